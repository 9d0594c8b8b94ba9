"""PPO's clipped surrogate (arXiv 1707.06347); separate bounds: DAPO (arXiv 2503.14476); dual clip: arXiv 1912.09729."""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch

from megatron_async_rl.objectives.batch import TokenBatch, TokenLoss

if TYPE_CHECKING:
    from megatron_async_rl.config.losses import PpoClipLoss


def ppo_clip(batch: TokenBatch, settings: PpoClipLoss) -> TokenLoss:
    """l = max(-A r, -A clip(r, 1 - clip_low, 1 + clip_high)), r = pi / pi_prox; where A < 0, at most -A dual_clip.

    [N] -> [N]. Defaults: clip_low = clip_high = 0.2, dual_clip off. `clipped` marks the tokens on which the constant
    side won, whose gradient is 0.
    """
    advantages = batch.advantages
    ratio = batch.log_ratio().exp()
    plain = -advantages * ratio
    bounded = -advantages * ratio.clamp(1.0 - settings.clip_low, 1.0 + settings.clip_high)
    loss = torch.maximum(plain, bounded)
    clipped = bounded > plain
    if settings.dual_clip is not None:
        ceiling = -advantages * settings.dual_clip
        capped = (advantages < 0) & (loss > ceiling)
        loss = torch.where(capped, ceiling, loss)
        clipped = clipped | capped
    return TokenLoss(loss, clipped)

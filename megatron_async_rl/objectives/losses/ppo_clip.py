"""PPO's clipped surrogate (arXiv 1707.06347), with the separate bounds of DAPO (arXiv 2503.14476)
and a dual clip (arXiv 1912.09729). Decoupled PPO (arXiv 2110.00641; AReaL, arXiv 2505.24298) clips
against the proximal policy and weights by its ratio to the behaviour policy."""

from __future__ import annotations

import torch
from torch import Tensor

from megatron_async_rl.config.losses import ClipBounds, DecoupledPpoLoss
from megatron_async_rl.objectives.batch import LOG_RATIO_BOUND, TokenBatch, TokenLoss
from megatron_async_rl.objectives.method import LossMethod


def ppo_clip(batch: TokenBatch, settings: ClipBounds) -> TokenLoss:
    """l = max(-A r, -A clip(r, 1 - clip_low, 1 + clip_high)), r = pi / pi_prox; where A < 0, at
    most -A dual_clip.

    [N] -> [N]. Defaults: clip_low = clip_high = 0.2, dual_clip off. `clipped` marks the tokens for
    which the constant side is larger, whose gradient is 0.
    """
    found = clipped_surrogate(
        batch.advantages, batch.log_ratio().exp(), 1.0 - settings.clip_low, 1.0 + settings.clip_high
    )
    if settings.dual_clip is None:
        return found
    ceiling = -batch.advantages * settings.dual_clip
    # Dual clip: a bad token that has become likely must not dominate the batch.
    capped = (batch.advantages < 0) & (found.loss > ceiling)
    return TokenLoss(torch.where(capped, ceiling, found.loss), found.clipped | capped)


def decoupled_ppo(batch: TokenBatch, settings: DecoupledPpoLoss) -> TokenLoss:
    """l = sg(rho) ppo_clip(r), rho = pi_prox / mu, r = pi / pi_prox. [N] -> [N].

    Defaults as `ppo_clip`. rho's logarithm is clamped to +-20 and rho is not truncated: for a cap,
    combine the loss `ppo_clip` with the correction `tis`.
    """
    found = ppo_clip(batch, settings)
    weight = (
        (batch.logp_prox - batch.logp_behavior)
        .clamp(-LOG_RATIO_BOUND, LOG_RATIO_BOUND)
        .detach()
        .exp()
    )
    return TokenLoss(weight * found.loss, found.clipped)


def clipped_surrogate(advantages: Tensor, ratio: Tensor, low: float, high: float) -> TokenLoss:
    """Return max(-A ratio, -A clip(ratio, low, high)), each [N]. Every loss that clips like PPO
    uses this function."""
    plain = -advantages * ratio
    bounded = -advantages * ratio.clamp(low, high)
    # `clipped` marks only tokens for which the constant side is larger, whose gradient is 0.
    return TokenLoss(torch.maximum(plain, bounded), bounded > plain)


PPO_CLIP = LossMethod(ppo_clip)
DECOUPLED_PPO = LossMethod(decoupled_ppo)

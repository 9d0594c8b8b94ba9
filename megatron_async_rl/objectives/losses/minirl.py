"""MiniRL (arXiv 2512.01374): REINFORCE with a truncated importance weight and PPO's mask."""

from __future__ import annotations

import torch

from megatron_async_rl.config.losses import MinirlLoss
from megatron_async_rl.objectives.batch import TokenBatch, TokenLoss
from megatron_async_rl.objectives.method import LossMethod


def minirl(batch: TokenBatch, settings: MinirlLoss) -> TokenLoss:
    """l = -M sg(min(w, cap)) A log pi, w = pi / mu, r = pi / pi_prox.

    M = 0 where A > 0 and r > 1 + clip_high, or A < 0 and r < 1 - clip_low, else 1; `clipped` marks
    M = 0. [N] -> [N]. Defaults: clip_low 0.2, clip_high 0.27, cap 5. The paper's advantage is the
    centred reward: `advantage: {name: grpo, normalize_std: false}`.
    """
    # The ratio only masks; the gradient comes from log pi.
    advantages, ratio = batch.advantages, batch.log_ratio().detach().exp()
    clipped = ((advantages > 0) & (ratio > 1.0 + settings.clip_high)) | (
        (advantages < 0) & (ratio < 1.0 - settings.clip_low)
    )
    weight = batch.log_weight().detach().exp().clamp(max=settings.cap)
    return TokenLoss(torch.where(clipped, 0.0, -weight * advantages * batch.logp), clipped)


MINIRL = LossMethod(minirl)

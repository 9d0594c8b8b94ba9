"""ASPO (arXiv 2510.06062): the ratio of tokens with positive advantage is inverted. The
formula was known to us only from third-party copies, not from the paper."""

from __future__ import annotations

import torch

from megatron_async_rl.config.losses import AspoLoss
from megatron_async_rl.objectives.batch import TokenBatch, TokenLoss
from megatron_async_rl.objectives.method import LossMethod


def aspo(batch: TokenBatch, settings: AspoLoss) -> TokenLoss:
    """l = -A sg(g) pi / sg(pi), r = pi / pi_prox; g = min(1 / r, dual_clip) where A > 0, so that a
    token whose probability has grown counts less; g = min(r, dual_clip) where A < 0.

    Constant, and `clipped`, where A > 0 and r > 1 + clip_high, or A < 0 and r < 1 - clip_low, as in
    PPO. The dual clip is soft: it bounds the weight and keeps the gradient. [N] -> [N]. Defaults:
    clip_low = clip_high = 0.2, dual_clip 3.0.
    """
    advantages, log_ratio = batch.advantages, batch.log_ratio().detach()
    ratio = log_ratio.exp()
    positive = advantages > 0
    clipped = (positive & (ratio > 1.0 + settings.clip_high)) | (
        (advantages < 0) & (ratio < 1.0 - settings.clip_low)
    )
    weight = torch.where(positive, -log_ratio, log_ratio).exp().clamp(max=settings.dual_clip)
    loss = -advantages * weight * (batch.logp - batch.logp.detach()).exp()
    # The value stays for the log; only the gradient is removed.
    return TokenLoss(torch.where(clipped, loss.detach(), loss), clipped)


ASPO = LossMethod(aspo)

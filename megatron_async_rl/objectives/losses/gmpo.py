"""GMPO (arXiv 2507.20673): the geometric mean of a sequence's token ratios instead of the
arithmetic mean."""

from __future__ import annotations

import torch

from megatron_async_rl.config.losses import GmpoLoss
from megatron_async_rl.objectives.batch import LOG_RATIO_BOUND, SequenceLoss, TokenBatch
from megatron_async_rl.objectives.method import LossMethod


def gmpo(batch: TokenBatch, settings: GmpoLoss) -> SequenceLoss:
    """l = -A exp(mean_t c_t), c_t = min(log r_t, clip_high) where A_t > 0, max(log r_t, -clip_low)
    where A_t < 0, else 0.

    r = pi / pi_prox; A is the mean of the sequence's advantages (all equal, with one reward per
    response). [N] -> [S]. Defaults: clip_low = clip_high = 0.4, bounds on the log-ratio. Each token
    is clipped only on the side on which a further step would count as improvement. A mean above 20
    is clamped to 20, without a gradient.
    """
    log_ratio, advantages = batch.logp - batch.logp_prox, batch.advantages
    high = (advantages > 0) & (log_ratio > settings.clip_high)
    low = (advantages < 0) & (log_ratio < -settings.clip_low)
    bounded = torch.where(high, settings.clip_high, torch.where(low, -settings.clip_low, log_ratio))
    # In log space: the geometric mean of ratios is the mean of their logarithms.
    mean = batch.sequence_mean(torch.where(advantages == 0, 0.0, bounded))
    loss = -batch.sequence_mean(advantages) * mean.clamp(max=LOG_RATIO_BOUND).exp()
    return SequenceLoss(loss, high | low | (mean > LOG_RATIO_BOUND)[batch.sequence])


GMPO = LossMethod(gmpo)

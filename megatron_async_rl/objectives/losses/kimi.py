"""Kimi k1.5's policy mirror descent (arXiv 2501.12599, eq. 3): regression of the log-ratio on the
centred reward."""

from __future__ import annotations

import torch

from megatron_async_rl.config.losses import KimiLoss
from megatron_async_rl.objectives.batch import BatchDecision, SequenceLoss, TokenBatch
from megatron_async_rl.objectives.method import LossMethod


def decide_kimi(whole: TokenBatch, settings: KimiLoss) -> BatchDecision:
    """Return R minus the mean reward of the group, [S]."""
    return BatchDecision(sequences={"centred": whole.group_centred(whole.require("rewards"))})


def kimi(batch: TokenBatch, settings: KimiLoss) -> SequenceLoss:
    """l = (R - mean R - tau sum_t log r_t)^2, r = pi / pi_prox, summed over the whole sequence
    before squaring. [N] -> [S].

    Default: tau 0.1 (the paper specifies none).
    """
    # Summed before squaring, because the regression is on the whole response.
    log_ratio = batch.sequence_sum(batch.logp - batch.logp_prox)
    residual = batch.decided.sequences["centred"] - settings.tau * log_ratio
    residual = torch.where(batch.lengths() > 0, residual, 0.0)
    return SequenceLoss(residual.square(), torch.zeros_like(batch.mask, dtype=torch.bool))


KIMI = LossMethod(kimi, decide_kimi)

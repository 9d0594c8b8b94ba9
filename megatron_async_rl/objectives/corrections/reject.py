"""Rejection by a statistic of the mismatch between pi_prox and mu (Liu, Li et al. 2025, "When Speed Kills Stability",
richardli.xyz/rl-collapse; estimators k1, k2, k3: joschu.net/blog/kl-approx.html)."""

from __future__ import annotations

import math
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from megatron_async_rl.objectives.batch import TokenBatch
from megatron_async_rl.objectives.corrections.importance import log_ratios, seen

if TYPE_CHECKING:
    from megatron_async_rl.config.corrections import RejectCorrection


def reject(batch: TokenBatch, settings: RejectCorrection) -> Tensor:
    """1 where low <= statistic <= high, else 0, of the token or of its whole sequence. [N].

    With l = log rho clamped to +-20, tokens of mu: ratio e^l; estimates of KL(mu || pi_prox) k1 = -l, k2 = l^2 / 2,
    k3 = e^l - 1 - l. sequence_sum and sequence_mean: of the estimates; sequence_product: e^(sum l); sequence_geometric:
    e^(mean l). Ratios are compared in log space, so a product cannot overflow.
    """
    log_rho = log_ratios(batch)
    low, high = settings.low, settings.high
    if settings.statistic == "ratio":
        values = log_rho
        low, high = (None if bound is None else math.log(bound) for bound in (low, high))
    elif settings.statistic == "k1":
        values = -log_rho
    elif settings.statistic == "k2":
        values = 0.5 * log_rho.square()
    else:
        values = torch.expm1(log_rho) - log_rho
    if settings.level in ("sequence_sum", "sequence_product"):
        values = seen(batch).sequence_sum(values)[batch.sequence]
    elif settings.level in ("sequence_mean", "sequence_geometric"):
        values = seen(batch).sequence_mean(values)[batch.sequence]
    keep = torch.ones_like(batch.mask, dtype=torch.bool)
    if low is not None:
        keep &= values >= low
    if high is not None:
        keep &= values <= high
    return keep.to(batch.mask.dtype)

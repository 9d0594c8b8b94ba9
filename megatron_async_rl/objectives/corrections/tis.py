"""Truncated importance sampling (truncation: arXiv 2402.14740's lineage of V-trace, arXiv 1802.01561; as used between rollout
engine and trainer: fengyao.notion.site/off-policy-rl)."""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch
from torch import Tensor

from megatron_async_rl.objectives.batch import LOG_RATIO_BOUND, TokenBatch

if TYPE_CHECKING:
    from megatron_async_rl.config.corrections import TisCorrection


def tis(batch: TokenBatch, settings: TisCorrection) -> Tensor:
    """min(rho_t, cap), or for `level: sequence` min(prod_t rho_t, cap) on each of its tokens; rho = pi_prox / mu. [N].

    `normalize` divides by the mean over the kept tokens of the whole batch (`token`), or over its sequences (`sequence`).
    """
    log_rho = batch.logp_prox - batch.logp_behavior
    if settings.level == "sequence":
        log_rho = batch.sequence_sum(log_rho)
    weights = log_rho.clamp(-LOG_RATIO_BOUND, LOG_RATIO_BOUND).exp().clamp(max=settings.cap)
    if settings.normalize:
        kept = batch.kept() if settings.level == "token" else batch.sequence_sum(batch.kept()) > 0
        weights = weights / weights[kept.bool()].mean().clamp(min=torch.finfo(weights.dtype).tiny)
    return weights if settings.level == "token" else batch.per_token(weights)

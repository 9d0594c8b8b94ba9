"""Truncated importance sampling (Ionides 2008, doi 10.1198/106186008X320456), between rollout engine and trainer as in Yao et
al. 2025, fengyao.notion.site/off-policy-rl; for distributed actors: V-trace, arXiv 1802.01561."""

from __future__ import annotations

from typing import TYPE_CHECKING

from torch import Tensor

from megatron_async_rl.objectives.batch import TokenBatch
from megatron_async_rl.objectives.corrections.importance import importance_ratios, normalized

if TYPE_CHECKING:
    from megatron_async_rl.config.corrections import TisCorrection


def tis(batch: TokenBatch, settings: TisCorrection) -> Tensor:
    """min(rho_t, cap), or for `level: sequence` min(prod_t rho_t, cap) on each of its tokens; rho = pi_prox / mu. [N].

    `normalize` divides by the mean over the kept tokens of the whole batch (`token`), or over its sequences (`sequence`), after
    truncation.
    """
    weights = importance_ratios(batch, settings.level).clamp(max=settings.cap)
    return normalized(weights, batch, settings.level) if settings.normalize else weights

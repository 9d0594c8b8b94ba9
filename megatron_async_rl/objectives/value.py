"""What the value head learns: the returns that the advantage estimator made from its own estimates.

    loss         0.5 (V - R)^2                                                       (PPO, arXiv 1707.06347, eq. 9)
    clipped      0.5 max((V - R)^2, (V_old + clip(V - V_old, -c, c) - R)^2)          V_old: before the step

V_old comes from the weights at the start of the step. With one optimizer step per batch V equals it, so clipping does nothing
there, as PPO's clip of a ratio to the own start weights does nothing.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch
from torch import Tensor

from megatron_async_rl.objectives.batch import TokenBatch

if TYPE_CHECKING:
    from megatron_async_rl.config.objective import ValueConfig


def value_loss(batch: TokenBatch, settings: ValueConfig) -> Tensor:
    """[N] with gradient in `values`; before mask and aggregation."""
    values, returns = batch.require("values"), batch.require("returns")
    error = (values - returns).square()
    if settings.clip is not None:
        old = batch.require("values_old")
        near = old + (values - old).clamp(-settings.clip, settings.clip)
        error = torch.maximum(error, (near - returns).square())
    return 0.5 * error


def value_metrics(whole: TokenBatch) -> dict[str, float]:
    """Of a whole batch with surveyed `values` and `returns`: 1 - Var(R - V) / Var(R) over trained tokens; nothing where all
    returns are equal."""
    if whole.values is None or whole.returns is None:
        return {}
    trained = whole.mask > 0
    returns, values = whole.returns[trained], whole.values[trained]
    if len(returns) < 2 or not float(returns.var()):
        return {}
    return {"value/explained_variance": 1.0 - float((returns - values).var() / returns.var())}

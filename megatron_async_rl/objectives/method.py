"""The function of a method and its inputs, as its settings model names them.

A decision that depends on the whole optimizer-step batch (a threshold, a group's mean log-prob,
whitening) is a pure function of a whole TokenBatch, which every rank holds after one all-reduce of
the precomputed columns. A global decision therefore costs the same number of collectives whatever
the number of micro-batches, and every rank makes the same decision, bit for bit.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, Literal

from torch import Tensor

from megatron_async_rl.objectives.batch import (
    Advantages,
    BatchDecision,
    SequenceLoss,
    TokenBatch,
    TokenLoss,
)

TokenColumn = Literal["logp", "sum_p_squared", "values", "logp_ref", "logp_prox"]
"""Per-token columns of the whole batch that a precompute pass (a forward pass before the training
pass) provides."""


def _nothing(settings: Any) -> frozenset[TokenColumn]:
    return frozenset()


Needs = Callable[[Any], frozenset[TokenColumn]]
"""settings -> columns of the whole batch that the method reads before training starts."""


def columns(*names: TokenColumn) -> Needs:
    """Needs that do not depend on settings."""
    # Functions of the settings, so that an option can bring its own needs.
    return lambda settings: frozenset(names)


@dataclass(frozen=True)
class AdvantageMethod:
    """function(whole batch, settings) -> Advantages. Reads rewards, group, mask, sequence and the
    columns in `needs`."""

    function: Callable[[TokenBatch, Any], Advantages]
    # Columns that were not requested are nan, so a method that forgets one cannot pass unnoticed.
    needs: Needs = _nothing


@dataclass(frozen=True)
class LossMethod:
    """function(batch, settings) -> losses. `decide`, if there is one, runs on the whole batch
    first, and its result is `batch.decided`."""

    function: Callable[[TokenBatch, Any], TokenLoss | SequenceLoss]
    decide: Callable[[TokenBatch, Any], BatchDecision] | None = None
    needs: Needs = _nothing


@dataclass(frozen=True)
class CorrectionMethod:
    """function(batch, settings) -> [N] factor on each token's loss, detached, >= 0. A factor of 0
    rejects the token, like a mask of 0.

    Accepts a micro-batch or a whole batch, unless `whole(settings)`: then it needs the whole batch.
    needs: columns besides `logp_prox` that it reads; for a whole batch, a precompute pass must
    supply them.
    """

    function: Callable[[TokenBatch, Any], Tensor]
    whole: Callable[[Any], bool] = lambda settings: False
    needs: Needs = _nothing

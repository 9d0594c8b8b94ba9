"""The function of a method and its inputs, as its settings model names them.

A method that decides from the whole optimizer-step batch (a threshold, a group's mean log-prob,
whitening) does so in a pure function of a whole TokenBatch, which every rank holds after one
all-reduce of the precomputed columns. So a global decision costs the same number of collectives
whatever the number of micro-batches, and every rank decides the same, to the bit.
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
"""Per-token numbers of the whole batch that a precompute pass (a forward pass before the training
pass) brings."""


def _nothing(settings: Any) -> frozenset[TokenColumn]:
    return frozenset()


Needs = Callable[[Any], frozenset[TokenColumn]]
"""settings -> columns of the whole batch the method reads before training starts."""


def columns(*names: TokenColumn) -> Needs:
    """Needs that do not depend on settings."""
    # Functions of the settings, so that an option can bring its own needs.
    return lambda settings: frozenset(names)


@dataclass(frozen=True)
class AdvantageMethod:
    """function(whole batch, settings) -> Advantages. Reads rewards, group, mask, sequence and the
    columns it needs."""

    function: Callable[[TokenBatch, Any], Advantages]
    # Unasked columns are nan: a method that forgets one cannot pass unnoticed.
    needs: Needs = _nothing


@dataclass(frozen=True)
class LossMethod:
    """function(batch, settings) -> losses; `decide`, where there is one, ran on the whole batch
    first and its result is `batch.decided`."""

    function: Callable[[TokenBatch, Any], TokenLoss | SequenceLoss]
    decide: Callable[[TokenBatch, Any], BatchDecision] | None = None
    needs: Needs = _nothing


@dataclass(frozen=True)
class CorrectionMethod:
    """function(batch, settings) -> [N] factor on each token's loss, detached, >= 0; 0 rejects the
    token, and so does the mask.

    Works on a micro-batch and on a whole batch alike, unless `whole(settings)`: then it is given
    the whole batch only. needs: columns besides `logp_prox` that it reads, which a precompute pass
    must supply if it is given a whole batch.
    """

    function: Callable[[TokenBatch, Any], Tensor]
    whole: Callable[[Any], bool] = lambda settings: False
    needs: Needs = _nothing

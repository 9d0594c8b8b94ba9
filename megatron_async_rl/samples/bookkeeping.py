"""Checks of a batch's tokens: trained tokens behind the end of a response, trained tokens without a
log-prob of the engine, and responses of a group that repeat another one.

Repetition has an exact expectation. Given the responses before it, a response repeats one of them
with the probability

    sum over the distinct ones y of p(y),        p(y) = exp(sum of the log-probs of its tokens)

so the number of repetitions minus the sum of these probabilities is a martingale. The probability
of n repetitions where a are expected is at most (a / n)^n e^(n - a).

Invariants:
- responses are compared within a group only: other prompts have other distributions;
- a token that an environment wrote is neither trained nor part of a response's probability.
"""

from __future__ import annotations

import math
from collections.abc import Collection
from dataclasses import dataclass

import numpy as np
import pyarrow as pa
from numpy.typing import NDArray

from megatron_async_rl.samples.columns import flat, value_rows

SURPRISE = 1e-6
"""Probability below which more repetitions than expected count as a fault."""


@dataclass(frozen=True, kw_only=True)
class Repetitions:
    """Responses equal to an earlier one of their group, and the number that their own probabilities
    let expect."""

    count: int
    expected: float

    @property
    def surprising(self) -> bool:
        """True if independent samples repeat so often with a probability below SURPRISE."""
        count, expected = self.count, self.expected
        if count <= expected:
            return False
        # Of the bound above; without an expectation, one repetition is impossible.
        log_bound = -math.inf
        if expected > 0.0:
            log_bound = count * math.log(expected / count) + count - expected
        return log_bound < math.log(SURPRISE)


def repetitions(samples: pa.RecordBatch) -> Repetitions:
    """Return the repetitions of a batch with the columns NUMERIC."""
    responses, lengths = flat(samples.column("response_ids"))
    mask, logp = (flat(samples.column(name))[0] for name in ("loss_mask", "behavior_logprobs"))
    starts = np.cumsum(lengths) - lengths
    # One sum per sample; a batch has no empty response.
    totals = np.add.reduceat(logp.astype(np.float64) * mask, starts) if len(starts) else starts
    chances = np.exp(np.minimum(totals, 0.0)).tolist()
    # One copy of all bytes: a slice of bytes is much cheaper than an array's.
    raw, size = responses.tobytes(), responses.dtype.itemsize
    bounds = [0, *(np.cumsum(lengths) * size).tolist()]
    known: set[tuple[int, bytes]] = set()
    earlier: dict[int, float] = {}
    count, expected = 0, 0.0
    groups = samples.column("group").to_pylist()
    for group, start, end, chance in zip(groups, bounds, bounds[1:], chances, strict=False):
        before = earlier.get(group, 0.0)
        expected += before if before < 1.0 else 1.0
        response = group, raw[start:end]
        if response in known:
            count += 1
        else:
            known.add(response)
            earlier[group] = before + chance
    return Repetitions(count=count, expected=expected)


def trained_after_end(samples: pa.RecordBatch, ends: Collection[int]) -> NDArray[np.int64]:
    """Return, for each sample, the number of trained tokens behind a token of `ends` in the same
    turn: [S]. A turn is a run of trained tokens; the end token itself is trained."""
    responses, lengths = flat(samples.column("response_ids"))
    trained = flat(samples.column("loss_mask"))[0] > 0
    starts = np.cumsum(lengths) - lengths
    # A turn begins behind a token of an environment, or with the sample or a segment.
    begins = trained & ~np.concatenate(([False], trained[:-1])) if len(trained) else trained
    begins[starts] = trained[starts]
    turns = np.flatnonzero(begins)
    ended = trained & np.isin(responses, np.fromiter(ends, dtype=responses.dtype))
    # Number of end tokens before each token; constant offsets vanish within a turn.
    before: NDArray[np.int64] = np.cumsum(ended) - ended
    turn = np.cumsum(begins) - 1
    late = np.zeros(len(responses), dtype=bool)
    if len(turns):
        late = trained & (before > before[turns][np.maximum(turn, 0)])
    rows = value_rows(lengths)
    return np.bincount(rows[late], minlength=len(lengths)).astype(np.int64)


def without_logprob(samples: pa.RecordBatch) -> NDArray[np.int64]:
    """Return, for each sample, the number of trained tokens whose log-prob by the engine is not a
    finite number of at most 0: [S]."""
    logp, lengths = flat(samples.column("behavior_logprobs"))
    trained = flat(samples.column("loss_mask"))[0] > 0
    # Rounding may make the log-prob of a certain token slightly positive.
    wrong = trained & ~(np.isfinite(logp) & (logp <= 1e-3))
    rows = value_rows(lengths)
    return np.bincount(rows[wrong], minlength=len(lengths)).astype(np.int64)

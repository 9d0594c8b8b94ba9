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
from collections.abc import Collection, Sequence
from dataclasses import dataclass
from itertools import pairwise

import numpy as np
import pyarrow as pa
from numpy.typing import NDArray

from megatron_async_rl.samples.columns import flat, value_rows

SURPRISE = 1e-6
"""Probability below which more repetitions than expected count as a fault."""
FEW_ENDS = 4
"""Largest number of end tokens that are compared one by one."""


@dataclass(frozen=True, kw_only=True, eq=False)
class SampledTokens:
    """The response tokens of a batch, one sample after another, [N], and the samples, [S].

    response_ids: integers. logp: log-probs by the engine, [N] floating point. trained: [N] bool.
    lengths: [S] int64, number of response tokens, at least one. group: group of each sample,
    S integers.
    """

    response_ids: NDArray[np.integer]
    logp: NDArray[np.floating]
    trained: NDArray[np.bool_]
    lengths: NDArray[np.int64]
    group: Sequence[int]

    @classmethod
    def of(cls, samples: pa.RecordBatch) -> SampledTokens:
        """Read the columns of a batch."""
        response_ids, lengths = flat(samples.column("response_ids"))
        return cls(
            response_ids=response_ids,
            logp=samples.column("behavior_logprobs").flatten().to_numpy(),
            trained=samples.column("loss_mask").flatten().to_numpy() > 0,
            lengths=lengths,
            group=samples.column("group").to_pylist(),
        )

    @property
    def starts(self) -> NDArray[np.int64]:
        """Place of the first token of each sample, [S]."""
        starts: NDArray[np.int64] = np.cumsum(self.lengths) - self.lengths
        return starts

    def per_sample(self, counted: NDArray[np.bool_]) -> NDArray[np.int64]:
        """Return the number of tokens of each sample that are `counted`: [S]. counted: [N]."""
        # Usually nothing is counted, which needs no pass over the samples.
        if not counted.any():
            return np.zeros(len(self.lengths), dtype=np.int64)
        rows = value_rows(self.lengths)
        return np.bincount(rows[counted], minlength=len(self.lengths)).astype(np.int64)


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


def repetitions(tokens: SampledTokens) -> Repetitions:
    """Return the repetitions of a batch."""
    starts = tokens.starts
    trained = tokens.logp.astype(np.float64) * tokens.trained
    # One sum per sample; a batch has no empty response.
    totals = np.add.reduceat(trained, starts) if len(starts) else starts
    chances = np.exp(np.minimum(totals, 0.0)).tolist()
    # One copy of all bytes: a slice of bytes is much cheaper than an array's.
    raw, size = tokens.response_ids.tobytes(), tokens.response_ids.dtype.itemsize
    bounds = [*(starts * size).tolist(), len(raw)]
    known: set[tuple[int, bytes]] = set()
    earlier: dict[int, float] = {}
    count, expected = 0, 0.0
    for group, (start, end), chance in zip(tokens.group, pairwise(bounds), chances, strict=True):
        before = earlier.get(group, 0.0)
        expected += before if before < 1.0 else 1.0
        response = group, raw[start:end]
        if response in known:
            count += 1
        else:
            known.add(response)
            earlier[group] = before + chance
    return Repetitions(count=count, expected=expected)


def trained_after_end(tokens: SampledTokens, ends: Collection[int]) -> NDArray[np.int64]:
    """Return, for each sample, the number of trained tokens behind a token of `ends` in the same
    turn: [S]. A turn is a run of trained tokens; the end token itself is trained."""
    trained, starts = tokens.trained, tokens.starts
    # A turn begins behind a token of an environment, or with the sample or a segment.
    begins = trained & ~np.concatenate(([False], trained[:-1])) if len(trained) else trained
    begins[starts] = trained[starts]
    turns = np.flatnonzero(begins)
    ended = trained & _is_any(tokens.response_ids, ends)
    # Number of end tokens before each token; constant offsets vanish within a turn.
    before: NDArray[np.int64] = np.cumsum(ended) - ended
    turn = np.cumsum(begins) - 1
    late = np.zeros(len(trained), dtype=bool)
    if len(turns):
        late = trained & (before > before[turns][np.maximum(turn, 0)])
    return tokens.per_sample(late)


def without_logprob(tokens: SampledTokens) -> NDArray[np.int64]:
    """Return, for each sample, the number of trained tokens whose log-prob by the engine is not a
    finite number of at most 0: [S]."""
    # Rounding may make the log-prob of a certain token slightly positive.
    usable = np.isfinite(tokens.logp) & (tokens.logp <= 1e-3)
    return tokens.per_sample(tokens.trained & ~usable)


def _is_any(values: NDArray[np.integer], wanted: Collection[int]) -> NDArray[np.bool_]:
    """Return which of `values` are in `wanted`."""
    if len(wanted) > FEW_ENDS:
        return np.isin(values, np.fromiter(wanted, dtype=values.dtype))
    # np.isin makes a table first, which costs more than a few comparisons.
    found = np.zeros(values.shape, dtype=bool)
    for one in wanted:
        found |= values == one
    return found

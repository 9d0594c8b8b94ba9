"""The optimizer steps of one batch: which samples each is made on, and one line of metrics of all.

A batch is gone through `objective.epochs` times, each time as the same `objective.minibatches`
parts in the same order. So a data-parallel rank keeps its samples throughout, each minibatch is
balanced over the ranks, and two consecutive optimizer steps never share a sample unless one
minibatch only has anything to train on.

Invariants:
- a group stays whole: its responses are in one minibatch;
- the division is a pure function of the groups, the version and the number of minibatches, the same
  on every rank and layout and after a resume; nothing else in the policy is drawn at random;
- minibatches differ by at most one group; where a batch has fewer groups than there are
  minibatches (rewards have failed), some are empty.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from megatron_async_rl.metrics.catalogue import METRICS
from megatron_async_rl.policy.microbatch import MicroBatch, Plan


@dataclass(frozen=True, eq=False)
class Minibatch:
    """The samples of one optimizer step: their rows in the batch, how all ranks cut them, and this
    rank's micro-batches, whose samples are numbered within `rows`."""

    rows: NDArray[np.int64]
    plan: Plan
    own: Sequence[MicroBatch]


def divide(group: NDArray[np.int64], version: int, minibatches: int) -> list[NDArray[np.int64]]:
    """group: [S], of the samples that are trained on. The samples of each minibatch, by number,
    rising."""
    if minibatches == 1:
        return [np.arange(len(group))]
    drawn = np.random.default_rng(version).permutation(np.unique(group))
    return [np.flatnonzero(np.isin(group, part)) for part in np.array_split(drawn, minibatches)]


def over_steps(steps: Sequence[Mapping[str, float]]) -> dict[str, float]:
    """The metrics of a batch from those of its optimizer steps, each as the catalogue says; a key
    that some steps lack is over the others."""
    found: dict[str, list[float]] = {}
    for step in steps:
        for name, value in step.items():
            found.setdefault(name, []).append(value)
    return {
        name: _over(METRICS[name].over_steps if name in METRICS else "mean", values)
        for name, values in found.items()
    }


def _over(rule: str, values: Sequence[float]) -> float:
    if len(values) == 1 or rule == "last":
        return values[-1]
    if rule == "first":
        return values[0]
    if rule == "largest":
        return float(np.max(values))
    total = float(np.sum(values))
    return total if rule == "sum" else total / len(values)

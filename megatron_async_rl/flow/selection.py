"""Which of the groups that wait train at a step. Pure functions; each answers fewer than `count` while the step has to wait.

Invariants:
- what is left after a batch is taken can still train in time (`law.holds` at the next step), given that it could before;
- an answer with k too few stays too short until k groups more have finished or been dropped: nobody needs to ask before.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Iterable, Sequence
from itertools import islice
from typing import Protocol, TypeVar

from megatron_async_rl.flow.law import as_written


class Waiting(Protocol):
    """A group that is neither consumed nor dropped."""

    @property
    def deadline(self) -> int: ...

    @property
    def finished(self) -> int | None:
        """Its place in the order in which groups finished; null while it is running."""


G = TypeVar("G", bound=Waiting)


def oldest_first(groups: Iterable[G], count: int) -> list[G]:
    """Those of the first `count` of `groups`, which come most urgent first, that have finished."""
    return [group for group in islice(groups, count) if group.finished is not None]


def windowed(groups: Sequence[G], count: int, step: int, window: float) -> list[G]:
    """The `count` that finished first among the first ceil((1 + window) count), without making another late.

    `groups` come most urgent first. Of those due by c' at most (c' - step) count can train after this step: the others must be in
    this batch. Once the first `count` groups have finished there always is a whole batch, as they alone would be one.
    """
    due = Counter(group.deadline for group in groups)
    owed: dict[int, int] = {}
    seen = 0
    for last in sorted(due):
        seen += due[last]
        owed[last] = seen - (last - step) * count
    candidates = [group for group in groups[: math.ceil((1 + as_written(window)) * count)] if group.finished is not None]
    taken: list[G] = []
    for group in sorted(candidates, key=lambda candidate: candidate.finished or 0):
        if len(taken) == count:
            break
        others = max((still for last, still in owed.items() if last < group.deadline), default=0)
        if count - len(taken) > others:
            taken.append(group)
            for last in owed:
                owed[last] -= last >= group.deadline
    return taken

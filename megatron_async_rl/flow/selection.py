"""Selection of the groups that train at a step, and the store of responses that train again.

Invariants:
- a selection is a pure function, which returns fewer than `count` groups while the step has to
  wait;
- after a batch is taken, the other groups can still train in time (`staleness.is_feasible` at the
  next step), if they could before;
- a result that lacks k groups stays too short until k more have finished or been dropped, so an
  earlier check is unnecessary;
- the store keeps the newest `per_prompt` distinct responses to a prompt; of two responses with the
  same tokens, the newer counts;
- a step's draw depends only on the seed, the version and the stored responses. A response that
  trains again has a different id in that batch: `<id>@<version>.<place>`.
"""

from __future__ import annotations

import math
from collections import Counter, OrderedDict
from collections.abc import Iterable, Sequence
from itertools import islice
from typing import Protocol

import numpy as np

from megatron_async_rl.config.flow import Replay
from megatron_async_rl.flow.buffer import SampleGroup
from megatron_async_rl.flow.staleness import as_written
from megatron_async_rl.samples.rows import SampleRow, gathered, rows_of
from megatron_async_rl.samples.types import Prompt


class Waiting(Protocol):
    """A group that is neither consumed nor dropped."""

    @property
    def deadline(self) -> int: ...

    @property
    def finished(self) -> int | None:
        """Position in the order in which groups finished; None while it is running."""


def oldest_first[G: Waiting](groups: Iterable[G], count: int) -> list[G]:
    """Return the finished groups among the first `count` of `groups`, which are sorted by
    urgency."""
    return [group for group in islice(groups, count) if group.finished is not None]


def windowed[G: Waiting](groups: Sequence[G], count: int, step: int, window: float) -> list[G]:
    """Return the `count` groups that finished first among the first ceil((1 + window) count), such
    that no other group becomes late.

    `groups` are in order of urgency. Of the groups due by c', at most (c' - step) count can train
    after this step: the others must be in this batch. Once the first `count` groups have finished
    there is always a whole batch, because they alone would form one.
    """
    due = Counter(group.deadline for group in groups)
    owed: dict[int, int] = {}
    seen = 0
    for last in sorted(due):
        seen += due[last]
        # Later steps can take (last - step) count of these in time: this batch owes the rest.
        owed[last] = seen - (last - step) * count
    candidates = [
        group
        for group in groups[: math.ceil((1 + as_written(window)) * count)]
        if group.finished is not None
    ]
    taken: list[G] = []
    for group in sorted(candidates, key=lambda candidate: candidate.finished or 0):
        if len(taken) == count:
            break
        # More urgent groups need these places, whatever other groups are chosen.
        others = max((still for last, still in owed.items() if last < group.deadline), default=0)
        if count - len(taken) > others:
            taken.append(group)
            for last in owed:
                owed[last] -= last >= group.deadline
    return taken


class ReplayStore:
    """Replay buffer in host memory; `content` goes into checkpoints."""

    def __init__(self, settings: Replay, seed: int) -> None:
        self._settings = settings
        self._seed = seed
        self._stored: dict[str, tuple[Prompt, OrderedDict[bytes, SampleRow]]] = {}

    def exchange(
        self, arrived: Sequence[SampleGroup], version: int, group_size: int
    ) -> tuple[tuple[SampleGroup, ...], int]:
        """Store `arrived`; return as many groups to train `version`, and the number of stored
        responses among them.

        With probability `recent` these are `arrived`. Otherwise prompts are drawn uniformly,
        without repetition as long as there are enough, and `group_size` responses to each with
        probability proportional to exp(inverse_temperature x reward), with repetition.
        """
        for group in arrived:
            self._store(group.prompt, group.samples)
        # A new generator for each step: a resume draws the same without any stored state.
        chance = np.random.default_rng([self._seed, version])
        if chance.random() < self._settings.recent or not self._stored:
            return tuple(arrived), 0
        # Sorted, because a resume inserts the prompts in another order.
        ids = sorted(self._stored)
        chosen = chance.choice(len(ids), size=len(arrived), replace=len(ids) < len(arrived))
        groups = tuple(
            self._draw(ids[which], group.index, version, group_size, chance)
            for which, group in zip(chosen.tolist(), arrived, strict=True)
        )
        return groups, sum(len(group.samples) for group in groups)

    def content(self) -> tuple[tuple[Prompt, tuple[SampleRow, ...]], ...]:
        """Every prompt with its responses, oldest first."""
        return tuple((prompt, tuple(samples.values())) for prompt, samples in self._stored.values())

    def load(self, content: Iterable[tuple[Prompt, Iterable[SampleRow]]]) -> None:
        """Store what `content` returned, or the newest responses of it if these settings keep
        fewer."""
        for prompt, samples in content:
            self._store(prompt, samples)

    def _store(self, prompt: Prompt, arrived: Iterable[SampleRow]) -> None:
        _, samples = self._stored.setdefault(prompt.id, (prompt, OrderedDict()))
        # Copied out of their reports, which would otherwise stay in memory as long.
        for sample in rows_of(gathered([one for one in arrived if one.valid])):
            key = sample.response_ids.tobytes()
            # Removed first, so that a repeated response becomes the newest.
            samples.pop(key, None)
            samples[key] = sample
        while len(samples) > self._settings.per_prompt:
            samples.popitem(last=False)
        if not samples:
            del self._stored[prompt.id]

    def _draw(
        self, prompt: str, index: int, version: int, count: int, chance: np.random.Generator
    ) -> SampleGroup:
        prompt_asked, stored = self._stored[prompt]
        samples = list(stored.values())
        scores = self._settings.inverse_temperature * np.array(
            [sample.reward for sample in samples]
        )
        # Softmax, shifted so that no exponent overflows.
        weights = np.exp(scores - scores.max())
        drawn = chance.choice(len(samples), size=count, p=weights / weights.sum()).tolist()
        own = [
            samples[which].renamed(f"{samples[which].id}@{version}.{index}-{k}")
            for k, which in enumerate(drawn)
        ]
        return SampleGroup(index, prompt_asked, tuple(own))

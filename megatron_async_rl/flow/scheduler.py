"""Admission of prompts and selection of batches: the staleness law, without engines, clocks or
tasks.

    prompt --admit--> requests (one per response) --on_sample--> finished group --take--> batch

Invariants:
- groups are numbered in admission order; none is admitted beyond the budget, and none is consumed
  after its deadline (staleness.py);
- a group is admitted under the newest version that an engine holds, and only engines that hold at
  least that version sample it: no engine waits for a slower one;
- the group table (group_table.py) holds the state of each group; its counts balance;
- with `exact_lag` a batch is handed out only when no request is open and none will follow under
  this version, so that no response continues with the next weights;
- the cost of a response does not depend on the number of waiting groups: a batch is selected only
  when one may be complete.

Invariants of the selection:
- a selection is a pure function, which returns fewer than `count` groups while the step has to
  wait;
- after a batch is taken, the other groups can still train in time (`staleness.is_feasible` at the
  next step), if they could before;
- a result with k groups too few stays too short until k more have finished or been dropped: no
  earlier check is needed.
"""

from __future__ import annotations

import math
from collections import Counter, OrderedDict, deque
from collections.abc import Callable, Collection, Iterable, Sequence
from dataclasses import replace
from itertools import islice
from typing import Protocol

import numpy as np

from megatron_async_rl.config.flow import ExactLag, FlowConfig, Replay, Windowed
from megatron_async_rl.flow.buffer import EMPTY, Buffer, GroupState, restorable
from megatron_async_rl.flow.group_table import GroupTable, OnDropped, OnGroupDropped
from megatron_async_rl.flow.staleness import admitted_limit, as_written, check_lags, deadline
from megatron_async_rl.samples.rows import SampleGroup, SampleRow, gathered, rows_of
from megatron_async_rl.samples.types import Aborted, Prompt, Request

NumberedPrompt = tuple[int, Prompt]
"""A group's number and its prompt."""


class Scheduler:
    """Admission and selection of groups. `steps`: optimizer steps of the whole run, beyond which
    nothing is admitted; None: no limit. `fresh_steps`: number of first steps that are synchronous
    whatever `flow.async_ratio` is. `seed`: of replay. `scored_whole`: a group finishes with its own
    reward (`on_scored`), after its last response."""

    def __init__(
        self,
        flow: FlowConfig,
        *,
        steps: int | None,
        fresh_steps: int,
        seed: int,
        scored_whole: bool,
        on_dropped: OnDropped = lambda *_: None,
        on_group_dropped: OnGroupDropped = lambda *_: None,
    ) -> None:
        self._flow = flow
        self._steps = steps
        self._fresh_steps = fresh_steps
        self._base = 0
        self._version: int | None = None
        self._next_index = 0
        self._pending: deque[NumberedPrompt] = deque()
        self._table = GroupTable(flow, on_dropped, on_group_dropped, scored_whole=scored_whole)
        self._limit = 0
        self._worth_at = 0
        """Total number of finished groups below which another selection cannot succeed."""
        self._awaited: GroupState | None = None
        """Group without whose end no selection can succeed, either."""
        self._first_versions = set[int]()
        """Versions at which no older group was waiting: groups that `exact_lag` admits under them
        have less lag."""
        self._replay = (
            ReplayStore(flow.selection, seed) if isinstance(flow.selection, Replay) else None
        )

    @property
    def version(self) -> int | None:
        """Newest version that an engine holds; null before `start`."""
        return self._version

    def start(
        self,
        version: int,
        next_index: int = 0,
        pending: Sequence[NumberedPrompt] = (),
        buffer: Buffer = EMPTY,
        oldest: int = 0,
    ) -> list[tuple[Request, int]]:
        """Begin at `version`, which an engine holds. New groups are numbered from `next_index`,
        after `pending` ones that an earlier run left.

        Restores all groups of `buffer` that the law and these settings permit and whose tokens come
        from version `oldest` or newer ones. Returns the requests to send again for them, each with
        the version under which its group was admitted.
        """
        if self._version is not None:
            raise RuntimeError(f"started already, at version {self._base}")
        self._version = self._base = version
        self._limit = self._may_admit(version)
        self._next_index = next_index
        fresh = self._fresh_steps
        self._load(
            restorable(
                buffer,
                self._flow,
                version=version,
                limit=self._limit,
                fresh_steps=fresh,
                oldest=oldest,
            )
        )
        # Those in the buffer count as admitted.
        self._pending.extend(place for place in pending if not self._table.is_waiting(place[0]))
        return self._table.open_requests()

    def _load(self, buffer: Buffer) -> None:
        self._table.load(buffer)
        self._first_versions = set(buffer.first_versions)
        if self._replay is not None:
            self._replay.load(buffer.stored)

    def advance(self, version: int) -> None:
        """Admit under `version`, which an engine holds now. Versions only grow; a call with the
        same version does nothing."""
        if self._version is None:
            raise RuntimeError(f"advance({version}) before start")
        if version < self._version:
            raise ValueError(
                f"weight versions only grow: cannot advance from {self._version} to {version}"
            )
        self._version = version
        self._limit = self._may_admit(version)

    # Admission

    def _may_admit(self, version: int) -> int:
        """Return the number of groups, without dropped ones, that may be admitted since `start`
        under `version`."""
        # The proof of the law counts versions and groups from the start.
        since, per_step = version - self._base, self._flow.prompts_per_step
        limit = admitted_limit(
            since,
            per_step,
            self._flow.async_ratio,
            self._fresh_steps - self._base,
            self._flow.oversample,
        )
        if self._steps is not None:
            # No group is sampled that no step would consume.
            limit = min(limit, max(self._steps - self._base, 0) * per_step)
        return limit

    def room(self) -> bool:
        """True while one more group may be admitted."""
        return self._table.kept < self._limit

    def admit(self, source: Callable[[], Prompt]) -> list[Request]:
        """Return the requests of one more group, for a pending prompt or the source's next. Call it
        only with `room`; the group is admitted under `version`."""
        assert self._version is not None
        index, prompt = self._pending.popleft() if self._pending else (self._number(), source())
        # Fixed at admission: newer weights do not extend it.
        due = deadline(self._version, self._flow.async_ratio, self._fresh_steps)
        requests = [Request(group=index, k=k, prompt=prompt) for k in range(self._flow.group_size)]
        self._table.enter(
            GroupState(index, prompt, self._version, due, {one.id: one for one in requests})
        )
        return requests

    def _number(self) -> int:
        self._next_index += 1
        return self._next_index - 1

    # Answers

    def on_sample(self, sample: SampleRow, group: int) -> None:
        """Accept a response of `group`."""
        self._table.on_sample(sample, group)

    def unscored(self, group: int) -> SampleGroup | None:
        """Return `group` if it has all its responses and waits for its reward."""
        return self._table.unscored(group)

    def on_scored(self, group: int, samples: Sequence[SampleRow]) -> None:
        """Accept the samples of an unscored group, with their rewards."""
        self._table.on_scored(group, samples)

    def on_abort(self, aborted: Aborted, group: int) -> Request:
        """Return the continuation of a request that its engine aborted."""
        return self._table.on_abort(aborted, group)

    def on_give_up(self, request: str, group: int) -> bool:
        """Give up the request and drop its group. Return False if it had been dropped before."""
        dropped = self._table.on_give_up(request, group)
        self._worth_at, self._awaited = 0, None  # the group may have blocked a selection
        return dropped

    # Selection

    @property
    def next_step(self) -> int:
        """Version that the next batch trains."""
        return self._base + self._table.counts["consumed"] // self._flow.prompts_per_step

    def take(self, version: int) -> tuple[SampleGroup, ...] | None:
        """Return the groups, in admission order, of the batch that trains `version`; None while it
        has to wait.

        Raises ValueError for a batch other than the next, and StalenessViolated if a sample breaks
        the law.
        """
        if self._version is None or version != self.next_step:
            raise ValueError(
                f"the batch of version {version} was requested; the next one trains"
                f" {self.next_step}"
            )
        if self._steps is not None and version >= self._steps:
            raise ValueError(
                f"the run's {self._steps} steps are consumed: there is no batch for version"
                f" {version}"
            )
        if not self.may_take(version):
            return None
        late = self._late(version)
        others = [entry for entry in self._table.waiting() if entry not in late]
        taken = self._select(others, version)
        missing = self._flow.prompts_per_step - len(taken)
        # Remembered, so that answers before that do not cause a selection.
        if missing:
            self._worth_at = self._table.finished + missing
            self._awaited = None if late else self._indispensable(others, version)
            return None
        self._worth_at, self._awaited = 0, None
        # Only with a complete batch: before that, late groups may still finish in time.
        for entry in late:
            self._table.drop(entry, "dropped_late")
        return self._consume(sorted(taken, key=lambda entry: entry.index), version)

    def finished(self, version: int, known: Collection[int]) -> tuple[SampleGroup, ...]:
        """Return the finished groups of the batch that trains `version`, in admission order and
        without `known` ones; nothing changes. With async_ratio 0 and oldest_first, each of them is
        in the batch. Raises StalenessViolated."""
        if version != self.next_step:
            return ()
        entries = self._select(list(self._table.waiting()), version)
        groups = tuple(entry.group() for entry in entries if entry.index not in known)
        every = (sample for group in groups for sample in group.samples)
        # They train at once, so the law must hold now.
        check_lags(every, version, self._flow, self._first_versions, self._fresh_steps)
        return groups

    def may_take(self, version: int) -> bool:
        """Return True if a selection may succeed. Only then does `take` examine why a batch is
        incomplete."""
        table = self._table
        if table.ready < self._flow.prompts_per_step or table.finished < self._worth_at:
            return False
        return (
            self._awaited is None or self._awaited.finished is not None
        ) and not self._must_stand_still(version)

    def _late(self, version: int) -> set[GroupState]:
        """Groups that are due at `version` and still running, with `late: drop`: no batch waits for
        them, and the next batch drops them. Empty with `late: wait`."""
        if self._flow.late == "wait":
            return set()
        return {entry for entry in self._table.running() if entry.deadline <= version}

    def _indispensable(self, groups: Iterable[GroupState], version: int) -> GroupState | None:
        """Return the most urgent running group of `groups` if every batch needs it."""
        first = next((entry for entry in groups if entry.finished is None), None)
        overtaken = isinstance(self._flow.selection, Windowed)
        return first if first is not None and (first.deadline <= version or not overtaken) else None

    def _must_stand_still(self, version: int) -> bool:
        """Return True with `exact_lag` until every response of this version has arrived, because
        the next weights have to wait for them."""
        if not isinstance(self._flow.selection, ExactLag):
            return False
        table = self._table
        # A group that waits for its own reward may still be dropped, and the next group instead of
        # it would continue with the next weights.
        unscored = self._flow.dynamic_sampling and table.ready < len(table.waiting())
        return self._version != version or self.room() or table.open > 0 or unscored

    def _select(self, groups: Sequence[GroupState], version: int) -> list[GroupState]:
        selection, count = self._flow.selection, self._flow.prompts_per_step
        if isinstance(selection, Windowed):
            return windowed(groups, count, version, selection.window)
        return oldest_first(groups, count)

    def _consume(self, taken: Sequence[GroupState], version: int) -> tuple[SampleGroup, ...]:
        groups = tuple(entry.group() for entry in taken)
        every = (sample for group in groups for sample in group.samples)
        # Before anything changes. A violation is an internal error, and ends the run.
        check_lags(every, version, self._flow, self._first_versions, self._fresh_steps)
        self._table.consume(taken)
        if self._replay is not None:
            # After the check, because replayed responses may have any age.
            groups, replayed = self._replay.exchange(groups, version, self._flow.group_size)
            self._table.counts["replayed"] += replayed
        return groups

    # What is where

    def pending(self) -> list[NumberedPrompt]:
        """Admitted or pending prompts that are not consumed, oldest first. A resume requests them
        again."""
        own = [(entry.index, entry.prompt) for entry in self._table.waiting()]
        return sorted([*own, *self._pending], key=lambda place: place[0])

    def buffer(self) -> Buffer:
        """Return a copy of the waiting groups and of the replay store."""
        stored = self._replay.content() if self._replay is not None else ()
        return replace(
            self._table.buffer(), stored=stored, first_versions=tuple(self._first_versions)
        )

    @property
    def next_index(self) -> int:
        return self._next_index

    def waiting(self) -> list[int]:
        """Groups that are neither consumed nor dropped, oldest first."""
        return sorted(entry.index for entry in self._table.waiting())

    def running(self) -> list[NumberedPrompt]:
        """Groups that still lack responses, oldest first."""
        return [(entry.index, entry.prompt) for entry in self._table.running()]

    def drain_dropped(self) -> list[SampleRow]:
        """Finished responses of dropped groups since the last call, whatever the reason."""
        return self._table.drain_dropped()

    def counts(self) -> dict[str, int]:
        """Return counts since `start`; groups that it restores count as admitted. Groups: admitted
        = consumed + dropped_equal + dropped_late + dropped_failed + running + ready. Responses:
        asked = finished + given_up + open (now); aborted (and requested again), replayed."""
        table = self._table
        running = len(table.waiting()) - table.ready
        return dict(table.counts) | {
            "ready": table.ready,
            "running": running,
            "open": table.open,
        }


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
    """Replay buffer in host memory; `content` goes into checkpoints.

    It keeps the newest `per_prompt` distinct responses of a prompt; of two responses with the same
    tokens, the newer counts. A step's draw depends on the seed, the version and the stored
    responses alone. A response that trains again has its own id in that batch:
    `<id>@<version>.<place>`.
    """

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
        requested_prompt, stored = self._stored[prompt]
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
        return SampleGroup(index, requested_prompt, tuple(own))

"""Who is asked what, and what trains when: the law, the groups and the counts, without engines, clocks or tasks.

    prompt --admit--> requests (one per response) --answered / was_cut--> finished group --take--> batch

Invariants:
- groups are numbered in admission order; none is admitted beyond the budget, none consumed after its deadline (law.py);
- every admitted group is waiting (running or finished), consumed, or dropped with a reason: `counts` balance at any time;
- every request is answered or cut exactly once;
- a group is made of the first `group_size` responses that finish; the others are cut, and may be continued in one more group;
- with `exact_lag` a batch is handed out only when nothing is open, so that no response meets the next weights.
"""

from __future__ import annotations

import logging
from collections import Counter, deque
from collections.abc import Callable, Iterable, Sequence

from megatron_async_rl.config.schema import FlowConfig
from megatron_async_rl.config.selection import ExactLag, Replay, Windowed
from megatron_async_rl.flow.admitted import Admitted
from megatron_async_rl.flow.law import admitted_limit, check_lags, deadline, holds
from megatron_async_rl.flow.replay import ReplayStore
from megatron_async_rl.flow.selection import oldest_first, windowed
from megatron_async_rl.samples.requests import Cut, Request
from megatron_async_rl.samples.types import Group, Prompt, Sample, TrainBatch

log = logging.getLogger(__name__)

FILTER_PATIENCE = 10
"""Batches' worth of groups that are dropped for one that is kept; after that equal groups are kept as well, so that no run waits
for ever. Counted by what is kept, not consumed: far ahead of the trainer, many batches are made before one trains."""

Place = tuple[int, Prompt]
"""A group's number and its prompt."""


class Scheduler:
    """`steps`: optimizer steps of the whole run, so that nothing is admitted that no step will consume; null admits without
    end. `fresh_steps`: the run's first steps that are synchronous whatever `flow.async_ratio` says. `seed`: of replay."""

    def __init__(self, flow: FlowConfig, *, steps: int | None = None, fresh_steps: int = 0, seed: int = 0) -> None:
        self._flow = flow
        self._steps = steps
        self._fresh_steps = fresh_steps
        self._base = 0
        self._version: int | None = None
        self._next_index = 0
        self._pending: deque[Place] = deque()
        self._waiting: dict[int, Admitted] = {}
        self._answering: dict[int, Admitted] = {}
        self._returned: deque[Admitted] = deque()
        self._due: Counter[int] = Counter()
        self._limit = 0
        self._missing = 0
        """Groups that have to finish, at the least, before another attempt to select a batch can succeed."""
        self._order = self._kept = self._filtered = self._open = self._ready = 0
        self._dropped: list[Sample] = []
        self._replay = ReplayStore(flow.selection, seed) if isinstance(flow.selection, Replay) else None
        self._counts: Counter[str] = Counter()

    @property
    def version(self) -> int | None:
        """Version that every engine holds; null before `start`."""
        return self._version

    def start(self, version: int, next_index: int = 0, pending: Sequence[Place] = ()) -> None:
        """The engines hold `version`. New groups are numbered from `next_index`, after `pending` ones that a run left behind."""
        if self._version is not None:
            raise RuntimeError(f"started already, at version {self._base}")
        self._version = self._base = version
        self._limit = self._may_admit(version)
        self._next_index = next_index
        self._pending.extend(pending)

    def advance(self, version: int) -> None:
        """Every engine holds `version` now, so more may be admitted. Versions only grow; the same one again does nothing."""
        if self._version is None:
            raise RuntimeError(f"advance({version}) before start")
        if version < self._version:
            raise ValueError(f"weight versions only grow: at {self._version}, asked to advance to {version}")
        self._version = version
        self._limit = self._may_admit(version)

    # Admission

    def _may_admit(self, version: int) -> int:
        """Groups that may be admitted since `start`, dropped ones apart, while the engines hold `version`."""
        since, per_step = version - self._base, self._flow.prompts_per_step
        limit = admitted_limit(since, per_step, self._flow.async_ratio, self._fresh_steps - self._base)
        if self._steps is not None:
            limit = min(limit, max(self._steps - self._base, 0) * per_step)
        return limit

    def room(self) -> bool:
        """Whether one more group may be admitted now."""
        counts = self._counts
        return counts["admitted"] - counts["dropped_equal"] - counts["dropped_late"] < self._limit

    def admit(self, source: Callable[[], Prompt]) -> list[Request]:
        """The requests of one more group: of cut responses that wait for a place, of a pending prompt, or of the source's next.
        Only with `room`."""
        assert self._version is not None
        returned = self._next_returned()
        if returned is not None:
            entry = Admitted(self._number(), returned.prompt, returned.version, returned.deadline, follows=True, open=set())
            prefixes = returned.prefixes
        else:
            index, prompt = self._pending.popleft() if self._pending else (self._number(), source())
            due = deadline(self._version, self._flow.async_ratio, self._fresh_steps)
            entry = Admitted(index, prompt, self._version, due, follows=False, open=set())
            prefixes = []
        asked = self._flow.group_size + self._flow.extra_responses
        continued = [*prefixes, *[None] * asked][:asked]
        requests = [Request(group=entry.index, k=k, prompt=entry.prompt, prefix=p) for k, p in enumerate(continued)]
        entry.open.update(request.id for request in requests)
        self._waiting[entry.index] = self._answering[entry.index] = entry
        self._due[entry.deadline] += 1
        self._open += asked
        self._counts.update(admitted=1, asked=asked, requeued=len(prefixes))
        return requests

    def _number(self) -> int:
        self._next_index += 1
        return self._next_index - 1

    def _next_returned(self) -> Admitted | None:
        """The oldest group with cut responses that the law still has a place for; those before it are given up."""
        while self._returned:
            returned = self._returned.popleft()
            due = self._due + Counter([returned.deadline])
            if holds(due, self.next_step, self._flow.prompts_per_step):
                return returned
            self._counts["given_up"] += len(returned.prefixes)
        return None

    # Answers

    def answered(self, sample: Sample, group: int) -> list[str]:
        """Takes in a response of `group`; returns the ids of requests that are no longer wanted."""
        entry = self._take_open(sample.id, group)
        unwanted: list[str] = []
        if len(entry.samples) == self._flow.group_size:
            self._counts["surplus"] += 1
        else:
            entry.samples.append(sample)
            if entry.dropped:
                self._dropped.append(sample)
            if len(entry.samples) == self._flow.group_size:
                unwanted = sorted(entry.open)
                if not entry.dropped:
                    self._finish(entry)
        self._close(entry)
        return unwanted

    def was_cut(self, cut: Cut, group: int) -> None:
        """The engine stopped a request that `answered` had said is no longer wanted."""
        entry = self._take_open(cut.id, group)
        self._counts["cut"] += 1
        if cut.prefix is not None:
            entry.prefixes.append(cut.prefix)
        self._close(entry)

    def _take_open(self, request: str, group: int) -> Admitted:
        entry = self._answering.get(group)
        if entry is None or request not in entry.open:
            raise RuntimeError(f"response {request} of group {group} came twice, or without being asked for")
        entry.open.remove(request)
        self._open -= 1
        return entry

    def _finish(self, entry: Admitted) -> None:
        entry.finished = self._order
        self._order += 1
        self._ready += 1
        self._missing -= 1
        rewards = {sample.reward for sample in entry.samples if sample.valid}
        if self._flow.filter_equal_groups and len(rewards) <= 1:
            if self._filtered < FILTER_PATIENCE * self._flow.prompts_per_step:
                self._filtered += 1
                self._drop(entry, "dropped_equal")
                return
            log.warning("group %d is trained on although its rewards are equal: too few others are left", entry.index)
        self._kept += 1
        if self._kept % self._flow.prompts_per_step == 0:
            self._filtered = 0

    def _close(self, entry: Admitted) -> None:
        if entry.open:
            return
        del self._answering[entry.index]
        if self._flow.requeue_cut and entry.prefixes and not entry.dropped:
            self._returned.append(entry)

    def _leaves(self, entry: Admitted) -> None:
        del self._waiting[entry.index]
        self._due[entry.deadline] -= 1

    def _drop(self, entry: Admitted, reason: str) -> None:
        self._ready -= entry.finished is not None
        entry.dropped = True
        self._leaves(entry)
        self._counts[reason] += 1
        self._dropped += entry.samples

    # Selection

    @property
    def next_step(self) -> int:
        """The version that the next batch trains."""
        return self._base + self._counts["consumed"] // self._flow.prompts_per_step

    def take(self, version: int) -> TrainBatch | None:
        """The batch that trains `version`, the trainer's; null while it has to wait.

        Raises ValueError for another batch than the next, StalenessViolated should a sample break the law.
        """
        if self._version is None or version != self.next_step:
            raise ValueError(f"asked for the batch that trains version {version}; the next is that of {self.next_step}")
        if self._steps is not None and version >= self._steps:
            raise ValueError(f"the run's {self._steps} steps are consumed: there is no batch for version {version}")
        count = self._flow.prompts_per_step
        if self._ready < count or self._missing > 0 or self._must_stand_still(version):
            return None
        taken = self._select(self._waiting.values(), version)
        self._missing = count - len(taken)
        if self._missing and self._flow.late == "drop":
            late = [entry for entry in self._waiting.values() if entry.finished is None and entry.deadline <= version]
            others = [entry for entry in self._waiting.values() if entry.finished is not None or entry.deadline > version]
            taken = self._select(others, version)
            self._missing = min(self._missing, count - len(taken))
            for entry in late if len(taken) == count else ():
                self._drop(entry, "dropped_late")
        if len(taken) < count:
            return None
        self._missing = 0
        return self._consume(sorted(taken, key=lambda entry: entry.index), version)

    def _must_stand_still(self, version: int) -> bool:
        """`exact_lag`: everything that this version makes has to be there before the next weights are."""
        exact = isinstance(self._flow.selection, ExactLag)
        return exact and (self._version != version or self.room() or self._open > 0)

    def _select(self, waiting: Iterable[Admitted], version: int) -> list[Admitted]:
        """The most urgent come first: that is the order of admission, but for groups that continue cut responses."""
        selection, count = self._flow.selection, self._flow.prompts_per_step
        if self._flow.requeue_cut:
            waiting = sorted(waiting, key=lambda entry: (entry.deadline, entry.index))
        if isinstance(selection, Windowed):
            return windowed(list(waiting), count, version, selection.window)
        return oldest_first(waiting, count)

    def _consume(self, taken: Sequence[Admitted], version: int) -> TrainBatch:
        groups = tuple(
            Group(
                index=entry.index,
                prompt=entry.prompt,
                samples=tuple(sorted(entry.samples, key=lambda sample: int(sample.id.rpartition("-")[2]))),
                admitted_version=entry.version,
            )
            for entry in taken
        )
        check_lags(groups, version, self._flow, first=self._base, fresh_steps=self._fresh_steps)
        for entry in taken:
            self._leaves(entry)
        self._counts["consumed"] += len(taken)
        self._ready -= len(taken)
        if self._replay is not None:
            groups, replayed = self._replay.exchange(groups, version, self._flow.group_size)
            self._counts["replayed"] += replayed
        return TrainBatch(version=version, groups=groups)

    # What is where

    def pending(self) -> list[Place]:
        """Admitted and not consumed, oldest first: what a resume has to ask again."""
        own = [(entry.index, entry.prompt) for entry in self._waiting.values() if not entry.follows]
        return sorted([*own, *self._pending], key=lambda place: place[0])

    @property
    def next_index(self) -> int:
        return self._next_index

    def running(self) -> list[Place]:
        """Groups whose responses have not all come, oldest first."""
        return [(entry.index, entry.prompt) for entry in self._waiting.values() if entry.finished is None]

    def drain_dropped(self) -> list[Sample]:
        """Finished responses of dropped groups since the last call, whatever the reason."""
        drained, self._dropped = self._dropped, []
        return drained

    def counts(self) -> dict[str, int]:
        """Since `start`. Groups: admitted = consumed + dropped_equal + dropped_late + running + ready. Responses: asked, cut,
        requeued, given_up (cut ones that the law had no place for), surplus, replayed; open now."""
        names = ("admitted", "consumed", "dropped_equal", "dropped_late", "asked", "cut", "requeued", "given_up", "surplus")
        counts = {name: self._counts[name] for name in (*names, "replayed")}
        return counts | {"ready": self._ready, "running": len(self._waiting) - self._ready, "open": self._open}

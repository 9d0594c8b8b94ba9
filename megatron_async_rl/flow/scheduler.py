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

from collections import Counter, deque
from collections.abc import Callable, Iterable, Sequence

from megatron_async_rl.config.schema import FlowConfig
from megatron_async_rl.config.selection import ExactLag, Replay, Windowed
from megatron_async_rl.flow.admitted import Admitted
from megatron_async_rl.flow.buffer import EMPTY, Buffer, at_rest, cut_at_rest, taken_up
from megatron_async_rl.flow.equal_groups import EqualGroups
from megatron_async_rl.flow.law import admitted_limit, check_lags, deadline, holds
from megatron_async_rl.flow.replay import ReplayStore
from megatron_async_rl.flow.selection import oldest_first, windowed
from megatron_async_rl.samples.requests import Cut, Request
from megatron_async_rl.samples.types import Prompt, Sample, TrainBatch

Place = tuple[int, Prompt]
"""A group's number and its prompt."""

COUNTED = (
    "admitted", "consumed", "dropped_equal", "dropped_late", "asked", "cut", "requeued", "given_up", "surplus", "replayed",
)  # fmt: skip


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
        self._first_versions = set[int]()
        """Nothing older was there when these admitted: what `exact_lag` makes under them waits less."""
        self._order = self._open = self._ready = 0
        self._dropped: list[Sample] = []
        self._equal = EqualGroups(flow.prompts_per_step) if flow.filter_equal_groups else None
        self._replay = ReplayStore(flow.selection, seed) if isinstance(flow.selection, Replay) else None
        self._counts: Counter[str] = Counter(dict.fromkeys(COUNTED, 0))

    @property
    def version(self) -> int | None:
        """Version that every engine holds; null before `start`."""
        return self._version

    def start(
        self, version: int, next_index: int = 0, pending: Sequence[Place] = (), buffer: Buffer = EMPTY, oldest: int = 0
    ) -> list[Request]:
        """The engines hold `version`. New groups are numbered from `next_index`, after `pending` ones that a run left behind.

        Of its `buffer` everything is taken up that the law and these settings permit and whose tokens come from version `oldest`
        or newer ones. Returns the requests that are to be asked again for it.
        """
        if self._version is not None:
            raise RuntimeError(f"started already, at version {self._base}")
        self._version = self._base = version
        self._limit = self._may_admit(version)
        self._next_index = next_index
        fresh = self._fresh_steps
        self._load(taken_up(buffer, self._flow, version=version, limit=self._limit, fresh_steps=fresh, oldest=oldest))
        self._pending.extend(place for place in pending if place[0] not in self._waiting)
        return [request for entry in self._answering.values() for request in entry.open.values()]

    def _load(self, buffer: Buffer) -> None:
        for entry in buffer.groups:
            self._enter(entry)
            if entry.finished is not None:
                self._ready += 1
                self._order = max(self._order, entry.finished + 1)
        self._first_versions = set(buffer.first_versions)
        self._returned.extend(buffer.returned)
        if self._equal is not None:
            self._equal.kept, self._equal.dropped = buffer.equal
        if self._replay is not None:
            self._replay.load(buffer.stored)

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
            entry = Admitted(self._number(), returned.prompt, returned.version, returned.deadline, follows=True, open={})
            prefixes = returned.prefixes
        else:
            index, prompt = self._pending.popleft() if self._pending else (self._number(), source())
            due = deadline(self._version, self._flow.async_ratio, self._fresh_steps)
            entry = Admitted(index, prompt, self._version, due, follows=False, open={})
            prefixes = []
        requests = entry.ask(self._flow.group_size + self._flow.extra_responses, prefixes)
        self._enter(entry)
        self._counts["requeued"] += len(prefixes)
        return requests

    def _enter(self, entry: Admitted) -> None:
        self._waiting[entry.index] = entry
        if entry.open:
            self._answering[entry.index] = entry
        self._due[entry.deadline] += 1
        self._open += len(entry.open)
        self._counts["admitted"] += 1
        self._counts["asked"] += len(entry.open)

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
        del entry.open[request]
        self._open -= 1
        return entry

    def _finish(self, entry: Admitted) -> None:
        entry.finished = self._order
        self._order += 1
        self._ready += 1
        self._missing -= 1
        if self._equal is not None and self._equal.drops(entry.index, entry.samples):
            self._drop(entry, "dropped_equal")

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
        if not self.may_take(version):
            return None
        count = self._flow.prompts_per_step
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

    def may_take(self, version: int) -> bool:
        """Whether it is worth while to try: what keeps a batch from being complete is looked at only when it is."""
        return self._ready >= self._flow.prompts_per_step and self._missing <= 0 and not self._must_stand_still(version)

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
        groups = tuple(entry.group() for entry in taken)
        check_lags(groups, version, self._flow, self._first_versions, self._fresh_steps)
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

    def buffer(self) -> Buffer:
        """What waits, and what the replay store holds: a copy, as of now."""
        whole = [entry for entry in self._answering.values() if entry.finished is not None and not entry.dropped]
        returned = [cut_at_rest(entry) for entry in (*self._returned, *whole)] if self._flow.requeue_cut else []
        return Buffer(
            groups=tuple(at_rest(entry) for entry in self._waiting.values()),
            returned=tuple(entry for entry in returned if entry.prefixes),
            stored=self._replay.content() if self._replay is not None else (),
            equal=(self._equal.kept, self._equal.dropped) if self._equal is not None else (0, 0),
            first_versions=tuple(self._first_versions),
        )

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
        """Since `start`, which admits what it takes up. Groups: admitted = consumed + dropped_equal + dropped_late + running +
        ready. Responses: asked, cut, requeued, given_up (cut ones that the law had no place for), surplus, replayed; open now."""
        return dict(self._counts) | {"ready": self._ready, "running": len(self._waiting) - self._ready, "open": self._open}

"""Where every admitted group is, what has come of it, and the counts: kept by the scheduler (scheduler.py), which decides.

    enter --> running --answered / was_cut--> finished --consume--> trained
                 +---------------+---------------+-----drop-----> dropped, with a reason

Invariants:
- every group that entered is waiting (running or finished), consumed, or dropped with a reason: `counts` balance at any time;
- every request is answered or cut exactly once;
- a group is made of the first `group_size` responses that finish; the others are cut, and may be continued in one more group;
- what an answer costs does not depend on how many groups are waiting.
"""

from __future__ import annotations

from collections import Counter, deque
from collections.abc import Collection, Iterable

from megatron_async_rl.config.schema import FlowConfig
from megatron_async_rl.flow.admitted import Admitted
from megatron_async_rl.flow.buffer import Buffer, at_rest, cut_at_rest
from megatron_async_rl.flow.equal_groups import EqualGroups
from megatron_async_rl.samples.requests import Cut, Request
from megatron_async_rl.samples.types import Sample

COUNTED = (
    "admitted", "consumed", "dropped_equal", "dropped_late", "asked", "cut", "requeued", "given_up", "surplus", "replayed",
)  # fmt: skip


class Ledger:
    """Groups in the order in which they entered. `counts`: see Scheduler.counts."""

    def __init__(self, flow: FlowConfig) -> None:
        self._group_size = flow.group_size
        self._requeue = flow.requeue_cut
        self._equal = EqualGroups(flow.prompts_per_step) if flow.filter_equal_groups else None
        self._waiting: dict[int, Admitted] = {}
        self._answering: dict[int, Admitted] = {}
        self._dropped: list[Sample] = []
        self.returned: deque[Admitted] = deque()
        """Whose cut responses wait to be continued, oldest first."""
        self.due: dict[int, int] = {}
        """How many of those that wait have which deadline; no deadline has none."""
        self.counts: Counter[str] = Counter(dict.fromkeys(COUNTED, 0))
        self.ready = self.open = 0
        """Groups that are finished and wait; requests neither answered nor cut."""
        self.finished = 0
        """Groups that have finished, whatever became of them."""

    def load(self, buffer: Buffer) -> None:
        """Groups come most urgent first."""
        for entry in buffer.groups:
            self.enter(entry)
            if entry.finished is not None:
                self.ready += 1
                self.finished = max(self.finished, entry.finished + 1)
        self.returned.extend(buffer.returned)
        if self._equal is not None:
            self._equal.kept, self._equal.dropped = buffer.equal

    def enter(self, entry: Admitted) -> None:
        """One more group waits."""
        self._waiting[entry.index] = entry
        if entry.open:
            self._answering[entry.index] = entry
        self.due[entry.deadline] = self.due.get(entry.deadline, 0) + 1
        self.open += len(entry.open)
        self.counts["admitted"] += 1
        self.counts["asked"] += len(entry.open)

    # What comes

    def answered(self, sample: Sample, group: int) -> list[str]:
        """Takes in a response of `group`; returns the ids of requests that are no longer wanted."""
        entry = self._take_open(sample.id, group)
        unwanted: list[str] = []
        if len(entry.samples) == self._group_size:
            self.counts["surplus"] += 1
        else:
            entry.samples.append(sample)
            if entry.dropped:
                self._dropped.append(sample)
            if len(entry.samples) == self._group_size:
                unwanted = sorted(entry.open)
                if not entry.dropped:
                    self._finish(entry)
        self._close(entry)
        return unwanted

    def was_cut(self, cut: Cut, group: int) -> None:
        """The engine stopped a request that `answered` had said is no longer wanted."""
        entry = self._take_open(cut.id, group)
        self.counts["cut"] += 1
        if cut.prefix is not None:
            entry.prefixes.append(cut.prefix)
        self._close(entry)

    def _take_open(self, request: str, group: int) -> Admitted:
        entry = self._answering.get(group)
        if entry is None or request not in entry.open:
            raise RuntimeError(f"response {request} of group {group} came twice, or without being asked for")
        del entry.open[request]
        self.open -= 1
        return entry

    def _finish(self, entry: Admitted) -> None:
        entry.finished = self.finished
        self.finished += 1
        self.ready += 1
        if self._equal is not None and self._equal.drops(entry.index, entry.samples):
            self.drop(entry, "dropped_equal")

    def _close(self, entry: Admitted) -> None:
        if entry.open:
            return
        del self._answering[entry.index]
        if self._requeue and entry.prefixes and not entry.dropped:
            self.returned.append(entry)

    # Where it goes

    def drop(self, entry: Admitted, reason: str) -> None:
        """What has come of it, and what still comes, is told by `drain_dropped`."""
        self.ready -= entry.finished is not None
        entry.dropped = True
        self._leaves(entry)
        self.counts[reason] += 1
        self._dropped += entry.samples

    def consume(self, entries: Collection[Admitted]) -> None:
        """Finished groups train."""
        for entry in entries:
            self._leaves(entry)
        self.ready -= len(entries)
        self.counts["consumed"] += len(entries)

    def _leaves(self, entry: Admitted) -> None:
        del self._waiting[entry.index]
        self.due[entry.deadline] -= 1
        if not self.due[entry.deadline]:
            del self.due[entry.deadline]

    # What is where

    def waiting(self) -> Collection[Admitted]:
        """Neither consumed nor dropped, in the order in which they entered: a view."""
        return self._waiting.values()

    def running(self) -> Iterable[Admitted]:
        """Those whose responses have not all come."""
        return (entry for entry in self._waiting.values() if entry.finished is None)

    def holds(self, group: int) -> bool:
        """Whether the group waits."""
        return group in self._waiting

    def unanswered(self) -> list[Request]:
        """Requests neither answered nor cut."""
        return [request for entry in self._answering.values() for request in entry.open.values()]

    def drain_dropped(self) -> list[Sample]:
        """Finished responses of dropped groups since the last call, whatever the reason."""
        drained, self._dropped = self._dropped, []
        return drained

    def buffer(self) -> Buffer:
        """A copy of what waits, as of now."""
        whole = [entry for entry in self._answering.values() if entry.finished is not None and not entry.dropped]
        returned = [cut_at_rest(entry) for entry in (*self.returned, *whole)] if self._requeue else []
        return Buffer(
            groups=tuple(at_rest(entry) for entry in self._waiting.values()),
            returned=tuple(entry for entry in returned if entry.prefixes),
            equal=(self._equal.kept, self._equal.dropped) if self._equal is not None else (0, 0),
        )

"""Table of the admitted groups, their states and their counts. The scheduler (scheduler.py)
decides; the table records. The two are separate files because they have 766 lines together, and a
file has at most 500.

    enter --> running --on_sample--> finished --consume--> trained
                 +---------------------+---------drop----> dropped, with a reason

With a reward that is called per group (`scored_whole`), a group that has all its responses is still
running; `on_scored` finishes it.

Invariants:
- every group that entered is waiting (running or finished), consumed, or dropped with a reason. The
  `counts` balance at any time. `on_group_dropped` is called once for each dropped group, at the
  moment of the decision;
- every request is answered or given up exactly once; an aborted request stays open and is sent
  again, with its tokens;
- with dynamic sampling, at most EQUAL_BATCHES_LIMIT batches' worth of equal groups are dropped for
  each batch's worth that is kept; after that equal groups are kept as well, so that no run waits
  forever;
- the cost of an answer does not depend on how many groups are waiting.
"""

from __future__ import annotations

import logging
from collections import Counter
from collections.abc import Callable, Collection, Iterable, Sequence
from dataclasses import dataclass, replace

from megatron_async_rl.config.flow import FlowConfig
from megatron_async_rl.flow.buffer import Buffer, GroupState, snapshot
from megatron_async_rl.samples.rows import SampleGroup, SampleRow, rescored
from megatron_async_rl.samples.types import Aborted, Request

log = logging.getLogger(__name__)

DROPPED = ("dropped_equal", "dropped_late", "dropped_failed")
"""Reasons: equal rewards (dynamic sampling), late (`flow.late: drop`), a request that was given up
because it ends engines (router.py)."""

COUNTED = ("admitted", "consumed", *DROPPED, "asked", "aborted", "given_up", "replayed")

OnDropped = Callable[[SampleRow, str, bool], None]
"""Callback for each response that will not train, with the reason and whether its group had
finished."""
OnGroupDropped = Callable[[int, str], None]
"""Callback for each group that will not train, with its number and the reason. It comes before the
calls for the group's responses; there may be none yet."""

EQUAL_BATCHES_LIMIT = 10
"""Limit of dropped groups, in batches. Counted against kept groups, not consumed ones: far ahead of
the trainer, many batches are complete before one trains."""


@dataclass(eq=False)
class DynamicSampling:
    """DAPO's dynamic sampling: finished groups whose rewards are all equal teach nothing and are
    dropped (arXiv 2503.14476, 3.2). `kept`: groups of the whole run. `dropped`: since a batch's
    worth was last complete."""

    prompts_per_step: int
    kept: int = 0
    dropped: int = 0

    def drops(self, index: int, samples: Iterable[SampleRow]) -> bool:
        """Return True if group `index`, which has just finished, must be dropped; count it."""
        # A group without a valid response teaches nothing, either.
        equal = len({sample.reward for sample in samples if sample.valid}) <= 1
        if equal and self.dropped < EQUAL_BATCHES_LIMIT * self.prompts_per_step:
            self.dropped += 1
            return True
        if equal:
            log.warning(
                "group %d is trained on although its rewards are equal: too few others are left",
                index,
            )
        self.kept += 1
        if self.kept % self.prompts_per_step == 0:
            self.dropped = 0
        return False


def unrewarded(samples: Sequence[SampleRow]) -> list[SampleRow]:
    """Return the samples of a group that never got its reward; samples that had failed before keep
    their error."""
    why = "its group was dropped before it had its reward"
    failed = [row for row in samples if not row.valid]
    left = [row for row in samples if row.valid]
    count = len(left)
    return failed + (rescored(left, [0.0] * count, [None] * count, [why] * count) if left else [])


class GroupTable:
    """Groups in the order in which they entered. `counts`: see Scheduler.counts."""

    def __init__(
        self,
        flow: FlowConfig,
        on_dropped: OnDropped = lambda *_: None,
        on_group_dropped: OnGroupDropped = lambda *_: None,
        *,
        scored_whole: bool = False,
    ) -> None:
        self._on_dropped = on_dropped
        self._on_group_dropped = on_group_dropped
        self._scored_whole = scored_whole
        self._group_size = flow.group_size
        self._dynamic = DynamicSampling(flow.prompts_per_step) if flow.dynamic_sampling else None
        self._waiting: dict[int, GroupState] = {}
        self._answering: dict[int, GroupState] = {}
        self._dropped: list[SampleRow] = []
        self.due: dict[int, int] = {}
        """Number of waiting groups by deadline; a deadline without groups has no entry."""
        self.counts: Counter[str] = Counter(dict.fromkeys(COUNTED, 0))
        self.ready = self.open = 0
        """Finished groups that wait; requests that are not answered."""
        self.finished = 0
        """Groups that have finished, including consumed and dropped ones."""

    def load(self, buffer: Buffer) -> None:
        """Enter the groups of a buffer, most urgent first."""
        for entry in buffer.groups:
            self.enter(entry)
            if entry.finished is not None:
                self.ready += 1
                # New groups finish after all that are restored.
                self.finished = max(self.finished, entry.finished + 1)
        if self._dynamic is not None:
            self._dynamic.kept, self._dynamic.dropped = buffer.equal

    def enter(self, entry: GroupState) -> None:
        """Add one waiting group."""
        self._waiting[entry.index] = entry
        if entry.open:
            self._answering[entry.index] = entry
        self.due[entry.deadline] = self.due.get(entry.deadline, 0) + 1
        self.open += len(entry.open)
        self.counts["admitted"] += 1
        self.counts["asked"] += len(entry.open)

    # Answers

    def on_sample(self, sample: SampleRow, group: int) -> None:
        """Accept a response of `group`."""
        # First: a second answer to one request raises before anything changes.
        entry = self._close(sample.id, group)
        entry.samples.append(sample)
        # The drop has counted the group already.
        if entry.dropped:
            self._put_away(entry, [sample])
        elif len(entry.samples) == self._group_size and not self._scored_whole:
            self._finish(entry)

    def unscored(self, group: int) -> SampleGroup | None:
        """Return `group` if it has all its responses and waits for its reward."""
        entry = self._waiting.get(group)
        waits = entry is not None and not entry.open and entry.finished is None
        return entry.group() if entry is not None and waits else None

    def on_scored(self, group: int, samples: Sequence[SampleRow]) -> None:
        """Accept the responses of an unscored group, with their rewards."""
        entry = self._waiting[group]
        entry.samples = list(samples)
        self._finish(entry)

    def on_abort(self, aborted: Aborted, group: int) -> Request:
        """Return the request that continues an aborted one after its tokens."""
        entry = self._answering.get(group)
        if entry is None or aborted.id not in entry.open:
            raise self._unexpected(aborted.id, group)
        self.counts["aborted"] += 1
        again = replace(entry.open[aborted.id], prefix=aborted.partial)
        # It stays open: an aborted request is not answered.
        entry.open[aborted.id] = again
        return again

    def on_give_up(self, request: str, group: int) -> bool:
        """Give up the request and drop its group, which cannot be completed. Return False if the
        group had been dropped before."""
        entry = self._close(request, group)
        self.counts["given_up"] += 1
        if entry.dropped:
            return False
        self.drop(entry, "dropped_failed")
        return True

    def _close(self, request: str, group: int) -> GroupState:
        entry = self._answering.get(group)
        if entry is None or request not in entry.open:
            raise self._unexpected(request, group)
        del entry.open[request]
        self.open -= 1
        if not entry.open:
            del self._answering[entry.index]
        return entry

    @staticmethod
    def _unexpected(request: str, group: int) -> RuntimeError:
        return RuntimeError(f"response {request} of group {group} came twice, or was not requested")

    def _finish(self, entry: GroupState) -> None:
        entry.finished = self.finished
        # Before the filter: the scheduler counts dropped groups as finished, too.
        self.finished += 1
        self.ready += 1
        if self._dynamic is not None and self._dynamic.drops(entry.index, entry.samples):
            self.drop(entry, "dropped_equal")

    # Where a group goes

    def drop(self, entry: GroupState, reason: str) -> None:
        """Drop a group. Its samples, present and future, go to `drain_dropped`."""
        self.ready -= entry.finished is not None
        entry.dropped = reason.removeprefix("dropped_")
        self._leave(entry)
        self.counts[reason] += 1
        # Before its responses, whose records refer to it.
        self._on_group_dropped(entry.index, entry.dropped)
        self._put_away(entry, entry.samples)

    def _put_away(self, entry: GroupState, samples: Sequence[SampleRow]) -> None:
        """Record samples of a group that is dropped."""
        finished = entry.finished is not None
        # A part of the reward must not be taken for the whole reward.
        if self._scored_whole and not finished:
            samples = unrewarded(samples)
        self._dropped += samples
        for sample in samples:
            self._on_dropped(sample, entry.dropped, finished)

    def consume(self, entries: Collection[GroupState]) -> None:
        """Remove finished groups, which train now."""
        for entry in entries:
            self._leave(entry)
        self.ready -= len(entries)
        self.counts["consumed"] += len(entries)

    def _leave(self, entry: GroupState) -> None:
        del self._waiting[entry.index]
        self.due[entry.deadline] -= 1
        if not self.due[entry.deadline]:
            # No zero entries: a check costs time in proportion to the number of entries.
            del self.due[entry.deadline]

    # What is where

    def waiting(self) -> Collection[GroupState]:
        """Groups that are neither consumed nor dropped, in the order in which they entered (a
        view)."""
        return self._waiting.values()

    def running(self) -> Iterable[GroupState]:
        """Groups that still lack responses."""
        return (entry for entry in self._waiting.values() if entry.finished is None)

    def is_waiting(self, group: int) -> bool:
        return group in self._waiting

    def open_requests(self) -> list[tuple[Request, int]]:
        """Unanswered requests, each with the version under which its group was admitted."""
        return [
            (request, entry.version)
            for entry in self._answering.values()
            for request in entry.open.values()
        ]

    @property
    def kept(self) -> int:
        """Groups that entered and were not dropped."""
        return self.counts["admitted"] - sum(self.counts[reason] for reason in DROPPED)

    def drain_dropped(self) -> list[SampleRow]:
        """Finished responses of dropped groups since the last call, whatever the reason."""
        drained, self._dropped = self._dropped, []
        return drained

    def buffer(self) -> Buffer:
        """Return a copy of the waiting groups."""
        dynamic = self._dynamic
        return Buffer(
            groups=tuple(snapshot(entry) for entry in self._waiting.values()),
            equal=(dynamic.kept, dynamic.dropped) if dynamic is not None else (0, 0),
        )

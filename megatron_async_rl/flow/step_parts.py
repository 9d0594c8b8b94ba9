"""Parts of the next batch, handed out before the batch is complete (`flow.stream: groups`).

Invariants:
- parts of a batch are numbered from 0 in the order of their handout; a group is in one part, and
  the groups that complete the batch are its last part;
- the handout of a part consumes nothing: its groups wait in the scheduler until the batch is taken,
  so after a stop or a crash they are in the checkpoint's buffer or are sampled again;
- a group that was handed out is in the batch. The scheduler admits no more groups than the batch
  has (async_ratio 0), and a finished group is never dropped.
"""

from __future__ import annotations

from collections.abc import Sequence

from megatron_async_rl.flow.buffer import train_batch
from megatron_async_rl.flow.scheduler import Scheduler
from megatron_async_rl.samples.rows import SampleGroup, TrainBatch


class StepParts:
    """Numbers of the parts of one batch. streams: False for batches that are handed out whole."""

    def __init__(self, *, streams: bool) -> None:
        self.streams = streams
        self._part_of: dict[int, int] = {}
        """Part of each group that was handed out."""
        self._count = 0

    def next(self, scheduler: Scheduler, version: int) -> TrainBatch | None:
        """Return the groups of the batch of `version` that have finished since the last part; None
        if there are none."""
        if not self.streams:
            return None
        groups = scheduler.finished(version, self._part_of.keys())
        if not groups:
            return None
        parts = self._add(groups)
        return train_batch(groups, version, parts, complete=False)

    def complete(self, groups: Sequence[SampleGroup]) -> tuple[int, ...]:
        """Return the part of each group of a complete batch, and begin with the next batch; () if
        batches have no parts."""
        if not self.streams:
            return ()
        self._add([group for group in groups if group.index not in self._part_of])
        found, self._part_of, self._count = self._part_of, {}, 0
        if len(found) > len(groups):
            # Their gradient is in the sum already, so the step would not be that of the batch.
            missing = sorted(found.keys() - {group.index for group in groups})
            raise RuntimeError(f"groups {missing} were handed out and are not in their batch")
        return tuple(found[group.index] for group in groups)

    def _add(self, groups: Sequence[SampleGroup]) -> tuple[int, ...]:
        number, self._count = self._count, self._count + 1
        self._part_of |= dict.fromkeys((group.index for group in groups), number)
        return (number,) * len(groups)

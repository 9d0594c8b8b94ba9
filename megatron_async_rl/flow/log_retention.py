"""Deletion of the sample log's oldest segments.

Invariant: the segments from which the oldest kept checkpoint can be replayed stay, even beyond
`samples.keep_mib`: a replay from there needs the batches of all later steps, and their samples may
have finished earlier, by as many steps as the staleness bound. A replay store (`flow.selection:
replay`) may hold older samples, which are not kept for it. The log never exceeds MAX_EXCESS times
`samples.keep_mib`.
"""

from __future__ import annotations

import sys
from pathlib import Path

from megatron_async_rl.flow.staleness import max_lag
from megatron_async_rl.policy.checkpoint_folder import step_of, steps
from megatron_async_rl.samples.frames import FOLDER, TABLES, SegmentBroken, file_of, numbers_in
from megatron_async_rl.samples.recorded import NotRecorded, RecordedBatches
from megatron_async_rl.samples.segments import size_of

MAX_EXCESS = 4


def make_room(run_dir: Path, keep: int, added: int, async_ratio: float) -> str | None:
    """Delete the oldest segments until the log and `added` more bytes fit in `keep` bytes. Return a
    note if segments stay beyond `keep` for a checkpoint."""
    folder = run_dir / FOLDER
    old = numbers_in(folder)
    sizes = {number: size_of(folder, number) for number in old}
    needed = None
    while old and (total := sum(sizes.values()) + added) > keep:
        # Computed only if something would be deleted: it reads a part of each segment.
        needed = first_needed(run_dir, max_lag(async_ratio)) if needed is None else needed
        if old[0] >= needed and total <= MAX_EXCESS * keep:
            size = -(-total // 2**20)
            return (
                f"the sample log uses {size} MiB, more than samples.keep_mib: {keep // 2**20},"
                " because the oldest kept checkpoint could not be replayed without it; lower"
                " checkpoint.keep or checkpoint.every to use less"
            )
        for table in TABLES:
            path = file_of(folder, table, old[0])
            if path is not None:
                path.unlink(missing_ok=True)
        del sizes[old.pop(0)]
    return None


def first_needed(run_dir: Path, lag: int) -> int:
    """Return the first segment that the oldest kept checkpoint needs; a number above all if there
    is no checkpoint, or if damage hides what it needs. lag: staleness bound in steps."""
    saved = steps(run_dir / "checkpoint")
    if not saved:
        return sys.maxsize
    try:
        return RecordedBatches(run_dir).segment_of(step_of(saved[0]) + 1 - lag)
    except (NotRecorded, SegmentBroken):
        return sys.maxsize

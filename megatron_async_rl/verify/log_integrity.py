"""Integrity of the sample log: no damage, no gap, a row for every trained sample, and an admission
for every group that ended."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any

import numpy as np
from numpy.typing import NDArray

from megatron_async_rl.config.problem import number_of
from megatron_async_rl.samples.frames import (
    FOLDER,
    SegmentBroken,
    file_of,
    is_new,
    lost_end,
    numbers_in,
    path_of,
    require_checksums,
)
from megatron_async_rl.samples.segments import gaps_in, read_batches
from megatron_async_rl.verify.run_check import Places, RunRecords
from megatron_async_rl.verify.sample_block import SampleBlock
from megatron_async_rl.verify.scorecard import ScorecardRow, absent, row

NAME = "sample log"
BOUND = "0 damaged files, 0 missing rows, every ended group admitted"
REMEDY = (
    "restore the named file from a copy; without it, the steps that it holds cannot be checked or"
    " replayed. A sample that trained before counts twice: read events.jsonl"
)


class LogIntegrity:
    """Accumulates the faults of the log while others read it.

    Outcomes are numbered without a gap, so their count, smallest and largest number prove that none
    is missing; only after a mismatch the numbers are read again to name the gap.
    """

    def __init__(self, records: RunRecords) -> None:
        self._run_dir, self._supervised = records.run_dir, records.config.supervised
        self._keeps = records.config.samples.keep_mib > 0
        self._running = records.running
        self._faults, self._unread = Places(), Places()
        self.forgets = False
        """True if samples were forgotten before all outcomes were read."""
        self.notes: list[str] = []
        self.samples = 0
        self._count, self._highest = 0, -1
        self._lowest: int | None = None
        # Groups whose other row has not been read: rows of a resumed run may be in an older file.
        self._waiting: set[int] = set()
        self._ended: set[int] = set()
        self.segments: Sequence[int] = ()
        self.replays = records.any_replays
        with self.damage():
            require_checksums(self._run_dir / FOLDER)
            self.segments = numbers_in(self._run_dir / FOLDER)
        if self.segments and self.segments[0] > 0:
            self.notes.append(
                f"segments before number {self.segments[0]} of the sample log were deleted"
                " (samples.keep_mib): their samples are not checked"
            )

    @contextmanager
    def damage(self) -> Iterator[None]:
        """Record a damaged file and continue."""
        try:
            yield
        except SegmentBroken as error:
            text = f"{error.path.name} {error.what}"
            # Several checks may read a damaged file.
            if text not in self._faults.first:
                self._faults.add(text)

    def misaligned(self, block: SampleBlock, rows: Sequence[int]) -> None:
        """Record samples whose columns have different lengths."""
        self._faults.add_all(
            (f"sample {block.ids[at]}: its columns have different lengths" for at in rows),
            len(rows),
        )

    def outcomes(self, numbers: NDArray[np.int64]) -> None:
        if not len(numbers):
            return
        self._count += len(numbers)
        lowest = int(numbers.min())
        self._lowest = lowest if self._lowest is None else min(self._lowest, lowest)
        self._highest = max(self._highest, int(numbers.max()))

    def unread(self, outcome: Mapping[str, Any]) -> None:
        """Accumulate a row of outcomes whose sample was not read, or has ended before."""
        if outcome["outcome"] == "trained":
            self._unread.add(
                f"sample {outcome['id']}, trained at step {outcome['step']}, trained before, or its"
                " row is missing"
            )

    def group(self, outcome: Mapping[str, Any]) -> None:
        """Accumulate the admission or the end of a group."""
        index = outcome["group"]
        if outcome["outcome"] == "admitted":
            if index in self._ended:
                self._ended.discard(index)
            else:
                self._waiting.add(index)
        elif outcome["outcome"] in ("consumed", "dropped"):
            if index in self._waiting:
                self._waiting.discard(index)
            else:
                self._ended.add(index)

    def result(self) -> Iterable[ScorecardRow]:
        if not self.segments and not self._faults:
            if self._supervised:
                yield absent(NAME, "a supervised run has no samples", BOUND, REMEDY)
                return
            if not self._keeps:
                why = "samples.keep_mib is 0: the run logged no samples"
                yield absent(NAME, why, BOUND, "set samples.keep_mib in the next run")
                return
            self._faults.add(f"{self._run_dir / FOLDER} has no segment")
        self._check_ends()
        whole = bool(self.segments) and self.segments[0] == 0
        first = 0 if whole else self._lowest
        if first is not None and self._count != self._highest - first + 1:
            self._faults.add(self._gap(first))
        if whole and self._ended:
            self._faults.add_all(
                (f"group {one} ended and was never admitted" for one in sorted(self._ended)),
                len(self._ended),
            )
        faults = self._faults
        # Rows that are deleted, damaged, forgotten or just being written are not read, either.
        if whole and not faults and not self.forgets and not self._running:
            faults.add_all(self._unread.first, self._unread.count)
        value = (
            f"{number_of('fault', faults.count)}; {self.samples:,} samples and {self._count:,}"
            " outcomes read"
            if faults
            else f"{self.samples:,} samples, {self._count:,} outcomes"
        )
        yield row(NAME, value, BOUND, not faults, REMEDY, faults.first)

    def _check_ends(self) -> None:
        # The writer of a running run deletes the oldest segment and replaces the mark meanwhile.
        if self._running:
            return
        folder = self._run_dir / FOLDER
        for oldest in self.segments[:-1][:1]:
            outcomes = file_of(folder, "outcomes", oldest)
            if file_of(folder, "samples", oldest) is None and outcomes and not is_new(outcomes):
                name = path_of(folder, "samples", oldest).name
                self._faults.add(
                    f"{name} is missing: it was lost, or the run was killed while it deleted that"
                    " segment"
                )
        with self.damage():
            if (lost := lost_end(self._run_dir)) is not None:
                self._faults.add(lost)

    def _gap(self, first: int) -> str:
        numbers: list[NDArray[np.int64]] = []
        for segment in self.segments:
            try:
                numbers += [
                    batch["seq"].to_numpy()
                    for _, batch in read_batches(
                        self._run_dir / FOLDER, "outcomes", segment, ("seq",)
                    )
                ]
            except SegmentBroken:  # it is named already
                continue
        gaps = gaps_in(numbers, first=first)
        return f"outcomes {gaps} are missing" if gaps else "two outcomes have the same number"

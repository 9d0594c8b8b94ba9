"""The newest segment of the sample log while it is being written: one open file per table.

Invariants:
- both files exist, or neither: a single file would count as damage;
- rows are appended in whole batches; `abandon` leaves both files at their last whole batch.
"""

from __future__ import annotations

import logging
from collections.abc import Sequence
from pathlib import Path

import pyarrow as pa

from megatron_async_rl.samples.frames import OPEN, FrameWriter, LogMark, sync_folder
from megatron_async_rl.samples.rows import SampleRow, gathered
from megatron_async_rl.samples.segments import (
    OUTCOMES,
    TABLES,
    SampleOutcome,
    file_of,
    path_of,
    payload_of,
)

log = logging.getLogger(__name__)

OutcomeRow = tuple[int, int, str | None, float | None, SampleOutcome, int, str | None]
"""Row of OUTCOMES."""


class OpenSegment:
    """Both files of the segment that is being written."""

    def __init__(self, folder: Path, number: int, schema: pa.Schema) -> None:
        self.number = number
        self._schema = schema
        self._files: list[FrameWriter] = []
        try:
            for table in TABLES:
                self._files.append(FrameWriter(path_of(folder, table, number, OPEN)))
            sync_folder(folder)
        except OSError:
            # A closed first file without the second would count as damage.
            for file in self._files:
                file.remove()
            raise

    @property
    def size(self) -> int:
        return sum(file.size for file in self._files)

    def write(self, samples: Sequence[SampleRow], outcomes: Sequence[OutcomeRow]) -> None:
        of_samples, of_outcomes = self._files
        if samples:
            of_samples.write(payload_of(gathered(samples, schema=self._schema)))
        if outcomes:
            columns = zip(OUTCOMES, zip(*outcomes, strict=True), strict=True)
            arrays = [pa.array(values, type=field.type) for field, values in columns]
            of_outcomes.write(payload_of(pa.RecordBatch.from_arrays(arrays, schema=OUTCOMES)))

    def sync(self) -> None:
        for file in self._files:
            file.sync()

    def mark(self, *, closed: bool) -> LogMark:
        """Return the mark of the rows written so far."""
        samples, outcomes = (file.frames for file in self._files)
        return LogMark(segment=self.number, closed=closed, samples=samples, outcomes=outcomes)

    def close(self) -> None:
        for file in self._files:
            file.close()

    def abandon(self) -> None:
        """Close the files after their last whole frames, because of an error."""
        for file in self._files:
            try:
                file.abandon()
            except OSError as error:  # tried again with the next segment
                log.warning("closing the sample log: %s", error)


def size_of(folder: Path, number: int) -> int:
    files = (file_of(folder, table, number) for table in TABLES)
    return sum(path.stat().st_size for path in files if path is not None)

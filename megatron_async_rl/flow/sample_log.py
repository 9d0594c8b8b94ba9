"""The sample log's writer, in the controller's process: what finished, and what became of it.

    controller --finished / trained / dropped / evaluated--> queue --thread--> RUN/samples/

Invariants, beside those of the files (samples/segments.py):
- the controller's loop appends to a queue and does nothing else; one thread converts and writes;
- the log never slows or ends the run: a full queue or a full disk loses rows of the log, which is
  noted once in the run's events, and writing is tried again later;
- what was queued FLUSH_S ago is in the file, and so is all that a checkpoint's `position` counts;
- `begin(position)` removes the outcomes of a history that the checkpoint does not know, so no
  sample stands as trained in two histories; the samples themselves stay;
- an evaluation of one version stands there once, however often it was begun;
- the segments take `keep_mib` at most, and at least the newest is kept.
"""

from __future__ import annotations

import logging
import os
import threading
import time
from collections import deque
from collections.abc import Callable, Sequence
from pathlib import Path

import pyarrow as pa
import pyarrow.compute as pc

from megatron_async_rl.config.schema import SamplesConfig
from megatron_async_rl.samples.columns import LOGGED, SCHEMA
from megatron_async_rl.samples.rows import SampleRow, gathered
from megatron_async_rl.samples.segments import (
    FOLDER,
    OUTCOMES,
    Outcome,
    SegmentBroken,
    path_of,
    read_batches,
    segments_in,
)
from megatron_async_rl.samples.types import Prompt
from megatron_async_rl.watchdog.events import note

log = logging.getLogger(__name__)

FLUSH_S = 1.0
RETRY_S = 60.0
CHECKPOINT_WAIT_S = 10.0
QUEUED = 100_000
"""Samples and outcomes that may wait for the thread; what comes on top is lost."""
ROWS, TOKENS = 256, 2**18
"""Limits of one record batch: the thread holds the interpreter only for so long."""

Item = Callable[[], None]


class SampleLog:
    """The log that keeps nothing (`samples.keep_mib: 0`); it only carries the position on."""

    def __init__(self) -> None:
        self._next_seq = 0

    @property
    def position(self) -> int:
        """Outcomes so far, over the whole run: for the checkpoint."""
        return self._next_seq

    def begin(self, position: int) -> None:
        """Continues from a checkpoint's `position`; 0: from the run's beginning."""
        self._next_seq = max(self._next_seq, position)

    def finished(self, sample: SampleRow) -> None:
        """A response came, with its reward."""

    def trained(self, samples: Sequence[SampleRow], step: int) -> None:
        """The batch of optimizer step `step` was handed out."""

    def dropped(self, sample: SampleRow, step: int, reason: str) -> None:
        """A finished response will not train; `step`: the next one."""

    def evaluated(
        self, answers: Sequence[tuple[Prompt, Sequence[SampleRow]]], version: int
    ) -> None:
        """A held-out evaluation is complete."""

    def flush(self) -> None:
        """Waits until what was queued is written, CHECKPOINT_WAIT_S at most. Blocks: not on the
        loop."""

    def close(self) -> None:
        """Writes what is queued and ends the thread."""


class SampleLogWriter(SampleLog):
    """Keeps segments in `run_dir`/samples, from `begin` on."""

    def __init__(self, run_dir: Path, settings: SamplesConfig) -> None:
        super().__init__()
        self._run_dir, self._folder = run_dir, run_dir / FOLDER
        self._keep = settings.keep_mib * 2**20
        self._segment_size = settings.segment_mib * 2**20
        self._schema = SCHEMA if settings.experts else LOGGED
        self._queue: deque[Item] = deque()
        self._wake, self._closing = threading.Event(), False
        self._thread = threading.Thread(target=self._write_on, name="sample log", daemon=True)

        # The rest belongs to the thread.
        self._samples: list[SampleRow] = []
        self._outcomes: list[tuple[int, str, float, Outcome, int, str | None]] = []
        self._tokens = 0
        self._segment: _Segment | None = None
        self._evaluated_before = set[int]()
        self._retry_at: float | None = None
        self._noted = False
        self._lost = 0

    # On the controller's loop

    def begin(self, position: int) -> None:
        super().begin(position)
        try:
            rows = _remove_outcomes(self._folder, lambda table: pc.less(table["seq"], position))
            self._next_seq = max([self._next_seq, *(seq + 1 for seq, _, _ in rows)])
            self._evaluated_before = {step for _, what, step in rows if what == "evaluated"}
        except Exception as error:  # noqa: BLE001 - the log must not cost the run
            self._failed(error, 0)
        self._thread.start()

    def finished(self, sample: SampleRow) -> None:
        self._put(lambda: self._add_sample(sample), rows=1)

    def trained(self, samples: Sequence[SampleRow], step: int) -> None:
        self._put_outcomes(samples, "trained", step, None)

    def dropped(self, sample: SampleRow, step: int, reason: str) -> None:
        self._put_outcomes([sample], "dropped", step, reason)

    def evaluated(
        self, answers: Sequence[tuple[Prompt, Sequence[SampleRow]]], version: int
    ) -> None:
        self._put(lambda: self._forget_evaluation(version))
        for _, samples in answers:
            for sample in samples:
                self.finished(sample)
            self._put_outcomes(samples, "evaluated", version, None)

    def flush(self) -> None:
        written = threading.Event()
        self._put(self._write)
        self._put(written.set)
        self._wake.set()
        if self._thread.is_alive() and not written.wait(CHECKPOINT_WAIT_S):
            log.warning("the sample log was not written within %g s", CHECKPOINT_WAIT_S)

    def close(self) -> None:
        self._closing = True
        self._wake.set()
        if self._thread.is_alive():
            self._thread.join(CHECKPOINT_WAIT_S)

    def _put(self, item: Item, *, rows: int = 0) -> None:
        """`rows`: what is lost where there is no place left; 0: there always is."""
        if rows == 0 or len(self._queue) < QUEUED:
            self._queue.append(item)
        else:
            self._lost += rows
        if len(self._queue) >= QUEUED // 4:
            self._wake.set()

    def _put_outcomes(
        self, samples: Sequence[SampleRow], outcome: Outcome, step: int, reason: str | None
    ) -> None:
        first = self._next_seq
        self._next_seq += len(samples)
        self._put(
            lambda: self._add_outcomes(samples, first, outcome, step, reason), rows=len(samples)
        )

    # In the thread

    def _write_on(self) -> None:
        while not self._closing:
            self._wake.wait(FLUSH_S)
            self._wake.clear()
            self._take_queued()
        self._take_queued()
        if self._segment is not None:
            self._segment.close()

    def _take_queued(self) -> None:
        while self._queue:
            self._queue.popleft()()
        self._write()

    def _add_sample(self, sample: SampleRow) -> None:
        self._samples.append(sample)
        self._tokens += sample.total_length
        if len(self._samples) >= ROWS or self._tokens >= TOKENS:
            self._write()

    def _add_outcomes(
        self,
        samples: Sequence[SampleRow],
        first: int,
        outcome: Outcome,
        step: int,
        reason: str | None,
    ) -> None:
        # A response that trains again has its first id and a suffix (flow/selection.py).
        self._outcomes += [
            (seq, sample.id.partition("@")[0], sample.finished_at, outcome, step, reason)
            for seq, sample in enumerate(samples, start=first)
        ]

    def _forget_evaluation(self, version: int) -> None:
        """A crash between an evaluation and its checkpoint has it repeated."""
        if version not in self._evaluated_before:
            return
        self._evaluated_before.remove(version)

        def others(table: pa.Table) -> pa.ChunkedArray:
            of_it = pc.and_(
                pc.equal(table["outcome"], "evaluated"), pc.equal(table["step"], version)
            )
            return pc.invert(of_it)

        try:
            current = self._segment.number if self._segment is not None else None
            _remove_outcomes(self._folder, others, without=current)
        except Exception as error:  # noqa: BLE001 - the log must not cost the run
            self._failed(error, 0)

    def _write(self) -> None:
        """Samples before their outcomes, in one segment."""
        samples, outcomes = self._samples, self._outcomes
        self._samples, self._outcomes, self._tokens = [], [], 0
        if not samples and not outcomes:
            return
        if self._retry_at is not None and time.monotonic() < self._retry_at:
            self._lost += len(samples) + len(outcomes)
            return

        try:
            if self._segment is None:
                self._segment = self._next_segment()
            self._segment.write(samples, outcomes)
            if self._segment.size >= self._segment_size:
                self._segment.close()
                self._segment = None
        except Exception as error:  # noqa: BLE001 - the log must not cost the run
            self._failed(error, len(samples) + len(outcomes))
            return

        if self._lost:
            self._noted = False
            self._note(f"the sample log is written again; {self._lost} rows of it are missing")
            self._lost = 0
        self._retry_at, self._noted = None, False

    def _next_segment(self) -> _Segment:
        """A new one, after the oldest have made room for it."""
        self._folder.mkdir(parents=True, exist_ok=True)
        old = segments_in(self._folder)
        sizes = {number: _size(self._folder, number) for number in old}
        while old and sum(sizes.values()) + self._segment_size > self._keep:
            for table in ("samples", "outcomes"):
                path_of(self._folder, table, old[0]).unlink(missing_ok=True)
            del sizes[old.pop(0)]
        return _Segment(self._folder, old[-1] + 1 if old else 0, self._schema)

    def _failed(self, error: Exception, lost: int) -> None:
        """Leaves what was begun as it is: readers stop where it is cut."""
        log.warning("the sample log cannot be written: %s", error, exc_info=True)
        self._lost += lost
        self._retry_at = time.monotonic() + RETRY_S
        segment, self._segment = self._segment, None
        if segment is not None:
            segment.abandon()
        self._note(
            f"the sample log ({self._folder}) cannot be written: {error}; the run goes on without,"
            f" and tries again every {RETRY_S:g} s"
        )

    def _note(self, text: str) -> None:
        """Once, until it is written again."""
        if self._noted:
            return
        try:
            note(self._run_dir, text)
            self._noted = True
        except OSError as error:  # the same full disk: said with the next attempt
            log.warning("%s (and not noted: %s)", text, error)


def open_sample_log(run_dir: Path, settings: SamplesConfig) -> SampleLog:
    """The log as the configuration wants it; nothing is touched before `begin`."""
    return SampleLogWriter(run_dir, settings) if settings.keep_mib else SampleLog()


class _Segment:
    """The two files that are being written."""

    def __init__(self, folder: Path, number: int, schema: pa.Schema) -> None:
        self.number = number
        self._schema = schema
        self._paths = [path_of(folder, "samples", number), path_of(folder, "outcomes", number)]
        self._files: list[pa.OSFile] = []
        self._writers: list[pa.ipc.RecordBatchStreamWriter] = []
        self._holds_rows = False
        options = pa.ipc.IpcWriteOptions(compression="zstd")
        try:
            for path, columns in zip(self._paths, (schema, OUTCOMES), strict=True):
                self._files.append(pa.OSFile(str(path), "wb"))
                self._writers.append(pa.ipc.new_stream(self._files[-1], columns, options=options))
        except OSError:
            self.abandon()
            raise

    @property
    def size(self) -> int:
        return sum(int(file.tell()) for file in self._files)

    def write(
        self,
        samples: Sequence[SampleRow],
        outcomes: Sequence[tuple[int, str, float, Outcome, int, str | None]],
    ) -> None:
        of_samples, of_outcomes = self._writers
        if samples:
            of_samples.write_batch(gathered(samples, schema=self._schema))
        if outcomes:
            columns = zip(OUTCOMES, zip(*outcomes, strict=True), strict=True)
            arrays = [pa.array(values, type=field.type) for field, values in columns]
            of_outcomes.write_batch(pa.RecordBatch.from_arrays(arrays, schema=OUTCOMES))
        self._holds_rows = True

    def close(self) -> None:
        for writer in self._writers:
            writer.close()
        for file in self._files:
            file.close()

    def abandon(self) -> None:
        """After an error: closes the files as they are, and removes them if nothing is in them."""
        for file in self._files:
            try:
                file.close()
            except OSError as error:
                log.warning("closing the sample log: %s", error)
        if not self._holds_rows:
            for path in self._paths:
                path.unlink(missing_ok=True)


def _size(folder: Path, number: int) -> int:
    files = (path_of(folder, table, number) for table in ("samples", "outcomes"))
    return sum(path.stat().st_size for path in files if path.exists())


def _remove_outcomes(
    folder: Path, keep: Callable[[pa.Table], pa.ChunkedArray], *, without: int | None = None
) -> list[tuple[int, str, int]]:
    """Removes outcomes that `keep` does not keep from every segment but `without`; returns (seq,
    outcome, step) of the others. A file that holds something else stays as it is.

    A file is replaced whole: a crash in here leaves the old one or the new one.
    """
    kept: list[tuple[int, str, int]] = []
    for number in segments_in(folder):
        path = path_of(folder, "outcomes", number)
        if number == without:
            continue
        try:
            table = pa.Table.from_batches(read_batches(path), schema=OUTCOMES)
        except SegmentBroken as error:
            log.warning("%s %s; it is passed over", error.path, error.what)
            continue

        left = table.filter(keep(table))
        if left.num_rows < table.num_rows:
            partial = path.with_suffix(".partial")
            with pa.OSFile(str(partial), "wb") as file:
                options = pa.ipc.IpcWriteOptions(compression="zstd")
                with pa.ipc.new_stream(file, OUTCOMES, options=options) as writer:
                    writer.write_table(left)
            os.replace(partial, path)
        kept += zip(*(left[name].to_pylist() for name in ("seq", "outcome", "step")), strict=True)
    return kept

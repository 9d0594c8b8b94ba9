"""Writer of the sample log, in the controller's process: admissions, finished samples, and their
outcomes.

    controller --admitted, finished, trained, dropped, evaluated--> queue --thread--> RUN/samples/

Invariants, in addition to those of the files (samples/segments.py):
- the controller's loop only appends to a queue; one thread reads, converts and writes;
- the log never slows or ends the run. If the queue or the disk is full, rows of the log are lost;
  the run's events record that once, and the thread tries again later;
- rows queued FLUSH_S ago are in the file; all rows that a checkpoint's `position` counts are on
  disk (fsync) before the checkpoint is;
- `begin(position)` removes the outcomes after the checkpoint, so no sample counts as trained in two
  histories; the samples themselves stay;
- the log's mark (samples/frames.py) counts only rows that are on disk, and a file with fewer rows
  than its mark is not closed as if it were whole;
- the run's events record a damaged or missing file and a gap in `seq`. Such files stay as they are;
  only a torn tail is cut off;
- the log contains one evaluation of each version, however often it was begun;
- the segments use at most `keep_mib`, with the exceptions of log_retention.py.
"""

from __future__ import annotations

import itertools
import logging
import threading
import time
from collections import deque
from collections.abc import Callable, Iterable, Sequence
from pathlib import Path

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc

from megatron_async_rl.config.durable import write_file
from megatron_async_rl.config.schema import SamplesConfig
from megatron_async_rl.flow.log_retention import make_room
from megatron_async_rl.samples.columns import LOGGED, SCHEMA
from megatron_async_rl.samples.frames import (
    FOLDER,
    MARK_FILE,
    OPEN,
    TABLES,
    LogMark,
    SegmentBroken,
    file_of,
    finish,
    is_new,
    numbers_in,
    read_mark,
    replace_whole,
    require_checksums,
    require_intact,
)
from megatron_async_rl.samples.rows import SampleRow
from megatron_async_rl.samples.segments import (
    OUTCOMES,
    OpenSegment,
    OutcomeRow,
    SampleOutcome,
    gaps_in,
    payload_of,
    read_batches,
)
from megatron_async_rl.samples.types import Prompt
from megatron_async_rl.watchdog.events import note

log = logging.getLogger(__name__)

FLUSH_S = 1.0
RETRY_S = 60.0
CHECKPOINT_WAIT_S = 10.0
QUEUED = 100_000
"""Largest number of samples and outcomes in the thread's queue; further ones are lost."""
ROWS, TOKENS = 256, 2**18
"""Limits of one record batch, and so of the time for which the thread holds the interpreter."""

LogWrite = Callable[[], None]
SampleGroups = Sequence[Sequence[SampleRow]]
Ints = Sequence[int]


class SampleLog:
    """Log that keeps nothing (`samples.keep_mib: 0`) except the position."""

    def __init__(self) -> None:
        self._next_seq = 0

    @property
    def position(self) -> int:
        """Number of outcomes so far in the whole run, for the checkpoint."""
        return self._next_seq

    @property
    def mark(self) -> LogMark | None:
        """Extent of the log on disk, for the checkpoint; null without a log."""
        return None

    def begin(self, position: int, after: int = -1) -> None:
        """Continue from a checkpoint's `position`; 0: from the run's beginning. `after`: segment of
        the checkpoint's mark. New segments get higher numbers, even if the user moved the log away:
        otherwise the new log would look like a log that has lost its end."""
        self._next_seq = max(self._next_seq, position)

    def admitted(self, group: int, step: int) -> None:
        """Record that a group entered the buffer, or was restored from a checkpoint. `step`: the
        next step."""

    def finished(self, sample: SampleRow) -> None:
        """Record a response with its reward."""

    def trained(self, groups: Ints, batch: SampleGroups, step: int, parts: Ints = ()) -> None:
        """Record that the batch of optimizer step `step` was handed out. It consumes `groups` and
        trains on `batch`, the samples of each group, which with replay are other groups. `parts`:
        of the groups (TrainBatch)."""

    def group_dropped(self, group: int, step: int, reason: str) -> None:
        """Record that the group will not train. `step`: the next step."""

    def dropped(self, sample: SampleRow, step: int, reason: str) -> None:
        """Record that a finished response will not train. `step`: the next step."""

    def evaluated(
        self, answers: Sequence[tuple[Prompt, Sequence[SampleRow]]], version: int
    ) -> None:
        """Record a complete held-out evaluation."""

    def flush(self) -> None:
        """Wait until the queue is written, at most CHECKPOINT_WAIT_S. This call blocks, so it must
        not run on the event loop."""

    def close(self) -> None:
        """Write the queue and end the thread."""


class SampleLogWriter(SampleLog):
    """Log that writes segments to `run_dir`/samples, from `begin` on."""

    def __init__(self, run_dir: Path, settings: SamplesConfig, async_ratio: float = 0.0) -> None:
        """`async_ratio`: flow.async_ratio, which decides what log_retention.py keeps."""
        super().__init__()
        self._async_ratio = async_ratio
        self._run_dir, self._folder = run_dir, run_dir / FOLDER
        self._keep = settings.keep_mib * 2**20
        self._segment_size = settings.segment_mib * 2**20
        self._schema = SCHEMA if settings.experts else LOGGED
        self._queue: deque[LogWrite] = deque()
        self._wake, self._closing = threading.Event(), False
        self._thread = threading.Thread(target=self._write_on, name="sample log", daemon=True)

        # Only the thread uses the attributes below.
        self._samples: list[SampleRow] = []
        self._outcomes: list[OutcomeRow] = []
        self._segment: OpenSegment | None = None
        self._retry_at: float | None = None
        self._noted = self._exceeds = False
        self._damaged, self._evaluated_before = set[Path](), set[int]()
        self._highest, self._lost, self._tokens = -1, 0, 0
        self._mark: LogMark | None = None

    @property
    def mark(self) -> LogMark | None:
        return self._mark

    # On the controller's loop

    def begin(self, position: int, after: int = -1) -> None:
        super().begin(position)
        self._highest = after
        # Not here on the event loop, because a long run has millions of outcomes.
        self._put(lambda: self._take_up(position))
        self._thread.start()

    def admitted(self, group: int, step: int) -> None:
        self._put_outcomes([(group, None, None)], "admitted", step, None)

    def finished(self, sample: SampleRow) -> None:
        self._put(lambda: self._add_sample(sample), rows=1)

    def trained(self, groups: Ints, batch: SampleGroups, step: int, parts: Ints = ()) -> None:
        # By group and by sample: with replay, a batch trains on groups that it does not consume.
        self._put_outcomes([(group, None, None) for group in groups], "consumed", step, None, parts)
        subjects = [_subject(sample) for group in batch for sample in group]
        places = [place for place, group in enumerate(batch) for _ in group]
        self._put_outcomes(subjects, "trained", step, None, places)

    def group_dropped(self, group: int, step: int, reason: str) -> None:
        self._put_outcomes([(group, None, None)], "dropped", step, reason)

    def dropped(self, sample: SampleRow, step: int, reason: str) -> None:
        self._put_outcomes([_subject(sample)], "dropped", step, reason)

    def evaluated(
        self, answers: Sequence[tuple[Prompt, Sequence[SampleRow]]], version: int
    ) -> None:
        self._put(lambda: self._forget_evaluation(version))
        for _, samples in answers:
            for sample in samples:
                self.finished(sample)
            self._put_outcomes(map(_subject, samples), "evaluated", version, None)

    def flush(self) -> None:
        written = threading.Event()
        self._put(self._write)
        # After the rows: the mark counts only what is on the disk.
        self._put(self._sync)
        self._put(written.set)
        self._wake.set()
        if self._thread.is_alive() and not written.wait(CHECKPOINT_WAIT_S):
            self._note(
                f"the sample log was not on the disk within {CHECKPOINT_WAIT_S:g} s: after a crash"
                " of the machine it may lack rows that the checkpoint counts"
            )

    def close(self) -> None:
        self._closing = True
        self._wake.set()
        if self._thread.is_alive():
            self._thread.join(CHECKPOINT_WAIT_S)

    def _put(self, item: LogWrite, *, rows: int = 0) -> None:
        """Queue `item`. `rows`: number of rows lost if the queue is full; 0 queues it anyway."""
        if rows == 0 or len(self._queue) < QUEUED:
            self._queue.append(item)
        else:
            self._lost += rows
        if len(self._queue) >= QUEUED // 4:
            self._wake.set()

    def _put_outcomes(
        self,
        subjects: Iterable[_Subject],
        outcome: SampleOutcome,
        step: int,
        reason: str | None,
        places: Sequence[int] | None = None,
    ) -> None:
        """`places`: see OUTCOMES; null for none."""
        numbered = zip(itertools.count(self._next_seq), subjects, places or itertools.repeat(None))
        rows: list[OutcomeRow] = [
            (seq, group, name, finished_at, outcome, step, reason, place)
            for seq, (group, name, finished_at), place in numbered
        ]
        # Even if the queue is full: the gap in `seq` shows that rows were lost.
        self._next_seq += len(rows)
        self._put(lambda: self._outcomes.extend(rows), rows=len(rows))

    # In the thread

    def _write_on(self) -> None:
        closing = False
        while not closing:
            self._wake.wait(FLUSH_S)
            self._wake.clear()
            closing = self._closing  # before the queue: nothing is queued after `close`
            self._retry_at = None if closing else self._retry_at  # nothing tries again later
            self._take_queued()
        if self._segment is not None:
            try:
                self._close_segment(self._segment)
            except OSError as error:
                self._failed(error, 0)
        if self._lost:
            self._note_apart(f"the sample log ({self._folder}) ends without {self._lost} rows")

    def _take_queued(self) -> None:
        while self._queue:
            self._queue.popleft()()
        self._write()

    def _add_sample(self, sample: SampleRow) -> None:
        self._samples.append(sample)
        self._tokens += sample.total_length
        if len(self._samples) >= ROWS or self._tokens >= TOKENS:
            self._write()

    def _take_up(self, position: int) -> None:
        """Reduce the log of an earlier process to the history up to `position`."""
        try:
            try:
                require_checksums(self._folder)
            except SegmentBroken as error:
                self._note_damage(error)
            self._finish_open()
            for number in numbers_in(self._folder):
                try:
                    require_intact(self._folder, "samples", number)
                except SegmentBroken as error:
                    self._note_damage(error)
            seqs = self._change_outcomes(
                lambda batch: batch.filter(pc.less(batch["seq"], position))
            )
            self._note_gaps(seqs, position)
        except Exception as error:  # noqa: BLE001 - an error of the log must not end the run
            self._failed(error, 0)

    def _note_gaps(self, seqs: Sequence[np.ndarray], position: int) -> None:
        # The writer deletes the oldest segments, with their outcomes, to make space.
        whole = numbers_in(self._folder)[:1] in ([], [0])
        gaps = gaps_in(seqs, first=0 if whole else None, end=position)
        if gaps:
            self._note_apart(
                f"the sample log ({self._folder}) lacks outcomes {gaps}, which the checkpoint"
                " counts: files were deleted, rows could not be written, or the log was off;"
                " samples may be missing, or shown as waiting or lost"
            )

    def _finish_open(self) -> None:
        """Close files that were left open; leave damaged files unchanged."""
        try:
            mark = read_mark(self._run_dir)
        except SegmentBroken as error:
            self._note_damage(error)
            mark = None
        for path in sorted(self._folder.glob(f"*{OPEN}")):
            try:
                number = int(path.stem.rpartition("-")[2])
                if is_new(path) and any(
                    file_of(self._folder, table, number) is None for table in TABLES
                ):
                    # The process was killed after it had made only one of the two files.
                    path.unlink()
                    continue
                of_mark = mark is not None and mark.segment == number
                table = TABLES[path.name.startswith("outcomes")]
                finish(path, mark.batches(table) if of_mark and mark is not None else 0)
            except SegmentBroken as error:
                self._note_damage(error)
            except OSError as error:
                self._failed(error, 0)

    def _forget_evaluation(self, version: int) -> None:
        """Mark an evaluation as repeated, after a crash before its checkpoint."""
        if version not in self._evaluated_before:
            return

        def repeated(batch: pa.RecordBatch) -> pa.RecordBatch:
            of_it = pc.and_(
                pc.equal(batch["outcome"], "evaluated"), pc.equal(batch["step"], version)
            )
            # The rows stay, without their samples, because a gap in `seq` means lost rows.
            changed = {
                "id": pc.if_else(of_it, None, batch["id"]),
                "finished_at": pc.if_else(of_it, None, batch["finished_at"]),
                "outcome": pc.if_else(of_it, "repeated", batch["outcome"]),
            }
            columns = [changed.get(name, batch[name]) for name in OUTCOMES.names]
            return pa.RecordBatch.from_arrays(columns, schema=OUTCOMES)

        self._change_outcomes(repeated)

    def _change_outcomes(
        self, change: Callable[[pa.RecordBatch], pa.RecordBatch]
    ) -> list[np.ndarray]:
        """Change the outcomes of every segment except the present one; return the `seq` of each
        that remains.

        Reads batch by batch, and replaces only files that change. A damaged file stays unchanged:
        its readable part is not the whole file.
        """
        evaluated = set[int]()
        seqs: list[np.ndarray] = []
        for number in numbers_in(self._folder):
            if self._segment is not None and number == self._segment.number:
                continue
            kept: list[pa.RecordBatch] = []
            changed = False
            try:
                for _, batch in read_batches(self._folder, "outcomes", number):
                    left = change(batch)
                    changed = changed or not left.equals(batch)
                    kept.append(left)
                path = file_of(self._folder, "outcomes", number)
                if changed and path is not None:
                    replace_whole(path, map(payload_of, kept))
            except SegmentBroken as error:
                self._note_damage(error)
                continue
            except OSError as error:
                self._failed(error, 0)
                continue
            for left in kept:
                seqs.append(left["seq"].to_numpy())
                versions = left.filter(pc.equal(left["outcome"], "evaluated"))["step"]
                evaluated.update(versions.unique().to_pylist())
        self._evaluated_before = evaluated
        return seqs

    def _write(self) -> None:
        """Write samples before their outcomes, in one segment."""
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
                self._close_segment(self._segment)
        except Exception as error:  # noqa: BLE001 - an error of the log must not end the run
            self._failed(error, len(samples) + len(outcomes))
            return

        if self._lost:
            self._noted = False
            self._note(f"the sample log is written again; {self._lost} rows of it are missing")
            self._lost = 0
        self._retry_at, self._noted = None, False

    def _sync(self) -> None:
        if self._segment is None:  # a closed segment is on disk
            return
        try:
            self._segment.sync()
            self._set_mark(self._segment.mark(closed=False))
        except OSError as error:
            self._failed(error, 0)

    def _close_segment(self, segment: OpenSegment) -> None:
        mark = segment.mark(closed=True)
        segment.close()
        self._segment = None
        try:
            self._set_mark(mark)
        except OSError as error:  # the rows are on disk
            self._failed(error, 0)

    def _set_mark(self, mark: LogMark) -> None:
        write_file(self._run_dir / MARK_FILE, mark.text())
        self._mark = mark

    def _next_segment(self) -> OpenSegment:
        """Return a new segment, after deleting the oldest ones to make space."""
        self._folder.mkdir(parents=True, exist_ok=True)
        self._finish_open()  # files that could not be closed before
        too_large = make_room(self._run_dir, self._keep, self._segment_size, self._async_ratio)
        if too_large is not None and not self._exceeds:
            self._exceeds = True
            self._note_apart(too_large)
        self._highest = max([self._highest, *numbers_in(self._folder)]) + 1
        return OpenSegment(self._folder, self._highest, self._schema)

    def _failed(self, error: Exception, lost: int) -> None:
        """Close the present segment after its last whole batch, to try again later."""
        log.warning("the sample log cannot be written: %s", error, exc_info=True)
        self._lost += lost
        self._retry_at = time.monotonic() + RETRY_S
        segment, self._segment = self._segment, None
        if segment is not None:
            segment.abandon()
        self._note(
            f"the sample log ({self._folder}) cannot be written: {error}; the run continues without"
            f" it, and tries again every {RETRY_S:g} s"
        )

    def _note_damage(self, error: SegmentBroken) -> None:
        """Note damage once for each file."""
        if error.path in self._damaged:
            return
        self._damaged.add(error.path)
        log.error("%s", error)
        self._note_apart(f"{error}; the log continues in a new segment: {error.fix}")

    def _note_apart(self, text: str) -> None:
        """Note `text` even if another text was noted before."""
        noted, self._noted = self._noted, False
        self._note(text)
        self._noted = noted

    def _note(self, text: str) -> None:
        """Note `text` once, until the log is written again."""
        if self._noted:
            return
        try:
            note(self._run_dir, text)
            self._noted = True
        except OSError as error:  # the disk is still full: the next attempt reports it
            log.warning("%s (and not noted: %s)", text, error)


def open_sample_log(run_dir: Path, settings: SamplesConfig, async_ratio: float = 0.0) -> SampleLog:
    """Return the log that the configuration requests; no file changes before `begin`."""
    return SampleLogWriter(run_dir, settings, async_ratio) if settings.keep_mib else SampleLog()


_Subject = tuple[int, str | None, float | None]
"""Group, id and time; the last two are None for a whole group."""


def _subject(sample: SampleRow) -> _Subject:
    # The id of a response that trains again is its first id and a suffix (flow/scheduler.py).
    name = sample.id.partition("@")[0]
    return int(name.rpartition("-")[0]), name, sample.finished_at

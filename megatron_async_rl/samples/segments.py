"""The sample log on disk, `RUN/samples/`: its tables, their readers, and the segment that is being
written.

    samples-000007.segment     finished samples, one row each (columns.LOGGED; SCHEMA with experts)
    outcomes-000007.segment    outcomes of groups and of samples (OUTCOMES)
    samples-000008.open, outcomes-000008.open    the newest two, while they are being written

Invariants:
- every file consists of checksummed frames (frames.py), each an Arrow IPC stream with one record
  batch. A reader raises SegmentBroken for any damage; only the newest segment, while it is `.open`,
  may have a torn tail, behind the batches that the log's mark counts (frames.py);
- a segment has both files, with or without rows. A missing file is damage, with two exceptions: the
  samples of the oldest of several segments (`_next_segment` deletes them first), and a file that
  the writer has not made yet;
- a sample is one row, written when it finished, and is identified by (id, finished_at): a run that
  resumes requests again under ids that it used before;
- a resumed run writes a sample's row again if its checkpoint does not contain the reward of the
  sample's group: readers keep the newest row of a sample;
- every group has a row when it is admitted (again at each resume that restores it) and one when it
  ends: consumed, or dropped with a reason;
- the row of an outcome is in the segment of its sample or in a later one, so segments can be
  deleted oldest first, both files together, and no sample that remains loses its outcome;
- `seq` numbers the outcomes of the whole run; a resume removes those from its checkpoint's position
  on (flow/sample_log.py), so each outcome belongs to the one history that counts;
- nothing else removes an outcome from a segment, so a gap in `seq` means that rows were lost.
"""

from __future__ import annotations

import logging
from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc

from megatron_async_rl.samples.columns import LOGGED, ROUTED, SCHEMA, samples_of, with_experts
from megatron_async_rl.samples.frames import (
    FOLDER,
    OPEN,
    TABLES,
    FrameWriter,
    LogMark,
    SegmentBroken,
    TableName,
    file_of,
    numbers_in,
    path_of,
    present_file,
    read_frames,
    read_mark,
    segments_in,
    sync_folder,
)
from megatron_async_rl.samples.rows import SampleRow, gathered
from megatron_async_rl.samples.types import Sample

SampleOutcome = Literal["admitted", "consumed", "dropped", "trained", "evaluated", "repeated"]
OUTCOMES = pa.schema(
    [
        pa.field("seq", pa.int64(), nullable=False),
        pa.field("group", pa.int64(), nullable=False),
        pa.field("id", pa.string()),
        pa.field("finished_at", pa.float64()),
        pa.field("outcome", pa.string(), nullable=False),
        pa.field("step", pa.int64(), nullable=False),
        pa.field("reason", pa.string()),
        pa.field("place", pa.int32()),
    ]
)
"""Outcomes of groups and samples. A row without `id` describes a whole group: `admitted`,
`consumed` or `dropped`. The others describe one sample: `trained`, `dropped` or `evaluated`.
`step`: for `consumed` and `trained`, the optimizer step (its line in metrics.jsonl); for `admitted`
and `dropped`, the step that was next; for `evaluated`, the weight version. `reason`: for `dropped`.
`place`: for `trained`, the position in the batch of the sample's group; in the order of `seq`, the
rows of a step are its batch. For `consumed` with streamed groups, the group's part of the batch
(TrainBatch.parts). `repeated`, without `id`: a former `evaluated` row of an evaluation
that was repeated; it keeps its `seq`."""
_EARLIER_OUTCOMES = OUTCOMES.remove(OUTCOMES.get_field_index("place"))
"""Columns of logs of earlier versions."""

log = logging.getLogger(__name__)

_COMPRESSED = pa.ipc.IpcWriteOptions(compression="zstd")
KEY = ["id", "finished_at"]
"""Columns that identify a sample."""

SampleState = Literal["trained", "dropped", "evaluated", "waiting", "repeated", "lost"]
"""`waiting`: finished, and its group is still in the buffer (or, with replay, in the store).
`repeated`: after a crash, the resumed run has sampled it again. `lost`: after a crash, the resumed
run has not admitted its group."""


@dataclass(frozen=True, kw_only=True)
class Entry:
    """A sample in the log, without its text and tokens, which `load` reads."""

    segment: int
    batch: int
    row: int
    id: str
    finished_at: float
    group: int
    """Negative for held-out evaluation."""
    reward: float
    valid: bool
    state: SampleState
    steps: tuple[int, ...]
    """Optimizer steps that trained on it, in order (several with replay); for `dropped` the step
    that was next, for `evaluated` the version."""
    reason: str | None


def gaps_in(seqs: Sequence[np.ndarray], *, first: int | None, end: int = 0) -> str:
    """Return the numbers that `seqs` lacks, as text; empty if none. `first`: the lowest required
    number, if known; `end`: one more than the highest required number."""
    # The empty array gives the dtype if there are no outcomes.
    numbers = np.unique(np.concatenate([np.array([], np.int64), *seqs]))
    before = [] if first is None else [first - 1]
    after = [end] if end > max(numbers, default=-1) else []
    edges = np.concatenate([before, numbers, after]).astype(np.int64)
    ranges = [
        f"{edges[place] + 1} to {edges[place + 1] - 1}"
        for place in np.flatnonzero(np.diff(edges) > 1)
    ]
    more = [f"{len(ranges) - 5} more ranges"] if len(ranges) > 5 else []
    return ", ".join(ranges[:5] + more)


def read_batches(
    folder: Path,
    table: TableName,
    segment: int,
    columns: Sequence[str] | None = None,
    *,
    wanted: Collection[int] | None = None,
) -> Iterator[tuple[int, pa.RecordBatch]]:
    """Yield (number, record batch) of a segment's file, with all or some columns, of all batches or
    the wanted ones; nothing if the segment was deleted. Raises SegmentBroken."""
    # Try again after a rename; a second one cannot follow.
    for _ in range(2):
        path = present_file(folder, table, segment)
        if path is None:
            return
        torn, minimum = path.suffix == OPEN and segment == numbers_in(folder)[-1], 0
        if torn and (mark := read_mark(folder.parent)) is not None and mark.segment == segment:
            # If the mark counts it as closed, it was renamed and lost its end mark: damage.
            torn, minimum = not mark.closed, mark.batches(table)
        try:
            for number, payload in read_frames(path, torn=torn, wanted=wanted, minimum=minimum):
                yield number, _batch(path, table, payload, columns)
            return
        except FileNotFoundError:  # closed, or deleted, since
            continue


def payload_of(batch: pa.RecordBatch) -> bytes:
    """Return the payload of a frame."""
    sink = pa.BufferOutputStream()
    with pa.ipc.new_stream(sink, batch.schema, options=_COMPRESSED) as stream:
        stream.write_batch(batch)
    return sink.getvalue().to_pybytes()


def _batch(
    path: Path, table: TableName, payload: bytes, columns: Sequence[str] | None
) -> pa.RecordBatch:
    known = (LOGGED, SCHEMA) if table == "samples" else (OUTCOMES, _EARLIER_OUTCOMES)
    try:
        schema = pa.ipc.read_schema(pa.py_buffer(payload))
        if not any(schema.equals(one) for one in known):
            names = ", ".join(schema.names)
            raise SegmentBroken(path, f"has other columns than a log: {names}")
        options = pa.ipc.IpcReadOptions()
        if columns is not None:
            # Arrow then decompresses only these columns.
            options.included_fields = [schema.get_field_index(name) for name in columns]
        with pa.ipc.open_stream(payload, options=options) as stream:
            batch = stream.read_next_batch()
        if table == "outcomes" and columns is None and "place" not in batch.schema.names:
            batch = batch.append_column("place", pa.nulls(batch.num_rows, pa.int32())).cast(
                OUTCOMES
            )
        return batch
    except (pa.ArrowException, OSError, StopIteration) as error:
        raise SegmentBroken(path, f"holds something other than record batches: {error}") from error


class Outcomes:
    """Ends of samples and groups; `add` accepts rows of OUTCOMES. `whole`: the log's oldest segment
    still exists. `oldest`: the oldest group with a row `admitted`, if not all rows are added."""

    def __init__(self, *, whole: bool, oldest: int | None = None) -> None:
        self._whole = whole
        self._oldest = oldest
        self._of_samples: dict[tuple[str, float], list[_SampleEnd]] = {}
        self._dropped: dict[int, tuple[int, str | None]] = {}
        self._admitted: set[int] = set()

    def add(self, rows: Iterable[Mapping[str, Any]]) -> None:
        for one in rows:
            if one["id"] is not None:
                known = self._of_samples.setdefault((one["id"], one["finished_at"]), [])
                known.append((one["seq"], one["outcome"], one["step"], one["reason"]))
            elif one["outcome"] == "admitted":
                self._admitted.add(one["group"])
            elif one["outcome"] == "dropped":
                self._dropped[one["group"]] = (one["step"], one["reason"])

    def of(
        self, key: tuple[str, float], group: int, *, again: bool
    ) -> tuple[SampleState, tuple[int, ...], str | None]:
        """Return state, steps and reason of a sample. `again`: a newer row has the same id."""
        own = self._of_samples.get(key)
        if own:
            return resolve(own)
        # A newer row has this id, so this sample was sampled again.
        if again:
            return "repeated", (), None
        # First: it may read older segments, and the end of the group may be in one of them.
        admitted = self.admits(group)
        if group in self._dropped:
            # The resumed run removed the sample's own row with the history after its checkpoint.
            step, reason = self._dropped[group]
            return "dropped", (step,), reason
        return ("waiting" if admitted else "lost"), (), None

    def admits(self, group: int) -> bool:
        if group in self._admitted:
            return True
        oldest = min(self._admitted, default=group + 1) if self._oldest is None else self._oldest
        # Its row may be in a segment that was deleted.
        return not self._whole and 0 <= group < oldest


class _OutcomeHistory(Outcomes):
    """Outcomes, read from the newest segment backwards, as far as necessary."""

    def __init__(self, folder: Path, segments: Sequence[int]) -> None:
        super().__init__(whole=not segments or segments[0] == 0)
        self._folder = folder
        self._unread = list(segments)

    def read_back_to(self, segment: int) -> None:
        while self._unread and self._unread[-1] >= segment:
            self._read_one()

    def admits(self, group: int) -> bool:
        while group not in self._admitted and self._unread:
            self._read_one()
        return super().admits(group)

    def _read_one(self) -> None:
        for _, batch in read_batches(self._folder, "outcomes", self._unread.pop()):
            self.add(batch.to_pylist())


def read_entries(run_dir: Path) -> Iterator[Entry]:
    """Yield every sample in the log, newest first. A segment is read when the iteration reaches it,
    so the newest few samples cost little."""
    folder = run_dir / FOLDER
    segments = segments_in(folder)
    history = _OutcomeHistory(folder, segments)
    newer: dict[str, set[float]] = {}
    """Finishing times of the samples of each id that were read so far."""

    for segment in reversed(segments):
        # Outcomes first: rows that a running run adds in between are then read as `waiting`.
        history.read_back_to(segment)
        light = ("id", "group", "reward", "valid", "finished_at")
        # Without texts and tokens, which `load` reads for the selected samples.
        batches = dict(read_batches(folder, "samples", segment, light))
        for number in reversed(batches):
            for row, one in reversed(list(enumerate(batches[number].to_pylist()))):
                key = (one["id"], one["finished_at"])
                times = newer.setdefault(one["id"], set())
                if one["finished_at"] in times:
                    continue
                state, steps, reason = history.of(key, one["group"], again=bool(times))
                times.add(one["finished_at"])
                yield Entry(
                    segment=segment,
                    batch=number,
                    row=row,
                    state=state,
                    steps=steps,
                    reason=reason,
                    **one,
                )


def load(run_dir: Path, entries: Sequence[Entry]) -> list[tuple[Entry, Sample]]:
    """Return `entries` with their samples, without entries whose segment was deleted meanwhile."""
    folder = run_dir / FOLDER
    wanted: dict[int, dict[int, list[Entry]]] = {}
    for entry in entries:
        wanted.setdefault(entry.segment, {}).setdefault(entry.batch, []).append(entry)

    found: dict[tuple[int, int, int], Sample] = {}
    for segment, batches in wanted.items():
        for batch, read in read_batches(folder, "samples", segment, wanted=batches.keys()):
            rows = [entry.row for entry in batches[batch]]
            samples = samples_of(read.take(pa.array(rows)))
            found |= {
                (segment, batch, row): sample for row, sample in zip(rows, samples, strict=True)
            }
    return [
        (entry, found[place])
        for entry in entries
        if (place := (entry.segment, entry.batch, entry.row)) in found
    ]


def read_table(run_dir: Path, table: TableName) -> pa.Table:
    """Return one of the two tables, whole, for pandas, Polars or DuckDB; of `samples`, the newest
    row of each."""
    folder = run_dir / FOLDER
    batches = [
        batch
        for segment in segments_in(folder)
        for _, batch in read_batches(folder, table, segment)
    ]
    if table == "outcomes":
        return pa.Table.from_batches(batches, schema=OUTCOMES)
    if any(ROUTED in batch.schema.names for batch in batches):
        batches = [with_experts(batch) for batch in batches]
        return newest_rows(pa.Table.from_batches(batches, schema=SCHEMA))
    return newest_rows(pa.Table.from_batches(batches, schema=LOGGED))


def newest_rows(table: pa.Table) -> pa.Table:
    """Return the last row of each sample, in order, of a table whose rows have the order in which
    they were written."""
    places = pa.array(np.arange(table.num_rows))
    keys = table.select(KEY).append_column("place", places)
    last = keys.group_by(KEY).aggregate([("place", "max")])["place_max"]
    return table if len(last) == table.num_rows else table.filter(pc.is_in(places, last))


_SampleEnd = tuple[int, Literal["trained", "dropped", "evaluated"], int, str | None]
"""(seq, outcome, step, reason) of a sample."""


def resolve(
    outcomes: Sequence[_SampleEnd],
) -> tuple[SampleState, tuple[int, ...], str | None]:
    """Return state, steps and reason of a sample from its own rows of the other table, at least
    one."""
    # By `seq`, the first field of the tuples.
    in_order = sorted(outcomes)
    _, last, step, reason = in_order[-1]
    if last != "trained":
        return last, (step,), reason
    steps = (step for _, outcome, step, _ in in_order if outcome == "trained")
    return last, tuple(dict.fromkeys(steps)), None


OutcomeRow = tuple[int, int, str | None, float | None, SampleOutcome, int, str | None, int | None]
"""Row of OUTCOMES."""


class OpenSegment:
    """Both files of the segment that is being written.

    Both exist, or neither: a file without the other would count as damage. Rows are appended in
    whole batches; `abandon` leaves both files at their last whole batch.
    """

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

"""The sample log on disk, `RUN/samples/`, and how to read it.

    samples-000007.arrows     finished samples, one row each (columns.LOGGED; SCHEMA with experts)
    outcomes-000007.arrows    what became of samples (OUTCOMES)

Invariants:
- a sample is one row, written when it finished, and is known by (id, finished_at): a run that
  resumes asks again under ids it has used before;
- a resumed run writes the row of a sample again where its checkpoint does not know the reward of the
  sample's group: whoever reads keeps the newest row of a sample;
- the row of an outcome stands in the segment of its sample or in a later one, so segments can be
  deleted oldest first, both files at once, and no sample that is kept loses its outcome;
- `seq` numbers the outcomes of the whole run; a resume removes those from its checkpoint's position
  on (flow/sample_log.py), so each outcome belongs to the one history that counts;
- both files are Arrow IPC streams that may end within a record batch, because the run is writing it
  or was killed: all before that is read. What is no such stream raises SegmentBroken.
"""

from __future__ import annotations

import errno
import re
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc

from megatron_async_rl.samples.columns import LOGGED, ROUTED, SCHEMA, samples_of, with_experts
from megatron_async_rl.samples.types import Sample

FOLDER = "samples"
_NAME = re.compile(r"(samples|outcomes)-(\d{6,})\.arrows")

Outcome = Literal["trained", "dropped", "evaluated"]
OUTCOMES = pa.schema(
    [
        pa.field("seq", pa.int64(), nullable=False),
        pa.field("id", pa.string(), nullable=False),
        pa.field("finished_at", pa.float64(), nullable=False),
        pa.field("outcome", pa.string(), nullable=False),
        pa.field("step", pa.int64(), nullable=False),
        pa.field("reason", pa.string()),
    ]
)
"""`step`: of `trained`, the optimizer step (its line in metrics.jsonl); of `dropped`, the step that
was next; of `evaluated`, the weight version. `reason`: of `dropped`."""

KEY = ["id", "finished_at"]
"""Columns that a sample is known by."""

MARK = b"\xff\xff\xff\xff"
"""Begins every stream."""

State = Literal["trained", "dropped", "evaluated", "waiting", "repeated"]
"""`waiting`: finished and neither trained nor dropped so far. `repeated`: a crash came first, and
the resumed run has sampled it again."""


@dataclass(frozen=True, kw_only=True)
class Entry:
    """A sample in the log, without its text and tokens: `load` has those."""

    segment: int
    batch: int
    row: int
    id: str
    finished_at: float
    group: int
    """Negative: of held-out evaluation."""
    reward: float
    valid: bool
    state: State
    steps: tuple[int, ...]
    """Optimizer steps that trained on it, in order (several with replay); of `dropped` the step
    that was next, of `evaluated` the version."""
    reason: str | None


class SegmentBroken(ValueError):
    """A file of the log that holds something else."""

    def __init__(self, path: Path, what: str) -> None:
        super().__init__(path, what)
        self.path = path
        self.what = what


def path_of(folder: Path, table: Literal["samples", "outcomes"], segment: int) -> Path:
    """The file of one segment. `folder`: RUN/samples."""
    return folder / f"{table}-{segment:06d}.arrows"


def segments_in(folder: Path) -> list[int]:
    """Numbers of the segments in RUN/samples, oldest first; none without the folder."""
    if not folder.is_dir():
        return []
    found = (_NAME.fullmatch(path.name) for path in folder.iterdir())
    return sorted({int(match[2]) for match in found if match})


def read_batches(path: Path, columns: Sequence[str] | None = None) -> Iterator[pa.RecordBatch]:
    """The whole record batches of a file, with all columns or some. None where the file is gone.
    Raises SegmentBroken."""
    try:
        with pa.memory_map(str(path)) as source:
            options = pa.ipc.IpcReadOptions()
            schema = _schema(path, source)
            source.seek(0)
            if columns is not None:
                options.included_fields = [schema.get_field_index(name) for name in columns]
            yield from pa.ipc.open_stream(source, options=options)
    except (pa.ArrowException, OSError) as error:
        _require_early_end(path, error)


def read_entries(run_dir: Path) -> Iterator[Entry]:
    """Every sample in the log, newest first. Reads a segment when it comes to it, so the newest few
    cost little."""
    folder = run_dir / FOLDER
    outcomes: dict[tuple[str, float], list[tuple[int, Outcome, int, str | None]]] = {}
    newer: dict[str, set[float]] = {}
    """When the samples of each id that were read so far finished."""

    for segment in reversed(segments_in(folder)):
        # Outcomes first: what a running run adds in between is then read as `waiting`.
        for batch in read_batches(path_of(folder, "outcomes", segment)):
            for one in batch.to_pylist():
                known = outcomes.setdefault((one["id"], one["finished_at"]), [])
                known.append((one["seq"], one["outcome"], one["step"], one["reason"]))

        light = ("id", "group", "reward", "valid", "finished_at")
        batches = list(read_batches(path_of(folder, "samples", segment), light))
        for number in reversed(range(len(batches))):
            for row, one in reversed(list(enumerate(batches[number].to_pylist()))):
                key = (one["id"], one["finished_at"])
                times = newer.setdefault(one["id"], set())
                if one["finished_at"] in times:
                    continue
                state, steps, reason = resolve(outcomes.get(key, ()))
                if state == "waiting" and times:
                    state = "repeated"
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
    """`entries` with their samples, without those whose segment was deleted meanwhile."""
    folder = run_dir / FOLDER
    wanted: dict[int, dict[int, list[Entry]]] = {}
    for entry in entries:
        wanted.setdefault(entry.segment, {}).setdefault(entry.batch, []).append(entry)

    found: dict[tuple[int, int, int], Sample] = {}
    for segment, batches in wanted.items():
        for batch, read in _read_some(path_of(folder, "samples", segment), batches.keys()):
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


def read_table(run_dir: Path, table: Literal["samples", "outcomes"]) -> pa.Table:
    """One of the two tables, whole, for pandas, Polars or DuckDB; of `samples`, the newest row of
    each."""
    folder = run_dir / FOLDER
    batches = [
        batch
        for segment in segments_in(folder)
        for batch in read_batches(path_of(folder, table, segment))
    ]
    if table == "outcomes":
        return pa.Table.from_batches(batches, schema=OUTCOMES)
    if any(ROUTED in batch.schema.names for batch in batches):
        batches = [with_experts(batch) for batch in batches]
        return newest_rows(pa.Table.from_batches(batches, schema=SCHEMA))
    return newest_rows(pa.Table.from_batches(batches, schema=LOGGED))


def newest_rows(table: pa.Table) -> pa.Table:
    """The last row of each sample, in order, of rows in the order in which they were written."""
    places = pa.array(np.arange(table.num_rows))
    keys = table.select(KEY).append_column("place", places)
    last = keys.group_by(KEY).aggregate([("place", "max")])["place_max"]
    return table if len(last) == table.num_rows else table.filter(pc.is_in(places, last))


def _read_some(path: Path, numbers: Iterable[int]) -> Iterator[tuple[int, pa.RecordBatch]]:
    """Record batches of a file by their number; the others are passed over, not decompressed."""
    wanted = set(numbers)
    try:
        with pa.memory_map(str(path)) as source:
            schema = _schema(path, source)
            for number in range(max(wanted) + 1):
                message = pa.ipc.read_message(source)
                if number in wanted:
                    yield number, pa.ipc.read_record_batch(message, schema)
    except (pa.ArrowException, OSError, EOFError) as error:
        _require_early_end(path, error)


def _schema(path: Path, source: pa.MemoryMappedFile) -> pa.Schema:
    begin = source.read(len(MARK))
    if not MARK.startswith(begin):
        raise SegmentBroken(path, "is not an Arrow stream")
    source.seek(0)
    schema = pa.ipc.read_schema(source)
    known = (LOGGED, SCHEMA) if path.name.startswith("samples") else (OUTCOMES,)
    if not any(schema.equals(one) for one in known):
        raise SegmentBroken(path, f"has other columns than a log: {', '.join(schema.names)}")
    return schema


def _require_early_end(path: Path, error: Exception) -> None:
    """Arrow met the end of a file within a record batch, or the file was deleted. An error of the
    file system has a number; one of sizes that no memory has comes of changed bytes."""
    if isinstance(error, pa.ArrowMemoryError):
        raise SegmentBroken(path, "was changed after it was written") from error
    if isinstance(error, OSError) and error.errno not in (None, errno.ENOENT):
        raise error


def resolve(
    outcomes: Sequence[tuple[int, Outcome, int, str | None]],
) -> tuple[State, tuple[int, ...], str | None]:
    """State, steps and reason of a sample from its rows of the other table: (seq, outcome, step,
    reason)."""
    if not outcomes:
        return "waiting", (), None
    in_order = sorted(outcomes)
    _, last, step, reason = in_order[-1]
    if last != "trained":
        return last, (step,), reason
    steps = (step for _, outcome, step, _ in in_order if outcome == "trained")
    return last, tuple(dict.fromkeys(steps)), None

"""Train batches of past steps, from the sample log alone.

    outcomes of a step, by `seq` --> (id, finished_at), place --> rows of samples --> TrainBatch

Invariants:
- a batch has every sample that trained in its step, in the order of the batch: a gap in `seq` and a
  sample whose row is gone raise NotRecorded;
- of a sample that was written again by a resumed run, the batch has the newest row; it is in the
  segment of the sample's outcome or in an older one;
- reading a step costs the segments that hold its rows, however long the log is.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Callable, Collection, Sequence
from contextlib import suppress
from functools import cached_property
from pathlib import Path

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc

from megatron_async_rl.samples.columns import NUMERIC, ROUTED, SCHEMA
from megatron_async_rl.samples.frames import FOLDER, SegmentBroken, segments_in
from megatron_async_rl.samples.rows import TrainBatch
from megatron_async_rl.samples.segments import OUTCOMES, read_batches

CACHED_SEGMENTS = 4
"""Number of segments whose keys and outcomes stay in memory: the rows of consecutive steps are in
neighbouring ones."""
CACHED_BATCHES = 32
_OF_VERSIONS = ("evaluated", "repeated")
"""Outcomes whose `step` is not that of the next batch."""

_KEY = pa.schema([SCHEMA.field(name) for name in ("id", "finished_at")])
_SampleKey = tuple[str, float]
_BatchRow = tuple[int, int]


class NotRecorded(ValueError):
    """The log of a run does not have a step's batch. The message is a sentence."""


class RecordedBatches:
    """Batches of the run in `run_dir`. The log must not grow meanwhile. Raises SegmentBroken for
    damage that concerns a requested step, NotRecorded for a run without a log."""

    def __init__(self, run_dir: Path) -> None:
        self._run_dir = run_dir
        self._folder = run_dir / FOLDER
        self._segments = segments_in(self._folder)
        if not self._segments:
            raise NotRecorded(f"{run_dir} has no log of its samples (samples.keep_mib)")
        self._keys = OrderedDict[int, pa.Table]()
        """Columns id, finished_at, batch and row of the samples of a segment."""
        self._outcomes = OrderedDict[int, pa.Table]()
        """Outcomes with growing steps, by segment."""
        self._batches = OrderedDict[tuple[int, int], pa.RecordBatch]()

    @property
    def whole(self) -> bool:
        """True if no segment was deleted from the beginning."""
        return self._segments[0] == 0

    @cached_property
    def _first_steps(self) -> dict[int, int]:
        """Step at which each segment begins. Outcomes of batches and groups have growing steps. A
        segment without such outcomes, and a damaged one, are missing: both lie between others."""
        found: dict[int, int] = {}
        for segment in self._segments:
            with suppress(SegmentBroken):  # raised if a requested step may be in it
                for _, batch in read_batches(self._folder, "outcomes", segment):
                    step = pc.min(_growing(batch)["step"]).as_py()
                    if step is not None:
                        found[segment] = step
                        break
        return found

    @cached_property
    def last_step(self) -> int:
        """The newest step that trained, as far as segments can be read; 0 if none did."""
        for segment in reversed(self._segments):
            known: list[int] = []
            with suppress(SegmentBroken):  # raised if a step in it is requested
                for _, batch in read_batches(self._folder, "outcomes", segment):
                    trained = batch.filter(pc.equal(batch["outcome"], "trained"))
                    known += [step for step in [pc.max(trained["step"]).as_py()] if step]
            if known:
                return max(known)
        return 0

    def segment_of(self, step: int) -> int:
        """Return the segment in which the rows of a step begin."""
        return next(iter(self._segments_of(step)), self._segments[0])

    def _segments_of(self, step: int) -> list[int]:
        """Return the segments that may have rows of a step, oldest first. The first begins before
        the step; the next one behind them begins after it."""
        first, end = self._segments[0], self._segments[-1] + 1
        for segment, begins in self._first_steps.items():
            if begins < step:
                first = segment
            elif begins > step:
                end = segment
                break
        return [segment for segment in self._segments if first <= segment < end]

    def batch(self, step: int) -> TrainBatch:
        """Return the batch of an optimizer step, without text. Raises NotRecorded."""
        segment, outcomes, parts = self._outcomes_of(step)
        keys = list(
            zip(outcomes["id"].to_pylist(), outcomes["finished_at"].to_pylist(), strict=True)
        )
        rows = self._rows_of(keys, segment, step)
        columns = {
            name: rows[name] if name in rows.schema.names else pa.nulls(len(rows), field.type)
            for name, field in zip(NUMERIC.names, NUMERIC, strict=True)
        }
        # A group's number is its position in the batch, as when the batch was handed out.
        columns["group"] = outcomes["place"].cast(pa.int64()).combine_chunks()
        samples = pa.RecordBatch.from_arrays(
            [
                column.combine_chunks() if isinstance(column, pa.ChunkedArray) else column
                for column in columns.values()
            ],
            schema=NUMERIC,
        )
        return TrainBatch(version=step - 1, samples=samples, parts=parts)

    def has_experts(self) -> bool:
        """True if the log has the experts that engines chose (samples.experts)."""
        for segment in reversed(self._segments):
            for _, batch in read_batches(self._folder, "samples", segment):
                return ROUTED in batch.schema.names
        return False

    def _outcomes_of(self, step: int) -> tuple[int, pa.Table, tuple[int, ...]]:
        """Return the newest segment with outcomes of a step, its outcomes `trained` by `seq`, and
        the parts of its groups."""
        tables: list[pa.Table] = []
        newest = self._segments[0]
        for segment in self._segments_of(step):
            outcomes = self._growing_outcomes(segment)
            found = outcomes.filter(pc.equal(outcomes["step"], step))
            if len(found):
                tables.append(found)
                newest = segment
            # Later segments have later steps: damage there does not concern this one.
            if pc.any(pc.greater(outcomes["step"], step)).as_py():
                break
        if not tables:
            raise self._no_batch(step)
        table = pa.concat_tables(tables).sort_by("seq")
        ends = table.filter(pc.is_in(table["outcome"], pa.array(["consumed", "trained"])))
        trained = ends.filter(pc.equal(ends["outcome"], "trained"))
        if not len(trained):
            raise self._no_batch(step)
        seqs = ends["seq"].to_numpy()
        # A batch's rows are written together, so their numbers have no gap.
        lost = np.setdiff1d(np.arange(seqs[0], seqs[-1] + 1), table["seq"].to_numpy())
        # In the order of the batch's groups.
        consumed = ends.filter(pc.equal(ends["outcome"], "consumed"))
        if len(lost):
            raise self._missing(f"lacks outcomes {lost[0]} to {lost[-1]} of step {step}")
        if not len(consumed):
            raise self._missing(f"lacks the consumed groups of step {step}")
        if trained["place"].null_count:
            raise self._missing(
                f"was written by an earlier version, which did not record the group of each sample"
                f" of step {step}"
            )
        return newest, trained, tuple(consumed["place"].drop_null().to_pylist())

    def _rows_of(self, keys: Sequence[_SampleKey], newest: int, step: int) -> pa.Table:
        """Return the samples' rows in the order of `keys`. newest: segment of their outcomes."""
        where: dict[_SampleKey, tuple[int, int, int]] = {}
        wanted = set(keys)
        for segment in reversed(self._segments[: self._segments.index(newest) + 1]):
            known = self._places_in(segment, wanted)
            where |= {key: (segment, *place) for key, place in known.items()}
            wanted -= known.keys()
            if not wanted:
                break
        if wanted:
            name, _ = min(wanted)
            raise self._missing(
                f"lacks {len(wanted)} of the {len(keys)} samples of step {step}, such as {name}"
                + ("" if self.whole else ": older segments were deleted (samples.keep_mib)")
            )
        places = [where[key] for key in keys]
        parts: list[pa.Table] = []
        order: list[int] = []
        for batch in dict.fromkeys((segment, number) for segment, number, _ in places):
            at = [index for index, place in enumerate(places) if place[:2] == batch]
            rows = [places[index][2] for index in at]
            parts.append(pa.Table.from_batches([self._batch(*batch).take(pa.array(rows))]))
            order += at
        return pa.concat_tables(parts, promote_options="default").take(pa.array(np.argsort(order)))

    def _places_in(
        self, segment: int, wanted: Collection[_SampleKey]
    ) -> dict[_SampleKey, _BatchRow]:
        """Return the newest (batch, row) of the samples that are in a segment."""
        keys = self._keys_of(segment)
        # By arrow first: a dict of all samples takes seconds for a segment of short ones.
        names = pa.array([name for name, _ in wanted], _KEY.field("id").type)
        if not len(keys):
            return {}
        found = keys.filter(pc.is_in(keys["id"], names))
        columns = [found[name].to_pylist() for name in (*_KEY.names, "batch", "row")]
        # Later rows replace earlier ones of the same sample.
        return {
            (name, finished_at): (number, row)
            for name, finished_at, number, row in zip(*columns, strict=True)
            if (name, finished_at) in wanted
        }

    def _keys_of(self, segment: int) -> pa.Table:
        def keys() -> pa.Table:
            read = read_batches(self._folder, "samples", segment, _KEY.names)
            tables = [
                pa.Table.from_batches([batch])
                .append_column("batch", pa.array(np.full(batch.num_rows, number)))
                .append_column("row", pa.array(np.arange(batch.num_rows)))
                for number, batch in read
            ]
            # A segment that a running run has deleted has no batches.
            return pa.concat_tables(tables) if tables else _KEY.empty_table()

        return _cached(self._keys, segment, keys)

    def _growing_outcomes(self, segment: int) -> pa.Table:
        def outcomes() -> pa.Table:
            read = read_batches(self._folder, "outcomes", segment)
            batches = [_growing(batch) for _, batch in read]
            return pa.Table.from_batches(batches) if batches else OUTCOMES.empty_table()

        return _cached(self._outcomes, segment, outcomes)

    def _batch(self, segment: int, number: int) -> pa.RecordBatch:
        key = segment, number
        if key not in self._batches:
            for _, batch in read_batches(self._folder, "samples", segment, wanted={number}):
                names = [name for name in NUMERIC.names if name in batch.schema.names]
                self._batches[key] = batch.select(names)
            if key not in self._batches:  # a running run has deleted its segment
                raise self._missing(f"no longer has segment {segment}")
            if len(self._batches) > CACHED_BATCHES:
                self._batches.popitem(last=False)
        self._batches.move_to_end(key)
        return self._batches[key]

    def _no_batch(self, step: int) -> NotRecorded:
        begins = min(self._first_steps.values(), default=0)
        deleted = not self.whole and step <= begins
        why = ": its segment was deleted (samples.keep_mib)" if deleted else ""
        return self._missing(f"has no batch of step {step}{why}")

    def _missing(self, what: str) -> NotRecorded:
        return NotRecorded(f"{self._folder} {what}")


def _cached(
    cache: OrderedDict[int, pa.Table], segment: int, read: Callable[[], pa.Table]
) -> pa.Table:
    """Return the segment's table; keep those of the CACHED_SEGMENTS segments used last."""
    if segment not in cache:
        cache[segment] = read()
        if len(cache) > CACHED_SEGMENTS:
            cache.popitem(last=False)
    cache.move_to_end(segment)
    return cache[segment]


def _growing(batch: pa.RecordBatch) -> pa.RecordBatch:
    return batch.filter(pc.invert(pc.is_in(batch["outcome"], pa.array(_OF_VERSIONS))))

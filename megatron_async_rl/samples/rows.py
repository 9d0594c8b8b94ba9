"""Samples in the controller: rows of the record batches that engines report.

    EngineReport --rows_of--> SampleRow (scheduler, evaluation) --gathered--> record batch
                                                                              (TrainBatch, buffer,
                                                                               sample log)

Invariants:
- a row is never copied into an object: it holds the values that decisions need, and the position of
  the rest;
- no row keeps memory of Ray's object store alive: a report arrives as one piece of its own memory;
- no token of a train batch was sampled by weights newer than the batch's own version.
"""

from __future__ import annotations

import copy
import math
import pickle
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Literal

import numpy as np
import pyarrow as pa
from numpy.typing import NDArray

from megatron_async_rl.samples.columns import (
    SCHEMA,
    as_stream,
    batch_of,
    flat,
    from_stream,
    list_array,
    rows_of_lists,
    samples_of,
)
from megatron_async_rl.samples.types import Aborted, Prompt, Sample

StateName = Literal["running", "paused", "asleep"]


@dataclass(frozen=True, kw_only=True, eq=False)
class EngineReport:
    """Report of an engine since its previous one. Counts are since the engine started."""

    finished: pa.RecordBatch
    """Samples that finished, in the order in which they did, by SCHEMA."""
    aborted: tuple[Aborted, ...]
    state: StateName
    version: int
    """Version of the weights that sample the next token."""
    running: int
    """Requests sent to the engine and not yet finished or aborted."""
    tokens: int
    """Response tokens sampled, including those of aborted responses but not an environment's."""
    busy_s: float
    """Seconds in which at least one request was running and sampling was not paused."""
    silent_s: float
    """Seconds since vLLM's own process last answered."""
    generated: int = 0
    """Number of `tokens` that are for training, not for an evaluation."""
    sampling: bool = False
    """True if a response has grown since the last report, or an agent is working on one by itself;
    read only if nothing finished and nothing was aborted."""

    def __reduce__(self) -> tuple[Any, ...]:
        # As bytes, in one piece: Ray leaves buffers in its object store, which would keep every
        # report for as long as one of its samples waits.
        rest = {name: value for name, value in vars(self).items() if name != "finished"}
        return _report, (as_stream(self.finished).to_pybytes(), pickle.dumps(rest, protocol=5))


def _report(finished: bytes, rest: bytes) -> EngineReport:
    return EngineReport(finished=from_stream(finished), **pickle.loads(rest))


class SampleRow:
    """One row of a record batch with columns SCHEMA. `length`: response tokens; `total_length`:
    prompt and response tokens. `start_version`, `last_version`: the oldest and the newest version
    of its response tokens."""

    __slots__ = (
        "batch",
        "finished_at",
        "id",
        "last_version",
        "length",
        "prompt_id",
        "reward",
        "row",
        "start_version",
        "total_length",
        "truncated",
        "valid",
    )

    id: str
    prompt_id: str
    reward: float
    valid: bool
    truncated: bool
    length: int
    total_length: int
    start_version: int
    last_version: int
    finished_at: float
    batch: pa.RecordBatch
    row: int

    @property
    def response_ids(self) -> NDArray[np.int32]:
        """Response tokens: [length] int32, a view."""
        column = self.batch.column("response_ids")
        start = column.offsets[self.row].as_py()
        values: NDArray[np.int32] = column.values.to_numpy()[start : start + self.length]
        return values

    def sample(self) -> Sample:
        """Return the row as a Sample, for a message or a reward."""
        (sample,) = samples_of(self.batch.slice(self.row, 1))
        return sample

    @property
    def reward_parts(self) -> dict[str, float] | None:
        """A sample's `reward_parts`."""
        parts = self.batch.column("reward_parts")[self.row].as_py()
        return None if parts is None else dict(parts)

    def renamed(self, name: str) -> SampleRow:
        """Return the same row with the id `name`."""
        # The record batch is shared: only the id differs.
        other = copy.copy(self)
        other.id = name
        return other


def rows_of(batch: pa.RecordBatch) -> list[SampleRow]:
    """Return the rows of a record batch by SCHEMA, which they keep alive."""
    versions = batch.column("versions")
    starts = versions.offsets.to_numpy()
    # A sliced batch holds the values of all rows: the offsets bound those of the slice.
    tokens, lengths = versions.values.to_numpy()[: starts[-1]], np.diff(starts)
    totals = lengths + np.diff(batch.column("prompt_ids").offsets.to_numpy())
    columns = zip(
        batch.column("id").to_pylist(),
        batch.column("prompt_id").to_pylist(),
        batch.column("reward").to_pylist(),
        batch.column("valid").to_pylist(),
        batch.column("finish_reason").to_pylist(),
        batch.column("finished_at").to_pylist(),
        lengths.tolist(),
        totals.tolist(),
        *(
            extreme.reduceat(tokens, starts[:-1]).tolist() if len(lengths) else []
            for extreme in (np.minimum, np.maximum)
        ),
        strict=True,
    )
    rows = []
    for number, (name, prompt, reward, valid, reason, at, length, total, first, last) in enumerate(
        columns
    ):
        # __slots__ and plain attributes: a batch has tens of thousands of rows.
        row = SampleRow()
        row.batch, row.row = batch, number
        row.id, row.prompt_id = name, prompt
        row.reward, row.valid, row.truncated = reward, valid, reason == "length"
        row.length, row.total_length = length, total
        row.start_version, row.last_version = first, last
        row.finished_at = at
        rows.append(row)
    return rows


def gathered(
    rows: Sequence[SampleRow], groups: Sequence[int] | None = None, schema: pa.Schema = SCHEMA
) -> pa.RecordBatch:
    """Return a batch of the rows, in order, under their present ids. `groups`: number of each row's
    group, instead of its own. `schema`: SCHEMA, or NUMERIC if text is not needed."""
    if not rows:
        return pa.RecordBatch.from_pylist([], schema=schema)
    places: dict[int, list[int]] = {}
    for place, row in enumerate(rows):
        # By identity, so that rows of one report are taken from it together.
        places.setdefault(id(row.batch), []).append(place)
    parts = [_rows_of_one([rows[place] for place in part]) for part in places.values()]
    table = pa.Table.from_batches(parts).select(schema.names).combine_chunks()
    (whole,) = table.to_batches()
    come = np.concatenate(list(places.values()))
    # Rows of several reports are interleaved here: restore the requested order.
    if (np.diff(come) != 1).any():
        whole = whole.take(pa.array(np.argsort(come)))
    columns = dict(zip(schema.names, whole.columns, strict=True))
    columns["id"] = pa.array([row.id for row in rows], type=pa.string())
    if groups is not None:
        columns["group"] = pa.array(groups, type=pa.int64())
    return pa.RecordBatch.from_arrays(list(columns.values()), schema=schema)


def rescored(
    rows: Sequence[SampleRow],
    rewards: Sequence[float],
    parts: Sequence[Mapping[str, float] | None],
    errors: Sequence[str | None],
) -> list[SampleRow]:
    """Return the rows with these rewards instead of their own. If a sample has step rewards, the
    difference is added to its last token; a row with an error has none."""
    steps: list[NDArray[np.float32] | None] = []
    batch, rewards = gathered(rows), list(rewards)
    given = rows_of_lists(batch.column("step_rewards"))
    for place, (row, error, old) in enumerate(zip(rows, errors, given, strict=True)):
        new = None if old is None or error is not None else old.copy()
        if new is not None:
            # Added to the last token, so that the sum is the new reward.
            new[-1] += rewards[place] - row.reward
            exact = float(np.sum(new, dtype=np.float64))
            if not math.isclose(rewards[place], exact, rel_tol=1e-6, abs_tol=1e-6):
                rewards[place] = exact  # the written reward equals the sum of its steps
        steps.append(new)
    changed = {
        "step_rewards": list_array(steps, SCHEMA.field("step_rewards").type),
        "reward": pa.array(rewards, pa.float64()),
        "reward_parts": pa.array(
            [None if one is None else list(one.items()) for one in parts],
            SCHEMA.field("reward_parts").type,
        ),
        "reward_error": pa.array(errors, pa.string()),
        "valid": pa.array([error is None for error in errors], pa.bool_()),
    }
    columns = [changed.get(name, batch.column(name)) for name in SCHEMA.names]
    return rows_of(pa.RecordBatch.from_arrays(columns, schema=SCHEMA))


def _rows_of_one(rows: Sequence[SampleRow]) -> pa.RecordBatch:
    """Return the rows of one record batch, in order, without copying the rest of it."""
    batch, wanted = rows[0].batch, [row.row for row in rows]
    return batch if wanted == list(range(batch.num_rows)) else batch.take(pa.array(wanted))


@dataclass(frozen=True, eq=False)
class SampleGroup:
    """Finished responses to one prompt. `index`: order of admission, from 0 over the whole run."""

    index: int
    prompt: Prompt
    samples: tuple[SampleRow, ...]


@dataclass(frozen=True, kw_only=True, eq=False)
class TrainBatch:
    """The samples that one optimizer step consumes. `samples`: by NUMERIC or SCHEMA, with the
    samples of a group together; `group` is the position of a group in the batch. `version`: the
    weights that will be trained. Raises ValueError for a token of a newer version.

    With streamed groups, the gradient of a step is the sum over the parts of its batch. `parts`:
    the part of each group, from 0 in the order of the sum; empty if the batch is one part.
    `complete`: False for a single part, which other parts of the batch will follow."""

    version: int
    samples: pa.RecordBatch
    parts: tuple[int, ...] = ()
    complete: bool = True

    def __post_init__(self) -> None:
        versions, lengths = flat(self.samples.column("versions"))
        # A token from the future means that version numbers were mixed up.
        newer = np.flatnonzero(versions > self.version)
        if len(newer):
            row = int(np.searchsorted(np.cumsum(lengths), newer[0], side="right"))
            raise ValueError(
                f"sample {self.samples.column('id')[row].as_py()!r} was sampled by version"
                f" {versions[newer[0]]}, newer than the batch's {self.version}"
            )

    @classmethod
    def of(cls, version: int, groups: Iterable[Sequence[Sample]]) -> TrainBatch:
        """Return the batch of the samples of `groups`, group by group."""
        # From here on, groups are numbered by their position in the batch.
        numbered = [(sample, place) for place, group in enumerate(groups) for sample in group]
        return cls(
            version=version,
            samples=batch_of([one for one, _ in numbered], [place for _, place in numbered]),
        )

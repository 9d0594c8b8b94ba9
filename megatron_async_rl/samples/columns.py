"""The only form of samples in transit: Arrow record batches with one schema.

An engine reports such batches, the controller stores and hands out their rows (rows.py), checkpoint
and sample log consist of them, and a data-parallel rank gets its own rows of the numeric columns
(rank_batch.py). Python objects (`Sample`) exist only at the edges.

Invariants:
- one row is one sample; per-token columns of a row have the length of its `response_ids`;
- `batch_of` and `samples_of` are inverse: dtype and value of arrays and every bit of numbers are
  preserved;
- `NUMERIC` contains the columns that training reads: no text, no fields. A trainer rank gets them
  as `RankBatch`.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping, Sequence
from operator import attrgetter, itemgetter
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc
from numpy.typing import NDArray

from megatron_async_rl.samples.types import FinishReason, Prompt, Sample, check_response

NUMERIC = pa.schema(
    [
        pa.field("id", pa.string(), nullable=False),
        pa.field("group", pa.int64(), nullable=False),
        pa.field("prompt_ids", pa.list_(pa.int32()), nullable=False),
        pa.field("response_ids", pa.list_(pa.int32()), nullable=False),
        pa.field("behavior_logprobs", pa.list_(pa.float32()), nullable=False),
        pa.field("versions", pa.list_(pa.int32()), nullable=False),
        pa.field("loss_mask", pa.list_(pa.uint8()), nullable=False),
        pa.field("step_rewards", pa.list_(pa.float32())),
        pa.field("segment_starts", pa.list_(pa.int32())),
        # large_binary: the routed experts of a batch may exceed 2 GiB.
        pa.field("routed_experts", pa.large_binary()),
        pa.field("reward", pa.float64(), nullable=False),
        pa.field("reward_parts", pa.map_(pa.string(), pa.float64())),
        pa.field("weight", pa.float64(), nullable=False),
        pa.field("valid", pa.bool_(), nullable=False),
        pa.field("finish_reason", pa.string(), nullable=False),
    ]
)
"""Columns that training reads."""

SCHEMA = pa.schema(
    [
        *NUMERIC,
        pa.field("prompt_id", pa.string(), nullable=False),
        pa.field("prompt_text", pa.large_string(), nullable=False),
        pa.field("fields", pa.large_string(), nullable=False),
        pa.field("text", pa.large_string(), nullable=False),
        pa.field("reward_error", pa.string()),
        pa.field("engine", pa.int32(), nullable=False),
        pa.field("started_at", pa.float64(), nullable=False),
        pa.field("finished_at", pa.float64(), nullable=False),
    ]
)
"""All columns of a sample. `fields`: the prompt's other keys, as JSON. Times are Unix seconds. Text
columns are large_string, because a batch's texts may exceed the 2 GiB of a `string` column."""
ROUTED = "routed_experts"
LOGGED = SCHEMA.remove(SCHEMA.get_field_index(ROUTED))
"""Columns of the sample log, unless `samples.experts` keeps all: routed experts are most of the
bytes of a mixture-of-experts model, and only recomputing a step reads them from the log."""


_COLUMNS: dict[str, Callable[[Sample], Any]] = {
    "prompt_ids": lambda sample: sample.prompt.token_ids,
    "prompt_id": lambda sample: sample.prompt.id,
    "prompt_text": lambda sample: sample.prompt.text,
    # JSON, because fields differ from row to row and a schema does not.
    "fields": lambda sample: json.dumps(dict(sample.prompt.fields)),
    "reward_parts": lambda sample: (
        None if sample.reward_parts is None else list(sample.reward_parts.items())
    ),
}
"""Columns that are not an attribute of a sample."""


def batch_of(
    samples: Sequence[Sample], groups: Sequence[int], schema: pa.Schema = SCHEMA
) -> pa.RecordBatch:
    """Return one row per sample, in order. `groups`: number of each sample's group. `schema`:
    SCHEMA, or NUMERIC if text is not needed."""
    columns = {
        name: [_COLUMNS.get(name, attrgetter(name))(sample) for sample in samples]
        for name in schema.names
        if name != "group"
    }
    return _record_batch(columns | {"group": groups}, schema)


class SampleColumns:
    """Finished responses of an engine's report, collected column by column without a `Sample` for
    each.

    Not thread-safe: `append` and `take` belong to one event loop.
    """

    def __init__(self) -> None:
        self._rows: list[tuple[Any, ...]] = []
        """Values in the order of SCHEMA."""
        # Serialised once per prompt: a group's responses share it.
        self._prompts: dict[str, tuple[Prompt, NDArray[np.int32], str]] = {}
        """Last prompt of each id, with its token ids and its fields as JSON. Many rows share a
        prompt, but two prompts of one id may differ if the data changed before a resume."""

    def __len__(self) -> int:
        return len(self._rows)

    def append(
        self,
        *,
        id: str,
        group: int,
        prompt: Prompt,
        response_ids: NDArray[np.int32],
        behavior_logprobs: NDArray[np.float32],
        versions: NDArray[np.int32],
        loss_mask: NDArray[np.uint8],
        text: str,
        finish_reason: FinishReason,
        reward: float,
        reward_error: str | None = None,
        reward_parts: Mapping[str, float] | None = None,
        weight: float = 1.0,
        step_rewards: NDArray[np.float32] | None = None,
        segment_starts: NDArray[np.int32] | None = None,
        routed_experts: bytes | None = None,
        engine: int = 0,
        started_at: float = 0.0,
        finished_at: float = 0.0,
    ) -> None:
        """Append a row. Raises ValueError, and appends nothing, for a row that a `Sample` could not
        hold."""
        per_token: dict[str, NDArray[Any]] = {
            "behavior_logprobs": behavior_logprobs,
            "versions": versions,
            "loss_mask": loss_mask,
        }
        # Before anything is stored: a rejected row leaves the others as they are.
        check_response(
            id,
            response_ids,
            per_token,
            reward,
            reward_error,
            step_rewards,
            prompt_length=len(prompt.token_ids),
            routed_experts=routed_experts,
            segment_starts=segment_starts,
        )
        if prompt.id not in self._prompts or self._prompts[prompt.id][0] is not prompt:
            ids = np.array(prompt.token_ids, dtype=np.int32)
            self._prompts[prompt.id] = prompt, ids, json.dumps(dict(prompt.fields))
        _, prompt_ids, fields = self._prompts[prompt.id]
        row = {
            "id": id,
            "group": group,
            "prompt_ids": prompt_ids,
            "response_ids": response_ids,
            **per_token,
            "step_rewards": step_rewards,
            "segment_starts": segment_starts,
            "routed_experts": routed_experts,
            "reward": reward,
            "reward_parts": None if reward_parts is None else list(reward_parts.items()),
            "weight": weight,
            "valid": reward_error is None,
            "finish_reason": finish_reason,
            "prompt_id": prompt.id,
            "prompt_text": prompt.text,
            "fields": fields,
            "text": text,
            "reward_error": reward_error,
            "engine": engine,
            "started_at": started_at,
            "finished_at": finished_at,
        }
        self._rows.append(_in_order(row))

    def take(self) -> pa.RecordBatch:
        """Return and forget the rows so far, by SCHEMA, in the order in which they were
        appended."""
        # Swapped, so that rows appended from here on go into the next report.
        rows, self._rows = self._rows, []
        # Cleared, because prompts must not outlive their rows.
        self._prompts.clear()
        columns = zip(*rows, strict=True) if rows else ((),) * len(SCHEMA)
        return _record_batch(dict(zip(SCHEMA.names, columns, strict=True)), SCHEMA)


_in_order = itemgetter(*SCHEMA.names)


def _record_batch(columns: Mapping[str, Sequence[Any]], schema: pa.Schema) -> pa.RecordBatch:
    return pa.RecordBatch.from_arrays(
        [
            list_array(columns[field.name], field.type)
            if pa.types.is_list(field.type)
            else pa.array(columns[field.name], type=field.type)
            for field in schema
        ],
        schema=schema,
    )


def list_array(rows: Sequence[Any], kind: pa.ListType) -> pa.ListArray:
    """Return a list column with one array or sequence of numbers per row; null where the row is
    None. Raises TypeError for an array of another dtype, whose values might not fit."""
    dtype = np.dtype(kind.value_type.to_pandas_dtype())
    present = [
        # Arrays are used as they are; only plain sequences are converted.
        row if isinstance(row, np.ndarray) else np.array(row, dtype=dtype)
        for row in rows
        if row is not None
    ]
    for row in present:
        # A silent cast could change a log-prob or a version.
        if row.dtype != dtype:
            raise TypeError(f"an array of {row.dtype}, and the column is of {dtype}")
    starts = np.zeros(len(rows) + 1, dtype=np.int32)
    # A null row has no values.
    np.cumsum([0 if row is None else len(row) for row in rows], out=starts[1:])
    missing = None if len(present) == len(rows) else pa.array([row is None for row in rows])
    values = np.concatenate(present) if present else np.zeros(0, dtype=dtype)
    return pa.ListArray.from_arrays(pa.array(starts), pa.array(values), type=kind, mask=missing)


def flat(column: pa.ListArray) -> tuple[NDArray[Any], NDArray[np.int64]]:
    """Return the values of a list column's rows, one row after another, and each row's length; a
    null row has none."""
    # int64: sums over a batch exceed 2^31.
    if column.null_count:
        lengths = pc.fill_null(pc.list_value_length(column), 0).to_numpy().astype(np.int64)
    else:
        # A quarter of the time. The offsets of a null row may enclose values.
        lengths = np.diff(column.offsets.to_numpy()).astype(np.int64)
    return column.flatten().to_numpy(), lengths


def row_starts(lengths: NDArray[np.int64]) -> NDArray[np.int64]:
    """Return the offset of each row in the values of `flat`, and the end: [S + 1]."""
    return np.concatenate(([0], np.cumsum(lengths)))


def value_rows(lengths: NDArray[np.int64]) -> NDArray[np.int64]:
    """Return the row of each value of `flat`: [N]."""
    return np.repeat(np.arange(len(lengths)), lengths)


def spans(starts: NDArray[np.int64], lengths: NDArray[np.int64]) -> NDArray[np.int64]:
    """Return the indices starts[0], ..., starts[0] + lengths[0] - 1, starts[1], ... of several
    spans, one after another."""
    # Without a loop: batches have millions of tokens.
    before = np.cumsum(lengths) - lengths
    return np.repeat(starts - before, lengths) + np.arange(lengths.sum(), dtype=np.int64)


def as_stream(batch: pa.RecordBatch) -> pa.Buffer:
    """Return the bytes of an Arrow stream: the schema and the rows of `batch`, without the rest of
    the buffers of a slice."""
    sink = pa.BufferOutputStream()
    with pa.ipc.new_stream(sink, batch.schema) as stream:
        # The IPC writer cuts a slice's buffers to its rows.
        stream.write_batch(batch)
    return sink.getvalue()


def from_stream(content: bytes | pa.Buffer) -> pa.RecordBatch:
    """Return the record batch that was passed to `as_stream`, as views that keep `content`
    alive."""
    with pa.ipc.open_stream(content) as stream:
        return stream.read_next_batch()


def samples_of(batch: pa.RecordBatch) -> list[Sample]:
    """Return the rows, by SCHEMA or LOGGED, as objects. Prompts are rebuilt, one for each
    `prompt_id` and text."""
    prompts: dict[tuple[str, str], Prompt] = {}
    arrays = {
        name: rows_of_lists(batch.column(name))
        for name in (
            "prompt_ids",
            "response_ids",
            "behavior_logprobs",
            "versions",
            "loss_mask",
            "step_rewards",
            "segment_starts",
        )
    }
    # Rows of a log without routed experts get the column, with nulls.
    batch = with_experts(batch)
    plain = {name: batch.column(name).to_pylist() for name in SCHEMA.names if name not in arrays}
    samples = []
    for row in range(batch.num_rows):
        # An environment may give each sample of a prompt a different text.
        known = prompt_id, text = plain["prompt_id"][row], plain["prompt_text"][row]
        if known not in prompts:
            prompts[known] = Prompt(
                id=prompt_id,
                text=text,
                token_ids=tuple(_present(arrays["prompt_ids"][row]).tolist()),
                fields=json.loads(plain["fields"][row]),
            )
        samples.append(
            Sample(
                id=plain["id"][row],
                prompt=prompts[known],
                response_ids=_present(arrays["response_ids"][row]),
                behavior_logprobs=_present(arrays["behavior_logprobs"][row]),
                versions=_present(arrays["versions"][row]),
                loss_mask=_present(arrays["loss_mask"][row]),
                step_rewards=arrays["step_rewards"][row],
                segment_starts=arrays["segment_starts"][row],
                routed_experts=plain["routed_experts"][row],
                text=plain["text"][row],
                finish_reason=plain["finish_reason"][row],
                reward=plain["reward"][row],
                reward_error=plain["reward_error"][row],
                reward_parts=None if (parts := plain["reward_parts"][row]) is None else dict(parts),
                weight=plain["weight"][row],
                engine=plain["engine"][row],
                started_at=plain["started_at"][row],
                finished_at=plain["finished_at"][row],
            )
        )
    return samples


def with_experts(batch: pa.RecordBatch) -> pa.RecordBatch:
    """Return a batch with columns LOGGED as a batch with columns SCHEMA."""
    if ROUTED in batch.schema.names:
        return batch
    columns = {name: batch.column(name) for name in batch.schema.names}
    # One schema for readers, whatever the log contains.
    columns[ROUTED] = pa.nulls(batch.num_rows, pa.large_binary())
    return pa.RecordBatch.from_arrays([columns[name] for name in SCHEMA.names], schema=SCHEMA)


def rows_of_lists(column: pa.ListArray) -> list[np.ndarray | None]:
    """Return the lists of a column as views of its values; None for a null row."""
    offsets, values = column.offsets.to_numpy(), column.values.to_numpy()
    present = column.is_valid().to_numpy(zero_copy_only=False)
    return [
        # Views: nothing is copied per sample.
        values[offsets[row] : offsets[row + 1]] if present[row] else None
        for row in range(len(column))
    ]


def _present(row: np.ndarray | None) -> np.ndarray:
    assert row is not None
    return row

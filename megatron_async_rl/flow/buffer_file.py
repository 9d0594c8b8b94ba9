"""A buffer as bytes, to be a file of a checkpoint: two Arrow streams, read back without running
code, and a check sum.

    samples     one row each, by columns.SCHEMA, group by group, then the replay store's; the
                schema's metadata has `about`: JSON with the groups, each prompt once
    beginnings  one row for each partial response (PARTIALS), in the order of `about`
    check sum   CRC-32 of all before it, 4 bytes

Invariant: what `read` returns of what `written` made is the same, arrays to dtype and value,
numbers to the last bit. A file from before samples had routed experts is read as one without any.
"""

from __future__ import annotations

import json
import zlib
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import pyarrow as pa

from megatron_async_rl.config.problem import UserError
from megatron_async_rl.flow.buffer import Buffer, GroupState
from megatron_async_rl.samples.columns import (
    LOGGED,
    ROUTED,
    SCHEMA,
    list_array,
    rows_of_lists,
    with_experts,
)
from megatron_async_rl.samples.rows import SampleRow, gathered, rows_of
from megatron_async_rl.samples.types import PartialResponse, Prompt, Request

NAME = "buffer.arrow"
EARLIER_NAME = "buffer.npz"
"""Name of the file before samples were columns; it cannot be read any more."""
CHECK_SUM_BYTES = 4
ROWS = 1024
"""Limit for a record batch: a row that waits longer than the others keeps all of its batch."""

PARTIALS = pa.schema(
    [
        pa.field("response_ids", pa.list_(pa.int32()), nullable=False),
        pa.field("behavior_logprobs", pa.list_(pa.float32()), nullable=False),
        pa.field("versions", pa.list_(pa.int32()), nullable=False),
        pa.field(ROUTED, pa.large_binary()),
    ]
)


class BufferBroken(UserError):
    """The file is damaged, or not a buffer."""


def earlier() -> BufferBroken:
    """The error for a checkpoint whose buffer has an earlier file format."""
    return BufferBroken.of(
        "run.dir",
        f"{EARLIER_NAME} of the checkpoint is of an earlier version and cannot be read",
        "remove the file, and what it held is sampled again",
    )


def written(buffer: Buffer) -> bytes:
    prompts = _Prompts()
    rows: list[SampleRow] = []
    partials: list[PartialResponse] = []

    def group(state: GroupState) -> dict[str, Any]:
        rows.extend(state.samples)
        for request in state.open.values():
            if request.prefix is not None:
                partials.append(request.prefix)
        return {
            "index": state.index,
            "prompt": prompts.place(state.prompt),
            "version": state.version,
            "deadline": state.deadline,
            "finished": state.finished,
            "samples": len(state.samples),
            "open": [[one.k, one.prefix is not None] for one in state.open.values()],
        }

    def stored(prompt: Prompt, samples: tuple[SampleRow, ...]) -> dict[str, Any]:
        rows.extend(samples)
        return {"prompt": prompts.place(prompt), "samples": len(samples)}

    about = {
        "groups": [group(state) for state in buffer.groups],
        "stored": [stored(*one) for one in buffer.stored],
        "equal": buffer.equal,
        "first_versions": buffer.first_versions,
        "prompts": [prompt_fields(prompt) for prompt in prompts.all],
    }
    beginnings = [
        pa.array(values, field.type) if field.name == ROUTED else list_array(values, field.type)
        for field in PARTIALS
        for values in ([getattr(one, field.name) for one in partials],)
    ]
    sink = pa.BufferOutputStream()
    # Compressed: the samples of a group have their prompt each.
    options = pa.ipc.IpcWriteOptions(compression="zstd")
    schema = SCHEMA.with_metadata({"about": json.dumps(about)})
    with pa.ipc.new_stream(sink, schema, options=options) as stream:
        for start in range(0, len(rows), ROWS):
            stream.write_batch(gathered(rows[start : start + ROWS]))
    with pa.ipc.new_stream(sink, PARTIALS, options=options) as stream:
        stream.write_batch(pa.RecordBatch.from_arrays(beginnings, schema=PARTIALS))
    content = sink.getvalue().to_pybytes()
    return content + zlib.crc32(content).to_bytes(CHECK_SUM_BYTES)


def read(content: bytes) -> Buffer:
    """Raises BufferBroken."""
    try:
        whole, check_sum = content[:-CHECK_SUM_BYTES], content[-CHECK_SUM_BYTES:]
        if zlib.crc32(whole) != int.from_bytes(check_sum):
            raise ValueError("its check sum does not hold")
        source = pa.BufferReader(whole)
        # Each to its end, where the next one begins.
        samples = pa.ipc.open_stream(source)
        if not any(samples.schema.equals(known) for known in (SCHEMA, LOGGED)):
            raise ValueError("its columns are others than a sample's")
        batches = list(samples)
        (partials,) = pa.ipc.open_stream(source)
        return _buffer(json.loads(samples.schema.metadata[b"about"]), batches, partials)
    except (ValueError, LookupError, TypeError, RuntimeError, pa.ArrowException) as error:
        raise BufferBroken.of(
            "run.dir",
            f"{NAME} of the checkpoint cannot be read ({type(error).__name__}: {error})",
            "resume with the release that wrote it; in a checkpoint without digests you may remove"
            " the file, and what it held is sampled again",
        ) from error


def _buffer(
    about: Mapping[str, Any], batches: Sequence[pa.RecordBatch], partials: pa.RecordBatch
) -> Buffer:
    prompts = [prompt_of(one) for one in about["prompts"]]
    rows = (
        row
        for batch in batches
        for row in rows_of(with_experts(batch.replace_schema_metadata(None)))
    )
    columns = (
        partials.column(name).to_pylist()
        if name == ROUTED
        else rows_of_lists(partials.column(name))
        for name in partials.schema.names
    )
    beginnings = (
        PartialResponse(**dict(zip(partials.schema.names, values, strict=True)))
        for values in zip(*columns, strict=True)
    )
    groups = tuple(_group(one, prompts, rows, beginnings) for one in about["groups"])
    stored = tuple(
        (prompts[one["prompt"]], tuple(next(rows) for _ in range(one["samples"])))
        for one in about["stored"]
    )
    if next(rows, None) is not None or next(beginnings, None) is not None:
        raise ValueError("it holds more samples than its groups have")
    return Buffer(
        groups=groups,
        stored=stored,
        equal=tuple(about["equal"]),
        first_versions=tuple(about["first_versions"]),
    )


def _group(
    one: Mapping[str, Any],
    prompts: list[Prompt],
    rows: Iterator[SampleRow],
    beginnings: Iterator[PartialResponse],
) -> GroupState:
    prompt, index = prompts[one["prompt"]], one["index"]
    requested = [
        Request(group=index, k=k, prompt=prompt, prefix=next(beginnings) if begun else None)
        for k, begun in one["open"]
    ]
    return GroupState(
        index=index,
        prompt=prompt,
        version=one["version"],
        deadline=one["deadline"],
        finished=one["finished"],
        samples=[next(rows) for _ in range(one["samples"])],
        open={request.id: request for request in requested},
    )


class _Prompts:
    """Each once. Prompts of one id may differ, where the data changed before a resume."""

    def __init__(self) -> None:
        self.all: list[Prompt] = []
        self._places: dict[str, list[int]] = {}

    def place(self, prompt: Prompt) -> int:
        """Index of the prompt in `all`; appends it if it is new."""
        places = self._places.setdefault(prompt.id, [])
        for place in places:
            if self.all[place] == prompt:
                return place
        places.append(len(self.all))
        self.all.append(prompt)
        return places[-1]


def prompt_fields(prompt: Prompt) -> dict[str, Any]:
    """Plain JSON."""
    return {
        "id": prompt.id,
        "text": prompt.text,
        "token_ids": list(prompt.token_ids),
        "fields": dict(prompt.fields),
    }


def prompt_of(given: Mapping[str, Any]) -> Prompt:
    """The prompt that `prompt_fields` was given."""
    return Prompt(
        id=given["id"],
        text=given["text"],
        token_ids=tuple(given["token_ids"]),
        fields=given["fields"],
    )

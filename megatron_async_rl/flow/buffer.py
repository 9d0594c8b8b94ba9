"""Groups between admission and their batch: the content of a checkpoint, the part that a resumed
run may use, and the file format.

    samples     one row each, by columns.SCHEMA, group by group, then the replay store's; `about` in
                the schema's metadata: JSON with the groups, each prompt once
    beginnings  one row for each partial response (PARTIALS), in the order of `about`
    checksum    CRC-32 of all bytes before it, 4 bytes

Invariants:
- a buffer is a snapshot: no group in it was consumed, and it shares no container with the
  scheduler;
- the groups that a run restores obey the law (staleness.py): budget and plan hold with them, and
  every deadline follows from the group's own version;
- with `exact_lag` a run restores every group or none: if it restored a part, the others would train
  at another lag;
- `read_buffer` inverts `buffer_bytes`: it restores the dtype and value of arrays and every bit of
  numbers, and runs no code. In a file older than routed experts, samples have none.
"""

from __future__ import annotations

import json
import logging
import zlib
from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import pyarrow as pa

from megatron_async_rl.config.flow import ExactLag, FlowConfig
from megatron_async_rl.config.problem import UserError
from megatron_async_rl.flow.staleness import deadline, max_lag
from megatron_async_rl.samples.columns import (
    LOGGED,
    NUMERIC,
    ROUTED,
    SCHEMA,
    list_array,
    rows_of_lists,
    with_experts,
)
from megatron_async_rl.samples.rows import SampleGroup, SampleRow, TrainBatch, gathered, rows_of
from megatron_async_rl.samples.types import PartialResponse, Prompt, Request

log = logging.getLogger(__name__)


@dataclass(eq=False)
class GroupState:
    """One group from its admission to its batch. `finished`: its position in the order in which
    groups finished; None while it is running."""

    index: int
    prompt: Prompt
    version: int
    """Version under which it was admitted."""
    deadline: int
    open: dict[str, Request]
    """Unanswered requests by id; empty while a whole group waits for its reward."""
    samples: list[SampleRow] = field(default_factory=list)
    finished: int | None = None
    dropped: str = ""
    """Reason why it was dropped; empty if it was not."""

    def group(self) -> SampleGroup:
        """Return the finished group, its samples in the order of their requests."""
        # Ids are `<group>-<k>`, and responses come in any order.
        samples = sorted(self.samples, key=lambda sample: int(sample.id.rpartition("-")[2]))
        return SampleGroup(self.index, self.prompt, tuple(samples))


@dataclass(frozen=True, kw_only=True, eq=False)
class Buffer:
    """Groups that are admitted and neither consumed nor dropped, and the replay store."""

    groups: tuple[GroupState, ...] = ()
    stored: tuple[tuple[Prompt, tuple[SampleRow, ...]], ...] = ()
    """Content of the replay store: responses to each prompt, oldest first."""
    equal: tuple[int, int] = (0, 0)
    """Groups that dynamic sampling has kept and dropped (group_table.py)."""
    first_versions: tuple[int, ...] = ()
    """Versions under which `exact_lag` admits groups with less lag, because too few groups were
    waiting before; empty with other selections."""


EMPTY = Buffer()


def snapshot(entry: GroupState) -> GroupState:
    """Return a copy of a waiting group."""
    # Copies: the scheduler changes the originals while the copies are written to disk.
    return replace(entry, open=dict(entry.open), samples=list(entry.samples))


def restorable(
    buffer: Buffer, flow: FlowConfig, *, version: int, limit: int, fresh_steps: int, oldest: int
) -> Buffer:
    """Return the part of `buffer` that a run from `version` on continues with, most urgent groups
    first. Prompts of the other groups are requested again.

    `limit`: largest number of groups. `oldest`: oldest version whose tokens may train.
    """
    # By the present settings, because the checkpoint may have had another async_ratio.
    due_now = [
        replace(one, deadline=deadline(one.version, flow.async_ratio, fresh_steps))
        for one in buffer.groups
    ]
    groups = _with_rewards(
        _within_the_law(due_now, flow, version, limit, oldest), flow.prompts_per_step
    )
    first_versions: set[int] = set()
    if isinstance(flow.selection, ExactLag):
        due = (version + place // flow.prompts_per_step for place in range(len(groups)))
        exact = all(
            _is_exact(g, d, version, buffer.first_versions)
            for g, d in zip(groups, due, strict=True)
        )
        # All or nothing: see the invariants.
        groups = groups if exact and len(groups) == len(buffer.groups) else []
        first_versions.update(buffer.first_versions if groups else ())
        if len(groups) < max_lag(flow.async_ratio) * flow.prompts_per_step:
            first_versions.add(max(version, fresh_steps))

    if len(groups) < len(buffer.groups):
        log.warning(
            "version %d continues with %d of the %d groups in the buffer and samples the others"
            " again: for the present flow and run.steps, they are of another size, too many, or too"
            " old, or every reward of their batch failed",
            version,
            len(groups),
            len(buffer.groups),
        )
    return replace(buffer, groups=tuple(groups), first_versions=tuple(first_versions))


def _within_the_law(
    groups: Iterable[GroupState], flow: FlowConfig, version: int, limit: int, oldest: int
) -> list[GroupState]:
    taken: list[GroupState] = []
    for group in sorted(groups, key=lambda group: (group.deadline, group.index)):
        # Every group accepted so far has this deadline or an earlier one, so this deadline decides
        # whether the plan is feasible (staleness.is_feasible).
        places = min(limit, (group.deadline - version + 1) * flow.prompts_per_step)
        if (
            len(taken) < places
            and _fits(group, flow.group_size)
            and min(_versions(group, version)) >= oldest
        ):
            taken.append(group)
    return taken


def _with_rewards(groups: Sequence[GroupState], count: int) -> list[GroupState]:
    """Return the groups without the batches of `count` finished groups in which every reward
    failed: such a batch ends the run, so a resume with a corrected reward would never pass it.

    Batches are taken in the order of urgency; a windowed selection may form others.
    """
    kept: list[GroupState] = []
    for start in range(0, len(groups), count):
        batch = groups[start : start + count]
        # A batch with one reward trains. Its failed groups stay: sampled again, those of many
        # batches would come together in one.
        hopeless = len(batch) == count and all(
            group.finished is not None and not any(sample.valid for sample in group.samples)
            for group in batch
        )
        kept += [] if hopeless else batch
    return kept


def _fits(group: GroupState, size: int) -> bool:
    have = len(group.samples)
    if group.finished is not None:
        return have == size
    return have <= size == have + len(group.open)


def _versions(group: GroupState, now: int) -> set[int]:
    """Return the versions of each response's first and last token. An open request samples with
    `now`."""
    begun = [request.prefix for request in group.open.values() if request.prefix is not None]
    return {
        *(version for one in group.samples for version in (one.start_version, one.last_version)),
        *(int(prefix.versions[end]) for prefix in begun for end in (0, -1)),
        # The rest of an open request is sampled from now on.
        *([now] if group.open else []),
    }


def _is_exact(group: GroupState, due: int, now: int, first_versions: Collection[int]) -> bool:
    return _versions(group, now) == {group.version} and (
        group.deadline == due or group.version in first_versions
    )


def train_batch(
    groups: Sequence[SampleGroup],
    version: int,
    parts: tuple[int, ...] = (),
    *,
    complete: bool = True,
) -> TrainBatch:
    """Return the batch that trains `version`, or a part of it, without text. A group's number is
    its place. parts, complete: see TrainBatch."""
    numbered = [(sample, place) for place, group in enumerate(groups) for sample in group.samples]
    # Numbers within the batch: those of admission grow over the whole run.
    samples = [sample for sample, _ in numbered]
    places = [place for _, place in numbered]
    return TrainBatch(
        version=version,
        samples=gathered(samples, places, NUMERIC),
        parts=parts,
        complete=complete,
    )


BUFFER_FILE = "buffer.arrow"
EARLIER_BUFFER_FILE = "buffer.npz"
"""Name of the file before samples were columns. It can no longer be read."""
CHECK_SUM_BYTES = 4
ROWS = 1024
"""Limit for a record batch: one row that waits long keeps its whole batch in memory."""

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


def earlier_format() -> BufferBroken:
    """Return the error for a checkpoint whose buffer has an earlier file format."""
    return BufferBroken.of(
        "run.dir",
        f"{EARLIER_BUFFER_FILE} of the checkpoint is of an earlier version and cannot be read",
        "remove the file, and its content is sampled again",
    )


def buffer_bytes(buffer: Buffer) -> bytes:
    prompts = _Prompts()
    rows: list[SampleRow] = []
    partials: list[PartialResponse] = []

    def group(state: GroupState) -> dict[str, Any]:
        rows.extend(state.samples)
        for request in state.open.values():
            if request.prefix is not None:
                # Sampled tokens are kept: a resume continues after them.
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
    # Compressed, because each sample of a group repeats the prompt.
    options = pa.ipc.IpcWriteOptions(compression="zstd")
    schema = SCHEMA.with_metadata({"about": json.dumps(about)})
    with pa.ipc.new_stream(sink, schema, options=options) as stream:
        for start in range(0, len(rows), ROWS):
            stream.write_batch(gathered(rows[start : start + ROWS]))
    with pa.ipc.new_stream(sink, PARTIALS, options=options) as stream:
        stream.write_batch(pa.RecordBatch.from_arrays(beginnings, schema=PARTIALS))
    content = sink.getvalue().to_pybytes()
    # At the end, so that a truncated file fails the check.
    return content + zlib.crc32(content).to_bytes(CHECK_SUM_BYTES)


def read_buffer(content: bytes) -> Buffer:
    """Return the buffer that `buffer_bytes` wrote. Raises BufferBroken."""
    try:
        whole, check_sum = content[:-CHECK_SUM_BYTES], content[-CHECK_SUM_BYTES:]
        if zlib.crc32(whole) != int.from_bytes(check_sum):
            raise ValueError("its checksum does not match")
        source = pa.BufferReader(whole)
        # Each stream is read to its end, where the next one begins.
        samples = pa.ipc.open_stream(source)
        # Compare columns alone: the metadata differs in every file.
        if not any(samples.schema.equals(known) for known in (SCHEMA, LOGGED)):
            raise ValueError("its columns are not those of a sample")
        batches = list(samples)
        # Exactly one batch, which is written even without rows.
        (partials,) = pa.ipc.open_stream(source)
        return _buffer(json.loads(samples.schema.metadata[b"about"]), batches, partials)
    except (ValueError, LookupError, TypeError, RuntimeError, pa.ArrowException) as error:
        raise BufferBroken.of(
            "run.dir",
            f"{BUFFER_FILE} of the checkpoint cannot be read ({type(error).__name__}: {error})",
            "resume with the release that wrote it; in a checkpoint without digests you may remove"
            " the file, and its content is sampled again",
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
    # Rows without an owner mean that `about` belongs to other data.
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
    """Distinct prompts. Prompts of one id may differ if the data changed before a resume."""

    def __init__(self) -> None:
        self.all: list[Prompt] = []
        self._places: dict[str, list[int]] = {}

    def place(self, prompt: Prompt) -> int:
        """Return the index of the prompt in `all`, to which a new prompt is appended."""
        places = self._places.setdefault(prompt.id, [])
        for place in places:
            # The id alone is not enough: an environment may change a prompt's text.
            if self.all[place] == prompt:
                return place
        places.append(len(self.all))
        self.all.append(prompt)
        return places[-1]


def prompt_fields(prompt: Prompt) -> dict[str, Any]:
    """Return the prompt as plain JSON."""
    return {
        "id": prompt.id,
        "text": prompt.text,
        "token_ids": list(prompt.token_ids),
        "fields": dict(prompt.fields),
    }


def prompt_of(given: Mapping[str, Any]) -> Prompt:
    """Return the prompt that was passed to `prompt_fields`."""
    return Prompt(
        id=given["id"],
        text=given["text"],
        token_ids=tuple(given["token_ids"]),
        fields=given["fields"],
    )

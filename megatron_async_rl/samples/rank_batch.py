"""A train batch as one trainer rank sees it: the numbers of all samples, and the tokens of its own
samples.

Decisions that depend on the whole batch (advantages, corrections, denominators, the plan) need the
numbers of every sample on every rank. Only the data-parallel rank that owns a sample feeds its
token ids to the model.

Invariants:
- rows have the order of the train batch, and per-token arrays are concatenated in this order: row s
  has the entries `starts[s]` to `starts[s + 1]`;
- `numbers` and `tokens` are Arrow record batches, and `of` reads them without a copy per sample;
- no text, no prompt fields, no Python object per sample.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc
from numpy.typing import NDArray

from megatron_async_rl.samples.columns import NUMERIC, ROUTED, flat, row_starts, spans, value_rows

NO_RANK = -1
"""Owner of a sample that is not trained on."""

SHARED = pa.field("shared", pa.list_(pa.int32()))
"""Tokens of each segment in the shared prefix of its family (prefixes.py); null: none."""

NUMBERS = pa.schema(
    [
        *(field for field in NUMERIC if field.name not in ("prompt_ids", "response_ids", ROUTED)),
        pa.field("prompt_length", pa.int32(), nullable=False),
        pa.field("owner", pa.int32(), nullable=False),
        pa.field("part", pa.int32(), nullable=False),
        SHARED,
    ]
)
"""The numbers of every sample, for every rank. `owner`: the data-parallel rank that trains it.
`part`: see `TrainBatch.parts`."""

TOKENS = pa.schema(
    [
        pa.field("row", pa.int32(), nullable=False),
        pa.field("token_ids", pa.list_(pa.int32()), nullable=False),
        pa.field(ROUTED, pa.large_binary()),
    ]
)
"""The tokens of a sample, for its owner: prompt and response, concatenated; and the experts that
the engine chose for them."""


@dataclass(frozen=True, kw_only=True, eq=False)
class RankBatch:
    """S samples with N response tokens; P tokens belong to this rank's own samples.

    version: the weights that will be trained. complete: False for one part of a streamed batch.
    ids: [S] strings. group, owner, part (`TrainBatch.parts`), prompt_lengths, lengths (response
    tokens): [S] int64. rewards, weights: [S] float64. reward_parts: [S], the
    parts of a reward by name, null for a reward without parts. segment_starts: [S], the response
    tokens at which further segments of a sample begin, null for a sample of one segment. shared:
    [S], the column SHARED. valid (the reward did not fail), sampled (not given data), truncated:
    [S] bool.

    behavior_logprobs: [N] float32. versions: [N] int32. loss_mask: [N] uint8. step_rewards: [N]
    float32, 0 for a sample without any; None if no sample has any.

    token_ids: [P] int32, prompt and response of each own sample. token_starts: [S] int64, index of
    a sample's first token in token_ids; -1 for a sample of another rank. routed_experts: [P, bytes]
    uint8, for each own token the row of types.py, 0 for the last token of a segment; None if no own
    sample has any. routed: [S] bool, own samples that have routed experts.
    """

    version: int
    complete: bool
    ids: pa.StringArray
    group: NDArray[np.int64]
    owner: NDArray[np.int64]
    part: NDArray[np.int64]
    prompt_lengths: NDArray[np.int64]
    lengths: NDArray[np.int64]
    rewards: NDArray[np.float64]
    reward_parts: pa.MapArray
    segment_starts: pa.ListArray
    shared: pa.ListArray
    weights: NDArray[np.float64]
    valid: NDArray[np.bool_]
    sampled: NDArray[np.bool_]
    truncated: NDArray[np.bool_]
    behavior_logprobs: NDArray[np.float32]
    versions: NDArray[np.int32]
    loss_mask: NDArray[np.uint8]
    step_rewards: NDArray[np.float32] | None
    token_ids: NDArray[np.int32]
    token_starts: NDArray[np.int64]
    routed_experts: NDArray[np.uint8] | None
    routed: NDArray[np.bool_]

    @classmethod
    def of(
        cls,
        version: int,
        numbers: pa.RecordBatch,
        tokens: pa.RecordBatch,
        *,
        complete: bool = True,
    ) -> RankBatch:
        """Return the batch of the record batches `numbers` (NUMBERS) and `tokens` (TOKENS)."""
        behavior_logprobs, lengths = flat(numbers.column("behavior_logprobs"))
        given, counts = flat(numbers.column("step_rewards"))
        steps = None
        # The array exists only if a sample has step rewards.
        if numbers.column("step_rewards").null_count < numbers.num_rows:
            steps = np.zeros(len(behavior_logprobs), dtype=np.float32)
            steps[np.repeat(counts > 0, lengths)] = given
        token_ids, totals = flat(tokens.column("token_ids"))
        rows = tokens.column("row").to_numpy()
        # -1 marks samples of other ranks.
        token_starts = np.full(numbers.num_rows, -1, dtype=np.int64)
        token_starts[rows] = np.cumsum(totals) - totals
        prompt_lengths = numbers.column("prompt_length").to_numpy().astype(np.int64)
        # Only own samples have experts, in the order of `rows`.
        own = numbers.column("segment_starts").take(pa.array(rows))
        routed_experts, recorded = routed_experts_of(
            tokens.column(ROUTED), *segment_lengths(prompt_lengths[rows], totals, own)
        )
        routed = np.zeros(numbers.num_rows, dtype=bool)
        routed[rows] = recorded
        reason = numbers.column("finish_reason")
        return cls(
            version=version,
            complete=complete,
            ids=numbers.column("id"),
            group=numbers.column("group").to_numpy(),
            owner=numbers.column("owner").to_numpy().astype(np.int64),
            part=numbers.column("part").to_numpy().astype(np.int64),
            prompt_lengths=prompt_lengths,
            lengths=lengths,
            rewards=numbers.column("reward").to_numpy(),
            reward_parts=numbers.column("reward_parts"),
            segment_starts=numbers.column("segment_starts"),
            shared=numbers.column("shared"),
            weights=numbers.column("weight").to_numpy(),
            valid=numbers.column("valid").to_numpy(zero_copy_only=False),
            # Arrow packs booleans into bits, which NumPy cannot view.
            sampled=pc.not_equal(reason, "given").to_numpy(zero_copy_only=False),
            truncated=pc.equal(reason, "length").to_numpy(zero_copy_only=False),
            behavior_logprobs=behavior_logprobs,
            versions=flat(numbers.column("versions"))[0],
            loss_mask=flat(numbers.column("loss_mask"))[0],
            step_rewards=steps,
            token_ids=token_ids,
            token_starts=token_starts,
            routed_experts=routed_experts,
            routed=routed,
        )

    def __len__(self) -> int:
        return len(self.lengths)

    @cached_property
    def starts(self) -> NDArray[np.int64]:
        """Offset of each sample's first response token, and the end: [S + 1]."""
        # Cached: every pass over the batch reads it.
        return row_starts(self.lengths)

    @cached_property
    def rows(self) -> NDArray[np.int64]:
        """Row of each response token: [N]."""
        return value_rows(self.lengths)

    @cached_property
    def owned_starts(self) -> NDArray[np.int64]:
        """Offset of each sample's first response token among those of its owner: [S]."""
        starts = np.zeros(len(self), dtype=np.int64)
        for owner in np.unique(self.owner):
            owned = self.owner == owner
            starts[owned] = np.cumsum(self.lengths[owned]) - self.lengths[owned]
        return starts

    @property
    def fed(self) -> NDArray[np.int64]:
        """Number of a sample's tokens that the model reads: all but the last of each segment, which
        predicts nothing. [S]."""
        # Each further segment ends with a token that predicts nothing.
        further = pc.fill_null(pc.list_value_length(self.segment_starts), 0).to_numpy()
        return self.prompt_lengths + self.lengths - 1 - further

    def segments(self, rows: NDArray[np.int64]) -> tuple[NDArray[np.int64], NDArray[np.int64]]:
        """Return `segment_lengths` of these samples."""
        prompts = self.prompt_lengths[rows]
        totals = prompts + self.lengths[rows]
        # The usual case, without the general arithmetic.
        if self.segment_starts.null_count == len(self):
            return totals, np.ones_like(totals)
        return segment_lengths(prompts, totals, self.segment_starts.take(pa.array(rows)))

    def shared_tokens(
        self, rows: NDArray[np.int64], counts: NDArray[np.int64]
    ) -> NDArray[np.int64]:
        """Return the tokens of each segment of these samples in the shared prefix of its family:
        [G]. counts: their segments."""
        if self.shared.null_count == len(self):
            return np.zeros(int(counts.sum()), dtype=np.int64)
        values, given = flat(self.shared.take(pa.array(rows)))
        found = np.zeros(int(counts.sum()), dtype=np.int64)
        found[np.repeat(given > 0, counts)] = values
        return found

    @cached_property
    def trained(self) -> NDArray[np.int64]:
        """Number of trained response tokens: [S]."""
        return np.bincount(self.rows, self.loss_mask, minlength=len(self)).astype(np.int64)

    @property
    def start_versions(self) -> NDArray[np.int32]:
        """Oldest version that sampled a token: [S]."""
        return np.minimum.reduceat(self.versions, self.starts[:-1])

    @property
    def last_versions(self) -> NDArray[np.int32]:
        """Newest version that sampled a token: [S]."""
        return np.maximum.reduceat(self.versions, self.starts[:-1])

    @property
    def lag_max(self) -> int:
        """Largest lag of a trained token; tokens of an environment were not sampled."""
        lags = self.version - self.versions[self.loss_mask > 0]
        return int(lags.max(initial=0))

    def select(self, rows: NDArray[np.int64] | Sequence[int]) -> RankBatch:
        """Return the batch of these samples alone, in this order."""
        rows = np.asarray(rows, dtype=np.int64)
        # Per-token columns are selected by tokens, the others by samples.
        tokens = spans(self.starts[rows], self.lengths[rows])
        per_token = {"behavior_logprobs", "versions", "loss_mask", "step_rewards"}
        columns = ("ids", "reward_parts", "segment_starts", "shared")
        changed = {
            field.name: getattr(self, field.name)[tokens if field.name in per_token else rows]
            for field in dataclasses.fields(self)
            if field.name not in ("version", "complete", "token_ids", ROUTED, *columns)
            and getattr(self, field.name) is not None
        }
        for name in columns:
            changed[name] = getattr(self, name).take(pa.array(rows))
        return dataclasses.replace(self, **changed)


def segment_lengths(
    prompts: NDArray[np.int64], totals: NDArray[np.int64], starts: pa.ListArray
) -> tuple[NDArray[np.int64], NDArray[np.int64]]:
    """Return [G] tokens of each segment of S samples, sample after sample, and [S] segments of
    each. totals: [S] tokens of prompt and response. starts: as `RankBatch.segment_starts`."""
    further, more = flat(starts)
    counts = more + 1
    last = np.cumsum(counts) - 1
    ends = np.empty(counts.sum(), dtype=np.int64)
    ends[spans(last - more, more)] = further + np.repeat(prompts, more)
    # The last segment ends with its sample.
    ends[last] = totals
    lengths = np.diff(ends, prepend=0)
    lengths[last - more] = ends[last - more]
    return lengths, counts


def numbers_of(
    samples: pa.RecordBatch,
    owner: NDArray[np.int64],
    part: NDArray[np.int64],
    shared: pa.ListArray | None = None,
) -> pa.RecordBatch:
    """Return the columns NUMBERS of a batch with columns NUMERIC or SCHEMA. owner, part: [S].
    shared: the column SHARED; null if samples share nothing."""
    columns = {
        **{name: samples.column(name) for name in NUMERIC.names},
        "prompt_length": pc.list_value_length(samples.column("prompt_ids")),
        "owner": pa.array(owner, type=pa.int32()),
        "part": pa.array(part, type=pa.int32()),
        "shared": pa.nulls(samples.num_rows, SHARED.type) if shared is None else shared,
    }
    return pa.RecordBatch.from_arrays([columns[name] for name in NUMBERS.names], schema=NUMBERS)


def tokens_of(samples: pa.RecordBatch, rows: NDArray[np.int64]) -> pa.RecordBatch:
    """Return the columns TOKENS of the samples `rows` of such a batch."""
    (prompts, before), (responses, lengths) = (
        flat(samples.column(name).take(pa.array(rows))) for name in ("prompt_ids", "response_ids")
    )
    ends = np.cumsum(before + lengths)
    values = np.empty(len(prompts) + len(responses), dtype=np.int32)
    # Prompt and response of a sample are contiguous, as the model reads them.
    values[spans(ends - before - lengths, before)] = prompts
    values[spans(ends - lengths, lengths)] = responses
    starts = np.concatenate(([0], ends)).astype(np.int32)
    return pa.RecordBatch.from_arrays(
        [
            pa.array(rows, type=pa.int32()),
            pa.ListArray.from_arrays(pa.array(starts), pa.array(values)),
            samples.column(ROUTED).take(pa.array(rows)),
        ],
        schema=TOKENS,
    )


def routed_experts_of(
    column: pa.LargeBinaryArray, segments: NDArray[np.int64], counts: NDArray[np.int64]
) -> tuple[NDArray[np.uint8] | None, NDArray[np.bool_]]:
    """Return `RankBatch.routed_experts`, and which rows of the column have any. segments, counts:
    of these samples, as `segment_lengths`. Raises ValueError if tokens have different numbers of
    bytes."""
    recorded = column.is_valid().to_numpy(zero_copy_only=False)
    if not recorded.any():
        return None, recorded
    sizes = pc.fill_null(pc.binary_length(column), 0).to_numpy()
    rows = np.add.reduceat(segments - 1, np.cumsum(counts) - counts)
    widths = np.unique(sizes[recorded] / rows[recorded])
    # Rows of different widths come from different models.
    if len(widths) != 1 or widths[0] != int(widths[0]):
        raise ValueError(f"routed experts of {widths.tolist()} bytes for a token: not of one model")
    known = column.drop_null()
    # A taken column may be a slice: buffers hold more than its rows.
    begin, end = known.offset, known.offset + len(known)
    offsets = np.frombuffer(known.buffers()[1], dtype=np.int64)[begin : end + 1]
    data = np.frombuffer(known.buffers()[2], dtype=np.uint8)[offsets[0] : offsets[-1]]
    found = np.zeros((int(segments.sum()), int(widths[0])), dtype=np.uint8)
    starts, has = np.cumsum(segments) - segments, np.repeat(recorded, counts)
    found[spans(starts[has], segments[has] - 1)] = data.reshape(-1, found.shape[1])
    return found, recorded

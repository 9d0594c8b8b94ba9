"""The path of a train batch to the model: from rank 0 to the ranks that train it, into minibatches,
and into micro-batches.

Only rank 0 gets the batch. It assigns each sample to a data-parallel rank, sends the numbers of the
whole batch to every rank, and to each rank the token ids of its own samples, as Arrow buffers over
the CPU group. This is the same for rollouts and for given responses, and works on nodes without
Ray. Ranks iterate over the batch `objective.epochs` times, each time in the same
`objective.minibatches` parts in the same order: each part is one optimizer step, and all together
give one line of metrics. So a data-parallel rank keeps its samples throughout, each minibatch is
balanced over the ranks, and two consecutive optimizer steps share a sample only if just one
minibatch has trainable tokens. A minibatch is cut into micro-batches, whose rows the sequence
layout fills (packing.py).

Invariants of minibatches:
- a group stays whole: its responses are in one minibatch;
- the division is a pure function of the groups, the version and the number of minibatches, the same
  on every rank and layout and after a resume; nothing else in the policy is random;
- minibatches differ by at most one group; if a batch has fewer groups than there are minibatches
  (because rewards have failed), some are empty.

Invariants of micro-batches:
- the plan is a pure function of lengths and owners, and every rank computes the same plan;
- every sample is, whole, in exactly one micro-batch of exactly one data-parallel rank; the
  context-parallel ranks of that rank hold a part of each row, and all other data of the sample;
- the last token of a segment is only a target: it predicts nothing and is not fed to the model. A
  sample has one segment or several, each a sequence of its own;
- every data-parallel rank runs the same number of micro-batches (all-masked ones are added), since
  the schedule and the gradient reduction make a fixed number of collectives per micro-batch; the
  interleaved pipeline schedule needs a multiple of the pipeline's size.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import pyarrow as pa
import torch
import torch.distributed as dist
from numpy.typing import NDArray
from torch import Tensor

from megatron_async_rl.metrics.catalogue import METRICS
from megatron_async_rl.objectives.batch import on_device
from megatron_async_rl.policy.attention import PackedSequences
from megatron_async_rl.policy.packing import Padded, SequenceLayout, balanced
from megatron_async_rl.policy.parallel import Layout
from megatron_async_rl.samples.columns import as_stream, flat, from_stream, spans
from megatron_async_rl.samples.rank_batch import NOBODY, RankBatch, numbers_of, tokens_of
from megatron_async_rl.samples.rows import TrainBatch

DEFAULT = Padded()
BY_ROW = ("tokens", "position_ids", "padding", "routed")
"""Tensors of a micro-batch that have rows and columns."""


class SampleTooLong(ValueError):
    """One sample alone exceeds the token budget of a micro-batch."""

    def __init__(self, sample: str, tokens: int, budget: int) -> None:
        super().__init__(
            f"sample {sample!r} has {tokens} tokens (prompt + response, padded), more than"
            f" policy.tokens_per_micro_batch = {budget}; raise that key to at least {tokens}, or"
            " shorten prompts or rollout.sampling.max_tokens"
        )
        self.sample, self.tokens, self.budget = sample, tokens, budget


SamplesOfRanks = tuple[tuple[tuple[int, ...], ...], ...]
"""Samples of each micro-batch of each data-parallel rank; () is an all-masked micro-batch."""


@dataclass(frozen=True, eq=False)
class MicroBatch:
    """B rows of length L with the N response tokens of the samples `samples` (indices into the
    planned batch).

    tokens, position_ids: [B, L] int64. rows: [N] int64, flat index b * L + t into [B, L] of the
    position that predicts the response token, one before it. targets: [N] int64. sequence: [N]
    int64, index into `samples` of the token's sample. versions: [N] int64. owned_tokens: [N] int64,
    indices of these tokens among those of the samples that their owner has in the planned batch.
    batch_samples: [S] int64, `samples`. packing: boundaries of the segments in a row that has
    several; null if a row is one. No position predicts the first token of a further segment: its
    entry in `rows` is that of the second token, and it is not trained on. An all-masked micro-batch
    has samples == () and one token of padding, whose indices are -1.

    Under context parallelism L is the length of this rank's part, `rows` is [n] and contains its
    own positions, and `places`, [n] int64, contains the index among the N tokens that each
    predicts; otherwise null.

    padding: [B, L] bool, true for padding. routed_experts: [B, L, bytes] uint8 on the host
    (page-locked for CUDA), the experts that the engine chose (samples/types.py), for tokens where
    `routed`, [B, L] bool, is true; both null if none were recorded.
    """

    samples: tuple[int, ...]
    tokens: Tensor
    position_ids: Tensor
    rows: Tensor
    targets: Tensor
    sequence: Tensor
    versions: Tensor
    owned_tokens: Tensor
    batch_samples: Tensor
    padding: Tensor
    packing: PackedSequences | None = None
    places: Tensor | None = None
    routed_experts: Tensor | None = None
    routed: Tensor | None = None


@dataclass(frozen=True, eq=False)
class Minibatch:
    """The samples of one optimizer step, and this rank's micro-batches of them.

    rows: [S] int64, the samples by their number in the batch. samples: only those, in that order.
    micro_batches: their `samples` are indices into `samples` above; every rank has equally many.
    padding_share: share of padding in all tokens that all ranks compute.
    """

    rows: NDArray[np.int64]
    samples: RankBatch
    micro_batches: Sequence[MicroBatch]
    padding_share: float


def assign_owners(
    lengths: NDArray[np.int64], data_parallel: int, group: NDArray[np.int64] | None = None
) -> NDArray[np.int64]:
    """Return the data-parallel rank that trains each sample, [S]: longest first to the rank with
    fewest tokens. group: the samples' groups, if groups must stay whole."""
    if data_parallel == 1 or not len(lengths):
        return np.zeros(len(lengths), dtype=np.int64)
    member = np.arange(len(lengths)) if group is None else np.unique(group, return_inverse=True)[1]
    # Groups are the units of balance if they must stay whole, otherwise single samples.
    tokens = np.bincount(member, lengths).astype(np.int64)
    return balanced(tokens, data_parallel)[member]


def plan_micro_batches(
    batch: RankBatch,
    *,
    data_parallel: int,
    budget: int,
    sequences: SequenceLayout = DEFAULT,
    in_groups_of: int = 1,
) -> tuple[SamplesOfRanks, float]:
    """Divide the samples of each owner into micro-batches; return the division and `padding_share`.

    in_groups_of: divisor of the number of micro-batches of a rank (the pipeline's size with virtual
    stages). Raises SampleTooLong.
    """
    fed, counts = _fed(batch, np.arange(len(batch)))
    # One more than is fed, because the budget counts the last token, which is only a target.
    needed = np.maximum(batch.fed + 1, sequences.room(fed, counts))
    if (needed > budget).any():
        first = int(np.argmax(needed > budget))
        raise SampleTooLong(batch.ids[first].as_py(), int(needed[first]), budget)

    shares = [np.flatnonzero(batch.owner == rank) for rank in range(data_parallel)]
    cuts = [sequences.cut(share, fed, counts, budget) for share in shares]
    # Every rank runs as many micro-batches as the longest plan, or collectives would not match.
    rounds = -(-max(1, *(len(rank) for rank in cuts)) // in_groups_of)
    count = rounds * in_groups_of
    # All-masked micro-batches come last on every rank.
    ranks = tuple(tuple(rank) + ((),) * (count - len(rank)) for rank in cuts)

    computed = sum(
        math.prod(sequences.shape(_fed(batch, np.array(rows, dtype=np.int64))[0]))
        for rank in ranks
        for rows in rank
    )
    return ranks, 1.0 - int(batch.fed.sum()) / computed


def build_micro_batch(
    batch: RankBatch,
    rows: tuple[int, ...],
    device: torch.device,
    sequences: SequenceLayout = DEFAULT,
) -> MicroBatch:
    (alone,) = build_micro_batches(batch, [rows], device, sequences)
    return alone


def build_micro_batches(
    batch: RankBatch,
    cuts: Sequence[tuple[int, ...]],
    device: torch.device,
    sequences: SequenceLayout = DEFAULT,
) -> list[MicroBatch]:
    """Return the tensors of entries of a plan made with the same `batch` and `sequences`, uploaded
    together; the samples must be this rank's own."""
    arrays = [_arrays(batch, rows, sequences) for rows in cuts]
    packings = [sequences.packing(_fed(batch, np.array(rows, dtype=np.int64))[0]) for rows in cuts]
    host = {
        (number, name): torch.from_numpy(values)
        for number, own in enumerate(arrays)
        for name, values in own.items()
    }
    offsets = {
        (number, "offsets"): packing.cu_seqlens_q
        for number, packing in enumerate(packings)
        if packing is not None
    }
    # One upload per dtype for all micro-batches, because the host waits for each upload.
    placed = on_device(host | offsets, device)
    for number, packing in enumerate(packings):
        if packing is not None:
            # Replace the host copies: attention kernels read the offsets on the device.
            packing.cu_seqlens_q = packing.cu_seqlens_kv = placed[number, "offsets"]
    return [
        MicroBatch(
            samples=rows,
            packing=packing,
            routed_experts=_routed_experts(batch, rows, sequences, device),
            **{name: placed[number, name] for name in own},
        )
        for number, (rows, own, packing) in enumerate(zip(cuts, arrays, packings, strict=True))
    ]


def _arrays(
    batch: RankBatch, rows: tuple[int, ...], sequences: SequenceLayout
) -> dict[str, NDArray[Any]]:
    """Return the device tensors of a micro-batch by name, int64 and bool."""
    chosen = np.array(rows, dtype=np.int64)
    starts, prompts, lengths = (
        each[chosen] for each in (batch.token_starts, batch.prompt_lengths, batch.lengths)
    )
    fed, counts = _fed(batch, chosen)
    # -1 marks samples of other ranks, whose tokens this rank never received.
    if starts.min(initial=0) < 0:
        missing = batch.ids[int(chosen[starts.argmin()])].as_py()
        raise ValueError(
            f"sample {missing!r} belongs to another data-parallel rank: its tokens are not here"
        )

    (count, length), line = sequences.shape(fed), sequences.starts(fed)
    tokens = np.zeros(count * length, dtype=np.int64)
    tokens[spans(line, fed)] = batch.token_ids[spans(_starts(starts, fed, counts), fed)]
    # For every token of the samples, the position before it in its segment. The first token of a
    # further segment has no predictor: its entry is that of the second, and the loss mask excludes
    # it.
    before = np.maximum(spans(line - 1, fed + 1), np.repeat(line, fed + 1))
    totals = prompts + lengths
    per_token: dict[str, NDArray[Any]] = {
        "rows": before[spans(np.cumsum(totals) - lengths, lengths)],
        "targets": batch.token_ids[spans(starts + prompts, lengths)],
        "sequence": np.repeat(np.arange(len(chosen)), lengths),
        "versions": batch.versions[spans(batch.starts[chosen], lengths)],
        "owned_tokens": spans(batch.owned_starts[chosen], lengths),
        "batch_samples": chosen,
    }
    # A filler micro-batch has one token of padding: its loss is 0, but its backward pass must run,
    # as on the other ranks.
    if not rows:
        per_token = dict.fromkeys(per_token, np.zeros(1, dtype=np.int64))
        # -1 selects the 0 that `StepTargets` appends to its numbers.
        per_token |= dict.fromkeys(("owned_tokens", "batch_samples"), np.array([-1]))
    own = sequences.own(fed)
    if sequences.context.size > 1:
        # -1: on another context-parallel rank. A target belongs to the rank that holds its
        # predictor.
        here = np.full(len(tokens), -1)
        here[own] = np.arange(len(own))
        at = here[per_token["rows"]]
        per_token |= {"rows": at[at >= 0], "places": np.flatnonzero(at >= 0)}

    per_token |= {"tokens": tokens[own], "position_ids": sequences.positions(fed)[own]}
    numbers = {name: values.astype(np.int64) for name, values in per_token.items()}
    marks = {"padding": ~_marked(line, fed, count * length)[own]}
    if batch.routed_experts is not None:
        has = np.repeat(batch.routed[chosen], counts)
        marks["routed"] = _marked(line[has], fed[has], count * length)[own]
    return {
        name: values.reshape(count, -1) if name in BY_ROW else values
        for name, values in (numbers | marks).items()
    }


def _fed(
    batch: RankBatch, samples: NDArray[np.int64]
) -> tuple[NDArray[np.int64], NDArray[np.int64]]:
    """Return [G] tokens that each segment of the samples feeds to the model, and [S] segments of
    each."""
    tokens, counts = batch.segments(samples)
    return tokens - 1, counts


def _starts(
    starts: NDArray[np.int64], fed: NDArray[np.int64], counts: NDArray[np.int64]
) -> NDArray[np.int64]:
    """Return [G] offsets of the segments among the tokens of samples that begin at `starts`."""
    tokens = fed + 1
    before = np.cumsum(tokens) - tokens
    return before + np.repeat(starts - before[np.cumsum(counts) - counts], counts)


def _marked(starts: NDArray[np.int64], lengths: NDArray[np.int64], size: int) -> NDArray[np.bool_]:
    """Return [size], true in these spans."""
    marked = np.zeros(size, dtype=bool)
    marked[spans(starts, lengths)] = True
    return marked


def _routed_experts(
    batch: RankBatch, rows: tuple[int, ...], sequences: SequenceLayout, device: torch.device
) -> Tensor | None:
    """Return `MicroBatch.routed_experts`."""
    if batch.routed_experts is None:
        return None
    chosen = np.array(rows, dtype=np.int64)
    fed, counts = _fed(batch, chosen)
    count, length = sequences.shape(fed)
    found = np.zeros((count * length, batch.routed_experts.shape[1]), dtype=np.uint8)
    read = spans(_starts(batch.token_starts[chosen], fed, counts), fed)
    found[spans(sequences.starts(fed), fed)] = batch.routed_experts[read]
    table = torch.from_numpy(found[sequences.own(fed)].reshape(count, -1, found.shape[1]))
    # Page-locked, so that each layer's copy to the device is asynchronous.
    return table.pin_memory() if device.type == "cuda" else table


@dataclass(frozen=True)
class Batcher:
    """Source of one rank's micro-batches. budget: largest number of tokens per micro-batch."""

    layout: Layout
    budget: int
    sequences: SequenceLayout

    def of(self, batch: RankBatch, rows: NDArray[np.int64] | None = None) -> Minibatch:
        """Return the minibatch of these samples, ascending; null: all. Raises SampleTooLong."""
        rows = np.arange(len(batch)) if rows is None else rows
        # The rows of a minibatch are ascending, so if it has all of them it is the batch itself.
        samples = batch if len(rows) == len(batch) else batch.select(rows)
        cuts, padding_share = plan_micro_batches(
            samples,
            data_parallel=self.layout.dp_size,
            budget=self.budget,
            sequences=self.sequences,
            in_groups_of=self.layout.pp_size if self.layout.virtual_stages > 1 else 1,
        )
        own = build_micro_batches(
            samples, cuts[self.layout.dp_rank], self.layout.device, self.sequences
        )
        return Minibatch(rows, samples, own, padding_share)

    def build(self, samples: RankBatch, rows: tuple[int, ...]) -> MicroBatch:
        return build_micro_batch(samples, rows, self.layout.device, self.sequences)


def divide(group: NDArray[np.int64], version: int, minibatches: int) -> list[NDArray[np.int64]]:
    """Return the samples of each minibatch, by number, ascending. group: [S], of the samples that
    are trained on."""
    if minibatches == 1:
        return [np.arange(len(group))]
    # Seeded by the version alone, so that every rank, every layout and a resumed run draw the same
    # division.
    drawn = np.random.default_rng(version).permutation(np.unique(group))
    return [np.flatnonzero(np.isin(group, part)) for part in np.array_split(drawn, minibatches)]


def split(
    batch: TrainBatch, data_parallel: int, *, minibatches: int = 1, whole_groups: bool = False
) -> tuple[pa.RecordBatch, tuple[pa.RecordBatch, ...]]:
    """Split a batch into a record batch with columns NUMBERS and, for each data-parallel rank, one
    with columns TOKENS.

    Each minibatch is divided separately, so each is balanced over the ranks. whole_groups: all of a
    group belongs to one rank. A sample whose reward failed has no owner."""
    samples = batch.samples
    owner = np.full(samples.num_rows, NOBODY, dtype=np.int64)
    # A sample whose reward failed is in no minibatch: its owner stays NOBODY.
    trained = np.flatnonzero(samples.column("valid").to_numpy(zero_copy_only=False))
    prompts, responses = (flat(samples.column(name))[1] for name in ("prompt_ids", "response_ids"))
    lengths = (prompts + responses)[trained]
    group = samples.column("group").to_numpy()[trained]
    for rows in divide(group, batch.version, minibatches):
        # Per minibatch: balance over the whole batch would leave single steps unbalanced.
        owner[trained[rows]] = assign_owners(
            lengths[rows], data_parallel, group[rows] if whole_groups else None
        )
    return (
        numbers_of(samples, owner),
        tuple(tokens_of(samples, np.flatnonzero(owner == rank)) for rank in range(data_parallel)),
    )


def receive(
    take: Callable[[], TrainBatch | None],
    layout: Layout,
    *,
    minibatches: int = 1,
    whole_groups: bool = False,
) -> RankBatch | None:
    """Receive a batch from rank 0, where alone `take` runs, as long as it takes. Every rank returns
    its view of the batch, or None if there is none. Collective.

    Raises `take`'s error on rank 0, and RankZeroFailed on the others.
    """
    parts: list[pa.RecordBatch] = []
    """On rank 0: the numbers, and the tokens of each data-parallel rank."""
    buffers: list[Tensor] = []

    def announce() -> tuple[int, list[int]] | None:
        batch = take()
        if batch is None:
            return None
        numbers, tokens = split(
            batch, layout.dp_size, minibatches=minibatches, whole_groups=whole_groups
        )
        parts.extend((numbers, *tokens))
        # Serialised here, inside rank 0's part, because the header contains the sizes.
        if layout.world_size > 1:
            buffers.extend(_tensor(part) for part in parts)
        return batch.version, [len(buffer) for buffer in buffers]

    header = layout.from_rank_zero(announce)
    if header is None:
        return None
    version, sizes = header
    if layout.world_size == 1:
        return RankBatch.of(version, *parts)

    numbers = buffers[0] if buffers else torch.empty(sizes[0], dtype=torch.uint8)
    # After the header, in this order on every rank: all numbers, then own tokens.
    dist.broadcast(numbers, src=0, group=layout.cpu_group)

    # The tensor- and pipeline-parallel ranks of a data-parallel rank feed or predict the same
    # tokens.
    own = 1 + layout.dp_rank
    if parts:
        requests = [
            dist.isend(buffers[1 + layout.dp_rank_of(rank)], rank, group=layout.cpu_group)
            for rank in range(1, layout.world_size)
        ]
        # The buffers must outlive the sends.
        for request in requests:
            request.wait()
        return RankBatch.of(version, parts[0], parts[own])
    tokens = torch.empty(sizes[own], dtype=torch.uint8)
    dist.recv(tokens, 0, group=layout.cpu_group)
    return RankBatch.of(version, _batch(numbers), _batch(tokens))


def over_steps(steps: Sequence[Mapping[str, float]]) -> dict[str, float]:
    """Return the metrics of a batch from those of its optimizer steps, each by its rule in the
    catalogue; a key that some steps lack is computed from the others."""
    found: dict[str, list[float]] = {}
    for step in steps:
        for name, value in step.items():
            found.setdefault(name, []).append(value)
    return {
        name: _over(METRICS[name].over_steps if name in METRICS else "mean", values)
        for name, values in found.items()
    }


def _over(rule: str, values: Sequence[float]) -> float:
    if len(values) == 1 or rule == "last":
        return values[-1]
    if rule == "first":
        return values[0]
    if rule == "largest":
        return float(np.max(values))
    total = float(np.sum(values))
    return total if rule == "sum" else total / len(values)


def _tensor(batch: pa.RecordBatch) -> Tensor:
    """Return the batch as an Arrow stream, [bytes] uint8."""
    return torch.frombuffer(bytearray(as_stream(batch)), dtype=torch.uint8)


def _batch(buffer: Tensor) -> pa.RecordBatch:
    """Return views of the buffer, which they keep alive."""
    return from_stream(pa.py_buffer(buffer.numpy()))

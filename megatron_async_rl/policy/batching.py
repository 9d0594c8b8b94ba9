"""Micro-batches: parts of a minibatch that the model computes at once, in rows that the sequence
layout fills (packing.py).

Invariants:
- the plan is a pure function of lengths and owners, and every rank computes the same plan;
- every sample is, whole, in exactly one micro-batch of exactly one data-parallel rank; the
  context-parallel ranks of that rank hold a part of each row, and all other data of the sample;
- the last token of a segment is only a target: it predicts nothing and is not fed to the model. A
  sample has one segment or several, each a sequence of its own. Segments with one prefix may share
  its positions, where one position predicts a token of each;
- every data-parallel rank runs the same number of micro-batches (all-masked ones are added), since
  the schedule and the gradient reduction make a fixed number of collectives per micro-batch; the
  interleaved pipeline schedule needs a multiple of the pipeline's size.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from megatron_async_rl.objectives.batch import on_device
from megatron_async_rl.policy.packed_sequences import PackedSequences
from megatron_async_rl.policy.packing import Arrangement, Padded, Segments, SequenceLayout
from megatron_async_rl.policy.parallel import Layout
from megatron_async_rl.samples.columns import spans
from megatron_async_rl.samples.rank_batch import RankBatch

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
    several; null if a row is one. Entries of `rows` are equal where samples share a position. No
    position predicts the first token of a further segment: its entry in `rows` is that of the
    second token, and it is not trained on. An all-masked micro-batch has samples == () and one
    token of padding, whose indices are -1.

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
    plan: that of all ranks.
    """

    rows: NDArray[np.int64]
    samples: RankBatch
    micro_batches: Sequence[MicroBatch]
    plan: MicroBatchPlan


class MicroBatchPlan(NamedTuple):
    """The micro-batches of all data-parallel ranks. computed: tokens that they compute together, in
    one pass. padding_share: share of padding in them. shared_share: share of the tokens that the
    samples feed to the model which are not computed, because another sample has them."""

    ranks: SamplesOfRanks
    computed: int
    padding_share: float
    shared_share: float


def plan_micro_batches(
    batch: RankBatch,
    *,
    data_parallel: int,
    budget: int,
    sequences: SequenceLayout = DEFAULT,
    in_groups_of: int = 1,
) -> MicroBatchPlan:
    """Divide the samples of each owner into micro-batches.

    in_groups_of: divisor of the number of micro-batches of a rank (the pipeline's size with virtual
    stages). Raises SampleTooLong.
    """
    segments = _segments(batch, np.arange(len(batch)))
    # One more than is fed, because the budget counts the last token, which is only a target.
    needed = np.maximum(batch.fed + 1, sequences.room(segments))
    if (needed > budget).any():
        first = int(np.argmax(needed > budget))
        raise SampleTooLong(batch.ids[first].as_py(), int(needed[first]), budget)

    shares = [np.flatnonzero(batch.owner == rank) for rank in range(data_parallel)]
    cuts = [sequences.cut(share, segments, budget) for share in shares]
    # Every rank runs as many micro-batches as the longest plan, or collectives would not match.
    rounds = -(-max(1, *(len(rank) for rank in cuts)) // in_groups_of)
    count = rounds * in_groups_of
    # All-masked micro-batches come last on every rank.
    ranks = tuple(tuple(rank) + ((),) * (count - len(rank)) for rank in cuts)

    parts = [segments.of(np.array(rows, dtype=np.int64)) for rank in ranks for rows in rank]
    computed = sum(math.prod(sequences.shape(part)) for part in parts)
    fed = int(batch.fed.sum())
    repeated = sum(sequences.repeated(part) for part in parts)
    return MicroBatchPlan(
        ranks, computed, 1.0 - (fed - repeated) / computed, repeated / max(fed, 1)
    )


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
    segments = [_segments(batch, np.array(rows, dtype=np.int64)) for rows in cuts]
    places = [sequences.arrange(each) for each in segments]
    packings: list[PackedSequences | None] = [each.packing for each in places]
    arrays = [
        _arrays(batch, rows, sequences, own, placed)
        for rows, own, placed in zip(cuts, segments, places, strict=True)
    ]
    host = {
        (number, name): torch.from_numpy(values)
        for number, own in enumerate(arrays)
        for name, values in own.items()
    }
    boundaries = [{} if packing is None else packing.tensors() for packing in packings]
    offsets = {
        (number, f"packing.{name}"): each
        for number, own in enumerate(boundaries)
        for name, each in own.items()
    }
    # One upload per dtype for all micro-batches, because the host waits for each upload.
    on = on_device(host | offsets, device)
    for number, packing in enumerate(packings):
        if packing is not None:
            # Replace the host copies: attention kernels read the offsets on the device.
            packing.place({name: on[number, f"packing.{name}"] for name in boundaries[number]})
    return [
        MicroBatch(
            samples=rows,
            packing=packings[number],
            routed_experts=_routed_experts(
                batch, rows, sequences, segments[number], places[number], device
            ),
            **{name: on[number, name] for name in arrays[number]},
        )
        for number, rows in enumerate(cuts)
    ]


def _arrays(
    batch: RankBatch,
    rows: tuple[int, ...],
    sequences: SequenceLayout,
    segments: Segments,
    arrangement: Arrangement,
) -> dict[str, NDArray[Any]]:
    """Return the device tensors of a micro-batch by name, int64 and bool."""
    chosen = np.array(rows, dtype=np.int64)
    starts, prompts, lengths = (
        each[chosen] for each in (batch.token_starts, batch.prompt_lengths, batch.lengths)
    )
    fed, counts = segments.fed, segments.counts
    # -1 marks samples of other ranks, whose tokens this rank never received.
    if starts.min(initial=0) < 0:
        missing = batch.ids[int(chosen[starts.argmin()])].as_py()
        raise ValueError(
            f"sample {missing!r} belongs to another data-parallel rank: its tokens are not here"
        )

    (count, length), places = sequences.shape(segments), arrangement.places
    tokens = np.zeros(count * length, dtype=np.int64)
    # Samples that share a place have the same token there.
    tokens[places] = batch.token_ids[spans(_starts(starts, fed, counts), fed)]
    # For every token of the samples, the place before it in its segment. The first token of a
    # further segment has no predictor: its entry is that of the second, and the loss mask excludes
    # it.
    begins = np.cumsum(fed) - fed
    before = places[np.maximum(spans(begins - 1, fed + 1), np.repeat(begins, fed + 1))]
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
    own = sequences.own(arrangement.lengths)
    if sequences.context.size > 1:
        # -1: on another context-parallel rank. A target belongs to the rank that holds its
        # predictor.
        here = np.full(len(tokens), -1)
        here[own] = np.arange(len(own))
        at = here[per_token["rows"]]
        per_token |= {"rows": at[at >= 0], "places": np.flatnonzero(at >= 0)}

    per_token |= {"tokens": tokens[own], "position_ids": arrangement.positions[own]}
    numbers = {name: values.astype(np.int64) for name, values in per_token.items()}
    marks = {"padding": ~_marked(places, count * length)[own]}
    if batch.routed_experts is not None:
        has = np.repeat(np.repeat(batch.routed[chosen], counts), fed)
        marks["routed"] = _marked(places[has], count * length)[own]
    return {
        name: values.reshape(count, -1) if name in BY_ROW else values
        for name, values in (numbers | marks).items()
    }


def _segments(batch: RankBatch, samples: NDArray[np.int64]) -> Segments:
    tokens, counts = batch.segments(samples)
    group = batch.group[samples]
    # The k-th segments of a group are a family (samples/prefixes.py).
    number = spans(np.zeros_like(counts), counts)
    family = np.repeat(group, counts) * (int(counts.max(initial=0)) + 1) + number
    return Segments(tokens - 1, counts, family, batch.shared_tokens(samples, counts), group)


def _starts(
    starts: NDArray[np.int64], fed: NDArray[np.int64], counts: NDArray[np.int64]
) -> NDArray[np.int64]:
    """Return [G] offsets of the segments among the tokens of samples that begin at `starts`."""
    tokens = fed + 1
    before = np.cumsum(tokens) - tokens
    return before + np.repeat(starts - before[np.cumsum(counts) - counts], counts)


def _marked(places: NDArray[np.int64], size: int) -> NDArray[np.bool_]:
    """Return [size], true at these places."""
    marked = np.zeros(size, dtype=bool)
    marked[places] = True
    return marked


def _routed_experts(
    batch: RankBatch,
    rows: tuple[int, ...],
    sequences: SequenceLayout,
    segments: Segments,
    arrangement: Arrangement,
    device: torch.device,
) -> Tensor | None:
    """Return `MicroBatch.routed_experts`."""
    if batch.routed_experts is None:
        return None
    chosen = np.array(rows, dtype=np.int64)
    fed, (count, length) = segments.fed, sequences.shape(segments)
    found = np.zeros((count * length, batch.routed_experts.shape[1]), dtype=np.uint8)
    read = spans(_starts(batch.token_starts[chosen], fed, segments.counts), fed)
    found[arrangement.places] = batch.routed_experts[read]
    own = sequences.own(arrangement.lengths)
    table = torch.from_numpy(found[own].reshape(count, -1, found.shape[1]))
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
        plan = plan_micro_batches(
            samples,
            data_parallel=self.layout.dp_size,
            budget=self.budget,
            sequences=self.sequences,
            in_groups_of=self.layout.pp_size if self.layout.virtual_stages > 1 else 1,
        )
        own = build_micro_batches(
            samples, plan.ranks[self.layout.dp_rank], self.layout.device, self.sequences
        )
        return Minibatch(rows, samples, own, plan)

    def build(self, samples: RankBatch, rows: tuple[int, ...]) -> MicroBatch:
        return build_micro_batch(samples, rows, self.layout.device, self.sequences)

"""Samples -> micro-batches: which rank, which rows, which positions.

Invariants:
- the plan is a pure function of lengths and owners, computed alike on every rank;
- every sample lies in exactly one micro-batch of exactly one data-parallel rank, whole; the
  context-parallel ranks of that rank hold a part of each row, and all of what is known of it;
- the last token of a segment is a target only: it predicts nothing and is not fed to the model. A
  sample has one segment or several, each a sequence of its own;
- every data-parallel rank runs the same number of micro-batches (an all-masked one fills up), since
  the collectives of the schedule and of the gradient reduction are counted by micro-batch; the
  interleaved pipeline schedule needs a multiple of the pipeline's size.

How segments lie in the rows of a micro-batch is the sequence layout's (`sequence_layout.py`).
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from megatron_async_rl.objectives.batch import on_device
from megatron_async_rl.policy.attention import PackedSequences
from megatron_async_rl.policy.parallel import Layout
from megatron_async_rl.policy.sequence_layout import Padded, SequenceLayout, balanced
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
    """B rows of length L holding N response tokens of the samples `samples` (indices into the
    planned batch).

    tokens, position_ids: [B, L] int64. rows: [N] int64, flat index b * L + t into [B, L] of the
    position that predicts the response token, one before it. targets: [N] int64. sequence: [N]
    int64, the place in `samples` of the token's. versions: [N] int64. owned_tokens: [N] int64,
    places of these tokens among those of the samples that their owner has in the planned batch.
    batch_samples: [S] int64, `samples`. packing: where segments begin and end in a row that has
    several; null where a row is one. Nothing predicts the first token of a further segment: its
    place in `rows` is that of the second, and is not trained on. An all-masked micro-batch has
    samples == () and one token of padding, whose places are -1.

    Under context parallelism L is the length of this rank's part, `rows` is [n] and of its own
    positions, and `places`, [n] int64, holds the index among the N tokens that each predicts; else
    null.

    padding: [B, L] bool, true for padding. routed_experts: [B, L, bytes] uint8 on the host
    (page-locked for CUDA), the experts that the engine chose (samples/types.py), of tokens where
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

    rows: [S] int64, the samples by their number in the batch. samples: those alone, in that order.
    micro_batches: their `samples` number `samples` above; every rank has as many. padding_share:
    padding tokens over all tokens that all ranks compute.
    """

    rows: NDArray[np.int64]
    samples: RankBatch
    micro_batches: Sequence[MicroBatch]
    padding_share: float


def assign_owners(
    lengths: NDArray[np.int64], data_parallel: int, group: NDArray[np.int64] | None = None
) -> NDArray[np.int64]:
    """[S]: the data-parallel rank that trains each sample: longest first onto the rank with fewest
    tokens. group: the samples' groups, where they have to stay whole."""
    if data_parallel == 1 or not len(lengths):
        return np.zeros(len(lengths), dtype=np.int64)
    member = np.arange(len(lengths)) if group is None else np.unique(group, return_inverse=True)[1]
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
    """Cut the samples of each owner into micro-batches; returns the cuts and `padding_share`.

    in_groups_of: the number of micro-batches of a rank is a multiple of it (the pipeline's size
    with virtual stages). Raises SampleTooLong.
    """
    fed, counts = _fed(batch, np.arange(len(batch)))
    needed = np.maximum(batch.fed + 1, sequences.room(fed, counts))
    if (needed > budget).any():
        first = int(np.argmax(needed > budget))
        raise SampleTooLong(batch.ids[first].as_py(), int(needed[first]), budget)

    shares = [np.flatnonzero(batch.owner == rank) for rank in range(data_parallel)]
    cuts = [sequences.cut(share, fed, counts, budget) for share in shares]
    rounds = -(-max(1, *(len(rank) for rank in cuts)) // in_groups_of)
    count = rounds * in_groups_of
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
    """Tensors of entries of a plan made with the same `batch` and `sequences`, uploaded together;
    the tokens of the samples are this rank's own."""
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
    placed = on_device(host | offsets, device)
    for number, packing in enumerate(packings):
        if packing is not None:
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
    """The tensors of a micro-batch on the device, int64 and bool, by their names there."""
    chosen = np.array(rows, dtype=np.int64)
    starts, prompts, lengths = (
        each[chosen] for each in (batch.token_starts, batch.prompt_lengths, batch.lengths)
    )
    fed, counts = _fed(batch, chosen)
    if starts.min(initial=0) < 0:
        missing = batch.ids[int(chosen[starts.argmin()])].as_py()
        raise ValueError(
            f"sample {missing!r} is another data-parallel rank's: no tokens of it here"
        )

    (count, length), line = sequences.shape(fed), sequences.starts(fed)
    tokens = np.zeros(count * length, dtype=np.int64)
    tokens[spans(line, fed)] = batch.token_ids[spans(_starts(starts, fed, counts), fed)]
    # Of every token of the samples, the position before it in its segment.
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
    if not rows:
        per_token = dict.fromkeys(per_token, np.zeros(1, dtype=np.int64))
        per_token |= dict.fromkeys(("owned_tokens", "batch_samples"), np.array([-1]))
    own = sequences.own(fed)
    if sequences.context.size > 1:
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
    """[G] tokens that each segment of the samples feeds to the model, and [S] segments of each."""
    tokens, counts = batch.segments(samples)
    return tokens - 1, counts


def _starts(
    starts: NDArray[np.int64], fed: NDArray[np.int64], counts: NDArray[np.int64]
) -> NDArray[np.int64]:
    """[G]: where each segment begins among the tokens that the samples begin at `starts` of."""
    tokens = fed + 1
    before = np.cumsum(tokens) - tokens
    return before + np.repeat(starts - before[np.cumsum(counts) - counts], counts)


def _marked(starts: NDArray[np.int64], lengths: NDArray[np.int64], size: int) -> NDArray[np.bool_]:
    """[size]: true in these spans."""
    marked = np.zeros(size, dtype=bool)
    marked[spans(starts, lengths)] = True
    return marked


def _routed_experts(
    batch: RankBatch, rows: tuple[int, ...], sequences: SequenceLayout, device: torch.device
) -> Tensor | None:
    """`MicroBatch.routed_experts`."""
    if batch.routed_experts is None:
        return None
    chosen = np.array(rows, dtype=np.int64)
    fed, counts = _fed(batch, chosen)
    count, length = sequences.shape(fed)
    found = np.zeros((count * length, batch.routed_experts.shape[1]), dtype=np.uint8)
    read = spans(_starts(batch.token_starts[chosen], fed, counts), fed)
    found[spans(sequences.starts(fed), fed)] = batch.routed_experts[read]
    table = torch.from_numpy(found[sequences.own(fed)].reshape(count, -1, found.shape[1]))
    return table.pin_memory() if device.type == "cuda" else table


@dataclass(frozen=True)
class Batcher:
    """Micro-batches of one rank. budget: largest number of tokens per micro-batch."""

    layout: Layout
    budget: int
    sequences: SequenceLayout

    def of(self, batch: RankBatch, rows: NDArray[np.int64] | None = None) -> Minibatch:
        """The minibatch of these samples, ascending; null for all. Raises SampleTooLong."""
        rows = np.arange(len(batch)) if rows is None else rows
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

"""Samples -> micro-batches: which rank, which rows, which positions.

Invariants:
- the plan is a pure function of lengths and owners, computed alike on every rank;
- every sample lies in exactly one micro-batch of exactly one data-parallel rank, whole;
- rows x padded length of a micro-batch never exceeds the token budget;
- a response's last token is a target only: it predicts nothing and is not fed to the model;
- every data-parallel rank runs the same number of micro-batches (an all-masked one fills up), since
  the collectives of the schedule and of the gradient reduction are counted by micro-batch; the
  interleaved pipeline schedule wants a multiple of the pipeline's size.

Rows are right-padded: under the causal mask no real token can see the padding, so no attention mask
is needed.
"""

from __future__ import annotations

import heapq
from dataclasses import dataclass
from typing import TYPE_CHECKING

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from megatron_async_rl.samples.columns import spans
from megatron_async_rl.samples.rank_batch import RankBatch

if TYPE_CHECKING:
    from megatron_async_rl.policy.parallel import Layout

MICRO_BATCH_COSTS = (256, 128, 64, 32, 16)
"""Fixed cost of a micro-batch, in tokens: see `cut`."""

MAX_PADDING = 0.1
"""Share of the computed tokens from which on padding is worth more micro-batches than by their
cost."""


class SampleTooLong(ValueError):
    """One sample alone exceeds the token budget of a micro-batch."""

    def __init__(self, sample: str, tokens: int, budget: int) -> None:
        super().__init__(
            f"sample {sample!r} has {tokens} tokens (prompt + response, padded), more than"
            f" policy.tokens_per_micro_batch = {budget}; raise that key to at least {tokens}, or"
            " shorten prompts or rollout.sampling.max_tokens"
        )
        self.sample, self.tokens, self.budget = sample, tokens, budget


@dataclass(frozen=True)
class Plan:
    """ranks[r]: the micro-batches of data-parallel rank r, each a tuple of sample indices; () is an
    all-masked one.

    padding_share: padding tokens over all tokens computed, of the whole plan.
    """

    ranks: tuple[tuple[tuple[int, ...], ...], ...]
    padding_share: float

    @property
    def micro_batches(self) -> int:
        """Per data-parallel rank; the same on all."""
        return len(self.ranks[0])


@dataclass(frozen=True, eq=False)
class MicroBatch:
    """B rows of padded length L holding N response tokens of the samples `samples` (indices into
    the planned batch).

    tokens, position_ids: [B, L] int64. rows: [N] int64, flat index b * L + t into [B, L] of the
    position that predicts the response token, one before it. targets: [N] int64. sequence: [N]
    int64 in 0..B-1. versions: [N] int64. An all-masked micro-batch has samples == () and one token
    of nobody.
    """

    samples: tuple[int, ...]
    tokens: Tensor
    position_ids: Tensor
    rows: Tensor
    targets: Tensor
    sequence: Tensor
    versions: Tensor


def assign_owners(
    lengths: NDArray[np.int64], data_parallel: int, group: NDArray[np.int64] | None = None
) -> NDArray[np.int64]:
    """[S]: the data-parallel rank that trains each sample: longest first onto the rank with fewest
    tokens. group: the samples' groups, where they have to stay whole."""
    if data_parallel == 1 or not len(lengths):
        return np.zeros(len(lengths), dtype=np.int64)
    member = np.arange(len(lengths)) if group is None else np.unique(group, return_inverse=True)[1]
    tokens = np.bincount(member, lengths).astype(np.int64)
    owner = np.zeros(len(tokens), dtype=np.int64)
    lightest = [(0, rank) for rank in range(data_parallel)]
    for unit in np.argsort(-tokens, kind="stable").tolist():
        load, rank = lightest[0]
        owner[unit] = rank
        heapq.heapreplace(lightest, (load + int(tokens[unit]), rank))
    return owner[member]


def plan_micro_batches(
    batch: RankBatch,
    *,
    data_parallel: int,
    budget: int,
    multiple: int = 1,
    in_groups_of: int = 1,
) -> Plan:
    """Cuts the samples of each owner into micro-batches.

    multiple: padded lengths are multiples of it (the tensor-parallel size under sequence
    parallelism). in_groups_of: so is the number of micro-batches of a rank (the pipeline's size
    with virtual stages). Raises SampleTooLong.
    """
    lengths = _round_up(batch.fed, multiple)
    needed = np.maximum(batch.fed + 1, lengths)
    if (needed > budget).any():
        first = int(np.argmax(needed > budget))
        raise SampleTooLong(batch.ids[first].as_py(), int(needed[first]), budget)

    shares = [np.flatnonzero(batch.owner == rank) for rank in range(data_parallel)]
    cuts = [cut(share, lengths, budget) for share in shares]
    rounds = -(-max(1, *(len(rank) for rank in cuts)) // in_groups_of)
    count = rounds * in_groups_of
    ranks = tuple(tuple(rank) + ((),) * (count - len(rank)) for rank in cuts)

    computed = sum(
        len(rows) * int(lengths[rows[0]]) if rows else multiple for rank in ranks for rows in rank
    )
    return Plan(ranks, 1.0 - int(batch.fed.sum()) / computed)


def cut(share: NDArray[np.int64], lengths: NDArray[np.int64], budget: int) -> list[tuple[int, ...]]:
    """One rank's samples, longest first, as micro-batches.

    On one CPU core a micro-batch takes by itself (however small it is: kernels are started,
    gradients are added up) as long as some 250 tokens do for a model of 0.3 million parameters, 150
    for one of 1 million, fewer for larger ones. So the cut is the cheapest at the first of
    MICRO_BATCH_COSTS, unless more than MAX_PADDING of it is padding; then at the next one. The
    last bounds how many micro-batches a few samples are cut into.
    """
    real, found = int(lengths[share].sum()), []
    for fixed in MICRO_BATCH_COSTS:
        found = cheapest_cut(share, lengths, budget, fixed)
        if real >= (1.0 - MAX_PADDING) * sum(len(rows) * int(lengths[rows[0]]) for rows in found):
            break
    return found


def cheapest_cut(
    share: NDArray[np.int64], lengths: NDArray[np.int64], budget: int, fixed: int
) -> list[tuple[int, ...]]:
    """The micro-batches, longest samples first, that cost least: each the tokens it computes,
    padding included, and `fixed` more.

    Rows of a micro-batch are neighbours in length, so the cheapest cut is found from the longest
    on: the cheapest cut before a run of samples, plus the run.
    """
    ordered = share[np.lexsort((share, -lengths[share]))]

    # Samples of one length are cut apart only where the budget asks for it.
    distinct, counts = np.unique(lengths[ordered], return_counts=True)
    longest, ends = distinct[::-1], np.concatenate(([0], np.cumsum(counts[::-1])))
    cheapest, came_from = np.zeros(len(ends)), np.zeros(len(ends), dtype=np.int64)
    for end in range(1, len(ends)):
        rows = ends[end] - ends[:end]
        micro_batches = -(-rows // (budget // longest[:end]))
        costs = cheapest[:end] + rows * longest[:end] + fixed * micro_batches
        came_from[end] = costs.argmin()
        cheapest[end] = costs[came_from[end]]

    found: list[tuple[int, ...]] = []
    end = len(ends) - 1
    while end:
        start = int(came_from[end])
        rows = ordered[ends[start] : ends[end]]
        pieces = -(-len(rows) // (budget // int(longest[start])))
        found += [tuple(piece.tolist()) for piece in np.array_split(rows, pieces)[::-1]]
        end = start
    return found[::-1]


def build_micro_batch(
    batch: RankBatch, rows: tuple[int, ...], device: torch.device, multiple: int = 1
) -> MicroBatch:
    """Tensors of one entry of a plan made with the same `batch` and `multiple`; the tokens of the
    samples are this rank's own."""
    if not rows:
        return _all_masked(device, multiple)
    chosen = np.array(rows)
    starts, fed, lengths = batch.token_starts[chosen], batch.fed[chosen], batch.lengths[chosen]
    prompts = batch.prompt_lengths[chosen]
    if starts.min() < 0:
        missing = batch.ids[int(chosen[starts.argmin()])].as_py()
        raise ValueError(
            f"sample {missing!r} is another data-parallel rank's: no tokens of it here"
        )

    length = int(_round_up(fed, multiple).max())
    line = np.arange(len(chosen)) * length
    tokens = np.zeros(len(chosen) * length, dtype=np.int64)
    tokens[spans(line, fed)] = batch.token_ids[spans(starts, fed)]

    def on_device(values: NDArray[np.int64]) -> Tensor:
        return torch.from_numpy(values).to(device)

    return MicroBatch(
        samples=rows,
        tokens=on_device(tokens.reshape(len(chosen), length)),
        position_ids=torch.arange(length, device=device).expand(len(chosen), length),
        rows=on_device(spans(line + prompts - 1, lengths)),
        targets=on_device(batch.token_ids[spans(starts + prompts, lengths)].astype(np.int64)),
        sequence=on_device(np.repeat(np.arange(len(chosen)), lengths)),
        versions=on_device(batch.versions[spans(batch.starts[chosen], lengths)].astype(np.int64)),
    )


@dataclass(frozen=True)
class Batcher:
    """Micro-batches of one rank. budget: tokens of one at the most. multiple: padded lengths are
    multiples of it."""

    layout: Layout
    budget: int
    multiple: int

    def of(self, samples: RankBatch) -> tuple[Plan, list[MicroBatch]]:
        """The plan of all ranks, and this rank's micro-batches. Raises SampleTooLong."""
        plan = plan_micro_batches(
            samples,
            data_parallel=self.layout.dp_size,
            budget=self.budget,
            multiple=self.multiple,
            in_groups_of=self.layout.pp_size if self.layout.virtual_stages > 1 else 1,
        )
        return plan, [self.build(samples, rows) for rows in plan.ranks[self.layout.dp_rank]]

    def build(self, samples: RankBatch, rows: tuple[int, ...]) -> MicroBatch:
        return build_micro_batch(samples, rows, self.layout.device, self.multiple)


def _all_masked(device: torch.device, multiple: int) -> MicroBatch:
    return MicroBatch(
        samples=(),
        tokens=torch.zeros((1, multiple), dtype=torch.int64, device=device),
        position_ids=torch.arange(multiple, device=device).expand(1, multiple),
        rows=torch.zeros(1, dtype=torch.int64, device=device),
        targets=torch.zeros(1, dtype=torch.int64, device=device),
        sequence=torch.zeros(1, dtype=torch.int64, device=device),
        versions=torch.zeros(1, dtype=torch.int64, device=device),
    )


def _round_up(lengths: NDArray[np.int64], multiple: int) -> NDArray[np.int64]:
    return -(-lengths // multiple) * multiple

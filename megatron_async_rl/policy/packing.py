"""Layout of samples' segments in the rows of a micro-batch: one segment per row, padded (`Padded`),
or all in one row, end to end (`Packed`).

Invariants:
- only this file depends on the layout's form: planning, building and the attention of a micro-batch
  use its interface, and all code after the hidden states gets response tokens alone;
- a sample is never cut, and its segments stay together; no token attends to another segment, except
  to a prefix that both begin with;
- positions count from 0 in every segment;
- rows x length of a micro-batch never exceeds the token budget, and the length is a multiple of
  `multiple`, which sequence and context parallelism require;
- context-parallel ranks cut each segment in the same way, so its length in a row is a multiple of
  its chunks;
- the filling of a row comes after its last segment, so that no real token attends to it (attention
  is causal).
"""

from __future__ import annotations

import heapq
import math
from abc import ABC, abstractmethod
from dataclasses import dataclass
from typing import Literal

import numpy as np
import torch
from numpy.typing import NDArray

from megatron_async_rl.config.policy import KEYS_PER_TOKEN, PolicyConfig
from megatron_async_rl.policy.attention import WHOLE, ContextParallelSlice
from megatron_async_rl.policy.packed_sequences import PackedSequences
from megatron_async_rl.samples.columns import spans

MICRO_BATCH_COSTS = (256, 128, 64, 32, 16)
"""Fixed cost of a padded micro-batch, in tokens: see `Padded.cut`."""

MAX_PADDING = 0.1
"""Share of padding in the computed tokens above which more micro-batches are used than their cost
alone would justify."""

KERNEL_TOKENS = 32
"""Divisor of a packed row's length on a CPU in bfloat16. oneDNN compiles kernels for each number of
rows of a matrix product and keeps them, so a process that meets other numbers in every step grows
(benchmarks/results.md)."""

CALL_COST = 64
"""Fixed cost of a call of attention, in filled tokens: see `Packed.pieces`."""


@dataclass(frozen=True, eq=False)
class Segments:
    """The G segments of S samples, in order.

    fed: [G] int64, the tokens that each feeds to the model. counts: [S] int64, the segments of each
    sample. family: [G] int64, the same number for segments that begin with the same `shared`
    tokens, [G] int64; 0 shares none. group: [S] int64, the same number for samples whose segments
    share tokens.
    """

    fed: NDArray[np.int64]
    counts: NDArray[np.int64]
    family: NDArray[np.int64]
    shared: NDArray[np.int64]
    group: NDArray[np.int64]

    @classmethod
    def apart(cls, fed: NDArray[np.int64], counts: NDArray[np.int64] | None = None) -> Segments:
        """Return segments that share nothing. counts: null for one segment per sample."""
        counts = np.ones_like(fed) if counts is None else counts
        return cls(fed, counts, np.arange(len(fed)), np.zeros_like(fed), np.arange(len(counts)))

    @property
    def first(self) -> NDArray[np.int64]:
        """Index of each sample's first segment: [S]."""
        return np.cumsum(self.counts) - self.counts

    def of(self, samples: NDArray[np.int64]) -> Segments:
        """Return the segments of these samples alone."""
        own = spans(self.first[samples], self.counts[samples])
        return Segments(
            self.fed[own],
            self.counts[samples],
            self.family[own],
            self.shared[own],
            self.group[samples],
        )

    @property
    def repeated(self) -> int:
        """Number of fed tokens that are not computed, because another segment has them."""
        _, first, counts = np.unique(self.family, return_index=True, return_counts=True)
        return int(((counts - 1) * self.shared[first]).sum())

    @property
    def computed(self) -> int:
        """Number of tokens to compute."""
        return int(self.fed.sum()) - self.repeated

    @property
    def copied_keys(self) -> int:
        """Number of keys that attention copies: those of each segment that continues a prefix of
        several."""
        _, family, counts = np.unique(self.family, return_inverse=True, return_counts=True)
        continues = (counts[family] > 1) & (self.shared > 0) & (self.fed > self.shared)
        return int(self.fed[continues].sum())


@dataclass(frozen=True)
class SequenceLayout(ABC):
    """Interface of layouts. `segments` below: those of a micro-batch; without any it is a
    micro-batch of padding, which is one row of `multiple` tokens.

    multiple: divisor of a row's length, a multiple of `context.multiple`. context: this rank's
    place among those that share the rows; all other values describe whole rows.
    """

    multiple: int = 1
    context: ContextParallelSlice = WHOLE

    @abstractmethod
    def cut(
        self, share: NDArray[np.int64], segments: Segments, budget: int
    ) -> list[tuple[int, ...]]:
        """Return the samples `share` (indices into `segments.counts`) as micro-batches. Each of
        them alone fits into the budget."""

    @abstractmethod
    def room(self, segments: Segments) -> NDArray[np.int64]:
        """Return the tokens of a micro-batch of each sample alone: [S]."""

    @abstractmethod
    def shape(self, segments: Segments) -> tuple[int, int]:
        """Return (rows, length)."""

    def repeated(self, segments: Segments) -> int:
        """Return the number of fed tokens that are not computed, because another segment has
        them."""
        return 0

    @abstractmethod
    def arrange(self, segments: Segments) -> Arrangement:
        """Return the places of the segments' tokens."""

    def own(self, lengths: NDArray[np.int64]) -> NDArray[np.int64]:
        """Return the positions in the flattened rows of this rank's tokens, row by row. lengths:
        `Arrangement.lengths`."""
        return self.context.own(np.cumsum(lengths) - lengths, lengths)

    def round_up(self, lengths: NDArray[np.int64]) -> NDArray[np.int64]:
        return -(-lengths // self.multiple) * self.multiple


@dataclass(frozen=True, eq=False)
class Arrangement:
    """Places in the rows of a micro-batch.

    places: for each token that the segments feed, in order, its index in the flattened rows; tokens
    of a shared prefix have one index. lengths: of the pieces for attention, in order, including
    their filling; together they are all of the rows. before: tokens of each piece's prefix.
    packing: the attention's boundaries within the row, on the host; null if a row is one segment.
    """

    places: NDArray[np.int64]
    lengths: NDArray[np.int64]
    before: NDArray[np.int64]
    packing: PackedSequences | None = None

    @property
    def positions(self) -> NDArray[np.int64]:
        """Position in its segment of each token of the flattened rows."""
        return spans(self.before, self.lengths)


@dataclass(frozen=True)
class Padded(SequenceLayout):
    """A row for each segment, right-padded to the longest of the micro-batch. Under the causal mask
    no real token attends to the padding, so no attention mask is needed."""

    def cut(
        self, share: NDArray[np.int64], segments: Segments, budget: int
    ) -> list[tuple[int, ...]]:
        """Return the cheapest division. On one CPU core the fixed cost of a micro-batch (starting
        kernels, adding up gradients) equals the cost of about 250 tokens for a model of 0.3 million
        parameters, 150 for one of 1 million, and fewer for larger ones. So the result is the
        cheapest division at the first of MICRO_BATCH_COSTS, unless more than MAX_PADDING of it is
        padding; then at the next one. The last one limits the number of micro-batches for a few
        samples. A sample of several segments is a micro-batch by itself.
        """
        several = segments.counts[share] > 1
        # A row contains one segment, and a sample is never divided: its segments are rows of one
        # micro-batch.
        share, alone = share[~several], share[several]
        lengths = self.room(segments)
        real, found = int(lengths[share].sum()), []
        for fixed in MICRO_BATCH_COSTS:
            found = cheapest_cut(share, lengths, budget, fixed)
            computed = sum(len(rows) * int(lengths[rows[0]]) for rows in found)
            # Use the first cost whose division has little padding: larger costs mean fewer
            # micro-batches.
            if real >= (1.0 - MAX_PADDING) * computed:
                break
        return found + [(int(row),) for row in alone]

    def room(self, segments: Segments) -> NDArray[np.int64]:
        # All rows of a micro-batch have the length of its longest segment.
        longest: NDArray[np.int64] = np.maximum.reduceat(segments.fed, segments.first)
        return segments.counts * self.round_up(longest)

    def shape(self, segments: Segments) -> tuple[int, int]:
        fed = segments.fed
        return max(1, len(fed)), int(self.round_up(fed).max(initial=self.multiple))

    def arrange(self, segments: Segments) -> Arrangement:
        rows, length = self.shape(segments)
        starts = np.arange(len(segments.fed)) * length
        lengths = np.full(rows, length)
        return Arrangement(spans(starts, segments.fed), lengths, np.zeros_like(lengths))


@dataclass(frozen=True)
class Packed(SequenceLayout):
    """One row: the segments end to end, each filled up to a multiple of its chunks. The filling of
    the row up to `multiple` belongs to the last segment.

    Segments of a family share their prefix: the row has it once, and the rest of each segment
    (packed_sequences.py). Families are cut only if one exceeds the budget, in tokens or in copied
    keys, and then each part has the prefix.
    """

    def cut(
        self, share: NDArray[np.int64], segments: Segments, budget: int
    ) -> list[tuple[int, ...]]:
        """Divide the samples `share` into as few micro-batches as the budget permits, with
        nearly equal numbers of tokens. Samples of one length are neighbours, because the
        attention computes them in one call."""
        ordered = share[np.lexsort((share, -self._tokens(segments)[share]))]
        # Rows are filled up to a multiple, so the budget beyond the last multiple is unusable.
        room = budget // self.multiple * self.multiple
        units, tokens = self._units(ordered, segments, room)
        longest = np.argsort(-tokens, kind="stable")
        units, tokens = [units[unit] for unit in longest], tokens[longest]
        count = -(-int(tokens.sum()) // room)
        while True:
            # The smallest number of parts that fit: longest-first division may need one more than
            # the sum requires.
            part = balanced(tokens, count)
            if np.bincount(part, tokens).max(initial=0) <= room:
                return [
                    tuple(np.concatenate([units[unit] for unit in own]).tolist())
                    for number in range(count)
                    if len(own := np.flatnonzero(part == number))
                ]
            count += 1

    def _units(
        self, ordered: NDArray[np.int64], segments: Segments, room: int
    ) -> tuple[list[NDArray[np.int64]], NDArray[np.int64]]:
        """Return samples that stay together, and the cost of each unit: single samples, and the
        samples of a group that share tokens, as many as fit."""
        tokens = self._tokens(segments)
        shares = np.maximum.reduceat(segments.shared, segments.first)[ordered] > 0
        alone, sharing = ordered[~shares], ordered[shares]
        numbers = segments.group[sharing]
        together = [
            part
            for number in np.unique(numbers)
            for part in _parts(sharing[numbers == number], segments, room)
        ]
        costs = [_cost(segments.of(part)) for part in together]
        return [*alone[:, None], *together], np.concatenate(
            (tokens[alone], np.array(costs, dtype=np.int64))
        )

    def room(self, segments: Segments) -> NDArray[np.int64]:
        return self.round_up(self._tokens(segments))

    def shape(self, segments: Segments) -> tuple[int, int]:
        tokens = int(self._filled(segments.fed).sum()) - segments.repeated
        return 1, max(self.multiple, -(-tokens // self.multiple) * self.multiple)

    def repeated(self, segments: Segments) -> int:
        return segments.repeated

    def arrange(self, segments: Segments) -> Arrangement:
        return self.pieces(segments).arrangement(self.context.size)

    def pieces(self, segments: Segments) -> Pieces:
        """Return the pieces of the row. Branches with prefixes of equal length are computed
        together, filled up to the longest one, unless the filling costs more than another call."""
        fed = segments.fed
        members = np.unique(segments.family, return_inverse=True, return_counts=True)
        shared = np.where(members[2][members[1]] > 1, segments.shared, 0) if len(fed) else fed
        whole, sharing = np.flatnonzero(shared == 0), np.flatnonzero(shared)
        own, prefix = np.full(len(fed), -1), np.full(len(fed), -1)
        _, first, family = np.unique(
            segments.family[sharing], return_index=True, return_inverse=True
        )
        lengths = np.concatenate((shared[sharing][first], self._filled(fed[whole])))
        if len(first):
            # Roots of equal length are one call.
            order = np.argsort(-lengths, kind="stable")
            place = np.empty_like(order)
            place[order] = np.arange(len(order))
            lengths = lengths[order]
            prefix[sharing] = place[: len(first)][family]
            own[whole] = place[len(first) :]
        else:
            own[whole] = np.arange(len(whole))

        rest = fed - shared
        calls = _calls(np.flatnonzero((shared > 0) & (rest > 0)), shared, rest, prefix)
        branches = np.concatenate(calls) if calls else np.zeros(0, dtype=np.int64)
        own[branches] = len(lengths) + np.arange(len(branches))
        lengths = np.concatenate((lengths, rest[branches]))
        if not len(lengths):
            lengths = np.array([self.multiple])
        # The filling extends the last piece and follows its tokens, so no real token attends to it.
        lengths[-1] += -int(lengths.sum()) % self.multiple
        return Pieces(lengths, prefix[branches], tuple(map(len, calls)), own, prefix, shared, rest)

    def _tokens(self, segments: Segments) -> NDArray[np.int64]:
        """Return the tokens of each sample alone, without the filling of the row: [S]."""
        found: NDArray[np.int64] = np.add.reduceat(self._filled(segments.fed), segments.first)
        return found

    def _filled(self, fed: NDArray[np.int64]) -> NDArray[np.int64]:
        chunks = self.context.multiple
        # Context-parallel ranks hold two equal chunks of every segment.
        return -(-fed.astype(np.int64) // chunks) * chunks


@dataclass(frozen=True, eq=False)
class Pieces:
    """The pieces of a packed row, roots before branches.

    lengths: [Q]. parents: the prefix's piece of each branch. calls: number of branches of each
    call. own, prefix: [G], the pieces with a segment's own tokens and with its prefix; -1 for none.
    shared, rest: [G], the tokens of both.
    """

    lengths: NDArray[np.int64]
    parents: NDArray[np.int64]
    calls: tuple[int, ...]
    own: NDArray[np.int64]
    prefix: NDArray[np.int64]
    shared: NDArray[np.int64]
    rest: NDArray[np.int64]

    def arrangement(self, context_size: int) -> Arrangement:
        starts = np.cumsum(self.lengths) - self.lengths
        # A piece -1 has no tokens.
        both = np.stack([starts[self.prefix], starts[self.own]], axis=1).ravel()
        roots = len(self.lengths) - len(self.parents)
        before = np.zeros_like(self.lengths)
        before[roots:] = self.lengths[self.parents]
        return Arrangement(
            places=spans(both, np.stack([self.shared, self.rest], axis=1).ravel()),
            lengths=self.lengths,
            before=before,
            # On the host, because all offsets of a plan are uploaded together (batching.py).
            packing=PackedSequences.of(
                self.lengths,
                torch.device("cpu"),
                context_size,
                calls=self.calls,
                parents=self.parents,
                shared=bool(self.shared.any()),
            ),
        )


def _cost(segments: Segments) -> int:
    """Return the part of a micro-batch's budget that segments need: the tokens to compute, or more
    if attention copies many keys. A long prompt of many short responses has few tokens, but its
    keys and values are stored once for each response, so tokens alone would not bound memory."""
    return max(segments.computed, -(-segments.copied_keys // KEYS_PER_TOKEN))


def _parts(samples: NDArray[np.int64], segments: Segments, room: int) -> list[NDArray[np.int64]]:
    """Divide samples that share prefixes into as few parts as fit, each with its own copy of the
    prefixes."""
    own = segments.of(samples)
    if _cost(own) <= room:
        return [samples]
    rest = np.add.reduceat(own.fed - own.shared, own.first)
    # Each part has the prefix.
    left = max(1, room - own.computed + int(rest.sum()))
    fewest = max(int(rest.sum()) / left, own.copied_keys / (KEYS_PER_TOKEN * room), 2)
    # A sample alone always fits.
    for count in range(math.ceil(fewest), len(samples)):
        part = balanced(rest, count)
        parts = [samples[part == number] for number in range(count)]
        if all(_cost(segments.of(each)) <= room for each in parts):
            return parts
    return list(samples[:, None])


def _calls(
    branches: NDArray[np.int64],
    shared: NDArray[np.int64],
    rest: NDArray[np.int64],
    prefix: NDArray[np.int64],
) -> list[NDArray[np.int64]]:
    """Return the branches (segments) of each call of attention, in order. shared, rest, prefix: as
    in `Pieces`."""
    found = []
    for length in np.unique(shared[branches])[::-1]:
        alike = branches[shared[branches] == length]
        unlimited = len(alike) * int(rest[alike].max())
        for rows in cheapest_cut(alike, rest, unlimited, CALL_COST):
            call = np.array(rows)
            # Branches of one prefix are adjacent, so that its gradient is one sum.
            found.append(call[np.lexsort((-rest[call], prefix[call]))])
    return found


LAYOUTS: dict[str, type[SequenceLayout]] = {"padded": Padded, "packed": Packed}
"""Layouts by the value of `policy.sequence`."""


def row_divisor(config: PolicyConfig, *, dtype: str, device: str) -> int:
    """Return the divisor of a row's length in tokens for a model of this dtype."""
    divisor = config.row_multiple
    if (device, dtype, config.sequence) != ("cpu", "bfloat16", "packed"):
        return divisor
    filled = math.lcm(divisor, KERNEL_TOKENS)
    # Otherwise a sample as long as the budget would not fit.
    return divisor if config.tokens_per_micro_batch % filled else filled


def sequence_layout(
    name: Literal["padded", "packed"], multiple: int, context: ContextParallelSlice
) -> SequenceLayout:
    return LAYOUTS[name](multiple, context)


def balanced(tokens: NDArray[np.int64], parts: int) -> NDArray[np.int64]:
    """Return [S] in 0..parts-1: longest first into the part with fewest tokens."""
    part = np.zeros(len(tokens), dtype=np.int64)
    lightest = [(0, number) for number in range(parts)]
    # Stable, so that all ranks use the same order for samples of equal length.
    for unit in np.argsort(-tokens, kind="stable").tolist():
        load, number = lightest[0]
        part[unit] = number
        heapq.heapreplace(lightest, (load + int(tokens[unit]), number))
    return part


def cheapest_cut(
    share: NDArray[np.int64], lengths: NDArray[np.int64], budget: int, fixed: int
) -> list[tuple[int, ...]]:
    """Return the cheapest padded micro-batches, longest samples first. The cost of each is the
    number of tokens it computes, including padding, plus `fixed`.

    Rows of a micro-batch are adjacent in length, so the cheapest division is found from the longest
    on: the cheapest division before a run of samples, plus the run.
    """
    ordered = share[np.lexsort((share, -lengths[share]))]

    # Samples of equal length are separated only if the budget requires it.
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
        # A run of one length may exceed the budget; it is divided into nearly equal pieces.
        pieces = -(-len(rows) // (budget // int(longest[start])))
        found += [tuple(piece.tolist()) for piece in np.array_split(rows, pieces)[::-1]]
        end = start
    return found[::-1]

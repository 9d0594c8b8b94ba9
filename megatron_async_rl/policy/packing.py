"""Layout of samples' segments in the rows of a micro-batch: one segment per row, padded (`Padded`),
or all in one row, end to end (`Packed`).

Invariants:
- only this file depends on the layout's form: planning, building and the attention of a micro-batch
  use its interface, and all code after the hidden states gets response tokens alone;
- a sample is never cut, and its segments stay together; no token attends to another segment;
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
from abc import ABC, abstractmethod
from dataclasses import dataclass
from typing import Literal

import numpy as np
import torch
from numpy.typing import NDArray

from megatron_async_rl.policy.attention import WHOLE, ContextParallelSlice, PackedSequences
from megatron_async_rl.samples.columns import spans

MICRO_BATCH_COSTS = (256, 128, 64, 32, 16)
"""Fixed cost of a padded micro-batch, in tokens: see `Padded.cut`."""

MAX_PADDING = 0.1
"""Share of padding in the computed tokens above which more micro-batches are used than their cost
alone would justify."""


@dataclass(frozen=True)
class SequenceLayout(ABC):
    """Interface of layouts. `fed` below: [G] int64, the tokens that each segment of a micro-batch
    feeds to the model, in order; empty for a micro-batch of padding, which is one row of `multiple`
    tokens. `counts`: [S] int64, the segments of each sample.

    multiple: divisor of a row's length, a multiple of `context.multiple`. context: this rank's
    place among those that share the rows; all other values describe whole rows.
    """

    multiple: int = 1
    context: ContextParallelSlice = WHOLE

    @abstractmethod
    def cut(
        self,
        share: NDArray[np.int64],
        fed: NDArray[np.int64],
        counts: NDArray[np.int64],
        budget: int,
    ) -> list[tuple[int, ...]]:
        """Return the samples `share` (indices into `counts`) as micro-batches, each longest first.
        Each of them alone fits into the budget."""

    @abstractmethod
    def room(self, fed: NDArray[np.int64], counts: NDArray[np.int64]) -> NDArray[np.int64]:
        """Return the tokens of a micro-batch of each sample alone: [S]."""

    @abstractmethod
    def shape(self, fed: NDArray[np.int64]) -> tuple[int, int]:
        """Return (rows, length)."""

    @abstractmethod
    def starts(self, fed: NDArray[np.int64]) -> NDArray[np.int64]:
        """Return the offset of each segment in the flattened rows: [G]."""

    @abstractmethod
    def lengths(self, fed: NDArray[np.int64]) -> NDArray[np.int64]:
        """Return the lengths of the sequences for attention, in order, including their filling;
        together they are all of the rows."""

    def own(self, fed: NDArray[np.int64]) -> NDArray[np.int64]:
        """Return the positions in the flattened rows of this rank's tokens, row by row."""
        lengths = self.lengths(fed)
        return self.context.own(np.cumsum(lengths) - lengths, lengths)

    def positions(self, fed: NDArray[np.int64]) -> NDArray[np.int64]:
        """Return the position in its sequence of each token of the flattened rows."""
        lengths = self.lengths(fed)
        return spans(np.zeros_like(lengths), lengths)

    def packing(self, fed: NDArray[np.int64]) -> PackedSequences | None:
        """Return the attention's boundaries within the row, on the host; null if a row is one
        segment."""
        return None

    def round_up(self, lengths: NDArray[np.int64]) -> NDArray[np.int64]:
        return -(-lengths // self.multiple) * self.multiple


@dataclass(frozen=True)
class Padded(SequenceLayout):
    """A row for each segment, right-padded to the longest of the micro-batch. Under the causal mask
    no real token attends to the padding, so no attention mask is needed."""

    def cut(
        self,
        share: NDArray[np.int64],
        fed: NDArray[np.int64],
        counts: NDArray[np.int64],
        budget: int,
    ) -> list[tuple[int, ...]]:
        """Return the cheapest division. On one CPU core the fixed cost of a micro-batch (starting
        kernels, adding up gradients) equals the cost of about 250 tokens for a model of 0.3 million
        parameters, 150 for one of 1 million, and fewer for larger ones. So the result is the
        cheapest division at the first of MICRO_BATCH_COSTS, unless more than MAX_PADDING of it is
        padding; then at the next one. The last one limits the number of micro-batches for a few
        samples. A sample of several segments is a micro-batch by itself.
        """
        several = counts[share] > 1
        # A row contains one segment, and a sample is never divided: its segments are rows of one
        # micro-batch.
        share, alone = share[~several], share[several]
        lengths = self.room(fed, counts)
        real, found = int(lengths[share].sum()), []
        for fixed in MICRO_BATCH_COSTS:
            found = cheapest_cut(share, lengths, budget, fixed)
            computed = sum(len(rows) * int(lengths[rows[0]]) for rows in found)
            # Use the first cost whose division has little padding: larger costs mean fewer
            # micro-batches.
            if real >= (1.0 - MAX_PADDING) * computed:
                break
        return found + [(int(row),) for row in alone]

    def room(self, fed: NDArray[np.int64], counts: NDArray[np.int64]) -> NDArray[np.int64]:
        # All rows of a micro-batch have the length of its longest segment.
        longest: NDArray[np.int64] = np.maximum.reduceat(fed, np.cumsum(counts) - counts)
        return counts * self.round_up(longest)

    def shape(self, fed: NDArray[np.int64]) -> tuple[int, int]:
        return max(1, len(fed)), int(self.round_up(fed).max(initial=self.multiple))

    def starts(self, fed: NDArray[np.int64]) -> NDArray[np.int64]:
        return np.arange(len(fed)) * self.shape(fed)[1]

    def lengths(self, fed: NDArray[np.int64]) -> NDArray[np.int64]:
        rows, length = self.shape(fed)
        return np.full(rows, length)


@dataclass(frozen=True)
class Packed(SequenceLayout):
    """One row: the segments end to end, each filled up to a multiple of its chunks. The filling of
    the row up to `multiple` belongs to the last segment."""

    def cut(
        self,
        share: NDArray[np.int64],
        fed: NDArray[np.int64],
        counts: NDArray[np.int64],
        budget: int,
    ) -> list[tuple[int, ...]]:
        """Divide the samples `share` into as few micro-batches as the budget permits, with
        nearly equal numbers of tokens. Samples of one length are neighbours, because the
        attention computes them in one call."""
        first = np.cumsum(counts) - counts
        ordered = share[np.lexsort((share, -np.add.reduceat(fed, first)[share]))]
        tokens = np.add.reduceat(self._filled(fed), first)[ordered]
        # Rows are filled up to a multiple, so the budget beyond the last multiple is unusable.
        room = budget // self.multiple * self.multiple
        count = -(-int(tokens.sum()) // room)
        while True:
            # The smallest number of parts that fit: longest-first division may need one more than
            # the sum requires.
            part = balanced(tokens, count)
            if np.bincount(part, tokens).max(initial=0) <= room:
                return [tuple(ordered[part == number].tolist()) for number in range(count)]
            count += 1

    def room(self, fed: NDArray[np.int64], counts: NDArray[np.int64]) -> NDArray[np.int64]:
        return self.round_up(np.add.reduceat(self._filled(fed), np.cumsum(counts) - counts))

    def shape(self, fed: NDArray[np.int64]) -> tuple[int, int]:
        return 1, int(self.lengths(fed).sum())

    def starts(self, fed: NDArray[np.int64]) -> NDArray[np.int64]:
        filled = self._filled(fed)
        return np.cumsum(filled) - filled

    def lengths(self, fed: NDArray[np.int64]) -> NDArray[np.int64]:
        lengths = self._filled(fed) if len(fed) else np.array([self.multiple])
        # The filling extends the last segment and follows its tokens, so no real token attends to
        # it.
        lengths[-1] += -int(lengths.sum()) % self.multiple
        return lengths

    def packing(self, fed: NDArray[np.int64]) -> PackedSequences:
        # On the host, because all offsets of a plan are uploaded together (batching.py).
        return PackedSequences.of(self.lengths(fed), torch.device("cpu"), self.context.size)

    def _filled(self, fed: NDArray[np.int64]) -> NDArray[np.int64]:
        chunks = self.context.multiple
        # Context-parallel ranks hold two equal chunks of every segment.
        return -(-fed.astype(np.int64) // chunks) * chunks


LAYOUTS: dict[str, type[SequenceLayout]] = {"padded": Padded, "packed": Packed}
"""Layouts by the value of `policy.sequence`."""


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

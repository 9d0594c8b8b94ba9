"""Context parallelism: sequences cut over the ranks of a context-parallel group.

A sequence is 2 * size chunks of one length; rank r holds chunk r and, behind it, chunk 2 * size - 1
- r: Megatron's cut and Transformer Engine's, under which all ranks have the same work with a causal
mask. Attention alone looks at other tokens; everything else in a layer is local.

Invariants:
- a sequence's length is a multiple of `Context.multiple`, which the sequence layout ensures;
- queries stay where they are; keys and values are gathered, and each rank's part of their gradient
  is sent back to the rank that holds the token, and summed there;
- outputs at response tokens are whole on every rank, which computes the whole loss; the gradient of
  a token's output stays with the rank that holds the token. So ranks hold parts of the gradient,
  which add up as those of data-parallel ranks do.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from megatron.core import tensor_parallel
from numpy.typing import NDArray
from torch import Tensor

from megatron_async_rl.samples.columns import spans


@dataclass(frozen=True)
class ContextParallelSlice:
    """A rank's place among `size` context-parallel ranks."""

    rank: int = 0
    size: int = 1

    @property
    def multiple(self) -> int:
        """Chunks of a sequence, which its length is a multiple of."""
        return 1 if self.size == 1 else 2 * self.size

    @property
    def chunks(self) -> tuple[int, int]:
        """The numbers of this rank's two chunks."""
        return self.rank, 2 * self.size - 1 - self.rank

    def own(self, starts: NDArray[np.int64], lengths: NDArray[np.int64]) -> NDArray[np.int64]:
        """Places in the flattened rows of the tokens that this rank holds, in its order, from where
        each sequence begins and its length."""
        if self.size == 1:
            return spans(starts, lengths)
        chunk = lengths // (2 * self.size)
        firsts = np.stack([starts + number * chunk for number in self.chunks], axis=1)
        return spans(firsts.ravel(), np.repeat(chunk, 2))


WHOLE = ContextParallelSlice()
"""A rank that does not share its sequences."""


def gather_sequences(part: Tensor, group: Any) -> Tensor:
    """[rows, length / ranks, ...] of this rank -> [rows, length, ...] of all ranks of `group`, in
    the sequences' order. The gradient of a token is summed over the ranks."""
    parts = tensor_parallel.gather_from_sequence_parallel_region(part, group=group)
    early, late = parts.unflatten(0, (group.size(), -1)).chunk(2, dim=2)
    return torch.cat((early, late.flip(0))).transpose(0, 1).flatten(1, 2)


def gather_outputs(own: Tensor, places: Tensor, tokens: int, group: Any) -> Tensor:
    """[K, n] at this rank's tokens -> [K, N] at all N of them, equal on all ranks of `group`.

    places: [n] int64, which of the N tokens this rank's are. Each lies on one rank; the gradient of
    the others' is theirs.
    """
    whole = own.new_zeros(len(own), tokens).index_copy(1, places, own)
    result: Tensor = tensor_parallel.reduce_from_tensor_model_parallel_region(whole, group=group)
    return result

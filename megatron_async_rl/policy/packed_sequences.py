"""Pieces of a packed row, and their attention: whole segments, and segments that continue a prefix
that others continue, too.

    row     | roots: whole segments and shared prefixes | branches: the rest of the others        |
    keys    own tokens                                    the prefix, then own tokens

Every operation except attention reads each token of the row once. In attention a branch's queries
are the last tokens of [prefix, own tokens], with the causal mask aligned at the end; only keys and
values of a prefix are repeated, and the gradients of the repetitions are summed.

Invariants:
- roots come first, and roots of equal length are adjacent: each run of them is a batch;
- the branches of one call have prefixes of equal length, and those of one prefix are adjacent;
- the filling of a row belongs to its last piece, after all of its tokens;
- sums over repetitions have a fixed order on every device, and are made in at least float32.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from megatron.core.packed_seq_params import PackedSeqParams
from numpy.typing import NDArray
from torch import Tensor

from megatron_async_rl.samples.columns import spans

DEVICE_TENSORS = ("cu_seqlens_q", "cu_seqlens_kv", "keys", "filled", "unfilled")


@dataclass(frozen=True)
class Branches:
    """Adjacent pieces whose attention is one call.

    run: index of the run with their prefixes. prefixes: (row of the run, pieces that continue it),
    in order. pieces: number of them. tokens: their number of tokens. longest: tokens of the longest
    one, to which the others are filled up. ragged: some are shorter.
    """

    run: int
    prefixes: tuple[tuple[int, int], ...]
    pieces: int
    tokens: int
    longest: int

    @property
    def ragged(self) -> bool:
        return self.tokens < self.pieces * self.longest

    def repeated(self, prefixes: Tensor) -> Tensor:
        """[prefixes of the run, length, ...] -> [pieces, length, ...], the prefix of each piece.
        The backward pass sums over the pieces of a prefix."""
        rows = prefixes.unbind(0)
        # Expanded views, so that the gradient of a prefix is one sum in a fixed order.
        parts = [rows[row].expand(count, *rows[row].shape) for row, count in self.prefixes]
        return parts[0] if len(parts) == 1 else torch.cat(parts)


@dataclass
class PackedSequences(PackedSeqParams):
    """Boundaries of the pieces of a packed row: on the device for Megatron and Transformer Engine,
    and as `runs` and `branches` on the host for attention by torch's kernels.

    cu_seqlens_q, cu_seqlens_kv: of each piece's own tokens, and of the tokens that it attends to.
    runs: (pieces, tokens of each on this rank) of each run of adjacent roots of equal length, in
    order. branches: calls, in order. keys: index in the row of each token of cu_seqlens_kv; null if
    that is the row itself. filled, unfilled: see `Filling`, of all ragged calls, one after another;
    null if no call is ragged. shared: some segments share tokens. All fields but `runs` count whole
    pieces.
    """

    runs: tuple[tuple[int, int], ...] = ()
    branches: tuple[Branches, ...] = ()
    keys: Tensor | None = None
    filled: Tensor | None = None
    unfilled: Tensor | None = None
    shared: bool = False

    @classmethod
    def of(
        cls,
        lengths: NDArray[np.int64],
        device: torch.device,
        context_size: int = 1,
        *,
        calls: tuple[int, ...] = (),
        parents: NDArray[np.int64] | None = None,
        shared: bool = False,
    ) -> PackedSequences:
        """Return the boundaries of a row. lengths: [Q], Q > 0, of the row's pieces in order; their
        sum is the row's length. context_size: number of ranks that share each of them. calls:
        number of pieces of each call of branches, which are the last pieces. parents: their
        prefixes' pieces."""
        roots = len(lengths) - sum(calls)
        own = np.cumsum(lengths) - lengths
        before = np.zeros_like(lengths)
        if parents is not None:
            before[roots:] = lengths[parents]
        offsets, attended = (
            torch.from_numpy(np.concatenate(([0], np.cumsum(each))).astype(np.int32)).to(device)
            for each in (lengths, lengths + before)
        )
        first = np.flatnonzero(np.diff(lengths[:roots], prepend=-1))
        counts = np.diff(first, append=roots)
        found = cls(
            # Until the attention kernel, a row has Megatron's own form, [length, 1, ...].
            qkv_format="sbhd",
            cu_seqlens_q=offsets,
            cu_seqlens_kv=attended if calls else offsets,
            max_seqlen_q=int(lengths.max()),
            max_seqlen_kv=int((lengths + before).max()),
            runs=tuple(
                zip(counts.tolist(), (lengths[first] // context_size).tolist(), strict=True)
            ),
            shared=shared,
        )
        if parents is None or not calls:
            return found

        # Each piece attends to its prefix, followed by itself.
        starts = np.stack([np.concatenate((own[:roots], own[parents])), own], axis=1).ravel()
        found.keys = torch.from_numpy(
            spans(starts, np.stack([before, lengths], axis=1).ravel())
        ).to(device)
        runs = np.repeat(np.arange(len(counts)), counts)
        groups = np.split(np.arange(roots, len(lengths)), np.cumsum(calls)[:-1])
        found.branches = tuple(
            _branches(lengths[pieces], parents[pieces - roots], runs, first) for pieces in groups
        )
        ragged = [
            _filling(lengths[pieces])
            for pieces, call in zip(groups, found.branches, strict=True)
            if call.ragged
        ]
        if ragged:
            filled, unfilled = (np.concatenate(each) for each in zip(*ragged, strict=True))
            found.filled = torch.from_numpy(filled).to(device)
            found.unfilled = torch.from_numpy(unfilled).to(device)
        return found

    @property
    def sizes(self) -> list[int]:
        """Number of tokens of each run and of each call, in order."""
        return [
            *(pieces * tokens for pieces, tokens in self.runs),
            *(call.tokens for call in self.branches),
        ]

    def fillings(self) -> list[Filling | None]:
        """Return the filling of each call; null for a call of pieces of equal length."""
        ragged = [call for call in self.branches if call.ragged]
        if self.filled is None or self.unfilled is None:
            return [None] * len(self.branches)
        parts = zip(
            self.filled.split([call.pieces * call.longest for call in ragged]),
            self.unfilled.split([call.tokens for call in ragged]),
            strict=True,
        )
        return [Filling(*next(parts)) if call.ragged else None for call in self.branches]

    def tensors(self) -> dict[str, Tensor]:
        """Return the tensors that kernels read, by the names of their fields."""
        found = {name: getattr(self, name) for name in DEVICE_TENSORS}
        if self.cu_seqlens_kv is self.cu_seqlens_q:
            del found["cu_seqlens_kv"]
        return {name: each for name, each in found.items() if each is not None}

    def place(self, tensors: Mapping[str, Tensor]) -> None:
        """Replace the result of `tensors` by its copies on the device."""
        for name, each in tensors.items():
            setattr(self, name, each)
        if "cu_seqlens_kv" not in tensors:
            self.cu_seqlens_kv = self.cu_seqlens_q


@dataclass(frozen=True, eq=False)
class Filling:
    """Filling of the pieces of a call up to the longest one.

    filled: [pieces * longest] int64, index of each place's token among those of the call; their
    number for a place to fill. unfilled: [tokens] int64, the place of each token.
    """

    filled: Tensor
    unfilled: Tensor

    def fill(self, tokens: Tensor) -> Tensor:
        """[tokens, ...] -> [pieces * longest, ...], zeros in the places to fill."""
        result: Tensor = _Moved.apply(tokens, self.filled, self.unfilled)
        return result

    def unfill(self, places: Tensor) -> Tensor:
        """[pieces * longest, ...] -> [tokens, ...]. The gradient of a filled place is 0."""
        result: Tensor = _Moved.apply(places, self.unfilled, self.filled)
        return result


class _Moved(torch.autograd.Function):
    """Rows to other places, each at most once, so that the gradient is moved back without a sum.
    An index beyond the rows makes a row of zeros."""

    @staticmethod
    def forward(ctx: Any, rows: Tensor, index: Tensor, inverse: Tensor) -> Tensor:
        ctx.save_for_backward(inverse)
        return _picked(rows, index)

    @staticmethod
    @torch.autograd.function.once_differentiable
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor, None, None]:
        (inverse,) = ctx.saved_tensors
        return _picked(gradient, inverse), None, None


def _picked(rows: Tensor, index: Tensor) -> Tensor:
    return torch.cat((rows, rows.new_zeros(1, *rows.shape[1:]))).index_select(0, index)


def repeat_rows(rows: Tensor, index: Tensor) -> Tensor:
    """Return rows.index_select(0, index), where an index may occur several times. The gradient of a
    row is summed in float32 or wider, and in a fixed order on a GPU, too. rows: [T, ...]; index:
    [N] int64."""
    result: Tensor = _Repeated.apply(rows, index)
    return result


class _Repeated(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, rows: Tensor, index: Tensor) -> Tensor:
        ctx.save_for_backward(index)
        ctx.rows = len(rows)
        return rows.index_select(0, index)

    @staticmethod
    @torch.autograd.function.once_differentiable
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor, None]:
        (index,) = ctx.saved_tensors
        return sum_rows(gradient, index, ctx.rows), None


def sum_rows(values: Tensor, index: Tensor, count: int) -> Tensor:
    """Return [count, ...]: the sum of the rows of `values`, [N, ...], with each index, in the order
    of the rows."""
    wide = values.flatten(1).to(torch.promote_types(values.dtype, torch.float32))
    if values.is_cuda:
        # CUDA's index_add adds atomically, in an order that differs from run to run.
        total = sum_sorted_rows(wide, index, count)
    else:
        total = wide.new_zeros(count, wide.shape[1]).index_add_(0, index, wide)
    return total.to(values.dtype).view(count, *values.shape[1:])


def sum_sorted_rows(values: Tensor, index: Tensor, count: int) -> Tensor:
    """Return `sum_rows` of [N, width] without atomic additions."""
    ordered, order = index.sort(stable=True)
    edges = torch.arange(count + 1, device=index.device)
    offsets = torch.searchsorted(ordered, edges)
    return torch.segment_reduce(
        values.index_select(0, order), "sum", offsets=offsets, unsafe=True, initial=0.0
    )


def _branches(
    lengths: NDArray[np.int64],
    parents: NDArray[np.int64],
    runs: NDArray[np.int64],
    first: NDArray[np.int64],
) -> Branches:
    """Return the call of these pieces. runs: run of each root. first: first root of each run."""
    run = int(runs[parents[0]])
    edges = np.flatnonzero(np.diff(parents, prepend=-1))
    counts = np.diff(edges, append=len(parents))
    rows = parents[edges] - first[run]
    return Branches(
        run=run,
        prefixes=tuple(zip(rows.tolist(), counts.tolist(), strict=True)),
        pieces=len(lengths),
        tokens=int(lengths.sum()),
        longest=int(lengths.max()),
    )


def _filling(lengths: NDArray[np.int64]) -> tuple[NDArray[np.int64], NDArray[np.int64]]:
    """Return `filled` and `unfilled` of pieces of these lengths."""
    longest, tokens = int(lengths.max()), int(lengths.sum())
    unfilled = spans(np.arange(len(lengths)) * longest, lengths)
    filled = np.full(len(lengths) * longest, tokens, dtype=np.int64)
    filled[unfilled] = np.arange(tokens)
    return filled, unfilled

"""The rows and columns of Hugging Face's tensors in a rank's shard of a Megatron parameter.

    shard of qkv, rank 1 of 2: rows q q k v | q q k v <-> q_proj rows 4..7, k_proj, v_proj 2..3
    shard of linear_proj:      columns 2nd half       <-> o_proj columns 2nd half

The bridge determines the positions of a shard's rows and columns: once for each kind of parameter,
it maps numbers instead of weights, so no code here depends on a model type. The same cuts describe
reading files into shards (parameters.py) and writing shards into staged versions
(weights/export.py).
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from math import prod
from types import SimpleNamespace
from typing import Any

import torch
from torch import Tensor


@dataclass(frozen=True)
class ParameterEntry:
    """One Megatron parameter. `name` is global (layers numbered over the whole model), `local_name`
    is that in its chunk.

    owner: the expert-parallel rank that holds it; None for a parameter that all of them hold.
    shard_shape: on each tensor-parallel rank. partition_dim: the dimension that is cut over them,
    None if replicated. hf_names, hf_shapes: the full tensors that it combines, in the bridge's
    order.
    """

    stage: int
    owner: int | None
    chunk: int
    local_name: str
    name: str
    dtype: torch.dtype
    shard_shape: tuple[int, ...]
    partition_dim: int | None
    hf_names: tuple[str, ...]
    hf_shapes: tuple[tuple[int, ...], ...]

    @property
    def shard_elements(self) -> int:
        return prod(self.shard_shape)

    @property
    def hf_bytes(self) -> int:
        return sum(prod(shape) for shape in self.hf_shapes) * self.dtype.itemsize

    def like(self) -> SimpleNamespace:
        """Return the attributes of a parameter that the bridge reads when it merges shards."""
        return SimpleNamespace(
            tensor_model_parallel=self.partition_dim is not None, partition_dim=self.partition_dim
        )


@dataclass(frozen=True, eq=False)
class Cut:
    """Part of a Hugging Face tensor in a tensor-parallel rank's shard of its parameter.

    tensor: index of the tensor. first, column: where the part begins in the tensor, in its first
    and second dimension. source: the part's rows in the shard, or a vector's elements, in order.
    """

    tensor: int
    first: int
    column: int
    source: Tensor

    def share(self, holder: int, holders: int) -> Cut:
        """Return one of `holders` equal parts by rows."""
        start, end = (len(self.source) * number // holders for number in (holder, holder + 1))
        return Cut(self.tensor, self.first + start, self.column, self.source[start:end])

    def rows(self, device: torch.device) -> slice | Tensor:
        """Return the part's rows as an index of the shard; a slice, which costs no copy, if they
        are contiguous."""
        start, count = int(self.source[0]), len(self.source)
        if torch.equal(self.source, torch.arange(start, start + count)):
            return slice(start, start + count)
        return self.source.to(device)

    def runs(self) -> Iterator[tuple[int, int, int]]:
        """Yield (first row in the tensor, first row in the shard, number of rows) of each run that
        is contiguous in both."""
        first = self.first
        for run in _runs(self.source):
            yield first, int(run[0]), len(run)
            first += len(run)


class Cuts:
    """Cuts of this tensor-parallel rank's shards, computed once per kind of parameter."""

    def __init__(self, bridge: Any) -> None:
        self._bridge = bridge
        self._known: dict[Any, list[Cut]] = {}

    def of(self, entry: ParameterEntry) -> list[Cut]:
        """Return the cuts of the shard of `entry`. Raises ValueError for a parameter that does not
        consist of rows and columns of its tensors."""
        # Layers and experts of one kind have the same cuts.
        kind = (re.sub(r"\d+", "", entry.name), entry.shard_shape, entry.partition_dim)
        if kind not in self._known:
            self._known[kind] = _cuts_of(self._bridge, entry)
        return self._known[kind]


def _cuts_of(bridge: Any, entry: ParameterEntry) -> list[Cut]:
    below, *across = (_traced(bridge, entry, dim) for dim in range(len(entry.shard_shape)))
    rank = bridge.mpu.tp_rank
    cuts = []
    for tensor, rows in enumerate(below):
        columns = across[0][tensor] if across else torch.zeros(1, dtype=rows.dtype)
        own, own_columns = (
            torch.nonzero(line // entry.shard_shape[dim] == rank).flatten()
            if dim == entry.partition_dim
            else torch.arange(len(line))
            for dim, line in enumerate((rows, columns))
        )
        wide = entry.shard_shape[1] if across else 1
        start = int(own_columns[0])
        expected = torch.arange(wide) + (wide * rank if entry.partition_dim == 1 else 0)
        # A permutation of columns cannot be represented as one block of columns.
        if not torch.equal(columns[start : start + wide], expected):
            raise _NotCut(entry)
        for run in _runs(own):
            source = rows[run] % entry.shard_shape[0]
            cuts.append(Cut(tensor, int(run[0]), start, source))
    # A row in no cut would never be loaded.
    if not _covers(bridge, entry, cuts):
        raise _NotCut(entry)
    return cuts


def _covers(bridge: Any, entry: ParameterEntry, cuts: Sequence[Cut]) -> bool:
    """Return True if each row of the shard is in one cut, except vocabulary padding at the end."""
    held = torch.cat([cut.source for cut in cuts]) if cuts else torch.arange(0)
    wanted = entry.shard_shape[0]
    if [shape[0] for shape in entry.hf_shapes] == [bridge.vocab_size]:
        before = bridge.mpu.tp_rank * wanted if entry.partition_dim == 0 else 0
        wanted = min(wanted, max(0, bridge.vocab_size - before))
    return torch.equal(held.sort().values, torch.arange(wanted))


class _NotCut(ValueError):
    def __init__(self, entry: ParameterEntry) -> None:
        super().__init__(
            f"{entry.name} is not made of whole rows and columns of {', '.join(entry.hf_names)}:"
            " policy/cuts.py cannot cut it"
        )


def _traced(bridge: Any, entry: ParameterEntry, dim: int) -> list[Tensor]:
    """Return the source index of each row or column (dimension `dim`) of the parameter's Hugging
    Face tensors, counted over the concatenated shards of all ranks."""
    size = entry.shard_shape[dim]
    ranks = bridge.mpu.tp_size if dim == entry.partition_dim else 1
    line = [1] * len(entry.shard_shape)
    line[dim] = size
    # int32 row numbers pass through the bridge instead of weights.
    numbers = torch.arange(size * ranks, dtype=torch.int32)
    shards = [one.view(line) for one in numbers.chunk(ranks)]
    places = bridge.merge(entry.name, shards, entry.like()) if ranks > 1 else shards[0]

    whole = list(places.shape)
    if dim == 1:  # rows are distinguished; their numbers are one row in memory
        # Expanded, not copied: one row of numbers stands for all rows.
        whole[0] = entry.shard_shape[0]
        if entry.partition_dim == 0:
            whole[0] *= bridge.mpu.tp_size
    found = []
    tensors = bridge.to_hugging_face(entry.name, places.expand(whole))[1]
    for tensor, shape in zip(tensors, entry.hf_shapes, strict=True):
        across = 1 - dim
        first = tensor if tensor.dim() == 1 else tensor.select(across, 0)
        equal = tensor.dim() == 1 or tensor.stride(across) == 0  # one number in memory
        if not equal and not torch.equal(tensor, first.unsqueeze(across).expand_as(tensor)):
            raise _NotCut(entry)
        if len(first) != shape[dim]:
            raise _NotCut(entry)
        found.append(first.long())
    return found


def _runs(places: Tensor) -> list[Tensor]:
    """Split where a number does not follow the one before it."""
    if not len(places):
        return []
    ends = torch.nonzero(places.diff() != 1).flatten() + 1
    return list(torch.tensor_split(places, ends))

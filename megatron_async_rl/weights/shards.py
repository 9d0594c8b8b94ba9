"""Parts of a staged version that each rank writes: of Hugging Face's tensors, out of its own shards.

    shard of qkv, rank 1 of 2:  rows q q k v | q q k v     ->  q_proj rows 4..7, k_proj 2..3, v_proj 2..3
    shard of linear_proj:       columns 2nd half           ->  o_proj columns 2nd half

Where a shard's rows and columns belong is asked of the bridge, once for each kind of parameter, by
numbers in place of weights; nothing here knows a model type.

Invariants:
- the parts of all ranks are each tensor exactly once: vocabulary padding is left out, a tied output
  layer is the embedding, and ranks that hold the same elements divide them;
- only ranks that reach the staged memory have parts. Where those do not hold the whole model among
  them, every tensor comes whole, through rank 0 (export.py).
"""

from __future__ import annotations

import functools
import logging
import re
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from megatron_async_rl.policy.parameters import ParameterEntry
from megatron_async_rl.weights.export import WeightExporter
from megatron_async_rl.weights.transport import Part, TensorSpec

log = logging.getLogger(__name__)

SMALL_BYTES = 2**18
"""A shard up to this size is one rank's; ranks that hold the same divide a larger one by rows."""


@dataclass(frozen=True, eq=False)
class Cut:
    """Part of a Hugging Face tensor that a tensor-parallel rank's shard of its parameter holds.

    tensor: which of them. first, column: where the part begins in the tensor, in its first and
    second dimension. source: the part's rows in the shard, or a vector's elements, in order.
    """

    tensor: int
    first: int
    column: int
    source: Tensor

    def share(self, holder: int, holders: int) -> Cut:
        """One of `holders` equal parts by rows."""
        start, end = (len(self.source) * number // holders for number in (holder, holder + 1))
        return Cut(self.tensor, self.first + start, self.column, self.source[start:end])

    def rows(self, device: torch.device) -> slice | Tensor:
        """The part's rows as an index of the shard; a slice, which costs no copy, where they lie
        one after the other."""
        start, count = int(self.source[0]), len(self.source)
        if torch.equal(self.source, torch.arange(start, start + count)):
            return slice(start, start + count)
        return self.source.to(device)


def cuts_of(bridge: Any, entry: ParameterEntry) -> list[Cut]:
    """Cuts of this tensor-parallel rank's shard. Raises ValueError for a parameter whose tensors are not
    made of its rows and columns."""
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
        if not torch.equal(columns[start : start + wide], expected):
            raise _NotCut(entry)
        for run in _runs(own):
            source = rows[run] % entry.shard_shape[0]
            cuts.append(Cut(tensor, int(run[0]), start, source))
    return cuts


class _NotCut(ValueError):
    def __init__(self, entry: ParameterEntry) -> None:
        super().__init__(
            f"{entry.name} is not made of whole rows and columns of {', '.join(entry.hf_names)}:"
            " weights/shards.py cannot cut it"
        )


def _traced(bridge: Any, entry: ParameterEntry, dim: int) -> list[Tensor]:
    """For each Hugging Face tensor, by its places in dimension `dim`: the place there in the shards
    of all ranks, one after the other."""
    size = entry.shard_shape[dim]
    ranks = bridge.mpu.tp_size if dim == entry.partition_dim else 1
    line = [1] * len(entry.shard_shape)
    line[dim] = size
    numbers = torch.arange(size * ranks, dtype=torch.int32)  # to be as many as the weights
    shards = [one.view(line) for one in numbers.chunk(ranks)]
    places = bridge.merge(entry.name, shards, entry.like()) if ranks > 1 else shards[0]

    whole = list(entry.shard_shape)
    if entry.partition_dim is not None:
        whole[entry.partition_dim] *= bridge.mpu.tp_size
    found = []
    for tensor in bridge.to_hugging_face(entry.name, places.expand(whole))[1]:
        across = 1 - dim
        first = tensor if tensor.dim() == 1 else tensor.select(across, 0)
        equal = tensor.dim() == 1 or tensor.stride(across) == 0  # one number in memory
        if not equal and not torch.equal(tensor, first.unsqueeze(across).expand_as(tensor)):
            raise _NotCut(entry)
        found.append(first.long())
    return found


def _runs(places: Tensor) -> list[Tensor]:
    """Cut where a number does not follow the one before it."""
    if not len(places):
        return []
    ends = torch.nonzero(places.diff() != 1).flatten() + 1
    return list(torch.tensor_split(places, ends))


_Own = tuple[ParameterEntry, list[tuple[Cut, slice | Tensor]]]
"""A parameter that this rank holds, and its cuts with their rows."""


@dataclass(frozen=True)
class Seat:
    """A rank of the world, as far as the parameters that it holds go."""

    rank: int
    reaches: bool
    stage: int
    tensor: int
    expert: int

    def holds(self, entry: ParameterEntry) -> bool:
        return entry.stage == self.stage and entry.owner in (None, self.expert)


class WeightShards:
    """Made once per run and used after every step. `reached`: for each rank of the world, true where
    it can write to the staged memory."""

    def __init__(self, exporter: WeightExporter, reached: Sequence[bool], max_bytes: int) -> None:
        """Collective."""
        self._exporter = exporter
        self._max_bytes = max_bytes
        layout = exporter.bridge.layout
        own = (layout.pp_rank, layout.tp_rank, layout.ep_rank)
        seats = [
            Seat(rank, reached[rank], *place) for rank, place in enumerate(layout.gathered(own))
        ]
        self._own = [] if not reached[layout.rank] else self._cut(seats, seats[layout.rank])
        self.gathered = not all(_have(seats, entry) for entry in exporter.entries)
        """The ranks that reach the memory do not hold the whole model."""
        if self.gathered and layout.rank == 0:
            log.warning(
                "ranks on other machines hold weights that no rank on this one has: every version"
                " is gathered through rank 0"
            )
        self.buckets = buckets_of(exporter.entries, max_bytes)

    def parts(self, bucket: int | None = None) -> Iterator[Part]:
        """This rank's, of the weights as they are now; a part is valid until the next one is asked
        for. Collective where `gathered`. bucket: those of one alone; not where `gathered`."""
        if self.gathered:
            assert bucket is None, "what is gathered comes in buckets of the exporter's"
            yield from self._whole_tensors()
            return
        for entry, cuts in self._own if bucket is None else self._own_by_bucket[bucket]:
            shard = self._exporter.shard(entry)
            for cut, rows in cuts:
                part, name = shard[rows], entry.hf_names[cut.tensor]
                if part.dim() == 1:
                    yield Part(name, 0, cut.first, part.reshape(1, -1))
                else:
                    yield Part(name, cut.first, cut.column, part)

    @functools.cached_property
    def _own_by_bucket(self) -> list[list[_Own]]:
        bucket_of = {spec.name: at for at, bucket in enumerate(self.buckets) for spec in bucket}
        found: list[list[_Own]] = [[] for _ in self.buckets]
        for entry, cuts in self._own:
            apart: dict[int, list[tuple[Cut, slice | Tensor]]] = {}
            for cut in cuts:
                apart.setdefault(bucket_of[entry.hf_names[cut[0].tensor]], []).append(cut)
            for at, of_bucket in apart.items():
                found[at].append((entry, of_bucket))
        return found

    def _whole_tensors(self) -> Iterator[Part]:
        for bucket in self._exporter.buckets(self._max_bytes):
            for name, tensor in zip(bucket.names, bucket.tensors, strict=True):
                if tensor is not None:
                    yield Part.whole(name, tensor)

    def _cut(self, seats: Sequence[Seat], own: Seat) -> list[_Own]:
        bridge = self._exporter.bridge
        known: dict[Any, list[Cut]] = {}
        mine: list[_Own] = []
        for number, entry in enumerate(self._exporter.entries):
            if not own.holds(entry):
                continue
            kind = (re.sub(r"\d+", "", entry.name), entry.shard_shape, entry.partition_dim)
            if kind not in known:
                known[kind] = cuts_of(bridge, entry)
            holders = [
                seat.rank
                for seat in seats
                if seat.reaches
                and seat.holds(entry)
                and (entry.partition_dim is None or seat.tensor == own.tensor)
            ]
            place, cuts = holders.index(own.rank), known[kind]
            if entry.shard_elements * entry.dtype.itemsize > SMALL_BYTES:
                cuts = [cut.share(place, len(holders)) for cut in cuts]
            elif number % len(holders) != place:
                cuts = []
            device = bridge.layout.device
            mine.append((entry, [(cut, cut.rows(device)) for cut in cuts if len(cut.source)]))
        return mine


def _have(seats: Sequence[Seat], entry: ParameterEntry) -> bool:
    holders = [seat for seat in seats if seat.reaches and seat.holds(entry)]
    if entry.partition_dim is None:
        return bool(holders)
    return {seat.tensor for seat in holders} == {seat.tensor for seat in seats}


def buckets_of(entries: Sequence[ParameterEntry], max_bytes: int) -> list[list[TensorSpec]]:
    """Every tensor once, in runs of at most `max_bytes`, or one that is larger alone."""
    buckets: list[list[TensorSpec]] = []
    size = 0
    for entry in entries:
        for name, shape in zip(entry.hf_names, entry.hf_shapes, strict=True):
            spec = TensorSpec(name, entry.dtype, shape)
            if not buckets or size + spec.nbytes > max_bytes:
                buckets.append([])
                size = 0
            buckets[-1].append(spec)
            size += spec.nbytes
    return buckets

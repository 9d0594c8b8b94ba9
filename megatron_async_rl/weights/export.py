"""Export of the trainer's weights: full tensors on rank 0 (`WeightExporter`), or each rank's parts
of a staged version, from its own shards (`WeightShards`).

Full tensors under Hugging Face names are for files, and for engines if ranks on other machines hold
weights that no rank on rank 0's machine has. They arrive one bucket at a time. A bucket is a run of
parameters of one pipeline stage: either all of them are experts divided over ranks, or none is. Its
shards are packed into one flat tensor. A bucket therefore costs one gather over the tensor-parallel
group (for divided experts over the expert-parallel group) and, for later stages, one message to
rank 0, however many tensors it contains. Parameters that rank 0 holds whole are neither packed nor
copied.

Parts are rows and columns of Hugging Face's tensors; policy/parameters.py computes them.

Invariants:
- names, shapes and the division into buckets are fixed when the exporter is made: publishing moves
  bytes only;
- full tensors exist only on rank 0, and for one bucket at a time; data-parallel copies do not take
  part;
- the owners' parts of a divided parameter have the same size and travel in the same bucket;
- a weight that is kept in FP8 is sent in the model's dtype, converted for its bucket: the numbers
  are those with which the policy multiplies;
- each tensor of the Hugging Face checkpoint is exported exactly once; a tied output layer is
  exported only as the embedding;
- every rank iterates over every bucket, so all ranks leave the loop together;
- the parts of all ranks together contain each element of each tensor exactly once: vocabulary
  padding is left out, a tied output layer is the embedding, and ranks that hold the same elements
  divide them;
- only ranks that reach the staged memory have parts. If those ranks together do not hold the whole
  model, every tensor is sent whole, through rank 0.
"""

from __future__ import annotations

import functools
import logging
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from itertools import groupby
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from megatron_async_rl.policy.fp8 import plain
from megatron_async_rl.policy.lora import weight_of
from megatron_async_rl.policy.parameters import Cut, Cuts, ParameterEntry, all_entries, merged
from megatron_async_rl.weights.transport import ShardSlice, TensorSpec

log = logging.getLogger(__name__)

SMALL_BYTES = 2**18
"""Size in bytes up to which a shard is written by one rank; ranks that hold the same elements
divide larger shards by rows."""


@dataclass(frozen=True, eq=False)
class Bucket:
    """Full tensors under Hugging Face names on rank 0; on other ranks None instead of each tensor.

    The tensors may be the live parameters: they are valid until the next bucket is requested or the
    next step is taken.
    """

    names: tuple[str, ...]
    tensors: tuple[Tensor | None, ...]


class WeightExporter:
    """Export of full tensors. Made once per run, collectively over the pipeline group, and used
    after every step. adapters: export only these, under PEFT's names; otherwise the model, with
    adapters merged into its weights. dtype: of every tensor; adapters are merged before tensors are
    rounded to it. None: each parameter's own dtype."""

    def __init__(
        self,
        bridge: Any,
        chunks: Sequence[torch.nn.Module],
        *,
        adapters: bool = False,
        dtype: torch.dtype | None = None,
    ) -> None:
        self.bridge = bridge
        self._chunks = chunks
        self._dtype = dtype
        self._owners: dict[tuple[int, str], tuple[torch.nn.Module, str]] = {}
        """Layer of each parameter, by chunk and name, and the parameter's name in it."""
        seen: set[str] = set()
        self.entries: list[ParameterEntry] = []
        """Every exported parameter of the model, in order."""
        for entry in all_entries(bridge, chunks, adapters=adapters):
            # The last stage's copy of a tied embedding is the same tensor as the first stage's.
            if not seen.intersection(entry.hf_names):
                seen.update(entry.hf_names)
                self.entries.append(entry if dtype is None else replace(entry, dtype=dtype))
        # Experts after the rest of their stage, so that the two kinds, which cannot share a bucket,
        # alternate less often.
        self.entries.sort(key=lambda entry: (entry.stage, entry.owner is not None))

    @property
    def names(self) -> tuple[str, ...]:
        """Names of all exported tensors, in order."""
        return tuple(name for entry in self.entries for name in entry.hf_names)

    @property
    def receives(self) -> bool:
        """True on rank 0, which receives the tensors."""
        return bool(self.bridge.layout.rank == 0)

    def buckets(self, max_bytes: int) -> Iterator[Bucket]:
        """Yield all buckets. Collective: every rank must iterate over every bucket. A bucket holds
        at most `max_bytes` of full tensors, or one larger parameter."""
        for entries in self._cut(max_bytes):
            shards = self._shards(entries)
            names = tuple(name for entry in entries for name in entry.hf_names)
            if shards is None:
                yield Bucket(names, (None,) * len(names))
                continue
            full = (
                merged(self.bridge, entry, parts)
                for entry, parts in zip(entries, shards, strict=True)
            )
            yield Bucket(names, tuple(tensor for tensors in full for tensor in tensors))

    def _cut(self, max_bytes: int) -> list[list[ParameterEntry]]:
        """Divide the entries into buckets. Entries of one local parameter, one per owner, stay
        together."""
        buckets: list[list[ParameterEntry]] = []
        size = 0
        for _, owned in groupby(
            self.entries, key=lambda entry: (entry.stage, entry.chunk, entry.local_name)
        ):
            entries = list(owned)
            added = sum(entry.hf_bytes for entry in entries)
            if (
                not buckets
                or size + added > max_bytes
                or _kind(entries[0]) != _kind(buckets[-1][0])
            ):
                buckets.append([])
                size = 0
            buckets[-1] += entries
            size += added
        return buckets

    def _shards(self, entries: list[ParameterEntry]) -> list[list[Tensor]] | None:
        """Return the shards of each entry on rank 0, else None."""
        layout = self.bridge.layout
        holders = layout.tp_size if entries[0].owner is None else layout.ep_size
        # Rank 0 holds them whole, so neither a message nor a copy is needed.
        if layout.rank == 0 and entries[0].stage == 0 and holders == 1:
            return [[self.shard(entry)] for entry in entries]
        held = self._gather(entries)
        return None if held is None else self._unpacked(entries, held)

    def _gather(self, entries: list[ParameterEntry]) -> Tensor | None:
        """Return [holders, elements] on rank 0, else None. Holders are the owners of divided
        experts, or else the tensor-parallel ranks."""
        layout = self.bridge.layout
        stage, divided = entries[0].stage, entries[0].owner is not None
        # Data-parallel copies are equal, so only the first one sends.
        if (layout.expert_replica if divided else layout.replica) != 0:
            return None
        group, rank, size = (
            (layout.ep_group, layout.ep_rank, layout.ep_size)
            if divided
            else (layout.tp_group, layout.tp_rank, layout.tp_size)
        )
        elements = sum(entry.shard_elements for entry in entries) // (size if divided else 1)
        if layout.pp_rank != stage:
            if layout.rank != 0:
                return None
            # Only rank 0 gets here: its stage has no part of this bucket.
            received = torch.empty(size, elements, dtype=entries[0].dtype, device=layout.device)
            dist.recv(received, group_src=stage, group=layout.pp_group)
            return received
        mine = self._packed([entry for entry in entries if entry.owner in (None, layout.ep_rank)])
        held = mine[None]
        if size > 1:
            held = mine.new_empty(size if rank == 0 else 0, elements)
            dist.gather(mine, list(held) if rank == 0 else None, group_dst=0, group=group)
        if rank != 0:
            return None
        if stage == 0:
            return held
        # One message per bucket, however many tensors it has.
        dist.send(held, group_dst=0, group=layout.pp_group)
        return None

    def shard(self, entry: ParameterEntry) -> Tensor:
        """Return this rank's shard of `entry`, which may be the live parameter."""
        weight = plain(weight_of(*self._owner_of(entry.chunk, entry.local_name), self._dtype))
        return weight if self._dtype is None else weight.to(self._dtype)

    def _owner_of(self, chunk: int, name: str) -> tuple[torch.nn.Module, str]:
        """Return the layer that owns a parameter, and the parameter's name in the layer."""
        found = self._owners.get((chunk, name))
        if found is None:
            # Layers stay for the whole run; searching for them by name takes longer than a digest.
            path, _, own = name.rpartition(".")
            layer = self._chunks[chunk].get_submodule(path)
            found = self._owners[chunk, name] = layer, own
        return found

    def _packed(self, entries: list[ParameterEntry]) -> Tensor:
        parameters = [self.shard(entry).reshape(-1) for entry in entries]
        # A single parameter is not copied.
        return parameters[0] if len(parameters) == 1 else torch.cat(parameters)

    @staticmethod
    def _unpacked(entries: list[ParameterEntry], held: Tensor) -> list[list[Tensor]]:
        """Return the shards of each entry. held: result of `_gather`; the row of each owner
        contains its parameters one after another."""
        starts: dict[int | None, int] = {}
        shards = []
        for entry in entries:
            start = starts.get(entry.owner, 0)
            starts[entry.owner] = end = start + entry.shard_elements
            rows = held if entry.owner is None else held[entry.owner : entry.owner + 1]
            shards.append([row[start:end].view(entry.shard_shape) for row in rows])
        return shards


def _kind(entry: ParameterEntry) -> tuple[Any, ...]:
    return entry.stage, entry.owner is not None, entry.dtype


_Own = tuple[ParameterEntry, list[tuple[Cut, slice | Tensor]]]
"""A parameter that this rank holds, and its cuts with their rows."""


@dataclass(frozen=True)
class RankParameters:
    """A rank and the parameters that it holds."""

    rank: int
    reaches: bool
    stage: int
    tensor: int
    expert: int

    def holds(self, entry: ParameterEntry) -> bool:
        return entry.stage == self.stage and entry.owner in (None, self.expert)


class WeightShards:
    """Each rank's parts of a version. Made once per run and used after every step. `reached`: for
    each rank of the world, True if it can write to the staged memory."""

    def __init__(self, exporter: WeightExporter, reached: Sequence[bool], max_bytes: int) -> None:
        """Collective: every rank makes the object."""
        self._exporter = exporter
        self._max_bytes = max_bytes
        layout = exporter.bridge.layout
        own = (layout.pp_rank, layout.tp_rank, layout.ep_rank)
        seats = [
            RankParameters(rank, reached[rank], *place)
            for rank, place in enumerate(layout.gathered(own))
        ]
        # A rank that cannot write to the memory has no parts.
        self._own = [] if not reached[layout.rank] else self._cut(seats, seats[layout.rank])
        self.gathered = not all(_have(seats, entry) for entry in exporter.entries)
        """True if the ranks that reach the memory do not hold the whole model."""
        if self.gathered and layout.rank == 0:
            log.warning(
                "ranks on other machines hold weights that no rank on this one has: every version"
                " is gathered through rank 0"
            )
        self.buckets = buckets_of(exporter.entries, max_bytes)

    def parts(self, bucket: int | None = None) -> Iterator[ShardSlice]:
        """Yield this rank's parts of the present weights; a part is valid until the next one is
        requested. Collective if `gathered`. bucket: yield only parts of this bucket; not supported
        if `gathered`."""
        if self.gathered:
            assert bucket is None, "gathered tensors come in the exporter's buckets"
            yield from self._whole_tensors()
            return
        for entry, cuts in self._own if bucket is None else self._own_by_bucket[bucket]:
            shard = self._exporter.shard(entry)
            for cut, rows in cuts:
                part, name = shard[rows], entry.hf_names[cut.tensor]
                # A vector is one row of its tensor's matrix (digest.matrix_shape).
                if part.dim() == 1:
                    yield ShardSlice(name, 0, cut.first, part.reshape(1, -1))
                else:
                    yield ShardSlice(name, cut.first, cut.column, part)

    @functools.cached_property
    def _own_by_bucket(self) -> list[list[_Own]]:
        bucket_of = {spec.name: at for at, bucket in enumerate(self.buckets) for spec in bucket}
        found: list[list[_Own]] = [[] for _ in self.buckets]
        for entry, cuts in self._own:
            # Tensors of one parameter, such as a fused QKV, may be in several buckets.
            apart: dict[int, list[tuple[Cut, slice | Tensor]]] = {}
            for cut in cuts:
                apart.setdefault(bucket_of[entry.hf_names[cut[0].tensor]], []).append(cut)
            for at, of_bucket in apart.items():
                found[at].append((entry, of_bucket))
        return found

    def _whole_tensors(self) -> Iterator[ShardSlice]:
        for bucket in self._exporter.buckets(self._max_bytes):
            for name, tensor in zip(bucket.names, bucket.tensors, strict=True):
                if tensor is not None:
                    yield ShardSlice.whole(name, tensor)

    def _cut(self, seats: Sequence[RankParameters], own: RankParameters) -> list[_Own]:
        bridge = self._exporter.bridge
        cuts_of = Cuts(bridge)
        mine: list[_Own] = []
        for number, entry in enumerate(self._exporter.entries):
            if not own.holds(entry):
                continue
            holders = [
                seat.rank
                for seat in seats
                if seat.reaches
                and seat.holds(entry)
                and (entry.partition_dim is None or seat.tensor == own.tensor)
            ]
            place, cuts = holders.index(own.rank), cuts_of.of(entry)
            # Exactly one holder writes each element: holders divide large shards by rows, and
            # write small ones alternately.
            if entry.shard_elements * entry.dtype.itemsize > SMALL_BYTES:
                cuts = [cut.share(place, len(holders)) for cut in cuts]
            elif number % len(holders) != place:
                cuts = []
            device = bridge.layout.device
            rows = [(cut, cut.rows(device)) for cut in cuts if len(cut.source)]
            if rows:
                mine.append((entry, rows))
        return mine


def _have(seats: Sequence[RankParameters], entry: ParameterEntry) -> bool:
    holders = [seat for seat in seats if seat.reaches and seat.holds(entry)]
    if entry.partition_dim is None:
        return bool(holders)
    # A divided parameter needs a holder of every tensor-parallel shard.
    return {seat.tensor for seat in holders} == {seat.tensor for seat in seats}


def buckets_of(entries: Sequence[ParameterEntry], max_bytes: int) -> list[list[TensorSpec]]:
    """Return every tensor once, in runs of at most `max_bytes`; a larger tensor is a run of its
    own."""
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

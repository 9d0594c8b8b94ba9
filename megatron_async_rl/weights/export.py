"""Megatron shards -> full tensors under Hugging Face names on rank 0, one bucket at a time: for
files, and for engines where ranks on other machines hold weights that none on rank 0's has
(shards.py).

A bucket is a run of parameters of one pipeline stage, all of them experts divided over ranks or
none. Its shards are packed into one flat tensor, so it costs one gather over the tensor-parallel
group (for divided experts over the expert-parallel group) and, for later stages, one message to
rank 0, however many tensors it has. What rank 0 holds whole is neither packed nor copied.

Invariants:
- names, shapes and the cut into buckets are settled when the exporter is made: publishing moves
  bytes only;
- tensors exist once, on rank 0, for one bucket at a time; data-parallel copies take no part;
- the owners' parts of a divided parameter have the same size and travel in the same bucket;
- a weight that is kept in 8 bits is sent in the model's dtype, made for its bucket: the numbers
  that the policy multiplies by;
- each tensor of the Hugging Face checkpoint comes exactly once, a tied output layer as the
  embedding alone;
- every rank walks through every bucket, so all ranks leave together.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from itertools import groupby
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from megatron_async_rl.policy.cuts import ParameterEntry
from megatron_async_rl.policy.fp8 import plain
from megatron_async_rl.policy.lora import weight_of
from megatron_async_rl.policy.parameters import all_entries, merged


@dataclass(frozen=True, eq=False)
class Bucket:
    """Full tensors under Hugging Face names on rank 0; None in their places on other ranks.

    The tensors may be the live parameters: they are valid until the next bucket is asked for or the
    next step is taken.
    """

    names: tuple[str, ...]
    tensors: tuple[Tensor | None, ...]


class WeightExporter:
    """Made once per run, collectively over the pipeline group, and used after every step. adapters:
    of these alone, under PEFT's names; otherwise of the model, adapters merged into its weights.
    dtype: of every tensor, with adapters merged before anything is rounded to it; null: each
    parameter's own."""

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
        seen: set[str] = set()
        self.entries: list[ParameterEntry] = []
        """Every exported parameter of the model, in order."""
        for entry in all_entries(bridge, chunks, adapters=adapters):
            # The last stage's copy of a tied embedding is the first stage's tensor again.
            if not seen.intersection(entry.hf_names):
                seen.update(entry.hf_names)
                self.entries.append(entry if dtype is None else replace(entry, dtype=dtype))
        # Experts after the rest of their stage, so that the two kinds do not cut each other's
        # buckets short.
        self.entries.sort(key=lambda entry: (entry.stage, entry.owner is not None))

    @property
    def names(self) -> tuple[str, ...]:
        """Every exported tensor, in order."""
        return tuple(name for entry in self.entries for name in entry.hf_names)

    @property
    def receives(self) -> bool:
        """True on rank 0, where the tensors come together."""
        return bool(self.bridge.layout.rank == 0)

    def buckets(self, max_bytes: int) -> Iterator[Bucket]:
        """Collective on all ranks: each must take every bucket. A bucket holds at most `max_bytes`
        of full tensors, or one parameter that is larger alone."""
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
        """Entries of one local parameter, one per owner, stay together."""
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
        """On rank 0 the shards of each entry, else None."""
        layout = self.bridge.layout
        holders = layout.tp_size if entries[0].owner is None else layout.ep_size
        if layout.rank == 0 and entries[0].stage == 0 and holders == 1:
            return [[self.shard(entry)] for entry in entries]
        held = self._gather(entries)
        return None if held is None else self._unpacked(entries, held)

    def _gather(self, entries: list[ParameterEntry]) -> Tensor | None:
        """On rank 0 [holders, elements], else None. Holders: of divided experts their owners, else
        the tensor-parallel ranks."""
        layout = self.bridge.layout
        stage, divided = entries[0].stage, entries[0].owner is not None
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
        dist.send(held, group_dst=0, group=layout.pp_group)
        return None

    def shard(self, entry: ParameterEntry) -> Tensor:
        """This rank's shard of `entry`, which it holds: may be the live parameter."""
        weight = plain(weight_of(self._chunks[entry.chunk], entry.local_name, self._dtype))
        return weight if self._dtype is None else weight.to(self._dtype)

    def _packed(self, entries: list[ParameterEntry]) -> Tensor:
        parameters = [self.shard(entry).reshape(-1) for entry in entries]
        return parameters[0] if len(parameters) == 1 else torch.cat(parameters)

    @staticmethod
    def _unpacked(entries: list[ParameterEntry], held: Tensor) -> list[list[Tensor]]:
        """held: what `_gather` gave. Each owner's parameters lie one after the other in its row."""
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

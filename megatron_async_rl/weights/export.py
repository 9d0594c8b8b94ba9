"""Megatron shards -> full tensors under Hugging Face names, one bucket at a time.

A bucket is a run of parameters of one pipeline stage. Its shards are packed into one flat tensor, so it costs one gather
over the tensor-parallel group and, for later stages, one message to rank 0, however many tensors it has.

Invariants:
- names, shapes and the cut into buckets are settled when the exporter is made: publishing moves bytes only;
- tensors exist once, on rank 0, for one bucket at a time; data-parallel copies take no part;
- each tensor of the Hugging Face checkpoint comes exactly once, a tied output layer as the embedding alone;
- every rank walks through every bucket, so all ranks leave together.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from megatron_async_rl.weights.parameters import ParameterEntry, all_entries, merged


@dataclass(frozen=True, eq=False)
class Bucket:
    """Full tensors under Hugging Face names on rank 0; None in their places on other ranks.

    The tensors may be the live parameters: they are valid until the next bucket is asked for or the next step is taken.
    """

    names: tuple[str, ...]
    tensors: tuple[Tensor | None, ...]


class WeightExporter:
    """Made once per run, collectively over the pipeline group, and used after every step."""

    def __init__(self, bridge: Any, chunks: Sequence[torch.nn.Module]) -> None:
        self._bridge = bridge
        self._chunks = chunks
        seen: set[str] = set()
        self._entries: list[ParameterEntry] = []
        for entry in all_entries(bridge, chunks):
            # The last stage's copy of a tied embedding is the first stage's tensor again.
            if not seen.intersection(entry.hf_names):
                seen.update(entry.hf_names)
                self._entries.append(entry)

    @property
    def names(self) -> tuple[str, ...]:
        """Every exported tensor, in order."""
        return tuple(name for entry in self._entries for name in entry.hf_names)

    @property
    def receives(self) -> bool:
        """True on rank 0, where the tensors come together."""
        return bool(self._bridge.layout.rank == 0)

    def buckets(self, max_bytes: int) -> Iterator[Bucket]:
        """Collective on all ranks: each must take every bucket. A bucket holds at most `max_bytes` of full tensors, or one
        parameter that is larger alone."""
        for entries in self._cut(max_bytes):
            names = tuple(name for entry in entries for name in entry.hf_names)
            shards = self._gather(entries)
            if shards is None:
                yield Bucket(names, (None,) * len(names))
                continue
            yield Bucket(names, tuple(self._tensors(entries, shards)))

    def _cut(self, max_bytes: int) -> list[list[ParameterEntry]]:
        buckets: list[list[ParameterEntry]] = []
        size = 0
        for entry in self._entries:
            full = size + entry.hf_bytes > max_bytes
            if not buckets or full or (entry.stage, entry.dtype) != (buckets[-1][0].stage, buckets[-1][0].dtype):
                buckets.append([])
                size = 0
            buckets[-1].append(entry)
            size += entry.hf_bytes
        return buckets

    def _gather(self, entries: list[ParameterEntry]) -> list[Tensor] | None:
        """On rank 0 one flat tensor per tensor-parallel rank, else None."""
        layout = self._bridge.layout
        stage, elements = entries[0].stage, sum(entry.shard_elements for entry in entries)
        if layout.dp_rank != 0:
            return None
        if layout.pp_rank != stage:
            if layout.rank != 0:
                return None
            received = torch.empty(layout.tp_size * elements, dtype=entries[0].dtype, device=layout.device)
            dist.recv(received, group_src=stage, group=layout.pp_group)
            return list(received.view(layout.tp_size, elements))
        flat = self._packed(entries)
        gathered = [flat]
        if layout.tp_size > 1:
            gathered = (
                list(torch.empty(layout.tp_size, elements, dtype=flat.dtype, device=flat.device)) if layout.tp_rank == 0 else []
            )
            dist.gather(flat, gathered or None, group_dst=0, group=layout.tp_group)
        if layout.tp_rank != 0:
            return None
        if stage == 0:
            return gathered
        dist.send(gathered[0] if len(gathered) == 1 else torch.cat(gathered), group_dst=0, group=layout.pp_group)
        return None

    def _packed(self, entries: list[ParameterEntry]) -> Tensor:
        parameters = [self._chunks[entry.chunk].get_parameter(entry.local_name).detach().reshape(-1) for entry in entries]
        return parameters[0] if len(parameters) == 1 else torch.cat(parameters)

    def _tensors(self, entries: list[ParameterEntry], shards: list[Tensor]) -> Iterator[Tensor]:
        start = 0
        for entry in entries:
            end = start + entry.shard_elements
            yield from merged(self._bridge, entry, [shard[start:end].view(entry.shard_shape) for shard in shards])
            start = end

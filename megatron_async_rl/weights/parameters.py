"""What every parameter of the model is called and shaped, in Megatron and in Hugging Face's files, over all pipeline stages.

`bridge` is the policy's mbridge bridge: it maps names and cuts fused tensors; nothing here knows a model type.

Experts are numbered over the whole model in global names; a rank's module numbers those it holds from 0. With expert parallelism
one local parameter is as many parameters of the model as there are expert-parallel ranks, each an entry of its own with an owner.
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import dataclass
from math import prod
from types import SimpleNamespace
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

NOT_EXPORTED = ("value_head.",)
"""Beginnings of the names of parameters that only training has: in no Hugging Face directory and in no engine."""
EXPERT = re.compile(r"(?<=\.mlp\.experts\.local_experts\.)\d+")
"""The number of an expert in a Megatron parameter name."""


@dataclass(frozen=True)
class ParameterEntry:
    """One Megatron parameter. `name` is global (layers numbered over the whole model), `local_name` its chunk's own.

    owner: the expert-parallel rank that holds it; None for a parameter that all of them hold. shard_shape: on each
    tensor-parallel rank. partition_dim: the dimension cut over them, None when replicated. hf_names, hf_shapes: the full tensors
    it is made of, in the bridge's order.
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
        """What the bridge reads of a parameter when it merges shards."""
        return SimpleNamespace(tensor_model_parallel=self.partition_dim is not None, partition_dim=self.partition_dim)


def local_entries(bridge: Any, chunks: Sequence[torch.nn.Module]) -> list[ParameterEntry]:
    """The parameters that this rank holds, in module order, without those that only training has."""
    return [entry for entry in stage_entries(bridge, chunks) if entry.owner in (None, bridge.mpu.ep_rank)]


def stage_entries(bridge: Any, chunks: Sequence[torch.nn.Module]) -> list[ParameterEntry]:
    """The parameters of this rank's stage, in module order and by owner, without those that only training has."""
    entries = []
    for index, chunk in enumerate(chunks):
        global_names = bridge._weight_name_mapping_mcore_local_to_global(chunk)
        for local_name, parameter in chunk.named_parameters():
            if local_name.startswith(NOT_EXPORTED):
                continue
            # Megatron marks experts as cut over expert-tensor-parallel ranks, of which there is one.
            cut = bool(getattr(parameter, "tensor_model_parallel", False)) and EXPERT.search(local_name) is None
            dim = int(parameter.partition_dim) if cut and bridge.mpu.tp_size > 1 else None
            full = list(parameter.shape)
            if dim is not None:
                full[dim] *= bridge.mpu.tp_size
            whole = torch.empty(full, dtype=parameter.dtype, device="meta")
            for owner, name in _owners(bridge, global_names[local_name]):
                hf_names, hf_tensors = bridge._weight_to_hf_format(name, whole)
                entries.append(
                    ParameterEntry(
                        stage=bridge.mpu.pp_rank,
                        owner=owner,
                        chunk=index,
                        local_name=local_name,
                        name=name,
                        dtype=parameter.dtype,
                        shard_shape=tuple(parameter.shape),
                        partition_dim=dim,
                        hf_names=tuple(hf_names),
                        hf_shapes=tuple(tuple(tensor.shape) for tensor in hf_tensors),
                    )
                )
    return entries


def _owners(bridge: Any, name: str) -> list[tuple[int | None, str]]:
    """(owner, global name) of every parameter of the model that `name`, with its expert numbered locally, stands for."""
    found = EXPERT.search(name)
    ranks = bridge.mpu.ep_size
    if found is None or ranks == 1:
        return [(None, name)]
    held = bridge.config.num_moe_experts // ranks
    return [(rank, EXPERT.sub(str(rank * held + int(found[0])), name)) for rank in range(ranks)]


def all_entries(bridge: Any, chunks: Sequence[torch.nn.Module]) -> list[ParameterEntry]:
    """The parameters of all stages, first stage first. Collective over the pipeline group."""
    mine = stage_entries(bridge, chunks)
    if bridge.mpu.pp_size == 1:
        return mine
    stages: list[Any] = [None] * bridge.mpu.pp_size
    dist.all_gather_object(stages, mine, group=bridge.mpu.pp_group)
    return [entry for stage in stages for entry in stage]


def merged(bridge: Any, entry: ParameterEntry, shards: Sequence[Tensor]) -> list[Tensor]:
    """The full Hugging Face tensors of `entry` from its tensor-parallel shards, in the order of `hf_names`."""
    if entry.partition_dim is None:
        whole = shards[0]
    else:
        whole = bridge._weight_merge_across_tp(entry.name, list(shards), entry.like())
    tensors: list[Tensor] = bridge._weight_to_hf_format(entry.name, whole)[1]
    return tensors


def shard_of(bridge: Any, entry: ParameterEntry, hf_tensors: Sequence[Tensor]) -> Tensor:
    """This rank's shard of `entry` from its full Hugging Face tensors, which have the shapes of `hf_shapes`."""
    whole = bridge._weight_to_mcore_format(entry.name, list(hf_tensors))
    if entry.partition_dim is None:
        return whole
    like = torch.empty(entry.shard_shape, device="meta")
    shard: Tensor = bridge._weight_split_across_tp(entry.name, whole, like, bridge.mpu.tp_size)[bridge.mpu.tp_rank]
    return shard

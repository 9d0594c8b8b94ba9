"""Tensors that go with the model's parameters, in a checkpoint which any parallel layout can load.

Two shapes of the same numbers:
    model tensors   one per parameter of this rank's chunks, of the parameter's shape (`ModelTensors`)
    shards          one per parameter that Adam updates on this rank, in the order of the gradient shards: the parameter itself,
                    its float32 master copy, or with the distributed optimizer a flat slice of it

Model tensors are saved as Megatron saves the parameters themselves: `chunk.sharded_state_dict()` says which part of which
tensor of the whole model each is, which are copies of one another, and how fused ones split. So whatever layout can load the
model can load these.

Invariants:
- `cut` of what a checkpoint carried over from `assembled` gives back the shards, bit for bit, whatever the two layouts;
- collectives follow the order of the model's parameters, which data-parallel ranks share although their shards differ.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any, Literal

import torch
import torch.distributed as dist
from megatron.core.dist_checkpointing.mapping import ShardedTensorFactory
from megatron.core.optimizer.distrib_optimizer import DistributedOptimizer
from megatron.core.optimizer.optimizer import Float16OptimizerWithFloat16Params
from torch import Tensor

from megatron_async_rl.policy.optimizer import optimizer_parameters, optimizer_parts

if TYPE_CHECKING:
    from megatron.core.optimizer import MegatronOptimizer

    from megatron_async_rl.policy.model import PolicyModel

ModelTensors = Sequence[Mapping[str, Tensor]]
"""Per chunk: the parameter's name in the chunk -> a tensor of its shape."""
Numbers = Literal["float32", "parameter"]
"""dtype of saved model tensors: float32 throughout, or each parameter's own."""


@dataclass(frozen=True, eq=False)
class _Place:
    """What one shard is of: elements start..end of the flattened model parameter."""

    parameter: Tensor
    start: int
    end: int


def assembled(shards: Sequence[Tensor], model: PolicyModel, optimizer: MegatronOptimizer) -> list[dict[str, Tensor]]:
    """float32 model tensors on the CPU from this rank's shards (on any device). Collective over data-parallel ranks.

    Whole on the first data-parallel rank, which is the one that a checkpoint is written by; on the others zeros of the right
    shapes that take no memory.
    """
    held: dict[int, list[tuple[_Place, Tensor]]] = {}
    for place, shard in zip(_places(optimizer), shards, strict=True):
        held.setdefault(id(place.parameter), []).append((place, shard))
    groups = _sharding_groups(optimizer)
    first = model.bridge.layout.dp_rank == 0
    chunks = []
    for chunk in model.chunks:
        tensors = {}
        for name, parameter in chunk.named_parameters():
            group = groups.get(id(parameter))
            # Experts without the distributed optimizer are replicated over ranks of their own.
            writes = dist.get_rank(group) == 0 if group is not None else first or not getattr(parameter, "allreduce", True)
            if group is None and not writes:
                tensors[name] = torch.zeros(1).expand(parameter.shape)
                continue
            whole = torch.zeros(parameter.numel(), dtype=torch.float32, device=parameter.device)
            for place, shard in held.get(id(parameter), []):
                whole[place.start : place.end] = shard.detach().reshape(-1)
            if group is not None:
                dist.reduce(whole, dst=dist.get_process_group_ranks(group)[0], group=group)
            tensors[name] = whole.view(parameter.shape).cpu() if writes else torch.zeros(1).expand(parameter.shape)
        chunks.append(tensors)
    return chunks


def cut(tensors: ModelTensors, model: PolicyModel, optimizer: MegatronOptimizer) -> list[Tensor]:
    """This rank's shards of model tensors: views of them, where they lie, in the order and shapes of the gradient shards."""
    by_parameter = {
        id(parameter): own[name]
        for chunk, own in zip(model.chunks, tensors, strict=True)
        for name, parameter in chunk.named_parameters()
    }
    return [
        by_parameter[id(place.parameter)].reshape(-1)[place.start : place.end].view(shard.shape)
        for place, shard in zip(_places(optimizer), optimizer_parameters(optimizer), strict=True)
    ]


def numbers_of(tensors: ModelTensors) -> Numbers:
    return "float32" if all(tensor.dtype == torch.float32 for chunk in tensors for tensor in chunk.values()) else "parameter"


def blank(model: PolicyModel, numbers: Numbers) -> list[dict[str, Tensor]]:
    """Zeros on the CPU for `sharded` to load into. Zero, because a padded vocabulary has rows that no file holds."""
    return [
        {
            name: torch.zeros(parameter.shape, dtype=torch.float32 if numbers == "float32" else parameter.dtype)
            for name, parameter in chunk.named_parameters()
        }
        for chunk in model.chunks
    ]


def sharded(name: str, tensors: ModelTensors, model_entries: Sequence[Mapping[str, Any]]) -> dict[str, Any]:
    """What Megatron's dist_checkpointing saves or loads for these tensors, under keys that begin with `name`.

    model_entries: `sharded_state_dict()` of each chunk, before Megatron has saved or loaded it (which changes it).
    """
    return {
        str(index): {local: _entry(name, entries[local], tensor) for local, tensor in own.items()}
        for index, (own, entries) in enumerate(zip(tensors, model_entries, strict=True))
    }


def _entry(name: str, entry: Any, tensor: Tensor) -> Any:
    key = f"{name}.{entry.key}"
    if isinstance(entry, ShardedTensorFactory):
        return replace(entry, key=key, data=tensor)
    return replace(entry, key=key, data=tensor, dtype=tensor.dtype)


def _places(optimizer: MegatronOptimizer) -> list[_Place]:
    found = {id(shard): place for part in optimizer_parts(optimizer) for shard, place in _places_of(part)}
    return [found[id(shard)] for shard in optimizer_parameters(optimizer)]


def _places_of(part: Any) -> Iterator[tuple[Tensor, _Place]]:
    if isinstance(part, DistributedOptimizer):
        groups = [*zip(part.model_float16_groups, part.shard_fp32_from_float16_groups, strict=True)]
        groups += zip(part.model_fp32_groups, part.shard_fp32_groups, strict=True)
        for parameters, shards in groups:
            for parameter, shard in zip(parameters, shards, strict=True):
                owned = part._get_model_param_range_map(parameter)["param"]
                yield shard, _Place(parameter, owned.start, owned.end)
        return
    masters: dict[int, Tensor] = {}
    if isinstance(part, Float16OptimizerWithFloat16Params):
        for parameters, shards in zip(part.float16_groups, part.fp32_from_float16_groups, strict=True):
            masters |= {id(shard): parameter for parameter, shard in zip(parameters, shards, strict=True)}
    for shard in optimizer_parameters(part):
        yield shard, _Place(masters.get(id(shard), shard), 0, shard.numel())


def _sharding_groups(optimizer: MegatronOptimizer) -> dict[int, Any]:
    """Parameters that the distributed optimizer slices -> the ranks it slices them over (experts have their own)."""
    return {
        id(parameter): part.data_parallel_group
        for part in optimizer_parts(optimizer)
        if isinstance(part, DistributedOptimizer)
        for buffer in part.buffers
        for parameter in buffer.params
    }

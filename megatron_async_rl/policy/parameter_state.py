"""Tensors that go with the model's parameters, in a checkpoint which any parallel layout can load.

Two shapes of the same numbers:
    model tensors   one per parameter of this rank's chunks, of the parameter's shape
                    (`ModelTensors`)
    shards          one per parameter that Adam updates on this rank, in the order of the gradient
                    shards: the parameter itself, its float32 master copy, or with the distributed
                    optimizer a flat slice of it

Model tensors are saved as Megatron saves the parameters themselves: `chunk.sharded_state_dict()`
says which part of which tensor of the whole model each is, which are copies of one another, and how
fused ones split. So whatever layout can load the model can load these.

Adam's state is saved so:
    adam.exp_avg, adam.exp_avg_sq   the moments
    adam.master                     the float32 parameters, where the model's own are not float32
Adam counts steps for all parameters alike; the count is one number. Settings (betas, eps, decay,
lr) are the configuration's.

Invariants:
- `cut` of what a checkpoint carried over from `assembled` gives back the shards, bit for bit,
  whatever the two layouts;
- collectives follow the order of the model's parameters, which data-parallel ranks share although
  their shards differ.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any, Literal

import torch
import torch.distributed as dist
from megatron.core.dist_checkpointing.mapping import ShardedTensorFactory
from torch import Tensor

from megatron_async_rl.policy.megatron_private import (
    model_slices,
    optimizer_parts,
    slicing_groups,
)
from megatron_async_rl.policy.optimizer import optimizer_parameters

if TYPE_CHECKING:
    from megatron.core.optimizer import MegatronOptimizer

    from megatron_async_rl.policy.model import PolicyModel

ModelTensors = Sequence[Mapping[str, Tensor]]
"""Per chunk: the parameter's name in the chunk -> a tensor of its shape."""
Numbers = Literal["float32", "parameter"]
"""dtype of saved model tensors: float32 throughout, or each parameter's own."""
MASTER = "adam.master"


@dataclass(frozen=True, eq=False)
class _Place:
    """The origin of one shard: elements start..end of the flattened model parameter."""

    parameter: Tensor
    start: int
    end: int


def assembled(
    shards: Sequence[Tensor], model: PolicyModel, optimizer: MegatronOptimizer
) -> list[dict[str, Tensor]]:
    """float32 model tensors on the CPU from this rank's shards (on any device). Collective over
    data- and context-parallel ranks.

    Whole on the first of those ranks, which is the one that a checkpoint is written by; on the
    others zeros of the right shapes that take no memory.
    """
    held: dict[int, list[tuple[_Place, Tensor]]] = {}
    for place, shard in zip(_places(optimizer), shards, strict=True):
        held.setdefault(id(place.parameter), []).append((place, shard))
    groups = slicing_groups(optimizer)
    first = model.bridge.layout.replica == 0
    chunks = []
    for chunk in model.chunks:
        tensors = {}
        for name, parameter in chunk.named_parameters():
            group = groups.get(id(parameter))
            # Experts without the distributed optimizer are replicated over ranks of their own.
            writes = (
                dist.get_rank(group) == 0
                if group is not None
                else first or not getattr(parameter, "allreduce", True)
            )
            if group is None and not writes:
                tensors[name] = torch.zeros(1).expand(parameter.shape)
                continue
            whole = torch.zeros(parameter.numel(), dtype=torch.float32, device=parameter.device)
            for place, shard in held.get(id(parameter), []):
                whole[place.start : place.end] = shard.detach().reshape(-1)
            if group is not None:
                dist.reduce(whole, dst=dist.get_process_group_ranks(group)[0], group=group)
            tensors[name] = (
                whole.view(parameter.shape).cpu()
                if writes
                else torch.zeros(1).expand(parameter.shape)
            )
        chunks.append(tensors)
    return chunks


def cut(tensors: ModelTensors, model: PolicyModel, optimizer: MegatronOptimizer) -> list[Tensor]:
    """This rank's shards of model tensors: views of them, where they lie, in the order and shapes
    of the gradient shards."""
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
    return (
        "float32"
        if all(tensor.dtype == torch.float32 for chunk in tensors for tensor in chunk.values())
        else "parameter"
    )


def blank(model: PolicyModel, numbers: Numbers) -> list[dict[str, Tensor]]:
    """Zeros on the CPU for `sharded` to load into. Zero, because a padded vocabulary has rows that
    no file holds."""
    return [
        {
            name: torch.zeros(
                parameter.shape, dtype=torch.float32 if numbers == "float32" else parameter.dtype
            )
            for name, parameter in chunk.named_parameters()
        }
        for chunk in model.chunks
    ]


def sharded(
    name: str, tensors: ModelTensors, model_entries: Sequence[Mapping[str, Any]]
) -> dict[str, Any]:
    """These tensors as Megatron's dist_checkpointing saves or loads them; keys begin with `name`.

    model_entries: `sharded_state_dict()` of each chunk, before Megatron has saved or loaded it
    (which changes it).
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


def shard_owners(optimizer: MegatronOptimizer) -> list[Tensor]:
    """The model's parameter that each shard is of, in the order of the optimizer's parameters."""
    return [place.parameter for place in _places(optimizer)]


def _places(optimizer: MegatronOptimizer) -> list[_Place]:
    found = {
        id(shard): _Place(parameter, start, end)
        for part in optimizer_parts(optimizer)
        for shard, parameter, start, end in model_slices(part)
    }
    return [found[id(shard)] for shard in optimizer_parameters(optimizer)]


def adam_names(model: PolicyModel) -> tuple[str, ...]:
    """Names of the parts of Adam's state that a checkpoint of this model holds; the same on every
    rank."""
    moments = ("adam.exp_avg", "adam.exp_avg_sq")
    return moments if model.config.params_dtype == torch.float32 else (*moments, MASTER)


def adam_shards(optimizer: MegatronOptimizer, name: str) -> list[Tensor]:
    """The state of one name, in place, in the order of the gradient shards; as it would start where
    there is none yet."""
    materialise(optimizer)
    parameters = optimizer_parameters(optimizer)
    if name == MASTER:
        return [parameter.detach() for parameter in parameters]
    states = {
        parameter: state
        for part in optimizer_parts(optimizer)
        for parameter, state in part.optimizer.state.items()
    }
    return [states[parameter][name.removeprefix("adam.")] for parameter in parameters]


def adam_steps(optimizer: MegatronOptimizer) -> int:
    """Steps that Adam's bias correction has counted."""
    counts = [
        state.get("step", 0)
        for part in optimizer_parts(optimizer)
        for state in part.optimizer.state.values()
    ]
    # torch's Adam counts each parameter's steps, the fused ones a group's.
    counts += [group.get("step", 0) for group in optimizer.param_groups]
    return max((int(count) for count in counts), default=0)


def set_adam_steps(optimizer: MegatronOptimizer, steps: int) -> None:
    for part in optimizer_parts(optimizer):
        if _is_torch_adam(part):
            for state in part.optimizer.state.values():
                # A tensor each: every parameter's update counts its own up.
                state["step"] = torch.tensor(float(steps), dtype=torch.float32)
        else:
            for group in part.param_groups:
                group["step"] = steps


def materialise(optimizer: MegatronOptimizer) -> None:
    """Gives every parameter that has not been stepped yet the state it would start from."""
    for part in optimizer_parts(optimizer):
        part.init_state_fn(part.optimizer, part.config)
        if _is_torch_adam(part):
            for state in part.optimizer.state.values():
                state.setdefault("step", torch.zeros((), dtype=torch.float32))


def _is_torch_adam(part: Any) -> bool:
    return isinstance(part.optimizer, torch.optim.Adam | torch.optim.AdamW)

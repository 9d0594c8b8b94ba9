"""State that goes with the model's parameters, as slices of them: what a rank holds of it, and
nothing that another holds.

A shard is a flat run of a parameter's elements with what belongs to them: Adam's moments, its
float32 parameters, a past gradient, a copy of the weights. There is one for each parameter that
Adam updates on this rank, in the order of the gradient shards: all of the parameter, or with the
distributed optimizer a slice of it; and copies of the weights are divided over replicas whatever
the optimizer (past_weights.py). blocks.py takes slices to a checkpoint and back.

Adam's state is saved so:
    adam.exp_avg, adam.exp_avg_sq   the moments, in the dtype they are kept in
    adam.master                     the float32 parameters, where the model's own are not float32
Adam counts steps for all parameters alike; the count is one number. Settings (betas, eps, decay,
lr) are the configuration's.

Invariants:
- every element of a parameter is in one slice on each replica, or (`own`) on one replica alone;
- nothing here communicates, so ranks may hold different numbers of shards.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
from megatron.core.optimizer import MegatronOptimizer
from torch import Tensor

from megatron_async_rl.policy.adam_view import masters_of, moment_of, optimizer_parameters
from megatron_async_rl.policy.megatron_private import (
    fill_adam,
    is_distributed,
    model_slices,
    optimizer_parts,
)
from megatron_async_rl.policy.model import PolicyModel

MASTER = "adam.master"
MOMENT_NAMES = ("adam.exp_avg", "adam.exp_avg_sq")
ALIGNED = 64


@dataclass(frozen=True, eq=False)
class Slice:
    """Elements start..end of a flattened parameter (or buffer) of this rank's chunks. own: no other
    replica holds them; else every replica does, alike."""

    parameter: Tensor
    start: int
    end: int
    own: bool


Sliced = Sequence[tuple[Slice, Tensor]]
"""Slices, and contiguous tensors of as many elements, of any dtype."""


def replica_part(elements: int, replica: int, replicas: int) -> tuple[int, int]:
    """Start and end of the part of a flattened parameter that is this replica's where a parameter
    is divided over all of them. Parts begin at multiples of ALIGNED elements, so that what is
    computed of a part is what a vector unit computes of the whole; the last ones may be empty."""
    size = -(-elements // (replicas * ALIGNED)) * ALIGNED
    return min(elements, replica * size), min(elements, (replica + 1) * size)


def optimizer_slices(optimizer: MegatronOptimizer) -> list[Slice]:
    """The model's slice that each of the optimizer's parameters is, in their order."""
    found = {
        id(shard): Slice(parameter, start, end, own=is_distributed(part))
        for part in optimizer_parts(optimizer)
        for shard, parameter, start, end in model_slices(part)
    }
    return [found[id(shard)] for shard in optimizer_parameters(optimizer)]


def optimizer_state(optimizer: MegatronOptimizer, shards: Sequence[Tensor]) -> Sliced:
    """shards: one for each of the optimizer's parameters, of its size."""
    return list(zip(optimizer_slices(optimizer), shards, strict=True))


def adam_names(model: PolicyModel) -> tuple[str, ...]:
    """Names of the parts of Adam's state that a checkpoint of this model holds; the same on every
    rank."""
    whole = model.config.params_dtype == torch.float32
    return MOMENT_NAMES if whole else (*MOMENT_NAMES, MASTER)


def adam_shards(optimizer: MegatronOptimizer, name: str) -> list[Tensor]:
    """The state of one name, in place, in the order of the gradient shards, on the device or on the
    host; as it would start if there is none yet."""
    materialise(optimizer)
    if name == MASTER:
        return [parameter.detach() for parameter in masters_of(optimizer)]
    states = {
        parameter: state
        for part in optimizer_parts(optimizer)
        for parameter, state in part.optimizer.state.items()
    }
    moment = name.removeprefix("adam.")
    return [moment_of(states[each], moment) for each in optimizer_parameters(optimizer)]


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
        fill_adam(part)
        if _is_torch_adam(part):
            for state in part.optimizer.state.values():
                state.setdefault("step", torch.zeros((), dtype=torch.float32))


def _is_torch_adam(part: Any) -> bool:
    return isinstance(part.optimizer, torch.optim.Adam | torch.optim.AdamW)

"""Access to Megatron's optimizer: gradients, moments and float32 parameters of this rank's shards,
and the view of Adam that controls get.

Invariants:
- controls get tensors in the order of the gradient shards (`gradients_of`), in float32 on their
  device. They are not stored, but read or computed from the optimizer's own state on
  request, one tensor at a time unless they are in place;
- the number of steps shows whether there is state to read, so the answer is the same on every rank,
  including ranks without shards;
- missing state raises StateMissing; no parameter is left out silently.

State of the model's parameters is saved and copied as slices. A shard is a flat run of a
parameter's elements with their state: Adam's moments, its float32 parameters, a past gradient, a
copy of the weights. There is one shard for each parameter that Adam updates on this rank, in the
order of the gradient shards: the whole parameter, or with the distributed optimizer a slice of it.
Copies of the weights are divided over replicas with either optimizer (past_weights.py). blocks.py
writes slices to a checkpoint and reads them.

Names of Adam's state in a checkpoint:
    adam.exp_avg, adam.exp_avg_sq   the moments, in the dtype in which they are kept
    adam.master                     the float32 parameters, if the model's own are not float32
Adam counts the same steps for all parameters, so the count is one number. Settings (betas, eps,
decay, lr) come from the configuration.

Invariants of slices:
- every element of a parameter is in one slice on each replica, or (`own`) on one replica alone;
- this file does not communicate, so ranks may hold different numbers of shards.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any, overload

import torch
from megatron.core.optimizer import MegatronOptimizer
from megatron.core.tensor_parallel import param_is_not_tensor_parallel_duplicate
from megatron.core.transformer.module import param_is_not_shared
from torch import Tensor, nn

from megatron_async_rl.config.policy import OptimizerConfig as OptimizerSettings
from megatron_async_rl.gradients import Gradients, GradientShard, blocks
from megatron_async_rl.policy.megatron_private import (
    fill_adam,
    is_distributed,
    model_slices,
    optimizer_parts,
)
from megatron_async_rl.policy.model import PolicyModel
from megatron_async_rl.policy.parallel import Layout


def gradients_of(optimizer: MegatronOptimizer, layout: Layout) -> Gradients:
    """Return the reduced gradients that the optimizer is about to use, in place; valid between
    `prepare_grads` and its step.

    With the distributed optimizer each rank holds its slices and every slice counts. Without it,
    data- and context-parallel replicas hold the same gradients, and the first one counts; for
    experts, whose replicas are the stage's ranks with the same experts, the first of those counts.
    Tensor-parallel copies count on tensor rank 0, tied embeddings on the first pipeline stage. Sums
    are over the world, so that every rank gets the same bits and makes the same decisions. Raises
    StateMissing.
    """
    # Slices are disjoint, so all of them count.
    sliced = optimizer.config.use_distributed_optimizer
    shards = tuple(
        GradientShard(
            grad=gradient_of(parameter),
            counted=(
                sliced
                or (layout.expert_replica if group["is_expert_parallel"] else layout.replica) == 0
            )
            and param_is_not_shared(parameter)
            and param_is_not_tensor_parallel_duplicate(parameter),
        )
        for group in optimizer.param_groups
        for parameter in group["params"]
    )
    return Gradients(shards, layout.world_group, layout.device)


def optimizer_parameters(optimizer: MegatronOptimizer) -> list[torch.nn.Parameter]:
    """Return the parameters that Adam updates on this rank: the model's own, or this rank's float32
    slices of them."""
    return [parameter for group in optimizer.param_groups for parameter in group["params"]]


FLOAT32_BYTES = torch.float32.itemsize


class StateMissing(RuntimeError):
    """A gradient, a moment or a master is not where it is expected. A step without it would leave
    its parameter out silently."""


def gradient_of(parameter: nn.Parameter) -> Tensor:
    """Return the reduced gradient of one of the optimizer's parameters, in place: valid between
    `prepare_grads` and the step. Raises StateMissing."""
    if parameter.grad is None:
        elsewhere = getattr(parameter, "decoupled_grad", None) is not None
        raise StateMissing(
            f"a parameter of shape {list(parameter.shape)} has no gradient in `grad`"
            + (
                ": a precision-aware optimizer has put it into `decoupled_grad`"
                if elsewhere
                else ""
            )
        )
    return parameter.grad


def moment_of(state: Mapping[str, Any], name: str) -> Tensor:
    """Return `exp_avg` or `exp_avg_sq` of Adam's state of one parameter, in place: float32 or
    bfloat16, on the parameter's device or the host (`BlockAdam`). Raises StateMissing, also for a
    moment with fewer bits, which is meaningless without its scale."""
    moment = state.get(name)
    scaled = moment is not None and moment.dtype.itemsize < FLOAT32_BYTES
    if moment is None or (scaled and moment.dtype != torch.bfloat16):
        found = f"has {sorted(state)}" if moment is None else f"holds it as {moment.dtype}"
        raise StateMissing(
            f"Adam's state of a parameter {found}, where {name} in float32 or bfloat16 is needed"
        )
    return moment


def _in_float32(moment: Tensor, device: torch.device) -> Tensor:
    """Return the moment or a part of it, in place if it already is float32 on the device."""
    # Offloaded moments are copied to the device here, and are not written back.
    moved = moment.to(device, non_blocking=True)
    return moved.float() if moved.dtype == torch.bfloat16 else moved


def masters_of(optimizer: MegatronOptimizer) -> list[nn.Parameter]:
    """Return the float32 parameters that Adam updates, which are its own. Raises StateMissing if it
    updates the model's, in a dtype of fewer bits."""
    parameters = optimizer_parameters(optimizer)
    for parameter in parameters:
        if parameter.dtype.itemsize < FLOAT32_BYTES:
            raise StateMissing(
                f"Adam updates a parameter of shape {list(parameter.shape)} in {parameter.dtype}:"
                " it has no float32 master to read"
            )
    return parameters


@dataclass(frozen=True)
class TakenStep:
    """The settings of the last optimizer step. lr: learning rate passed to Adam, with the controls'
    factors and the correction of its bias (optimizer.py). norm: length of Adam's change to the
    parameters, if it was measured."""

    lr: float
    beta1: float
    norm: float | None = None


class AdamView:
    """Implementation of controls.decision.OptimizerView for Megatron's Adam: torch's, or a fused
    one."""

    def __init__(
        self,
        optimizer: MegatronOptimizer,
        settings: OptimizerSettings,
        updates: int,
        last: TakenStep | None,
    ) -> None:
        self._optimizer = optimizer
        self._settings = settings
        self._last = last
        self.updates = updates

    @property
    def beta1(self) -> float:
        return self._settings.betas[0]

    @property
    def last_update_norm(self) -> float | None:
        return None if self._last is None else self._last.norm

    def momentum(self) -> Sequence[Tensor] | None:
        if self._last is None:
            return None
        return _Computed(
            [
                partial(_in_float32, moment_of(state, "exp_avg"), parameter.device)
                for parameter, state, _ in _states(self._optimizer)
            ]
        )

    def last_update(self) -> Sequence[Tensor] | None:
        """-lr / (1 - beta1^n) m / (sqrt(v / (1 - beta2^n)) + eps), with the n-th step's own beta1
        and the lr passed to Adam for it (arXiv 1412.6980). Moments in bfloat16 are read as they
        were rounded after the step."""
        if self._last is None:
            return None
        return _Computed(
            [partial(_last_update, *each, self._last) for each in _states(self._optimizer)]
        )

    def next_update(self) -> NextUpdate:
        """Return the update of the step for which the optimizer is set: its groups' lr and betas,
        and the present gradients."""
        return NextUpdate(_states(self._optimizer))


class _Computed(Sequence[Tensor]):
    """Tensors that are computed when they are read, so that they never exist all at once."""

    def __init__(self, make: Sequence[Callable[[], Tensor]]) -> None:
        self._make = make

    def __len__(self) -> int:
        return len(self._make)

    @overload
    def __getitem__(self, index: int) -> Tensor: ...
    @overload
    def __getitem__(self, index: slice) -> Sequence[Tensor]: ...
    def __getitem__(self, index: int | slice) -> Tensor | Sequence[Tensor]:
        if isinstance(index, slice):
            return _Computed(self._make[index])
        return self._make[index]()


def _last_update(
    parameter: nn.Parameter, state: dict[str, Any], group: dict[str, Any], last: TakenStep
) -> Tensor:
    # torch's Adam counts the steps of each parameter, fused ones those of a group.
    step = float(state["step"] if "step" in state else group["step"])
    first, second = 1.0 - last.beta1**step, 1.0 - group["betas"][1] ** step
    update = torch.empty(parameter.shape, dtype=parameter.dtype, device=parameter.device)
    for part, *moments in blocks(
        update, moment_of(state, "exp_avg"), moment_of(state, "exp_avg_sq")
    ):
        # One block at a time, so no second copy of the moments exists on the device.
        m, v = (_in_float32(moment, part.device) for moment in moments)
        torch.sqrt(v, out=part).div_(math.sqrt(second)).add_(group["eps"])
        torch.div(m, part, out=part).mul_(-last.lr / first)
    return update


class NextUpdate:
    """The tensors that Adam is about to add to each of its parameters, without weight decay;
    iteration computes them.

    With g the gradient and n the number of the step: m' = beta1 m + (1 - beta1) g, v' = beta2 v +
    (1 - beta2) g^2, and -lr / (1 - beta1^n) m' / (sqrt(v' / (1 - beta2^n)) + eps). Adam's state
    does not change. One shard exists at a time.
    """

    def __init__(
        self, states: Sequence[tuple[nn.Parameter, dict[str, Any], dict[str, Any]]]
    ) -> None:
        self._states = states

    def __iter__(self) -> Iterator[Tensor]:
        return (_next_update(parameter, state, group) for parameter, state, group in self._states)


def _states(
    optimizer: MegatronOptimizer,
) -> list[tuple[nn.Parameter, dict[str, Any], dict[str, Any]]]:
    """Return each of Adam's parameters, its state (empty before the first step), and its group."""
    held = {
        parameter: state
        for part in optimizer_parts(optimizer)
        for parameter, state in part.optimizer.state.items()
    }
    return [
        (parameter, held.get(parameter, {}), group)
        for group in optimizer.param_groups
        for parameter in group["params"]
    ]


@torch.no_grad()
def _next_update(parameter: nn.Parameter, state: dict[str, Any], group: dict[str, Any]) -> Tensor:
    beta1, beta2 = group["betas"]
    gradient = gradient_of(parameter)
    # Before its first step Adam has no state, and a fused one has no count.
    step = 1.0 + float(state["step"] if "step" in state else group.get("step", 0))
    nothing = torch.zeros((), dtype=parameter.dtype, device=parameter.device).expand(
        parameter.numel()
    )
    moment, square = (
        moment_of(state, name) if state else nothing for name in ("exp_avg", "exp_avg_sq")
    )
    update = torch.empty(parameter.shape, dtype=parameter.dtype, device=parameter.device)
    for part, g, *moments in blocks(update, gradient, moment, square):
        g = g.to(part.dtype)
        m, v = (_in_float32(each, part.device) for each in moments)
        torch.mul(v, beta2, out=part).addcmul_(g, g, value=1.0 - beta2).sqrt_()
        part.div_(math.sqrt(1.0 - beta2**step)).add_(group["eps"])
        torch.div(torch.lerp(m, g, 1.0 - beta1), part, out=part).mul_(
            -group["lr"] / (1.0 - beta1**step)
        )
    return update


MASTER = "adam.master"
MOMENT_NAMES = ("adam.exp_avg", "adam.exp_avg_sq")
ALIGNED = 64


@dataclass(frozen=True, eq=False)
class Slice:
    """Elements start..end of a flattened parameter (or buffer) of this rank's chunks. own: True if
    no other replica holds them; otherwise every replica holds the same ones."""

    parameter: Tensor
    start: int
    end: int
    own: bool


Sliced = Sequence[tuple[Slice, Tensor]]
"""Slices, and contiguous tensors with the same number of elements, of any dtype."""


def replica_part(elements: int, replica: int, replicas: int) -> tuple[int, int]:
    """Return start and end of this replica's part of a flattened parameter that is divided over all
    replicas. Parts begin at multiples of ALIGNED elements, so that a vector unit computes the same
    for a part as for the whole; the last parts may be empty."""
    # Rounded up, so early parts are full and the last ones short or empty.
    size = -(-elements // (replicas * ALIGNED)) * ALIGNED
    return min(elements, replica * size), min(elements, (replica + 1) * size)


def optimizer_slices(optimizer: MegatronOptimizer) -> list[Slice]:
    """Return, for each of the optimizer's parameters in order, the slice of the model that it
    is."""
    found = {
        id(shard): Slice(parameter, start, end, own=is_distributed(part))
        for part in optimizer_parts(optimizer)
        for shard, parameter, start, end in model_slices(part)
    }
    # In the order of the gradient shards, which is the order of all per-shard state.
    return [found[id(shard)] for shard in optimizer_parameters(optimizer)]


def optimizer_state(optimizer: MegatronOptimizer, shards: Sequence[Tensor]) -> Sliced:
    """Return the shards with their slices. shards: one for each of the optimizer's parameters, of
    its size."""
    return list(zip(optimizer_slices(optimizer), shards, strict=True))


def adam_names(model: PolicyModel) -> tuple[str, ...]:
    """Return the names of the parts of Adam's state in a checkpoint of this model; the same on
    every rank."""
    whole = model.config.params_dtype == torch.float32
    return MOMENT_NAMES if whole else (*MOMENT_NAMES, MASTER)


def adam_shards(optimizer: MegatronOptimizer, name: str) -> list[Tensor]:
    """Return the state of one name, in place, in the order of the gradient shards, on the device or
    the host; its initial value if there is none yet."""
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
    """Return the number of steps that Adam's bias correction has counted."""
    counts = [
        state.get("step", 0)
        for part in optimizer_parts(optimizer)
        for state in part.optimizer.state.values()
    ]
    # torch's Adam counts the steps of each parameter, fused ones those of a group. The maximum,
    # because parameters without an update yet count 0.
    counts += [group.get("step", 0) for group in optimizer.param_groups]
    return max((int(count) for count in counts), default=0)


def set_adam_steps(optimizer: MegatronOptimizer, steps: int) -> None:
    for part in optimizer_parts(optimizer):
        if _is_torch_adam(part):
            for state in part.optimizer.state.values():
                # A separate tensor for each, because every parameter's update increments its own.
                state["step"] = torch.tensor(float(steps), dtype=torch.float32)
        else:
            for group in part.param_groups:
                # Fused Adams count per group.
                group["step"] = steps


def materialise(optimizer: MegatronOptimizer) -> None:
    """Create the initial state of every parameter that has not been stepped yet."""
    for part in optimizer_parts(optimizer):
        fill_adam(part)
        if _is_torch_adam(part):
            for state in part.optimizer.state.values():
                # Megatron only fills moments; torch's Adam also requires its own count.
                state.setdefault("step", torch.zeros((), dtype=torch.float32))


def _is_torch_adam(part: Any) -> bool:
    return isinstance(part.optimizer, torch.optim.Adam | torch.optim.AdamW)

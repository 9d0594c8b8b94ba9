"""What a control may read of Adam: the moment it averages, the step it took last, and the one it is about to take.

Invariants:
- tensors are in the order of the gradient shards (`optimizer.gradients_of`);
- nothing here is stored: all are read or computed from the optimizer's own state when asked for;
- whether there is anything to read is known from the steps taken, so it is the same on every rank, also on one without shards.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, overload

import torch
from torch import Tensor, nn

from megatron_async_rl.controls.inner_product import block_elements, blocks
from megatron_async_rl.policy.optimizer import optimizer_parts

if TYPE_CHECKING:
    from megatron.core.optimizer import MegatronOptimizer

    from megatron_async_rl.config.schema import OptimizerConfig


@dataclass(frozen=True)
class TakenStep:
    """What the last optimizer step was made with, the controls' factors included."""

    lr: float
    beta1: float


class AdamView:
    """Implements controls.decision.OptimizerView over Megatron's Adam: torch's, or a fused one."""

    def __init__(self, optimizer: MegatronOptimizer, settings: OptimizerConfig, updates: int, last: TakenStep | None) -> None:
        self._optimizer = optimizer
        self._settings = settings
        self._last = last
        self.updates = updates

    @property
    def beta1(self) -> float:
        return self._settings.betas[0]

    def momentum(self) -> Sequence[Tensor] | None:
        if self._last is None:
            return None
        return [state["exp_avg"] for state, _ in self._states()]

    def last_update(self) -> Sequence[Tensor] | None:
        """-lr / (1 - beta1^n) m / (sqrt(v / (1 - beta2^n)) + eps), with the n-th step's own lr and beta1 (arXiv 1412.6980)."""
        return None if self._last is None else _Updates(self._states(), self._last)

    def next_update(self) -> NextUpdate:
        """Of the step that the optimizer is set for: its groups' lr and betas, and the gradients as they are."""
        return NextUpdate(_states(self._optimizer))

    def _states(self) -> list[tuple[dict[str, Any], dict[str, Any]]]:
        return [(state, group) for _, state, group in _states(self._optimizer)]


class _Updates(Sequence[Tensor]):
    """Each tensor is computed when it is read, so that the whole update never exists at once."""

    def __init__(self, states: Sequence[tuple[dict[str, Any], dict[str, Any]]], last: TakenStep) -> None:
        self._states = states
        self._last = last

    def __len__(self) -> int:
        return len(self._states)

    @overload
    def __getitem__(self, index: int) -> Tensor: ...
    @overload
    def __getitem__(self, index: slice) -> Sequence[Tensor]: ...
    def __getitem__(self, index: int | slice) -> Tensor | Sequence[Tensor]:
        if isinstance(index, slice):
            return _Updates(self._states[index], self._last)
        state, group = self._states[index]
        # torch's Adam counts each parameter's steps, the fused ones a group's.
        step = float(state["step"] if "step" in state else group["step"])
        first, second = 1.0 - self._last.beta1**step, 1.0 - group["betas"][1] ** step
        moment, square = state["exp_avg"], state["exp_avg_sq"]
        update = torch.empty_like(moment)
        size = block_elements(moment.device)
        for part, m, v in zip(*(x.view(-1).split(size) for x in (update, moment, square)), strict=True):
            torch.sqrt(v, out=part).div_(math.sqrt(second)).add_(group["eps"])
            torch.div(m, part, out=part).mul_(-self._last.lr / first)
        return update


class NextUpdate:
    """What Adam is about to add to each parameter that has a gradient shard, without weight decay: iterate to compute it.

    With g the gradient and n the number of the step: m' = beta1 m + (1 - beta1) g, v' = beta2 v + (1 - beta2) g^2, and
    -lr / (1 - beta1^n) m' / (sqrt(v' / (1 - beta2^n)) + eps). Adam's state stays as it is. One shard exists at a time.
    """

    def __init__(self, states: Sequence[tuple[nn.Parameter, dict[str, Any], dict[str, Any]]]) -> None:
        self._states = states

    def __iter__(self) -> Iterator[Tensor]:
        return (_next_update(parameter, state, group) for parameter, state, group in self._states)


def _states(optimizer: MegatronOptimizer) -> list[tuple[nn.Parameter, dict[str, Any], dict[str, Any]]]:
    """Of each parameter that has a gradient shard: itself, Adam's state of it (empty before the first step), its group."""
    held = {parameter: state for part in optimizer_parts(optimizer) for parameter, state in part.optimizer.state.items()}
    return [
        (parameter, held.get(parameter, {}), group)
        for group in optimizer.param_groups
        for parameter in group["params"]
        if parameter.grad is not None
    ]


@torch.no_grad()
def _next_update(parameter: nn.Parameter, state: dict[str, Any], group: dict[str, Any]) -> Tensor:
    beta1, beta2 = group["betas"]
    # Before its first step Adam has no state, and a fused one no count.
    step = 1.0 + float(state["step"] if "step" in state else group.get("step", 0))
    nothing = torch.zeros((), dtype=parameter.dtype, device=parameter.device).expand(parameter.numel())
    moment, square = state.get("exp_avg", nothing), state.get("exp_avg_sq", nothing)
    update = torch.empty(parameter.shape, dtype=parameter.dtype, device=parameter.device)
    assert parameter.grad is not None
    for part, g, m, v in blocks(update, parameter.grad, moment, square):
        g = g.to(part.dtype)
        torch.mul(v, beta2, out=part).addcmul_(g, g, value=1.0 - beta2).sqrt_()
        part.div_(math.sqrt(1.0 - beta2**step)).add_(group["eps"])
        torch.div(torch.lerp(m, g, 1.0 - beta1), part, out=part).mul_(-group["lr"] / (1.0 - beta1**step))
    return update

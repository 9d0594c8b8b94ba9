"""What a control may read of Adam: the moment it averages, and the step it took last.

Invariants:
- tensors are in the order of the gradient shards (`optimizer.gradients_of`);
- nothing here is stored: both are read or computed from the optimizer's own state when asked for;
- whether there is anything to read is known from the steps taken, so it is the same on every rank, also on one without shards.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, overload

import torch
from torch import Tensor

from megatron_async_rl.controls.inner_product import block_elements
from megatron_async_rl.policy.optimizer import optimizer_parameters

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

    def _states(self) -> list[tuple[dict[str, Any], dict[str, Any]]]:
        """Adam's state and group of each parameter that has a gradient shard."""
        parts = [part for part in getattr(self._optimizer, "chained_optimizers", [self._optimizer]) if part.optimizer is not None]
        groups = {parameter: group for group in self._optimizer.param_groups for parameter in group["params"]}
        found = []
        for parameter in optimizer_parameters(self._optimizer):
            if parameter.grad is not None:
                held = next(part.optimizer.state for part in parts if parameter in part.optimizer.state)
                found.append((held[parameter], groups[parameter]))
        return found


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

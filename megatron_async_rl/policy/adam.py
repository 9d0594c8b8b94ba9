"""What a control may read of Adam: the moment it averages, and the step it took last.

Invariants:
- tensors are in the order of the gradient shards (`optimizer.gradients_of`);
- nothing here is stored: both are read or computed from the optimizer's own state when asked for.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

from torch import Tensor

from megatron_async_rl.policy.optimizer import optimizer_parameters

if TYPE_CHECKING:
    from megatron.core.optimizer import MegatronOptimizer

    from megatron_async_rl.config.schema import OptimizerConfig


class AdamView:
    """Implements controls.decision.OptimizerView over Megatron's Adam."""

    def __init__(self, optimizer: MegatronOptimizer, settings: OptimizerConfig) -> None:
        self._optimizer = optimizer
        self._settings = settings

    @property
    def beta1(self) -> float:
        return self._settings.betas[0]

    def momentum(self) -> Sequence[Tensor] | None:
        states = [self._state(parameter) for parameter in optimizer_parameters(self._optimizer) if parameter.grad is not None]
        if any("exp_avg" not in state for state in states):
            return None
        return [state["exp_avg"] for state in states]

    def last_update(self) -> Sequence[Tensor] | None:
        raise NotImplementedError

    def _state(self, parameter: Tensor) -> dict[str, Tensor]:
        for part in getattr(self._optimizer, "chained_optimizers", [self._optimizer]):
            if parameter in part.optimizer.state:
                found: dict[str, Tensor] = part.optimizer.state[parameter]
                return found
        return {}

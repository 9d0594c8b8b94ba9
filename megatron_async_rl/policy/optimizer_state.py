"""Adam's state as tensors that go with the model's parameters: a checkpoint of it loads wherever one of the model does.

    adam.exp_avg, adam.exp_avg_sq   the moments
    adam.master                     the float32 parameters, where the model's own are not float32

Adam counts steps for all parameters alike; the count is one number. Settings (betas, eps, decay, lr) are the configuration's.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from megatron_async_rl.policy.optimizer import optimizer_parameters, optimizer_parts

if TYPE_CHECKING:
    from megatron.core.optimizer import MegatronOptimizer

    from megatron_async_rl.policy.model import PolicyModel

MASTER = "adam.master"


def adam_names(model: PolicyModel) -> tuple[str, ...]:
    """What of Adam's state a checkpoint of this model holds; the same on every rank."""
    moments = ("adam.exp_avg", "adam.exp_avg_sq")
    return moments if model.config.params_dtype == torch.float32 else (*moments, MASTER)


def adam_shards(optimizer: MegatronOptimizer, name: str) -> list[Tensor]:
    """The state of one name, in place, in the order of the gradient shards; as it would start where there is none yet."""
    materialise(optimizer)
    parameters = optimizer_parameters(optimizer)
    if name == MASTER:
        return [parameter.detach() for parameter in parameters]
    states = {parameter: state for part in optimizer_parts(optimizer) for parameter, state in part.optimizer.state.items()}
    return [states[parameter][name.removeprefix("adam.")] for parameter in parameters]


def adam_steps(optimizer: MegatronOptimizer) -> int:
    """Steps that Adam's bias correction has counted."""
    counts = [state.get("step", 0) for part in optimizer_parts(optimizer) for state in part.optimizer.state.values()]
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

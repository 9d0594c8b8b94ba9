"""Adam's state as a checkpoint needs it: there before the first step, and each parameter's own after a load.

Megatron saves and loads the state of the fused Adams as it is, but with torch's Adam, which runs where neither Transformer
Engine nor Apex is installed, it needs every parameter to have state and gives them all one step counter.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import TYPE_CHECKING, Any

import torch

if TYPE_CHECKING:
    from megatron.core.optimizer import MegatronOptimizer


def materialise(optimizer: MegatronOptimizer) -> None:
    """Gives every parameter that has not been stepped yet the state it would start from."""
    for part in _parts(optimizer):
        part.init_state_fn(part.optimizer, part.config)
        if _is_torch_adam(part):
            for state in part.optimizer.state.values():
                state.setdefault("step", torch.zeros((), dtype=torch.float32))


def restore(optimizer: MegatronOptimizer, state: dict[str, Any]) -> None:
    """Loads moments and step counts. Settings (betas, eps, decay, lr) stay those of the configuration, not the checkpoint's."""
    settings = [
        {name: value for name, value in group.items() if name not in ("params", "step")} for group in optimizer.param_groups
    ]
    parts = list(_parts(optimizer))
    if len(parts) == 1 and "param_state" in state and _is_torch_adam(parts[0]):
        # Megatron would look for each parameter's step among the saved tensors, where its torch Adam has none.
        optimizer.load_state_dict({name: value for name, value in state.items() if name != "param_state"})
        held = parts[0].optimizer.state
        steps = {parameter: entry.pop("step") for parameter, entry in held.items()}
        parts[0].load_parameter_state_from_fully_reshardable(state["param_state"])
        for parameter, step in steps.items():
            held[parameter]["step"] = step
    else:
        optimizer.load_state_dict(state)
    for group, configured in zip(optimizer.param_groups, settings, strict=True):
        group.update(configured)
    for part in parts:
        if _is_torch_adam(part):
            # Loaded steps are one tensor under many names, which every parameter's update would count up.
            for entry in part.optimizer.state.values():
                entry["step"] = entry["step"].clone()


def _is_torch_adam(part: Any) -> bool:
    return isinstance(part.optimizer, torch.optim.Adam | torch.optim.AdamW)


def _parts(optimizer: MegatronOptimizer) -> Iterator[Any]:
    yield from getattr(optimizer, "chained_optimizers", [optimizer])

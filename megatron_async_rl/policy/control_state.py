"""State of the gradient controls in a checkpoint: numbers in `state.pt`, and tensors that are cut
like the optimizer's shards, so that another layout can read them.

Invariant: a control without state in the checkpoint starts afresh, with a warning.
"""

from __future__ import annotations

import logging
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
from megatron.core.optimizer import MegatronOptimizer
from torch import Tensor

from megatron_async_rl.controls.decision import Control
from megatron_async_rl.policy.adam_view import Sliced, optimizer_parameters, optimizer_state
from megatron_async_rl.policy.checkpoint import Checkpoint

log = logging.getLogger(__name__)


def control_slices(
    controls: Mapping[str, Control], optimizer: MegatronOptimizer
) -> dict[str, Sliced]:
    """Return the slices by name of the tensors that controls keep."""
    return {
        _of_control(name, kind): optimizer_state(optimizer, shards)
        for name, control in controls.items()
        for kind, shards in control.shard_state().items()
    }


def load_controls(
    loaded: Checkpoint,
    controls: Mapping[str, Control],
    optimizer: MegatronOptimizer,
    directory: Path,
    *,
    warn: bool,
) -> None:
    """Restore the controls from a checkpoint of `directory`. warn: log a control that starts
    afresh. Collective over the world."""
    numbers: Mapping[str, Any] = loaded.state.get("controls", {})
    for name, control in controls.items():
        if name in numbers:
            control.load_state_dict(numbers[name])
            kinds = {
                # `read` below fills it, in the layout of this run's shards.
                held.removeprefix(_of_control(name, "")): _zeros_like(optimizer)
                for held in sorted(loaded.names)
                if held.startswith(_of_control(name, ""))
            }
            loaded.read(
                {
                    _of_control(name, kind): optimizer_state(optimizer, shards)
                    for kind, shards in kinds.items()
                }
            )
            control.load_shard_state(kinds)
        elif warn:
            log.warning(
                "the checkpoint in %s has no state of control %s: it starts afresh",
                directory,
                name,
            )


def _zeros_like(optimizer: MegatronOptimizer) -> list[Tensor]:
    """Return zeros in float32 on the CPU, of the shards' shapes."""
    return [torch.zeros(p.shape, dtype=torch.float32) for p in optimizer_parameters(optimizer)]


def _of_control(name: str, kind: str) -> str:
    """Return the name in a checkpoint of this shard state of a control."""
    return f"control.{name}.{kind}"

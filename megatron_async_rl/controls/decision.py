"""What a control says about the step that is about to be taken."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, Protocol

if TYPE_CHECKING:
    from megatron_async_rl.policy.parallel import Gradients


@dataclass(frozen=True)
class Decision:
    """skip: leave weights, moments, step count and weight decay alone. lr_scale: factor on this one step's learning rate."""

    skip: bool = False
    lr_scale: float = 1.0
    metrics: Mapping[str, float] = field(default_factory=dict)


class Control(Protocol):
    """Called once per optimizer step on every rank, on the fully reduced gradient, before clipping.

    Its decision must be the same on every rank, so it may rest only on all-reduced numbers. State is per rank.
    """

    def apply(self, gradients: Gradients) -> Decision: ...

    def forget(self) -> None:
        """This step has no usable gradient; what compares one step with the next starts anew."""
        ...

    def state_dict(self) -> dict[str, Any]: ...

    def load_state_dict(self, state: Mapping[str, Any]) -> None: ...

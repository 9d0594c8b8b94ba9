"""Null baseline of a control: the learning rate is scaled so that updates are, in the mean, as long as the control's were.

    scale_t = target_update_norm n / sum of the n past update norms, each divided by the scale it was made with

`target_update_norm` is the mean of `update/norm` in the control's own run (a skipped step counts there as 0). Adam's update is
proportional to the learning rate, so dividing by the scale gives the length it would have had at scale 1; the ratio of the
two means is the same whatever the schedule, as long as both runs follow the same one.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

from megatron_async_rl.controls.decision import Control, Decision, StepView
from megatron_async_rl.controls.inner_product import squared_norm_of

if TYPE_CHECKING:
    from megatron_async_rl.config.controls import MatchedLrControl


class MatchedLr(Control):
    """State: the updates counted, their summed norms at scale 1, and the scale of the step that is about to be counted."""

    def __init__(self, settings: MatchedLrControl) -> None:
        self.settings = settings
        self.counted = 0
        self.seen = 0
        self.total = 0.0
        self.scale = 1.0

    def apply(self, step: StepView) -> Decision:
        """Metric: matched_lr/scale. One all-reduce of one scalar after each step that was taken."""
        update = step.optimizer.last_update() if step.optimizer.updates > self.seen else None
        self.seen = step.optimizer.updates
        if update is not None:
            norm = math.sqrt(squared_norm_of(step.gradients, update))
            self.total += norm / self.scale
            self.counted += 1
        if self.total > 0.0:
            self.scale = self.settings.target_update_norm * self.counted / self.total
        return Decision(lr_scale=self.scale, metrics={"matched_lr/scale": self.scale})

    def state_dict(self) -> dict[str, Any]:
        return {"counted": self.counted, "seen": self.seen, "total": self.total, "scale": self.scale}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        self.counted, self.seen = state["counted"], state["seen"]
        self.total, self.scale = state["total"], state["scale"]

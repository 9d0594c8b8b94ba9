"""Control that shortens Adam's memory while the gradient keeps pointing in the optimizer's present
direction (a method of this project).

With c the cosine of this step's gradient and Adam's first moment before the step (`against:
momentum`), or of the descent direction and the last update (`against: last_update`: -<g, update>,
so that a positive value means "the same direction again"):

    beta1 = beta1_max - (beta1_max - beta1_min) clip((c - c_low) / (c_high - c_low), 0, 1)

beta1 is beta1_max if there is nothing to compare with. The gradient is the output of earlier
controls. Adam's bias correction follows the beta1 of every step (policy/optimizer.py).
"""

from __future__ import annotations

import math

from megatron_async_rl.config.controls import MomentumByAlignmentControl
from megatron_async_rl.controls.decision import Control, Decision, StepView
from megatron_async_rl.gradients import products_with


class MomentumByAlignment(Control):
    """Control of beta1. It has no state of its own, because Adam's is enough."""

    def __init__(self, settings: MomentumByAlignmentControl) -> None:
        self.settings = settings

    def apply(self, step: StepView) -> Decision:
        """Metric: momentum/cosine, absent before the first update. One all-reduce of three scalars
        from the second step on."""
        settings, optimizer = self.settings, step.optimizer
        longest = settings.beta1_max if settings.beta1_max is not None else optimizer.beta1
        going = optimizer.momentum() if settings.against == "momentum" else optimizer.last_update()
        # None on every rank, so all ranks leave out the all-reduce.
        if going is None:
            return Decision(beta1=longest)
        product, norm, going_norm = products_with(step.gradients, going)
        lengths = norm * going_norm
        if not (math.isfinite(lengths) and lengths > 0.0):
            return Decision(beta1=longest)
        cosine = max(-1.0, min(1.0, product / math.sqrt(lengths)))
        if settings.against == "last_update":
            # An update points against the gradient.
            cosine = -cosine
        share = max(0.0, min(1.0, (cosine - settings.c_low) / (settings.c_high - settings.c_low)))
        return Decision(
            beta1=longest - (longest - settings.beta1_min) * share,
            metrics={"momentum/cosine": cosine},
        )

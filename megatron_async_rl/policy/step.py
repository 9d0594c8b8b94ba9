"""From reduced gradients to new weights: prepare, controls, clip, controls once more, step.

Invariants:
- every decision rests on all-reduced numbers, so all ranks step or none does;
- a skipped step changes nothing: no weight, no moment, no step count, no weight decay;
- a gradient that is not finite, or one of a loss that is not finite, is never applied, whatever the controls say.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import numpy as np
import torch
from numpy.typing import NDArray

from megatron_async_rl.controls.decision import Control, StepView, UpdateView
from megatron_async_rl.controls.inner_product import squared_norm, squared_norm_of
from megatron_async_rl.policy.adam import AdamView, TakenStep
from megatron_async_rl.policy.optimizer import gradients_of, learning_rate

if TYPE_CHECKING:
    from megatron.core.optimizer import MegatronOptimizer

    from megatron_async_rl.config.schema import OptimizerConfig
    from megatron_async_rl.policy.displacement import Displacement
    from megatron_async_rl.policy.parallel import Gradients, Layout

CLIP_EPSILON = 1e-6


@dataclass(frozen=True, kw_only=True, eq=False)
class StepFacts:
    """What the forward passes said about the batch, the same on every rank; fields as in StepView."""

    loss: float
    log_weights: NDArray[np.float64]
    lag_max: int


class OptimizerStep:
    """Counts: `steps` taken or skipped so far (the schedule's clock), `updates` of them taken, `nonfinite` of them skipped for
    their gradient."""

    def __init__(
        self,
        optimizer: MegatronOptimizer,
        settings: OptimizerConfig,
        controls: Mapping[str, Control],
        layout: Layout,
        total_steps: int,
    ) -> None:
        self.optimizer = optimizer
        self.settings = settings
        self.controls = controls
        self.layout = layout
        self.total_steps = total_steps
        self.steps = 0
        self.updates = 0
        self.nonfinite = 0
        self.last: TakenStep | None = None

    def take(self, facts: StepFacts, displacement: Displacement | None = None) -> dict[str, float]:
        """Collective; returns metrics, the same on every rank. `policy/grad_norm` is after the controls, before clipping.

        The loss is looked at because clamps turn one that is not a number into a gradient of 0, which would pass for a
        harmless one.
        """
        lr = learning_rate(self.settings, self.steps, self.total_steps)
        self.steps += 1
        overflow = self.optimizer.prepare_grads()
        gradients = gradients_of(self.optimizer, self.layout)
        usable = math.isfinite(facts.loss) and not overflow
        view = StepView(
            gradients=gradients,
            optimizer=self._view(),
            log_weights=facts.log_weights,
            lag_max=facts.lag_max,
            lr=lr,
        )
        metrics: dict[str, float] = {}
        skip, lr_scale, gradient_scale, beta1, lengthened = not usable, 1.0, 1.0, self.settings.betas[0], 1.0
        for control in self.controls.values():
            if not usable:
                control.forget()
                continue
            decision = control.apply(view)
            metrics |= decision.metrics
            skip |= decision.skip
            lr_scale *= decision.lr_scale
            gradient_scale *= decision.gradient_scale
            beta1 = decision.beta1 if decision.beta1 is not None else beta1
        norm = math.sqrt(squared_norm(gradients))
        if not usable or not math.isfinite(norm):
            self.nonfinite += 1
            skip = True
        if not skip:
            clip_to(gradients, norm, self.settings.clip_grad)
            if gradient_scale != 1.0:
                torch._foreach_mul_([shard.grad for shard in gradients.shards], gradient_scale)
            for group in self.optimizer.param_groups:
                group["lr"] = lr * lr_scale
                group["betas"] = (beta1, self.settings.betas[1])
            for control in self.controls.values():
                update = UpdateView(gradients=gradients, update=self._view().next_update(), displacement=displacement)
                nudge = control.before_update(update)
                metrics |= nudge.metrics
                lengthened *= nudge.length
                if nudge.along != 0.0 and displacement is not None:
                    displacement.add(nudge.along)
            self.optimizer.step_with_ready_grads()
            self.updates += 1
            self.last = TakenStep(lr * lr_scale, beta1)
        return (
            metrics
            | self._update_norm(None if skip else gradients, lengthened)
            | {
                "policy/grad_norm": norm,
                "policy/lr": lr,
                "policy/lr_scale": lr_scale,
                "policy/beta1": beta1,
                "policy/skipped": float(skip),
                "policy/nonfinite": float(self.nonfinite),
            }
        )

    def pass_over(self) -> dict[str, float]:
        """A batch that has nothing to learn from: the clock moves, nothing else does."""
        lr = learning_rate(self.settings, self.steps, self.total_steps)
        self.steps += 1
        skipped = {"policy/lr": lr, "policy/skipped": 1.0, "policy/nonfinite": float(self.nonfinite)}
        return skipped | self._update_norm(None)

    def _view(self) -> AdamView:
        return AdamView(self.optimizer, self.settings, self.updates, self.last)

    def _update_norm(self, gradients: Gradients | None, lengthened: float = 1.0) -> dict[str, float]:
        """Length of the update just made, `lengthened` times that of Adam's part; 0 without one. Only where there are controls,
        whose baselines are matched on it: it costs a sweep over Adam's state and an all-reduce of one scalar."""
        if not self.controls:
            return {}
        update = self._view().last_update() if gradients is not None else None
        if gradients is None or update is None:
            return {"update/norm": 0.0}
        return {"update/norm": lengthened * math.sqrt(squared_norm_of(gradients, update))}

    def state_dict(self) -> dict[str, Any]:
        last = None if self.last is None else {"lr": self.last.lr, "beta1": self.last.beta1}
        return {"steps": self.steps, "updates": self.updates, "nonfinite": self.nonfinite, "last": last}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        self.steps, self.updates, self.nonfinite = state["steps"], state["updates"], state["nonfinite"]
        self.last = None if state["last"] is None else TakenStep(**state["last"])


def clip_to(gradients: Gradients, norm: float, limit: float | None) -> None:
    """Scales all gradients in place so that their global norm is at most `limit`; copies are scaled alike."""
    if limit is not None and norm > limit:
        torch._foreach_mul_([shard.grad for shard in gradients.shards], limit / (norm + CLIP_EPSILON))

"""The ESS learning rate of VCPO (arXiv 2602.17616): the step size follows the number of on-policy
samples that the batch is worth.

    log w_i = sum over the response's tokens of log(pi / mu)
    ESS     = (sum w)^2 / sum w^2                         between 1 and B
    scale   = rule(min(1, (ESS / B) / reference_ratio))   rule: square root, or linear

All computations are in log space with a max shift, so weights that overflow, underflow or are all
tiny do no harm. The weights come from the step's own forward passes and are all-reduced before any
control runs: ranks of every parallel dimension have the whole batch, and there is no collective
here. The factor applies to one step, and the scheduler does not see it.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any, Literal

import numpy as np
from numpy.typing import NDArray

from megatron_async_rl.config.controls import EssLrControl
from megatron_async_rl.controls.decision import Control, Decision, StepView


def effective_sample_size(log_weights: NDArray[np.float64]) -> float:
    """Return the effective sample size. log_weights: [B] float64, of any magnitude. The result is 0
    for an empty batch, and if a weight is not a number.

    A weight of +inf leaves only equal weights in the sum.
    """
    # 0 makes the step as small as the floor permits.
    if len(log_weights) == 0 or np.isnan(log_weights).any():
        return 0.0
    largest = log_weights.max()
    if np.isinf(largest):
        return float((log_weights == largest).sum())
    # The largest weight becomes 1, so that the sum neither overflows nor vanishes.
    weights = np.exp(log_weights - largest)
    return float(weights.sum() ** 2 / np.square(weights).sum())


def lr_scale(
    ess_ratio: float,
    *,
    rule: Literal["sqrt", "linear"] = EssLrControl.default_of("rule"),
    reference_ratio: float = EssLrControl.default_of("reference_ratio"),
    floor: float = EssLrControl.default_of("floor"),
) -> float:
    """Return the factor on the learning rate, in [floor, 1]. ess_ratio: ESS / B; if it is not a
    number, the factor is the floor."""
    if math.isnan(ess_ratio):
        return floor
    relative = min(1.0, ess_ratio / reference_ratio)
    return max(floor, math.sqrt(relative) if rule == "sqrt" else relative)


class EssLr(Control):
    """Control of the learning rate. State, for `reference_ratio: auto`: sum and number of the ESS /
    B of on-policy steps, whose batch has lag 0 throughout and has not changed the weights yet.

    A run's first step is on-policy, so `auto` is known from then on.
    """

    def __init__(self, settings: EssLrControl) -> None:
        self.settings = settings
        self.on_policy_sum = 0.0
        self.on_policy_steps = 0

    @property
    def reference_ratio(self) -> float:
        if self.settings.reference_ratio != "auto":
            return self.settings.reference_ratio
        return self.on_policy_sum / self.on_policy_steps if self.on_policy_steps else 1.0

    def apply(self, step: StepView) -> Decision:
        """Metrics: ess_lr/scale, ess_lr/ess_ratio (of the capped weights), and
        ess_lr/reference_ratio, absent until it is known."""
        log_weights = step.log_weights
        if len(log_weights) == 0:
            return Decision()
        if self.settings.use_truncated:
            # Capped in log space, where a weight cannot overflow.
            log_weights = np.minimum(log_weights, math.log(self.settings.cap))
        ratio = effective_sample_size(log_weights) / len(log_weights)
        # Later optimizer steps of a batch are off-policy although their lag is 0.
        if step.lag_max == 0 and not step.moved and ratio > 0.0:
            self.on_policy_sum += ratio
            self.on_policy_steps += 1
        reference = self.reference_ratio
        scale = lr_scale(
            ratio, rule=self.settings.rule, reference_ratio=reference, floor=self.settings.floor
        )
        metrics = {"ess_lr/scale": scale, "ess_lr/ess_ratio": ratio}
        if self.settings.reference_ratio != "auto" or self.on_policy_steps:
            metrics["ess_lr/reference_ratio"] = reference
        return Decision(lr_scale=scale, metrics=metrics)

    def state_dict(self) -> dict[str, Any]:
        return {"on_policy_sum": self.on_policy_sum, "on_policy_steps": self.on_policy_steps}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        self.on_policy_sum, self.on_policy_steps = state["on_policy_sum"], state["on_policy_steps"]

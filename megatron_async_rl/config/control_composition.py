"""Which step controls go together, and with which runs. Each refusal says what was combined, why that is wrong, what to change.

The facts about each control are class attributes of its settings model.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from megatron_async_rl.config.controls import Control
    from megatron_async_rl.config.schema import Config


def control_refusals(config: Config) -> Iterator[str]:
    """Reasons why the step controls do not go together, or not with this run; none: they do."""
    controls = config.controls
    names = [control.name for control in controls]
    if len(set(names)) != len(names):
        yield f"controls: each at most once, got {names}"
    judging = [control.name for control in controls if control.judges_alignment]
    if len(judging) > 1:
        yield (
            f"controls: {' and '.join(judging)} both act on the cosine of consecutive gradients, and matched_norm is what gac is "
            "compared with: run them one at a time"
        )
    for name in ("gac", "displacement"):
        if "matched_lr" in names and name in names:
            yield (
                f"controls: matched_lr stands in for {name} at the same mean update norm; run {name} alone, read the mean of its "
                "`update/norm`, and give it to matched_lr in a run of its own"
            )
    setting = [control.name for control in controls if control.sets_beta1]
    if len(setting) > 1:
        yield f"controls: {' and '.join(setting)} both set beta1, and the later would overrule the earlier; keep one"
    scaling = [control.name for control in controls if control.scales_lr]
    if len(scaling) > 1:
        yield (
            f"controls: {' and '.join(scaling)} both scale the learning rate, and matched_lr is the null baseline of the "
            "other: run them one at a time"
        )
    for control in controls:
        if config.supervised and control.needs_sampled:
            yield (
                f"controls: {control.name} looks at pi / pi_behavior, and objective.loss: sft learns from given responses, which "
                "nobody sampled; remove it"
            )
        if config.supervised and control.needs_past_weights:
            yield (
                f"controls: {control.name} compares with the weights that sampled the batch, and objective.loss: sft learns from "
                "given responses, which nobody sampled; remove it"
            )
        if control.fresh_steps >= config.run.steps:
            yield (
                f"controls: {control.name} would calibrate over the first {control.fresh_steps} steps, and run.steps is "
                f"{config.run.steps}, so it would never act; lower calibrate.steps, or give c_low and no calibrate"
            )
        yield from _beta1_refusals(config, control)


def _beta1_refusals(config: Config, control: Control) -> Iterator[str]:
    own = config.policy.optimizer.betas[0]
    if control.name == "beta1" and control.beta1 == own:
        yield f"controls: beta1 is {own:g} in policy.optimizer.betas already, so the control would be without effect; remove it"
    if control.name == "momentum_by_alignment" and control.beta1_max is None and own <= control.beta1_min:
        yield (
            f"controls: momentum_by_alignment lowers beta1 from policy.optimizer.betas ({own:g}) to beta1_min "
            f"({control.beta1_min:g}), which must be below it"
        )

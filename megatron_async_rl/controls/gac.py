"""GAC, gradient alignment control (arXiv 2603.01501), and the null baselines that a claim for it
has to beat.

The paper's observation: with stale samples, consecutive policy gradients stay aligned, while they
are nearly orthogonal in synchronous training, and this alignment precedes divergence. The regimes
are the paper's (keep, project or skip by thresholds on the cosine, see alignment.py); the constants
and the exact projection are this project's own.

    keep      g' = g
    project   g' = g_perp + k g_par
              target "threshold": k = (c_low / c) sqrt((1 - c^2) / (1 - c_low^2)),
                                  so cos(g', u) = c_low
              target "zero":      k = 0
    skip      no step at all

`matched_norm` scales the gradient to the length that GAC would give it, without changing its
direction. It judges every step as GAC with the same settings would (alignment.py). If GAC projects,
the gradient is scaled by |g'| / |g| = sqrt(1 - c^2 + (k c)^2) after clipping, so that clipping
cannot undo it; if GAC skips, so does this control. Adam cancels a constant factor, so only the
change of length from step to step remains. Any further effect of GAC is an effect of the direction.

`matched_lr` scales the learning rate so that updates have on average the length of the control's
updates:

    scale_t = target_update_norm n / sum of the n past update norms, each divided by its scale

`target_update_norm` is the mean of `update/norm` in the control's own run (in which a skipped step
counts as 0). Adam's update is proportional to the learning rate, so dividing by the scale gives the
length that it would have had at scale 1. The ratio of the two means does not depend on the
schedule, as long as both runs have the same one.

`beta1` shortens the memory of Adam's first moment, in the same way at every step.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from megatron_async_rl.config.controls import Beta1Control, MatchedLrControl
from megatron_async_rl.controls.alignment import AlignmentControl, Verdict
from megatron_async_rl.controls.decision import Control, Decision, StepView
from megatron_async_rl.gradients import Gradients


class Gac(AlignmentControl):
    """Control that projects the gradients in place. Metric of its own: gac/removed, |g - g'| / |g|,
    absent without a previous gradient."""

    def act(self, gradients: Gradients, verdict: Verdict) -> Decision:
        # There is nothing to compare with, and the reference is already up to date.
        if verdict.cosine is None:
            return Decision()
        # g' = g + (along - cosine) |g| u: only the component along u changes.
        change = verdict.along - verdict.cosine if verdict.along is not None else 0.0
        self.sweep(gradients, verdict, change=change)
        norm = verdict.norm * verdict.left
        return Decision(norm_after=norm, metrics={"gac/removed": abs(change)})


class MatchedNorm(AlignmentControl):
    """Baseline that changes no gradient in place. Metric of its own: matched_norm/scale, |g'| / |g|
    of the projection that GAC would make."""

    def act(self, gradients: Gradients, verdict: Verdict) -> Decision:
        if verdict.cosine is None:
            return Decision()
        # Only the reference changes: the gradient keeps its direction.
        self.sweep(gradients, verdict, change=0.0)
        scale = verdict.left
        return Decision(gradient_scale=scale, metrics={"matched_norm/scale": scale})


class MatchedLr(Control):
    """Baseline that scales the learning rate. State: the number of counted updates, the sum of
    their norms at scale 1, and the scale of the step that is counted next."""

    needs_update_norm = True

    def __init__(self, settings: MatchedLrControl) -> None:
        self.settings = settings
        self.counted = 0
        self.seen = 0
        self.total = 0.0
        self.scale = 1.0

    def apply(self, step: StepView) -> Decision:
        """Metric: matched_lr/scale, absent until an update has been measured."""
        # A skipped step made no update and must not be counted twice.
        norm = step.optimizer.last_update_norm if step.optimizer.updates > self.seen else None
        self.seen = step.optimizer.updates
        if norm is not None:
            self.total += norm / self.scale
            self.counted += 1
        # All updates so far were 0, for instance because the learning rate warms up from 0.
        if self.total <= 0.0:
            return Decision(lr_scale=self.scale)
        self.scale = self.settings.target_update_norm * self.counted / self.total
        return Decision(lr_scale=self.scale, metrics={"matched_lr/scale": self.scale})

    def state_dict(self) -> dict[str, Any]:
        return {
            "counted": self.counted,
            "seen": self.seen,
            "total": self.total,
            "scale": self.scale,
        }

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        self.counted, self.seen = state["counted"], state["seen"]
        self.total, self.scale = state["total"], state["scale"]


class Beta1(Control):
    def __init__(self, settings: Beta1Control) -> None:
        self.settings = settings

    def apply(self, step: StepView) -> Decision:
        return Decision(beta1=self.settings.beta1)

"""GAC, gradient alignment control (arXiv 2603.01501).

The paper's observation: with stale samples, consecutive policy gradients stay aligned where synchronous training has
nearly orthogonal ones, and that alignment precedes divergence. The regimes are the paper's (untouched, projected,
skipped by thresholds on the cosine); the constants and the exact projection are this project's own.

With g the reduced gradient before clipping, u the direction of the previous one, and c = <g, u> / |g|:

    c <= c_low            keep      g' = g                    (every negative c too: one-sided)
    c_low < c <= c_high   project   g' = g_perp + k g_par
                                    target "threshold": k = (c_low / c) sqrt((1 - c^2) / (1 - c_low^2)), so cos(g', u) = c_low
                                    target "zero":      k = 0
    c > c_high            skip      no step at all; after max_consecutive_skips of them, project instead

The reference is the raw gradient, also after a skip, or (`reference: applied`) the last gradient that was applied; it is
dropped after a gradient that is not finite. Two sweeps over gradient memory: the inner products, then projection and
reference copy together.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

from torch import Tensor

from megatron_async_rl.controls.decision import Control, Decision, StepView
from megatron_async_rl.controls.inner_product import products_with, squared_norm

if TYPE_CHECKING:
    from megatron_async_rl.config.controls import GacControl
    from megatron_async_rl.policy.parallel import Gradients

KEEP, PROJECT, SKIP = 0, 1, 2
"""Values of the metric `gac/regime`."""


def target_cosine_component(cosine: float, settings: GacControl) -> float:
    """<g', u> / |g|: how much of the gradient, in units of its own norm, lies along the reference after projection.

    Equal to k c of the formula above, written without the division by c.
    """
    if settings.target == "zero":
        return 0.0
    across = math.sqrt(max(0.0, 1.0 - cosine * cosine))
    return settings.c_low * across / math.sqrt(1.0 - settings.c_low**2)


class Gac(Control):
    """State per rank: the reference shards (float32, one per gradient shard) and the skip counts."""

    def __init__(self, settings: GacControl) -> None:
        self.settings = settings
        self.reference: list[Tensor] | None = None
        self.skips = 0
        self.consecutive_skips = 0

    def apply(self, step: StepView) -> Decision:
        """Projects the gradients in place. Metrics: gac/cosine (absent while there is no reference), gac/regime, gac/skips,
        gac/removed (|g - g'| / |g|)."""
        gradients = step.gradients
        if self.reference is None:
            norm = squared_norm(gradients)
            if math.isfinite(norm) and norm > 0.0:
                self.reference = [shard.grad.detach().float().clone() for shard in gradients.shards]
            return self._decision(KEEP, None, 0.0)
        product, norm, reference_norm = products_with(gradients, self.reference)
        if not math.isfinite(norm):
            self.forget()
            return self._decision(KEEP, None, 0.0)
        if norm == 0.0:
            # A zero gradient has no direction: the reference stays what it was.
            return self._decision(KEEP, None, 0.0)
        cosine = max(-1.0, min(1.0, product / math.sqrt(norm * reference_norm)))
        regime = self._regime(cosine)
        change = target_cosine_component(cosine, self.settings) - cosine if regime == PROJECT else 0.0
        self._sweep(gradients, along=change * math.sqrt(norm / reference_norm), applied=regime != SKIP)
        return self._decision(regime, cosine, abs(change))

    def forget(self) -> None:
        self.reference = None
        self.consecutive_skips = 0

    def state_dict(self) -> dict[str, Any]:
        """This rank's part; `load_state_dict` needs the same parallel layout."""
        return {"reference": self.reference, "skips": self.skips, "consecutive_skips": self.consecutive_skips}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        self.reference = state["reference"]
        self.skips = state["skips"]
        self.consecutive_skips = state["consecutive_skips"]

    def _regime(self, cosine: float) -> int:
        if cosine <= self.settings.c_low:
            return KEEP
        if self.settings.c_high is None or cosine <= self.settings.c_high:
            return PROJECT
        return SKIP if self.consecutive_skips < self.settings.max_consecutive_skips else PROJECT

    def _decision(self, regime: int, cosine: float | None, removed: float) -> Decision:
        if regime == SKIP:
            self.skips += 1
            self.consecutive_skips += 1
        else:
            self.consecutive_skips = 0
        metrics = {"gac/regime": float(regime), "gac/skips": float(self.skips), "gac/removed": removed}
        if cosine is not None:
            metrics["gac/cosine"] = cosine
        return Decision(skip=regime == SKIP, metrics=metrics)

    def _sweep(self, gradients: Gradients, *, along: float, applied: bool) -> None:
        """g += along * reference, and the reference becomes the raw or the applied gradient, shard by shard.

        Copies (replicated parameters) move too, by the same factor, so they stay equal.
        """
        assert self.reference is not None
        raw = self.settings.reference == "raw"
        for shard, reference in zip(gradients.shards, self.reference, strict=True):
            before = shard.grad.detach().float().clone() if raw and along else shard.grad.detach()
            if along:
                shard.grad.add_(reference.view_as(shard.grad), alpha=along)
            if raw:
                reference.copy_(before.view_as(reference))
            elif applied:
                reference.copy_(shard.grad.view_as(reference))

"""How the gradient of a step lines up with the one before it, and which of GAC's regimes that is (arXiv 2603.01501).

With g the reduced gradient before clipping, u the direction of the reference, and c = <g, u> / |g|:

    c <= c_low            keep                  (every negative c too: one-sided)
    c_low < c <= c_high   project
    c > c_high            skip                  after max_consecutive_skips of them, project instead
    not yet calibrated    keep                  (`calibrate`: see calibration.py)

The reference is the raw gradient of the previous step, also after a skip, or (`reference: applied`) the last gradient that was
applied; it is dropped after a gradient that is not finite. It is kept as `reference_dtype` and `reference_offload` say, and c
is the cosine with what was kept: number_format.py bounds the difference.

What follows from the regime is the control's own: GAC projects, its null baseline only shortens. One all-reduce per step, of
three scalars (of one while there is no reference), and two sweeps over gradient memory: inner products, then change and copy.
"""

from __future__ import annotations

import math
from abc import ABC, abstractmethod
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from itertools import repeat
from typing import TYPE_CHECKING, Any, Literal

from torch import Tensor

from megatron_async_rl.controls.calibration import Calibration
from megatron_async_rl.controls.decision import Control, Decision, StepView
from megatron_async_rl.controls.inner_product import block_elements, products_with, squared_norm
from megatron_async_rl.controls.offload import Copies, copies_for
from megatron_async_rl.controls.reference import GradientReference

if TYPE_CHECKING:
    from megatron_async_rl.config.controls import AlignmentSettings
    from megatron_async_rl.policy.parallel import Gradients

KEEP, PROJECT, SKIP = 0, 1, 2
"""Values of the metric `gac/regime`."""


@dataclass(frozen=True, kw_only=True)
class Verdict:
    """cosine: null where there is nothing to compare with; then the regime is KEEP and the reference is in order already.

    length: |g| / |reference|. along: <g', u> / |g| that projection leaves, null in the other regimes. fresh: of this batch.
    """

    regime: int
    cosine: float | None = None
    length: float = 1.0
    along: float | None = None
    fresh: bool = False


class AlignmentControl(Control, ABC):
    """Judges each step; `act` is the subclass's. Shard state: `reference`, the gradient that the next one is compared with."""

    def __init__(self, settings: AlignmentSettings) -> None:
        self.settings = settings
        self.calibration = Calibration(settings.calibrate) if settings.calibrate is not None else None
        self.reference: GradientReference | None = None
        self.reference_fresh = False
        self.counts = [0, 0, 0]
        self.cosines = [0, 0, 0]
        self.cosine_sums = [0.0, 0.0, 0.0]
        self.consecutive_skips = 0
        self._copies: Copies | None = None
        self._restored: list[Tensor] | None = None

    @abstractmethod
    def act(self, gradients: Gradients, verdict: Verdict) -> Decision:
        """What this control does about the verdict. Calls `sweep` when there is a cosine."""

    @property
    def c_low(self) -> float | None:
        """The threshold in force; null until calibrated."""
        return self.settings.c_low if self.calibration is None else self.calibration.threshold

    def apply(self, step: StepView) -> Decision:
        """Metrics: gac/cosine (absent while there is no reference), gac/regime, and counts and mean cosines so far."""
        verdict = self._judge(step)
        self._count(verdict)
        decision = self.act(step.gradients, verdict)
        metrics = {**self._metrics(verdict), **decision.metrics}
        return Decision(skip=verdict.regime == SKIP, gradient_scale=decision.gradient_scale, metrics=metrics)

    def forget(self) -> None:
        self.reference = self._restored = None
        self.consecutive_skips = 0

    def sweep(self, gradients: Gradients, verdict: Verdict, *, change: float) -> None:
        """g += change |g| u, and the reference becomes the raw or the applied gradient, shard by shard.

        Copies (replicated parameters) move too, by the same factor, so they stay equal.
        """
        assert self.reference is not None
        raw = self.settings.reference == "raw"
        if not raw and verdict.regime == SKIP:
            return
        self.reference_fresh = verdict.fresh
        shards = zip(gradients.shards, self.reference if change else repeat(None), strict=bool(change))
        for index, (shard, reference) in enumerate(shards):
            if reference is None:
                self.reference.put(index, shard.grad.detach())
            elif raw and self.reference.in_place:
                _add_and_exchange(shard.grad, reference, change * verdict.length)
            else:
                before = shard.grad.detach().clone() if raw else shard.grad.detach()
                shard.grad.add_(reference, alpha=change * verdict.length)
                self.reference.put(index, before)

    def _judge(self, step: StepView) -> Verdict:
        gradients, fresh = step.gradients, step.lag_max == 0
        if self._restored is not None:
            self._remember(gradients, self._restored)
        if self.reference is None:
            norm = squared_norm(gradients)
            if math.isfinite(norm) and norm > 0.0:
                self._begin(gradients, fresh)
            return Verdict(regime=KEEP)
        product, norm, reference_norm = products_with(gradients, self.reference)
        if not math.isfinite(norm):
            self.forget()
            return Verdict(regime=KEEP)
        if norm == 0.0:
            # A zero gradient has no direction: the reference stays what it was.
            return Verdict(regime=KEEP)
        if reference_norm == 0.0:
            # It was too small for the numbers it was kept in.
            self._begin(gradients, fresh)
            return Verdict(regime=KEEP)
        cosine = max(-1.0, min(1.0, product / math.sqrt(norm * reference_norm)))
        if self.calibration is not None:
            self.calibration.observe(cosine, fresh=fresh and self.reference_fresh)
        regime = self._regime(cosine)
        return Verdict(
            regime=regime,
            cosine=cosine,
            length=math.sqrt(norm / reference_norm),
            along=component_left(cosine, self.settings.target, self.c_low) if regime == PROJECT else None,
            fresh=fresh,
        )

    def _regime(self, cosine: float) -> int:
        if self.c_low is None or cosine <= self.c_low:
            return KEEP
        if self.settings.c_high is None or cosine <= self.settings.c_high:
            return PROJECT
        return SKIP if self.consecutive_skips < self.settings.max_consecutive_skips else PROJECT

    def _begin(self, gradients: Gradients, fresh: bool) -> None:
        self.reference_fresh = fresh
        self._remember(gradients, [shard.grad for shard in gradients.shards])

    def _remember(self, gradients: Gradients, values: Sequence[Tensor]) -> None:
        if self.settings.reference_offload == "cpu" and self._copies is None:
            self._copies = copies_for(gradients.device)
        self.reference = GradientReference(self.settings.reference_dtype, gradients.device, self._copies)
        for index, (shard, value) in enumerate(zip(gradients.shards, values, strict=True)):
            self.reference.put(index, value.to(gradients.device).view(shard.grad.shape))
        self._restored = None

    def _count(self, verdict: Verdict) -> None:
        self.counts[verdict.regime] += 1
        self.consecutive_skips = self.consecutive_skips + 1 if verdict.regime == SKIP else 0
        if verdict.cosine is not None:
            self.cosines[verdict.regime] += 1
            self.cosine_sums[verdict.regime] += verdict.cosine

    def _metrics(self, verdict: Verdict) -> dict[str, float]:
        metrics = {
            "gac/regime": float(verdict.regime),
            "gac/kept": float(self.counts[KEEP]),
            "gac/projected": float(self.counts[PROJECT]),
            "gac/skips": float(self.counts[SKIP]),
        }
        if verdict.cosine is not None:
            metrics["gac/cosine"] = verdict.cosine
        if self.c_low is not None:
            metrics["gac/c_low"] = self.c_low
        if self.calibration is not None:
            metrics["gac/calibrated"] = float(self.calibration.threshold is not None)
        names = ("gac/cosine_kept", "gac/cosine_projected", "gac/cosine_skipped")
        for name, number, total in zip(names, self.cosines, self.cosine_sums, strict=True):
            if number:
                metrics[name] = total / number
        return metrics

    def state_dict(self) -> dict[str, Any]:
        return {
            "counts": list(self.counts),
            "cosines": list(self.cosines),
            "cosine_sums": list(self.cosine_sums),
            "consecutive_skips": self.consecutive_skips,
            "reference_fresh": self.reference_fresh,
            "calibration": self.calibration.state_dict() if self.calibration is not None else None,
        }

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        self.counts = list(state["counts"])
        self.cosines = list(state["cosines"])
        self.cosine_sums = list(state["cosine_sums"])
        self.consecutive_skips = state["consecutive_skips"]
        self.reference_fresh = state["reference_fresh"]
        if self.calibration is not None and state["calibration"] is not None:
            self.calibration.load_state_dict(state["calibration"])

    def shard_state(self) -> dict[str, list[Tensor]]:
        if self.reference is not None:
            return {"reference": self.reference.shards()}
        return {"reference": self._restored} if self._restored is not None else {}

    def load_shard_state(self, state: Mapping[str, Sequence[Tensor]]) -> None:
        """Kept aside until a step shows which device and shapes the gradients have."""
        self.reference = None
        self._restored = [shard.detach().clone() for shard in state["reference"]] if "reference" in state else None


def component_left(cosine: float, target: Literal["threshold", "zero"], c_low: float | None) -> float:
    """<g', u> / |g| after projection: 0, or k c of gac.py's formula, written without the division by c."""
    if target == "zero" or c_low is None:
        return 0.0
    return c_low * math.sqrt(max(0.0, 1.0 - cosine * cosine)) / math.sqrt(1.0 - c_low**2)


def _add_and_exchange(gradient: Tensor, reference: Tensor, factor: float) -> None:
    """gradient += factor reference, and reference = the gradient as it was: one sweep, without a copy of either in whole."""
    size = block_elements(gradient.device)
    for g, r in zip(gradient.view(-1).split(size), reference.view(-1).split(size), strict=True):
        before = g.clone()
        g.add_(r, alpha=factor)
        r.copy_(before)

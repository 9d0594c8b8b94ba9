"""Alignment of a step's gradient with that of the step before, and GAC's regime that follows from
it (arXiv 2603.01501).

With g the reduced gradient before clipping, u the direction of the reference, and c = <g, u> / |g|:

    c <= c_low            keep                  (every negative c too: one-sided)
    c_low < c <= c_high   project
    c > c_high            skip                  after max_consecutive_skips of them, project instead
    not yet calibrated    keep                  (`calibrate`: see CosineCalibration)

If c is 1 within rounding, the remainder of g orthogonal to u is rounding, too: the projection is
then to zero whatever the target, which a metric reports. An anomalous gradient (policy/anomaly.py)
is not changed and never becomes the reference.

The reference is the raw gradient of the previous step, also after a skip, or (`reference: applied`)
the last gradient that was applied; it is dropped after a gradient that is not finite. It is stored
with `reference_dtype` and `reference_offload`, and c is the cosine with the stored reference:
reference.py bounds the difference.

Each control decides what to do in a regime: GAC projects, its null baseline only shortens. A step
costs one all-reduce of three scalars (of one while there is no reference), and two sweeps over
gradient memory: one for inner products, one for change and copy. Norms need no third sweep: |g| is
computed with the products, the norm after projection follows from it, and |reference| was known
when the reference was written (in float32; in other dtypes it is computed with the products).
"""

from __future__ import annotations

import logging
import math
from abc import ABC, abstractmethod
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, Literal

import numpy as np
from torch import Tensor

from megatron_async_rl.config.controls import AlignmentSettings, CalibrateConfig
from megatron_async_rl.controls.decision import Control, Decision, StepView
from megatron_async_rl.controls.reference import GradientReference, ReferenceCopies, copies_for
from megatron_async_rl.gradients import Gradients, products_with, squared_norm

log = logging.getLogger(__name__)

BOUND = 0.999
"""Upper bound of a calibrated threshold: at 1 there is no component to project to."""

KEEP, PROJECT, SKIP = 0, 1, 2
"""Values of the metric `gac/regime`."""
PARALLEL = 2.0**-20
"""Cosines are exact to about 1e-6 (1e-7 from the products, the rest from the gradient's own
rounding): for a smaller 1 - c, the direction of the remainder is noise."""


class CosineCalibration:
    """GAC's lower threshold, calibrated on the run itself: a quantile of the cosines of fresh data.
    `threshold`: null until it is known; then it does not change.

    A step is fresh if its batch and the batch of the reference were sampled by the weights that
    they trained (lag 0). A run with calibration trains synchronously for its first `steps` + 1
    steps (flow/staleness.py); the first step has no cosine. If other steps among them have no
    cosine either (a gradient that is not finite, an empty batch), the first stale step uses the
    quantile of the cosines so far, provided that there are at least half of them; with fewer,
    calibration waits for more fresh steps.
    """

    def __init__(self, settings: CalibrateConfig) -> None:
        self.settings = settings
        self.cosines: list[float] = []
        self.threshold: float | None = None

    def observe(self, cosine: float, *, fresh: bool) -> None:
        """Record the cosine of one step, which is equal on every rank."""
        # The threshold is set once: results must not drift with later data.
        if self.threshold is not None:
            return
        if fresh:
            self.cosines.append(cosine)
        # The fresh steps are over: use the cosines so far, if there are at least half.
        enough = self.settings.steps if fresh else max(1, (self.settings.steps + 1) // 2)
        if len(self.cosines) >= enough:
            quantile = float(np.quantile(self.cosines, self.settings.quantile))
            if quantile < 0.0:
                log.warning(
                    "calibrate: the %g quantile of %d cosines is %.3f; c_low is 0 instead, as a"
                    " negative one would turn gradients against their predecessor",
                    self.settings.quantile,
                    len(self.cosines),
                    quantile,
                )
            self.threshold = min(max(quantile, 0.0), BOUND)

    def state_dict(self) -> dict[str, Any]:
        return {"cosines": list(self.cosines), "threshold": self.threshold}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        self.cosines, self.threshold = list(state["cosines"]), state["threshold"]
        if self.threshold is not None:
            # Checkpoints of earlier versions may contain a negative threshold.
            self.threshold = max(self.threshold, 0.0)


@dataclass(frozen=True, kw_only=True)
class Verdict:
    """Cosine of a step and its consequences.

    cosine: null if there is nothing to compare with; then the regime is KEEP and the reference is
    already up to date. square: |g|^2. length: |g| / |reference|. along: <g', u> / |g| after
    projection, null in the other regimes. to_zero: True if it is 0 because c is 1 within rounding.
    fresh: True if the weights that this batch trains have sampled it.
    """

    regime: int
    square: float
    # Null, not 0: a cosine of 0 is a measurement.
    cosine: float | None = None
    length: float = 1.0
    along: float | None = None
    to_zero: bool = False
    fresh: bool = False

    @property
    def norm(self) -> float:
        return math.sqrt(self.square)

    @property
    def left(self) -> float:
        """|g'| / |g| after projection, 1 without one: sqrt(1 - c^2 + (k c)^2)."""
        if self.along is None or self.cosine is None:
            return 1.0
        # Rounding may leave a cosine slightly above 1.
        return math.sqrt(max(0.0, 1.0 - self.cosine**2) + self.along**2)


class AlignmentControl(Control, ABC):
    """Base class that judges each step; subclasses define `act`. Shard state: `reference`, the
    gradient with which the next one is compared."""

    def __init__(self, settings: AlignmentSettings) -> None:
        self.settings = settings
        self.calibration = (
            CosineCalibration(settings.calibrate) if settings.calibrate is not None else None
        )
        self.reference: GradientReference | None = None
        self.reference_square: float | None = None
        self.reference_fresh = False
        self.counts = [0, 0, 0]
        self.cosines = [0, 0, 0]
        self.cosine_sums = [0.0, 0.0, 0.0]
        self.consecutive_skips = 0
        self._copies: ReferenceCopies | None = None
        self._restored: list[Tensor] | None = None

    @abstractmethod
    def act(self, gradients: Gradients, verdict: Verdict) -> Decision:
        """Return the decision that follows from the verdict. Calls `sweep` if there is a cosine."""

    @property
    def c_low(self) -> float | None:
        """Current threshold; null until calibrated."""
        return self.settings.c_low if self.calibration is None else self.calibration.threshold

    def apply(self, step: StepView) -> Decision:
        """Metrics: gac/cosine (absent while there is no reference), gac/regime, and counts and mean
        cosines so far."""
        verdict = self._judge(step)
        self._count(verdict)
        decision = self.act(step.gradients, verdict)
        metrics = {**self._metrics(verdict), **decision.metrics}
        return replace(
            decision,
            # Null baselines inherit this: they skip where GAC would.
            skip=verdict.regime == SKIP,
            norm_before=verdict.norm,
            norm_after=verdict.norm if decision.norm_after is None else decision.norm_after,
            metrics=metrics,
        )

    def reset(self) -> None:
        # A gradient that is not finite would make every later cosine nan.
        self.reference = self._restored = self.reference_square = None
        self.consecutive_skips = 0

    def sweep(self, gradients: Gradients, verdict: Verdict, *, change: float) -> None:
        """Compute g += change |g| u, and make the raw or the applied gradient the reference, shard
        by shard.

        Copies (replicated parameters) change too, by the same factor, so they stay equal.
        """
        assert self.reference is not None
        raw = self.settings.reference == "raw"
        # With `applied`, a skipped gradient does not become the reference.
        if not raw and verdict.regime == SKIP:
            return
        self.reference_fresh = verdict.fresh
        # Only in this case is |reference| the norm that was just measured.
        exact = self.settings.reference_dtype == "fp32" and (raw or not change)
        self.reference_square = verdict.square if exact else None
        grads = [shard.grad.detach() for shard in gradients.shards]
        # One sweep changes the gradient and writes the reference.
        if change:
            self.reference.project(grads, change * verdict.length, raw=raw)
        else:
            self.reference.put(grads)

    def _judge(self, step: StepView) -> Verdict:
        # Fresh: sampled by the weights that the batch trains.
        gradients, fresh = step.gradients, step.lag_max == 0
        if self._restored is not None:
            self._remember(gradients, self._restored)
        if self.reference is None:
            square = squared_norm(gradients)
            kept = Verdict(regime=KEEP, square=square)
            # Every branch depends on all-reduced numbers, so ranks never diverge.
            if math.isfinite(square) and square > 0.0 and not step.is_anomaly(kept.norm):
                self._begin(gradients, fresh, square)
            return kept
        product, square, reference_square = products_with(
            gradients,
            self.reference.written(),
            reference_square=self.reference_square,
            products=self.reference.products,
        )
        kept = Verdict(regime=KEEP, square=square)
        if not math.isfinite(square):
            self.reset()
            return kept
        # A zero gradient has no direction, and a gradient far outside the run's history does not
        # predict the next one, so the reference does not change.
        if square == 0.0 or step.is_anomaly(kept.norm):
            return kept
        if reference_square == 0.0:
            # The reference was too small for the dtype in which it is stored.
            self._begin(gradients, fresh, square)
            return kept
        # Rounding may give a value outside [-1, 1].
        cosine = max(-1.0, min(1.0, product / math.sqrt(square * reference_square)))
        if self.calibration is not None:
            # Both gradients of the cosine must be on-policy.
            self.calibration.observe(cosine, fresh=fresh and self.reference_fresh)
        regime = self._regime(cosine)
        if regime != PROJECT:
            along, to_zero = None, False
        else:
            to_zero = 1.0 - cosine < PARALLEL
            target = "zero" if to_zero else self.settings.target
            along = component_left(cosine, target, self.c_low)
        return Verdict(
            regime=regime,
            square=square,
            cosine=cosine,
            length=math.sqrt(square / reference_square),
            along=along,
            to_zero=to_zero,
            fresh=fresh,
        )

    def _regime(self, cosine: float) -> int:
        if self.c_low is None or cosine <= self.c_low:
            return KEEP
        if self.settings.c_high is None or cosine <= self.settings.c_high:
            return PROJECT
        # A skip does not change the weights, so the next gradient would be as aligned: end the
        # deadlock.
        return SKIP if self.consecutive_skips < self.settings.max_consecutive_skips else PROJECT

    def _begin(self, gradients: Gradients, fresh: bool, square: float) -> None:
        self.reference_fresh = fresh
        self.reference_square = square if self.settings.reference_dtype == "fp32" else None
        self._remember(gradients, [shard.grad for shard in gradients.shards])

    def _remember(self, gradients: Gradients, values: Sequence[Tensor]) -> None:
        if self.settings.reference_offload == "cpu" and self._copies is None:
            # One stream for the lifetime of the control, because copies must stay in order.
            self._copies = copies_for(gradients.device)
        shapes = [shard.grad.shape for shard in gradients.shards]
        self.reference = GradientReference(
            self.settings.reference_dtype, gradients.device, self._copies, shapes
        )
        self.reference.put(
            value.to(gradients.device).view(shape)
            for value, shape in zip(values, shapes, strict=True)
        )
        # Free the restored tensors: the reference holds the values now.
        self._restored = None

    def _count(self, verdict: Verdict) -> None:
        self.counts[verdict.regime] += 1
        self.consecutive_skips = self.consecutive_skips + 1 if verdict.regime == SKIP else 0
        if verdict.cosine is not None:
            self.cosines[verdict.regime] += 1
            # Means over the whole run, including the steps before a resume.
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
            metrics["gac/to_zero"] = float(verdict.to_zero)
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
            "reference_square": self.reference_square,
            "calibration": self.calibration.state_dict() if self.calibration is not None else None,
        }

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        self.counts = list(state["counts"])
        self.cosines = list(state["cosines"])
        self.cosine_sums = list(state["cosine_sums"])
        self.consecutive_skips = state["consecutive_skips"]
        self.reference_fresh = state["reference_fresh"]
        self.reference_square = state.get("reference_square")
        if self.calibration is not None and state["calibration"] is not None:
            self.calibration.load_state_dict(state["calibration"])

    def shard_state(self) -> dict[str, list[Tensor]]:
        if self.reference is not None:
            return {"reference": self.reference.shards()}
        return {"reference": self._restored} if self._restored is not None else {}

    def device_state(self) -> list[Tensor]:
        return [] if self.reference is None else self.reference.on_device()

    def load_shard_state(self, state: Mapping[str, Sequence[Tensor]]) -> None:
        """Store the state until a step shows the device and shapes of the gradients."""
        self.reference = None
        self._restored = (
            [shard.detach().clone() for shard in state["reference"]]
            if "reference" in state
            else None
        )


def component_left(
    cosine: float, target: Literal["threshold", "zero"], c_low: float | None
) -> float:
    """Return <g', u> / |g| after projection: 0, or k c of gac.py's formula, written without the
    division by c."""
    if target == "zero" or c_low is None:
        return 0.0
    return c_low * math.sqrt(max(0.0, 1.0 - cosine * cosine)) / math.sqrt(1.0 - c_low**2)

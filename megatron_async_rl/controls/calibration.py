"""GAC's lower threshold, calibrated on the run itself: a quantile of the cosines of fresh data.

A step is fresh if its batch and the batch of the reference were sampled by the weights that they
trained (lag 0). A run with calibration trains synchronously for its first `steps` + 1 steps
(flow/staleness.py); the first step has no cosine. If other steps among them have no cosine either
(a gradient that is not finite, an empty batch), the first stale step uses the quantile of the
cosines so far, provided that there are at least half of them; with fewer, calibration waits for
more fresh steps.
"""

from __future__ import annotations

import logging
from collections.abc import Mapping
from typing import Any

import numpy as np

from megatron_async_rl.config.controls import CalibrateConfig

log = logging.getLogger(__name__)

BOUND = 0.999
"""Upper bound of a calibrated threshold: at 1 there is no component to project to."""


class CosineCalibration:
    """Calibration of one threshold. `threshold`: null until it is known; then it does not
    change."""

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

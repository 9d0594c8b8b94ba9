"""GAC, gradient alignment control (arXiv 2603.01501).

The paper's observation: with stale samples, consecutive policy gradients stay aligned where
synchronous training has nearly orthogonal ones, and that alignment precedes divergence. The regimes
are the paper's (untouched, projected, skipped by thresholds on the cosine, see alignment.py); the
constants and the exact projection are this project's own.

    keep      g' = g
    project   g' = g_perp + k g_par
              target "threshold": k = (c_low / c) sqrt((1 - c^2) / (1 - c_low^2)),
                                  so cos(g', u) = c_low
              target "zero":      k = 0
    skip      no step at all
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from megatron_async_rl.controls.alignment import AlignmentControl, Verdict
from megatron_async_rl.controls.decision import Decision

if TYPE_CHECKING:
    from megatron_async_rl.gradients import Gradients


class Gac(AlignmentControl):
    """Projects the gradients in place. Metric of its own: gac/removed, |g - g'| / |g|."""

    def act(self, gradients: Gradients, verdict: Verdict) -> Decision:
        if verdict.cosine is None:
            return Decision(metrics={"gac/removed": 0.0})
        change = verdict.along - verdict.cosine if verdict.along is not None else 0.0
        self.sweep(gradients, verdict, change=change)
        norm = verdict.norm * verdict.left
        return Decision(norm_after=norm, metrics={"gac/removed": abs(change)})

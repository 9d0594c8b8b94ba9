"""Null baseline of GAC: the gradient is made as short as GAC would make it, in its own direction.

Every step is judged as GAC with the same settings would judge it (alignment.py). Where GAC projects, the gradient is scaled by
|g'| / |g| = sqrt(1 - c^2 + (k c)^2) after clipping, so that clipping cannot undo it; where GAC skips, so does this. Adam undoes
a constant factor, so what is left is the change of length from step to step: what GAC does beyond it, it owes to the direction.
"""

from __future__ import annotations

import math
from typing import TYPE_CHECKING

from megatron_async_rl.controls.alignment import AlignmentControl, Verdict
from megatron_async_rl.controls.decision import Decision

if TYPE_CHECKING:
    from megatron_async_rl.policy.parallel import Gradients


class MatchedNorm(AlignmentControl):
    """Changes no gradient in place. Metric of its own: matched_norm/scale, |g'| / |g| of the projection not made."""

    def act(self, gradients: Gradients, verdict: Verdict) -> Decision:
        scale = 1.0
        if verdict.cosine is not None:
            self.sweep(gradients, verdict, change=0.0)
            if verdict.along is not None:
                scale = math.sqrt(max(0.0, 1.0 - verdict.cosine**2) + verdict.along**2)
        return Decision(gradient_scale=scale, metrics={"matched_norm/scale": scale})

"""Control that removes from the update the direction in which the weights already moved since the
batch was sampled. A method of this project, and experimental.

With D = theta_now - theta_v, theta_v the weights under which the batch's samples began, and u the
update that the optimizer is about to make (Adam's, of the clipped gradient, without weight decay),
c = cos(u, D):

    c <= c_low    u' = u            (every negative c too: one-sided)
    c > c_low     u' = u + a D      target "zero":       a = -c |u| / |D|, so u' is orthogonal to D
                                    target "threshold":  a so that cos(u', D) = c_low

If tolerated_kl is above 0, only the share max(0, 1 - tolerated_kl / KL) of this change is made. KL
is the divergence of the policy from the batch's sampling policy (estimate k2, nats per token). A
policy that has hardly moved therefore trains as without the control, at learning rates at which the
control alone would be slow.

For a batch that the present weights sampled, D = 0 and the control does nothing. It stores nothing:
past weights come from the store that `proximal: snapshot` also uses. A step with D costs one
all-reduce of three scalars; D is read twice if the control acts, and once otherwise.
"""

from __future__ import annotations

import math

from megatron_async_rl.config.controls import DisplacementControl
from megatron_async_rl.controls.alignment import component_left
from megatron_async_rl.controls.decision import Control, UpdateCorrection, UpdateView
from megatron_async_rl.gradients import products_of


class Displacement(Control):
    def __init__(self, settings: DisplacementControl) -> None:
        self.settings = settings

    def before_update(self, update: UpdateView) -> UpdateCorrection:
        """Metrics: displacement/cosine, and displacement/removed, |u - u'| / |u|; absent if D or u
        is 0."""
        # Null on every rank or on none, so that all ranks run the collective below or none does.
        if update.displacement is None:
            return UpdateCorrection()
        product, norm, distance = products_of(update.gradients, update.update, update.displacement)
        lengths = norm * distance
        if not (math.isfinite(lengths) and lengths > 0.0):
            return UpdateCorrection()
        cosine = max(-1.0, min(1.0, product / math.sqrt(lengths)))
        if cosine <= self.settings.c_low:
            return UpdateCorrection(
                metrics={"displacement/cosine": cosine, "displacement/removed": 0.0}
            )
        target = component_left(cosine, self.settings.target, self.settings.c_low)
        # Interpolate the cosine, not the length.
        left = cosine - self._share(update) * (cosine - target)
        return UpdateCorrection(
            along=(left - cosine) * math.sqrt(norm / distance),
            length=math.sqrt(max(0.0, 1.0 - cosine * cosine) + left * left),
            metrics={"displacement/cosine": cosine, "displacement/removed": cosine - left},
        )

    def _share(self, update: UpdateView) -> float:
        """Return the share of the component that is removed, in [0, 1]."""
        tolerated = self.settings.tolerated_kl
        if tolerated == 0.0:
            return 1.0
        # An estimate of 0 means that the policy has not moved.
        return max(0.0, 1.0 - tolerated / update.kl) if update.kl > 0.0 else 0.0

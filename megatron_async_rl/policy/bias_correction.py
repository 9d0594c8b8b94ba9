"""Bias correction of Adam's first moment while a control changes beta1 from step to step.

Adam's first moment after n steps is a sum of past gradients whose weights add up to

    1 - beta1_1 * beta1_2 * ... * beta1_n

Every Adam implementation divides by 1 - beta1^n instead, with the beta1 of the current step. The
two agree only while beta1 is constant: after a few steps at beta1 = 0, a step at 0.9 would be up to
1 / (1 - 0.9^n) times too long. The learning rate of a step is therefore multiplied by

    (1 - beta1_n^n) / (1 - beta1_1 * ... * beta1_n)

and its weight decay is divided by the same factor, since Adam multiplies decay by the learning
rate. This works for torch's Adam, for fused ones and for `BlockAdam`, without a change to any.

Invariant: the factor is exactly 1 while beta1 has never changed, so that a run without such a
control takes the same steps to the bit.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any


@dataclass(frozen=True)
class Beta1Product:
    """Product of beta1 over the steps taken: `earlier` times `beta1 ** count`.

    The newest steps of one beta1 are counted instead of multiplied: multiplication would round, and
    the factor of a constant beta1 would differ from 1.
    """

    earlier: float = 1.0
    beta1: float = 0.0
    count: int = 0

    @property
    def value(self) -> float:
        return self.earlier * self.beta1**self.count

    def times(self, beta1: float) -> Beta1Product:
        """The product after one more step."""
        if beta1 == self.beta1:
            return Beta1Product(self.earlier, beta1, self.count + 1)
        return Beta1Product(self.value, beta1, 1)

    def lr_factor(self, steps: int) -> float:
        """Factor on the learning rate of step `steps` (from 1), the newest in this product."""
        return float((1.0 - self.beta1**steps) / (1.0 - self.value))

    def state_dict(self) -> dict[str, Any]:
        return {"earlier": self.earlier, "beta1": self.beta1, "count": self.count}

    @classmethod
    def of_state(cls, state: Mapping[str, Any] | None, beta1: float, steps: int) -> Beta1Product:
        """The saved product; `beta1 ** steps` for a checkpoint of an earlier version, which has
        none."""
        return cls(beta1=beta1, count=steps) if state is None else cls(**state)

"""The base of every loss's settings: facts about the loss that decide what it goes with."""

from __future__ import annotations

from typing import ClassVar, Literal

from megatron_async_rl.config.strict import Strict

Aggregation = Literal["token-mean", "seq-mean-token-sum", "seq-mean-token-mean", "seq-mean-token-sum-norm", "seq-mean"]


class LossSettings(Strict):
    """The class attributes are facts about the loss, for config/composition.py and objectives/."""

    default_aggregation: ClassVar[Aggregation] = "token-mean"
    """Taken when `objective.aggregation` is null. `seq-mean` marks a sequence-level loss, which knows no other."""
    uses_advantage: ClassVar[bool] = True
    """False: the loss reads rewards (or nothing) instead, and goes with `advantage: none`."""
    linear_in_advantage: ClassVar[bool] = False
    """The gradient is the advantage times something that does not depend on the advantage, its sign included."""
    against_behavior: ClassVar[bool] = False
    """The loss holds pi / pi_behavior itself, so a weight of the same ratio would correct twice."""
    uses_proximal: ClassVar[bool] = False
    """The loss holds a ratio to the proximal policy."""
    uses_reference: ClassVar[bool] = False
    """The loss reads log-probs of the reference policy."""
    compares_group: ClassVar[bool] = False
    """Needs at least two responses per prompt."""
    whole_group_of_one_version: ClassVar[bool] = False
    """The loss is defined for groups that one weight version sampled."""

    @property
    def level(self) -> Literal["token", "sequence"]:
        return "sequence" if self.default_aggregation == "seq-mean" else "token"

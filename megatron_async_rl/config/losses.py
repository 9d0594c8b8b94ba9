"""What a user may say about the loss: one small model per loss, chosen by its `name`."""

from __future__ import annotations

from typing import Annotated, ClassVar, Literal, Union

from pydantic import BeforeValidator, Field, PositiveFloat

from megatron_async_rl.config.bare_name import bare_name
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
    whole_group_of_one_version: ClassVar[bool] = False
    """The loss is defined for groups that one weight version sampled."""

    @property
    def level(self) -> Literal["token", "sequence"]:
        return "sequence" if self.default_aggregation == "seq-mean" else "token"


class ReinforceLoss(LossSettings):
    """-A * logp."""

    linear_in_advantage: ClassVar[bool] = True

    name: Literal["reinforce"] = "reinforce"


class PpoClipLoss(LossSettings):
    """max(-A r, -A clip(r, 1 - clip_low, 1 + clip_high)) (arXiv 1707.06347; asymmetric bounds from arXiv 2503.14476)."""

    uses_proximal: ClassVar[bool] = True

    name: Literal["ppo_clip"] = "ppo_clip"
    clip_low: PositiveFloat = 0.2
    """The ratio is cut at 1 - clip_low from below."""
    clip_high: PositiveFloat = 0.2
    """The ratio is cut at 1 + clip_high from above."""
    dual_clip: Annotated[float, Field(gt=1.0)] | None = None
    """c of dual-clip PPO (arXiv 1912.09729): where A < 0 the loss is at most -A c."""


class SftLoss(LossSettings):
    """-logp of given responses: supervised warm starts."""

    uses_advantage: ClassVar[bool] = False

    name: Literal["sft"] = "sft"


Loss = Annotated[
    Annotated[Union[ReinforceLoss, PpoClipLoss, SftLoss], Field(discriminator="name")],
    BeforeValidator(bare_name),
]

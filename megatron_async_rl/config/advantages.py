"""Settings of the advantage: one small model per estimator, chosen by its `name`."""

from __future__ import annotations

from typing import Annotated, Any, ClassVar, Literal, Union

from pydantic import (
    BeforeValidator,
    Field,
    PositiveFloat,
    PositiveInt,
    SerializeAsAny,
    model_validator,
)

from megatron_async_rl.config.losses import Ratio, ReadsRatios
from megatron_async_rl.config.settings_model import bare_name, or_plug_in

Discount = Annotated[float, Field(gt=0.0, le=1.0)]


class AdvantageSettings(ReadsRatios):
    """The class attributes are facts about the estimator, for config/objective.py and the
    rules."""

    method_type: ClassVar[tuple[str, str]] = (
        "an instance of",
        "megatron_async_rl.objectives.method.AdvantageMethod",
    )
    folder: ClassVar[str] = "megatron_async_rl.objectives.advantages"
    # Facts of the class, read by rules that never test for a method's name.
    compares_group: ClassVar[bool] = False
    """Compares the responses of a group with each other."""
    reads_values: ClassVar[bool] = False
    """Reads the value head's estimates, and makes the returns it learns."""

    @property
    def needs_group(self) -> bool:
        """Needs at least two responses per prompt."""
        return self.compares_group


class GrpoAdvantage(AdvantageSettings):
    """(R - mean) / (std + 1e-6) over the group, unbiased std (arXiv 2402.03300)."""

    method: ClassVar[Any] = "objectives.advantages.per_response:GRPO"
    compares_group: ClassVar[bool] = True

    name: Literal["grpo"] = "grpo"
    normalize_std: bool = True
    """False is Dr.GRPO (arXiv 2503.20783): centre only."""


class RlooAdvantage(AdvantageSettings):
    """R minus the mean of the group's other rewards (arXiv 2402.14740)."""

    method: ClassVar[Any] = "objectives.advantages.per_response:RLOO"
    compares_group: ClassVar[bool] = True

    name: Literal["rloo"] = "rloo"


class OpoAdvantage(AdvantageSettings):
    """R minus the group's mean reward weighted by response length (arXiv 2505.23585)."""

    method: ClassVar[Any] = "objectives.advantages.per_response:OPO"
    compares_group: ClassVar[bool] = True

    name: Literal["opo"] = "opo"


# Whitened over the batch, so a group of one response is allowed.
class ReinforcePpAdvantage(AdvantageSettings):
    """REINFORCE++ (arXiv 2501.03262): the discounted reward to go of each token, whitened over the
    whole batch."""

    method: ClassVar[Any] = "objectives.advantages.discounted:REINFORCE_PP"

    name: Literal["reinforce_pp"] = "reinforce_pp"
    gamma: Discount = 1.0
    """Discount per trained token."""


class ReinforcePpBaselineAdvantage(AdvantageSettings):
    """R minus the group's mean, whitened over all trained tokens of the whole batch (arXiv
    2501.03262)."""

    method: ClassVar[Any] = "objectives.advantages.discounted:REINFORCE_PP_BASELINE"
    compares_group: ClassVar[bool] = True

    name: Literal["reinforce_pp_baseline"] = "reinforce_pp_baseline"


class GaeAdvantage(AdvantageSettings):
    """Generalised advantage estimation (arXiv 1506.02438) with the value head of `objective.value`:
    PPO, A2C."""

    method: ClassVar[Any] = "objectives.advantages.discounted:GAE"
    reads_values: ClassVar[bool] = True

    name: Literal["gae"] = "gae"
    gamma: Discount = 1.0
    """Discount per trained token."""
    lam: Annotated[float, Field(ge=0.0, le=1.0)] = 0.95
    """0: one-step errors of the value head, least variance; 1: whole returns, least bias."""
    whiten: bool = True
    """Mean 0 and variance 1 over all trained tokens of the whole batch."""


# Baselines of least variance weigh rewards by squared score norms.
class OtbAdvantage(AdvantageSettings):
    """Optimal token baseline (arXiv 2602.07078): per token, the group's rewards to go averaged with
    the squared norm of the score so far as weight."""

    method: ClassVar[Any] = "objectives.advantages.least_variance:OTB"
    compares_group: ClassVar[bool] = True

    name: Literal["otb"] = "otb"
    zero_tail: bool = False
    """Baseline of tokens beyond the second-longest response of a group: 0 (A = the reward) if
    true, the reward itself (A = 0) if false."""
    importance: Literal["token", "sequence"] | None = None
    """Weights also hold the square of min(pi_prox / pi_behavior, cap), as correction `tis` of this
    level multiplies the loss by it; null: they do not."""
    cap: PositiveFloat = 2.0
    """Largest importance weight; as that of the correction."""

    @property
    def ratios(self) -> frozenset[Ratio]:
        # Only the importance weight reads a ratio; the score norms need one policy.
        return frozenset({"prox/mu"} if self.importance is not None else ())

    @property
    def multiplies_over_response(self) -> bool:
        return self.importance == "sequence"


class OpobAdvantage(AdvantageSettings):
    """VCPO's minimum-variance off-policy baseline (arXiv 2602.17616): the group's rewards averaged
    with weights min(w, cap)^2 |s|^2, w = pi / pi_behavior over the sequence, s its score
    gradient."""

    method: ClassVar[Any] = "objectives.advantages.least_variance:OPOB"
    compares_group: ClassVar[bool] = True

    name: Literal["opob"] = "opob"
    mode: Literal["exact", "cheap"] = "cheap"
    """Source of |s|. `exact`: measured, one backward pass per sequence. `cheap`: estimated from
    the probabilities of the response's tokens, one forward pass."""
    cap: PositiveFloat = 8.0
    """Mode `cheap`: w is cut to it; as the loss or the correction clips them. `exact` measures what
    they do."""
    normalize_std: bool = False
    """Divide by the group's standard deviation of rewards + 1e-6."""

    @property
    def ratios(self) -> frozenset[Ratio]:
        # `exact` measures the loss with its corrections, which declare their own ratios.
        return frozenset({"pi/mu"} if self.mode == "cheap" else ())

    @property
    def multiplies_over_response(self) -> bool:
        return self.mode == "cheap"


class PartialReturnAdvantage(AdvantageSettings):
    """Partial policy gradients (arXiv 2603.06138), for tasks with rewards per step: a token is
    credited with the rewards of its own step from the token on, and of some later steps."""

    method: ClassVar[Any] = "objectives.advantages.partial_return:PARTIAL_RETURN"

    name: Literal["partial_return"] = "partial_return"
    horizon: Literal["full", "greedy", "k", "segment"] = "full"
    """Later steps that count: all; none; the next k - 1; the rest of the block of k steps that the
    token is in."""
    k: PositiveInt | None = None
    """Steps, for horizons `k` and `segment`."""
    step: Literal["turn", "token"] = "turn"
    """Unit of a step: a run of trained tokens between environment tokens, or one trained token."""
    gamma: Discount = 1.0
    """Discount per step."""
    baseline: Literal["none", "group"] = "group"
    """`group`: minus the mean over the group's responses at the same step."""

    @property
    def needs_group(self) -> bool:
        # Depends on a setting, so it is a property and not a class attribute.
        return self.baseline == "group"

    @model_validator(mode="after")
    def _k_where_it_means_something(self) -> PartialReturnAdvantage:
        # A `k` that another horizon ignores would be lost silently.
        if (self.horizon in ("k", "segment")) != (self.k is not None):
            raise ValueError(
                f"k goes with horizon: k or horizon: segment; got horizon={self.horizon},"
                f" k={self.k}"
            )
        return self


class NoAdvantage(AdvantageSettings):
    """The reward itself, without a baseline; the default of losses that read no advantage, such as
    `sft`."""

    method: ClassVar[Any] = "objectives.advantages.per_response:NO_BASELINE"

    name: Literal["none"] = "none"


Advantage = Annotated[
    Annotated[
        Union[
            GrpoAdvantage,
            RlooAdvantage,
            OpoAdvantage,
            ReinforcePpAdvantage,
            ReinforcePpBaselineAdvantage,
            GaeAdvantage,
            OtbAdvantage,
            OpobAdvantage,
            PartialReturnAdvantage,
            NoAdvantage,
        ],
        # The discriminator makes an unknown name one error, not one per member.
        Field(discriminator="name"),
    ],
    or_plug_in(AdvantageSettings),
    BeforeValidator(bare_name),
    # A plug-in has fields of its own, which the stored configuration must keep.
    SerializeAsAny(),
]

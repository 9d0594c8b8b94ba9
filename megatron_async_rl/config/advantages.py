"""Settings of the advantage: one model per estimator, which the configuration selects by its
`name`."""

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
    """Base of every estimator's settings. The class attributes are properties of the estimator,
    which config/objective.py and the rules read."""

    method_type: ClassVar[tuple[str, str]] = (
        "an instance of",
        "megatron_async_rl.objectives.method.AdvantageMethod",
    )
    folder: ClassVar[str] = "megatron_async_rl.objectives.advantages"
    # Class attributes, so that rules also cover plug-ins and never test for a name.
    compares_group: ClassVar[bool] = False
    """True if the estimator compares the responses of a group with each other."""
    reads_values: ClassVar[bool] = False
    """True if the estimator reads the value head's estimates and computes its target returns."""

    @property
    def needs_group(self) -> bool:
        """True if the estimator needs at least two responses per prompt."""
        return self.compares_group


class GrpoAdvantage(AdvantageSettings):
    """GRPO (arXiv 2402.03300): (R - mean) / (std + 1e-6) over the group, with the unbiased std."""

    method: ClassVar[Any] = "objectives.advantages.per_response:GRPO"
    compares_group: ClassVar[bool] = True

    name: Literal["grpo"] = "grpo"
    normalize_std: bool = True
    """False gives Dr.GRPO (arXiv 2503.20783), which subtracts the mean and does not divide."""


class RlooAdvantage(AdvantageSettings):
    """RLOO (arXiv 2402.14740): R minus the mean of the group's other rewards."""

    method: ClassVar[Any] = "objectives.advantages.per_response:RLOO"
    compares_group: ClassVar[bool] = True

    name: Literal["rloo"] = "rloo"


class OpoAdvantage(AdvantageSettings):
    """OPO (arXiv 2505.23585): R minus the group's mean reward, weighted by response length."""

    method: ClassVar[Any] = "objectives.advantages.per_response:OPO"
    compares_group: ClassVar[bool] = True

    name: Literal["opo"] = "opo"


# Whitening is over the batch, so a group of one response is allowed.
class ReinforcePpAdvantage(AdvantageSettings):
    """REINFORCE++ (arXiv 2501.03262): the discounted reward-to-go of each token, whitened over the
    whole batch."""

    method: ClassVar[Any] = "objectives.advantages.discounted:REINFORCE_PP"
    compares_batch: ClassVar[bool] = True

    name: Literal["reinforce_pp"] = "reinforce_pp"
    gamma: Discount = 1.0
    """Discount per trained token."""


class ReinforcePpBaselineAdvantage(AdvantageSettings):
    """REINFORCE++-baseline (arXiv 2501.03262): R minus the group's mean, whitened over all trained
    tokens of the whole batch."""

    method: ClassVar[Any] = "objectives.advantages.discounted:REINFORCE_PP_BASELINE"
    compares_batch: ClassVar[bool] = True
    compares_group: ClassVar[bool] = True

    name: Literal["reinforce_pp_baseline"] = "reinforce_pp_baseline"


class GaeAdvantage(AdvantageSettings):
    """Generalised advantage estimation (arXiv 1506.02438) with the value head of `objective.value`,
    as in PPO and A2C."""

    method: ClassVar[Any] = "objectives.advantages.discounted:GAE"
    reads_values: ClassVar[bool] = True

    name: Literal["gae"] = "gae"
    gamma: Discount = 1.0
    """Discount per trained token."""
    lam: Annotated[float, Field(ge=0.0, le=1.0)] = 0.95
    """Trade-off of bias and variance. 0: one-step temporal differences of the value head, least
    variance. 1: whole returns, least bias."""
    whiten: bool = True
    """Normalise to mean 0 and variance 1 over all trained tokens of the whole batch."""

    @property
    def needs_batch(self) -> bool:
        # Without whitening, each response has its own estimates.
        return self.whiten


# Minimum-variance baselines weight the rewards by squared score norms.
class OtbAdvantage(AdvantageSettings):
    """Optimal token baseline (arXiv 2602.07078). The baseline of a token is the mean of the group's
    rewards-to-go, weighted by the squared norm of the score up to the token."""

    method: ClassVar[Any] = "objectives.advantages.least_variance:OTB"
    compares_group: ClassVar[bool] = True

    name: Literal["otb"] = "otb"
    zero_tail: bool = False
    """Baseline of tokens beyond the end of the second-longest response of a group. True: 0, so A is
    the reward. False: the reward, so A is 0."""
    importance: Literal["token", "sequence"] | None = None
    """Level of the importance ratio in the weights: the square of min(pi_prox / pi_behavior, cap),
    for a loss that correction `tis` of this level multiplies by the ratio. Null: the weights have
    none."""
    cap: PositiveFloat = 2.0
    """Largest importance ratio; set it to the cap of the correction."""

    @property
    def ratios(self) -> frozenset[Ratio]:
        # Only the importance weight reads a ratio; the score norms depend on a single policy.
        return frozenset({"prox/mu"} if self.importance is not None else ())

    @property
    def multiplies_over_response(self) -> bool:
        return self.importance == "sequence"


class OpobAdvantage(AdvantageSettings):
    """VCPO's minimum-variance off-policy baseline (arXiv 2602.17616): the mean of the group's
    rewards with weights min(w, cap)^2 |s|^2, where w is pi / pi_behavior of the sequence and s is
    its score gradient."""

    method: ClassVar[Any] = "objectives.advantages.least_variance:OPOB"
    compares_group: ClassVar[bool] = True

    name: Literal["opob"] = "opob"
    mode: Literal["exact", "cheap"] = "cheap"
    """Computation of |s|. `exact` measures it with one backward pass per sequence. `cheap`
    estimates it from the probabilities of the response's tokens in one forward pass."""
    cap: PositiveFloat = 8.0
    """Largest w in mode `cheap`; set it to the cap of the loss or correction. Mode `exact` measures
    the gradient with the loss's and the corrections' own clipping."""
    normalize_std: bool = False
    """Divide the advantage by the group's standard deviation of rewards + 1e-6."""

    @property
    def ratios(self) -> frozenset[Ratio]:
        # `exact` measures the loss with its corrections; these declare their own ratios.
        return frozenset({"pi/mu"} if self.mode == "cheap" else ())

    @property
    def multiplies_over_response(self) -> bool:
        return self.mode == "cheap"


class PartialReturnAdvantage(AdvantageSettings):
    """Partial policy gradients (arXiv 2603.06138), for tasks with rewards per step. The return of a
    token sums the rewards of its own step from the token on and of some later steps."""

    method: ClassVar[Any] = "objectives.advantages.partial_return:PARTIAL_RETURN"

    name: Literal["partial_return"] = "partial_return"
    horizon: Literal["full", "greedy", "k", "segment"] = "full"
    """Later steps in the return. `full`: all. `greedy`: none. `k`: the next k - 1. `segment`: the
    rest of the token's block of k steps."""
    k: PositiveInt | None = None
    """Number of steps; required by horizons `k` and `segment`, and refused with the others."""
    step: Literal["turn", "token"] = "turn"
    """Unit of a step. `turn`: the trained tokens between two stretches of environment tokens.
    `token`: one trained token."""
    gamma: Discount = 1.0
    """Discount per step."""
    baseline: Literal["none", "group"] = "group"
    """Baseline of the return. `group`: the mean over the group's responses at the same step."""

    @property
    def needs_group(self) -> bool:
        # The need depends on a setting, so it is a property and not a class attribute.
        return self.baseline == "group"

    @model_validator(mode="after")
    def _require_k_with_its_horizons(self) -> PartialReturnAdvantage:
        # The other horizons would ignore `k` silently.
        if (self.horizon in ("k", "segment")) != (self.k is not None):
            raise ValueError(
                f"k is for horizon: k and horizon: segment, which need it; got"
                f" horizon={self.horizon}, k={self.k}"
            )
        return self


class NoAdvantage(AdvantageSettings):
    """The reward without a baseline. It is the default with losses that read no advantage, such as
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
        # With a discriminator pydantic reports an unknown name once, not once per member.
        Field(discriminator="name"),
    ],
    or_plug_in(AdvantageSettings),
    BeforeValidator(bare_name),
    # The stored configuration must keep a plug-in's own fields.
    SerializeAsAny(),
]

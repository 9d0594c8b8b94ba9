"""Settings of corrections of off-policy data: one small model per correction, chosen
by its `name`."""

from __future__ import annotations

from typing import Annotated, Any, ClassVar, Literal, Union

from pydantic import (
    BeforeValidator,
    Field,
    NonNegativeFloat,
    PositiveFloat,
    SerializeAsAny,
    model_validator,
)

from megatron_async_rl.config.losses import Ratio, ReadsRatios
from megatron_async_rl.config.settings_model import bare_name, or_plug_in


class CorrectionSettings(ReadsRatios):
    """The class attributes are facts about the correction, for config/objective.py and the
    rules."""

    method_type: ClassVar[tuple[str, str]] = (
        "an instance of",
        "megatron_async_rl.objectives.method.CorrectionMethod",
    )
    folder: ClassVar[str] = "megatron_async_rl.objectives"
    # Facts of the class, so that rules cover plug-ins and never test for a name.
    weighs: ClassVar[bool] = False
    """Multiplies by an importance ratio, where others only reject."""
    uses_advantage: ClassVar[bool] = False
    """Looks at the sign of the advantage."""
    compares_prox_with_behavior: ClassVar[bool] = True
    """Looks at pi_prox / pi_behavior, which is 1 with `proximal: behavior`."""
    compares_current_with_prox: ClassVar[bool] = False
    """Looks at pi / pi_prox, which is 1 with `proximal: recompute` and one step per batch."""

    @property
    def per_token(self) -> bool:
        """True when tokens of one sequence may get different factors."""
        return False

    @property
    def ratios(self) -> frozenset[Ratio]:
        # Derived from the facts above, so that a correction declares each ratio once.
        found: set[Ratio] = set()
        if self.compares_prox_with_behavior:
            found.add("prox/mu")
        if self.compares_current_with_prox:
            found.add("pi/prox")
        return frozenset(found)

    @property
    def weighs_each_token(self) -> bool:
        return self.per_token


# Weights are stop-gradient factors: the loss keeps its own gradient.
class TisCorrection(CorrectionSettings):
    """Truncated importance sampling: min(rho, cap), rho = pi_prox / pi_behavior."""

    method: ClassVar[Any] = "objectives.off_policy:TIS"
    weighs: ClassVar[bool] = True

    name: Literal["tis"] = "tis"
    level: Literal["token", "sequence"] = "token"
    """Each token's ratio, or the product over its sequence."""
    cap: PositiveFloat = 2.0
    """Weights above it are cut to it."""
    normalize: bool = False
    """Divide by the mean weight of the whole optimizer-step batch, after truncation."""

    @property
    def per_token(self) -> bool:
        return self.level == "token"

    @property
    def multiplies_over_response(self) -> bool:
        return self.level == "sequence"


class IcepopCorrection(CorrectionSettings):
    """rho where low <= rho <= high, else 0, rho = pi_prox / pi_behavior (arXiv 2510.18855)."""

    method: ClassVar[Any] = "objectives.off_policy:ICEPOP"
    weighs: ClassVar[bool] = True

    name: Literal["icepop"] = "icepop"
    level: Literal["token", "sequence"] = "token"
    """Each token's ratio, or the product over its sequence."""
    low: PositiveFloat = 0.5
    """Smaller ratios are rejected."""
    high: PositiveFloat = 5.0
    """Larger ratios are rejected."""
    normalize: bool = False
    """Divide by the mean weight of the whole optimizer-step batch, the zeros of this correction
    included."""

    @property
    def per_token(self) -> bool:
        return self.level == "token"

    @property
    def multiplies_over_response(self) -> bool:
        return self.level == "sequence"

    @model_validator(mode="after")
    def _ordered(self) -> IcepopCorrection:
        # An empty interval would reject every token.
        if self.low >= self.high:
            raise ValueError(f"low ({self.low}) must be below high ({self.high})")
        return self


class RejectCorrection(CorrectionSettings):
    """Keeps what has low <= statistic <= high. With l = log(pi_prox / pi_behavior), clamped to
    +-20: ratio = exp(l); estimates of KL(pi_behavior || pi_prox): k1 = -l, k2 = l^2 / 2, k3 =
    exp(l) - 1 - l."""

    method: ClassVar[Any] = "objectives.off_policy:REJECT"

    name: Literal["reject"] = "reject"
    statistic: Literal["ratio", "k1", "k2", "k3"] = "k3"
    """Statistic of each token."""
    level: Literal[
        "token", "sequence_sum", "sequence_mean", "sequence_product", "sequence_geometric"
    ] = "sequence_mean"
    """Rejects a token by its own statistic, or a whole sequence: by the sum or mean of k1, k2, k3,
    by the product or the geometric mean of ratios."""
    low: float | None = None
    """Smaller values are rejected; null: none. For `ratio` and `k1`."""
    high: float | None
    """Larger values are rejected; null: none. Has no default, since each statistic has its own
    scale."""

    @property
    def per_token(self) -> bool:
        return self.level == "token"

    @property
    def multiplies_over_response(self) -> bool:
        return self.level in ("sequence_sum", "sequence_product")

    @model_validator(mode="after")
    def _an_interval_of_the_statistic(self) -> RejectCorrection:
        # Ratios multiply along a sequence, log-ratios and their estimators add.
        ratio = self.statistic == "ratio"
        fitting = (
            ("token", "sequence_product", "sequence_geometric")
            if ratio
            else ("token", "sequence_sum", "sequence_mean")
        )
        if self.level not in fitting:
            why = (
                "ratios multiply along a sequence"
                if ratio
                else f"{self.statistic} adds up along a sequence"
            )
            raise ValueError(
                f"level: {self.level} does not fit statistic: {self.statistic}: {why}; one of"
                f" {', '.join(fitting)}"
            )
        if self.low is None and self.high is None:
            raise ValueError(
                "low and high are both null, so nothing would be rejected; set at least one"
            )
        # Both estimators are non-negative.
        if self.statistic in ("k2", "k3") and (
            self.low is not None or (self.high is not None and self.high <= 0)
        ):
            raise ValueError(
                f"{self.statistic} is 0 where the policies agree and never below; give high > 0 and"
                " no low"
            )
        if ratio and any(bound is not None and bound <= 0 for bound in (self.low, self.high)):
            raise ValueError(f"a ratio is above 0; got low={self.low}, high={self.high}")
        if self.low is not None and self.high is not None and self.low >= self.high:
            raise ValueError(f"low ({self.low}) must be below high ({self.high})")
        return self


class TokenVetoCorrection(CorrectionSettings):
    """Drops a sequence if any of its tokens has pi_prox / pi_behavior < threshold."""

    method: ClassVar[Any] = "objectives.off_policy:TOKEN_VETO"

    name: Literal["token_veto"] = "token_veto"
    threshold: Annotated[float, Field(gt=0.0, lt=1.0)] = 1e-4
    """A ratio below it vetoes the sequence."""


class OpsmCorrection(CorrectionSettings):
    """Off-policy sequence masking (arXiv 2512.02556): drops a sequence if A < 0 and the mean of
    log(pi_prox / pi) over its tokens is above delta. With `proximal: behavior` that is the distance
    from the policy that sampled, as in the paper."""

    method: ClassVar[Any] = "objectives.off_policy:OPSM"
    uses_advantage: ClassVar[bool] = True
    # It compares the current policy, so it also acts within a batch of several steps.
    compares_prox_with_behavior: ClassVar[bool] = False
    compares_current_with_prox: ClassVar[bool] = True

    name: Literal["opsm"] = "opsm"
    delta: NonNegativeFloat = 1e-4
    """Nats per token."""


Correction = Annotated[
    Annotated[
        Union[
            TisCorrection, IcepopCorrection, RejectCorrection, TokenVetoCorrection, OpsmCorrection
        ],
        Field(discriminator="name"),
    ],
    or_plug_in(CorrectionSettings),
    BeforeValidator(bare_name),
    # A plug-in has fields of its own, which the stored configuration must keep.
    SerializeAsAny(),
]

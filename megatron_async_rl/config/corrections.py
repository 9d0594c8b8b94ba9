"""Settings of the off-policy corrections: one model per correction, which the configuration
selects by its `name`."""

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
    """Base of every correction's settings. The class attributes are properties of the correction,
    which config/objective.py and the rules read."""

    method_type: ClassVar[tuple[str, str]] = (
        "an instance of",
        "megatron_async_rl.objectives.method.CorrectionMethod",
    )
    folder: ClassVar[str] = "megatron_async_rl.objectives"
    # Class attributes, so that rules also cover plug-ins and never test for a name.
    weighs: ClassVar[bool] = False
    """True if the correction multiplies by an importance ratio, false if it only rejects."""
    uses_advantage: ClassVar[bool] = False
    """True if the correction reads the sign of the advantage."""
    compares_prox_with_behavior: ClassVar[bool] = True
    """True if the correction reads pi_prox / pi_behavior, which is 1 with `proximal: behavior`."""
    compares_current_with_prox: ClassVar[bool] = False
    """True if the correction reads pi / pi_prox, which is 1 with `proximal: recompute` and one
    optimizer step per batch."""

    @property
    def per_token(self) -> bool:
        """True if tokens of one sequence may get different factors."""
        return False

    @property
    def ratios(self) -> frozenset[Ratio]:
        # Derived from the class attributes, so that a correction declares each ratio once.
        read: set[Ratio] = set()
        if self.compares_prox_with_behavior:
            read.add("prox/mu")
        if self.compares_current_with_prox:
            read.add("pi/prox")
        return frozenset(read)

    @property
    def weighs_each_token(self) -> bool:
        return self.per_token


# Weights are factors without gradient, so the gradient is the loss's own times the weight.
class TisCorrection(CorrectionSettings):
    """Truncated importance sampling: min(rho, cap), rho = pi_prox / pi_behavior."""

    method: ClassVar[Any] = "objectives.off_policy:TIS"
    weighs: ClassVar[bool] = True

    name: Literal["tis"] = "tis"
    level: Literal["token", "sequence"] = "token"
    """Level of rho: each token's ratio, or the product over its sequence."""
    cap: PositiveFloat = 2.0
    """Largest weight."""
    normalize: bool = False
    """Divide by the mean weight of the whole optimizer-step batch, after truncation."""

    @property
    def needs_batch(self) -> bool:
        return self.normalize

    @property
    def per_token(self) -> bool:
        return self.level == "token"

    @property
    def multiplies_over_response(self) -> bool:
        return self.level == "sequence"


class IcepopCorrection(CorrectionSettings):
    """IcePop (arXiv 2510.18855): rho where low <= rho <= high, else 0, with rho = pi_prox /
    pi_behavior."""

    method: ClassVar[Any] = "objectives.off_policy:ICEPOP"
    weighs: ClassVar[bool] = True

    name: Literal["icepop"] = "icepop"
    level: Literal["token", "sequence"] = "token"
    """Level of rho: each token's ratio, or the product over its sequence."""
    low: PositiveFloat = 0.5
    """Lower bound; smaller ratios are rejected."""
    high: PositiveFloat = 5.0
    """Upper bound; larger ratios are rejected."""
    normalize: bool = False
    """Divide by the mean weight of the whole optimizer-step batch, including the zeros of this
    correction."""

    @property
    def needs_batch(self) -> bool:
        return self.normalize

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
    """Keeps tokens or sequences with low <= statistic <= high. With l = log(pi_prox / pi_behavior),
    clamped to +-20: ratio = exp(l); the estimates of KL(pi_behavior || pi_prox) are k1 = -l, k2 =
    l^2 / 2 and k3 = exp(l) - 1 - l."""

    method: ClassVar[Any] = "objectives.off_policy:REJECT"

    name: Literal["reject"] = "reject"
    statistic: Literal["ratio", "k1", "k2", "k3"] = "k3"
    """Statistic of each token."""
    level: Literal[
        "token", "sequence_sum", "sequence_mean", "sequence_product", "sequence_geometric"
    ] = "sequence_mean"
    """Unit of rejection. `token`: each token by its own statistic. The others reject whole
    sequences, by the sum or mean of k1, k2 or k3, or by the product or geometric mean of ratios."""
    low: float | None = None
    """Lower bound, for `ratio` and `k1`; smaller values are rejected. Null: no bound."""
    high: float | None
    """Upper bound; larger values are rejected. Null: no bound. There is no default because each
    statistic has its own scale."""

    @property
    def per_token(self) -> bool:
        return self.level == "token"

    @property
    def multiplies_over_response(self) -> bool:
        return self.level in ("sequence_sum", "sequence_product")

    @model_validator(mode="after")
    def _bounds_fit_the_statistic(self) -> RejectCorrection:
        # Ratios multiply along a sequence; log-ratios and KL estimates add.
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
                f"level: {self.level} does not fit statistic: {self.statistic}: {why}; set level to"
                f" one of {', '.join(fitting)}"
            )
        if self.low is None and self.high is None:
            raise ValueError(
                "low and high are both null, so nothing would be rejected; set at least one"
            )
        # k2 and k3 are never negative.
        if self.statistic in ("k2", "k3") and (
            self.low is not None or (self.high is not None and self.high <= 0)
        ):
            raise ValueError(
                f"{self.statistic} is 0 where the policies agree and never negative; set high > 0"
                " and remove low"
            )
        if ratio and any(bound is not None and bound <= 0 for bound in (self.low, self.high)):
            raise ValueError(
                f"low and high bound a ratio, so they must be above 0; got low={self.low},"
                f" high={self.high}"
            )
        if self.low is not None and self.high is not None and self.low >= self.high:
            raise ValueError(f"low ({self.low}) must be below high ({self.high})")
        return self


class TokenVetoCorrection(CorrectionSettings):
    """Drops a sequence that has a token with pi_prox / pi_behavior < threshold."""

    method: ClassVar[Any] = "objectives.off_policy:TOKEN_VETO"

    name: Literal["token_veto"] = "token_veto"
    threshold: Annotated[float, Field(gt=0.0, lt=1.0)] = 1e-4
    """Ratio below which a token vetoes its sequence."""


class OpsmCorrection(CorrectionSettings):
    """Off-policy sequence masking (arXiv 2512.02556): drops a sequence if A < 0 and the mean of
    log(pi_prox / pi) over its tokens is above delta. With `proximal: behavior` this is the distance
    from the sampling policy, as in the paper."""

    method: ClassVar[Any] = "objectives.off_policy:OPSM"
    uses_advantage: ClassVar[bool] = True
    # The ratio is to the current policy, so it also changes within a batch of several steps.
    compares_prox_with_behavior: ClassVar[bool] = False
    compares_current_with_prox: ClassVar[bool] = True

    name: Literal["opsm"] = "opsm"
    delta: NonNegativeFloat = 1e-4
    """Largest mean; nats per token."""


Correction = Annotated[
    Annotated[
        Union[
            TisCorrection, IcepopCorrection, RejectCorrection, TokenVetoCorrection, OpsmCorrection
        ],
        Field(discriminator="name"),
    ],
    or_plug_in(CorrectionSettings),
    BeforeValidator(bare_name),
    # The stored configuration must keep a plug-in's own fields.
    SerializeAsAny(),
]

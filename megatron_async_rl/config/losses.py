"""Settings of the loss, one model per loss, and the policy ratios that a method declares.

Three policies give a token a log-prob: the trained policy (pi), the proximal policy and the policy
that sampled it (mu). Rules that depend on a ratio (config/rollout_rules.py) read `ratios` and never
a method's name, so they also cover new methods and plug-ins.
"""

from __future__ import annotations

from typing import Annotated, Any, ClassVar, Literal, Union

from pydantic import (
    AfterValidator,
    BeforeValidator,
    Field,
    NonNegativeFloat,
    PositiveFloat,
    SerializeAsAny,
    model_validator,
)

from megatron_async_rl.config.settings_model import MethodSettings, bare_name, or_plug_in

Aggregation = Literal[
    "token-mean", "seq-mean-token-sum", "seq-mean-token-mean", "seq-mean-token-sum-norm", "seq-mean"
]


NATS_PER_ROOT_TOKEN = 0.03
"""Spread of the logarithm of a response's ratio over the square root of its length, by a public fit
of the mismatch between trainers and engines alone; staleness adds to it."""
LONG_RESPONSE = 512
"""Tokens at which that spread, 0.68 nats, is a factor of 2: the default cap of `tis`. The studies
of this project had answers of 6 to 14 tokens."""

Ratio = Literal["pi/mu", "prox/mu", "pi/prox"]
Proximal = Literal["behavior", "recompute", "loglinear", "ewma", "snapshot"]


class ReadsRatios(MethodSettings):
    """Settings of a method that may read ratios of policies."""

    @property
    def ratios(self) -> frozenset[Ratio]:
        """Ratios that the method reads, with these settings."""
        return frozenset()

    @property
    def weighs_each_token(self) -> bool:
        """True when a ratio to the behavior policy is nothing but that token's own importance
        weight (or decides about that token alone). It then is the right weight of what was sampled,
        whatever distribution that was sampled from."""
        return False

    @property
    def multiplies_over_response(self) -> bool:
        """True when the method reads the product of a ratio over all tokens of a response (or the
        sum of its logarithm), which grows or falls with the response's length."""
        return False


def engine_ratios(method: ReadsRatios, proximal: Proximal) -> frozenset[Ratio]:
    """Ratios of the method that compare a log-prob of the trainer with one of the engine."""
    own: dict[Ratio, bool] = {
        "pi/mu": True,
        # With `behavior` both are the engine's, and the ratio is 1.
        "prox/mu": proximal != "behavior",
        # The engine's log-probs are (`behavior`), or are part of (`loglinear`), the proximal ones.
        "pi/prox": proximal in ("behavior", "loglinear"),
    }
    return frozenset(ratio for ratio in method.ratios if own[ratio])


class LossSettings(ReadsRatios):
    """The class attributes are facts about the loss, for config/objective.py, the rules and
    objectives/."""

    method_type: ClassVar[tuple[str, str]] = (
        "an instance of",
        "megatron_async_rl.objectives.method.LossMethod",
    )
    folder: ClassVar[str] = "megatron_async_rl.objectives.losses"
    # ClassVar: facts about a method are not keys that a user could set.
    default_aggregation: ClassVar[Aggregation] = "token-mean"
    """Taken when `objective.aggregation` is null. `seq-mean` marks a sequence-level loss, which
    knows no other."""
    uses_advantage: ClassVar[bool] = True
    """False: the loss reads rewards (or nothing) instead, and goes with `advantage: none`."""
    linear_in_advantage: ClassVar[bool] = False
    """The gradient is the advantage times something that does not depend on the advantage, its sign
    included."""
    against_behavior: ClassVar[bool] = False
    """The loss holds pi / pi_behavior itself, so a weight of the same ratio would correct twice."""
    uses_proximal: ClassVar[bool] = False
    """The loss holds a ratio to the proximal policy."""
    uses_reference: ClassVar[bool] = False
    """The loss reads log-probs of the reference policy."""
    decides_by_logp: ClassVar[bool] = False
    """Before an optimizer step the loss looks at the log-probs of its whole batch."""
    compares_group: ClassVar[bool] = False
    """Needs at least two responses per prompt."""
    whole_group_of_one_version: ClassVar[bool] = False
    """The loss is defined for groups that one weight version sampled."""

    @property
    def ratios(self) -> frozenset[Ratio]:
        found: set[Ratio] = set()
        if self.against_behavior:
            found.add("pi/mu")
        if self.uses_proximal:
            found.add("pi/prox")
        return frozenset(found)

    @property
    def level(self) -> Literal["token", "sequence"]:
        # A sequence-level loss returns one number per sequence, so no other aggregation applies.
        return "sequence" if self.default_aggregation == "seq-mean" else "token"


class ReinforceLoss(LossSettings):
    """-A * logp."""

    method: ClassVar[Any] = "objectives.losses.reinforce:REINFORCE"
    linear_in_advantage: ClassVar[bool] = True

    name: Literal["reinforce"] = "reinforce"


class ClipBounds(LossSettings):
    """Clip bounds of PPO's ratio."""

    uses_proximal: ClassVar[bool] = True

    clip_low: PositiveFloat = 0.2
    """The ratio is cut at 1 - clip_low from below."""
    clip_high: PositiveFloat = 0.2
    """The ratio is cut at 1 + clip_high from above."""
    dual_clip: Annotated[float, Field(gt=1.0)] | None = None
    """c of dual-clip PPO (arXiv 1912.09729): where A < 0 the loss is at most -A c."""


class PpoClipLoss(ClipBounds):
    """max(-A r, -A clip(r, 1 - clip_low, 1 + clip_high)) (arXiv 1707.06347; asymmetric bounds from
    arXiv 2503.14476)."""

    method: ClassVar[Any] = "objectives.losses.ppo_clip:PPO_CLIP"

    name: Literal["ppo_clip"] = "ppo_clip"


# Two ratios: the clipped one is to the proximal policy, the weight to the sampling one.
class DecoupledPpoLoss(ClipBounds):
    """sg(pi_prox / mu) * ppo_clip(pi / pi_prox) (arXiv 2110.00641; AReaL, arXiv 2505.24298)."""

    method: ClassVar[Any] = "objectives.losses.ppo_clip:DECOUPLED_PPO"
    against_behavior: ClassVar[bool] = True

    name: Literal["decoupled_ppo"] = "decoupled_ppo"


class CispoLoss(LossSettings):
    """-sg(clip(r, 1 - clip_low, 1 + clip_high)) * A * logp (arXiv 2506.13585)."""

    method: ClassVar[Any] = "objectives.losses.cispo:CISPO"
    uses_proximal: ClassVar[bool] = True
    linear_in_advantage: ClassVar[bool] = True

    name: Literal["cispo"] = "cispo"
    clip_low: PositiveFloat = 0.5
    """The weight is at least 1 - clip_low."""
    clip_high: PositiveFloat = 0.2
    """The weight is at most 1 + clip_high."""


# Bounds are tighter than PPO's, as the mean over a response varies less than one token.
class GspoLoss(LossSettings):
    """PPO's clip on the sequence's ratio exp(mean log r), per token (arXiv 2507.18071)."""

    method: ClassVar[Any] = "objectives.losses.gspo:GSPO"
    default_aggregation: ClassVar[Aggregation] = "seq-mean-token-mean"
    uses_proximal: ClassVar[bool] = True

    name: Literal["gspo"] = "gspo"
    clip_low: PositiveFloat = 0.03
    """The sequence's ratio is cut at 1 - clip_low from below. The paper, with hardly stale data,
    takes 3e-4."""
    clip_high: PositiveFloat = 0.04
    """The sequence's ratio is cut at 1 + clip_high from above. The paper, with hardly stale data,
    takes 4e-4."""


class GmpoLoss(LossSettings):
    """-A * exp(mean of the token log-ratios, each clipped on the side of A's sign) (arXiv
    2507.20673)."""

    method: ClassVar[Any] = "objectives.losses.gmpo:GMPO"
    default_aggregation: ClassVar[Aggregation] = "seq-mean"
    uses_proximal: ClassVar[bool] = True

    name: Literal["gmpo"] = "gmpo"
    clip_low: PositiveFloat = 0.4
    """Lower bound of the log-ratio, applied where A < 0: -clip_low."""
    clip_high: PositiveFloat = 0.4
    """Upper bound of the log-ratio, applied where A > 0."""


class SapoLoss(LossSettings):
    """-A * (4 / tau) * sigmoid(tau (r - 1)) (arXiv 2511.20347)."""

    method: ClassVar[Any] = "objectives.losses.sapo:SAPO"
    default_aggregation: ClassVar[Aggregation] = "seq-mean-token-mean"
    uses_proximal: ClassVar[bool] = True

    name: Literal["sapo"] = "sapo"
    tau_pos: PositiveFloat = 1.0
    """Sharpness of the gate where A > 0."""
    tau_neg: PositiveFloat = 1.05
    """Sharpness of the gate where A <= 0."""


# DPPO masks by the distance of probabilities instead of clipping ratios.
class DppoTvLoss(LossSettings):
    """-A * sg(min(w, cap)) * logp, w = pi / mu; 0 where pi has moved more than `threshold` from mu
    on A's side (arXiv 2602.04879)."""

    method: ClassVar[Any] = "objectives.losses.dppo:DPPO_TV"
    against_behavior: ClassVar[bool] = True

    name: Literal["dppo_tv"] = "dppo_tv"
    threshold: PositiveFloat = 0.15
    """Largest |pi - mu| of a token's probability."""
    cap: PositiveFloat = 20.0
    """Larger weights are cut to it."""


class DppoKlLoss(LossSettings):
    """Variant of `dppo_tv` whose mask uses the two-outcome KL divergence of the token's
    probability (arXiv 2602.04879)."""

    method: ClassVar[Any] = "objectives.losses.dppo:DPPO_KL"
    against_behavior: ClassVar[bool] = True

    name: Literal["dppo_kl"] = "dppo_kl"
    threshold: PositiveFloat = 0.05
    """Largest divergence from mu to pi; nats."""
    cap: PositiveFloat = 20.0
    """Larger weights are cut to it."""


# Losses that read rewards directly go with `advantage: none`.
class ToprLoss(LossSettings):
    """-c * R * logp, c = 1 where R >= 0, else sg(min(1, product of w)) over the sequence, w = pi /
    mu (arXiv 2503.14286)."""

    method: ClassVar[Any] = "objectives.losses.topr:TOPR"
    default_aggregation: ClassVar[Aggregation] = "seq-mean-token-sum"
    uses_advantage: ClassVar[bool] = False
    against_behavior: ClassVar[bool] = True

    name: Literal["topr"] = "topr"

    @property
    def multiplies_over_response(self) -> bool:
        return True


class TrajectoryBalanceLoss(LossSettings):
    """(log Z + sum(logp - logp_ref) - R / beta)^2 per sequence, log Z the group's mean estimate
    (TBA, arXiv 2503.18929)."""

    method: ClassVar[Any] = "objectives.losses.trajectory_balance:TRAJECTORY_BALANCE"
    default_aggregation: ClassVar[Aggregation] = "seq-mean"
    uses_advantage: ClassVar[bool] = False
    uses_reference: ClassVar[bool] = True
    decides_by_logp: ClassVar[bool] = True
    compares_group: ClassVar[bool] = True

    name: Literal["trajectory_balance"] = "trajectory_balance"
    beta: PositiveFloat = 0.05
    """Reward that weighs as much as one nat of divergence from the reference."""


# The group's value is defined for responses that one weight version sampled.
class OaplLoss(LossSettings):
    """(beta_policy * sum(logp - logp_behavior) - (R - V))^2 per sequence, V = beta_value * log mean
    exp(R / beta_value) over the group (arXiv 2602.19362)."""

    method: ClassVar[Any] = "objectives.losses.oapl:OAPL"
    default_aggregation: ClassVar[Aggregation] = "seq-mean"
    uses_advantage: ClassVar[bool] = False
    against_behavior: ClassVar[bool] = True
    compares_group: ClassVar[bool] = True
    whole_group_of_one_version: ClassVar[bool] = True

    name: Literal["oapl"] = "oapl"
    beta_value: PositiveFloat = 1.0
    """Temperature of the group's value: small takes the best reward, large the mean."""
    beta_policy: PositiveFloat = 0.001
    """Advantage that one nat of log-ratio stands for."""


class KimiLoss(LossSettings):
    """(R - mean R - tau * sum(log r))^2 per sequence (Kimi k1.5, arXiv 2501.12599)."""

    method: ClassVar[Any] = "objectives.losses.kimi:KIMI"
    default_aggregation: ClassVar[Aggregation] = "seq-mean"
    uses_advantage: ClassVar[bool] = False
    uses_proximal: ClassVar[bool] = True
    compares_group: ClassVar[bool] = True

    name: Literal["kimi"] = "kimi"
    tau: PositiveFloat = 0.1
    """Centred reward that one nat of log-ratio stands for."""


class VespoLoss(LossSettings):
    """-sg(phi) * A * logp, phi = exp(lambda + k log W - lambda W), W the sequence's ratio to prox
    (arXiv 2602.10693)."""

    method: ClassVar[Any] = "objectives.losses.vespo:VESPO"
    uses_proximal: ClassVar[bool] = True

    name: Literal["vespo"] = "vespo"
    k_pos: NonNegativeFloat = 2.0
    """k where A > 0: how fast phi falls for small W."""
    lambda_pos: NonNegativeFloat = 3.0
    """lambda where A > 0: how fast phi falls for large W."""
    k_neg: NonNegativeFloat = 3.0
    """k where A <= 0."""
    lambda_neg: NonNegativeFloat = 2.0
    """lambda where A <= 0."""

    @property
    def multiplies_over_response(self) -> bool:
        return True


class GipoLoss(LossSettings):
    """-sg(exp(-(log w / sigma)^2 / 2)) * w * A, w = pi / mu (arXiv 2603.03955; known from
    third-party copies only)."""

    method: ClassVar[Any] = "objectives.losses.gipo:GIPO"
    against_behavior: ClassVar[bool] = True
    linear_in_advantage: ClassVar[bool] = True

    name: Literal["gipo"] = "gipo"
    sigma: PositiveFloat = 1.0
    """Width of the trusted log-ratios; nats."""


class AspoLoss(LossSettings):
    """-A * sg(g) * logp: where A > 0, g = 1 / r and 0 for r > 1 + clip_high; where A < 0, g = r and
    0 for r < 1 - clip_low; g at most dual_clip (arXiv 2510.06062; known from third-party copies
    only)."""

    method: ClassVar[Any] = "objectives.losses.aspo:ASPO"
    uses_proximal: ClassVar[bool] = True

    name: Literal["aspo"] = "aspo"
    clip_low: PositiveFloat = 0.2
    """Lower bound: ratios below 1 - clip_low have no gradient where A < 0."""
    clip_high: PositiveFloat = 0.2
    """Upper bound: ratios above 1 + clip_high have no gradient where A > 0."""
    dual_clip: Annotated[float, Field(gt=1.0)] = 3.0
    """Largest gradient weight; larger ones are cut to it and keep their gradient."""


class MinirlLoss(LossSettings):
    """-M * sg(min(w, cap)) * A * logp, w = pi / mu, M = PPO's mask on r (arXiv 2512.01374)."""

    method: ClassVar[Any] = "objectives.losses.minirl:MINIRL"
    default_aggregation: ClassVar[Aggregation] = "seq-mean-token-sum"
    against_behavior: ClassVar[bool] = True
    uses_proximal: ClassVar[bool] = True

    name: Literal["minirl"] = "minirl"
    clip_low: PositiveFloat = 0.2
    """Lower bound: tokens with r < 1 - clip_low are masked where A < 0."""
    clip_high: PositiveFloat = 0.27
    """Upper bound: tokens with r > 1 + clip_high are masked where A > 0."""
    cap: PositiveFloat = 5.0
    """Larger weights are cut to it."""


# M2PO and BAPO look at the whole optimizer-step batch before the first micro-batch.
class M2poLoss(LossSettings):
    """-w * A, w = pi / mu, with the second moment of log w bounded over the optimizer-step batch
    (arXiv 2510.01161)."""

    method: ClassVar[Any] = "objectives.losses.m2po:M2PO"
    against_behavior: ClassVar[bool] = True
    decides_by_logp: ClassVar[bool] = True

    name: Literal["m2po"] = "m2po"
    mode: Literal["mask", "cap"] = "mask"
    """`mask`: the tokens with the largest (log w)^2 are left out until the mean of the others is
    within the bound (the paper's Algorithm 1). `cap`: PPO's clip of w to [e^-c, e^c], c such that
    the mean of min((log w)^2, c^2) is the bound."""
    candidates: Literal["harmful", "all"] = "harmful"
    """Tokens whose moment is bounded. `harmful`: those PPO could clip, with A > 0 and w > 1 or A <
    0 and w < 1."""
    second_moment: PositiveFloat = 0.04
    """Bound on the mean (log w)^2; nats squared."""


def _rising(bounds: tuple[float, float, float]) -> tuple[float, float, float]:
    start, end, step = bounds
    if not 0 <= start <= end or step <= 0:
        raise ValueError(
            f"expected [start, end, step] with 0 <= start <= end and step > 0, got {list(bounds)}"
        )
    return bounds


def _as_tuple(value: Any) -> Any:
    """A method's settings come through a Python function (config/settings_model.py), after which
    strict refuses the file's list for a tuple."""
    # JSON has lists only.
    return tuple(value) if isinstance(value, list) else value


Search = Annotated[tuple[float, float, float], BeforeValidator(_as_tuple), AfterValidator(_rising)]


class BapoLoss(LossSettings):
    """PPO's clip of w = pi / mu with bounds searched for each batch, so that tokens with A > 0 make
    up `target_share` of the loss (arXiv 2510.18927)."""

    method: ClassVar[Any] = "objectives.losses.bapo:BAPO"
    against_behavior: ClassVar[bool] = True
    decides_by_logp: ClassVar[bool] = True

    name: Literal["bapo"] = "bapo"
    target_share: Annotated[float, Field(gt=0.0, le=1.0)] = 0.4
    """Target share of the loss's magnitude from tokens with A > 0; the search stops there."""
    low: Search = (0.6, 0.9, 0.02)
    """Lower bound of the ratio: where the search starts, where it ends, its step. It rises after
    the upper bound."""
    high: Search = (1.2, 3.0, 0.05)
    """Upper bound of the ratio: where the search starts, where it ends, its step."""

    @model_validator(mode="after")
    def _bounds_stay_apart(self) -> BapoLoss:
        # The two searches must not cross, or an interval would be empty.
        if self.low[1] > self.high[0]:
            raise ValueError(
                f"low may end at {self.low[1]}, above where high starts, {self.high[0]}: the bounds"
                " would cross"
            )
        return self


class SftLoss(LossSettings):
    """-logp of given responses: supervised warm starts."""

    method: ClassVar[Any] = "objectives.losses.sft:SFT"
    uses_advantage: ClassVar[bool] = False

    name: Literal["sft"] = "sft"


Loss = Annotated[
    Annotated[
        Union[
            ReinforceLoss,
            PpoClipLoss,
            DecoupledPpoLoss,
            CispoLoss,
            GspoLoss,
            GmpoLoss,
            SapoLoss,
            DppoTvLoss,
            DppoKlLoss,
            ToprLoss,
            TrajectoryBalanceLoss,
            OaplLoss,
            KimiLoss,
            VespoLoss,
            GipoLoss,
            AspoLoss,
            MinirlLoss,
            M2poLoss,
            BapoLoss,
            SftLoss,
        ],
        # The discriminator makes an unknown name one error, not one per member.
        Field(discriminator="name"),
    ],
    # Outside the union: a plug-in's name is not one of its tags.
    or_plug_in(LossSettings),
    BeforeValidator(bare_name),
    # A plug-in has fields of its own, which the stored configuration must keep.
    SerializeAsAny(),
]

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
"""Standard deviation of the logarithm of a response's ratio, divided by the square root of its
length in tokens, if the tokens' rounding differences are independent. Staleness adds to it. 0.045
was measured with SmolLM2-135M in bfloat16 (docs/choosing_a_method.md)."""
LONG_RESPONSE = 512
"""Number of tokens at which this deviation, 0.68 nats, is a factor of 2: the default cap of `tis`.
The studies of this project had answers of 6 to 14 tokens."""

Ratio = Literal["pi/mu", "prox/mu", "pi/prox"]
Proximal = Literal["behavior", "recompute", "loglinear", "ewma", "snapshot"]


class ReadsRatios(MethodSettings):
    """Base of the settings of a method that may read ratios of policies."""

    @property
    def ratios(self) -> frozenset[Ratio]:
        """Ratios that the method reads with these settings."""
        return frozenset()

    @property
    def weighs_each_token(self) -> bool:
        """True if each ratio to the behavior policy is only its own token's importance weight, or
        only masks its own token. Such a weight is correct for any sampling distribution."""
        return False

    @property
    def multiplies_over_response(self) -> bool:
        """True if the method reads the product of a ratio over all tokens of a response, or the sum
        of its logarithm. The spread of both grows with the response's length."""
        return False


def engine_ratios(method: ReadsRatios, proximal: Proximal) -> frozenset[Ratio]:
    """Return the method's ratios of a trainer's log-prob to an engine's log-prob."""
    compares_engine: dict[Ratio, bool] = {
        "pi/mu": True,
        # With `behavior` both log-probs are the engine's, and the ratio is 1.
        "prox/mu": proximal != "behavior",
        # `behavior` uses the engine's log-probs, and `loglinear` interpolates between them and the
        # trainer's.
        "pi/prox": proximal in ("behavior", "loglinear"),
    }
    return frozenset(ratio for ratio in method.ratios if compares_engine[ratio])


class LossSettings(ReadsRatios):
    """Base of every loss's settings. The class attributes are properties of the loss, which
    config/objective.py, the rules and objectives/ read."""

    method_type: ClassVar[tuple[str, str]] = (
        "an instance of",
        "megatron_async_rl.objectives.method.LossMethod",
    )
    folder: ClassVar[str] = "megatron_async_rl.objectives.losses"
    # ClassVars, because properties of a method are not keys that a user may set.
    default_aggregation: ClassVar[Aggregation] = "token-mean"
    """Aggregation if `objective.aggregation` is null. `seq-mean` marks a sequence-level loss, which
    has no other aggregation."""
    uses_advantage: ClassVar[bool] = True
    """False if the loss reads rewards or neither, and therefore needs `advantage: none`."""
    linear_in_advantage: ClassVar[bool] = False
    """True if the gradient is the advantage times a factor that does not depend on the advantage,
    its sign included."""
    against_behavior: ClassVar[bool] = False
    """True if the loss contains pi / pi_behavior, so that a weight of this ratio would correct
    twice."""
    uses_proximal: ClassVar[bool] = False
    """True if the loss contains a ratio to the proximal policy."""
    uses_reference: ClassVar[bool] = False
    """True if the loss reads log-probs of the reference policy."""
    decides_by_logp: ClassVar[bool] = False
    """True if the loss reads the log-probs of the whole batch before an optimizer step."""
    compares_group: ClassVar[bool] = False
    """True if the loss needs at least two responses per prompt."""
    whole_group_of_one_version: ClassVar[bool] = False
    """True if the loss is defined only for groups that one weight version sampled."""

    @property
    def ratios(self) -> frozenset[Ratio]:
        read: set[Ratio] = set()
        if self.against_behavior:
            read.add("pi/mu")
        if self.uses_proximal:
            read.add("pi/prox")
        return frozenset(read)

    @property
    def level(self) -> Literal["token", "sequence"]:
        # A sequence-level loss returns one number per sequence, so its aggregation is fixed.
        return "sequence" if self.default_aggregation == "seq-mean" else "token"


class ReinforceLoss(LossSettings):
    """REINFORCE: -A * logp."""

    method: ClassVar[Any] = "objectives.losses.reinforce:REINFORCE"
    linear_in_advantage: ClassVar[bool] = True

    name: Literal["reinforce"] = "reinforce"


class ClipBounds(LossSettings):
    """Clip bounds of PPO's ratio."""

    uses_proximal: ClassVar[bool] = True

    clip_low: PositiveFloat = 0.2
    """Lower clip bound of the ratio: 1 - clip_low."""
    clip_high: PositiveFloat = 0.2
    """Upper clip bound of the ratio: 1 + clip_high."""
    dual_clip: Annotated[float, Field(gt=1.0)] | None = None
    """Constant c of dual-clip PPO (arXiv 1912.09729): where A < 0 the loss is at most -A c. Null:
    no bound."""


class PpoClipLoss(ClipBounds):
    """PPO (arXiv 1707.06347; asymmetric bounds from arXiv 2503.14476): max(-A r, -A clip(r, 1 -
    clip_low, 1 + clip_high))."""

    method: ClassVar[Any] = "objectives.losses.ppo_clip:PPO_CLIP"

    name: Literal["ppo_clip"] = "ppo_clip"


# The clipped ratio is to the proximal policy; the weight is a ratio to the sampling policy.
class DecoupledPpoLoss(ClipBounds):
    """Decoupled PPO (arXiv 2110.00641; AReaL, arXiv 2505.24298): sg(pi_prox / mu) * ppo_clip(pi /
    pi_prox)."""

    method: ClassVar[Any] = "objectives.losses.ppo_clip:DECOUPLED_PPO"
    against_behavior: ClassVar[bool] = True

    name: Literal["decoupled_ppo"] = "decoupled_ppo"


class CispoLoss(LossSettings):
    """CISPO (arXiv 2506.13585): -sg(clip(r, 1 - clip_low, 1 + clip_high)) * A * logp."""

    method: ClassVar[Any] = "objectives.losses.cispo:CISPO"
    uses_proximal: ClassVar[bool] = True
    linear_in_advantage: ClassVar[bool] = True

    name: Literal["cispo"] = "cispo"
    clip_low: PositiveFloat = 0.5
    """Lower bound of the weight: 1 - clip_low."""
    clip_high: PositiveFloat = 0.2
    """Upper bound of the weight: 1 + clip_high."""


# Bounds are tighter than PPO's, because the mean over a response varies less than one token.
class GspoLoss(LossSettings):
    """GSPO (arXiv 2507.18071): PPO's clip of the sequence's ratio exp(mean log r), per token."""

    method: ClassVar[Any] = "objectives.losses.gspo:GSPO"
    default_aggregation: ClassVar[Aggregation] = "seq-mean-token-mean"
    uses_proximal: ClassVar[bool] = True

    name: Literal["gspo"] = "gspo"
    clip_low: PositiveFloat = 0.03
    """Lower clip bound of the sequence's ratio: 1 - clip_low. The paper, whose data is hardly
    stale, uses 3e-4."""
    clip_high: PositiveFloat = 0.04
    """Upper clip bound of the sequence's ratio: 1 + clip_high. The paper, whose data is hardly
    stale, uses 4e-4."""


class GmpoLoss(LossSettings):
    """GMPO (arXiv 2507.20673): -A * exp(mean of the token log-ratios, each clipped on the side of
    A's sign)."""

    method: ClassVar[Any] = "objectives.losses.gmpo:GMPO"
    default_aggregation: ClassVar[Aggregation] = "seq-mean"
    uses_proximal: ClassVar[bool] = True

    name: Literal["gmpo"] = "gmpo"
    clip_low: PositiveFloat = 0.4
    """Lower bound of the log-ratio, which applies where A < 0: -clip_low."""
    clip_high: PositiveFloat = 0.4
    """Upper bound of the log-ratio, which applies where A > 0."""


class SapoLoss(LossSettings):
    """SAPO (arXiv 2511.20347): -A * (4 / tau) * sigmoid(tau (r - 1))."""

    method: ClassVar[Any] = "objectives.losses.sapo:SAPO"
    default_aggregation: ClassVar[Aggregation] = "seq-mean-token-mean"
    uses_proximal: ClassVar[bool] = True

    name: Literal["sapo"] = "sapo"
    tau_pos: PositiveFloat = 1.0
    """Sharpness of the gate where A > 0."""
    tau_neg: PositiveFloat = 1.05
    """Sharpness of the gate where A <= 0."""


# DPPO masks tokens by a distance of probabilities instead of clipping ratios.
class DppoTvLoss(LossSettings):
    """DPPO with total variation (arXiv 2602.04879): -A * sg(min(w, cap)) * logp, with w = pi / mu.
    The loss is 0 where pi differs from mu by more than `threshold` on the side of A's sign."""

    method: ClassVar[Any] = "objectives.losses.dppo:DPPO_TV"
    against_behavior: ClassVar[bool] = True

    name: Literal["dppo_tv"] = "dppo_tv"
    threshold: PositiveFloat = 0.15
    """Largest |pi - mu| of a token's probability."""
    cap: PositiveFloat = 20.0
    """Largest weight w."""


class DppoKlLoss(LossSettings):
    """DPPO with KL divergence (arXiv 2602.04879): `dppo_tv` with a mask by the two-outcome KL
    divergence of the token's probability."""

    method: ClassVar[Any] = "objectives.losses.dppo:DPPO_KL"
    against_behavior: ClassVar[bool] = True

    name: Literal["dppo_kl"] = "dppo_kl"
    threshold: PositiveFloat = 0.05
    """Largest divergence from mu to pi; nats."""
    cap: PositiveFloat = 20.0
    """Largest weight w."""


# Losses that read rewards directly need `advantage: none`.
class ToprLoss(LossSettings):
    """TOPR (arXiv 2503.14286): -c * R * logp, with c = 1 where R >= 0, else sg(min(1, product of w
    over the sequence)), and w = pi / mu."""

    method: ClassVar[Any] = "objectives.losses.topr:TOPR"
    default_aggregation: ClassVar[Aggregation] = "seq-mean-token-sum"
    uses_advantage: ClassVar[bool] = False
    against_behavior: ClassVar[bool] = True

    name: Literal["topr"] = "topr"

    @property
    def multiplies_over_response(self) -> bool:
        return True


class TrajectoryBalanceLoss(LossSettings):
    """Trajectory balance (TBA, arXiv 2503.18929): (log Z + sum(logp - logp_ref) - R / beta)^2 per
    sequence, where log Z is the group's mean estimate."""

    method: ClassVar[Any] = "objectives.losses.trajectory_balance:TRAJECTORY_BALANCE"
    default_aggregation: ClassVar[Aggregation] = "seq-mean"
    uses_advantage: ClassVar[bool] = False
    uses_reference: ClassVar[bool] = True
    decides_by_logp: ClassVar[bool] = True
    compares_group: ClassVar[bool] = True

    name: Literal["trajectory_balance"] = "trajectory_balance"
    beta: PositiveFloat = 0.05
    """Reward equivalent of one nat of divergence from the reference."""


# The group's value is defined only for responses that one weight version sampled.
class OaplLoss(LossSettings):
    """OAPL (arXiv 2602.19362): (beta_policy * sum(logp - logp_behavior) - (R - V))^2 per sequence,
    with V = beta_value * log mean exp(R / beta_value) over the group."""

    method: ClassVar[Any] = "objectives.losses.oapl:OAPL"
    default_aggregation: ClassVar[Aggregation] = "seq-mean"
    uses_advantage: ClassVar[bool] = False
    against_behavior: ClassVar[bool] = True
    compares_group: ClassVar[bool] = True
    whole_group_of_one_version: ClassVar[bool] = True

    name: Literal["oapl"] = "oapl"
    beta_value: PositiveFloat = 1.0
    """Temperature of the group's value, which tends to the best reward for small and to the mean
    reward for large temperatures."""
    beta_policy: PositiveFloat = 0.001
    """Advantage equivalent of one nat of log-ratio."""


class KimiLoss(LossSettings):
    """Kimi k1.5 (arXiv 2501.12599): (R - mean R - tau * sum(log r))^2 per sequence."""

    method: ClassVar[Any] = "objectives.losses.kimi:KIMI"
    default_aggregation: ClassVar[Aggregation] = "seq-mean"
    uses_advantage: ClassVar[bool] = False
    uses_proximal: ClassVar[bool] = True
    compares_group: ClassVar[bool] = True

    name: Literal["kimi"] = "kimi"
    tau: PositiveFloat = 0.1
    """Equivalent of one nat of log-ratio, in units of the centred reward."""


class VespoLoss(LossSettings):
    """VESPO (arXiv 2602.10693): -sg(phi) * A * logp, with phi = exp(lambda + k log W - lambda W),
    where W is the sequence's ratio to the proximal policy."""

    method: ClassVar[Any] = "objectives.losses.vespo:VESPO"
    uses_proximal: ClassVar[bool] = True

    name: Literal["vespo"] = "vespo"
    k_pos: NonNegativeFloat = 2.0
    """Exponent k where A > 0: the decay of phi for small W."""
    lambda_pos: NonNegativeFloat = 3.0
    """Rate lambda where A > 0: the decay of phi for large W."""
    k_neg: NonNegativeFloat = 3.0
    """Exponent k where A <= 0."""
    lambda_neg: NonNegativeFloat = 2.0
    """Rate lambda where A <= 0."""

    @property
    def multiplies_over_response(self) -> bool:
        return True


class GipoLoss(LossSettings):
    """GIPO (arXiv 2603.03955; known from third-party copies only): -sg(exp(-(log w / sigma)^2 / 2))
    * w * A, with w = pi / mu."""

    method: ClassVar[Any] = "objectives.losses.gipo:GIPO"
    against_behavior: ClassVar[bool] = True
    linear_in_advantage: ClassVar[bool] = True

    name: Literal["gipo"] = "gipo"
    sigma: PositiveFloat = 1.0
    """Width of the trusted log-ratios; nats."""


class AspoLoss(LossSettings):
    """ASPO (arXiv 2510.06062; known from third-party copies only): -A * sg(g) * logp. Where A > 0,
    g is 1 / r, and 0 for r > 1 + clip_high. Where A < 0, g is r, and 0 for r < 1 - clip_low. g is
    at most dual_clip."""

    method: ClassVar[Any] = "objectives.losses.aspo:ASPO"
    uses_proximal: ClassVar[bool] = True

    name: Literal["aspo"] = "aspo"
    clip_low: PositiveFloat = 0.2
    """Lower bound: tokens with r < 1 - clip_low have no gradient where A < 0."""
    clip_high: PositiveFloat = 0.2
    """Upper bound: tokens with r > 1 + clip_high have no gradient where A > 0."""
    dual_clip: Annotated[float, Field(gt=1.0)] = 3.0
    """Largest weight g. Tokens with a larger weight get this weight; they are not masked."""


class MinirlLoss(LossSettings):
    """MiniRL (arXiv 2512.01374): -M * sg(min(w, cap)) * A * logp, where w = pi / mu and M is PPO's
    mask on r."""

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
    """Largest weight w."""


class M2poLoss(LossSettings):
    """M2PO (arXiv 2510.01161): -w * A, with w = pi / mu and a bound on the second moment of log w
    over the optimizer-step batch."""

    method: ClassVar[Any] = "objectives.losses.m2po:M2PO"
    compares_batch: ClassVar[bool] = True
    against_behavior: ClassVar[bool] = True
    decides_by_logp: ClassVar[bool] = True

    name: Literal["m2po"] = "m2po"
    mode: Literal["mask", "cap"] = "mask"
    """Enforcement of the bound. `mask`: the tokens with the largest (log w)^2 are left out until
    the mean of the others is within the bound (Algorithm 1 of the paper). `cap`: PPO's clip of w to
    [e^-c, e^c], with c such that the mean of min((log w)^2, c^2) equals the bound."""
    candidates: Literal["harmful", "all"] = "harmful"
    """Tokens whose moment is bounded. `harmful`: the tokens that PPO could clip, with A > 0 and w >
    1, or A < 0 and w < 1. `all`: all tokens."""
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
    """Convert a list to a tuple. Method settings pass through a Python validator (`or_plug_in`),
    after which strict mode refuses a list for a tuple."""
    return tuple(value) if isinstance(value, list) else value


Search = Annotated[tuple[float, float, float], BeforeValidator(_as_tuple), AfterValidator(_rising)]


class BapoLoss(LossSettings):
    """BAPO (arXiv 2510.18927): PPO's clip of w = pi / mu, whose bounds are searched for each batch
    until tokens with A > 0 contribute `target_share` of the loss."""

    method: ClassVar[Any] = "objectives.losses.bapo:BAPO"
    compares_batch: ClassVar[bool] = True
    against_behavior: ClassVar[bool] = True
    decides_by_logp: ClassVar[bool] = True

    name: Literal["bapo"] = "bapo"
    target_share: Annotated[float, Field(gt=0.0, le=1.0)] = 0.4
    """Target share of tokens with A > 0 in the magnitude of the loss; the search stops there."""
    low: Search = (0.6, 0.9, 0.02)
    """Search range of the ratio's lower bound: [start, end, step]. It rises after the upper
    bound."""
    high: Search = (1.2, 3.0, 0.05)
    """Search range of the ratio's upper bound: [start, end, step]."""

    @model_validator(mode="after")
    def _bounds_stay_apart(self) -> BapoLoss:
        # The search ranges must not overlap, or the clip interval could be empty.
        if self.low[1] > self.high[0]:
            raise ValueError(
                f"the end of low ({self.low[1]}) is above the start of high ({self.high[0]}), so"
                " the bounds could cross; set it to at most the start of high"
            )
        return self


class SftLoss(LossSettings):
    """Supervised fine-tuning: -logp of given responses, for warm starts."""

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
        # With a discriminator pydantic reports an unknown name once, not once per member.
        Field(discriminator="name"),
    ],
    # The plug-in validator wraps the union, because a plug-in's name is not one of its tags.
    or_plug_in(LossSettings),
    BeforeValidator(bare_name),
    # The stored configuration must keep a plug-in's own fields.
    SerializeAsAny(),
]

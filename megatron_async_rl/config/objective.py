"""Settings of the objective (an advantage, a loss, ordered corrections and further terms of the
loss), and the combinations that are refused.

Each conflict states the combination, the reason and the fix. The properties of each method are
class attributes of its settings model, so a new method brings its own.
"""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Annotated, Literal

from pydantic import Field, NonNegativeFloat, PositiveFloat, PositiveInt, model_validator

from megatron_async_rl.config.advantages import (
    Advantage,
    GrpoAdvantage,
    NoAdvantage,
    OpobAdvantage,
    OtbAdvantage,
)
from megatron_async_rl.config.corrections import Correction
from megatron_async_rl.config.losses import (
    Aggregation,
    Loss,
    PpoClipLoss,
    Proximal,
    Ratio,
    ReadsRatios,
)
from megatron_async_rl.config.settings_model import Strict


class KlConfig(ReadsRatios):
    """Penalty on the divergence from the reference policy (estimators:
    joschu.net/blog/kl-approx.html). docs/objectives.md has the gradient of each estimator."""

    coef: PositiveFloat
    """Factor of the penalty."""
    estimator: Literal["k1", "k2", "k3"] = "k3"
    """Estimate per token, with l = log pi/pi_ref: k1 = l; k2 = l^2 / 2; k3 = exp(-l) - 1 + l."""
    where: Literal["loss", "reward"] = "loss"
    """Place of the penalty. `loss`: it is added to the loss, with gradient. `reward`: it is
    subtracted from the reward of each token, without gradient. k1 needs `reward`: its expected
    gradient in the loss is 0."""
    weight: Literal["none", "truncated"] = "none"
    """Importance weight of each token's estimate. `truncated`: min(w, cap), with w = pi / mu
    without gradient, because another policy than the current one sampled stale tokens. `none`: no
    weight, as in released code."""
    cap: PositiveFloat = 2.0
    """Largest weight of `weight: truncated`."""

    @property
    def ratios(self) -> frozenset[Ratio]:
        return frozenset({"pi/mu"} if self.weight == "truncated" else ())

    @property
    def weighs_each_token(self) -> bool:
        return True

    @model_validator(mode="after")
    def _pulls_towards_the_reference(self) -> KlConfig:
        # The gradient of k1 is grad log pi, whose expectation under pi is 0.
        if self.estimator == "k1" and self.where == "loss":
            raise ValueError(
                "estimator: k1 in the loss does not pull towards the reference: its gradient, that"
                " of log pi, has mean 0 for any reference; set where: reward, or estimator: k2"
                " (the gradient of KL(pi || ref)) or k3 (the gradient of KL(ref || pi))"
            )
        # Refuse a setting without effect; otherwise it would be ignored silently.
        if self.weight == "none" and self.cap != type(self).model_fields["cap"].default:
            raise ValueError(
                f"cap: {self.cap:g} bounds the weights of weight: truncated, and weight is none;"
                " set weight: truncated, or remove cap"
            )
        return self


class ReferenceConfig(Strict):
    """Reference policy of KL penalties and trajectory balance, by default the run's first weights.
    Host memory holds it.

    A checkpoint contains a reference that moves. A resumed run reads a fixed reference from its
    directory again, so it compares with the same weights as before."""

    path: Path | None = None
    """A Hugging Face model directory of the same shape; null uses the model that the run starts
    from."""
    refresh_every: PositiveInt | None = None
    """Number of optimizer steps after which the current weights become the reference; null never
    refreshes it."""
    ema: Annotated[float, Field(gt=0.0, lt=1.0)] | None = None
    """Decay per step of an exponential average of the weights, which is then the reference; null
    computes no average."""

    @model_validator(mode="after")
    def _one_way_to_move(self) -> ReferenceConfig:
        # A refresh would overwrite the average, whose history is then lost.
        if self.refresh_every is not None and self.ema is not None:
            raise ValueError(
                "reference: refresh_every and ema both move the reference; set one of them to null"
            )
        return self


class ValueConfig(Strict):
    """Value head (advantage `gae`): one linear output on the policy's last hidden state, trained
    with the policy."""

    coef: PositiveFloat = 0.5
    """Factor of the head's squared error, averaged over trained tokens, in the loss."""
    clip: PositiveFloat | None = None
    """Largest distance of a value from its estimate at the start of the batch (PPO's value
    clipping); null does not clip. With one optimizer step per batch the distance is 0, and nothing
    is clipped."""
    detach: bool = False
    """Stop the head's gradient at the hidden states, so that it does not change the policy."""


class OverlongConfig(Strict):
    """Soft overlong punishment of DAPO (arXiv 2503.14476, eq. 13): no penalty up to max_length -
    buffer, then a linear increase."""

    max_length: PositiveInt
    """Number of response tokens at which the penalty is complete. Tokens of an environment do not
    count, because the policy did not choose them."""
    buffer: PositiveInt
    """Number of tokens before max_length over which the penalty grows."""
    penalty: PositiveFloat = 1.0
    """Penalty at max_length and beyond, subtracted from the reward."""

    @model_validator(mode="after")
    def _begins_at_a_length(self) -> OverlongConfig:
        # A response without tokens would have a penalty already.
        if self.buffer > self.max_length:
            raise ValueError(
                f"overlong: buffer: {self.buffer} is above max_length: {self.max_length}, so the"
                " penalty would begin at a negative length; set buffer to at most max_length"
            )
        return self


class ObjectiveConfig(Strict):
    """Training objective: advantage, loss, corrections and penalties."""

    minibatches: PositiveInt = 1
    """Number of minibatches of a batch; at most flow.prompts_per_step. Each is one optimizer step
    on whole groups, which are drawn at random with the weight version as seed. Weights are
    published after the last step."""
    epochs: PositiveInt = 1
    """Number of passes over each batch, with the same minibatches in the same order."""
    advantage: Advantage = GrpoAdvantage()
    loss: Loss = PpoClipLoss()
    # A tuple: the order is part of the method.
    corrections: tuple[Correction, ...] = ()
    """Corrections in the order of their application; each gets the tokens that the previous ones
    kept."""
    renormalize: bool = False
    """Treatment of rejected tokens in denominators. False: they count as zeros, and the weights of
    other tokens do not change. True: they are left out at the level of the aggregation's division:
    for `token-mean`, from the tokens of the batch; for `seq-mean-token-mean`, from the tokens of
    each sequence, and sequences without any other token from the mean."""
    proximal: Proximal = "behavior"
    """Proximal policy, the denominator of a ratio r. `behavior`: the sampling policy. `recompute`:
    the trainer's weights at the start of the batch; with one optimizer step per batch these are the
    current weights, so r is 1. `loglinear`: the interpolation between the two in log space, at 1 -
    1/d for a token's lag d (A-3PO). `ewma`: an exponential average of the trainer's weights.
    `snapshot`: the weight version that sampled the token, with log-probs of the trainer (arXiv
    2605.12070)."""
    ewma_decay: Annotated[float, Field(gt=0.0, lt=1.0)] = 0.9
    """Decay per step of `proximal: ewma`."""
    snapshots: PositiveInt | None = None
    """Number of the newest weight versions, the present one included, that the run keeps in host
    memory and in checkpoints for `proximal: snapshot` and the control `displacement`, which refuse
    a number below that of null. Null keeps as many as a batch may contain: the largest lag,
    `flow.async_ratio` rounded up, + 1."""
    aggregation: Aggregation | None = None
    """Aggregation of the token losses, with denominators from the whole optimizer-step batch.
    Null uses the aggregation of the loss's paper."""
    norm_length: PositiveInt | None = None
    """Constant divisor per sequence for `seq-mean-token-sum-norm` (Dr.GRPO); tokens."""
    kl: KlConfig | None = None
    """KL penalty; null adds none."""
    entropy_bonus: NonNegativeFloat = 0.0
    """Factor of the mean token entropy, which is subtracted from the loss."""
    reference: ReferenceConfig | None = None
    """Reference policy. Null: a KL penalty compares with the run's first weights."""
    value: ValueConfig | None = None
    """Value head, for advantage `gae`, which needs it."""
    overlong: OverlongConfig | None = None
    """Length penalty of the reward, subtracted before advantages; null subtracts none."""

    @property
    def steps_per_batch(self) -> int:
        """Number of optimizer steps from one version of the weights to the next."""
        return self.minibatches * self.epochs

    @property
    def aggregation_used(self) -> Aggregation:
        # The user's choice takes precedence over the aggregation of the loss's paper.
        return self.aggregation if self.aggregation is not None else self.loss.default_aggregation

    @property
    def past_versions(self) -> int:
        """`snapshots` of a resolved objective (`Config.resolved_objective`). Raises ValueError for
        null."""
        if self.snapshots is None:
            raise ValueError(
                "objective.snapshots is null; only the whole configuration resolves it"
            )
        return self.snapshots

    @property
    def needs_reference(self) -> bool:
        return self.kl is not None or self.loss.uses_reference

    @model_validator(mode="after")
    def _pieces_fit(self) -> ObjectiveConfig:
        if "advantage" not in self.model_fields_set and not self.loss.uses_advantage:
            # Assign past the lock of a frozen model: pydantic offers no validator that may set a
            # field from another one.
            self.__dict__["advantage"] = NoAdvantage()
        for reason in objective_conflicts(self):
            raise ValueError(reason)
        return self


def objective_conflicts(objective: ObjectiveConfig) -> Iterator[str]:
    """Yield the reasons why the parts of this objective do not compose."""
    loss, advantage = objective.loss, objective.advantage
    yield from _aggregation(objective)
    # Refuse an advantage without effect; otherwise it would be ignored silently.
    if not loss.uses_advantage and advantage.name != "none":
        yield (
            f"loss: {loss.name} reads no advantage, so advantage: {advantage.name} would have no"
            " effect; set advantage: none"
        )
    yield from _advantage(objective)
    yield from _proximal(objective)
    yield from _corrections(objective)
    if loss.name == "sft" and objective.kl is not None and objective.kl.ratios:
        yield (
            "kl.weight: truncated multiplies by pi / pi_behavior, and loss: sft learns from given"
            " responses, which no policy sampled; set kl.weight: none"
        )
    if loss.uses_reference and objective.reference is None:
        yield (
            f"loss: {loss.name} compares with a reference policy: add `reference: {{}}` (the run's"
            " first weights, kept in host memory), or name another model or a refresh there"
        )
    # Refused because a study would compare ppo_clip with itself.
    if loss.name == "decoupled_ppo" and objective.proximal == "behavior":
        yield (
            "loss: decoupled_ppo multiplies by pi_prox / pi_behavior, which is 1 with proximal:"
            " behavior, so it would equal ppo_clip; set proximal: recompute (or another), or loss:"
            " ppo_clip"
        )
    if objective.reference is not None and not objective.needs_reference:
        yield (
            "reference is set, but nothing compares with it: add kl, or remove reference (loss:"
            f" {loss.name} does not use it)"
        )


def _aggregation(objective: ObjectiveConfig) -> Iterator[str]:
    used, loss = objective.aggregation_used, objective.loss
    if (used == "seq-mean") != (loss.level == "sequence"):
        own = loss.default_aggregation
        yield (
            f"aggregation: {used} does not fit loss: {loss.name}, which is defined per"
            f" {loss.level}; remove aggregation (the default is {own})"
        )
    # Neither setting has a meaning without the other.
    if (used == "seq-mean-token-sum-norm") != (objective.norm_length is not None):
        yield (
            "norm_length and aggregation: seq-mean-token-sum-norm need each other; got"
            f" aggregation={used}, norm_length={objective.norm_length}"
        )


def _advantage(objective: ObjectiveConfig) -> Iterator[str]:
    advantage = objective.advantage
    if advantage.reads_values and objective.value is None:
        yield f"advantage: {advantage.name} reads the estimates of a value head; add value"
    if objective.value is not None and not advantage.reads_values:
        yield (
            f"value is set, but advantage: {advantage.name} computes no returns for the value head;"
            " set advantage: gae, or remove value"
        )
    # Both terms must come from one policy: otherwise the squared score norm may be negative.
    if isinstance(advantage, OtbAdvantage) and objective.proximal != "recompute":
        yield (
            "advantage: otb computes 1 - 2 p + sum p^2, with p of the proximal policy and the sum"
            " of the trained policy, and these policies differ with proximal:"
            f" {objective.proximal}; set proximal: recompute"
        )
    if isinstance(advantage, OpobAdvantage):
        yield from _opob(objective, advantage)


def _opob(objective: ObjectiveConfig, advantage: OpobAdvantage) -> Iterator[str]:
    loss, used = objective.loss, objective.aggregation_used
    # The baseline is optimal for gradients A * s with s independent of A (arXiv 2602.17616).
    if loss.uses_advantage and not loss.linear_in_advantage:
        yield (
            "advantage: opob minimises the variance of gradients that are proportional to the"
            f" advantage, and the gradient of loss: {loss.name} is not, because the loss clips or"
            " weights by the advantage; set a loss such as reinforce"
        )
    signed = [correction.name for correction in objective.corrections if correction.uses_advantage]
    # In exact mode advantages follow from gradients, so corrections run before they exist.
    if signed and advantage.mode == "exact":
        yield (
            f"corrections {signed} read the sign of the advantage, which advantage: opob, mode:"
            " exact computes only after the backward passes; remove them, or set mode: cheap"
        )
    if advantage.mode == "cheap" and used not in ("seq-mean", "seq-mean-token-mean"):
        yield (
            "advantage: opob, mode: cheap estimates the score gradient of a mean over the"
            f" response's tokens, and aggregation: {used} computes another mean; set aggregation:"
            " seq-mean-token-mean, or mode: exact"
        )


def _proximal(objective: ObjectiveConfig) -> Iterator[str]:
    # A setting without effect would be ignored silently.
    default = ObjectiveConfig.model_fields["ewma_decay"].default
    if objective.proximal != "ewma" and objective.ewma_decay != default:
        yield (
            f"ewma_decay: {objective.ewma_decay:g} is the decay of proximal: ewma, and proximal is"
            f" {objective.proximal}; set proximal: ewma, or remove ewma_decay"
        )


def _corrections(objective: ObjectiveConfig) -> Iterator[str]:
    loss = objective.loss
    names = [correction.name for correction in objective.corrections]
    if names and loss.name == "sft":
        yield (
            f"corrections {names} compare with the sampling policy, and loss: sft learns from given"
            " responses, which no policy sampled; remove them"
        )
    idle = [
        correction.name
        for correction in objective.corrections
        if correction.compares_prox_with_behavior
    ]
    if idle and objective.proximal == "behavior":
        yield (
            f"corrections {idle} read pi_prox / pi_behavior, which is 1 with proximal: behavior;"
            " set proximal: recompute (or another), or remove the corrections"
        )
    idle = [
        correction.name
        for correction in objective.corrections
        if correction.compares_current_with_prox
    ]
    if idle and objective.proximal == "recompute" and objective.steps_per_batch == 1:
        yield (
            f"corrections {idle} read pi / pi_prox, which is 1 with proximal: recompute and one"
            " optimizer step per batch; set proximal: behavior (or another), set minibatches or"
            " epochs above 1, or remove the corrections"
        )
    # One importance weight per ratio: a second weight would square the ratio.
    for correction in objective.corrections:
        if correction.weighs and loss.against_behavior:
            yield (
                f"correction {correction.name} multiplies by an importance ratio that loss:"
                f" {loss.name} already contains (its ratio is to the behaviour policy); remove one"
                " of the two"
            )
        if correction.per_token and loss.level == "sequence":
            yield (
                f"correction {correction.name} computes a factor per token, and loss: {loss.name}"
                " one number per sequence; set the correction's level to a sequence level"
            )

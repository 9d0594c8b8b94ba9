"""Settings of the objective: an advantage, a loss, corrections in order, and the
terms added to the loss; and the combinations of them that are refused.

Each conflict states the combination, the reason, and the fix. The facts about each method are class
attributes of its settings model, so a new method brings its own.
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
    """A penalty on leaving the reference policy (estimators: joschu.net/blog/kl-approx.html).
    docs/objectives.md has the gradient of each estimator."""

    coef: PositiveFloat
    """Factor of the penalty."""
    estimator: Literal["k1", "k2", "k3"] = "k3"
    """Per token, with l = log pi/pi_ref: k1 = l; k2 = l^2 / 2; k3 = exp(-l) - 1 + l."""
    where: Literal["loss", "reward"] = "loss"
    """Added to the loss, with gradient; or taken from the reward of each token, without. k1 goes
    with `reward` alone: its gradient in the loss is 0 in the mean."""
    weight: Literal["none", "truncated"] = "none"
    """`truncated`: each token's estimate is multiplied by min(w, cap), w = pi / mu without
    gradient, since stale tokens were not sampled by the policy whose divergence is estimated.
    `none`: it is not, as in released code."""
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
        # d/dtheta E[log pi - log ref] is E[grad log pi] = 0 under the sampling distribution.
        if self.estimator == "k1" and self.where == "loss":
            raise ValueError(
                "estimator: k1 in the loss does not pull towards the reference: its gradient, that"
                " of log pi, is 0 in the mean, whatever the reference is; set where: reward, or"
                " estimator: k2 (the gradient of KL(pi || ref)) or k3 (that of KL(ref || pi))"
            )
        # A setting without effect would be ignored silently.
        if self.weight == "none" and self.cap != type(self).model_fields["cap"].default:
            raise ValueError(
                f"cap: {self.cap:g} bounds the weights of weight: truncated, and weight is none;"
                " set weight: truncated, or remove cap"
            )
        return self


class ReferenceConfig(Strict):
    """Reference policy of KL penalties and trajectory balance: the run's first weights, kept in
    host memory.

    A reference that moves is in the checkpoint. A fixed one is read from its directory again, so a
    resumed run compares with the same weights as before."""

    path: Path | None = None
    """A Hugging Face model directory of the same shape; null: the model the run starts from."""
    refresh_every: PositiveInt | None = None
    """Optimizer steps after which the reference becomes the current weights; null never."""
    ema: Annotated[float, Field(gt=0.0, lt=1.0)] | None = None
    """Decay per step of an exponential average of the weights, which then is the reference; null
    never."""

    @model_validator(mode="after")
    def _one_way_to_move(self) -> ReferenceConfig:
        # A refresh would overwrite the average, whose history is then lost.
        if self.refresh_every is not None and self.ema is not None:
            raise ValueError(
                "reference: refresh_every and ema are two ways to move it; set one of them to null"
            )
        return self


class ValueConfig(Strict):
    """The value head (advantage `gae`): one linear output on the policy's last hidden state,
    trained along."""

    coef: PositiveFloat = 0.5
    """Factor of its squared error, averaged over trained tokens, in the loss."""
    clip: PositiveFloat | None = None
    """The value moves at most this far from its estimate at the batch's start (PPO's value
    clipping); null does not clip. With one optimizer step per batch the two are the same, and
    nothing is clipped."""
    detach: bool = False
    """True: the head learns from the hidden states without changing them."""


class OverlongConfig(Strict):
    """DAPO's soft overlong punishment (arXiv 2503.14476, eq. 13): 0 up to max_length - buffer, then
    falling linearly."""

    max_length: PositiveInt
    """Response tokens at which the penalty is complete. Tokens of an environment are not
    counted: the policy did not choose them."""
    buffer: PositiveInt
    """Tokens before max_length over which the penalty grows."""
    penalty: PositiveFloat = 1.0
    """Penalty at max_length and beyond, subtracted from the reward."""


class ObjectiveConfig(Strict):
    """Training objective: advantage, loss, corrections and penalties."""

    minibatches: PositiveInt = 1
    """Number of parts of a batch, each one optimizer step, of whole groups drawn at random by
    the version; at most flow.prompts_per_step. Weights are published after the last."""
    epochs: PositiveInt = 1
    """Number of passes over each batch, with the same minibatches in the same order."""
    advantage: Advantage = GrpoAdvantage()
    loss: Loss = PpoClipLoss()
    # A tuple: the order is part of the method.
    corrections: tuple[Correction, ...] = ()
    """Applied in this order; each sees what the ones before it kept."""
    renormalize: bool = False
    """False: rejected tokens count as zeros, and nothing else weighs more. True: they leave the
    denominators at the level that the aggregation divides at: tokens of the batch for `token-mean`;
    tokens of each sequence, and then the sequences that keep any, for `seq-mean-token-mean`."""
    proximal: Proximal = "behavior"
    """The policy a ratio r is taken against. `behavior`: the sampling policy. `recompute`: the
    trainer's weights at the start of the batch (with one optimizer step per batch the current ones,
    so r is 1). `loglinear`: between the two in log space, by the token's lag d, at 1 - 1/d (A-3PO).
    `ewma`: an exponential average of the trainer's weights. `snapshot`: the trainer's own log-probs
    under the version that sampled the token (arXiv 2605.12070)."""
    ewma_decay: Annotated[float, Field(gt=0.0, lt=1.0)] = 0.9
    """Decay per step of `proximal: ewma`."""
    snapshots: PositiveInt = 8
    """Past weight versions that `proximal: snapshot` and the control `displacement` keep in host
    memory and in checkpoints; at least the largest lag + 1."""
    aggregation: Aggregation | None = None
    """Aggregation of the token losses, with denominators from the whole optimizer-step batch.
    Null: the loss's own."""
    norm_length: PositiveInt | None = None
    """Constant divisor per sequence for `seq-mean-token-sum-norm` (Dr.GRPO); tokens."""
    kl: KlConfig | None = None
    entropy_bonus: NonNegativeFloat = 0.0
    """Factor of the mean token entropy, which is subtracted from the loss."""
    reference: ReferenceConfig | None = None
    """Null: kept only where something needs it."""
    value: ValueConfig | None = None
    """The value head; only with advantage `gae`, which needs it."""
    overlong: OverlongConfig | None = None
    """Shapes the reward by length, before advantages."""

    @property
    def steps_per_batch(self) -> int:
        """Optimizer steps from one version of the weights to the next."""
        return self.minibatches * self.epochs

    @property
    def aggregation_used(self) -> Aggregation:
        # The loss knows the aggregation of its paper; the user's choice wins.
        return self.aggregation if self.aggregation is not None else self.loss.default_aggregation

    @property
    def needs_reference(self) -> bool:
        return self.kl is not None or self.loss.uses_reference

    @model_validator(mode="after")
    def _pieces_fit(self) -> ObjectiveConfig:
        if "advantage" not in self.model_fields_set and not self.loss.uses_advantage:
            # Pydantic has no validator that may fill a field of a frozen model.
            self.__dict__["advantage"] = NoAdvantage()  # past the lock of a frozen model
        for reason in objective_conflicts(self):
            raise ValueError(reason)
        return self


def objective_conflicts(objective: ObjectiveConfig) -> Iterator[str]:
    """Reasons why the parts of this objective do not compose; empty if they do."""
    loss, advantage = objective.loss, objective.advantage
    # In the order in which a batch meets them: aggregation, advantage, corrections, loss.
    yield from _aggregation(objective)
    # An advantage that nothing reads would be ignored silently.
    if not loss.uses_advantage and advantage.name != "none":
        yield (
            f"loss: {loss.name} reads no advantage, so advantage: {advantage.name} would have no"
            " effect; set advantage: none"
        )
    yield from _advantage(objective)
    yield from _corrections(objective)
    if loss.name == "sft" and objective.kl is not None and objective.kl.ratios:
        yield (
            "kl.weight: truncated weighs by pi / pi_behavior, and loss: sft learns from given"
            " responses, which no policy sampled; set kl.weight: none"
        )
    if loss.uses_reference and objective.reference is None:
        yield (
            f"loss: {loss.name} compares with a reference policy: add `reference: {{}}` (the run's"
            " first weights, kept in host memory), or name another model or a refresh there"
        )
    # Not wrong but another method: a study would compare ppo_clip with itself.
    if loss.name == "decoupled_ppo" and objective.proximal == "behavior":
        yield (
            "loss: decoupled_ppo weighs by pi_prox / pi_behavior, which is 1 with proximal:"
            " behavior, so it would be ppo_clip; set proximal: recompute (or another), or loss:"
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
            f" {loss.level}; leave aggregation out (it is {own})"
        )
    # Neither has a meaning without the other.
    if (used == "seq-mean-token-sum-norm") != (objective.norm_length is not None):
        yield (
            "norm_length and aggregation: seq-mean-token-sum-norm go together; "
            f"got aggregation={used}, norm_length={objective.norm_length}"
        )


def _advantage(objective: ObjectiveConfig) -> Iterator[str]:
    advantage = objective.advantage
    if advantage.reads_values and objective.value is None:
        yield f"advantage: {advantage.name} reads the estimates of a value head; add value"
    if objective.value is not None and not advantage.reads_values:
        yield (
            f"value is set, but advantage: {advantage.name} makes no returns for it to learn; set"
            " advantage: gae or remove it"
        )
    # Both terms of the squared score norm must come from one policy, or it may be negative.
    if isinstance(advantage, OtbAdvantage) and objective.proximal != "recompute":
        yield (
            "advantage: otb reads 1 - 2 p + sum p^2, with p of the proximal policy and the sum of"
            f" the policy in training; they are not the same with proximal: {objective.proximal};"
            " set proximal: recompute"
        )
    if isinstance(advantage, OpobAdvantage):
        yield from _opob(objective, advantage)


def _opob(objective: ObjectiveConfig, advantage: OpobAdvantage) -> Iterator[str]:
    loss, used = objective.loss, objective.aggregation_used
    # The optimal baseline is derived for gradients A * s, with s independent of A (2602.17616).
    if loss.uses_advantage and not loss.linear_in_advantage:
        yield (
            "advantage: opob minimises the variance of gradients that are proportional to the"
            f" advantage, and loss: {loss.name} clips or weighs by the advantage; set a loss that"
            " does not, like reinforce"
        )
    signed = [correction.name for correction in objective.corrections if correction.uses_advantage]
    # In this mode advantages follow from the gradients, so they do not exist yet.
    if signed and advantage.mode == "exact":
        yield (
            f"corrections {signed} read the sign of the advantage, which advantage: opob, mode:"
            " exact knows only after the backward passes; remove them, or set mode: cheap"
        )
    if advantage.mode == "cheap" and used not in ("seq-mean", "seq-mean-token-mean"):
        yield (
            "advantage: opob, mode: cheap estimates the score gradient of a mean over the"
            f" response's tokens, and aggregation: {used} computes another mean; set aggregation:"
            " seq-mean-token-mean, or mode: exact"
        )


def _corrections(objective: ObjectiveConfig) -> Iterator[str]:
    loss = objective.loss
    names = [correction.name for correction in objective.corrections]
    if names and loss.name == "sft":
        yield (
            f"corrections {names} compare with the policy that sampled, and loss: sft learns from"
            " given responses; remove them"
        )
    idle = [
        correction.name
        for correction in objective.corrections
        if correction.compares_prox_with_behavior
    ]
    if idle and objective.proximal == "behavior":
        yield (
            f"corrections {idle} look at pi_prox / pi_behavior, which is 1 with proximal: behavior;"
            " set proximal: recompute (or another), or remove the corrections"
        )
    idle = [
        correction.name
        for correction in objective.corrections
        if correction.compares_current_with_prox
    ]
    if idle and objective.proximal == "recompute" and objective.steps_per_batch == 1:
        yield (
            f"corrections {idle} look at pi / pi_prox, which is 1 with proximal: recompute, as each"
            " batch is one step; set proximal: behavior (or another), minibatches or epochs above"
            " 1, or remove the corrections"
        )
    # One importance weight per ratio: a second one would square it.
    for correction in objective.corrections:
        if correction.weighs and loss.against_behavior:
            yield (
                f"correction {correction.name} weighs by an importance ratio that loss: {loss.name}"
                " already holds (its ratio is against the behaviour policy); remove one of the two"
            )
        if correction.per_token and loss.level == "sequence":
            yield (
                f"correction {correction.name} gives each token its own factor, and loss:"
                f" {loss.name} is one number per sequence; use its sequence level"
            )

"""A configured objective: the columns of a batch that it needs, its decisions, and the loss of any
part of the batch.

    needs        per-token columns of the whole batch that are precomputed before training (often
                 none)
    prepare      once per batch: reward shaping, the proximal policy, advantages
    needs_again  the columns that an optimizer step needs under its own weights, if earlier steps
                 have changed the weights since the batch began
    decide       once per optimizer step, from its whole minibatch: corrections that need all of it,
                 the loss's decisions, denominators
    loss         per micro-batch, with gradient: loss, KL penalty, entropy bonus, value loss

Invariants:
- every quantity that depends on more than one sequence is computed in `prepare` and `decide`, in
  the same way on every rank, in float64;
- for every division of a minibatch into micro-batches, the sum of `loss` is the same loss with the
  same gradient;
- samples whose reward failed have no effect on group statistics, denominators or the loss;
- the whole batch is float64 on the CPU, in the order of the train batch, the same on every rank;
- numbers that were not precomputed are nan there, so that a method that forgot to request them
  cannot pass unnoticed.

Denominators are those of the whole optimizer-step batch, over all data-parallel ranks and
micro-batches. For every division of the batch into micro-batches, the sum of `aggregate` is
therefore the loss of the batch, and its gradient does not depend on the division. No sum is ever
divided by a padded width.

A rejected token counts as a zero. With `renormalize` it does not count: each division of the
aggregation averages the kept terms over the kept terms.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from typing import Any, Literal

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from megatron_async_rl.config.losses import Aggregation
from megatron_async_rl.config.objective import ObjectiveConfig
from megatron_async_rl.config.settings_model import method_of
from megatron_async_rl.objectives.batch import (
    PER_SEQUENCE,
    BatchDecision,
    SequenceLoss,
    TokenBatch,
    TokenLoss,
    on_device,
)
from megatron_async_rl.objectives.method import (
    AdvantageMethod,
    CorrectionMethod,
    LossMethod,
    TokenColumn,
)
from megatron_async_rl.objectives.off_policy import (
    columns_for_proximal,
    proximal_logp,
    proximal_metrics,
)
from megatron_async_rl.objectives.terms import (
    kl_penalty,
    shaped_rewards,
    token_kl,
    token_rewards,
    value_loss,
    value_metrics,
)
from megatron_async_rl.samples.rank_batch import RankBatch


@dataclass(frozen=True)
class Denominators:
    """Counts over the optimizer-step batch: trained tokens, and sequences with at least one trained
    token. kept: with `renormalize`, the same counts of the tokens and sequences that no correction
    has rejected; the loss then divides by them."""

    tokens: int
    sequences: int
    kept: Denominators | None = None

    @classmethod
    def of(cls, batch: TokenBatch, *, renormalize: bool = False) -> Denominators:
        """Return the counts of a whole batch."""
        counted = batch.lengths()
        # Counted over the whole batch, before it is cut into micro-batches.
        kept = cls.of(batch.replace(mask=batch.kept())) if renormalize else None
        return cls(int(counted.sum()), int((counted > 0).sum()), kept)

    @property
    def of_all(self) -> Denominators:
        """Return the denominators of terms without corrections, such as penalties: all tokens and
        sequences count."""
        return replace(self, kept=None)

    @property
    def undivided(self) -> Denominators:
        """Return denominators of 1, with which losses are sums; `divisor` then divides them."""
        return Denominators(1, 1, None if self.kept is None else self.kept.undivided)

    def divisor(self, aggregation: Aggregation) -> int:
        """Return the divisor of the sum over all sequences, which `aggregate` applies."""
        counted = self if self.kept is None else self.kept
        return max(counted.tokens if aggregation == "token-mean" else counted.sequences, 1)


def aggregate(
    losses: TokenLoss | SequenceLoss,
    batch: TokenBatch,
    aggregation: Aggregation,
    denominators: Denominators,
    norm_length: int | None = None,
) -> Tensor:
    """Return this micro-batch's part of the batch loss, per sequence: [S], to be summed.

    With l the weighted token loss, m the mask, N the trained tokens and B the sequences of the
    optimizer-step batch: `token-mean` sum l m / N; `seq-mean-token-sum` sum_s (sum_t l m) / B;
    `seq-mean-token-mean` sum_s (mean_t l) / B (the original GRPO); `seq-mean-token-sum-norm` sum_s
    (sum_t l m / norm_length) / B (Dr.GRPO, arXiv 2503.20783); `seq-mean` sum_s l_s / B for the
    losses that are one number l_s per sequence, weighted by the mean of its tokens' weights. With
    `denominators.kept`, N, B and the means over t count only tokens that are not rejected.
    """
    if denominators.kept is not None:
        batch, denominators = batch.replace(mask=batch.kept()), denominators.kept
    if isinstance(losses, SequenceLoss):
        weighted = torch.where(
            # A sequence without trained tokens has no loss, even if its formula gives nan.
            batch.lengths() > 0,
            losses.loss * batch.sequence_mean(batch.weights),
            0.0,
        )
        return weighted / max(denominators.sequences, 1)
    sums = batch.sequence_sum(losses.loss * batch.weights)
    if aggregation == "token-mean":
        # An empty batch gives 0 and not nan.
        return sums / max(denominators.tokens, 1)
    per_sequence = sums / max(denominators.sequences, 1)
    if aggregation == "seq-mean-token-sum":
        return per_sequence
    if aggregation == "seq-mean-token-mean":
        return per_sequence / batch.lengths().clamp(min=1)
    if aggregation != "seq-mean-token-sum-norm":
        raise ValueError(
            f"aggregation {aggregation} is for losses per sequence; this one is per token"
        )
    if norm_length is None:
        raise ValueError(
            "aggregation seq-mean-token-sum-norm needs norm_length: the constant number of tokens"
            " to divide by"
        )
    return per_sequence / norm_length


TargetKind = Literal["batch", "tokens", "sequences"]
"""A field of the TokenBatch, or a decision per token or per sequence."""
OwnedNumbers = Mapping[tuple[TargetKind, str], Tensor]
"""Numbers of a step's samples, in order, and of the tokens of one owner's samples. Each tensor ends
with a 0, for padding."""


@dataclass(frozen=True, eq=False)
class StepTargets:
    """One optimizer step. samples: the valid ones of its minibatch. whole: their tokens, in order.

    corrected: True if `whole.weights` contains the corrections; otherwise each micro-batch computes
    its own.
    """

    samples: RankBatch
    whole: TokenBatch
    denominators: Denominators
    corrected: bool
    # Caches: several passes of a step read the same numbers.
    _gathered: dict[int, OwnedNumbers] = field(default_factory=dict, init=False, repr=False)
    _placed: dict[int, OwnedNumbers] = field(default_factory=dict, init=False, repr=False)

    @property
    def metrics(self) -> Mapping[str, float]:
        """Numbers of the loss's decisions, for the log."""
        return self.whole.decided.scalars

    def gather(self, owner: int) -> OwnedNumbers:
        """Return, on the host, the numbers from which micro-batches of the data-parallel rank
        `owner` select theirs. Called before the micro-batches run, so that none waits for it."""
        if owner not in self._gathered:
            self._gathered[owner] = self._numbers_of(owner)
        return self._gathered[owner]

    def micro_batch(
        self,
        owner: int,
        tokens: Tensor,
        samples: Tensor,
        sequence: Tensor,
        *,
        dtype: torch.dtype,
    ) -> TokenBatch:
        """Return the targets of one micro-batch on the device of `tokens`, floats in `dtype`.

        tokens: [N] int64, indices into the tokens of the samples that `owner` trains. samples: [S]
        int64, indices into the step's samples. -1 in both is the padding of a micro-batch without
        samples. sequence: [N] int64, each token's index into `samples`.

        `logp` (and `logp_prox`, if it was not precomputed) is nan until the caller replaces it.
        """
        if owner not in self._placed:
            # Uploaded together, and once for all passes of the step: an upload per micro-batch
            # would make the host wait for the device each time.
            self._placed[owner] = _placed(self.gather(owner), dtype, tokens.device)
        taken: dict[TargetKind, dict[str, Any]] = {"batch": {}, "tokens": {}, "sequences": {}}
        for (kind, name), values in self._placed[owner].items():
            taken[kind][name] = values[samples if _by_sequence(kind, name) else tokens]
        taken["batch"] |= {"sequence": sequence, "sequences": len(samples)}
        decided = BatchDecision(taken["tokens"], taken["sequences"], self.whole.decided.scalars)
        return TokenBatch(**taken["batch"], decided=decided)

    def _numbers_of(self, owner: int) -> OwnedNumbers:
        whole, samples = self.whole, self.samples
        # By token: the model of this rank reads only these.
        owned = torch.from_numpy(samples.owner[samples.rows] == owner)
        kinds: dict[TargetKind, Mapping[str, Tensor]] = {
            # A part of a group would have wrong statistics, so micro-batches have no `group`.
            "batch": {
                name: each for name, each in whole.tensors() if name not in ("group", "sequence")
            },
            "tokens": whole.decided.tokens,
            "sequences": whole.decided.sequences,
        }
        numbers: dict[tuple[TargetKind, str], Tensor] = {}
        for kind, tensors in kinds.items():
            for name, each in tensors.items():
                if not _by_sequence(kind, name):
                    each = each[owned]
                # The index -1 of padding reads the appended 0.
                numbers[kind, name] = torch.cat((each, each.new_zeros((1, *each.shape[1:]))))
        return numbers


def _placed(numbers: OwnedNumbers, dtype: torch.dtype, device: torch.device) -> OwnedNumbers:
    return on_device(
        {
            key: each.to(dtype) if each.is_floating_point() else each
            for key, each in numbers.items()
        },
        device,
    )


def _by_sequence(kind: TargetKind, name: str) -> bool:
    return kind == "sequences" or (kind == "batch" and name in PER_SEQUENCE)


def valid_samples(batch: RankBatch) -> RankBatch:
    """Return the samples that are trained on, in the batch's order.

    Raises ValueError for a reward that is not finite and not marked as failed.
    """
    # A single nan would make every advantage of its group nan.
    strange = batch.valid & ~np.isfinite(batch.rewards)
    if strange.any():
        first = int(strange.argmax())
        raise ValueError(
            f"sample {batch.ids[first].as_py()!r} has reward {batch.rewards[first]}; a reward that"
            " is not finite must set reward_error"
        )
    return batch if batch.valid.all() else batch.select(np.flatnonzero(batch.valid))


def whole_batch(samples: RankBatch, precomputed: Mapping[str, Tensor]) -> TokenBatch:
    """Return [S] samples as one TokenBatch: rewards as given, advantages 0, weights the samples'
    own, logp nan if it was not precomputed.

    precomputed: [N] each, in the samples' order. `step_rewards` is None if no sample has any.
    """

    def exact(values: NDArray[Any]) -> Tensor:
        return torch.tensor(values, dtype=torch.float64)

    sequence = torch.tensor(samples.rows)
    behavior = exact(samples.behavior_logprobs)
    # nan, not 0, so that a column that is read without being requested is noticed.
    unknown = torch.full_like(behavior, float("nan"))
    return TokenBatch(
        logp=precomputed["logp"].double() if "logp" in precomputed else unknown,
        logp_prox=unknown,
        logp_behavior=behavior,
        advantages=torch.zeros_like(behavior),
        mask=exact(samples.loss_mask),
        weights=exact(samples.weights)[sequence],
        sequence=sequence,
        sequences=len(samples),
        rewards=exact(samples.rewards),
        step_rewards=None if samples.step_rewards is None else exact(samples.step_rewards),
        lag=torch.tensor(samples.version - samples.versions, dtype=torch.int64),
        group=torch.tensor(samples.group),
        **{
            name: precomputed[name].double()
            for name in ("logp_ref", "sum_p_squared", "values")
            if name in precomputed
        },
    )


MOVING: frozenset[TokenColumn] = frozenset({"logp", "sum_p_squared"})
"""Columns of the trained weights that an optimizer step changes. `values` remain those from the
beginning of the batch, because value clipping is relative to them."""


@dataclass(frozen=True, eq=False)
class BatchLoss:
    """Loss of a micro-batch. parts: [S] with gradient, to be summed over the batch. clipped,
    rejected: [N] bool.

    terms: [S] each, detached: the terms in `parts` besides the loss (`kl`, `entropy`, `value`).
    """

    parts: Tensor
    clipped: Tensor
    rejected: Tensor
    terms: Mapping[str, Tensor]


class Objective:
    def __init__(self, config: ObjectiveConfig) -> None:
        self.config = config
        self._advantage: AdvantageMethod = method_of(config.advantage)
        self._loss: LossMethod = method_of(config.loss)
        self._corrections: list[tuple[CorrectionMethod, Any]] = [
            (method_of(one), one) for one in config.corrections
        ]
        # Denominators of kept tokens, and decisions of a loss from log-probs, need every correction
        # of the whole batch.
        decides = "logp" in self._loss.needs(config.loss)
        self._correct_whole = config.renormalize or any(
            decides or method.whole(c) for method, c in self._corrections
        )
        self.needs = self._needs()
        self.needs_again = self._of_a_step() & MOVING

    def prepare(self, samples: RankBatch, precomputed: Mapping[str, Tensor]) -> TokenBatch:
        """Return all values that stay the same while a batch is trained on: its tokens with
        rewards, proximal policy and advantages; the same on every rank.

        samples: the valid ones. precomputed: the columns of `needs`, [N] each, over the samples'
        tokens in order.
        """
        config = self.config
        whole = whole_batch(samples, precomputed)
        if not len(samples):
            return whole
        whole = whole.replace(
            logp_prox=proximal_logp(whole, config.proximal, precomputed.get("logp_prox"))
        )
        # Order: shaping, then the KL penalty, then advantages, which read the result of both.
        whole = whole.replace(rewards=shaped_rewards(whole, samples.trained, config))
        penalty = kl_penalty(whole, config.kl)
        whole = whole.replace(token_rewards=token_rewards(whole, penalty))
        # Sequence estimators read the penalty from the reward, token estimators per token.
        whole = whole.replace(rewards=whole.require("rewards") - whole.sequence_sum(penalty))
        advantages = self._advantage.function(whole, config.advantage)
        whole = whole.replace(advantages=advantages.tokens)
        if advantages.returns is not None:
            whole = whole.replace(returns=advantages.returns)
        return whole

    def metrics(self, whole: TokenBatch, precomputed: Mapping[str, Tensor]) -> dict[str, float]:
        """Return metrics of a prepared batch, for the log."""
        return {**value_metrics(whole), **proximal_metrics(whole, precomputed.get("logp_prox"))}

    def decide(
        self,
        samples: RankBatch,
        prepared: TokenBatch,
        current: Mapping[str, Tensor] | None = None,
    ) -> StepTargets:
        """Return all values of an optimizer step that need no gradients; the same on every rank.

        samples, prepared: a minibatch, or the whole batch. current: the columns of `needs_again`
        under the step's own weights; they replace those from the beginning of the batch.
        """
        whole = prepared.replace(
            # float64, like all values of a whole batch.
            **{name: column.double() for name, column in (current or {}).items()}
        )
        if len(samples):
            if self._correct_whole:
                # Before the loss decides: a rejected token has no influence on its thresholds.
                whole = self._corrected(whole)
            if self._loss.decide is not None:
                whole = whole.replace(decided=self._loss.decide(whole, self.config.loss))
        return StepTargets(
            samples=samples,
            whole=whole,
            denominators=Denominators.of(whole, renormalize=self.config.renormalize),
            corrected=self._correct_whole,
        )

    @property
    def adds_terms(self) -> bool:
        """True if a term is added to the loss."""
        config = self.config
        return (
            bool(config.entropy_bonus)
            or config.value is not None
            or (config.kl is not None and config.kl.where == "loss")
        )

    def loss(
        self,
        batch: TokenBatch,
        denominators: Denominators,
        *,
        corrected: bool = True,
        with_terms: bool = True,
    ) -> BatchLoss:
        """Return the loss of one micro-batch whose `logp` carries the gradient.

        `logp_prox` may still be nan if the batch is one optimizer step: it is set here, exactly, to
        the detached `logp`. corrected: True if the batch's weights contain the corrections.
        with_terms: False leaves out the terms that are added to the loss.
        """
        config = self.config
        if config.steps_per_batch == 1 and config.proximal in ("recompute", "loglinear"):
            # With one optimizer step pi is pi_prox: exact, and without another pass. Detached,
            # because no gradient may flow through the proximal policy.
            current = batch.replace(logp=batch.logp.detach())
            batch = batch.replace(logp_prox=proximal_logp(current, config.proximal, None))
        # Per micro-batch only if no correction needs the whole batch.
        if not corrected:
            batch = self._corrected(batch)
        losses = self._loss.function(batch, config.loss)
        used = config.aggregation_used
        parts = aggregate(losses, batch, used, denominators, config.norm_length)
        terms = {}
        for name, coefficient, values in self._terms(batch) if with_terms else ():
            # A term per token is averaged over tokens even if the loss is per sequence. Corrections
            # do not weight it.
            plain = batch.replace(weights=torch.ones_like(batch.weights))
            average = "token-mean" if used == "seq-mean" else used
            term = coefficient * aggregate(
                TokenLoss(values, losses.clipped),
                plain,
                average,
                denominators.of_all,
                config.norm_length,
            )
            parts, terms[name] = parts + term, term.detach()
        return BatchLoss(parts, losses.clipped, (batch.weights == 0) & (batch.mask > 0), terms)

    def _terms(self, batch: TokenBatch) -> list[tuple[str, float, Tensor]]:
        """Return (name, factor, [N] values with gradient) of each term added to the loss."""
        config, found = self.config, []
        if config.kl is not None and config.kl.where == "loss":
            found.append(("kl", config.kl.coef, token_kl(batch, config.kl)))
        if config.entropy_bonus:
            found.append(("entropy", -config.entropy_bonus, batch.require("entropy")))
        if config.value is not None:
            found.append(("value", config.value.coef, value_loss(batch, config.value)))
        return found

    def _corrected(self, batch: TokenBatch) -> TokenBatch:
        # Corrections are constants: with their gradient the objective would be another one.
        detached = batch.replace(logp=batch.logp.detach())
        for method, settings in self._corrections:
            detached = detached.replace(
                weights=detached.weights * method.function(detached, settings)
            )
        return batch.replace(weights=detached.weights)

    def _of_a_step(self) -> set[TokenColumn]:
        """Columns that corrections and loss read, besides the proximal policy's."""
        wanted: set[TokenColumn] = set(self._loss.needs(self.config.loss))
        if self._correct_whole:
            wanted.update(*(method.needs(c) for method, c in self._corrections))
        return wanted

    def _needs(self) -> frozenset[TokenColumn]:
        config = self.config
        wanted: set[TokenColumn] = {*self._advantage.needs(config.advantage), *self._of_a_step()}
        if self._correct_whole:
            wanted.add("logp_prox")
        if config.kl is not None:
            wanted |= {"logp_ref", "logp"} if config.kl.where == "reward" else {"logp_ref"}
        # With one optimizer step the other proximal policies follow from the step's own log-probs.
        precomputed = config.proximal in ("snapshot", "ewma") or config.steps_per_batch > 1
        if precomputed and (config.loss.uses_proximal or self._corrections):
            wanted.add("logp_prox")
        # Replaced by the columns from which the proximal policy is computed.
        if "logp_prox" in wanted:
            # Derived from other columns if the proximal policy is not a copy.
            wanted = (wanted - {"logp_prox"}) | columns_for_proximal(config.proximal)
        return frozenset(wanted)

"""A configured objective: the columns it needs of a batch, its decisions, and the loss of any part
of it.

    needs        which per-token columns of the whole batch are precomputed before training (often
                 none)
    prepare      once per batch: reward shaping, the proximal policy, advantages
    needs_again  the columns that an optimizer step needs under its own weights, where others
                 have moved them since the batch began
    decide       once per optimizer step, from its whole minibatch: corrections that need all of it,
                 the loss's decisions, denominators
    loss         per micro-batch, with gradient: loss, KL penalty, entropy bonus, value loss

Invariants:
- everything that depends on more than one sequence is decided in `prepare` and `decide`, on every
  rank alike, in float64;
- the sum of `loss` over any cut of a minibatch into micro-batches is the same loss with the same
  gradient.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from megatron_async_rl.config.objective import ObjectiveConfig
from megatron_async_rl.config.settings_model import method_of
from megatron_async_rl.objectives.aggregate import Denominators, aggregate
from megatron_async_rl.objectives.batch import TokenBatch, TokenLoss
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
from megatron_async_rl.objectives.targets import (
    BatchTargets,
    StepTargets,
    valid_samples,
    whole_batch,
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

MOVING: frozenset[TokenColumn] = frozenset({"logp", "sum_p_squared"})
"""Columns of the weights in training that an optimizer step changes. `values` stay those that the
batch began with: value clipping is from there."""


@dataclass(frozen=True, eq=False)
class BatchLoss:
    """parts: [S] with gradient, to be summed over the batch. clipped, rejected: [N] bool.

    terms: [S] each, detached: what of `parts` is not the loss itself (`kl`, `entropy`, `value`).
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
        self._correct_whole = config.renormalize or any(
            method.whole(c) for method, c in self._corrections
        )
        self.needs = self._needs()
        self.needs_again = self._of_a_step() & MOVING

    def prepare(self, batch: RankBatch, precomputed: Mapping[str, Tensor]) -> BatchTargets:
        """Everything that stays the same while a batch is trained on; the same on every rank.

        precomputed: the columns of `needs`, [N] each, over the tokens of the valid samples in the
        batch's order.
        """
        config = self.config
        samples = valid_samples(batch)
        whole = whole_batch(samples, precomputed)
        if len(samples):
            whole = whole.replace(
                logp_prox=proximal_logp(whole, config.proximal, precomputed.get("logp_prox"))
            )
            whole = whole.replace(rewards=shaped_rewards(whole, samples.trained, config))
            penalty = kl_penalty(whole, config.kl)
            whole = whole.replace(token_rewards=token_rewards(whole, penalty))
            whole = whole.replace(rewards=whole.require("rewards") - whole.sequence_sum(penalty))
            advantages = self._advantage.function(whole, config.advantage)
            whole = whole.replace(advantages=advantages.tokens)
            if advantages.returns is not None:
                whole = whole.replace(returns=advantages.returns)
        return BatchTargets(
            samples,
            whole,
            {**value_metrics(whole), **proximal_metrics(whole, precomputed.get("logp_prox"))},
        )

    def decide(
        self, batch: BatchTargets, current: Mapping[str, Tensor] | None = None
    ) -> StepTargets:
        """Everything about an optimizer step on `batch`, a minibatch or all of one, that does not
        need gradients; the same on every rank.

        current: the columns of `needs_again` under the step's own weights, replacing those with
        which the batch began.
        """
        whole = batch.whole.replace(
            **{name: column.double() for name, column in (current or {}).items()}
        )
        if len(batch.samples):
            if self._correct_whole:
                whole = self._corrected(whole)
            if self._loss.decide is not None:
                whole = whole.replace(decided=self._loss.decide(whole, self.config.loss))
        return StepTargets(
            samples=batch.samples,
            whole=whole,
            denominators=Denominators.of(whole, renormalize=self.config.renormalize),
            corrected=self._correct_whole,
            metrics=whole.decided.scalars,
        )

    @property
    def adds_terms(self) -> bool:
        """True when something is added to the loss."""
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
        """Loss of one micro-batch whose `logp` carries the gradient.

        `logp_prox` may still be nan where a batch is one optimizer step: it is filled in here,
        exactly, from the detached `logp`. corrected: the batch's weights already hold the
        corrections. with_terms: false leaves out the terms that are added to the loss.
        """
        config = self.config
        if config.steps_per_batch == 1 and config.proximal in ("recompute", "loglinear"):
            current = batch.replace(logp=batch.logp.detach())
            batch = batch.replace(logp_prox=proximal_logp(current, config.proximal, None))
        if not corrected:
            batch = self._corrected(batch)
        losses = self._loss.function(batch, config.loss)
        used = config.aggregation_used
        parts = aggregate(losses, batch, used, denominators, config.norm_length)
        terms = {}
        for name, coefficient, values in self._terms(batch) if with_terms else ():
            # A term per token is averaged over tokens even if the loss is per sequence. Corrections
            # do not weigh it.
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
        """(name, factor, [N] values with gradient) of each term added to the loss."""
        config, found = self.config, []
        if config.kl is not None and config.kl.where == "loss":
            found.append(("kl", config.kl.coef, token_kl(batch, config.kl)))
        if config.entropy_bonus:
            found.append(("entropy", -config.entropy_bonus, batch.require("entropy")))
        if config.value is not None:
            found.append(("value", config.value.coef, value_loss(batch, config.value)))
        return found

    def _corrected(self, batch: TokenBatch) -> TokenBatch:
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
        if "logp_prox" in wanted:
            wanted = (wanted - {"logp_prox"}) | columns_for_proximal(config.proximal)
        return frozenset(wanted)

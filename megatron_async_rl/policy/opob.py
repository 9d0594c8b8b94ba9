"""VCPO's minimum-variance baseline (arXiv 2602.17616) with measured score norms: advantage `opob`,
mode `exact`.

For a loss that is linear in the advantage, with L_i sequence i's part of the batch loss at
advantage 1:

    g_i = grad L_i        W_i = |g_i|^2        b = sum_i W_i R_i / sum_i W_i   over the group
    gradient of the step = sum_i (R_i - b) g_i
                         = sum_i (R_i - m) g_i - (b - m) sum_i g_i,   m the group's mean reward

so two accumulators and one backward pass per sequence suffice: b is known after a group's last
sequence.

L_i is the configured loss with its aggregation, denominators and corrections, so W belongs to the
estimator in use, with all its weights. With loss `reinforce` and correction `tis` at sequence level
it is the paper's W_i = min(w_i, cap)^2 |s_i|^2, where `cap` is the correction's. The advantage's
own `cap` is for mode `cheap`, which needs the number.

Invariants:
- a group is on one data-parallel rank, whole. Within the loop only ranks of the same model replica
  communicate, so replicas may have different numbers of sequences;
- W_i counts every parameter once: gradients of sequence-parallel norms, of embeddings tied over
  stages and of the sequence's parts on context-parallel ranks are summed first, and of copies one
  counts;
- the accumulators contain each rank's own, unsummed gradient: it is copied to Megatron's buffers,
  and one ordinary reduction follows;
- equal rewards in a group give a gradient of exactly zero.

Costs: one schedule call per sequence (over pipeline stages a bubble each), and two more gradient
buffers, in float32.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from functools import partial

import numpy as np
import torch
import torch.distributed as dist
from megatron.core.tensor_parallel import param_is_not_tensor_parallel_duplicate
from megatron.core.transformer.module import param_is_not_shared
from numpy.typing import NDArray
from torch import Tensor

from megatron_async_rl.config.advantages import OpobAdvantage
from megatron_async_rl.config.objective import ObjectiveConfig
from megatron_async_rl.gradients import dot
from megatron_async_rl.objectives.advantages.per_response import EPSILON
from megatron_async_rl.objectives.batch import TokenBatch, weighted_means
from megatron_async_rl.objectives.objective import Objective, StepTargets
from megatron_async_rl.policy import megatron_private
from megatron_async_rl.policy.batching import Batcher, MicroBatch, Minibatch
from megatron_async_rl.policy.forward import Consume, Schedule
from megatron_async_rl.policy.parallel import Layout
from megatron_async_rl.policy.parameters import trainable
from megatron_async_rl.policy.step import RecordedLoss, StepTable

Build = Callable[[tuple[int, ...]], "MicroBatch"]
"""Function from sample indices to their micro-batch."""


class OpobUnsupported(ValueError):
    """A sequence's gradient cannot be measured with this layout or setting."""


@dataclass(frozen=True, eq=False)
class Measured:
    """Measurements of a batch: [S] float64 each, on every rank, in the order of the samples.

    norms: |g_i|. baselines: b of the sequence's group. advantages: the factors of g_i.
    """

    norms: Tensor
    baselines: Tensor
    advantages: Tensor

    def metrics(self, whole: TokenBatch) -> dict[str, float]:
        means = whole.group_mean(whole.require("rewards"))
        return {
            "opob/baseline": float(self.baselines.mean()),
            "opob/shift": float((self.baselines - means).abs().mean()),
        }


def own_groups(
    owner: NDArray[np.int64], group: NDArray[np.int64], data_parallel_rank: int
) -> tuple[tuple[int, ...], ...]:
    """Return the groups of one data-parallel rank, each a tuple of sample indices."""
    mine = owner == data_parallel_rank
    return tuple(
        tuple(np.flatnonzero(mine & (group == number)).tolist())
        for number in np.unique(group[mine])
    )


def exact_baseline(
    objective: ObjectiveConfig, schedule: Schedule, layout: Layout
) -> ExactBaseline | None:
    """Return the measured baseline; null if the objective has none. Raises OpobUnsupported."""
    advantage = objective.advantage
    if not isinstance(advantage, OpobAdvantage) or advantage.mode != "exact":
        return None
    if not objective.loss.linear_in_advantage:
        raise OpobUnsupported(
            f"advantage opob, mode exact: the gradient of loss {objective.loss.name} is not linear"
            " in it"
        )
    return ExactBaseline(schedule, layout, normalize_std=advantage.normalize_std)


class ExactBaseline:
    """The measured baseline. Raises OpobUnsupported on construction."""

    def __init__(self, schedule: Schedule, layout: Layout, *, normalize_std: bool) -> None:
        self.schedule = schedule
        self.layout = layout
        self.normalize_std = normalize_std
        if layout.virtual_stages > 1:
            raise OpobUnsupported(
                "advantage opob, mode exact, runs one sequence at a time, and the interleaved"
                " schedule needs at least as many micro-batches as there are stages; set"
                " policy.parallel.virtual_pipeline: 1, or mode: cheap"
            )
        for chunk in schedule.chunks:
            if megatron_private.has_expert_buffers(chunk):
                raise OpobUnsupported(
                    "advantage opob, mode exact, does not sum experts over their own ranks; set"
                    " mode: cheap"
                )
            if chunk.ddp_config.overlap_grad_reduce:
                raise OpobUnsupported(
                    "advantage opob, mode exact, needs gradients that are reduced once, at the end"
                    " of a step"
                )

    def forward_backward(
        self, objective: Objective, targets: StepTargets, minibatch: Minibatch, batcher: Batcher
    ) -> tuple[StepTable, StepTargets, dict[str, float]]:
        """Compute, in the gradient buffers, the reduced gradient of a step whose advantages are
        known only after the backward passes. Return the step's table, the targets with those
        advantages, and metrics. Collective over the world."""
        samples, owner = targets.samples, self.layout.dp_rank
        table = StepTable(len(samples), self.layout.device)
        records = self.layout.records_outputs
        alone = RecordedLoss(
            objective,
            targets,
            table if records else None,
            owner=owner,
            advantage=1.0,
            with_terms=False,
        )
        measured = self.accumulate(targets, partial(batcher.build, samples), alone)
        table.weigh(measured.advantages)
        if objective.adds_terms:
            # Terms added to the loss do not depend on the advantage: at advantage 0 only they
            # remain.
            terms = StepTable(len(samples), self.layout.device)
            added = RecordedLoss(
                objective, targets, terms if records else None, owner=owner, advantage=0.0
            )
            self.schedule.accumulate(minibatch.micro_batches, added)
            table.add_terms(terms)
        self.schedule.reduce()
        whole = targets.whole
        weighed = whole.replace(advantages=whole.per_token(measured.advantages))
        return table, replace(targets, whole=weighed), measured.metrics(whole)

    def accumulate(self, targets: StepTargets, build: Build, consume: Consume) -> Measured:
        """Compute sum_i (R_i - b) g_i, not yet reduced, in the gradient buffers. Collective over
        the world.

        consume: a micro-batch's loss at advantage 1, without added terms.
        """
        whole, samples = targets.whole, targets.samples
        centred = whole.group_centred(whole.require("rewards"))
        # In float32, whatever the buffers' dtype, because each sequence is added to them.
        # total: sum_i (R_i - m) g_i. scores: sum_i g_i of one group, for the shift by (b - m).
        total, scores = (
            [torch.zeros_like(buffer, dtype=torch.float32) for buffer in self._buffers()]
            for _ in range(2)
        )
        rows = torch.zeros(3, len(samples), dtype=torch.float64, device=self.layout.device)
        # No world collective inside, because replicas have different numbers of groups.
        for members in own_groups(samples.owner, samples.group, self.layout.dp_rank):
            rows[:, list(members)] = self._group(
                members, centred[list(members)], build, consume, total, scores
            ).to(rows.device)
        for buffer, accumulated in zip(self._buffers(), total, strict=True):
            # Copied to Megatron's buffers, from which the one ordinary reduction follows.
            buffer.copy_(accumulated)
        if not (self.layout.records_outputs and self.layout.is_last_stage):
            # One rank per replica contributes, so the sum over the world contains each row once.
            rows.zero_()
        dist.all_reduce(rows, group=self.layout.world_group)
        norms, shifts, advantages = rows.cpu()
        return Measured(norms, whole.require("rewards") - centred + shifts, advantages)

    def _group(
        self,
        members: Sequence[int],
        rewards: Tensor,
        build: Build,
        consume: Consume,
        total: Sequence[Tensor],
        scores: Sequence[Tensor],
    ) -> Tensor:
        """Add a group's gradient to `total`; `scores` is scratch memory of the same shapes.
        rewards: centred.

        Returns [3, members]: |g_i|, b - m, advantages.
        """
        scale = 1.0 / (_unbiased_std(rewards) + EPSILON) if self.normalize_std else 1.0
        squares = torch.zeros(len(members), dtype=torch.float64, device=self.layout.device)
        for buffer in scores:
            buffer.zero_()
        for place, (index, reward) in enumerate(zip(members, rewards.tolist(), strict=True)):
            # The buffers contain one sequence's gradient at a time.
            self.schedule.clear()
            self.schedule.accumulate([build((index,))], consume)
            gradients = self._buffers()
            torch._foreach_add_(list(total), gradients, alpha=scale * reward)
            torch._foreach_add_(list(scores), gradients)
            # After `total` and `scores` have got the unsummed part: a norm needs the whole
            # gradient, but the accumulators need each rank's own part.
            if self.layout.cp_size > 1:
                for buffer in gradients:
                    dist.all_reduce(buffer, group=self.layout.cp_group)
            megatron_private.sum_over_replica(self.schedule.chunks, self.schedule.model.config)
            squares[place] = self._own_square()
        # Every rank of a replica computes the same b, so all shift `total` by the same factor.
        for process_group in (self.layout.tp_group, self.layout.pp_group):
            dist.all_reduce(squares, group=process_group)
        lowest, above = weighted_means(
            rewards, squares.cpu(), torch.zeros(len(members), dtype=torch.int64)
        )
        shift = lowest + above
        torch._foreach_add_(list(total), list(scores), alpha=-scale * float(shift))
        advantages = scale * (rewards - lowest - above)
        return torch.stack((squares.cpu().sqrt(), shift.expand(len(members)), advantages))

    def _buffers(self) -> list[Tensor]:
        return megatron_private.gradient_buffers(self.schedule.chunks)

    def _own_square(self) -> Tensor:
        """Return scalar float64: |g|^2 over the parameters that this rank counts for its
        replica."""
        square = torch.zeros((), dtype=torch.float64, device=self.layout.device)
        for chunk in self.schedule.chunks:
            for _, parameter in trainable(chunk):
                if param_is_not_shared(parameter) and param_is_not_tensor_parallel_duplicate(
                    parameter
                ):
                    square += dot(parameter.main_grad, parameter.main_grad)
        return square


def _unbiased_std(centred: Tensor) -> float:
    return float((centred.square().sum() / max(len(centred) - 1, 1)).sqrt())

"""VCPO's minimum-variance baseline (arXiv 2602.17616) with the score norms measured: advantage `opob`, mode `exact`.

For a loss that is linear in the advantage, with L_i sequence i's part of the batch loss at advantage 1:

    g_i = grad L_i        W_i = |g_i|^2        b = sum_i W_i R_i / sum_i W_i   over the group
    gradient of the step = sum_i (R_i - b) g_i = sum_i (R_i - m) g_i - (b - m) sum_i g_i,   m the group's mean reward

so two accumulators and one backward pass per sequence are enough: b is known after a group's last sequence.

L_i is the configured loss with its aggregation, denominators and corrections, so W is that of the estimator in use, whatever
weighs it. With loss `reinforce` and correction `tis` at sequence level it is W_i = min(w_i, cap)^2 |s_i|^2 of the paper, `cap`
being the correction's. The advantage's own `cap` is for mode `cheap`, which has to be told.

Invariants:
- a group lies on one data-parallel rank, whole. Within the loop only ranks of the same model replica talk to each other, so
  replicas may have different numbers of sequences;
- W_i counts every parameter once: gradients of sequence-parallel norms and of embeddings tied over stages are summed first, and
  of copies one counts;
- what is accumulated is each rank's own, unsummed gradient: it ends in Megatron's buffers, and one ordinary reduction follows;
- equal rewards in a group give a gradient of exactly zero.

Costs: one schedule call per sequence (over pipeline stages a bubble each), and two more gradient buffers.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

import torch
import torch.distributed as dist
from megatron.core.distributed.finalize_model_grads import (
    _allreduce_non_tensor_model_parallel_grads,
    _allreduce_word_embedding_grads,
)
from megatron.core.tensor_parallel import param_is_not_tensor_parallel_duplicate
from megatron.core.transformer.module import param_is_not_shared
from torch import Tensor

from megatron_async_rl.config.advantages import OpobAdvantage
from megatron_async_rl.controls.inner_product import dot
from megatron_async_rl.objectives.advantages.baseline import weighted_means
from megatron_async_rl.objectives.advantages.grpo import EPSILON

if TYPE_CHECKING:
    from megatron_async_rl.config.objective import ObjectiveConfig
    from megatron_async_rl.objectives.batch import TokenBatch
    from megatron_async_rl.objectives.targets import StepTargets
    from megatron_async_rl.policy.forward import Consume, Schedule
    from megatron_async_rl.policy.microbatch import MicroBatch
    from megatron_async_rl.policy.parallel import Layout


Build = Callable[[tuple[int, ...]], "MicroBatch"]
"""Sample indices -> the micro-batch of them."""


class OpobUnsupported(ValueError):
    """A layout or a setting under which a sequence's gradient cannot be measured."""


@dataclass(frozen=True, eq=False)
class Measured:
    """[S] float64 each, on every rank, in the order of the samples.

    norms: |g_i|. baselines: b of the sequence's group. advantages: what g_i was multiplied by.
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


def plan_groups(lengths: Sequence[int], group: Sequence[int], data_parallel: int) -> tuple[tuple[tuple[int, ...], ...], ...]:
    """-> for each data-parallel rank its groups, each a tuple of sample indices; balanced by tokens, the same on every rank.

    lengths: tokens of each sample; group: its group's number. The group with most tokens goes first, to the lightest rank.
    """
    members: dict[int, list[int]] = {}
    for index, number in enumerate(group):
        members.setdefault(number, []).append(index)
    tokens = {number: sum(lengths[index] for index in rows) for number, rows in members.items()}
    shares: list[list[tuple[int, ...]]] = [[] for _ in range(data_parallel)]
    loads = [0] * data_parallel
    for number in sorted(members, key=lambda number: (-tokens[number], number)):
        lightest = loads.index(min(loads))
        shares[lightest].append(tuple(members[number]))
        loads[lightest] += tokens[number]
    return tuple(tuple(share) for share in shares)


def exact_baseline(objective: ObjectiveConfig, schedule: Schedule, layout: Layout) -> ExactBaseline | None:
    """Where the objective asks for it. Raises OpobUnsupported."""
    advantage = objective.advantage
    if not isinstance(advantage, OpobAdvantage) or advantage.mode != "exact":
        return None
    if not objective.loss.linear_in_advantage:
        raise OpobUnsupported(f"advantage opob, mode exact: the gradient of loss {objective.loss.name} is not linear in it")
    return ExactBaseline(schedule, layout, normalize_std=advantage.normalize_std)


class ExactBaseline:
    """Raises OpobUnsupported on construction."""

    def __init__(self, schedule: Schedule, layout: Layout, *, normalize_std: bool) -> None:
        self.schedule = schedule
        self.layout = layout
        self.normalize_std = normalize_std
        if layout.world_size != layout.tp_size * layout.pp_size * layout.dp_size:
            raise OpobUnsupported(
                "advantage opob, mode exact, sums a sequence's gradient over tensor and pipeline ranks alone; set mode: cheap "
                "with context or expert parallelism"
            )
        if layout.virtual_stages > 1:
            raise OpobUnsupported(
                "advantage opob, mode exact, runs one sequence at a time, and the interleaved schedule wants at least as many "
                "micro-batches as there are stages; set policy.parallel.virtual_pipeline: 1, or mode: cheap"
            )
        for chunk in schedule.chunks:
            if chunk.expert_parallel_buffers:
                raise OpobUnsupported("advantage opob, mode exact, does not sum experts over their own ranks; set mode: cheap")
            if chunk.ddp_config.overlap_grad_reduce:
                raise OpobUnsupported("advantage opob, mode exact, needs gradients that are reduced once, at the end of a step")

    def accumulate(self, targets: StepTargets, build: Build, consume: Consume) -> Measured:
        """Leaves sum_i (R_i - b) g_i, not yet reduced, in the gradient buffers. Collective over the world.

        consume: a micro-batch's loss at advantage 1, the loss alone.
        """
        whole, samples = targets.whole, targets.samples
        group, centred = whole.require("group"), whole.group_centred(whole.require("rewards"))
        plan = plan_groups([sample.total_length for sample in samples], group.tolist(), self.layout.dp_size)
        total, scores = ([torch.zeros_like(buffer) for buffer in self._buffers()] for _ in range(2))
        rows = torch.zeros(3, len(samples), dtype=torch.float64, device=self.layout.device)
        for members in plan[self.layout.dp_rank]:
            rows[:, list(members)] = self._group(members, centred[list(members)], build, consume, total, scores).to(rows.device)
        for buffer, accumulated in zip(self._buffers(), total, strict=True):
            buffer.copy_(accumulated)
        if self.layout.tp_rank or not self.layout.is_last_stage:
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
        """Adds a group's gradient to `total`; `scores` is scratch of the same shapes. rewards: centred.

        -> [3, members]: |g_i|, b - m, advantages.
        """
        scale = 1.0 / (_unbiased_std(rewards) + EPSILON) if self.normalize_std else 1.0
        squares = torch.zeros(len(members), dtype=torch.float64, device=self.layout.device)
        for buffer in scores:
            buffer.zero_()
        for place, (index, reward) in enumerate(zip(members, rewards.tolist(), strict=True)):
            self.schedule.clear()
            self.schedule.accumulate([build((index,))], consume)
            gradients = self._buffers()
            torch._foreach_add_(list(total), gradients, alpha=scale * reward)
            torch._foreach_add_(list(scores), gradients)
            self._sum_over_replica()
            squares[place] = self._own_square()
        for process_group in (self.layout.tp_group, self.layout.pp_group):
            dist.all_reduce(squares, group=process_group)
        lowest, above = weighted_means(rewards, squares.cpu(), torch.zeros(len(members), dtype=torch.int64))
        shift = lowest + above
        torch._foreach_add_(list(total), list(scores), alpha=-scale * float(shift))
        advantages = scale * (rewards - lowest - above)
        return torch.stack((squares.cpu().sqrt(), shift.expand(len(members)), advantages))

    def _buffers(self) -> list[Tensor]:
        """Every gradient of this rank, as Megatron's flat buffers."""
        return [buffer.grad_data for chunk in self.schedule.chunks for buffer in chunk.buffers]

    def _sum_over_replica(self) -> None:
        """The part of Megatron's reduction that makes a gradient whole within one model replica."""
        config = self.schedule.model.config
        _allreduce_non_tensor_model_parallel_grads(list(self.schedule.chunks), config)
        _allreduce_word_embedding_grads(list(self.schedule.chunks), config)

    def _own_square(self) -> Tensor:
        """Scalar float64: |g|^2 over the parameters that this rank counts for its replica."""
        square = torch.zeros((), dtype=torch.float64, device=self.layout.device)
        for chunk in self.schedule.chunks:
            for parameter in chunk.parameters():
                if param_is_not_shared(parameter) and param_is_not_tensor_parallel_duplicate(parameter):
                    square += dot(parameter.main_grad, parameter.main_grad)
        return square


def _unbiased_std(centred: Tensor) -> float:
    return float((centred.square().sum() / max(len(centred) - 1, 1)).sqrt())

"""Megatron's gradient buffers, Megatron's Adam and what a control may read of it, and the learning
rate of a step.

Invariants:
- gradients are float32 and are summed, never averaged, over data- and context-parallel ranks and
  micro-batches: the loss already carries the denominators of the whole batch;
- weight decay applies to matrices only, not to norms or biases;
- the learning rate is a pure function of the step number: what a control multiplies it by lasts one
  step;
- controls see tensors in the order of the gradient shards (`gradients_of`). Nothing of that is
  stored: all is read or computed from the optimizer's own state when asked for;
- whether there is anything to read is known from the steps taken, so it is the same on every rank,
  also on one without shards.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, overload

import torch
from megatron.core.distributed import (
    DistributedDataParallel,
    DistributedDataParallelConfig,
    finalize_model_grads,
)
from megatron.core.optimizer import MegatronOptimizer, OptimizerConfig, get_megatron_optimizer
from megatron.core.tensor_parallel import param_is_not_tensor_parallel_duplicate
from megatron.core.transformer.module import param_is_not_shared
from torch import Tensor, nn

from megatron_async_rl.gradients import Gradients, GradientShard, block_elements, blocks
from megatron_async_rl.policy.megatron_private import optimizer_parts

if TYPE_CHECKING:
    from megatron_async_rl.config.schema import OptimizerConfig as OptimizerSettings
    from megatron_async_rl.config.schema import PolicyConfig
    from megatron_async_rl.policy.parallel import Layout


def learning_rate(settings: OptimizerSettings, step: int, total_steps: int) -> float:
    """The learning rate of optimizer step `step` (from 0) of a run of `total_steps`.

    Warm-up: lr (step + 1) / warmup_steps. After it, with p = (step - warmup_steps) / (total_steps -
    warmup_steps) in [0, 1): `linear` goes from lr towards min_lr with p, `cosine` with (1 - cos(pi
    p)) / 2; `constant` stays at lr.
    """
    if step < settings.warmup_steps:
        return settings.lr * (step + 1) / settings.warmup_steps
    if settings.schedule == "constant":
        return settings.lr
    progress = min(
        1.0, (step - settings.warmup_steps) / max(1, total_steps - settings.warmup_steps)
    )
    left = (
        1.0 - progress
        if settings.schedule == "linear"
        else 0.5 * (1.0 + math.cos(math.pi * progress))
    )
    return settings.min_lr + (settings.lr - settings.min_lr) * left


def wrap_for_gradients(chunks: list[Any], policy: PolicyConfig) -> list[DistributedDataParallel]:
    """Each model chunk inside Megatron's DDP, with float32 gradient buffers that are summed over
    data- and context-parallel ranks."""

    def finalize(model: list[Any], num_tokens: torch.Tensor | None = None, **groups: Any) -> None:
        # Megatron would divide by the tokens it counted; the loss has its denominators already.
        finalize_model_grads(model, None, **groups)

    for chunk in chunks:
        # Without this Megatron averages over data-parallel ranks and divides each micro-batch by
        # their number.
        chunk.config.calculate_per_token_loss = True
        chunk.config.finalize_model_grads_func = finalize
    settings = DistributedDataParallelConfig(
        grad_reduce_in_fp32=True,
        use_distributed_optimizer=policy.parallel.distributed_optimizer,
        overlap_grad_reduce=False,
        average_in_collective=False,
    )
    wrapped = [
        DistributedDataParallel(config=chunk.config, ddp_config=settings, module=chunk)
        for chunk in chunks
    ]
    for chunk, ddp in zip(chunks, wrapped, strict=True):
        # One configuration serves all chunks; the interleaved schedule takes a list, one entry per
        # chunk.
        chunk.config.no_sync_func = (
            [each.no_sync for each in wrapped] if len(wrapped) > 1 else ddp.no_sync
        )
    return wrapped


def build_optimizer(
    wrapped: list[DistributedDataParallel], policy: PolicyConfig, dtype: torch.dtype
) -> MegatronOptimizer:
    """Megatron's AdamW over wrapped chunks; float32 main parameters where the model is bfloat16."""
    settings = policy.optimizer
    optimizer = get_megatron_optimizer(
        OptimizerConfig(
            optimizer="adam",
            lr=settings.lr,
            min_lr=settings.min_lr,
            weight_decay=settings.weight_decay,
            adam_beta1=settings.betas[0],
            adam_beta2=settings.betas[1],
            adam_eps=settings.eps,
            clip_grad=0.0,
            bf16=dtype == torch.bfloat16,
            params_dtype=dtype,
            use_distributed_optimizer=policy.parallel.distributed_optimizer,
        ),
        wrapped,
    )
    for group in optimizer.param_groups:
        # wd_mult is 0 for one-dimensional parameters; Megatron applies it in its own scheduler,
        # which is not used here.
        group["weight_decay"] = settings.weight_decay * group["wd_mult"]
    return optimizer


def gradients_of(optimizer: MegatronOptimizer, layout: Layout) -> Gradients:
    """The reduced gradients the optimizer is about to use, in place; valid between `prepare_grads`
    and its step.

    With the distributed optimizer each rank holds its slices and every slice counts; without it
    data- and context-parallel replicas hold the same gradients, which count on the first: of
    experts, whose replicas are the stage's ranks with the same experts, on the first of those.
    Tensor-parallel copies count on tensor rank 0, tied embeddings on the first pipeline stage. Sums go over the
    world, so that every rank sees the same bits and decides alike.
    """
    sliced = optimizer.config.use_distributed_optimizer
    shards = tuple(
        GradientShard(
            grad=parameter.grad,
            counted=(
                sliced
                or (layout.expert_replica if group["is_expert_parallel"] else layout.replica) == 0
            )
            and param_is_not_shared(parameter)
            and param_is_not_tensor_parallel_duplicate(parameter),
        )
        for group in optimizer.param_groups
        for parameter in group["params"]
        if parameter.grad is not None
    )
    return Gradients(shards, layout.world_group, layout.device)


def optimizer_parameters(optimizer: MegatronOptimizer) -> list[torch.nn.Parameter]:
    """The parameters Adam updates on this rank: the model's own, or this rank's float32 slices of
    them."""
    return [parameter for group in optimizer.param_groups for parameter in group["params"]]


@dataclass(frozen=True)
class TakenStep:
    """The settings of the last optimizer step, the controls' factors included. norm: of what Adam
    added to the parameters, where it was measured."""

    lr: float
    beta1: float
    norm: float | None = None


class AdamView:
    """Implements controls.decision.OptimizerView over Megatron's Adam: torch's, or a fused one."""

    def __init__(
        self,
        optimizer: MegatronOptimizer,
        settings: OptimizerSettings,
        updates: int,
        last: TakenStep | None,
    ) -> None:
        self._optimizer = optimizer
        self._settings = settings
        self._last = last
        self.updates = updates

    @property
    def beta1(self) -> float:
        return self._settings.betas[0]

    @property
    def last_update_norm(self) -> float | None:
        return None if self._last is None else self._last.norm

    def momentum(self) -> Sequence[Tensor] | None:
        if self._last is None:
            return None
        return [state["exp_avg"] for state, _ in self._states()]

    def last_update(self) -> Sequence[Tensor] | None:
        """-lr / (1 - beta1^n) m / (sqrt(v / (1 - beta2^n)) + eps), with the n-th step's own lr and
        beta1 (arXiv 1412.6980)."""
        return None if self._last is None else _Updates(self._states(), self._last)

    def next_update(self) -> NextUpdate:
        """The update of the step that the optimizer is set for: its groups' lr and betas, and the
        gradients as they are."""
        return NextUpdate(_states(self._optimizer))

    def _states(self) -> list[tuple[dict[str, Any], dict[str, Any]]]:
        return [(state, group) for _, state, group in _states(self._optimizer)]


class _Updates(Sequence[Tensor]):
    """Each tensor is computed when it is read, so that the whole update never exists at once."""

    def __init__(
        self, states: Sequence[tuple[dict[str, Any], dict[str, Any]]], last: TakenStep
    ) -> None:
        self._states = states
        self._last = last

    def __len__(self) -> int:
        return len(self._states)

    @overload
    def __getitem__(self, index: int) -> Tensor: ...
    @overload
    def __getitem__(self, index: slice) -> Sequence[Tensor]: ...
    def __getitem__(self, index: int | slice) -> Tensor | Sequence[Tensor]:
        if isinstance(index, slice):
            return _Updates(self._states[index], self._last)
        state, group = self._states[index]
        # torch's Adam counts each parameter's steps, the fused ones a group's.
        step = float(state["step"] if "step" in state else group["step"])
        first, second = 1.0 - self._last.beta1**step, 1.0 - group["betas"][1] ** step
        moment, square = state["exp_avg"], state["exp_avg_sq"]
        update = torch.empty_like(moment)
        size = block_elements(moment.device)
        for part, m, v in zip(
            *(x.view(-1).split(size) for x in (update, moment, square)), strict=True
        ):
            torch.sqrt(v, out=part).div_(math.sqrt(second)).add_(group["eps"])
            torch.div(m, part, out=part).mul_(-self._last.lr / first)
        return update


class NextUpdate:
    """The tensors that Adam is about to add to each parameter that has a gradient shard, without
    weight decay: iterate to compute it.

    With g the gradient and n the number of the step: m' = beta1 m + (1 - beta1) g, v' = beta2 v +
    (1 - beta2) g^2, and -lr / (1 - beta1^n) m' / (sqrt(v' / (1 - beta2^n)) + eps). Adam's state
    stays as it is. One shard exists at a time.
    """

    def __init__(
        self, states: Sequence[tuple[nn.Parameter, dict[str, Any], dict[str, Any]]]
    ) -> None:
        self._states = states

    def __iter__(self) -> Iterator[Tensor]:
        return (_next_update(parameter, state, group) for parameter, state, group in self._states)


def _states(
    optimizer: MegatronOptimizer,
) -> list[tuple[nn.Parameter, dict[str, Any], dict[str, Any]]]:
    """Each parameter that has a gradient shard: itself, Adam's state of it (empty before the
    first step), its group."""
    held = {
        parameter: state
        for part in optimizer_parts(optimizer)
        for parameter, state in part.optimizer.state.items()
    }
    return [
        (parameter, held.get(parameter, {}), group)
        for group in optimizer.param_groups
        for parameter in group["params"]
        if parameter.grad is not None
    ]


@torch.no_grad()
def _next_update(parameter: nn.Parameter, state: dict[str, Any], group: dict[str, Any]) -> Tensor:
    beta1, beta2 = group["betas"]
    # Before its first step Adam has no state, and a fused one no count.
    step = 1.0 + float(state["step"] if "step" in state else group.get("step", 0))
    nothing = torch.zeros((), dtype=parameter.dtype, device=parameter.device).expand(
        parameter.numel()
    )
    moment, square = state.get("exp_avg", nothing), state.get("exp_avg_sq", nothing)
    update = torch.empty(parameter.shape, dtype=parameter.dtype, device=parameter.device)
    assert parameter.grad is not None
    for part, g, m, v in blocks(update, parameter.grad, moment, square):
        g = g.to(part.dtype)
        torch.mul(v, beta2, out=part).addcmul_(g, g, value=1.0 - beta2).sqrt_()
        part.div_(math.sqrt(1.0 - beta2**step)).add_(group["eps"])
        torch.div(torch.lerp(m, g, 1.0 - beta1), part, out=part).mul_(
            -group["lr"] / (1.0 - beta1**step)
        )
    return update

"""Megatron's gradient buffers, Megatron's Adam with its float32 weights, and the learning rate of a
step.

Invariants:
- gradients are summed, never averaged, over data- and context-parallel ranks and micro-batches: the
  loss already has the denominators of the whole batch. Controls and Adam get them in float32,
  whatever the dtype of the sums;
- weight decay applies only to matrices, not to norms or biases;
- at a run's start Adam's float32 weights are the files' tensors. Megatron would use the model's
  weights, which were rounded to bfloat16 at loading, and for an FP8 weight the previous content of
  its memory;
- between two steps the model's weights always are the rounded float32 weights. A copy of the
  float32 weights is therefore a copy of the model, and is exact even if FP8 weights need new bytes
  and scales;
- the learning rate is a pure function of the step number; a control's factor on it lasts one step;
- moments are where Megatron's Adam keeps them, except for settings that it does not support well.
  Its precision-aware Adam is a kernel of Transformer Engine, for CUDA only, which hides gradients
  and float32 weights from the controls, and its offloaded Adam steps on the CPU. `BlockAdam` leaves
  both where every other module reads them, and works wherever torch does.

Bias correction while a control changes beta1 from step to step: Adam's first moment after n steps
is a sum of past gradients whose weights add up to

    1 - beta1_1 * beta1_2 * ... * beta1_n

Every Adam implementation divides by 1 - beta1^n instead, with the beta1 of the current step. The
two agree only while beta1 is constant: after a few steps at beta1 = 0, a step at 0.9 would be up to
1 / (1 - 0.9^n) times too long. The learning rate of a step is therefore multiplied by

    (1 - beta1_n^n) / (1 - beta1_1 * ... * beta1_n)

and its weight decay is divided by the same factor, since Adam multiplies decay by the learning
rate. This works for torch's Adam, for fused ones and for `BlockAdam`, without a change to any.

Invariant: the factor is exactly 1 while beta1 has never changed, so that a run without such a
control takes the same steps bit for bit.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from contextlib import ExitStack
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from megatron.core.distributed import (
    DistributedDataParallel,
    DistributedDataParallelConfig,
    finalize_model_grads,
)
from megatron.core.optimizer import MegatronOptimizer, OptimizerConfig, get_megatron_optimizer
from torch import Tensor, nn

from megatron_async_rl.config.policy import PolicyConfig
from megatron_async_rl.gradients import blocks
from megatron_async_rl.policy.adam_view import gradient_of
from megatron_async_rl.policy.fp8 import is_quantised
from megatron_async_rl.policy.learning_rate import learning_rate as learning_rate
from megatron_async_rl.policy.megatron_private import (
    model_slices,
    optimizer_parts,
    replace_adam,
    weights_from_masters,
)
from megatron_async_rl.policy.model import PolicyModel
from megatron_async_rl.policy.parameters import Cuts, HuggingFaceTensors, local_entries


def wrap_for_gradients(chunks: list[Any], policy: PolicyConfig) -> list[DistributedDataParallel]:
    """Return each model chunk inside Megatron's DDP, with gradient buffers of `gradient_dtype` that
    are summed over data- and context-parallel ranks."""

    def finalize(model: list[Any], num_tokens: torch.Tensor | None = None, **groups: Any) -> None:
        # Megatron would divide by the tokens it counted, but the loss has its denominators already.
        finalize_model_grads(model, None, **groups)

    for chunk in chunks:
        # Without this Megatron averages over data-parallel ranks and divides each micro-batch by
        # their number.
        chunk.config.calculate_per_token_loss = True
        chunk.config.finalize_model_grads_func = finalize
    settings = DistributedDataParallelConfig(
        # Otherwise in the parameters' dtype, which config/ permits only for bfloat16.
        grad_reduce_in_fp32=policy.optimizer.gradient_dtype == "float32",
        use_distributed_optimizer=policy.parallel.distributed_optimizer,
        overlap_grad_reduce=policy.parallel.overlap_grad_reduce,
        overlap_param_gather=policy.parallel.overlap_param_gather,
        average_in_collective=False,
        fp8_param_gather=policy.fp8 is not None and policy.fp8.primary_weights,
    )
    wrapped = [
        DistributedDataParallel(config=chunk.config, ddp_config=settings, module=chunk)
        for chunk in chunks
    ]
    for chunk, ddp in zip(chunks, wrapped, strict=True):
        # One configuration serves all chunks; the interleaved schedule needs a list with one entry
        # per chunk.
        chunk.config.no_sync_func = (
            [each.no_sync for each in wrapped] if len(wrapped) > 1 else ddp.no_sync
        )
    return wrapped


def build_optimizer(
    wrapped: list[DistributedDataParallel], policy: PolicyConfig, dtype: torch.dtype
) -> MegatronOptimizer:
    """Return Megatron's AdamW over wrapped chunks, or `BlockAdam` if moments are kept in another
    way; float32 main parameters if the model is bfloat16."""
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
            overlap_param_gather=policy.parallel.overlap_param_gather,
            fp8_recipe=policy.fp8.recipe if policy.fp8 is not None else None,
        ),
        wrapped,
    )
    if settings.moment_dtype != "float32" or settings.moment_offload != "none":
        for part in optimizer_parts(optimizer):
            adam = BlockAdam(
                part.optimizer,
                dtype=getattr(torch, settings.moment_dtype),
                offload=settings.moment_offload == "cpu",
            )
            replace_adam(part, adam, adam.materialise)
            if adam.offload:
                # Missing page-locked memory is noticed now, not in the first step.
                adam.materialise()
    # So that the dtype of the moments can be read even on a rank without a parameter.
    optimizer.config.exp_avg_dtype = getattr(torch, settings.moment_dtype)
    for group in optimizer.param_groups:
        # wd_mult is 0 for one-dimensional parameters; Megatron applies it in its own scheduler,
        # which is not used here.
        group["weight_decay"] = settings.weight_decay * group["wd_mult"]
        if next(wrapped[0].parameters()).device.type == "cpu":
            # torch's AdamW then makes one pass over the memory, and takes a quarter of the time.
            group["fused"] = True
    return optimizer


def load_masters(
    optimizer: MegatronOptimizer, model: PolicyModel, directory: Path, *, every: bool = False
) -> None:
    """Set the float32 weights of this rank's shards to the tensors in `directory`, which fit the
    model. every: also set weights whose loaded parameter has the full precision of the file. FP8
    weights are then computed from them, for which the call is collective over the world."""
    bridge, chunks = model.bridge, model.chunks
    entries = {
        id(chunks[entry.chunk].get_parameter(entry.local_name)): entry
        for entry in local_entries(bridge, chunks)
    }
    with ExitStack() as stack, torch.no_grad():
        tensors, cuts = HuggingFaceTensors(directory, stack), Cuts(bridge)
        for part in optimizer_parts(optimizer):
            for shard, parameter, start, _ in model_slices(part):
                entry = entries.get(id(parameter))
                # A float32 parameter is its own master, and already has the file's precision.
                if entry is None or (parameter.dtype == torch.float32 and not every):
                    continue
                coarser = {tensors.dtype(name) for name in entry.hf_names} - {parameter.dtype}
                if every or coarser or is_quantised(parameter):
                    tensors.fill(shard.view(-1), entry, cuts.of(entry), start)
    if every or model.config.fp8_param:
        weights_from_masters(optimizer)


MOMENTS = ("exp_avg", "exp_avg_sq")


class BlockAdam(torch.optim.AdamW):
    """AdamW that keeps moments in `dtype` and, with `offload`, in host memory, page-locked if
    parameters are on CUDA: they are copied to the device and back one block at a time.

    A step computes in float32 from the stored moments, and applies the new moments before they are
    rounded for storage. With float32 moments it equals torch's AdamW(foreach=False) bit for bit,
    wherever they are stored; the fused one, which policies on a CPU use, rounds differently. The
    device additionally holds four blocks. replaced: an Adam that has not stepped yet, whose groups
    of float32 parameters are used.
    """

    def __init__(
        self,
        replaced: torch.optim.Optimizer,
        *,
        dtype: torch.dtype = torch.float32,
        offload: bool = False,
    ) -> None:
        super().__init__([{"params": []}])
        # The distributed optimizer's shards are views in autograd's graph, which torch's
        # constructor refuses.
        self.param_groups = replaced.param_groups
        self.dtype = dtype
        self.offload = offload

    def materialise(self) -> None:
        """Create the initial state of every parameter that has not been stepped yet."""
        for parameter, _ in self._parameters():
            self._state_of(parameter)

    @torch.no_grad()
    def step(self, closure: Callable[[], Any] | None = None) -> None:
        """Make one step; when it returns, host memory has the new moments. closure: not supported.
        Raises StateMissing for a parameter without a gradient."""
        assert closure is None
        for parameter, group in self._parameters():
            self._update(parameter, gradient_of(parameter), group)
        if any(self._offloads(parameter) for parameter, _ in self._parameters()):
            torch.cuda.current_stream().synchronize()

    def _update(self, parameter: nn.Parameter, gradient: Tensor, group: dict[str, Any]) -> None:
        state, (beta1, beta2) = self._state_of(parameter), group["betas"]
        state["step"] += 1
        step = state["step"].item()
        first, second = 1 - beta1**step, 1 - beta2**step
        for weight, g, *kept in blocks(
            parameter.detach().view(-1), gradient, *(state[name] for name in MOMENTS)
        ):
            # Moments are copied in their stored dtype and then converted to float32; float32
            # moments that are on the device are changed in place.
            m, v = (each.to(weight.device, non_blocking=True).float() for each in kept)
            if group["weight_decay"] != 0:
                weight.mul_(1 - group["lr"] * group["weight_decay"])
            m.lerp_(g, 1 - beta1)
            v.mul_(beta2).addcmul_(g, g, value=1 - beta2)
            root = v.sqrt().div_(second**0.5).add_(group["eps"])
            weight.addcdiv_(m, root, value=-group["lr"] / first)
            for new, place in zip((m, v), kept, strict=True):
                if new is not place:
                    place.copy_(new.to(place.dtype), non_blocking=True)
            del m, v, root, new

    def _state_of(self, parameter: nn.Parameter) -> dict[str, Any]:
        state: dict[str, Any] = self.state[parameter]
        if not state:
            state["step"] = torch.zeros((), dtype=torch.float32)
            offloaded = self._offloads(parameter)
            for name in MOMENTS:
                state[name] = torch.zeros(
                    parameter.shape,
                    dtype=self.dtype,
                    device="cpu" if offloaded else parameter.device,
                    pin_memory=offloaded,
                )
        return state

    def _offloads(self, parameter: nn.Parameter) -> bool:
        return self.offload and parameter.is_cuda

    def _parameters(self) -> Iterator[tuple[nn.Parameter, dict[str, Any]]]:
        for group in self.param_groups:
            for parameter in group["params"]:
                yield parameter, group


@dataclass(frozen=True)
class Beta1Product:
    """Product of beta1 over the steps so far: `earlier` times `beta1 ** count`.

    The newest steps with the same beta1 are counted instead of multiplied, because multiplication
    would round, and the factor of a constant beta1 would differ from 1.
    """

    earlier: float = 1.0
    beta1: float = 0.0
    count: int = 0

    @property
    def value(self) -> float:
        return self.earlier * self.beta1**self.count

    def times(self, beta1: float) -> Beta1Product:
        """Return the product after one more step."""
        if beta1 == self.beta1:
            return Beta1Product(self.earlier, beta1, self.count + 1)
        # A new beta1 starts a new count; the product so far becomes one number.
        return Beta1Product(self.value, beta1, 1)

    def lr_factor(self, steps: int) -> float:
        """Return the factor on the learning rate of step `steps` (from 1), the newest in this
        product."""
        return float((1.0 - self.beta1**steps) / (1.0 - self.value))

    def state_dict(self) -> dict[str, Any]:
        return {"earlier": self.earlier, "beta1": self.beta1, "count": self.count}

    @classmethod
    def of_state(cls, state: Mapping[str, Any] | None, beta1: float, steps: int) -> Beta1Product:
        """Return the saved product; `beta1 ** steps` for a checkpoint of an earlier version, which
        has none."""
        return cls(beta1=beta1, count=steps) if state is None else cls(**state)

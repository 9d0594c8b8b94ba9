"""All names of Megatron-Core that it does not promise to keep: its private functions, names that
this package replaces, and internal state of its optimizers and gradient buffers.

Invariants:
- no other module of the package uses one. An override in a class of this package stays with that
  class and is listed here;
- a unit test checks that each name of the tables below still exists in the installed version, and
  that no other module uses one.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterator, Sequence
from typing import Any

from megatron.core import optimizer, utils
from megatron.core.distributed import param_and_grad_buffer
from megatron.core.distributed.finalize_model_grads import (
    _allreduce_non_tensor_model_parallel_grads,
    _allreduce_word_embedding_grads,
)
from megatron.core.optimizer import MegatronOptimizer, clip_grads, distrib_optimizer
from megatron.core.optimizer import optimizer as optimizer_classes
from megatron.core.optimizer.distrib_optimizer import DistributedOptimizer
from megatron.core.optimizer.optimizer import Float16OptimizerWithFloat16Params
from megatron.core.pipeline_parallel.schedules import get_schedule_table
from megatron.core.tensor_parallel import random
from megatron.core.transformer.moe import moe_utils, token_dispatcher
from torch import Tensor
from torch.optim import Adam, AdamW

NAMES = {
    "megatron.core.tensor_parallel.random": ("_get_cuda_rng_state", "_set_cuda_rng_state"),
    "megatron.core.transformer.moe.token_dispatcher": ("all_to_all",),
    "megatron.core.transformer.moe.moe_utils": ("router_gating_linear", "te_general_gemm"),
    "megatron.core.distributed.finalize_model_grads": (
        "_allreduce_non_tensor_model_parallel_grads",
        "_allreduce_word_embedding_grads",
    ),
    "megatron.core.distributed.param_and_grad_buffer": (
        "dist_all_gather_func",
        "dist_reduce_scatter_func",
    ),
    "megatron.core.pipeline_parallel.schedules": ("get_schedule_table",),
    "megatron.core.optimizer": ("Adam", "USING_PYTORCH_OPTIMIZER"),
    "megatron.core.optimizer.distrib_optimizer": (
        "HAVE_APEX_OR_TE",
        "USING_APEX_OPTIMIZER",
        "USING_TE_OPTIMIZER",
    ),
    "megatron.core.optimizer.optimizer": ("multi_tensor_applier", "multi_tensor_scale_impl"),
    "megatron.core.optimizer.clip_grads": (
        "l2_norm_impl",
        "multi_tensor_applier",
        "multi_tensor_scale_impl",
        "multi_tensor_scale_tensor_impl",
    ),
    "megatron.core.utils": (
        "local_multi_tensor_applier",
        "local_multi_tensor_l2_norm",
        "local_multi_tensor_scale",
    ),
}
"""Module -> names in it."""
OVERRIDDEN = {
    "megatron.core.pipeline_parallel.p2p_communication.P2PCommunicator": ("_communicate_shapes",),
    "megatron.core.transformer.moe.router_replay.RouterReplay": ("get_replay_topk",),
}
"""Class -> methods that a class of this package replaces: forward.py, routing_replay.py (model.py
lists its own)."""
METHODS = {
    "megatron.core.optimizer.distrib_optimizer.DistributedOptimizer": (
        "_copy_main_params_to_model_params",
        "_get_model_param_range_map",
    ),
    "megatron.core.optimizer.optimizer.Float16OptimizerWithFloat16Params": (
        "_copy_main_params_to_model_params",
    ),
}
"""Class -> methods that this package calls."""
ASSIGNED = {
    "megatron.core.optimizer.optimizer.MegatronOptimizer": ("init_state_fn",),
    "megatron.core.optimizer.optimizer.ChainedOptimizer": ("chained_optimizers",),
    "megatron.core.optimizer.optimizer.Float16OptimizerWithFloat16Params": (
        "float16_groups",
        "fp32_from_float16_groups",
    ),
    "megatron.core.optimizer.distrib_optimizer.DistributedOptimizer": (
        "model_float16_groups",
        "shard_fp32_from_float16_groups",
        "model_fp32_groups",
        "shard_fp32_groups",
        "model_chunks",
    ),
    "megatron.core.distributed.distributed_data_parallel": (
        "buffers",
        "expert_parallel_buffers",
        "bucket_groups",
        "expert_parallel_bucket_groups",
        "param_to_bucket_group",
    ),
    "megatron.core.distributed.param_and_grad_buffer": (
        "grad_data",
        "main_grad",
        "param_gather_dispatched",
    ),
    "megatron.core.transformer.moe.router.TopKRouter": ("router_replay",),
}
"""Class or module -> attributes that it assigns and this package reads."""

# A router multiplies in float32, which Transformer Engine, if it is installed, rounds to TF32.
moe_utils.te_general_gemm = None


def point_at_cpu(get_state: Callable[..., Any], set_state: Callable[..., Any]) -> None:
    """Adapt Megatron to a CPU: its random generator is that of `get_state` and `set_state`, the
    expert dispatcher's counts of tokens become the lists that a collective needs, a rank without
    data-parallel ranks sends no gradients, and the optimizer uses torch's kernels."""
    _use_torchs_optimizer()
    random._get_cuda_rng_state = get_state
    random._set_cuda_rng_state = set_state
    # Here Megatron forks the CPU's generator, and would log a warning about that for each draw.
    logging.getLogger(random.__name__).setLevel(logging.ERROR)
    plain_all_to_all = token_dispatcher.all_to_all

    # The dispatcher converts the counts to lists only when it copies them from the GPU to the CPU.
    def all_to_all(
        group: Any,
        tensor: Tensor,
        output_splits: Any = None,
        input_splits: Any = None,
        **options: Any,
    ) -> Any:
        counts = (
            splits.tolist() if isinstance(splits, Tensor) else splits
            for splits in (output_splits, input_splits)
        )
        return plain_all_to_all(group, tensor, *counts, **options)

    token_dispatcher.all_to_all = all_to_all
    for name in NAMES[param_and_grad_buffer.__name__]:
        collective = getattr(param_and_grad_buffer, name)
        setattr(param_and_grad_buffer, name, _unless_alone(collective))


def _unless_alone(collective: Callable[..., Any]) -> Callable[..., Any]:
    """Return the collective without an exchange in a group of one rank. Megatron passes the same
    memory as output and input, and gloo would copy it twice."""

    def call(output: Tensor, part: Tensor, *, group: Any, **options: Any) -> Any:
        if group.size() > 1:
            return collective(output, part, group=group, **options)
        if output.data_ptr() != part.data_ptr():
            output.copy_(part)
        return None

    return call


def _use_torchs_optimizer() -> None:
    """Replace the optimizer kernels of Transformer Engine and Apex, which only accept CUDA tensors,
    by those that Megatron uses if neither is installed."""
    optimizer.Adam, optimizer.USING_PYTORCH_OPTIMIZER = AdamW, True
    distrib_optimizer.Adam, distrib_optimizer.HAVE_APEX_OR_TE = Adam, False
    distrib_optimizer.USING_TE_OPTIMIZER = distrib_optimizer.USING_APEX_OPTIMIZER = False
    for module in (optimizer_classes, clip_grads):
        module.multi_tensor_applier = utils.local_multi_tensor_applier
        module.multi_tensor_scale_impl = utils.local_multi_tensor_scale
    clip_grads.l2_norm_impl = utils.local_multi_tensor_l2_norm
    clip_grads.multi_tensor_scale_tensor_impl = None


def sum_over_replica(chunks: Sequence[Any], config: Any) -> None:
    """Run the part of Megatron's reduction that completes a gradient within one model replica."""
    _allreduce_non_tensor_model_parallel_grads(list(chunks), config)
    _allreduce_word_embedding_grads(list(chunks), config)


def schedule_order(config: Any, micro_batches: int) -> list[tuple[int, int]]:
    """Return (micro-batch, chunk) of every forward pass of Megatron's schedule, in its order.
    config: Megatron's, of the model."""
    chunks = config.virtual_pipeline_model_parallel_size or 1
    together = micro_batches if chunks == 1 else config.microbatch_group_size_per_vp_stage
    order: list[tuple[int, int]] = get_schedule_table(micro_batches, chunks, together)
    return order


def gradient_buffers(chunks: Sequence[Any]) -> list[Tensor]:
    """Return all gradients of these chunks (inside Megatron's DDP), as flat buffers."""
    return [
        buffer.grad_data
        for chunk in chunks
        for buffer in (*chunk.buffers, *chunk.expert_parallel_buffers)
    ]


def has_expert_buffers(chunk: Any) -> bool:
    """Return True if experts of the chunk (inside Megatron's DDP) are reduced over separate
    ranks."""
    return bool(chunk.expert_parallel_buffers)


def set_gathered(chunks: Sequence[Any], gathered: bool) -> None:
    """Set whether parameters count as gathered. gathered: True if the parameters of these chunks
    (inside Megatron's DDP) are the same on every replica; otherwise Megatron gathers each bucket of
    them before the first module that reads it."""
    for chunk in chunks:
        for group in (*chunk.bucket_groups, *chunk.expert_parallel_bucket_groups):
            # Megatron gathers a bucket before its first use, unless this flag is set.
            group.param_gather_dispatched = gathered


def await_parameter(chunk: Any, parameter: Tensor) -> None:
    """Wait until a parameter is gathered, for a reader other than its own module, before which
    Megatron waits itself."""
    group = chunk.param_to_bucket_group.get(parameter)
    if group is not None:
        group.finish_param_sync()


def optimizer_parts(optimizer: MegatronOptimizer) -> list[Any]:
    """Return Megatron's optimizers inside `optimizer` (experts have their own), without those that
    hold no parameter here."""
    parts = getattr(optimizer, "chained_optimizers", [optimizer])
    return [part for part in parts if part.optimizer is not None]


def replace_adam(part: Any, adam: Any, fill: Callable[[], None]) -> None:
    """Replace the Adam of one part of the optimizer, which has not stepped yet, by `adam`. fill:
    creates the initial state of `adam`'s parameters, which Megatron expects to exist."""
    # Both, because Megatron fills missing state before it saves or loads.
    part.optimizer, part.init_state_fn = adam, lambda *_: fill()


def fill_adam(part: Any) -> None:
    """Create the initial state of every parameter of one part of the optimizer that has not been
    stepped yet."""
    part.init_state_fn(part.optimizer, part.config)


def model_slices(part: Any) -> Iterator[tuple[Tensor, Tensor, int, int]]:
    """Yield (shard, model parameter, start, end) of everything that one part of the optimizer
    updates: the shard is elements start..end of the flattened parameter, or its float32 copy of
    them."""
    if isinstance(part, DistributedOptimizer):
        groups = [*zip(part.model_float16_groups, part.shard_fp32_from_float16_groups, strict=True)]
        groups += zip(part.model_fp32_groups, part.shard_fp32_groups, strict=True)
        for parameters, shards in groups:
            for parameter, shard in zip(parameters, shards, strict=True):
                # This rank's range of the flattened parameter; ranges of replicas are disjoint.
                owned = part._get_model_param_range_map(parameter)["param"]
                yield shard, parameter, owned.start, owned.end
        return
    masters: dict[int, Tensor] = {}
    if isinstance(part, Float16OptimizerWithFloat16Params):
        for parameters, shards in zip(
            part.float16_groups, part.fp32_from_float16_groups, strict=True
        ):
            masters |= {
                id(shard): parameter for parameter, shard in zip(parameters, shards, strict=True)
            }
    for group in part.param_groups:
        for shard in group["params"]:
            # A float32 parameter is its own master.
            yield shard, masters.get(id(shard), shard), 0, shard.numel()


def weights_from_masters(optimizer: MegatronOptimizer) -> None:
    """Compute the model's weights from the optimizer's float32 weights, like the end of a step.
    Collective over the world with the distributed optimizer."""
    parts = optimizer_parts(optimizer)
    for part in parts:
        if isinstance(part, DistributedOptimizer | Float16OptimizerWithFloat16Params):
            part._copy_main_params_to_model_params()
    distributed = [part for part in parts if is_distributed(part)]
    if distributed:
        # One part gathers the weights that all parts have written.
        for chunk in distributed[0].model_chunks:
            chunk.start_param_sync(force_sync=True)


def is_distributed(part: Any) -> bool:
    """Return True if the part of the optimizer divides its state over the replicas of its
    parameters."""
    return isinstance(part, DistributedOptimizer)

"""GPU memory that CUDA processes take besides the tensors that the plan counts.

Estimates from the libraries' documentation and sources and from reports of their users; this
project has not measured one of them. By vLLM's source, an engine's context and communicators lie
outside the share that `rollout.gpu_memory_utilization` gives it, and its graphs inside. Sleep
releases weights and cache alone.
"""

from __future__ import annotations

from megatron_async_rl.config.rollout import RolloutConfig
from megatron_async_rl.config.schema import Config
from megatron_async_rl.plan.machine import GIB

CONTEXT_BYTES = GIB // 2
"""A process's CUDA context with the kernels that it has loaded."""
NCCL_OF_RANK_BYTES = GIB
"""Channels of the communicators of a rank: the world, and those of data, tensor, pipeline, context
and expert parallelism."""
NCCL_OF_WORKER_BYTES = GIB // 2
"""Channels of the communicators between the workers of an engine."""
WORKSPACE_BYTES = GIB // 4
"""Workspaces of cuBLAS (32 MiB for each handle and stream on Hopper), cuDNN and Transformer
Engine."""
GRAPH_BYTES = 5 * GIB // 4
"""CUDA graphs and lasting buffers of an engine."""

OverheadParts = tuple[tuple[str, int], ...]
"""(what, bytes) of each."""


def of_rank(config: Config) -> OverheadParts:
    """Parts of the GPU of a trainer rank. A world of one has no communicator."""
    several = config.policy.parallel.ranks > 1
    return (
        ("the rank's CUDA context", CONTEXT_BYTES),
        ("the rank's NCCL channels", NCCL_OF_RANK_BYTES * several),
        ("the rank's workspaces", WORKSPACE_BYTES),
    )


def of_engine(rollout: RolloutConfig) -> OverheadParts:
    """Parts of each GPU of an engine, outside its share."""
    return (
        ("the engine's CUDA context", CONTEXT_BYTES),
        ("the engine's NCCL channels", NCCL_OF_WORKER_BYTES * (rollout.workers > 1)),
    )


def of_sleeping_engine(rollout: RolloutConfig) -> OverheadParts:
    """Parts of each GPU of an engine that sleeps, or has woken nothing but its weights."""
    eager = bool(rollout.vllm.get("enforce_eager"))
    return (*of_engine(rollout), ("the engine's CUDA graphs", GRAPH_BYTES * (not eager)))

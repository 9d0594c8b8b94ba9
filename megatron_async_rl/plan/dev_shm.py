"""Bytes in the /dev/shm of rank 0's machine: weights for the engines and Ray's object store."""

from __future__ import annotations

import math
import os

from megatron_async_rl.config.problem import Problem
from megatron_async_rl.config.schema import Config
from megatron_async_rl.plan.fit import ipc_bucket_bytes
from megatron_async_rl.plan.layout import device_of, engine_count, engines_elsewhere
from megatron_async_rl.plan.machine import GIB, MIB, Machine
from megatron_async_rl.plan.memory import EngineMemory
from megatron_async_rl.rollout.cluster import object_store_bytes


def shared_memory_problems(config: Config, engine: EngineMemory, machine: Machine) -> list[Problem]:
    """Return problems of a /dev/shm that is too small."""
    needed, what = in_shared_memory(config, engine, machine)
    free = machine.shared_memory
    # The /dev/shm of a described machine is unknown.
    if machine.described or free >= needed:
        return []
    return [
        Problem(
            key="weights.transport",
            what=(
                f"{what} ({math.ceil(needed / MIB)} MiB) must fit into /dev/shm, which has"
                f" {free // MIB} MiB free"
            ),
            fix=f"enlarge /dev/shm (docker run {shm_size(needed, 0)})",
        )
    ]


def in_shared_memory(config: Config, engine: EngineMemory, machine: Machine) -> tuple[int, str]:
    """Return the bytes of weights in the /dev/shm of rank 0's machine, maybe none, and their
    description."""
    if config.weights.carrier.ipc:
        ranks = config.policy.parallel.ranks if device_of(config, machine) == "cpu" else 0
        return ranks * ipc_bucket_bytes(config, engine), f"two buckets of each of {ranks} ranks"
    # Each engine's copy is in its own machine's memory; engines on rank 0's machine count here.
    own = config.weights.carrier.per_engine and not engines_elsewhere(config, machine)
    receivers = engine_count(config) if own else 0
    what = "two versions of the model" + (f", and two for each of {receivers} engines" * own)
    return 2 * engine.weights * (1 + receivers), what


def shared_memory(
    config: Config, engine: EngineMemory, machine: Machine, longest: int
) -> tuple[int, int, str]:
    """Return the bytes of weights and of Ray's object store in the /dev/shm of rank 0's machine,
    and the description of the weights."""
    responses = config.flow.prompts_per_step * config.flow.group_size
    segments = config.rollout.max_segments if config.rollout is not None else 1
    weights, what = in_shared_memory(config, engine, machine)
    return weights, object_store_bytes(responses, segments * longest), what


def shm_size(weights: int, store: int) -> str:
    """Return Docker's option for a /dev/shm that is large enough."""
    # One GiB more, for the queues of vLLM and NCCL.
    return f"--shm-size={math.ceil((weights + store) / GIB) + 1}g"


def shared_memory_notes(
    config: Config, engine: EngineMemory, machine: Machine, longest: int
) -> list[str]:
    """Return a note if /dev/shm has no room for Ray's object store, which is then on disk."""
    if machine.described or os.environ.get("RAY_ADDRESS"):
        return []
    weights, store, what = shared_memory(config, engine, machine, longest)
    if weights + store <= machine.shared_memory:
        return []
    subject = f"Ray's object store for the samples ({store / MIB:.0f} MiB)"
    if weights:
        subject = f"{what} ({weights / MIB:.0f} MiB) and {subject}"
    return [
        f"{subject} {'do' if weights else 'does'} not fit into /dev/shm, which has"
        f" {machine.shared_memory / MIB:.0f} MiB free: Ray will be slow (docker run"
        f" {shm_size(weights, store)})"
    ]

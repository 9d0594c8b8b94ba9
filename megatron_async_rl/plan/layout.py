"""Placement of the processes on machines and GPUs: tensor x context x pipeline x data, in the order
of Megatron-Core's ranks."""

from __future__ import annotations

import os
from dataclasses import dataclass
from typing import Literal

from megatron_async_rl.config.problem import Problem, number_of
from megatron_async_rl.config.rollout import RolloutConfig
from megatron_async_rl.config.schema import Config
from megatron_async_rl.plan.machine import Machine
from megatron_async_rl.plan.model_files import ModelShape
from megatron_async_rl.policy.families import ChosenLayers, choose_layers
from megatron_async_rl.rollout.cluster import CONNECTIONS

Device = Literal["cpu", "cuda"]
PARALLEL = "policy.parallel"
PLANNED_DEVICE = "MEGATRON_ASYNC_RL_DEVICE"
"""Environment variable of ranks: the device that the plan assigns to them."""


@dataclass(frozen=True)
class PlannedProcess:
    """A process of the plan. `kind`: the process, and the program that starts it; `device`: the GPU
    that it owns, or its threads."""

    name: str
    kind: str
    device: str


def device_of(config: Config, machine: Machine) -> Device:
    """Return the device of policy and engines on `machine`."""
    if config.policy.device == "auto":
        # The machine of the plan decides, which need not be this one.
        return "cuda" if machine.gpus else "cpu"
    return config.policy.device


def engines_here(rollout: RolloutConfig, device: Device, machine: Machine) -> int:
    """Return how many of the engines fit on `machine`, each with GPUs of its own; 0 if it has too
    few GPUs for one."""
    if device != "cuda":
        return rollout.engines
    return min(rollout.engines, len(machine.gpus) // rollout.workers)


def engine_size_problems(rollout: RolloutConfig, device: Device, machine: Machine) -> list[Problem]:
    """Return the problem of engines with more workers than `machine` has GPUs, or none."""
    if engines_here(rollout, device, machine):
        return []
    return [
        Problem(
            key="rollout.tensor",
            what=f"an engine needs {number_of('GPU', rollout.workers)}, and this machine has"
            f" {len(machine.gpus)}",
            fix="set a smaller rollout.tensor or rollout.pipeline, or use a larger machine",
        )
    ]


def rank_environment(config: Config, machine: Machine) -> dict[str, str]:
    """Return environment variables of trainer ranks. They prevent ranks that are planned for GPUs
    from using the CPU silently.

    Megatron-Core launches the communication of tensor or context parallelism before the kernels
    that overlap with it. Up to Hopper, GPUs keep that order only with a single hardware queue."""
    parallel = config.policy.parallel
    if device_of(config, machine) != "cuda":
        return {}
    # An unknown capability counts as an older GPU: a single queue is always correct.
    blackwell = all((gpu.capability or (0, 0)) >= (10, 0) for gpu in machine.gpus)
    ordered = blackwell or max(parallel.tensor, parallel.context) == 1
    return {PLANNED_DEVICE: "cuda"} | ({} if ordered else {CONNECTIONS: "1"})


def layers_of(config: Config, machine: Machine, shape: ModelShape) -> ChosenLayers:
    """Return the model's layers. Raises UserError for layers that are not available."""
    policy = config.policy
    return choose_layers(
        policy.layers,
        model_type=shape.family.model_type,
        dtype=config.model.dtype,
        device=device_of(config, machine),
        lora=policy.lora is not None,
        engine=machine.transformer_engine,
        fp8=policy.fp8 is not None,
    )


def rank_coordinates(config: Config, rank: int) -> tuple[int, int, int, int]:
    """Return (tensor, context, data, pipeline) coordinates: tensor varies fastest, pipeline
    slowest."""
    parallel = config.policy.parallel
    # The order of Megatron's default: tp-cp-ep-dp-pp.
    rank, tensor = divmod(rank, parallel.tensor)
    rank, context = divmod(rank, parallel.context)
    pipeline, data = divmod(rank, parallel.data)
    return tensor, context, data, pipeline


def processes(config: Config, device: Device, machine: Machine) -> tuple[PlannedProcess, ...]:
    """Return every process of a run, in the order of their starts; empty for a layout that does not
    divide."""
    parallel, rollout = config.policy.parallel, config.rollout
    # Other checks report the problems of such a layout.
    if parallel.ranks % parallel.replica_ranks or parallel.ranks % machine.nodes:
        return ()
    listed = []
    share = parallel.ranks // machine.nodes
    for rank in range(parallel.ranks):
        tensor, context, data, pipeline = rank_coordinates(config, rank)
        kind = f"torchrun: tensor {tensor}, "
        kind += f"context {context}, " if parallel.context > 1 else ""
        kind += f"pipeline {pipeline}, data {data}"
        # torchrun gives local rank n the n-th visible GPU.
        place = f"GPU {rank % share}" if device == "cuda" else "1 thread"
        place += f" of node {rank // share}" if machine.nodes > 1 else ""
        listed.append(PlannedProcess(f"rank {rank}", kind, place))
    if rollout is not None:
        listed.append(
            PlannedProcess("controller", "Ray actor: prompts, admission, batches", "1 thread")
        )
        for engine in range(engine_count(config)):
            kind = "Ray actor: vLLM and its core process, rewards"
            if rollout.workers > 1:
                kind = f"Ray actor: vLLM, its core process and {rollout.workers} workers, rewards"
            listed.append(
                PlannedProcess(
                    f"engine {engine}",
                    kind,
                    _engine_place(config, device, engine, share, machine),
                )
            )
        if config.weights.carrier.per_engine:
            where = "rank 0's machine" + (", on its GPU" if device == "cuda" else "")
            listed.append(
                PlannedProcess("sender", "Ray actor: sends each engine the weights", where)
            )
        elif config.weights.carrier.other_machines:
            kind = "Ray actor: two versions of the weights in /dev/shm"
            listed.append(PlannedProcess("relays", kind, "each other machine with engines"))
    return tuple(listed)


def engines_elsewhere(config: Config, machine: Machine) -> bool:
    """Return True if engines may run on other machines than rank 0's. This requires a carrier that
    reaches other machines, and a Ray cluster that the run joins."""
    # Described and counted machines are assumed to be a cluster. Without one, Ray starts on this
    # machine only.
    joins = machine.described or machine.engine_nodes or os.environ.get("RAY_ADDRESS")
    return config.weights.carrier.other_machines and bool(joins)


def engine_count(config: Config) -> int:
    """Return the number of engines, including those that only evaluate."""
    engines = config.rollout.engines if config.rollout else 0
    return engines + (config.eval.engines if config.eval else 0)


def _engine_place(config: Config, device: Device, engine: int, ranks: int, machine: Machine) -> str:
    """Return the device of an engine, as text. `ranks`: number of ranks on its node."""
    assert config.rollout is not None
    workers = config.rollout.workers
    if engines_elsewhere(config, machine):
        what = "GPU" if device == "cuda" else "thread"
        place = f"{number_of(what, workers)} of any machine"
        return f"{place} with as many free" if device == "cuda" else place
    if device == "cpu":
        return number_of("thread", workers)
    # Colocated engines share the GPUs of the ranks; others use the next GPUs.
    first = engine * workers + (0 if config.rollout.placement == "colocated" else ranks)
    return f"GPU {first}" if workers == 1 else f"GPU {first}-{first + workers - 1}"


def by_node(config: Config, device: Device, machine: Machine) -> tuple[tuple[str, str], ...]:
    """Return (name, processes) of each machine; machines with engines only are one entry. Empty for
    a run on one machine, and for a layout that does not divide."""
    ranks, rollout = config.policy.parallel.ranks, config.rollout
    if machine.nodes + machine.engine_nodes == 1 or ranks % machine.nodes:
        return ()
    share, has = ranks // machine.nodes, len(machine.gpus)
    on_gpu, elsewhere = device == "cuda", rollout is not None and engines_elsewhere(config, machine)
    found = []
    for node in range(machine.nodes):
        parts = [counted("rank", node * share, share)]
        parts[0] += f" on {counted('GPU', 0, share)}" if on_gpu else ""
        # The controller runs on the machine of rank 0, which requests its batches.
        if node == 0 and rollout is not None:
            parts += ["the controller"] + ["the engines"] * (not elsewhere)
        if on_gpu and elsewhere and has > share:
            room = engine_room(config, has - share)
            parts.append(f"{counted('GPU', share, has - share)} for engines, {room} at most")
        found.append((f"node {node}", "; ".join(parts)))
    if machine.engine_nodes:
        name = counted("node", machine.nodes, machine.engine_nodes)
        maximum = (
            f", {engine_room(config, has)} at most on each"
            if on_gpu and rollout is not None
            else ""
        )
        found.append((name, f"engines only{maximum}"))
    return tuple(found)


def counted(noun: str, first: int, count: int) -> str:
    """Format `count` things that are numbered from `first`."""
    if count == 1:
        return f"{noun} {first}"
    # A table has `GPU 0-3`, without a plural.
    plural = noun if noun == "GPU" else f"{noun}s"
    return f"{plural} {first}-{first + count - 1}"


def engine_room(config: Config, gpus: int) -> int:
    """Return the number of engines that fit on `gpus` GPUs of one machine."""
    assert config.rollout is not None
    # All workers of an engine must be on one machine.
    return max(0, gpus) // config.rollout.workers


def gpus_required(config: Config, machine: Machine, node: int = 0) -> int:
    """Return the number of GPUs that ranks and engines require on machine number `node`, without
    engines that may run on any machine. Ranks use the first GPUs, engines the next."""
    ranks, rollout = -(-config.policy.parallel.ranks // machine.nodes), config.rollout
    if rollout is None or node > 0 or engines_elsewhere(config, machine):
        return ranks
    engines = engine_count(config) * rollout.workers
    # Colocated ranks and engines share the GPUs, so the larger number decides.
    return max(ranks, engines) if rollout.placement == "colocated" else ranks + engines


def gpus_used(config: Config, machine: Machine) -> int:
    """Return the number of GPUs that ranks and engines use on all machines."""
    ranks, rollout = config.policy.parallel.ranks, config.rollout
    if rollout is None:
        return ranks
    engines = engine_count(config) * rollout.workers
    return max(ranks, engines) if rollout.placement == "colocated" else ranks + engines


def spread_notes(config: Config, device: Device, machine: Machine) -> list[str]:
    """Return notes on slow communication between machines."""
    parallel = config.policy.parallel
    share = parallel.ranks // machine.nodes
    group = parallel.tensor * parallel.context
    # The ranks of a tensor and context group are contiguous, so each group is within one node if
    # its size divides the node's number of ranks.
    if device == "cpu" or machine.nodes == 1 or parallel.ranks % machine.nodes or not share % group:
        return []
    context = f" x context {parallel.context}" if parallel.context > 1 else ""
    return [
        f"policy.parallel.tensor: {parallel.tensor}{context} ranks exchange activations in every"
        f" layer, and a node has {share} ranks, so activations pass over the network between"
        " machines: place more ranks on each node (fewer --trainer-nodes), or lower it"
    ]

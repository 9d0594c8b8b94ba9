"""Plan of a configuration on a machine: who runs where, how much memory, how batches divide.

Pure arithmetic on the config, the model's config.json and the machine's sizes; loads no torch. A
plan with `problems` cannot run; `warnings` are about slowness or estimates.
"""

from __future__ import annotations

import math
import os
from collections.abc import Sequence
from dataclasses import dataclass

from megatron_async_rl.config.problem import Problem, UserError
from megatron_async_rl.config.sampling import sampling_warnings
from megatron_async_rl.config.schema import Config
from megatron_async_rl.plan.activations import value_bytes
from megatron_async_rl.plan.fit import gpu_memory
from megatron_async_rl.plan.layers import fp8_problems, fp8_warnings
from megatron_async_rl.plan.layout import (
    Device,
    Process,
    device_of,
    engines_elsewhere,
    layers_of,
    layout_problems,
    processes,
)
from megatron_async_rl.plan.machine import GIB, MIB, Machine
from megatron_async_rl.plan.memory import (
    EngineMemory,
    RankMemory,
    engine_memory,
    rank_memory,
)
from megatron_async_rl.plan.model_files import ModelShape
from megatron_async_rl.policy.supported import ChosenLayers
from megatron_async_rl.rollout.cluster import object_store_bytes

RANK_PROCESS_BYTES = GIB
"""Memory of a trainer process or an engine besides its tensors: Python, torch, libraries."""


@dataclass(frozen=True, kw_only=True)
class Lengths:
    """Tokens of what the data holds: the longest prompt, the mean prompt, and how many prompts were
    read."""

    longest: int
    mean: float
    prompts: int


@dataclass(frozen=True, kw_only=True)
class Batch:
    """The samples of one version. Micro-batch counts are per data-parallel rank, for going through
    it once, with responses of half and of full length."""

    samples: int
    data_parallel: int
    longest: int
    micro_batches_half: int
    micro_batches_full: int

    @property
    def samples_per_rank(self) -> int:
        return self.samples // self.data_parallel


@dataclass(frozen=True, kw_only=True)
class Plan:
    device: Device
    layers: ChosenLayers | None
    """Null where they, or the model, cannot be had."""
    processes: tuple[Process, ...]
    batch: Batch | None
    ranks: tuple[RankMemory, ...]
    """One per pipeline stage."""
    engine: EngineMemory | None
    problems: tuple[Problem, ...]
    warnings: tuple[str, ...]


def make_plan(
    config: Config,
    machine: Machine,
    shape: ModelShape | None,
    *,
    lengths: Lengths | None = None,
    problems: Sequence[Problem] = (),
) -> Plan:
    """`shape`: null when the model directory is in fault. `problems`: what was found outside the
    config, kept first."""
    found = [
        *problems,
        *layout_problems(config, machine, shape),
        *_batch_problems(config, lengths),
        *_schedule_problems(config),
    ]
    layers: ChosenLayers | None = None
    if shape is not None:
        found += _context_problems(config, shape)
        found += fp8_problems(config, machine, shape)
        try:
            layers = layers_of(config, machine, shape)
        except UserError as error:
            found += error.problems
    device = device_of(config, machine)
    parallel = config.policy.parallel
    data_parallel = parallel.data
    longest = longest_sample(config, shape, lengths)
    ranks: tuple[RankMemory, ...] = ()
    engine = None
    if shape is not None:
        ranks = _ranks(config, shape, longest, device, layers)
    if shape is not None and config.rollout is not None:
        engine = engine_memory(config, shape, on_gpu=device == "cuda")
        found += _transport_problems(config, shape, machine)
    notes: list[str] = []
    if shape is not None and device == "cuda" and machine.gpus:

        def ranks_of(changed: Config) -> tuple[RankMemory, ...]:
            wrong = layout_problems(changed, machine, shape) + _batch_problems(changed, lengths)
            if changed is not config and wrong:
                return ()
            return _ranks(changed, shape, longest, device, layers)

        too_large, notes = gpu_memory(config, machine, engine, ranks_of)
        found += too_large
    warnings = _warnings(config, machine, device, ranks, engine, longest) + notes
    warnings += fp8_warnings(config, machine) + sampling_warnings(config)
    if engine is not None and shape is not None:
        warnings += _store_warnings(config, shape, machine, longest)
    return Plan(
        device=device,
        layers=layers,
        processes=processes(config, device, machine),
        batch=_batch(config, data_parallel, longest, lengths) if data_parallel > 0 else None,
        ranks=ranks,
        engine=engine,
        problems=tuple(found),
        warnings=tuple(warnings),
    )


def _ranks(
    config: Config, shape: ModelShape, longest: int, device: Device, layers: ChosenLayers | None
) -> tuple[RankMemory, ...]:
    """One per stage; none for a layout that does not divide."""
    parallel = config.policy.parallel
    if parallel.data < 1 or shape.layers % parallel.pipeline:
        return ()
    return tuple(
        rank_memory(
            config,
            shape,
            stage=stage,
            data_parallel=parallel.data,
            longest=longest,
            on_gpu=device == "cuda",
            layers=layers.family if layers else "local",
        )
        for stage in range(parallel.pipeline)
    )


def context_limit(config: Config, shape: ModelShape) -> int:
    """Tokens of prompt + response: the model's own limit, or `rollout.max_context` below it."""
    if config.rollout is None or config.rollout.max_context is None:
        return shape.context
    return min(config.rollout.max_context, shape.context)


def longest_sample(config: Config, shape: ModelShape | None, lengths: Lengths | None) -> int:
    """Tokens of the longest prompt + response that can come up, as far as it is known."""
    # Data with a longer one are refused: a micro-batch holds whole samples.
    limit = config.policy.tokens_per_micro_batch
    if shape is not None:
        limit = min(limit, context_limit(config, shape))
    if config.rollout is None or lengths is None:
        return limit
    return min(limit, lengths.longest + config.rollout.sampling.max_tokens)


def _batch(config: Config, data_parallel: int, longest: int, lengths: Lengths | None) -> Batch:
    samples = config.flow.prompts_per_step * config.flow.group_size
    budget, parts = config.policy.tokens_per_micro_batch, config.objective.minibatches

    def micro_batches(length: int) -> int:
        share = samples / parts / data_parallel
        if config.policy.sequence == "packed":
            return parts * math.ceil(share * length / budget)
        return parts * math.ceil(share / max(1, budget // max(1, length)))

    half = longest // 2
    if lengths is not None and config.rollout is not None:
        half = math.ceil(lengths.mean + config.rollout.sampling.max_tokens / 2)
    return Batch(
        samples=samples,
        data_parallel=data_parallel,
        longest=longest,
        micro_batches_half=micro_batches(half),
        micro_batches_full=micro_batches(longest),
    )


def _batch_problems(config: Config, lengths: Lengths | None) -> list[Problem]:
    found = []
    parallel, flow = config.policy.parallel, config.flow
    samples = flow.prompts_per_step * flow.group_size
    data_parallel = max(1, parallel.data)
    if samples % data_parallel:
        found.append(
            Problem(
                key="flow.prompts_per_step",
                what=(
                    f"{flow.prompts_per_step} x group_size {flow.group_size} = {samples} samples"
                    f" per step do not divide over {data_parallel} data-parallel ranks"
                ),
                fix=(
                    f"make prompts_per_step x group_size a multiple of {data_parallel}, or change"
                    " policy.parallel.ranks"
                ),
            )
        )
    smallest = flow.prompts_per_step // config.objective.minibatches * flow.group_size
    if 0 < smallest < data_parallel <= samples:
        most_minibatches = flow.prompts_per_step // math.ceil(data_parallel / flow.group_size)
        found.append(
            Problem(
                key="objective.minibatches",
                what=(
                    f"{config.objective.minibatches} minibatches of {flow.prompts_per_step} prompts"
                    f" leave {smallest} samples in one for {data_parallel} data-parallel ranks"
                ),
                fix=(
                    f"set it to at most {most_minibatches}, raise flow.prompts_per_step, or"
                    " lower policy.parallel.ranks"
                ),
            )
        )
    if config.rollout is not None:
        most = (lengths.longest if lengths else 1) + config.rollout.sampling.max_tokens
        # The last token is not fed, and rows are rounded up.
        multiple = config.policy.row_multiple
        needed = max(most, -(-(most - 1) // multiple) * multiple)
        if needed > config.policy.tokens_per_micro_batch:
            found.append(
                Problem(
                    key="policy.tokens_per_micro_batch",
                    what=(
                        f"{config.policy.tokens_per_micro_batch} tokens cannot hold one sample of"
                        f" up to {most} tokens (prompt + rollout.sampling.max_tokens)"
                    ),
                    fix=f"set it to at least {needed}",
                )
            )
    return found


def _context_problems(config: Config, shape: ModelShape) -> list[Problem]:
    rollout = config.rollout
    if rollout is None:
        return []
    found = []
    if rollout.max_context is not None and rollout.max_context > shape.context:
        found.append(
            Problem(
                key="rollout.max_context",
                what=(
                    f"{rollout.max_context} tokens, but the model takes {shape.context}"
                    " (max_position_embeddings)"
                ),
                fix=f"set it to at most {shape.context}, or null for the model's own limit",
            )
        )
    limit = context_limit(config, shape)
    if rollout.sampling.max_tokens >= limit:
        found.append(
            Problem(
                key="rollout.sampling.max_tokens",
                what=(
                    f"{rollout.sampling.max_tokens} response tokens leave no room for a prompt in a"
                    f" context of {limit}"
                ),
                fix=f"set it below {limit} minus the longest prompt",
            )
        )
    return found


def _schedule_problems(config: Config) -> list[Problem]:
    optimizer = config.policy.optimizer
    if optimizer.min_lr <= optimizer.lr:
        return []
    what = f"{optimizer.min_lr} is above policy.optimizer.lr, {optimizer.lr}"
    return [Problem(key="policy.optimizer.min_lr", what=what, fix="lower it, or raise lr")]


def _transport_problems(config: Config, shape: ModelShape, machine: Machine) -> list[Problem]:
    needed = 2 * shape.parameters * value_bytes(config)
    free = machine.shared_memory
    if machine.described or free >= needed:
        return []
    return [
        Problem(
            key="weights.transport",
            what=(
                f"two versions of the model, {needed / MIB:.0f} MiB, are to lie in /dev/shm, which"
                f" has {free / MIB:.0f} MiB free"
            ),
            fix=f"enlarge /dev/shm (docker run --shm-size={math.ceil(needed / GIB) + 1}g)",
        )
    ]


def _store_warnings(config: Config, shape: ModelShape, machine: Machine, longest: int) -> list[str]:
    """Ray puts its object store elsewhere, or on disk, where /dev/shm has no room for it."""
    if machine.described or os.environ.get("RAY_ADDRESS"):
        return []
    responses = config.flow.prompts_per_step * config.flow.group_size
    store = object_store_bytes(responses, longest)
    weights = 2 * shape.parameters * value_bytes(config)
    if weights + store <= machine.shared_memory:
        return []
    return [
        f"two versions of the weights ({weights / MIB:.0f} MiB) and Ray's object store for the"
        f" samples ({store / MIB:.0f} MiB) do not fit into /dev/shm, which has"
        f" {machine.shared_memory / MIB:.0f} MiB free: Ray will be slow (docker run"
        f" --shm-size={math.ceil((weights + store) / GIB) + 1}g)"
    ]


def _warnings(
    config: Config,
    machine: Machine,
    device: Device,
    ranks: Sequence[RankMemory],
    engine: EngineMemory | None,
    longest: int,
) -> list[str]:
    found = []
    optimizer, rollout, parallel = config.policy.optimizer, config.rollout, config.policy.parallel
    if optimizer.warmup_steps >= config.optimizer_steps:
        several = config.objective.steps_per_batch > 1
        found.append(
            f"policy.optimizer.warmup_steps ({optimizer.warmup_steps}) is not below"
            + (" run.steps x minibatches x epochs" if several else " run.steps")
            + f" ({config.optimizer_steps}): lr never reaches its value"
        )
    elsewhere = engines_elsewhere(config, machine)
    if config.weights.transport == "relay" and not elsewhere:
        found.append(
            "weights.transport: relay, but RAY_ADDRESS names no cluster: Ray starts on this machine"
            " alone, and all engines run here"
        )
    if rollout is not None and engine is not None and engine.cache_tokens is not None:
        at_once = engine.cache_tokens // longest
        if at_once < 1:
            found.append(
                f"rollout.kv_cache_gib ({rollout.kv_cache_gib:g}) holds no response of {longest}"
                " tokens: raise it"
            )
        elif at_once < min(
            rollout.max_concurrent, config.flow.prompts_per_step * config.flow.group_size
        ):
            found.append(
                f"rollout.kv_cache_gib holds {at_once} responses of full length at a time; more"
                " wait inside the engine"
            )
    if device == "cpu":
        count = parallel.ranks + (rollout.engines if rollout and not elsewhere else 0)
        if not machine.described and count > machine.cores:
            found.append(
                f"{count} ranks and engines share {machine.cores} cores: it works, at the speed of"
                f" {machine.cores}"
            )
        needed = _host_bytes(config, ranks, None if elsewhere else engine)
        if ranks and not machine.described and needed > machine.memory:
            found.append(
                f"about {needed / GIB:.1f} GiB of memory are needed, this machine gives"
                f" {machine.memory / GIB:.1f} GiB"
            )
    elif machine.gpus and ranks:
        held = sum(rank.host for rank in ranks) * (parallel.ranks // len(ranks)) // machine.nodes
        if not machine.described and held > machine.memory:
            found.append(
                "copies of the weights (reference, proximal policies), offloaded moments and the"
                " copy that a checkpoint is written from (checkpoint.asynchronous) take about"
                f" {held / GIB:.1f} GiB of host memory over all ranks of a machine, this one gives"
                f" {machine.memory / GIB:.1f} GiB"
            )
    return found


def _host_bytes(config: Config, ranks: Sequence[RankMemory], engine: EngineMemory | None) -> int:
    per_stage = config.policy.parallel.ranks // max(1, len(ranks))
    total = (
        sum(rank.total + rank.host for rank in ranks) * per_stage
        + config.policy.parallel.ranks * RANK_PROCESS_BYTES
    )
    if engine is not None and config.rollout is not None:
        total += config.rollout.engines * (
            engine.weights + (engine.cache or 0) + RANK_PROCESS_BYTES
        )
    return total

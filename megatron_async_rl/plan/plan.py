"""Plan of a config on a machine: placement of processes, memory, division of batches, step time.

A plan is arithmetic on the config, the model's config.json and the machine's sizes; it does not
import torch. A config whose plan has `problems` cannot run; `warnings` concern speed, estimates and
unusual settings.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from megatron_async_rl.config.problem import Problem, UserError, number_of
from megatron_async_rl.config.rollout_rules import length_warnings, sampling_warnings
from megatron_async_rl.config.schema import Config
from megatron_async_rl.config.weights import DEFAULT_CARRIER
from megatron_async_rl.flow.device_phases import Phase
from megatron_async_rl.plan.cache import cache_problems
from megatron_async_rl.plan.dev_shm import shared_memory_notes, shared_memory_problems
from megatron_async_rl.plan.estimate import Estimate, estimate
from megatron_async_rl.plan.fit import (
    GpuNeed,
    gpu_memory,
)
from megatron_async_rl.plan.host import HostMemory, host_memory, host_problems
from megatron_async_rl.plan.layout import (
    Device,
    PlannedProcess,
    by_node,
    device_of,
    engines_elsewhere,
    layers_of,
    processes,
    spread_notes,
)
from megatron_async_rl.plan.layout_problems import (
    fp8_problems,
    fp8_warnings,
    gpu_problems,
    layout_problems,
)
from megatron_async_rl.plan.machine import Machine
from megatron_async_rl.plan.memory import EngineMemory, RankMemory, engine_memory, rank_memory
from megatron_async_rl.plan.model_files import ModelShape
from megatron_async_rl.plan.totals import (
    Batch,
    PromptLengths,
    Totals,
    TrainingSource,
    batch_of,
    batch_problems,
    context_problems,
    longest_sample,
    totals,
)
from megatron_async_rl.policy.families import ChosenLayers


@dataclass(frozen=True, kw_only=True)
class RunPlan:
    """Result of `make_plan`."""

    device: Device
    layers: ChosenLayers | None
    """Layers of the policy; null if the model's sizes are unknown or the layers are unavailable."""
    processes: tuple[PlannedProcess, ...]
    nodes: tuple[tuple[str, str], ...]
    """(name, processes) of each machine; empty for a run on one machine."""
    batch: Batch | None
    ranks: tuple[RankMemory, ...]
    """Memory of a rank of each pipeline stage."""
    engine: EngineMemory | None
    estimate: Estimate | str
    """Time of a step, or the reason why it is unknown; empty if the plan has problems."""
    peaks: Mapping[Phase, GpuNeed]
    """Memory of a GPU that engines and policy share, by device phase."""
    problems: tuple[Problem, ...]
    warnings: tuple[str, ...]
    unfit: tuple[Problem, ...] = ()
    """The subset of `problems` that more GPUs or memory would fix."""
    routed_bytes: int = 0
    """Bytes per token of a sample for the recorded experts; 0 if they are not recorded."""
    hosts: tuple[HostMemory, ...] = ()
    """Host memory of the machines, equal ones together; the first entry includes rank 0's."""
    totals: Totals | None = None
    """Sums over the whole run; null if the model or the layout has a problem."""
    absent: tuple[str, ...] = ()
    """Keys whose files are not here and therefore were not checked."""


def make_plan(
    config: Config,
    machine: Machine,
    shape: ModelShape | None,
    *,
    lengths: PromptLengths | None = None,
    held_out: int = 0,
    problems: Sequence[Problem] = (),
    sources: Sequence[TrainingSource] = (),
) -> RunPlan:
    """Return the plan of `config` on `machine`.

    `shape`: null if the model's sizes are unknown. `lengths`: null if the data was not read.
    `held_out`: tokens of the longest held-out prompt and its response; 0 without held-out data.
    `problems`: earlier findings, which the plan lists first. `sources`: sources of the training
    data whose rows are known.
    """
    # Earlier problems first: a missing model explains later ones.
    found = [
        *problems,
        *layout_problems(config, machine, shape),
        *batch_problems(config, lengths),
        *_schedule_problems(config),
    ]
    layers: ChosenLayers | None = None
    if shape is not None:
        found += context_problems(config, shape)
        found += fp8_problems(config, machine, shape)
        try:
            layers = layers_of(config, machine, shape)
        except UserError as error:
            found += error.problems
    unfit: list[Problem] = []
    device = device_of(config, machine)
    parallel = config.policy.parallel
    # Memory must suffice for the longest sample that data and limits permit.
    longest = longest_sample(config, shape, lengths)
    unread = bool(problems) and lengths is None and config.rollout is not None
    if unread and config.rollout is not None:
        # The plan assumes the shortest prompts, because an unknown length must not refuse it for
        # memory.
        longest = min(longest, 1 + config.rollout.sampling.max_tokens)
    # Engines also sample held-out responses, whose length does not matter to the policy.
    sampled = max(longest, held_out)
    ranks: tuple[RankMemory, ...] = ()
    engine = None
    if shape is not None:
        ranks = _ranks(config, shape, longest, device, layers)
    if shape is not None and config.rollout is not None:
        engine = engine_memory(config, shape, on_gpu=device == "cuda")
        unfit += shared_memory_problems(config, engine, machine)
        found += cache_problems(config, engine, sampled)
    notes: list[str] = []
    peaks: dict[Phase, GpuNeed] = {}
    hosts: tuple[HostMemory, ...] = ()
    routed = 0
    if shape is not None:
        known = shape  # not null in the functions below, for mypy
        routed = shape.routed_bytes if config.policy.routing_replay == "rollout" else 0

        def ranks_of(changed: Config) -> tuple[RankMemory, ...]:
            wrong = layout_problems(changed, machine, known) + batch_problems(changed, lengths)
            if changed.rollout is not None:
                own = engine_memory(changed, known, on_gpu=device == "cuda")
                wrong += cache_problems(changed, own, sampled)
            # A changed config with a problem is not a fix; `config` itself is planned anyway.
            if changed is not config and wrong:
                return ()
            return _ranks(changed, known, longest, device, layers)

        def hosts_of(changed: Config) -> tuple[HostMemory, ...]:
            engines = None
            if changed.rollout is not None:
                engines = engine_memory(changed, known, on_gpu=device == "cuda")
            return host_memory(
                changed,
                machine,
                device,
                ranks_of(changed),
                engines,
                longest=longest,
                routed_bytes=routed,
            )

        if device == "cuda" and machine.gpus:
            too_large, notes, peaks = gpu_memory(config, machine, engine, ranks_of, sampled)
            unfit += too_large
        hosts = hosts_of(config)
        beyond, host_notes = host_problems(config, machine, hosts, hosts_of)
        unfit += beyond
        notes += host_notes
    # Memory last, because it is the least certain.
    found += unfit
    unfit += gpu_problems(config, machine)  # already in `found`, from layout_problems
    if unread:
        notes.append("prompts are assumed to have one token, because the data was not read")
    notes += spread_notes(config, device, machine)
    notes += fp8_warnings(config, machine) + sampling_warnings(config) + length_warnings(config)
    if engine is not None:
        notes += shared_memory_notes(config, engine, machine, longest)
    # A layout with fewer ranks than one replica has no batch.
    batch = batch_of(config, parallel.data, longest, lengths) if parallel.data > 0 else None
    sums = None
    if shape is not None and batch is not None:
        sums = totals(config, machine, device, shape, batch, sources)
    return RunPlan(
        device=device,
        layers=layers,
        processes=processes(config, device, machine),
        nodes=by_node(config, device, machine),
        batch=batch,
        ranks=ranks,
        engine=engine,
        # No speed for a run that cannot start.
        estimate=estimate(config, machine, device, shape, batch) if not found else "",
        peaks=peaks,
        problems=tuple(found),
        unfit=tuple(unfit),
        warnings=(*_warnings(config, machine, device, engine, longest), *notes),
        routed_bytes=routed,
        hosts=hosts,
        totals=sums,
    )


def _ranks(
    config: Config, shape: ModelShape, longest: int, device: Device, layers: ChosenLayers | None
) -> tuple[RankMemory, ...]:
    """Return the memory of a rank of each stage; empty for a layout that does not divide."""
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


def _schedule_problems(config: Config) -> list[Problem]:
    optimizer = config.policy.optimizer
    if optimizer.min_lr <= optimizer.lr:
        return []
    what = f"{optimizer.min_lr} is above policy.optimizer.lr ({optimizer.lr})"
    return [Problem(key="policy.optimizer.min_lr", what=what, fix="lower it, or raise lr")]


def _warnings(
    config: Config,
    machine: Machine,
    device: Device,
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
            + f" ({config.optimizer_steps}): the learning rate never reaches policy.optimizer.lr"
        )
    if rollout is not None and rollout.quantised and not config.objective.corrections:
        found.append(
            f"rollout.vllm.quantization ({rollout.vllm['quantization']}): samples have log-probs of"
            " quantised weights, which differ from the policy's; add objective.corrections (tis),"
            " which weights tokens by their ratio"
        )
    elsewhere = engines_elsewhere(config, machine)
    carrier = config.weights.carrier
    if carrier.other_machines and not elsewhere:
        less = f", where {DEFAULT_CARRIER} copies nothing" if carrier.per_engine else ""
        found.append(
            f"weights.transport: {config.weights.transport}, but RAY_ADDRESS is not set: Ray starts"
            f" on this machine only, and all engines run here{less}"
        )
    if rollout is not None and engine is not None and engine.cache_tokens is not None:
        # Full length is the worst case: more responses fit if they are shorter.
        at_once = engine.cache_tokens // longest
        # An engine whose cache holds no sample does not start.
        if (
            0
            < at_once
            < min(rollout.max_concurrent, config.flow.prompts_per_step * config.flow.group_size)
        ):
            found.append(
                f"rollout.kv_cache_gib suffices for {number_of('sample', at_once)} of full length"
                " at a time; other responses wait in the engine"
            )
    if device == "cpu":
        count = parallel.ranks + (rollout.engines if rollout and not elsewhere else 0)
        if not machine.described and count > machine.cores:
            found.append(
                f"{count} ranks and engines share {machine.cores} cores, which slows them down"
            )
        if config.model.dtype == "bfloat16" and machine.lacks_bfloat16:
            found.append(
                "model.dtype: bfloat16, but this CPU has no instructions for it (AMX or"
                " AVX512-BF16): the policy trains much faster in float32"
            )
    return found

"""Plan of a configuration on a machine: who runs where, how much memory, how batches divide.

Pure arithmetic on the config, the model's config.json and the machine's sizes; loads no torch. A
plan with `problems` cannot run; `warnings` are about slowness or estimates.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from megatron_async_rl.config.problem import Problem, UserError, number_of
from megatron_async_rl.config.rollout_rules import length_warnings, sampling_warnings
from megatron_async_rl.config.schema import Config
from megatron_async_rl.config.weights import DEFAULT_CARRIER
from megatron_async_rl.flow.colocated import Phase
from megatron_async_rl.plan.estimate import Estimate, estimate
from megatron_async_rl.plan.fit import (
    GpuNeed,
    gpu_memory,
    shared_memory_notes,
    shared_memory_problems,
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
    device: Device
    layers: ChosenLayers | None
    """Null if they, or the model, are not available."""
    processes: tuple[PlannedProcess, ...]
    nodes: tuple[tuple[str, str], ...]
    """Name of each machine -> its processes, for a run over several machines."""
    batch: Batch | None
    ranks: tuple[RankMemory, ...]
    """One per pipeline stage."""
    engine: EngineMemory | None
    estimate: Estimate | str
    """Seconds of a step, or why they are not known."""
    peaks: Mapping[Phase, GpuNeed]
    """Memory of a GPU that engines and policy share, by phase."""
    problems: tuple[Problem, ...]
    warnings: tuple[str, ...]
    unfit: tuple[Problem, ...] = ()
    """Problems that are about GPUs or memory that the machine lacks."""
    routed_bytes: int = 0
    """Bytes of the experts that come with each token of a sample."""
    hosts: tuple[HostMemory, ...] = ()
    """Host memory of each machine, those that are alike together; the first is rank 0's."""
    totals: Totals | None = None
    """Sums over the whole run; null where the model or the layout is in fault."""
    absent: tuple[str, ...] = ()
    """Keys whose files are not here and were not checked."""


def make_plan(
    config: Config,
    machine: Machine,
    shape: ModelShape | None,
    *,
    lengths: PromptLengths | None = None,
    problems: Sequence[Problem] = (),
    sources: Sequence[TrainingSource] = (),
) -> RunPlan:
    """`shape`: null when the model directory is in fault. `problems`: what was found outside the
    config, kept first. `sources`: of the training data, as far as they are here."""
    # Problems from outside first: a missing model explains later ones.
    found = [
        *problems,
        *layout_problems(config, machine, shape),
        *batch_problems(config, lengths),
        *_schedule_problems(config),
    ]
    layers: ChosenLayers | None = None
    if shape is not None:
        found += context_problems(config, shape)
        # These need the model's sizes.
        found += fp8_problems(config, machine, shape)
        try:
            layers = layers_of(config, machine, shape)
        except UserError as error:
            found += error.problems
    unfit: list[Problem] = []
    device = device_of(config, machine)
    parallel = config.policy.parallel
    # Memory is planned for the longest sample that data and limits permit.
    longest = longest_sample(config, shape, lengths)
    unread = bool(problems) and lengths is None and config.rollout is not None
    if unread and config.rollout is not None:
        # The data may be at fault. A plan is refused for memory only if the shortest prompts lack
        # it.
        longest = min(longest, 1 + config.rollout.sampling.max_tokens)
    ranks: tuple[RankMemory, ...] = ()
    engine = None
    if shape is not None:
        ranks = _ranks(config, shape, longest, device, layers)
    if shape is not None and config.rollout is not None:
        engine = engine_memory(config, shape, on_gpu=device == "cuda")
        unfit += shared_memory_problems(config, engine, machine)
    notes: list[str] = []
    peaks: dict[Phase, GpuNeed] = {}
    hosts: tuple[HostMemory, ...] = ()
    routed = 0
    if shape is not None:
        known = shape  # for the functions below
        routed = shape.routed_bytes if config.policy.routing_replay == "rollout" else 0

        def ranks_of(changed: Config) -> tuple[RankMemory, ...]:
            wrong = layout_problems(changed, machine, known) + batch_problems(changed, lengths)
            # The config itself is planned even with a faulty layout, as far as it goes.
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
            too_large, notes, peaks = gpu_memory(config, machine, engine, ranks_of)
            unfit += too_large
        hosts = hosts_of(config)
        beyond, host_notes = host_problems(config, machine, hosts, hosts_of)
        unfit += beyond
        notes += host_notes
    # Memory last: it is the least certain.
    found += unfit
    unfit += gpu_problems(config, machine)  # layout_problems has found them, too
    if unread:
        notes.append("prompts are assumed to be one token long, because the data was not read")
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
        # Speed of a run that cannot start would mislead.
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
    """One per stage; none for a layout that does not divide."""
    parallel = config.policy.parallel
    # The stages' sizes are not defined.
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
    what = f"{optimizer.min_lr} is above policy.optimizer.lr, {optimizer.lr}"
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
            + f" ({config.optimizer_steps}): lr never reaches its value"
        )
    if rollout is not None and rollout.quantised and not config.objective.corrections:
        found.append(
            f"rollout.vllm.quantization ({rollout.vllm['quantization']}): log-probs of samples are"
            " those of quantised weights, and the policy's are not: objective.corrections (tis)"
            " weighs by their ratio"
        )
    elsewhere = engines_elsewhere(config, machine)
    carrier = config.weights.carrier
    if carrier.other_machines and not elsewhere:
        less = f", where {DEFAULT_CARRIER} copies nothing" if carrier.per_engine else ""
        found.append(
            f"weights.transport: {config.weights.transport}, but RAY_ADDRESS names no cluster: Ray"
            f" starts on this machine alone, and all engines run here{less}"
        )
    if rollout is not None and engine is not None and engine.cache_tokens is not None:
        # Full length is the worst case: shorter responses share the cache.
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
                f"rollout.kv_cache_gib holds {number_of('response', at_once)} of full length at a"
                " time; more wait inside the engine"
            )
    if device == "cpu":
        count = parallel.ranks + (rollout.engines if rollout and not elsewhere else 0)
        if not machine.described and count > machine.cores:
            found.append(
                f"{count} ranks and engines share {machine.cores} cores: it works, at the speed of"
                f" {machine.cores}"
            )
    return found

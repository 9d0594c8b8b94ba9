"""A plan on one or two screens: the resolved config, processes, batch, memory, the staleness law
and the time of a step."""

from __future__ import annotations

import math
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.table import Table
from rich.text import Text

from megatron_async_rl.config.flow import ExactLag, OldestFirst, Replay, Windowed
from megatron_async_rl.config.load import write
from megatron_async_rl.config.schema import Config
from megatron_async_rl.flow.staleness import admitted_limit, max_lag
from megatron_async_rl.metrics.log import read_newest
from megatron_async_rl.plan.estimate import Overlap, run_ahead
from megatron_async_rl.plan.fit import lent_bytes, twin_bytes
from megatron_async_rl.plan.machine import GIB, MIB, Machine
from megatron_async_rl.plan.plan import Plan
from megatron_async_rl.report.summary import Rates, measure, update_per_lr

PROCESSES_SHOWN = 16
MEASURED_STEPS = 2000
"""Rates are taken from so many last steps of a run."""


def show_plan(
    plan: Plan, config: Config, machine: Machine, console: Console, measured_in: Path | None = None
) -> None:
    """`measured_in`: a run whose measured rates say what overlap to expect."""
    _heading(console, "config")
    _print(console, resolved(config))
    _heading(console, "processes")
    _print(console, f"device {plan.device}; {machine_line(machine)}")
    if plan.layers is not None and plan.device == "cuda":
        why = f" ({plan.layers.why})" if plan.layers.why else ""
        _print(console, f"layers {plan.layers.family}{why}{_fp8(config)}")
    if plan.processes:
        console.print(_processes(plan))
    if plan.nodes:
        console.print(_nodes(plan))
    if plan.batch is not None:
        _heading(console, "one batch")
        _print(console, _batch(plan, config))
    if plan.ranks:
        _heading(console, "memory")
        console.print(_rank_memory(plan, config))
    if plan.engine is not None and config.rollout is not None:
        _print(console, _engine_memory(plan, config))
        if config.weights.transport == "relay":
            two = size(2 * plan.engine.weights)
            _print(console, f"each other machine with engines: {two} in /dev/shm, two versions")
        if config.weights.transport == "collective":
            two = size(2 * plan.engine.weights)
            _print(console, f"each engine: {two} in its machine's /dev/shm, two versions")
        if config.weights.transport == "cuda_ipc":
            two = size(lent_bytes(config, plan.engine))
            where = "in /dev/shm" if plan.device == "cpu" else "of its GPU"
            _print(console, f"each rank, while engines load: {two} {where}, two buckets")
    if plan.peaks:
        console.print(_peaks(plan))
    if config.rollout is not None:
        rows = read_newest(measured_in, MEASURED_STEPS) if measured_in is not None else []
        _heading(console, "staleness")
        _print(console, f"{staleness_law(config)}\n{planning_rule(config, update_per_lr(rows))}")
        rates = measure(rows)
        if measured_in is not None:
            _heading(console, "overlap")
            nothing = f"not known: {measured_in} has not logged what its engines did for two steps"
            _print(console, expected_overlap(config, rates, measured_in) if rates else nothing)
        if rates is None:
            _heading(console, "step time")
            found = plan.estimate
            _print(console, found if isinstance(found, str) else found.in_words())
    for warning in plan.warnings:
        console.print(Text.assemble(("note: ", "yellow bold"), warning), soft_wrap=True)


def _fp8(config: Config) -> str:
    fp8 = config.policy.fp8
    if fp8 is None:
        return ""
    kept = "kept in 8 bits" if fp8.primary_weights else "in bfloat16, rounded in each pass"
    return f"; products in 8 bits, {fp8.recipe}; their weights {kept}"


def machine_line(machine: Machine) -> str:
    gpus = f"{len(machine.gpus)} x {machine.gpus[0].name}" if machine.gpus else "no GPU"
    nodes = machine.nodes + machine.engine_nodes
    count = f"{nodes} nodes, each with" if nodes > 1 else "one node with"
    if machine.described:
        return f"as described: {count} {gpus}; cores and host memory are not checked"
    here = f"{count} what this machine has" if nodes > 1 else "this machine"
    return f"{here}: {machine.cores} cores, {size(machine.memory)} memory, {gpus}"


def resolved(config: Config) -> str:
    """The whole config, defaults included, a section to a line."""
    lines = []
    for name, section in config.model_dump(mode="json").items():
        text = write(section, one_line=True).removesuffix("...\n").strip()
        lines.append(f"{name}: {text}")
    return "\n".join(lines)


def staleness_law(config: Config) -> str:
    """The staleness bound that this config gives, in words, and what selection, late groups and
    placement make of it."""
    flow, rollout = config.flow, config.rollout
    ratio, prompts, responses = (
        flow.async_ratio,
        flow.prompts_per_step,
        flow.group_size,
    )
    limit = admitted_limit(0, prompts, ratio, oversample=flow.oversample)
    fresh = config.fresh_steps
    lines = (
        [f"fresh      the first {fresh} steps are synchronous: a control calibrates on them"]
        if fresh and ratio
        else []
    )
    lines.append(f"lag        {_lag(config)}")
    if ratio:
        lines.append(
            f"admission  at version t at most (t + 1) x {prompts} + {limit - prompts} prompts have"
            " been admitted"
        )
    lines.append(
        f"queue      at most {limit} prompts ({limit * responses} responses) are admitted and not"
        " yet trained on"
    )
    lines.append(f"selection  {_selection(config)}")
    lines.append(
        f"late       {flow.late}: when a group that has to train now is still running,"
        f" {LATE[flow.late]}"
    )
    if flow.oversample:
        lines.append(
            f"oversample {flow.oversample:g} x {prompts} of those prompts are beyond what"
            " async_ratio asks for; the first to finish train, the others go on"
        )
    if rollout is not None:
        if ratio and not isinstance(flow.selection, ExactLag):
            lines.append(
                f"in flight  {rollout.in_flight}: running responses {IN_FLIGHT[rollout.in_flight]}"
            )
        lines.append(f"placement  {rollout.placement}: {PLACEMENT[rollout.placement]}")
    return "\n".join(lines)


LATE = {
    "wait": "the trainer waits for it",
    "drop": "it is dropped if enough others are there, which favours short responses",
}
IN_FLIGHT = {
    "keep": "go on under new weights over the key-value cache of the old ones",
    "recompute": "go on under new weights, which read prompt and response so far again",
}
PLACEMENT = {
    "disaggregated": "engines have devices of their own and sample while the policy trains",
    "colocated": "engines and policy take turns on the same devices",
}


def _lag(config: Config) -> str:
    flow, bound = config.flow, max_lag(config.flow.async_ratio)
    if isinstance(flow.selection, ExactLag) and bound:
        return (
            f"exactly {bound}: every sample trains {bound} updates after the one version that made"
            f" it; those made before the first update wait 0 to {bound}"
        )
    if isinstance(flow.selection, Replay):
        return (
            f"no bound: stored responses train at any age; what enters the store is at most {bound}"
            " versions old"
        )
    if bound == 0:
        return (
            "async_ratio 0: synchronous; every token is trained on by the weights that sampled it"
            " (lag 0)"
        )
    return (
        f"version_now - start_version <= ceil({flow.async_ratio:g}) = {bound}, kept by admitting"
        " later"
    )


def _selection(config: Config) -> str:
    selection, prompts = config.flow.selection, config.flow.prompts_per_step
    match selection:
        case Windowed():
            older = math.ceil((1 + selection.window) * prompts)
            return (
                f"windowed: groups train as they finish; one may overtake while fewer than {older}"
                " older ones wait to train"
            )
        case ExactLag():
            return (
                f"exact_lag: {selection.lag} batches wait in host memory; no response runs while"
                " the weights change"
            )
        case Replay():
            return (
                f"replay: a step takes the newest batch with probability {selection.recent:g}, else"
                f" stored responses, of which the newest {selection.per_prompt} of each prompt are"
                " kept"
            )
        case OldestFirst():
            return "oldest_first: groups train in the order they were admitted"


def expected_overlap(config: Config, rates: Rates, run_dir: Path) -> str:
    """Applies the rates of the run in `run_dir` to this config: more samples take longer in
    proportion, on either side."""
    assert config.rollout is not None
    measured, planned = run_sizes(run_dir), sizes_of(config.model_dump(mode="json"))
    factor = planned["samples"] / measured["samples"] if measured else 1.0
    overlap = Overlap(
        generate_s=factor * rates.generate_s(config.rollout.engines),
        train_s=factor * rates.train_s,
        publish_s=rates.publish_s,
        pause_s=rates.pause_s,
        engines=config.rollout.engines,
        run_ahead=run_ahead(config),
    )
    speed = f"an engine that is busy samples {rates.tokens_per_busy_s:,.0f} tokens/s"
    of = f"measured       in {run_dir}, {rates.steps} steps: {speed}"
    if factor != 1.0:
        of += f"; scaled by {factor:.3g} in samples per step"
    if measured and measured["ranks"] != planned["ranks"]:
        of += f"; T_train is of {measured['ranks']} ranks, and there are {planned['ranks']} here"
    return f"{of}\n{overlap.in_words()}"


def run_sizes(run_dir: Path) -> dict[str, int] | None:
    """The sizes in the config that a run was started with; null where that is not there to read."""
    import yaml

    try:
        return sizes_of(yaml.safe_load((run_dir / "config.yaml").read_text()))
    except (OSError, KeyError, TypeError, yaml.YAMLError):
        return None


def sizes_of(tree: Mapping[str, Any]) -> dict[str, int]:
    """Samples of a step and trainer ranks, of a whole config as a tree."""
    samples = int(tree["flow"]["prompts_per_step"]) * int(tree["flow"]["group_size"])
    return {"samples": samples, "ranks": int(tree["policy"]["parallel"]["ranks"])}


def planning_rule(config: Config, measured: float | None) -> str:
    """S·η·G and T·η·G of arXiv 2607.01083, with `measured` for G; stable while they stay below the
    two radii of the rule."""
    lag, lr = max_lag(config.flow.async_ratio), config.policy.optimizer.lr
    steps, per_version = config.optimizer_steps, config.objective.steps_per_batch
    if isinstance(config.flow.selection, Replay):
        return "drift      S·η·G has no bound: with replay the largest lag S has none"
    text = (
        f"drift      S·η·G: largest lag S = {lag}, learning rate η = {lr:g}, update per learning"
        " rate G = "
    )
    if measured is None:
        return f"{text}not measured (a run with any control logs it: mar plan --from RUN)"
    return (
        f"{text}{measured:.3g}: {lag * per_version * lr * measured:.3g} from the oldest sample to the policy,"
        f" against T·η·G = {steps * lr * measured:.3g} in all {steps} steps"
    )


def size(count: int) -> str:
    """Bytes in MiB or GiB."""
    return f"{count / GIB:.1f} GiB" if count >= GIB else f"{count / MIB:.1f} MiB"


def _heading(console: Console, text: str) -> None:
    console.print(Text(text, style="bold cyan"))


def _print(console: Console, text: str) -> None:
    console.print(text, markup=False, highlight=False, soft_wrap=True)


def _processes(plan: Plan) -> Table:
    table = Table(box=None, padding=(0, 2, 0, 0), header_style="dim")
    for column in ("process", "what", "on"):
        table.add_column(column)
    for process in plan.processes[:PROCESSES_SHOWN]:
        table.add_row(process.name, process.kind, process.device)
    if len(plan.processes) > PROCESSES_SHOWN:
        table.add_row("...", f"and {len(plan.processes) - PROCESSES_SHOWN} more", "")
    return table


def _nodes(plan: Plan) -> Table:
    table = Table(box=None, padding=(0, 2, 0, 0), header_style="dim")
    for column in ("machine", "what it has"):
        table.add_column(column)
    shown = plan.nodes
    if len(shown) > PROCESSES_SHOWN:
        beyond = (f"and {len(shown) - PROCESSES_SHOWN} more", "as many ranks each")
        shown = (*shown[: PROCESSES_SHOWN - 1], beyond, shown[-1])
    for node in shown:
        table.add_row(*node)
    return table


def _batch(plan: Plan, config: Config) -> str:
    batch, flow = plan.batch, config.flow
    assert batch is not None
    return (
        f"{flow.prompts_per_step} prompts x {flow.group_size} responses = {batch.samples} samples,"
        f" {batch.samples_per_rank} on each of {batch.data_parallel} data-parallel ranks, up to"
        f" {batch.longest} tokens each (prompt + response)\n{_steps(config)}micro-batches of"
        f" {config.policy.tokens_per_micro_batch} tokens: {batch.micro_batches_half} per rank at"
        f" half length, {batch.micro_batches_full} at full length{_routed(plan)}"
    )


def _routed(plan: Plan) -> str:
    if not plan.routed_bytes or plan.batch is None:
        return ""
    most = plan.routed_bytes * plan.batch.longest * plan.batch.samples
    return (
        f"\nexperts that the engines chose: {plan.routed_bytes} bytes a token, up to {size(most)} of a"
        " batch in the controller, and of each data-parallel rank's samples on the rank's host"
    )


def _steps(config: Config) -> str:
    """A line where a batch is several optimizer steps."""
    objective, prompts = config.objective, config.flow.prompts_per_step
    if objective.steps_per_batch == 1:
        return ""
    fewest = prompts // objective.minibatches
    groups = f"{fewest}" if prompts % objective.minibatches == 0 else f"{fewest} or {fewest + 1}"
    return (
        f"{objective.steps_per_batch} optimizer steps: {objective.minibatches} minibatches of"
        f" {groups} prompts x {objective.epochs} epochs; each epoch's "
    )


def _rank_memory(plan: Plan, config: Config) -> Table:
    table = Table(box=None, padding=(0, 2, 0, 0), header_style="dim")
    table.add_column("each rank of")
    fp8 = any(rank.fp8 for rank in plan.ranks)
    columns = [
        "parameters",
        *(["weights in 8 bits ~"] if fp8 else []),
        "gradients",
        "optimizer",
        "controls",
        "activations ~",
        "log-probs, targets ~",
        "total ~",
    ]
    holds = any(rank.held for rank in plan.ranks)
    offloads = any(rank.offloaded for rank in plan.ranks)
    columns += ["other weights, on the host"] if holds else []
    columns += ["offloaded, on the host"] if offloads else []
    columns += ["while engines generate, on the host"] if plan.peaks else []
    columns += ["a checkpoint's copy, on the host"] if config.checkpoint.asynchronous else []
    for column in columns:
        table.add_column(column, justify="right")
    for rank in plan.ranks:
        parts = [
            rank.parameters,
            *([rank.fp8] if fp8 else []),
            rank.gradients,
            rank.optimizer,
            rank.controls,
            rank.activations,
            rank.logprobs,
            rank.total,
        ]
        parts += [rank.held] if holds else []
        parts += [rank.offloaded] if offloads else []
        parts += [twin_bytes(config, rank)] if plan.peaks else []
        parts += [rank.staged] if config.checkpoint.asynchronous else []
        table.add_row(
            f"stage {rank.stage}" if len(plan.ranks) > 1 else "the policy",
            *(size(part) for part in parts),
        )
    return table


def _peaks(plan: Plan) -> Table:
    table = Table(box=None, padding=(0, 2, 0, 0), header_style="dim")
    table.add_column("a GPU in phase")
    table.add_column("peak ~", justify="right")
    table.add_column("it has", justify="right")
    table.add_column("what takes most")
    for phase, need in plan.peaks.items():
        table.add_row(phase, size(need.total), size(need.has), need.largest)
    return table


def _engine_memory(plan: Plan, config: Config) -> str:
    engine, rollout, batch = plan.engine, config.rollout, plan.batch
    assert engine is not None
    assert rollout is not None
    if engine.cache is None or engine.cache_tokens is None:
        return (
            f"each of {rollout.engines} engines: weights {size(engine.weights)}; KV cache takes"
            f" what is left of {rollout.gpu_memory_utilization:.0%} of its GPU,"
            f" {engine.bytes_per_token} bytes a token"
        )
    at_once = (
        f" = {engine.cache_tokens // batch.longest} responses of {batch.longest}"
        if batch is not None
        else ""
    )
    return (
        f"each of {rollout.engines} engines: weights {size(engine.weights)}, KV cache"
        f" {size(engine.cache)} = {engine.cache_tokens} tokens{at_once}"
    )

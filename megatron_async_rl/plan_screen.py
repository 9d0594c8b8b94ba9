"""A plan on one or two screens: the resolved config, processes, batch, memory and the staleness law."""

from __future__ import annotations

from rich.console import Console
from rich.table import Table
from rich.text import Text

from megatron_async_rl.config.machine import GIB, MIB, Machine
from megatron_async_rl.config.plan import Plan
from megatron_async_rl.config.problem import Problem, screen
from megatron_async_rl.config.schema import Config
from megatron_async_rl.config.yaml_text import write
from megatron_async_rl.flow.law import admitted_limit, max_lag

PROCESSES_SHOWN = 16


def show_plan(plan: Plan, config: Config, machine: Machine, console: Console) -> None:
    _heading(console, "config")
    _print(console, resolved(config))
    _heading(console, "processes")
    gpus = f", {len(machine.gpus)} x {machine.gpus[0].name}" if machine.gpus else ""
    _print(console, f"device {plan.device}; this machine: {machine.cores} cores, {size(machine.memory)} memory{gpus}")
    if plan.processes:
        console.print(_processes(plan))
    if plan.batch is not None:
        _heading(console, "one optimizer step")
        _print(console, _batch(plan, config))
    if plan.ranks:
        _heading(console, "memory")
        console.print(_rank_memory(plan, config))
    if plan.engine is not None and config.rollout is not None:
        _print(console, _engine_memory(plan, config))
    if config.rollout is not None:
        _heading(console, "staleness")
        _print(console, staleness_law(config))
    for warning in plan.warnings:
        console.print(Text.assemble(("note: ", "yellow bold"), warning), soft_wrap=True)


def show_problems(problems: tuple[Problem, ...], source: str, console: Console) -> None:
    count = "1 problem" if len(problems) == 1 else f"{len(problems)} problems"
    _print(console, screen(f"{source}: cannot run: {count}", problems))


def resolved(config: Config) -> str:
    """The whole config, defaults included, a section to a line."""
    lines = []
    for name, section in config.model_dump(mode="json").items():
        text = write(section, one_line=True).removesuffix("...\n").strip()
        lines.append(f"{name}: {text}")
    return "\n".join(lines)


def staleness_law(config: Config) -> str:
    """What the law of `flow.law` comes to for this config."""
    ratio, prompts, responses = config.flow.async_ratio, config.flow.prompts_per_step, config.flow.group_size
    if ratio == 0:
        return "async_ratio 0: synchronous; every token is trained on by the weights that sampled it (lag 0)"
    limit = admitted_limit(0, prompts, ratio)
    fresh = config.fresh_steps
    return (f"fresh      the first {fresh} steps are synchronous: a control calibrates on them\n" if fresh else "") + (
        f"lag        version_now - start_version <= ceil({ratio:g}) = {max_lag(ratio)}, kept by admitting later\n"
        f"admission  at version t at most (t + 1) x {prompts} + {limit - prompts} prompts have been admitted\n"
        f"queue      at most {limit} prompts ({limit * responses} responses) are admitted and not yet trained on"
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


def _batch(plan: Plan, config: Config) -> str:
    batch, flow = plan.batch, config.flow
    assert batch is not None
    return (
        f"{flow.prompts_per_step} prompts x {flow.group_size} responses = {batch.samples} samples, "
        f"{batch.samples_per_rank} on each of {batch.data_parallel} data-parallel ranks, "
        f"up to {batch.longest} tokens each (prompt + response)\n"
        f"micro-batches of {config.policy.tokens_per_micro_batch} tokens: {batch.micro_batches_half} per rank "
        f"at half length, {batch.micro_batches_full} at full length"
    )


def _rank_memory(plan: Plan, config: Config) -> Table:
    table = Table(box=None, padding=(0, 2, 0, 0), header_style="dim")
    table.add_column("each rank of")
    columns = ["parameters", "gradients", "optimizer", "controls", "activations ~", "log-prob chunk ~", "total ~"]
    holds = any(rank.held for rank in plan.ranks)
    for column in [*columns, "other weights, on the host"] if holds else columns:
        table.add_column(column, justify="right")
    for rank in plan.ranks:
        parts = [rank.parameters, rank.gradients, rank.optimizer, rank.controls, rank.activations, rank.logprobs, rank.total]
        parts += [rank.held] if holds else []
        table.add_row(f"stage {rank.stage}" if len(plan.ranks) > 1 else "the policy", *(size(part) for part in parts))
    return table


def _engine_memory(plan: Plan, config: Config) -> str:
    engine, rollout, batch = plan.engine, config.rollout, plan.batch
    assert engine is not None
    assert rollout is not None
    if engine.cache is None or engine.cache_tokens is None:
        return (
            f"each of {rollout.engines} engines: weights {size(engine.weights)}; KV cache takes what is left of "
            f"{rollout.gpu_memory_utilization:.0%} of its GPU, {engine.bytes_per_token} bytes a token"
        )
    at_once = f" = {engine.cache_tokens // batch.longest} responses of {batch.longest}" if batch is not None else ""
    return (
        f"each of {rollout.engines} engines: weights {size(engine.weights)}, KV cache {size(engine.cache)} = "
        f"{engine.cache_tokens} tokens{at_once}"
    )

"""Output of `mar plan`: processes, batch, memory, staleness, step time, totals of the run, problems
and the verdict; the resolved config on request."""

from __future__ import annotations

import re
import textwrap
from collections.abc import Sequence
from pathlib import Path

from rich.console import Console
from rich.table import Table
from rich.text import Text

from megatron_async_rl.config.problem import SCREEN_PROBLEMS, number_of
from megatron_async_rl.config.schema import Config
from megatron_async_rl.config.yaml_tree import write
from megatron_async_rl.metrics.log import read_newest
from megatron_async_rl.plan.dev_shm import shared_memory, shm_size
from megatron_async_rl.plan.estimate import measure, update_per_lr
from megatron_async_rl.plan.fit import ipc_bucket_bytes, twin_bytes
from megatron_async_rl.plan.machine import Machine, size
from megatron_async_rl.plan.memory import (
    OverheadParts,
    engine_overhead,
    rank_overhead,
    sleeping_overhead,
)
from megatron_async_rl.plan.pace import expected_overlap, overlap_of, planning_rule, staleness_law
from megatron_async_rl.plan.plan import RunPlan
from megatron_async_rl.plan.sharing import GroupTokens
from megatron_async_rl.plan.totals import Batch

PROCESSES_SHOWN = 16
STAGES_SHOWN = 5
WIDTH = 100
"""Largest width of the output, also on a wider terminal or in a pipe."""
LABEL = re.compile(r"[^\s:]+(?: [^\s:]+){0,2}\s{2,}")
"""Matches the label of a line; the rest of the line is wrapped in its own column."""
MEASURED_STEPS = 2000
"""Number of last steps of a run that rates are measured in."""


def show_plan(
    plan: RunPlan,
    config: Config,
    machine: Machine,
    console: Console,
    measured_in: Path | None = None,
    *,
    notes: Sequence[str] = (),
    refused: Sequence[str] = (),
    with_config: bool = False,
) -> None:
    """Print the plan, its notes and problems, and the verdict. Parts that could not be computed
    because of problems are left out.

    `measured_in`: run whose measured rates predict the overlap. `notes`: notes besides the plan's.
    `refused`: reasons why `mar train` would refuse run.dir; only if the plan has no problems.
    `with_config`: print the resolved config first.
    """
    # Long lines are hard to read, and the width is arbitrary in a pipe.
    console.width = min(console.width, WIDTH)
    if with_config:
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
    _show_memory(plan, config, machine, console)
    step_s = None
    if config.rollout is not None:
        step_s = _show_speed(plan, config, console, measured_in)
    if plan.totals is not None:
        _heading(console, "totals")
        _print(console, plan.totals.as_text(step_s))
    # Notes follow the numbers that they concern. Problems come last, so that they are not missed.
    for note in (*plan.warnings, *notes):
        _print(console, Text.assemble(("note: ", "yellow bold"), note))
    if plan.problems:
        _heading(console, "problems")
        for problem in plan.problems[:SCREEN_PROBLEMS]:
            _print(console, str(problem))
        if len(plan.problems) > SCREEN_PROBLEMS:
            _print(console, f"... and {len(plan.problems) - SCREEN_PROBLEMS} more")
    # Always the last line, where users and scripts expect it.
    _print(console, _verdict(plan, machine, refused))


def _verdict(plan: RunPlan, machine: Machine, refused: Sequence[str]) -> Text:
    """Return one line on whether the config can run, and on what was not checked."""
    if refused:
        what = f"fits, but `mar train` would refuse this run.dir: {'; '.join(refused)}"
        return Text.assemble(("verdict: ", "bold"), (what, "red"))
    where = "on the machines described" if machine.described else "here"
    if plan.problems:
        # Too few GPUs or too little memory first: a plan is made to find these.
        first = (plan.unfit or plan.problems)[0]
        what = (
            f"{'does not fit' if plan.unfit else 'cannot run'} {where}: {first.key}: {first.what}"
        )
        more = len(plan.problems) - 1
        what += f" (and {number_of('more problem', more)}, above)" if more else ""
        return Text.assemble(("verdict: ", "bold"), (what, "red"))
    what = f"can run {where}"
    if plan.absent:
        what += f"; not checked, because the files are not here: {', '.join(plan.absent)}"
    if machine.described and not machine.memory:
        what += "; host memory not checked (--host-memory)"
    # Estimates never refuse a run, so this is not a problem of the plan.
    crowded = [host for host in plan.hosts if machine.memory and host.total > machine.memory]
    if crowded:
        maximum = max(host.total for host in crowded)
        what = (
            f"may not fit {where}: by estimates, about {size(maximum)} of host memory are needed,"
            f" and the machine has {size(machine.memory)}"
        )
        return Text.assemble(("verdict: ", "bold"), (what, "yellow"))
    return Text.assemble(("verdict: ", "bold"), (what, "green"))


def _show_memory(plan: RunPlan, config: Config, machine: Machine, console: Console) -> None:
    if plan.ranks:
        _heading(console, "memory of each rank")
        console.print(_rank_memory(plan, config))
        if plan.device == "cuda":
            _print(console, _overhead(config))
    if plan.engine is not None and config.rollout is not None:
        _print(console, _engine_memory(plan, config))
        if plan.batch is not None:
            longest = plan.batch.longest
            weights, store, what = shared_memory(config, plan.engine, machine, longest)
            option = shm_size(weights, store)
            _print(
                console,
                "/dev/shm of rank 0's machine: "
                # Buckets on GPUs take no shared memory.
                + f"{size(weights)} ({what}) and " * bool(weights)
                + f"{size(store)} (Ray's object store); in a container: docker run {option}",
            )
        carrier, two = config.weights.carrier, size(2 * plan.engine.weights)
        if carrier.per_engine:
            _print(console, f"each engine: {two} in its machine's /dev/shm (two versions)")
        elif carrier.other_machines:
            _print(console, f"each other machine with engines: {two} in /dev/shm (two versions)")
        if carrier.ipc:
            two = size(ipc_bucket_bytes(config, plan.engine))
            where = "in /dev/shm" if plan.device == "cpu" else "on its GPU"
            _print(console, f"each rank, while engines load: {two} {where} (two buckets)")
    if plan.peaks:
        console.print(_peaks(plan))
    if plan.hosts:
        _heading(console, "host memory of each machine")
        console.print(_host_memory(plan, machine))


def _show_speed(
    plan: RunPlan, config: Config, console: Console, measured_in: Path | None
) -> float | None:
    """Print staleness and step time. Return the seconds of a step, or None if they are unknown."""
    rows = read_newest(measured_in, MEASURED_STEPS) if measured_in is not None else []
    _heading(console, "staleness")
    _print(console, f"{staleness_law(config)}\n{planning_rule(config, update_per_lr(rows))}")
    # Measured rates are more accurate than those of a data sheet.
    rates = measure(rows)
    if measured_in is not None:
        _heading(console, "overlap")
        if rates is not None:
            _print(console, expected_overlap(config, rates, measured_in))
            return overlap_of(config, rates, measured_in).step_s
        unknown = f"unknown: {measured_in} has not logged two steps with the work of its engines"
        _print(console, unknown)
    estimate = plan.estimate
    # Empty if the plan has problems.
    if not estimate:
        return None
    _heading(console, "step time")
    _print(console, estimate if isinstance(estimate, str) else estimate.as_text())
    return None if isinstance(estimate, str) else estimate.step_s


def _fp8(config: Config) -> str:
    fp8 = config.policy.fp8
    if fp8 is None:
        return ""
    weights = "stored in FP8" if fp8.primary_weights else "stored in bfloat16, cast in each pass"
    return f"; FP8 GEMMs ({fp8.recipe}), weights {weights}"


def machine_line(machine: Machine) -> str:
    """Return a line on the machines of the plan."""
    gpus = f"{len(machine.gpus)} x {machine.gpus[0].name}" if machine.gpus else "no GPU"
    nodes = machine.nodes + machine.engine_nodes
    count = f"{nodes} nodes, each with" if nodes > 1 else "one node with"
    # Cores of a described machine are unknown.
    if machine.described:
        memory = f", {size(machine.memory)} host memory" if machine.memory else ""
        return f"as described: {count} {gpus}{memory}"
    here = f"{count} the resources of this machine" if nodes > 1 else "this machine"
    return f"{here}: {machine.cores} cores, {size(machine.memory)} memory, {gpus}"


def resolved(config: Config) -> str:
    """Return the whole config with its defaults, one line per section."""
    lines = []
    for name, section in config.model_dump(mode="json").items():
        # PyYAML writes `...` after a document that is a scalar.
        text = write(section, one_line=True).removesuffix("...\n").strip()
        lines.append(f"{name}: {text}")
    return "\n".join(lines)


def _heading(console: Console, text: str) -> None:
    console.print(Text(text, style="bold cyan"))


def _print(console: Console, text: str | Text) -> None:
    """Print lines, wrapped at the console's width. The text after a label is wrapped in its own
    column. A word that is longer than a line, such as a path, is not broken."""
    for line in text.split("\n") if isinstance(text, Text) else map(Text, text.split("\n")):
        # A hanging indent keeps wrapped lines in the column of the first one.
        label = LABEL.match(line.plain)
        indent = label.end() if label else 2
        wrapped = textwrap.wrap(
            line.plain,
            console.width,
            subsequent_indent=" " * indent,
            break_long_words=False,
            break_on_hyphens=False,
        )
        shown = Text("\n".join(wrapped))
        # Only the first words have a style, so the spans are within the first line.
        for span in line.spans:
            shown.stylize(span.style, span.start, min(span.end, len(wrapped[0])))
        console.print(shown, markup=False, highlight=False, soft_wrap=True)


def _processes(plan: RunPlan) -> Table:
    table = Table(box=None, padding=(0, 2, 0, 0), header_style="dim")
    for column in ("process", "what", "on"):
        table.add_column(column)
    # Limited, so that a plan for hundreds of GPUs fits a screen.
    for process in plan.processes[:PROCESSES_SHOWN]:
        table.add_row(process.name, process.kind, process.device)
    if len(plan.processes) > PROCESSES_SHOWN:
        table.add_row("...", f"and {len(plan.processes) - PROCESSES_SHOWN} more", "")
    return table


def _nodes(plan: RunPlan) -> Table:
    table = Table(box=None, padding=(0, 2, 0, 0), header_style="dim")
    for column in ("machine", "processes"):
        table.add_column(column)
    shown = plan.nodes
    if len(shown) > PROCESSES_SHOWN:
        beyond = (f"and {len(shown) - PROCESSES_SHOWN} more", "as many ranks each")
        # The last row is shown, too: machines with engines only come last.
        shown = (*shown[: PROCESSES_SHOWN - 1], beyond, shown[-1])
    for node in shown:
        table.add_row(*node)
    return table


def _batch(plan: RunPlan, config: Config) -> str:
    batch, flow = plan.batch, config.flow
    assert batch is not None
    return (
        f"{number_of('prompt', flow.prompts_per_step)} x {number_of('response', flow.group_size)} ="
        f" {number_of('sample', batch.samples)} of up to {batch.longest} tokens (prompt +"
        f" response); {number_of('data-parallel rank', batch.data_parallel)},"
        f" {number_of('sample', batch.samples_per_rank)} per rank\n{_steps(config)}micro-batches of"
        f" {config.policy.tokens_per_micro_batch} tokens: {batch.micro_batches_half} per rank at"
        f" half length, {batch.micro_batches_full} at full length{_shared(config, batch)}"
        f"{_routed(plan)}"
    )


def _shared(config: Config, batch: Batch) -> str:
    group = GroupTokens.of(config, batch.prompt, batch.response)
    if not group.shared:
        return ""
    whole = batch.prompt + batch.response
    return (
        f"; responses share their group's prompt: {group.computed:.0f} of {whole} tokens to compute"
        " for a sample of half length"
    )


def _routed(plan: RunPlan) -> str:
    if not plan.routed_bytes or plan.batch is None:
        return ""
    # Each token has the ids of its experts in every layer.
    maximum = plan.routed_bytes * plan.batch.longest * plan.batch.samples
    return (
        f"\nexperts chosen by engines: {plan.routed_bytes} bytes per token, up to {size(maximum)}"
        " for a batch in the controller; each data-parallel rank's host has those of its samples"
    )


def _steps(config: Config) -> str:
    """Return a line on the optimizer steps of a batch; empty if there is only one."""
    objective, prompts = config.objective, config.flow.prompts_per_step
    if objective.steps_per_batch == 1:
        return ""
    # Minibatches consist of whole groups, so their sizes may differ by one.
    fewest = prompts // objective.minibatches
    groups = f"{fewest}" if prompts % objective.minibatches == 0 else f"{fewest} or {fewest + 1}"
    return (
        f"{objective.steps_per_batch} optimizer steps:"
        f" {number_of('minibatch', objective.minibatches)} of {groups} prompts x"
        f" {number_of('epoch', objective.epochs)}; each epoch's "
    )


def _rank_memory(plan: RunPlan, config: Config) -> Table:
    """Return a table with a column per pipeline stage; of many stages, the first ones and the
    last."""
    ranks = list(plan.ranks)
    left_out = len(ranks) - STAGES_SHOWN
    if left_out > 0:
        # The first stage has the embedding, the last stage the output layer and the log-probs.
        ranks = [*plan.ranks[: STAGES_SHOWN - 1], plan.ranks[-1]]
    table = Table(box=None, padding=(0, 2, 0, 0), header_style="dim")
    table.add_column("on its device")
    for rank in ranks:
        name = f"stage {rank.stage}" if len(plan.ranks) > 1 else "the policy"
        table.add_column(name, justify="right")
    rows = [
        ("parameters", [rank.parameters for rank in ranks]),
        ("FP8 weights ~", [rank.fp8 for rank in ranks]),
        ("gradients", [rank.gradients for rank in ranks]),
        ("optimizer", [rank.optimizer for rank in ranks]),
        ("controls", [rank.controls for rank in ranks]),
        ("activations ~", [rank.activations for rank in ranks]),
        ("log-probs, targets ~", [rank.logprobs for rank in ranks]),
        ("total ~", [rank.total for rank in ranks]),
    ]
    on_host = [
        ("other weights", [rank.held for rank in ranks]),
        ("offloaded", [rank.offloaded for rank in ranks]),
        ("while engines generate", [twin_bytes(config, rank) for rank in ranks]),
        ("copy for a checkpoint", [rank.staged for rank in ranks]),
    ]
    rows += [(f"{name}, on the host", sizes) for name, sizes in on_host]
    always = ("parameters", "gradients", "optimizer", "total ~")
    for name, sizes in rows:
        # Rows of unused features are left out.
        if any(sizes) or name in always:
            table.add_row(name, *(size(one) for one in sizes))
    if left_out > 0:
        table.add_row(f"({left_out} stages before the last are not shown)")
    return table


def _host_memory(plan: RunPlan, machine: Machine) -> Table:
    """Return a table with a column per kind of machine; of many kinds, the first ones."""
    hosts = plan.hosts[:STAGES_SHOWN]
    table = Table(box=None, padding=(0, 2, 0, 0), header_style="dim")
    table.add_column("all processes of a machine")
    for host in hosts:
        table.add_column(host.machines if len(plan.hosts) > 1 else "", justify="right")
    # Machines may have different parts: the rows are the union of all, in a stable order.
    names = dict.fromkeys((part.name, part.certain) for host in plan.hosts for part in host.parts)
    for name, certain in names:
        sizes = [sum(part.size for part in host.parts if part.name == name) for host in hosts]
        table.add_row(
            name if certain else f"{name} ~", *(size(one) if one else "" for one in sizes)
        )
    table.add_row("total ~", *(size(host.total) for host in hosts))
    table.add_row(
        "of this in /dev/shm",
        *(size(host.shared_memory) if host.shared_memory else "none" for host in hosts),
    )
    if machine.memory:
        table.add_row("the machine has", *(size(machine.memory) for _ in hosts))
    if len(plan.hosts) > len(hosts):
        table.add_row(f"({len(plan.hosts) - len(hosts)} more kinds of machines are not shown)")
    return table


def _overhead(config: Config) -> str:
    rollout, parts = config.rollout, rank_overhead(config)
    lines = [f"in addition, on each rank's GPU ~: {_shown(parts)}"]
    if rollout is not None and rollout.placement == "colocated":
        lines.append(f"and of a sleeping engine there ~: {_shown(sleeping_overhead(rollout))}")
    elif rollout is not None:
        lines.append(
            "in addition, on each engine's GPU, outside rollout.gpu_memory_utilization ~:"
            f" {_shown(engine_overhead(rollout))}"
        )
    return "\n".join(lines)


def _shown(parts: OverheadParts) -> str:
    total = sum(count for _, count in parts)
    named = ", ".join(f"{name.partition("'s ")[2]} {size(count)}" for name, count in parts if count)
    return f"{size(total)} ({named})"


def _peaks(plan: RunPlan) -> Table:
    table = Table(box=None, padding=(0, 2, 0, 0), header_style="dim")
    table.add_column("GPU in phase")
    table.add_column("peak ~", justify="right")
    table.add_column("available", justify="right")
    table.add_column("largest parts")
    for phase, need in plan.peaks.items():
        table.add_row(phase, size(need.total), size(need.has), need.largest)
    return table


def _engine_memory(plan: RunPlan, config: Config) -> str:
    engine, rollout, batch = plan.engine, config.rollout, plan.batch
    assert engine is not None
    assert rollout is not None
    engines = "the engine" if rollout.engines == 1 else f"each of {rollout.engines} engines"
    # On a GPU, vLLM decides the size of the cache when it starts.
    if engine.cache is None or engine.cache_tokens is None:
        return (
            f"{engines}: weights {size(engine.weights)}; KV cache: the rest of"
            f" {rollout.gpu_memory_utilization:.0%} of its GPU, {engine.bytes_per_token} bytes per"
            " token"
        )
    at_once = (
        f" = {engine.cache_tokens // batch.longest} samples of {batch.longest}"
        if batch is not None
        else ""
    )
    return (
        f"{engines}: weights {size(engine.weights)}, KV cache"
        f" {size(engine.cache)} = {engine.cache_tokens} tokens{at_once}"
    )

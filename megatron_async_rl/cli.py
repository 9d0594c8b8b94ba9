"""The `mar` command: train, plan, eval, report, convert, conform, doctor.

Invariants:
- what a user got wrong ends with one screen and exit code 2, never a traceback, before any rank or engine starts;
- importing this file, and every command up to the point where it needs them, loads no torch, Megatron-Core, vLLM or Ray.
"""

from __future__ import annotations

import os
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, NoReturn

import typer
from rich.console import Console

from megatron_async_rl import __version__
from megatron_async_rl.config.problem import ConfigError

if TYPE_CHECKING:
    from megatron_async_rl.nodes import Nodes
    from megatron_async_rl.refusals import Others

USER_ERROR = 2
PIPE_WIDTH = 140

app = typer.Typer(
    name="mar",
    help="Asynchronous RL post-training: Megatron-Core policies, vLLM rollouts.",
    no_args_is_help=True,
    add_completion=False,
    pretty_exceptions_enable=False,
)

ConfigFile = Annotated[Path, typer.Argument(metavar="CONFIG", help="YAML file; examples/ holds some to start from.")]
Overrides = Annotated[
    list[str] | None, typer.Argument(metavar="[KEY=VALUE]...", help="Dotted overrides, such as policy.optimizer.lr=1e-4.")
]
NodeCount = Annotated[int, typer.Option("--nnodes", min=1, help="Machines of the run, alike; `mar train` runs on each.")]


def console(*, stderr: bool = False) -> Console:
    """As wide as the terminal, and wide enough not to break lines in a pipe."""
    made = Console(stderr=stderr)
    return made if made.is_terminal else Console(stderr=stderr, width=PIPE_WIDTH)


@app.command()
def train(
    config: ConfigFile,
    overrides: Overrides = None,
    nnodes: NodeCount = 1,
    node_rank: Annotated[int, typer.Option("--node-rank", min=0, help="Which of the machines this is; 0 has the engines.")] = 0,
    rdzv_endpoint: Annotated[
        str, typer.Option("--rdzv-endpoint", metavar="HOST:PORT", help="Of node 0, with --nnodes above 1: a free port.")
    ] = "",
) -> None:
    """Run a config to its end; Ctrl-C stops after the step, and the same command resumes."""
    from megatron_async_rl.nodes import Nodes, NodesError
    from megatron_async_rl.refusals import Others
    from megatron_async_rl.run_lock import RunDirectoryError

    _let_children_import_from_here()
    try:
        nodes = Nodes(nnodes, node_rank, rdzv_endpoint)
        others = Others(nodes)
    except NodesError as error:
        _refuse(error)
    try:
        code = _train(config, overrides or (), nodes, others)
    except (ConfigError, RunDirectoryError, NodesError) as error:
        _say_failed(error)
        others.refuse(str(error))
        raise typer.Exit(USER_ERROR) from None
    except BaseException as error:
        others.refuse(f"{type(error).__name__} {error}".strip(), within_s=0.0)
        raise
    raise typer.Exit(code)


def _train(config: Path, overrides: Sequence[str], nodes: Nodes, others: Others) -> int:
    from megatron_async_rl.check import check
    from megatron_async_rl.config.load import load
    from megatron_async_rl.config.machine import this_machine
    from megatron_async_rl.launch import launch

    loaded = load(config, overrides)
    plan = check(loaded, all_data=True, machine=this_machine(nodes.count))
    if plan.problems:
        raise ConfigError(f"{config}: cannot run", plan.problems)
    for warning in plan.warnings:
        console().print(f"note: {warning}", markup=False, highlight=False)
    return launch(loaded, console(), nodes, others)


@app.command()
def plan(
    config: ConfigFile,
    overrides: Overrides = None,
    measured_in: Annotated[
        Path | None, typer.Option("--from", metavar="RUN", help="A run whose measured rates to reckon with, else run.dir.")
    ] = None,
    nnodes: NodeCount = 1,
) -> None:
    """Show what a config comes to here: layout, memory, batch, staleness. Starts nothing; exit code 2 if it cannot run."""
    from megatron_async_rl.check import check
    from megatron_async_rl.config.load import load
    from megatron_async_rl.config.machine import this_machine
    from megatron_async_rl.plan_screen import show_plan

    if measured_in is not None and not (measured_in / "metrics.jsonl").is_file():
        _refuse(f"--from {measured_in}: holds no metrics.jsonl\n  fix: name a run directory, the `run.dir` of its config")
    loaded = load(config, overrides or ())
    if measured_in is None and (loaded.run.dir / "metrics.jsonl").is_file():
        measured_in = loaded.run.dir
    machine = this_machine(nnodes)
    planned = check(loaded, all_data=False, machine=machine)
    if planned.problems:
        raise ConfigError(f"{config}: cannot run", planned.problems)
    show_plan(planned, loaded, machine, console(), measured_in)


@app.command()
def report(run: Annotated[Path, typer.Argument(metavar="RUN", help="A run directory.")]) -> None:
    """Write the run's report, an HTML page and a PNG picture, into its directory."""
    if not (run / "metrics.jsonl").is_file():
        _refuse(f"{run}: holds no metrics.jsonl\n  fix: name a run directory, the `run.dir` of its config")
    from megatron_async_rl.observe.report import write_report

    for written in write_report(run):
        console().print(str(written), markup=False, highlight=False, soft_wrap=True)


@app.command()
def convert(
    checkpoint: Annotated[Path, typer.Argument(metavar="CHECKPOINT", help="RUN/checkpoint, or one step's folder in it.")],
    out: Annotated[Path, typer.Argument(metavar="OUT", help="Folder to write; must not exist or be empty.")],
) -> None:
    """Write a checkpoint as a Hugging Face model directory."""
    if not checkpoint.is_dir():
        _refuse(f"{checkpoint}: is no folder\n  fix: name RUN/checkpoint of a run that has saved one")
    if out.exists() and (not out.is_dir() or any(out.iterdir())):
        _refuse(f"{out}: already exists\n  fix: name a new folder")
    from megatron_async_rl.weights.convert import convert as convert_checkpoint

    try:
        convert_checkpoint(checkpoint, out)
    except (FileNotFoundError, FileExistsError) as error:
        _refuse(error)
    console().print(f"wrote {out}", markup=False, highlight=False, soft_wrap=True)


@app.command(name="eval")
def evaluate(
    checkpoint: Annotated[
        Path, typer.Argument(metavar="CHECKPOINT", help="RUN/checkpoint, one step's folder in it, or a Hugging Face directory.")
    ],
    overrides: Overrides = None,
    config: Annotated[Path | None, typer.Option(metavar="CONFIG", help="Says how to sample; default: the run's own.")] = None,
    out: Annotated[Path | None, typer.Option(metavar="FILE", help="JSON to write; default: RUN/eval_<step>.json.")] = None,
) -> None:
    """Sample held-out prompts from a checkpoint or a model: mean reward, pass@k, speed. Engines alone, no training."""
    from megatron_async_rl.evaluate import EvaluationFailed, answer, ask

    _let_children_import_from_here()
    question = ask(checkpoint, config, overrides or (), out)
    try:
        answer(question, console())
    except EvaluationFailed as error:
        _say_failed(error)
        raise typer.Exit(1) from None


@app.command()
def conform(
    files: Annotated[list[Path], typer.Argument(metavar="FILE...", help="JSON lists of reference vectors (tests/data/golden).")],
) -> None:
    """Run reference vectors through the registries; exit code 0 only if every case passes."""
    from megatron_async_rl.conform.cases import Malformed, read_cases
    from megatron_async_rl.conform.judge import show

    try:
        cases = {file: read_cases(file) for file in files}
    except Malformed as error:
        _refuse(f"{error}\n  fix: tests/data/golden/README.md says what such a file holds")
    raise typer.Exit(show(cases, console()))


@app.command()
def doctor() -> None:
    """Check this installation and say what each missing part would bring; exit code 1 if a needed one is missing."""
    from megatron_async_rl.doctor import examine, show

    findings = examine()
    raise typer.Exit(show(findings, console()))


def _show_version(wanted: bool) -> None:
    if wanted:
        print(f"megatron-async-rl {__version__}")  # noqa: T201
        raise typer.Exit


@app.callback()
def options(
    version: Annotated[bool, typer.Option("--version", callback=_show_version, is_eager=True, help="Show the version.")] = False,
) -> None:
    """Asynchronous RL post-training: Megatron-Core policies, vLLM rollouts."""


def _let_children_import_from_here() -> None:
    """A reward given as module:function is found from the current folder by ranks and engines too."""
    here = os.getcwd()
    known = [part for part in os.environ.get("PYTHONPATH", "").split(os.pathsep) if part]
    if here not in known:
        os.environ["PYTHONPATH"] = os.pathsep.join([*known, here])


def _refuse(message: object) -> NoReturn:
    _say_failed(message)
    raise typer.Exit(USER_ERROR)


def _say_failed(message: object) -> None:
    style = None if isinstance(message, ConfigError) else "red"
    console(stderr=True).print(str(message), style=style, markup=False, highlight=False, soft_wrap=True)


def main() -> None:
    """Console entry point."""
    from megatron_async_rl.observe.metrics import MetricsError

    try:
        app()
    except (ConfigError, MetricsError) as error:
        _say_failed(error)
        sys.exit(USER_ERROR)

"""Commands that start a run or an evaluation, and those that write what a run needs."""

from __future__ import annotations

import contextlib
import shlex
import shutil
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from megatron_async_rl.cli.application import (
    USER_ERROR,
    ConfigFile,
    NodeCount,
    Overrides,
    app,
    console,
    let_children_import_from_here,
    print_error,
    print_text,
)
from megatron_async_rl.config.problem import SHARE, ConfigError, UserError
from megatron_async_rl.config.schema import Config
from megatron_async_rl.launch.addresses import Nodes, NodesError

if TYPE_CHECKING:  # it loads what only `mar train` needs
    from megatron_async_rl.launch.rendezvous import PeerNodes
    from megatron_async_rl.verify.scorecard import Scorecard


@app.command()
def train(
    config: ConfigFile,
    overrides: Overrides = None,
    nnodes: NodeCount = 1,
    node_rank: Annotated[
        int,
        typer.Option("--node-rank", min=0, help="Number of this machine; node 0 has the engines."),
    ] = 0,
    rdzv_endpoint: Annotated[
        str,
        typer.Option(
            "--rdzv-endpoint",
            metavar="HOST:PORT",
            help="Address of node 0 and a free port there; needed with --nnodes above 1.",
        ),
    ] = "",
    engine_nodes: Annotated[
        int,
        typer.Option(
            "--engine-nodes",
            min=0,
            help="Rollout nodes (without ranks) to wait for in the Ray cluster of RAY_ADDRESS.",
        ),
    ] = 0,
) -> None:
    """Run a config to its end; Ctrl-C stops after the step, and the same command resumes."""
    from megatron_async_rl.launch.rendezvous import PeerNodes

    let_children_import_from_here()
    # Before anything slow: a wrong endpoint is refused at once on every node.
    nodes = Nodes(nnodes, node_rank, rdzv_endpoint)
    peers = PeerNodes(nodes)
    try:
        code = _train(config, overrides or (), nodes, peers, engine_nodes)
    except UserError as error:
        print_error(error)  # first here: the other nodes may receive it late
        # The other nodes wait for this one, and would wait until their deadline.
        peers.refuse(str(error))
        raise typer.Exit(USER_ERROR) from None
    except BaseException as error:
        # Nodes that wait already read it within their next look; later ones are not awaited.
        peers.refuse(f"{type(error).__name__} {error}".strip(), within_s=1.0)
        raise
    raise typer.Exit(code)


def _train(
    config: Path, overrides: Sequence[str], nodes: Nodes, peers: PeerNodes, engine_nodes: int
) -> int:
    from megatron_async_rl.config.load import load
    from megatron_async_rl.data.hub import located
    from megatron_async_rl.launch.launcher import refuse_second_run
    from megatron_async_rl.launch.run_lock import refuse_taken, usable

    # First: most mistakes are in the config, and loading it takes no time.
    given = load(config, overrides)
    # What the directory alone decides comes first: it takes no time, and the run that has the
    # directory may also be why memory or GPUs are short.
    if nodes.rank == 0:
        with usable(given.run.dir):
            refuse_taken(given.run.dir)
            refuse_second_run(given)
    # Downloads come after the checks that need no network.
    loaded, found = located(given)
    with usable(loaded.run.dir):
        return checked_launch(config, loaded, found, nodes, peers, engine_nodes)


def checked_launch(
    config: Path,
    loaded: Config,
    found: Sequence[str],
    nodes: Nodes,
    peers: PeerNodes,
    engine_nodes: int,
) -> int:
    """Launch a config whose downloads are done, after all checks that need no process; return the
    exit code. config: its file. Raises UserError."""
    from megatron_async_rl.launch.launcher import already_finished, finished_before, launch
    from megatron_async_rl.plan.host import free_memory_problems
    from megatron_async_rl.plan.layout import rank_environment
    from megatron_async_rl.plan.machine import this_machine
    from megatron_async_rl.plan.nodes import cluster_problems, occupied_gpus, query_cluster
    from megatron_async_rl.plan.preflight import preflight
    from megatron_async_rl.plan.resume import conflicts, differences
    from megatron_async_rl.plan.totals import free_disk_problems

    # Node 0 alone looks at what the directory holds: only that process writes there.
    refused = conflicts(loaded) if nodes.rank == 0 else []
    # A finished run needs no model, no data and no memory any more.
    finished = finished_before if nodes.rank == 0 else already_finished
    # A conflict is reported even for a finished run.
    if not refused and finished(loaded, console()):
        return 0
    machine = this_machine(nodes.count)
    # Everything that can be known before a process starts.
    plan = preflight(loaded, all_data=True, machine=machine)
    # What its checkpoint was made with can differ, too: the same key, reported once.
    reported = {one.key for one in refused}
    # Not of `mar plan`: by the time of the run, programs may have ended and files may be gone.
    crowded = free_memory_problems(loaded, machine, plan.device, plan.hosts, nodes.rank)
    full = free_disk_problems(loaded, plan.totals) if nodes.rank == 0 else []
    planned = [one for one in plan.problems if one.key not in reported]
    problems = [*refused, *planned, *crowded, *full]
    if problems:
        raise ConfigError(f"{config}: cannot run", problems)
    # Last, as it may wait for GPUs of a run that has just ended.
    taken = occupied_gpus(loaded, machine, nodes.rank)
    if engine_nodes:
        print_text(f"waiting for {engine_nodes} rollout nodes to join Ray")
    cluster = query_cluster(loaded, machine, engine_nodes) if nodes.rank == 0 else None
    unfit = cluster_problems(cluster, waited=engine_nodes > 0) if cluster else []
    if taken or unfit:
        raise NodesError("", [*taken, *unfit])
    # A run can start with fewer engines: they join later.
    if cluster and cluster.missing:
        print_text(f"note: {cluster.missing} of {engine_nodes} machines have not joined Ray yet")
    for node in cluster.nodes if cluster else ():
        if node.silent:
            print_text(
                f"note: {node.host}, a machine of the Ray cluster, did not answer: {node.silent}"
            )
    # Allowed differences are printed: nothing the user changed is silent.
    changed = [str(one) for one in differences(loaded)] if nodes.rank == 0 else []
    if changed:
        print_text(f"{loaded.run.dir} continues with other settings:\n  " + "\n  ".join(changed))
    for warning in (*found, *plan.warnings):
        print_text(f"note: {warning}")
    return launch(loaded, console(), nodes, peers, rank_environment(loaded, machine))


def compare_numerics(
    config: Path, overrides: Sequence[str], *, alone: bool
) -> tuple[int, Scorecard]:
    """Run the check of a config; return the exit code of its processes, and the scorecard. alone:
    nothing but the scorecard may be written to standard output."""
    from megatron_async_rl.data.hub import located
    from megatron_async_rl.launch.rendezvous import PeerNodes
    from megatron_async_rl.verify.numerics import numerics_config, numerics_scorecard

    let_children_import_from_here()
    nodes = Nodes(1, 0, "")
    with contextlib.redirect_stdout(sys.stderr) if alone else contextlib.nullcontext():
        loaded, found = located(numerics_config(config, overrides))
        code = checked_launch(config, loaded, found, nodes, PeerNodes(nodes), 0)
    return code, numerics_scorecard(str(config), loaded)


def _absent(out: Path) -> Path:
    """Return `out`, which must not exist; called before the first question. Raises UserError."""
    # An existing file may be a config in use.
    if out.exists():
        raise UserError.of("OUT", f"{out} already exists", "name another file, or remove it")
    return out


@app.command()
def init(
    out: Annotated[
        Path,
        typer.Argument(
            metavar="[OUT]", callback=_absent, help="YAML file to write; must not exist."
        ),
    ] = Path("run.yaml"),
    model: Annotated[
        str | None,
        typer.Option(metavar="MODEL", help="A model's directory, or its name on a hub."),
    ] = None,
    data: Annotated[
        str | None,
        typer.Option(
            metavar="FILE",
            help="A file or folder of prompts, hf://datasets/OWNER/NAME or its /FILE, or"
            " reasoning_gym:TASK.",
        ),
    ] = None,
    prompt_key: Annotated[
        str | None,
        typer.Option("--prompt-key", metavar="COLUMN", help="The prompts' column."),
    ] = None,
    held_out: Annotated[
        str | None,
        typer.Option(
            "--eval",
            metavar="FILE",
            help="Held-out data, as for --data; or a share to split off, 5% by default; or none.",
        ),
    ] = None,
    reward: Annotated[
        str | None,
        typer.Option(
            metavar="NAME[+NAME...]",
            help="A reward or an environment, or several joined by +; default: math, or the"
            " task's own scorer for reasoning_gym:TASK.",
        ),
    ] = None,
    answer_key: Annotated[
        str | None,
        typer.Option("--answer-key", metavar="COLUMN", help="The answers' column, if any."),
    ] = None,
    gpus: Annotated[
        int | None, typer.Option(min=0, help="Number of GPUs; 0: the CPU; default: this machine's.")
    ] = None,
    style: Annotated[
        str | None,
        typer.Option(
            metavar="STYLE",
            help="How samples and updates overlap: asynchronous (default), clipped or synchronous.",
        ),
    ] = None,
    gpu_memory: Annotated[
        float | None,
        typer.Option(
            "--gpu-memory",
            min=1.0,
            help="Memory of each GPU in GiB; default: this machine's, else 80.",
        ),
    ] = None,
    as_chat: Annotated[
        bool, typer.Option("--as-chat", help="Each prompt is a message to a chat model.")
    ] = False,
    setting: Annotated[
        list[str] | None,
        typer.Option(
            metavar="[NAME.]KEY=VALUE",
            help="Setting of the reward or environment, such as judge.url=http://HOST:8001/v1;"
            " repeatable.",
        ),
    ] = None,
) -> None:
    """Write a config that `mar plan` accepts, from answers about model, data, held-out data,
    reward, GPUs and style. Options answer questions in advance; without a terminal the remaining
    ones take their defaults."""
    from megatron_async_rl.plan import interview
    from megatron_async_rl.plan.new_config import write_config

    let_children_import_from_here()
    given = {
        "model": model,
        "data": data,
        "prompt_key": prompt_key,
        "eval": held_out,
        "reward": reward,
        "answer_key": answer_key,
        # Text: options and typed answers pass through the same checks.
        "gpus": None if gpus is None else str(gpus),
        "style": style,
    }
    questions = interview.Interview(
        {name: text for name, text in given.items() if text is not None},
        out=out,
        settings=setting or (),
        as_chat=as_chat,
        gpu_memory_gib=gpu_memory,
        terminal=interview.at_terminal(),
        report=print_error,
    )
    answers = questions.run()
    # A refused answer is requested again, without losing the others.
    while True:
        try:
            written = write_config(answers, out)
            break
        except UserError as error:
            answers = questions.repeat(error)
    for note in written.notes:
        print_text(f"note: {note}")
    files = " and ".join(map(str, written.files))
    name = shlex.quote(str(out))
    print_text(f"wrote {files}; next: mar plan {name}, then mar train {name}")


@app.command()
def examples(
    folder: Annotated[
        Path, typer.Argument(metavar="[FOLDER]", help="Target folder; default: the current one.")
    ] = Path(),
) -> None:
    """Copy the examples, launchers and pages of this version, so that the commands in the pages
    work from that folder."""
    for part in sorted(SHARE.iterdir()):
        # Checked for all parts before the first is copied.
        if (folder / part.name).exists():
            fix = "name a new folder: mar examples FOLDER"
            raise UserError.of("FOLDER", f"{folder / part.name} exists", fix)
    ignored = shutil.ignore_patterns("generated", "__pycache__")
    try:
        shutil.copytree(SHARE, folder, ignore=ignored, dirs_exist_ok=True)
    except shutil.Error as error:
        # It lists every file that could not be copied: (source, target, reason).
        _, target, why = error.args[0][0]
        fix = "check space and permissions there, or name another folder: mar examples FOLDER"
        raise UserError.of("FOLDER", f"{target} was not written: {why}", fix) from error
    print_text(f"wrote {', '.join(str(folder / part.name) for part in sorted(SHARE.iterdir()))}")


@app.command()
def study(
    grid: Annotated[
        Path,
        typer.Argument(
            metavar="GRID", help="YAML file; `mar examples` copies some, in examples/stability."
        ),
    ],
    only: Annotated[
        list[str] | None,
        typer.Option(
            "--only", metavar="NAME", help="Sweep or run to include; `*` matches any characters."
        ),
    ] = None,
    jobs: Annotated[int, typer.Option("--jobs", min=1, help="Number of concurrent runs.")] = 1,
    retry: Annotated[bool, typer.Option("--retry", help="Also restart failed runs.")] = False,
) -> None:
    """Run every config of a grid that has not run yet. Ctrl-C stops; the same command continues.
    Exit code 1 if a run failed."""
    from megatron_async_rl.study import study as run_study

    let_children_import_from_here()
    # Exit codes are those of study().
    raise typer.Exit(run_study(grid, only or (), console(), jobs=jobs, retry=retry))


@app.command()
def replay(
    run: Annotated[Path, typer.Argument(metavar="RUN", help="The run.dir of a run.")],
    overrides: Overrides = None,
    first: Annotated[
        int | None,
        typer.Option(
            "--from", min=1, metavar="STEP", help="First step; default: the first possible."
        ),
    ] = None,
    steps: Annotated[
        int | None, typer.Option("--steps", min=1, help="Number of steps; default: all.")
    ] = None,
    out: Annotated[
        Path | None,
        typer.Option(metavar="FOLDER", help="Directory of the replay; default: RUN/replays/N."),
    ] = None,
    explain: Annotated[
        int | None,
        typer.Option(
            min=1,
            metavar="STEP",
            help="Repeat up to STEP, and show which samples, tokens and parameters made its"
            " gradient.",
        ),
    ] = None,
    save: Annotated[
        bool, typer.Option("--save", help="Write a checkpoint of the last step, for `mar eval`.")
    ] = False,
) -> None:
    """Repeat the optimizer steps of a run on its recorded samples, with the trainer alone, and
    compare the weights bit by bit. KEY=VALUE changes settings of the trainer: a what-if analysis.
    Exit code 1 if a step differs although no setting was changed."""
    from megatron_async_rl.replay.repetition import replay as repeat
    from megatron_async_rl.replay.replay_plan import plan_replay

    let_children_import_from_here()
    plan = plan_replay(run.absolute(), first, steps, overrides or (), explain, save=save)
    raise typer.Exit(repeat(plan, out.absolute() if out is not None else None, console()))


@app.command(name="eval")
def evaluate(
    checkpoint: Annotated[
        Path,
        typer.Argument(
            metavar="CHECKPOINT",
            help="RUN/checkpoint, one step's folder in it, or a Hugging Face directory.",
        ),
    ],
    overrides: Overrides = None,
    config: Annotated[
        Path | None,
        typer.Option(metavar="CONFIG", help="Config with sampling settings; default: the run's."),
    ] = None,
    out: Annotated[
        Path | None,
        typer.Option(metavar="FILE", help="JSON to write; default: RUN/eval_<step>.json."),
    ] = None,
    responses: Annotated[
        Path | None,
        typer.Option(metavar="FILE", help="JSONL file for all responses and their rewards."),
    ] = None,
) -> None:
    """Evaluate a checkpoint or a model on held-out prompts: mean reward, pass@k and speed. Starts
    engines only."""
    from megatron_async_rl.evaluate import EvaluationFailed, resolve, run

    let_children_import_from_here()
    job = resolve(checkpoint, config, overrides or (), out, responses)
    try:
        run(job, console())
    # Not a user error: exit code 1, as for a failed run.
    except EvaluationFailed as error:
        print_error(error)
        raise typer.Exit(1) from None

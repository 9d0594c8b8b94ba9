"""The `mar` command; each of its commands calls one module.

Invariants:
- what a user got wrong ends with one screen and exit code 2, never a traceback, before any rank or
  engine starts;
- importing this file, and every command up to the point where it needs them, loads no torch,
  Megatron-Core, vLLM or Ray.
"""

from __future__ import annotations

import io
import os
import shutil
import sys
import warnings
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Annotated, Any

import typer
from rich.console import Console
from typer.core import TyperGroup

from megatron_async_rl import __version__
from megatron_async_rl.config.durable import reason
from megatron_async_rl.config.problem import SHARE, ConfigError, UserError
from megatron_async_rl.config.schema import Config
from megatron_async_rl.launch.peers import Nodes, PeerNodes

USER_ERROR = 2
PIPE_WIDTH = 140
GPU_MEMORY_GIB = 80.0
NAME_A_RUN = "name a run directory, the `run.dir` of its config"


class Commands(TyperGroup):
    """Ends any command that a user error stops with that error's screen and exit code 2; likewise
    for a file that cannot be read or written."""

    def invoke(self, ctx: Any) -> Any:
        try:
            return super().invoke(ctx)
        except UserError as error:
            _print_error(error)
            raise typer.Exit(USER_ERROR) from None
        except OSError as error:
            # The caller of last resort: an error without a file, such as a socket's, is not the
            # user's.
            if error.filename is None:
                raise
            fix = "check the file, its folder and their permissions, or name another one"
            _print_error(UserError.of(os.fsdecode(error.filename), reason(error), fix))
            raise typer.Exit(USER_ERROR) from None


app = typer.Typer(
    name="mar",
    cls=Commands,
    help="Asynchronous RL post-training: Megatron-Core policies, vLLM rollouts.",
    no_args_is_help=True,
    pretty_exceptions_enable=False,
)

ConfigFile = Annotated[
    Path, typer.Argument(metavar="CONFIG", help="YAML file; `mar init` writes one.")
]
Overrides = Annotated[
    list[str] | None,
    typer.Argument(
        metavar="[KEY=VALUE]...", help="Dotted overrides, such as policy.optimizer.lr=1e-4."
    ),
]
NodeCount = Annotated[
    int,
    typer.Option("--nnodes", min=1, help="Machines of the run, alike; `mar train` runs on each."),
]


def console(*, stderr: bool = False) -> Console:
    """Console as wide as the terminal; outside a terminal, wide enough that no line is broken."""
    made = Console(stderr=stderr)
    return made if made.is_terminal else Console(stderr=stderr, width=PIPE_WIDTH)


@app.command()
def train(
    config: ConfigFile,
    overrides: Overrides = None,
    nnodes: NodeCount = 1,
    node_rank: Annotated[
        int,
        typer.Option(
            "--node-rank", min=0, help="Which of the machines this is; 0 has the engines."
        ),
    ] = 0,
    rdzv_endpoint: Annotated[
        str,
        typer.Option(
            "--rdzv-endpoint",
            metavar="HOST:PORT",
            help="Of node 0, with --nnodes above 1: a free port.",
        ),
    ] = "",
    engine_nodes: Annotated[
        int,
        typer.Option(
            "--engine-nodes",
            min=0,
            help="Machines without ranks to wait for in the Ray cluster that RAY_ADDRESS names.",
        ),
    ] = 0,
) -> None:
    """Run a config to its end; Ctrl-C stops after the step, and the same command resumes."""
    from megatron_async_rl.launch.peers import Nodes, PeerNodes

    _let_children_import_from_here()
    nodes = Nodes(nnodes, node_rank, rdzv_endpoint)
    peers = PeerNodes(nodes)
    try:
        code = _train(config, overrides or (), nodes, peers, engine_nodes)
    except UserError as error:
        _print_error(error)  # first here: the other nodes may take their time to hear it
        peers.refuse(str(error))
        raise typer.Exit(USER_ERROR) from None
    except BaseException as error:
        peers.refuse(f"{type(error).__name__} {error}".strip(), within_s=0.0)
        raise
    raise typer.Exit(code)


def _train(
    config: Path, overrides: Sequence[str], nodes: Nodes, peers: PeerNodes, engine_nodes: int
) -> int:
    from megatron_async_rl.config.load import load
    from megatron_async_rl.data.hub import located
    from megatron_async_rl.launch.launcher import refuse_second_run
    from megatron_async_rl.launch.run_lock import refuse_taken, usable

    given = load(config, overrides)
    # What the directory alone decides comes first: it takes no time, and the run that has the
    # directory may also be why memory or GPUs are short.
    if nodes.rank == 0:
        with usable(given.run.dir):
            refuse_taken(given.run.dir)
            refuse_second_run(given)
    loaded, found = located(given)
    with usable(loaded.run.dir):
        return _train_loaded(config, loaded, found, nodes, peers, engine_nodes)


def _train_loaded(
    config: Path,
    loaded: Config,
    found: Sequence[str],
    nodes: Nodes,
    peers: PeerNodes,
    engine_nodes: int,
) -> int:
    from megatron_async_rl.launch.launcher import already_finished, finished_before, launch
    from megatron_async_rl.launch.peers import NodesError
    from megatron_async_rl.plan.host import free_memory_problems
    from megatron_async_rl.plan.layout import rank_environment
    from megatron_async_rl.plan.machine import this_machine
    from megatron_async_rl.plan.nodes import ask_cluster, cluster_problems, taken_gpus
    from megatron_async_rl.plan.preflight import preflight
    from megatron_async_rl.plan.resume import conflicts, differences

    # Node 0 alone looks at what the directory holds: only that process writes there.
    refused = conflicts(loaded) if nodes.rank == 0 else []
    # A finished run needs no model, no data and no memory any more.
    finished = finished_before if nodes.rank == 0 else already_finished
    if not refused and finished(loaded, console()):
        return 0
    machine = this_machine(nodes.count)
    plan = preflight(loaded, all_data=True, machine=machine)
    # What its checkpoint was made with can differ, too: the same key, reported once.
    reported = {one.key for one in refused}
    # Not of `mar plan`: other programs may have ended by the time of the run.
    crowded = free_memory_problems(loaded, machine, plan.device, plan.hosts, nodes.rank)
    problems = [*refused, *(one for one in plan.problems if one.key not in reported), *crowded]
    if problems:
        raise ConfigError(f"{config}: cannot run", problems)
    taken = taken_gpus(loaded, machine, nodes.rank)
    if engine_nodes:
        _print(f"waiting for {engine_nodes} machines of engines to join Ray")
    cluster = ask_cluster(loaded, machine, engine_nodes) if nodes.rank == 0 else None
    unfit = cluster_problems(cluster, waited=engine_nodes > 0) if cluster else []
    if taken or unfit:
        raise NodesError("", [*taken, *unfit])
    if cluster and cluster.missing:
        _print(f"note: {cluster.missing} of {engine_nodes} machines have not joined Ray yet")
    for node in cluster.nodes if cluster else ():
        if node.silent:
            _print(
                f"note: {node.host}, a machine of the Ray cluster, did not answer: {node.silent}"
            )
    changed = [str(one) for one in differences(loaded)] if nodes.rank == 0 else []
    if changed:
        _print(f"{loaded.run.dir} goes on with other settings:\n  " + "\n  ".join(changed))
    for warning in (*found, *plan.warnings):
        _print(f"note: {warning}")
    return launch(loaded, console(), nodes, peers, rank_environment(loaded, machine))


def _absent(out: Path) -> Path:
    """Called before the first question."""
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
            help="A file or folder of prompts, or hf://datasets/OWNER/NAME or its /FILE.",
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
            help="Held-out data, as --data; or a share to split off, by default 5%; or none.",
        ),
    ] = None,
    reward: Annotated[
        str | None,
        typer.Option(
            metavar="NAME[+NAME...]",
            help="A reward or an environment, or several joined by +; default: math.",
        ),
    ] = None,
    answer_key: Annotated[
        str | None,
        typer.Option("--answer-key", metavar="COLUMN", help="The answers' column, if any."),
    ] = None,
    gpus: Annotated[
        int | None, typer.Option(min=0, help="0: the CPU; default: those of this machine.")
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
            "--gpu-memory", min=1.0, help="Of each GPU, in GiB; default: as here, else 80."
        ),
    ] = None,
    as_chat: Annotated[
        bool, typer.Option("--as-chat", help="A prompt is a message to a chat model.")
    ] = False,
    setting: Annotated[
        list[str] | None,
        typer.Option(
            metavar="[NAME.]KEY=VALUE",
            help="Of the reward or environment, such as judge.url=http://HOST:8001/v1; may be given"
            " several times.",
        ),
    ] = None,
) -> None:
    """Ask for model, data, held-out data, reward, GPUs and style, and write a config that `mar
    plan` accepts. Options answer without being asked; without a terminal the others take
    defaults."""
    from megatron_async_rl.plan import interview
    from megatron_async_rl.plan.new_config import write_config

    _let_children_import_from_here()
    given = {
        "model": model,
        "data": data,
        "prompt_key": prompt_key,
        "eval": held_out,
        "reward": reward,
        "answer_key": answer_key,
        "gpus": None if gpus is None else str(gpus),
        "style": style,
    }
    questions = interview.Interview(
        {name: text for name, text in given.items() if text is not None},
        settings=setting or (),
        as_chat=as_chat,
        gpu_memory_gib=gpu_memory,
        terminal=interview.at_terminal(),
        report=_print_error,
    )
    answers = questions.ask()
    while True:
        try:
            written = write_config(answers, out)
            break
        except UserError as error:
            answers = questions.again(error)
    for note in written.notes:
        _print(f"note: {note}")
    files = " and ".join(map(str, written.files))
    _print(f"wrote {files}: mar plan {out} shows what it would do, mar train {out} does it")


@app.command()
def examples(
    folder: Annotated[
        Path, typer.Argument(metavar="[FOLDER]", help="Where they go; default: here.")
    ] = Path(),
) -> None:
    """Copy the examples, the launchers and the pages of this version, so that what the pages tell
    you to type works from that folder."""
    for part in sorted(SHARE.iterdir()):
        if (folder / part.name).exists():
            fix = "name a new folder: mar examples FOLDER"
            raise UserError.of("FOLDER", f"{folder / part.name} exists", fix)
    ignored = shutil.ignore_patterns("generated", "__pycache__")
    shutil.copytree(SHARE, folder, ignore=ignored, dirs_exist_ok=True)
    _print(f"wrote {', '.join(str(folder / part.name) for part in sorted(SHARE.iterdir()))}")


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
            "--only", metavar="NAME", help="A sweep, or runs by name; `*` stands for any."
        ),
    ] = None,
    jobs: Annotated[int, typer.Option("--jobs", min=1, help="Runs at a time.")] = 1,
    retry: Annotated[bool, typer.Option("--retry", help="Start failed runs again, too.")] = False,
) -> None:
    """Run every config of a grid that has not been run; Ctrl-C stops, and the same command goes
    on. Exit code 1 where runs failed."""
    from megatron_async_rl.study import study as run_study

    _let_children_import_from_here()
    raise typer.Exit(run_study(grid, only or (), console(), jobs=jobs, retry=retry))


@app.command()
def plan(
    config: ConfigFile,
    overrides: Overrides = None,
    measured_in: Annotated[
        Path | None,
        typer.Option(
            "--from", metavar="RUN", help="A run whose measured rates to reckon with, else run.dir."
        ),
    ] = None,
    nodes: Annotated[
        int, typer.Option("--nodes", "--nnodes", min=1, help="Machines of the run, alike.")
    ] = 1,
    trainer_nodes: Annotated[
        int | None,
        typer.Option(
            "--trainer-nodes",
            min=1,
            help="Those of them that have ranks; the others have engines alone. Default: all.",
        ),
    ] = None,
    gpus: Annotated[
        int | None,
        typer.Option(
            "--gpus", min=1, help="Plan for machines with this many GPUs each, not for this one."
        ),
    ] = None,
    gpu_memory: Annotated[
        float | None,
        typer.Option(
            "--gpu-memory", min=1.0, help="Of each of those GPUs, in GiB; default: --gpu's, or 80."
        ),
    ] = None,
    gpu: Annotated[
        str | None,
        typer.Option(
            "--gpu",
            metavar="NAME",
            help="Their model: h100, h200, b200 or a100; default: by memory.",
        ),
    ] = None,
    host_memory: Annotated[
        float | None,
        typer.Option(
            "--host-memory",
            min=1.0,
            help="Host memory of each machine, in GiB; default: this machine's, with --gpus"
            " unchecked.",
        ),
    ] = None,
    resolved: Annotated[
        bool, typer.Option("--resolved", help="Show the whole config, defaults included, first.")
    ] = False,
) -> None:
    """Show a config's layout, memory, batch, staleness, step time and totals, here or on the GPUs
    named. Starts nothing, and needs no weights of a published model; exit code 2 if it cannot
    run."""
    from megatron_async_rl.config.load import load
    from megatron_async_rl.data.hub import located
    from megatron_async_rl.plan.machine import CHIPS, GIB, described_machine, this_machine
    from megatron_async_rl.plan.preflight import preflight
    from megatron_async_rl.plan.published_models import published_config
    from megatron_async_rl.plan.resume import conflicts
    from megatron_async_rl.plan.screen import show_plan

    for option, value in (("--gpu-memory", gpu_memory), ("--gpu", gpu)):
        if value is not None and gpus is None:
            raise UserError.of(
                option, "is that of the GPUs that --gpus counts", "add --gpus NUMBER"
            )
    chip = CHIPS.get(gpu.lower()) if gpu is not None else None
    if gpu is not None and chip is None:
        raise UserError.of("--gpu", f"{gpu} is not known", f"name one of {', '.join(CHIPS)}")

    with_ranks = trainer_nodes or nodes
    if with_ranks > nodes:
        what = f"{with_ranks} of {nodes} machines"
        raise UserError.of("--trainer-nodes", what, f"name at most {nodes}, or more --nodes")
    if measured_in is not None and not (measured_in / "metrics.jsonl").is_file():
        raise UserError.of("--from", f"{measured_in} holds no metrics.jsonl", NAME_A_RUN)
    loaded, found = located(
        load(config, overrides or ()),
        weights=False,
        # Sizes of published models are known; data of a described machine may lie there.
        may_be_absent=lambda key, name: (
            published_config(Path(str(name))) is not None
            if key == "model.path"
            else gpus is not None
        ),
    )
    if measured_in is None and (loaded.run.dir / "metrics.jsonl").is_file():
        measured_in = loaded.run.dir
    if gpus is None:
        machine = this_machine(with_ranks, nodes - with_ranks)
    else:
        default = chip.sizes[0] if chip is not None else GPU_MEMORY_GIB
        machine = described_machine(
            gpus=gpus,
            gpu_memory_gib=gpu_memory or default,
            nodes=with_ranks,
            engine_nodes=nodes - with_ranks,
            chip=chip,
        )
    if host_memory is not None:
        machine = replace(machine, memory=int(host_memory * GIB))
    planned = preflight(loaded, all_data=False, machine=machine, without_model=True)
    unlike = [] if machine.described or planned.problems else conflicts(loaded)
    show_plan(
        planned,
        loaded,
        machine,
        console(),
        measured_in,
        notes=found,
        refused=[f"{one.key}: {one.what}" for one in unlike],
        with_config=resolved,
    )
    if planned.problems:
        raise typer.Exit(USER_ERROR)


@app.command()
def simulate(
    config: ConfigFile,
    overrides: Overrides = None,
    measured_in: Annotated[
        list[Path] | None,
        typer.Option(
            "--from", metavar="RUN", help="A run, or several, whose rates to take; else --hardware."
        ),
    ] = None,
    async_ratio: Annotated[
        str, typer.Option("--async-ratio", metavar="LIST", help="Such as 0,1,2; else the config's.")
    ] = "",
    gpus: Annotated[
        str,
        typer.Option("--gpus", metavar="LIST", help="Such as 64,256: divide this many optimally."),
    ] = "",
    grow: Annotated[
        bool, typer.Option("--grow", help="With --gpus: prompts_per_step grows with the GPUs.")
    ] = False,
    hardware: Annotated[
        str, typer.Option(metavar="NAME", help="`h100`, `h200`, `b200` or `a100`.")
    ] = "h100",
    assume: Annotated[
        list[str] | None,
        typer.Option("--assume", metavar="KEY=VALUE", help="Another value of that hardware."),
    ] = None,
    steps: Annotated[int, typer.Option(min=4, help="To simulate, after the first few.")] = 20,
    seed: Annotated[int, typer.Option(min=0, help="Of lengths and of steps that vary.")] = 0,
    out: Annotated[
        Path | None, typer.Option(metavar="FOLDER", help="Where the curves of --gpus go.")
    ] = None,
) -> None:
    """Predict a config's speed, busy shares and lags, and what binds; with --gpus the best
    division. Starts nothing."""
    from megatron_async_rl.config.load import load
    from megatron_async_rl.data.hub import located
    from megatron_async_rl.simulate.choose import predict_from_hardware, predict_from_run
    from megatron_async_rl.simulate.rates import assumed

    ratios = _numbers(async_ratio, "--async-ratio", 0.0)
    counts = [int(one) for one in _numbers(gpus, "--gpus", 2.0)]
    loaded, _ = located(load(config, overrides or ()), weights=False)
    if measured_in:
        if counts or assume:
            key, what = (
                "--gpus" if counts else "--assume",
                "is for stated rates, and --from has a run's",
            )
            raise UserError.of(key, what, "leave one of the two out")
        predict_from_run(loaded, measured_in, ratios, steps, seed, console())
        return
    stated = assumed(hardware, assume or ())
    predict_from_hardware(
        loaded, stated, ratios, counts, steps, seed, console(), grow=grow, out=out
    )


@app.command()
def report(
    runs: Annotated[
        list[Path], typer.Argument(metavar="RUN...", help="A run directory, or several.")
    ],
    out: Annotated[
        Path | None,
        typer.Option(
            metavar="FOLDER",
            help="Where a comparison goes; default: the folder that holds all the runs.",
        ),
    ] = None,
) -> None:
    """Write a run's report, an HTML page and a PNG picture, into its directory; of several runs a
    comparison."""
    for run in runs:
        if not (run / "metrics.jsonl").is_file():
            raise UserError.of("RUN", f"{run} holds no metrics.jsonl", NAME_A_RUN)
    if len(runs) == 1 and out is not None:
        fix = "leave it out, or name several runs"
        raise UserError.of("--out", "a run's report goes into its own directory", fix)
    from megatron_async_rl.report.report import write_comparison, write_report

    written = write_report(runs[0]) if len(runs) == 1 else write_comparison(runs, out)
    for path in written:
        _print(str(path))


@app.command()
def engines(
    run: Annotated[Path, typer.Argument(metavar="RUN", help="Directory of a running run.")],
    count: Annotated[int, typer.Argument(metavar="N", min=1, help="Training engines.")],
) -> None:
    """Give a run more or fewer engines while it runs. Those that join start from the newest
    weights; those that leave hand on what they had begun."""
    from megatron_async_rl.launch.run_lock import ask_for_engines

    ask_for_engines(run, count)
    _print(f"{run} is asked for {count} engines: it notes on its screen who joins and leaves")


@app.command()
def dashboard(
    runs: Annotated[
        list[Path], typer.Argument(metavar="RUN...", help="A run directory, or several.")
    ],
    port: Annotated[
        int, typer.Option(min=0, max=65535, help="To listen on; 0: a free port.")
    ] = 8470,
    host: Annotated[
        str, typer.Option(help="Address to listen on; 0.0.0.0: every one of this machine.")
    ] = "localhost",
    allow_host: Annotated[
        list[str] | None,
        typer.Option(
            metavar="NAME",
            help="A name of this machine, or of a proxy before it, that a browser may ask for;"
            " may be given several times.",
        ),
    ] = None,
) -> None:
    """Show runs in a browser while they go on, or after: curves, engines, anomalies, samples; of
    several, curves on top of each other. Reads run directories, changes nothing."""
    from megatron_async_rl.report.dashboard import serve

    serve(runs, host, port, _print, allow_host or ())


@app.command()
def samples(
    run: Annotated[Path, typer.Argument(metavar="RUN", help="A run directory.")],
    step: Annotated[
        int | None,
        typer.Option(
            "--step", metavar="N", help="What step N trained on; with --eval, a weight version."
        ),
    ] = None,
    worst: Annotated[
        int | None, typer.Option("--worst", metavar="K", min=1, help="The K lowest rewards.")
    ] = None,
    best: Annotated[
        int | None, typer.Option("--best", metavar="K", min=1, help="The K highest rewards.")
    ] = None,
    random: Annotated[
        int | None, typer.Option("--random", metavar="K", min=1, help="K drawn by --seed.")
    ] = None,
    seed: Annotated[int, typer.Option("--seed", min=0, help="Of --random.")] = 0,
    held_out: Annotated[
        bool, typer.Option("--eval", help="Held-out evaluation instead of training.")
    ] = False,
    as_json: Annotated[
        bool, typer.Option("--json", help="Whole samples, one JSON object per line.")
    ] = False,
) -> None:
    """Print samples of a run, also while it runs: prompt, response, reward, versions. By default
    the newest few."""
    from megatron_async_rl.report.samples import SampleQuery, choose, print_samples

    wanted = SampleQuery(
        step=step, worst=worst, best=best, random=random, seed=seed, held_out=held_out
    )
    print_samples(choose(run, wanted), console(), as_json=as_json)


@app.command()
def convert(
    checkpoint: Annotated[
        Path,
        typer.Argument(metavar="CHECKPOINT", help="RUN/checkpoint, or one step's folder in it."),
    ],
    out: Annotated[
        Path, typer.Argument(metavar="OUT", help="Folder to write; must not exist or be empty.")
    ],
) -> None:
    """Write a checkpoint as a Hugging Face model directory."""
    if not checkpoint.is_dir():
        raise UserError.of(
            "CHECKPOINT",
            f"{checkpoint} is not a directory",
            "name RUN/checkpoint of a run that has saved one",
        )
    if out.exists() and (not out.is_dir() or any(out.iterdir())):
        raise UserError.of("OUT", f"{out} already exists", "name a new directory")
    with warnings.catch_warnings():
        # Libraries say what they lack as they load; `mar doctor` reports it with its meaning.
        warnings.simplefilter("ignore")
        from megatron_async_rl.weights.convert import convert as convert_checkpoint

        convert_checkpoint(checkpoint, out)
    _print(f"wrote {out}")


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
        typer.Option(metavar="CONFIG", help="Says how to sample; default: the run's own."),
    ] = None,
    out: Annotated[
        Path | None,
        typer.Option(metavar="FILE", help="JSON to write; default: RUN/eval_<step>.json."),
    ] = None,
    responses: Annotated[
        Path | None,
        typer.Option(metavar="FILE", help="JSONL to write every response to, with its reward."),
    ] = None,
) -> None:
    """Sample held-out prompts from a checkpoint or a model: mean reward, pass@k, speed. Engines
    alone, no training."""
    from megatron_async_rl.evaluate import EvaluationFailed, resolve, run

    _let_children_import_from_here()
    job = resolve(checkpoint, config, overrides or (), out, responses)
    try:
        run(job, console())
    except EvaluationFailed as error:
        _print_error(error)
        raise typer.Exit(1) from None


@app.command()
def conform(
    files: Annotated[
        list[Path],
        typer.Argument(
            metavar="FILE...",
            help="JSON lists of reference vectors; `mar examples` copies some, in"
            " tests/data/golden.",
        ),
    ],
) -> None:
    """Run reference vectors through the registries; exit code 0 only if every case passes."""
    from megatron_async_rl.conform.cases import read_cases
    from megatron_async_rl.conform.judge import show

    raise typer.Exit(show({file: read_cases(file) for file in files}, console()))


@app.command()
def doctor(
    models: Annotated[
        bool,
        typer.Option(
            "--models", help="List the model families instead: what each may have, what is refused."
        ),
    ] = False,
    fix_hints: Annotated[
        bool,
        typer.Option("--fix-hints", help="Add a command or a setting that mends what is not well."),
    ] = False,
    as_json: Annotated[bool, typer.Option("--json", help="All findings, as JSON.")] = False,
) -> None:
    """Check this installation and say what each missing part would bring; exit code 1 if a needed
    one is missing."""
    if models:
        from megatron_async_rl.plan.model_table import show_families

        show_families(console())
        return
    from megatron_async_rl.plan.doctor import examine, show

    raise typer.Exit(show(examine(), console(), fix_hints=fix_hints, as_json=as_json))


def _show_version(wanted: bool) -> None:
    if wanted:
        print(f"megatron-async-rl {__version__}")  # noqa: T201
        raise typer.Exit


@app.callback()
def options(
    version: Annotated[
        bool,
        typer.Option("--version", callback=_show_version, is_eager=True, help="Show the version."),
    ] = False,
) -> None:
    """Asynchronous RL post-training: Megatron-Core policies, vLLM rollouts."""


def _numbers(text: str, option: str, minimum: float) -> list[float]:
    """Numbers of a comma-separated list, smallest first. Raises UserError."""
    try:
        found = sorted({float(part) for part in text.split(",")}) if text else []
    except ValueError:
        found = [-1.0]
    if not all(minimum <= one < float("inf") for one in found):
        what = f"{text!r} is not a list of numbers from {minimum:g} on"
        raise UserError.of(option, what, "write such as 64,256")
    return found


def _let_children_import_from_here() -> None:
    """A reward given as module:function is found from the current folder by ranks and engines
    too."""
    here = os.getcwd()
    known = [part for part in os.environ.get("PYTHONPATH", "").split(os.pathsep) if part]
    if here not in known:
        os.environ["PYTHONPATH"] = os.pathsep.join([*known, here])


def _print(text: str) -> None:
    console().print(text, markup=False, highlight=False, soft_wrap=True)


def _print_error(error: object) -> None:
    console(stderr=True).print(str(error), markup=False, highlight=False, soft_wrap=True)


def main() -> None:
    """Console entry point."""
    _never_fail_to_print()
    app()


def _never_fail_to_print() -> None:
    """Print a replacement character where the locale's encoding (GBK, ISO-8859-1, ASCII) lacks one;
    a child process's output is read by this package, as UTF-8."""
    for stream in (sys.stdin, sys.stdout, sys.stderr):
        if isinstance(stream, io.TextIOWrapper):
            stream.reconfigure(errors="replace")
    os.environ["PYTHONIOENCODING"] = "utf-8:backslashreplace"

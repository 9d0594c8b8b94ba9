"""Commands that read a config, a run or a checkpoint and train nothing."""

from __future__ import annotations

import warnings
from dataclasses import replace
from pathlib import Path
from typing import Annotated, Literal

import typer

from megatron_async_rl.cli.application import (
    NAME_A_RUN,
    USER_ERROR,
    ConfigFile,
    Overrides,
    app,
    console,
    print_text,
)
from megatron_async_rl.config.durable import write_file
from megatron_async_rl.config.problem import UserError

GPU_MEMORY_GIB = 80.0


@app.command()
def plan(
    config: ConfigFile,
    overrides: Overrides = None,
    measured_in: Annotated[
        Path | None,
        typer.Option(
            "--from", metavar="RUN", help="Run whose measured rates to use; default: run.dir."
        ),
    ] = None,
    nodes: Annotated[
        int, typer.Option("--nodes", "--nnodes", min=1, help="Number of identical machines.")
    ] = 1,
    trainer_nodes: Annotated[
        int | None,
        typer.Option(
            "--trainer-nodes",
            min=1,
            help="Number of machines with ranks; the others have engines only. Default: all.",
        ),
    ] = None,
    gpus: Annotated[
        int | None,
        typer.Option(
            "--gpus", min=1, help="Plan for machines with this many GPUs each instead of this one."
        ),
    ] = None,
    gpu_memory: Annotated[
        float | None,
        typer.Option(
            "--gpu-memory",
            min=1.0,
            help="Memory of each of those GPUs in GiB; default: that of --gpu, else 80.",
        ),
    ] = None,
    gpu: Annotated[
        str | None,
        typer.Option(
            "--gpu",
            metavar="NAME",
            help="Model of those GPUs: h100, h200, b200 or a100; default: by memory.",
        ),
    ] = None,
    host_memory: Annotated[
        float | None,
        typer.Option(
            "--host-memory",
            min=1.0,
            help="Host memory of each machine in GiB; default: this machine's, and not checked with"
            " --gpus.",
        ),
    ] = None,
    resolved: Annotated[
        bool, typer.Option("--resolved", help="Print the whole config with its defaults first.")
    ] = False,
) -> None:
    """Show layout, memory, batch, staleness, step time and totals of a config, on this machine or
    on described GPUs. Starts nothing and needs no weights of a published model. Exit code 2 if the
    config cannot run."""
    from megatron_async_rl.config.load import load
    from megatron_async_rl.data.hub import located
    from megatron_async_rl.plan.machine import CHIPS, GIB, described_machine, this_machine
    from megatron_async_rl.plan.model_files import published_config
    from megatron_async_rl.plan.preflight import preflight
    from megatron_async_rl.plan.resume import conflicts
    from megatron_async_rl.plan.screen import show_plan

    # Options without effect are refused, not ignored.
    for option, value in (("--gpu-memory", gpu_memory), ("--gpu", gpu)):
        if value is not None and gpus is None:
            raise UserError.of(option, "needs the number of GPUs", "add --gpus NUMBER")
    chip = CHIPS.get(gpu.lower()) if gpu is not None else None
    if gpu is not None and chip is None:
        raise UserError.of("--gpu", f"{gpu} is not known", f"name one of {', '.join(CHIPS)}")

    with_ranks = trainer_nodes or nodes
    # Before the config is read: it is about the command line alone.
    if with_ranks > nodes:
        what = f"{with_ranks} of {nodes} machines"
        raise UserError.of("--trainer-nodes", what, f"name at most {nodes}, or more --nodes")
    # A run without metrics has no rates.
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
    # A resumed run is planned with its own rates.
    if measured_in is None and (loaded.run.dir / "metrics.jsonl").is_file():
        measured_in = loaded.run.dir
    if gpus is None:
        machine = this_machine(with_ranks, nodes - with_ranks)
    else:
        default = chip.sizes[0] if chip is not None else GPU_MEMORY_GIB
        # Only GPUs are described; cores and disks stay unknown.
        machine = described_machine(
            gpus=gpus,
            gpu_memory_gib=gpu_memory or default,
            nodes=with_ranks,
            engine_nodes=nodes - with_ranks,
            chip=chip,
        )
    if host_memory is not None:
        # Overrides this machine's memory, too.
        machine = replace(machine, memory=int(host_memory * GIB))
    planned = preflight(loaded, all_data=False, machine=machine, without_model=True)
    # Only a plan that could run here checks the run directory.
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
    # After the screen, which shows all of them.
    if planned.problems:
        raise typer.Exit(USER_ERROR)


@app.command()
def simulate(
    config: ConfigFile,
    overrides: Overrides = None,
    measured_in: Annotated[
        list[Path] | None,
        typer.Option(
            "--from",
            metavar="RUN",
            help="Run whose measured rates to use; repeatable; default: --hardware.",
        ),
    ] = None,
    async_ratio: Annotated[
        str,
        typer.Option(
            "--async-ratio",
            metavar="LIST",
            help="Ratios to try, such as 0,1,2; default: the config's.",
        ),
    ] = "",
    gpus: Annotated[
        str,
        typer.Option(
            "--gpus", metavar="LIST", help="GPU counts to divide optimally, such as 64,256."
        ),
    ] = "",
    grow: Annotated[
        bool, typer.Option("--grow", help="With --gpus: scale prompts_per_step with the GPUs.")
    ] = False,
    hardware: Annotated[
        str | None,
        typer.Option(metavar="NAME", help="`h100` (default), `h200`, `b200` or `a100`."),
    ] = None,
    assume: Annotated[
        list[str] | None,
        typer.Option("--assume", metavar="KEY=VALUE", help="Override a value of that hardware."),
    ] = None,
    steps: Annotated[int, typer.Option(min=4, help="Steps to simulate after the warm-up.")] = 20,
    seed: Annotated[int, typer.Option(min=0, help="Seed of response lengths and step times.")] = 0,
    out: Annotated[
        Path | None, typer.Option(metavar="FOLDER", help="Folder for the curves of --gpus.")
    ] = None,
) -> None:
    """Predict speed, utilisation, lag and bottleneck of a config; with --gpus also the best
    division. Starts nothing."""
    from megatron_async_rl.config.load import load
    from megatron_async_rl.data.hub import located
    from megatron_async_rl.simulate.choose import predict_from_hardware, predict_from_run
    from megatron_async_rl.simulate.rates import assumed

    # Checked before the config and its model are read.
    ratios = _numbers(async_ratio, "--async-ratio", 0.0)
    counts = [int(one) for one in _numbers(gpus, "--gpus", 2.0, whole=True)]
    loaded, _ = located(load(config, overrides or ()), weights=False)
    if measured_in:
        # Measured rates belong to one division of one machine.
        others = {"--gpus": bool(counts), "--assume": bool(assume), "--hardware": bool(hardware)}
        for key, given in others.items():
            if given:
                what = "applies to assumed rates, and --from uses a run's"
                raise UserError.of(key, what, "leave one of the two out")
    for key, given in (("--grow", grow), ("--out", out is not None)):
        if given and not counts:
            raise UserError.of(key, "applies to --gpus", f"add --gpus, or leave {key} out")
    if measured_in:
        predict_from_run(loaded, measured_in, ratios, steps, seed, console())
        return
    stated = assumed(hardware or "h100", assume or ())
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
            help="Folder for a comparison; default: the common folder of the runs.",
        ),
    ] = None,
) -> None:
    """Write the report of a run (HTML page and PNG) into its directory, or compare several runs."""
    for run in runs:
        if not (run / "metrics.jsonl").is_file():
            raise UserError.of("RUN", f"{run} holds no metrics.jsonl", NAME_A_RUN)
    if len(runs) == 1 and out is not None:
        fix = "leave it out, or name several runs"
        raise UserError.of("--out", "a run's report goes into its own directory", fix)
    # Imported after the checks: matplotlib takes a second.
    from megatron_async_rl.report.report import write_comparison, write_report

    written = write_report(runs[0]) if len(runs) == 1 else write_comparison(runs, out)
    for path in written:
        print_text(str(path))


@app.command()
def engines(
    run: Annotated[Path, typer.Argument(metavar="RUN", help="Directory of a running run.")],
    count: Annotated[int, typer.Argument(metavar="N", min=1, help="Number of training engines.")],
) -> None:
    """Add or remove engines of a running run. New engines start from the newest weights;
    responses of a removed engine continue on the others."""
    from megatron_async_rl.launch.run_lock import request_engines

    # Only a request: the controller decides and notes the result.
    request_engines(run, count)
    print_text(f"requested {count} engines of {run}: its screen shows which join and leave")


@app.command()
def dashboard(
    runs: Annotated[
        list[Path], typer.Argument(metavar="RUN...", help="A run directory, or several.")
    ],
    port: Annotated[
        int, typer.Option(min=0, max=65535, help="Port to listen on; 0: a free one.")
    ] = 8470,
    host: Annotated[
        str, typer.Option(help="Address to listen on; 0.0.0.0: all addresses of this machine.")
    ] = "localhost",
    allow_host: Annotated[
        list[str] | None,
        typer.Option(
            metavar="NAME",
            help="Host name of this machine, or of a proxy in front of it, that browsers may use;"
            " repeatable.",
        ),
    ] = None,
) -> None:
    """Show runs in a browser, during the run or afterwards: curves, engines, anomalies and
    samples; several runs share their charts. Only reads run directories."""
    from megatron_async_rl.report.dashboard import serve

    serve(runs, host, port, print_text, allow_host or ())


@app.command()
def samples(
    run: Annotated[Path, typer.Argument(metavar="RUN", help="A run directory.")],
    step: Annotated[
        int | None,
        typer.Option(
            "--step", metavar="N", help="Samples that step N trained on; with --eval, of version N."
        ),
    ] = None,
    worst: Annotated[
        int | None, typer.Option("--worst", metavar="K", min=1, help="The K lowest rewards.")
    ] = None,
    best: Annotated[
        int | None, typer.Option("--best", metavar="K", min=1, help="The K highest rewards.")
    ] = None,
    random: Annotated[
        int | None,
        typer.Option("--random", metavar="K", min=1, help="K samples drawn with --seed."),
    ] = None,
    seed: Annotated[
        int | None, typer.Option("--seed", min=0, help="Seed of --random; default: 0.")
    ] = None,
    held_out: Annotated[
        bool, typer.Option("--eval", help="Samples of held-out evaluation instead of training.")
    ] = False,
    as_json: Annotated[
        bool, typer.Option("--json", help="Whole samples, one JSON object per line.")
    ] = False,
) -> None:
    """Print samples of a run, also during the run: prompt, response, reward and versions. Default:
    the newest few."""
    from megatron_async_rl.report.samples import SampleQuery, choose, print_samples

    if seed is not None and random is None:
        raise UserError.of("--seed", "applies to --random", "add --random K, or leave --seed out")
    wanted = SampleQuery(
        step=step, worst=worst, best=best, random=random, seed=seed or 0, held_out=held_out
    )
    # Reads the log only, so it is safe while the run continues.
    print_samples(choose(run, wanted), console(), as_json=as_json)


@app.command()
def verify(
    run: Annotated[
        Path,
        typer.Argument(metavar="RUN", help="The run.dir of a run; with --numerics, a config file."),
    ],
    overrides: Overrides = None,
    numerics: Annotated[
        bool,
        typer.Option(
            "--numerics",
            help="Compare trainer and engines of a config on a few prompts, without training.",
        ),
    ] = False,
    as_json: Annotated[
        str | None,
        typer.Option(
            "--json",
            metavar="FILE",
            help="Also write the scorecard as JSON; `-`: print only the JSON.",
        ),
    ] = None,
) -> None:
    """Check the records of a run: weights, log-probs, tokens, rewards, data and arithmetic. Writes
    RUN/verify.json, which the report shows. With --numerics, check a config before its run: start
    its trainer and engines, sample a few prompts, and compare log-probs and weights. KEY=VALUE
    needs --numerics. Exit code 1 if a row fails."""
    from megatron_async_rl.cli.runs import compare_numerics
    from megatron_async_rl.verify.verified_run import verify_run

    alone = as_json == "-"
    code = 0
    if numerics:
        code, card = compare_numerics(run, overrides or (), alone=alone)
    elif overrides or run.is_file():
        what = f"{run} is a file" if run.is_file() else f"{overrides} change nothing in a run"
        fix = "name a run directory, or add --numerics to check a config before its run"
        raise UserError.of("RUN", what, fix)
    else:
        card = verify_run(run.absolute(), console(stderr=alone))
    if alone:
        typer.echo(card.text(), nl=False)
    else:
        # First: the file may be impossible to write.
        card.show(console())
        if as_json is not None:
            write_file(Path(as_json), card.text())
    raise typer.Exit(code or card.exit_code)


@app.command()
def convert(
    checkpoint: Annotated[
        Path,
        typer.Argument(metavar="CHECKPOINT", help="RUN/checkpoint, or one step's folder in it."),
    ],
    out: Annotated[
        Path, typer.Argument(metavar="OUT", help="Folder to write; must not exist or be empty.")
    ],
    dtype: Annotated[
        Literal["float32", "bfloat16"] | None,
        typer.Option(help="Precision of the weights.", show_default="that of the model"),
    ] = None,
) -> None:
    """Write a checkpoint as a Hugging Face model directory."""
    if not checkpoint.is_dir():
        raise UserError.of(
            "CHECKPOINT",
            f"{checkpoint} is not a directory",
            "name RUN/checkpoint of a run that has saved one",
        )
    # Files of another model in the folder would be loaded with this one.
    if out.exists() and (not out.is_dir() or any(out.iterdir())):
        raise UserError.of("OUT", f"{out} already exists", "name a new directory")
    with warnings.catch_warnings():
        # Libraries warn about missing parts; `mar doctor` reports them with their meaning.
        warnings.simplefilter("ignore")
        from megatron_async_rl.weights.convert import convert as convert_checkpoint

        convert_checkpoint(checkpoint, out, dtype)
    print_text(f"wrote {out}")


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
    from megatron_async_rl.conform.judge import show
    from megatron_async_rl.conform.methods import read_cases

    # All files are read before the first case runs.
    raise typer.Exit(show({file: read_cases(file) for file in files}, console()))


@app.command()
def doctor(
    models: Annotated[
        bool,
        typer.Option(
            "--models", help="List the supported model families and their limits instead."
        ),
    ] = False,
    fix_hints: Annotated[
        bool,
        typer.Option("--fix-hints", help="Add a command or setting that fixes each finding."),
    ] = False,
    as_json: Annotated[bool, typer.Option("--json", help="All findings, as JSON.")] = False,
) -> None:
    """Check this installation and report what each missing part provides. Exit code 1 if a required
    part is missing."""
    if models:
        for key, given in (("--json", as_json), ("--fix-hints", fix_hints)):
            if given:
                raise UserError.of(key, "does not apply to --models", "leave one of the two out")
        from megatron_async_rl.plan.doctor import show_families

        show_families(console())
        return
    from megatron_async_rl.plan.doctor import examine, show

    raise typer.Exit(show(examine(), console(), fix_hints=fix_hints, as_json=as_json))


def _numbers(text: str, option: str, minimum: float, *, whole: bool = False) -> list[float]:
    """Numbers of a comma-separated list, smallest first. Raises UserError."""
    try:
        # Sorted and distinct: curves are drawn over them.
        found = sorted({float(part) for part in text.split(",")}) if text else []
    except ValueError:
        found = [-1.0]
    # Also refuses nan, which no comparison accepts.
    if not all(minimum <= one < float("inf") and (one.is_integer() or not whole) for one in found):
        kind = "whole numbers" if whole else "numbers"
        what = f"{text!r} is not a list of {kind} from {minimum:g} on"
        raise UserError.of(option, what, "write such as 64,256")
    return found

"""`mar simulate`: a config at several `async_ratio`s, or the best division of so many GPUs: how many
train, how many sample, how far ahead, and in which buckets weights travel.

Invariants:
- all choices are judged by the same lengths and the same seed;
- what `mar plan` refuses is not simulated;
- of a large fleet a part is simulated: so many engines, and as many prompts as are theirs, while
  trainer and weights take what they take of the whole.
"""

from __future__ import annotations

import json
import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, Literal

import numpy as np
from rich.console import Console
from rich.table import Table

from megatron_async_rl.config.flow import ExactLag
from megatron_async_rl.config.problem import ConfigError, UserError
from megatron_async_rl.config.schema import Config
from megatron_async_rl.plan.layout import device_of
from megatron_async_rl.plan.machine import described_machine, this_machine
from megatron_async_rl.plan.model_files import ModelShape, read_model
from megatron_async_rl.plan.plan import make_plan
from megatron_async_rl.plan.preflight import preflight
from megatron_async_rl.simulate.calibrate import calibrate
from megatron_async_rl.simulate.hardware import Hardware, best_bucket, lengths_of, rates_of
from megatron_async_rl.simulate.model import Lengths, Outcome, Rates, simulate

RATIOS = (0.0, 0.5, 1.0, 2.0, 4.0, 8.0)
SAMPLES, ENGINES, LEAST_ENGINES = 512, 8, 4
"""Of a step, and of the fleet: simulated one by one. Of more a part stands for all; engines load in
turns, which one alone cannot show."""
CLOSE = 0.98
"""Speeds within this of the fastest are as good: then fresher samples count."""
SPLITS = 4
HALVES = {
    "trainer": ("train_s", "train_token_s"),
    "engines": ("decode", "prompt_s"),
    "publishing": ("publish_s", "send_s", "begin_s", "load_s"),
}
COLUMNS = (
    *(
        "GPUs",
        "prompts",
        "async ratio",
        "ranks",
        "engines",
        "bucket MiB",
        "step s",
        "tokens a second",
    ),
    *("trainer busy", "engines busy", "mean lag", "binds"),
)


@dataclass(frozen=True, kw_only=True)
class Choice:
    """A config that was simulated. `binds`: by how much a step would be shorter if a part took half
    as long, the part first that binds most; empty where that was not asked."""

    gpus: int
    prompts: int
    async_ratio: float
    ranks: int
    engines: int
    bucket_mib: int
    outcome: Outcome
    binds: str = ""

    def cells(self) -> list[str]:
        outcome = self.outcome
        return [
            *(f"{self.gpus:,}", f"{self.prompts:,}", f"{self.async_ratio:g}", f"{self.ranks:,}"),
            *(f"{self.engines:,}", str(self.bucket_mib), f"{outcome.step_s:.3g}"),
            *(f"{outcome.tokens_per_s:,.0f}", f"{outcome.trainer_busy:.0%}"),
            *(f"{outcome.engine_busy:.0%}", f"{outcome.lag_mean:.2f}", self.binds),
        ]


@dataclass(frozen=True, kw_only=True)
class Trial:
    """What is simulated, and how."""

    config: Config
    rates: Rates
    lengths: Lengths
    steps: int
    seed: int

    def outcome(self, **rates: Any) -> Outcome:
        """`rates`: other ones."""
        rollout, flow = self.config.rollout, self.config.flow
        assert rollout is not None
        used = replace(self.rates, **rates)
        engines, prompts = part_of(flow.prompts_per_step, flow.group_size, rollout.engines)
        whole = flow.prompts_per_step / prompts
        outcome = simulate(
            flow.model_copy(update={"prompts_per_step": prompts}),
            rollout.model_copy(update={"engines": engines}),
            replace(used, train_token_s=whole * used.train_token_s),
            self.lengths,
            steps=self.steps,
            seed=self.seed,
            max_paused=self.config.weights.max_paused,
        )
        return replace(outcome, tokens_per_s=whole * outcome.tokens_per_s)

    def choice(self, *, explain: bool) -> Choice:
        config, outcome, gains = self.config, self.outcome(), {}
        assert config.rollout is not None
        for part, names in HALVES.items() if explain else ():
            half = {name: _half(getattr(self.rates, name)) for name in names}
            gains[part] = 1 - self.outcome(**half).step_s / outcome.step_s
        order = sorted(gains, key=lambda part: -gains[part])
        return Choice(
            gpus=gpus_of(config),
            prompts=config.flow.prompts_per_step,
            async_ratio=config.flow.async_ratio,
            ranks=config.policy.parallel.ranks,
            engines=config.rollout.engines,
            bucket_mib=config.weights.bucket_mib,
            outcome=outcome,
            binds=", ".join(f"{part} {max(0.0, gains[part]):.0%}" for part in order),
        )


def _half(value: Any) -> Any:
    return tuple(map(_half, value)) if isinstance(value, tuple) else value / 2


def part_of(prompts: int, group_size: int, engines: int) -> tuple[int, int]:
    """(engines, prompts) that stand for the whole: few enough to simulate one by one, each engine
    with its share of the prompts, as nearly as whole prompts permit."""
    if engines <= ENGINES and prompts * group_size <= 2 * SAMPLES:
        return engines, prompts
    most = max(LEAST_ENGINES, min(ENGINES, engines * SAMPLES // (prompts * group_size)))
    counts = range(min(engines, LEAST_ENGINES), min(engines, most) + 1)

    def off(count: int) -> float:
        return abs(math.log(max(1, round(prompts * count / engines)) * engines / (prompts * count)))

    count = min(counts, key=lambda count: (off(count), -count))
    return count, max(1, round(prompts * count / engines))


def changed(config: Config, section: str, **values: Any) -> Config:
    """`config` with other values in a section."""
    part = getattr(config, section).model_copy(update=values)
    return config.model_copy(update={section: part})


def ahead(config: Config, ratio: float) -> Config:
    """`config` at another async_ratio. Raises UserError for one that it cannot have."""
    flow, key = config.flow, "--async-ratio"
    if isinstance(flow.selection, ExactLag) and ratio != flow.async_ratio:
        fix = "leave it out, or choose another flow.selection"
        raise UserError.of(key, "exact_lag has the ratio of its lag", fix)
    if flow.oversample and ratio + flow.oversample > math.ceil(ratio):
        what = f"flow.oversample: {flow.oversample:g} fits only below the next whole number"
        raise UserError.of(key, what, "name fractions, such as 0.5, or set it to 0")
    return changed(config, "flow", async_ratio=ratio)


def gpus_of(config: Config) -> int:
    """That trainer and engines have."""
    assert config.rollout is not None
    return config.policy.parallel.ranks + config.rollout.engines * config.rollout.tensor


def predict_from_run(
    config: Config,
    runs: Sequence[Path],
    ratios: Sequence[float],
    steps: int,
    seed: int,
    console: Console,
) -> None:
    """Raises UserError."""
    _require_engines(config)
    machine = this_machine()
    on_cpu = device_of(config, machine) == "cpu"
    calibration = calibrate(runs, machine.cores if on_cpu else None)
    problems = preflight(config, all_data=False, machine=machine).problems
    if problems:
        raise ConfigError("cannot run", problems)
    rates = calibration.rates_of(config)
    _print(console, calibration.in_words())
    trials = [
        Trial(
            config=ahead(config, ratio),
            rates=rates,
            lengths=calibration.lengths,
            steps=steps,
            seed=seed,
        )
        for ratio in ratios or [config.flow.async_ratio]
    ]
    show([trial.choice(explain=True) for trial in trials], console)


def predict_from_hardware(
    config: Config,
    hardware: Hardware,
    ratios: Sequence[float],
    gpus: Sequence[int],
    steps: int,
    seed: int,
    console: Console,
    *,
    grow: bool,
    out: Path | None,
) -> None:
    """Raises UserError."""
    _require_engines(config)
    if config.policy.device == "cpu":
        what = "cpu, and no speed is assumed of a CPU"
        raise UserError.of("policy.device", what, "name a run whose rates to take: --from RUN")
    shape, problems = read_model(config.model.path)
    if shape is None:
        raise UserError(str(config.model.path), problems)
    _print(console, f"assumed, nothing of it measured: {hardware}")
    if not gpus:
        require_plan(config, shape, hardware)
        trials = [
            _trial(ahead(config, ratio), shape, hardware, steps, seed)
            for ratio in ratios or [config.flow.async_ratio]
        ]
        show([trial.choice(explain=True) for trial in trials], console)
        return
    tried, chosen = [], []
    for count in gpus:
        prompts = config.flow.prompts_per_step * (count / gpus_of(config) if grow else 1)
        sized = changed(config, "flow", prompts_per_step=max(1, round(prompts)))
        trials = _trials(sized, shape, hardware, ratios or RATIOS, count, steps, seed)
        tried.append([trial.choice(explain=False) for trial in trials])
        chosen.append(trials[tried[-1].index(best(tried[-1]))].choice(explain=True))
    show(chosen, console)
    if out is not None:
        for path in write(tried, chosen, out):
            _print(console, str(path))


def _require_engines(config: Config) -> None:
    if config.rollout is None:
        what = "a supervised run has no engines, and nothing to simulate"
        raise UserError.of("rollout", what, "name a config that samples")
    if config.rollout.placement == "colocated":
        what = "colocated: engines and policy take turns, so a step is the sum of its parts"
        raise UserError.of("rollout.placement", what, "`mar plan` says what that comes to")


def require_plan(config: Config, shape: ModelShape, hardware: Hardware) -> None:
    """Raises ConfigError for what `mar plan` refuses on such machines."""
    nodes = max(1, config.policy.parallel.ranks // hardware.gpus_per_machine)
    machine = described_machine(
        gpus=hardware.gpus_per_machine, gpu_memory_gib=hardware.memory_gib, nodes=nodes
    )
    problems = make_plan(config, machine, shape).problems
    if problems:
        raise ConfigError("cannot run", problems)


def _trial(config: Config, shape: ModelShape, hardware: Hardware, steps: int, seed: int) -> Trial:
    lengths = lengths_of(config, hardware, seed)
    rates = rates_of(config, shape, hardware, lengths)
    return Trial(config=config, rates=rates, lengths=lengths, steps=steps, seed=seed)


def _trials(
    config: Config,
    shape: ModelShape,
    hardware: Hardware,
    ratios: Sequence[float],
    gpus: int,
    steps: int,
    seed: int,
) -> list[Trial]:
    """Each ratio on the divisions of `gpus` whose slowest part, the trainer, the engines or the
    carrier, is the fastest. Raises UserError where no division can run."""
    rollout, parallel, flow = config.rollout, config.policy.parallel, config.flow
    assert rollout is not None
    samples, cell = flow.prompts_per_step * flow.group_size, parallel.replica_ranks
    found: list[tuple[float, Trial]] = []
    problem = UserError.of(
        "--gpus", f"{gpus} are too few for {cell} ranks and an engine", "add some"
    )
    for data in range(1, (gpus - rollout.tensor) // cell + 1):
        engines = (gpus - data * cell) // rollout.tensor
        if samples % data:
            continue
        layout = parallel.model_copy(update={"ranks": data * cell})
        split = changed(changed(config, "policy", parallel=layout), "rollout", engines=engines)
        split = changed(split, "weights", bucket_mib=best_bucket(split, shape, hardware))
        try:
            require_plan(split, shape, hardware)
            trial = _trial(split, shape, hardware, steps, seed)
        except UserError as error:
            problem = error
            continue
        rates, mean = trial.rates, trial.lengths.mean
        tokens = samples * (hardware.prompt_tokens + mean)
        trains_s = rates.train_s + tokens * rates.train_token_s + rates.publish_s
        running = max(1, min(rates.places, samples // engines))
        samples_s = (rates.token_s(running) * mean / running + rates.prompt_s) * samples / engines
        found.append((max(trains_s, samples_s, rates.send_s), trial))
    if not found:
        raise problem
    likely = sorted(found, key=lambda pair: pair[0])[:SPLITS]
    return [
        replace(trial, config=ahead(trial.config, ratio)) for _, trial in likely for ratio in ratios
    ]


def best(tried: Sequence[Choice]) -> Choice:
    """The fastest; of those that are nearly as fast, the one with the freshest samples."""
    fastest = max(one.outcome.tokens_per_s for one in tried)
    close = [one for one in tried if one.outcome.tokens_per_s >= CLOSE * fastest]
    return min(close, key=lambda one: (one.async_ratio, -one.outcome.tokens_per_s))


def show(choices: Sequence[Choice], console: Console) -> None:
    table = Table(box=None, padding=(0, 2, 0, 0), header_style="dim")
    for name in COLUMNS:
        side: Literal["left", "right"] = "left" if name == "binds" else "right"
        table.add_column(name.replace(" ", "\n"), justify=side, no_wrap=True)
    for one in choices:
        table.add_row(*one.cells())
    console.print(table)
    _print(console, "binds: by how much a step would be shorter if that part took half as long")


def _print(console: Console, text: str) -> None:
    console.print(text, markup=False, highlight=False, soft_wrap=True)


def write(
    tried: Sequence[Sequence[Choice]], chosen: Sequence[Choice], folder: Path
) -> tuple[Path, Path]:
    """scaling.json, and its curves in scaling.svg."""
    folder.mkdir(parents=True, exist_ok=True)
    numbers, curves = folder / "scaling.json", folder / "scaling.svg"
    tree = {
        "columns": COLUMNS,
        "best": [one.cells() for one in chosen],
        "tried": [[one.cells()[:-1] for one in choices] for choices in tried],
    }
    numbers.write_text(json.dumps(tree) + "\n", encoding="utf-8")
    _draw(tried, curves)
    return numbers, curves


def _draw(tried: Sequence[Sequence[Choice]], path: Path) -> None:
    """Speed against how far ahead the engines are, on the best division, and against the share of
    the GPUs that trains, at the best ratio; a curve for each of `tried`."""
    from matplotlib import rc_context
    from matplotlib.figure import Figure

    from megatron_async_rl.report.charts import draw
    from megatron_async_rl.report.panel import COLOURS, Curve, Panel

    def curve(colour: str, points: Iterable[tuple[float, Choice]]) -> Curve:
        speeds = {x: one.outcome.tokens_per_s / one.gpus for x, one in points}
        x, y = np.array(sorted(speeds.items()), dtype=np.float64).T
        return Curve(name="", colour=colour, x=x, y=y)

    ratios, shares = [], []
    for colour, choices in zip(list(COLOURS)[4:], tried, strict=False):
        top = best(choices)
        division = [one for one in choices if one.ranks == top.ranks]
        ratios.append(curve(colour, [(one.async_ratio, one) for one in division]))
        same = [one for one in choices if one.async_ratio == top.async_ratio]
        shares.append(curve(colour, [(one.ranks / one.gpus, one) for one in same]))
    with rc_context({"svg.fonttype": "none", "svg.hashsalt": "scaling"}):
        figure = Figure(figsize=(9.5, 3.4), facecolor="white", layout="constrained")
        for axes, x_label, curves in zip(
            figure.subplots(1, 2),
            ("async_ratio", "share of the GPUs that trains"),
            (ratios, shares),
            strict=True,
        ):
            draw(Panel(title="", unit="", x_label=x_label, curves=curves, low=0.0), axes, scale=0.9)
            axes.autoscale(axis="x")
            axes.set_ylabel("tokens/s per GPU, predicted", fontsize=9, color=COLOURS["muted"])
        names = [f"{choices[0].gpus:,} GPUs" for choices in tried]
        axes.legend(axes.get_lines(), names, frameon=False, fontsize=8.5)
        figure.savefig(path, metadata={"Date": None})

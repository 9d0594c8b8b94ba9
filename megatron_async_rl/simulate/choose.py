"""`mar simulate`: evaluates a config at several `async_ratio`s, or finds the best division of a
number of GPUs: how many train, how many sample, how far ahead, and the bucket size of weights.

Invariants:
- all choices are compared with the same lengths and the same seed;
- configurations that `mar plan` refuses are not simulated;
- of a large fleet only a part is simulated: some engines with their prompts, while trainer and
  weights need the same time as for the whole fleet.
"""

from __future__ import annotations

import itertools
import json
import math
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from pathlib import Path
from typing import Any

import numpy as np
from rich.console import Console
from rich.table import Table

from megatron_async_rl.config.flow import ExactLag
from megatron_async_rl.config.problem import ConfigError, UserError
from megatron_async_rl.config.rollout import RolloutConfig
from megatron_async_rl.config.schema import Config
from megatron_async_rl.plan.layout import device_of, engine_count, engines_elsewhere
from megatron_async_rl.plan.machine import described_machine, this_machine
from megatron_async_rl.plan.model_files import ModelShape, read_model
from megatron_async_rl.plan.plan import make_plan
from megatron_async_rl.plan.preflight import preflight
from megatron_async_rl.report.panels import PREDICTED, SIMULATION
from megatron_async_rl.simulate.calibrate import calibrate
from megatron_async_rl.simulate.rates import (
    Hardware,
    ResponseLengths,
    SimulationRates,
    best_bucket,
    lengths_of,
    rates_of,
)
from megatron_async_rl.simulate.simulation import SimulationResult, simulate

RATIOS = (0.0, 0.5, 1.0, 2.0, 4.0, 8.0)
SAMPLES, ENGINES, MIN_ENGINES = 512, 8, 4
"""Largest step and fleet that are simulated in full. For larger ones a part represents all, with
several engines, because engines load one after another."""
CLOSE = 0.98
"""Speeds within this share of the fastest count as equal, and then fresher samples win."""
SPLITS = 4
HALVES = {
    "trainer": ("train_s", "train_token_s"),
    "engines": ("decode", "prompt_s"),
    "publishing": ("publish_s", "send_s", "load_s"),
}


@dataclass(frozen=True, kw_only=True)
class Trial:
    """A simulated setting and its result."""

    config: Config
    rates: SimulationRates
    lengths: ResponseLengths
    steps: int
    seed: int

    @cached_property
    def outcome(self) -> SimulationResult:
        # Cached, because the table, the choice and the curves read it several times.
        return self._simulated(self.rates)

    @cached_property
    def binds(self) -> str:
        """Text with the relative gain of a step if a part took half as long, starting with the part
        that gains most."""
        gains = {}
        for part, names in HALVES.items():
            # Halving a part shows its influence better than its share of the time.
            half = {name: _half(getattr(self.rates, name)) for name in names}
            step_s = self._simulated(replace(self.rates, **half)).step_s
            gains[part] = max(0.0, 1 - step_s / self.outcome.step_s)
        return ", ".join(
            f"{part} {gain:.0%}"
            for gain, part in sorted(
                ((gain, part) for part, gain in gains.items()), key=lambda pair: -pair[0]
            )
        )

    @property
    def gpus(self) -> int:
        return gpus_of(self.config)

    @property
    def speed(self) -> float:
        """Tokens per second of each GPU."""
        return self.outcome.tokens_per_s / self.gpus

    @property
    def ratio(self) -> float:
        return self.config.flow.async_ratio

    @property
    def trains(self) -> float:
        """Share of the GPUs that train."""
        return self.config.policy.parallel.ranks / self.gpus

    def cells(self) -> list[str]:
        return [write(self) for write in COLUMNS.values()]

    def _simulated(self, rates: SimulationRates) -> SimulationResult:
        flow, rollout = self.config.flow, engines_of(self.config)
        # A part of a large fleet, whose trainer still needs the time of the whole batch.
        engines, prompts = part_of(flow.prompts_per_step, flow.group_size, rollout.engines)
        whole = flow.prompts_per_step / prompts
        outcome = simulate(
            flow.model_copy(update={"prompts_per_step": prompts}),
            rollout.model_copy(update={"engines": engines}),
            replace(rates, train_token_s=whole * rates.train_token_s),
            self.lengths,
            steps=self.steps,
            seed=self.seed,
            max_paused=self.config.weights.max_paused,
        )
        return replace(outcome, tokens_per_s=whole * outcome.tokens_per_s)


COLUMNS: dict[str, Callable[[Trial], str]] = {
    "GPUs": lambda one: f"{one.gpus:,}",
    "prompts": lambda one: f"{one.config.flow.prompts_per_step:,}",
    "async ratio": lambda one: f"{one.ratio:g}",
    "ranks": lambda one: f"{one.config.policy.parallel.ranks:,}",
    "engines": lambda one: f"{engines_of(one.config).engines:,}",
    "bucket MiB": lambda one: str(one.config.weights.bucket_mib),
    "step s": lambda one: f"{one.outcome.step_s:.3g}",
    "tokens a second": lambda one: f"{one.outcome.tokens_per_s:,.0f}",
    "trainer busy": lambda one: f"{one.outcome.trainer_busy:.0%}",
    "engines busy": lambda one: f"{one.outcome.engine_busy:.0%}",
    "mean lag": lambda one: f"{one.outcome.lag_mean:.2f}",
}


def _half(value: Any) -> Any:
    return tuple(map(_half, value)) if isinstance(value, tuple) else value / 2


def part_of(prompts: int, group_size: int, engines: int) -> tuple[int, int]:
    """Return (engines, prompts) that represent the whole fleet: few enough to simulate one by one,
    each engine with its share of the prompts, as nearly as whole prompts permit."""
    # Small enough to simulate in full.
    if engines <= ENGINES and prompts * group_size <= 2 * SAMPLES:
        return engines, prompts
    maximum = max(MIN_ENGINES, min(ENGINES, engines * SAMPLES // (prompts * group_size)))
    counts = range(min(engines, MIN_ENGINES), min(engines, maximum) + 1)

    def off(count: int) -> float:
        return abs(math.log(max(1, round(prompts * count / engines)) * engines / (prompts * count)))

    # The count whose prompts per engine need the least rounding.
    count = min(counts, key=lambda count: (off(count), -count))
    return count, max(1, round(prompts * count / engines))


def changed(config: Config, section: str, **values: Any) -> Config:
    """Return `config` with other values in a section."""
    # Not validated again: the caller plans the result.
    part = getattr(config, section).model_copy(update=values)
    return config.model_copy(update={section: part})


def ahead(config: Config, ratio: float) -> Config:
    """Return `config` with another async_ratio. Raises UserError for an impossible division."""
    flow, key = config.flow, "--async-ratio"
    if isinstance(flow.selection, ExactLag) and ratio != flow.async_ratio:
        fix = "leave it out, or choose another flow.selection"
        raise UserError.of(key, "exact_lag has the ratio of its lag", fix)
    # The same rule as in config/rules.py, with the option's name.
    if flow.oversample and ratio + flow.oversample > math.ceil(ratio):
        what = f"flow.oversample: {flow.oversample:g} fits only below the next whole number"
        raise UserError.of(key, what, "name fractions, such as 0.5, or set it to 0")
    return changed(config, "flow", async_ratio=ratio)


def engines_of(config: Config) -> RolloutConfig:
    assert config.rollout is not None, "refused before"
    return config.rollout


def gpus_of(config: Config) -> int:
    """Return the number of GPUs of trainer and engines."""
    rollout = engines_of(config)
    return config.policy.parallel.ranks + rollout.engines * rollout.workers


def predict_from_run(
    config: Config,
    runs: Sequence[Path],
    ratios: Sequence[float],
    steps: int,
    seed: int,
    console: Console,
) -> None:
    """Simulate `config` with the rates of `runs`. With several `ratios`, the curves are stored in
    the first run for `mar report`. Raises UserError."""
    _require_simulable(config)
    machine = this_machine()
    on_cpu = device_of(config, machine) == "cpu"
    # On GPUs trainer and engines share no cores.
    calibration = calibrate(runs, machine.cores if on_cpu else None)
    problems = preflight(config, all_data=False, machine=machine).problems
    if problems:
        raise ConfigError("cannot run", problems)
    rates, lengths = calibration.rates_of(config), calibration.lengths
    _print(console, calibration.as_text())
    trials = [
        Trial(config=at, rates=rates, lengths=lengths, steps=steps, seed=seed)
        for at in (ahead(config, ratio) for ratio in ratios or [config.flow.async_ratio])
    ]
    show(trials, console)
    if len(trials) > 1:
        # Kept with the run, so that `mar report` draws prediction and measurement together.
        keep = runs[0] / SIMULATION
        curves = {name: [getattr(one.outcome, name) for one in trials] for name in PREDICTED}
        tree = {"async_ratio": [one.ratio for one in trials], **curves}
        keep.write_text(json.dumps(tree) + "\n", encoding="utf-8")
        _print(console, f"{keep}: `mar report` draws it")


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
    """Simulate `config` on assumed hardware. Raises UserError."""
    _require_simulable(config)
    # No data sheet states how fast a CPU runs these models.
    if config.policy.device == "cpu":
        what = "cpu, and no speed is assumed for a CPU"
        raise UserError.of("policy.device", what, "name a run whose rates to use: --from RUN")
    shape, problems = read_model(config.model.path)
    if shape is None:
        raise UserError(str(config.model.path), problems)
    _print(console, f"assumed, not measured: {hardware}")

    def trial(config: Config) -> Trial:
        require_plan(config, shape, hardware)
        lengths = lengths_of(config, hardware, seed)
        rates = rates_of(config, shape, hardware, lengths)
        return Trial(config=config, rates=rates, lengths=lengths, steps=steps, seed=seed)

    if not gpus:
        wanted = [ahead(config, ratio) for ratio in ratios or [config.flow.async_ratio]]
        show([trial(one) for one in wanted], console)
        return
    tried = []
    for count in gpus:
        prompts = config.flow.prompts_per_step * (count / gpus_of(config) if grow else 1)
        sized = changed(config, "flow", prompts_per_step=max(1, round(prompts)))
        # Arithmetic selects a few divisions; only these are simulated.
        likely = likely_splits(splits(sized, shape, hardware, count), trial, hardware)
        pairs = itertools.product(likely, ratios or RATIOS)
        tried.append([replace(one, config=ahead(one.config, ratio)) for one, ratio in pairs])
    show(list(map(best, tried)), console)
    if out is not None:
        for path in write(tried, out):
            _print(console, str(path))


def _require_simulable(config: Config) -> None:
    if config.rollout is None:
        what = "a supervised run has no engines, and nothing to simulate"
        raise UserError.of("rollout", what, "name a config that samples")
    # Nothing overlaps, so there is nothing to simulate.
    if config.rollout.placement == "colocated":
        what = "colocated: engines and policy take turns, so a step is the sum of its parts"
        raise UserError.of("rollout.placement", what, "`mar plan` prints the resulting sizes")
    if config.flow.stream == "groups":
        what = "groups: the simulation trains on whole batches, without overlap within a step"
        fix = "add flow.stream=none, and measure a streamed run by `mar train`"
        raise UserError.of("flow.stream", what, fix)


def require_plan(config: Config, shape: ModelShape, hardware: Hardware) -> None:
    """Raise ConfigError for a configuration that `mar plan` refuses on such machines."""
    gpus, ranks = hardware.gpus_per_machine, config.policy.parallel.ranks
    machine = described_machine(
        gpus=gpus, gpu_memory_gib=hardware.memory_gib, nodes=max(1, ranks // gpus)
    )
    if engines_elsewhere(config, machine):
        beyond = engine_count(config) * engines_of(config).workers - (machine.nodes * gpus - ranks)
        machine = replace(machine, engine_nodes=max(0, -(-beyond // gpus)))
    problems = make_plan(config, machine, shape).problems
    if problems:
        raise ConfigError("cannot run", problems)


def splits(config: Config, shape: ModelShape, hardware: Hardware, gpus: int) -> Iterator[Config]:
    """Yield the divisions of `gpus` in which the batch divides over the data-parallel ranks, each
    with its best bucket. Raises UserError if there are too few GPUs."""
    rollout, parallel, flow = engines_of(config), config.policy.parallel, config.flow
    cell = parallel.replica_ranks
    if gpus < cell + rollout.workers:
        what = f"{gpus} are too few for {cell} ranks and an engine"
        raise UserError.of("--gpus", what, "add some")
    for data in range(1, (gpus - rollout.workers) // cell + 1):
        # The plan would refuse other sizes.
        if flow.prompts_per_step * flow.group_size % data == 0:
            layout = parallel.model_copy(update={"ranks": data * cell})
            engines = (gpus - data * cell) // rollout.workers
            split = changed(changed(config, "policy", parallel=layout), "rollout", engines=engines)
            yield changed(split, "weights", bucket_mib=best_bucket(split, shape, hardware))


def likely_splits(
    divisions: Iterable[Config], trial: Callable[[Config], Trial], hardware: Hardware
) -> list[Trial]:
    """Return trials of the divisions whose slowest part (trainer, engines or carrier) is fastest.
    Raises UserError if no division can run."""
    found, refused = list[tuple[float, Trial]](), list[UserError]()
    for config in divisions:
        try:
            one = trial(config)
        except UserError as error:
            refused.append(error)
            continue
        samples = config.flow.prompts_per_step * config.flow.group_size
        rates, mean, engines = one.rates, one.lengths.mean, engines_of(config).engines
        tokens = samples * (hardware.prompt_tokens + mean)
        trains_s = rates.train_s + tokens * rates.train_token_s + rates.publish_s
        running = max(1, min(rates.places, samples // engines))
        samples_s = (rates.token_s(running) * mean / running + rates.prompt_s) * samples / engines
        found.append((max(trains_s, samples_s, rates.send_s), one))
    if not found:
        # The last one has the most ranks, and is closest to the request.
        raise refused[-1]
    return [one for _, one in sorted(found, key=lambda pair: pair[0])[:SPLITS]]


def best(tried: Sequence[Trial]) -> Trial:
    """Return the fastest trial; of those that are nearly as fast, the one with the freshest
    samples."""
    fastest = max(one.speed for one in tried)
    # Differences below this are noise of the simulation.
    close = [one for one in tried if one.speed >= CLOSE * fastest]
    return min(close, key=lambda one: (one.ratio, -one.speed))


def show(trials: Sequence[Trial], console: Console) -> None:
    table = Table(box=None, padding=(0, 2, 0, 0), header_style="dim")
    for name in COLUMNS:
        table.add_column(name.replace(" ", "\n"), justify="right", no_wrap=True)
    table.add_column("binds", no_wrap=True)
    for one in trials:
        table.add_row(*one.cells(), one.binds)
    console.print(table)
    _print(console, "binds: by how much a step would be shorter if that part took half as long")


def _print(console: Console, text: str) -> None:
    console.print(text, markup=False, highlight=False, soft_wrap=True)


def write(tried: Sequence[Sequence[Trial]], folder: Path) -> tuple[Path, Path]:
    """Write scaling.json, and its curves in scaling.svg: speed against how far ahead the engines
    are, with the best division, and against the share of the GPUs that train, with the best
    ratio."""
    from matplotlib import rc_context

    from megatron_async_rl.report.panel import COLOURS, Curve, Panel
    from megatron_async_rl.report.report import draw_sheet

    folder.mkdir(parents=True, exist_ok=True)
    numbers, drawn = folder / "scaling.json", folder / "scaling.svg"
    tree = {
        "columns": [*COLUMNS, "binds"],
        "best": [[*best(trials).cells(), best(trials).binds] for trials in tried],
        "tried": [[one.cells() for one in trials] for trials in tried],
    }
    numbers.write_text(json.dumps(tree) + "\n", encoding="utf-8")

    def panel(over: str, key: str, same: str) -> Panel:
        curves = []
        for colour, trials in zip(list(COLOURS)[4:], tried, strict=False):
            others = [one for one in trials if getattr(one, same) == getattr(best(trials), same)]
            x, y = np.array(sorted((getattr(one, key), one.speed) for one in others)).T
            curves.append(Curve(name=f"{trials[0].gpus:,} GPUs", colour=colour, x=x, y=y))
        return Panel(
            title=f"Speed over {over}",
            unit="tokens/s per GPU",
            x_label=over,
            curves=curves,
            low=0.0,
            x_range=(0.0, 1.03 * max(float(curve.x[-1]) for curve in curves)),
            overview=True,
        )

    panels = [
        panel("async_ratio", "ratio", "trains"),
        panel("the share of the GPUs that trains", "trains", "ratio"),
    ]
    # Text as text and fixed ids: the same input gives the same file.
    with rc_context({"svg.fonttype": "none", "svg.hashsalt": "scaling"}):
        draw_sheet("Predicted", [], panels, drawn)
    return numbers, drawn

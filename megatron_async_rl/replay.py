"""`mar replay`: repeats the steps of a run on its recorded samples, with the trainer alone.

    RUN/samples, RUN/starts.jsonl, a checkpoint --> one launch for each settings --> RUN/replays/N

Invariants:
- nothing of the run changes: a replay has a directory of its own;
- every repeated step uses the settings of the start that made it, unless the user changes them;
- the result counts equal digests of weights, step by step: a step without a recorded digest is
  reported, not counted.
"""

from __future__ import annotations

import json
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path

from rich.console import Console

from megatron_async_rl.config.load import load
from megatron_async_rl.config.problem import ConfigError, UserError, number_of
from megatron_async_rl.config.schema import Config, ReplayConfig
from megatron_async_rl.flow.starts import Start, config_of, read_starts, start_of_step
from megatron_async_rl.launch.addresses import Nodes
from megatron_async_rl.launch.launcher import launch
from megatron_async_rl.launch.rendezvous import PeerNodes
from megatron_async_rl.metrics.log import (
    MetricRow,
    digests_of_steps,
    number,
    read_metrics,
    read_newest,
)
from megatron_async_rl.metrics.weight_log import tensors_of_step
from megatron_async_rl.plan.layout import device_of, rank_environment
from megatron_async_rl.plan.layout_problems import layout_problems
from megatron_async_rl.plan.machine import this_machine
from megatron_async_rl.plan.model_files import read_model
from megatron_async_rl.policy.checkpoint_folder import step_of
from megatron_async_rl.policy.checkpoint_folder import steps as checkpoints
from megatron_async_rl.rollout.cluster import software, software_differences
from megatron_async_rl.samples.frames import SegmentBroken
from megatron_async_rl.samples.recorded import NotRecorded, RecordedBatches

FOLDER = "replays"
WITHOUT_ENGINES = (
    "checkpoint.every=0",
    "eval=null",
    "observe.tensorboard=false",
    "observe.trackers=[]",
    "observe.prometheus_port=null",
    "run.resume=auto",
)
"""Settings of a run that a replay does not use."""
COMPARED = ("policy/loss", "policy/grad_norm")
"""Metrics compared if a replay has another layout or device."""
TOLERANCES = {"float32": 1e-3, "bfloat16": 5e-2}
"""Largest relative difference of those metrics, by the dtype of the model: another layout adds the
same numbers in another order."""
LAYOUT = ("policy.parallel", "policy.device", "policy.tokens_per_micro_batch")
"""Keys that change only the order of additions."""
USED = ("model", "policy", "objective", "controls", "run.seed", "run.steps", "watchdog")
"""Keys that the trainer reads; the recorded samples replace the others."""
TEMPERATURE = "rollout.sampling.temperature"
MEASURED_ON_SAMPLES = {"ESS": "ratio/ess", "KL": "ratio/kl_k2"}
"""Metrics that show how far the recorded samples are from the replayed policy."""


@dataclass(frozen=True, kw_only=True)
class Stretch:
    """Consecutive steps with the same settings."""

    first: int
    last: int
    start: Start | None
    config_file: Path


@dataclass(frozen=True, kw_only=True)
class ReplayPlan:
    """Steps that a replay repeats. checkpoint: folder with the weights of the step before the
    first; null for the model. requested: first step that the user requested; the steps before it
    lead to it."""

    run_dir: Path
    stretches: Sequence[Stretch]
    checkpoint: Path | None
    requested: int
    changes: Sequence[str] = ()
    """The user's overrides."""

    @property
    def is_what_if(self) -> bool:
        """True if the user changes more than the layout."""
        return any(not _names(change, LAYOUT) for change in self.changes)

    @property
    def first(self) -> int:
        return self.stretches[0].first

    @property
    def last(self) -> int:
        return self.stretches[-1].last


@dataclass(kw_only=True)
class Comparison:
    """Repeated steps against the run's. Steps are optimizer steps."""

    steps: int = 0
    identical: int = 0
    first_different: int | None = None
    without_digest: list[int] = field(default_factory=list)
    largest: dict[str, float] = field(default_factory=dict)
    """Largest relative difference of each of COMPARED."""


def plan_replay(
    run_dir: Path, first: int | None, count: int | None, changes: Sequence[str]
) -> ReplayPlan:
    """Return the steps to repeat. first: null for the oldest that can be repeated; count: null for
    all up to the last. Raises UserError for a run that cannot be replayed from there, with what can
    be."""
    for change in changes:
        if not _names(change, (*USED, TEMPERATURE)):
            key = change.partition("=")[0]
            raise UserError.of(
                key,
                "has no effect on a replay, which trains on recorded samples without engines",
                f"change keys of {', '.join(USED)} or {TEMPERATURE}",
            )
    if not (run_dir / "config.yaml").is_file():
        what = f"{run_dir} has no config.yaml: it is not a run"
        raise UserError.of("RUN", what, "name a run directory, the `run.dir` of its config")
    log = _recorded_steps(run_dir)
    saved = {step_of(path): path for path in checkpoints(run_dir / "checkpoint")}
    first_step = _first_step(log, saved, first)
    begin, checkpoint = _beginning(saved, first_step)
    last = log.last_step if count is None else min(first_step + count - 1, log.last_step)
    for step in (begin, last):  # the ends; the trainer reads the others as it reaches them
        log.require(step)
    starts = read_starts(run_dir)
    return ReplayPlan(
        run_dir=run_dir,
        stretches=stretches(run_dir, starts, begin, last, changed=bool(changes)),
        checkpoint=checkpoint,
        requested=first_step,
        changes=changes,
    )


class _ReplayableSteps:
    """Steps whose batches are known. recorded: null for a supervised run, because data and seed
    determine its batches."""

    def __init__(self, recorded: RecordedBatches | None, last_step: int) -> None:
        self._recorded = recorded
        self.last_step = last_step

    @property
    def whole(self) -> bool:
        return self._recorded is None or self._recorded.whole

    def require(self, step: int) -> None:
        """Raise UserError if the batch of a step is not complete."""
        if self._recorded is not None:
            with _reading_log():
                self._recorded.batch(step)

    def has(self, step: int) -> bool:
        try:
            self.require(step)
        except UserError:
            return False
        return True


def _recorded_steps(run_dir: Path) -> _ReplayableSteps:
    """Raises UserError for a run without a log or without a step."""
    if load(run_dir / "config.yaml").supervised:
        rows = read_newest(run_dir, 1)
        recorded, last = None, int(rows[-1]["step"]) if rows else 0  # type: ignore[arg-type]
    else:
        with _reading_log():
            recorded = RecordedBatches(run_dir)
            last = recorded.last_step
    if not last:
        raise UserError.of("RUN", f"{run_dir} has made no step", "wait for its first step")
    return _ReplayableSteps(recorded, last)


@contextmanager
def _reading_log() -> Iterator[None]:
    """Turn errors of the sample log into a UserError."""
    try:
        yield
    except NotRecorded as error:
        raise UserError.of("RUN", error.what, error.fix) from error
    except SegmentBroken as error:
        raise UserError.of("RUN", f"{error.path} {error.what}", error.fix) from error


def _first_step(log: _ReplayableSteps, saved: dict[int, Path], requested: int | None) -> int:
    if requested is not None:
        if requested > log.last_step:
            what = f"the last recorded step is {log.last_step}"
            raise UserError.of("--from", what, f"name a step up to {log.last_step}")
        return requested
    if log.whole:
        return 1
    possible = [step + 1 for step in sorted(saved) if log.has(step + 1)]
    if not possible:
        raise UserError.of(
            "RUN",
            "the first segments of the sample log were deleted (samples.keep_mib), and no kept"
            " checkpoint is followed by a recorded step",
            "raise samples.keep_mib or checkpoint.keep in the next run",
        )
    return possible[0]


def _beginning(saved: dict[int, Path], first: int) -> tuple[int, Path | None]:
    """Return the first step to repeat and the checkpoint before it, so that `first` is reached with
    the fewest steps."""
    older = [step for step in saved if step < first]
    if not older:
        return 1, None
    return max(older) + 1, saved[max(older)]


def stretches(
    run_dir: Path, starts: list[Start], first: int, last: int, *, changed: bool
) -> list[Stretch]:
    """Divide the steps by the settings of the starts that made them. changed: the user changes
    settings, so all steps have those of the newest start."""
    newest = run_dir / "config.yaml"
    if changed or not starts:
        start = start_of_step(starts, last)
        return [Stretch(first=first, last=last, start=start, config_file=newest)]
    found: list[Stretch] = []
    for step in range(first, last + 1):
        start = start_of_step(starts, step)
        before = found[-1].start if found else None
        if before is not None and start is not None and before.config == start.config:
            found[-1] = Stretch(
                first=found[-1].first, last=step, start=before, config_file=found[-1].config_file
            )
        else:
            file = newest if start is None else config_of(run_dir, start)
            found.append(Stretch(first=step, last=step, start=start, config_file=file))
    return found


def replay(plan: ReplayPlan, out: Path | None, console: Console) -> int:
    """Repeat the steps, and print the result. Return the exit code: 0 if all bits are identical, or
    if the user changed settings; 1 if a step differs or the trainer failed; 130 after Ctrl-C."""
    out = out or next_folder(plan.run_dir / FOLDER)
    checkpoint = plan.checkpoint
    rows: list[MetricRow] = []
    digests: dict[int, str] = {}
    configs = [
        _config(plan, stretch, _part(out, plan, index), index + 1 < len(plan.stretches))
        for index, stretch in enumerate(plan.stretches)
    ]
    machine = this_machine()
    for config in configs:
        _require_fitting(config, machine)
    _announce(plan, out, console)
    for stretch, config in zip(plan.stretches, configs, strict=True):
        assert config.run.replay is not None
        started_from = config.run.replay.model_copy(update={"checkpoint": checkpoint})
        run = config.run.model_copy(update={"replay": started_from})
        environment = rank_environment(config, machine)
        if stretch.start is not None:
            environment["OMP_NUM_THREADS"] = str(stretch.start.threads)
        nodes = Nodes(1, 0, "")
        code = launch(
            config.model_copy(update={"run": run}), console, nodes, PeerNodes(nodes), environment
        )
        if code != 0:
            return code
        rows += read_metrics(run.dir)
        digests |= digests_of_steps(run.dir)
        checkpoint = run.dir / "checkpoint" / f"step_{stretch.last:08d}"
    compared = compare(plan, rows, digests)
    different = compared.first_different
    part = next(
        (
            config
            for stretch, config in zip(plan.stretches, configs, strict=True)
            if different is not None and stretch.first <= different <= stretch.last
        ),
        configs[0],
    )
    return _report(plan, part, compared, rows, console)


def _names(change: str, keys: Sequence[str]) -> bool:
    """Return True if an override sets one of the keys or something in them."""
    key = change.partition("=")[0].strip()
    return any(key == one or key.startswith(f"{one}.") for one in keys)


def next_folder(folder: Path) -> Path:
    numbers = [int(path.name) for path in folder.glob("*") if path.name.isdigit()]
    return folder / str(max(numbers, default=0) + 1)


def _part(out: Path, plan: ReplayPlan, index: int) -> Path:
    return out if len(plan.stretches) == 1 else out / f"part_{index + 1}"


def _config(plan: ReplayPlan, stretch: Stretch, run_dir: Path, save: bool) -> Config:
    settings = ReplayConfig(
        run=plan.run_dir,
        first=stretch.first,
        last=stretch.last,
        # Of a later stretch, the checkpoint exists once the one before it has ended.
        checkpoint=plan.checkpoint if stretch is plan.stretches[0] else None,
        save=save,
    )
    return load(
        stretch.config_file,
        [
            *WITHOUT_ENGINES,
            f"run.dir={json.dumps(str(run_dir))}",
            f"run.replay={settings.model_dump_json()}",
            f"observe.beside={json.dumps(str(plan.run_dir))}",
            *plan.changes,
        ],
    )


def _require_fitting(config: Config, machine: object) -> None:
    """Raise ConfigError for a model that is not here, or a layout that this machine lacks."""
    shape, problems = read_model(config.model.path)
    alone = config.model_copy(update={"rollout": None})
    problems = [*problems, *layout_problems(alone, machine, shape)]  # type: ignore[arg-type]
    if config.policy.routing_replay == "rollout" and config.run.replay is not None:
        recorded = RecordedBatches(config.run.replay.run)
        if not recorded.has_experts():
            raise UserError.of(
                "samples.experts",
                "the log does not have the experts that the engines chose"
                " (policy.routing_replay: rollout), so no step can be recomputed",
                "set samples.experts to true in the next run, or replay with"
                " policy.routing_replay=none to see how far the steps differ",
            )
    if problems:
        raise ConfigError("mar replay: cannot run", problems)


def _announce(plan: ReplayPlan, out: Path, console: Console) -> None:
    begin = "the model" if plan.checkpoint is None else str(plan.checkpoint)
    text = f"replaying steps {plan.first} to {plan.last} of {plan.run_dir}, from {begin}, in {out}"
    console.print(text, markup=False, highlight=False, soft_wrap=True)
    if plan.first < plan.requested:
        note = f"note: no checkpoint of step {plan.requested - 1} was kept"
        console.print(note, markup=False, highlight=False, soft_wrap=True)
    start = plan.stretches[-1].start
    different = software_differences(software(), start.software) if start is not None else ""
    if different:
        note = f"note: the run was made with other software, so bits may differ: {different}"
        console.print(note, markup=False, highlight=False, soft_wrap=True)


def compare(plan: ReplayPlan, rows: Sequence[MetricRow], digests: dict[int, str]) -> Comparison:
    """Compare the repeated steps with the run's lines of metrics."""
    expected = digests_of_steps(plan.run_dir)
    of_run = {row["step"]: row for row in read_metrics(plan.run_dir)}
    found = Comparison()
    for row in rows:
        step = int(row["step"])  # type: ignore[arg-type]
        found.steps += 1
        if step not in expected:
            found.without_digest.append(step)
        elif expected[step] == digests[step]:
            found.identical += 1
        elif found.first_different is None:
            found.first_different = step
        for name in COMPARED:
            here, there = number(row, name), number(of_run.get(step, {}), name)
            if here is not None and there is not None:
                scale = max(abs(here), abs(there), 1e-12)
                difference = abs(here - there) / scale
                found.largest[name] = max(found.largest.get(name, 0.0), difference)
    return found


def _report(
    plan: ReplayPlan,
    config: Config,
    found: Comparison,
    rows: Sequence[MetricRow],
    console: Console,
) -> int:
    replay_dir = config.run.dir

    def show(text: str) -> None:
        console.print(text, markup=False, highlight=False, soft_wrap=True)

    steps = number_of("step", found.steps)
    if found.without_digest:
        first = found.without_digest[0]
        count = number_of("step", len(found.without_digest))
        show(f"{count} of the run, the first {first}, have no digest: they cannot be compared")
    if found.steps and found.identical == found.steps:
        show(f"{steps}, identical bits")
        return 0
    if found.first_different is not None:
        text = f"step {found.first_different} is the first whose weights differ from the run's"
        show(text + _different_tensors(plan.run_dir, replay_dir, found.first_different))
    if plan.is_what_if:
        _show_distance(plan, found, rows, show)
        return 0
    if not _same_arithmetic(plan, config):
        tolerance = TOLERANCES[config.model.dtype]
        worst = ", ".join(f"{name} {value:.1e}" for name, value in sorted(found.largest.items()))
        show(
            "another layout or device adds in another order: largest relative differences are"
            f" {worst}; the tolerance is {tolerance:g}"
        )
        return int(any(value > tolerance for value in found.largest.values()))
    # A step without a digest proves nothing.
    return 1


def _different_tensors(run_dir: Path, replay_dir: Path, step: int) -> str:
    """Return which tensors differ after a step, as the rest of a sentence."""
    of_run, here = tensors_of_step(run_dir, step), tensors_of_step(replay_dir, step)
    different = [name for name in here if of_run.get(name) != here[name]]
    if not of_run or not different:
        return ""
    more = f" and {len(different) - 1} others" if len(different) > 1 else ""
    return f": tensor {different[0]}{more} of {len(here)}"


def _same_arithmetic(plan: ReplayPlan, config: Config) -> bool:
    """True if every step ran on the layout and the device of the run."""
    device = device_of(config, this_machine())
    return all(
        one.start is None
        or (
            one.start.device == device
            and dict(one.start.layout) == config.policy.parallel.model_dump(mode="json")
        )
        for one in plan.stretches
    )


def _show_distance(
    plan: ReplayPlan, found: Comparison, rows: Sequence[MetricRow], show: object
) -> None:
    """Show how far the recorded samples are from the replayed policy once the weights differ."""
    of_run = {row["step"]: row for row in read_metrics(plan.run_dir)}
    later = [
        row
        for row in rows
        if found.first_different is not None and int(row["step"]) > found.first_different  # type: ignore[arg-type]
    ]
    if not later:
        return
    for label, name in MEASURED_ON_SAMPLES.items():
        here = [value for row in later if (value := number(row, name)) is not None]
        there = [
            value
            for row in later
            if (value := number(of_run.get(row["step"], {}), name)) is not None
        ]
        if here and there:
            show(  # type: ignore[operator]
                f"{label} of the recorded samples, from then on: mean"
                f" {sum(here) / len(here):.3g}, last {here[-1]:.3g}"
                f" (the run's: {sum(there) / len(there):.3g}, {there[-1]:.3g})"
            )

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
import math
import os
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path

from rich.console import Console

from megatron_async_rl.config.load import load
from megatron_async_rl.config.problem import ConfigError, UserError, number_of
from megatron_async_rl.config.schema import Config, ReplayConfig
from megatron_async_rl.flow.starts import Start, read_starts
from megatron_async_rl.launch.addresses import Nodes
from megatron_async_rl.launch.launcher import launch
from megatron_async_rl.launch.rendezvous import PeerNodes
from megatron_async_rl.metrics.log import (
    MetricRow,
    digests_of_steps,
    number,
    read_metrics,
)
from megatron_async_rl.metrics.replay_record import FOLDER, ReplayRecord
from megatron_async_rl.metrics.weight_log import tensors_of_step
from megatron_async_rl.plan.layout import device_of, rank_environment
from megatron_async_rl.plan.layout_problems import layout_problems
from megatron_async_rl.plan.machine import Machine, this_machine
from megatron_async_rl.plan.model_files import read_model
from megatron_async_rl.replay.explanation_tables import show_explanation
from megatron_async_rl.replay.replay_plan import (
    WITHOUT_ENGINES,
    ReplayPlan,
    Stretch,
    reading_log,
)
from megatron_async_rl.replay.step_table import show_distance, steps_of
from megatron_async_rl.rollout.cluster import software, software_differences
from megatron_async_rl.samples.recorded import RecordedBatches

THREADS = "OMP_NUM_THREADS"
COMPARED = {"policy/loss": 0.1, "policy/grad_norm": 1e-12}
"""Metrics compared if a replay has another layout or device, and the least value to which a
difference is relative. A loss is a mean of terms of both signs, which may cancel to nearly 0; their
size is about 1, that of normalised advantages."""
TOLERANCES = {"float32": 1e-3, "bfloat16": 5e-2}
"""Largest relative difference of those metrics, by the dtype of the model: another layout adds the
same numbers in another order."""


@dataclass(kw_only=True)
class Comparison:
    """Comparison of repeated steps with the run's. Steps are those of metrics.jsonl."""

    steps: int = 0
    identical: int = 0
    first_different: int | None = None
    without_digest: int = 0
    largest: dict[str, float] = field(default_factory=dict)
    """Largest relative difference of each of COMPARED."""
    verdicts: dict[int, bool | None] = field(default_factory=dict)
    """Step -> True if its weights have the run's bits; null without a digest of them."""


def replay(plan: ReplayPlan, out: Path | None, console: Console) -> int:
    """Repeat the steps, and print the result. Return the exit code: 0 if all bits are identical, or
    if the user changed settings; 1 if a step differs or the trainer failed; 130 after Ctrl-C."""
    folder = _new_folder(plan.run_dir, out)
    configs = [
        _config(plan, stretch, _part(folder, plan, index))
        for index, stretch in enumerate(plan.stretches)
    ]
    machine = this_machine()
    for stretch, config in zip(plan.stretches, configs, strict=True):
        _require_fitting(config, machine, stretch.start)
    # Its lines are compared with the replay's, so damage is found before any step is repeated.
    read_metrics(plan.run_dir)
    _create(folder, named=out is not None)
    _announce(plan, folder, console)
    checkpoint, code, compared = plan.checkpoint, 0, Comparison()
    rows: list[MetricRow] = []
    record = ReplayRecord(
        run=plan.run_dir,
        changes=list(plan.changes),
        first=plan.first,
        last=plan.last,
        parts=[os.path.relpath(config.run.dir, folder) for config in configs],
    )
    # At once, because a dashboard of the run shows the replay while it trains.
    record.write(folder)
    try:
        for stretch, config in zip(plan.stretches, configs, strict=True):
            assert config.run.replay is not None
            begin = config.run.replay.model_copy(update={"checkpoint": checkpoint})
            run = config.run.model_copy(update={"replay": begin})
            code = _launch(config.model_copy(update={"run": run}), stretch, machine, console)
            # Also after a failure: the steps before it are compared.
            own = [row for row in read_metrics(run.dir) if number(row, "step")]
            rows += own
            of_run = {int(number(row, "step") or 0): row for row in read_metrics(plan.run_dir)}
            compare(compared, plan.run_dir, of_run, own, digests_of_steps(run.dir))
            record = record.model_copy(
                update={
                    "first_different": compared.first_different,
                    "steps": steps_of(rows, of_run, compared.verdicts),
                }
            )
            record.write(folder)
            _show_other_inputs(stretch, run.dir, console)
            if code != 0:
                break
            checkpoint = run.dir / "checkpoint" / f"step_{stretch.last:08d}"
    finally:
        record = record.model_copy(update={"ended": True})
        record.write(folder)
    # The settings and the directory of the first step that differs.
    different = compared.first_different or plan.last
    config = next(
        config
        for stretch, config in zip(plan.stretches, configs, strict=True)
        if different <= stretch.last
    )
    result = _report(plan, config, compared, record, console)
    if plan.explained is not None and not code:
        show_explanation(configs[-1], console)
    return code or result


def _launch(config: Config, stretch: Stretch, machine: Machine, console: Console) -> int:
    nodes = Nodes(1, 0, "")
    environment = rank_environment(config, machine)
    with _threads_of(stretch.start):
        return launch(config, console, nodes, PeerNodes(nodes), environment)


@contextmanager
def _threads_of(start: Start | None) -> Iterator[None]:
    """Set the number of threads of a start: the user's variable would take precedence."""
    before = os.environ.get(THREADS)
    if start is not None:
        os.environ[THREADS] = str(start.threads)
    try:
        yield
    finally:
        if before is None:
            os.environ.pop(THREADS, None)
        else:
            os.environ[THREADS] = before


def _new_folder(run_dir: Path, out: Path | None) -> Path:
    """Return the directory of the replay. Raises UserError for a directory with content, which the
    replay would change or compare with itself."""
    if out is not None:
        if out.exists() and (not out.is_dir() or any(out.iterdir())):
            raise UserError.of("--out", f"{out} is not an empty directory", "name a new one")
        if out.resolve() == (run_dir / FOLDER).resolve():
            what = f"{out} holds the replays of the run, each in a directory of its own"
            raise UserError.of("--out", what, f"name a directory in it, such as {out / '1'}")
        return out
    folder = run_dir / FOLDER
    numbers = [int(path.name) for path in folder.glob("*") if path.name.isdecimal()]
    return folder / str(max(numbers, default=0) + 1)


def _create(out: Path, *, named: bool) -> None:
    """Create the directory of the replay. If the user `named` it, it may exist. Raises UserError if
    another replay has just taken its number."""
    try:
        out.mkdir(parents=True, exist_ok=named)
    except FileExistsError:
        what = f"another replay has just begun in {out}"
        raise UserError.of("RUN", what, "start this one again") from None


def _part(out: Path, plan: ReplayPlan, index: int) -> Path:
    return out if len(plan.stretches) == 1 else out / f"part_{index + 1}"


def _config(plan: ReplayPlan, stretch: Stretch, run_dir: Path) -> Config:
    last = stretch is plan.stretches[-1]
    settings = ReplayConfig(
        run=plan.run_dir,
        first=stretch.first,
        last=stretch.last,
        # The checkpoint of a later stretch exists once the stretch before it has ended.
        checkpoint=plan.checkpoint if stretch is plan.stretches[0] else None,
        save=plan.save or not last,
        explain=plan.explained is not None and last,
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


def _require_fitting(config: Config, machine: Machine, start: Start | None) -> None:
    """Raise ConfigError for a model that is not here, or UserError for a layout that this machine
    lacks."""
    ranks, gpus = config.policy.parallel.ranks, len(machine.gpus)
    if device_of(config, machine) == "cuda" and 0 < gpus < ranks:
        several = start is not None and start.nodes > 1 and start.ranks == ranks
        made = f", which the run had on {start.nodes} machines," if start and several else ""
        raise UserError.of(
            "policy.parallel.ranks",
            f"{number_of('rank', ranks)}{made} need a GPU each; a replay runs on this machine"
            f" alone, which has {gpus}",
            f"start it on a machine with {number_of('GPU', ranks)}, or name a layout for this one,"
            f" such as policy.parallel.ranks={gpus}, whose results agree within a tolerance",
        )
    shape, problems = read_model(config.model.path)
    alone = config.model_copy(update={"rollout": None})
    problems = [*problems, *layout_problems(alone, machine, shape)]
    if config.policy.routing_replay == "rollout" and config.run.replay is not None:
        with reading_log():
            recorded = RecordedBatches(config.run.replay.run).has_experts()
        if not recorded:
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
        note = (
            f"note: no checkpoint of step {plan.requested - 1} was kept, so the replay begins at"
            f" step {plan.first}"
        )
        console.print(note, markup=False, highlight=False, soft_wrap=True)
    for note in plan.notes:
        console.print(f"note: {note}", markup=False, highlight=False, soft_wrap=True)
    for stretch in plan.stretches:
        if stretch.start is not None and stretch.start.nodes > 1:
            note = (
                f"note: steps {stretch.first} to {stretch.last} were made on {stretch.start.nodes}"
                " machines; this one runs all ranks"
            )
            console.print(note, markup=False, highlight=False, soft_wrap=True)
        made_with = {} if stretch.start is None else stretch.start.software
        different = software_differences(software(), made_with) if made_with else ""
        if different:
            note = (
                f"note: steps {stretch.first} to {stretch.last} were made with other software, so"
            )
            console.print(
                f"{note} bits may differ: {different}",
                markup=False,
                highlight=False,
                soft_wrap=True,
            )


def _show_other_inputs(stretch: Stretch, replay_dir: Path, console: Console) -> None:
    """Print the inputs, besides settings, that differ from those at the start of the run."""
    own = read_starts(replay_dir)
    if stretch.start is None or not own:
        return
    here, there = own[-1], stretch.start
    found = []
    if here.step == there.step and here.weights != there.weights:
        found.append("the weights at the beginning")
    if here.data and here.data != there.data:
        found.append("the data")
    if here.device != there.device:
        found.append(f"the device, {there.device} (here {here.device})")
    if here.threads != there.threads:
        found.append(f"the number of threads, {there.threads} (here {here.threads})")
    for text in found:
        console.print(f"note: different from the run: {text}", markup=False, soft_wrap=True)


def compare(
    found: Comparison,
    run_dir: Path,
    of_run: Mapping[int, MetricRow],
    rows: Sequence[MetricRow],
    digests: Mapping[int, str],
) -> None:
    """Add repeated steps, `rows`, to the comparison with the run's lines of metrics, `of_run`."""
    expected = digests_of_steps(run_dir)
    for row in rows:
        step = int(number(row, "step") or 0)
        found.steps += 1
        same = expected[step] == digests.get(step) if step in expected else None
        found.verdicts[step] = same
        if same is None:
            found.without_digest += 1
        elif same:
            found.identical += 1
        elif found.first_different is None:
            found.first_different = step
        for name, minimum in COMPARED.items():
            here, there = number(row, name), number(of_run.get(step, {}), name)
            if here is not None or there is not None:
                difference = _relative_difference(here, there, minimum)
                found.largest[name] = max(found.largest.get(name, 0.0), difference)


def _relative_difference(here: float | None, there: float | None, minimum: float) -> float:
    """Return the relative difference of two numbers; infinite if exactly one of them is missing or
    not finite, or if both are infinite with other signs."""
    if here is None or there is None:
        return math.inf
    if math.isfinite(here) and math.isfinite(there):
        return abs(here - there) / max(abs(here), abs(there), minimum)
    # Their quotient is nan, which is never above a tolerance.
    same = here == there or (math.isnan(here) and math.isnan(there))
    return 0.0 if same else math.inf


def _report(
    plan: ReplayPlan,
    config: Config,
    found: Comparison,
    record: ReplayRecord,
    console: Console,
) -> int:
    def show(text: str) -> None:
        console.print(text, markup=False, highlight=False, soft_wrap=True)

    missing = plan.last - plan.first + 1 - found.steps
    if missing > 0:
        show(f"{number_of('step', missing, 'was', 'were')} not repeated")
    if found.without_digest:
        count = number_of("step", found.without_digest, "has", "have")
        show(f"{count} no digest in the run's metrics: they cannot be compared")
    if found.first_different is not None:
        text = f"step {found.first_different} is the first whose weights differ from the run's"
        show(text + _different_tensors(plan.run_dir, config.run.dir, found.first_different))
    elif found.identical:
        show(f"{number_of('step', found.identical)}, identical bits")
    if plan.is_what_if:
        show_distance(record.steps, found.first_different, show, console.print)
        return 0
    if found.identical == found.steps > 0:
        return int(missing > 0)
    if not _same_arithmetic(plan, config) and found.largest:
        tolerance = TOLERANCES[config.model.dtype]
        worst = ", ".join(f"{name} {value:.1e}" for name, value in sorted(found.largest.items()))
        show(
            "another layout or device adds in another order: the largest relative differences are"
            f" {worst}; the tolerance is {tolerance:g}"
        )
        return int(missing > 0 or any(value > tolerance for value in found.largest.values()))
    # A step without a digest proves nothing.
    return 1


def _different_tensors(run_dir: Path, replay_dir: Path, step: int) -> str:
    """Return the tensors that differ after a step, as the rest of a sentence."""
    try:
        of_run, here = tensors_of_step(run_dir, step), tensors_of_step(replay_dir, step)
    except UserError as error:
        # The digest of the whole step, from another file, has shown the difference.
        return f"; the tensors that differ are unknown: {error.problems[0].key} is damaged"
    different = [name for name in here if of_run.get(name) != here[name]]
    if not of_run or not different:
        return ""
    more = f" and {number_of('other', len(different) - 1)}" if len(different) > 1 else ""
    return f": tensor {different[0]}{more} of {len(here)}"


def _same_arithmetic(plan: ReplayPlan, config: Config) -> bool:
    """Return True if identical bits are expected: the user changed nothing, and the device is the
    run's."""
    own = read_starts(config.run.dir)
    device = own[-1].device if own else ""
    return plan.has_the_run_s_settings and all(
        one.start is None or one.start.device == device for one in plan.stretches
    )

"""Studies (`mar study GRID`): several runs that differ in named settings. Each run is an ordinary
`mar train` in a directory of its own.

Invariants:
- a run is equivalent to `mar train BASE key=value ...` with the overrides of its settings, and
  shares nothing with other runs. Synchronous and `exact_lag` runs give the same results, except for
  timings, whether they run alone, one after another or in parallel. In other runs the lag depends
  on the speed, so results differ between parallel and sequential runs;
- only one study at a time uses a runs folder. The study ends its `mar train` processes before it
  ends. If the study is killed, its active runs keep the folder locked until they end;
- the study checks every run before it starts the first one, and refuses a directory that belongs to
  other settings;
- a run that finished or failed is not repeated, and a stopped run is resumed if `mar train` permits
  it. A failure is counted and kept, and stops no other run.
"""

from __future__ import annotations

import json
import signal
import subprocess
import sys
import time
from collections.abc import Mapping, Sequence
from contextlib import ExitStack, suppress
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, Literal

from rich.console import Console
from rich.live import Live
from rich.table import Table
from rich.text import Text

from megatron_async_rl.config.durable import write_file
from megatron_async_rl.config.grid import Grid, StudyRun, read_grid, runs_of
from megatron_async_rl.config.load import load
from megatron_async_rl.config.problem import ConfigError, Problem, UserError
from megatron_async_rl.config.schema import Config
from megatron_async_rl.data.hub import located
from megatron_async_rl.launch.ending import INTERRUPTED, deferred_signals, print_plain
from megatron_async_rl.launch.run_lock import lock_run_dir
from megatron_async_rl.metrics.log import MetricsReader, number
from megatron_async_rl.plan.layout import device_of
from megatron_async_rl.plan.machine import this_machine
from megatron_async_rl.plan.preflight import preflight
from megatron_async_rl.plan.resume import differences
from megatron_async_rl.plan.totals import DiskNeed, disk_needs, study_disk_problems
from megatron_async_rl.report.run_data import span
from megatron_async_rl.watchdog.events import read_status
from megatron_async_rl.watchdog.logs import find_cause

FILE = "study.json"
"""File in each run directory with the run's settings by axis, and the duration (seconds) and exit
code of its last start."""
LOG = "study.log"
"""File in each run directory with the output of `mar train`."""
TRAIN = (sys.executable, "-m", "megatron_async_rl", "train")
POLL_S = 0.25
PLAIN_EVERY_S = 30.0
"""Seconds between progress lines if the output is not a terminal."""
ENDING = ((signal.SIGINT, 120.0), (signal.SIGINT, 20.0), (signal.SIGKILL, 20.0))
"""Signals that end the runs of an interrupted study, each with the seconds to wait after it."""

RunState = Literal["waiting", "running", "finished", "failed", "stopped"]


@dataclass(frozen=True, kw_only=True)
class StudyOutcome:
    """State of a run according to its directory."""

    state: RunState
    step: int
    why: str = ""
    """Reason for the failure, or a note about how the run ended."""
    held_out: str = ""
    """Held-out reward (loss, if the data contains responses) before the first step and after the
    last, as text."""


def outcome_of(run: StudyRun) -> StudyOutcome:
    """Return the state of a run that is not active, from its directory. A run that failed before
    its first step is `waiting`, and `why` has the reason. Raises UserError for an invalid status
    file."""
    status = read_status(run.directory)
    if status is None:
        return StudyOutcome(state="waiting", step=0)
    ends = [status.before, status.after]
    lines = " → ".join("?" if one is None else f"{one:.3f}" for one in ends)
    held_out = "" if ends == [None, None] else f"{status.measure} {lines}"
    if status.phase == "finished":
        return StudyOutcome(state="finished", step=status.step, held_out=held_out)
    # A run that failed before its first step has produced nothing, so it starts again.
    if status.phase == "failed":
        state: RunState = "failed" if status.step else "waiting"
        why = (status.error or "").split("\n")[0]
        return StudyOutcome(state=state, step=status.step, why=why, held_out=held_out)
    return StudyOutcome(state="stopped", step=status.step, held_out=held_out)


def check(
    grid: Grid, runs: Sequence[StudyRun], *, jobs: int, again: Sequence[RunState]
) -> dict[str, Config]:
    """Return name -> config of every run, after checking each run, `jobs` runs at a time, and the
    disk space of all runs that will start. `again`: states of runs that will start. Raises
    ConfigError with all problems, including every directory that belongs to other settings."""
    configs: dict[str, Config] = {}
    problems: dict[tuple[str, str], Problem] = {}
    needs: list[DiskNeed] = []
    writing = 0
    machine = this_machine()
    for run in runs:
        try:
            config, _ = located(load(grid.base, run.overrides), weights=False)
        except UserError as error:
            found: Sequence[Problem] = error.problems
        else:
            configs[run.name] = config
            # Otherwise `mar train` would resume another run under this name.
            found = [
                Problem(
                    key=one.key,
                    what=f"{run.directory} holds a run with other settings: {one}",
                    fix="give the grid another `runs`, or remove that directory",
                )
                for one in differences(config)
                if not one.is_move
            ]
            plan = preflight(config, all_data=False, machine=machine)
            found = [*found, *plan.problems]
            if plan.totals is not None and outcome_of(run).state in again:
                needs += disk_needs(config, plan.totals)
                writing += 1
            # Every run uses GPUs from GPU 0 on, so parallel runs would share them.
            if jobs > 1 and device_of(config, machine) == "cuda":
                what = f"--jobs {jobs} would give the same GPUs to {jobs} runs at a time"
                found.append(Problem(key="policy.device", what=what, fix="leave out --jobs"))
        for one in found:
            # Report each problem once, because many runs of a study have the same problems.
            problems.setdefault((one.key, one.what), one)
    # Finished runs keep their checkpoints, so the disk must hold those of all runs.
    for one in study_disk_problems(needs, writing, jobs):
        problems[one.key, one.what] = one
    if problems:
        raise ConfigError(f"{grid.base}, {len(runs)} runs", list(problems.values()))
    return configs


class _StartedRun:
    """A running `mar train` of the study. `lock`: descriptor of the lock on the runs folder."""

    def __init__(self, run: StudyRun, base: Path, steps: int, *, jobs: int, lock: int) -> None:
        self.run, self.steps, self._jobs = run, steps, jobs
        self.began = time.monotonic()
        # The reader reads each row once, so polling a long run stays cheap.
        self.rows = MetricsReader(run.directory)
        self.last: dict[str, Any] = {}
        run.directory.mkdir(parents=True, exist_ok=True)
        # In a session of its own, the run does not receive Ctrl-C directly; the study forwards it.
        with open(run.directory / LOG, "wb") as log:
            self.process = subprocess.Popen(
                [*TRAIN, str(base), *run.overrides],
                stdin=subprocess.DEVNULL,
                stdout=log,
                stderr=subprocess.STDOUT,
                start_new_session=True,
                # The run inherits the lock, so the folder stays locked if the study is killed.
                pass_fds=(lock,),
            )

    @property
    def seconds(self) -> float:
        return time.monotonic() - self.began

    @property
    def learned(self) -> str:
        """Reward of the newest row (loss, if the data contains responses) as text; empty before the
        first row."""
        for name, key in (("reward", "reward/mean"), ("loss", "policy/loss")):
            if (value := number(self.last, key)) is not None:
                return f"{name} {value:.3f}"
        return ""

    def poll(self) -> None:
        """Read the newest row. Ignore a metrics file that cannot be read."""
        with suppress(UserError, OSError):
            for block in self.rows.blocks():
                self.last = block.rows[-1] if block.rows else {}

    def ended(self, *, requested: bool) -> StudyOutcome:
        """Write the record of this start, and return the outcome of the ended process. If the
        directory does not show how the run ended, it has failed, or has stopped if the stop was
        `requested`."""
        code = self.process.returncode
        about: dict[str, Any] = {"settings": dict(self.run.settings)}
        about |= {"seconds": round(self.seconds, 2), "exit_code": code, "jobs": self._jobs}
        try:
            # Write the record first: reading the status may fail, and every start must have one.
            write_file(self.run.directory / FILE, json.dumps(about) + "\n")
            outcome = outcome_of(self.run)
        except (UserError, OSError) as error:
            # A directory that is full, removed or unreadable must not end the other runs.
            why = error.problems[0].what if isinstance(error, UserError) else str(error)
            return StudyOutcome(state="failed", step=int(number(self.last, "step") or 0), why=why)
        # The exit code agrees with the status in the directory.
        if code in (0, INTERRUPTED) or outcome.state == "failed":
            return outcome
        if outcome.state == "finished":
            return replace(outcome, why=f"`mar train` ended with code {code} afterwards")
        if requested:
            return replace(outcome, state="stopped")
        return replace(outcome, state="failed", why=outcome.why or self._cause())

    def _cause(self) -> str:
        """Return the error in the run's logs, else the last line of its output."""
        cause = find_cause(self.run.directory / "logs")
        lines: list[str] = []
        with suppress(OSError):
            output = (self.run.directory / LOG).read_text(errors="replace", encoding="utf-8")
            lines = output.strip().splitlines()
        return cause.message.splitlines()[0] if cause else lines[-1] if lines else "no output"


def study(
    path: Path, only: Sequence[str], console: Console, *, jobs: int = 1, retry: bool = False
) -> int:
    """Run the remaining runs of the grid in `path`, `jobs` at a time, and return the exit code: 0
    if every run finished, 1 if some failed or were stopped, 130 if Ctrl-C stopped the study.

    The first Ctrl-C stops each active run after its step, the second one stops it at once. `only`:
    names of sweeps or runs to use (see `runs_of`); all if empty. `retry`: start failed runs again.
    Raises UserError before any run starts.
    """
    grid = read_grid(path)
    runs = runs_of(grid, only)
    # Check all runs first: an error in the last one must not appear after hours of training.
    again: list[RunState] = ["waiting", "stopped"]
    if retry:
        again.append("failed")
    configs = check(grid, runs, jobs=jobs, again=again)
    active: list[_StartedRun] = []
    durations: list[float] = []
    forwarded = 0
    with ExitStack() as stack:
        lock = stack.enter_context(lock_run_dir(grid.runs, command="mar study", key="runs"))
        outcomes = {run.name: outcome_of(run) for run in runs}
        remaining = [run for run in runs if outcomes[run.name].state in again]
        console.print(Text(f"{path}: {len(runs)} runs, {len(remaining)} to do"), soft_wrap=True)
        interrupts = stack.enter_context(deferred_signals())
        live = None
        if console.is_terminal:
            live = stack.enter_context(Live(console=console, auto_refresh=False, transient=True))
        # The stack unwinds in reverse order, so the runs end before the folder is unlocked.
        stack.callback(_end, active, interrupts)
        drawn_at = time.monotonic()
        # After a signal the study starts no run, and waits for the active runs.
        while active or (remaining and not interrupts):
            while remaining and len(active) < jobs and not interrupts:
                run = remaining.pop(0)
                steps = configs[run.name].run.steps
                try:
                    active.append(_StartedRun(run, grid.base, steps, jobs=jobs, lock=lock))
                    outcomes[run.name] = StudyOutcome(state="running", step=0)
                except OSError as error:
                    why = f"the run was not started: {error}"
                    outcomes[run.name] = StudyOutcome(state="failed", step=0, why=why)
                    print_plain(console, f"{run.name}: failed, {why}")
            # Forward one signal per round, because a process may receive two pending signals as
            # one.
            if len(interrupts) > forwarded:
                forwarded += 1
                for one in active:
                    one.process.send_signal(signal.SIGINT)
                if forwarded == 1:
                    console.print("Stopping after this step. Press Ctrl-C again to stop at once.")
            if live is not None:
                live.update(_live_table(active, remaining, outcomes, durations, jobs), refresh=True)
            elif time.monotonic() - drawn_at > PLAIN_EVERY_S:
                drawn_at = time.monotonic()
                console.print(_counts(outcomes, remaining, durations, jobs), highlight=False)
            time.sleep(POLL_S)
            for one in active:
                one.poll()
            for one in [one for one in active if one.process.poll() is not None]:
                outcomes[one.run.name] = outcome = one.ended(requested=bool(interrupts))
                active.remove(one)
                durations.append(one.seconds)
                _report(console, one, outcome)
    console.print(_summary(runs, outcomes))
    console.print(_counts(outcomes, remaining, durations, jobs), highlight=False)
    if interrupts:
        console.print("Stopped. Run the same command again to continue.")
        return INTERRUPTED
    return 0 if all(one.state == "finished" for one in outcomes.values()) else 1


def _end(active: Sequence[_StartedRun], interrupts: Sequence[int]) -> None:
    """End the active runs of an interrupted study. A further Ctrl-C ends the current wait."""
    # The first SIGINT lets the run save a checkpoint, the second one stops it at once.
    for signal_number, timeout_s in ENDING:
        until, received = time.monotonic() + timeout_s, len(interrupts)
        for one in active:
            if one.process.poll() is None:
                one.process.send_signal(signal_number)
        while any(one.process.poll() is None for one in active):
            if time.monotonic() > until or len(interrupts) > received:
                break
            time.sleep(POLL_S)


def _report(console: Console, one: _StartedRun, outcome: StudyOutcome) -> None:
    parts = [f"{one.run.name}: {outcome.state} at step {outcome.step} in {span(one.seconds)}"]
    parts += [one.learned] if one.learned else []
    parts += [outcome.why] if outcome.why else []
    print_plain(console, ", ".join(parts))


def _counts(
    outcomes: Mapping[str, StudyOutcome],
    remaining: Sequence[StudyRun],
    durations: Sequence[float],
    jobs: int,
) -> str:
    states = [one.state for one in outcomes.values()]
    parts = [f"{states.count(state)} {state}" for state in dict.fromkeys(states)]
    if durations and remaining:
        parts.append(f"about {span(sum(durations) / len(durations) * len(remaining) / jobs)} left")
    return ", ".join(parts)


def _live_table(
    active: Sequence[_StartedRun],
    remaining: Sequence[StudyRun],
    outcomes: Mapping[str, StudyOutcome],
    durations: Sequence[float],
    jobs: int,
) -> Table:
    table = Table(
        "run",
        "step",
        "latest",
        "cosine",
        "time",
        caption=_counts(outcomes, remaining, durations, jobs),
    )
    for one in active:
        cosine = number(one.last, "gac/cosine")
        table.add_row(
            one.run.name,
            f"{one.last.get('step', 0)}/{one.steps}",
            one.learned,
            "" if cosine is None else f"{cosine:.3f}",
            span(one.seconds),
        )
    return table


def _summary(runs: Sequence[StudyRun], outcomes: Mapping[str, StudyOutcome]) -> Table:
    table = Table("run", "state", "step", "held out", "why", box=None)
    for run in runs:
        one = outcomes[run.name]
        # Text, because rich would interpret brackets in a reason as markup.
        table.add_row(run.name, one.state, str(one.step), one.held_out, Text(one.why))
    return table

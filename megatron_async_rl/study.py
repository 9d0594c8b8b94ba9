"""`mar study GRID`: runs that differ in named settings, each an ordinary `mar train` in a separate
directory.

Invariants:
- a run equals `mar train BASE key=value ...` with the overrides of its settings, and shares nothing
  with others. Apart from timings, synchronous and `exact_lag` runs have the same results alone, one
  after another or in parallel. In other runs the lag depends on the speed, so parallel runs have
  other results;
- one study at a time works on a runs folder; no `mar train` of it outlives it, unless the study is
  killed; such a run then holds the folder until its end;
- every run is checked before the first one starts; a directory with other settings is refused;
- a run that finished or failed is not repeated, and a stopped run is resumed if `mar train` permits
  it; a failure is counted and kept, and stops no other run.
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
from megatron_async_rl.report.run_data import span
from megatron_async_rl.watchdog.events import read_status
from megatron_async_rl.watchdog.logs import find_cause

FILE = "study.json"
"""File of each run directory with its settings by axis, and the seconds and exit code of its
last start."""
LOG = "study.log"
"""File of each run directory with the output of `mar train`."""
TRAIN = (sys.executable, "-m", "megatron_async_rl", "train")
POLL_S = 0.25
PLAIN_EVERY_S = 30.0
ENDING = ((signal.SIGINT, 120.0), (signal.SIGINT, 20.0), (signal.SIGKILL, 20.0))
"""Signals that end the runs of an interrupted study, and the seconds after each."""

RunState = Literal["waiting", "running", "finished", "failed", "stopped"]


@dataclass(frozen=True, kw_only=True)
class StudyOutcome:
    """State of a run according to its directory."""

    state: RunState
    step: int
    why: str = ""
    """Reason of the failure, or a remark on the end."""
    held_out: str = ""
    """Reward (loss, if responses are given) before the first step and after the last."""


def outcome_of(run: StudyRun) -> StudyOutcome:
    """Return the state that the run's directory shows while no process works on it. A run that
    failed before its first step is `waiting`, with its reason. Raises UserError for an invalid
    status."""
    status = read_status(run.directory)
    if status is None:
        return StudyOutcome(state="waiting", step=0)
    ends = [status.before, status.after]
    lines = " → ".join("?" if one is None else f"{one:.3f}" for one in ends)
    held_out = "" if ends == [None, None] else f"{status.measure} {lines}"
    if status.phase == "finished":
        return StudyOutcome(state="finished", step=status.step, held_out=held_out)
    # Before its first step a run has nothing to keep, so it may simply run again.
    if status.phase == "failed":
        state: RunState = "failed" if status.step else "waiting"
        why = (status.error or "").split("\n")[0]
        return StudyOutcome(state=state, step=status.step, why=why, held_out=held_out)
    return StudyOutcome(state="stopped", step=status.step, held_out=held_out)


def check(grid: Grid, runs: Sequence[StudyRun], *, jobs: int) -> dict[str, Config]:
    """Return name -> configuration of every run. Raises ConfigError with all problems of the runs,
    alone or `jobs` at a time, and with every directory that has other settings."""
    configs: dict[str, Config] = {}
    problems: dict[tuple[str, str], Problem] = {}
    machine = this_machine()
    for run in runs:
        try:
            config, _ = located(load(grid.base, run.overrides), weights=False)
        except UserError as error:
            found: Sequence[Problem] = error.problems
        else:
            configs[run.name] = config
            # A directory with other settings would be resumed under the wrong name.
            found = [
                Problem(
                    key=one.key,
                    what=f"{run.directory} holds a run with other settings: {one}",
                    fix="give the grid another `runs`, or remove that directory",
                )
                for one in differences(config)
                if not one.is_move
            ]
            found = [*found, *preflight(config, all_data=False, machine=machine).problems]
            # Each run uses GPUs from the first one on.
            if jobs > 1 and device_of(config, machine) == "cuda":
                what = f"--jobs {jobs} would give the same GPUs to {jobs} runs at a time"
                found.append(Problem(key="policy.device", what=what, fix="leave out --jobs"))
        for one in found:  # most of a hundred runs have the same problems
            # One line per distinct problem.
            problems.setdefault((one.key, one.what), one)
    if problems:
        raise ConfigError(f"{grid.base}, {len(runs)} runs", list(problems.values()))
    return configs


class _StartedRun:
    """A running `mar train` of the study. `lock`: of the runs folder, which the run holds, too."""

    def __init__(self, run: StudyRun, base: Path, steps: int, *, jobs: int, lock: int) -> None:
        self.run, self.steps, self._jobs = run, steps, jobs
        self.began = time.monotonic()
        # Follows the file, so that a row is read once, however long the run is.
        self.rows = MetricsReader(run.directory)
        self.last: dict[str, Any] = {}
        run.directory.mkdir(parents=True, exist_ok=True)
        # A separate session: Ctrl-C reaches only the study, which passes it on.
        with open(run.directory / LOG, "wb") as log:
            self.process = subprocess.Popen(
                [*TRAIN, str(base), *run.overrides],
                stdin=subprocess.DEVNULL,
                stdout=log,
                stderr=subprocess.STDOUT,
                start_new_session=True,
                # A run that outlives its study keeps the folder locked.
                pass_fds=(lock,),
            )

    @property
    def seconds(self) -> float:
        return time.monotonic() - self.began

    @property
    def learned(self) -> str:
        """Reward of the newest row (loss, if responses are given); empty before the first."""
        for name, key in (("reward", "reward/mean"), ("loss", "policy/loss")):
            if (value := number(self.last, key)) is not None:
                return f"{name} {value:.3f}"
        return ""

    def look(self) -> None:
        """Read the newest row; skip a run that cannot be read."""
        with suppress(UserError, OSError):
            for news in self.rows.blocks():
                self.last = news.rows[-1] if news.rows else {}

    def ended(self, *, requested: bool) -> StudyOutcome:
        """Record the start, and return its outcome according to the directory. A run without a last
        status, or refused, has failed, unless it was `requested` to stop."""
        code = self.process.returncode
        about: dict[str, Any] = {"settings": dict(self.run.settings)}
        about |= {"seconds": round(self.seconds, 2), "exit_code": code, "jobs": self._jobs}
        # Before the status is evaluated, so that every start leaves its record.
        write_file(self.run.directory / FILE, json.dumps(about) + "\n")
        try:
            outcome = outcome_of(self.run)
        except UserError as error:
            why = error.problems[0].what
            return StudyOutcome(state="failed", step=int(number(self.last, "step") or 0), why=why)
        # The directory and the exit code agree.
        if code in (0, INTERRUPTED) or outcome.state == "failed":
            return outcome
        if outcome.state == "finished":
            return replace(outcome, why=f"`mar train` ended with code {code} afterwards")
        if requested:
            return replace(outcome, state="stopped")
        return replace(outcome, state="failed", why=outcome.why or self._last_words())

    def _last_words(self) -> str:
        cause = find_cause(self.run.directory / "logs")
        lines = (
            (self.run.directory / LOG)
            .read_text(errors="replace", encoding="utf-8")
            .strip()
            .splitlines()
        )
        return cause.message.splitlines()[0] if cause else lines[-1] if lines else "no words"


def study(
    path: Path, only: Sequence[str], console: Console, *, jobs: int = 1, retry: bool = False
) -> int:
    """Run the remaining runs of the grid in `path`, `jobs` at a time, and return the exit code.

    0: every run finished; 1: some failed; 130: stopped by Ctrl-C, each run after its step, or at
    once by a second Ctrl-C. `retry`: failed runs start again. Raises UserError before any starts.
    """
    grid = read_grid(path)
    runs = runs_of(grid, only)
    # All runs first, because a typing error in the last one must not cost a night.
    configs = check(grid, runs, jobs=jobs)
    at_work: list[_StartedRun] = []
    took: list[float] = []
    sent = 0
    with ExitStack() as stack:
        lock = stack.enter_context(lock_run_dir(grid.runs, command="mar study", key="runs"))
        outcomes = {run.name: outcome_of(run) for run in runs}
        again = ("waiting", "stopped", "failed") if retry else ("waiting", "stopped")
        left = [run for run in runs if outcomes[run.name].state in again]
        console.print(Text(f"{path}: {len(runs)} runs, {len(left)} to do"), soft_wrap=True)
        interrupts = stack.enter_context(deferred_signals())
        live = None
        if console.is_terminal:
            live = stack.enter_context(Live(console=console, auto_refresh=False, transient=True))
        # After the lock in the stack, so that runs end before the folder is released.
        stack.callback(_end, at_work, interrupts)
        drawn_at = time.monotonic()
        # After a signal no run starts, and the study waits for the active ones.
        while at_work or (left and not interrupts):
            while left and len(at_work) < jobs and not interrupts:
                run = left.pop(0)
                steps = configs[run.name].run.steps
                at_work.append(_StartedRun(run, grid.base, steps, jobs=jobs, lock=lock))
                outcomes[run.name] = StudyOutcome(state="running", step=0)
            # One at a time, because two signals that are sent together arrive as one.
            if len(interrupts) > sent:
                sent += 1
                for one in at_work:
                    one.process.send_signal(signal.SIGINT)
                if sent == 1:
                    console.print("Stopping after this step. Ctrl-C again kills at once.")
            if live is not None:
                live.update(_live_table(at_work, left, outcomes, took, jobs), refresh=True)
            elif time.monotonic() - drawn_at > PLAIN_EVERY_S:
                drawn_at = time.monotonic()
                console.print(_counts(outcomes, left, took, jobs), highlight=False)
            time.sleep(POLL_S)
            for one in at_work:
                one.look()
            for one in [one for one in at_work if one.process.poll() is not None]:
                outcomes[one.run.name] = outcome = one.ended(requested=bool(interrupts))
                at_work.remove(one)
                took.append(one.seconds)
                _report(console, one, outcome)
    console.print(_summary(runs, outcomes))
    console.print(_counts(outcomes, left, took, jobs), highlight=False)
    if interrupts:
        console.print("Stopped; the same command continues.")
        return INTERRUPTED
    return 1 if any(one.state == "failed" for one in outcomes.values()) else 0


def _end(at_work: Sequence[_StartedRun], interrupts: Sequence[int]) -> None:
    """End the active runs of an interrupted study. Ctrl-C shortens the waits."""
    # A checkpoint first, then the second Ctrl-C, then SIGKILL.
    for what, timeout_s in ENDING:
        until, requested = time.monotonic() + timeout_s, len(interrupts)
        for one in at_work:
            if one.process.poll() is None:
                one.process.send_signal(what)
        while any(one.process.poll() is None for one in at_work):
            if time.monotonic() > until or len(interrupts) > requested:
                break
            time.sleep(POLL_S)


def _report(console: Console, one: _StartedRun, outcome: StudyOutcome) -> None:
    parts = [f"{one.run.name}: {outcome.state} at step {outcome.step} in {span(one.seconds)}"]
    parts += [one.learned] if one.learned else []
    parts += [outcome.why] if outcome.why else []
    print_plain(console, ", ".join(parts))


def _counts(
    outcomes: Mapping[str, StudyOutcome], left: Sequence[StudyRun], took: Sequence[float], jobs: int
) -> str:
    states = [one.state for one in outcomes.values()]
    parts = [f"{states.count(state)} {state}" for state in dict.fromkeys(states)]
    if took and left:
        parts.append(f"about {span(sum(took) / len(took) * len(left) / jobs)} left")
    return ", ".join(parts)


def _live_table(
    at_work: Sequence[_StartedRun],
    left: Sequence[StudyRun],
    outcomes: Mapping[str, StudyOutcome],
    took: Sequence[float],
    jobs: int,
) -> Table:
    table = Table(
        "run", "step", "latest", "cosine", "time", caption=_counts(outcomes, left, took, jobs)
    )
    for one in at_work:
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
        # A reason may contain brackets, which are not markup.
        table.add_row(run.name, one.state, str(one.step), one.held_out, Text(one.why))
    return table

"""Who waits for what, on every process of a run: gathered when nothing moves any more, or when a wait missed its deadline.

Invariant: gathering changes nothing in the run, ends within seconds whatever the processes do, and asks nothing of them but
what the kernel and a signal handler can answer: a stopped process and one that is stuck in one call are in the picture too.
"""

from __future__ import annotations

import contextlib
import os
import re
import signal
import socket
import time
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import psutil

from megatron_async_rl.observe.movement import FOLDER, LAUNCHER, ProcessState, read_states
from megatron_async_rl.observe.processes import STOPPED, condition, handles
from megatron_async_rl.observe.stack import places

FILE = "stall.txt"
STACKS_S = 2.0
"""Longest wait for the stacks."""
GATHER_S = STACKS_S + 1.0
SILENT_S = 5.0
"""A heartbeat comes every second; one that is this late means that the process does not come to run Python."""
_STACKS = "\nStacks\n"
_TIMED_OUT = re.compile(r"time[ds]? ?-?out|did not come|d(?:o|oes|id) not answer|no answer|unresponsive", re.IGNORECASE)


@dataclass(frozen=True, kw_only=True)
class View:
    """One process, from outside."""

    state: ProcessState
    condition: str | None
    """The kernel's word; None: it is gone."""
    silent_s: float
    stack: str = ""

    @property
    def title(self) -> str:
        return f"{self.state.name} (pid {self.state.pid})"


@dataclass(frozen=True, kw_only=True)
class Stall:
    """`headline`: what happened; `suspects`: sentences; `text`: a screenful with every process."""

    headline: str
    suspects: tuple[str, ...]
    text: str

    @property
    def error(self) -> str:
        return " ".join([self.headline, *self.suspects])


def gather(run_dir: Path, headline: str, *, still_s: float, others: Iterable[psutil.Process] = ()) -> Stall:
    """Looks at every process of the run and writes `RUN/stall.txt`, stacks included.

    `still_s`: for how long nothing has moved; `others`: processes that may have no state file, such as Ray's own.
    """
    stacks = _stacks(run_dir, [state for state in read_states(run_dir) if state.host == socket.gethostname()])
    views = [_view(state, stacks.get(state.name, "")) for state in read_states(run_dir) if state.name != LAUNCHER]
    views.sort(key=lambda view: (not view.state.name.startswith("rank "), view.state.name))
    known = {view.state.pid for view in views}
    unwatched = [process for process in others if process.pid not in known and condition(process.pid) in STOPPED]
    found = (*suspects(views, still_s), *(f"{_name(process)} (pid {process.pid}) is stopped." for process in unwatched))
    lines = [headline, *found, "", *(line for view in views for line in _lines(view))]
    stall = Stall(headline=headline, suspects=found, text="\n".join(lines))
    every = "\n".join(f"\n{view.title}\n{view.stack or '  no stack came'}" for view in views)
    (run_dir / FILE).write_text(stall.text + "\n" + _STACKS + every + "\n")
    return stall


def gather_if_timed_out(run_dir: Path, error: BaseException, timeout_s: float) -> None:
    """To be called where `error` ends a rank, before anything is torn down: if it is a wait that ended, the picture is taken."""
    words = f"{type(error).__name__}: {error}"
    if not isinstance(error, TimeoutError) and not _TIMED_OUT.search(words):
        return
    if type(error).__name__ == "RankZeroFailed":
        time.sleep(GATHER_S)  # rank 0 gathers; when this rank ends, torchrun ends rank 0
    else:
        gather(run_dir, f"{words.splitlines()[0]}.", still_s=timeout_s)


def read_summary(run_dir: Path) -> str | None:
    """The picture of `RUN/stall.txt` without the stacks; None when there is none."""
    try:
        return (run_dir / FILE).read_text().partition(_STACKS)[0].rstrip()
    except FileNotFoundError:
        return None


def suspects(views: Sequence[View], still_s: float) -> tuple[str, ...]:
    """A sentence for each process that most likely holds up the others; the surest kind of evidence alone."""
    stopped = [f"{view.title} is stopped (T): it does not run until SIGCONT." for view in views if view.condition in STOPPED]
    # One that died long before the others stood still was survived.
    dead = [f"{view.title} is dead." for view in views if view.condition is None and view.silent_s < still_s + 2 * SILENT_S]
    disk = [f"{view.title} waits inside the kernel (D), on a device." for view in views if view.condition == "disk-sleep"]
    live = [view for view in views if view.condition is not None]
    silent = [
        f"{view.title} does not answer: it has not come to run Python for {view.silent_s:.0f} s; it is in {_innermost(view)}."
        for view in live
        if view.silent_s >= SILENT_S
    ]
    long = [(view, one) for view in live for one in view.state.of_kind("work")[:1] if one["since_s"] >= 0.5 * still_s]
    at_work = [f"{view.title} is busy with {one['name']}, since {one['since_s']:.0f} s." for view, one in long]
    free = [view for view in live if not view.state.of_kind("wait")]
    idle = [f"{view.title} waits for nothing that has a name; it is in {_innermost(view)}." for view in free]
    return tuple(stopped or dead or disk or silent or at_work or idle)


def _innermost(view: View) -> str:
    return next(iter(places(view.stack)), "a place that it did not tell")


def _view(state: ProcessState, stack: str) -> View:
    here = state.host == socket.gethostname()
    there = "on another machine"
    return View(
        state=state,
        condition=condition(state.pid, state.time) if here else there,
        silent_s=max(0.0, time.time() - state.time),
        stack=stack,
    )


def _lines(view: View) -> list[str]:
    state = view.state
    lines = [f"{view.title}: {view.condition or 'dead'}, last heartbeat {view.silent_s:.1f} s ago"]
    lines += [f"    {_activity(one, view.silent_s)}" for kind in ("wait", "work", "phase") for one in state.of_kind(kind)[:4]]
    if len(state.activities) > 8:
        lines.append(f"    ({len(state.activities)} waits and works in all)")
    shown = {mark: value for mark, value in state.progress.items() if mark not in ("phases", "loop")}
    marks = [f"{mark} {count} ({age + view.silent_s:.0f} s ago)" for mark, (count, age) in shown.items()]
    facts = [f"{key} {value}" for key, value in state.facts.items()]
    lines += [f"    {', '.join(marks + facts)}"] if marks or facts else []
    return lines + [f"    in {place}" for place in places(view.stack)]


def _activity(one: dict[str, Any], silent_s: float) -> str:
    verb = {"wait": "waits for", "work": "is busy with", "phase": "is"}[one["kind"]]
    limit = f" of {one['deadline_s']:.0f}" if one["deadline_s"] is not None else ""
    return f"{verb} {one['name']} ({one['since_s'] + silent_s:.1f}{limit} s)"


def _stacks(run_dir: Path, states: Sequence[ProcessState]) -> dict[str, str]:
    """What each process wrote within STACKS_S of being asked; nothing for one that cannot."""
    asked: dict[str, Path] = {}
    for state in states:
        if condition(state.pid, state.time) in (None, *STOPPED) or not handles(state.pid, signal.SIGUSR1):
            continue
        path = run_dir / FOLDER / f"{state.name}.stack"
        with contextlib.suppress(OSError):
            os.truncate(path, 0)
            os.kill(state.pid, signal.SIGUSR1)
            asked[state.name] = path
    deadline = time.monotonic() + STACKS_S
    while time.monotonic() < deadline and not all(_size(path) for path in asked.values()):
        time.sleep(0.05)
    time.sleep(0.1)  # the last one may be writing
    return {name: path.read_text(errors="replace") for name, path in asked.items() if _size(path)}


def _size(path: Path) -> int:
    try:
        return path.stat().st_size
    except OSError:
        return 0


def _name(process: psutil.Process) -> str:
    try:
        return str(process.name())
    except psutil.Error:
        return "a process"

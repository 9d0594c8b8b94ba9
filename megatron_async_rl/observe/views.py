"""What each machine of a run sees of its own processes, and how machines tell each other.

A process can be looked at on its own machine only: its condition in the kernel, its stacks by a signal. Whoever takes the
picture of a run (observe/stall.py) writes what it sees to `RUN/watch/<host>.views`; the launchers of other machines find it
there and write theirs.

Invariants:
- looking changes nothing in the run, ends within seconds whatever the processes do, and asks nothing of them but what the
  kernel and a signal handler can answer: a stopped process and one that is stuck in one call are seen too;
- a file of views is replaced whole; its ages are measured by the clock of the machine that wrote it.
"""

from __future__ import annotations

import contextlib
import json
import os
import signal
import socket
import time
from collections.abc import Iterable, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path

import psutil

from megatron_async_rl.observe import watch
from megatron_async_rl.observe.movement import FOLDER, ProcessState, read_states
from megatron_async_rl.observe.processes import STOPPED, condition, handles

STACKS_S = 2.0
"""Longest wait for the stacks."""
ANSWER_S = STACKS_S + 3.0
"""Longest wait for the views of other machines, once this one's are written."""
_POLL_S = 0.05


@dataclass(frozen=True, kw_only=True)
class View:
    """One process, from outside."""

    state: ProcessState
    condition: str | None
    """The kernel's word; None: it is gone."""
    silent_s: float
    stack: str = ""
    host: str = ""
    """Where it runs, if the run has several machines."""

    @property
    def title(self) -> str:
        place = f" on {self.host}" if self.host else ""
        return f"{self.state.name} (pid {self.state.pid}{place})"


@dataclass(frozen=True, kw_only=True)
class Sight:
    """What the machine `host` sees. `stopped`: sentences on stopped processes that have no state, such as Ray's own."""

    host: str
    views: tuple[View, ...]
    stopped: tuple[str, ...] = ()
    ends: str | None = None
    """Why the run is being ended, where that is decided; None: it is not, this is an answer."""


def look_here(run_dir: Path, others: Iterable[psutil.Process] = (), ends: str | None = None) -> Sight:
    """Every process of the run on this machine. `others`: processes of the run that may have no state file."""
    host = socket.gethostname()
    stacks = _stacks(run_dir, _of(host, read_states(run_dir)))
    states = read_states(run_dir)
    several = host if len({state.host for state in states}) > 1 else ""
    views = tuple(
        View(
            state=state,
            condition=condition(state.pid, state.time),
            silent_s=max(0.0, time.time() - state.time),
            stack=stacks.get(state.name, ""),
            host=several,
        )
        for state in _of(host, states)
    )
    known = {view.state.pid for view in views}
    place = f" on {host}" if several else ""
    unknown = [process for process in others if process.pid not in known and condition(process.pid) in STOPPED]
    stopped = tuple(f"{_name(process)} (pid {process.pid}{place}) is stopped." for process in unknown)
    return Sight(host=host, views=views, stopped=stopped, ends=ends)


def tell(run_dir: Path, sight: Sight) -> None:
    """For the other machines."""
    path = run_dir / FOLDER / f"{sight.host}.views"
    partial = path.with_suffix(f".{os.getpid()}.partial")
    path.parent.mkdir(parents=True, exist_ok=True)
    partial.write_text(json.dumps(asdict(sight)))
    os.replace(partial, path)


def told(run_dir: Path) -> list[Sight]:
    """What other machines see, as far as they have said so."""
    sights = []
    for path in sorted((run_dir / FOLDER).glob("*.views")):
        if path.stem != socket.gethostname():
            tree = json.loads(path.read_text())
            views = tuple(View(**{**view, "state": ProcessState(**view["state"])}) for view in tree.pop("views"))
            sights.append(Sight(**{**tree, "views": views, "stopped": tuple(tree["stopped"])}))
    return sights


def ask_other_machines(run_dir: Path, *, at_the_end: bool) -> list[Sight]:
    """What the machines with a launcher of this run see, once each has said so, or after ANSWER_S.

    `at_the_end`: the run is being ended, and what they saw at an earlier time does not count.
    """
    asked = {state.host for state in read_states(run_dir) if state.is_launcher} - {socket.gethostname()}
    deadline = time.monotonic() + ANSWER_S
    with watch.doing("wait", "what other machines see", ANSWER_S):
        while time.monotonic() < deadline:
            if not asked - {sight.host for sight in told(run_dir) if sight.ends is not None or not at_the_end}:
                break
            time.sleep(_POLL_S)
    return told(run_dir)


def unseen(state: ProcessState) -> View:
    """Of a process whose machine did not answer."""
    silent_s = max(0.0, time.time() - state.time)
    return View(state=state, condition="on another machine", silent_s=silent_s, host=state.host)


def _of(host: str, states: Sequence[ProcessState]) -> list[ProcessState]:
    return [state for state in states if state.host == host and not state.is_launcher]


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
        time.sleep(_POLL_S)
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

"""The picture of who waits for what, on every process of a run: gathered when nothing moves any
more, or when a wait missed its deadline.

Invariant: gathering changes nothing in the run, and ends within seconds whatever the processes and
the other machines do (watchdog/snapshots.py); every process that has a state is in the picture.
"""

from __future__ import annotations

import time
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import psutil

from megatron_async_rl.watchdog.events import timed_out
from megatron_async_rl.watchdog.processes import STOPPED
from megatron_async_rl.watchdog.progress_monitor import read_states, write_whole
from megatron_async_rl.watchdog.snapshots import (
    ANSWER_S,
    STACKS_S,
    ProcessSnapshot,
    ask_other_machines,
    look_here,
    places,
    publish,
    unseen,
)

FILE = "stall.txt"
GATHER_S = STACKS_S + ANSWER_S + 1.0
"""Longest time that the picture takes."""
POLL_S = 0.1
SILENT_S = 5.0
"""A heartbeat comes every second; a heartbeat that is this late means that the process cannot run
Python."""
_STACKS = "\nStacks\n"


@dataclass(frozen=True, kw_only=True)
class Stall:
    """`headline`: what happened; `suspects`: sentences; `text`: a screenful with every process;
    `kind`: as an error's name."""

    headline: str
    suspects: tuple[str, ...]
    text: str
    kind: str = "Stalled"
    consequence: bool = False
    """True when another machine ended first, and has the better words."""

    @property
    def error(self) -> str:
        return f"{self.kind}: " + " ".join([self.headline, *self.suspects])


def gather(
    run_dir: Path,
    headline: str,
    *,
    still_s: float,
    others: Iterable[psutil.Process] = (),
    lost: Sequence[str] = (),
    ends_run: bool = False,
) -> Stall:
    """Looks at every process of the run, on every machine, and writes `RUN/stall.txt`, stacks
    included.

    `still_s`: for how long nothing has moved; `others`: processes of this machine that may have no
    state file, such as Ray's own; `lost`: sentences on machines that are gone; `ends_run`: the run
    is being ended for it, on the other machines too.
    """
    here = look_here(run_dir, others, ends=headline if ends_run else None)
    publish(run_dir, here)
    snapshots = [here, *ask_other_machines(run_dir, at_the_end=ends_run)]
    seen = {process.state.name: process for snapshot in snapshots for process in snapshot.processes}
    states = [state for state in read_states(run_dir) if not state.is_launcher]
    processes = [*seen.values(), *(unseen(state) for state in states if state.name not in seen)]
    processes.sort(
        key=lambda process: (not process.state.name.startswith("rank "), process.state.name)
    )
    found = (
        *lost,
        *suspects(processes, still_s),
        *(sentence for snapshot in snapshots for sentence in snapshot.stopped),
    )
    lines = [headline, *found, "", *(line for process in processes for line in _lines(process))]
    stall = Stall(headline=headline, suspects=found, text="\n".join(lines))
    every = "\n".join(
        f"\n{process.title}\n{process.stack or '  no stack came'}" for process in processes
    )
    write_whole(run_dir / FILE, stall.text + "\n" + _STACKS + every + "\n")
    return stall


def gather_if_timed_out(run_dir: Path, error: BaseException, timeout_s: float) -> None:
    """To be called where `error` ends a rank, before anything is torn down: if it is a wait that
    was over, the picture is taken."""
    if not timed_out(error):
        return
    if getattr(error, "consequence", False):
        # Rank 0 gathers; when this rank ends, torchrun ends rank 0.
        deadline = time.monotonic() + GATHER_S
        while not (run_dir / FILE).exists() and time.monotonic() < deadline:
            time.sleep(POLL_S)
        return
    message = f"{type(error).__name__}: {error}".splitlines()[0]
    notes = "; ".join(getattr(error, "__notes__", []))
    gather(run_dir, f"{message} ({notes})." if notes else f"{message}.", still_s=timeout_s)


def read_summary(run_dir: Path) -> str | None:
    """The picture of `RUN/stall.txt` without the stacks; None if there is none."""
    try:
        return (run_dir / FILE).read_text(encoding="utf-8").partition(_STACKS)[0].rstrip()
    except FileNotFoundError:
        return None


def suspects(processes: Sequence[ProcessSnapshot], still_s: float) -> tuple[str, ...]:
    """A sentence for each process that most likely holds up the others; the surest kind of evidence
    alone."""
    stopped = [
        f"{process.title} is stopped (T): it does not run until SIGCONT."
        for process in processes
        if process.condition in STOPPED
    ]
    # One that died long before the others stood still was survived.
    dead = [
        f"{process.title} is dead."
        for process in processes
        if process.condition is None and process.silent_s < still_s + 2 * SILENT_S
    ]
    disk = [
        f"{process.title} waits inside the kernel (D), on a device."
        for process in processes
        if process.condition == "disk-sleep"
    ]
    live = [process for process in processes if process.condition is not None]
    silent = [
        f"{process.title} does not answer: it has not come to run Python for"
        f" {process.silent_s:.0f} s; it is in {_innermost(process)}."
        for process in live
        if process.silent_s >= SILENT_S
    ]
    blamed = (
        live if still_s >= SILENT_S else []
    )  # in a run that moves, and is ended for another reason, no process is at fault
    too_long_s = max(0.5 * still_s, SILENT_S)
    long = [
        (process, one)
        for process in blamed
        for one in process.state.of_kind("work")[:1]
        if one["since_s"] >= too_long_s
    ]
    at_work = [
        f"{process.title} is busy with {one['name']}, since {one['since_s']:.0f} s."
        for process, one in long
    ]
    free = [process for process in blamed if not process.state.of_kind("wait")]
    idle = [
        f"{process.title} waits for nothing that has a name; it is in {_innermost(process)}."
        for process in free
    ]
    return tuple(stopped or dead or disk or silent or at_work or idle)


def _innermost(process: ProcessSnapshot) -> str:
    return next(iter(places(process.stack)), "a place that it did not tell")


def _lines(process: ProcessSnapshot) -> list[str]:
    state = process.state
    lines = [
        f"{process.title}: {process.condition or 'dead'},"
        f" last heartbeat {process.silent_s:.1f} s ago"
    ]
    lines += [
        f"    {_activity(one, process.silent_s)}"
        for kind in ("wait", "work", "phase")
        for one in state.of_kind(kind)[:4]
    ]
    if len(state.activities) > 8:
        lines.append(f"    ({len(state.activities)} waits and works in all)")
    shown = {
        mark: value for mark, value in state.progress.items() if mark not in ("phases", "loop")
    }
    marks = [
        f"{mark} {count} ({age + process.silent_s:.0f} s ago)"
        for mark, (count, age) in shown.items()
    ]
    facts = [f"{key} {value}" for key, value in state.facts.items()]
    lines += [f"    {', '.join(marks + facts)}"] if marks or facts else []
    return lines + [f"    in {place}" for place in places(process.stack)]


def _activity(one: dict[str, Any], silent_s: float) -> str:
    verb = {"wait": "waits for", "work": "is busy with", "phase": "is"}[one["kind"]]
    limit = f" of {one['deadline_s']:.0f}" if one["deadline_s"] is not None else ""
    return f"{verb} {one['name']} ({one['since_s'] + silent_s:.1f}{limit} s)"

"""Snapshot of who waits for what, in every process of a run. It is taken when the run stalls, or
when a wait exceeded its deadline.

A process can be inspected only on its own machine: its state in the kernel, and its stacks by a
signal. The process that takes the snapshot writes its machine's part to
`RUN/watch/<host>.snapshot`; the launchers of other machines find it there and write theirs.

Invariants:
- taking the snapshot changes nothing in the run, and ends within seconds whatever the processes and
  the other machines do. It needs only answers of the kernel and of a signal handler, so it includes
  stopped processes and processes stuck in one call;
- every process that has a state is in the snapshot;
- a snapshot file is replaced whole; its ages are measured by the clock of the machine that wrote
  it.
"""

from __future__ import annotations

import contextlib
import json
import os
import re
import signal
import socket
import time
from collections import Counter
from collections.abc import Iterable, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import psutil

from megatron_async_rl.watchdog import watch
from megatron_async_rl.watchdog.events import timed_out
from megatron_async_rl.watchdog.processes import STOPPED, condition, handles
from megatron_async_rl.watchdog.progress_monitor import (
    FOLDER,
    ProcessState,
    read_states,
    write_whole,
)

FILE = "stall.txt"


STACKS_S = 2.0
"""Longest wait for the stacks."""
ANSWER_S = STACKS_S + 3.0
"""Longest wait for the processes of other machines, once this one's are written."""
# Callers add this to their own deadlines.
GATHER_S = STACKS_S + ANSWER_S + 1.0
"""Longest time that the snapshot takes."""
POLL_S = 0.1
SILENT_S = 5.0
"""Age at which a heartbeat, which comes every second, shows that the process cannot run Python."""
_STACKS = "\nStacks\n"


@dataclass(frozen=True, kw_only=True)
class Stall:
    """Snapshot of a stalled run. `headline`: what happened; `suspects`: sentences; `text`: a
    screenful with every process; `kind`: name of the error."""

    headline: str
    suspects: tuple[str, ...]
    text: str
    kind: str = "Stalled"
    consequence: bool = False
    """True if another machine ended first and has the better message."""

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
    """Inspect every process of the run, on every machine, and write `RUN/stall.txt` with stacks.

    `still_s`: seconds since the run moved; `others`: processes of this machine that may have no
    state file, such as Ray's own; `lost`: sentences about lost machines; `ends_run`: the run is
    being ended for this reason, on the other machines too.
    """
    # This machine first, because its processes may end as soon as the others notice.
    here = look_here(run_dir, others, ends=headline if ends_run else None)
    # The published part is also the request, which other launchers answer.
    publish(run_dir, here)
    snapshots = [here, *ask_other_machines(run_dir, at_the_end=ends_run)]
    seen = {process.state.name: process for snapshot in snapshots for process in snapshot.processes}
    # Read again, so that the snapshot includes processes whose state could not be read before.
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
        f"\n{process.title}\n{process.stack or '  no stack was received'}" for process in processes
    )
    # Summary and stacks are in one file, so that a copy of it is complete.
    write_whole(run_dir / FILE, stall.text + "\n" + _STACKS + every + "\n")
    return stall


def gather_if_timed_out(run_dir: Path, error: BaseException, timeout_s: float) -> None:
    """Take the snapshot if `error`, which ends a rank, is an exceeded deadline. Call this before
    anything is torn down."""
    if not timed_out(error):
        return
    if getattr(error, "consequence", False):
        # Rank 0 takes it; when this rank ends, torchrun ends rank 0.
        deadline = time.monotonic() + GATHER_S
        while not (run_dir / FILE).exists() and time.monotonic() < deadline:
            time.sleep(POLL_S)
        return
    message = f"{type(error).__name__}: {error}".splitlines()[0]
    notes = "; ".join(getattr(error, "__notes__", []))
    gather(run_dir, f"{message} ({notes})." if notes else f"{message}.", still_s=timeout_s)


def waits_of(state: ProcessState) -> list[str]:
    """Return what a process waited for at its last heartbeat, such as "waits for a batch (9.5 of 60
    s)", the longest wait first."""
    return [_activity(one, 0.0) for one in state.of_kind("wait")]


def read_summary(run_dir: Path) -> str | None:
    """Return the snapshot in `RUN/stall.txt` without the stacks; None if there is none."""
    try:
        return (run_dir / FILE).read_text(encoding="utf-8").partition(_STACKS)[0].rstrip()
    except FileNotFoundError:
        return None


def suspects(processes: Sequence[ProcessSnapshot], still_s: float) -> tuple[str, ...]:
    """Return a sentence for each process that most likely holds up the others, using only the most
    certain kind of evidence."""
    stopped = [
        f"{process.title} is stopped (T): it does not run until SIGCONT."
        for process in processes
        if process.condition in STOPPED
    ]
    # The earliest death explains later silence. The run survived a process that died long before
    # the others stalled.
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
    # A late heartbeat means that the interpreter itself is stuck.
    silent = [
        f"{process.title} does not answer: it has run no Python for {process.silent_s:.0f} s; it"
        f" is in {_innermost(process)}."
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
        f"{process.title} has no named wait; it is in {_innermost(process)}." for process in free
    ]
    # In order of certainty. With several kinds of evidence the list would name every process.
    return tuple(stopped or dead or disk or silent or at_work or idle)


def _innermost(process: ProcessSnapshot) -> str:
    return next(iter(places(process.stack)), "an unknown place")


def _lines(process: ProcessSnapshot) -> list[str]:
    state = process.state
    lines = [
        f"{process.title}: {process.condition or 'dead'},"
        f" last heartbeat {process.silent_s:.1f} s ago"
    ]
    listed = [one for kind in ("wait", "work", "phase") for one in state.of_kind(kind)[:4]]
    lines += [f"    {_activity(one, process.silent_s)}" for one in listed]
    if len(listed) < len(state.activities):
        lines.append(f"    ({len(state.activities)} waits, works and phases in all)")
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


_POLL_S = 0.05

PACKAGE_FOLDER = "/megatron_async_rl/"
PACKAGE_FRAMES = 2
THREADS = 4
_FRAME = re.compile(r'^ +File "(?P<file>[^"]*)", line (?P<line>\d+) in (?P<function>.+)$')
_THREAD = re.compile(r"^(?:Current thread|Thread) 0x", re.MULTILINE)
_END = re.compile(r"(?: in <module>|^  \.\.\.)\n\Z", re.MULTILINE)


@dataclass(frozen=True, kw_only=True)
class ProcessSnapshot:
    """One process as seen from outside."""

    state: ProcessState
    condition: str | None
    """The kernel's state of the process; None: it has ended."""
    silent_s: float
    stack: str = ""
    host: str = ""
    """Name of the machine, if the run has several machines."""

    @property
    def title(self) -> str:
        place = f" on {self.host}" if self.host else ""
        return f"{self.state.name} (pid {self.state.pid}{place})"


@dataclass(frozen=True, kw_only=True)
class HostSnapshot:
    """The processes on machine `host`. `stopped`: sentences about stopped processes without a
    state, such as Ray's own."""

    host: str
    processes: tuple[ProcessSnapshot, ...]
    stopped: tuple[str, ...] = ()
    ends: str | None = None
    """The reason why the run is being ended, if that is decided; None if this is only an answer."""


def look_here(
    run_dir: Path, others: Iterable[psutil.Process] = (), ends: str | None = None
) -> HostSnapshot:
    """Every process of the run on this machine. `others`: processes of the run that may have no
    state file."""
    host = socket.gethostname()
    # Stacks first: they take time, and states read afterwards are as new as the stacks.
    stacks = _stacks(run_dir, _of(host, read_states(run_dir)))
    states = read_states(run_dir)
    several = host if len({state.host for state in states}) > 1 else ""
    processes = tuple(
        ProcessSnapshot(
            state=state,
            condition=condition(state.pid, state.time),
            # Clocks may be set back.
            silent_s=max(0.0, time.time() - state.time),
            stack=stacks.get(state.name, ""),
            host=several,
        )
        for state in _of(host, states)
    )
    known = {process.state.pid for process in processes}
    place = f" on {host}" if several else ""
    unknown = [
        process
        for process in others
        if process.pid not in known and condition(process.pid) in STOPPED
    ]
    stopped = tuple(
        f"{_name(process)} (pid {process.pid}{place}) is stopped." for process in unknown
    )
    return HostSnapshot(host=host, processes=processes, stopped=stopped, ends=ends)


def publish(run_dir: Path, snapshot: HostSnapshot) -> None:
    """Write the snapshot for the launchers of other machines."""
    path = run_dir / FOLDER / f"{snapshot.host}.snapshot"
    path.parent.mkdir(parents=True, exist_ok=True)
    write_whole(path, json.dumps(asdict(snapshot)))


def read_others(run_dir: Path) -> list[HostSnapshot]:
    """Return the newest snapshots of other machines, as far as they published one."""
    snapshots = []
    for path in sorted((run_dir / FOLDER).glob("*.snapshot")):
        # Every host reads and writes the same folder.
        if path.stem != socket.gethostname():
            tree = json.loads(path.read_text(encoding="utf-8"))
            processes = tuple(
                ProcessSnapshot(**{**process, "state": ProcessState(**process["state"])})
                for process in tree.pop("processes")
            )
            snapshots.append(
                HostSnapshot(**{**tree, "processes": processes, "stopped": tuple(tree["stopped"])})
            )
    return snapshots


def ask_other_machines(run_dir: Path, *, at_the_end: bool) -> list[HostSnapshot]:
    """Return the snapshots of machines with a launcher of this run, once all exist, or after
    ANSWER_S.

    `at_the_end`: the run is being ended, and earlier snapshots do not count.
    """
    requested = {state.host for state in read_states(run_dir) if state.is_launcher} - {
        socket.gethostname()
    }
    deadline = time.monotonic() + ANSWER_S
    with watch.doing("wait", "what other machines see", ANSWER_S):
        while time.monotonic() < deadline:
            if not requested - {
                snapshot.host
                for snapshot in read_others(run_dir)
                # Earlier snapshots answered another request.
                if snapshot.ends is not None or not at_the_end
            }:
                break
            time.sleep(_POLL_S)
    return read_others(run_dir)


def unseen(state: ProcessState) -> ProcessSnapshot:
    """Return the snapshot of a process whose machine did not answer."""
    silent_s = max(0.0, time.time() - state.time)
    return ProcessSnapshot(
        state=state, condition="on another machine", silent_s=silent_s, host=state.host
    )


def _of(host: str, states: Sequence[ProcessState]) -> list[ProcessState]:
    return [state for state in states if state.host == host and not state.is_launcher]


def _stacks(run_dir: Path, states: Sequence[ProcessState]) -> dict[str, str]:
    """Return the stacks that processes wrote within STACKS_S of the request; nothing for a process
    that cannot write them."""
    requested: dict[str, Path] = {}
    for state in states:
        # Without a handler SIGUSR1 would end the process.
        if condition(state.pid, state.time) in (None, *STOPPED) or not handles(
            state.pid, signal.SIGUSR1
        ):
            continue
        path = run_dir / FOLDER / f"{state.name}.stack"
        with contextlib.suppress(OSError):
            # The file is opened in append mode, so the dump starts at the new beginning.
            os.truncate(path, 0)
            os.kill(state.pid, signal.SIGUSR1)
            requested[state.name] = path
    deadline = time.monotonic() + STACKS_S
    dumps = dict.fromkeys(requested, "")
    # A process stuck in the kernel never answers; the deadline bounds the wait.
    while time.monotonic() < deadline and not all(map(is_whole, dumps.values())):
        time.sleep(_POLL_S)
        for name, path in requested.items():
            with contextlib.suppress(OSError):
                dumps[name] = path.read_text(errors="replace", encoding="utf-8")
    return {name: dump for name, dump in dumps.items() if dump}


def is_whole(dump: str) -> bool:
    """Return False while faulthandler is still writing: the kernel may suspend a process between
    two threads or two lines. The main thread comes last, and its outermost frame is that of the
    program; a stack of more than 100 frames ends with an ellipsis instead."""
    threads = _THREAD.split(dump)
    return bool(_END.search(threads[-1]))


def _name(process: psutil.Process) -> str:
    try:
        return str(process.name())
    except psutil.Error:
        return "a process"


@dataclass(frozen=True)
class Frame:
    file: str
    line: int
    function: str

    @property
    def in_package(self) -> bool:
        return PACKAGE_FOLDER in self.file

    def __str__(self) -> str:
        place = (
            self.file.rpartition(PACKAGE_FOLDER)[2]
            if self.in_package
            else "/".join(self.file.split("/")[-2:])
        )
        return f"{place}:{self.line} {self.function}"


def read_threads(dump: str) -> list[tuple[Frame, ...]]:
    """Return the frames of each thread, innermost first. The main thread is the last one, as in
    faulthandler's output."""
    threads: list[list[Frame]] = []
    for line in dump.splitlines():
        if _THREAD.match(line):
            threads.append([])
        elif threads and (frame := _FRAME.match(line)):
            threads[-1].append(Frame(frame["file"], int(frame["line"]), frame["function"]))
    return [tuple(frames) for frames in threads if frames]


def places(dump: str) -> list[str]:
    """Return the places of the threads with code of this package, and of the main thread, without
    repetition: `innermost < this package's < its caller`."""
    threads = read_threads(dump)
    shown = [_place(frames) for frames in threads[-1:] if not _watches(frames)]
    shown += [
        _place(frames)
        for frames in threads[:-1]
        if any(frame.in_package for frame in frames) and not _watches(frames)
    ]
    counted = Counter(shown)
    return [text if count == 1 else f"{text} ({count} threads)" for text, count in counted.items()][
        :THREADS
    ]


def _place(frames: tuple[Frame, ...]) -> str:
    in_package = [frame for frame in frames if frame.in_package][:PACKAGE_FRAMES]
    chosen = in_package if frames[0] in in_package else [frames[0], *in_package]
    return " < ".join(map(str, chosen))


def _watches(frames: tuple[Frame, ...]) -> bool:
    """Return True for the heartbeat's own thread, and the thread that takes the snapshot."""
    watching = (("watchdog/watch.py", "run"), ("watchdog/stall.py", "gather"))
    return any(
        frame.in_package and (frame.file.rpartition(PACKAGE_FOLDER)[2], frame.function) in watching
        for frame in frames
    )

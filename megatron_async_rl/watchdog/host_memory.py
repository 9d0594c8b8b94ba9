"""Host memory of this machine: free memory, the processes that use most, and processes that the
kernel ended to reclaim memory.

Reads /proc and the cgroup of this process (version 1 or 2), so that a container's limit counts.
"""

from __future__ import annotations

import os
import re
import time
from collections import deque
from collections.abc import Callable, Collection, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

import psutil

from megatron_async_rl.watchdog.processes import RUN_ID_VARIABLE

MemoryKind = Literal["host", "device"]
"""The kind of memory that ran out: a machine's, or a GPU's."""

GIB = 2**30
SHOWN = 5
COMMAND_SHOWN = 60
RECENT_S = 60.0
"""Largest age at which the kernel's kill of a process explains a death noticed now."""
LOOK_S = 1.0
"""Shortest time between two regular reads of the kernel's count."""
_RAY_NODE = re.compile(r"Memory on the node \(IP: ([^,)]+)[^)]*\) was (\S+ used / \S+) limit")
_RAY_USER = re.compile(r"\d+\t[\d.]+\t")
_LOGGED = re.compile(
    r"^\d+,\d+,(\d+),[^;\n]*;[^\n]*\bKilled process (\d+) \((.*?)\)(?= total-vm|$)", re.MULTILINE
)
# PROC_PID_INIT_INO of the kernel's sources.
_INITIAL_PIDS = 0xEFFFFFFC
"""The kernel's number of the machine's own process id namespace."""
_CGROUPS = Path("/sys/fs/cgroup")
_OWN_CGROUP = Path("/proc/self/cgroup")


def total_bytes() -> int:
    """Bytes that this process and its children may use: the machine's, or its container's limit."""
    # Version 1 reports a huge number instead of `max`; the minimum ignores it.
    limits = _cgroup_values("memory.max", "memory.limit_in_bytes")
    return min([int(psutil.virtual_memory().total), *limits])


def free_bytes() -> int:
    """Bytes that new processes can allocate while the others keep theirs."""
    free = int(psutil.virtual_memory().available)
    for folder in _folders():
        limit = _number(folder, "memory.max", "memory.limit_in_bytes")
        used = _number(folder, "memory.current", "memory.usage_in_bytes")
        if limit is None or used is None:
            continue
        # The kernel first reclaims file pages that were not read recently. Version 1 counts those
        # of inner groups only in `total_inactive_file`.
        counts = _parse(folder / "memory.stat")
        cached = counts.get("total_inactive_file", counts.get("inactive_file", 0))
        # Every group's limit applies, so the smallest one decides.
        free = min(free, max(0, limit - used + cached))
    return free


@dataclass(frozen=True)
class Shortage:
    """Kills by the kernel for lack of host memory, shortly before a death. `certain`: they explain
    the death; otherwise they may concern other processes."""

    message: str
    certain: bool


@dataclass(frozen=True)
class LoggedKill:
    """A line of the kernel's log. `at`: seconds of the monotonic clock."""

    pid: int
    name: str
    at: float


@dataclass(frozen=True)
class KillCount:
    """Number of processes that the kernel has ended for lack of memory; only differences are
    meaningful. `own`: in the cgroup of this process; otherwise on the machine or in a wider
    cgroup."""

    kills: int
    own: bool


def kernel_kills() -> KillCount:
    """Return the kernel's count for this container or, if there is none, for this machine."""
    for name in ("memory.events", "memory.oom_control"):
        # The innermost group with a count decides whether the kill was in this container.
        for place, folder in enumerate(_folders()):
            counts = _parse(folder / name)
            if "oom_kill" in counts:
                return KillCount(counts["oom_kill"], own=place == 0)
    return KillCount(_parse(Path("/proc/vmstat")).get("oom_kill", 0), own=False)


def logged_kills() -> list[LoggedKill] | None:
    """Return the kills in the kernel's log; None if it cannot be read, or if it has other process
    ids than this process, as in a container."""
    try:
        if os.stat("/proc/self/ns/pid").st_ino != _INITIAL_PIDS:
            return None
        # Without O_NONBLOCK the read after the last record would wait for the next one.
        descriptor = os.open("/dev/kmsg", os.O_RDONLY | os.O_NONBLOCK)
    except OSError:
        return None
    records = []
    try:
        while True:
            try:
                # One read returns one record.
                records.append(os.read(descriptor, 8192))
            except BrokenPipeError:  # the kernel has overwritten records: the next read continues
                continue
            except BlockingIOError:
                break
    except OSError:
        return None
    finally:
        os.close(descriptor)
    return kills_in(b"".join(records).decode("utf-8", errors="replace"))


def kills_in(text: str) -> list[LoggedKill]:
    """Return the kills in records of /dev/kmsg."""
    return [
        LoggedKill(pid=int(pid), name=name, at=int(microseconds) / 1e6)
        for microseconds, pid, name in _LOGGED.findall(text)
    ]


class KernelKills:
    """Recent kills by the kernel for lack of memory, which may explain the death of a process.

    Invariants:
    - a kill explains a death only within RECENT_S, and only with evidence: the kernel's log names
      the process, or, if that log cannot be read, this process's own cgroup counts a kill. The
      count of the whole machine is not evidence: another program may have been killed;
    - a counted kill explains at most one death for which `used` is true.

    `now`: seconds of a clock that never goes back."""

    def __init__(
        self,
        count: Callable[[], KillCount] | None = None,
        now: Callable[[], float] = time.monotonic,
        log: Callable[[], Sequence[LoggedKill] | None] | None = None,
    ) -> None:
        self._count = count or kernel_kills
        self._log = log or logged_kills
        self._now = now
        # Kills before this process began explain nothing here.
        self._last = self._count().kills
        self._read = now()
        self._own = False
        self._kills: deque[tuple[float, float]] = deque(maxlen=1000)
        """Times of the last read without the kill and of the first one with it, oldest first."""

    def look(self) -> None:
        """Read the count, at most once in LOOK_S seconds, so that the age of kills is known."""
        if self._now() - self._read >= LOOK_S:
            self._take_up()

    def explain(self, pids: Collection[int], *, used: bool) -> Shortage | None:
        """Return the recent kills that explain, or may explain, the death of a process, and the
        present state of memory. `pids`: the process and those that it needs, as far as known;
        `used`: a counted kill explains no further death."""
        self._take_up()
        now = self._now()
        # Old kills are removed first, so that they cannot explain a later death.
        while self._kills and now - self._kills[0][1] > RECENT_S:
            self._kills.popleft()
        logged = self._log()
        # The log names processes, which is better evidence than a count.
        if logged is not None:
            return _explained([one for one in logged if now - one.at <= RECENT_S], pids)
        if not self._kills:
            return None
        kills, since = len(self._kills), now - self._kills[0][0]
        # One kill ends one process: it must not explain a second death.
        if used and self._own:
            self._kills.popleft()
        count = "a process" if kills == 1 else f"{kills} processes"
        where = "container" if self._own else "machine"
        message = (
            f"In the last {max(1.0, since):.0f} s, the kernel has ended {count} of this {where}"
            f" for lack of host memory"
        )
        return _shortage(message, certain=self._own)

    def _take_up(self) -> None:
        before, self._read = self._read, self._now()
        count = self._count()
        # The kill happened between the two reads; both times are kept.
        self._kills.extend([(before, self._read)] * min(count.kills - self._last, 1000))
        self._last, self._own = count.kills, count.own


def _explained(recent: Sequence[LoggedKill], pids: Collection[int]) -> Shortage | None:
    """Return the evidence for the death of a process of `pids` in the kernel's log."""
    own = [one for one in recent if one.pid in pids]
    if not own and (pids or not recent):
        return None  # the log is complete, so only other processes were killed
    named = ", ".join(f"pid {one.pid} ({one.name})" for one in own or recent)
    return _shortage(f"The kernel has ended {named} for lack of host memory", certain=bool(own))


def _shortage(message: str, *, certain: bool) -> Shortage:
    possibly = "" if certain else "This may be the cause, or concern another process: "
    return Shortage(f"{possibly}{message}; {state_text()}", certain)


def look_for_kernel_kills() -> None:
    """Read the kernel's count. A process that watches others calls this regularly, so that a kill
    while they still answered does not explain a much later death."""
    _kills.look()


def kernel_shortage(pids: Collection[int] = (), *, used: bool = True) -> Shortage | None:
    """Return the recent kills by the kernel for lack of memory that explain, or may explain, the
    death of the process `pids`; None if there are none. `used`: one of them explains no further
    death."""
    return _kills.explain(pids, used=used)


def largest_processes(count: int = SHOWN) -> list[str]:
    """Return one line for each of the `count` processes of this machine with most resident memory;
    processes of this run are marked."""
    found: list[tuple[int, psutil.Process]] = []
    for process in psutil.process_iter():
        try:
            # A process may end between the listing and this read.
            found.append((process.memory_info().rss, process))
        except psutil.Error:
            continue
    found.sort(key=lambda one: -one[0])
    lines = []
    for size, process in found[:count]:
        try:
            command = " ".join(process.cmdline()) or process.name()
            lines.append(_line(size, process, command))
        except psutil.Error:
            continue
    return lines


def _line(size: int, process: psutil.Process, command: str) -> str:
    shown = command if len(command) <= COMMAND_SHOWN else command[: COMMAND_SHOWN - 3] + "..."
    own = RUN_ID_VARIABLE in os.environ and _run_of(process) == os.environ[RUN_ID_VARIABLE]
    return f"pid {process.pid} {size / GIB:.1f} GiB {shown}{' (this run)' if own else ''}"


def _run_of(process: psutil.Process) -> str | None:
    try:
        return process.environ().get(RUN_ID_VARIABLE)
    except psutil.Error:
        return None


def state_text() -> str:
    """Return a text with free and total memory and the largest processes, for a message."""
    free, total = free_bytes() / GIB, total_bytes() / GIB
    largest = "; ".join(largest_processes()) or "not known"
    return f"{free:.1f} of {total:.1f} GiB of host memory are free; largest processes: {largest}"


def ended_by_ray(text: str) -> str:
    """Summarise in one line the text (60 lines) that Ray's memory monitor wrote when it ended a
    process: the node, its memory and the largest processes at that moment."""
    node = _RAY_NODE.search(text)
    users = [line.split("\t", 2) for line in text.splitlines() if _RAY_USER.match(line)]
    largest = "; ".join(f"pid {pid} {size} GB {command}" for pid, size, command in users[:SHOWN])
    where = f"node {node[1]} had {node[2]}" if node else (text.splitlines() or [""])[0]
    return (
        "Ray's memory monitor ended it, as host memory was nearly out:"
        f" {where}; largest processes: {largest or 'not known'}"
    )


def _parse(file: Path) -> dict[str, int]:
    try:
        lines = file.read_text(encoding="utf-8").splitlines()
    except OSError:
        return {}
    pairs = (line.split() for line in lines)
    return {pair[0]: int(pair[1]) for pair in pairs if len(pair) == 2 and pair[1].isdigit()}


def _cgroup_values(second: str, first: str) -> list[int]:
    """Return the numbers in a file of this process's cgroup and of those around it, innermost
    first, without `max`. `second`, `first`: the file's names in cgroup versions 2 and 1."""
    numbers = (_number(folder, second, first) for folder in _folders())
    return [number for number in numbers if number is not None]


def _number(folder: Path, second: str, first: str) -> int | None:
    """Return the number in a file of one cgroup, by its names in versions 2 and 1; None for `max`,
    or if there is no such file."""
    for name in (second, first):
        try:
            text = (folder / name).read_text(encoding="utf-8").strip()
        except OSError:
            continue
        if text.isdigit():
            return int(text)
    return None


def _folders() -> Iterator[Path]:
    """Yield the folders of this process's memory cgroup and those around it, innermost first. A
    container may see its own cgroup as the root."""
    try:
        lines = _OWN_CGROUP.read_text(encoding="utf-8").splitlines()
    except OSError:
        lines = []
    # Version 1 has a line per controller, version 2 a single line without one.
    for line in lines:
        _, controllers, path = [*line.split(":", 2), "", ""][:3]
        if controllers and "memory" not in controllers.split(","):
            continue
        root = _CGROUPS / "memory" if controllers else _CGROUPS
        inner = root / path.lstrip("/")
        # A limit of any group around this one applies, too.
        for folder in (inner, *inner.parents):
            if folder == root or root in folder.parents:
                yield folder


_kills = KernelKills()
"""Kills since this process began."""

"""Host memory of this machine: how much is free, which processes hold it, and whether the kernel
ended a process to get some back.

Reads /proc and the cgroup of this process (version 1 or 2), so that a container's limit counts.
"""

from __future__ import annotations

import os
import re
import time
from collections import deque
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Literal

import psutil

from megatron_async_rl.watchdog.processes import RUN_ID_VARIABLE

Memory = Literal["host", "device"]
"""The memory that ran out: a machine's, or a GPU's own."""

GIB = 2**30
SHOWN = 5
COMMAND_SHOWN = 60
RECENT_S = 60.0
"""Age up to which the kernel's kill of a process explains a death that is noticed now."""
LOOK_S = 1.0
"""Shortest time between two regular reads of the kernel's count."""
RAY_THRESHOLD = 0.95
"""Share of a machine's memory in use at which Ray's memory monitor ends an engine."""
_RAY_NODE = re.compile(r"Memory on the node \(IP: ([^,)]+)[^)]*\) was (\S+ used / \S+) limit")
_RAY_USER = re.compile(r"\d+\t[\d.]+\t")
_CGROUPS = Path("/sys/fs/cgroup")
_OWN_CGROUP = Path("/proc/self/cgroup")


def total_bytes() -> int:
    """Bytes that this process and its children may use: the machine's, or its container's limit."""
    limits = _cgroup_values("memory.max", "memory.limit_in_bytes")
    return min([int(psutil.virtual_memory().total), *limits])


def free_bytes() -> int:
    """Bytes that new processes may take without others having to give any back."""
    free = int(psutil.virtual_memory().available)
    for folder in _folders():
        limit = _number(folder, "memory.max", "memory.limit_in_bytes")
        used = _number(folder, "memory.current", "memory.usage_in_bytes")
        if limit is None or used is None:
            continue
        # The kernel reclaims file pages that were not read recently first. Version 1 counts those
        # of inner groups only in `total_inactive_file`.
        counts = _parse(folder / "memory.stat")
        cached = counts.get("total_inactive_file", counts.get("inactive_file", 0))
        # Every group's limit applies, so the tightest one decides.
        free = min(free, max(0, limit - used + cached))
    return free


def kernel_kills() -> int:
    """Processes that the kernel has ended for want of memory, in this container or, where it keeps
    no count of its own, on this machine. Only differences mean something."""
    for counts in (_counts("memory.events"), _counts("memory.oom_control"), _vmstat()):
        if "oom_kill" in counts:
            return counts["oom_kill"]
    return 0


class KernelKills:
    """Recent kills by the kernel for want of memory, which may explain the death of a process.

    Invariants: a kill explains a death only within RECENT_S of the read that found it, and at most
    one death for which `used` is true. `now`: seconds of a clock that never goes back."""

    def __init__(
        self,
        count: Callable[[], int] | None = None,
        now: Callable[[], float] = time.monotonic,
    ) -> None:
        self._count = count or kernel_kills
        self._now = now
        self._last = self._count()
        self._read = now()
        self._kills: deque[tuple[float, float]] = deque(maxlen=1000)
        """Times of the last read without the kill and of the first one with it, oldest first."""

    def look(self) -> None:
        """Read the count, at most once in LOOK_S seconds, so that old kills are known as old."""
        if self._now() - self._read >= LOOK_S:
            self._take_up()

    def in_words(self, *, used: bool) -> str:
        """Return the recent kills and the state of memory now; empty where there are none.

        `used`: one of them explains a death, and no other death after it."""
        self._take_up()
        now = self._now()
        while self._kills and now - self._kills[0][1] > RECENT_S:
            self._kills.popleft()
        if not self._kills:
            return ""
        kills, since = len(self._kills), now - self._kills[0][0]
        if used:
            self._kills.popleft()
        count = "a process" if kills == 1 else f"{kills} processes"
        return (
            f"In the last {max(1.0, since):.0f} s, the kernel has ended {count} of this machine or container"
            f" for want of host memory; {state_in_words()}"
        )

    def _take_up(self) -> None:
        before, self._read = self._read, self._now()
        count = self._count()
        self._kills.extend([(before, self._read)] * min(count - self._last, 1000))
        self._last = count


def look_for_kernel_kills() -> None:
    """Read the kernel's count. A process that watches others calls this regularly: a kill while
    they still answered does not explain a death much later."""
    _kills.look()


def kernel_kills_in_words(*, used: bool = True) -> str:
    """Return the recent kills of processes by the kernel for want of memory, with the state of
    memory now; empty where there are none. `used`: one of them explains no further death."""
    return _kills.in_words(used=used)


def largest_processes(count: int = SHOWN) -> list[str]:
    """The `count` processes of this machine with most resident memory, as a line each; those of this
    run are marked."""
    found: list[tuple[int, psutil.Process]] = []
    for process in psutil.process_iter():
        try:
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


def state_in_words() -> str:
    """Free and total memory and the largest processes, for a message."""
    free, total = free_bytes() / GIB, total_bytes() / GIB
    largest = "; ".join(largest_processes()) or "not known"
    return f"{free:.1f} of {total:.1f} GiB of host memory are free; largest processes: {largest}"


def ended_by_ray(text: str) -> str:
    """Return what Ray's memory monitor wrote as it ended a process (60 lines of it), in one line: the node,
    its memory and the largest processes at that moment."""
    node = _RAY_NODE.search(text)
    users = [line.split("\t", 2) for line in text.splitlines() if _RAY_USER.match(line)]
    largest = "; ".join(f"pid {pid} {size} GB {command}" for pid, size, command in users[:SHOWN])
    where = f"node {node[1]} had {node[2]}" if node else (text.splitlines() or [""])[0]
    return (
        "Ray's memory monitor ended it, as host memory was nearly out:"
        f" {where}; largest processes: {largest or 'not known'}"
    )


def _vmstat() -> dict[str, int]:
    return _parse(Path("/proc/vmstat"))


def _counts(name: str) -> dict[str, int]:
    """Counts of a file of this process's cgroup, by their names; empty where it cannot be read."""
    for folder in _folders():
        if counts := _parse(folder / name):
            return counts
    return {}


def _parse(file: Path) -> dict[str, int]:
    try:
        lines = file.read_text(encoding="utf-8").splitlines()
    except OSError:
        return {}
    pairs = (line.split() for line in lines)
    return {pair[0]: int(pair[1]) for pair in pairs if len(pair) == 2 and pair[1].isdigit()}


def _cgroup_values(second: str, first: str) -> list[int]:
    """Numbers of a file of this process's cgroup and of those around it, by its names in cgroup
    version 2 and 1, the innermost first; `max` is left out."""
    numbers = (_number(folder, second, first) for folder in _folders())
    return [number for number in numbers if number is not None]


def _number(folder: Path, second: str, first: str) -> int | None:
    """Number in a file of one cgroup, by its names in version 2 and 1; None for `max`, or where
    there is no such file."""
    for name in (second, first):
        try:
            text = (folder / name).read_text(encoding="utf-8").strip()
        except OSError:
            continue
        if text.isdigit():
            return int(text)
    return None


def _folders() -> Iterator[Path]:
    """Folders of this process's memory cgroup and those around it, innermost first. A container may
    see its own as the root."""
    try:
        lines = _OWN_CGROUP.read_text(encoding="utf-8").splitlines()
    except OSError:
        lines = []
    for line in lines:
        _, controllers, path = [*line.split(":", 2), "", ""][:3]
        if controllers and "memory" not in controllers.split(","):
            continue
        root = _CGROUPS / "memory" if controllers else _CGROUPS
        inner = root / path.lstrip("/")
        for folder in (inner, *inner.parents):
            if folder == root or root in folder.parents:
                yield folder


_kills = KernelKills()
"""Kills since this process began."""

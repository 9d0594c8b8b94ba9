"""Host memory of this machine: how much is free, which processes hold it, and whether the kernel
ended a process to get some back.

Reads /proc and the cgroup of this process (version 1 or 2), so that a container's limit counts.
"""

from __future__ import annotations

import os
import re
from collections.abc import Iterator
from pathlib import Path
from typing import Literal

import psutil

from megatron_async_rl.watchdog.processes import RUN_ID_VARIABLE

Memory = Literal["host", "device"]
"""The memory that ran out: a machine's, or a GPU's own."""

GIB = 2**30
SHOWN = 5
COMMAND_SHOWN = 60
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
    limits = _cgroup_values("memory.max", "memory.limit_in_bytes")
    used = _cgroup_values("memory.current", "memory.usage_in_bytes")
    if limits and used:
        # Pages of files that were read a while ago are given back first.
        cached = _counts("memory.stat").get("inactive_file", 0)
        free = min(free, max(0, limits[0] - used[0] + cached))
    return free


def kernel_kills() -> int:
    """Processes that the kernel has ended for want of memory, in this container or, where it keeps
    no count of its own, on this machine. Only differences mean something."""
    for counts in (_counts("memory.events"), _counts("memory.oom_control"), _vmstat()):
        if "oom_kill" in counts:
            return counts["oom_kill"]
    return 0


def kernel_kills_in_words() -> str:
    """Processes that the kernel has ended for want of memory since this process began, with the
    state of memory now; empty where there were none."""
    kills = kernel_kills() - _KILLS_BEFORE
    if kills <= 0:
        return ""
    count = "a process" if kills == 1 else f"{kills} processes"
    return (
        f"Since {psutil.Process().name()} (pid {os.getpid()}) began, the kernel has ended {count} of"
        f" this machine or container for want of host memory; {state_in_words()}"
    )


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
    found = []
    for folder in _folders():
        for name in (second, first):
            try:
                text = (folder / name).read_text(encoding="utf-8").strip()
            except OSError:
                continue
            if text.isdigit():
                found.append(int(text))
    return found


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


_KILLS_BEFORE = kernel_kills()
"""When this process began."""

"""Processes of a run on this machine. Each has the run's id in its environment, wherever it is in
the process tree, and no process of an engine outlives the actor that started it.

vLLM runs its scheduler in a child process and, with tensor parallelism, the model in children of
the scheduler. They do not notice when their parent is killed, and would keep their cores or GPUs
forever. The actor therefore writes its process id into the environment. Each child requests from
the kernel to be ended with its parent, and writes its own id for its own children. A child needs
seconds until it does so; if its parent is killed before, it ends itself."""

from __future__ import annotations

import contextlib
import ctypes
import gc
import os
import signal
from collections.abc import Collection
from pathlib import Path

import psutil

from megatron_async_rl.watchdog import preloaded

PARENT = preloaded.PARENT
"""Environment variable: process id of the engine actor, or of a process of vLLM that descends from
it."""
RUN_ID_VARIABLE = "MEGATRON_ASYNC_RL_RUN_ID"
OBJECTS_BETWEEN_COLLECTIONS = 100_000
"""Far more than the objects that ten thousand groups in flight create and free during a batch;
Python's default threshold is 700."""

STOPPED = (psutil.STATUS_STOPPED, psutil.STATUS_TRACING_STOP)
_GONE = (psutil.NoSuchProcess, psutil.AccessDenied, psutil.ZombieProcess)
_CLOCK_SLACK_S = 2.0
_PR_SET_PDEATHSIG = 1


def of_run(run_id: str) -> list[psutil.Process]:
    """Return all processes of this user with the run's id, except this one."""

    def belongs(process: psutil.Process) -> bool:
        try:
            # Unlike a process tree, the environment survives reparenting.
            return process.pid != os.getpid() and process.environ().get(RUN_ID_VARIABLE) == run_id
        except _GONE:
            return False

    return [process for process in psutil.process_iter() if belongs(process)]


def descendants(of: Collection[int] | None = None) -> set[int]:
    """Return the ids of all processes that the processes `of` (None: this one) started, directly or
    not. A fork of the server of engines (`preloaded`) counts as started by its requester."""
    roots = {os.getpid()} if of is None else set(of)
    found = _children(roots)
    # The kernel lists these as children of the fork server.
    forked = preloaded.started_by(preloaded.address_of("engines"), roots | found)
    return found | forked | _children(forked)


def _children(pids: Collection[int]) -> set[int]:
    """Return what the kernel lists as children of these processes, directly or not."""
    found: set[int] = set()
    for pid in pids:
        with contextlib.suppress(psutil.NoSuchProcess):
            found |= {child.pid for child in psutil.Process(pid).children(recursive=True)}
    return found


def ended_ray_servers() -> list[str]:
    """Describe each of Ray's servers that this process started and that has ended, one sentence
    each."""
    from ray._private import worker

    node = worker._global_node  # None without Ray; has no processes if the run joined a cluster
    return [
        f"Ray's {name} (pid {server.pid}) has ended{_by_signal(server.returncode)}."
        for name, server in (node.dead_processes() if node is not None else ())
    ]


def ended_servers() -> list[str]:
    """Describe each server that has ended and with which other processes end, one sentence each:
    Ray's servers, and the fork server of engines."""
    found = ended_ray_servers()
    if preloaded.has_ended("engines"):
        found.append("The fork server of engines has ended, and with it the processes it forked.")
    return found


def _by_signal(code: int | None) -> str:
    return f" by {signal.Signals(-code).name}" if code is not None and code < 0 else ""


def condition(pid: int, written_at: float | None = None) -> str | None:
    """Return the kernel's state of the process: `sleeping`, `stopped`, `disk-sleep`, ...; None if
    it has ended.

    `written_at`: Unix seconds at which it was certainly alive; a process that began later only has
    the same id.
    """
    try:
        process = psutil.Process(pid)
        # The id was given to another process.
        if written_at is not None and process.create_time() > written_at + _CLOCK_SLACK_S:
            return None
        status = str(process.status())
    except psutil.Error:
        return None
    return None if status == psutil.STATUS_ZOMBIE else status


def handles(pid: int, number: signal.Signals) -> bool:
    """Return True if the process has a handler for the signal, which would otherwise end it."""
    try:
        status = Path(f"/proc/{pid}/status").read_text(encoding="utf-8", errors="replace")
    except OSError:
        return False
    caught = next(
        (line.split()[1] for line in status.splitlines() if line.startswith("SigCgt:")), "0"
    )
    # The kernel numbers signals from 1, and the mask's bits from 0.
    return bool(int(caught, 16) >> (number - 1) & 1)


def die_with_parent() -> None:
    """Bind this process's lifetime to the process that `PARENT` names. A child of that process gets
    SIGKILL when it ends. A later descendant, and the process itself, gets SIGKILL at once if the
    named process has ended, and nothing otherwise. Without `PARENT` the call has no effect.

    Linux only, where vLLM runs. The kernel watches the thread that started the child: the actor's
    event loop, or the main thread of vLLM's scheduler process.
    """
    named = os.environ.get(PARENT)
    if named is None:
        return
    parent = int(named)
    # prctl only binds to the real parent.
    if os.getppid() == parent:
        if ctypes.CDLL(None, use_errno=True).prctl(_PR_SET_PDEATHSIG, signal.SIGKILL) != 0:
            raise OSError(ctypes.get_errno(), "prctl(PR_SET_PDEATHSIG) was refused")
        os.environ[PARENT] = str(os.getpid())
    # The parent may have ended before prctl took effect.
    if os.getppid() != parent and condition(parent) is None:
        os.kill(os.getpid(), signal.SIGKILL)


def collect_rarely() -> None:
    """Exclude the objects that this process holds so far, and most objects in flight, from garbage
    collection.

    A library's import and start create a million objects that stay. Requests, samples and arrays
    are many, live long, and are freed without the collector. With 10,000 groups in flight, repeated
    traversals of all of them take a fifth of the controller's time, and two fifths of an engine
    actor's. Garbage that only the collector can free is still freed, later."""
    # Frozen objects are never freed, so garbage must be collected first.
    gc.collect()
    gc.freeze()
    gc.set_threshold(OBJECTS_BETWEEN_COLLECTIONS)

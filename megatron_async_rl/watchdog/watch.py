"""The state of this process, in a small file that others can read when it no longer answers; and
waits with a name and a deadline, so that a stuck run reports who waited how long for what.

`start` gives the process a heartbeat: a daemon thread replaces `RUN/watch/<name>.json` every second
with the process's waits, its progress and the figures that its parts provide. SIGUSR1 writes the
stacks of all its threads to `RUN/watch/<name>.stack`, even if the interpreter is stuck in one call.

Invariants:
- waits, marks and facts may be registered in any process and from any thread, before `start` and
  without it;
- registering uses no lock and no file, so it is cheap enough for the hottest loop;
- a fact that raises is shown as its exception; nothing here can fail the process;
- a process that ends by itself removes its state file, so a file without its process means that the
  process was killed;
- a wait with a deadline ends with its result, with the failure of the awaited call, or with
  `DeadlineExceeded`. A timeout that the awaited call itself raises before the deadline is raised
  unchanged.
"""

from __future__ import annotations

import asyncio
import atexit
import faulthandler
import itertools
import json
import logging
import multiprocessing
import os
import signal
import socket
import threading
import time
from collections.abc import Awaitable, Callable, Iterable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Literal, NamedTuple

from megatron_async_rl.watchdog.host_memory import (
    MemoryKind,
    ended_by_ray,
    kernel_shortage,
    look_for_kernel_kills,
)
from megatron_async_rl.watchdog.lost_actors import death_reason, named_pids, was_here
from megatron_async_rl.watchdog.processes import condition, ended_ray_servers, ended_servers
from megatron_async_rl.watchdog.progress_monitor import FOLDER, ProgressMonitor, write_whole

BEAT_S = 1.0
INHERITED = "MEGATRON_ASYNC_RL_WATCH"
"""Environment variable: run directory and name of the watched process, for the processes that it
starts."""

STOP = "stop"
"""File in the run's directory that makes rank 0 stop after the step."""
ENGINES = "engines"
"""File in the run's directory with the number of training engines that the controller should
run."""
ActivityKind = Literal["wait", "work", "phase"]
_CLOCK_SLACK = 0.98
"""Timers fire slightly early; a timeout this close to the deadline counts as the deadline."""


class Activity(NamedTuple):
    """Activity of a process. `wait`: blocked on another process; `work`: busy itself; `phase`:
    busy, and permitted to show no progress until its deadline."""

    kind: ActivityKind
    name: str
    started: float
    """Monotonic seconds."""
    deadline_s: float | None


@dataclass
class _WatchedProcess:
    activities: dict[int, Activity] = field(default_factory=dict)
    marks: dict[str, tuple[int, float]] = field(default_factory=dict)
    facts: dict[str, Callable[[], Any]] = field(default_factory=dict)


_log = logging.getLogger(__name__)
_MAIN = -1
_numbers = itertools.count()
_process = _WatchedProcess()
_beating: _HeartbeatThread | None = None
_process_name: str | None = None


class doing:
    """Show that this process does `name` while the block runs. Interrupts nothing."""

    # Not a generator, which costs three times as much: this is entered for every report of an
    # engine.
    __slots__ = ("_deadline_s", "_kind", "_name", "_number")

    def __init__(self, kind: ActivityKind, name: str, deadline_s: float | None = None) -> None:
        self._kind, self._name, self._deadline_s = kind, name, deadline_s

    def __enter__(self) -> None:
        # `next` on a count is atomic, so no lock is needed.
        self._number = next(_numbers)
        _process.activities[self._number] = Activity(
            self._kind, self._name, time.monotonic(), self._deadline_s
        )

    def __exit__(self, *raised: object) -> None:
        _process.activities.pop(self._number, None)
        if self._kind == "phase":
            progress("phases")


def working(name: str) -> doing:
    """`with working("train step"):` shows work that may block inside code of others, such as a
    collective."""
    return doing("work", name)


def phase(name: str, allowed_s: float) -> doing:
    """`with phase("building the model", 600):` permits the whole run to be without progress for
    `allowed_s` seconds of it."""
    return doing("phase", name, allowed_s)


def enter(kind: ActivityKind, name: str) -> None:
    """Record that the main loop of this process does `name` until the next call. Each call is
    progress."""
    _process.activities[_MAIN] = Activity(kind, name, time.monotonic(), None)
    progress("loop")


def progress(mark: str, n: int = 1) -> None:
    """Add `n` to the count of `mark`, such as samples. Any mark that grows in any process is
    progress of the run."""
    # A new pair instead of a change of the old one, so that readers see either whole.
    count, _ = _process.marks.get(mark, (0, 0.0))
    _process.marks[mark] = (count + n, time.monotonic())


def fact(key: str, read: Callable[[], Any]) -> None:
    """Show `read()`, a number or a short text, under `key` in every state of this process. Another
    thread calls it."""
    _process.facts[key] = read


def start(run_dir: Path, name: str, *, end_after_s: float | None = None) -> None:
    """Begin the heartbeat of this process as `name`, such as `rank 0`; later calls in the same
    process do nothing.

    `end_after_s`: this process writes its stacks and ends itself when the run has not moved for so
    long and no launcher can notice it. Such a process also requests a stop after the step when this
    machine's launcher was killed.
    """
    global _beating
    # A fork inherits the object but not the thread.
    if _beating is not None and _beating.pid == os.getpid():
        return
    heart = _HeartbeatThread(run_dir.resolve() / FOLDER, name, end_after_s)
    # Not earlier: processes that this one starts must not join a folder that cannot be used.
    os.environ[INHERITED] = f"{run_dir.resolve()}\n{name}"
    _beating = heart
    _beating.start()


def stop() -> None:
    """End the heartbeat of a process that outlives the run, and remove its state file."""
    global _beating
    if _beating is not None:
        _beating.leave()
        _beating = None


def join(name: str | None = None) -> None:
    """Begin the heartbeat of a process that a watched process started, directly or through Ray. For
    other processes the call has no effect.

    Without a `name` it is called by its parent's name and its own, and a process that
    `multiprocessing` did not start is not changed.
    """
    inherited = os.environ.get(INHERITED)
    own = multiprocessing.current_process().name
    if inherited is None or (name is None and own == "MainProcess"):
        return
    run_dir, _, parent = inherited.partition("\n")
    start(Path(run_dir), name or f"{parent} {own}")


def state() -> dict[str, Any]:
    """Return the content of the state file except the name; see `progress_monitor.ProcessState`."""
    now = time.monotonic()
    activities = (
        _process.activities.copy().values()
    )  # `copy` is atomic for the other threads, unlike iteration
    return {
        "pid": os.getpid(),
        "host": socket.gethostname(),
        "time": time.time(),
        "activities": [
            {
                "kind": one.kind,
                "name": one.name,
                "since_s": round(now - one.started, 1),
                "deadline_s": one.deadline_s,
            }
            for one in activities
        ],
        "progress": {
            mark: [count, round(now - grown, 1)]
            for mark, (count, grown) in _process.marks.copy().items()
        },
        "facts": {key: _read(read) for key, read in _process.facts.copy().items()},
    }


def _read(read: Callable[[], Any]) -> Any:
    try:
        value = read()
    except Exception as error:  # noqa: BLE001 - a fact is read while its owner changes it; it must not end the heartbeat
        return f"{type(error).__name__}: {error}"
    return value if isinstance(value, int | float | str | None) else str(value)


class _HeartbeatThread(threading.Thread):
    """Thread of `start`."""

    def __init__(self, folder: Path, name: str, end_after_s: float | None) -> None:
        super().__init__(name="watch", daemon=True)
        self.pid = os.getpid()
        self._process_name = name
        self._path = folder / f"{name.replace('/', '_')}.json"
        self._end_after_s = end_after_s
        self._stopped = False
        self._writing = threading.Lock()
        folder.mkdir(parents=True, exist_ok=True)
        # Append mode, so that a process that requests a stack may empty the file first.
        flags = os.O_WRONLY | os.O_CREAT | os.O_TRUNC | os.O_APPEND
        self._stack = os.open(self._path.with_suffix(".stack"), flags, 0o644)
        # In C, so that it answers even if the interpreter is stuck in one call.
        faulthandler.register(signal.SIGUSR1, file=self._stack, all_threads=True, chain=False)
        atexit.register(self.leave)
        self._monitor = ProgressMonitor(folder.parent)
        self._launcher: int | None = None
        self._timed = False
        self._shown = True
        # The first state is written before `start` returns, so an unusable folder is noticed.
        self._beat()

    def run(self) -> None:
        while not self._stopped:
            time.sleep(BEAT_S)
            self._beat()

    def _beat(self) -> None:
        with self._writing:
            if self._stopped:
                return
            try:
                write_whole(self._path, json.dumps({"name": self._process_name, **state()}))
            except OSError as error:
                # The run itself reports a full disk when it writes a file that it needs.
                if self._shown:
                    _log.warning("the state of %s was not written: %s", self._process_name, error)
                self._shown = False
            else:
                self._shown = True
        if self._end_after_s is not None:
            self._put_off_the_end(self._monitor, self._end_after_s)
            self._stop_without_launcher()

    def _put_off_the_end(self, monitor: ProgressMonitor, end_after_s: float) -> None:
        """Restart a timer outside the interpreter while the run moves. It also ends a process that
        never returns to Python."""
        monitor.look()
        # The launcher ends a stalled run with a full snapshot, which a timer cannot take.
        if monitor.launcher_watches:
            faulthandler.cancel_dump_traceback_later()
            self._timed = False
            return
        moves = monitor.still_s < 2 * BEAT_S or monitor.allowed_s > 0
        # Without a timer, the launcher died while the run did not move: that time counts.
        if moves or not self._timed:
            left_s = end_after_s if moves else max(BEAT_S, end_after_s - monitor.still_s)
            faulthandler.dump_traceback_later(
                left_s + monitor.allowed_s, exit=True, file=self._stack
            )
            self._timed = True

    def _stop_without_launcher(self) -> None:
        """Request a stop after the step, once, if the launcher of this machine was killed, so that
        its state file still exists."""
        here = (
            state
            for state in self._monitor.states
            if state.is_launcher and state.host == socket.gethostname()
        )
        for state in here:
            if condition(state.pid, state.time) is not None:
                self._launcher = state.pid
            elif state.pid == self._launcher:
                self._launcher = None
                _log.warning(
                    "%s (pid %d) was killed: the run stops after this step", state.name, state.pid
                )
                (self._path.parent.parent / STOP).touch()

    def leave(self) -> None:
        if os.getpid() != self.pid:  # a fork inherits the exit handlers, but not the thread
            return
        with self._writing:
            self._stopped = True
        faulthandler.cancel_dump_traceback_later()
        self._path.unlink(missing_ok=True)


class DeadlineExceeded(TimeoutError):
    """`who` waited `waited_s` seconds for `name`, which did not come."""

    def __init__(self, who: str, name: str, waited_s: float) -> None:
        super().__init__(f"{who} waited {waited_s:.1f} s for {name}, which did not come")
        self.who = who
        self.name = name
        self.waited_s = waited_s

    def __reduce__(self) -> tuple[Any, ...]:
        # An exception pickles its message alone, which cannot restore the fields.
        return (type(self), (self.who, self.name, self.waited_s), self.__dict__)


class ProcessDied(RuntimeError):
    """The process that should answer has ended; its own failure has the details. `out_of_memory`:
    the kind of memory whose shortage ended it, if known. `outside`: something else ended it, such
    as a preemption, or a shortage of memory that another process may have caused."""

    # events.py reads this and reports the other process's own failure instead.
    consequence = True
    out_of_memory: MemoryKind | None = None

    def __init__(self, reason: str, *, outside: bool = False) -> None:
        super().__init__(reason)
        self.outside = outside


class ServerEnded(ProcessDied):
    """A server that the run started and that all its processes need has ended."""

    consequence = False


class KilledForMemory(ProcessDied):
    """Ray or the kernel ended the process that should answer, because host memory ran out."""

    # A process that was killed for memory cannot report it, so this error is the cause.
    consequence = False
    out_of_memory = "host"


def _ended(error: BaseException, waited: str = "") -> ProcessDied:
    """Convert Ray's error about a lost actor into an error of this package."""
    import ray

    if isinstance(error, ray.exceptions.OutOfMemoryError):
        # Another process than the killed one may have filled the memory.
        return KilledForMemory(waited + ended_by_ray(str(error)), outside=True)
    reason = waited + death_reason(str(error))
    # This machine's kernel does not end processes of another machine.
    kernel = kernel_shortage(named_pids(str(error))) if was_here(str(error)) else None
    # A possible kill is mentioned, but does not change the kind of failure.
    if kernel is not None and kernel.certain:
        return KilledForMemory(f"{reason} {kernel.message}", outside=True)
    # The servers of another machine are not visible here.
    servers = ended_servers() if was_here(str(error)) else []
    reason = " ".join([reason, *([kernel.message] if kernel is not None else []), *servers])
    return ProcessDied(reason, outside=bool(getattr(error, "preempted", False)))


def name_this_process(name: str) -> None:
    """Set the name of this process in messages, such as `rank 0`, `engine 1` or `controller`."""
    global _process_name
    _process_name = name


def this_process() -> str:
    return _process_name if _process_name is not None else f"process {os.getpid()}"


@contextmanager
def waiting(name: str, timeout_s: float) -> Iterator[None]:
    """Name the deadline of a blocking call that has its own `timeout_s`, such as
    `future.result(timeout_s)`.

    This does not interrupt the call. Raises DeadlineExceeded instead of the call's TimeoutError;
    any other error gets a note about the wait. The state of this process shows the wait while it
    lasts.
    """
    started = time.monotonic()
    try:
        # Registered before the call, so that a snapshot taken meanwhile shows the wait.
        with doing("wait", name, timeout_s):
            yield
    except DeadlineExceeded:
        raise
    except Exception as error:
        waited = time.monotonic() - started
        # An earlier timeout is the call's own, not this deadline.
        if isinstance(error, TimeoutError) and waited >= _CLOCK_SLACK * timeout_s:
            raise DeadlineExceeded(this_process(), name, waited) from error
        error.add_note(f"{this_process()} had waited {waited:.1f} s for {name}")
        raise


async def await_named[Result](name: str, awaitable: Awaitable[Result], timeout_s: float) -> Result:
    """Wait for an awaitable, at most `timeout_s` seconds. On the deadline, cancel it and raise
    DeadlineExceeded."""
    with waiting(name, timeout_s):
        return await asyncio.wait_for(awaitable, timeout_s)


def ray_get(ref: Any, name: str, timeout_s: float) -> Any:
    """Return `ray.get` of one reference or a list of them. Raises DeadlineExceeded after
    `timeout_s` seconds.

    Raises the remote task's own exception, and ProcessDied if its process has ended.
    """
    import ray

    look_for_kernel_kills()
    # Ray notices the end of its own servers after 15 to 60 s.
    if ended := ended_ray_servers():
        raise ServerEnded(f"{this_process()} needs {name}. {' '.join(ended)}", outside=True)
    with waiting(name, timeout_s):
        try:
            return ray.get(ref, timeout=timeout_s)
        except ray.exceptions.RayTaskError as error:
            # Without the context, which repeats the remote traceback.
            raise remote_cause(error) from None
        except (ray.exceptions.ActorDiedError, ray.exceptions.OutOfMemoryError) as error:
            waited = f"{this_process()} waited for {name}, and the process that should answer is"
            raise _ended(error, f"{waited} dead: ") from None


async def answer_of(call: Any) -> Any:
    """Return the answer of an actor. Raises its own exceptions unchanged, and ProcessDied if it has
    ended."""
    import ray

    look_for_kernel_kills()
    try:
        return await call
    except (ray.exceptions.ActorDiedError, ray.exceptions.OutOfMemoryError) as error:
        raise _ended(error) from None
    except Exception as error:  # noqa: BLE001 - raised again, unwrapped
        raise remote_cause(error) from None


def remote_cause(error: BaseException) -> BaseException:
    """Return the exception that a Ray task raised, without Ray's wrappers; any other error is
    returned unchanged.

    A wrapper's own text contains the remote tracebacks, hundreds of lines, which are also in the
    remote process's log.
    """
    while isinstance(cause := getattr(error, "cause", None), BaseException):
        error = cause
    return error


async def cancel_all(works: Iterable[asyncio.Future[Any]]) -> None:
    """Cancel `works` and wait until all have ended. Cancels repeatedly, because a library may lose
    a cancellation that arrives together with its result, as Python's `wait_for` did before 3.12."""
    left = set(works)
    while left:
        for work in left:
            work.cancel()
        _, left = await asyncio.wait(left, timeout=0.5)

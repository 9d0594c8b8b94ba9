"""Waits with a name and a deadline, so that a stuck run reports who waited how long for what.

Invariant: a wait through this module ends with its result, with the failure of the awaited call, or
with `DeadlineExceeded`. A timeout that the awaited call itself raises before the deadline is raised
unchanged.
"""

from __future__ import annotations

import asyncio
import os
import re
import time
from collections.abc import Awaitable, Iterable, Iterator
from contextlib import contextmanager
from typing import Any

import psutil

from megatron_async_rl.watchdog import watch
from megatron_async_rl.watchdog.host_memory import (
    MemoryKind,
    ended_by_ray,
    kernel_shortage,
    look_for_kernel_kills,
)

_process_name: str | None = None
_CLOCK_SLACK = 0.98
"""Timers fire slightly early; a timeout this close to the deadline counts as the deadline."""


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
    kernel = kernel_shortage(_pids(str(error))) if _was_here(str(error)) else None
    # A possible kill is mentioned, but does not change the kind of failure.
    if kernel is not None and kernel.certain:
        return KilledForMemory(f"{reason} {kernel.message}", outside=True)
    reason += f" {kernel.message}" if kernel is not None else ""
    return ProcessDied(reason, outside=bool(getattr(error, "preempted", False)))


def _pids(text: str) -> list[int]:
    """Return the process that Ray's text names, if it names one."""
    return [int(pid) for pid in re.findall(r"^\s*pid: (\d+)$", text, re.MULTILINE)]


def _was_here(text: str) -> bool:
    """Return False if Ray's text names another machine's address."""
    named = re.search(r"^\s*ip: (\S+)$", text, re.MULTILINE)
    addresses = (one.address for here in psutil.net_if_addrs().values() for one in here)
    # Without an address, assume that the process was here, as on one machine.
    return named is None or named[1] in addresses


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
    any other error gets a note about the wait. The state of this process (watchdog/watch.py) shows
    the wait as long as it lasts.
    """
    started = time.monotonic()
    try:
        # Registered before the call, so that a snapshot taken meanwhile shows the wait.
        with watch.doing("wait", name, timeout_s):
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
    with waiting(name, timeout_s):
        try:
            return ray.get(ref, timeout=timeout_s)
        except ray.exceptions.RayTaskError as error:
            # Without the context, which repeats the remote traceback.
            raise remote_cause(error) from None
        except (ray.exceptions.ActorDiedError, ray.exceptions.OutOfMemoryError) as error:
            waited = (
                f"{this_process()} waited for {name}, and the process that should answer is dead: "
            )
            raise _ended(error, waited) from None


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


def death_reason(text: str) -> str:
    """Return the name of the process, and Ray's reason, from a text of a dozen lines. Of the three
    causes that Ray guesses, two are impossible here."""
    lines = [line.strip() for line in text.splitlines() if line.strip()]
    about = dict(
        line.split(": ", 1) for line in lines if re.match(r"(?:class_name|name|pid): ", line)
    )
    who = about.get("name") or about.get("class_name", "an actor")
    reason, guesses, _ = lines[-1].partition(" Some common causes include:")
    seen = (
        " Unless it was killed on purpose, `dmesg` shows whether the kernel did, for lack of"
        " memory." * bool(guesses)
    )
    return f"{who} (pid {about.get('pid', 'unknown')}). {reason}{seen}"


async def cancel_all(works: Iterable[asyncio.Future[Any]]) -> None:
    """Cancel `works` and wait until all have ended. Cancels repeatedly, because a library may lose
    a cancellation that arrives together with its result, as Python's `wait_for` did before 3.12."""
    left = set(works)
    while left:
        for work in left:
            work.cancel()
        _, left = await asyncio.wait(left, timeout=0.5)

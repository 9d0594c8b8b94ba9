"""One process that calls a reward, as the engine's event loop sees it, and its calls.

Invariants:
- every call ends within the time limit of the moment it was handed over and a few seconds, whatever
  the reward does: a plain reward that does not answer is killed, for a reward that holds the
  interpreter lock cannot be asked to stop; an `async` reward is requested to cancel the call, and
  killed if it does not confirm;
- a limit on what a reward computes is one on processor time, so a loaded machine makes no right
  answer wrong; a reply that came in time counts, however late the event loop reads it;
- whatever way a process ends, all it started is killed with it, in whatever session: its parent, a
  subreaper (isolation/sandboxed.py), adopts what it leaves behind;
- only what certainly is the fault of one response is its error; where several were worked on, each
  is a suspect, and the owner tries them one by one.
"""

from __future__ import annotations

import asyncio
import contextlib
import json
import math
import os
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import islice
from typing import Any, Protocol, cast

import psutil

from megatron_async_rl.rollout.isolation.sandboxed import keep
from megatron_async_rl.rollout.rewards.registry import RewardItem
from megatron_async_rl.rollout.rewards.worker import LENGTH, MAIN, Scored, encode_call
from megatron_async_rl.watchdog import watch
from megatron_async_rl.watchdog.processes import PARENT

START_S = 300.0
"""Longest time for a process to import the reward."""
EXIT_S = 1.0
"""Grace for a process that closed its socket to end, so that its end can be reported."""
CANCEL_S = 5.0
"""Longest time for a process to say that it cancelled a call: after it, its event loop is stuck."""

POLL_S = 0.01
READ_S = 0.1
"""Time for the event loop to read what came while it was busy."""
SHOW_S = 0.2
"""Time for a process to write where it stands."""
KEEPER_S = 5.0
"""Longest time for a subreaper to end what is left; then it is killed."""
KEEP = (
    "import json, os, signal, sys; sys.path[:] = json.loads(sys.argv[1])['path'];"
    f" from {keep.__module__} import keep;"
    f" os.environ[{PARENT!r}] = str(keep((signal.SIGUSR1,)));"
)
"""Beginning of the program: the rest runs in a child."""


class Job:
    """A response that waits for its reward, or a group of them. `alone`: it is a suspect, so no
    other may be in the process with it."""

    def __init__(self, items: Sequence[RewardItem]) -> None:
        self.items = items
        self.alone = False
        self.result: asyncio.Future[Sequence[Scored]] = asyncio.get_running_loop().create_future()

    def finish(self, scored: Sequence[Scored]) -> None:
        if not self.result.done():
            self.result.set_result(scored)
            watch.progress("rewards")

    def fail(self, scored: Scored) -> None:
        """All of them got no reward, for one reason."""
        self.finish([scored] * len(self.items))


@dataclass(frozen=True, kw_only=True)
class RewardLimits:
    """The reward of a process and its limits."""

    name: str
    key: str
    settings: dict[str, Any]
    concurrency: int
    """Most calls of an `async` reward at a time."""
    batch: int
    """Most responses of one call of a reward that takes lists."""
    timeout_s: float
    cpu_limit_s: float | None
    memory_mib: int | None

    @property
    def timed_out(self) -> Scored:
        error = f"no reward within rollout.reward.timeout_s: {self.timeout_s:g}"
        return Scored(reward=0.0, error=error, timed_out=True)


class RewardOwner(Protocol):
    def on_free(self, process: RewardProcess) -> None:
        """The process can take a call."""

    def on_end(self, process: RewardProcess, how: str) -> None:
        """The process has ended."""

    def suspect(self, jobs: Sequence[Job]) -> None:
        """One of these is at fault, and it is not known which."""


class _RewardCall:
    def __init__(self, jobs: Sequence[Job], activity: watch.doing) -> None:
        self.jobs = jobs
        self.activity = activity
        self.timer: asyncio.TimerHandle | None = None
        self.deadline = self.cpu_limit_s = 0.0
        self.over = self.cancelled = False


class RewardProcess(asyncio.Protocol):
    """A process and its socket. Raises OSError where it cannot be started."""

    def __init__(self, owner: RewardOwner, called: RewardLimits) -> None:
        self.called = called
        self.ready = self.asynchronous = self.batched = False
        self.calls: dict[int, _RewardCall] = {}
        self._owner = owner
        self._worker = self._numbered = 0
        self._received = bytearray()
        self._start_failure: str | None = None
        self._killed = False
        self._start_timer: asyncio.TimerHandle | None = None
        self._transport: asyncio.WriteTransport | None = None
        self._loop = asyncio.get_running_loop()

        local, remote = socket.socketpair()
        settings = {
            "name": called.name,
            "key": called.key,
            "settings": called.settings,
            "descriptor": remote.fileno(),
            "memory_mib": called.memory_mib,
            "timeout_s": called.timeout_s,
            "path": sys.path,
        }
        try:
            self._process = subprocess.Popen(
                [sys.executable, "-c", KEEP + MAIN, json.dumps(settings)],
                stdin=subprocess.DEVNULL,
                pass_fds=[remote.fileno()],
                env={**os.environ, PARENT: str(os.getpid())},
                # A group of its own: Ctrl-C is for the launcher to answer.
                start_new_session=True,
            )
        except OSError:
            local.close()
            raise
        finally:
            remote.close()
        self._tasks: set[asyncio.Future[Any]] = {
            asyncio.ensure_future(self._loop.create_connection(lambda: self, sock=local))
        }

    @property
    def pid(self) -> int:
        """Number of the process that calls the reward, once it is ready."""
        return self._worker

    @property
    def free(self) -> bool:
        """True if the process can take a call now."""
        works_alone = any(job.alone for call in self.calls.values() for job in call.jobs)
        room = len(self.calls) < (self.called.concurrency if self.asynchronous else 1)
        return self.ready and not self._killed and room and not works_alone

    def take(self, jobs: Sequence[Job]) -> None:
        assert self._transport is not None
        items = [item for job in jobs for item in job.items]
        first = items[0].prompt.id
        others = f" and {len(items) - 1} more" if len(items) > 1 else ""
        timeout_s, cpu_limit_s = self.called.timeout_s, self.called.cpu_limit_s
        activity = watch.doing(
            "work",
            f"the reward of a response to prompt {first}{others}, {self.called.name}",
            timeout_s,
        )
        call = _RewardCall(jobs, activity)
        self._numbered += 1
        self.calls[self._numbered] = call
        activity.__enter__()
        call.deadline = self._loop.time() + timeout_s
        if cpu_limit_s is not None:
            call.cpu_limit_s = self._cpu_s() + cpu_limit_s
            timeout_s = min(timeout_s, cpu_limit_s)
        self._set_timer(self._numbered, timeout_s)
        self._transport.write(encode_call(self._numbered, items))

    def close(self) -> None:
        for call in self.calls.values():
            for job in call.jobs:
                job.result.cancel()
        self._kill()
        self._reap()

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        # No `isinstance`: the transports of uvloop, which Ray uses, are not asyncio's classes.
        self._transport = cast(asyncio.WriteTransport, transport)
        # From now, not from the start: while vLLM starts the loop may not run for minutes.
        self._start_timer = self._loop.call_later(START_S, self._did_not_start)

    def data_received(self, data: bytes) -> None:
        self._received += data
        while len(self._received) >= LENGTH.size:
            end = LENGTH.size + LENGTH.unpack_from(self._received)[0]
            if len(self._received) < end:
                return
            message = json.loads(self._received[LENGTH.size : end])
            del self._received[:end]
            # Output of a process from before it was killed comes too late.
            if not self._killed:
                self._on_message(message)

    def connection_lost(self, error: Exception | None) -> None:
        self._clear_timers()
        self._tasks.add(asyncio.ensure_future(self._see_off()))

    def _on_message(self, message: dict[str, Any]) -> None:
        if "failed" in message:
            self._start_failure = message["failed"]
            return

        if "ready" in message:
            assert self._start_timer is not None
            self._start_timer.cancel()
            self.asynchronous, self.batched = message["asynchronous"], message["batched"]
            self._worker = message["pid"]
            self.ready = True
        else:
            jobs = self._done(message["call"])
            if "scored" in message:
                scored = (Scored(reward=reward, error=error) for reward, error in message["scored"])
                for job in jobs:
                    job.finish(list(islice(scored, len(job.items))))
            elif "cancelled" in message:
                self._fail(jobs, self.called.timed_out)
            else:
                self._fail(jobs, Scored(reward=0.0, error=message["error"]))
        self._owner.on_free(self)

    def _did_not_start(self) -> None:
        self._start_failure = f"it was not imported within {START_S:g} s"
        self._kill()

    def _out_of_time(self, number: int) -> None:
        call, called = self.calls[number], self.called
        if not call.over:
            # The loop may have been busy until now, and the reply be there: uvloop runs timers
            # before it reads.
            call.over = True
            self._set_timer(number, READ_S)
        elif called.cpu_limit_s is not None:
            left_s = call.deadline - self._loop.time()
            cpu_left_s = call.cpu_limit_s - self._cpu_s()
            if left_s > 0 and cpu_left_s > 0:
                call.over = False
                self._set_timer(number, min(left_s, cpu_left_s))
                return
            scored = called.timed_out if cpu_left_s > 0 else Scored(reward=0.0)
            self._fail(self._done(number), scored)
            self._kill()
        elif self.asynchronous and not call.cancelled:
            assert self._transport is not None
            call.cancelled = True
            self._set_timer(number, CANCEL_S)
            self._transport.write(encode_call(number, None))
        else:
            self._fail_all(called.timed_out)
            self._show_and_kill()

    def _show_and_kill(self) -> None:
        """Has the process write where it stands into the engine's log, for which it needs a moment
        (rewards/worker.py). It is no longer waited for."""
        self._killed = True
        with contextlib.suppress(ProcessLookupError):
            os.kill(self._process.pid, signal.SIGUSR1)
        self._start_timer = self._loop.call_later(SHOW_S, self._kill)

    def _cpu_s(self) -> float:
        """Processor time of the process so far; without end once it is gone."""
        try:
            times = psutil.Process(self._worker).cpu_times()
        except psutil.Error:
            return math.inf
        return float(times.user + times.system)

    def _done(self, number: int) -> Sequence[Job]:
        call = self.calls.pop(number)
        if call.timer is not None:
            call.timer.cancel()
        call.activity.__exit__()
        return call.jobs

    def _fail(self, jobs: Sequence[Job], scored: Scored) -> None:
        if len(jobs) == 1:
            jobs[0].fail(scored)
        else:
            self._owner.suspect(jobs)

    def _fail_all(self, scored: Scored) -> None:
        self._fail([job for number in list(self.calls) for job in self._done(number)], scored)

    def _set_timer(self, number: int, seconds: float) -> None:
        call = self.calls[number]
        if call.timer is not None:
            call.timer.cancel()
        call.timer = self._loop.call_later(seconds, self._out_of_time, number)

    def _clear_timers(self) -> None:
        for timer in (self._start_timer, *(call.timer for call in self.calls.values())):
            if timer is not None:
                timer.cancel()

    def _kill(self) -> None:
        self._killed = True
        self._clear_timers()
        self._end_all()
        if self._transport is not None:
            # A daemon that the reward left behind may hold the other end open forever.
            self._transport.abort()

    def _end_all(self) -> None:
        """The process and all it started: the subreaper kills them.

        Only before `wait`: afterwards the number may be another process's.
        """
        if self._process.returncode is None:
            with contextlib.suppress(ProcessLookupError):
                os.kill(self._process.pid, signal.SIGTERM)

    def _reap(self) -> int:
        """Exit code of the subreaper, which is its child's."""
        if not self._ends_within(KEEPER_S) and self._process.returncode is None:
            with contextlib.suppress(ProcessLookupError):
                os.killpg(self._process.pid, signal.SIGKILL)
        return self._process.wait()

    async def _see_off(self) -> None:
        code = await self._loop.run_in_executor(None, self._exit_code)
        how = (
            f"was ended by {signal.Signals(-code).name}" if code < 0 else f"ended with code {code}"
        )
        self._fail_all(
            Scored(reward=0.0, error=f"the reward's process {how}; see the engine's log")
        )
        self._owner.on_end(self, self._start_failure or f"it {how}")

    def _exit_code(self) -> int:
        """Ends what is left of the process, after a grace in which it may say how it ended."""
        if not self._ends_within(EXIT_S):
            self._end_all()
        return self._reap()

    def _ends_within(self, seconds: float) -> bool:
        deadline = time.monotonic() + seconds
        while not (ended := self._has_ended()) and time.monotonic() < deadline:
            time.sleep(POLL_S)
        return ended

    def _has_ended(self) -> bool:
        """Leaves the process to `wait`: until then its group keeps its number."""
        try:
            flags = os.WEXITED | os.WNOHANG | os.WNOWAIT
            return os.waitid(os.P_PID, self._process.pid, flags) is not None
        except ChildProcessError:
            return True

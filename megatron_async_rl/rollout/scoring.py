"""Scores finished responses: trivial rewards on the engine's event loop, all others in processes.

Invariants:
- every call of `score` ends within the time limit of the moment a process took the response,
  whatever the reward does: a process that does not answer is killed, for a reward that holds the
  interpreter lock cannot be asked to stop;
- a limit on what a reward computes is one on processor time, so a loaded machine makes no right
  answer wrong; a reply that came in time counts, however late the event loop reads it;
- whatever way a process ends, all it started in its session is killed with it;
- a process that dies costs the one response it was working on; another takes its place;
- the event loop never waits for a process: to start, to answer or to end.

Processes start when responses wait for them, up to `rollout.reward.workers`; the first one with the
engine.
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
from collections import deque
from typing import Any, cast

import psutil

from megatron_async_rl.config.schema import RewardConfig
from megatron_async_rl.rollout.rewards.registry import Scored, built_in, load_reward, score
from megatron_async_rl.rollout.rewards.worker import LENGTH, MAIN, encode_request
from megatron_async_rl.samples import Prompt
from megatron_async_rl.watchdog import watch
from megatron_async_rl.watchdog.processes import PARENT

START_S = 300.0
"""Longest time for a process to import the reward."""
EXIT_S = 1.0
"""Grace for a process that closed its socket to end, so that it can be said how it ended."""

POLL_S = 0.01
READ_S = 0.1
"""Time for the event loop to read what came while it was busy."""
SHOW_S = 0.2
"""Time for a process to write where it stands."""


class WorkerStartError(RuntimeError):
    """A process for the reward did not start, or the reward could not be imported in it."""


class Scorer:
    """Used by one event loop. Call `start` first."""

    def __init__(self, settings: RewardConfig) -> None:
        self.name = settings.name
        found = built_in(settings.name)
        self.inline = found is not None and found.inline
        self._reward = load_reward(settings.name) if self.inline else None
        self._settings = settings
        limits = (settings.memory_mib, found.memory_mib if found is not None else None)
        self._memory_mib = min((limit for limit in limits if limit is not None), default=None)

        self.timeout_s = settings.timeout_s
        self.timed_out = Scored(
            reward=0.0, error=f"no reward within rollout.reward.timeout_s: {settings.timeout_s:g}"
        )
        self.cpu_limit_s = found.cpu_limit_s if found is not None else None

        self._waiting: deque[_Job] = deque()
        self._workers: set[_Worker] = set()
        self._idle: list[_Worker] = []
        self._first: asyncio.Future[None] | None = None
        self._closed = False

    def start(self) -> None:
        """Starts the first process, which imports the reward while the engine starts."""
        if not self.inline:
            self._first = asyncio.get_running_loop().create_future()
            self._hire()

    async def ready(self) -> None:
        """Returns when the first process can score. Raises WorkerStartError."""
        if self._first is not None:
            with watch.doing("wait", f"the reward {self.name} to be imported", START_S):
                await self._first

    def score_inline(self, prompt: Prompt, response: str) -> Scored:
        """At once; of a reward that is `inline`."""
        assert self._reward is not None
        return score(self._reward, prompt, response)

    async def score(self, prompt: Prompt, response: str) -> Scored:
        """Never raises for what the reward does: an exception, a value that is not a finite number,
        a time-out and the end of its process are errors of the response."""
        if self.inline:
            return self.score_inline(prompt, response)
        job = _Job(prompt, response)
        self._waiting.append(job)
        self._dispatch()
        return await job.result

    def close(self) -> None:
        """Ends the processes; scores that are still waited for are cancelled."""
        self._closed = True
        for job in self._waiting:
            job.result.cancel()
        for worker in self._workers:
            worker.close()

    def _dispatch(self) -> None:
        while self._waiting and self._idle:
            job = self._waiting.popleft()
            if not job.result.done():  # else whoever waited was cancelled
                self._idle.pop().take(job)
        starting = sum(not worker.ready for worker in self._workers)
        room = self._settings.workers - len(self._workers)
        for _ in range(min(room, len(self._waiting) - starting)):
            self._hire()

    def _hire(self) -> None:
        try:
            self._workers.add(_Worker(self, self.name, self._memory_mib))
        except OSError as error:  # no memory, process or file descriptor is left for it
            self._on_start_failure(str(error))

    def on_idle(self, worker: _Worker) -> None:
        if self._first is not None and not self._first.done():
            self._first.set_result(None)
        self._idle.append(worker)
        self._dispatch()

    def on_end(self, worker: _Worker, how: str) -> None:
        """The worker's process has ended."""
        self._workers.discard(worker)
        if worker in self._idle:
            self._idle.remove(worker)
        if self._closed:
            return
        if worker.ready:
            # Its successor imports the reward while nobody waits for it.
            self._hire()
            return

        self._on_start_failure(how)

    def _on_start_failure(self, how: str) -> None:
        """Another start would most likely fail too: nobody waits for it who need not."""
        reason = f"the reward's process did not start: {how}"
        if self._first is not None and not self._first.done():
            self._first.set_exception(WorkerStartError(reason))
        if not self._workers:
            while self._waiting:
                job = self._waiting.popleft()
                if not job.result.done():
                    job.result.set_result(Scored(reward=0.0, error=reason))


class _Job:
    def __init__(self, prompt: Prompt, response: str) -> None:
        self.prompt = prompt
        self.response = response
        self.result: asyncio.Future[Scored] = asyncio.get_running_loop().create_future()


class _Worker(asyncio.Protocol):
    """One process and its socket."""

    def __init__(self, scorer: Scorer, name: str, memory_mib: int | None) -> None:
        self.ready = False
        self._scorer = scorer
        self._job: _Job | None = None
        self._activity: watch.doing | None = None
        self._received = bytearray()
        self._start_failure: str | None = None
        self._killed = False
        self._over = False
        self._deadline = self._cpu_limit_s = 0.0
        self._transport: asyncio.WriteTransport | None = None
        self._loop = asyncio.get_running_loop()

        ours, theirs = socket.socketpair()
        settings = {
            "name": name,
            "descriptor": theirs.fileno(),
            "memory_mib": memory_mib,
            "path": sys.path,
        }
        try:
            self._process = subprocess.Popen(
                [sys.executable, "-c", MAIN, json.dumps(settings)],
                stdin=subprocess.DEVNULL,
                pass_fds=[theirs.fileno()],
                env={**os.environ, PARENT: str(os.getpid())},
                # A group of its own: Ctrl-C is for the launcher to answer, and what a reward
                # started is killed with it.
                start_new_session=True,
            )
        except OSError:
            ours.close()
            raise
        finally:
            theirs.close()
        self._timer: asyncio.TimerHandle | None = None
        self._tasks: set[asyncio.Future[Any]] = {
            asyncio.ensure_future(self._loop.create_connection(lambda: self, sock=ours))
        }

    def take(self, job: _Job) -> None:
        assert self._transport is not None
        timeout_s, cpu_limit_s = self._scorer.timeout_s, self._scorer.cpu_limit_s
        self._job, self._over = job, False
        self._activity = watch.doing(
            "work",
            f"the reward of a response to prompt {job.prompt.id}, {self._scorer.name}",
            timeout_s,
        )
        self._activity.__enter__()
        self._deadline = self._loop.time() + timeout_s
        if cpu_limit_s is not None:
            self._cpu_limit_s = self._cpu_s() + cpu_limit_s
            timeout_s = min(timeout_s, cpu_limit_s)
        self._set_timer(timeout_s)
        self._transport.write(encode_request(job.prompt, job.response))

    def close(self) -> None:
        if self._job is not None:
            self._job.result.cancel()
        self._kill()
        self._process.wait()

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        # No `isinstance`: the transports of uvloop, which Ray uses, are not asyncio's classes.
        self._transport = cast(asyncio.WriteTransport, transport)
        # From now, not from the start: while vLLM starts the loop may not run for minutes.
        self._set_timer(START_S)

    def data_received(self, data: bytes) -> None:
        self._received += data
        while len(self._received) >= LENGTH.size:
            end = LENGTH.size + LENGTH.unpack_from(self._received)[0]
            if len(self._received) < end:
                return
            message = json.loads(self._received[LENGTH.size : end])
            del self._received[:end]
            # What a process said before it was killed comes too late.
            if not self._killed:
                self._on_message(message)

    def connection_lost(self, error: Exception | None) -> None:
        self._set_timer(None)
        self._tasks.add(asyncio.ensure_future(self._see_off()))

    def _on_message(self, message: dict[str, Any]) -> None:
        if "failed" in message:
            self._start_failure = message["failed"]
            return

        self._set_timer(None)
        if "ready" in message:
            self.ready = True
        else:
            self._finish(Scored(reward=message["reward"], error=message["error"]))
        self._scorer.on_idle(self)

    def _out_of_time(self) -> None:
        if not self._over:
            # The loop may have been busy until now, and the reply be there: uvloop runs timers
            # before it reads.
            self._over = True
            self._set_timer(READ_S)
            return

        if self.ready and self._scorer.cpu_limit_s is not None:
            left_s = self._deadline - self._loop.time()
            cpu_left_s = self._cpu_limit_s - self._cpu_s()
            if left_s > 0 and cpu_left_s > 0:
                self._over = False
                self._set_timer(min(left_s, cpu_left_s))
                return
            self._finish(self._scorer.timed_out if cpu_left_s > 0 else Scored(reward=0.0))
        elif self.ready:
            self._finish(self._scorer.timed_out)
            self._show_and_kill()
            return
        else:
            self._start_failure = f"it was not imported within {START_S:g} s"
        self._kill()

    def _show_and_kill(self) -> None:
        """Has the process write where it stands into the engine's log, for which it needs a moment
        (rewards/worker.py). Nobody waits for it any more."""
        self._killed = True
        with contextlib.suppress(ProcessLookupError):
            os.kill(self._process.pid, signal.SIGUSR1)
        self._timer = self._loop.call_later(SHOW_S, self._kill)

    def _cpu_s(self) -> float:
        """Processor time of the process so far; without end once it is gone."""
        try:
            times = psutil.Process(self._process.pid).cpu_times()
        except psutil.Error:
            return math.inf
        return float(times.user + times.system)

    def _finish(self, scored: Scored) -> None:
        job, self._job = self._job, None
        if job is not None and not job.result.done():
            job.result.set_result(scored)
            watch.progress("rewards")
        if self._activity is not None:
            self._activity.__exit__()
            self._activity = None

    def _set_timer(self, seconds: float | None) -> None:
        if self._timer is not None:
            self._timer.cancel()
        self._timer = None if seconds is None else self._loop.call_later(seconds, self._out_of_time)

    def _kill(self) -> None:
        self._killed = True
        self._set_timer(None)
        self._kill_group()
        if self._transport is not None:
            # A daemon that the reward left behind may hold the other end open for ever.
            self._transport.abort()

    def _kill_group(self) -> None:
        """The process and all it started. SIGKILL: what holds the interpreter lock hears no other.

        Only before `wait`: afterwards the number may be another process's.
        """
        if self._process.returncode is None:
            with contextlib.suppress(ProcessLookupError):
                os.killpg(self._process.pid, signal.SIGKILL)

    async def _see_off(self) -> None:
        code = await self._loop.run_in_executor(None, self._exit_code)
        how = (
            f"was ended by {signal.Signals(-code).name}" if code < 0 else f"ended with code {code}"
        )
        self._finish(Scored(reward=0.0, error=f"the reward's process {how}; see the engine's log"))
        self._scorer.on_end(self, self._start_failure or f"it {how}")

    def _exit_code(self) -> int:
        """Ends what is left of the process, after a grace in which it may say how it ended."""
        grace_ends = time.monotonic() + EXIT_S
        while time.monotonic() < grace_ends and not self._has_ended():
            time.sleep(POLL_S)
        self._kill_group()
        return self._process.wait()

    def _has_ended(self) -> bool:
        """Leaves the process to `wait`: until then its group keeps its number."""
        try:
            flags = os.WEXITED | os.WNOHANG | os.WNOWAIT
            return os.waitid(os.P_PID, self._process.pid, flags) is not None
        except ChildProcessError:
            return True

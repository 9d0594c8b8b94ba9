"""Pool of the processes that call one reward, and queue of the responses that wait for it.

    Scorer --responses--> RewardPool --calls--> UserProcess ... (isolation/supervisor.py)

Invariants:
- a response fails only if no other response can have caused the failure. If a call with several
  responses fails, each of them becomes a suspect and is retried alone in a process;
- a process that ends is replaced immediately, so that its replacement has imported the reward when
  the next call needs it;
- the event loop never blocks on a process.

The first process starts with the engine. Others start on demand, up to `rollout.reward.workers`.
"""

from __future__ import annotations

import asyncio
import functools
import math
from collections import deque
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import islice
from typing import Any

from megatron_async_rl.rollout.isolation.supervisor import (
    START_S,
    OutOfProcessorTime,
    OutOfTime,
    Supervisor,
    UserCode,
    UserCodeError,
    UserCodeStartError,
    UserProcess,
    UserProcessEnded,
)
from megatron_async_rl.rollout.rewards.registry import RewardItem
from megatron_async_rl.rollout.rewards.worker import LOADER, Scored
from megatron_async_rl.watchdog import watch


class RewardJob:
    """One response, or one group, that waits for its reward. `alone`: true for a suspect, which may
    not share its process with another job."""

    def __init__(self, items: Sequence[RewardItem]) -> None:
        self.items = items
        self.alone = False
        self.result: asyncio.Future[Sequence[Scored]] = asyncio.get_running_loop().create_future()

    def finish(self, scored: Sequence[Scored]) -> None:
        # The future is already done if the waiting task was cancelled.
        if not self.result.done():
            self.result.set_result(scored)
            watch.progress("rewards")

    def fail(self, scored: Scored) -> None:
        """Finish every response of the job with the same failure."""
        self.finish([scored] * len(self.items))


@dataclass(frozen=True, kw_only=True)
class RewardLimits:
    """Name and settings of the reward that a pool calls, and the limits of its calls."""

    name: str
    key: str
    settings: dict[str, Any]
    concurrency: int
    """Maximum pending calls of an `async` reward in one process."""
    batch: int
    """Maximum responses per call of a reward that takes lists."""
    timeout_s: float
    cpu_limit_s: float | None
    memory_mib: int | None

    def failure(self, error: UserCodeError) -> Scored:
        """Return the result of a response whose call failed."""
        match error:
            case OutOfTime():
                what = f"no reward within rollout.reward.timeout_s: {self.timeout_s:g}"
                return Scored(reward=0.0, error=what, timed_out=True)
            # Exceeding the CPU limit is a property of the response: it is wrong, not an error.
            case OutOfProcessorTime():
                return Scored(reward=0.0)
            case UserProcessEnded():
                what = f"the reward's process {error}; see the engine's log"
                return Scored(reward=0.0, error=what)
        return Scored(reward=0.0, error=str(error))


class RewardPool:
    """Pool that scores responses in processes, for one event loop. Call `start` first."""

    def __init__(self, limits: RewardLimits, workers: int) -> None:
        self.limits = limits
        self.processes: dict[UserProcess, set[RewardJob]] = {}
        """Process -> its running jobs. A process that has ended has no entry."""
        self._workers = workers
        self._waiting: deque[RewardJob] = deque()
        self._suspects: deque[RewardJob] = deque()
        self._first: asyncio.Future[None] | None = None
        self._per_call = math.inf
        """Number of jobs that one process takes concurrently; infinite until a process reports
        it."""
        self._closed = False
        arguments = {
            "name": limits.name,
            "key": limits.key,
            "settings": limits.settings,
            "timeout_s": limits.timeout_s,
        }
        # Each process imports the reward itself, because a reward may have objects that do not
        # survive a fork, such as a CUDA context, a connection or threads.
        code = UserCode(loader=LOADER, arguments=arguments, memory_mib=limits.memory_mib)
        self.supervisor = Supervisor(code)

    def start(self) -> None:
        """Start the first process."""
        self._first = asyncio.get_running_loop().create_future()
        self._start_process()

    async def ready(self) -> None:
        """Return when the reward has been imported. Raises UserCodeStartError."""
        assert self._first is not None
        with watch.doing("wait", f"the reward {self.limits.name} to be imported", START_S):
            await self._first

    async def submit(self, items: Sequence[RewardItem]) -> Sequence[Scored]:
        """Return the scores of one response, or of one group, which is scored in a single call."""
        job = RewardJob(items)
        self._waiting.append(job)
        self._dispatch()
        return await job.result

    def close(self) -> None:
        """Cancel all jobs and end all processes."""
        # Set first, so that callbacks of the cancelled jobs do not start processes.
        self._closed = True
        for job in (*self._waiting, *self._suspects, *self._working()):
            job.result.cancel()
        self.supervisor.close()

    def _working(self) -> Iterator[RewardJob]:
        for jobs in self.processes.values():
            yield from jobs

    def _dispatch(self) -> None:
        """Give jobs to free processes, and start further processes if jobs remain."""
        for process in self.processes:
            while self._is_free(process) and (jobs := self._next(process)):
                self._call(process, jobs)
        # At least one process for waiting jobs: its capacity is unknown until it has started.
        others = max(1, math.ceil(len(self._waiting) / self._per_call)) if self._waiting else 0
        needed = len(self._suspects) + others
        # Each starting process will take waiting jobs, so count it before starting more.
        starting = sum(not process.ready for process in self.processes)
        room = self._workers - len(self.processes)
        for _ in range(min(room, needed - starting)):
            self._start_process()

    def _is_free(self, process: UserProcess) -> bool:
        """Return True if the process can take a call now."""
        if not process.ready or process.killed:
            return False
        # No second job joins a suspect, so that a crash identifies the job that caused it.
        alone = any(job.alone for job in self.processes[process])
        return len(process.calls) < self._concurrency(process) and not alone

    def _concurrency(self, process: UserProcess) -> int:
        return self.limits.concurrency if process.facts["concurrent"] else 1

    def _batch(self, process: UserProcess) -> int:
        return self.limits.batch if process.facts["batched"] else 1

    def _next(self, process: UserProcess) -> Sequence[RewardJob]:
        """Return the jobs of the next call of the process. Suspects come first: while there are
        suspects, no process takes other jobs, and a busy process takes no suspect."""
        while self._suspects and self._suspects[0].result.done():
            self._suspects.popleft()
        if self._suspects:
            # In a busy process, a failure would again have several possible causes.
            return () if process.calls else [self._suspects.popleft()]

        jobs: list[RewardJob] = []
        while self._waiting and len(jobs) < self._batch(process):
            job = self._waiting.popleft()
            # A done future belongs to a cancelled task.
            if not job.result.done():
                jobs.append(job)
        return jobs

    def _call(self, process: UserProcess, jobs: Sequence[RewardJob]) -> None:
        limits = self.limits
        items = [item for job in jobs for item in job.items]
        others = f" and {len(items) - 1} more" if len(items) > 1 else ""
        what = f"the reward of a response to prompt {items[0].prompt.id}{others}, {limits.name}"
        # Registered before the call, because the process may end during the call.
        self.processes[process].update(jobs)
        result = process.call(
            items,
            activity=watch.doing("work", what, limits.timeout_s),
            timeout_s=limits.timeout_s,
            cpu_limit_s=limits.cpu_limit_s,
        )
        result.add_done_callback(functools.partial(self._on_result, process, jobs))

    def _on_result(
        self, process: UserProcess, jobs: Sequence[RewardJob], result: asyncio.Future[Any]
    ) -> None:
        # The process may have ended before its result arrived; it then has no entry.
        if process in self.processes:
            self.processes[process].difference_update(jobs)
        if self._closed or result.cancelled():
            return
        error = result.exception()
        if error is None:
            # A flat list in the order of the items: each job takes as many scores as it has items.
            scored = (Scored(reward=reward, error=why) for reward, why in result.result())
            for job in jobs:
                job.finish(list(islice(scored, len(job.items))))
            self._dispatch()
            return

        assert isinstance(error, UserCodeError)
        # Several possible causes. `shared`: the process ended with other calls in progress.
        if len(jobs) > 1 or error.shared:
            for job in jobs:
                job.alone = True
            self._suspects.extend(jobs)
        else:
            jobs[0].fail(self.limits.failure(error))
        self._dispatch()

    def _start_process(self) -> None:
        try:
            process = self.supervisor.process(self._on_ready, self._on_end)
        # The system has no memory, process or file descriptor left.
        except OSError as error:
            self._on_start_failure(str(error))
        else:
            self.processes[process] = set()

    def _on_ready(self, process: UserProcess) -> None:
        if self._first is not None and not self._first.done():
            self._first.set_result(None)
        # All processes run the same reward, so the capacity of one holds for all.
        self._per_call = self._concurrency(process) * self._batch(process)
        self._dispatch()

    def _on_end(self, process: UserProcess, reason: str) -> None:
        self.processes.pop(process, None)
        if self._closed:
            return
        if process.ready:
            # Start the replacement now, so that it imports the reward before it is needed.
            self._start_process()
            self._dispatch()
            return

        self._on_start_failure(reason)

    def _on_start_failure(self, reason: str) -> None:
        """Fail all waiting jobs if no process is running: another start would most likely fail,
        too."""
        failure = f"the reward's process did not start: {reason}"
        if self._first is not None and not self._first.done():
            self._first.set_exception(UserCodeStartError(failure))
        # If other processes are running, they serve the queue.
        if not self.processes:
            for waiting in (self._suspects, self._waiting):
                while waiting:
                    waiting.popleft().fail(Scored(reward=0.0, error=failure))

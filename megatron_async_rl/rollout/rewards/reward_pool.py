"""Processes of one reward, and the responses that wait for them.

    Scorer --responses--> RewardPool --calls--> UserProcess ... (isolation/supervisor.py)

Invariants:
- a response fails only if it alone can have caused the failure. If a process fails with several
  responses, each becomes a suspect and is retried alone in a process;
- a process that ends is replaced at once, so that its successor is ready when it is needed;
- the event loop never blocks on a process.

The first process starts with the engine; others start on demand, up to `rollout.reward.workers`.
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
    """One response, or one group, that waits for its reward. `alone`: it is a suspect, so no other
    job may share its process."""

    def __init__(self, items: Sequence[RewardItem]) -> None:
        self.items = items
        self.alone = False
        self.result: asyncio.Future[Sequence[Scored]] = asyncio.get_running_loop().create_future()

    def finish(self, scored: Sequence[Scored]) -> None:
        # The waiting task may have been cancelled, which resolves the future first.
        if not self.result.done():
            self.result.set_result(scored)
            watch.progress("rewards")

    def fail(self, scored: Scored) -> None:
        """Fail every response of the job for the same reason."""
        self.finish([scored] * len(self.items))


@dataclass(frozen=True, kw_only=True)
class RewardLimits:
    """The reward that a pool calls, and the limits of its calls."""

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
            # Computing too long is a property of the response: a wrong answer, not an error.
            case OutOfProcessorTime():
                return Scored(reward=0.0)
            case UserProcessEnded():
                what = f"the reward's process {error}; see the engine's log"
                return Scored(reward=0.0, error=what)
        return Scored(reward=0.0, error=str(error))


class RewardPool:
    """Scores responses in processes. Belongs to one event loop; call `start` first."""

    def __init__(self, called: RewardLimits, workers: int) -> None:
        self.called = called
        self.processes: dict[UserProcess, set[RewardJob]] = {}
        """Process -> its running jobs. A process that ended has no entry."""
        self._workers = workers
        self._waiting: deque[RewardJob] = deque()
        self._suspects: deque[RewardJob] = deque()
        self._first: asyncio.Future[None] | None = None
        self._per_call = math.inf
        """Jobs that one process takes concurrently; unlimited until a process has reported it."""
        self._closed = False
        arguments = {
            "name": called.name,
            "key": called.key,
            "settings": called.settings,
            "timeout_s": called.timeout_s,
        }
        # Each process imports the reward itself: a reward may hold objects that do not survive a
        # fork, such as a CUDA context, a connection or threads.
        code = UserCode(loader=LOADER, arguments=arguments, memory_mib=called.memory_mib)
        self.supervisor = Supervisor(code)

    def start(self) -> None:
        self._first = asyncio.get_running_loop().create_future()
        self._hire()

    async def ready(self) -> None:
        """Raises UserCodeStartError."""
        assert self._first is not None
        with watch.doing("wait", f"the reward {self.called.name} to be imported", START_S):
            await self._first

    async def submit(self, items: Sequence[RewardItem]) -> Sequence[Scored]:
        """Return the scores of one response, or of a group that one call must receive whole."""
        job = RewardJob(items)
        self._waiting.append(job)
        self._dispatch()
        return await job.result

    def close(self) -> None:
        # First: callbacks of the cancelled jobs must not start new processes.
        self._closed = True
        for job in (*self._waiting, *self._suspects, *self._working()):
            job.result.cancel()
        self.supervisor.close()

    def _working(self) -> Iterator[RewardJob]:
        for jobs in self.processes.values():
            yield from jobs

    def _dispatch(self) -> None:
        for process in self.processes:
            while self._is_free(process) and (jobs := self._next(process)):
                self._call(process, jobs)
        # At least one while nothing is known: a process that is starting reports its capacity.
        others = max(1, math.ceil(len(self._waiting) / self._per_call)) if self._waiting else 0
        wanted = len(self._suspects) + others
        # A starting process will take waiting jobs; count it before another is started.
        starting = sum(not process.ready for process in self.processes)
        room = self._workers - len(self.processes)
        for _ in range(min(room, wanted - starting)):
            self._hire()

    def _is_free(self, process: UserProcess) -> bool:
        """True if the process can take a call now."""
        if not process.ready or process.killed:
            return False
        # No second job joins a suspect: a crash must point at one job.
        alone = any(job.alone for job in self.processes[process])
        return len(process.calls) < self._concurrency(process) and not alone

    def _concurrency(self, process: UserProcess) -> int:
        return self.called.concurrency if process.facts["concurrent"] else 1

    def _batch(self, process: UserProcess) -> int:
        return self.called.batch if process.facts["batched"] else 1

    def _next(self, process: UserProcess) -> Sequence[RewardJob]:
        """Return the jobs of the process's next call. Suspects come first: while there are any, no
        process takes others, and a process that works on others takes none until it is done."""
        while self._suspects and self._suspects[0].result.done():
            self._suspects.popleft()
        if self._suspects:
            # The process is still busy with others: adding a suspect would blur the blame again.
            return () if process.calls else [self._suspects.popleft()]

        jobs: list[RewardJob] = []
        while self._waiting and len(jobs) < self._batch(process):
            job = self._waiting.popleft()
            if not job.result.done():  # otherwise the waiting task was cancelled
                jobs.append(job)
        return jobs

    def _call(self, process: UserProcess, jobs: Sequence[RewardJob]) -> None:
        called = self.called
        items = [item for job in jobs for item in job.items]
        others = f" and {len(items) - 1} more" if len(items) > 1 else ""
        what = f"the reward of a response to prompt {items[0].prompt.id}{others}, {called.name}"
        # Before the call: the process may end within it.
        self.processes[process].update(jobs)
        result = process.call(
            items,
            activity=watch.doing("work", what, called.timeout_s),
            timeout_s=called.timeout_s,
            cpu_limit_s=called.cpu_limit_s,
        )
        result.add_done_callback(functools.partial(self._on_result, process, jobs))

    def _on_result(
        self, process: UserProcess, jobs: Sequence[RewardJob], result: asyncio.Future[Any]
    ) -> None:
        # The process may have ended, and lost its entry, before its result arrived.
        if process in self.processes:
            self.processes[process].difference_update(jobs)
        if self._closed or result.cancelled():
            return
        error = result.exception()
        if error is None:
            # One flat list in the order of the items; each job takes its own part of it.
            scored = (Scored(reward=reward, error=why) for reward, why in result.result())
            for job in jobs:
                job.finish(list(islice(scored, len(job.items))))
            self._dispatch()
            return

        assert isinstance(error, UserCodeError)
        # Several possible culprits. `shared`: calls of other jobs died with the process.
        if len(jobs) > 1 or error.shared:
            for job in jobs:
                job.alone = True
            self._suspects.extend(jobs)
        else:
            jobs[0].fail(self.called.failure(error))
        self._dispatch()

    def _hire(self) -> None:
        try:
            process = self.supervisor.process(self._on_ready, self._on_end)
        except OSError as error:  # no memory, process or file descriptor is left for it
            self._on_start_failure(str(error))
        else:
            self.processes[process] = set()

    def _on_ready(self, process: UserProcess) -> None:
        if self._first is not None and not self._first.done():
            self._first.set_result(None)
        # All processes run the same reward, so one report holds for all.
        self._per_call = self._concurrency(process) * self._batch(process)
        self._dispatch()

    def _on_end(self, process: UserProcess, how: str) -> None:
        self.processes.pop(process, None)
        if self._closed:
            return
        if process.ready:
            # Its successor imports the reward before it is needed.
            self._hire()
            self._dispatch()
            return

        self._on_start_failure(how)

    def _on_start_failure(self, how: str) -> None:
        """Fail what waits: another start would most likely fail, too."""
        reason = f"the reward's process did not start: {how}"
        if self._first is not None and not self._first.done():
            self._first.set_exception(UserCodeStartError(reason))
        # Otherwise the running processes still serve the queue.
        if not self.processes:
            for waiting in (self._suspects, self._waiting):
                while waiting:
                    waiting.popleft().fail(Scored(reward=0.0, error=reason))

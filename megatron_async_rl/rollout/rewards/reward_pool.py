"""The processes of one reward and the responses that wait for them.

    Scorer --responses--> RewardPool --calls--> UserProcess ... (isolation/supervisor.py)

Invariants:
- only what certainly is the fault of one response is its error; where several were worked on, each
  is a suspect, and they are tried again one by one, without another in the process;
- a process that ends is replaced before its successor is needed;
- the event loop never waits for a process.

Processes start when responses wait for them, up to `rollout.reward.workers`; the first one with
the engine.
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
        """Give all of them the same reason for the missing reward."""
        self.finish([scored] * len(self.items))


@dataclass(frozen=True, kw_only=True)
class RewardLimits:
    """The reward of a pool and its limits."""

    name: str
    key: str
    settings: dict[str, Any]
    concurrency: int
    """Maximum pending calls of an `async` reward in one process."""
    batch: int
    """Maximum responses of one call of a reward that takes lists."""
    timeout_s: float
    cpu_limit_s: float | None
    memory_mib: int | None

    def failure(self, error: UserCodeError) -> Scored:
        """Return the result of a response whose call failed."""
        match error:
            case OutOfTime():
                what = f"no reward within rollout.reward.timeout_s: {self.timeout_s:g}"
                return Scored(reward=0.0, error=what, timed_out=True)
            case OutOfProcessorTime():
                return Scored(reward=0.0)
            case UserProcessEnded():
                what = f"the reward's process {error}; see the engine's log"
                return Scored(reward=0.0, error=what)
        return Scored(reward=0.0, error=str(error))


class RewardPool:
    """Used by one event loop. Call `start` first."""

    def __init__(self, called: RewardLimits, workers: int) -> None:
        self.called = called
        self.processes: dict[UserProcess, set[RewardJob]] = {}
        """The processes, each with the jobs it works on."""
        self._workers = workers
        self._waiting: deque[RewardJob] = deque()
        self._suspects: deque[RewardJob] = deque()
        self._first: asyncio.Future[None] | None = None
        self._per_call = math.inf
        """Responses that a process works on at a time, once a process has reported it."""
        self._closed = False
        arguments = {
            "name": called.name,
            "key": called.key,
            "settings": called.settings,
            "timeout_s": called.timeout_s,
        }
        # Each process imports the reward by itself: it may hold what forks cannot share, such as a
        # model on a GPU, a connection or threads.
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
        """Return the scores of one response, or of all that one call is to take."""
        job = RewardJob(items)
        self._waiting.append(job)
        self._dispatch()
        return await job.result

    def close(self) -> None:
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
        others = max(1, math.ceil(len(self._waiting) / self._per_call)) if self._waiting else 0
        wanted = len(self._suspects) + others
        starting = sum(not process.ready for process in self.processes)
        room = self._workers - len(self.processes)
        for _ in range(min(room, wanted - starting)):
            self._hire()

    def _is_free(self, process: UserProcess) -> bool:
        """True if the process can take a call now."""
        if not process.ready or process.killed:
            return False
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
        if process in self.processes:
            self.processes[process].difference_update(jobs)
        if self._closed or result.cancelled():
            return
        error = result.exception()
        if error is None:
            scored = (Scored(reward=reward, error=why) for reward, why in result.result())
            for job in jobs:
                job.finish(list(islice(scored, len(job.items))))
            self._dispatch()
            return

        assert isinstance(error, UserCodeError)
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
        if not self.processes:
            for waiting in (self._suspects, self._waiting):
                while waiting:
                    waiting.popleft().fail(Scored(reward=0.0, error=reason))

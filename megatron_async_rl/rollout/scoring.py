"""Runs the reward on finished responses, off the engine's event loop, so that no reward can stall sampling.

Invariants:
- every call of `score` ends within `timeout_s` of the moment its reward began to run, whatever the reward does;
- a reward that hangs keeps its thread, and another thread takes its place: later responses are scored as usual;
- the threads are daemons, so a hung reward does not keep the process from ending.
"""

from __future__ import annotations

import asyncio
import math
import queue
import threading
import time
from dataclasses import dataclass

from megatron_async_rl.observe import watch
from megatron_async_rl.rollout.rewards import Reward
from megatron_async_rl.samples import Prompt


@dataclass(frozen=True, kw_only=True)
class Scored:
    """`error` says why there is no reward; `reward` is 0.0 then."""

    reward: float
    error: str | None = None


class _Job:
    def __init__(self, prompt: Prompt, response: str, loop: asyncio.AbstractEventLoop) -> None:
        self.prompt = prompt
        self.response = response
        self.loop = loop
        self.result: asyncio.Future[Scored] = loop.create_future()
        self.started_at: float | None = None
        self.abandoned = False

    def finish(self, scored: Scored) -> None:
        if not self.result.done():
            self.result.set_result(scored)


class Scorer:
    """`threads` rewards at a time; `timeout_s` seconds for each."""

    def __init__(self, reward: Reward, *, timeout_s: float, threads: int = 4) -> None:
        self._reward = reward
        self._timeout_s = timeout_s
        self._jobs: queue.SimpleQueue[_Job | None] = queue.SimpleQueue()
        self._threads = threads
        for _ in range(threads):
            self._hire()

    async def score(self, prompt: Prompt, response: str) -> Scored:
        """Never raises for what the reward does: an exception, a value that is not a finite number and a time-out are errors."""
        job = _Job(prompt, response, asyncio.get_running_loop())
        self._jobs.put(job)
        while not job.result.done():
            ran = 0.0 if job.started_at is None else time.monotonic() - job.started_at
            if ran >= self._timeout_s:
                job.abandoned = True
                self._hire()
                return Scored(reward=0.0, error=f"no reward within rollout.reward.timeout_s: {self._timeout_s:g}")
            await asyncio.wait([job.result], timeout=self._timeout_s - ran)
        return job.result.result()

    def close(self) -> None:
        for _ in range(self._threads):
            self._jobs.put(None)

    def _hire(self) -> None:
        threading.Thread(target=self._work, name="reward", daemon=True).start()

    def _work(self) -> None:
        while (job := self._jobs.get()) is not None:
            job.started_at = time.monotonic()
            scored = self._call(job)
            watch.progress("rewards")
            if job.abandoned:
                return  # its place was taken when it timed out
            try:
                job.loop.call_soon_threadsafe(job.finish, scored)
            except RuntimeError:  # the loop closed: the engine has stopped and nobody waits
                return

    def _call(self, job: _Job) -> Scored:
        try:
            with watch.doing("work", f"the reward of a response to prompt {job.prompt.id}", self._timeout_s):
                reward = float(self._reward(job.prompt, job.response))
        except Exception as error:  # noqa: BLE001 - the caller's code: whatever it raises is this sample's error
            return Scored(reward=0.0, error=f"{type(error).__name__}: {error}")
        if not math.isfinite(reward):
            return Scored(reward=0.0, error=f"the reward is {reward}, not a finite number")
        return Scored(reward=reward)

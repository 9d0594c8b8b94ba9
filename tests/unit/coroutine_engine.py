"""A rollout engine that is a coroutine: it answers requests after delays, can be cut, and fails in every way one can."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import Callable, Sequence

import numpy as np

from megatron_async_rl.samples.requests import Cut, EngineReport, Prefix, Request
from megatron_async_rl.samples.types import Sample


def prefix(*versions: int) -> Prefix:
    zeros = np.zeros(len(versions), dtype=np.int32)
    return Prefix(response_ids=zeros, behavior_logprobs=zeros.astype(np.float32), versions=np.array(versions, dtype=np.int32))


class CoroutineEngine:
    """`delay(request)`: seconds until it is answered. `version`: what the trainer last loaded. `started(request, version)`: the
    version of its first token."""

    def __init__(self, delay: Callable[[Request], float] = lambda request: 0.0) -> None:
        self.delay = delay
        self.version = 0
        self.asked: list[Request] = []
        self.versions: list[int] = []
        self.cuts: list[str] = []
        self.most = 0
        self.started: Callable[[Request, int], int] = lambda request, version: version
        self.reward: Callable[[Request], float | None] = lambda request: float(request.k)
        self.alter: Callable[[Sample], Sample] = lambda sample: sample
        self.failure: Exception | None = None
        self.refuses: Exception | None = None
        self.wedged = False
        self.silent_s = 0.0
        self.sampling = False
        self._running: dict[str, asyncio.Task[None]] = {}
        self._start: dict[str, int] = {}
        self._outcomes: list[Sample | Cut] = []
        self._news = asyncio.Event()

    def groups(self) -> list[int]:
        """Asked for, in order, each once."""
        return list(dict.fromkeys(request.group for request in self.asked))

    async def submit(self, requests: Sequence[Request]) -> None:
        if self.refuses is not None:
            raise self.refuses
        for request in requests:
            assert request.id not in self._running, f"{request.id} was asked twice"
            self.asked.append(request)
            self.versions.append(self.version)
            self._start[request.id] = self.started(request, self.version)
            self._running[request.id] = asyncio.create_task(self._answer(request))
        self.most = max(self.most, len(self._running))

    async def cut(self, ids: Sequence[str]) -> None:
        self.cuts += ids
        for one in ids:
            task = self._running.pop(one, None)
            if task is not None:
                task.cancel()
                self.say(Cut(id=one, prefix=prefix(self._start[one], max(self._start[one], self.version))))

    async def report(self, timeout_s: float) -> EngineReport:
        if self.wedged:
            await asyncio.Event().wait()
        if self.failure is None:
            with contextlib.suppress(TimeoutError):
                await asyncio.wait_for(self._news.wait(), timeout_s)
        if self.failure is not None:
            raise self.failure
        self._news.clear()
        said, self._outcomes = self._outcomes, []
        return EngineReport(
            finished=tuple(one for one in said if isinstance(one, Sample)),
            cut=tuple(one for one in said if isinstance(one, Cut)),
            state="running",
            version=self.version,
            running=len(self._running),
            tokens=0,
            busy_s=0.0,
            silent_s=self.silent_s,
            sampling=self.sampling,
        )

    def fail(self, error: Exception) -> None:
        self.failure = error
        self._news.set()

    def say(self, outcome: Sample | Cut) -> None:
        self._outcomes.append(outcome)
        self._news.set()

    async def _answer(self, request: Request) -> None:
        await asyncio.sleep(self.delay(request))
        del self._running[request.id]
        self.say(self.alter(self.sample(request)))

    def sample(self, request: Request) -> Sample:
        start = self._start[request.id]
        before = [] if request.prefix is None else request.prefix.versions.tolist()
        versions = np.array([*before, start, max(start, self.version)], dtype=np.int32)
        reward = self.reward(request)
        return Sample(
            id=request.id,
            prompt=request.prompt,
            response_ids=np.ones(len(versions), dtype=np.int32),
            behavior_logprobs=np.zeros(len(versions), dtype=np.float32),
            versions=versions,
            loss_mask=np.ones(len(versions), dtype=np.uint8),
            text="ab",
            finish_reason="length" if request.k == 0 else "stop",
            reward=0.0 if reward is None else reward,
            reward_error="ValueError: no idea" if reward is None else None,
        )

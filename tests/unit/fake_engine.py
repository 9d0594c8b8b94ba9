"""Stand-in for a rollout engine without vLLM: it finishes requests after delays, aborts requests,
loads weights, and fails in all ways in which an engine can fail."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import Awaitable, Callable, Sequence
from pathlib import Path

import numpy as np

from megatron_async_rl.config.rollout import RolloutConfig
from megatron_async_rl.rollout.spec import HERE, EngineSpec
from megatron_async_rl.samples.columns import batch_of
from megatron_async_rl.samples.rows import EngineReport
from megatron_async_rl.samples.types import Aborted, PartialResponse, Request, Sample
from megatron_async_rl.weights.manifest import Manifest


def partial(*versions: int) -> PartialResponse:
    zeros = np.zeros(len(versions), dtype=np.int32)
    return PartialResponse(
        response_ids=zeros,
        behavior_logprobs=zeros.astype(np.float32),
        versions=np.array(versions, dtype=np.int32),
    )


def manifest(version: int) -> Manifest:
    return Manifest(buckets=(), digests={"w": f"digest of {version}"})


class FakeEngine:
    """Stand-in for an engine.

    `delay(request)`: seconds until the request finishes; requests also wait while `gate` is closed.
    `version`: version of its weights. `started(request, version)`: returns the version of the first
    token. `before_update(version)`: awaited before weights are loaded; its exceptions propagate.
    `before`: the same for calls of `sleep` and `wake`, by their names in `calls`."""

    def __init__(self, delay: Callable[[Request], float] = lambda request: 0.0) -> None:
        self.delay = delay
        self.gate = asyncio.Event()
        self.gate.set()
        self.version = -1
        self.machine = HERE
        self.machine_gone = False
        self.asked: list[Request] = []
        self.versions: list[int] = []
        self.aborts: list[str] = []
        self.updates: list[int] = []
        self.buckets: list[str] = []
        """Paths of the buckets of the last update."""
        self.calls: list[str] = []
        self.maximum = 0
        self.started: Callable[[Request, int], int] = lambda request, version: version
        self.reward: Callable[[Request], float | None] = lambda request: float(request.k)
        self.alter: Callable[[Sample], Sample] = lambda sample: sample
        self.before_update: Callable[[int], object] | None = None
        self.spoil = False
        """True: an update loads other weights than were sent."""
        self.failure: BaseException | None = None
        self.refuses: Exception | None = None
        self.wedged = False
        self.sleeping: set[str] = set()
        self.before: dict[str, Callable[[], Awaitable[object]]] = {}
        self.deaf = False
        """True: aborts are ignored."""
        self.killed = False
        self.ended = asyncio.Event()
        """Set once the processes of a killed engine have ended."""
        self.ended.set()
        self.silent_s = 0.0
        self.sampling = False
        self._running: dict[str, asyncio.Task[None]] = {}
        self._start: dict[str, int] = {}
        self._outcomes: list[Sample | Aborted] = []
        self._news = asyncio.Event()

    def groups(self) -> list[int]:
        """Return the groups of the requests, in order, each once."""
        return list(dict.fromkeys(request.group for request in self.asked))

    async def submit(self, requests: Sequence[Request]) -> None:
        if self.refuses is not None:
            raise self.refuses
        for request in requests:
            assert request.id not in self._running, f"{request.id} was requested twice"
            self.asked.append(request)
            self.versions.append(self.version)
            self._start[request.id] = self.started(request, self.version)
            self._running[request.id] = asyncio.create_task(self._answer(request))
        self.maximum = max(self.maximum, len(self._running))

    async def abort(self, ids: Sequence[str]) -> None:
        self.aborts += ids
        for one in ids if not self.deaf else ():
            task = self._running.pop(one, None)
            if task is not None:
                task.cancel()
                start = self._start[one]
                tokens = partial(*self._before(one), start, max(start, self.version))
                self.say(Aborted(id=one, partial=tokens))

    def _before(self, one: str) -> list[int]:
        request = next(r for r in reversed(self.asked) if r.id == one)
        return [] if request.prefix is None else request.prefix.versions.tolist()

    async def update(
        self, version: int, manifest: Manifest, first: bool = True, last: bool = True
    ) -> dict[str, str]:
        assert "weights" not in self.sleeping, "weights cannot be loaded while they are asleep"
        if first:
            self.calls.append(f"update {version}")
            self.buckets = []
        self.buckets += [ref.path for ref in manifest.buckets]
        if self.before_update is not None:
            waiting = self.before_update(version)
            if asyncio.iscoroutine(waiting):
                await waiting
        if not last:
            return {}
        self.updates.append(version)
        self.version = version
        return {name: "?" if self.spoil else digest for name, digest in manifest.digests.items()}

    async def sleep(self) -> None:
        assert not self.sleeping, "the engine is asleep already"
        await self._call("sleep")
        self.sleeping = {"weights", "kv_cache"}

    async def wake(self, tags: Sequence[str] | None = None) -> None:
        waking = self.sleeping if tags is None else set(tags)
        assert waking, "the engine is awake already"
        await self._call("wake weights" if "weights" in waking else "wake cache")
        self.sleeping = self.sleeping - waking

    async def _call(self, name: str) -> None:
        self.calls.append(name)
        if name in self.before:
            await self.before[name]()

    async def stop(self) -> None:
        self.calls.append("stop")

    def kill(self) -> None:
        self.killed = True
        for task in self._running.values():
            task.cancel()

    async def machine_is_lost(self) -> bool:
        return self.machine_gone

    async def until_ended(self) -> None:
        assert self.killed
        await self.ended.wait()

    async def report(self, timeout_s: float) -> EngineReport:
        if self.wedged:
            await asyncio.Event().wait()
        if self.failure is None:
            with contextlib.suppress(TimeoutError):
                async with asyncio.timeout(timeout_s):
                    await self._news.wait()
        if self.failure is not None:
            raise self.failure
        self._news.clear()
        said, self._outcomes = self._outcomes, []
        finished = [one for one in said if isinstance(one, Sample)]
        groups = [int(one.id.rpartition("-")[0]) for one in finished]
        return EngineReport(
            finished=batch_of(finished, groups),
            aborted=tuple(one for one in said if isinstance(one, Aborted)),
            state="running",
            version=self.version,
            running=len(self._running),
            tokens=0,
            busy_s=0.0,
            silent_s=self.silent_s,
            sampling=self.sampling,
        )

    def fail(self, error: BaseException) -> None:
        self.failure = error
        self._news.set()

    def say(self, outcome: Sample | Aborted) -> None:
        self._outcomes.append(outcome)
        self._news.set()

    async def _answer(self, request: Request) -> None:
        await asyncio.sleep(self.delay(request))
        await self.gate.wait()
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


class FakeLaunch:
    """Launch of stand-ins. The first start of an index returns `engines[index]`, later starts
    return `again(index)`. `failures`: exceptions that the first starts raise, in order."""

    def __init__(
        self,
        engines: Sequence[FakeEngine],
        again: Callable[[int], FakeEngine] | None = None,
        failures: Sequence[Exception] = (),
    ) -> None:
        self.engines = list(engines)
        self.again = again or (lambda index: FakeEngine(self.engines[index].delay))
        self.failures = list(failures)
        self.make: Callable[[int], FakeEngine] = lambda index: FakeEngine()
        """Factory of the engines that join."""
        self.starts: list[tuple[int, bool]] = []
        self._began = set[int]()

    async def __call__(self, spec: EngineSpec, *, again: bool = False) -> FakeEngine:
        index = spec.index
        self.starts.append((index, again))
        await asyncio.sleep(0)
        if self.failures:
            raise self.failures.pop(0)
        if index >= len(self.engines):
            self.engines.append(self.make(index))
        elif index in self._began:
            self.engines[index] = self.again(index)
        self._began.add(index)
        self.engines[index].version = spec.first_version
        return self.engines[index]


def specs(count: int, first_version: int = -1) -> list[EngineSpec]:
    rollout = RolloutConfig.model_validate(
        {"sampling": {"max_tokens": 8}, "reward": {"name": "arithmetic"}}
    )
    return [
        EngineSpec(
            index=index,
            model_path=Path("model"),
            dtype="float32",
            rollout=rollout,
            seed=0,
            device="cpu",
            log_dir=Path("logs"),
            transport="shared_memory",
            first_version=first_version,
        )
        for index in range(count)
    ]

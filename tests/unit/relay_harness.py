"""Weight agents without Ray or sockets: coroutines, and engines that only have weights."""

from __future__ import annotations

import asyncio
import math
from collections.abc import Awaitable, Callable
from dataclasses import dataclass, field, replace
from pathlib import Path

from megatron_async_rl.flow.distribution import AgentSettings, WeightAgents
from megatron_async_rl.flow.updates import WeightUpdates
from megatron_async_rl.rollout.spec import HERE
from megatron_async_rl.weights.agents import AgentContext, AgentSource, AgentSpec
from megatron_async_rl.weights.manifest import BucketRef, Manifest, StagedCopy


def manifest(version: int, where: str = HERE) -> Manifest:
    bucket = BucketRef(path=f"{where}/{version}", size=8, nbytes=8, entries=())
    return Manifest(buckets=(bucket,), digests={"w": f"digest of {version}"})


@dataclass(eq=False)
class Reader:
    """An engine as far as its weights go. `loaded`: versions and the paths it read them from."""

    index: int
    machine: str = HERE
    version: int = -1
    evaluates: bool = False
    there: bool = True
    serving: bool = False
    busy: bool = False
    loaded: list[tuple[int, str]] = field(default_factory=list)

    async def load(self, updates: WeightUpdates, gate: asyncio.Event | None = None) -> None:
        """Loads once; reading lasts until `gate` is set."""
        async with updates.loading(self) as staged:
            if gate is not None:
                await gate.wait()
            self.loaded.append((staged.version, staged.manifest.buckets[0].path))
            self.version = staged.version


def copied(manifest: Manifest, nbytes: int = 8, seconds: float = 0.5) -> StagedCopy:
    return StagedCopy(manifest=manifest, nbytes=nbytes, seconds=seconds)


@dataclass(eq=False)
class FakeAgent:
    """`gate`: closed, nothing arrives. `failure`: what the next fetch raises. `deaf`: no answer.
    `death`: why it has ended."""

    spec: AgentSpec
    gate: asyncio.Event = field(default_factory=asyncio.Event)
    failure: Exception | None = None
    deaf: bool = False
    death: Exception | None = None
    fetched: list[int] = field(default_factory=list)
    asked: list[int] = field(default_factory=list)
    killed: bool = False
    closed: bool = False
    where: str = "elsewhere"

    async def fetch(self, version: int, staged: Manifest) -> StagedCopy:
        self.asked.append(version)
        await self.gate.wait()
        if self.failure is not None:
            raise self.failure
        self.fetched.append(version)
        (bucket,) = staged.buckets
        there = replace(bucket, path=f"{self.spec.machine}/{version}")
        return copied(replace(staged, buckets=(there,)))

    async def alive(self) -> None:
        if self.death is not None:
            raise self.death
        if self.deaf:
            await asyncio.Event().wait()

    async def close(self) -> None:
        self.closed = True

    def kill(self) -> None:
        self.killed = True


@dataclass
class RecordedSource(AgentSource):
    """Records its calls. `start`: starts an agent."""

    start: Callable[[AgentSpec], Awaitable[FakeAgent]]
    calls: list[tuple[object, ...]] = field(default_factory=list)

    @classmethod
    def of(cls, context: AgentContext) -> RecordedSource:
        raise NotImplementedError

    async def launch(self, spec: AgentSpec) -> FakeAgent:
        return await self.start(spec)

    def stage(self, version: int, manifest: Manifest) -> None:
        self.calls.append(("stage", version, manifest))

    def release(self, version: int) -> None:
        self.calls.append(("release", version))

    def close(self) -> None:
        self.calls.append(("close",))


class AgentHarness:
    """`held_up`: agents start with their gate closed. `broken`: what starts raise, in order."""

    def __init__(self, engines: list[Reader], **settings: float) -> None:
        self.engines = engines
        self.updates = WeightUpdates(lambda: self.engines, max_paused=1.0)
        self.source = RecordedSource(self.launch)
        self.started: list[FakeAgent] = []
        self.broken: list[Exception] = []
        self.held_up = False
        self.notes: list[str] = []
        self.lost: list[tuple[str, str, bool]] = []
        self.errors: list[BaseException] = []
        limits = dict.fromkeys(("unresponsive_s", "send_timeout_s", "start_timeout_s"), 600.0)
        usual = {"restarts_per_hour": 3, "at_once": math.inf, "with_engines": False}
        own = {**limits, **usual, **settings}
        spec = AgentSettings(log_dir=Path("logs"), transport="relay", **own)  # type: ignore[arg-type]
        self.agents = WeightAgents(self.updates, self.source, self, spec)

    async def launch(self, spec: AgentSpec) -> FakeAgent:
        await asyncio.sleep(0)
        if self.broken:
            raise self.broken.pop(0)
        self.started.append(FakeAgent(spec))
        if not self.held_up:
            self.started[-1].gate.set()
        return self.started[-1]

    def note(self, text: str) -> None:
        self.notes.append(text)

    def on_machine_lost(self, machine: str, reason: str, *, all_engines: bool) -> None:
        self.lost.append((machine, reason, all_engines))
        if all_engines:
            for engine in self.engines:
                if engine.machine == machine:
                    engine.machine, engine.version = HERE, -1
                    self.updates.forget(engine.index)

    def on_error(self, error: BaseException) -> None:
        self.errors.append(error)

    def stage(self, version: int) -> None:
        self.updates.stage(version, manifest(version))

    async def start(self, engine: Reader, machine: str) -> None:
        """The engine starts (again), without weights."""
        async with self.updates.starting():
            engine.machine, engine.version = machine, -1

    async def released(self, version: int) -> bool:
        """True once rank 0 could write where versions before `version` are."""
        waiting = asyncio.ensure_future(self.updates.until_released(version))
        for _ in range(20):
            await asyncio.sleep(0)
        waiting.cancel()
        return waiting.done() and not waiting.cancelled()

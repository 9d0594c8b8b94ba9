"""The controller as a Ray actor named `controller`, in a process of its own, so that admission never waits for training."""

from __future__ import annotations

import asyncio
import gc
import logging
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

from megatron_async_rl.config.schema import FlowConfig
from megatron_async_rl.flow.buffer import EMPTY
from megatron_async_rl.flow.buffer_file import read, written
from megatron_async_rl.flow.controller import Controller, Source
from megatron_async_rl.flow.engines import RayEngine
from megatron_async_rl.flow.evaluation import EvalResult
from megatron_async_rl.observe import watch
from megatron_async_rl.observe.deadline import name_this_process
from megatron_async_rl.samples.types import Prompt, Sample, TrainBatch

NAME = "controller"


@dataclass(frozen=True, kw_only=True)
class ControllerSpec:
    """What the controller is told at start besides its source and its engines; see Controller and Scheduler."""

    flow: FlowConfig
    log_path: Path
    on_reward_error: Literal["drop", "stop"] = "drop"
    steps: int | None = None
    fresh_steps: int = 0
    seed: int = 0
    capacity: int = 320
    unresponsive_s: float = 60.0


OBJECTS_BETWEEN_COLLECTIONS = 100_000
"""Far more than ten thousand groups in flight gain and lose at a batch; by default Python looks for garbage at 700."""


def collect_rarely() -> None:
    """What this process holds so far is never looked at again for garbage, and what is in flight is looked at rarely.

    Requests and samples live long, are many, and are freed without the collector: going through them time and again takes a
    fifth of the controller's time with 10,000 groups in flight. Garbage that only the collector frees is still freed, later.
    """
    gc.collect()
    gc.freeze()
    gc.set_threshold(OBJECTS_BETWEEN_COLLECTIONS)


class ControllerActor:
    """The methods of Controller, awaitable over Ray. All run on the actor's one asyncio loop."""

    def __init__(self, source: Source, engines: Sequence[Any], evaluators: Sequence[Any], spec: ControllerSpec) -> None:
        spec.log_path.parent.mkdir(parents=True, exist_ok=True)
        handler = logging.FileHandler(spec.log_path, encoding="utf-8")
        handler.setFormatter(logging.Formatter("%(asctime)s %(levelname)s %(message)s"))
        package_log = logging.getLogger("megatron_async_rl")
        package_log.addHandler(handler)
        package_log.setLevel(logging.INFO)
        name_this_process(NAME)
        watch.join(NAME)
        watch.fact("flow", self._describe)
        self._controller = Controller(
            source,
            [RayEngine(engine) for engine in engines],
            spec.flow,
            evaluators=[RayEngine(engine) for engine in evaluators],
            on_reward_error=spec.on_reward_error,
            steps=spec.steps,
            fresh_steps=spec.fresh_steps,
            seed=spec.seed,
            capacity=spec.capacity,
            unresponsive_s=spec.unresponsive_s,
        )
        collect_rarely()

    async def start(self, version: int) -> None:
        self._controller.start(version)

    async def advance(self, version: int) -> None:
        self._controller.advance(version)

    async def next_batch(self, version: int, timeout_s: float) -> TrainBatch | None:
        with watch.doing("wait", f"responses for the batch of version {version}", timeout_s):
            return await self._controller.next_batch(version, timeout_s)

    async def withdraw(self) -> None:
        self._controller.withdraw()

    async def evaluate(
        self, prompts: Sequence[Prompt], n: int, version: int, timeout_s: float, pass_at: Sequence[int], pass_reward: float
    ) -> EvalResult:
        with watch.doing("wait", f"the evaluation of version {version}", timeout_s):
            return await self._controller.evaluate(prompts, n, version, timeout_s, pass_at=pass_at, pass_reward=pass_reward)

    async def lost(self) -> tuple[int, str]:
        return await self._controller.lost()

    async def lose(self, index: int, reason: str) -> None:
        self._controller.lose(index, reason)

    async def replace(self, index: int, engine: Any) -> None:
        self._controller.replace(index, RayEngine(engine))

    async def give_up(self, index: int) -> None:
        self._controller.give_up(index)

    async def position(self) -> tuple[dict[str, Any], bytes]:
        """The state, and the buffer as a file's content, of one moment; engines are listened to while it is written."""
        state, buffer = self._controller.state(), self._controller.buffer()
        return state, await asyncio.to_thread(written, buffer)

    async def load_position(self, state: Mapping[str, Any], buffer: bytes | None, oldest: int) -> None:
        """`buffer`: null where the checkpoint has none. Raises BufferBroken."""
        self._controller.load_state(state, read(buffer) if buffer is not None else EMPTY, oldest)

    async def stats(self) -> dict[str, Any]:
        return self._controller.stats()

    async def drain_dropped(self) -> list[Sample]:
        return self._controller.drain_dropped()

    async def stop(self) -> None:
        await self._controller.stop()

    def _describe(self) -> str:
        stats = self._controller.stats()
        engines = "; ".join(
            f"engine {index}: {'version ' + str(one.version) if one.alive else 'lost'}, {one.in_flight} in flight"
            for index, one in enumerate(stats["engines"])
        )
        oldest = f"the oldest for {stats['oldest_in_flight_s']:.0f} s"
        return f"version {stats['version']}, {stats['waiting']} waiting, {stats['buffer']} ready, {oldest}; {engines}"


def start_controller(source: Source, engines: Sequence[Any], spec: ControllerSpec, evaluators: Sequence[Any] = ()) -> Any:
    """Starts the actor on this machine and returns its handle. `engines`: handles of engine actors; Ray must be initialised."""
    import ray
    from ray.util.scheduling_strategies import NodeAffinitySchedulingStrategy

    remote_class = ray.remote(num_cpus=0, max_restarts=0, max_concurrency=1000)(ControllerActor)
    here = NodeAffinitySchedulingStrategy(ray.get_runtime_context().get_node_id(), soft=False)
    return remote_class.options(name=NAME, scheduling_strategy=here).remote(source, list(engines), list(evaluators), spec)

"""The controller as a Ray actor named `controller`, in a process of its own, so that admission never waits for training."""

from __future__ import annotations

import logging
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, Literal

from megatron_async_rl.config.schema import FlowConfig
from megatron_async_rl.flow.controller import Controller, Source
from megatron_async_rl.flow.engines import RayEngine
from megatron_async_rl.flow.evaluation import EvalResult
from megatron_async_rl.samples.types import Prompt, TrainBatch

NAME = "controller"


class ControllerActor:
    """The methods of Controller, awaitable over Ray. All run on the actor's one asyncio loop."""

    def __init__(
        self,
        source: Source,
        engines: Sequence[Any],
        flow: FlowConfig,
        on_reward_error: Literal["drop", "stop"],
        steps: int | None,
        fresh_steps: int,
        log_path: Path,
    ) -> None:
        log_path.parent.mkdir(parents=True, exist_ok=True)
        handler = logging.FileHandler(log_path, encoding="utf-8")
        handler.setFormatter(logging.Formatter("%(asctime)s %(levelname)s %(message)s"))
        package_log = logging.getLogger("megatron_async_rl")
        package_log.addHandler(handler)
        package_log.setLevel(logging.INFO)
        clients = [RayEngine(engine) for engine in engines]
        self._controller = Controller(
            source, clients, flow, on_reward_error=on_reward_error, steps=steps, fresh_steps=fresh_steps
        )

    async def start(self, version: int) -> None:
        self._controller.start(version)

    async def advance(self, version: int) -> None:
        self._controller.advance(version)

    async def next_batch(self, version: int, timeout_s: float) -> TrainBatch:
        return await self._controller.next_batch(version, timeout_s)

    async def evaluate(self, prompts: Sequence[Prompt], n: int, version: int, timeout_s: float) -> EvalResult:
        return await self._controller.evaluate(prompts, n, version, timeout_s)

    async def state(self) -> dict[str, Any]:
        return self._controller.state()

    async def load_state(self, state: Mapping[str, Any]) -> None:
        self._controller.load_state(state)

    async def stats(self) -> dict[str, float | int]:
        return self._controller.stats()

    async def stop(self) -> None:
        await self._controller.stop()


def start_controller(
    source: Source,
    engines: Sequence[Any],
    flow: FlowConfig,
    *,
    on_reward_error: Literal["drop", "stop"],
    steps: int | None,
    log_path: Path,
    fresh_steps: int = 0,
) -> Any:
    """Starts the actor and returns its handle. `engines`: handles of rollout engine actors; Ray must be initialised."""
    import ray

    remote_class = ray.remote(num_cpus=0, max_restarts=0)(ControllerActor)
    return remote_class.options(name=NAME).remote(source, list(engines), flow, on_reward_error, steps, fresh_steps, log_path)

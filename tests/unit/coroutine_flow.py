"""What tests of the controller share: seven prompts, a flow, and the trainer's side."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Coroutine
from typing import Any

from megatron_async_rl.config.schema import FlowConfig
from megatron_async_rl.data import PromptSource
from megatron_async_rl.flow.controller import Controller
from megatron_async_rl.samples import Group, Prompt
from tests.unit.coroutine_engine import CoroutineEngine

PROMPTS = [Prompt(id=f"p{i}", text=str(i), token_ids=(i,)) for i in range(7)]


def flow(prompts_per_step: int = 3, async_ratio: float = 1.0, **more: Any) -> FlowConfig:
    return FlowConfig(**{"prompts_per_step": prompts_per_step, "group_size": 2, "async_ratio": async_ratio, **more})


def source() -> PromptSource:
    return PromptSource(PROMPTS, seed=5, shuffle=True)


def run(body: Callable[[], Coroutine[Any, Any, None]]) -> None:
    asyncio.run(asyncio.wait_for(body(), 20))


def expected_prompts(count: int) -> list[str]:
    reference = source()
    return [reference.next().id for _ in range(count)]


async def train(controller: Controller, engines: list[CoroutineEngine], first: int, last: int) -> list[Group]:
    """The trainer's side for versions first..last-1; returns the consumed groups in order."""
    groups: list[Group] = []
    for version in range(first, last):
        groups += (await controller.next_batch(version, 10.0)).groups
        for engine in engines:
            engine.version = version + 1
        controller.advance(version + 1)
    return groups

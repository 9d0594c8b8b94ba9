"""A fleet of coroutine engines, and what it hands back."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from typing import Any

from megatron_async_rl.flow.fleet import Fleet
from megatron_async_rl.samples import Sample
from megatron_async_rl.samples.requests import Cut, Request
from tests.unit.coroutine_engine import CoroutineEngine
from tests.unit.coroutine_flow import PROMPTS


def never(request: Request) -> float:
    return 60.0


class Desk:
    """What a fleet hands back."""

    def __init__(self, engines: list[CoroutineEngine], *, capacity: int = 8, unresponsive_s: float = 5.0, **more: Any) -> None:
        self.samples: list[Sample] = []
        self.cuts: list[Cut] = []
        self.lost: list[tuple[int, str]] = []
        self.errors: list[BaseException] = []
        self.fleet = Fleet(
            engines,
            capacity=capacity,
            unresponsive_s=unresponsive_s,
            on_sample=lambda sample, request: self.samples.append(sample),
            on_cut=lambda cut, request: self.cuts.append(cut),
            on_lost=lambda index, reason: self.lost.append((index, reason)),
            on_error=self.errors.append,
            **more,
        )
        self.fleet.start()

    async def until(self, what: Callable[[], object]) -> None:
        while not what():
            await asyncio.sleep(0.002)


def requests(groups: int, size: int = 1, first: int = 0) -> list[Request]:
    return [Request(group=first + g, k=k, prompt=PROMPTS[g % 7]) for g in range(groups) for k in range(size)]


def ids(of: list[Request]) -> list[str]:
    return [request.id for request in of]

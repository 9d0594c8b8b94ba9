"""Watches that vLLM's own process still answers: a cheap question once a second, while it samples
and while it is paused.

Invariant: `silent_s` grows from the last answer on, whatever keeps the next one away; one question
is open at a time.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Awaitable, Callable

from megatron_async_rl.rollout.spec import EngineSpec

EVERY_S = 1.0
DEADLINE_S = 10.0
"""After which a question counts as lost and is asked anew. vLLM answers between two steps, not
while it loads weights."""


class EngineDied(RuntimeError):
    """vLLM's own process ended while the engine was in use."""

    def __init__(self, spec: EngineSpec, while_what: str) -> None:
        super().__init__(f"the vLLM process of {spec.name} died while {while_what}; see {spec.log}")
        self._arguments = (spec, while_what)

    def __reduce__(self) -> tuple[type[EngineDied], tuple[EngineSpec, str]]:
        return (type(self), self._arguments)


class HealthCheck:
    """`ask` is answered by vLLM's process; `dead` says that this process has ended."""

    def __init__(self, ask: Callable[[], Awaitable[object]], dead: Callable[[], bool]) -> None:
        self._ask = ask
        self._dead = dead
        self._answered = time.monotonic()

    @property
    def silent_s(self) -> float:
        return time.monotonic() - self._answered

    async def until_dead(self) -> None:
        """Asks until vLLM's process has ended. Raises what an answer raises."""
        while not self._dead():
            question = asyncio.ensure_future(self._ask())
            asked = time.monotonic()
            while (
                not question.done() and time.monotonic() - asked < DEADLINE_S and not self._dead()
            ):
                await asyncio.wait((question,), timeout=EVERY_S)
            if question.done():
                question.result()
                self._answered = time.monotonic()
                await asyncio.sleep(EVERY_S)
            else:
                question.cancel()

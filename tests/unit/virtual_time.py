"""Coroutines in a time in which nothing takes time: the clock stands while any of them can continue
or a thread works for them, and then moves to the next timer. A test's seconds, deadlines and orders
hold on a machine of any speed."""

from __future__ import annotations

import asyncio
import selectors
import time
from collections.abc import Callable, Coroutine
from typing import Any
from unittest import mock


class _Clock(selectors.DefaultSelector):
    """Clock that jumps to the next timer as soon as the loop would wait for it."""

    def __init__(self) -> None:
        super().__init__()
        self.now = 1000.0
        self.threads = 0
        """Calls that threads work on for the loop, which they wake."""

    def select(self, timeout: float | None = None) -> list[tuple[selectors.SelectorKey, int]]:
        ready = super().select(0)
        if ready or (timeout is not None and timeout <= 0):
            return ready
        if self.threads or timeout is None:
            return super().select(None)
        self.now += timeout
        return []


class _Loop(asyncio.SelectorEventLoop):
    def __init__(self) -> None:
        self._clock = _Clock()
        super().__init__(self._clock)

    def time(self) -> float:
        return self._clock.now

    def run_in_executor(self, executor: Any, call: Callable[..., Any], *arguments: Any) -> Any:
        self._clock.threads += 1
        future = super().run_in_executor(executor, call, *arguments)
        future.add_done_callback(self._ended)
        return future

    def _ended(self, _: asyncio.Future[Any]) -> None:
        self._clock.threads -= 1

    async def shutdown_default_executor(self, timeout: float | None = None) -> None:
        if self._default_executor is not None:  # type: ignore[attr-defined]
            self._default_executor.shutdown()  # type: ignore[attr-defined]


def run[Result](work: Coroutine[Any, Any, Result]) -> Result:
    """`asyncio.run` in such a time, which `time.monotonic` returns, too."""
    with (
        asyncio.Runner(loop_factory=_Loop) as runner,
        mock.patch.object(time, "monotonic", runner.get_loop().time),
    ):
        return runner.run(work)

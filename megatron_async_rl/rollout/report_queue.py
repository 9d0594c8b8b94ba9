"""All that happened on an engine since it was last asked, and the wait for it.

Invariants:
- everything put in is handed out once, in order;
- a failure is handed out before anything else, and again at every later wait: the engine is of no
  more use then.
"""

from __future__ import annotations

import asyncio

from megatron_async_rl.samples import Sample
from megatron_async_rl.samples.types import Aborted

COALESCE_S = 0.005
"""Responses that end within so long travel in one report: one step of vLLM often ends several."""


class ReportQueue:
    """Used by one event loop, emptied by one reader."""

    def __init__(self) -> None:
        self._finished: list[Sample] = []
        self._aborted: list[Aborted] = []
        self._failure: BaseException | None = None
        self._news = asyncio.Event()

    def put(self, outcome: Sample | Aborted) -> None:
        if isinstance(outcome, Aborted):
            self._aborted.append(outcome)
        else:
            self._finished.append(outcome)
        self._news.set()

    def fail(self, error: BaseException) -> None:
        """The first failure counts: the others follow from it."""
        if self._failure is None:
            self._failure = error
        self._news.set()

    async def take(self, timeout_s: float) -> tuple[tuple[Sample, ...], tuple[Aborted, ...]]:
        """Returns what came since the last call, as soon as there is something; nothing
        after `timeout_s`. Raises the failure."""
        try:
            await asyncio.wait_for(self._news.wait(), timeout_s)
            if self._failure is None:
                await asyncio.sleep(COALESCE_S)
        except TimeoutError:
            pass
        if self._failure is not None:
            raise self._failure
        finished, aborted = tuple(self._finished), tuple(self._aborted)
        self._finished, self._aborted = [], []
        self._news.clear()
        return finished, aborted

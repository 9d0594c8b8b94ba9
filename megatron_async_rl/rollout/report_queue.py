"""All that happened on an engine since it was last asked, and the wait for it.

Invariants:
- everything put in is handed out once, in order;
- a failure is handed out before anything else, and again at every later wait: the engine is of no
  more use then.
"""

from __future__ import annotations

import asyncio

import pyarrow as pa

from megatron_async_rl.samples.columns import SampleColumns
from megatron_async_rl.samples.types import Aborted

COALESCE_S = 0.005
"""Responses that end within so long travel in one report: one step of vLLM often ends several."""


class ReportQueue:
    """Used by one event loop, emptied by one reader. Call `notify` after something was appended to
    `finished` or `aborted`."""

    def __init__(self) -> None:
        self.finished = SampleColumns()
        self.aborted: list[Aborted] = []
        self._failure: BaseException | None = None
        self._news = asyncio.Event()

    def notify(self) -> None:
        self._news.set()

    def fail(self, error: BaseException) -> None:
        """The first failure counts: the others follow from it."""
        if self._failure is None:
            self._failure = error
        self._news.set()

    async def take(self, timeout_s: float) -> tuple[pa.RecordBatch, tuple[Aborted, ...]]:
        """Returns what came since the last call, as soon as there is something; nothing
        after `timeout_s`. Samples are rows by columns.SCHEMA. Raises the failure."""
        try:
            await asyncio.wait_for(self._news.wait(), timeout_s)
            if self._failure is None:
                await asyncio.sleep(COALESCE_S)
        except TimeoutError:
            pass
        if self._failure is not None:
            raise self._failure
        aborted, self.aborted = tuple(self.aborted), []
        self._news.clear()
        try:
            return self.finished.take(), aborted
        except Exception as error:
            self.fail(error)
            raise

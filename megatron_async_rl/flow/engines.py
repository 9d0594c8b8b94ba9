"""What the controller needs of a rollout engine, and the engine's Ray form."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, Protocol, cast

from megatron_async_rl.observe.remote import remote_cause
from megatron_async_rl.samples.requests import EngineReport, Request


class EngineClient(Protocol):
    """One engine, seen from the controller."""

    async def submit(self, requests: Sequence[Request]) -> None:
        """Returns once the engine has taken the requests; what becomes of them is in the reports."""
        ...

    async def cut(self, ids: Sequence[str]) -> None:
        """Stops these requests; each is then in a report, as `cut`, or as `finished` if it was quicker. Others are ignored."""
        ...

    async def report(self, timeout_s: float) -> EngineReport:
        """As soon as something finished or was cut, and after `timeout_s` at the latest. One call at a time.

        Raises what ended the engine, or a request of it: after that it is of no more use.
        """
        ...


class RayEngine:
    """A rollout engine that lives in a Ray actor."""

    def __init__(self, handle: Any) -> None:
        self._handle = handle

    async def submit(self, requests: Sequence[Request]) -> None:
        await self._answer(self._handle.submit.remote(list(requests)))

    async def cut(self, ids: Sequence[str]) -> None:
        await self._answer(self._handle.cut.remote(list(ids)))

    async def report(self, timeout_s: float) -> EngineReport:
        return cast(EngineReport, await self._answer(self._handle.report.remote(timeout_s)))

    @staticmethod
    async def _answer(call: Any) -> Any:
        try:
            return await call
        except Exception as error:  # noqa: BLE001 - raised again, as itself
            raise remote_cause(error) from None

"""What the controller needs of a rollout engine, and the engine's Ray form."""

from __future__ import annotations

from typing import Any, Protocol, cast

from megatron_async_rl.observe.remote import remote_cause
from megatron_async_rl.samples.types import Group, Prompt


class EngineClient(Protocol):
    """One engine, seen from the controller."""

    async def generate_group(self, index: int, prompt: Prompt, n: int, admitted_version: int) -> Group:
        """`n` scored responses to `prompt`. Training groups have index >= 0, held-out evaluations a negative one."""
        ...


class RayEngine:
    """A rollout engine that lives in a Ray actor."""

    def __init__(self, handle: Any) -> None:
        self._handle = handle

    async def generate_group(self, index: int, prompt: Prompt, n: int, admitted_version: int) -> Group:
        try:
            return cast(Group, await self._handle.generate_group.remote(index, prompt, n, admitted_version))
        except Exception as error:  # noqa: BLE001 - raised again, as itself
            raise remote_cause(error) from None

"""Shares groups out over the engines: the least loaded one first, in turn among equals."""

from __future__ import annotations

from collections.abc import Sequence

from megatron_async_rl.flow.engines import EngineClient
from megatron_async_rl.flow.errors import EngineFailed
from megatron_async_rl.samples.types import Group, Prompt


class Fleet:
    """`load[e]`: responses engine e is working on. A group stays on one engine."""

    def __init__(self, engines: Sequence[EngineClient]) -> None:
        if not engines:
            raise ValueError("a fleet needs at least one engine")
        self._engines = tuple(engines)
        self.load = [0] * len(self._engines)
        self._turn = 0

    def reserve(self, n: int) -> int:
        """Picks the engine for a group of `n` and counts its load; `generate` gives the load back."""
        count = len(self._engines)
        engine = min(range(count), key=lambda e: (self.load[e], (e - self._turn) % count))
        self._turn = (engine + 1) % count
        self.load[engine] += n
        return engine

    async def generate(self, engine: int, index: int, prompt: Prompt, n: int, version: int) -> Group:
        """Raises EngineFailed, naming engine and group, for whatever goes wrong on the engine's side."""
        try:
            group = await self._engines[engine].generate_group(index, prompt, n, version)
        except Exception as error:
            what = f"{type(error).__name__}: {error}"
            raise EngineFailed(f"engine {engine} failed on group {index} (prompt {prompt.id}): {what}") from error
        finally:
            self.load[engine] -= n
        if group.index != index or group.prompt.id != prompt.id or len(group.samples) != n:
            raise EngineFailed(
                f"engine {engine} was asked for group {index}: {n} samples of prompt {prompt.id}, and answered with "
                f"group {group.index}: {len(group.samples)} samples of prompt {group.prompt.id}"
            )
        return group

"""One engine's place in the fleet: who is in it, what it was asked, and what it said last."""

from __future__ import annotations

import asyncio
from dataclasses import dataclass, field
from typing import Literal

from megatron_async_rl.flow.engines import EngineClient
from megatron_async_rl.samples.requests import EngineReport, Request

Kind = Literal["training", "evaluation"]


@dataclass(eq=False)
class Slot:
    """Another engine in the same place has a slot of its own."""

    index: int
    kind: Kind
    client: EngineClient
    held: dict[str, Request] = field(default_factory=dict)
    cutting: set[str] = field(default_factory=set)
    """Of those held: told to stop, not yet answered."""
    report: EngineReport | None = None
    pump: asyncio.Task[None] | None = None
    alive: bool = True
    lost: str = ""
    """Why it is not alive."""
    restarts: int = 0
    """Engines that were in this place before."""

"""Agents that copy staged weights to memory other than rank 0's. This file has their interface: a
carrier whose engines may run on other machines names a module of this folder, which assigns the
class of its source to `SOURCE` (`config.weights.CarrierCapabilities.agents`).

    relay_agents        server on rank 0's machine ==TCP==> RelayActor, one per machine
    collective_agents   controller --receive--> engine: its workers wait for the version
                                   --send-----> SenderActor ==communicator==> workers

The controller imports these modules, so they import torch only in the processes of agents. The life
cycle of agents is in `flow/distribution.py`.

Invariants:
- an exception that a call raised in an agent is raised in the controller with its own type;
- an agent that fails to start leaves nothing running.
"""

from __future__ import annotations

import importlib
from abc import ABC, abstractmethod
from collections.abc import Awaitable, Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Protocol

from megatron_async_rl.weights.manifest import Manifest, StagedCopy, WeightUpdate


@dataclass(frozen=True, kw_only=True)
class AgentSpec:
    """Settings of one agent. `machine`: id of its Ray node, or an engine's own memory. `index` is
    unique in the run. `transport`: the carrier's name. `silence_s`: longest time without a byte.
    The log is `<transport>-<index>.log` in `log_dir`."""

    index: int
    machine: str
    log_dir: Path
    transport: str
    silence_s: float

    @property
    def name(self) -> str:
        return f"{self.transport}-{self.index}"


class Agent(Protocol):
    """A running agent. `where`: text that names its machine."""

    where: str

    async def fetch(self, version: int, manifest: Manifest) -> StagedCopy: ...
    async def alive(self) -> None:
        """Return at once: a call shows that the agent answers."""

    async def close(self) -> None: ...
    def kill(self) -> None: ...


@dataclass(frozen=True)
class ReceivingEngine:
    """An engine that receives its own copy. `receive`: makes its workers wait for a version, and
    returns before any bytes arrive."""

    name: str
    workers: int
    receive: Callable[[WeightUpdate], Awaitable[None]]


@dataclass(frozen=True, kw_only=True)
class AgentContext:
    """Properties of a run for the source of its agents. `limit_s`: longest wait for a member or a
    byte. `sender_gpu`: rank 0's GPU; None without one. `engine_at`: the engine with this own
    memory (`machine` of an AgentSpec); None if it no longer exists."""

    log_dir: Path
    limit_s: float
    sender_gpu: str | None
    engine_at: Callable[[str], ReceivingEngine | None]


class AgentSource(ABC):
    """Rank 0's end of all agents of a run. Ray must be initialised."""

    @classmethod
    @abstractmethod
    def of(cls, context: AgentContext) -> AgentSource:
        """Return the source. Raises RuntimeError if this machine cannot serve weights."""

    @abstractmethod
    async def launch(self, spec: AgentSpec) -> Agent:
        """Start an agent. Raises the agent's error if it does not start. A cancelled call leaves
        nothing running."""

    def stage(self, version: int, manifest: Manifest) -> None:  # noqa: B027 - most need nothing
        """Let agents fetch `version`."""

    def release(self, version: int) -> None:  # noqa: B027
        """Stop sending versions before `version`: their memory may be overwritten."""

    @abstractmethod
    def close(self) -> None:
        """End the source, after all its agents."""


def agent_source(module: str, context: AgentContext) -> AgentSource:
    """Return the source in `weights/<module>.py`, which a carrier's capabilities name."""
    found = importlib.import_module(f"megatron_async_rl.weights.{module}")
    source: AgentSource = found.SOURCE.of(context)
    return source

"""Staged versions, who reads them, and which of them the memory of machines other than rank 0's
holds, or an engine's own by collective, which counts as a machine. State alone: who waits for it
does so in `updates.py`.

Invariants:
- a copy is here once it is whole and verified, until its place is taken or its machine's relay is
  lost;
- a machine has two at most; the next takes the place of all but the one that came last, as the
  agent has it (weights/relay.py).
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Protocol

from megatron_async_rl.weights.manifest import Copy, Manifest


@dataclass(frozen=True, kw_only=True)
class Staged:
    version: int
    manifest: Manifest
    at: float
    """When it was staged; monotonic seconds."""


class Reader(Protocol):
    """An engine, as far as its weights go."""

    @property
    def index(self) -> int: ...
    @property
    def evaluates(self) -> bool:
        """True for one that only evaluates."""

    @property
    def version(self) -> int:
        """The version it holds, verified; -1: none."""

    @property
    def serving(self) -> bool: ...
    @property
    def busy(self) -> bool:
        """True while it samples, and would stand still to load."""

    @property
    def machine(self) -> str:
        """Where it reads weights; HERE where it is not there yet."""


@dataclass(frozen=True, kw_only=True)
class Transfer:
    """One version on its way to the engines. `seconds`: staging, and from then until the last
    engine so far held it. `paused_s`: longest time that an engine stood still for it."""

    version: int
    nbytes: int
    seconds: float
    paused_s: float


@dataclass(frozen=True, kw_only=True)
class Relayed:
    """One version on its way to other machines. `seconds`: of the machine that took longest;
    `nbytes`: to all of them."""

    version: int
    seconds: float
    nbytes: int


class Copies:
    """By machine; rank 0's is none of them."""

    def __init__(self) -> None:
        self._held: dict[str, dict[int, Staged]] = {}
        """The one that came last is last."""
        self.sending: dict[str, int] = {}
        """Version on its way, read from rank 0's memory."""
        self.last: Relayed | None = None
        """The newest version that reached a machine."""

    def find(self, machine: str, version: int) -> Staged | None:
        return self._held.get(machine, {}).get(version)

    def newest(self, machine: str) -> Staged | None:
        held = self._held.get(machine)
        return held[max(held)] if held else None

    def replaced(self, machine: str) -> list[int]:
        """Versions whose place the next one takes."""
        return list(self._held.get(machine, ()))[:-1]

    def begin(self, machine: str, version: int) -> None:
        """`version` is on its way; what it replaces is gone."""
        for old in self.replaced(machine):
            del self._held[machine][old]
        self.sending[machine] = version

    def end(self, machine: str) -> None:
        """Nothing is on its way there any more."""
        self.sending.pop(machine, None)

    def add(self, machine: str, staged: Staged, arrived: Copy) -> None:
        """`staged` is whole in that machine's memory, as `arrived` has it."""
        copy = replace(staged, manifest=arrived.manifest)
        self._held.setdefault(machine, {})[staged.version] = copy
        last, seconds, nbytes = self.last, arrived.seconds, arrived.nbytes
        if last is not None and last.version > staged.version:
            return
        if last is not None and last.version == staged.version:
            seconds, nbytes = max(seconds, last.seconds), nbytes + last.nbytes
        self.last = Relayed(version=staged.version, seconds=seconds, nbytes=nbytes)

    def lose(self, machine: str) -> None:
        """The machine's agent is lost, and its copies with it."""
        self._held.pop(machine, None)

"""Staged versions, who reads them, which of them the memory of machines other than rank 0's holds,
or an engine's own by collective, which counts as a machine; and where the buckets of an on-demand
version are. State alone: who waits for it does so in `updates.py`.

Invariants:
- a copy is here once it is whole and verified, until its place is taken or its machine's relay is
  lost;
- a machine has two at most; the next replaces all but the newest, as in the agent
  (weights/relay.py);
- a place of an on-demand version is filled only while no engine reads it. An engine that is behind
  is waited for, so that each bucket is filled once for all that load; a lost engine is no longer
  waited for.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Protocol

from megatron_async_rl.weights.manifest import IN_FLIGHT, BucketRef, Manifest, StagedCopy


@dataclass(frozen=True, kw_only=True)
class Staged:
    version: int
    manifest: Manifest
    at: float
    """When it was staged; monotonic seconds."""


class VersionReader(Protocol):
    """An engine, as far as its weights go."""

    @property
    def index(self) -> int: ...
    @property
    def evaluates(self) -> bool:
        """True for an engine that only evaluates."""

    @property
    def version(self) -> int:
        """The version it holds, verified; -1: none."""

    @property
    def there(self) -> bool:
        """True from its start on, until it is lost."""

    @property
    def serving(self) -> bool: ...
    @property
    def busy(self) -> bool:
        """True while it samples, and would have to pause to load."""

    @property
    def machine(self) -> str:
        """Machine from which the engine reads weights; HERE before the engine has started."""


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


class VersionCopies:
    """The staged copies of weight versions on other machines than rank 0's, by machine."""

    def __init__(self) -> None:
        self._held: dict[str, dict[int, Staged]] = {}
        """Copies by version, the newest last."""
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

    def add(self, machine: str, staged: Staged, arrived: StagedCopy) -> None:
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


@dataclass(frozen=True, kw_only=True)
class BufferRequest:
    """An order to all ranks: put bucket `number` of a version into a place, or, with null, give the
    memory of all places back."""

    version: int
    number: int | None
    place: int = 0


class IpcBucketQueue:
    """The buckets of one version. An engine requests a bucket, reads it once it is in a place, and
    then requests the next."""

    def __init__(self, version: int, count: int) -> None:
        self.version = version
        self._count = count
        self._requested: dict[int, int] = {}
        self._reads: dict[int, int] = {}
        """Bucket by engine."""
        self._there: list[int | None] = [None] * IN_FLIGHT
        self._refs: dict[int, BucketRef] = {}
        """Buckets that are there, by their numbers."""
        self._filling: BufferRequest | None = None
        self._taken = False
        """The ranks hold memory for places."""

    def request(self, engine: int, number: int) -> None:
        self._requested[engine] = number

    def take(self, engine: int) -> BucketRef | None:
        """The bucket that it requested, which it reads from now on; null while it is not there."""
        ref = self._refs.get(self._requested[engine])
        if ref is not None:
            self._reads[engine] = self._requested.pop(engine)
        return ref

    def leave(self, engine: int) -> None:
        """Record that it neither reads nor requests anything."""
        self._requested.pop(engine, None)
        self._reads.pop(engine, None)

    def next_buffer_request(self) -> BufferRequest | None:
        """Returns what the ranks are to do now; null: nothing."""
        if self._filling is not None:
            return None
        reads = set(self._reads.values())
        soon = reads | {n for n in self._requested.values() if n in self._refs}
        ahead = {*self._requested.values(), *(n + 1 for n in soon if n + 1 < self._count)}
        if not self._requested and not reads:
            if not self._taken:
                return None
            self._taken, self._there, self._refs = False, [None] * IN_FLIGHT, {}
            return BufferRequest(version=self.version, number=None)
        free = [place for place, n in enumerate(self._there) if n not in ahead | reads]
        missing = ahead.difference(self._there)
        if not free or not missing:
            return None
        place, number = free[0], min(missing)
        gone = self._there[place]
        if gone is not None:
            del self._refs[gone]
        self._there[place], self._taken = None, True
        self._filling = BufferRequest(version=self.version, number=number, place=place)
        return self._filling

    def buffer_filled(self, ref: BucketRef | None) -> None:
        """The ranks have done what they were to do."""
        fill, self._filling = self._filling, None
        if fill is not None and fill.number is not None and ref is not None:
            self._there[fill.place] = fill.number
            self._refs[fill.number] = ref

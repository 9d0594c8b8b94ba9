"""State of weight updates: the staged version, its readers, its copies in memory other than rank
0's, and the engines that may pause for it. A `machine` here is one memory: with the collective
carrier, each engine has its own.

    rank 0 --stage--> newest ---------------loading--> engines of its machine, each in its turn
                         +--sending--> copy --loading--> engines of another machine
    rank 0 <--until_released-- no engine reads an older version: its slot may be written again

Invariants:
- an engine loads the newest staged version, an evaluation engine the version that it must evaluate;
  on a machine other than rank 0's, an engine loads only versions that have a copy there;
- a copy exists from the moment it is whole and verified until it is overwritten or its agent is
  lost. A machine has at most two; the next replaces all but the newest, as in the agent
  (weights/relay.py);
- a machine's copy, like rank 0's slot, is overwritten only when no engine reads it;
- of the engines that have work, at most `max_paused` pause at a time, and always at least one may;
  an engine that has no work, sleeps, or does not serve yet loads at once;
- every wait is for a version number or for a turn: a condition that was reached stays true;
- colocated: while the policy has the devices, no engine starts, loads or wakes. No engine loads a
  version that is filled on demand while another starts and measures its device's free memory;
- after `halt` no engine loads, and every wait for a version raises its error.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import AsyncIterator, Callable, Container, Iterable, Iterator
from contextlib import asynccontextmanager, contextmanager
from dataclasses import dataclass, replace
from typing import Protocol

from megatron_async_rl.flow.errors import FlowError
from megatron_async_rl.flow.ipc_buckets import BufferRequest, IpcBucketQueue
from megatron_async_rl.rollout.spec import HERE
from megatron_async_rl.weights.manifest import BucketRef, Manifest, StagedCopy


@dataclass(frozen=True, kw_only=True)
class Staged:
    version: int
    manifest: Manifest
    at: float
    """Time of staging; monotonic seconds."""


class VersionReader(Protocol):
    """An engine as a reader of weights."""

    @property
    def index(self) -> int: ...
    @property
    def evaluates(self) -> bool:
        """True for an engine that only evaluates."""

    @property
    def version(self) -> int:
        """Version that the engine holds, verified; -1: none."""

    @property
    def there(self) -> bool:
        """True from the engine's start until it is lost."""

    @property
    def serving(self) -> bool: ...
    @property
    def busy(self) -> bool:
        """True while the engine samples, and would have to pause to load."""

    @property
    def machine(self) -> str:
        """Machine from which the engine reads weights; HERE before the engine has started."""


@dataclass(frozen=True, kw_only=True)
class Transfer:
    """An update. `seconds`: from staging to the last engine. `paused_s`: longest pause for it."""

    version: int
    nbytes: int
    seconds: float
    paused_s: float


@dataclass(frozen=True, kw_only=True)
class Relayed:
    """One version on its way to other machines. `seconds`: time of the slowest machine; `nbytes`:
    total for all of them."""

    version: int
    seconds: float
    nbytes: int


class VersionCopies:
    """Staged copies of versions on machines other than rank 0's, by machine."""

    def __init__(self) -> None:
        self._held: dict[str, dict[int, Staged]] = {}
        """Copies by version, the newest last."""
        self.sending: dict[str, int] = {}
        """Version by machine that is being sent, and read from rank 0's memory."""
        self.last: Relayed | None = None
        """The newest version that reached a machine."""

    def find(self, machine: str, version: int) -> Staged | None:
        return self._held.get(machine, {}).get(version)

    def newest(self, machine: str) -> Staged | None:
        held = self._held.get(machine)
        return held[max(held)] if held else None

    def replaced(self, machine: str) -> list[int]:
        """Return the versions that the next version overwrites."""
        return list(self._held.get(machine, ()))[:-1]

    def begin(self, machine: str, version: int) -> None:
        """Record that `version` is being sent and that the versions it overwrites are gone."""
        # The agent overwrites that slot now, so an engine must no longer find the old copy.
        for old in self.replaced(machine):
            del self._held[machine][old]
        self.sending[machine] = version

    def end(self, machine: str) -> None:
        """Record that nothing is being sent there any more."""
        self.sending.pop(machine, None)

    def add(self, machine: str, staged: Staged, arrived: StagedCopy) -> None:
        """Record that `staged` is whole in that machine's memory, at the addresses of `arrived`."""
        copy = replace(staged, manifest=arrived.manifest)
        self._held.setdefault(machine, {})[staged.version] = copy
        last, seconds, nbytes = self.last, arrived.seconds, arrived.nbytes
        if last is not None and last.version > staged.version:
            return
        if last is not None and last.version == staged.version:
            seconds, nbytes = max(seconds, last.seconds), nbytes + last.nbytes
        self.last = Relayed(version=staged.version, seconds=seconds, nbytes=nbytes)

    def lose(self, machine: str) -> None:
        """Forget the copies of a machine whose agent is lost."""
        # Only the record: engines that have mapped the memory continue to read it.
        self._held.pop(machine, None)


class Signal:
    """Condition variable of one event loop. It wakes its waiters each time a condition of theirs
    may have changed."""

    def __init__(self) -> None:
        self._event = asyncio.Event()

    def fire(self) -> None:
        self._event.set()
        # A new event: tasks that wait from now on wait for the next change.
        self._event = asyncio.Event()

    async def until(self, condition: Callable[[], object]) -> None:
        while not condition():
            await self._event.wait()


class WeightUpdates:
    """All versions and their readers. `engines`: all engines. `max_paused`: share of the serving
    engines."""

    def __init__(self, engines: Callable[[], Iterable[VersionReader]], max_paused: float) -> None:
        self._engines = engines
        self._max_paused = max_paused
        self._requested: dict[int, Staged] = {}
        """Versions that evaluation engines must load, by index."""
        self._loading: dict[int, tuple[str, int]] = {}
        """Machine and version that an engine is reading, by engine."""
        self._paused: set[int] = set()
        self._starting = 0
        self._ending = 0
        self._policy_has_devices = False
        self._halted: BaseException | None = None
        self._changed = Signal()
        self._ipc_buckets: IpcBucketQueue | None = None
        """Buckets of the newest version, if they are filled on demand."""
        self.copies = VersionCopies()
        self.newest: Staged | None = None
        self.last: Transfer | None = None
        """The newest version that an engine has loaded; none before the first."""

    def stage(self, version: int, manifest: Manifest) -> None:
        """Let engines read `version`, and return the devices to them. Raises ValueError unless it
        is newer."""
        if self.newest is not None and version <= self.newest.version:
            raise ValueError(
                f"version {version} was staged after version {self.newest.version}: versions only"
                " grow"
            )
        self.newest = Staged(version=version, manifest=manifest, at=time.monotonic())
        self._ipc_buckets = (
            IpcBucketQueue(version, len(manifest.buckets)) if manifest.on_demand else None
        )
        # Staging is the policy's last step on the devices (device_phases.py).
        self._policy_has_devices = False
        self._changed.fire()

    async def until_staged(self, version: int) -> None:
        """Wait until `version` or a newer one is staged, because the second of two calls to an
        actor may arrive first. Raises the error passed to `halt`."""
        await self._changed.until(
            lambda: (
                self._halted is not None
                or (self.newest is not None and self.newest.version >= version)
            )
        )
        if self._halted is not None:
            raise self._halted

    async def until_released(self, version: int) -> None:
        """Wait until no engine reads, or will read, a version before `version`. Raises the error
        passed to `halt`; some engines may still be reading then."""
        await self._changed.until(
            lambda: self._halted is not None or min(self._in_use(), default=version) >= version
        )
        if self._halted is not None:
            raise self._halted

    def _in_use(self) -> Iterator[int]:
        """Yield the versions that are read, or will be read, from rank 0's memory."""
        yield from (version for machine, version in self._loading.values() if machine == HERE)
        # A send reads rank 0's slot until it ends, even if its machine's engines are gone.
        yield from self.copies.sending.values()
        machines = {one.index: one.machine for one in self._engines()}
        # Not being read yet, but it will be, so it must not be overwritten before.
        for index, wanted in self._requested.items():
            if self.copies.find(machines.get(index, HERE), wanted.version) is None:
                yield wanted.version

    def request_version(self, indices: Iterable[int], version: int) -> None:
        """Let evaluation engines load `version`. Raises FlowError unless it is the newest."""
        if self.newest is None or self.newest.version != version:
            staged = "none" if self.newest is None else self.newest.version
            raise FlowError(
                f"version {version} must be evaluated, and the staged version is {staged}"
            )
        # These engines have nothing to load, and would stay in the table forever.
        holds = {one.index for one in self._engines() if one.version == version}
        self._requested |= dict.fromkeys(set(indices) - holds, self.newest)
        self._changed.fire()

    def is_requested(self, index: int) -> bool:
        """Return True until the engine has loaded the version that it must evaluate."""
        return index in self._requested

    def forget(self, index: int) -> None:
        """Record that the engine is lost or leaves, and no longer reads."""
        self._requested.pop(index, None)
        self._loading.pop(index, None)
        self._paused.discard(index)
        self.release(index)

    def halt(self, error: BaseException) -> None:
        """Stop all loading, because the weights are wrong."""
        # Never reset: an engine with wrong weights may have sampled.
        self._halted = error
        self._changed.fire()

    @asynccontextmanager
    async def loading(self, engine: VersionReader) -> AsyncIterator[Staged]:
        """Wait until there is a version for `engine` to load and it is the engine's turn; the body
        loads it."""
        await self._changed.until(lambda: self._may_load(engine))
        staged = self._target(engine)
        assert staged is not None
        # No await since the wait ended: no other task can have taken the slot or the pause.
        self._loading[engine.index] = engine.machine, staged.version
        if engine.serving and engine.busy:
            self._paused.add(engine.index)
        began = time.monotonic()
        try:
            yield staged
            # Only after the body: a failed load does not count as a transfer.
            self._note(staged, began)
        finally:
            wanted = self._requested.get(engine.index)
            # A newer request may have arrived meanwhile; it stays.
            if wanted is not None and wanted.version == staged.version:
                del self._requested[engine.index]
            self._loading.pop(engine.index, None)
            self._paused.discard(engine.index)
            self._changed.fire()

    def _target(self, engine: VersionReader) -> Staged | None:
        """Return the version that the engine can load from its machine's memory."""
        aim, machine = self._aim(engine), engine.machine
        if aim is None or machine == HERE:
            return aim
        if engine.evaluates:
            return self.copies.find(machine, aim.version)
        copy = self.copies.newest(machine)
        return copy if copy is not None and copy.version > engine.version else None

    def _aim(self, engine: VersionReader) -> Staged | None:
        """Return the version that the engine should load."""
        staged = self._requested.get(engine.index) if engine.evaluates else self.newest
        return staged if staged is not None and staged.version > engine.version else None

    def _may_load(self, engine: VersionReader) -> bool:
        starts = self._ipc_buckets is not None and self._starting > 0
        held_back = self._halted is not None or self._policy_has_devices or starts
        if held_back or self._target(engine) is None:
            return False
        serving = sum(one.serving and not one.evaluates for one in self._engines())
        # At least one: with few engines the share rounds to zero.
        room = len(self._paused) < max(1, int(self._max_paused * serving))
        return room or engine.evaluates or not (engine.serving and engine.busy)

    def _note(self, staged: Staged, began: float) -> None:
        now, last = time.monotonic(), self.last
        paused_s = now - began
        if last is not None and last.version > staged.version:
            return
        if last is not None and last.version == staged.version:
            paused_s = max(paused_s, last.paused_s)
        self.last = Transfer(
            version=staged.version,
            nbytes=staged.manifest.nbytes,
            seconds=staged.manifest.seconds + now - staged.at,
            paused_s=paused_s,
        )

    # Copies on other machines

    async def until_elsewhere(self, known: Container[str]) -> str:
        """Return a machine other than rank 0's that has an engine and is not in `known`."""

        def found() -> list[str]:
            machines = (one.machine for one in self._engines())
            return [machine for machine in machines if machine != HERE and machine not in known]

        await self._changed.until(found)
        return found()[0]

    def reaches(self, machine: str) -> bool:
        """Return True while an engine is on that machine."""
        return any(one.machine == machine for one in self._engines())

    async def until_reached(self, machine: str) -> None:
        """Wait until an engine is on that machine."""
        await self._changed.until(lambda: self.reaches(machine))

    async def until_left(self, machine: str) -> None:
        """Wait until no engine is on that machine."""
        await self._changed.until(lambda: not self.reaches(machine))

    async def until_unread(self, machine: str) -> None:
        """Wait until no engine reads a copy there."""
        await self._changed.until(
            lambda: all(where != machine for where, _ in self._loading.values())
        )

    @asynccontextmanager
    async def sending(self, machine: str, at_once: float) -> AsyncIterator[Staged]:
        """Wait until an engine there needs a version that its machine lacks, until the machine has
        room for it, and until fewer than `at_once` machines receive. The body sends the version and
        reports its arrival."""
        await self._changed.until(
            lambda: len(self.copies.sending) < at_once and self._may_send(machine)
        )
        staged = self._to_send(machine)
        assert staged is not None
        self.copies.begin(machine, staged.version)
        try:
            yield staged
        finally:
            self.copies.end(machine)
            self._changed.fire()

    def arrived(self, machine: str, staged: Staged, copy: StagedCopy) -> None:
        """Record that the version has arrived."""
        self.copies.add(machine, staged, copy)
        self._changed.fire()

    def lose_copies(self, machine: str) -> None:
        """Forget the copies of a machine whose agent is lost. Engines that read them may
        continue."""
        self.copies.lose(machine)
        self._changed.fire()

    def _to_send(self, machine: str) -> Staged | None:
        """Return the oldest version that an engine there must load and its machine lacks."""
        aims = [self._aim(one) for one in self._engines() if one.machine == machine]
        missing = [
            aim
            for aim in aims
            if aim is not None and self.copies.find(machine, aim.version) is None
        ]
        # The oldest, because rank 0 may wait to overwrite it.
        return min(missing, key=lambda aim: aim.version, default=None)

    def _may_send(self, machine: str) -> bool:
        if self._halted is not None or self._to_send(machine) is None:
            return False
        needed = {version for where, version in self._loading.values() if where == machine}
        needed |= {
            wanted.version
            for one in self._engines()
            if one.machine == machine and (wanted := self._requested.get(one.index)) is not None
        }
        # The agent overwrites the versions that it replaces: no engine may read or need them.
        return needed.isdisjoint(self.copies.replaced(machine))

    # Colocated: whose turn it is on the devices

    @asynccontextmanager
    async def starting(self) -> AsyncIterator[None]:
        """Wait until the policy has released the devices; the body starts an engine."""
        await self._changed.until(
            lambda: not self._policy_has_devices and not (self._ipc_buckets and self._loading)
        )
        # Counted, because the policy waits for starts that have begun.
        self._starting += 1
        try:
            yield
        finally:
            self._starting -= 1
            self._changed.fire()

    @contextmanager
    def ending(self) -> Iterator[None]:
        """Keep the devices from the policy while the body ends a lost engine."""
        self._ending += 1
        try:
            yield
        finally:
            self._ending -= 1
            self._changed.fire()

    async def give_devices_to_policy(self) -> None:
        """Give the devices to the policy until the next version is staged. Return when no engine is
        starting, loading or ending."""
        # First, so that nothing new begins during the wait.
        self._policy_has_devices = True
        await self._changed.until(
            lambda: not self._starting and not self._loading and not self._ending
        )

    # Buckets filled on demand

    async def until_loaded(self, version: int) -> None:
        """Wait until every present engine holds `version` or a newer one. Raises the error passed
        to `halt`."""
        await self._changed.until(
            lambda: (
                self._halted is not None
                or all(one.version >= version for one in self._engines() if one.there)
            )
        )
        if self._halted is not None:
            raise self._halted

    def held(self) -> None:
        """Record that an engine holds another version than before."""
        self._changed.fire()

    async def acquire(self, engine: int, number: int) -> BucketRef:
        """Return a bucket of the version that the engine is loading, once it is filled. The engine
        reads it until `release`."""
        # A local reference, because a newer version may be staged during the wait.
        ipc_buckets = self._ipc_buckets
        assert ipc_buckets is not None, "an on-demand version is loading"
        ipc_buckets.request(engine, number)
        self._changed.fire()
        found: list[BucketRef] = []

        def there() -> bool:
            found.extend(ref for ref in (ipc_buckets.take(engine),) if ref is not None)
            return bool(found)

        await self._changed.until(there)
        return found[0]

    def release(self, engine: int) -> None:
        """Record that the engine no longer reads a bucket or waits for one."""
        if self._ipc_buckets is not None:
            self._ipc_buckets.leave(engine)
        self._changed.fire()

    async def next_buffer_request(self, done: BucketRef | None) -> BufferRequest:
        """Return the ranks' next request. `done`: location of the bucket requested last."""
        if self._ipc_buckets is not None:
            self._ipc_buckets.buffer_filled(done)
            self._changed.fire()
        found: list[BufferRequest] = []

        def wanted() -> bool:
            found.extend(
                fill
                for fill in (self._ipc_buckets and self._ipc_buckets.next_buffer_request(),)
                if fill
            )
            return bool(found)

        await self._changed.until(wanted)
        return found[0]

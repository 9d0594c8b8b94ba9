"""Life of one engine, from its first start to its end: one asyncio task.

         +---------------------------------------------------------------+
         v                                                               |
    start --> load the newest staged version --> serve, and load newer --+--> lost: kill what is
         (verified digest by digest)               versions in turn      |    left, back off
                                                                         +--- start again
Invariants:
- an engine serves only once it has proved the digests of the version that it holds. Only this file
  records the version that an engine holds;
- an engine is lost when a call fails, when its reports or its vLLM are silent for `unresponsive_s`,
  or when it answers something that was not requested. It is killed at once, its requests go to
  other engines, and its later reports are ignored;
- restarts follow each other after a growing, random delay, at most `restarts_per_hour` within an
  hour; after that the engine is dead;
- the first start of a configured engine must succeed: it shows that the settings work;
- a sleeping engine loads a version step by step, in the order of `device_phases.py`;
- weights that differ from the trainer's end the run.
"""

from __future__ import annotations

import asyncio
import logging
import random
import time
from collections import deque
from collections.abc import Awaitable, Callable, Mapping
from dataclasses import dataclass, field
from typing import NoReturn, Protocol

from megatron_async_rl.flow.device_phases import DevicePhases, Phase
from megatron_async_rl.flow.updates import Staged, WeightUpdates
from megatron_async_rl.rollout.engine_process import Engine, EngineStartError
from megatron_async_rl.rollout.spec import HERE, EngineSpec
from megatron_async_rl.samples.rows import EngineReport, SampleRow
from megatron_async_rl.samples.types import Request
from megatron_async_rl.watchdog import watch
from megatron_async_rl.watchdog.events import described, out_of_memory, with_notes
from megatron_async_rl.watchdog.host_memory import MemoryKind
from megatron_async_rl.watchdog.watch import await_named, cancel_all
from megatron_async_rl.weights.manifest import Manifest, WeightMismatch, require_equal

log = logging.getLogger(__name__)

REPORT_S = 1.0
"""Longest time between two reports of an engine without news; a quarter of `unresponsive_s` if that
is less."""
HOUR_S = 3600.0
FIRST_DELAY_S = 0.5
LONGEST_DELAY_S = 60.0
LOSSES_BEFORE_ALONE = 2
LOOK_S = 10.0
"""Longest time for the check whether an engine's machine is still in the cluster."""


class Launch(Protocol):
    """Start an engine. `again`: it replaces an engine that was lost."""

    def __call__(self, spec: EngineSpec, *, again: bool) -> Awaitable[Engine]: ...


class EngineLost(RuntimeError):
    """The engine can no longer be used. `suspect`: one of its requests may be the reason. No
    request is the reason if the engine was removed, if something else ended it (a preemption, Ray's
    memory monitor), if its machine left the cluster, or if it failed to load weights, to sleep, or
    to name the request that it answers."""

    def __init__(self, reason: str, *, suspect: bool = True) -> None:
        super().__init__(reason)
        self.suspect = suspect


@dataclass(eq=False)
class PendingRequest:
    """A request, and the engines that may answer it: those that hold at least version
    `minimum_version`. `answer`: result of an evaluation's request, which only engines with exactly
    that version may answer. `losses`: number of engines that were lost while they had the request,
    if it may be the reason."""

    request: Request
    minimum_version: int
    answer: asyncio.Future[SampleRow] | None = None
    losses: int = 0

    @property
    def alone(self) -> bool:
        """True if the request must run alone on its engine, so that the next loss shows whether it
        is the reason."""
        return self.losses >= LOSSES_BEFORE_ALONE


@dataclass(eq=False)
class EngineSlot:
    """One engine's place in the fleet: its version, its requests, and its last report. Only its
    task and the fleet write it."""

    spec: EngineSpec
    evaluates: bool = False
    """True for an engine that only evaluates."""
    engine: Engine | None = None
    version: int = -1
    serving: bool = False
    leaving: bool = False
    asleep: bool = False
    """Colocated: True from a batch until the engine has loaded newer weights, which wake it."""
    dead: bool = False
    """True once the engine will not be restarted."""
    lost: str = ""
    """Reason why the engine is absent."""
    memory_out: tuple[Phase, MemoryKind] | None = None
    """Phase and memory, if the engine was lost because memory ran out."""
    restarts: int = 0
    held: dict[str, PendingRequest] = field(default_factory=dict)
    aborting: set[str] = field(default_factory=set)
    """Ids of the held requests that the engine must abort."""
    report: EngineReport | None = None

    @property
    def index(self) -> int:
        return self.spec.index

    @property
    def name(self) -> str:
        return self.spec.name

    @property
    def there(self) -> bool:
        return self.engine is not None

    @property
    def busy(self) -> bool:
        return bool(self.held) and not self.asleep

    @property
    def machine(self) -> str:
        return HERE if self.engine is None else self.engine.machine


class EngineOwner(Protocol):
    """The fleet, which is notified of an engine's events."""

    def take_in(self, slot: EngineSlot, report: EngineReport) -> None:
        """Process a report. Raises EngineLost for an answer to something that was not requested."""

    def on_loaded(self, slot: EngineSlot, version: int, digests: Mapping[str, str]) -> None:
        """Record the digests of the weights in the engine's memory, right or wrong."""

    def on_version(self, slot: EngineSlot) -> None:
        """Record that the engine serves with `slot.version`."""

    def on_lost(self, slot: EngineSlot, reason: str, *, suspect: bool) -> None: ...
    def on_dead(self, slot: EngineSlot) -> None: ...
    def on_error(self, error: BaseException) -> None:
        """End the run."""


class Restarts:
    """Limit of an engine's restarts. `now`: seconds of a clock that never goes back."""

    def __init__(
        self,
        per_hour: int,
        now: Callable[[], float] = time.monotonic,
        chance: Callable[[], float] = random.random,
    ) -> None:
        self.per_hour = per_hour
        self._now = now
        self._chance = chance
        self._begun: deque[float] = deque()

    def begin(self) -> int:
        """Count one more start; return its number within the hour, or 0 if the limit of the hour is
        reached."""
        while self._begun and self._now() - self._begun[0] >= HOUR_S:
            self._begun.popleft()
        if len(self._begun) >= self.per_hour:
            return 0
        self._begun.append(self._now())
        return len(self._begun)

    def delay_s(self) -> float:
        """Return the delay before the start counted last: doubled with every start of the hour,
        times 0.5 to 1.5."""
        longest = min(LONGEST_DELAY_S, FIRST_DELAY_S * 2 ** (len(self._begun) - 1))
        # Random: engines that were lost together must not start together.
        return longest * (0.5 + self._chance())


class EngineTask:
    """Task of one engine. `update_timeout_s`: longest time to load a version. `note`: shows a text
    to the user. `must_start`: its first start must succeed."""

    def __init__(
        self,
        slot: EngineSlot,
        owner: EngineOwner,
        updates: WeightUpdates,
        launch: Launch,
        *,
        unresponsive_s: float,
        update_timeout_s: float,
        restarts: Restarts,
        note: Callable[[str], None],
        must_start: bool,
    ) -> None:
        self.slot = slot
        self._owner = owner
        self._updates = updates
        self._launch = launch
        self._unresponsive_s = unresponsive_s
        self._update_timeout_s = update_timeout_s
        self._restarts = restarts
        self._note = note
        self._must_start = must_start
        self._comes = "" if must_start else "has joined"
        self._failed: asyncio.Future[None] | None = None
        self._phases = DevicePhases("engine", "generate")
        self.started: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        """Done after the first start; raises EngineStartError."""
        self.task = asyncio.create_task(self._run(), name=slot.name)

    def fail(
        self,
        engine: Engine,
        reason: str,
        *,
        suspect: bool = True,
        cause: BaseException | None = None,
    ) -> None:
        """Lose `engine` because a call to it failed, by `cause`. Does nothing if it was lost
        before."""
        # A late failure of an earlier engine must not cost the present one.
        if self.slot.engine is engine and self._failed is not None and not self._failed.done():
            lost = EngineLost(reason, suspect=suspect)
            lost.__cause__ = cause
            self._failed.set_exception(lost)

    async def sleep(self, timeout_s: float) -> None:
        """Make the engine release its memory until it takes newer weights. An engine that fails is
        lost, and has ended before this returns: the policy counts on its memory."""
        engine, what = self.slot.engine, f"{self.slot.name} to sleep"
        if engine is None:  # lost meanwhile
            return
        self.slot.asleep = True
        try:
            with self._phases.phase("train"), self._phases.step("sleep"):
                await await_named(what, engine.sleep(), timeout_s)
        except Exception as error:  # noqa: BLE001 - whatever the error, this engine is unusable
            reason = f"it failed to sleep: {described(error)}"
            self.fail(engine, reason, suspect=False, cause=error)
            # Its memory is free only when its processes have ended.
            await self._end(engine)

    async def _run(self) -> None:
        try:
            again = False
            while not self.slot.leaving:
                error = await self._life(again=again)
                again = True
                if not self.started.done() and self._must_start:
                    # `Fleet.started` raises it: the run ends before it has trained.
                    self.started.set_exception(error)
                    return
                if self.slot.leaving or not await self._wait_for_restart(error):
                    return
        except WeightMismatch as error:
            self._owner.on_error(error)
        except Exception as error:  # noqa: BLE001 - an internal error must end the run, not a task
            self._owner.on_error(error)
        finally:
            if not self.started.done():
                self.started.cancel()

    async def _life(self, *, again: bool) -> Exception:
        """Start the engine and use it until it is lost; return the reason. Raises
        WeightMismatch."""
        slot = self.slot
        engine: Engine | None = None
        try:
            # A starting engine measures free memory, so the policy must have released the devices.
            async with self._updates.starting():
                engine = slot.engine = await self._launch(slot.spec, again=again)
            # One per start: calls to the engine before this one cannot fail it.
            self._failed = asyncio.get_running_loop().create_future()
            self._phases = DevicePhases("engine", "generate")
            if not self.started.done():
                self.started.set_result(None)
            if slot.spec.first_version >= 0:
                self._serve(slot.spec.first_version)
            await self._use(engine, self._failed)
        except WeightMismatch:
            raise
        except Exception as error:  # noqa: BLE001 - another engine may work, whatever the error
            suspect = isinstance(error, EngineLost) and error.suspect
            # Before any await: from here on it gets nothing, and its reports are ignored.
            slot.engine, slot.serving, slot.asleep, slot.version = None, False, False, -1
            phase = error.phase if isinstance(error, EngineStartError) else self._phases.current
            memory = out_of_memory(error)
            slot.memory_out = (phase, memory) if memory is not None else None
            # Rank 0 waits for readers, and this engine no longer reads.
            self._updates.forget(slot.index)
            if suspect and engine is not None:
                suspect = not await self._has_lost_its_machine(engine)
            # Before the engine has ended, which may take long: its requests go elsewhere at once.
            self._owner.on_lost(slot, with_notes(error), suspect=suspect)
            if engine is not None:
                # Until it has ended it may hold device memory that the policy needs.
                with self._updates.ending():
                    await self._end(engine)
            return error

    async def _has_lost_its_machine(self, engine: Engine) -> bool:
        """Return True if the machine left the cluster; False if that is unknown in time."""
        try:
            return await asyncio.wait_for(engine.machine_is_lost(), LOOK_S)
        except Exception as error:  # noqa: BLE001 - the engine is lost, whatever the check finds
            log.warning("%s: is its machine there? %s", self.slot.name, described(error))
            return False

    async def _end(self, engine: Engine) -> None:
        """Kill the engine and wait until it has ended: the next owner of its devices needs their
        memory."""
        engine.kill()
        try:
            await await_named(
                f"{self.slot.name}, killed, to end", engine.until_ended(), self._unresponsive_s
            )
        except TimeoutError as error:
            self._note(str(error))

    async def _wait_for_restart(self, error: Exception) -> bool:
        """Wait for the next start. Return False if there will be none."""
        slot, number = self.slot, self._restarts.begin()
        if not number:
            slot.dead = True
            self._owner.on_dead(slot)
            return False
        self._note(
            f"{slot.name} is lost and its requests are sent again; restart {number} of"
            f" {self._restarts.per_hour} within an hour. Why: {with_notes(error)}"
        )
        slot.restarts += 1
        await asyncio.sleep(self._restarts.delay_s())
        return True

    async def _use(self, engine: Engine, failed: asyncio.Future[None]) -> NoReturn:
        """Use the engine until it is lost; raise the reason."""
        works: list[asyncio.Future[None]] = [
            asyncio.ensure_future(self._listen(engine)),
            asyncio.ensure_future(self._follow(engine)),
            failed,
        ]
        try:
            done, _ = await asyncio.wait(works, return_when=asyncio.FIRST_COMPLETED)
            # A mismatch ends the run, whatever else went wrong at the same moment.
            errors = [_error_of(one) for one in done]
            raise next((e for e in errors if isinstance(e, WeightMismatch)), errors[0])
        finally:
            await cancel_all(works)

    async def _follow(self, engine: Engine) -> None:
        """Load every version that is staged from now on; if several were staged during the wait,
        load only the newest."""
        slot = self.slot
        while True:
            async with self._updates.loading(slot) as staged:
                await self._take(engine, staged)
            watch.progress("weight updates")
            self._serve(staged.version)

    async def _take(self, engine: Engine, staged: Staged) -> None:
        """Load a version and verify it; the engine may then sample with it. Raises EngineLost, and
        WeightMismatch because no engine can load this version any more."""
        slot, version = self.slot, f"load weights of version {staged.version}"

        async def load() -> Mapping[str, str]:
            if staged.manifest.on_demand:
                return await self._load_on_demand(engine, staged)
            return await self._request(version, engine.update(staged.version, staged.manifest))

        def verify(loaded: Mapping[str, str]) -> None:
            # Before the comparison, so that the record has wrong weights, too.
            self._owner.on_loaded(slot, staged.version, loaded)
            try:
                require_equal(slot.name, staged.manifest.digests, loaded)
            except WeightMismatch as error:
                self._updates.halt(error)  # before the next engine's turn
                raise

        if not slot.asleep:
            verify(await load())
            return
        phases = self._phases
        with phases.phase("publish"):
            pass  # The policy releases its memory; this engine has nothing to do.
        with phases.phase("generate"):
            with phases.step("wake weights"):
                await self._request("wake its weights", engine.wake(("weights",)))
            with phases.step("load"):
                loaded = await load()
            with phases.step("verify"):
                verify(loaded)
            # Last: an engine with a cache samples, and wrong weights must not.
            with phases.step("wake cache"):
                await self._request("wake its cache", engine.wake())

    async def _load_on_demand(self, engine: Engine, staged: Staged) -> dict[str, str]:
        """Load bucket by bucket, and release each as soon as it is loaded. An engine that holds a
        bucket for `unresponsive_s` is lost, because others wait for it."""
        updates, index, manifest = self._updates, self.slot.index, staged.manifest
        last = len(manifest.buckets) - 1
        answer: dict[str, str] = {}
        for number in range(last + 1):
            what = f"bucket {number} of version {staged.version}"
            try:
                ref = await self._request(f"get {what}", updates.acquire(index, number))
                part = Manifest(buckets=(ref,), digests=manifest.digests if number == last else {})
                call = engine.update(staged.version, part, number == 0, number == last)
                answer = await self._request(f"load {what}", call, self._unresponsive_s)
            finally:
                # After an error, too: other engines wait for this memory.
                updates.release(index)
        return answer

    async def _request[Result](
        self, what: str, call: Awaitable[Result], limit_s: float | None = None
    ) -> Result:
        """Return the engine's answer, within `update_timeout_s` or another limit. Raises
        EngineLost."""
        try:
            limit_s = limit_s or self._update_timeout_s
            return await await_named(f"{self.slot.name} to {what}", call, limit_s)
        except TimeoutError as error:
            raise EngineLost(str(error), suspect=False) from None
        except Exception as error:
            raise EngineLost(f"it failed to {what}: {error}", suspect=False) from error

    def _serve(self, version: int) -> None:
        slot = self.slot
        back = "" if slot.serving else "is back" if slot.restarts else self._comes
        # Together: a reader that sees the engine serve also sees its version.
        slot.version, slot.serving, slot.asleep, slot.lost = version, True, False, ""
        self._updates.held()
        self._owner.on_version(slot)
        if back:
            self._note(f"{slot.name} {back}, with the weights of version {version}, verified")

    async def _listen(self, engine: Engine) -> None:
        """Process reports until the engine is lost; raise the reason."""
        slot, limit_s = self.slot, self._unresponsive_s
        wait = min(REPORT_S, limit_s / 4)
        while True:
            try:
                with watch.doing("wait", f"a report of {slot.name}", limit_s):
                    async with asyncio.timeout(limit_s):
                        # The engine answers within `wait` even if there is nothing to report.
                        report = await engine.report(wait)
            except TimeoutError:
                raise EngineLost(
                    f"it did not answer for {limit_s:g} s (rollout.unresponsive_s)"
                ) from None
            except Exception as error:
                suspect = not getattr(error, "outside", False)
                raise EngineLost(f"{type(error).__name__}: {error}", suspect=suspect) from error
            if report.silent_s > limit_s:
                raise EngineLost(
                    f"its vLLM process did not answer for {report.silent_s:.0f} s"
                    " (rollout.unresponsive_s)"
                )
            self._owner.take_in(slot, report)


def _error_of(work: asyncio.Future[None]) -> BaseException:
    """Return the reason why `work`, which should have continued, has ended. A call that another
    task cancelled counts, too: a plain cancellation would silently end the engine's task."""
    error = None if work.cancelled() else work.exception()
    return error or EngineLost("a call to it was cancelled")

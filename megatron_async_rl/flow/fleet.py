"""All engines: their number, their life cycles (engine_task.py), and their requests (router.py).

Invariants:
- engines join and leave while the others work; an engine that leaves returns its requests with
  their tokens;
- a call to an engine has a time limit, and an engine is lost if a call to it fails;
- errors of the listener end the run and are not attributed to an engine.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Awaitable, Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path

from megatron_async_rl.config.rollout import RolloutConfig
from megatron_async_rl.config.schema import WatchdogConfig
from megatron_async_rl.config.weights import WeightsConfig
from megatron_async_rl.flow.engine_task import EngineSlot, EngineTask, Launch, Restarts
from megatron_async_rl.flow.router import Listener, Requests, all_lost
from megatron_async_rl.flow.updates import WeightUpdates
from megatron_async_rl.metrics.load_log import LoadLog
from megatron_async_rl.rollout.engine_process import Engine
from megatron_async_rl.rollout.spec import EngineSpec
from megatron_async_rl.samples.rows import EngineReport
from megatron_async_rl.watchdog import watch
from megatron_async_rl.watchdog.watch import await_named, cancel_all
from megatron_async_rl.weights.version_digest import version_digest

log = logging.getLogger(__name__)

ORDERS_POLL_S = 0.5
"""Seconds between two checks for an order of the user."""


@dataclass(frozen=True, kw_only=True)
class FleetSettings:
    """Limits of the engines. `capacity`: largest number of requests that one engine holds. The
    other limits come from the configuration. `run_dir`: directory for the record of loaded weights;
    null: no record. `even`: see Lanes."""

    capacity: int = 320
    unresponsive_s: float = RolloutConfig.default_of("unresponsive_s")
    update_timeout_s: float = WatchdogConfig.default_of("timeout_s")
    restarts_per_hour: int = RolloutConfig.default_of("restarts_per_hour")
    max_paused: float = WeightsConfig.default_of("max_paused")
    run_dir: Path | None = None
    even: int = 0


class Fleet:
    """All engines, on one event loop, which must be running. `specs`: the engines at the start;
    those from `evaluators_from` on only evaluate."""

    def __init__(
        self,
        specs: Sequence[EngineSpec],
        launch: Launch,
        listener: Listener,
        settings: FleetSettings,
        *,
        evaluators_from: int | None = None,
    ) -> None:
        if not specs:
            raise ValueError("a fleet needs at least one engine")
        self._launch = launch
        self._listener = listener
        self._settings = settings
        self._background: set[asyncio.Task[None]] = set()
        self._separate = evaluators_from is not None and evaluators_from < len(specs)
        self.slots: list[EngineSlot] = []
        self.tasks: list[EngineTask] = []
        self._loads = LoadLog(settings.run_dir) if settings.run_dir is not None else None
        self.updates = WeightUpdates(lambda: self.slots, settings.max_paused)
        self.requests = Requests(
            self, listener, settings.capacity, separate=self._separate, even=settings.even
        )
        for spec in specs:
            evaluates = evaluators_from is not None and spec.index >= evaluators_from
            self._begin(spec, evaluates=evaluates, must_start=True)

    # Engines

    def _begin(self, spec: EngineSpec, *, evaluates: bool, must_start: bool) -> None:
        slot = EngineSlot(spec, evaluates=evaluates)
        self.slots.append(slot)
        self.tasks.append(
            EngineTask(
                slot,
                self,
                self.updates,
                self._launch,
                unresponsive_s=self._settings.unresponsive_s,
                update_timeout_s=self._settings.update_timeout_s,
                restarts=Restarts(self._settings.restarts_per_hour),
                note=self._listener.note,
                must_start=must_start,
            )
        )

    async def started(self) -> None:
        """Wait until every engine has started once. Raises EngineStartError."""
        await asyncio.gather(*(task.started for task in self.tasks))

    def add(self, spec: EngineSpec) -> int:
        """Add a training engine, which serves once it has started and holds the newest version;
        return its index."""
        index = len(self.slots)
        self._begin(replace(spec, index=index), evaluates=False, must_start=False)
        return index

    async def remove(self, index: int, timeout_s: float) -> None:
        """Remove an engine: it gets no more requests, and its own continue on other engines with
        their tokens. Raises ValueError if it does not exist or is the last one."""
        slot, task = self.slots[index], self.tasks[index]
        if slot.leaving or slot.dead:
            raise ValueError(f"{slot.name} is not there")
        others = [one for one in self._engines(slot.evaluates) if one is not slot]
        if not any(one.serving and not one.leaving for one in others):
            raise ValueError(f"{slot.name} is the only engine that serves, and cannot leave")
        # First, so that the engine gets nothing new from here on.
        slot.leaving, engine = True, slot.engine
        if engine is not None:
            await self.requests.until_given_back(slot, engine, timeout_s)
        # The task would start the engine again.
        await cancel_all([task.task])
        slot.serving, slot.asleep, slot.dead, slot.lost = False, False, True, "it was removed"
        # Rank 0 waits for readers, and this engine no longer reads.
        self.updates.forget(index)
        # Not returned in time: these requests begin again without the tokens sampled here.
        if slot.held:
            self.on_lost(slot, slot.lost, suspect=False)
        if slot.engine is not None:
            await self._stop_engines([slot], timeout_s)
            # Tasks that wait for all engines of a machine or a version must check again.
            self.updates.held()
        self.requests.dispatch()

    async def resize(self, count: int, timeout_s: float) -> None:
        """Add training engines, or remove those that were added last, until there are `count`.
        Raises ValueError if an engine cannot leave. `timeout_s`: limit for each."""
        there = [one for one in self._engines(False) if not one.dead and not one.leaving]
        more = count - len(there)
        joining = [self.slots[self.add(self.slots[0].spec)].name for _ in range(more)]
        leaving = there[count:][::-1]
        names = ", ".join([*joining, *(slot.name for slot in leaving)])
        what = "join" if joining else "leave"
        self._listener.note(
            f"engines requested: {count}, present: {len(there)}"
            + (f"; to {what}: {names}" * bool(names))
        )
        for slot in leaving:
            await self.remove(slot.index, timeout_s)
            self._listener.note(f"{slot.name} has left")

    async def follow_orders(self, file: Path, timeout_s: float) -> None:
        """Resize the training engines to the number in `file` each time the user writes it. Runs
        until it is cancelled."""
        while True:
            await asyncio.sleep(ORDERS_POLL_S)
            if not file.exists():
                continue
            try:
                text = file.read_text(encoding="utf-8")
                # Removed first, so that an order that fails is not repeated.
                file.unlink()
                await self.resize(int(text), timeout_s)
            except (OSError, ValueError) as error:
                self._listener.note(f"the number of engines in {file} was not reached: {error}")
            except Exception as error:  # noqa: BLE001 - an internal error must end the run, not a task
                self._listener.on_error(error)

    def lose_machine(self, machine: str, reason: str, *, all_engines: bool) -> None:
        """Lose the engines of a machine that no weights reach, or only those that must evaluate a
        version that may be gone before the next attempt."""
        for task in self.tasks:
            slot = task.slot
            if slot.machine != machine or slot.engine is None:
                continue
            # Rank 0 waits to overwrite a requested version, so that engine cannot wait.
            if all_engines or self.updates.is_requested(slot.index):
                task.fail(slot.engine, reason, suspect=False)

    async def sleep(self, timeout_s: float) -> None:
        """Put colocated engines to sleep until the next version is staged. `timeout_s`: limit for
        each engine, and for engines that start or load now."""
        still = "engines that start or load before they sleep"
        await await_named(still, self.updates.give_devices_to_policy(), timeout_s)

        # An engine that still waits to load has been asleep since the batch before.
        awake = [task for task in self.tasks if task.slot.engine and not task.slot.asleep]
        await asyncio.gather(*(task.sleep(timeout_s) for task in awake))

    async def close(self, timeout_s: float) -> None:
        """End every engine; kill an engine that does not stop within `timeout_s`."""
        # Tasks first: a stopping engine would look lost to them, and they would restart it.
        await cancel_all([*(task.task for task in self.tasks), *self._background])
        await self._stop_engines(self.slots, timeout_s)

    @staticmethod
    async def _stop_engines(slots: Iterable[EngineSlot], timeout_s: float) -> None:
        engines = [slot.engine for slot in slots if slot.engine is not None]
        stops = [asyncio.ensure_future(engine.stop()) for engine in engines]
        if stops:
            with watch.doing("wait", "the engines to stop", timeout_s):
                _, late = await asyncio.wait(stops, timeout=timeout_s)
            for stop in late:
                stop.cancel()
            await asyncio.gather(*stops, return_exceptions=True)
        for engine in engines:
            engine.kill()
        for slot in slots:
            slot.engine, slot.serving, slot.asleep = None, False, False

    def _engines(self, evaluates: bool) -> list[EngineSlot]:
        return [slot for slot in self.slots if slot.evaluates == evaluates]

    def prepare_evaluation(self, version: int) -> None:
        """Let separate evaluation engines load `version`, the version staged last. Raises
        EngineFailed if all of them are gone."""
        if self._separate:
            there = [one.index for one in self._engines(True) if one.engine is not None]
            if not there:
                raise all_lost(self.slots, True)
            self.updates.request_version(there, version)

    # Events of the engines' tasks

    def take_in(self, slot: EngineSlot, report: EngineReport) -> None:
        slot.report = report
        self.requests.take_in(slot, report)

    def on_loaded(self, slot: EngineSlot, version: int, digests: Mapping[str, str]) -> None:
        if self._loads is None:
            return
        try:
            self._loads.record(version, slot.index, version_digest(digests), len(digests))
        except OSError as error:
            # A full disk costs the record, not the run.
            log.warning("recording the weights of %s: %s", slot.name, error)

    def on_version(self, slot: EngineSlot) -> None:
        if not slot.evaluates:
            self.notify(lambda: self._listener.on_version(slot.version))
        self.requests.served()

    def on_lost(self, slot: EngineSlot, reason: str, *, suspect: bool) -> None:
        """Send the engine's requests to others."""
        slot.lost, slot.report = reason, None
        self.requests.take_back(slot, reason, suspect=suspect)
        # If no engine can answer, now or soon, evaluations must not hang.
        if slot.evaluates and not any(
            one.serving or self.updates.is_requested(one.index) for one in self._engines(True)
        ):
            self.requests.fail_evaluations(all_lost(self.slots, True))
        self.requests.dispatch()

    def on_dead(self, slot: EngineSlot) -> None:
        peers = self._engines(slot.evaluates)
        left = sum(not one.dead for one in peers)
        self._listener.note(
            f"{slot.name} is lost permanently; {left} of {len(peers)} engines are left. Why:"
            f" {slot.lost}"
        )
        if left:
            return
        error = all_lost(self.slots, slot.evaluates)
        self.requests.fail_evaluations(error)
        if not slot.evaluates:
            self._listener.on_error(error)

    def on_error(self, error: BaseException) -> None:
        self.requests.fail_evaluations(error)
        self._listener.on_error(error)

    # For the requests

    def notify(self, call: Callable[[], object]) -> None:
        """Call the listener. An error of the listener ends the run and does not affect an
        engine."""
        try:
            call()
        except Exception as error:
            log.exception("an answer could not be processed")
            self.on_error(error)

    def send(self, slot: EngineSlot, call: Callable[[], Awaitable[None]], what: str) -> None:
        """Begin a call to the slot's engine. The engine is lost if the call fails."""
        assert slot.engine is not None
        work = self._send(self.tasks[slot.index], slot.engine, call, what)
        task = asyncio.get_running_loop().create_task(work)
        # asyncio holds tasks weakly: without this reference they may be garbage-collected.
        self._background.add(task)
        task.add_done_callback(self._background.discard)

    async def _send(
        self,
        task: EngineTask,
        engine: Engine,
        call: Callable[[], Awaitable[None]],
        what: str,
    ) -> None:
        limit_s = self._settings.unresponsive_s
        try:
            with watch.doing("wait", f"{task.slot.name} to {what}", limit_s):
                async with asyncio.timeout(limit_s):
                    await call()
        except Exception as error:  # noqa: BLE001 - whatever the error, this engine is unusable
            reason = f"it failed to {what}: {type(error).__name__}: {error}"
            task.fail(engine, reason, suspect=not getattr(error, "outside", False))

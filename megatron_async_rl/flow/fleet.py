"""The engines as one: what is to be asked goes through lanes (lanes.py) to whichever engine has room
and may answer; answers come back through each engine's task (engine_task.py).

Invariants:
- a request is with one engine at a time; what an engine that is lost had not answered goes to the
  front of its lane again. One that two engines were lost with is given up, before it costs a third;
- a request that goes on with tokens of its own needs the version that sampled the last of them, or
  a newer one;
- engines join and leave while the others work; one that leaves gives its requests back with their
  tokens;
- the mistakes of whoever listens end the run and are blamed on no engine.
"""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import Awaitable, Callable, Coroutine, Iterable, Sequence
from contextlib import suppress
from dataclasses import dataclass, replace
from functools import partial
from itertools import repeat

from megatron_async_rl.flow.engine_task import (
    Asked,
    EngineLost,
    EngineSlot,
    EngineTask,
    Launch,
    Restarts,
)
from megatron_async_rl.flow.errors import EngineFailed, RequestGivenUp
from megatron_async_rl.flow.lanes import Lanes
from megatron_async_rl.flow.updates import Signal, WeightUpdates, cancel_all
from megatron_async_rl.rollout.engine_process import Engine
from megatron_async_rl.rollout.spec import EngineSpec
from megatron_async_rl.samples.rows import EngineReport, SampleRow, rows_of
from megatron_async_rl.samples.types import Aborted, Request
from megatron_async_rl.watchdog import watch
from megatron_async_rl.watchdog.deadline import await_named

log = logging.getLogger(__name__)

ENGINES_A_REQUEST_MAY_COST = 2


@dataclass(frozen=True, kw_only=True)
class FleetSettings:
    """`capacity`: requests that one engine holds at most. The rest is the configuration's."""

    capacity: int = 320
    unresponsive_s: float = 60.0
    update_timeout_s: float = 600.0
    restarts_per_hour: int = 3
    max_paused: float = 0.5


class Listener:
    """Hears of training's requests and of the engines; every method may be left as it is."""

    def on_sample(self, sample: SampleRow, request: Request) -> None: ...
    def on_abort(self, aborted: Aborted, request: Request) -> Request:
        """The request to ask instead."""
        return replace(request, prefix=aborted.partial)

    def on_give_up(self, request: Request, reason: str) -> None: ...
    def on_version(self, version: int) -> None:
        """A training engine holds `version`."""

    def on_error(self, error: BaseException) -> None:
        """The run cannot go on."""

    def note(self, text: str) -> None:
        """For the user."""


class Fleet:
    """`specs`: the engines at the start; those from `evaluators_from` on only evaluate. All on one
    loop, which must run when the fleet is made."""

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
        self._evaluations: set[Asked] = set()
        self._background: set[asyncio.Task[None]] = set()
        self._emptied = Signal()
        self._separate = evaluators_from is not None and evaluators_from < len(specs)
        self._lanes = Lanes(settings.capacity, separate=self._separate)
        self.slots: list[EngineSlot] = []
        self.tasks: list[EngineTask] = []
        self.updates = WeightUpdates(lambda: self.slots, settings.max_paused)
        self._moved_at = time.monotonic()
        for spec in specs:
            evaluates = evaluators_from is not None and spec.index >= evaluators_from
            self._begin(spec, evaluates=evaluates, must_start=True)

    @property
    def moved_at(self) -> float:
        """Time when an engine last answered a request, or a response grew; monotonic seconds. Now,
        while no engine serves: starts, loads and restarts have limits of their own."""
        if any(slot.serving for slot in self.slots):
            return self._moved_at
        return time.monotonic()

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
        """Waits until every engine has started once. Raises EngineStartError."""
        await asyncio.gather(*(task.started for task in self.tasks))

    def add(self, spec: EngineSpec) -> int:
        """One more training engine, which serves once it has started and holds the newest version;
        returns its index."""
        index = len(self.slots)
        self._begin(replace(spec, index=index), evaluates=False, must_start=False)
        return index

    async def remove(self, index: int, timeout_s: float) -> None:
        """The engine leaves: it takes no more requests, and those it has go on elsewhere with the
        tokens they have. Raises ValueError where it is not there, or is the last one."""
        slot, task = self.slots[index], self.tasks[index]
        if slot.leaving or slot.dead:
            raise ValueError(f"{slot.name} is not there")
        others = [one for one in self._engines(slot.evaluates) if one is not slot]
        if not any(one.serving and not one.leaving for one in others):
            raise ValueError(f"{slot.name} is the only engine that serves, and cannot leave")
        slot.leaving, engine = True, slot.engine
        if engine is not None:
            self._abort(slot, slot.held.values())
            with (
                watch.doing("wait", f"{slot.name} to give its requests back", timeout_s),
                suppress(TimeoutError),
            ):
                await asyncio.wait_for(
                    self._emptied.until(lambda: not slot.held or slot.engine is not engine),
                    timeout_s,
                )
        await cancel_all([task.task])
        slot.serving, slot.asleep, slot.dead, slot.lost = False, False, True, "it was removed"
        self.updates.forget(index)
        if slot.held:
            self.on_lost(slot, slot.lost, suspect=False)
        if slot.engine is not None:
            await self._stop_engines([slot], timeout_s)
        self._dispatch()

    async def sleep(self, timeout_s: float) -> None:
        """Colocated: no engine uses the devices until the next version is staged. `timeout_s`: for
        each engine, and for those that are starting or loading now."""
        still = "engines that start or load before they sleep"
        await await_named(still, self.updates.give_devices_to_policy(), timeout_s)

        # One that still waits to load sleeps since the batch before.
        awake = [
            (task, task.slot.engine)
            for task in self.tasks
            if task.slot.engine is not None and not task.slot.asleep
        ]
        for task, _ in awake:
            task.slot.asleep = True
        await asyncio.gather(
            *(self._send(task, engine, engine.sleep, "sleep", timeout_s) for task, engine in awake)
        )

    async def close(self, timeout_s: float) -> None:
        """Ends every engine; one that does not stop within `timeout_s` is killed."""
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

    # What the tasks of the engines say

    def on_version(self, slot: EngineSlot) -> None:
        self._moved_at = time.monotonic()
        if not slot.evaluates:
            self._guard(lambda: self._listener.on_version(slot.version))
        self._dispatch()

    def on_lost(self, slot: EngineSlot, reason: str, *, suspect: bool) -> None:
        """Asks again what the engine held."""
        slot.lost, slot.report = reason, None
        held, slot.held = list(slot.held.values()), {}
        slot.aborting.clear()
        log.error("%s is lost, %d requests are asked again: %s", slot.name, len(held), reason)
        for asked in reversed(held):
            asked.losses += suspect and not slot.leaving
            if asked.losses >= ENGINES_A_REQUEST_MAY_COST:
                self._give_up(asked, reason)
            elif asked.answer is None or not asked.answer.done():
                self._lanes.add(asked, first=True)
        self._emptied.fire()
        if slot.evaluates and not any(
            one.serving or self.updates.wants(one.index) for one in self._engines(True)
        ):
            self.fail_evaluations(self.all_lost(True))
        self._dispatch()

    def on_dead(self, slot: EngineSlot) -> None:
        peers = self._engines(slot.evaluates)
        left = sum(not one.dead for one in peers)
        self._listener.note(
            f"{slot.name} is lost for good; {left} of {len(peers)} engines are left. Why:"
            f" {slot.lost}"
        )
        if left:
            return
        error = self.all_lost(slot.evaluates)
        self.fail_evaluations(error)
        if not slot.evaluates:
            self._listener.on_error(error)

    def on_error(self, error: BaseException) -> None:
        self.fail_evaluations(error)
        self._listener.on_error(error)

    def all_lost(self, evaluates: bool = False) -> EngineFailed:
        kind = "evaluation" if evaluates else "training"
        reasons = "; ".join(
            f"engine {slot.index}: {slot.lost}" for slot in self._engines(evaluates)
        )
        return EngineFailed(f"no {kind} engine is left: {reasons}")

    def take_in(self, slot: EngineSlot, report: EngineReport) -> None:
        """Hands on what the engine says."""
        slot.report = report
        answers = report.finished.num_rows + len(report.aborted)
        if answers or report.sampling:
            self._moved_at = time.monotonic()
        if answers:
            watch.progress("responses", answers)

        for sample in rows_of(report.finished):
            asked = slot.held.get(sample.id)
            if asked is None or sample.prompt_id != asked.request.prompt.id:
                raise EngineLost(
                    f"it answered {sample.id}, prompt {sample.prompt_id}, which it was not asked"
                )
            self._release(slot, sample.id)
            if asked.answer is None:
                self._guard(partial(self._listener.on_sample, sample, asked.request))
            elif not asked.answer.done():
                asked.answer.set_result(sample)

        for aborted in report.aborted:
            asked = slot.held.get(aborted.id)
            if asked is None or aborted.id not in slot.aborting:
                raise EngineLost(f"it aborted {aborted.id}, which it was not told to")
            self._release(slot, aborted.id)
            self._guard(partial(self._ask_again, asked, aborted))
        self._dispatch()

    def _ask_again(self, asked: Asked, aborted: Aborted) -> None:
        if asked.answer is not None:
            if not asked.answer.done():
                self._lanes.add(asked, first=True)
            return
        asked.request = self._listener.on_abort(aborted, asked.request)
        if aborted.partial is not None:
            asked.least = max(asked.least, int(aborted.partial.versions[-1]))
        self._lanes.add(asked, first=True)

    def _release(self, slot: EngineSlot, request: str) -> None:
        del slot.held[request]
        slot.aborting.discard(request)
        if not slot.held:
            self._emptied.fire()

    def _give_up(self, asked: Asked, reason: str) -> None:
        request = asked.request
        text = (
            f"request {request.id} (prompt {request.prompt.id}) is given up:"
            f" {ENGINES_A_REQUEST_MAY_COST} engines were lost while they had it, the last one as"
            f" {reason.splitlines()[0] if reason else 'it ended'}"
        )
        if asked.answer is None:
            self._guard(lambda: self._listener.on_give_up(request, text))
        elif not asked.answer.done():
            asked.answer.set_exception(RequestGivenUp(text))

    def _guard(self, call: Callable[[], object]) -> None:
        """The listener's mistakes are not the engine's: they end the run."""
        try:
            call()
        except Exception as error:
            log.exception("an answer could not be taken in")
            self.on_error(error)

    # Requests

    def put(self, requests: Iterable[Request], version: int) -> None:
        """Hands training requests of groups admitted under `version` out, in order, as engines have
        room."""
        for request in requests:
            least = version if request.prefix is None else int(request.prefix.versions[-1])
            self._lanes.add(Asked(request, max(version, least)))
        self._dispatch()

    async def run(self, requests: Sequence[Request], version: int) -> list[SampleRow]:
        """The samples that answer held-out `requests`, in their order, by engines that hold
        `version`, before training's. Cancelled, it stops what is running.

        Raises EngineFailed when no engine is left to ask, RequestGivenUp.
        """
        peers = self._engines(self._separate)
        # One of the engines that only evaluate that starts again is not given the version again.
        if all(slot.engine is None if self._separate else slot.dead for slot in peers):
            raise self.all_lost(self._separate)
        answers = [asyncio.get_running_loop().create_future() for _ in requests]
        evaluation = [Asked(*one) for one in zip(requests, repeat(version), answers)]
        self._evaluations.update(evaluation)
        try:
            for asked in evaluation:
                self._lanes.add(asked)
            self._dispatch()
            return list(await asyncio.gather(*answers))
        finally:
            self._forget(evaluation)

    def prepare_evaluation(self, version: int) -> None:
        """Has the engines that only evaluate, if there are some, load `version`, which is the one
        staged last. Raises EngineFailed where none of them is there."""
        if self._separate:
            there = [one.index for one in self._engines(True) if one.engine is not None]
            if not there:
                raise self.all_lost(True)
            self.updates.want(there, version)

    def fail_evaluations(self, error: BaseException) -> None:
        """Nobody is left to answer: whoever waits in `run` gets `error`."""
        for asked in self._evaluations:
            if asked.answer is not None and not asked.answer.done():
                asked.answer.set_exception(error)

    def waiting(self) -> int:
        """Training requests that no engine has yet."""
        return self._lanes.waiting()

    def holders(self, group: int) -> list[int]:
        """Engines that hold requests of `group`."""
        return [
            slot.index
            for slot in self.slots
            if any(asked.request.group == group for asked in slot.held.values())
        ]

    def _dispatch(self) -> None:
        for index, requests in self._lanes.place(self.slots).items():
            engine = self.slots[index].engine
            assert engine is not None
            call = partial(engine.submit, requests)
            self._spawn(self._send(self.tasks[index], engine, call, "take requests"))

    def _forget(self, evaluation: Sequence[Asked]) -> None:
        """Stops what has not been answered yet: nobody waits for it any more."""
        self._evaluations.difference_update(evaluation)
        for asked in evaluation:
            assert asked.answer is not None
            asked.answer.cancel()
        self._lanes.forget(evaluation)
        for slot in self.slots:
            self._abort(slot, [one for one in evaluation if slot.held.get(one.request.id) is one])

    def _abort(self, slot: EngineSlot, held: Iterable[Asked]) -> None:
        ids, engine = [asked.request.id for asked in held], slot.engine
        if engine is not None and ids:
            slot.aborting.update(ids)
            call = partial(engine.abort, ids)
            self._spawn(self._send(self.tasks[slot.index], engine, call, "abort requests"))

    async def _send(
        self,
        task: EngineTask,
        engine: Engine,
        call: Callable[[], Awaitable[None]],
        what: str,
        timeout_s: float | None = None,
    ) -> None:
        limit_s = timeout_s or self._settings.unresponsive_s
        try:
            with watch.doing("wait", f"{task.slot.name} to {what}", limit_s):
                async with asyncio.timeout(limit_s):
                    await call()
        except Exception as error:  # noqa: BLE001 - whatever it is, this engine is of no more use
            task.fail(engine, f"it failed to {what}: {type(error).__name__}: {error}")

    def _spawn(self, work: Coroutine[None, None, None]) -> None:
        task = asyncio.get_running_loop().create_task(work)
        self._background.add(task)
        task.add_done_callback(self._background.discard)

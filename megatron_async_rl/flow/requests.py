"""Requests from the moment they are put until they are answered: they wait in lanes (lanes.py), are
held by one engine, and come back as samples, or to be asked again.

Invariants:
- a request is with one engine at a time; what an engine that is lost had not answered goes to the
  front of its lane again;
- a request is given up only on evidence. A loss counts against the requests that the engine had if
  one of them may be the reason (engine_task.EngineLost). After LOSSES_BEFORE_ALONE such losses a
  request runs alone on an engine, and only where that engine is lost as well, it is given up: a
  long response shares many engines, and is not the reason for their end;
- a request that continues with tokens of its own needs the version that sampled the last of them,
  or a newer one;
- the requests that a slot holds, and those it was requested to abort, are written here and by the
  lanes only; which engines there are, and whether they serve, is the fleet's.
"""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import Awaitable, Callable, Iterable, Sequence
from contextlib import suppress
from dataclasses import replace
from functools import partial
from itertools import repeat
from typing import Protocol

from megatron_async_rl.flow.engine_task import (
    LOSSES_BEFORE_ALONE,
    EngineLost,
    EngineSlot,
    PendingRequest,
)
from megatron_async_rl.flow.errors import EngineFailed, EngineMemoryOut, RequestGivenUp
from megatron_async_rl.flow.lanes import Lanes
from megatron_async_rl.flow.updates import Signal
from megatron_async_rl.rollout.engine_process import Engine
from megatron_async_rl.samples.rows import EngineReport, SampleRow, rows_of
from megatron_async_rl.samples.types import Aborted, Request
from megatron_async_rl.watchdog import watch

log = logging.getLogger(__name__)


class Listener:
    """Receives events of training's requests and of the engines; every method may be left as it
    is."""

    def on_sample(self, sample: SampleRow, request: Request) -> None: ...
    def on_abort(self, aborted: Aborted, request: Request) -> Request:
        """The request to send instead."""
        return replace(request, prefix=aborted.partial)

    def on_give_up(self, request: Request, reason: str) -> None: ...
    def on_version(self, version: int) -> None:
        """A training engine holds `version`."""

    def on_error(self, error: BaseException) -> None:
        """The run cannot continue."""

    def note(self, text: str) -> None:
        """Show `text` to the user."""


class Engines(Protocol):
    """The fleet, as far as requests need it."""

    @property
    def slots(self) -> Sequence[EngineSlot]: ...
    def send(self, slot: EngineSlot, call: Callable[[], Awaitable[None]], what: str) -> None:
        """Begins a call to the slot's engine; a failed call costs the engine."""

    def notify(self, call: Callable[[], object]) -> None:
        """Calls the listener; an error of it ends the run."""


class Requests:
    """`capacity`: requests that one engine holds at most. `separate`: engines of their own
    evaluate."""

    def __init__(
        self, engines: Engines, listener: Listener, capacity: int, *, separate: bool
    ) -> None:
        self._engines = engines
        self._listener = listener
        self._separate = separate
        self._lanes = Lanes(capacity, separate=separate)
        self._evaluations: set[PendingRequest] = set()
        self._emptied = Signal()
        self._moved_at = time.monotonic()

    @property
    def moved_at(self) -> float:
        """Time when an engine last answered a request, or a response grew; monotonic seconds. Now,
        while no engine serves: starts, loads and restarts have limits of their own."""
        if any(slot.serving for slot in self._engines.slots):
            return self._moved_at
        return time.monotonic()

    def put(self, requests: Iterable[Request], version: int) -> None:
        """Hands training requests of groups admitted under `version` out, in order, as engines have
        room."""
        for request in requests:
            minimum_version = (
                version if request.prefix is None else int(request.prefix.versions[-1])
            )
            self._lanes.add(PendingRequest(request, max(version, minimum_version)))
        self.dispatch()

    async def run(self, requests: Sequence[Request], version: int) -> list[SampleRow]:
        """The samples that answer held-out `requests`, in their order, by engines that hold
        `version`, before training's. Cancelled, it stops what is running.

        Raises EngineFailed when no engine is left, RequestGivenUp.
        """
        slots = self._engines.slots
        peers = [slot for slot in slots if slot.evaluates == self._separate]
        # One of the engines that only evaluate that starts again is not given the version again.
        if all(slot.engine is None if self._separate else slot.dead for slot in peers):
            raise all_lost(slots, self._separate)
        answers = [asyncio.get_running_loop().create_future() for _ in requests]
        evaluation = [PendingRequest(*one) for one in zip(requests, repeat(version), answers)]
        self._evaluations.update(evaluation)
        try:
            for pending in evaluation:
                self._lanes.add(pending)
            self.dispatch()
            return list(await asyncio.gather(*answers))
        finally:
            self._forget(evaluation)

    def fail_evaluations(self, error: BaseException) -> None:
        """Raise `error` in all waiting `run` calls; no engine is left to answer them."""
        for pending in self._evaluations:
            if pending.answer is not None and not pending.answer.done():
                pending.answer.set_exception(error)

    def waiting(self) -> int:
        """Training requests that no engine has yet."""
        return self._lanes.waiting()

    def holders(self, group: int) -> list[int]:
        """Engines that hold requests of `group`."""
        return [
            slot.index
            for slot in self._engines.slots
            if any(pending.request.group == group for pending in slot.held.values())
        ]

    # Events of the engines

    def served(self) -> None:
        """An engine holds a version that it did not hold before."""
        self._moved_at = time.monotonic()
        self.dispatch()

    def take_in(self, slot: EngineSlot, report: EngineReport) -> None:
        """Process an engine's report. Raises EngineLost where it answers what it was not asked."""
        answers = report.finished.num_rows + len(report.aborted)
        if answers or report.sampling:
            self._moved_at = time.monotonic()
        if answers:
            watch.progress("responses", answers)

        for sample in rows_of(report.finished):
            pending = slot.held.get(sample.id)
            if pending is None or sample.prompt_id != pending.request.prompt.id:
                raise EngineLost(
                    f"it answered {sample.id}, prompt {sample.prompt_id}, which it was not asked",
                    suspect=False,
                )
            self._release(slot, sample.id)
            if pending.answer is None:
                self._engines.notify(partial(self._listener.on_sample, sample, pending.request))
            elif not pending.answer.done():
                pending.answer.set_result(sample)

        for aborted in report.aborted:
            pending = slot.held.get(aborted.id)
            if pending is None or aborted.id not in slot.aborting:
                raise EngineLost(f"it aborted {aborted.id}, which was not requested", suspect=False)
            self._release(slot, aborted.id)
            self._engines.notify(partial(self._ask_again, pending, aborted))
        self.dispatch()

    def take_back(self, slot: EngineSlot, reason: str, *, suspect: bool) -> None:
        """Requests again what an engine that is lost held. `suspect`: one of its requests may be
        the reason."""
        held, slot.held = list(slot.held.values()), {}
        slot.aborting.clear()
        log.error("%s is lost, %d requests are asked again: %s", slot.name, len(held), reason)
        counts = suspect and not slot.leaving
        for pending in reversed(held):
            pending.losses += counts
            if counts and len(held) == 1 and pending.losses >= LOSSES_BEFORE_ALONE:
                self._give_up(pending, reason)
            elif pending.answer is None or not pending.answer.done():
                self._lanes.add(pending, first=True)
        self._emptied.fire()

    async def until_given_back(self, slot: EngineSlot, engine: Engine, timeout_s: float) -> None:
        """Has the engine give its requests back with their tokens; waits until it has, or is gone,
        for at most `timeout_s`."""
        self._abort(slot, slot.held.values())
        with (
            watch.doing("wait", f"{slot.name} to give its requests back", timeout_s),
            suppress(TimeoutError),
        ):
            await asyncio.wait_for(
                self._emptied.until(lambda: not slot.held or slot.engine is not engine), timeout_s
            )

    def dispatch(self) -> None:
        """Gives engines what they have room for and may answer."""
        slots = self._engines.slots
        for index, requests in self._lanes.place(slots).items():
            engine = slots[index].engine
            assert engine is not None
            self._engines.send(slots[index], partial(engine.submit, requests), "take requests")

    def _ask_again(self, pending: PendingRequest, aborted: Aborted) -> None:
        if pending.answer is not None:
            if not pending.answer.done():
                self._lanes.add(pending, first=True)
            return
        pending.request = self._listener.on_abort(aborted, pending.request)
        if aborted.partial is not None:
            pending.minimum_version = max(
                pending.minimum_version, int(aborted.partial.versions[-1])
            )
        self._lanes.add(pending, first=True)

    def _release(self, slot: EngineSlot, request: str) -> None:
        del slot.held[request]
        slot.aborting.discard(request)
        if not slot.held:
            self._emptied.fire()

    def _give_up(self, pending: PendingRequest, reason: str) -> None:
        request = pending.request
        text = (
            f"request {request.id} (prompt {request.prompt.id}) is given up: {pending.losses}"
            " engines were lost while they had it, the last one while it had nothing else, as"
            f" {reason.splitlines()[0] if reason else 'it ended'}"
        )
        if pending.answer is None:
            # Nothing trains on the rest of its group: no engine is risked for its other suspects.
            for one in (pending, *self._lanes.take_alone(request.group)):
                self._engines.notify(partial(self._listener.on_give_up, one.request, text))
        elif not pending.answer.done():
            pending.answer.set_exception(RequestGivenUp(text))

    def _forget(self, evaluation: Sequence[PendingRequest]) -> None:
        """Stops what has not been answered yet: it is no longer waited for."""
        self._evaluations.difference_update(evaluation)
        for pending in evaluation:
            assert pending.answer is not None
            pending.answer.cancel()
        self._lanes.forget(evaluation)
        for slot in self._engines.slots:
            self._abort(slot, [one for one in evaluation if slot.held.get(one.request.id) is one])

    def _abort(self, slot: EngineSlot, held: Iterable[PendingRequest]) -> None:
        ids, engine = [pending.request.id for pending in held], slot.engine
        if engine is not None and ids:
            slot.aborting.update(ids)
            self._engines.send(slot, partial(engine.abort, ids), "abort requests")


def all_lost(slots: Iterable[EngineSlot], evaluates: bool) -> EngineFailed:
    kind = "evaluation" if evaluates else "training"
    peers = [slot for slot in slots if slot.evaluates == evaluates]
    reasons = "; ".join(f"engine {slot.index}: {slot.lost}" for slot in peers)
    message = f"no {kind} engine is left: {reasons}"
    out = [slot.memory_out for slot in peers if slot.memory_out is not None]
    return EngineMemoryOut(message, *out[0]) if out else EngineFailed(message)

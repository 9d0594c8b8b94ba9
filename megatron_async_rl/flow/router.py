"""Requests and the lanes in which they wait: choice of an engine, and processing of its answers.

    put, run --> lane --place--> held by one engine --report--> sample
                   ^                    |
                   +--- aborted, or the engine was lost

Invariants of requests:
- one engine at a time has a request; the unanswered requests of a lost engine return to the front
  of their lane;
- a request is given up only on evidence. A loss counts against the requests that the engine had if
  one of them may be the reason (engine_task.EngineLost). After LOSSES_BEFORE_ALONE such losses a
  request runs alone on an engine. If that engine is lost, too, the request is given up. A long
  response shares many engines and is not the reason for their end;
- a request that continues with its own tokens needs the version that sampled the last of them, or a
  newer one;
- only this file records which requests a slot holds, and which of them it must abort. The fleet
  knows which engines exist and serve.

Invariants of lanes, which use no clocks and no tasks:
- requests that the same engines may answer wait in one lane, in order. Evaluations come first, then
  requests of groups that were admitted under older versions;
- a training request goes only to engines that hold at least its version, an evaluation's only to
  engines that hold exactly its version;
- an engine never holds more than `capacity` requests. While other engines have yet to load the
  version that a request needs, an engine gets no more than its share: the others will have room;
- training and evaluation requests go to engines of their kind; without evaluation engines both
  kinds share;
- a request that runs alone (`PendingRequest.alone`) goes to an engine without requests, which then
  gets no other. For the first such request that waits, the emptiest engine gets nothing new until
  it is empty.
"""

from __future__ import annotations

import asyncio
import logging
import math
import time
from collections import Counter, OrderedDict
from collections.abc import Awaitable, Callable, Iterable, Sequence, Sized
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
from megatron_async_rl.flow.updates import Signal
from megatron_async_rl.rollout.engine_process import Engine
from megatron_async_rl.samples.rows import EngineReport, SampleRow, rows_of
from megatron_async_rl.samples.types import Aborted, Request
from megatron_async_rl.watchdog import watch

log = logging.getLogger(__name__)


class Listener:
    """Receiver of events about training requests and engines; each method may keep its default."""

    def on_sample(self, sample: SampleRow, request: Request) -> None: ...
    def on_abort(self, aborted: Aborted, request: Request) -> Request:
        """Return the request to send instead."""
        return replace(request, prefix=aborted.partial)

    def on_give_up(self, request: Request, reason: str) -> None: ...
    def on_version(self, version: int) -> None:
        """Process the event that a training engine holds `version`."""

    def on_error(self, error: BaseException) -> None:
        """End the run."""

    def note(self, text: str) -> None:
        """Show `text` to the user."""


class Engines(Protocol):
    """The part of the fleet that requests use."""

    @property
    def slots(self) -> Sequence[EngineSlot]: ...
    def send(self, slot: EngineSlot, call: Callable[[], Awaitable[None]], what: str) -> None:
        """Begin a call to the slot's engine. The engine is lost if the call fails."""

    def notify(self, call: Callable[[], object]) -> None:
        """Call the listener. An error of the listener ends the run."""


class Requests:
    """All requests of a fleet. `capacity`: largest number of requests that one engine holds.
    `separate`: evaluations have their own engines. `even`: see Lanes."""

    def __init__(
        self,
        engines: Engines,
        listener: Listener,
        capacity: int,
        *,
        separate: bool,
        even: int = 0,
    ) -> None:
        self._engines = engines
        self._listener = listener
        self._separate = separate
        self._lanes = Lanes(capacity, separate=separate, even=even)
        self._evaluations: set[PendingRequest] = set()
        self._emptied = Signal()
        self._moved_at = time.monotonic()

    @property
    def moved_at(self) -> float:
        """Time when an engine last answered a request, or a response grew; monotonic seconds. The
        present time while no engine serves: starts, loads and restarts have limits of their own."""
        if any(slot.serving for slot in self._engines.slots):
            return self._moved_at
        return time.monotonic()

    def put(self, requests: Iterable[Request], version: int) -> None:
        """Send training requests of groups admitted under `version`, in order, as engines have
        room."""
        for request in requests:
            # Versions never fall along a response, so the engine needs the version of its end.
            minimum_version = (
                version if request.prefix is None else int(request.prefix.versions[-1])
            )
            self._lanes.add(PendingRequest(request, max(version, minimum_version)))
        self.dispatch()

    async def run(self, requests: Sequence[Request], version: int) -> list[SampleRow]:
        """Return the samples that answer held-out `requests`, in their order, from engines that
        hold `version`. They take precedence over training. A cancelled call stops its running
        requests.

        Raises EngineFailed if no engine is left, and RequestGivenUp.
        """
        slots = self._engines.slots
        peers = [slot for slot in slots if slot.evaluates == self._separate]
        # An evaluation engine that restarts does not get this version again.
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
        """Raise `error` in all waiting `run` calls, because no engine is left to answer them."""
        for pending in self._evaluations:
            if pending.answer is not None and not pending.answer.done():
                pending.answer.set_exception(error)

    def waiting(self) -> int:
        """Training requests that no engine has yet."""
        return self._lanes.waiting()

    def holders(self, group: int) -> list[int]:
        """Return the engines that hold requests of `group`."""
        return [
            slot.index
            for slot in self._engines.slots
            if any(pending.request.group == group for pending in slot.held.values())
        ]

    # Events of the engines

    def served(self) -> None:
        """Record that an engine holds a new version."""
        self._moved_at = time.monotonic()
        self.dispatch()

    def take_in(self, slot: EngineSlot, report: EngineReport) -> None:
        """Process an engine's report. Raises EngineLost for an answer to something that was not
        requested."""
        answers = report.finished.num_rows + len(report.aborted)
        # A growing response is progress: a long response is not late.
        if answers or report.sampling:
            self._moved_at = time.monotonic()
        if answers:
            watch.progress("responses", answers)

        for sample in rows_of(report.finished):
            # Compared with the request, because a wrong answer would train.
            pending = slot.held.get(sample.id)
            if pending is None or sample.prompt_id != pending.request.prompt.id:
                raise EngineLost(
                    f"it answered {sample.id}, prompt {sample.prompt_id}, which was not requested",
                    suspect=False,
                )
            # Before the listener is called: a sample counts once, whatever the listener does.
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
            self._engines.notify(partial(self._repeat_request, pending, aborted))
        self.dispatch()

    def take_back(self, slot: EngineSlot, reason: str, *, suspect: bool) -> None:
        """Send the requests of a lost engine again. `suspect`: one of them may be the reason."""
        # Emptied first, so that a late report of this engine cannot answer the requests, too.
        held, slot.held = list(slot.held.values()), {}
        slot.aborting.clear()
        log.error("%s is lost, %d requests are sent again: %s", slot.name, len(held), reason)
        # A requested removal is not evidence against any request.
        counts = suspect and not slot.leaving
        # Reversed, because each request goes to the front: this keeps their order.
        for pending in reversed(held):
            pending.losses += counts
            if counts and len(held) == 1 and pending.losses >= LOSSES_BEFORE_ALONE:
                self._give_up(pending, reason)
            elif pending.answer is None or not pending.answer.done():
                self._lanes.add(pending, first=True)
        self._emptied.fire()

    async def until_given_back(self, slot: EngineSlot, engine: Engine, timeout_s: float) -> None:
        """Make the engine return its requests with their tokens; wait at most `timeout_s` until it
        has, or is gone."""
        self._abort(slot, slot.held.values())
        with (
            watch.doing("wait", f"{slot.name} to return its requests", timeout_s),
            suppress(TimeoutError),
        ):
            await asyncio.wait_for(
                self._emptied.until(lambda: not slot.held or slot.engine is not engine), timeout_s
            )

    def dispatch(self) -> None:
        """Send to engines the requests that they have room for and may answer."""
        slots = self._engines.slots
        for index, requests in self._lanes.place(slots).items():
            engine = slots[index].engine
            assert engine is not None
            self._engines.send(slots[index], partial(engine.submit, requests), "accept requests")

    def _repeat_request(self, pending: PendingRequest, aborted: Aborted) -> None:
        if pending.answer is not None:
            if not pending.answer.done():
                self._lanes.add(pending, first=True)
            return
        # The id stays the same: scheduler and lanes refer to the same request.
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
            # The rest of its group will not train, so its other suspects must not cost an engine.
            for one in (pending, *self._lanes.take_alone(request.group)):
                self._engines.notify(partial(self._listener.on_give_up, one.request, text))
        elif not pending.answer.done():
            pending.answer.set_exception(RequestGivenUp(text))

    def _forget(self, evaluation: Sequence[PendingRequest]) -> None:
        """Stop requests whose answers are no longer needed."""
        self._evaluations.difference_update(evaluation)
        for pending in evaluation:
            assert pending.answer is not None
            pending.answer.cancel()
        # Waiting requests are simply removed; an engine answers an abort of the others.
        self._lanes.forget(evaluation)
        for slot in self._engines.slots:
            self._abort(slot, [one for one in evaluation if slot.held.get(one.request.id) is one])

    def _abort(self, slot: EngineSlot, held: Iterable[PendingRequest]) -> None:
        ids, engine = [pending.request.id for pending in held], slot.engine
        if engine is not None and ids:
            # Noted before the call: an abort that was not requested costs the engine.
            slot.aborting.update(ids)
            self._engines.send(slot, partial(engine.abort, ids), "abort requests")


def all_lost(slots: Iterable[EngineSlot], evaluates: bool) -> EngineFailed:
    kind = "evaluation" if evaluates else "training"
    peers = [slot for slot in slots if slot.evaluates == evaluates]
    reasons = "; ".join(f"engine {slot.index}: {slot.lost}" for slot in peers)
    message = f"no {kind} engine is left: {reasons}"
    # Memory first: it is the cause that the user can fix.
    out = [slot.memory_out for slot in peers if slot.memory_out is not None]
    return EngineMemoryOut(message, *out[0]) if out else EngineFailed(message)


MIN_AFFINITY_SLACK = 8
"""Minimum slack: an engine with the prompt in its cache may have this many requests more than the
least loaded engine."""
LOOKAHEAD = 4
"""An engine gets max_concurrent / LOOKAHEAD requests more than it decodes at a time, so that all
its slots stay busy."""
GROUPS_REMEMBERED = 4096
"""Number of newest groups whose engine is remembered, for its prefix cache."""

LaneKey = tuple[bool, int]
"""True for training requests, False for an evaluation's; and the version. Lanes are served in this
order."""
Lane = OrderedDict[str, PendingRequest]
RequestBatches = dict[int, list[Request]]
"""Requests to send, by index of the engine."""


def capacity_of(places: int) -> int:
    """Return the largest number of requests for an engine that decodes `places` at a time."""
    return places + max(1, places // LOOKAHEAD)


class EngineCandidate(Protocol):
    """An engine that could take a request."""

    @property
    def index(self) -> int: ...
    @property
    def held(self) -> Sized: ...


class Router:
    """Choice of an engine: the least loaded one with room, or one nearly as empty that has the
    prompt in its cache. `capacity`: largest number of requests that one engine holds."""

    def __init__(self, capacity: int) -> None:
        self.capacity = capacity
        self._slack = max(MIN_AFFINITY_SLACK, capacity // 16)
        self._last: OrderedDict[int, int] = OrderedDict()

    def choose[P: EngineCandidate](self, slots: Sequence[P], group: int, limit: int) -> P | None:
        """Return an engine and remember it for the group; None if all hold `limit` requests. Of
        several engines with the same load, return the first."""
        emptiest = min(slots, key=lambda slot: len(slot.held), default=None)
        if emptiest is None or len(emptiest.held) >= limit:
            return None
        last = self._last.get(group)
        near = None if last is None else next((slot for slot in slots if slot.index == last), None)
        # Up to this imbalance, a cached prefix saves more than the imbalance costs.
        if near is not None and len(near.held) < min(limit, len(emptiest.held) + self._slack + 1):
            return near
        self._last[group] = emptiest.index
        if len(self._last) > GROUPS_REMEMBERED:
            # The oldest group has most likely finished.
            self._last.popitem(last=False)
        return emptiest


class EvenRouter(Router):
    """Choice of an engine that divides every group evenly over the first `engines` engines, in
    turn, and waits until an engine whose turn it is can take a request."""

    def __init__(self, capacity: int, engines: int) -> None:
        super().__init__(capacity)
        self._engines = engines
        self._given = Counter[int]()

    def choose[P: EngineCandidate](self, slots: Sequence[P], group: int, limit: int) -> P | None:
        turn = self._given[group] % self._engines
        for slot in slots:
            if slot.index == turn and len(slot.held) < limit:
                self._given[group] += 1
                return slot
        return None


class Lanes:
    """Waiting requests. `capacity`: largest number of requests that one engine holds. `separate`:
    evaluations have their own engines. `even`: number of engines over which each group is divided
    evenly; 0 chooses by load."""

    def __init__(self, capacity: int, *, separate: bool, even: int = 0) -> None:
        self._router = EvenRouter(capacity, even) if even else Router(capacity)
        self._separate = separate
        self._lanes: dict[LaneKey, Lane] = {}
        self._alone: dict[str, PendingRequest] = {}
        """Requests that wait for an empty engine, in order."""

    def add(self, pending: PendingRequest, *, first: bool = False) -> None:
        """Add a request. `first`: ahead of those that already wait."""
        if pending.alone:
            self._alone[pending.request.id] = pending
            return
        lane = self._lanes.setdefault(
            (pending.answer is None, pending.minimum_version), OrderedDict()
        )
        lane[pending.request.id] = pending
        if first:
            lane.move_to_end(pending.request.id, last=False)

    def forget(self, requests: Iterable[PendingRequest]) -> None:
        """Remove the requests from their lanes; those already sent are not affected."""
        for pending in requests:
            for lane in (*self._lanes.values(), self._alone):
                if lane.get(pending.request.id) is pending:
                    del lane[pending.request.id]

    def take_alone(self, group: int) -> list[PendingRequest]:
        """Remove and return the requests of a group that wait for an empty engine."""
        taken = [one for one in self._alone.values() if one.request.group == group]
        self.forget(taken)
        return taken

    def waiting(self) -> int:
        """Training requests that no engine has yet."""
        alone = sum(pending.answer is None for pending in self._alone.values())
        return alone + sum(len(lane) for (training, _), lane in self._lanes.items() if training)

    def place(self, slots: Sequence[EngineSlot]) -> RequestBatches:
        """Assign to engines the requests that they have room for and may answer. From now on `held`
        of the slots contains them."""
        batches: RequestBatches = {}
        reserved = self._place_alone(slots, batches)
        # False sorts first: evaluations, for which rank 0 waits; then older versions, which are due
        # first.
        for key in sorted(self._lanes):
            lane = self._lanes[key]
            able, limit = self._eligible(key, slots)
            able = [one for one in able if one.index not in reserved]
            while lane:
                pending = next(iter(lane.values()))
                # A request of an abandoned evaluation must end there before its id is used again.
                free = (
                    able if key[0] else [one for one in able if pending.request.id not in one.held]
                )
                slot = self._router.choose(free, pending.request.group, limit)
                if slot is None:
                    break
                lane.popitem(last=False)
                slot.held[pending.request.id] = pending
                batches.setdefault(slot.index, []).append(pending.request)
            if not lane:
                del self._lanes[key]
        return batches

    def _place_alone(self, slots: Sequence[EngineSlot], batches: RequestBatches) -> set[int]:
        """Return the engines that get no other request, because they have a request that runs
        alone, get one now, or finish their requests to become empty for one."""
        reserved = {
            slot.index for slot in slots if any(pending.alone for pending in slot.held.values())
        }
        for name, pending in list(self._alone.items()):
            able, _ = self._eligible((pending.answer is None, pending.minimum_version), slots)
            free = [one for one in able if one.index not in reserved]
            if not free:
                continue
            slot = min(free, key=lambda one: len(one.held))
            # Also while it is busy: without new requests it becomes empty.
            reserved.add(slot.index)
            if slot.held:
                break  # only one engine at a time becomes empty
            del self._alone[name]
            slot.held[name] = pending
            batches.setdefault(slot.index, []).append(pending.request)
        return reserved

    def _eligible(self, key: LaneKey, slots: Sequence[EngineSlot]) -> tuple[list[EngineSlot], int]:
        """Return the engines that may answer a lane's requests, and how many requests each may
        hold. The limit holds for the whole lane, since requests that are placed move from waiting
        to held."""
        training, version = key
        evaluates = not training and self._separate
        there = [
            slot
            for slot in slots
            if slot.engine is not None and not slot.leaving and slot.evaluates == evaluates
        ]
        able = [slot for slot in there if slot.serving and slot.version >= version]
        if not training:
            return [one for one in able if one.version == version], self._router.capacity
        # Otherwise some engines are still loading: leave their share for them.
        if len(able) == len(there):
            return able, self._router.capacity
        requests = self.waiting() + sum(len(slot.held) for slot in there)
        return able, min(self._router.capacity, math.ceil(requests / len(there)))

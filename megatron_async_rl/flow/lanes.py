"""Requests that wait for an engine, and which engine gets them: no clocks, no tasks.

Invariants:
- requests that may be answered by the same engines wait in one lane, in order; evaluations go
  first, then what was admitted under older versions;
- a training request goes only to engines that hold at least its version, an evaluation's only to
  engines that hold exactly its version;
- an engine never holds more than `capacity` requests. While others are there that are still to load
  the version that a request needs, it takes no more than its share: they will have room;
- training and evaluation requests go to the engines of their kind; without evaluation engines both
  kinds share;
- a request that is to run alone (`PendingRequest.alone`) goes to an engine that has nothing, and
  that engine takes nothing else meanwhile. For the first that waits, the engine that has the least
  empties itself.
"""

from __future__ import annotations

import math
from collections import OrderedDict
from collections.abc import Iterable, Sequence, Sized
from typing import Protocol

from megatron_async_rl.flow.engine_task import EngineSlot, PendingRequest
from megatron_async_rl.samples.types import Request

AFFINITY_LEAST = 8
"""Smallest number of requests that an engine that knows the prompt may have more than the least
loaded engine."""
LOOKAHEAD = 4
"""An engine is given max_concurrent / LOOKAHEAD requests more than it decodes at a time, so that
all its slots stay busy."""
GROUPS_REMEMBERED = 4096
"""Newest groups whose engine is remembered, for its prefix cache."""

LaneKey = tuple[bool, int]
"""Training requests (else an evaluation's), and the version: lanes are served in this order."""
Lane = OrderedDict[str, PendingRequest]
RequestBatches = dict[int, list[Request]]
"""Requests to send, by the engine's index."""


def capacity_of(places: int) -> int:
    """Requests that an engine holds at most, which decodes `places` at a time."""
    return places + max(1, places // LOOKAHEAD)


class EngineCandidate(Protocol):
    """An engine that could take a request."""

    @property
    def index(self) -> int: ...
    @property
    def held(self) -> Sized: ...


class Router:
    """The least loaded engine with room, or one nearly as empty that knows the prompt. `capacity`:
    requests that one engine holds at most."""

    def __init__(self, capacity: int) -> None:
        self.capacity = capacity
        self._slack = max(AFFINITY_LEAST, capacity // 16)
        self._last: OrderedDict[int, int] = OrderedDict()

    def choose[P: EngineCandidate](self, slots: Sequence[P], group: int, limit: int) -> P | None:
        """Null where none holds fewer than `limit`; of several that are as empty, the first.
        Remembers where the group went."""
        least = min(slots, key=lambda slot: len(slot.held), default=None)
        if least is None or len(least.held) >= limit:
            return None
        last = self._last.get(group)
        near = None if last is None else next((slot for slot in slots if slot.index == last), None)
        if near is not None and len(near.held) < min(limit, len(least.held) + self._slack + 1):
            return near
        self._last[group] = least.index
        if len(self._last) > GROUPS_REMEMBERED:
            self._last.popitem(last=False)
        return least


class Lanes:
    """`capacity`: requests that one engine holds at most. `separate`: engines of their own
    evaluate."""

    def __init__(self, capacity: int, *, separate: bool) -> None:
        self._router = Router(capacity)
        self._separate = separate
        self._lanes: dict[LaneKey, Lane] = {}
        self._alone: dict[str, PendingRequest] = {}
        """Requests that wait for an engine of their own, in order."""

    def add(self, pending: PendingRequest, *, first: bool = False) -> None:
        """`first`: before those that wait already."""
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
        """Removes the requests of a group that wait for an engine of their own; returns them."""
        taken = [one for one in self._alone.values() if one.request.group == group]
        self.forget(taken)
        return taken

    def waiting(self) -> int:
        """Training requests that no engine has yet."""
        alone = sum(pending.answer is None for pending in self._alone.values())
        return alone + sum(len(lane) for (training, _), lane in self._lanes.items() if training)

    def place(self, slots: Sequence[EngineSlot]) -> RequestBatches:
        """Gives engines what they have room for and may answer; each `held` has it from now on."""
        batches: RequestBatches = {}
        reserved = self._place_alone(slots, batches)
        for key in sorted(self._lanes):
            lane = self._lanes[key]
            able, limit = self._eligible(key, slots)
            able = [one for one in able if one.index not in reserved]
            while lane:
                pending = next(iter(lane.values()))
                # What an evaluation that was given up left there ends before its id is asked again.
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
        """Indices of the engines that take nothing else: they have a request that runs alone, get
        one now, or empty themselves for one."""
        reserved = {
            slot.index for slot in slots if any(pending.alone for pending in slot.held.values())
        }
        for name, pending in list(self._alone.items()):
            able, _ = self._eligible((pending.answer is None, pending.minimum_version), slots)
            free = [one for one in able if one.index not in reserved]
            if not free:
                continue
            slot = min(free, key=lambda one: len(one.held))
            reserved.add(slot.index)
            if slot.held:
                break  # one engine at a time empties itself
            del self._alone[name]
            slot.held[name] = pending
            batches.setdefault(slot.index, []).append(pending.request)
        return reserved

    def _eligible(self, key: LaneKey, slots: Sequence[EngineSlot]) -> tuple[list[EngineSlot], int]:
        """The engines that may answer a lane's requests, and how many requests one of them may
        hold: the same for all of the lane, since what is placed waits no longer and is held."""
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
        if len(able) == len(there):
            return able, self._router.capacity
        requests = self.waiting() + sum(len(slot.held) for slot in there)
        return able, min(self._router.capacity, math.ceil(requests / len(there)))

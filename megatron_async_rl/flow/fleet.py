"""The engines as one: requests wait in one queue and go to whichever engine has room; answers come back through one pump each.

Invariants:
- a request is with one engine at a time; what an engine that is lost had not answered goes to the front of the queue again;
- an engine never holds more than `capacity` requests, so a slow one cannot hoard;
- training and evaluation requests go to the engines of their kind; without evaluation engines both kinds share;
- an engine that raises, or whose vLLM is silent for `unresponsive_s`, is lost, and nothing it says later is heard.
"""

from __future__ import annotations

import asyncio
import logging
import time
from collections import OrderedDict, deque
from collections.abc import Awaitable, Callable, Coroutine, Sequence
from dataclasses import dataclass, field
from typing import Literal

from megatron_async_rl.flow.engines import EngineClient
from megatron_async_rl.flow.errors import EngineFailed
from megatron_async_rl.samples.requests import Cut, EngineReport, Request
from megatron_async_rl.samples.types import Sample

log = logging.getLogger(__name__)

Kind = Literal["training", "evaluation"]
REPORT_S = 1.0
"""Longest time between two reports of an engine that has nothing to say."""

AFFINITY_LEAST = 8
"""Requests by which an engine that knows the prompt may be fuller than the least loaded one, at the least."""

GROUPS_REMEMBERED = 4096
"""Newest groups whose engine is remembered, for its prefix cache."""


@dataclass(eq=False)
class Slot:
    """One engine's place in the fleet."""

    index: int
    kind: Kind
    client: EngineClient
    held: dict[str, Request] = field(default_factory=dict)
    cutting: set[str] = field(default_factory=set)
    """Of those held: told to stop, not yet answered."""
    report: EngineReport | None = None
    pump: asyncio.Task[None] | None = None
    alive: bool = True
    lost: str = ""
    """Why it is not alive."""
    restarts: int = 0
    """Engines that were in this place before."""


class Fleet:
    """`on_sample` and `on_cut` get the answers to training requests; `on_lost` an engine's index and why, `on_error` what they
    raise. All on one loop."""

    def __init__(
        self,
        engines: Sequence[EngineClient],
        *,
        evaluators: Sequence[EngineClient] = (),
        capacity: int,
        unresponsive_s: float,
        on_sample: Callable[[Sample, Request], None],
        on_cut: Callable[[Cut, Request], None],
        on_lost: Callable[[int, str], None],
        on_error: Callable[[BaseException], None],
    ) -> None:
        if not engines:
            raise ValueError("a fleet needs at least one engine")
        kinds: list[tuple[Kind, EngineClient]] = [("training", e) for e in engines] + [("evaluation", e) for e in evaluators]
        self.slots = [Slot(index, kind, client) for index, (kind, client) in enumerate(kinds)]
        self._capacity = capacity
        self._unresponsive_s = unresponsive_s
        self._on_sample = on_sample
        self._on_cut = on_cut
        self._on_lost = on_lost
        self._on_error = on_error
        self._queues: dict[Kind, deque[Request]] = {"training": deque(), "evaluation": deque()}
        self._evaluations: dict[str, asyncio.Future[Sample]] = {}
        self._last: OrderedDict[int, int] = OrderedDict()
        self._background: set[asyncio.Task[None]] = set()
        self.moved_at = time.monotonic()
        """When an engine last answered a request."""

    # Requests

    def put(self, requests: Sequence[Request]) -> None:
        """Hands training requests out, in order, as engines have room."""
        self._queues["training"].extend(requests)
        self._dispatch()

    async def run(self, requests: Sequence[Request], *, on: Kind) -> list[Sample]:
        """The samples that answer held-out `requests`, in their order, before training's. Cancelled, it stops what is running.

        Raises EngineFailed when no engine is left to ask.
        """
        futures = [asyncio.get_running_loop().create_future() for _ in requests]
        for request, future in zip(requests, futures, strict=True):
            self._evaluations[request.id] = future
        try:
            self._queues[on if self._engines_for(on) else "training"].extendleft(reversed(requests))
            self._dispatch()
            return list(await asyncio.gather(*futures))
        finally:
            self._forget({request.id for request in requests})

    def cut(self, ids: Sequence[str], group: int) -> None:
        """Stops training requests of `group`: those that wait here at once, the others on their engines."""
        wanted = set(ids)
        waiting = [request for request in self._queues["training"] if request.group == group and request.id in wanted]
        if waiting:
            gone = {request.id for request in waiting}
            self._queues["training"] = deque(r for r in self._queues["training"] if r.id not in gone)
            for request in waiting:
                self._on_cut(Cut(id=request.id, prefix=request.prefix), request)
        for slot in self._engines_for("training"):
            held = [request for request in slot.held if request in wanted]
            if held:
                slot.cutting.update(held)
                self._spawn(self._send(slot, slot.client.cut(held), "cut requests"))

    def waiting(self) -> int:
        """Requests that no engine has yet."""
        return sum(len(queue) for queue in self._queues.values())

    def holder(self, group: int) -> list[int]:
        """Engines that hold requests of `group`."""
        return [slot.index for slot in self.slots if any(request.group == group for request in slot.held.values())]

    # Engines

    def start(self) -> None:
        """Begins to listen; in the loop that everything else runs on."""
        for slot in self.slots:
            if slot.alive and slot.pump is None:
                slot.pump = asyncio.get_running_loop().create_task(self._pump(slot), name=f"reports of engine {slot.index}")

    def replace(self, index: int, client: EngineClient) -> None:
        """A new engine, which holds the current weights, in the place of a lost one."""
        old = self.slots[index]
        if old.alive:
            raise ValueError(f"engine {index} is alive and cannot be replaced")
        self.slots[index] = Slot(index, old.kind, client, restarts=old.restarts + 1)
        self.start()
        self._dispatch()

    def lose(self, index: int, reason: str) -> None:
        """The engine takes part no longer; what it held is asked again."""
        slot = self.slots[index]
        if not slot.alive:
            return
        slot.alive, slot.lost = False, reason
        if slot.pump is not None and slot.pump is not asyncio.current_task():
            slot.pump.cancel()
        held, slot.held = list(slot.held.values()), {}
        again = [request for request in held if request.id not in slot.cutting]
        log.error("engine %d is lost, %d requests are asked again: %s", index, len(again), reason)
        self._queues[slot.kind].extendleft(reversed(again))
        for request in held:
            if request.id in slot.cutting and request.group >= 0:
                self._on_cut(Cut(id=request.id, prefix=request.prefix), request)
        self._on_lost(index, reason)
        self._dispatch()

    def fail(self, error: BaseException) -> None:
        """Nobody is left to answer: whoever waits in `run` gets `error`."""
        for future in self._evaluations.values():
            if not future.done():
                future.set_exception(error)

    async def stop(self) -> None:
        tasks = [slot.pump for slot in self.slots if slot.pump is not None] + list(self._background)
        for task in tasks:
            task.cancel()
        if tasks:
            await asyncio.wait(tasks, timeout=10.0)

    def _engines_for(self, kind: Kind) -> list[Slot]:
        return [slot for slot in self.slots if slot.alive and slot.kind == kind]

    def _dispatch(self) -> None:
        batches: dict[int, list[Request]] = {}
        for kind, queue in self._queues.items():
            slots = self._engines_for(kind)
            while queue and (slot := self._choose(slots, queue[0])) is not None:
                request = queue.popleft()
                slot.held[request.id] = request
                self._last[request.group] = slot.index
                while len(self._last) > GROUPS_REMEMBERED:
                    self._last.popitem(last=False)
                batches.setdefault(slot.index, []).append(request)
        for index, requests in batches.items():
            slot = self.slots[index]
            self._spawn(self._send(slot, slot.client.submit(requests), "take requests"))

    def _choose(self, slots: Sequence[Slot], request: Request) -> Slot | None:
        """The least loaded engine with room; among nearly equals the one that has the group's prompt in its cache."""
        free = [slot for slot in slots if len(slot.held) < self._capacity]
        if not free:
            return None
        least = min(free, key=lambda slot: (len(slot.held), slot.index))
        last = self._last.get(request.group)
        near = next((slot for slot in free if slot.index == last), None)
        slack = max(AFFINITY_LEAST, self._capacity // 16)
        return near if near is not None and len(near.held) <= len(least.held) + slack else least

    def _forget(self, ids: set[str]) -> None:
        for request in ids:
            self._evaluations.pop(request, None)
        for kind, queue in self._queues.items():
            self._queues[kind] = deque(request for request in queue if request.id not in ids)
        for slot in self.slots:
            held = [request for request in slot.held if request in ids]
            if slot.alive and held:
                slot.cutting.update(held)
                self._spawn(self._send(slot, slot.client.cut(held), "cut requests"))

    # Answers

    async def _pump(self, slot: Slot) -> None:
        while slot.alive:
            try:
                report = await asyncio.wait_for(slot.client.report(REPORT_S), self._unresponsive_s)
            except TimeoutError:
                self.lose(slot.index, f"it did not answer for {self._unresponsive_s:g} s (rollout.unresponsive_s)")
                return
            except Exception as error:  # noqa: BLE001 - whatever it is, this engine is of no more use
                self.lose(slot.index, f"{type(error).__name__}: {error}")
                return
            if report.silent_s > self._unresponsive_s:
                self.lose(slot.index, f"its vLLM process did not answer for {report.silent_s:.0f} s (rollout.unresponsive_s)")
                return
            try:
                self._take(slot, report)
            except Exception as error:
                log.exception("the report of engine %d could not be taken in", slot.index)
                self._on_error(error)
                return

    def _take(self, slot: Slot, report: EngineReport) -> None:
        slot.report = report
        if report.finished or report.cut:
            self.moved_at = time.monotonic()
        for sample in report.finished:
            request = slot.held.pop(sample.id, None)
            slot.cutting.discard(sample.id)
            if request is None or sample.prompt.id != request.prompt.id:
                self.lose(slot.index, f"it answered {sample.id}, prompt {sample.prompt.id}, which it was not asked")
                return
            if request.group >= 0:
                self._on_sample(sample, request)
            elif (future := self._evaluations.get(request.id)) is not None and not future.done():
                future.set_result(sample)
        for cut in report.cut:
            request = slot.held.pop(cut.id, None)
            slot.cutting.discard(cut.id)
            if request is not None and request.group >= 0:
                self._on_cut(cut, request)
        self._dispatch()

    async def _send(self, slot: Slot, call: Awaitable[None], what: str) -> None:
        try:
            await asyncio.wait_for(call, self._unresponsive_s)
        except Exception as error:  # noqa: BLE001 - whatever it is, this engine is of no more use
            self.lose(slot.index, f"it failed to {what}: {type(error).__name__}: {error}")

    def _spawn(self, work: Coroutine[None, None, None]) -> None:
        task = asyncio.get_running_loop().create_task(work)
        self._background.add(task)
        task.add_done_callback(self._background.discard)


def all_lost(fleet: Fleet, kind: Kind = "training") -> EngineFailed:
    """Why there is nobody left to ask."""
    reasons = "; ".join(f"engine {slot.index}: {slot.lost}" for slot in fleet.slots if slot.kind == kind)
    return EngineFailed(f"no {kind} engine is left: {reasons}")

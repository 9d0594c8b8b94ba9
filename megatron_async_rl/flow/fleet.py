"""The engines as one: requests wait in one queue and go to whichever engine has room; answers come back through one pump each.

Invariants:
- a request is with one engine at a time; what an engine that is lost had not answered goes to the front of the queue again;
- an engine never holds more than `capacity` requests (routing.py);
- training and evaluation requests go to the engines of their kind; without evaluation engines both kinds share;
- an engine that raises, answers what it was not asked, or whose vLLM is silent for `unresponsive_s`, is lost: nothing it says
  later is heard, and nothing that fails later of it touches the engine that took its place.
"""

from __future__ import annotations

import asyncio
import logging
import time
from collections import OrderedDict
from collections.abc import Awaitable, Callable, Coroutine, Iterable, Sequence
from functools import partial
from typing import TypeVar

from megatron_async_rl.flow.engines import EngineClient
from megatron_async_rl.flow.errors import EngineFailed
from megatron_async_rl.flow.routing import Router
from megatron_async_rl.flow.slot import Kind, Slot
from megatron_async_rl.observe import watch
from megatron_async_rl.samples.requests import Cut, EngineReport, Request
from megatron_async_rl.samples.types import Sample

log = logging.getLogger(__name__)

A = TypeVar("A", Sample, Cut)
Batches = dict[int, list[Request]]
"""By engine."""
REPORT_S = 1.0
"""Longest time between two reports of an engine that has nothing to say; a quarter of `unresponsive_s` where that is less."""


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
        self._router = Router(capacity)
        self._unresponsive_s = unresponsive_s
        self._on_sample = on_sample
        self._on_cut = on_cut
        self._on_lost = on_lost
        self._on_error = on_error
        self._queues: dict[Kind, OrderedDict[str, Request]] = {"training": OrderedDict(), "evaluation": OrderedDict()}
        self._evaluations: dict[str, asyncio.Future[Sample]] = {}
        self._background: set[asyncio.Task[None]] = set()
        self._stopped = False
        self.moved_at = time.monotonic()
        """When an engine last answered a request, or a response grew."""

    # Requests

    def put(self, requests: Iterable[Request]) -> None:
        """Hands training requests out, in order, as engines have room. Each has its place before the next one is made."""
        queue, slots = self._queues["training"], self._engines_for("training")
        batches: Batches = {}
        for request in requests:
            if queue or not self._place(request, slots, batches):
                queue[request.id] = request
        self._submit(batches)

    async def run(self, requests: Sequence[Request], *, on: Kind) -> list[Sample]:
        """The samples that answer held-out `requests`, in their order, before training's. Cancelled, it stops what is running.

        Raises EngineFailed when no engine is left to ask.
        """
        futures = [asyncio.get_running_loop().create_future() for _ in requests]
        for request, future in zip(requests, futures, strict=True):
            self._evaluations[request.id] = future
        try:
            self._put_first(requests, on if any(slot.kind == on for slot in self.slots) else "training")
            self._dispatch()
            return list(await asyncio.gather(*futures))
        finally:
            self._forget([request.id for request in requests])

    def cut(self, ids: Sequence[str]) -> None:
        """Stops training requests: those that wait here at once, the others on their engines."""
        queue = self._queues["training"]
        for request in [queue.pop(one) for one in ids if one in queue]:
            self._tell(self._on_cut, Cut(id=request.id, prefix=request.prefix), request)
        self._stop_held(ids)

    def _stop_held(self, ids: Iterable[str]) -> None:
        for slot in self.slots:
            held = [one for one in ids if one in slot.held]
            if slot.alive and held:
                slot.cutting.update(held)
                self._spawn(self._send(slot, partial(slot.client.cut, held), "cut requests"))

    def _put_first(self, requests: Sequence[Request], kind: Kind) -> None:
        for request in reversed(requests):
            self._queues[kind][request.id] = request
            self._queues[kind].move_to_end(request.id, last=False)

    def waiting(self) -> int:
        """Training requests that no engine has yet."""
        return sum(request.group >= 0 for request in self._queues["training"].values())

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
        self._lose(self.slots[index], reason)

    def _lose(self, slot: Slot, reason: str) -> None:
        if not slot.alive or self._stopped:
            return
        slot.alive, slot.lost = False, reason
        if slot.pump is not None and slot.pump is not asyncio.current_task():
            slot.pump.cancel()
        held, slot.held = list(slot.held.values()), {}
        again = [request for request in held if request.id not in slot.cutting]
        log.error("engine %d is lost, %d requests are asked again: %s", slot.index, len(again), reason)
        self._put_first(again, slot.kind)
        for request in held:
            if request.id in slot.cutting and request.group >= 0:
                self._tell(self._on_cut, Cut(id=request.id, prefix=request.prefix), request)
        self._on_lost(slot.index, reason)
        self._dispatch()

    def fail(self, error: BaseException) -> None:
        """Nobody is left to answer: whoever waits in `run` gets `error`."""
        for future in self._evaluations.values():
            if not future.done():
                future.set_exception(error)

    async def stop(self) -> None:
        """Hears and sends nothing more."""
        self._stopped = True
        tasks = [slot.pump for slot in self.slots if slot.pump is not None] + list(self._background)
        for task in tasks:
            task.cancel()
        if tasks:
            await asyncio.wait(tasks, timeout=10.0)

    def _engines_for(self, kind: Kind) -> list[Slot]:
        return [slot for slot in self.slots if slot.alive and slot.kind == kind]

    def _dispatch(self) -> None:
        batches: Batches = {}
        for kind, queue in self._queues.items():
            slots = self._engines_for(kind) if queue else []
            while queue and self._place(next(iter(queue.values())), slots, batches):
                queue.popitem(last=False)
        self._submit(batches)

    def _place(self, request: Request, slots: Sequence[Slot], batches: Batches) -> bool:
        """Gives the request to one of `slots`, unless none has room; `batches` is told."""
        slot = self._router.choose(slots, request.group)
        if slot is None:
            return False
        slot.held[request.id] = request
        batches.setdefault(slot.index, []).append(request)
        return True

    def _submit(self, batches: Batches) -> None:
        for index, requests in batches.items():
            slot = self.slots[index]
            self._spawn(self._send(slot, partial(slot.client.submit, requests), "take requests"))

    def _forget(self, ids: Sequence[str]) -> None:
        futures = {one: self._evaluations.pop(one) for one in ids}
        left = [one for one, future in futures.items() if not future.done() or future.cancelled() or future.exception()]
        for queue in self._queues.values():
            for one in left:
                queue.pop(one, None)
        self._stop_held(left)

    # Answers

    async def _pump(self, slot: Slot) -> None:
        reason = await self._listen(slot)
        if reason:
            self._lose(slot, reason)

    async def _listen(self, slot: Slot) -> str:
        """Takes in reports until the engine is of no more use; returns why."""
        wait = min(REPORT_S, self._unresponsive_s / 4)
        while slot.alive:
            try:
                with watch.doing("wait", f"a report of engine {slot.index}", self._unresponsive_s):
                    async with asyncio.timeout(self._unresponsive_s):
                        report = await slot.client.report(wait)
            except TimeoutError:
                return f"it did not answer for {self._unresponsive_s:g} s (rollout.unresponsive_s)"
            except Exception as error:  # noqa: BLE001 - whatever it is, this engine is of no more use
                return f"{type(error).__name__}: {error}"
            if not slot.alive or self._stopped:
                break
            if report.silent_s > self._unresponsive_s:
                return f"its vLLM process did not answer for {report.silent_s:.0f} s (rollout.unresponsive_s)"
            reason = self._take(slot, report)
            if reason:
                return reason
        return ""

    def _take(self, slot: Slot, report: EngineReport) -> str:
        """Hands on what the engine says; returns why it cannot be trusted, where it answers what it was not asked."""
        slot.report = report
        if report.finished or report.cut or report.sampling:
            self.moved_at = time.monotonic()
        if report.finished or report.cut:
            watch.progress("responses", len(report.finished) + len(report.cut))
        for sample in report.finished:
            request = slot.held.get(sample.id)
            if request is None or sample.prompt.id != request.prompt.id:
                return f"it answered {sample.id}, prompt {sample.prompt.id}, which it was not asked"
            self._release(slot, sample.id)
            if request.group >= 0:
                self._tell(self._on_sample, sample, request)
            elif (future := self._evaluations.get(request.id)) is not None and not future.done():
                future.set_result(sample)
        for cut in report.cut:
            request = slot.held.get(cut.id)
            if request is None or cut.id not in slot.cutting:
                return f"it cut {cut.id}, which it was not told to"
            self._release(slot, cut.id)
            if request.group >= 0:
                self._tell(self._on_cut, cut, request)
        self._dispatch()
        return ""

    def _tell(self, receive: Callable[[A, Request], None], answer: A, request: Request) -> None:
        try:
            receive(answer, request)
        except Exception as error:  # the receiver broke: nothing can go on, and somebody must be told
            log.exception("the answer to request %s could not be taken in", request.id)
            self._on_error(error)

    @staticmethod
    def _release(slot: Slot, request: str) -> None:
        del slot.held[request]
        slot.cutting.discard(request)

    async def _send(self, slot: Slot, call: Callable[[], Awaitable[None]], what: str) -> None:
        try:
            with watch.doing("wait", f"engine {slot.index} to {what}", self._unresponsive_s):
                async with asyncio.timeout(self._unresponsive_s):
                    await call()
        except Exception as error:  # noqa: BLE001 - whatever it is, this engine is of no more use
            self._lose(slot, f"it failed to {what}: {type(error).__name__}: {error}")

    def _spawn(self, work: Coroutine[None, None, None]) -> None:
        task = asyncio.get_running_loop().create_task(work)
        self._background.add(task)
        task.add_done_callback(self._background.discard)


def all_lost(fleet: Fleet, kind: Kind = "training") -> EngineFailed:
    """Why there is nobody left to ask."""
    reasons = "; ".join(f"engine {slot.index}: {slot.lost}" for slot in fleet.slots if slot.kind == kind)
    return EngineFailed(f"no {kind} engine is left: {reasons}")

"""Prompts in, train batches out: the scheduler's decisions carried out on a fleet of engines.

              advance(version) makes room
                         v
    source --admit--> scheduler --requests--> fleet --samples--> scheduler --next_batch--> trainer

Invariants:
- what is decided is decided by the scheduler (scheduler.py), who does it by the fleet (fleet.py); here they are put together;
- `state()` has the prompts that are admitted and not consumed, `buffer()` what there already is of their responses: a resume
  goes on with the buffer and asks for the rest again, so nothing is lost and nothing made twice;
- an engine that is lost is reported once through `lost`; whoever restarts engines says `replace` or `give_up`;
- what goes wrong for good (no engine left, a reward that must not fail) ends the next `next_batch` at once, with its cause;
- held-out evaluation uses the same fleet and touches neither the source nor the scheduler.
"""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import Iterator, Mapping, Sequence
from typing import Any, Literal, Protocol

from megatron_async_rl.config.schema import FlowConfig
from megatron_async_rl.flow.buffer import EMPTY, Buffer
from megatron_async_rl.flow.buffer_file import prompt_fields, prompt_of
from megatron_async_rl.flow.engines import EngineClient
from megatron_async_rl.flow.errors import BatchTimeout, reward_failed
from megatron_async_rl.flow.evaluation import EvalResult, evaluate
from megatron_async_rl.flow.fleet import Fleet, all_lost
from megatron_async_rl.flow.fleet_summary import engine_counts
from megatron_async_rl.flow.lateness import Ages, lateness
from megatron_async_rl.flow.scheduler import Scheduler
from megatron_async_rl.samples.requests import Cut, Request
from megatron_async_rl.samples.types import Prompt, Sample, TrainBatch

log = logging.getLogger(__name__)


class Source(Protocol):
    """Where training prompts come from (data.PromptSource)."""

    def next(self) -> Prompt: ...
    def state(self) -> dict[str, Any]: ...
    def load_state(self, state: Mapping[str, Any]) -> None: ...


class Controller:
    """Lives on one asyncio loop; every method runs there.

    `evaluators`: engines that only evaluate; they are numbered after `engines`. `capacity`: requests that one engine holds at
    most. The rest is the scheduler's and the fleet's.
    """

    def __init__(
        self,
        source: Source,
        engines: Sequence[EngineClient],
        flow: FlowConfig,
        *,
        evaluators: Sequence[EngineClient] = (),
        on_reward_error: Literal["drop", "stop"] = "drop",
        steps: int | None = None,
        fresh_steps: int = 0,
        seed: int = 0,
        capacity: int = 320,
        unresponsive_s: float = 60.0,
    ) -> None:
        self._source = source
        self._flow = flow
        self._on_reward_error = on_reward_error
        self._scheduler = Scheduler(flow, steps=steps, fresh_steps=fresh_steps, seed=seed)
        self._fleet = Fleet(
            engines,
            evaluators=evaluators,
            capacity=capacity,
            unresponsive_s=unresponsive_s,
            on_sample=self._answered,
            on_cut=self._was_cut,
            on_lost=self._was_lost,
            on_error=self._fail,
        )
        self._resumed: Mapping[str, Any] = {}
        self._left_behind = EMPTY
        self._oldest = 0
        self._withdrawn = False
        self._failure: BaseException | None = None
        self._progress = asyncio.Event()
        self._lost: asyncio.Queue[tuple[int, str]] = asyncio.Queue()
        self._given_up: set[int] = set()
        self._ages = Ages()
        self._totals = {"samples": 0, "tokens": 0, "truncated": 0, "reward_errors": 0}

    # Versions and batches

    def start(self, version: int) -> None:
        """The engines hold `version`: begin admitting. After `load_state`, continues with what the run had not consumed."""
        pending = [(int(index), prompt_of(fields)) for index, fields in self._resumed.get("pending", [])]
        next_index = int(self._resumed.get("next_index", 0))
        requests = self._scheduler.start(version, next_index, pending, self._left_behind, self._oldest)
        self._left_behind = EMPTY
        for index, _ in self._scheduler.running():
            self._ages.begin(index)
        self._fleet.start()
        self._fleet.put(requests)
        self._admit()
        self._progress.set()

    def advance(self, version: int) -> None:
        """Every engine holds `version` now, so more may be admitted. Versions only grow; the same one again does nothing."""
        self._scheduler.advance(version)
        self._admit()
        self._progress.set()

    def _admit(self) -> None:
        if self._failure is None and self._scheduler.room():
            self._fleet.put(self._admitted())

    def _admitted(self) -> Iterator[Request]:
        while self._scheduler.room():
            requests = self._scheduler.admit(self._source.next)
            self._ages.begin(requests[0].group)
            yield from requests

    async def next_batch(self, version: int, timeout_s: float) -> TrainBatch | None:
        """The batch that trains `version`, the trainer's; the engines may still hold an older one. Null after `withdraw`.

        Raises what ended the flow as soon as it happened, BatchTimeout after `timeout_s` seconds in which no response grew,
        naming the groups that are late and their engines, and StalenessViolated should a sample break the law.
        """
        waited_from = time.monotonic()
        while True:
            if self._withdrawn:
                return None
            if self._failure is not None:
                raise self._failure
            batch = self._scheduler.take(version) if self._scheduler.version is not None else None
            if batch is not None:
                self._ages.keep(index for index, _ in self._scheduler.running())
                self._admit()
                return batch
            self._progress.clear()
            left = max(waited_from, self._fleet.moved_at) + timeout_s - time.monotonic()
            if left <= 0:
                raise BatchTimeout(lateness(version, timeout_s, self._scheduler, self._fleet, self._ages))
            await _at_most(self._progress.wait(), left)

    def withdraw(self) -> None:
        """No batch is handed out any more: what was taken before is all that may train. Engines and admission go on."""
        self._withdrawn = True
        self._progress.set()

    # Answers of the fleet

    def _answered(self, sample: Sample, request: Request) -> None:
        self._totals["samples"] += 1
        self._totals["tokens"] += sample.length - (0 if request.prefix is None else len(request.prefix.response_ids))
        self._totals["truncated"] += sample.truncated
        if not sample.valid:
            self._totals["reward_errors"] += 1
            log.warning("reward failed on sample %s: %s; response %r", sample.id, sample.reward_error, sample.text[:200])
            if self._on_reward_error == "stop":
                self._fail(reward_failed([sample]))
        unwanted = self._scheduler.answered(sample, request.group)
        if unwanted:
            self._fleet.cut(unwanted)
        self._go_on()

    def _was_cut(self, cut: Cut, request: Request) -> None:
        self._scheduler.was_cut(cut, request.group)
        self._go_on()

    def _go_on(self) -> None:
        """The trainer is woken only where there may be a batch: not for each of a batch's responses."""
        self._admit()
        if self._scheduler.may_take(self._scheduler.next_step):
            self._progress.set()

    def _was_lost(self, index: int, reason: str) -> None:
        self._lost.put_nowait((index, reason))

    def _fail(self, error: BaseException) -> None:
        if self._failure is None:
            log.error("%s", error)
            self._failure = error
        self._fleet.fail(error)
        self._progress.set()

    # Engines that come and go

    async def lost(self) -> tuple[int, str]:
        """Waits for the next engine to be lost: its number and why."""
        return await self._lost.get()

    def lose(self, index: int, reason: str) -> None:
        """Somebody else found that the engine is of no more use."""
        self._fleet.lose(index, reason)

    def replace(self, index: int, client: EngineClient) -> None:
        """A restarted engine takes the place of a lost one. It holds the version that the others hold, proven."""
        self._fleet.replace(index, client)

    def give_up(self, index: int) -> None:
        """The engine will not be restarted: the run goes on with the others, or ends when there are none of its kind."""
        self._given_up.add(index)
        kind = self._fleet.slots[index].kind
        if all(slot.index in self._given_up for slot in self._fleet.slots if slot.kind == kind):
            error = all_lost(self._fleet, kind)
            if kind == "training":
                self._fail(error)
            else:
                self._fleet.fail(error)

    # Evaluation, positions, counts

    async def evaluate(
        self, prompts: Sequence[Prompt], n: int, version: int, timeout_s: float, *, pass_at: Sequence[int], pass_reward: float
    ) -> EvalResult:
        """Held-out prompts, `n` responses each, sampled as in training. See evaluation.evaluate."""
        if self._failure is not None:
            raise self._failure
        separate = [slot for slot in self._fleet.slots if slot.kind == "evaluation"]
        if separate and all(slot.index in self._given_up for slot in separate):
            raise all_lost(self._fleet, "evaluation")
        self._fleet.start()
        return await evaluate(
            self._fleet,
            prompts,
            n,
            version,
            timeout_s,
            on_reward_error=self._on_reward_error,
            pass_at=pass_at,
            pass_reward=pass_reward,
            on="evaluation" if separate else "training",
        )

    def state(self) -> dict[str, Any]:
        """Plain JSON: the source's position, and the prompts that came from it and are not consumed."""
        if self._scheduler.version is None and self._resumed:
            return dict(self._resumed)
        pending = [[index, prompt_fields(prompt)] for index, prompt in self._scheduler.pending()]
        counts = self._scheduler.counts()
        consumed = int(self._resumed.get("consumed", 0)) + counts["consumed"]
        return {
            "source": self._source.state(),
            "consumed": consumed,
            "next_index": self._scheduler.next_index,
            "pending": pending,
        }

    def buffer(self) -> Buffer:
        """What there is of the responses to the prompts in `state()`, of the same moment if nothing is awaited in between."""
        return self._scheduler.buffer() if self._scheduler.version is not None else self._left_behind

    def load_state(self, state: Mapping[str, Any], buffer: Buffer = EMPTY, oldest: int = 0) -> None:
        """Before `start` only. `oldest`: the oldest version whose tokens may train. Raises ValueError where the saved position
        belongs to other data."""
        if self._scheduler.version is not None:
            raise RuntimeError("load_state after start")
        self._source.load_state(state["source"])
        self._resumed, self._left_behind, self._oldest = state, buffer, oldest

    def stats(self) -> dict[str, Any]:
        """Counts since `start`: of the scheduler, of responses, and `engines`: EngineCounts of each place in the fleet."""
        counts = self._scheduler.counts()
        return {
            **counts,
            "in_flight": counts["open"] - self._fleet.waiting(),
            "waiting": self._fleet.waiting(),
            "buffer": counts["ready"],
            "oldest_in_flight_s": self._ages.oldest(index for index, _ in self._scheduler.running()),
            "version": self._scheduler.version,
            "engines": [engine_counts(slot) for slot in self._fleet.slots],
            **self._totals,
        }

    def drain_dropped(self) -> list[Sample]:
        """Finished responses of dropped groups since the last call."""
        return self._scheduler.drain_dropped()

    async def stop(self) -> None:
        """Listens to the engines no longer; `state()` still has what they had not answered."""
        await self._fleet.stop()


async def _at_most(wait: Any, seconds: float) -> None:
    try:
        await asyncio.wait_for(wait, seconds)
    except TimeoutError:
        return

"""Prompts in, train batches out, under the staleness law (law.py).

              advance(version) raises the limit
                         v
    source --admit--> engines (one task per group) --finished--> ordered buffer --next_batch--> trainer

Invariants:
- groups are numbered in admission order and consumed strictly in that order, B per step;
- with `flow.filter_equal_groups` a finished group that has nothing to compare is dropped, counted, and one more is admitted;
- no group is admitted beyond the law's limit for the version the engines already hold;
- `state()` is the position of the next unconsumed group: prompts admitted but not consumed are asked again after a
  resume, so nothing is lost and nothing is trained twice;
- what goes wrong on an engine or in a reward ends the next `next_batch` at once, with its cause;
- held-out evaluation uses the same engines and touches neither the source nor the numbering.
"""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any, Literal, Protocol

from megatron_async_rl.config.schema import FlowConfig
from megatron_async_rl.flow.engines import EngineClient
from megatron_async_rl.flow.errors import BatchTimeout, reward_failed
from megatron_async_rl.flow.evaluation import EvalResult, evaluate
from megatron_async_rl.flow.fleet import Fleet
from megatron_async_rl.flow.law import StalenessViolated, admitted_limit, max_lag
from megatron_async_rl.samples.types import Group, Prompt, TrainBatch

log = logging.getLogger(__name__)

FILTER_PATIENCE = 10
"""Batches' worth of groups that are dropped for one batch; after that equal groups are taken, so that no run waits for ever."""


class Source(Protocol):
    """Where training prompts come from (data.PromptSource)."""

    def next(self) -> Prompt: ...
    def state(self) -> dict[str, Any]: ...
    def load_state(self, state: Mapping[str, Any]) -> None: ...


@dataclass(eq=False)
class _Flight:
    """One admitted, not yet consumed group."""

    index: int
    prompt: Prompt
    source_state: dict[str, Any]
    engine: int
    admitted_at: float
    task: asyncio.Task[Group]
    dropped: bool | None = None
    """Null until it has finished and been looked at."""


class Controller:
    """Lives on one asyncio loop; every method runs there. `steps`: optimizer steps of the whole run, so that nothing is
    admitted that no step will consume; null admits without end. `fresh_steps`: the run's first steps that are synchronous
    whatever `flow.async_ratio` says."""

    def __init__(
        self,
        source: Source,
        engines: Sequence[EngineClient],
        flow: FlowConfig,
        *,
        on_reward_error: Literal["drop", "stop"] = "drop",
        steps: int | None = None,
        fresh_steps: int = 0,
    ) -> None:
        self._source = source
        self._fleet = Fleet(engines)
        self._flow = flow
        self._on_reward_error = on_reward_error
        self._steps = steps
        self._fresh_steps = fresh_steps
        self._version: int | None = None
        self._base_version = 0
        self._base_index = 0
        self._next_index = 0
        self._consumed = 0
        self._dropped = self._dropped_for_batch = 0
        self._flights: dict[int, _Flight] = {}
        self._failure: BaseException | None = None
        self._progress = asyncio.Event()
        self._totals = {"samples": 0, "tokens": 0, "truncated": 0, "reward_errors": 0}

    def start(self, version: int) -> None:
        """The engines hold `version`: begin admitting. After `load_state`, continues with the next unconsumed group."""
        if self._version is not None:
            raise RuntimeError(f"the controller was started already, at version {self._base_version}")
        self._version = self._base_version = version
        self._base_index = self._next_index = self._consumed
        self._admit()

    def advance(self, version: int) -> None:
        """The engines hold `version` now, so more may be admitted. Versions only grow; the same one again does nothing."""
        if self._version is None:
            raise RuntimeError(f"advance({version}) before start")
        if version < self._version:
            raise ValueError(f"weight versions only grow: at {self._version}, asked to advance to {version}")
        self._version = version
        self._admit()

    def _limit(self) -> int:
        assert self._version is not None
        step = self._version - self._base_version
        fresh = self._fresh_steps - self._base_version
        limit = admitted_limit(step, self._flow.prompts_per_step, self._flow.async_ratio, fresh)
        if self._steps is not None:
            limit = min(limit, max(self._steps - self._base_version, 0) * self._flow.prompts_per_step)
        # A dropped group gives up its place in the order, so those behind it are consumed no later than the law reckons with.
        return self._base_index + limit + self._dropped

    def _admit(self) -> None:
        assert self._version is not None
        while self._next_index < self._limit() and self._failure is None:
            index = self._next_index
            source_state = self._source.state()
            prompt = self._source.next()
            engine = self._fleet.reserve(self._flow.group_size)
            call = self._generate(engine, index, prompt, self._version)
            task = asyncio.get_running_loop().create_task(call, name=f"group {index} on engine {engine}")
            task.add_done_callback(partial(self._finished, index))
            self._flights[index] = _Flight(index, prompt, source_state, engine, time.monotonic(), task)
            self._next_index += 1

    async def _generate(self, engine: int, index: int, prompt: Prompt, version: int) -> Group:
        group = await self._fleet.generate(engine, index, prompt, self._flow.group_size, version)
        bad = [sample for sample in group.samples if not sample.valid]
        self._totals["samples"] += len(group.samples)
        self._totals["tokens"] += sum(sample.length for sample in group.samples)
        self._totals["truncated"] += sum(sample.truncated for sample in group.samples)
        self._totals["reward_errors"] += len(bad)
        for sample in bad:
            log.warning("reward failed on sample %s: %s; response %r", sample.id, sample.reward_error, sample.text[:200])
        if bad and self._on_reward_error == "stop":
            raise reward_failed(bad)
        return group

    def _finished(self, index: int, task: asyncio.Task[Group]) -> None:
        self._progress.set()
        if task.cancelled():
            return
        error = task.exception()
        if error is not None and self._failure is None:
            log.error("%s", error)
            self._failure = error
        if error is None and index in self._flights:
            self._is_dropped(self._flights[index])

    def _is_dropped(self, flight: _Flight) -> bool:
        """Of a finished flight; decides the first time, and then admits one more for a group that is dropped (DAPO)."""
        if flight.dropped is None:
            rewards = {sample.reward for sample in flight.task.result().samples if sample.valid}
            flight.dropped = self._flow.filter_equal_groups and len(rewards) < 2
            if flight.dropped and self._dropped_for_batch >= FILTER_PATIENCE * self._flow.prompts_per_step:
                log.warning("group %d is trained on although its rewards are equal: too few others are left", flight.index)
                flight.dropped = False
            if flight.dropped:
                self._dropped += 1
                self._dropped_for_batch += 1
                self._admit()
        return flight.dropped

    async def next_batch(self, version: int, timeout_s: float) -> TrainBatch:
        """The next B groups in admission order, once all have finished.

        Raises EngineFailed or RewardFailed as soon as one happened anywhere, BatchTimeout naming the missing groups,
        their engines and how long each has run, and StalenessViolated should a sample break the law.
        """
        if version != self._version:
            raise ValueError(f"asked for the batch that trains version {version}, but the engines hold {self._version}")
        if self._steps is not None and version >= self._steps:
            raise ValueError(f"the run's {self._steps} steps are consumed: there is no batch for version {version}")
        flights = await self._wait(version, timeout_s)
        groups = tuple(flight.task.result() for flight in flights)
        self._check_lag(groups, version)
        batch = TrainBatch(version=version, groups=groups)
        for index in range(self._consumed, flights[-1].index + 1):
            del self._flights[index]
        self._consumed = flights[-1].index + 1
        self._dropped_for_batch = 0
        return batch

    async def _wait(self, version: int, timeout_s: float) -> list[_Flight]:
        """The next B flights that are not dropped, finished."""
        deadline = time.monotonic() + timeout_s
        taken: list[_Flight] = []
        index = self._consumed
        while True:
            if self._failure is not None:
                raise self._failure
            while len(taken) < self._flow.prompts_per_step and index in self._flights and self._flights[index].task.done():
                if not self._is_dropped(self._flights[index]):
                    taken.append(self._flights[index])
                index += 1
            if len(taken) == self._flow.prompts_per_step:
                return taken
            self._progress.clear()
            try:
                await asyncio.wait_for(self._progress.wait(), deadline - time.monotonic())
            except TimeoutError:
                waited = range(index, index + self._flow.prompts_per_step - len(taken))
                late = [flight for flight in (self._flights[i] for i in waited if i in self._flights) if not flight.task.done()]
                raise BatchTimeout(self._lateness(late, version, timeout_s)) from None

    def _lateness(self, late: Sequence[_Flight], version: int, timeout_s: float) -> str:
        now = time.monotonic()
        shown = [f"group {f.index} (prompt {f.prompt.id}): {now - f.admitted_at:.1f} s on engine {f.engine}" for f in late[:8]]
        more = [f"and {len(late) - 8} more"] if len(late) > 8 else []
        return (
            f"the batch for version {version} is incomplete after {timeout_s:g} s: {len(late)} of "
            f"{self._flow.prompts_per_step} groups are missing\n  " + "\n  ".join(shown + more)
        )

    def _check_lag(self, groups: Sequence[Group], version: int) -> None:
        bound = max_lag(self._flow.async_ratio)
        for group in groups:
            for sample in group.samples:
                lag = version - sample.start_version
                if lag > bound:
                    raise StalenessViolated(
                        f"sample {sample.id} starts at version {sample.start_version}, {lag} behind {version}; "
                        f"flow.async_ratio {self._flow.async_ratio:g} permits {bound}"
                    )

    async def evaluate(self, prompts: Sequence[Prompt], n: int, version: int, timeout_s: float) -> EvalResult:
        """Held-out prompts, `n` responses each, sampled as in training. See evaluation.evaluate."""
        return await evaluate(self._fleet, prompts, n, version, timeout_s, on_reward_error=self._on_reward_error)

    def state(self) -> dict[str, Any]:
        """Plain JSON. Counts consumed groups only: what is in flight or waiting is asked again after `load_state`."""
        oldest = self._flights.get(self._consumed)
        return {"consumed": self._consumed, "source": self._source.state() if oldest is None else oldest.source_state}

    def load_state(self, state: Mapping[str, Any]) -> None:
        """Before `start` only. Raises ValueError where the saved position belongs to other data."""
        if self._version is not None:
            raise RuntimeError("load_state after start")
        self._source.load_state(state["source"])
        self._consumed = int(state["consumed"])

    def stats(self) -> dict[str, float | int]:
        """Counts are over this process's life (`reward_errors`, `tokens`, ... over finished groups); ages in seconds."""
        running = [flight for flight in self._flights.values() if not flight.task.done()]
        now = time.monotonic()
        return {
            "admitted": self._next_index,
            "finished": self._next_index - len(running),
            "consumed": self._consumed,
            "dropped_equal": self._dropped,
            "in_flight": len(running),
            "buffered": len(self._flights) - len(running),
            "oldest_in_flight_s": max((now - flight.admitted_at for flight in running), default=0.0),
            **self._totals,
        }

    async def stop(self) -> None:
        """Cancels what is in flight; `state()` still names it as unconsumed."""
        tasks = [flight.task for flight in self._flights.values()]
        for task in tasks:
            task.cancel()
        if tasks:
            await asyncio.wait(tasks, timeout=10.0)

"""Scores finished responses: trivial rewards on the engine's event loop, all others in processes.

    response -> Scorer -+-> Pool of part "correct" -> RewardProcess ...
                        +-> Pool of part "style"   -> RewardProcess ...

Invariants:
- the reward of a response is the sum of its parts times their weights, multiplied by those that are
  gates; one part that fails, fails the response, and is named;
- a response that makes a process die or a call of several fail costs itself alone: the others that
  were worked on are tried again, one by one;
- a process that ends is replaced;
- the event loop never waits for a process: to start, to answer or to end.

Processes start when responses wait for them, up to `rollout.reward.workers` for each reward; the
first one with the engine.
"""

from __future__ import annotations

import asyncio
import math
from collections import deque
from collections.abc import Mapping, Sequence

from megatron_async_rl.config.schema import RewardConfig, RewardPart
from megatron_async_rl.rollout.reward_process import START_S, Called, Job, RewardProcess
from megatron_async_rl.rollout.rewards.registry import (
    KEY,
    NOTHING_KNOWN,
    Context,
    Item,
    built_in,
    load_reward,
    required_fields,
)
from megatron_async_rl.rollout.rewards.worker import CallFailed, Scored, call
from megatron_async_rl.samples import Prompt
from megatron_async_rl.watchdog import watch


class WorkerStartError(RuntimeError):
    """A process for the reward did not start, or the reward could not be imported in it."""


def require_rewards(settings: RewardConfig) -> None:
    """Loads every reward into this process. Raises RewardError, naming the key."""
    for name, part in settings.rewards.items():
        load_reward(part.name, part.settings, _key(name))


def reward_fields(settings: RewardConfig) -> tuple[str, ...]:
    """Keys that every row of the data needs for the rewards, beside `prompt`."""
    fields = [
        field
        for one in settings.rewards.values()
        for field in required_fields(one.name, one.settings)
    ]
    return tuple(dict.fromkeys(fields))


def _key(part: str | None) -> str:
    return KEY if part is None else f"{KEY}.parts.{part}"


def weighted(rewards: Mapping[str | None, RewardPart], parts: Mapping[str, float]) -> float:
    """The sum of `parts` times their weights, times those that are gates; those that `rewards` does
    not have are only shown."""
    known = [(part, parts[n]) for n, part in rewards.items() if n is not None and n in parts]
    total = sum(part.weight * value for part, value in known if not part.gate)
    return total * math.prod(value for part, value in known if part.gate)


class Inline:
    """A trivial reward, called at once."""

    def __init__(self, name: str, key: str) -> None:
        self._reward = load_reward(name, None, key)

    def score(self, item: Item) -> Scored:
        try:
            (scored,) = call(self._reward, [item], 0.0)
        except CallFailed as error:
            return Scored(reward=0.0, error=str(error))
        return scored

    async def ask(self, item: Item) -> Scored:
        return self.score(item)


class Pool:
    """The processes of one reward and the responses that wait for them."""

    def __init__(self, called: Called, workers: int) -> None:
        self.called = called
        self.processes: set[RewardProcess] = set()
        self._workers = workers
        self._waiting: deque[Job] = deque()
        self._suspects: deque[Job] = deque()
        self._first: asyncio.Future[None] | None = None
        self._per_call = math.inf
        """Responses that a process works on at a time, once one has said so."""
        self._closed = False

    def start(self) -> None:
        self._first = asyncio.get_running_loop().create_future()
        self._hire()

    async def ready(self) -> None:
        """Raises WorkerStartError."""
        assert self._first is not None
        with watch.doing("wait", f"the reward {self.called.name} to be imported", START_S):
            await self._first

    async def ask(self, item: Item) -> Scored:
        job = Job(item)
        self._waiting.append(job)
        self._dispatch()
        return await job.result

    def close(self) -> None:
        self._closed = True
        for job in (*self._waiting, *self._suspects):
            job.result.cancel()
        for process in self.processes:
            process.close()

    def _dispatch(self) -> None:
        for process in self.processes:
            while process.free and (jobs := self._next(process)):
                process.take(jobs)
        others = max(1, math.ceil(len(self._waiting) / self._per_call)) if self._waiting else 0
        wanted = len(self._suspects) + others
        starting = sum(not process.ready for process in self.processes)
        room = self._workers - len(self.processes)
        for _ in range(min(room, wanted - starting)):
            self._hire()

    def _next(self, process: RewardProcess) -> Sequence[Job]:
        """The jobs of the process's next call. Suspects first: while there are any, no process takes
        others, and one that works on others takes none until it is done with them."""
        while self._suspects and self._suspects[0].result.done():
            self._suspects.popleft()
        if self._suspects:
            return () if process.calls else [self._suspects.popleft()]

        jobs: list[Job] = []
        while self._waiting and len(jobs) < (self.called.batch if process.batched else 1):
            job = self._waiting.popleft()
            if not job.result.done():  # else whoever waited was cancelled
                jobs.append(job)
        return jobs

    def _hire(self) -> None:
        try:
            self.processes.add(RewardProcess(self, self.called))
        except OSError as error:  # no memory, process or file descriptor is left for it
            self._on_start_failure(str(error))

    def on_free(self, process: RewardProcess) -> None:
        if self._first is not None and not self._first.done():
            self._first.set_result(None)
        calls = self.called.concurrency if process.asynchronous else 1
        self._per_call = calls * (self.called.batch if process.batched else 1)
        self._dispatch()

    def suspect(self, jobs: Sequence[Job]) -> None:
        for job in jobs:
            job.alone = True
        self._suspects.extend(jobs)

    def on_end(self, process: RewardProcess, how: str) -> None:
        self.processes.discard(process)
        if self._closed:
            return
        if process.ready:
            # Its successor imports the reward while nobody waits for it.
            self._hire()
            self._dispatch()
            return

        self._on_start_failure(how)

    def _on_start_failure(self, how: str) -> None:
        """Another start would most likely fail too: nobody waits for it who need not."""
        reason = f"the reward's process did not start: {how}"
        if self._first is not None and not self._first.done():
            self._first.set_exception(WorkerStartError(reason))
        if not self.processes:
            for waiting in (self._suspects, self._waiting):
                while waiting:
                    waiting.popleft().finish(Scored(reward=0.0, error=reason))


def _rewarding(settings: RewardConfig, name: str | None, part: RewardPart) -> Inline | Pool:
    found = built_in(part.name)
    key = _key(name)
    if found is not None and found.inline:
        return Inline(part.name, key)
    limits = (settings.memory_mib, found.memory_mib if found is not None else None)
    called = Called(
        name=part.name,
        key=key,
        settings=dict(part.settings),
        concurrency=settings.concurrency,
        batch=settings.batch,
        timeout_s=settings.timeout_s,
        cpu_limit_s=found.cpu_limit_s if found is not None else None,
        memory_mib=min((limit for limit in limits if limit is not None), default=None),
    )
    return Pool(called, settings.workers)


class Scorer:
    """Used by one event loop. Call `start` first."""

    def __init__(self, settings: RewardConfig) -> None:
        self._rewards = settings.rewards
        self._parts = {
            name: _rewarding(settings, name, part) for name, part in self._rewards.items()
        }
        self.pools = [pool for pool in self._parts.values() if isinstance(pool, Pool)]
        self.inline = not self.pools

    def start(self) -> None:
        """Starts the first process of each reward, which imports it while the engine starts."""
        for pool in self.pools:
            pool.start()

    async def ready(self) -> None:
        """Returns when each reward can score. Raises WorkerStartError."""
        for pool in self.pools:
            await pool.ready()

    def score_inline(
        self, prompt: Prompt, response: str, context: Context = NOTHING_KNOWN
    ) -> Scored:
        """At once; of rewards that are `inline`."""
        item = Item(prompt, response, context)
        every = [one for one in self._parts.values() if isinstance(one, Inline)]
        return self._sum([one.score(item) for one in every])

    async def score(
        self, prompt: Prompt, response: str, context: Context = NOTHING_KNOWN
    ) -> Scored:
        """Never raises for what the reward does: an exception, a value that is not a finite number,
        a time-out and the end of its process are errors of the response."""
        item = Item(prompt, response, context)
        asked = [one.ask(item) for one in self._parts.values()]
        return self._sum([await asked[0]] if len(asked) == 1 else await asyncio.gather(*asked))

    def close(self) -> None:
        """Ends the processes; scores that are still waited for are cancelled."""
        for pool in self.pools:
            pool.close()

    def _sum(self, scored: Sequence[Scored]) -> Scored:
        if None in self._parts:
            return scored[0]
        errors = [
            f"{name}: {one.error}"
            for name, one in zip(self._parts, scored, strict=True)
            if one.error is not None
        ]
        if errors:
            timed_out = any(one.timed_out for one in scored)
            return Scored(reward=0.0, error="; ".join(errors), timed_out=timed_out)

        parts = {str(name): one.reward for name, one in zip(self._parts, scored, strict=True)}
        total = weighted(self._rewards, parts)
        if not math.isfinite(total):
            return Scored(reward=0.0, error=f"the reward of the parts {parts} is {total}")
        return Scored(reward=total, parts=parts)

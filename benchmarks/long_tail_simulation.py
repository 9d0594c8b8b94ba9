"""How full engines are when response lengths have a long tail: a discrete-event simulation around
the real scheduler and routing.

Model: an engine has `slots`, each makes one token per unit of time whatever the others do; a
request waits until a slot is free. The trainer takes `train_time` for a batch; new weights are on
the engines as soon as it is done. Everything else, who is asked when, what trains, is decided by
`flow.scheduler.Scheduler` and `flow.lanes.Router`, as in a run.

With `barrier`, nothing is asked before everything asked before is answered: a batch at a time, with
training overlapped.
"""

from __future__ import annotations

import heapq
from collections import deque
from dataclasses import dataclass, field

import numpy as np

from megatron_async_rl.config.schema import FlowConfig
from megatron_async_rl.flow.lanes import Router
from megatron_async_rl.flow.scheduler import Scheduler
from megatron_async_rl.samples.columns import batch_of
from megatron_async_rl.samples.rows import rows_of
from megatron_async_rl.samples.types import Prompt, Request, Sample


@dataclass(frozen=True, kw_only=True)
class LongTail:
    """Log-normal response lengths, in tokens, between 1 and `longest`."""

    median: float = 200.0
    sigma: float = 1.0
    longest: int = 4096

    def draw(self, chance: np.random.Generator) -> int:
        return int(
            np.clip(
                round(self.median * np.exp(self.sigma * chance.standard_normal())), 1, self.longest
            )
        )


@dataclass(frozen=True, kw_only=True)
class Outcome:
    """Of one run. Times are in tokens of one slot."""

    wall: float
    occupied: float
    """Share of slot time in which a token was made."""
    idle: float
    """Share of engine time in which no slot was occupied."""
    trained_tokens: int
    lag: float
    """Mean start lag."""
    counts: dict[str, int]

    @property
    def rate(self) -> float:
        """Tokens trained per unit of time."""
        return self.trained_tokens / self.wall


@dataclass(eq=False)
class _Engine:
    index: int
    held: dict[str, Request] = field(default_factory=dict)


class _Run:
    def __init__(
        self,
        flow: FlowConfig,
        lengths: LongTail,
        engines: int,
        slots: int,
        train_time: float,
        steps: int,
        seed: int,
        barrier: bool,
    ) -> None:
        self.scheduler = Scheduler(flow, steps=steps)
        self.barrier = barrier
        self.router = Router(slots)
        self.engines = [_Engine(index) for index in range(engines)]
        self.lengths, self.train_time, self.steps = lengths, train_time, steps
        self.chance = np.random.default_rng(seed)
        self.now = 0.0
        self.queue: deque[Request] = deque()
        self.events: list[tuple[float, int, str]] = []
        """When, a number that keeps them apart, and the request that ends or "" for the trainer."""
        self.numbered = 0
        self.begun: dict[str, tuple[int, int]] = {}
        """Under which version, and with how many tokens to make."""
        self.prompts = 0
        self.slot_time = self.engine_time = 0.0
        self.training: int | None = None
        self.length: dict[str, int] = {}
        self.trained = 0
        self.lag: list[int] = []
        self.scheduler.start(0)

    def prompt(self) -> Prompt:
        self.prompts += 1
        return Prompt(id=f"p{self.prompts}", text="", token_ids=(1,))

    def admit(self) -> None:
        if not self.barrier or (not self.begun and not self.queue):
            while self.scheduler.room():
                self.queue.extend(self.scheduler.admit(self.prompt))
        while self.queue:
            engine = self.router.choose(self.engines, self.queue[0].group, self.router.capacity)
            if engine is None:
                return
            request = self.queue.popleft()
            engine.held[request.id] = request
            length = self.lengths.draw(self.chance)
            assert self.scheduler.version is not None
            self.begun[request.id] = self.scheduler.version, length
            self.happens(length, request.id)

    def happens(self, after: float, what: str) -> None:
        self.numbered += 1
        heapq.heappush(self.events, (self.now + after, self.numbered, what))

    def go(self) -> Outcome:
        self.admit()
        step = 0
        while step < self.steps:
            when, _, what = heapq.heappop(self.events)
            if what and what not in self.begun:
                continue
            running = [len(engine.held) for engine in self.engines]
            self.slot_time += sum(running) * (when - self.now)
            self.engine_time += sum(count > 0 for count in running) * (when - self.now)
            self.now = when
            if what:
                self.finish(what)
            else:
                step += 1
                self.training = None
                self.scheduler.advance(step)
            self.admit()
            if self.training is None and step < self.steps:
                self.train(step)
        return Outcome(
            wall=self.now,
            occupied=self.slot_time / (self.now * len(self.engines) * self.router.capacity),
            idle=1.0 - self.engine_time / (self.now * len(self.engines)),
            trained_tokens=self.trained,
            lag=float(np.mean(self.lag)),
            counts=self.scheduler.counts(),
        )

    def train(self, step: int) -> None:
        groups = self.scheduler.take(step)
        if groups is not None:
            self.training = step
            self.trained += sum(
                self.length[sample.id] for group in groups for sample in group.samples
            )
            self.lag += [step - one.start_version for group in groups for one in group.samples]
            self.happens(self.train_time, "")

    def finish(self, request: str) -> None:
        """Takes it off its engine; its first and its last token stand for all."""
        version, length = self.begun.pop(request)
        engine = next(engine for engine in self.engines if request in engine.held)
        asked = engine.held.pop(request)
        self.length[request] = length
        assert self.scheduler.version is not None
        sample = Sample(
            id=request,
            prompt=asked.prompt,
            response_ids=np.zeros(2, np.int32),
            behavior_logprobs=np.zeros(2, np.float32),
            versions=np.array([version, self.scheduler.version], dtype=np.int32),
            loss_mask=np.ones(2, dtype=np.uint8),
            text="",
            finish_reason="stop",
            reward=float(self.chance.random()),
        )
        (row,) = rows_of(batch_of([sample], [asked.group]))
        self.scheduler.on_sample(row, asked.group)


def simulate(
    flow: FlowConfig,
    lengths: LongTail,
    *,
    engines: int = 2,
    slots: int = 32,
    train_time: float = 500.0,
    steps: int = 40,
    seed: int = 0,
    barrier: bool = False,
) -> Outcome:
    return _Run(flow, lengths, engines, slots, train_time, steps, seed, barrier).go()

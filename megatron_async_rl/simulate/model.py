"""A run as discrete events: how long its steps take and how old its samples are, from how long its
parts take.

                 +------ next batch ------- scheduler <-- response -- engines decode
                 v                              |                        ^
    trainer: train, publish --> staged --> carrier --> engines load,     | requests, by the lanes
                                                       in turns ---------+

The run's own code decides: who is asked when and what trains when (`flow.scheduler.Scheduler`), and
which engine gets a request (`flow.lanes.Lanes`). Modelled here is what takes time, `Rates`:
- an engine that decodes n responses makes a token of each in f(n) seconds, so its next event is the
  end of the response that has the least left: events are responses, never tokens;
- versions reach the engines' machines one after another, and engines load the newest in turns, as
  in `flow.updates`; a version is staged once nobody reads the one before the last;
- where trainer and engines share cores, each is slower while the other works.

Seconds everywhere. The same seed gives the same run.
"""

from __future__ import annotations

import heapq
from collections import Counter, deque
from collections.abc import Callable, Generator, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any, Literal

import numpy as np
import simpy

from megatron_async_rl.config.flow import OldestFirst, Replay
from megatron_async_rl.config.schema import FlowConfig, RolloutConfig
from megatron_async_rl.flow.engine_task import Asked, EngineSlot
from megatron_async_rl.flow.lanes import Lanes, capacity_of
from megatron_async_rl.flow.scheduler import Scheduler
from megatron_async_rl.rollout.spec import EngineSpec
from megatron_async_rl.samples.rows import SampleRow
from megatron_async_rl.samples.types import Prompt, Request

Process = Generator[simpy.Event, Any, None]
Side = Literal["trainer", "engine"]

PROMPT = Prompt(id="simulated", text="", token_ids=(0,))


@dataclass(frozen=True, kw_only=True)
class Rates:
    """Seconds that the parts of a run take."""

    decode: tuple[tuple[float, float], ...]
    """A step of an engine that decodes n responses: the longest of fixed + each x n, of pairs
    (fixed, each). In it each response grows by a token."""
    places: int
    """Responses that an engine decodes at a time."""
    prompt_s: float = 0.0
    """Of an engine, which decodes nothing meanwhile: to take in one more response."""
    ask_s: float = 0.0
    """From a request that may be asked until its engine has it."""
    take_s: float = 0.0
    """From the last response that a batch waited for to the beginning of its step."""
    train_s: float = 0.0
    """Of the trainer, for a batch whatever it holds."""
    train_token_s: float = 0.0
    """For each token of a batch, prompts included."""
    train_spread: tuple[float, ...] = (1.0,)
    """Factors, one of which each step takes."""
    publish_s: float = 0.0
    """Of the trainer, to stage a version."""
    send_s: float = 0.0
    """Of a version, to the machines that have engines; 0: they are where it was staged."""
    begin_s: float = 0.0
    """From a version that is there to an engine that loads it."""
    load_s: float = 0.0
    """Of an engine, which samples nothing meanwhile, to load a version."""
    trainer_beside: float = 1.0
    """Speed of the trainer while an engine works: below 1 where they share cores."""
    engine_beside: float = 1.0
    """Speed of an engine while the trainer works."""

    def token_s(self, responses: int) -> float:
        return max(fixed + each * responses for fixed, each in self.decode)


@dataclass(frozen=True, kw_only=True)
class Lengths:
    """Lengths that are drawn from, a whole group at a time: responses to one prompt are alike.

    groups: response tokens of each group's samples; prompts: tokens of its prompt; equal: share of
    groups whose rewards are all equal."""

    groups: tuple[tuple[int, ...], ...]
    prompts: tuple[int, ...]
    equal: float = 0.0

    def draw(self, size: int, chance: np.random.Generator) -> tuple[int, list[int]]:
        """Tokens of a prompt, and of `size` responses to it."""
        index = int(chance.integers(len(self.groups)))
        seen = self.groups[index]
        if len(seen) == size:
            return self.prompts[index], list(seen)
        return self.prompts[index], chance.choice(seen, size, replace=len(seen) < size).tolist()

    @property
    def mean(self) -> float:
        """Of a response."""
        return float(np.mean(np.concatenate(self.groups)))


@dataclass(frozen=True, kw_only=True)
class Outcome:
    """Of the steps that count. Shares are of the time, of engines the mean over them."""

    step_s: float
    tokens_per_s: float
    """Response tokens trained."""
    trainer_busy: float
    """It trained or published."""
    engine_busy: float
    """It sampled."""
    places_taken: float
    """Of an engine's places, those that decoded."""
    lags: tuple[float, ...]
    """Share of the samples by start lag, from 0."""
    counts: dict[str, int]
    """Of the scheduler, over the whole run."""

    @property
    def lag_mean(self) -> float:
        return sum(lag * share for lag, share in enumerate(self.lags))


def simulate(
    flow: FlowConfig,
    rollout: RolloutConfig,
    rates: Rates,
    lengths: Lengths,
    *,
    steps: int,
    seed: int = 0,
    max_paused: float = 0.5,
    barrier: bool = False,
) -> Outcome:
    """`steps`: that count, after as many as it takes to run in. `barrier`: nothing is asked before
    all that was asked is answered, as in frameworks that ask for a batch at a time."""
    run = _Run(flow, rollout, rates, lengths, seed, max_paused, barrier)
    return run.go(steps, warm=int(flow.async_ratio) + 5)


class _Engine:
    """Decodes what it has. `slot`: what the lanes see of it."""

    def __init__(self, run: _Run, slot: EngineSlot) -> None:
        self.run, self.slot = run, slot
        self.loads = False
        self.busy_s = self.place_s = 0.0
        self._waits: deque[str] = deque()
        self._decoding: list[tuple[float, str]] = []
        """A heap: at which `_grown` a response ends, and its id."""
        self._grown = 0.0
        """Tokens that a response would have that was here from the beginning."""
        self._owed_s = 0.0
        """Work that comes before decoding."""
        self._at = 0.0
        self._alarm = 0

    @property
    def works(self) -> bool:
        return self.loads or bool(self._decoding)

    def take(self, requests: Sequence[Request]) -> None:
        self.advance()
        self._waits.extend(request.id for request in requests)
        self._go_on()

    def load(self, loads: bool) -> None:
        self.advance()
        self.loads = loads
        self._go_on()

    def advance(self) -> None:
        """Brings it to the present."""
        now = self.run.env.now
        passed, self._at = now - self._at, now
        if self.loads or not self._decoding:
            return
        self.busy_s += passed
        self.place_s += passed * len(self._decoding)
        worked = passed * self.run.speed["engine"]
        paid = min(self._owed_s, worked)
        self._owed_s -= paid
        self._grown += (worked - paid) / self.run.rates.token_s(len(self._decoding))

    def _go_on(self) -> None:
        rates = self.run.rates
        while not self.loads and self._waits and len(self._decoding) < rates.places:
            name = self._waits.popleft()
            row = self.run.asked[name]
            row.start_version = self.slot.version
            self._owed_s += rates.prompt_s
            heapq.heappush(self._decoding, (self._grown + row.length, name))
        self.run.share()
        self.set_alarm()

    def set_alarm(self) -> None:
        """Wakes it when the next response ends, if nothing changes before."""
        self._alarm += 1
        if self.loads or not self._decoding:
            return
        left = max(0.0, self._decoding[0][0] - self._grown)
        seconds = self._owed_s + left * self.run.rates.token_s(len(self._decoding))
        self.run.after(seconds / self.run.speed["engine"], partial(self._ring, self._alarm))

    def _ring(self, alarm: int) -> None:
        if alarm != self._alarm:
            return
        self.advance()
        # By rounding it may be a hair short of the end that the alarm was set for.
        self._grown = max(self._grown, self._decoding[0][0])
        ended = []
        while self._decoding and self._decoding[0][0] <= self._grown:
            ended.append(heapq.heappop(self._decoding)[1])
        self._go_on()
        self.run.ended(self, ended)


class _Run:
    def __init__(
        self,
        flow: FlowConfig,
        rollout: RolloutConfig,
        rates: Rates,
        lengths: Lengths,
        seed: int,
        max_paused: float,
        barrier: bool,
    ) -> None:
        if isinstance(flow.selection, Replay):
            # What trains out of the store takes the place of a batch that was sampled all the same.
            flow = flow.model_copy(update={"selection": OldestFirst()})
        self.env = simpy.Environment()
        self.rates, self._lengths, self._barrier = rates, lengths, barrier
        self._chance = np.random.default_rng(seed)
        # Without an end: that a run's last steps admit no more is no part of its pace.
        self.scheduler = Scheduler(flow)
        self._lanes = Lanes(capacity_of(rates.places), separate=False)
        self.engines = [_Engine(self, _slot(rollout, index)) for index in range(rollout.engines)]
        self._may_pause = max(1, int(max_paused * rollout.engines))
        self.asked: dict[str, SampleRow] = {}
        self._groups: dict[str, int] = {}
        self._staged = self._there = 0
        """Newest versions: staged, and where engines can load it."""
        self._sending: int | None = None
        self._loading: dict[int, int] = {}
        """Version that is loaded, by engine."""
        self._paused: set[int] = set()
        self._trains = False
        self.speed: dict[Side, float] = {"trainer": 1.0, "engine": 1.0}
        self._changed, self._speed_changed = self.env.event(), self.env.event()
        self._totals = [np.zeros(5)]
        """Up to the end of each step: now, seconds of the trainer's work, of engines, of places;
        tokens."""
        self._lags: list[Counter[int]] = []

    def go(self, steps: int, warm: int) -> Outcome:
        for engine in self.engines:
            self.env.process(self._follow(engine))
        self.env.process(self._carry())
        self.scheduler.start(0)
        self._admit()
        self.env.run(until=self.env.process(self._train(steps + warm)))

        now, work, busy, place, tokens = (self._totals[-1] - self._totals[warm]).tolist()
        lags, engines = sum(self._lags[warm:], Counter[int]()), len(self.engines)
        return Outcome(
            step_s=now / steps,
            tokens_per_s=tokens / now,
            trainer_busy=work / now,
            engine_busy=busy / (now * engines),
            places_taken=place / (now * engines * self.rates.places),
            lags=tuple(lags[lag] / lags.total() for lag in range(max(lags) + 1)),
            counts=self.scheduler.counts(),
        )

    # The trainer

    def _train(self, steps: int) -> Process:
        rates, work, deck = self.rates, 0.0, list[float]()
        for version in range(steps):
            while (groups := self.scheduler.take(version)) is None:
                yield self._changed
            self._admit()  # what was dropped made room
            yield self.env.timeout(rates.take_s)
            began = self.env.now
            samples = [sample for group in groups for sample in group.samples]
            train_s = rates.train_s + rates.train_token_s * sum(one.total_length for one in samples)
            # From a shuffled deck, so that few steps have the mean of many.
            deck = deck or self._chance.permutation(rates.train_spread).tolist()
            train_s *= deck.pop()
            yield from self._work(train_s, "trainer")
            while self._is_read_before(version):
                yield self._changed
            yield from self._work(rates.publish_s, "trainer")
            self._staged = version + 1
            self._fire()

            work += self.env.now - began
            for engine in self.engines:
                engine.advance()
            busy = sum(engine.busy_s for engine in self.engines)
            place = sum(engine.place_s for engine in self.engines)
            tokens = self._totals[-1][-1] + sum(sample.length for sample in samples)
            self._totals.append(np.array([self.env.now, work, busy, place, tokens]))
            self._lags.append(Counter(version - sample.start_version for sample in samples))

    def _work(self, seconds: float, side: Side) -> Process:
        """Takes `seconds`, or longer where others use the same cores."""
        self._trains = self._trains or side == "trainer"
        self.share()
        while True:
            began, speed = self.env.now, self.speed[side]
            done = self.env.timeout(max(0.0, seconds) / speed)
            yield done | self._speed_changed
            if done.processed:
                break
            seconds -= (self.env.now - began) * speed
        self._trains = self._trains and side != "trainer"
        self.share()

    def share(self) -> None:
        """Sets the speeds anew, where trainer and engines share cores."""
        both = self._trains and any(engine.works for engine in self.engines)
        trainer, engine = (self.rates.trainer_beside, self.rates.engine_beside) if both else (1, 1)
        speed: dict[Side, float] = {"trainer": trainer, "engine": engine}
        if speed == self.speed:
            return
        for one in self.engines:
            one.advance()
        self.speed = speed
        for one in self.engines:
            one.set_alarm()
        changed, self._speed_changed = self._speed_changed, self.env.event()
        changed.succeed()

    # Requests and responses

    def _admit(self) -> None:
        if not self._barrier or not self.asked:
            while self.scheduler.room():
                version = self.scheduler.version
                assert version is not None
                requests = self.scheduler.admit(lambda: PROMPT)
                self._draw(requests)
                for request in requests:
                    self._lanes.add(Asked(request, version))
        for index, given in self._lanes.place([engine.slot for engine in self.engines]).items():
            self.after(self.rates.ask_s, partial(self.engines[index].take, given))

    def _draw(self, requests: Sequence[Request]) -> None:
        prompt, lengths = self._lengths.draw(len(requests), self._chance)
        equal = self._chance.random() < self._lengths.equal
        for request, length in zip(requests, lengths, strict=True):
            row = SampleRow()
            row.id, row.prompt_id, row.valid, row.truncated = request.id, PROMPT.id, True, False
            row.reward = 0.0 if equal else float(request.k)
            row.length, row.total_length = length, prompt + length
            self.asked[request.id], self._groups[request.id] = row, request.group

    def ended(self, engine: _Engine, names: Sequence[str]) -> None:
        """Hands the responses that ended on an engine to the scheduler."""
        for name in names:
            del engine.slot.held[name]
            row = self.asked.pop(name)
            row.last_version, row.finished_at = engine.slot.version, self.env.now
            self.scheduler.on_sample(row, self._groups.pop(name))
        self._admit()
        if self.scheduler.may_take(self.scheduler.next_step):
            self._fire()

    # Weights

    def _is_read_before(self, version: int) -> bool:
        """True while somebody reads an older version where the trainer staged it."""
        read = [self._sending] if self.rates.send_s else list(self._loading.values())
        return any(one is not None and one < version for one in read)

    def _carry(self) -> Process:
        """Brings each version, or the newest of several, to the engines' machines, which keep
        two."""
        sent = 0
        while True:
            while sent == self._staged or any(one < self._there for one in self._loading.values()):
                yield self._changed
            sent = self._sending = self._staged
            yield self.env.timeout(self.rates.send_s)
            self._sending = None
            self.after(self.rates.begin_s, partial(self._arrive, sent))

    def _arrive(self, version: int) -> None:
        self._there = version
        self._fire()

    def _follow(self, engine: _Engine) -> Process:
        """Loads each version, or the newest of those that came while it waited for its turn."""
        slot = engine.slot
        while True:
            while self._there <= slot.version or (
                slot.busy and len(self._paused) >= self._may_pause
            ):
                yield self._changed
            version = self._loading[slot.index] = self._there
            if slot.busy:
                self._paused.add(slot.index)
            engine.load(True)
            yield from self._work(self.rates.load_s, "engine")
            slot.version = version
            del self._loading[slot.index]
            self._paused.discard(slot.index)
            engine.load(False)
            self.scheduler.advance(max(version, self.scheduler.version or 0))
            self._admit()
            self._fire()

    def _fire(self) -> None:
        changed, self._changed = self._changed, self.env.event()
        changed.succeed()

    def after(self, seconds: float, call: Callable[[], None]) -> None:
        self.env.timeout(seconds).callbacks.append(lambda _: call())


def _slot(rollout: RolloutConfig, index: int) -> EngineSlot:
    """An engine that serves version 0, as the lanes see it."""
    spec = EngineSpec(
        index=index,
        model_path=Path(),
        dtype="bfloat16",
        rollout=rollout,
        seed=0,
        device="cpu",
        log_dir=Path(),
    )
    there: Any = object()  # the lanes ask only whether it is there
    return EngineSlot(spec, engine=there, version=0, serving=True)

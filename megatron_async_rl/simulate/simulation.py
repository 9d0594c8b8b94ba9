"""A run as discrete events: the duration of its steps and the age of its samples, from the
durations of its parts.

                 +------ next batch ------- scheduler <-- response -- engines decode
                 v                              |                        ^
    trainer: take, train, publish --> staged --> carrier --> engines     | requests, by the lanes
                                                 load in sequence -------+

The run's own code decides which requests run and what trains when (`flow.scheduler.Scheduler`), and
which engine gets a request (`flow.router.Lanes`). Only durations are modelled, by
`SimulationRates`:
- an engine that decodes n responses makes a token of each in f(n) seconds, so its next event is the
  end of the response with the fewest tokens left: events are responses, never tokens;
- versions reach the engines' machines one after another, and engines load the newest one after
  another, as in `flow.updates`; a version is staged once no engine reads the version before the
  last;
- if trainer and engines share cores, each is slower while the other works, also while the trainer
  receives a finished batch.

All times are in seconds. The same seed gives the same run.
"""

from __future__ import annotations

import heapq
from collections import Counter, deque
from collections.abc import Callable, Generator, Sequence
from dataclasses import dataclass
from functools import partial
from types import SimpleNamespace
from typing import Any

import numpy as np
import simpy

from megatron_async_rl.config.flow import FlowConfig, OldestFirst, Replay
from megatron_async_rl.config.rollout import RolloutConfig
from megatron_async_rl.config.weights import WeightsConfig
from megatron_async_rl.flow.engine_task import EngineSlot, PendingRequest
from megatron_async_rl.flow.router import Lanes, capacity_of
from megatron_async_rl.flow.scheduler import Scheduler
from megatron_async_rl.samples.rows import SampleRow
from megatron_async_rl.samples.types import Prompt, Request
from megatron_async_rl.simulate.rates import ResponseLengths, SimulationRates

SimulatedProcess = Generator[simpy.Event, Any, None]

PROMPT = Prompt(id="simulated", text="", token_ids=(0,))
SOON = 1e-9
"""Seconds, or tokens, that are only rounding errors."""


@dataclass(frozen=True, kw_only=True)
class SimulationResult:
    """Result over the steps that count. Shares are shares of time; shares of engines are means over
    the engines."""

    step_s: float
    tokens_per_s: float
    """Response tokens trained."""
    trainer_busy: float
    """Share in which the trainer trained or published."""
    engine_busy: float
    """Share in which an engine sampled."""
    places_taken: float
    """Share of an engine's slots that decoded."""
    lags: tuple[float, ...]
    """Share of the samples by start lag, from 0."""
    counts: dict[str, int]
    """Counts of the scheduler over the whole run."""

    @property
    def lag_mean(self) -> float:
        return sum(lag * share for lag, share in enumerate(self.lags))


def simulate(
    flow: FlowConfig,
    rollout: RolloutConfig,
    rates: SimulationRates,
    lengths: ResponseLengths,
    *,
    steps: int,
    seed: int = 0,
    max_paused: float = WeightsConfig.default_of("max_paused"),
    barrier: bool = False,
) -> SimulationResult:
    """Simulate a run. `steps`: number of steps that count, after a warm-up. `barrier`: no request
    is sent before all earlier ones are answered, as in frameworks that request a batch at a
    time."""
    if isinstance(flow.selection, Replay):
        # A batch from the store replaces a batch that was sampled nevertheless.
        flow = flow.model_copy(update={"selection": OldestFirst()})
    # Without an end, so that the end of admission in a run's last steps does not affect the result.
    run = _SimulatedRun(
        Scheduler(flow, steps=None, fresh_steps=0, seed=seed, scored_whole=False),
        rollout.engines,
        rates,
        lengths,
        np.random.default_rng(seed),
    )
    run.barrier, run.may_pause = barrier, max(1, int(max_paused * rollout.engines))
    return run.go(steps, warm=int(flow.async_ratio) + 5)


class _SimulatedEngine:
    """Engine that decodes its requests, or loads a version. `slot`: the lanes' view of it."""

    def __init__(self, run: _SimulatedRun, index: int) -> None:
        spec: Any = SimpleNamespace(index=index)
        self.run = run
        self.slot = EngineSlot(spec, engine=spec, version=0, serving=True)
        self.loading: int | None = None
        self.paused = False
        """True if it has requests, and loads."""
        self.busy_s = self.place_s = 0.0
        self._waits: deque[str] = deque()
        self._decoding: list[tuple[float, str]] = []
        """Heap of (value of `_grown` at which a response ends, its id)."""
        self._grown = 0.0
        """Tokens of a hypothetical response that has been decoding from the beginning."""
        self._owed_s = self._load_s = 0.0
        """Work that comes before decoding, and the remaining time of a load."""
        self._at = 0.0
        self._alarm = 0

    @property
    def works(self) -> bool:
        return self.loading is not None or bool(self._decoding)

    def take(self, requests: Sequence[Request]) -> None:
        self.advance()
        self._waits.extend(request.id for request in requests)
        self._go_on()

    def load(self, version: int) -> None:
        self.advance()
        self.loading, self.paused, self._load_s = version, self.slot.busy, self.run.rates.load_s
        self._go_on()

    def advance(self) -> None:
        """Advance the engine to the present."""
        now = self.run.env.now
        passed, self._at = now - self._at, now
        worked = passed * self.run.engine_speed
        if self.loading is not None:
            self._load_s -= worked
        elif self._decoding:
            self.busy_s += passed
            self.place_s += passed * len(self._decoding)
            paid = min(self._owed_s, worked)
            self._owed_s -= paid
            self._grown += (worked - paid) / self.run.rates.token_s(len(self._decoding))

    def _go_on(self) -> None:
        rates = self.run.rates
        while self.loading is None and self._waits and len(self._decoding) < rates.places:
            name = self._waits.popleft()
            row = self.run.requested[name]
            row.start_version = self.slot.version
            self._owed_s += rates.prompt_s
            heapq.heappush(self._decoding, (self._grown + row.length, name))
        self.run.share()
        self.set_alarm()

    def set_alarm(self) -> None:
        """Wake the engine at its next event, if nothing changes before."""
        # Earlier alarms become stale: simpy cannot cancel a timeout.
        self._alarm += 1
        if not self.works:
            return
        seconds = self._load_s
        if self.loading is None:
            left = self._decoding[0][0] - self._grown
            seconds = self._owed_s + left * self.run.rates.token_s(len(self._decoding))
        self.run.after(seconds / self.run.engine_speed, partial(self._ring, self._alarm))

    def _ring(self, alarm: int) -> None:
        # The engine's work changed after this alarm was set.
        if alarm != self._alarm:
            return
        self.advance()
        if self.loading is not None:
            self.slot.version, self.loading, self.paused = self.loading, None, False
            self._go_on()
            self.run.on_loaded(self.slot.version)
            return
        ended = []
        # Ends that rounding separates are one event.
        while self._decoding and self._decoding[0][0] <= self._grown + SOON:
            ended.append(heapq.heappop(self._decoding)[1])
        self._go_on()
        self.run.on_ended(self, ended)


class _SimulatedRun:
    barrier = False
    may_pause = 1
    """Number of engines with work that may load at a time."""

    def __init__(
        self,
        scheduler: Scheduler,
        engines: int,
        rates: SimulationRates,
        lengths: ResponseLengths,
        chance: np.random.Generator,
    ) -> None:
        self.env = simpy.Environment()
        self.scheduler, self.rates = scheduler, rates
        self._lengths, self._chance = lengths, chance
        # The run's own router, so that its decisions are real and not modelled.
        self._lanes = Lanes(capacity_of(rates.places), separate=False)
        self.engines = [_SimulatedEngine(self, index) for index in range(engines)]
        self.requested: dict[str, SampleRow] = {}
        self._groups: dict[str, int] = {}
        self._staged = self._sent = self._there = 0
        """Newest versions: staged, being sent, and available to engines."""
        self._trains = self._both = False
        """True while the trainer works, and while engines work, too."""
        self._changed = self.env.event()
        self._totals = [np.zeros(5)]
        """Totals at the end of each step: time, seconds of the trainer's work, of engines, of
        slots; tokens."""
        self._lags: list[Counter[int]] = []

    def go(self, steps: int, warm: int) -> SimulationResult:
        self.scheduler.start(0)
        self._admit()
        self.env.run(until=self.env.process(self._train(steps + warm)))

        now, work, busy, place, tokens = (self._totals[-1] - self._totals[warm]).tolist()
        lags, engines = sum(self._lags[warm:], Counter[int]()), len(self.engines)
        return SimulationResult(
            step_s=now / steps,
            tokens_per_s=tokens / now,
            trainer_busy=work / now,
            engine_busy=busy / (now * engines),
            places_taken=place / (now * engines * self.rates.places),
            lags=tuple(lags[lag] / lags.total() for lag in range(max(lags) + 1)),
            counts=self.scheduler.counts(),
        )

    def _train(self, steps: int) -> SimulatedProcess:
        rates, work, deck = self.rates, 0.0, list[float]()
        for version in range(steps):
            # The scheduler decides which groups train; only the wait is simulated.
            while (groups := self.scheduler.take(version)) is None:
                yield self._changed
            self._admit()  # dropped groups permit new ones
            yield from self._work(rates.take_s)
            began = self.env.now
            samples = [sample for group in groups for sample in group.samples]
            tokens = sum(one.total_length for one in samples)
            # From a shuffled deck, so that the mean of few steps is that of many.
            deck = deck or self._chance.permutation(rates.train_spread).tolist()
            yield from self._work((rates.train_s + rates.train_token_s * tokens) * deck.pop())
            # Two versions are kept, so the one before the last must not be in use.
            while self._is_read_before(version):
                yield self._changed
            yield from self._work(rates.publish_s)
            self._staged = version + 1
            self._bring()

            work += self.env.now - began
            for engine in self.engines:
                engine.advance()
            busy = sum(engine.busy_s for engine in self.engines)
            place = sum(engine.place_s for engine in self.engines)
            trained = self._totals[-1][-1] + sum(sample.length for sample in samples)
            self._totals.append(np.array([self.env.now, work, busy, place, trained]))
            self._lags.append(Counter(version - sample.start_version for sample in samples))

    def _work(self, seconds: float) -> SimulatedProcess:
        """Simulate work of the trainer, which takes longer if engines use the same cores."""
        self._trains = True
        self.share()
        # The speed changes when engines start or stop, so work advances piece by piece.
        while seconds > SOON:
            began, speed = self.env.now, self.rates.trainer_beside if self._both else 1.0
            yield self.env.timeout(seconds / speed) | self._changed
            seconds -= (self.env.now - began) * speed
        self._trains = False
        self.share()

    @property
    def engine_speed(self) -> float:
        return self.rates.engine_beside if self._both else 1.0

    def share(self) -> None:
        """Update the speeds if trainer and engines share cores."""
        both = self._trains and any(engine.works for engine in self.engines)
        # Alarms depend on the speed: advance at the old speed, then set them again.
        if both != self._both:
            for one in self.engines:
                one.advance()
            self._both = both
            for one in self.engines:
                one.set_alarm()
            self._fire()

    def _admit(self) -> None:
        waits = self.barrier and bool(self.requested)
        while not waits and self.scheduler.room():
            version = self.scheduler.version
            assert version is not None
            requests = self.scheduler.admit(lambda: PROMPT)
            prompt, lengths = self._lengths.draw(len(requests), self._chance)
            equal = self._chance.random() < self._lengths.equal
            for request, length in zip(requests, lengths, strict=True):
                row = SampleRow()
                row.id, row.prompt_id, row.valid, row.truncated = request.id, PROMPT.id, True, False
                row.reward = 0.0 if equal else float(request.k)
                # Lengths are drawn at admission, but the scheduler must not depend on them.
                row.length, row.total_length = length, prompt + length
                self.requested[request.id], self._groups[request.id] = row, request.group
                self._lanes.add(PendingRequest(request, version))
        for index, given in self._lanes.place([engine.slot for engine in self.engines]).items():
            self.after(self.rates.ask_s, partial(self.engines[index].take, given))

    def on_ended(self, engine: _SimulatedEngine, names: Sequence[str]) -> None:
        """Pass the responses that ended on an engine to the scheduler."""
        for name in names:
            del engine.slot.held[name]
            row = self.requested.pop(name)
            row.last_version, row.finished_at = engine.slot.version, self.env.now
            self.scheduler.on_sample(row, self._groups.pop(name))
        self._admit()
        self._bring()

    def on_loaded(self, version: int) -> None:
        # Engines load one after another; the newest version of any of them counts.
        self.scheduler.advance(max(version, self.scheduler.version or 0))
        self._admit()
        self._bring()

    def _is_read_before(self, version: int) -> bool:
        """Return True while an engine reads an older version from the staging memory."""
        if self.rates.send_s:
            return self._there < self._sent < version
        return any(one.loading is not None and one.loading < version for one in self.engines)

    def _bring(self) -> None:
        """Send the newest version to the engines' machines, which keep two, and let engines load
        versions that have arrived, one after another."""
        reads = any(one.loading is not None and one.loading < self._there for one in self.engines)
        if self._there == self._sent < self._staged and not reads:
            self._sent = self._staged
            self.after(self.rates.send_s, self._arrive)
        for one in self.engines:
            turn = not one.slot.busy or sum(e.paused for e in self.engines) < self.may_pause
            if one.loading is None and one.slot.version < self._there and turn:
                one.load(self._there)
        self._fire()

    def _arrive(self) -> None:
        self._there = self._sent
        self._bring()

    def _fire(self) -> None:
        changed, self._changed = self._changed, self.env.event()
        changed.succeed()

    def after(self, seconds: float, call: Callable[[], None]) -> None:
        self.env.timeout(max(0.0, seconds)).callbacks.append(lambda _: call())

"""The circle as rank 0 holds it: engines and controller as Ray actors, the publisher, and the keeper that restarts engines.

    next_batch(c) <-- controller <-- engines <-- delivery of version c, in the background <-- publish(c)

Invariants:
- the controller hears of a version only when every engine that is left holds it, proven: that is what the law reckons with;
- `disaggregated`: the engines sample while the policy trains, and load while it trains the next batch;
  `colocated`: they sleep from the moment a batch is there until they have the weights that it made;
- what fails in the background (a delivery, the keeper) ends the next call here.
"""

from __future__ import annotations

import os
import threading
import time
from collections.abc import Iterator, Sequence
from concurrent.futures import Future
from contextlib import ExitStack, nullcontext
from typing import Any

import ray

from megatron_async_rl.circle.engine_keeper import EngineKeeper
from megatron_async_rl.circle.evaluator import Evaluator
from megatron_async_rl.circle.feed import Position
from megatron_async_rl.config.schema import Config
from megatron_async_rl.data.prompts import PromptSource, read_prompts
from megatron_async_rl.data.tokenizer import load_tokenizer
from megatron_async_rl.flow.actor import ControllerSpec, start_controller
from megatron_async_rl.flow.evaluation import EvalResult
from megatron_async_rl.flow.fleet_summary import EngineCounts, counted, engine_metrics, flow_metrics
from megatron_async_rl.flow.summary import MetricValue, summarise_dropped
from megatron_async_rl.observe import watch
from megatron_async_rl.observe.deadline import ray_get, waiting
from megatron_async_rl.rollout.actor import start_engines, stop_engines
from megatron_async_rl.rollout.cluster import join_ray
from megatron_async_rl.rollout.spec import EngineSpec
from megatron_async_rl.samples import Prompt, TrainBatch
from megatron_async_rl.weights.export import Bucket
from megatron_async_rl.weights.publish import Publisher, PublishReport, RayEngine

STOP_POLL_S = 0.5
STOP_ENGINES_S = 15.0
LOOKAHEAD = 4
"""An engine is given max_concurrent / LOOKAHEAD requests more than it decodes at a time, so that none of its places is empty."""


class RolloutFeed:
    """See feed.Feed."""

    def __init__(self, config: Config, device_type: str, version: int, position: Position | None) -> None:
        assert config.rollout is not None
        self._config = config
        self._rollout = config.rollout
        self._timeout_s = config.watchdog.timeout_s
        self._stop = config.run.dir / watch.STOP
        self._colocated = config.rollout.placement == "colocated"
        self._ends = ExitStack()
        self._engines: list[Any] = []
        self._controller: Any = None
        self._keeper: EngineKeeper | None = None
        self._started = self._asleep = False
        self._turn = threading.Lock()
        """Held while colocated engines sleep: none may start meanwhile on devices that the policy uses, nor come up."""
        self._settled = threading.Event()
        self._telling = threading.Lock()
        self._published: PublishReport | None = None
        self._failure: BaseException | None = None
        self._tokens_reported = 0.0
        self._counted_at, self._counts = time.monotonic(), list[EngineCounts]()
        source, held_out = _prompts(config)
        specs = _engine_specs(config, device_type)
        self._names = {spec.name: spec.index for spec in specs}
        ranks_here = int(os.environ.get("LOCAL_WORLD_SIZE", "1"))
        join_ray(ranks_here if device_type == "cuda" and not self._colocated else 0)
        try:
            self._engines = start_engines(specs)
            self._controller = self._start_controller(source)
            if position is not None:
                loading = self._controller.load_position.remote(position.state, position.buffer, position.oldest)
                self._call("controller to take up its position", loading)
            clients = [RayEngine(spec.name, engine) for spec, engine in zip(specs, self._engines, strict=True)]
            training, evaluating = clients[: config.rollout.engines], clients[config.rollout.engines :]
            self._publisher = Publisher(training, timeout_s=self._timeout_s, update=config.weights.update)
            self._ends.callback(self._publisher.close)
            self._keeper = EngineKeeper(
                self._controller,
                self._publisher,
                specs,
                self._engines,
                evaluators=len(evaluating),
                run_dir=config.run.dir,
                timeout_s=self._timeout_s,
                turn=self._turn if self._colocated else nullcontext(),
                on_up=self._tell_version,
            )
            self._evaluator = Evaluator(config, self._controller, self._publisher, evaluating, held_out)
        except BaseException:
            self.close()
            raise

    def _start_controller(self, source: PromptSource) -> Any:
        config, rollout = self._config, self._rollout
        spec = ControllerSpec(
            flow=config.flow,
            log_path=config.run.dir / "logs" / "controller.log",
            on_reward_error=rollout.reward.on_error,
            steps=config.run.steps,
            fresh_steps=config.fresh_steps,
            seed=config.run.seed,
            capacity=rollout.max_concurrent + max(1, rollout.max_concurrent // LOOKAHEAD),
            unresponsive_s=rollout.unresponsive_s,
        )
        return start_controller(source, self._engines[: rollout.engines], spec, self._engines[rollout.engines :])

    def next_batch(self, version: int) -> TrainBatch | None:
        if self._stop.exists():
            return None
        pending = self._controller.next_batch.remote(version, self._timeout_s)
        # The controller has a deadline, from the newest response on, and knows what is missing; here it only has to be there.
        with waiting(f"the batch for version {version} from the controller", self._timeout_s):
            there = False
            while not there:
                if self._stop.exists():
                    self._call("controller to hand out no more", self._controller.withdraw.remote())
                    break
                self._check()
                there = bool(ray.wait([pending], timeout=STOP_POLL_S)[0])
        batch: TrainBatch | None = self._call(f"batch for version {version}", pending)
        if batch is not None and self._colocated:
            self._sleep()
        return batch

    def _sleep(self) -> None:
        longest_s = max(self._timeout_s, self._rollout.start_timeout_s)
        with waiting("an engine that is being started before the engines sleep", longest_s):
            if not self._turn.acquire(timeout=longest_s):
                raise TimeoutError
        self._asleep = True
        held = self._publisher.versions
        sleeping = {name: self._engines[index].sleep.remote() for name, index in self._names.items() if name in held}
        for name, call in sleeping.items():
            try:
                self._call(f"{name} to sleep", call)
            except Exception as error:  # noqa: BLE001 - whatever it is, the keeper and the controller deal with it
                self._lose(name, f"it did not go to sleep: {error}")

    def publish(self, version: int, buckets: Iterator[Bucket]) -> None:
        self._check()
        self._publisher.stage(version, buckets)
        self._settled.clear()
        delivery = self._publisher.deliver(version, asleep=self._asleep)
        delivery.add_done_callback(self._delivered)
        if self._colocated or not self._started:
            self._settle(version)
        if self._asleep:
            self._asleep = False
            self._turn.release()

    def _delivered(self, delivery: Future[PublishReport]) -> None:
        """In the publisher's thread."""
        try:
            self._published = report = delivery.result()
            for name, reason in report.lost.items():
                self._lose(name, reason)
            self._tell_version()
        except BaseException as error:  # noqa: BLE001 - raised in the loop's thread
            self._failure = error
        finally:
            self._settled.set()

    def _tell_version(self) -> None:
        """The controller may reckon with what every engine that is left holds; while none is, with what it knew before."""
        with self._telling:
            version = min(self._publisher.versions.values(), default=-1)
            if version < 0:
                return
            turn = self._controller.advance if self._started else self._controller.start
            self._call(f"controller to advance to version {version}", turn.remote(version))
            self._started = True

    def _lose(self, name: str, reason: str) -> None:
        self._publisher.remove(name)
        self._call("controller to lose an engine", self._controller.lose.remote(self._names[name], reason))

    def _settle(self, version: int) -> None:
        """Waits until every engine that is left holds the version that was published last."""
        longest_s = self._timeout_s * (len(self._engines) + 3)
        with waiting(f"version {version} to reach the engines", longest_s):
            if not self._settled.wait(longest_s):
                raise TimeoutError
        self._check()

    def position(self) -> Position:
        state, buffer = self._call("controller's position", self._controller.position.remote())
        return Position(state=state, buffer=buffer)

    def evaluate(self, version: int) -> None:
        if not self._evaluator.separate:
            self._settle(version)
        self._evaluator.begin(version)

    def evaluated(self, *, wait: bool = False) -> Sequence[EvalResult]:
        return self._evaluator.results(wait=wait)

    def metrics(self) -> dict[str, MetricValue]:
        calls = [self._controller.stats.remote(), self._controller.drain_dropped.remote()]
        stats, dropped = self._call("controller's counts", calls)
        now = time.monotonic()
        values: dict[str, MetricValue] = {"tokens/generated": stats["tokens"] - self._tokens_reported}
        values |= flow_metrics(stats) | summarise_dropped(dropped)
        engines, seconds = stats["engines"][: self._rollout.engines], now - self._counted_at
        values |= engine_metrics(engines, self._counts, seconds)
        held = self._publisher.versions
        values["engine/versions"] = [held.get(name, -1) for name, index in self._names.items() if index < self._rollout.engines]
        self._tokens_reported = stats["tokens"]
        self._counted_at, self._counts = now, counted(engines, self._counts, seconds)
        if self._published is not None:
            values |= {
                "weights/publish_s": self._published.seconds,
                "weights/publish_bytes": self._published.bytes,
                "weights/pause_s": self._published.paused_s,
            }
        return values

    def close(self) -> None:
        if self._keeper is not None:
            self._keeper.close()
        if self._controller is not None:
            ray.kill(self._controller)
        stop_engines(self._engines, timeout_s=STOP_ENGINES_S)
        self._ends.close()
        ray.shutdown()

    def _check(self) -> None:
        """Raises what failed in the background."""
        if self._failure is not None:
            raise self._failure
        if self._keeper is not None:
            self._keeper.check()

    def _call(self, name: str, reference: Any) -> Any:
        return ray_get(reference, name, self._timeout_s)


def _engine_specs(config: Config, device_type: str) -> list[EngineSpec]:
    """Of the training engines, then of those that only evaluate."""
    assert config.rollout is not None
    evaluators = config.eval.engines if config.eval is not None else 0
    return [
        EngineSpec(
            index=index,
            model_path=config.model.path,
            dtype=config.model.dtype,
            rollout=config.rollout,
            seed=config.run.seed,
            device="cuda" if device_type == "cuda" else "cpu",
            log_dir=config.run.dir / "logs",
            run_dir=config.run.dir,
            first_version=-1,
        )
        for index in range(config.rollout.engines + evaluators)
    ]


def _prompts(config: Config) -> tuple[PromptSource, list[Prompt]]:
    """The training source and the held-out prompts, all of them checked."""
    tokenizer = load_tokenizer(config.model.path)
    train = read_prompts(config.data.train, tokenizer)
    held_out = read_prompts(config.data.eval, tokenizer) if config.eval is not None and config.data.eval is not None else []
    return PromptSource(train, seed=config.run.seed, shuffle=config.data.shuffle), held_out

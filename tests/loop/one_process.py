"""The whole loop in one process: the real policy on one rank, the real controller on an event loop
in its own thread, and fake engines. `train.py` is unchanged; only Ray, torchrun and vLLM are
missing.
"""

from __future__ import annotations

import asyncio
import gc
import threading
from collections import Counter
from collections.abc import Callable, Sequence
from concurrent.futures import Future
from dataclasses import replace
from pathlib import Path
from typing import Any
from unittest import mock

import numpy as np
import pytest
import yaml

from megatron_async_rl.config.load import load
from megatron_async_rl.config.schema import Config
from megatron_async_rl.flow import batches
from megatron_async_rl.flow.controller import Controller
from megatron_async_rl.flow.controller_spec import ControllerSpec, PromptProvider
from megatron_async_rl.flow.engine_task import Launch, Restarts
from megatron_async_rl.flow.trainer_rank import TrainerRank
from megatron_async_rl.policy import device
from megatron_async_rl.policy.background import Background
from megatron_async_rl.policy.parallel import initialise
from megatron_async_rl.rollout.spec import EngineSpec
from megatron_async_rl.samples.types import Request, Sample
from megatron_async_rl.train import train
from megatron_async_rl.watchdog import processes
from megatron_async_rl.weights.manifest import Manifest
from tests.tiny_models import save_tiny_model
from tests.unit.fake_engine import FakeEngine
from tests.unit.flow_setup import until
from tests.written_run import config_tree, write_model, write_prompts

DEADLINE_S = 300.0
VOCABULARY = 96
ENGINES = 2
GROUPS = 4
"""Number of groups of a step, as in `config_tree`."""


class EngineDied(RuntimeError):
    """Simulated death of an engine's process."""


class Crash(RuntimeError):
    """Simulated death of rank 0."""


class LoopEngine(FakeEngine):
    """Engine whose responses depend only on the request.

    fails_at: (name of a call, number of that call over all engines), at which this engine dies.
    """

    def __init__(self, calls: Counter[str], fails_at: tuple[str, int] | None) -> None:
        super().__init__()
        self._all_calls = calls
        self._fails_at = fails_at
        self.alter = varied
        self.holds_back = False
        """True if it answers a step's groups only once it holds the version before the step's:
        while older versions train, those groups have no response."""
        self.digests: dict[int, dict[str, str]] = {}
        """Digests of the weights, by version."""
        for name in ("sleep", "wake weights", "wake cache"):
            self.before[name] = lambda name=name: self._reach(name)
        self.before_update = lambda version: self._reach("update")

    async def update(
        self, version: int, manifest: Manifest, first: bool = True, last: bool = True
    ) -> dict[str, str]:
        self.digests[version] = dict(manifest.digests)
        return await super().update(version, manifest, first, last)

    async def submit(self, requests: Sequence[Request]) -> None:
        await self._reach("submit")
        if any(request.sampling is not None for request in requests):
            await self._reach("evaluate")
        await super().submit(requests)

    async def _answer(self, request: Request) -> None:
        if self.holds_back and request.sampling is None:
            await until(lambda: self.version >= request.group // GROUPS - 1)
        await super()._answer(request)

    async def _reach(self, name: str) -> None:
        self._all_calls[name] += 1
        if (name, self._all_calls[name]) == self._fails_at:
            error = EngineDied(f"{name} {self._all_calls[name]}")
            self.fail(error)
            raise error


def varied(sample: Sample) -> Sample:
    """Return `sample` with tokens, log-probs and a reward drawn from its id."""
    group, _, k = sample.id.rpartition("-")
    draw = np.random.default_rng([abs(int(group)), int(k)])
    ids = draw.integers(1, VOCABULARY, len(sample.versions)).astype(np.int32)
    logprobs = draw.uniform(-6, -3, len(ids)).astype(np.float32)
    reward = sample.reward if sample.reward_error else float(draw.integers(3))
    return replace(sample, response_ids=ids, behavior_logprobs=logprobs, reward=reward)


class Engines:
    """Starts LoopEngines. calls: number of times that each call was made, over all engines.

    fails_at: see LoopEngine. prepare: called on each engine before it serves.
    """

    def __init__(
        self,
        fails_at: tuple[str, int] | None = None,
        prepare: Callable[[LoopEngine], object] = lambda engine: None,
    ) -> None:
        self.calls = Counter[str]()
        self.all: list[LoopEngine] = []
        self._fails_at = fails_at
        self._prepare = prepare

    async def __call__(self, spec: EngineSpec, *, again: bool) -> LoopEngine:
        engine = LoopEngine(self.calls, self._fails_at)
        self._prepare(engine)
        engine.version = spec.first_version
        self.all.append(engine)
        return engine


class CrashingRank(TrainerRank):
    """Rank that raises Crash. crashes_at: (name of a method, number of its call)."""

    crashes_at: tuple[str, int] | None = None

    def __init__(self, *arguments: Any) -> None:
        super().__init__(*arguments)
        self._calls = Counter[str]()
        log = self.rank0.log

        def reached(*arguments: Any) -> None:
            self._reach("log")
            log(*arguments)

        self.rank0.log = reached  # type: ignore[method-assign]

    def _reach(self, name: str) -> None:
        self._calls[name] += 1
        if (name, self._calls[name]) == self.crashes_at:
            raise Crash(f"{name} {self._calls[name]}")

    def await_batch(self) -> None:
        self._reach("await_batch")
        super().await_batch()
        self._reach("after await_batch")

    def take_devices(self) -> None:
        self._reach("take_devices")
        super().take_devices()

    def give_devices(self) -> None:
        self._reach("give_devices")
        super().give_devices()

    def publish(self, version: int) -> None:
        self._reach("publish")
        super().publish(version)

    def state(self) -> tuple[dict[str, Any], dict[str, bytes]]:
        self._reach("state")
        return super().state()


class Answer:
    """Replacement of Ray's object reference."""

    def __init__(self, answer: Future[Any]) -> None:
        self._answer = answer

    def future(self) -> Future[Any]:
        return self._answer


class Method:
    """Method of an actor. `remote` begins the call on the controller's event loop."""

    def __init__(self, call: Callable[..., Any], loop: asyncio.AbstractEventLoop) -> None:
        self._call = call
        self._loop = loop

    def remote(self, *arguments: Any) -> Answer:
        return Answer(asyncio.run_coroutine_threadsafe(self._call(*arguments), self._loop))


class ControllerThread:
    """Handle of a controller whose event loop is a thread of this process."""

    def __init__(self, source: PromptProvider, spec: ControllerSpec, launch: Launch) -> None:
        self._loop = asyncio.new_event_loop()
        self._thread = threading.Thread(target=self._loop.run_forever, name="controller")
        self._thread.start()
        self.controller = Controller(source, spec, launch)

    def __getattr__(self, name: str) -> Method:
        return Method(getattr(self.controller, name), self._loop)

    def end(self) -> None:
        self._loop.call_soon_threadsafe(self._loop.stop)
        self._thread.join()
        self._loop.close()


class OneProcess:
    """Runs `train` in folders of `root`, on one model and one file of prompts."""

    def __init__(self, root: Path, monkeypatch: pytest.MonkeyPatch) -> None:
        self.root = root
        self._configs = 0
        self.pending: list[int] = []
        """Groups that the last run admitted and did not end."""
        self._launch: Launch = Engines()
        write_model(root / "model")
        save_tiny_model(root / "model", vocab_size=VOCABULARY)
        write_prompts(root / "train.jsonl")
        write_prompts(root / "held_out.jsonl", 3)
        tree = config_tree()
        tree["run"]["steps"] = 3
        tree["rollout"]["engines"] = ENGINES
        tree["policy"]["optimizer"] = {"lr": 0.01}
        self._file = root / "config.yaml"
        self._file.write_text(yaml.safe_dump(tree))
        self._replace(monkeypatch)

    @classmethod
    def rank(cls, monkeypatch: pytest.MonkeyPatch) -> OneProcess:
        """Return the loop of one of several ranks, whose configuration names files that exist."""
        loop = cls.__new__(cls)
        loop.pending = []
        loop._replace(monkeypatch)
        return loop

    def _replace(self, monkeypatch: pytest.MonkeyPatch) -> None:
        """Replace Ray, and the delays after a failure."""
        # `collect_rarely` would exclude the run's objects from garbage collection permanently.
        monkeypatch.setattr(processes, "gc", mock.Mock())
        monkeypatch.setattr(batches, "join_ray", lambda *_, **__: None)
        monkeypatch.setattr(batches, "start_controller", self._start)
        monkeypatch.setattr(batches, "ray_get", self._get)
        monkeypatch.setattr(batches, "ray", self)
        monkeypatch.setattr(Restarts, "delay_s", lambda _: 0.0)
        device.install("cpu")

    def config(self, name: str, *overrides: str) -> Config:
        """Return the config of a new run: hypothesis may draw an example a second time."""
        self._configs += 1
        return load(self._file, [f"run.dir={self.root / f'{self._configs} {name}'}", *overrides])

    def run(
        self, config: Config, engines: Engines, crashes_at: tuple[str, int] | None = None
    ) -> Path:
        """Return the run's folder. Raises the error that ended the run."""
        self._launch = engines
        config.run.dir.mkdir(exist_ok=True)
        layout = initialise(config.policy.parallel, "cpu", timeout_s=DEADLINE_S)
        rank = CrashingRank(config, layout)
        rank.crashes_at = crashes_at
        try:
            with Background("writing a checkpoint") as writing:
                try:
                    train(config, layout, rank, writing)
                except BaseException as error:
                    writing.settle(DEADLINE_S)
                    rank.rank0.failed(error)
                    raise
                finally:
                    rank.close()
        finally:
            layout.shutdown()
            del rank, layout
            # The policy is garbage in cycles, and keeps its process groups, whose threads poll. The
            # threads of a hundred runs would slow down all later tests.
            gc.collect()
        return config.run.dir

    # Functions of Ray, and of deadlines for it, that `batches` calls

    def _start(self, source: PromptProvider, spec: ControllerSpec) -> ControllerThread:
        return ControllerThread(source, spec, self._launch)

    def _get(self, answer: Answer, name: str, limit_s: float) -> Any:
        return answer.future().result(min(limit_s, DEADLINE_S))

    def wait(self, answers: Sequence[Answer], timeout: float) -> tuple[list[Answer], list[Answer]]:
        done: list[Answer] = []
        waiting: list[Answer] = []
        for answer in answers:
            try:
                answer.future().exception(timeout)
            except TimeoutError:
                waiting.append(answer)
            else:
                done.append(answer)
        return done, waiting

    def kill(self, controller: ControllerThread) -> None:
        controller.end()
        self.pending = [index for index, _ in controller.controller._state()["pending"]]

    def shutdown(self) -> None:
        """Do nothing, because nothing was started."""

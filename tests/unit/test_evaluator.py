"""Rank 0's evaluations on engines of their own, with the controller, Ray and the publisher replaced."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from megatron_async_rl.circle import evaluator as module
from megatron_async_rl.circle.evaluator import Evaluator
from megatron_async_rl.flow.errors import EngineFailed
from megatron_async_rl.observe.deadline import DeadlineExceeded
from megatron_async_rl.observe.events import EventReader
from megatron_async_rl.weights.publish import PublishFailed

TRAINING = 2


class World:
    """Engines 2 and 3 evaluate. A call of the controller is made when its answer is asked for, as a Ray call ends."""

    def __init__(self, folder: Path, monkeypatch: pytest.MonkeyPatch, engines: int = 2) -> None:
        self.folder = folder
        self.broken: set[str] = set()
        self.fed: list[str] = []
        self.lost: list[int] = []
        self.asked: list[int] = []
        self.gate = threading.Event()
        self.gate.set()
        self.failure: Exception | None = None
        monkeypatch.setattr(module, "ray_get", lambda call, name, timeout_s: call())
        config: Any = SimpleNamespace(
            rollout=SimpleNamespace(engines=TRAINING),
            run=SimpleNamespace(dir=folder),
            watchdog=SimpleNamespace(timeout_s=5.0),
            eval=SimpleNamespace(samples_per_prompt=2, pass_at=(1,), pass_reward=1.0),
        )
        controller = SimpleNamespace(
            evaluate=SimpleNamespace(remote=lambda prompts, n, version, *settings: lambda: self._evaluate(version)),
            lose=SimpleNamespace(remote=lambda index, reason: lambda: self.lost.append(index)),
        )
        publisher: Any = SimpleNamespace(bring_up=self._bring_up, remove=lambda name: None)
        clients: Any = [SimpleNamespace(name=f"engine-{TRAINING + i}") for i in range(engines)]
        self.events = EventReader(folder)
        self.evaluator = Evaluator(config, controller, publisher, clients, [])
        self.version = 0

    def _bring_up(self, engine: Any) -> int:
        if engine.name in self.broken:
            raise PublishFailed(f"{engine.name} died")
        self.fed.append(engine.name)
        return self.version

    def _evaluate(self, version: int) -> Any:
        assert self.gate.wait(10.0)
        if self.failure is not None:
            raise self.failure
        self.asked.append(version)
        return SimpleNamespace(version=version)

    def begin(self, version: int) -> None:
        self.version = version
        self.evaluator.begin(version)

    def results(self) -> list[int]:
        return [result.version for result in self.evaluator.results(wait=True)]


@pytest.fixture
def world(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> World:
    return World(tmp_path, monkeypatch)


def test_training_goes_on_beside_an_evaluation_and_the_next_one_waits_for_it(
    world: World, monkeypatch: pytest.MonkeyPatch
) -> None:
    waited_with_fed: list[int] = []

    @contextmanager
    def waiting(name: str, timeout_s: float) -> Iterator[None]:
        waited_with_fed.append(len(world.fed))
        world.gate.set()
        yield

    monkeypatch.setattr(module, "waiting", waiting)
    world.gate.clear()
    world.begin(0)
    assert world.evaluator.results(wait=False) == []
    world.begin(3)
    assert waited_with_fed == [2], "no engine is fed version 3 while version 0 is being evaluated"
    assert world.results() == [0, 3]
    assert world.fed == ["engine-2", "engine-3"] * 2


def test_an_evaluation_engine_that_dies_is_lost_alone_and_the_other_evaluates(world: World) -> None:
    world.broken.add("engine-3")
    for version in (0, 3):
        world.begin(version)
    assert world.results() == [0, 3]
    assert world.lost == [3], "once: it is asked for nothing at the next version"
    assert world.events.new() == []


def test_without_an_evaluation_engine_that_is_noted_and_the_training_engines_do_not_step_in(world: World) -> None:
    world.broken |= {"engine-2", "engine-3"}
    for version in (0, 3):
        world.begin(version)
    assert world.evaluator.separate
    assert (world.results(), world.asked, world.lost) == ([], [], [2, 3])
    assert world.events.new() == [f"version {version} is not evaluated: no evaluation engine is left" for version in (0, 3)]


def test_engines_that_die_while_they_evaluate_cost_that_evaluation_and_anything_else_ends_the_run(world: World) -> None:
    world.failure = EngineFailed("no evaluation engine is left: engine 2: gone")
    world.begin(0)
    assert world.results() == []
    assert world.events.new() == ["version 0 is not evaluated: no evaluation engine is left: engine 2: gone"]
    world.failure = ValueError("a mistake of ours")
    world.begin(3)
    with pytest.raises(ValueError, match="a mistake of ours"):
        world.results()


def test_an_evaluation_that_never_ends_is_not_waited_for_in_silence(world: World, monkeypatch: pytest.MonkeyPatch) -> None:
    world.gate.clear()
    world.begin(0)
    monkeypatch.setattr(module, "DAY_S", 0.05)
    with pytest.raises(DeadlineExceeded, match="the evaluation before"):
        world.begin(3)
    world.gate.set()

"""The keeper of engines with Ray, the controller and the publisher replaced: who is killed, started and replaced, and when."""

import json
import queue
import threading
from collections.abc import Callable, Iterator
from concurrent.futures import Future, wait
from contextlib import contextmanager, nullcontext
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import ray

from megatron_async_rl.circle import engine_keeper
from megatron_async_rl.circle.engine_keeper import EngineKeeper
from megatron_async_rl.observe.events import FILE
from megatron_async_rl.weights.publish import PublishFailed

SOON_S = 10.0


class World:
    """Engines are strings: `engine-0` at first, then `engine-0/1`, `engine-0/2`, ... Everything done with them is in `done`."""

    def __init__(self, folder: Path, engines: int, restarts: int) -> None:
        self.folder = folder
        self.specs = [
            SimpleNamespace(index=i, name=f"engine-{i}", rollout=SimpleNamespace(restarts=restarts)) for i in range(engines)
        ]
        self.handles = [spec.name for spec in self.specs]
        self.versions = {spec.name: 4 for spec in self.specs}
        self.started = {spec.name: 0 for spec in self.specs}
        self.start: Callable[[str], None] = lambda handle: None
        """What happens while an engine starts."""
        self.bringing_up: Callable[[str], None] = lambda handle: None
        self.at_replace: Callable[[str], None] = lambda handle: None
        self.done: queue.SimpleQueue[tuple[str, ...]] = queue.SimpleQueue()
        self._asked: queue.SimpleQueue[Future[Any]] = queue.SimpleQueue()

    # The controller, whose answers are futures

    @property
    def controller(self) -> Any:
        methods = {"lost": self._lost, "replace": self._replace, "lose": self._lose, "give_up": self._give_up}
        return SimpleNamespace(**{name: SimpleNamespace(remote=method) for name, method in methods.items()})

    def _lost(self) -> "Future[Any]":
        asked: Future[Any] = Future()
        self._asked.put(asked)
        return asked

    def _replace(self, index: int, handle: str) -> "Future[None]":
        self.at_replace(handle)
        return self._did("replace", handle)

    def _lose(self, index: int, reason: str) -> "Future[None]":
        return self._did("lose", str(index))

    def _give_up(self, index: int) -> "Future[None]":
        return self._did("give up", str(index))

    def _did(self, *what: str) -> "Future[None]":
        self.done.put(what)
        answered: Future[None] = Future()
        answered.set_result(None)
        return answered

    # The publisher

    def remove(self, name: str) -> None:
        self.versions.pop(name, None)
        self.done.put(("remove", name))

    def bring_up(self, engine: Any) -> int:
        self.bringing_up(engine.handle)
        self.versions[engine.name] = 4
        self.done.put(("bring up", engine.handle))
        return 4

    # Ray actors

    def start_engine(self, spec: Any) -> str:
        self.started[spec.name] += 1
        handle = f"{spec.name}/{self.started[spec.name]}"
        self.start(handle)
        return handle

    def kill_engine(self, handle: str) -> None:
        self.done.put(("kill", handle))

    # The tests

    def lose(self, index: int) -> None:
        self._asked.get(timeout=SOON_S).set_result((index, "it fell silent"))

    def next(self) -> tuple[str, ...]:
        return self.done.get(timeout=SOON_S)

    def events(self) -> list[str]:
        path = self.folder / FILE
        return [json.loads(line)["text"] for line in path.read_text().splitlines()] if path.exists() else []


@pytest.fixture
def keep(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Any:
    def waited(futures: list["Future[Any]"], timeout: float) -> tuple[list["Future[Any]"], list["Future[Any]"]]:
        done, others = wait(futures, timeout=timeout)
        return list(done), list(others)

    monkeypatch.setattr(ray, "wait", waited)
    monkeypatch.setattr(ray, "get", lambda future, timeout=None: future.result(timeout=timeout))

    @contextmanager
    def kept(engines: int = 2, restarts: int = 1, evaluators: int = 0, turn: Any = None) -> Iterator[tuple[World, EngineKeeper]]:
        world = World(tmp_path, engines, restarts)
        monkeypatch.setattr(engine_keeper, "start_engine", world.start_engine)
        monkeypatch.setattr(engine_keeper, "kill_engine", world.kill_engine)
        keeper = EngineKeeper(
            world.controller,
            world,  # type: ignore[arg-type]
            world.specs,  # type: ignore[arg-type]
            world.handles,
            evaluators=evaluators,
            run_dir=tmp_path,
            timeout_s=SOON_S,
            turn=turn or nullcontext(),
            on_up=lambda: world.done.put(("up",)),
        )
        try:
            yield world, keeper
        finally:
            keeper.close()

    return kept


def test_a_lost_engine_is_killed_and_another_takes_its_place_with_proven_weights(keep: Any) -> None:
    with keep() as (world, keeper):
        world.lose(1)
        assert [world.next() for _ in range(5)] == [
            ("remove", "engine-1"),
            ("kill", "engine-1"),
            ("bring up", "engine-1/1"),
            ("replace", "engine-1/1"),
            ("up",),
        ]
        assert world.handles == ["engine-0", "engine-1/1"]
        keeper.check()


def test_an_engine_lost_while_another_starts_is_killed_at_once_and_starts_beside_it(keep: Any) -> None:
    """An update would wait for its answers otherwise, for as long as the other one takes to start."""
    go_on = threading.Event()
    with keep() as (world, _):
        world.start = lambda handle: None if handle != "engine-0/1" else must_be_set(go_on)
        world.lose(0)
        assert [world.next(), world.next()] == [("remove", "engine-0"), ("kill", "engine-0")]
        world.lose(1)
        assert [world.next(), world.next()] == [("remove", "engine-1"), ("kill", "engine-1")]
        assert [world.next() for _ in range(3)] == [("bring up", "engine-1/1"), ("replace", "engine-1/1"), ("up",)]
        go_on.set()
        assert [world.next() for _ in range(3)] == [("bring up", "engine-0/1"), ("replace", "engine-0/1"), ("up",)]


def must_be_set(event: threading.Event) -> None:
    assert event.wait(SOON_S)


def test_one_that_failed_at_an_update_before_it_had_its_place_is_lost_again(keep: Any) -> None:
    """The publisher left it out, and the controller did not know it yet: it would sample with old weights for ever."""
    with keep(restarts=2) as (world, _):
        world.at_replace = lambda handle: world.versions.pop("engine-0") if handle == "engine-0/1" else None
        world.lose(0)
        done = [world.next() for _ in range(5)]
        assert done[3:] == [("replace", "engine-0/1"), ("lose", "0")]
        assert "engine-0 is back" not in " ".join(world.events())
        world.lose(0)
        assert [world.next() for _ in range(5)] == [
            ("remove", "engine-0"),
            ("kill", "engine-0/1"),
            ("bring up", "engine-0/2"),
            ("replace", "engine-0/2"),
            ("up",),
        ]


def test_failed_starts_and_failed_bring_ups_count_and_the_end_of_an_engine_is_said(keep: Any) -> None:
    def start(handle: str) -> None:
        if handle == "engine-0/1":
            raise RuntimeError("no memory")

    def bring_up(handle: str) -> None:
        raise PublishFailed("engine-0 failed to pause")

    with keep(restarts=2) as (world, keeper):
        world.start, world.bringing_up = start, bring_up
        world.lose(0)
        assert [world.next() for _ in range(4)] == [
            ("remove", "engine-0"),
            ("kill", "engine-0"),
            ("kill", "engine-0/2"),
            ("give up", "0"),
        ]
        assert world.events() == [
            "engine-0 is lost and its prompts are asked again; restart 1 of 2. Why: it fell silent",
            "engine-0 is lost and its prompts are asked again; restart 2 of 2. Why: no memory",
            "engine-0 is lost for good; 1 of 2 engines are left. Why: engine-0 failed to pause",
        ]
        keeper.check()


def test_an_engine_starts_and_comes_up_only_while_it_has_the_turn(keep: Any) -> None:
    """Colocated engines that sleep have left their devices to the policy."""
    turn = threading.Lock()
    turn.acquire()
    with keep(turn=turn) as (world, _):
        world.start = lambda handle: world.done.put(("start", f"in turn: {turn.locked()}"))
        for engine in range(2):
            world.lose(engine)
            assert [world.next(), world.next()] == [("remove", f"engine-{engine}"), ("kill", f"engine-{engine}")]
        turn.release()
        done = [world.next() for _ in range(8)]
        assert [what[0] for what in done] == ["start", "bring up", "replace", "up"] * 2
        assert done[0] == done[4] == ("start", "in turn: True")


def test_an_evaluation_engine_is_not_started_again(keep: Any) -> None:
    with keep(engines=3, evaluators=1) as (world, _):
        world.lose(2)
        assert [world.next() for _ in range(3)] == [("remove", "engine-2"), ("kill", "engine-2"), ("give up", "2")]


def test_a_run_that_ends_while_an_engine_starts_gives_nobody_up(keep: Any) -> None:
    starting, ended = threading.Event(), threading.Event()

    def start(handle: str) -> None:
        starting.set()
        must_be_set(ended)
        raise RuntimeError("Ray is gone")

    with keep() as (world, keeper):
        world.start = start
        world.lose(0)
        must_be_set(starting)
        keeper.close()
        ended.set()
        (thread,) = [thread for thread in threading.enumerate() if thread.name == "restart of engine-0"]
        thread.join(SOON_S)
        assert [text for text in world.events() if "for good" in text] == []
        keeper.check()

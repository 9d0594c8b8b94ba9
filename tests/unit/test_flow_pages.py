"""Whole outputs of one run's flow, in a time in which nothing takes time: batches, metrics, the
position for a checkpoint, the log of samples, notes and evaluations; while an engine is lost,
rewards fail, groups are dropped, and an engine joins and leaves."""

from __future__ import annotations

import asyncio
import json
import random
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from megatron_async_rl.config.schema import SamplesConfig
from megatron_async_rl.flow import controller as controller_module
from megatron_async_rl.flow import engine_task
from megatron_async_rl.flow.buffer import read_buffer
from megatron_async_rl.flow.controller import Controller
from megatron_async_rl.samples.rows import EngineReport
from megatron_async_rl.samples.segments import read_entries, read_table
from megatron_async_rl.samples.types import Request
from megatron_async_rl.watchdog.events import read_events
from tests.stored_pages import listed, plain, require_page
from tests.unit.fake_engine import FakeEngine, FakeLaunch
from tests.unit.flow_setup import begin, flow, groups_of, run, stage

STEPS = 6


def delay(request: Request) -> float:
    """Return a duration that depends on the request, in virtual seconds."""
    return 0.2 + 0.1 * ((7 * request.group + 3 * request.k) % 5)


def reward(request: Request) -> float | None:
    """Return 0 or 1; some groups are equal, and some rewards fail."""
    if request.group % 5 == 3 and request.k == 1:
        return None
    return float((request.group + request.k) % 4 == 0)


class CountingEngine(FakeEngine):
    """Engine that reports tokens and busy time in proportion to its requests."""

    async def report(self, timeout_s: float) -> EngineReport:
        found = await super().report(timeout_s)
        count = len(self.asked)
        trained = sum(request.group >= 0 for request in self.asked)
        return replace(found, tokens=5 * count, generated=2 * trained, busy_s=0.05 * count)


def engine(index: int) -> FakeEngine:
    made = CountingEngine(delay)
    made.reward = reward
    return made


async def state_of(controller: Controller) -> str:
    saved = await controller.state()
    assert saved.buffer is not None
    buffer = read_buffer(saved.buffer)
    groups = [
        [one.index, one.version, one.deadline, sorted(one.open), [s.id for s in one.samples]]
        for one in buffer.groups
    ]
    kept = {"groups": groups, "equal": buffer.equal, "first versions": buffer.first_versions}
    return listed(dict(saved.state)) + listed(kept) + f"mark: {saved.log}\n"


async def recorded(tmp_path: Path, settings: dict[str, Any], fails: dict[int, str]) -> str:
    """Return what a run shows. fails: what happens before each step."""
    launch = FakeLaunch([engine(index) for index in range(3)], again=engine)
    launch.make = engine
    sleeps = settings.pop("sleeps", False)
    controller = await begin(
        launch,
        flow(prompts_per_step=2, **settings),
        run_dir=tmp_path,
        samples=SamplesConfig(experts=False),
        evaluators=1,
        steps=STEPS,
        capacity=3,
        max_paused=0.5,
        restarts_per_hour=2,
    )
    text = ""
    for version in range(STEPS):
        match fails.get(version):
            case "evaluate":
                result = await controller.evaluate(version)
                assert result is not None
                text += f"evaluated: {json.dumps(plain(result.as_json()))}\n"
            case "lost":
                launch.engines[0].fail(RuntimeError("out of memory"))
            case "joins":
                text += f"joins: {await controller.add_engine()}\n"
            case "leaves":
                await controller.remove_engine(1)
        handout = await controller.next_batch(version)
        assert handout is not None
        groups = [
            [group.index, group.prompt.id, [(s.id, s.versions, s.reward) for s in group.samples]]
            for group in groups_of(handout.batch)
        ]
        text += f"$ step {version + 1}\n{listed({'groups': groups})}{listed(dict(handout.metrics))}"
        if sleeps:
            await controller.sleep()
        await stage(controller, version + 1)
        if version in (1, STEPS - 1):
            text += await state_of(controller)
    await controller.close()
    stats = controller.stats()
    text += "$ counts\n" + listed({name: stats[name] for name in stats if name != "engines"})
    text += listed({"engines": stats["engines"]})
    calls = {f"calls of engine {at}": one.calls for at, one in enumerate(launch.engines)}
    return text + listed({"starts": launch.starts, **calls})


def logged(tmp_path: Path) -> str:
    """Return what the run left in its folder."""
    text = "$ notes\n" + "".join(f"{event.text}\n" for event in read_events(tmp_path))
    text += "$ outcomes\n"
    for one in read_table(tmp_path, "outcomes").sort_by("seq").to_pylist():
        del one["finished_at"]
        text += " ".join(f"{name}={value}" for name, value in one.items() if value is not None)
        text += "\n"
    text += "$ samples\n"
    for entry in sorted(read_entries(tmp_path), key=lambda one: (one.group, one.id)):
        text += f"{entry.id} {entry.reward:g} {entry.valid} {entry.state} {entry.steps}"
        text += f" {entry.reason}\n"
    return text


FLOWS: dict[str, tuple[dict[str, Any], dict[int, str]]] = {
    "steady": ({"async_ratio": 1.0}, {0: "evaluate", 3: "evaluate"}),
    "synchronous": ({"async_ratio": 0.0}, {2: "lost", 4: "evaluate"}),
    "filtered": (
        {"async_ratio": 2.0, "dynamic_sampling": True},
        {1: "joins", 2: "lost", 4: "leaves"},
    ),
    "exact": ({"async_ratio": 1.0, "selection": {"name": "exact_lag", "lag": 1}}, {2: "lost"}),
    "late": (
        {"async_ratio": 1.0, "late": "drop", "selection": {"name": "windowed", "window": 3}},
        {3: "lost"},
    ),
    "colocated": ({"async_ratio": 1.0, "sleeps": True}, {1: "lost", 4: "evaluate"}),
    "replay": ({"async_ratio": 1.0, "selection": {"name": "replay", "recent": 0.5}}, {}),
}


@pytest.mark.parametrize("name", FLOWS)
def test_a_whole_flow_is_the_one_on_its_page(
    name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    begun: list[Any] = []
    monkeypatch.setattr(controller_module, "log_package_to", lambda path: begun.append(path.name))
    for call in ("collect_rarely", "name_this_process"):
        monkeypatch.setattr(
            controller_module, call, lambda *given, call=call: begun.append((call, *given))
        )
    for call in ("join", "fact"):
        monkeypatch.setattr(
            controller_module.watch, call, lambda name, *_, call=call: begun.append((call, name))
        )
    monkeypatch.setattr(engine_task.Restarts, "delay_s", lambda self: 0.25)
    random.seed(0)
    texts: list[str] = []

    async def body() -> None:
        settings, fails = FLOWS[name]
        texts.append(await recorded(tmp_path, {**settings}, fails))
        await asyncio.sleep(0)

    run(body)
    assert begun == [
        *("controller.log", ("name_this_process", "controller"), ("join", "controller")),
        *(("fact", "flow"), ("collect_rarely",)),
    ]
    require_page(f"flow/{name}", texts[0] + logged(tmp_path))

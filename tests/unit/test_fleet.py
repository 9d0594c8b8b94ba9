"""Distribution of requests: they go to engines with room that hold the version they need, and
engines join and leave while the others work."""

from __future__ import annotations

import asyncio

import pytest

from megatron_async_rl.flow.engine_task import EngineSlot, PendingRequest
from megatron_async_rl.flow.errors import EngineFailed
from megatron_async_rl.flow.router import Lanes
from megatron_async_rl.samples import Sample
from megatron_async_rl.samples.types import Request
from tests.unit.fake_engine import FakeEngine, FakeLaunch, partial, specs
from tests.unit.fleet_harness import fleet_of, ids, never, requests
from tests.unit.flow_setup import PROMPTS, run, until


def test_requests_spread_over_the_engines_up_to_their_capacity_and_the_rest_waits() -> None:
    async def body() -> None:
        engines = [FakeEngine(lambda request: 0.01) for _ in range(3)]
        harness = await fleet_of(engines, capacity=4)
        harness.fleet.requests.put(requests(22), 0)
        assert harness.fleet.requests.waiting() == 10
        await until(lambda: len(harness.samples) == 22)
        assert [engine.maximum for engine in engines] == [4, 4, 4]
        assert [engine.groups()[:2] for engine in engines] == [[0, 3], [1, 4], [2, 5]]
        assert harness.fleet.requests.waiting() == 0
        await harness.close()

    run(body)


def test_what_is_asked_because_of_an_answer_goes_behind_what_has_been_waiting() -> None:
    async def body() -> None:
        first, waiting, late = requests(3)
        engine = FakeEngine()
        harness = await fleet_of([engine], capacity=1)

        def on_sample(sample: Sample, request: Request) -> None:
            harness.samples.append(sample)
            harness.fleet.requests.put([late] if request is first else [], 0)

        harness.on_sample = on_sample  # type: ignore[method-assign]
        harness.fleet.requests.put([first, waiting], 0)
        await until(lambda: len(harness.samples) == 3)
        assert ids(engine.asked) == ids([first, waiting, late])
        await harness.close()

    run(body)


def test_a_group_stays_with_the_engine_that_knows_its_prompt_unless_that_is_much_fuller() -> None:
    async def body() -> None:
        engines = [FakeEngine(never), FakeEngine(never)]
        harness = await fleet_of(engines, capacity=64)
        harness.fleet.requests.put(requests(4, size=6), 0)
        await asyncio.sleep(0)
        await until(lambda: sum(len(engine.asked) for engine in engines) == 24)
        assert [engine.groups() for engine in engines] == [[0, 2], [1, 3]]
        harness.fleet.requests.put(requests(1, size=30, first=9), 0)
        await until(lambda: sum(len(engine.asked) for engine in engines) == 54)
        loads = [len(engine.asked) for engine in engines]
        assert max(loads) - min(loads) <= 9, "affinity ends where an engine is 8 requests fuller"
        await harness.close()

    run(body)


def test_a_request_goes_only_to_engines_that_hold_its_version_or_a_newer_one() -> None:
    async def body() -> None:
        ahead, behind = FakeEngine(never), FakeEngine(lambda request: 0.01)
        gate = asyncio.Event()
        behind.before_update = lambda version: gate.wait() if version else None
        harness = await fleet_of([ahead, behind], capacity=4, max_paused=1.0)
        await harness.stage(1)
        await until(lambda: ahead.version == 1)
        harness.fleet.requests.put(requests(4), 1)
        harness.fleet.requests.put(requests(4, first=10), 0)
        await until(lambda: behind.asked and ahead.asked)
        assert min(behind.groups()) >= 10, "what was admitted under 0 it may take"
        assert all(version == 0 for version in behind.versions)
        assert 0 < len([group for group in ahead.groups() if group < 10]) < 4, (
            "the one that is ahead takes its share, not all"
        )
        gate.set()
        await until(lambda: min(behind.groups()) < 10)
        assert all(
            engine.versions[i] >= (0 if request.group >= 10 else 1)
            for engine in (ahead, behind)
            for i, request in enumerate(engine.asked)
        )
        await harness.close()

    run(body)


def test_an_engine_that_joins_loads_the_newest_version_and_takes_requests() -> None:
    async def body() -> None:
        harness = await fleet_of([FakeEngine(never)], capacity=2)
        await harness.stage(5)
        await until(lambda: harness.fleet.slots[0].version == 5)
        harness.fleet.requests.put(requests(4), 5)
        assert harness.fleet.requests.waiting() == 2
        assert harness.fleet.add(harness.fleet.slots[0].spec) == 1
        await until(lambda: len(harness.samples) == 2)
        joined = harness.launch.engines[1]
        assert (joined.updates, ids(joined.asked)) == ([5], ["2-0", "3-0"])
        await harness.stage(6)
        await until(lambda: joined.version == 6)
        await harness.close()

    run(body)


def test_an_engine_that_leaves_gives_its_requests_back_with_their_tokens() -> None:
    async def body() -> None:
        leaving, other = FakeEngine(never), FakeEngine(lambda request: 0.01)
        harness = await fleet_of([leaving, other], capacity=3)
        begun = Request(group=7, k=0, prompt=PROMPTS[0], prefix=partial(0, 0))
        harness.fleet.requests.put([begun, *requests(4)], 0)
        await until(lambda: len(leaving.asked) == 3)
        await harness.fleet.remove(0, 5.0)
        await until(lambda: len(harness.samples) == 5)
        assert sorted(leaving.aborts) == sorted(ids(leaving.asked))
        continued = {one.id: one.sample().versions.tolist() for one in harness.samples}
        assert continued["7-0"] == [0] * 6, "two tokens, two here, two there"
        assert leaving.killed
        assert "stop" in leaving.calls
        assert not harness.given_up
        await harness.stage(1)
        await until(lambda: other.version == 1)
        assert leaving.updates == [0], "nothing is delivered to it any more"
        with pytest.raises(ValueError, match="engine-0 is not there"):
            await harness.fleet.remove(0, 5.0)
        with pytest.raises(ValueError, match="engine-1 is the only engine that serves"):
            await harness.fleet.remove(1, 5.0)
        await harness.close()

    run(body)


def test_a_fleet_grows_and_shrinks_to_the_engines_that_are_asked_for() -> None:
    async def body() -> None:
        harness = await fleet_of([FakeEngine(never), FakeEngine(never)], capacity=8)
        harness.launch.make = lambda index: FakeEngine(never)
        await harness.fleet.resize(3, 5.0)
        await until(lambda: harness.serving() == [0, 1, 2])
        assert harness.notes == [
            "engines requested: 3, present: 2; to join: engine-2",
            "engine-2 has joined, with the weights of version 0, verified",
        ]
        harness.fleet.requests.put(requests(6), 0)
        await harness.fleet.resize(1, 5.0)
        assert harness.serving() == [0]
        assert len(harness.fleet.slots[0].held) == 6
        assert harness.notes[2:] == [
            "engines requested: 1, present: 3; to leave: engine-2, engine-1",
            "engine-2 has left",
            "engine-1 has left",
        ]
        await harness.fleet.resize(1, 5.0)
        assert harness.notes[5:] == ["engines requested: 1, present: 1"]
        await harness.close()

    run(body)


def test_two_engines_that_leave_at_once_do_not_leave_none() -> None:
    async def body() -> None:
        engines = [FakeEngine(never), FakeEngine(never)]
        harness = await fleet_of(engines, capacity=2)
        engines[0].deaf = True
        harness.fleet.requests.put(requests(2), 0)
        await until(lambda: all(engine.asked for engine in engines))
        leaving = asyncio.create_task(harness.fleet.remove(0, 5.0))
        await until(lambda: engines[0].aborts)
        with pytest.raises(ValueError, match="engine-1 is the only engine that serves"):
            await harness.fleet.remove(1, 5.0)
        raises = harness.fleet.tasks[0].fail
        raises(engines[0], "it ended")
        await leaving
        await until(lambda: len(engines[1].asked) == 2)
        await harness.close()

    run(body)


def test_an_engine_that_does_not_give_its_requests_back_leaves_all_the_same() -> None:
    async def body() -> None:
        deaf, other = FakeEngine(never), FakeEngine()
        deaf.deaf = True
        harness = await fleet_of([deaf, other], capacity=2)
        harness.fleet.requests.put(requests(3), 0)
        await until(lambda: len(deaf.asked) == 2)
        await harness.fleet.remove(0, 0.05)
        await until(lambda: len(harness.samples) == 3)
        assert deaf.killed
        await harness.close()

    run(body)


def test_held_out_requests_go_to_engines_of_their_own_that_hold_the_version() -> None:
    async def body() -> None:
        engine, evaluator = FakeEngine(), FakeEngine()
        harness = await fleet_of([engine, evaluator], evaluators=1)
        asking = asyncio.create_task(
            harness.fleet.requests.run([Request(group=-1, k=0, prompt=PROMPTS[0])], 0)
        )
        harness.fleet.requests.put(requests(2), 0)
        await until(lambda: len(harness.samples) == 2)
        assert not asking.done(), "the evaluation engine has no weights yet"
        harness.fleet.prepare_evaluation(0)
        assert [sample.id for sample in await asking] == ["-1-0"]
        assert engine.groups() == [0, 1]
        assert len(harness.samples) == 2, "nothing held out is handed on for training"
        await harness.close()

    run(body)


def test_what_an_abandoned_evaluation_left_running_answers_no_other_evaluation() -> None:
    async def body() -> None:
        engine = FakeEngine(never)
        harness = await fleet_of([engine])
        (asked,) = (Request(group=-1, k=0, prompt=PROMPTS[0]),)
        abandoned = asyncio.create_task(harness.fleet.requests.run([asked], 0))
        await until(lambda: engine.asked)
        engine.deaf = True
        abandoned.cancel()
        await until(lambda: engine.aborts)

        await harness.stage(1)
        await until(lambda: harness.fleet.slots[0].version == 1)
        again = asyncio.create_task(harness.fleet.requests.run([asked], 1))
        await asyncio.sleep(0)
        assert len(engine.asked) == 1, "the engine still works on one of this id"
        engine.delay = lambda request: 0.0
        late = engine.sample(asked)
        engine._running.pop(asked.id).cancel()
        engine.say(late)
        (sample,) = await again
        assert sample.sample().versions.tolist() == [1, 1]
        await harness.close()

    run(body)


def test_an_evaluation_ends_at_once_where_its_engine_was_lost_just_before_it_was_asked() -> None:
    async def body() -> None:
        launch = FakeLaunch([FakeEngine(), FakeEngine()])
        harness = await fleet_of(launch, evaluators=1)
        harness.fleet.prepare_evaluation(0)
        harness.fleet.tasks[1].fail(launch.engines[1], "it ended")
        await until(lambda: harness.lost)
        with pytest.raises(EngineFailed, match="engine 1: it ended"):
            await harness.fleet.requests.run([Request(group=-1, k=0, prompt=PROMPTS[0])], 0)
        await harness.close()

    run(body)


def test_the_version_an_evaluation_engine_holds_already_holds_up_no_other() -> None:
    async def body() -> None:
        harness = await fleet_of([FakeEngine(), FakeEngine()], evaluators=1)
        for _ in range(2):
            harness.fleet.prepare_evaluation(0)
            await until(lambda: harness.fleet.slots[1].version == 0)
        await harness.stage(1)
        await harness.fleet.updates.until_released(1)
        await harness.close()

    run(body)


def test_without_engines_of_their_own_held_out_requests_come_first_and_can_be_taken_back() -> None:
    async def body() -> None:
        engine = FakeEngine(lambda request: 0.02 if request.group == 0 else 60.0)
        harness = await fleet_of([engine], capacity=2)
        harness.fleet.requests.put(requests(3), 0)
        asked = [Request(group=-1, k=k, prompt=PROMPTS[0]) for k in range(2)]
        asking = asyncio.create_task(harness.fleet.requests.run(asked, 0))
        await until(lambda: len(engine.asked) == 3)
        assert ids(engine.asked) == ["0-0", "1-0", "-1-0"]
        asking.cancel()
        await until(lambda: "-1-0" in engine.aborts)
        await until(lambda: "2-0" in ids(engine.asked))
        assert "-1-1" not in ids(engine.asked), "it was still waiting and is forgotten"
        assert not harness.aborted
        await harness.close()

    run(body)


def test_while_engines_load_their_share_of_all_requests_is_left_for_them() -> None:
    lanes = Lanes(8, separate=False)
    slots = [EngineSlot(spec) for spec in specs(2)]
    for slot, version in zip(slots, (1, 0), strict=True):
        slot.engine, slot.serving, slot.version = FakeEngine(), True, version
    pending = [PendingRequest(request, 1) for request in requests(6)]
    slots[0].held.update({one.request.id: one for one in pending[:2]})
    for one in pending[2:]:
        lanes.add(one)
    lanes.place(slots)
    # Half of the two requests that the first engine holds and of the four that waited.
    assert [len(slot.held) for slot in slots] == [3, 0]
    assert lanes.waiting() == 3
    slots[1].version = 1
    lanes.place(slots)
    assert [len(slot.held) for slot in slots] == [3, 3]

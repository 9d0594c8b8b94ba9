"""Engines that raise, wedge, fall silent or answer what they were not asked: every request is
answered once nevertheless, or given up before it costs a third engine."""

from __future__ import annotations

import asyncio
import random
import re
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from megatron_async_rl.flow import controller as controller_module
from megatron_async_rl.flow import engine_task
from megatron_async_rl.flow.engine_task import PendingRequest
from megatron_async_rl.flow.errors import EngineFailed, RequestGivenUp
from megatron_async_rl.samples import Prompt
from megatron_async_rl.samples.types import Aborted, Request
from megatron_async_rl.watchdog.watch import ProcessDied
from tests.cases import looped
from tests.unit.fake_engine import FakeEngine, FakeLaunch, manifest, partial
from tests.unit.fleet_harness import FleetHarness, fleet_of, ids, never, requests
from tests.unit.flow_setup import (
    PROMPTS,
    Trained,
    begin,
    flow,
    groups_of,
    run,
    samples_in,
    stage,
    until,
)


@pytest.fixture(autouse=True)
def quick_restarts(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(engine_task, "FIRST_DELAY_S", 0.001)


def raises(engine: FakeEngine) -> None:
    engine.fail(RuntimeError("out of memory"))


def wedges(engine: FakeEngine) -> None:
    engine.wedged = True
    engine._news.set()


def falls_silent(engine: FakeEngine) -> None:
    engine.silent_s = 99.0


def answers_another_question(engine: FakeEngine) -> None:
    other = Prompt(id="other", text="", token_ids=(1,))
    engine.say(replace(engine.sample(engine.asked[0]), prompt=other))


def answers_what_nobody_asked(engine: FakeEngine) -> None:
    engine.say(replace(engine.sample(engine.asked[0]), id="77-0"))


def has_its_call_cancelled(engine: FakeEngine) -> None:
    engine.fail(asyncio.CancelledError())


def aborts_what_nobody_aborted(engine: FakeEngine) -> None:
    engine.say(Aborted(id=engine.asked[0].id, partial=None))


@looped(
    ("break_it", "reason"),
    [
        (raises, "RuntimeError: out of memory"),
        (wedges, r"it did not answer for 2 s \(rollout.unresponsive_s\)"),
        (has_its_call_cancelled, "a call to it was cancelled"),
        (falls_silent, "its vLLM process did not answer for 99 s"),
        (answers_another_question, "it answered 0-0, prompt other, which was not requested"),
        (answers_what_nobody_asked, "it answered 77-0, prompt p0, which was not requested"),
        (aborts_what_nobody_aborted, "it aborted 0-0, which was not requested"),
    ],
)
def test_what_a_lost_engine_had_not_answered_is_asked_again_elsewhere_and_answered_once(
    break_it: Callable[[FakeEngine], None], reason: str
) -> None:
    async def body() -> None:
        broken, other = FakeEngine(never), FakeEngine(lambda request: 0.01)
        harness = await fleet_of(
            [broken, other], capacity=3, unresponsive_s=2.0, restarts_per_hour=0
        )
        harness.fleet.requests.put(requests(8), 0)
        await until(lambda: len(broken.asked) == 3)
        held = ids(broken.asked)
        break_it(broken)
        await until(lambda: len(harness.samples) == 8)
        assert Counter(sample.id for sample in harness.samples) == Counter(
            f"{i}-0" for i in range(8)
        )
        assert set(held) <= set(ids(other.asked))
        ((index, why),) = harness.lost
        assert index == 0
        assert re.search(reason, why)
        assert broken.killed
        assert not harness.errors
        await harness.close()

    run(body)


def test_an_engine_that_refuses_requests_is_lost_and_they_go_elsewhere() -> None:
    async def body() -> None:
        refusing, other = FakeEngine(), FakeEngine()
        refusing.refuses = MemoryError("no room")
        harness = await fleet_of([refusing, other], restarts_per_hour=0)
        harness.fleet.requests.put(requests(6), 0)
        await until(lambda: len(harness.samples) == 6)
        assert harness.lost == [(0, "it failed to accept requests: MemoryError: no room")]
        await harness.close()

    run(body)


def test_a_partial_response_survives_the_engine_that_was_continuing_it() -> None:
    async def body() -> None:
        broken, other = FakeEngine(never), FakeEngine()
        harness = await fleet_of([broken, other], capacity=1, restarts_per_hour=0)
        await harness.stage(6)
        await until(lambda: other.version == 6 and broken.version == 6)
        continued = Request(group=0, k=0, prompt=PROMPTS[0], prefix=partial(3, 4))
        harness.fleet.requests.put([continued], 3)
        await until(lambda: broken.asked)
        raises(broken)
        await until(lambda: harness.samples)
        assert harness.samples[0].sample().versions.tolist() == [3, 4, 6, 6]
        await harness.close()

    run(body)


def test_a_restarted_engine_is_not_blamed_for_what_its_predecessor_fails_at_later() -> None:
    async def body() -> None:
        old, gate = FakeEngine(never), asyncio.Event()

        async def slow_submit(requests: object) -> None:
            await gate.wait()
            raise RuntimeError("too late")

        launch = FakeLaunch([old], again=lambda index: FakeEngine())
        harness = await fleet_of(launch, capacity=2)
        harness.fleet.requests.put(requests(1), 0)
        await until(lambda: old.asked)
        old.submit = slow_submit  # type: ignore[method-assign]
        harness.fleet.requests.put(requests(1, first=3), 0)
        raises(old)
        await until(lambda: harness.fleet.slots[0].serving and launch.engines[0] is not old)
        gate.set()
        await until(lambda: len(harness.samples) == 2)
        await asyncio.sleep(0)
        slot = harness.fleet.slots[0]
        assert (slot.serving, slot.restarts) == (True, 1)
        assert "engine-0 is back, with the weights of version 0, verified" in harness.notes
        await harness.close()

    run(body)


def test_a_request_that_two_engines_were_lost_with_is_given_up_before_a_third() -> None:
    async def body() -> None:
        engines = [FakeEngine(never) for _ in range(3)]
        harness = await fleet_of(engines, capacity=8, restarts_per_hour=0)
        harness.fleet.requests.put(requests(1), 0)
        for lost in range(2):
            await until(lambda lost=lost: engines[lost].asked)
            raises(engines[lost])
            await until(lambda lost=lost: harness.fleet.slots[lost].dead)
        await until(lambda: harness.given_up)
        ((request, reason),) = harness.given_up
        assert request == "0-0"
        assert "2 engines were lost while they had it" in reason
        assert not engines[2].asked
        assert harness.serving() == [2]
        await harness.close()

    run(body)


def losses(harness: FleetHarness) -> dict[str, int]:
    every = [asked for slot in harness.fleet.slots for asked in slot.held.values()]
    return {asked.request.id: asked.losses for asked in every}


def leaves_with_its_machine(engine: FakeEngine) -> None:
    engine.machine_gone = True
    raises(engine)


def is_preempted(engine: FakeEngine) -> None:
    engine.fail(ProcessDied("the autoscaler took it", outside=True))


@pytest.mark.parametrize(
    "lose", [leaves_with_its_machine, is_preempted, answers_what_nobody_asked, falls_silent, raises]
)
def test_a_long_response_outlives_any_number_of_engines_that_it_did_not_end(
    lose: Callable[[FakeEngine], None],
) -> None:
    """A loss that has another reason does not count. Where the reason may be a request, the long
    response is tried alone, and then it is known that it was not."""

    async def body() -> None:
        launch = FakeLaunch([FakeEngine(never)], again=lambda index: FakeEngine(never))
        harness = await fleet_of(launch, capacity=4, restarts_per_hour=1000, unresponsive_s=2.0)
        harness.fleet.requests.put(requests(3), 0)
        for lost in range(6):
            engine = launch.engines[0]
            await until(lambda: launch.engines[0].asked)
            if lose in (raises, falls_silent) and lost == 2:
                break
            lose(engine)
            await until(lambda engine=engine: launch.engines[0] is not engine)
        assert harness.given_up == []
        if lose not in (raises, falls_silent):
            assert losses(harness) == {"0-0": 0, "1-0": 0, "2-0": 0}
        engine = launch.engines[0]
        engine.delay = lambda request: 0.0
        for one in [*engine._running]:
            engine._running.pop(one).cancel()
            await engine.submit([next(r for r in engine.asked if r.id == one)])
        await until(lambda: len(harness.samples) == 3)
        await harness.close()

    run(body)


@pytest.mark.parametrize(("engines", "poison"), [(1, ["3-0"]), (3, ["3-0"]), (3, ["2-0", "5-0"])])
def test_of_many_requests_those_that_end_engines_are_given_up_and_no_other(
    engines: int, poison: list[str]
) -> None:
    async def body() -> None:
        def made(index: int) -> FakeEngine:
            engine = FakeEngine(lambda request: 0.05)
            submit = engine.submit

            async def poisoned(asked: Sequence[Request]) -> None:
                await submit(asked)
                alone.update(r.id for r in asked if len(engine._running) == 1)
                if any(r.id in poison for r in asked):
                    asyncio.get_running_loop().call_later(0.01, raises, engine)

            engine.submit = poisoned  # type: ignore[method-assign]
            return engine

        alone = set[str]()
        launch = FakeLaunch([made(index) for index in range(engines)], again=made)
        harness = await fleet_of(launch, capacity=16, restarts_per_hour=1000)
        harness.fleet.requests.put(requests(8), 0)
        await until(lambda: len(harness.samples) + len(harness.given_up) == 8)
        assert sorted(one for one, _ in harness.given_up) == poison
        assert set(poison) <= alone
        assert all("the last one while it had nothing else" in why for _, why in harness.given_up)
        assert not harness.errors
        await harness.close()

    run(body)


def test_while_a_suspect_waits_one_engine_empties_itself_and_the_others_go_on() -> None:
    async def body() -> None:
        slow = FakeEngine(lambda request: 1.0)
        launch = FakeLaunch([slow, FakeEngine(lambda request: 1.0)])
        harness = await fleet_of(launch, capacity=3)
        suspect = PendingRequest(requests(1)[0], 0, losses=2)
        harness.fleet.requests.put(requests(6, first=1), 0)
        harness.fleet.requests._lanes.add(suspect)
        harness.fleet.requests.put(requests(6, first=7), 0)
        await until(lambda: suspect.request.id in {*losses(harness)})
        (ward,) = [slot for slot in harness.fleet.slots if suspect.request.id in slot.held]
        assert [*ward.held] == ["0-0"]
        other = harness.fleet.slots[1 - ward.index]
        assert len(other.held) == 3, "it has taken more meanwhile"
        await until(lambda: len(harness.samples) == 13)
        assert max(len(one.asked) for one in launch.engines) >= 9
        await harness.close()

    run(body)


def test_with_a_request_that_is_given_up_the_suspects_of_its_group_go_untried() -> None:
    async def body() -> None:
        launch = FakeLaunch([FakeEngine(never)], again=lambda index: FakeEngine(never))
        harness = await fleet_of(launch, capacity=8, restarts_per_hour=1000)
        harness.fleet.requests.put(requests(1, size=4), 0)
        for held in (4, 4, 1):
            engine = launch.engines[0]
            await until(lambda held=held: len(launch.engines[0].asked) == held)
            raises(engine)
            await until(lambda engine=engine: launch.engines[0] is not engine)
        await until(lambda: len(harness.given_up) == 4)
        assert harness.fleet.requests.waiting() == 0
        await harness.close()

    run(body)


def test_an_evaluation_of_which_a_request_is_given_up_ends_with_its_reason() -> None:
    async def body() -> None:
        engines = [FakeEngine(never) for _ in range(3)]
        harness = await fleet_of(engines, restarts_per_hour=0)
        asked = [Request(group=-1, k=0, prompt=PROMPTS[0])]
        asking = asyncio.create_task(harness.fleet.requests.run(asked, 0))
        for lost in range(2):
            await until(lambda lost=lost: engines[lost].asked)
            raises(engines[lost])
        with pytest.raises(RequestGivenUp, match="2 engines were lost"):
            await asking
        await harness.close()

    run(body)


def test_the_group_of_a_request_that_was_given_up_is_dropped_and_replaced() -> None:
    async def body() -> None:
        bad = FakeEngine(lambda request: 60.0 if request.group == 1 else 0.0)
        launch = FakeLaunch([bad], again=lambda index: FakeEngine(bad.delay))
        controller = await begin(launch, flow(3, 0.0))
        for held in (2, 2, 1):  # the last time it is alone
            engine = launch.engines[0]
            await until(lambda held=held: len(controller._fleet.slots[0].held) == held)
            raises(engine)
            await until(lambda engine=engine: launch.engines[0] is not engine)
        handout = await controller.next_batch(0)
        assert handout is not None
        assert [group.index for group in groups_of(handout.batch)] == [0, 2, 3]
        stats = controller.stats()
        assert (stats["dropped_failed"], stats["given_up"], stats["open"]) == (1, 2, 0)
        assert stats["asked"] == stats["samples"] + stats["given_up"]
        await controller.close()

    run(body)


def test_an_idle_engine_is_not_taken_for_dead_however_short_the_patience() -> None:
    async def body() -> None:
        engine = FakeEngine()
        reports = []
        report = engine.report

        async def counted(timeout_s: float) -> object:
            reports.append(timeout_s)
            return await report(timeout_s)

        engine.report = counted  # type: ignore[method-assign]
        harness = await fleet_of([engine], unresponsive_s=2.0)
        await until(lambda: len(reports) > 2)
        assert max(reports) == 0.5, "it is asked again within a quarter of the patience"
        assert not harness.lost
        await harness.close()

    run(body)


def test_a_listener_that_breaks_ends_the_run_and_the_engine_is_not_blamed() -> None:
    async def body() -> None:
        harness = await fleet_of([FakeEngine()])
        harness.on_sample = lambda sample, request: 1 / 0  # type: ignore[assignment, method-assign, return-value]
        harness.fleet.requests.put(requests(1), 0)
        await until(lambda: harness.errors)
        assert isinstance(harness.errors[0], ZeroDivisionError)
        assert not harness.lost
        await harness.close()

    run(body)


@settings(max_examples=12, deadline=None)
@given(seed=st.integers(0, 2**32), ratio=st.sampled_from([0.0, 1.0, 2.5]))
def test_a_run_loses_and_doubles_nothing_while_engines_die_and_come_back(
    seed: int, ratio: float
) -> None:
    async def body() -> None:
        chance = random.Random(seed)

        def made(index: int) -> FakeEngine:
            return FakeEngine(lambda request: chance.choice([0.0, 0.001, 0.003]))

        launch = FakeLaunch([made(index) for index in range(3)], again=made)
        controller = await begin(
            launch, flow(3, ratio), capacity=4, unresponsive_s=0.2, restarts_per_hour=1000
        )
        trained: list[Trained] = []
        for version in range(10):
            if chance.random() < 0.6:
                chance.choice((raises, wedges, falls_silent))(launch.engines[chance.randrange(3)])
            handout = await controller.next_batch(version)
            assert handout is not None
            trained += samples_in(handout.batch)
            await stage(controller, version + 1)
        assert len(trained) == len({sample.id for sample in trained}) == 60
        stats = controller.stats()
        assert stats["asked"] == stats["samples"] + stats["given_up"] + stats["open"]
        await controller.close()

    run(body)


@settings(max_examples=15, deadline=None)
@given(
    seed=st.integers(0, 2**32),
    setting=st.sampled_from(
        [
            {"async_ratio": 0.0},
            {"async_ratio": 1.5},
            {"async_ratio": 2.0, "selection": {"name": "exact_lag", "lag": 2}},
            {"async_ratio": 1.0, "selection": {"name": "windowed", "window": 1.0}},
            {"async_ratio": 0.5, "selection": "windowed", "oversample": 0.5, "late": "drop"},
        ]
    ),
    colocated=st.booleans(),
)
def test_the_bound_holds_while_each_engine_loads_in_its_own_time_and_engines_come_and_go(
    seed: int, setting: dict[str, Any], colocated: bool
) -> None:
    """The trainer waits only until no older version is read: engines lag behind it and each other,
    are lost with older or newer weights than the others', join and leave. What was admitted under a
    version starts under no older one, tokens in parts included."""

    async def body() -> None:
        chance = random.Random(seed)

        async def load_slowly(version: int) -> None:
            await asyncio.sleep(chance.choice([0.0, 0.0, 0.002, 0.01]))

        def made(index: int) -> FakeEngine:
            engine = FakeEngine(lambda request: chance.choice([0.0, 0.001, 0.004]))
            engine.before_update = load_slowly
            return engine

        def left() -> list[int]:
            return [slot.index for slot in controller._fleet.slots if slot.serving]

        launch = FakeLaunch([made(index) for index in range(3)], again=made)
        launch.make = made
        controller = await begin(
            launch,
            flow(2, **setting),
            capacity=3,
            max_paused=chance.choice([0.0, 0.5, 1.0]),
            restarts_per_hour=1000,
        )
        admitted: dict[int, int | None] = {}
        admit = controller._scheduler.admit

        def noted(source: Callable[[], Prompt]) -> list[Request]:
            requests = admit(source)
            admitted[requests[0].group] = controller._scheduler.version
            return requests

        by_begin = controller._scheduler.next_index  # these under version 0
        controller._scheduler.admit = noted  # type: ignore[method-assign]
        removing = set[asyncio.Task[None]]()
        trained: list[str] = []
        for version in range(12):
            what = chance.choice(["lose", "lose", "join", "leave", "nothing"])
            if what == "lose" and left():
                raises(launch.engines[chance.choice(left())])
            elif what == "join" and len(left()) < 5:
                await controller.add_engine()
            elif what == "leave" and len(left()) > 1:
                removing.add(asyncio.create_task(controller.remove_engine(chance.choice(left()))))
            handout = await controller.next_batch(version)
            assert handout is not None
            if colocated:
                await controller.sleep()
            for group in groups_of(handout.batch):
                assert group.index in admitted or group.index < by_begin
                assert all(s.start_version >= admitted.get(group.index, 0) for s in group.samples)
                trained += [sample.id for sample in group.samples]
            await controller.staged(version + 1, manifest(version + 1))
        assert len(trained) == len(set(trained)) == 48
        refused = [one for one in await asyncio.gather(*removing, return_exceptions=True) if one]
        assert all(isinstance(one, ValueError) for one in refused)
        stats = controller.stats()
        assert stats["asked"] == stats["samples"] + stats["given_up"] + stats["open"]
        held = [one for slot in controller._fleet.slots for one in slot.held]
        assert len(held) == len(set(held)), "a request is with one engine at a time"
        assert len(held) + controller._fleet.requests.waiting() == stats["open"]
        await controller.close()

    run(body)


def test_a_run_ends_with_its_last_engine_and_reports_the_end_of_each() -> None:
    async def body() -> None:
        engines = [FakeEngine(never), FakeEngine(never)]
        controller = await begin(engines, flow(), restarts_per_hour=0)
        for index, error in enumerate((RuntimeError("out of memory"), OSError("no GPU"))):
            engines[index].fail(error)
            await until(lambda index=index: controller._fleet.slots[index].dead)
        with pytest.raises(
            EngineFailed, match="engine 0: RuntimeError: out of memory; engine 1: OSError: no GPU"
        ):
            await controller.next_batch(0)
        with pytest.raises(EngineFailed):
            await controller.evaluate(0)
        await controller.close()

    run(body)


def test_while_the_only_engine_starts_again_no_batch_is_late(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """A start has a limit of its own, which may be longer than that of a response."""
    monkeypatch.setattr(controller_module, "STOP_POLL_S", 0.01)

    async def body() -> None:
        launch = FakeLaunch([FakeEngine(never)])
        controller = await begin(launch, flow(), timeout_s=0.05)
        controller._fleet.tasks[0]._launch = lambda spec, again: asyncio.Event().wait()  # type: ignore[assignment, return-value]
        looked: list[None] = []
        monkeypatch.setattr(controller, "_stop_requested", lambda: looked.append(None))
        raises(launch.engines[0])
        await until(lambda: not controller._fleet.slots[0].serving)
        waiting = asyncio.create_task(controller.next_batch(0))
        await until(lambda: len(looked) > 20 or waiting.done())
        assert not waiting.done(), "20 waits of 0.01 s are more than 0.05 s"
        waiting.cancel()
        await controller.close()

    run(body)


def test_a_run_continues_with_fewer_engines() -> None:
    async def body() -> None:
        engines = [FakeEngine(never), FakeEngine()]
        controller = await begin(engines, flow(), restarts_per_hour=0)
        engines[0].fail(RuntimeError("out of memory"))
        handout = await controller.next_batch(0)
        assert handout is not None
        assert len(groups_of(handout.batch)) == 3
        assert [engine.alive for engine in controller.stats()["engines"]] == [False, True]
        await controller.close()

    run(body)


def test_a_scheduler_that_breaks_ends_the_wait_for_the_next_batch() -> None:
    async def body() -> None:
        controller = await begin([FakeEngine(lambda request: 0.01)], flow())
        controller._scheduler.on_sample = lambda sample, group: 1 / 0  # type: ignore[method-assign, assignment, return-value]
        with pytest.raises(ZeroDivisionError):
            await controller.next_batch(0)
        await controller.close()

    run(body)

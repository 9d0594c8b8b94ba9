"""The life of an engine: it starts, loads what is staged, proves it, serves, takes newer versions
in its turn, and starts again after a failure."""

from __future__ import annotations

import asyncio
from collections import Counter
from dataclasses import dataclass
from functools import partial

import pytest
from hypothesis import given
from hypothesis import strategies as st

from megatron_async_rl.flow import engine_task
from megatron_async_rl.flow.controller import Controller
from megatron_async_rl.flow.engine_task import HOUR_S, LONGEST_DELAY_S, Restarts
from megatron_async_rl.flow.updates import WeightUpdates
from megatron_async_rl.rollout.engine_process import EngineStartError
from megatron_async_rl.rollout.spec import HERE
from megatron_async_rl.weights.manifest import WeightMismatch
from tests.unit.fake_engine import FakeEngine, FakeLaunch, manifest
from tests.unit.fleet_harness import fleet_of, never, requests
from tests.unit.flow_setup import begin, controller_of, flow, holds, run, stage, until


@pytest.fixture(autouse=True)
def quick_restarts(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(engine_task, "FIRST_DELAY_S", 0.001)


# Starts and restarts


def test_an_engine_that_cannot_start_at_first_ends_the_run_with_its_error() -> None:
    async def body() -> None:
        launch = FakeLaunch([FakeEngine(), FakeEngine()], failures=[EngineStartError("no memory")])
        controller = controller_of(launch, flow())
        with pytest.raises(EngineStartError, match="no memory"):
            await controller.start()
        await controller.close()

    run(body)


def test_a_restart_that_fails_is_tried_again_and_each_keeps_the_log_of_the_one_before() -> None:
    async def body() -> None:
        launch = FakeLaunch([FakeEngine(), FakeEngine()])
        harness = await fleet_of(launch, restarts_per_hour=3)
        launch.failures = [EngineStartError("no memory"), OSError("no GPU")]
        launch.engines[0].fail(RuntimeError("out of memory"))
        await until(lambda: len(harness.notes) == 4)
        assert launch.starts[2:] == [(0, True)] * 3
        assert [text.split("; ")[-1] for text in harness.notes[:3]] == [
            "restart 1 of 3 within an hour. Why: RuntimeError: out of memory",
            "restart 2 of 3 within an hour. Why: no memory",
            "restart 3 of 3 within an hour. Why: no GPU",
        ]
        assert harness.notes[3] == "engine-0 is back, with the weights of version 0, verified"
        await harness.close()

    run(body)


def test_after_its_restarts_within_an_hour_an_engine_is_reported_dead() -> None:
    async def body() -> None:
        launch = FakeLaunch([FakeEngine(), FakeEngine()])
        harness = await fleet_of(launch, restarts_per_hour=1)
        for starts in (3, 3):
            await until(lambda: harness.fleet.slots[0].serving)
            launch.engines[0].fail(RuntimeError("out of memory"))
            await until(lambda starts=starts: len(launch.starts) >= starts)
        await until(lambda: harness.fleet.slots[0].dead)
        assert harness.notes[-1] == (
            "engine-0 is lost permanently; 1 of 2 engines are left. Why: RuntimeError:"
            " out of memory"
        )
        assert not harness.errors
        await harness.close()

    run(body)


def test_the_limit_is_of_an_hour_and_not_of_the_run() -> None:
    now = 0.0
    restarts = Restarts(2, now=lambda: now)
    assert [restarts.begin() for _ in range(3)] == [1, 2, 0]
    now = HOUR_S - 1
    assert restarts.begin() == 0
    now = HOUR_S
    assert [restarts.begin() for _ in range(3)] == [1, 2, 0]


@given(chance=st.floats(0.0, 1.0))
def test_the_delay_before_a_restart_grows_is_random_and_has_an_end(chance: float) -> None:
    restarts = Restarts(100, now=lambda: 0.0, chance=lambda: chance)
    delays = []
    for _ in range(20):
        restarts.begin()
        delays.append(restarts.delay_s())
    assert delays == sorted(delays)
    assert delays[3] == pytest.approx(8 * delays[0])
    assert delays[-1] == pytest.approx(LONGEST_DELAY_S * (0.5 + chance)) or delays[-1] < 60


# Weights


def test_an_engine_serves_only_after_it_has_verified_the_newest_version() -> None:
    async def body() -> None:
        engine, gate = FakeEngine(), asyncio.Event()
        engine.before_update = lambda version: gate.wait()
        controller = controller_of([engine], flow())
        await controller.start()
        staging = asyncio.create_task(controller.staged(4, manifest(4)))
        await until(lambda: engine.calls)
        assert not engine.asked
        gate.set()
        await staging
        await until(lambda: engine.asked)
        assert set(engine.versions) == {4}
        await controller.close()

    run(body)


def test_a_restarted_engine_gets_what_is_newest_by_then() -> None:
    async def body() -> None:
        launch = FakeLaunch([FakeEngine(), FakeEngine()])
        harness = await fleet_of(launch)
        gate = asyncio.Event()
        start = launch.__call__

        async def slow(spec: object, *, again: bool = False) -> FakeEngine:
            await gate.wait()
            return await start(spec, again=again)  # type: ignore[arg-type]

        harness.fleet.tasks[0]._launch = slow  # type: ignore[assignment]
        launch.engines[0].fail(RuntimeError("out of memory"))
        await until(lambda: not harness.fleet.slots[0].serving)
        for version in (1, 2):
            await harness.stage(version)
            await until(lambda version=version: harness.fleet.slots[1].version == version)
        gate.set()
        await until(lambda: harness.fleet.slots[0].serving)
        assert launch.engines[0].updates == [2]
        await harness.close()

    run(body)


@pytest.mark.parametrize(
    ("share", "count", "most"), [(0.5, 4, 2), (0.5, 3, 1), (0.0, 2, 1), (1.0, 3, 3)]
)
def test_no_more_than_a_share_of_the_busy_engines_stands_still_at_a_time(
    share: float, count: int, most: int
) -> None:
    async def body() -> None:
        engines = [FakeEngine(never) for _ in range(count)]
        loading: set[int] = set()
        seen: Counter[int] = Counter()

        def gate(index: int):  # type: ignore[no-untyped-def]
            async def wait(version: int) -> None:
                loading.add(index)
                seen[len(loading)] += 1
                await asyncio.sleep(0.01)
                loading.discard(index)

            return lambda version: wait(version) if version else None

        for index, engine in enumerate(engines):
            engine.before_update = gate(index)
        harness = await fleet_of(engines, max_paused=share)
        harness.fleet.requests.put(requests(count), 0)
        await until(lambda: all(engine.asked for engine in engines))
        await harness.stage(1)
        await until(lambda: all(engine.version == 1 for engine in engines))
        assert max(seen) == most
        await harness.close()

    run(body)


def test_engines_without_work_load_together_whatever_the_share() -> None:
    async def body() -> None:
        engines = [FakeEngine() for _ in range(3)]
        all_there = asyncio.Event()
        arrived: list[int] = []

        async def meet() -> None:
            arrived.append(1)
            if len(arrived) == 3:
                all_there.set()
            await all_there.wait()

        for engine in engines:
            engine.before_update = lambda version: meet() if version else None
        harness = await fleet_of(engines, max_paused=0.0)
        await harness.stage(1)
        await until(lambda: all(engine.version == 1 for engine in engines))
        await harness.close()

    run(body)


def test_a_slow_engine_holds_up_neither_the_others_nor_admission() -> None:
    async def body() -> None:
        quick, slow = FakeEngine(lambda request: 0.001), FakeEngine()
        gate = asyncio.Event()
        controller = await begin([quick, slow], flow(2, 1.0), max_paused=1.0)
        slow.before_update = lambda version: gate.wait()
        for version in range(1):
            assert await controller.next_batch(version) is not None
            pending = asyncio.create_task(controller.staged(version + 1, manifest(version + 1)))
            await until(lambda version=version: quick.version == version + 1)
        assert await controller.next_batch(1) is not None
        assert await controller.next_batch(2) is not None, "by the quick one alone"
        assert pending.done(), "the slow one reads version 1, and nobody an older one"
        late = asyncio.create_task(controller.staged(2, manifest(2)))
        await until(lambda: quick.version == 2)
        assert not late.done(), "version 1 is still being read"
        gate.set()
        await late
        await until(lambda: slow.version == 2)
        await controller.close()

    run(body)


def test_a_version_counts_as_released_only_when_that_version_is_whatever_was_before() -> None:
    """The wait is for a version number: reaching an older one does not imply a newer one, in any
    order of events."""

    async def body() -> None:
        engine = FakeEngine()
        gates = {version: asyncio.Event() for version in range(1, 9)}
        controller = await begin([engine], flow())
        engine.before_update = lambda version: gates[version].wait()
        for version in range(1, 9):
            released = asyncio.create_task(controller.staged(version, manifest(version)))
            await until(lambda version=version: f"update {version}" in engine.calls)
            await released
            later = asyncio.create_task(controller._fleet.updates.until_released(version + 1))
            for _ in range(20):
                await asyncio.sleep(0)
            assert not later.done(), f"version {version} is being read"
            assert not holds(controller, version)
            gates[version].set()
            await later
            await until(lambda version=version: holds(controller, version))
        await controller.close()

    run(body)


async def staged_and_taken(controller: Controller) -> None:
    """Rank 0 receives what went wrong at one of the two."""
    await controller.staged(1, manifest(1))
    await controller.next_batch(0)


def test_a_wait_for_a_version_reports_its_mismatch_and_not_its_release() -> None:
    """Else rank 0 writes the next version where another engine still reads."""

    async def body() -> None:
        engines, gate = [FakeEngine(), FakeEngine()], asyncio.Event()
        controller = await begin(engines, flow(), max_paused=1.0)
        for engine in engines:
            engine.before_update = lambda version: gate.wait()
        await controller.staged(1, manifest(1))
        await until(lambda: all("update 1" in engine.calls for engine in engines))
        engines[0].spoil = True
        engines[0].before_update = None
        released = asyncio.create_task(controller.staged(2, manifest(2)))
        engines[1].before_update = lambda version: asyncio.Event().wait()
        gate.set()
        with pytest.raises(WeightMismatch, match="tensor w"):
            await released
        await controller.close()

    run(body)


@pytest.mark.parametrize("share", [0.0, 1.0])
def test_after_a_mismatch_nothing_is_delivered_and_the_run_ends_naming_the_tensor(
    share: float,
) -> None:
    async def body() -> None:
        engines = [FakeEngine(never) for _ in range(3)]
        controller = await begin(engines, flow(), max_paused=share)
        for engine in engines:
            engine.spoil = True
        await until(lambda: all(engine.asked for engine in engines))
        with pytest.raises(WeightMismatch, match=r"engine-\d .*tensor w was sent as digest of 1"):
            await staged_and_taken(controller)
        calls = [list(engine.calls) for engine in engines]
        with pytest.raises(WeightMismatch, match="tensor w"):
            await controller.staged(2, manifest(2))
        with pytest.raises(WeightMismatch, match="tensor w"):
            await controller.next_batch(0)
        await asyncio.sleep(0.03)
        assert [engine.calls for engine in engines] == calls
        assert not any("update 2" in one for one in calls)
        if share == 0.0:
            asked = sum("update 1" in one for one in calls)
            assert asked == 1, "the turn of the others never comes"
        assert not any(engine.killed for engine in engines), "none is started again"
        await controller.close()

    run(body)


def test_an_engine_that_fails_to_take_a_version_is_lost_alone_and_its_requests_are_innocent() -> (
    None
):
    async def body() -> None:
        launch = FakeLaunch([FakeEngine(never), FakeEngine(never), FakeEngine(never)])
        harness = await fleet_of(launch, update_timeout_s=0.05, restarts_per_hour=0)
        harness.fleet.requests.put(requests(3), 0)
        await until(lambda: all(engine.asked for engine in launch.engines))

        def out_of_memory(version: int) -> None:
            raise MemoryError("no room")

        launch.engines[0].before_update = out_of_memory
        launch.engines[1].before_update = lambda version: asyncio.Event().wait()
        await harness.stage(1)
        await until(lambda: len(harness.lost) == 2)
        reasons = dict(harness.lost)
        assert reasons[0] == "it failed to load weights of version 1: no room"
        assert "engine-1 to load weights of version 1" in reasons[1]
        await until(lambda: len(launch.engines[2].asked) == 3)
        assert not harness.given_up
        await harness.fleet.updates.until_released(1)
        await harness.close()

    run(body)


# Colocated


async def taken(controller: Controller, version: int) -> None:
    """A batch, and the devices for it."""
    assert await controller.next_batch(version) is not None
    await controller.sleep()


def test_colocated_engines_sleep_from_the_batch_to_the_weights_that_it_makes() -> None:
    async def body() -> None:
        engines = [FakeEngine(), FakeEngine()]
        controller = await begin(engines, flow(2, 1.0))
        for version in range(3):
            await taken(controller, version)
            assert [engine.calls[-1] for engine in engines] == ["sleep"] * 2
            await stage(controller, version + 1)
        for engine in engines:
            assert engine.calls == ["update 0"] + [
                call
                for version in range(1, 4)
                for call in ("sleep", "wake weights", f"update {version}", "wake cache")
            ]
        await controller.close()

    run(body)


def test_colocated_an_engine_that_is_lost_as_it_is_to_sleep_ends_no_run_whenever_that_is() -> None:
    async def body(turns: int) -> None:
        engines = [FakeEngine(), FakeEngine()]
        controller = await begin(engines, flow(2, 1.0))
        assert await controller.next_batch(0) is not None
        engines[0].fail(RuntimeError("gone"))
        for _ in range(turns):
            await asyncio.sleep(0)
        await controller.sleep()
        assert engines[1].sleeping
        await stage(controller, 1)
        await controller.close()

    for turns in range(12):
        run(partial(body, turns))


@pytest.mark.parametrize("lost", ["before it sleeps", "as it sleeps"])
def test_colocated_the_policy_and_a_restart_wait_until_a_lost_engine_has_given_its_memory_back(
    lost: str,
) -> None:
    async def body() -> None:
        launch = FakeLaunch([FakeEngine(), FakeEngine()])
        controller = await begin(launch, flow(2, 1.0))
        broken = launch.engines[0]
        broken.ended.clear()

        async def fails() -> None:
            raise RuntimeError("out of memory")

        assert await controller.next_batch(0) is not None
        if lost == "as it sleeps":
            broken.before["sleep"] = fails
        else:
            broken.fail(RuntimeError("gone"))
            await until(lambda: broken.killed)
        sleeping = asyncio.create_task(controller.sleep())
        await until(lambda: broken.killed)
        await asyncio.sleep(4.0)
        assert not sleeping.done()
        broken.ended.set()
        await sleeping
        await stage(controller, 1)
        await until(lambda: controller._fleet.slots[0].serving)
        assert launch.starts[-1] == (0, True)

        again = launch.engines[0]
        again.ended.clear()
        again.fail(RuntimeError("gone"))
        await until(lambda: again.killed)
        starts = len(launch.starts)
        await asyncio.sleep(4.0)
        assert len(launch.starts) == starts
        again.ended.set()
        await until(lambda: len(launch.starts) == starts + 1)
        await controller.close()

    run(body)


def test_colocated_engines_that_wait_for_their_turn_sleep_on_and_none_waits_while_all_sleep() -> (
    None
):
    async def body() -> None:
        engines, gate = [FakeEngine(), FakeEngine(), FakeEngine()], asyncio.Event()
        controller = await begin(engines, flow(3, 2.0), max_paused=0.0)
        await until(lambda: controller.stats()["buffer"] == 9)
        for engine in engines:
            engine.delay = never
        await taken(controller, 0)

        for engine in engines:
            engine.before_update = lambda version: gate.wait()
        await controller.staged(1, manifest(1))
        await until(lambda: all("update 1" in engine.calls for engine in engines))
        gate.set()
        await until(lambda: holds(controller, 1))
        await until(lambda: all(slot.held for slot in controller._fleet.slots))
        await taken(controller, 1)

        for engine in engines:
            engine.before_update = None
        await controller.staged(2, manifest(2))
        controller._fleet.updates._policy_has_devices = True  # the batch is asked for at once
        await taken(controller, 2)
        await stage(controller, 3)
        assert not any(slot.restarts or slot.lost for slot in controller._fleet.slots)
        await controller.close()

    run(body)


def test_colocated_no_engine_starts_beside_the_policy_and_the_policy_waits_for_one_that_does() -> (
    None
):
    async def body() -> None:
        launch = FakeLaunch([FakeEngine(), FakeEngine()])
        controller = await begin(launch, flow(2, 1.0))
        gate = asyncio.Event()
        start = launch.__call__

        async def slow(spec: object, *, again: bool = False) -> FakeEngine:
            started.append("began")
            await gate.wait()
            return await start(spec, again=again)  # type: ignore[arg-type]

        started: list[str] = []
        controller._fleet.tasks[0]._launch = slow  # type: ignore[assignment]
        launch.engines[0].fail(RuntimeError("out of memory"))
        await until(lambda: started)
        waiting = asyncio.create_task(taken(controller, 0))
        await until(lambda: controller._fleet.updates._policy_has_devices)
        assert not waiting.done(), "an engine is being started on the devices"
        gate.set()
        await waiting
        assert "sleep" in launch.engines[0].calls

        launch.engines[1].fail(RuntimeError("out of memory"))
        starts = len(launch.starts)
        await until(lambda: controller._fleet.slots[1].restarts)
        for _ in range(50):
            await asyncio.sleep(0.001)
        assert len(launch.starts) == starts, "the policy has the devices"
        await stage(controller, 1)
        await until(lambda: controller._fleet.slots[1].serving)
        await controller.close()

    run(body)


def test_colocated_an_engine_whose_turn_has_not_come_does_not_load_beside_the_policy() -> None:
    @dataclass
    class Busy:
        index: int
        version: int = 0
        evaluates: bool = False
        serving: bool = True
        busy: bool = True
        machine: str = HERE

    async def body() -> None:
        engines = [Busy(0), Busy(1)]
        updates = WeightUpdates(lambda: engines, max_paused=0.0)
        gate = asyncio.Event()
        loaded: list[tuple[int, int]] = []

        async def load(engine: Busy) -> None:
            async with updates.loading(engine) as staged:
                await gate.wait()
                engine.version = staged.version
                loaded.append((engine.index, staged.version))

        updates.stage(1, manifest(1))
        loads = [asyncio.create_task(load(engine)) for engine in engines]
        await until(lambda: updates._loading)
        policy = asyncio.create_task(updates.give_devices_to_policy())
        gate.set()
        await policy
        for _ in range(20):
            await asyncio.sleep(0)
        assert loaded == [(0, 1)]
        updates.stage(2, manifest(2))
        await asyncio.gather(*loads)
        assert loaded == [(0, 1), (1, 2)]

    run(body)

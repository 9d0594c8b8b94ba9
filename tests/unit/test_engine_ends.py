"""Engines, and calls about them, that end in rare ways."""

from __future__ import annotations

import asyncio
import json
from functools import partial
from pathlib import Path
from typing import Any

import pytest

from megatron_async_rl.flow import engine_task
from megatron_async_rl.flow.errors import EngineFailed, FlowError
from megatron_async_rl.flow.fleet import Fleet, FleetSettings
from megatron_async_rl.flow.router import Listener
from megatron_async_rl.flow.updates import Transfer, WeightUpdates
from megatron_async_rl.samples.types import Request
from megatron_async_rl.weights.manifest import BucketRef, Manifest
from megatron_async_rl.weights.version_digest import version_digest
from tests.unit.fake_engine import FakeEngine, FakeLaunch, manifest, specs
from tests.unit.fleet_harness import FleetHarness, fleet_of, ids, never, requests
from tests.unit.flow_setup import PROMPTS, controller_of, flow, run, until
from tests.unit.relay_harness import Reader


@pytest.fixture(autouse=True)
def quick_restarts(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(engine_task, "FIRST_DELAY_S", 0.001)


def test_a_fleet_without_engines_is_refused() -> None:
    with pytest.raises(ValueError, match="a fleet needs at least one engine"):
        Fleet([], FakeLaunch([]), Listener(), FleetSettings())


def test_orders_are_followed_once_and_one_that_fails_is_noted(tmp_path: Path) -> None:
    async def body() -> None:
        harness = await fleet_of([FakeEngine()])
        order, fleet = tmp_path / "engines", harness.fleet
        following = asyncio.create_task(fleet.follow_orders(order, 5.0))
        for text, expected in (
            ("2", ["engines requested: 2, present: 1; to join: engine-1", "engine-1 has joined"]),
            ("0", ["engines requested: 0, present: 2; to leave: engine-1, engine-0"]),
            ("many", [f"the number of engines in {order} was not reached: invalid literal"]),
        ):
            harness.notes.clear()
            order.write_text(text)
            await until(lambda expected=expected: len(harness.notes) >= len(expected))
            await asyncio.sleep(2.0)
            assert not order.exists(), "an order that fails is not repeated"
            for found, start in zip(harness.notes, expected, strict=False):
                assert found.startswith(start)
        assert not harness.errors
        assert not following.done()
        fleet.resize = broken  # type: ignore[method-assign]
        order.write_text("1")
        await until(lambda: harness.errors)
        assert [str(error) for error in harness.errors] == ["broken"]
        following.cancel()
        await harness.close()

    run(body)


async def broken(*_: object) -> None:
    raise RuntimeError("broken")


def test_an_engine_that_does_not_stop_in_time_is_killed() -> None:
    async def body() -> None:
        late, other = FakeEngine(), FakeEngine()
        ended: list[str] = []

        async def stop() -> None:
            try:
                await asyncio.Event().wait()
            finally:
                ended.append("cancelled")

        late.stop = stop  # type: ignore[method-assign]
        harness = await fleet_of([late, other])
        began = asyncio.get_running_loop().time()
        await harness.fleet.close(7.0)
        assert asyncio.get_running_loop().time() - began == pytest.approx(7.0)
        assert ended == ["cancelled"]
        assert other.calls == ["update 0", "stop"]
        assert late.killed
        assert other.killed
        assert [(slot.engine, slot.serving) for slot in harness.fleet.slots] == [(None, False)] * 2

    run(body)


def test_a_machine_whose_state_is_unknown_excuses_no_request(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Only an engine whose machine is known to be lost is not evidence against its requests."""
    monkeypatch.setattr(engine_task, "LOOK_S", 3.0)
    for look, losses in ((True, 0), (False, 1), (broken, 1), (asyncio.Event().wait, 1)):

        async def body(look: Any = look, losses: int = losses) -> None:
            engines = [FakeEngine(never), FakeEngine(never)]
            if isinstance(look, bool):
                engines[0].machine_gone = look
            else:
                engines[0].machine_is_lost = look  # type: ignore[method-assign]
            harness = await fleet_of(engines, capacity=2)
            harness.fleet.requests.put(requests(1), 0)
            await until(lambda: engines[0].asked)
            engines[0].fail(RuntimeError("it ended"))
            await until(lambda: engines[1].asked)
            (held,) = harness.fleet.slots[1].held.values()
            assert held.losses == losses
            await harness.close()

        run(body)


def test_an_engine_that_outlives_its_kill_is_noted() -> None:
    async def body() -> None:
        engine = FakeEngine()
        engine.ended.clear()
        harness = await fleet_of([engine, FakeEngine()], unresponsive_s=5.0)
        engine.fail(RuntimeError("out of memory"))
        await until(lambda: len(harness.notes) == 3)
        assert harness.notes == [
            "fleet waited 5.0 s for engine-0, killed, to end, which did not come",
            "engine-0 is lost and its requests are sent again; restart 1 of 3 within an hour. Why:"
            " RuntimeError: out of memory",
            "engine-0 is back, with the weights of version 0, verified",
        ]
        await harness.close()

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("megatron_async_rl.watchdog.watch._process_name", "fleet")
        run(body)


def test_engines_with_weights_serve_at_once() -> None:
    async def body() -> None:
        launch = FakeLaunch([FakeEngine()])
        harness = FleetHarness(launch, 0, FleetSettings(capacity=8))
        harness.fleet = Fleet(specs(1, first_version=3), launch, harness, FleetSettings())
        await harness.fleet.started()
        await until(harness.serving)
        assert harness.versions == [3]
        harness.fleet.requests.put(requests(2), 3)
        await until(lambda: len(harness.samples) == 2)
        assert launch.engines[0].versions == [3, 3]
        assert harness.notes == []
        await harness.close()

    run(body)


def test_an_internal_error_of_an_engines_task_ends_the_run() -> None:
    async def body() -> None:
        engine = FakeEngine()
        harness = await fleet_of([engine, FakeEngine()])
        harness.fleet.tasks[0]._restarts.begin = broken_now  # type: ignore[method-assign]
        engine.fail(RuntimeError("out of memory"))
        await until(lambda: harness.errors)
        assert [str(error) for error in harness.errors] == ["broken"]
        await harness.close()

    run(body)


def broken_now() -> int:
    raise RuntimeError("broken")


def test_a_start_that_is_interrupted_leaves_no_waiter() -> None:
    async def body() -> None:
        launch = FakeLaunch([FakeEngine()])
        launch.make = lambda index: FakeEngine()
        harness = FleetHarness(launch, 0, FleetSettings())
        task = harness.fleet.tasks[0]
        waiter = asyncio.create_task(harness.fleet.started())
        await asyncio.sleep(0)
        await harness.close()
        assert task.started.cancelled()
        with pytest.raises(asyncio.CancelledError):
            await waiter

    run(body)


def test_loads_are_recorded_and_a_full_disk_costs_only_the_record(tmp_path: Path) -> None:
    async def body() -> None:
        harness = await fleet_of([FakeEngine(), FakeEngine()], run_dir=tmp_path)
        await harness.stage(1)
        await until(lambda: [slot.version for slot in harness.fleet.slots] == [1, 1])
        lines = [json.loads(line) for line in (tmp_path / "loads.jsonl").read_text().splitlines()]
        assert sorted((one["version"], one["engine"]) for one in lines) == [
            *((0, 0), (0, 1), (1, 0), (1, 1))
        ]
        for one in lines:
            assert one["digest"] == version_digest(manifest(one["version"]).digests)
            assert one["tensors"] == 1
        (tmp_path / "loads.jsonl").unlink()
        (tmp_path / "loads.jsonl").mkdir()
        await harness.stage(2)
        await until(lambda: [slot.version for slot in harness.fleet.slots] == [2, 2])
        assert not harness.errors
        await harness.close()

    run(body)


def test_an_evaluation_continues_on_other_engines_if_its_engine_leaves() -> None:
    async def body() -> None:
        engines = [FakeEngine(never), FakeEngine(never)]
        harness = await fleet_of(engines, capacity=2)
        held_out = [Request(group=-1, k=k, prompt=PROMPTS[0]) for k in range(4)]
        asking = asyncio.create_task(harness.fleet.requests.run(held_out, 0))
        await until(lambda: sum(len(engine.asked) for engine in engines) == 4)
        first = ids(engines[0].asked)
        engines[1].delay = lambda request: 0.01
        await harness.fleet.remove(0, 5.0)
        harness.fleet.requests.put(requests(1), 0)
        samples = await asking
        assert [sample.id for sample in samples] == ids(held_out)
        await until(lambda: harness.samples)
        assert sorted(ids(engines[1].asked[2:4])) == sorted(first), "ahead of training"
        assert engines[1].asked[2].prefix is None
        assert not harness.aborted
        await harness.close()

    run(body)


def test_a_lost_machine_costs_its_own_engines_alone() -> None:
    async def body() -> None:
        engines = [FakeEngine(never), FakeEngine(never), FakeEngine(never)]
        for engine in engines[1:]:
            engine.machine = "there"
        controller = controller_of(engines, flow(), restarts_per_hour=0)
        await controller.start()
        await asyncio.sleep(0.1)
        controller.on_machine_lost("there", "no weights", all_engines=False)
        await asyncio.sleep(0.1)
        assert [slot.lost for slot in controller._fleet.slots] == ["", "", ""]
        controller.on_machine_lost("there", "no weights", all_engines=True)
        await until(lambda: controller._fleet.slots[2].dead)
        assert [slot.lost for slot in controller._fleet.slots] == ["", *["no weights"] * 2]
        await controller.close()

    run(body)


def test_only_the_staged_version_is_evaluated() -> None:
    updates = WeightUpdates(list, 1.0)
    for staged in ("none", 3):
        with pytest.raises(FlowError) as raised:
            updates.request_version([0], 4)
        assert str(raised.value) == (
            f"version 4 must be evaluated, and the staged version is {staged}"
        )
        updates.stage(3 if staged == "none" else 5, manifest(3))


def test_after_a_halt_every_wait_for_a_version_raises_its_error() -> None:
    async def body() -> None:
        updates = WeightUpdates(list, 1.0)
        updates.stage(3, manifest(3))
        await updates.until_staged(3)
        waits = (partial(updates.until_staged, 4), partial(updates.until_loaded, 4))
        tasks = [asyncio.create_task(waits[0]())]
        await asyncio.sleep(0)
        assert not tasks[0].done()
        updates.halt(ValueError("wrong"))
        with pytest.raises(ValueError, match="wrong"):
            await tasks[0]
        for wait in (*waits, partial(updates.until_released, 3)):
            with pytest.raises(ValueError, match="wrong"):
                await wait()

    run(body)


def test_a_transfer_lasts_until_the_last_engine_and_an_older_one_changes_nothing() -> None:
    async def body() -> None:
        readers = [Reader(index) for index in range(4)]
        updates = WeightUpdates(lambda: readers, 1.0)
        assert updates.last is None

        def staged(version: int) -> None:
            bucket = BucketRef(path=f"/{version}", size=16, nbytes=9, entries=())
            updates.stage(version, Manifest(buckets=(bucket,), digests={}, seconds=0.25))

        async def load(reader: Reader, seconds: float) -> None:
            gate = asyncio.Event()
            asyncio.get_running_loop().call_later(seconds, gate.set)
            await reader.load(updates, gate)

        def transfer(version: int, seconds: float, paused_s: float) -> Transfer:
            return Transfer(version=version, nbytes=9, seconds=seconds, paused_s=paused_s)

        staged(3)
        await asyncio.sleep(1.0)
        loads = [asyncio.create_task(load(reader, at + 2.0)) for at, reader in enumerate(readers)]
        await loads[0]
        assert updates.last == transfer(3, 3.25, 2.0)
        late = asyncio.create_task(load(readers[0], 0.5))
        await loads[1]
        assert updates.last == transfer(3, 4.25, 3.0)
        staged(4)
        await late
        assert updates.last == transfer(4, 0.25, 0.0)
        await loads[2]
        assert updates.last == transfer(4, 0.25, 0.0)
        failed = asyncio.create_task(load(readers[1], 0.5))
        await asyncio.sleep(0.25)
        failed.cancel()
        await asyncio.wait([failed])
        assert updates.last == transfer(4, 0.25, 0.0), "it has not loaded"
        await load(readers[2], 0.25)
        assert updates.last == transfer(4, 1.75, 0.25)
        await load(readers[1], 0.125)
        assert updates.last == transfer(4, 1.875, 0.25), "the longest pause"
        await loads[3]

    run(body)


def test_nothing_is_prepared_for_evaluation_engines_that_are_gone() -> None:
    async def body() -> None:
        engines = [FakeEngine(), FakeEngine()]
        harness = await fleet_of(engines, evaluators=1, restarts_per_hour=0)
        harness.fleet.prepare_evaluation(0)
        await until(lambda: engines[1].version == 0)
        engines[1].fail(RuntimeError("out of memory"))
        await until(lambda: harness.fleet.slots[1].dead)
        for ask in (
            lambda: harness.fleet.prepare_evaluation(0),
            lambda: harness.fleet.requests.run([], 0).send(None),
        ):
            with pytest.raises(EngineFailed) as raised:
                ask()
            assert str(raised.value) == (
                "no evaluation engine is left: engine 1: RuntimeError: out of memory"
            )
        assert not harness.errors, "training continues"
        await harness.close()

    run(body)

"""Buckets that engines acquire from the policy's devices: two places, each filled once for all that
load, read by every engine that requests it, and released; and what an engine that fails meanwhile
costs."""

from __future__ import annotations

import asyncio
import time
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from megatron_async_rl.flow import engine_task
from megatron_async_rl.flow.controller import Controller
from megatron_async_rl.flow.ipc_buckets import BufferRequest, IpcBucketQueue
from megatron_async_rl.weights.manifest import IN_FLIGHT, BucketRef, Manifest, WeightMismatch
from tests.unit.fake_engine import FakeEngine, FakeLaunch
from tests.unit.flow_setup import controller_of, flow, holds, run, until

COUNT = 5
"""Buckets of a version."""


@pytest.fixture(autouse=True)
def quick_restarts(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(engine_task, "FIRST_DELAY_S", 0.001)


def on_demand(version: int) -> Manifest:
    ref = BucketRef(path="", size=8, nbytes=8, entries=())
    digests = {"w": f"digest of {version}"}
    return Manifest(buckets=(ref,) * COUNT, digests=digests, on_demand=True)


class Ranks:
    """The ranks' side: does what is requested. `memory`: what is in each place; `filled`: the
    buckets that were put there, in order; `held`: places whose memory they have."""

    def __init__(self) -> None:
        self.memory: list[str] = [""] * IN_FLIGHT
        self.filled: list[tuple[int, int]] = []
        self.held: set[int] = set()
        self.gate = asyncio.Event()
        self.gate.set()
        self.done: BucketRef | None = None

    async def serve(self, controller: Controller) -> None:
        while True:
            fill = await controller.next_buffer_request(self.done)
            await self.gate.wait()
            self.done = self.do(fill)
            await asyncio.sleep(0.001)

    def do(self, fill: BufferRequest) -> BucketRef | None:
        if fill.number is None:
            self.held = set()
            return None
        self.held.add(fill.place)
        self.filled.append((fill.version, fill.number))
        self.memory[fill.place] = f"{fill.version}/{fill.number}"
        return BucketRef(
            path=f"{fill.place}:{fill.version}/{fill.number}", size=8, nbytes=8, entries=()
        )


def reads(ranks: Ranks, engine: FakeEngine) -> Callable[[int], Any]:
    """Raises AssertionError unless what an engine reads stays until it has read it."""

    async def read(version: int) -> None:
        place, _, content = engine.buckets[-1].partition(":")
        for _ in range(3):
            assert ranks.memory[int(place)] == content
            await asyncio.sleep(0.001)

    return read


def wanted(version: int) -> list[str]:
    return [f"{version}/{number}" for number in range(COUNT)]


def had(engine: FakeEngine) -> list[str]:
    return [path.partition(":")[2] for path in engine.buckets]


@asynccontextmanager
async def colocated(
    *engines: FakeEngine, async_ratio: float = 1.0, **settings: Any
) -> AsyncIterator[tuple[Controller, Ranks, FakeLaunch]]:
    """A controller whose engines hold version 0, which was shared."""
    launch, ranks = FakeLaunch(list(engines)), Ranks()
    launch.again = lambda index: reader(ranks)
    for engine in engines:
        engine.before_update = engine.before_update or reads(ranks, engine)
    controller = controller_of(launch, flow(2, async_ratio), **settings)
    await controller.start()
    serving = asyncio.create_task(ranks.serve(controller))
    try:
        await stage(controller, 0)
        yield controller, ranks, launch
    finally:
        serving.cancel()
        await controller.close()


def reader(ranks: Ranks) -> FakeEngine:
    engine = FakeEngine()
    engine.before_update = reads(ranks, engine)
    return engine


async def stage(controller: Controller, version: int) -> None:
    """Returns when the engines that are there hold `version`."""
    await controller.staged(version, on_demand(version))
    await controller.loaded(version)


def test_each_bucket_is_filled_once_for_all_engines_and_the_memory_is_given_back() -> None:
    async def body() -> None:
        async with colocated(FakeEngine(), FakeEngine(), FakeEngine()) as (
            controller,
            ranks,
            launch,
        ):
            assert ranks.filled == [(0, number) for number in range(COUNT)]
            await until(lambda: not ranks.held)
            await controller.next_batch(0)
            await controller.sleep()
            await stage(controller, 1)
            assert holds(controller, 1)
            assert ranks.filled[COUNT:] == [(1, number) for number in range(COUNT)]
            assert [had(engine) for engine in launch.engines] == [wanted(1)] * 3
            assert len({path[0] for path in launch.engines[0].buckets}) == IN_FLIGHT
            await until(lambda: not ranks.held)

    run(body)


def test_while_one_bucket_is_read_the_next_is_filled() -> None:
    async def body() -> None:
        engine, goes_on = FakeEngine(), asyncio.Event()
        async with colocated(engine) as (controller, ranks, _):
            await controller.next_batch(0)
            await controller.sleep()
            engine.before_update = lambda version: goes_on.wait()
            await controller.staged(1, on_demand(1))
            await until(lambda: len(ranks.filled) == COUNT + 2)
            assert had(engine) == ["1/0"]
            assert ranks.memory == ["1/0", "1/1"]
            goes_on.set()
            await controller.loaded(1)

    run(body)


def test_an_engine_that_comes_later_gets_all_buckets_and_is_waited_for() -> None:
    """From the third bucket on both load the same."""

    async def body() -> None:
        first, second, comes = FakeEngine(), FakeEngine(), asyncio.Event()
        async with colocated(first, second) as (controller, ranks, _):
            await controller.next_batch(0)
            await controller.sleep()
            second.before["wake weights"] = comes.wait
            loads = first.before_update

            async def read(version: int) -> None:
                if len(first.buckets) == 3:
                    comes.set()
                await loads(version)  # type: ignore[misc]

            first.before_update = read
            await stage(controller, 1)
            assert had(first) == had(second) == wanted(1)
            numbers = [number for version, number in ranks.filled if version == 1]
            assert numbers.count(0) == 2
            assert numbers.count(COUNT - 1) == 1

    run(body)


def test_an_engine_that_starts_again_while_others_sample_acquires_the_version_again() -> None:
    async def body() -> None:
        async with colocated(FakeEngine(), FakeEngine()) as (controller, ranks, launch):
            await until(lambda: not ranks.held)
            launch.engines[0].fail(RuntimeError("gone"))
            await until(lambda: len(launch.starts) == 3 and holds(controller, 0))
            assert had(launch.engines[0]) == wanted(0)
            assert ranks.filled[COUNT:] == [(0, number) for number in range(COUNT)]
            await until(lambda: not ranks.held)

    run(body)


@pytest.mark.parametrize("how", ["raises", "dies", "hangs"])
def test_an_engine_that_fails_with_a_bucket_is_lost_alone_and_its_place_is_filled_again(
    how: str,
) -> None:
    async def body() -> None:
        broken, other = FakeEngine(), FakeEngine()
        limits = {"unresponsive_s": 30.0, "update_timeout_s": 500.0}
        async with colocated(broken, other, restarts_per_hour=0, **limits) as (
            controller,
            ranks,
            _,
        ):
            await controller.next_batch(0)
            await controller.sleep()

            async def fails(version: int) -> None:
                if len(broken.buckets) < 2:
                    return
                if how == "raises":
                    raise RuntimeError("cuIpcOpenMemHandle_v2 failed: CUDA_ERROR_INVALID_VALUE")
                if how == "dies":
                    broken.fail(RuntimeError("killed"))
                await asyncio.Event().wait()

            broken.before_update, began = fails, time.monotonic()
            await stage(controller, 1)
            assert time.monotonic() - began < 2 * limits["unresponsive_s"], "others wait for it"
            slot = controller._fleet.slots[0]
            await until(lambda: slot.dead)
            said = {
                "raises": "CUDA_ERROR_INVALID",
                "dies": "killed",
                "hangs": "to load bucket 1 of",
            }
            assert said[how] in slot.lost
            assert broken.killed
            assert had(other) == wanted(1)
            assert controller._fleet.slots[1].version == 1
            await until(lambda: not ranks.held)
            assert await controller.next_batch(1) is not None

    run(body)


def test_ranks_that_fill_nothing_cost_the_engines_after_their_limit_and_the_run_ends() -> None:
    async def body() -> None:
        engine = FakeEngine()
        limits = {"restarts_per_hour": 0, "update_timeout_s": 20.0}
        async with colocated(engine, async_ratio=0.0, **limits) as (controller, ranks, _):
            await controller.next_batch(0)
            await controller.sleep()
            ranks.gate.clear()
            await controller.staged(1, on_demand(1))
            with pytest.raises(Exception, match=r"engine-0 to get bucket 0 of version 1"):
                await controller.next_batch(1)

    run(body)


def test_acquired_weights_that_differ_end_the_run() -> None:
    async def body() -> None:
        engines = [FakeEngine(), FakeEngine()]
        async with colocated(*engines) as (controller, _, _):
            await controller.next_batch(0)
            await controller.sleep()
            engines[1].spoil = True
            await controller.staged(1, on_demand(1))
            with pytest.raises(WeightMismatch, match="tensor w"):
                await controller.loaded(1)

    run(body)


def test_no_bucket_is_filled_while_an_engine_starts_and_none_starts_while_one_loads() -> None:
    """An engine that starts measures the free memory of its device."""

    async def body() -> None:
        async with colocated(FakeEngine(), FakeEngine()) as (controller, ranks, launch):
            await until(lambda: not ranks.held)
            goes_on, updates = asyncio.Event(), controller._fleet.updates
            task, fill = controller._fleet.tasks[0], len(ranks.filled)
            start = task._launch

            async def slowly(spec: Any, *, again: bool) -> Any:
                await goes_on.wait()
                return await start(spec, again=again)

            task._launch = slowly  # type: ignore[assignment]
            launch.engines[0].fail(RuntimeError("gone"))
            await until(lambda: updates._starting == 1)
            launch.engines[1].fail(RuntimeError("gone"))
            await until(lambda: launch.starts[2:] == [(1, True)] and updates._starting == 1)
            await asyncio.sleep(1.0)
            assert len(ranks.filled) == fill
            goes_on.set()
            await until(lambda: holds(controller, 0))

            task._launch, reads_on = start, asyncio.Event()
            launch.again = lambda index: waits(reads_on)
            launch.engines[0].fail(RuntimeError("gone"))
            await until(lambda: launch.engines[0].buckets == ["0:0/0"])
            launch.engines[1].fail(RuntimeError("gone"))
            await until(lambda: not controller._fleet.slots[1].there)
            await asyncio.sleep(1.0)
            assert len(launch.starts) == 5
            reads_on.set()
            await until(lambda: holds(controller, 0))

    def waits(event: asyncio.Event) -> FakeEngine:
        engine = FakeEngine()
        engine.before_update = lambda version: event.wait()
        return engine

    run(body)


def test_what_ranks_did_for_the_version_before_is_no_bucket_of_this_one() -> None:
    buckets = IpcBucketQueue(2, 3)
    buckets.request(0, 0)
    buckets.buffer_filled(BucketRef(path="0:1/0", size=8, nbytes=8, entries=()))
    assert buckets.take(0) is None
    assert buckets.next_buffer_request() == BufferRequest(version=2, number=0)
    assert buckets.next_buffer_request() is None, "ranks fill one bucket at a time"


@given(st.data())
def test_whatever_the_order_every_engine_reads_every_bucket_and_no_place_is_filled_under_it(
    data: st.DataObject,
) -> None:
    count, engines = data.draw(st.integers(1, 6)), data.draw(st.integers(1, 4))
    buckets = IpcBucketQueue(3, count)
    at, reading = dict.fromkeys(range(engines), -1), dict[int, BucketRef]()
    content: dict[int, int] = {}
    joined, filling, fills = set[int](), None, 0
    for _ in range(20 * count * engines + 50):
        steps: list[Any] = ["fill"] if filling is None else ["filled"]
        steps += [one for one in at if at[one] < count]
        step = data.draw(st.sampled_from(steps))
        if step == "fill":
            filling = buckets.next_buffer_request()
            if filling is not None and filling.number is not None:
                fills += 1
                assert all(int(ref.path) != filling.place for ref in reading.values())
        elif step == "filled":
            assert filling is not None
            ref = None
            if filling.number is not None:
                content[filling.place] = filling.number
                ref = BucketRef(path=str(filling.place), size=8, nbytes=8, entries=())
            buckets.buffer_filled(ref)
            filling = None
        elif step in reading:
            assert content[int(reading.pop(step).path)] == at[step]
            buckets.leave(step)
            at[step] += 1
            if at[step] < count:
                buckets.request(step, at[step])
        elif step not in joined:
            joined.add(step)
            at[step] = 0
            buckets.request(step, 0)
        else:
            found = buckets.take(step)
            if found is not None:
                reading[step] = found
        if set(at.values()) == {count}:
            break
    # The rest in turn: nothing waits forever.
    for _ in range(10 * count * engines):
        if filling is None:
            filling = buckets.next_buffer_request()
        if filling is not None:
            ref = BucketRef(path=str(filling.place), size=8, nbytes=8, entries=())
            if filling.number is not None:
                content[filling.place] = filling.number
            buckets.buffer_filled(ref if filling.number is not None else None)
            filling = None
        for one in at:
            if one not in joined:
                joined.add(one)
                at[one] = 0
                buckets.request(one, 0)
            if one in reading:
                assert content[int(reading.pop(one).path)] == at[one]
                buckets.leave(one)
                at[one] += 1
                if at[one] < count:
                    buckets.request(one, at[one])
            elif at[one] < count and (found := buckets.take(one)) is not None:
                reading[one] = found
    assert set(at.values()) == {count}
    filling = buckets.next_buffer_request()
    assert filling is None or filling.number is None

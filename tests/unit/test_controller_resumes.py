"""Stopping and resuming: nothing is lost, nothing repeated, and the law holds on both sides."""

from __future__ import annotations

import asyncio
import json
import random
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from megatron_async_rl.flow.buffer import EMPTY
from megatron_async_rl.flow.buffer_file import read, written
from megatron_async_rl.flow.controller import Controller
from megatron_async_rl.samples import Group
from tests.unit.coroutine_engine import CoroutineEngine
from tests.unit.coroutine_flow import expected_prompts, flow, run, source, train


@settings(max_examples=40, deadline=None)
@given(
    seed=st.integers(0, 2**32),
    stops=st.lists(st.integers(0, 4), min_size=1, max_size=4),
    ratio=st.sampled_from([0.0, 0.5, 2.0]),
    keeps=st.booleans(),
)
def test_stopping_and_resuming_anywhere_loses_nothing_and_repeats_nothing(
    seed: int, stops: list[int], ratio: float, keeps: bool
) -> None:
    """`keeps`: the checkpoint has its buffer."""

    async def body() -> None:
        chance = random.Random(seed)
        state: dict[str, Any] | None = None
        left = EMPTY
        version = 0
        consumed: list[Group] = []
        for steps in stops:
            engine = CoroutineEngine(lambda request: chance.choice([0.0, 0.001]))
            engine.version = version
            controller = Controller(source(), [engine], flow(3, ratio))
            if state is not None:
                controller.load_state(json.loads(json.dumps(state)), read(written(left)))
                assert controller.state() == state, "a stop right after a resume loses nothing"
                assert written(controller.buffer()) == written(left)
            controller.start(version)
            if chance.random() < 0.5:
                await asyncio.sleep(0.002)
            consumed += await train(controller, [engine], version, version + steps)
            version += steps
            await controller.stop()
            answered = {sample.id for group in left.groups for sample in group.samples}
            assert not answered & {request.id for request in engine.asked}, "what had come is not asked again"
            state = controller.state()
            left = controller.buffer() if keeps else EMPTY
        assert state is not None
        assert state["consumed"] == 3 * version
        assert [group.index for group in consumed] == list(range(3 * version))
        assert [group.prompt.id for group in consumed] == expected_prompts(3 * version)

    run(body)


def test_a_resume_trains_on_the_responses_that_were_waiting() -> None:
    async def body() -> None:
        engine = CoroutineEngine(lambda request: 60.0 if request.id == "5-0" else 0.0)
        first = Controller(source(), [engine], flow(2, 2.0))
        first.start(0)
        await train(first, [engine], 0, 1)
        await answered(first, 2 * 8 - 1)
        await first.stop()
        quick = CoroutineEngine()
        quick.version = 1
        second = Controller(source(), [quick], flow(2, 2.0))
        second.load_state(first.state(), first.buffer())
        second.start(1)
        groups = await train(second, [quick], 1, 4)
        assert [quick.asked[0].id, quick.asked[0].prompt.id] == ["5-0", expected_prompts(6)[5]]
        assert [group.index for group in groups] == list(range(2, 8))
        starts = {sample.id: sample.start_version for group in groups for sample in group.samples}
        assert starts.pop("5-0") > 0
        assert list(starts.values()) == [0] * 7 + [1] * 4
        assert second.state()["consumed"] == 8
        await second.stop()
        third = Controller(source(), [quick], flow(2, 2.0))
        third.load_state(first.state(), first.buffer(), oldest=1)
        third.start(1)
        assert [group.index for group in third.buffer().groups if group.samples] == [6, 7], "others are of version 0"
        await third.stop()

    run(body)


async def answered(controller: Controller, count: int) -> None:
    while controller.stats()["samples"] < count:
        await asyncio.sleep(0)


def test_after_a_withdrawal_no_batch_is_taken_and_the_position_is_that_of_what_was() -> None:
    async def body() -> None:
        engine = CoroutineEngine(lambda request: 0.0 if request.group < 2 else 60.0)
        controller = Controller(source(), [engine], flow(2, 1.0))
        controller.start(0)
        assert await controller.next_batch(0, 10.0) is not None
        waiting = asyncio.create_task(controller.next_batch(1, 60.0))
        await asyncio.sleep(0)  # it has looked once, and waits
        controller.withdraw()
        assert await waiting is None
        engine.delay = lambda request: 0.0
        engine.version = 1
        controller.advance(1)
        await answered(controller, 2 * 4)
        assert await controller.next_batch(1, 10.0) is None, "also when it would be there"
        assert controller.state()["consumed"] == 2
        assert [index for index, _ in controller.state()["pending"]] == [2, 3, 4, 5]
        await controller.stop()

    run(body)


def test_without_its_buffer_a_resume_asks_again_what_was_overtaken() -> None:
    async def body() -> None:
        engine = CoroutineEngine(lambda request: 60.0 if request.group == 1 else 0.0)
        first = Controller(source(), [engine], flow(2, 2.0, selection="windowed"))
        first.start(0)
        taken = await train(first, [engine], 0, 2)
        await first.stop()
        saved = json.loads(json.dumps(first.state()))
        assert 1 not in [group.index for group in taken]
        assert saved["pending"][0][0] == 1
        quick = CoroutineEngine()
        quick.version = 2
        second = Controller(source(), [quick], flow(2, 2.0, selection="windowed"))
        second.load_state(saved)
        second.start(2)
        taken += await train(second, [quick], 2, 6)
        count = len(taken)
        asked = sorted(group.index for group in taken)
        assert len(set(asked)) == count == 12
        assert asked[:10] == list(range(10)), "the overtaken group came back, and no other is missing before the newest"
        prompts = expected_prompts(20)
        assert all(group.prompt.id == prompts[group.index] for group in taken)
        await second.stop()

    run(body)


def test_a_resume_with_another_batch_size_keeps_the_lag_bound() -> None:
    async def body() -> None:
        engine = CoroutineEngine()
        first = Controller(source(), [engine], flow(4, 1.0))
        first.start(0)
        await train(first, [engine], 0, 3)
        await first.stop()
        second = Controller(source(), [engine], flow(2, 1.0))
        second.load_state(first.state())
        second.start(3)
        groups = await train(second, [engine], 3, 8)
        assert [group.index for group in groups] == list(range(12, 22))
        assert max(3 + k // 2 - group.samples[0].start_version for k, group in enumerate(groups)) == 1
        await second.stop()

    run(body)


@pytest.mark.parametrize("more", [{}, {"selection": {"name": "exact_lag", "lag": 2}}])
@pytest.mark.parametrize("stop", [None, 2, 4, 5])
def test_fresh_steps_are_synchronous_also_after_a_resume_among_them_and_then_the_ratio_rules(
    stop: int | None, more: dict[str, Any]
) -> None:
    async def body() -> None:
        engine = CoroutineEngine()
        state, version, groups = None, 0, []
        for until in [8] if stop is None else [stop, 8]:
            controller = Controller(source(), [engine], flow(3, 2.0, **more), fresh_steps=4)
            if state is not None:
                controller.load_state(state)
            controller.start(version)
            groups += await train(controller, [engine], version, until)
            await controller.stop()
            state, version = controller.state(), until
        lags = [index // 3 - group.samples[0].start_version for index, group in enumerate(groups)]
        assert lags[: 4 * 3] == [0] * 12
        assert max(lags) == 2

    run(body)

"""Stopping and resuming: nothing is lost, nothing repeated, and the law holds on both sides."""

from __future__ import annotations

import asyncio
import json
import random
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from megatron_async_rl.flow.controller import Controller
from megatron_async_rl.samples import Group
from tests.unit.coroutine_engine import CoroutineEngine
from tests.unit.coroutine_flow import expected_prompts, flow, run, source, train


@settings(max_examples=40, deadline=None)
@given(
    seed=st.integers(0, 2**32), stops=st.lists(st.integers(0, 4), min_size=1, max_size=4), ratio=st.sampled_from([0.0, 0.5, 2.0])
)
def test_stopping_and_resuming_anywhere_loses_nothing_and_repeats_nothing(seed: int, stops: list[int], ratio: float) -> None:
    async def body() -> None:
        chance = random.Random(seed)
        state: dict[str, Any] | None = None
        version = 0
        consumed: list[Group] = []
        for steps in stops:
            engine = CoroutineEngine(lambda request: chance.choice([0.0, 0.001]))
            engine.version = version
            controller = Controller(source(), [engine], flow(3, ratio))
            if state is not None:
                controller.load_state(json.loads(json.dumps(state)))
                assert controller.state() == state, "a stop right after a resume loses nothing"
            controller.start(version)
            if chance.random() < 0.5:
                await asyncio.sleep(0.002)
            consumed += await train(controller, [engine], version, version + steps)
            version += steps
            await controller.stop()
            state = controller.state()
        assert state is not None
        assert state["consumed"] == 3 * version
        assert [group.index for group in consumed] == list(range(3 * version))
        assert [group.prompt.id for group in consumed] == expected_prompts(3 * version)

    run(body)


def test_a_resume_asks_again_what_was_overtaken() -> None:
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

"""Stopping and resuming: nothing is lost, nothing repeated, and the law holds on both sides."""

from __future__ import annotations

import asyncio
import json
import random
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from megatron_async_rl.flow.buffer import EMPTY, buffer_bytes, read_buffer
from megatron_async_rl.flow.controller import Controller
from megatron_async_rl.flow.controller_spec import DataState
from megatron_async_rl.flow.errors import RewardFailed
from megatron_async_rl.watchdog.watch import STOP
from tests.cases import looped
from tests.thorough import examples
from tests.unit.fake_engine import FakeEngine
from tests.unit.flow_setup import (
    TrainedGroup,
    WholeRewards,
    begin,
    controller_of,
    expected_prompts,
    flow,
    position,
    run,
    stage,
    train,
    until,
)


@settings(max_examples=examples(40, 20), deadline=None)
@given(
    seed=st.integers(0, 2**32),
    stops=st.lists(st.integers(0, 4), min_size=1, max_size=4),
    ratio=st.sampled_from([0.0, 0.5, 2.0]),
    keeps=st.booleans(),
    of_groups=st.booleans(),
)
def test_stopping_and_resuming_anywhere_loses_nothing_and_repeats_nothing(
    seed: int, stops: list[int], ratio: float, keeps: bool, of_groups: bool
) -> None:
    """`keeps`: the checkpoint has its buffer. `of_groups`: the reward is one per group, and takes
    its time."""

    async def body() -> None:
        chance = random.Random(seed)
        saved: DataState | None = None
        version = 0
        consumed: list[TrainedGroup] = []
        for steps in stops:
            engine = FakeEngine(lambda request: chance.choice([0.0, 0.001]))
            whole = WholeRewards(lambda samples: chance.choice([0.0, 0.003]))
            controller = controller_of([engine], flow(3, ratio), whole=whole if of_groups else None)
            await controller.start(saved)
            if saved is not None:
                again = await controller.state()
                assert again.state == saved.state, "a stop right after a resume loses nothing"
                assert again.buffer == (saved.buffer or buffer_bytes(EMPTY))
            await stage(controller, version)
            if chance.random() < 0.5:
                await asyncio.sleep(0.002)
            consumed += await train(controller, version, version + steps)
            version += steps
            await controller.close()
            left = read_buffer(saved.buffer) if saved and saved.buffer else EMPTY
            answered = {sample.id for group in left.groups for sample in group.samples}
            assert not answered & {request.id for request in engine.asked}, (
                "what had come is not asked again"
            )
            saved = await position(controller, buffer=keeps)
            saved = replace(saved, state=json.loads(json.dumps(saved.state)))
        assert saved is not None
        assert saved.state["consumed"] == 3 * version
        assert [group.index for group in consumed] == list(range(3 * version))
        assert [group.prompt.id for group in consumed] == expected_prompts(3 * version)
        rewards = [[sample.reward for sample in group.samples] for group in consumed]
        assert rewards == [[10.0, 11.0] if of_groups else [0.0, 1.0]] * len(consumed)

    run(body)


def test_a_resume_trains_on_the_responses_that_were_waiting() -> None:
    async def body() -> None:
        engine = FakeEngine(lambda request: 60.0 if request.id == "5-0" else 0.0)
        first = await begin([engine], flow(2, 2.0))
        await train(first, 0, 1)
        await answered(first, 2 * 8 - 1)
        await first.close()
        saved = await position(first)
        quick = FakeEngine()
        second = await begin([quick], flow(2, 2.0), version=1, position=saved)
        groups = await train(second, 1, 4)
        assert [quick.asked[0].id, quick.asked[0].prompt.id] == ["5-0", expected_prompts(6)[5]]
        assert [group.index for group in groups] == list(range(2, 8))
        starts = {sample.id: sample.start_version for group in groups for sample in group.samples}
        assert starts.pop("5-0") > 0
        assert list(starts.values()) == [0] * 7 + [1] * 4
        assert (await second.state()).state["consumed"] == 8
        await second.close()

        newer = replace(saved, oldest=1)
        third = await begin([FakeEngine()], flow(2, 2.0), version=1, position=newer)
        waiting = third._scheduler._table.waiting()
        kept = [group.index for group in waiting if 0 in {s.start_version for s in group.samples}]
        assert kept == [], "others are of version 0"
        await third.close()

    run(body)


async def answered(controller: Controller, count: int) -> None:
    await until(lambda: controller.stats()["samples"] >= count)


def test_after_a_stop_was_asked_no_batch_is_taken_and_the_position_is_that_of_what_was(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    # The names and logs of the controller's process are not this process's.
    for name in ("log_package_to", "name_this_process", "watch.join", "watch.fact"):
        monkeypatch.setattr(f"megatron_async_rl.flow.controller.{name}", lambda *_: None)

    async def body() -> None:
        engine = FakeEngine(lambda request: 0.0 if request.group < 2 else 60.0)
        controller = await begin([engine], flow(2, 1.0), run_dir=tmp_path)
        assert await controller.next_batch(0) is not None
        waiting = asyncio.create_task(controller.next_batch(1))
        await asyncio.sleep(0)  # it has looked once, and waits
        (tmp_path / STOP).touch()
        assert await waiting is None
        engine.delay = lambda request: 0.0
        await stage(controller, 1)
        await answered(controller, 2 * 4)
        assert await controller.next_batch(1) is None, "also when it would be there"
        state = (await controller.state()).state
        assert state["consumed"] == 2
        assert [index for index, _ in state["pending"]] == [2, 3, 4, 5]
        await controller.close()

    run(body)


def test_without_its_buffer_a_resume_asks_again_what_was_overtaken() -> None:
    async def body() -> None:
        engine = FakeEngine(lambda request: 60.0 if request.group == 1 else 0.0)
        first = await begin([engine], flow(2, 2.0, selection="windowed"))
        taken = await train(first, 0, 2)
        await first.close()
        saved = await position(first, buffer=False)
        assert 1 not in [group.index for group in taken]
        assert saved.state["pending"][0][0] == 1
        second = await begin(
            [FakeEngine()], flow(2, 2.0, selection="windowed"), version=2, position=saved
        )
        taken += await train(second, 2, 6)
        count = len(taken)
        asked = sorted(group.index for group in taken)
        assert len(set(asked)) == count == 12
        assert asked[:10] == list(range(10)), (
            "the overtaken group came back, and no other is missing before the newest"
        )
        prompts = expected_prompts(20)
        assert all(group.prompt.id == prompts[group.index] for group in taken)
        await second.close()

    run(body)


def test_a_run_whose_rewards_all_failed_resumes_once_the_reward_is_corrected() -> None:
    async def body() -> None:
        engine = FakeEngine()
        engine.reward = lambda request: None if request.group < 2 else 1.0
        first = await begin([engine], flow(2, 1.0))
        await answered(first, 2 * 4)
        saved = await position(first)
        with pytest.raises(RewardFailed):
            await first.next_batch(0)
        await first.close()
        corrected = FakeEngine()
        second = await begin([corrected], flow(2, 1.0), position=saved)
        groups = await train(second, 0, 2)
        assert sorted(group.index for group in groups) == [0, 1, 2, 3]
        assert all(sample.valid for group in groups for sample in group.samples)
        assert {0, 1} <= set(corrected.groups())
        assert not {2, 3} & set(corrected.groups()), "their rewards did not fail"
        await second.close()

    run(body)


def test_a_resume_with_another_batch_size_keeps_the_lag_bound() -> None:
    async def body() -> None:
        engine = FakeEngine()
        first = await begin([engine], flow(4, 1.0))
        await train(first, 0, 3)
        await first.close()
        saved = await position(first, buffer=False)
        second = await begin([FakeEngine()], flow(2, 1.0), version=3, position=saved)
        groups = await train(second, 3, 8)
        assert [group.index for group in groups] == list(range(12, 22))
        assert (
            max(3 + k // 2 - group.samples[0].start_version for k, group in enumerate(groups)) == 1
        )
        await second.close()

    run(body)


@looped("more", [{}, {"selection": {"name": "exact_lag", "lag": 2}}])
@looped("stop", [None, 2, 4, 5])
def test_fresh_steps_are_synchronous_also_after_a_resume_among_them_and_then_the_ratio_rules(
    stop: int | None, more: dict[str, Any]
) -> None:
    async def body() -> None:
        engine = FakeEngine()
        saved, version, groups = None, 0, []
        for last in [8] if stop is None else [stop, 8]:
            controller = await begin(
                [engine], flow(3, 2.0, **more), fresh_steps=4, version=version, position=saved
            )
            groups += await train(controller, version, last)
            await controller.close()
            saved, version = await position(controller, buffer=False), last
        lags = [index // 3 - group.samples[0].start_version for index, group in enumerate(groups)]
        assert lags[: 4 * 3] == [0] * 12
        assert max(lags) == 2

    run(body)

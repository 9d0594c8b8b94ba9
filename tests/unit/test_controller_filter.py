"""DAPO's dynamic sampling: groups of equal rewards are replaced, as long as there is patience."""

from __future__ import annotations

import random
from collections.abc import Callable

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from megatron_async_rl.samples.types import Request
from tests.thorough import examples
from tests.unit.fake_engine import FakeEngine
from tests.unit.flow_setup import (
    WholeRewards,
    begin,
    expected_prompts,
    flow,
    position,
    run,
    train,
)


def equal(which: Callable[[int], bool]) -> Callable[[Request], float]:
    """Rewards that are equal in the groups that `which(index)` names."""
    return lambda request: 0.5 if which(request.group) else float(request.k)


@settings(max_examples=examples(30, 15), deadline=None)
@given(
    ratio=st.sampled_from([0.0, 0.5, 1.0, 2.5]),
    dull=st.sets(st.integers(0, 40), max_size=25),
    seed=st.integers(0, 10**6),
)
def test_equal_groups_are_replaced_in_order_and_no_sample_is_older_than_the_law_permits(
    ratio: float, dull: set[int], seed: int
) -> None:
    """Batches stay full and in admission order whatever finishes when; the lag check inside the
    controller is on."""

    async def body() -> None:
        chance = random.Random(seed)
        engine = FakeEngine(lambda request: chance.choice([0.0, 0.0, 0.001, 0.003]))
        engine.reward = equal(lambda index: index in dull)
        controller = await begin([engine], flow(3, ratio, dynamic_sampling=True), steps=5)
        groups = await train(controller, 0, 5)
        kept = [index for index in range(100) if index not in dull][:15]
        assert [group.index for group in groups] == kept
        stats = controller.stats()
        assert stats["dropped_equal"] >= sum(index < kept[-1] for index in dull)
        assert stats["admitted"] <= 15 + stats["dropped_equal"]
        assert {sample.reward for sample in controller._scheduler.drain_dropped()} <= {0.5}
        await controller.close()

    run(body)


def test_without_dynamic_sampling_equal_groups_are_trained_on() -> None:
    async def body() -> None:
        engine = FakeEngine()
        engine.reward = equal(lambda index: True)
        controller = await begin([engine], flow(3, 1.0))
        assert [group.index for group in await train(controller, 0, 2)] == list(range(6))
        await controller.close()

    run(body)


@pytest.mark.parametrize("ratio", [0.0, 2.0])
def test_when_every_group_is_equal_each_batch_comes_after_ten_batches_worth_of_drops(
    ratio: float,
) -> None:
    async def body() -> None:
        engine = FakeEngine()
        engine.reward = equal(lambda index: True)
        controller = await begin([engine], flow(3, ratio, dynamic_sampling=True), steps=2)
        assert [group.index for group in await train(controller, 0, 2)] == [
            30,
            31,
            32,
            63,
            64,
            65,
        ]
        await controller.close()

    run(body)


def test_a_resume_asks_again_what_was_not_consumed_and_drops_nothing_twice() -> None:
    async def body() -> None:
        engine = FakeEngine()
        engine.reward = equal(lambda index: index in (1, 4, 5))
        controller = await begin([engine], flow(2, 1.0, dynamic_sampling=True))
        first = await train(controller, 0, 2)
        await controller.close()
        saved = await position(controller, buffer=False)
        assert [group.index for group in first] == [0, 2, 3, 6]
        fresh = FakeEngine()
        fresh.reward = engine.reward
        again = await begin([fresh], flow(2, 1.0, dynamic_sampling=True), version=2, position=saved)
        rest = await train(again, 2, 4)
        assert [group.index for group in rest] == [7, 8, 9, 10]
        assert [group.prompt.id for group in rest] == expected_prompts(11)[7:]
        await again.close()

    run(body)


@pytest.mark.parametrize("lag", [1, 2])
def test_exact_lag_waits_for_rewards_of_groups_that_may_still_be_replaced(lag: int) -> None:
    async def body() -> None:
        chance = random.Random(lag)
        rewards = WholeRewards(lambda samples: chance.choice([0.0, 2.0, 9.0]))
        engine = FakeEngine(lambda request: chance.choice([0.0, 0.5]))
        engine.reward = equal(lambda index: index % 3 == 1)
        controller = await begin(
            [engine],
            flow(
                2,
                float(lag),
                dynamic_sampling=True,
                selection={"name": "exact_lag", "lag": lag},
            ),
            steps=8,
            whole=rewards,
        )
        # The controller raises StalenessViolated for a sample of two versions.
        groups = await train(controller, 0, 8)
        assert [group.index % 3 == 1 for group in groups] == [False] * 16
        assert {len(set(one.versions)) for group in groups for one in group.samples} == {1}
        await controller.close()

    run(body)

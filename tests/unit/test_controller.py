"""The controller: admission order, deadlines, failures and resumes, with engines that are coroutines of this test."""

import asyncio
import json
import math
import pickle
import random
from collections.abc import Callable, Coroutine
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from megatron_async_rl.config.schema import FlowConfig
from megatron_async_rl.data import PromptSource
from megatron_async_rl.flow.controller import Controller
from megatron_async_rl.flow.errors import BatchTimeout, EngineFailed, RewardFailed
from megatron_async_rl.flow.law import StalenessViolated
from megatron_async_rl.samples import Group, Prompt, Sample

PROMPTS = [Prompt(id=f"p{i}", text=str(i), token_ids=(i,)) for i in range(7)]


class CoroutineEngine:
    """Answers after `delay(index)` seconds of the loop's clock; `version` is what the trainer last loaded."""

    def __init__(self, delay: Callable[[int], float] = lambda index: 0.0) -> None:
        self.delay = delay
        self.version = 0
        self.asked: list[tuple[int, str, int]] = []
        self.stamp: Callable[[int, int], int] = lambda index, version: version
        self.errors: dict[int, Exception] = {}
        self.reward_errors: set[int] = set()
        self.alter: Callable[[Group], Group] = lambda group: group

    async def generate_group(self, index: int, prompt: Prompt, n: int, admitted_version: int) -> Group:
        self.asked.append((index, prompt.id, self.version))
        start = self.stamp(index, self.version)
        await asyncio.sleep(self.delay(index))
        if index in self.errors:
            raise self.errors[index]
        end = max(start, self.version)
        samples = tuple(self.sample(index, k, prompt, start, end) for k in range(n))
        return self.alter(Group(index=index, prompt=prompt, samples=samples, admitted_version=admitted_version))

    def sample(self, index: int, k: int, prompt: Prompt, start: int, end: int) -> Sample:
        return Sample(
            id=f"{index}-{k}",
            prompt=prompt,
            response_ids=np.array([1, 2], dtype=np.int32),
            behavior_logprobs=np.zeros(2, dtype=np.float32),
            versions=np.array([start, end], dtype=np.int32),
            loss_mask=np.ones(2, dtype=np.uint8),
            text="ab",
            finish_reason="length" if k == 0 else "stop",
            reward=float(k),
            reward_error="ValueError: no idea" if index in self.reward_errors and k == 1 else None,
        )


def flow(prompts_per_step: int = 3, async_ratio: float = 1.0) -> FlowConfig:
    return FlowConfig(prompts_per_step=prompts_per_step, group_size=2, async_ratio=async_ratio)


def source() -> PromptSource:
    return PromptSource(PROMPTS, seed=5, shuffle=True)


def run(body: Callable[[], Coroutine[Any, Any, None]]) -> None:
    asyncio.run(asyncio.wait_for(body(), 20))


def expected_prompts(count: int) -> list[str]:
    reference = source()
    return [reference.next().id for _ in range(count)]


async def train(controller: Controller, engines: list[CoroutineEngine], first: int, last: int) -> list[Group]:
    """The trainer's side for versions first..last-1; returns the consumed groups in order."""
    groups: list[Group] = []
    for version in range(first, last):
        groups += (await controller.next_batch(version, 10.0)).groups
        for engine in engines:
            engine.version = version + 1
        controller.advance(version + 1)
    return groups


def test_groups_are_consumed_in_admission_order_whatever_order_they_finish_in() -> None:
    async def body() -> None:
        chance = random.Random(1)
        engines = [CoroutineEngine(lambda index: chance.random() * 0.02) for _ in range(2)]
        controller = Controller(source(), engines, flow())
        controller.start(0)
        groups = await train(controller, engines, 0, 6)
        assert [group.index for group in groups] == list(range(18))
        assert [group.prompt.id for group in groups] == expected_prompts(18)
        await controller.stop()

    run(body)


@pytest.mark.parametrize("ratio", [0.0, 0.5, 1.0, 2.0])
def test_admission_stops_at_the_law_and_goes_on_when_the_version_grows(ratio: float) -> None:
    async def body() -> None:
        engine = CoroutineEngine()
        controller = Controller(source(), [engine], flow(4, ratio))
        controller.start(0)
        await asyncio.sleep(0.02)
        assert len(engine.asked) == 4 + math.ceil(4 * ratio)
        await controller.next_batch(0, 1.0)
        await asyncio.sleep(0.02)
        assert len(engine.asked) == 4 + math.ceil(4 * ratio), "consuming alone admits nothing: the weights are still old"
        controller.advance(1)
        await asyncio.sleep(0.02)
        assert len(engine.asked) == 8 + math.ceil(4 * ratio)

    run(body)


@settings(max_examples=30, deadline=None)
@given(seed=st.integers(0, 2**32), ratio=st.sampled_from([0.0, 0.3, 1.0, 1.5, 3.0]), engines=st.integers(1, 3))
def test_lags_stay_within_the_bound_under_random_durations(seed: int, ratio: float, engines: int) -> None:
    async def body() -> None:
        chance = random.Random(seed)
        fleet = [CoroutineEngine(lambda index: chance.choice([0.0, 0.0, 0.001, 0.004])) for _ in range(engines)]
        controller = Controller(source(), fleet, flow(2, ratio))
        controller.start(0)
        for version in range(8):
            batch = await controller.next_batch(version, 10.0)
            lags = [version - sample.start_version for sample in batch.samples()]
            assert min(lags) >= 0
            assert max(lags) <= math.ceil(ratio)
            for engine in fleet:
                engine.version = version + 1
            controller.advance(version + 1)
        await controller.stop()

    run(body)


def test_a_sample_older_than_the_bound_stops_the_run() -> None:
    async def body() -> None:
        engine = CoroutineEngine()
        engine.stamp = lambda index, version: 0
        controller = Controller(source(), [engine], flow(3, 1.0))
        controller.start(0)
        await train(controller, [engine], 0, 2)
        with pytest.raises(StalenessViolated, match=r"sample 6-0 starts at version 0, 2 behind 2; .* permits 1"):
            await controller.next_batch(2, 1.0)

    run(body)


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
            engine = CoroutineEngine(lambda index: chance.choice([0.0, 0.001]))
            engine.version = version
            controller = Controller(source(), [engine], flow(3, ratio))
            if state is not None:
                controller.load_state(json.loads(json.dumps(state)))
            controller.start(version)
            if chance.random() < 0.5:
                await asyncio.sleep(0.002)
            consumed += await train(controller, [engine], version, version + steps)
            version += steps
            state = controller.state()
            await controller.stop()
            assert controller.state() == state
        assert [group.index for group in consumed] == list(range(3 * version))
        assert [group.prompt.id for group in consumed] == expected_prompts(3 * version)

    run(body)


def test_a_resume_with_another_batch_size_keeps_the_lag_bound() -> None:
    async def body() -> None:
        engine = CoroutineEngine()
        first = Controller(source(), [engine], flow(4, 1.0))
        first.start(0)
        await train(first, [engine], 0, 3)
        second = Controller(source(), [engine], flow(2, 1.0))
        second.load_state(first.state())
        engine.asked.clear()
        second.start(3)
        groups = await train(second, [engine], 3, 8)
        assert [group.index for group in groups] == list(range(12, 22))
        assert max(3 + k // 2 - group.samples[0].start_version for k, group in enumerate(groups)) == 1

    run(body)


@pytest.mark.parametrize("stop", [None, 2, 4, 5])
def test_fresh_steps_are_synchronous_also_after_a_resume_among_them_and_then_the_ratio_rules(stop: int | None) -> None:
    async def body() -> None:
        engine = CoroutineEngine()
        state, version, groups = None, 0, []
        for until in [8] if stop is None else [stop, 8]:
            controller = Controller(source(), [engine], flow(3, 2.0), fresh_steps=4)
            if state is not None:
                controller.load_state(state)
            controller.start(version)
            groups += await train(controller, [engine], version, until)
            state, version = controller.state(), until
            await controller.stop()
        lags = [index // 3 - group.samples[0].start_version for index, group in enumerate(groups)]
        assert lags[: 4 * 3] == [0] * 12
        assert max(lags) == 2

    run(body)


def test_nothing_is_admitted_that_no_step_will_consume() -> None:
    async def body() -> None:
        engine = CoroutineEngine()
        controller = Controller(source(), [engine], flow(3, 2.0), steps=4)
        controller.start(0)
        assert len(await train(controller, [engine], 0, 4)) == 12
        assert len(engine.asked) == 12
        with pytest.raises(ValueError, match="the run's 4 steps are consumed"):
            await controller.next_batch(4, 1.0)

    run(body)


def test_a_late_batch_says_which_groups_are_missing_where_and_for_how_long() -> None:
    async def body() -> None:
        engines = [CoroutineEngine(), CoroutineEngine(lambda index: 60.0)]
        controller = Controller(source(), engines, flow(3, 0.0))
        controller.start(0)
        with pytest.raises(BatchTimeout) as caught:
            await controller.next_batch(0, 0.1)
        message = str(caught.value)
        assert "the batch for version 0 is incomplete after 0.1 s: 1 of 3 groups are missing" in message
        assert f"group 1 (prompt {expected_prompts(2)[1]}): 0.1 s on engine 1" in message
        assert "group 0" not in message
        await controller.stop()

    run(body)


@pytest.mark.parametrize("failing", [0, 4])
def test_an_engines_error_ends_the_wait_at_once_and_names_the_engine(failing: int) -> None:
    async def body() -> None:
        engine = CoroutineEngine(lambda index: 0.0 if index == failing else 60.0)
        engine.errors = {failing: MemoryError("no more cache")}
        controller = Controller(source(), [engine], flow(3, 1.0))
        controller.start(0)
        with pytest.raises(EngineFailed, match=f"engine 0 failed on group {failing} .*MemoryError: no more cache") as caught:
            await controller.next_batch(0, 30.0)
        assert isinstance(caught.value.__cause__, MemoryError)
        asked = len(engine.asked)
        controller.advance(1)
        await asyncio.sleep(0.01)
        assert len(engine.asked) == asked, "a failed run admits nothing more"
        await controller.stop()

    run(body)


def test_an_answer_to_another_question_is_an_engine_failure() -> None:
    async def body() -> None:
        engine = CoroutineEngine()
        engine.alter = lambda group: replace(group, samples=group.samples[:1])
        controller = Controller(source(), [engine], flow())
        controller.start(0)
        with pytest.raises(EngineFailed, match=r"asked for group 0: 2 samples .* answered with group 0: 1 samples"):
            await controller.next_batch(0, 1.0)

    run(body)


def test_a_failed_reward_is_counted_and_passed_on_or_stops_the_run_as_configured() -> None:
    async def body() -> None:
        engine = CoroutineEngine()
        engine.reward_errors = {1}
        dropping = Controller(source(), [engine], flow(), on_reward_error="drop")
        dropping.start(0)
        batch = await dropping.next_batch(0, 1.0)
        assert [sample.id for sample in batch.samples() if not sample.valid] == ["1-1"]
        assert dropping.stats()["reward_errors"] == 1
        stopping = Controller(source(), [engine], flow(), on_reward_error="stop")
        stopping.start(0)
        with pytest.raises(RewardFailed, match="the reward failed on sample 1-1: ValueError: no idea"):
            await stopping.next_batch(0, 1.0)

    run(body)


def test_groups_go_to_the_least_loaded_engine_in_turn_among_equals() -> None:
    async def body() -> None:
        engines = [CoroutineEngine(lambda index: 60.0), CoroutineEngine(lambda index: 60.0), CoroutineEngine()]
        controller = Controller(source(), engines, flow(3, 1.0))
        controller.start(0)
        await asyncio.sleep(0.02)
        assert [[index for index, _, _ in engine.asked] for engine in engines] == [[0, 3], [1, 4], [2, 5]]
        result = await controller.evaluate(PROMPTS[:3], 1, 0, 1.0)
        assert result.samples == 3
        assert [index for index, _, _ in engines[2].asked] == [2, 5, -1, -2, -3]
        await controller.stop()

    run(body)


def test_versions_only_grow_and_a_batch_is_for_the_version_the_engines_hold() -> None:
    async def body() -> None:
        controller = Controller(source(), [CoroutineEngine()], flow())
        with pytest.raises(RuntimeError, match="before start"):
            controller.advance(1)
        controller.start(3)
        controller.advance(3)
        with pytest.raises(ValueError, match="at 3, asked to advance to 2"):
            controller.advance(2)
        with pytest.raises(ValueError, match="version 4, but the engines hold 3"):
            await controller.next_batch(4, 1.0)
        with pytest.raises(RuntimeError, match="started already"):
            controller.start(3)
        with pytest.raises(RuntimeError, match="load_state after start"):
            controller.load_state(controller.state())
        await controller.stop()

    run(body)


def test_evaluation_changes_nothing_of_training() -> None:
    async def body() -> None:
        engine = CoroutineEngine()
        engine.reward_errors = {-2}
        controller = Controller(source(), [engine], flow())
        before = controller.state()
        result = await controller.evaluate(PROMPTS, 2, 0, 5.0)
        assert controller.state() == before
        assert controller.stats()["admitted"] == controller.stats()["tokens"] == 0
        assert [index for index, _, _ in engine.asked] == [-1 - i for i in range(7)]
        assert result.per_prompt == (0.5, 0.0, 0.5, 0.5, 0.5, 0.5, 0.5)
        assert result.mean_reward == pytest.approx(3.0 / 7)
        assert (result.truncated, result.tokens, result.samples, result.reward_errors) == (0.5, 28, 14, 1)
        engine.delay = lambda index: 60.0 if index == -3 else 0.0
        with pytest.raises(BatchTimeout, match=r"1 of 7 prompts are missing, among them p2 on engine 0"):
            await controller.evaluate(PROMPTS, 2, 0, 0.1)
        engine.errors = {-1: ValueError("broken")}
        with pytest.raises(EngineFailed, match="engine 0 failed on group -1"):
            await controller.evaluate(PROMPTS, 2, 0, 5.0)

    run(body)


def test_stats_account_for_every_admitted_group() -> None:
    async def body() -> None:
        engine = CoroutineEngine(lambda index: 60.0 if index in (1, 4) else 0.0)
        controller = Controller(source(), [engine], flow(3, 1.0))
        controller.start(0)
        await asyncio.sleep(0.05)
        stats = controller.stats()
        assert stats["oldest_in_flight_s"] >= 0.04
        del stats["oldest_in_flight_s"]
        assert stats == {
            "admitted": 6,
            "finished": 4,
            "consumed": 0,
            "dropped_equal": 0,
            "in_flight": 2,
            "buffered": 4,
            "samples": 8,
            "tokens": 16,
            "truncated": 4,
            "reward_errors": 0,
        }
        await controller.stop()

    run(body)


@pytest.mark.parametrize("kind", [BatchTimeout, EngineFailed, RewardFailed, StalenessViolated])
def test_errors_survive_the_trip_between_processes(kind: type[Exception]) -> None:
    again = pickle.loads(pickle.dumps(kind("who, where, why")))
    assert (type(again), str(again)) == (kind, "who, where, why")


def equal_rewards(which):
    """Makes the groups that `which(index)` names have equal rewards."""

    def alter(group: Group) -> Group:
        if not which(group.index):
            return group
        return replace(group, samples=tuple(replace(sample, reward=0.5) for sample in group.samples))

    return alter


def filtering(prompts_per_step: int, async_ratio: float) -> FlowConfig:
    return FlowConfig(prompts_per_step=prompts_per_step, group_size=2, async_ratio=async_ratio, filter_equal_groups=True)


@settings(max_examples=40, deadline=None)
@given(ratio=st.sampled_from([0.0, 0.5, 1.0, 2.5]), equal=st.sets(st.integers(0, 40), max_size=25), seed=st.integers(0, 10**6))
def test_equal_groups_are_replaced_in_order_and_no_sample_is_older_than_the_law_permits(ratio, equal, seed) -> None:
    """Batches stay full and in admission order whatever finishes when; the lag check inside the controller is on."""

    async def body() -> None:
        chance = random.Random(seed)
        engine = CoroutineEngine(lambda index: chance.choice([0.0, 0.0, 0.001, 0.003]))
        engine.alter = equal_rewards(lambda index: index in equal)
        controller = Controller(source(), [engine], filtering(3, ratio), steps=5)
        controller.start(0)
        groups = await train(controller, [engine], 0, 5)
        kept = [index for index in range(100) if index not in equal][:15]
        assert [group.index for group in groups] == kept
        last_dropped = sum(index < kept[-1] for index in equal)
        assert controller.stats()["dropped_equal"] >= last_dropped
        assert controller.stats()["admitted"] <= 15 + controller.stats()["dropped_equal"]
        await controller.stop()

    run(body)


def test_without_the_filter_equal_groups_are_trained_on() -> None:
    async def body() -> None:
        engine = CoroutineEngine()
        engine.alter = equal_rewards(lambda index: True)
        controller = Controller(source(), [engine], flow(3, 1.0))
        controller.start(0)
        assert [group.index for group in await train(controller, [engine], 0, 2)] == list(range(6))
        await controller.stop()

    run(body)


def test_when_every_group_is_equal_the_batch_comes_all_the_same() -> None:
    async def body() -> None:
        engine = CoroutineEngine()
        engine.alter = equal_rewards(lambda index: True)
        controller = Controller(source(), [engine], filtering(3, 0.0))
        controller.start(0)
        assert [group.index for group in (await controller.next_batch(0, 5.0)).groups] == [30, 31, 32]
        await controller.stop()

    run(body)


def test_a_resume_asks_again_what_was_not_consumed_and_drops_nothing_twice() -> None:
    async def body() -> None:
        engine = CoroutineEngine()
        engine.alter = equal_rewards(lambda index: index in (1, 4, 5))
        controller = Controller(source(), [engine], filtering(2, 1.0))
        controller.start(0)
        first = await train(controller, [engine], 0, 2)
        saved = json.loads(json.dumps(controller.state()))
        await controller.stop()
        assert [group.index for group in first] == [0, 2, 3, 6]
        again = Controller(source(), [engine], filtering(2, 1.0))
        again.load_state(saved)
        again.start(2)
        rest = await train(again, [engine], 2, 4)
        assert [group.index for group in rest] == [7, 8, 9, 10]
        assert [group.prompt.id for group in rest] == expected_prompts(11)[7:]
        await again.stop()

    run(body)

"""Held-out evaluation through the controller, while training's responses are under way on the same engines or on others."""

from __future__ import annotations

import asyncio

import pytest

from megatron_async_rl.flow.controller import Controller
from megatron_async_rl.flow.errors import BatchTimeout
from megatron_async_rl.flow.evaluation import EvalResult, WeightsMoved
from tests.unit.coroutine_engine import CoroutineEngine
from tests.unit.coroutine_flow import PROMPTS, flow, run, source, train


async def evaluated(controller: Controller, version: int, timeout_s: float = 5.0) -> EvalResult:
    return await controller.evaluate(PROMPTS, 2, version, timeout_s, pass_at=(1, 2), pass_reward=1.0)


def test_evaluation_changes_nothing_of_training() -> None:
    async def body() -> None:
        consumed = []
        for evaluates in (False, True):
            engine = CoroutineEngine(lambda request: 0.002)
            controller = Controller(source(), [engine], flow())
            if evaluates:
                before = controller.state()
                await evaluated(controller, 0)
                assert controller.state() == before
            controller.start(0)
            groups = await train(controller, [engine], 0, 3)
            if evaluates:
                before, counts = controller.state(), controller.stats()["consumed"]
                assert (await evaluated(controller, 3)).mean_reward == 0.5
                assert (controller.state(), controller.stats()["consumed"]) == (before, counts)
            groups += await train(controller, [engine], 3, 5)
            consumed.append([(group.index, group.prompt.id) for group in groups])
            assert [group for group in engine.groups() if group < 0] == ([-1 - i for i in range(7)] if evaluates else [])
            await controller.stop()
        assert consumed[0] == consumed[1]

    run(body)


def test_engines_of_their_own_evaluate_and_see_no_training_request_while_training_goes_on() -> None:
    async def body() -> None:
        engine, evaluator = CoroutineEngine(), CoroutineEngine(lambda request: 0.05)
        evaluator.version = 2
        controller = Controller(source(), [engine], flow(), evaluators=[evaluator])
        controller.start(0)
        evaluation = asyncio.create_task(evaluated(controller, 2))
        await train(controller, [engine], 0, 4)
        assert not evaluation.done(), "the engines of training went on to version 4 meanwhile"
        assert (await evaluation).version == 2
        assert min(engine.groups()) >= 0
        assert max(evaluator.groups()) < 0
        await controller.stop()

    run(body)


@pytest.mark.parametrize("separate", [False, True])
def test_what_an_evaluation_has_waiting_is_no_response_of_training(separate: bool) -> None:
    async def body() -> None:
        engines = [CoroutineEngine(lambda request: 0.02) for _ in range(1 + separate)]
        controller = Controller(source(), engines[:1], flow(), evaluators=engines[1:], capacity=3)
        controller.start(0)
        admitted = controller.stats()["open"]
        evaluation = asyncio.create_task(evaluated(controller, 0))
        await asyncio.sleep(0)
        await asyncio.sleep(0)
        counts = controller.stats()
        assert counts["waiting"] == admitted - 3
        assert counts["in_flight"] == 3, "what the engine took before the evaluation came"
        await evaluation
        await controller.stop()

    run(body)


def test_weights_that_move_under_an_evaluation_are_noticed() -> None:
    async def body() -> None:
        engine = CoroutineEngine(lambda request: 0.02)
        controller = Controller(source(), [engine], flow())
        evaluation = asyncio.create_task(evaluated(controller, 0))
        await asyncio.sleep(0.005)
        engine.version = 1
        with pytest.raises(WeightsMoved, match="evaluation of version 0"):
            await evaluation
        await controller.stop()

    run(body)


def test_what_an_evaluation_that_was_given_up_had_running_is_stopped_on_the_engine() -> None:
    async def body() -> None:
        engine = CoroutineEngine(lambda request: 60.0 if request.prompt.id == "p2" else 0.0)
        controller = Controller(source(), [engine], flow())
        with pytest.raises(BatchTimeout, match=r"1 of 7 are missing, among them p2"):
            await evaluated(controller, 0, timeout_s=0.05)
        await asyncio.sleep(0.01)
        assert sorted(engine.cuts) == ["-3-0", "-3-1"]
        engine.delay = lambda request: 0.0
        assert (await evaluated(controller, 0)).samples == 14, "and may be asked again"
        await controller.stop()

    run(body)

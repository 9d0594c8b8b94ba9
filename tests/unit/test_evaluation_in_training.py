"""Held-out evaluation through the controller, while training's responses are under way on the same
engines or on others."""

from __future__ import annotations

import asyncio

import pytest

from megatron_async_rl.flow.controller import Controller
from megatron_async_rl.flow.errors import BatchTimeout
from megatron_async_rl.flow.evaluation import EvalResult, WeightsMoved
from tests.unit.fake_engine import FakeEngine, manifest
from tests.unit.flow_setup import begin, controller_of, flow, run, stage, train, until


async def evaluated(controller: Controller, version: int) -> EvalResult:
    result = await controller.evaluate(version)
    assert result is not None
    return result


def test_evaluation_changes_nothing_of_training() -> None:
    async def body() -> None:
        consumed = []
        for evaluates in (False, True):
            engine = FakeEngine(lambda request: 0.002)
            controller = await begin([engine], flow())
            if evaluates:
                before = (await controller.state()).state
                await evaluated(controller, 0)
                assert (await controller.state()).state == before
            groups = await train(controller, 0, 3)
            if evaluates:
                before, counts = (await controller.state()).state, controller.stats()["consumed"]
                assert (await evaluated(controller, 3)).mean_reward == 0.5
                after = (await controller.state()).state
                assert (after, controller.stats()["consumed"]) == (before, counts)
            groups += await train(controller, 3, 5)
            consumed.append([(group.index, group.prompt.id) for group in groups])
            held_out = [group for group in engine.groups() if group < 0]
            assert held_out == ([-1 - i for i in range(7)] if evaluates else [])
            await controller.close()
        assert consumed[0] == consumed[1]

    run(body)


def test_evaluation_engines_see_no_training_request_while_training_continues() -> None:
    async def body() -> None:
        engine, evaluator = FakeEngine(), FakeEngine()
        evaluator.gate.clear()
        controller = await begin([engine, evaluator], flow(), evaluators=1, version=2)
        assert evaluator.updates == [], "it is given weights only to evaluate them"
        evaluation = asyncio.create_task(evaluated(controller, 2))
        await until(lambda: evaluator.asked)
        await train(controller, 2, 6)
        assert not evaluation.done(), "the engines of training continued to version 6 meanwhile"
        evaluator.gate.set()
        assert (await evaluation).version == 2
        assert evaluator.updates == [2]
        assert min(engine.groups()) >= 0
        assert max(evaluator.groups()) < 0
        assert (await evaluated(controller, 6)).version == 6
        await controller.close()

    run(body)


def test_the_version_to_evaluate_is_kept_for_its_engines_while_newer_ones_are_staged() -> None:
    async def body() -> None:
        engine, evaluator = FakeEngine(), FakeEngine()
        gate = asyncio.Event()
        evaluator.before_update = lambda version: gate.wait()
        controller = await begin([engine, evaluator], flow(), evaluators=1)
        evaluation = asyncio.create_task(evaluated(controller, 0))
        await until(lambda: evaluator.calls)
        released = asyncio.create_task(controller.staged(1, manifest(1)))
        await until(lambda: engine.version == 1)
        assert not released.done(), "version 0 is still being read"
        gate.set()
        await released
        assert (await evaluation).version == 0
        await controller.close()

    run(body)


def test_an_evaluation_asked_for_before_its_version_is_staged_waits_for_it() -> None:
    """Rank 0 requests both at once, and Ray may hand an actor the second call first."""

    async def body() -> None:
        controller = await begin([FakeEngine(), FakeEngine()], flow(), evaluators=1)
        evaluation = asyncio.create_task(evaluated(controller, 1))
        for _ in range(10):
            await asyncio.sleep(0)
        assert not evaluation.done()
        await controller.staged(1, manifest(1))
        assert (await evaluation).version == 1
        await controller.close()

    run(body)


@pytest.mark.parametrize("when", ["before", "meanwhile"])
def test_without_an_evaluation_engine_training_continues_with_a_note(
    when: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    notes: list[str] = []
    monkeypatch.setattr(Controller, "note", lambda self, text: notes.append(text))

    async def body() -> None:
        engine, evaluator = FakeEngine(), FakeEngine(lambda request: 60.0)
        controller = await begin([engine, evaluator], flow(), evaluators=1, restarts_per_hour=0)
        evaluation = None
        if when == "meanwhile":
            evaluation = asyncio.create_task(controller.evaluate(0))
            await until(lambda: evaluator.asked)
        evaluator.fail(RuntimeError("out of memory"))
        await until(lambda: controller._fleet.slots[1].dead)
        assert await (evaluation or controller.evaluate(0)) is None
        assert any(text.startswith("version 0 is not evaluated: no eval") for text in notes)
        assert len(await train(controller, 0, 2)) == 6, "and the training engines do not step in"
        assert min(engine.groups()) >= 0
        await controller.close()

    run(body)


def test_what_a_lost_evaluation_engine_had_is_asked_of_the_other_that_holds_the_version() -> None:
    async def body() -> None:
        engine, broken, other = FakeEngine(), FakeEngine(lambda request: 60.0), FakeEngine()
        controller = await begin([engine, broken, other], flow(), evaluators=2, restarts_per_hour=0)
        evaluation = asyncio.create_task(evaluated(controller, 0))
        await until(lambda: broken.asked)
        broken.fail(RuntimeError("out of memory"))
        assert (await evaluation).samples == 14
        await controller.close()

    run(body)


@pytest.mark.parametrize("separate", [False, True])
def test_what_an_evaluation_has_waiting_is_no_response_of_training(separate: bool) -> None:
    async def body() -> None:
        engines = [FakeEngine() for _ in range(1 + separate)]
        engines[0].gate.clear()
        controller = await begin(engines, flow(), evaluators=int(separate), capacity=3)
        admitted = controller.stats()["open"]
        evaluation = asyncio.create_task(evaluated(controller, 0))
        await asyncio.sleep(0)
        await asyncio.sleep(0)
        counts = controller.stats()
        assert counts["waiting"] == admitted - 3
        assert counts["in_flight"] == 3, "what the engine took before the evaluation came"
        engines[0].gate.set()
        await evaluation
        await controller.close()

    run(body)


def test_weights_that_move_under_an_evaluation_are_noticed() -> None:
    async def body() -> None:
        engine = FakeEngine()
        controller = await begin([engine], flow())
        engine.gate.clear()
        evaluation = asyncio.create_task(evaluated(controller, 0))
        await until(lambda: any(request.group < 0 for request in engine.asked))
        engine.version = 1
        engine.gate.set()
        with pytest.raises(WeightsMoved, match="evaluation of version 0"):
            await evaluation
        await controller.close()

    run(body)


def test_what_an_evaluation_that_was_given_up_had_running_is_stopped_on_the_engine() -> None:
    async def body() -> None:
        engine = FakeEngine(lambda request: 60.0 if request.prompt.id == "p2" else 0.0)
        controller = controller_of([engine], flow(), timeout_s=0.1)
        await controller.start()
        controller._admit = lambda: None  # type: ignore[method-assign]
        await stage(controller, 0)
        with pytest.raises(BatchTimeout, match=r"1 of 7 are missing, among them p2"):
            await evaluated(controller, 0)
        await until(lambda: len(engine.aborts) == 2)
        assert sorted(engine.aborts) == ["-3-0", "-3-1"]
        engine.delay = lambda request: 0.0
        assert (await evaluated(controller, 0)).samples == 14, "and may be asked again"
        await controller.close()

    run(body)

"""Engines that raise, wedge, fall silent or answer what they were not asked: every request is answered once all the same."""

from __future__ import annotations

import asyncio
import random
import re
from collections import Counter
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from megatron_async_rl.flow.controller import Controller
from megatron_async_rl.flow.errors import EngineFailed
from megatron_async_rl.samples import Prompt
from megatron_async_rl.samples.requests import Cut, Request
from tests.unit.coroutine_engine import CoroutineEngine, prefix
from tests.unit.coroutine_fleet import Desk, ids, never, requests
from tests.unit.coroutine_flow import PROMPTS, flow, run, source


def raises(engine: CoroutineEngine) -> None:
    engine.fail(RuntimeError("out of memory"))


def wedges(engine: CoroutineEngine) -> None:
    engine.wedged = True


def falls_silent(engine: CoroutineEngine) -> None:
    engine.silent_s = 99.0


def answers_another_question(engine: CoroutineEngine) -> None:
    engine.say(replace(engine.sample(engine.asked[0]), prompt=Prompt(id="other", text="", token_ids=(1,))))


def answers_what_nobody_asked(engine: CoroutineEngine) -> None:
    engine.say(replace(engine.sample(engine.asked[0]), id="77-0"))


def cuts_what_nobody_cut(engine: CoroutineEngine) -> None:
    engine.say(Cut(id=engine.asked[0].id, prefix=None))


@pytest.mark.parametrize(
    ("break_it", "reason"),
    [
        (raises, "RuntimeError: out of memory"),
        (wedges, r"it did not answer for 0.3 s \(rollout.unresponsive_s\)"),
        (falls_silent, "its vLLM process did not answer for 99 s"),
        (answers_another_question, "it answered 0-0, prompt other, which it was not asked"),
        (answers_what_nobody_asked, "it answered 77-0, prompt p0, which it was not asked"),
        (cuts_what_nobody_cut, "it cut 0-0, which it was not told to"),
    ],
)
def test_what_a_lost_engine_had_not_answered_is_asked_again_elsewhere_and_answered_once(
    break_it: Callable[[CoroutineEngine], None], reason: str
) -> None:
    async def body() -> None:
        broken, other = CoroutineEngine(never), CoroutineEngine(lambda request: 0.01)
        desk = Desk([broken, other], capacity=3, unresponsive_s=0.3)
        desk.fleet.put(requests(8))
        await asyncio.sleep(0.005)
        held = ids(broken.asked)
        assert len(held) == 3
        break_it(broken)
        await desk.until(lambda: len(desk.samples) == 8)
        assert Counter(sample.id for sample in desk.samples) == Counter(f"{i}-0" for i in range(8))
        assert set(held) <= set(ids(other.asked))
        assert [index for index, _ in desk.lost] == [0]
        assert re.search(reason, desk.lost[0][1])
        assert not desk.errors
        await desk.fleet.stop()

    run(body)


def test_an_engine_that_refuses_requests_is_lost_and_they_go_elsewhere() -> None:
    async def body() -> None:
        refusing, other = CoroutineEngine(), CoroutineEngine()
        refusing.refuses = MemoryError("no room")
        desk = Desk([refusing, other])
        desk.fleet.put(requests(6))
        await desk.until(lambda: len(desk.samples) == 6)
        assert desk.lost == [(0, "it failed to take requests: MemoryError: no room")]
        await desk.fleet.stop()

    run(body)


def test_a_prefix_survives_the_engine_that_was_continuing_it() -> None:
    async def body() -> None:
        broken, other = CoroutineEngine(never), CoroutineEngine()
        desk = Desk([broken, other], capacity=1)
        continued = Request(group=0, k=0, prompt=PROMPTS[0], prefix=prefix(3, 4))
        desk.fleet.put([continued])
        await asyncio.sleep(0.005)
        raises(broken)
        other.version = 6
        await desk.until(lambda: desk.samples)
        assert desk.samples[0].versions.tolist() == [3, 4, 6, 6]
        await desk.fleet.stop()

    run(body)


def test_a_replacement_takes_part_and_is_not_blamed_for_what_its_predecessor_fails_at_later() -> None:
    async def body() -> None:
        old, new = CoroutineEngine(never), CoroutineEngine()
        gate = asyncio.Event()

        async def slow_cut(ids: Any) -> None:
            await gate.wait()
            raise RuntimeError("too late")

        old.cut = slow_cut  # type: ignore[method-assign]
        desk = Desk([old], capacity=2)
        desk.fleet.put(requests(2))
        await asyncio.sleep(0.005)
        desk.fleet.cut(["0-0"])
        raises(old)
        await desk.until(lambda: desk.lost)
        desk.fleet.put(requests(3, first=5))
        desk.fleet.replace(0, new)
        gate.set()
        await desk.until(lambda: len(desk.samples) == 4)
        await asyncio.sleep(0.01)
        assert desk.fleet.slots[0].alive
        assert (desk.fleet.slots[0].restarts, len(desk.lost)) == (1, 1)
        await desk.fleet.stop()

    run(body)


def test_an_engine_that_is_alive_is_not_replaced() -> None:
    async def body() -> None:
        desk = Desk([CoroutineEngine()])
        with pytest.raises(ValueError, match="engine 0 is alive and cannot be replaced"):
            desk.fleet.replace(0, CoroutineEngine())
        await desk.fleet.stop()

    run(body)


def test_an_idle_engine_is_not_taken_for_dead_however_short_the_patience() -> None:
    async def body() -> None:
        desk = Desk([CoroutineEngine()], unresponsive_s=0.1)
        await asyncio.sleep(0.4)
        assert not desk.lost
        await desk.fleet.stop()

    run(body)


def test_a_receiver_that_breaks_is_reported_and_the_engine_is_not_blamed() -> None:
    async def body() -> None:
        desk = Desk([CoroutineEngine()])
        desk.fleet._on_sample = lambda sample, request: 1 / 0  # type: ignore[assignment, return-value]
        desk.fleet.put(requests(1))
        await desk.until(lambda: desk.errors)
        assert isinstance(desk.errors[0], ZeroDivisionError)
        assert not desk.lost
        await desk.fleet.stop()

    run(body)


@settings(max_examples=12, deadline=None)
@given(seed=st.integers(0, 2**32), extra=st.integers(0, 2), ratio=st.sampled_from([0.0, 1.0, 2.5]))
def test_a_run_goes_on_with_nothing_lost_or_doubled_while_engines_die_and_come_back(seed: int, extra: int, ratio: float) -> None:
    async def body() -> None:
        chance = random.Random(seed)
        engines = [CoroutineEngine(lambda request: chance.choice([0.0, 0.001, 0.003])) for _ in range(3)]
        settings = flow(3, ratio, extra_responses=extra, requeue_cut=extra > 0)
        controller = Controller(source(), list(engines), settings, capacity=4, unresponsive_s=0.2)
        controller.start(0)
        trained: list[str] = []

        async def keeper() -> None:
            while True:
                index, _ = await controller.lost()
                engines[index] = CoroutineEngine(engines[index].delay)
                engines[index].version = version
                controller.replace(index, engines[index])

        version = 0
        keeping = asyncio.create_task(keeper())
        for version in range(10):
            if chance.random() < 0.6:
                chance.choice((raises, wedges, falls_silent))(engines[chance.randrange(3)])
            trained += [sample.id for sample in (await controller.next_batch(version, 5.0)).samples()]
            for engine in engines:
                engine.version = version + 1
            controller.advance(version + 1)
        assert len(trained) == len(set(trained)) == 60
        stats = controller.stats()
        assert stats["asked"] == stats["samples"] + stats["cut"] + stats["open"]
        keeping.cancel()
        await controller.stop()

    run(body)


def test_a_run_ends_when_the_last_engine_is_given_up_and_says_what_became_of_each() -> None:
    async def body() -> None:
        engines = [CoroutineEngine(never), CoroutineEngine(never)]
        controller = Controller(source(), list(engines), flow())
        controller.start(0)
        for index, error in enumerate((RuntimeError("out of memory"), OSError("no GPU"))):
            engines[index].fail(error)
            assert (await controller.lost())[0] == index
            controller.give_up(index)
        with pytest.raises(EngineFailed, match="engine 0: RuntimeError: out of memory; engine 1: OSError: no GPU"):
            await controller.next_batch(0, 30.0)
        admitted = controller.stats()["admitted"]
        controller.advance(1)
        assert controller.stats()["admitted"] == admitted, "a failed run admits nothing more"
        with pytest.raises(EngineFailed):
            await controller.evaluate(PROMPTS, 1, 0, 30.0, pass_at=(1,), pass_reward=1.0)
        await controller.stop()

    run(body)


def test_a_run_goes_on_with_fewer_engines() -> None:
    async def body() -> None:
        engines = [CoroutineEngine(never), CoroutineEngine()]
        controller = Controller(source(), list(engines), flow())
        controller.start(0)
        engines[0].fail(RuntimeError("out of memory"))
        controller.give_up((await controller.lost())[0])
        assert len((await controller.next_batch(0, 5.0)).groups) == 3
        assert [engine.alive for engine in controller.stats()["engines"]] == [False, True]
        await controller.stop()

    run(body)


def test_a_scheduler_that_breaks_ends_the_wait_for_the_next_batch() -> None:
    async def body() -> None:
        controller = Controller(source(), [CoroutineEngine()], flow())
        controller._scheduler.answered = lambda sample, group: 1 / 0  # type: ignore[method-assign, assignment, return-value]
        controller.start(0)
        with pytest.raises(ZeroDivisionError):
            await controller.next_batch(0, 30.0)
        await controller.stop()

    run(body)

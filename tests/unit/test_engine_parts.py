"""The parts of an engine that need no vLLM: what it hands out, what it counts, in what order it may be asked."""

import asyncio
import time
from collections.abc import Awaitable

import pytest

from megatron_async_rl.rollout.busy import BusyClock
from megatron_async_rl.rollout.outbox import Outbox
from megatron_async_rl.rollout.phase import Phase, WrongPhase
from megatron_async_rl.rollout.pulse import Pulse
from megatron_async_rl.samples.requests import Cut


def cut(name: str) -> Cut:
    return Cut(id=name, prefix=None)


def test_what_comes_within_a_moment_travels_together_and_once() -> None:
    async def run() -> None:
        outbox = Outbox()
        asyncio.get_running_loop().call_later(0.02, outbox.put, cut("a"))
        asyncio.get_running_loop().call_later(0.022, outbox.put, cut("b"))
        started = time.monotonic()
        _, came = await outbox.take(5.0)
        assert time.monotonic() - started < 1
        assert [one.id for one in came] == ["a", "b"]
        assert await outbox.take(0.01) == ((), ())

    asyncio.run(run())


def test_a_failure_is_the_answer_from_then_on_and_the_first_one_counts() -> None:
    async def run() -> None:
        outbox = Outbox()
        outbox.put(cut("a"))
        outbox.fail(ValueError("the first"))
        outbox.fail(ValueError("what followed"))
        for _ in range(2):
            with pytest.raises(ValueError, match="the first"):
                await outbox.take(5.0)

    asyncio.run(run())


def test_an_engine_is_busy_while_it_samples_at_least_one_response_and_is_not_paused() -> None:
    now = 0.0
    clock = BusyClock(now=lambda: now)
    readings = []
    for at, change in (
        (1.0, clock.begin),
        (2.0, clock.begin),
        (4.0, clock.end),
        (5.0, lambda: clock.pause(True)),
        (9.0, clock.end),
        (10.0, clock.begin),
        (11.0, lambda: clock.pause(False)),
        (14.0, clock.end),
    ):
        now = at
        change()
        readings.append(clock.seconds)
    assert readings == [0, 1, 3, 4, 4, 4, 4, 7]
    now = 20.0
    assert clock.seconds == 7


def test_the_states_an_engine_goes_through_from_one_version_to_the_next() -> None:
    phase = Phase("engine-0")
    states = []
    for step in (
        phase.pause,
        phase.require_loadable,
        phase.resume,
        phase.sleep,
        lambda: phase.wake(phase.sleepers(("weights",))),
        phase.require_loadable,
        lambda: phase.wake(phase.sleepers(None)),
    ):
        step()
        states.append(phase.state)
    assert states == ["paused", "paused", "running", "asleep", "asleep", "asleep", "running"]


def test_an_engine_paused_before_it_slept_runs_when_it_is_awake() -> None:
    phase = Phase("engine-0")
    phase.pause()
    phase.sleep()
    assert phase.sleepers(None) == ("weights", "kv_cache")
    phase.wake(("weights", "kv_cache"))
    assert phase.runs


def test_what_is_out_of_order_is_refused() -> None:
    phase = Phase("engine-0")
    with pytest.raises(WrongPhase, match="was to load weights, and is running"):
        phase.require_loadable()
    with pytest.raises(WrongPhase, match="was to wake, and it is awake"):
        phase.sleepers(None)
    with pytest.raises(ValueError, match="cannot wake cache: what sleeps is weights and kv_cache"):
        phase.sleepers(("cache",))
    phase.sleep()
    with pytest.raises(WrongPhase, match="its weights are asleep"):
        phase.require_loadable()
    with pytest.raises(WrongPhase, match="was to pause, and is asleep"):
        phase.require_awake("pause")
    phase.wake(("weights",))
    with pytest.raises(WrongPhase, match="was to wake, and weights is awake"):
        phase.sleepers(("weights", "kv_cache"))


def test_silence_grows_while_a_question_is_open_and_ends_with_its_answer(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("megatron_async_rl.rollout.pulse.EVERY_S", 0.01)
    answers: list[asyncio.Future[str]] = []
    dead = False

    def ask() -> Awaitable[str]:
        answers.append(asyncio.get_running_loop().create_future())
        return answers[-1]

    async def run() -> None:
        nonlocal dead
        pulse = Pulse(ask, lambda: dead)
        watching = asyncio.create_task(pulse.until_dead())
        await asyncio.sleep(0.2)
        assert len(answers) == 1, "one question at a time"
        assert pulse.silent_s >= 0.19
        answers[0].set_result("3")
        await asyncio.sleep(0.1)
        assert len(answers) == 2
        assert pulse.silent_s < 0.15
        dead = True
        await asyncio.wait_for(watching, 5)

    asyncio.run(run())


def test_a_question_that_is_lost_is_asked_again(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("megatron_async_rl.rollout.pulse.EVERY_S", 0.01)
    monkeypatch.setattr("megatron_async_rl.rollout.pulse.DEADLINE_S", 0.05)
    asked = 0

    async def ask() -> str:
        nonlocal asked
        asked += 1
        if asked == 1:
            await asyncio.sleep(3600)
        return "3"

    async def run() -> None:
        pulse = Pulse(ask, lambda: asked > 3)
        await asyncio.wait_for(pulse.until_dead(), 5)
        assert pulse.silent_s < 1

    asyncio.run(run())

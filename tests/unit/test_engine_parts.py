"""Parts of an engine that need no vLLM: reports, state, busy time, health check and processes."""

import asyncio
import os
import pickle
import subprocess
from collections.abc import Awaitable
from types import SimpleNamespace
from typing import Any

import numpy as np
import psutil
import pytest
import ray

from megatron_async_rl.config.rollout import EnvironmentConfig
from megatron_async_rl.rollout.engine import RolloutEngine
from megatron_async_rl.rollout.engine_process import ENDED_POLL_S, RemoteEngine
from megatron_async_rl.rollout.engine_state import (
    BusyClock,
    EngineState,
    ReportQueue,
    WrongState,
)
from megatron_async_rl.rollout.environments.pool import Environments
from megatron_async_rl.rollout.vllm.client import DEADLINE_S, EVERY_S, HealthCheck
from megatron_async_rl.samples import Prompt, Sample
from megatron_async_rl.samples.columns import SCHEMA, batch_of
from megatron_async_rl.samples.rows import EngineReport
from megatron_async_rl.samples.types import Aborted
from megatron_async_rl.watchdog.watch import ProcessDied
from tests.unit import virtual_time
from tests.unit.fake_engine import partial


def aborted(name: str) -> Aborted:
    return Aborted(id=name, partial=None)


def test_results_that_arrive_almost_together_are_in_one_report_once() -> None:
    async def run() -> None:
        reports = ReportQueue()

        def put(result: Aborted) -> None:
            reports.aborted.append(result)
            reports.notify()

        asyncio.get_running_loop().call_later(0.02, put, aborted("a"))
        asyncio.get_running_loop().call_later(0.022, put, aborted("b"))
        _, results = await asyncio.wait_for(reports.take(3600.0), 600)
        assert [one.id for one in results] == ["a", "b"]
        finished, results = await reports.take(0.01)
        assert (finished.num_rows, finished.schema, results) == (0, SCHEMA, ())

    virtual_time.run(run())


def test_an_unpickled_report_holds_no_memory_of_rays_object_store() -> None:
    """Ray stores out-of-band buffers of pickle in its object store, and an array that is a view of
    one of them would keep the whole object there."""
    sent = EngineReport(
        finished=batch_of([one_sample(40_000)], [0]),
        aborted=(Aborted(id="0-1", partial=partial(*range(40_000))),),
        state="running",
        version=3,
        running=1,
        tokens=40_000,
        busy_s=1.5,
        silent_s=0.0,
    )
    buffers: list[pickle.PickleBuffer] = []
    received = pickle.loads(pickle.dumps(sent, protocol=5, buffer_callback=buffers.append))
    assert buffers == []
    assert vars(received) | {"aborted": ()} == vars(sent) | {"aborted": ()}
    ((before,), (after,)) = (sent.aborted, received.aborted)
    assert before.partial is not None
    assert after.partial is not None
    assert after.id == before.id
    assert np.array_equal(after.partial.versions, before.partial.versions)


def test_every_report_after_an_unencodable_sample_raises_its_error() -> None:
    async def run() -> None:
        reports = ReportQueue()
        sample = vars(one_sample(1)) | {"text": "\ud800"}
        reports.finished.append(group=0, **sample)
        reports.notify()
        for _ in range(2):
            with pytest.raises(UnicodeEncodeError):
                await reports.take(5.0)

    virtual_time.run(run())


def one_sample(length: int) -> Sample:
    zeros = np.zeros(length, dtype=np.int32)
    return Sample(
        id="0-0",
        prompt=Prompt(id="p", text="", token_ids=(1,)),
        response_ids=zeros,
        behavior_logprobs=zeros.astype(np.float32),
        versions=np.arange(length, dtype=np.int32),
        loss_mask=np.ones(length, dtype=np.uint8),
        text="",
        finish_reason="stop",
        reward=0.0,
    )


def test_every_report_after_a_failure_raises_the_first_failure() -> None:
    async def run() -> None:
        reports = ReportQueue()
        reports.aborted.append(aborted("a"))
        reports.notify()
        reports.fail(ValueError("first failure"))
        reports.fail(ValueError("second failure"))
        for _ in range(2):
            with pytest.raises(ValueError, match="first failure"):
                await reports.take(5.0)

    virtual_time.run(run())


def test_an_agent_that_works_without_the_model_is_reported_as_sampling() -> None:
    """The caller then does not count its sample as late."""
    environments = Environments(EnvironmentConfig(name="agent"))
    responses = SimpleNamespace(reports=ReportQueue(), sampled=0, running=1, tokens=0, generated=0)
    engine: Any = RolloutEngine.__new__(RolloutEngine)
    vars(engine).update(
        _environments=environments,
        _responses=responses,
        _llm=object(),
        _sampled=0,
        _version=0,
        _state=EngineState("engine-0"),
        _busy=BusyClock(),
        _health=SimpleNamespace(silent_s=0.0),
    )
    with asyncio.Runner() as runner:
        with environments.working_alone(60):
            assert runner.run(engine.report(0.01)).sampling
        assert not runner.run(engine.report(0.01)).sampling


def test_vllm_is_shut_down_even_if_closing_user_code_fails() -> None:
    ended: list[str] = []

    async def close() -> None:
        raise RuntimeError("an agent")

    engine: Any = RolloutEngine.__new__(RolloutEngine)
    vars(engine).update(
        _watch=None,
        _responses=None,
        _scorer=SimpleNamespace(close=lambda: ended.append("scorer")),
        _agents=SimpleNamespace(close=close),
        _environments=None,
        _llm=SimpleNamespace(shutdown=lambda timeout: ended.append("vllm")),
        _timeline=SimpleNamespace(close=lambda: ended.append("timeline")),
    )
    with pytest.raises(RuntimeError, match="an agent"):
        asyncio.run(engine.stop())
    assert ended == ["scorer", "vllm", "timeline"]


def test_an_engine_is_busy_while_it_has_a_response_and_is_not_paused() -> None:
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


def test_the_states_of_an_engine_between_two_versions() -> None:
    state = EngineState("engine-0")
    states = []
    for step in (
        state.pause,
        state.resume,
        state.sleep,
        lambda: state.wake(state.sleepers(("weights",))),
        lambda: state.wake(state.sleepers(None)),
    ):
        step()
        states.append(state.state)
    assert states == ["paused", "running", "asleep", "asleep", "running"]


def test_an_engine_that_was_paused_before_it_slept_runs_after_waking() -> None:
    state = EngineState("engine-0")
    state.pause()
    state.sleep()
    assert state.sleepers(None) == ("weights", "kv_cache")
    state.wake(("weights", "kv_cache"))
    assert state.runs


def test_a_call_that_the_state_does_not_permit_is_refused() -> None:
    state = EngineState("engine-0")
    with pytest.raises(WrongState, match="cannot wake: it is awake already"):
        state.sleepers(None)
    with pytest.raises(ValueError, match="cannot wake cache; its parts are weights and kv_cache"):
        state.sleepers(("cache",))
    state.sleep()
    assert state.sleeps("weights")
    with pytest.raises(WrongState, match="cannot pause: it is asleep"):
        state.require_awake("pause")
    state.wake(("weights",))
    assert not state.sleeps("weights")
    assert state.sleeps("kv_cache")
    with pytest.raises(WrongState, match="cannot wake: weights is awake already"):
        state.sleepers(("weights", "kv_cache"))


def test_silence_grows_while_a_probe_is_pending_and_ends_with_the_reply() -> None:
    replies: list[asyncio.Future[str]] = []
    dead = False

    def probe() -> Awaitable[str]:
        replies.append(asyncio.get_running_loop().create_future())
        return replies[-1]

    async def run() -> None:
        nonlocal dead
        health = HealthCheck(probe, lambda: dead)
        await asyncio.sleep(300.0)  # vLLM's start
        watching = asyncio.create_task(health.until_dead())
        await asyncio.sleep(DEADLINE_S - 0.5)
        assert len(replies) == 1, "one probe at a time"
        assert health.silent_s == pytest.approx(DEADLINE_S - 0.5)
        replies[0].set_result("3")
        while len(replies) < 2:
            await asyncio.sleep(0.1)
        assert health.silent_s < 1.5 * EVERY_S
        dead = True
        await watching

    virtual_time.run(run())


def test_a_probe_without_a_reply_is_repeated() -> None:
    probes = 0

    async def probe() -> str:
        nonlocal probes
        probes += 1
        if probes == 1:
            await asyncio.sleep(3600)
        return "3"

    async def run() -> None:
        health = HealthCheck(probe, lambda: probes > 3)
        await asyncio.wait_for(health.until_dead(), 60)
        assert probes > 3

    virtual_time.run(run())


def test_an_engine_has_ended_once_all_of_its_processes_have() -> None:
    """A zombie counts as ended. A process with a listed pid and another start time is ignored."""
    children = [subprocess.Popen(["cat"], stdin=subprocess.PIPE) for _ in range(2)]
    running = [(one.pid, psutil.Process(one.pid).create_time()) for one in children]
    engine = RemoteEngine(None, processes=[*running, (os.getpid(), 0.0)])

    async def body() -> None:
        ended = asyncio.ensure_future(engine.until_ended())
        for child in children:
            assert not (await asyncio.wait((ended,), timeout=3 * ENDED_POLL_S))[0]
            child.kill()
        await ended

    asyncio.run(body())
    for child in children:
        child.communicate()


def test_the_death_of_an_engines_process_is_reported_in_one_line() -> None:
    """Ray's own message has a dozen lines, most of them about impossible causes."""

    async def dies() -> None:
        error = ray.exceptions.ActorDiedError()
        error.error_msg = (
            "The actor died unexpectedly before finishing this task.\n\tclass_name: RolloutEngine\n"
            "\tactor_id: 6496e9ed5fcb\n\tpid: 31173\n\tnamespace: cf3091ca\nThe actor is dead"
            " because its"
            " worker process has died. End of file. Some common causes include: (1) the process was"
            " killed by the OOM killer, (2) ray stop --force was called"
        )
        raise error

    actor = SimpleNamespace(report=SimpleNamespace(remote=lambda _: dies()))
    with pytest.raises(ProcessDied) as died:
        asyncio.run(RemoteEngine(actor).report(1.0))
    assert str(died.value) == (
        "RolloutEngine (pid 31173). The actor is dead because its worker process has died. End of"
        " file. Unless it was killed on purpose, `dmesg` shows whether the kernel did, for lack of"
        " memory."
    )

"""Dispatch of responses to the processes of a reward, with stand-ins for the processes: how many
start, which jobs share a call, and which job a failure is blamed on."""

from __future__ import annotations

import asyncio
import math
from collections.abc import Sequence
from typing import Any

import pytest

from megatron_async_rl.rollout.isolation.supervisor import (
    OutOfProcessorTime,
    OutOfTime,
    UserCodeError,
    UserCodeStartError,
    UserProcessEnded,
)
from megatron_async_rl.rollout.rewards import reward_pool
from megatron_async_rl.rollout.rewards.registry import RewardContext, RewardItem
from megatron_async_rl.rollout.rewards.reward_pool import RewardJob, RewardLimits, RewardPool
from megatron_async_rl.rollout.rewards.worker import Scored
from megatron_async_rl.samples import Prompt
from tests.cases import looped


class FakeProcess:
    """A process whose calls the test answers."""

    def __init__(self, on_ready: Any, on_end: Any) -> None:
        self.ready = self.killed = False
        self.facts: dict[str, Any] = {}
        self.calls: dict[int, Any] = {}
        self.given: list[list[str]] = []
        self.limits: list[dict[str, Any]] = []
        self._on_ready, self._on_end = on_ready, on_end

    def call(self, items: Sequence[RewardItem], **limits: Any) -> Any:
        limits.pop("activity")
        self.limits.append(limits)
        self.given.append([item.response for item in items])
        self.calls[len(self.given)] = future = asyncio.get_running_loop().create_future()
        return future

    def start(self, *, concurrent: bool = False, batched: bool = False) -> None:
        self.facts, self.ready = {"concurrent": concurrent, "batched": batched}, True
        self._on_ready(self)

    async def answer(self, number: int, result: Any) -> None:
        future = self.calls.pop(number)
        if isinstance(result, Exception):
            future.set_exception(result)
        else:
            future.set_result(result)
        await asyncio.sleep(0)
        await asyncio.sleep(0)

    def end(self, reason: str = "it ended with code 1") -> None:
        self._on_end(self, reason)


class FakeSupervisor:
    def __init__(self, code: Any) -> None:
        self.code = code
        self.started: list[FakeProcess] = []
        self.refuses = self.closed = False

    def process(self, on_ready: Any, on_end: Any) -> FakeProcess:
        if self.refuses:
            raise OSError("no memory")
        self.started.append(FakeProcess(on_ready, on_end))
        return self.started[-1]

    def close(self) -> None:
        self.closed = True


@pytest.fixture(autouse=True)
def no_processes(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(reward_pool, "Supervisor", FakeSupervisor)


def pool_of(workers: int = 2, **limits: Any) -> tuple[RewardPool, list[FakeProcess]]:
    given: dict[str, Any] = {
        "name": "mine:score",
        "key": "rollout.reward",
        "settings": {"s": 1},
        "concurrency": 2,
        "batch": 2,
        "timeout_s": 7.0,
        "cpu_limit_s": None,
        "memory_mib": 64,
    }
    pool = RewardPool(RewardLimits(**given | limits), workers)
    pool.start()
    supervisor: Any = pool.supervisor
    return pool, supervisor.started


def submitted(pool: RewardPool, *responses: str) -> list[asyncio.Task[Sequence[Scored]]]:
    return [
        asyncio.ensure_future(pool.submit([RewardItem(PROMPT, one, RewardContext())]))
        for one in responses
    ]


PROMPT = Prompt(id="p", text="?", token_ids=(1,))


def test_a_process_has_the_rewards_limits() -> None:
    async def run() -> None:
        pool, (first,) = pool_of(cpu_limit_s=3.0)
        code: Any = pool.supervisor.code  # type: ignore[attr-defined]
        assert (code.loader, code.memory_mib, code.preload) == (reward_pool.LOADER, 64, False)
        assert code.arguments == {
            "name": "mine:score",
            "key": "rollout.reward",
            "settings": {"s": 1},
            "timeout_s": 7.0,
        }
        waiting = asyncio.ensure_future(pool.ready())
        await asyncio.sleep(0)
        assert not waiting.done()
        first.start()
        await waiting
        (job,) = submitted(pool, "a")
        await asyncio.sleep(0)
        assert first.limits == [{"timeout_s": 7.0, "cpu_limit_s": 3.0}]
        await first.answer(1, [(0.5, None)])
        assert await job == [Scored(reward=0.5)]

    asyncio.run(run())


def test_processes_start_as_jobs_need_them_up_to_the_limit() -> None:
    async def run() -> None:
        pool, started = pool_of(workers=3)
        assert pool._per_call == math.inf
        submitted(pool, "a", "b", "c", "d", "e")
        await asyncio.sleep(0)
        assert len(started) == 1  # the first is starting, and its capacity is unknown
        started[0].start()
        assert started[0].given == [["a"]]
        # Four jobs wait, and a process takes one at a time: the limit of three processes.
        assert len(started) == 3
        started[1].start()
        assert (started[1].given, len(started)) == ([["b"]], 3)
        await started[0].answer(1, [(1.0, None)])
        assert started[0].given == [["a"], ["c"]]
        started[2].start()
        assert started[2].given == [["d"]]
        await started[1].answer(1, [(1.0, None)])
        assert (started[1].given, len(started)) == ([["b"], ["e"]], 3)

    asyncio.run(run())


def test_a_batched_reward_takes_several_jobs_and_starts_fewer_processes() -> None:
    async def run() -> None:
        pool, started = pool_of(workers=3)
        jobs = submitted(pool, "a", "b", "c", "d", "e")
        jobs[1].cancel()
        await asyncio.sleep(0)
        await asyncio.sleep(0)
        started[0].start(batched=True)
        # The cancelled job takes no place. c is in the first call; d and e need one more process.
        assert (started[0].given, len(started)) == ([["a", "c"]], 2)
        assert pool._per_call == 2
        await started[0].answer(1, [(1.0, None), (0.0, "no")])
        assert started[0].given == [["a", "c"], ["d", "e"]]
        assert [(await jobs[at])[0] for at in (0, 2)] == [
            Scored(reward=1.0),
            Scored(reward=0.0, error="no"),
        ]

    asyncio.run(run())


def test_an_async_reward_takes_as_many_calls_as_its_concurrency() -> None:
    async def run() -> None:
        pool, started = pool_of(workers=1)
        submitted(pool, "a", "b", "c")
        await asyncio.sleep(0)
        started[0].start(concurrent=True)
        assert (started[0].given, len(started)) == ([["a"], ["b"]], 1)
        await started[0].answer(2, [(1.0, None)])
        assert started[0].given == [["a"], ["b"], ["c"]]

    asyncio.run(run())


def test_a_failure_of_a_shared_call_is_blamed_on_the_job_that_fails_alone() -> None:
    async def run() -> None:
        pool, (first,) = pool_of(workers=1)
        jobs = submitted(pool, "a", "b", "c")
        await asyncio.sleep(0)
        first.start(batched=True)
        await first.answer(1, UserCodeError("crash"))
        # The suspects come first, each in a call of its own.
        assert first.given == [["a", "b"], ["a"]]
        await first.answer(2, UserCodeError("crash"))
        assert (await jobs[0]) == [Scored(reward=0.0, error="crash")]
        assert first.given[2:] == [["b"]]
        await first.answer(3, [(1.0, None)])
        assert first.given[3:] == [["c"]]
        assert (await jobs[1]) == [Scored(reward=1.0)]

    asyncio.run(run())


def test_a_suspect_waits_for_a_process_without_other_calls() -> None:
    async def run() -> None:
        pool, (first,) = pool_of(workers=1)
        submitted(pool, "a", "b", "c")
        await asyncio.sleep(0)
        first.start(concurrent=True)
        shared = UserProcessEnded("was killed")
        shared.shared = True
        await first.answer(1, shared)
        assert first.given == [["a"], ["b"]]  # c waits behind the suspect a
        await first.answer(2, [(1.0, None)])
        assert first.given == [["a"], ["b"], ["a"]]  # alone: c does not join
        await first.answer(3, [(1.0, None)])
        assert first.given[3:] == [["c"]]

    asyncio.run(run())


def test_a_process_that_ends_is_replaced_at_once() -> None:
    async def run() -> None:
        pool, started = pool_of(workers=1)
        started[0].start()
        started[0].end()
        assert (len(started), list(pool.processes)) == (2, [started[1]])
        started[1].start()
        started[1].killed = True
        submitted(pool, "a")
        await asyncio.sleep(0)
        assert started[1].given == []

    asyncio.run(run())


def test_jobs_fail_if_no_process_starts() -> None:
    async def run() -> None:
        pool, started = pool_of(workers=2)
        jobs = submitted(pool, "a", "b")
        await asyncio.sleep(0)
        failure = "the reward's process did not start: it ended with code 1"
        started[0].end()
        for job in jobs:
            assert await job == [Scored(reward=0.0, error=failure)]
        with pytest.raises(UserCodeStartError, match=failure):
            await pool.ready()
        # Other processes serve the queue.
        pool, started = pool_of(workers=2)
        started[0].start()
        jobs = submitted(pool, "a", "b")
        await asyncio.sleep(0)
        assert len(started) == 2
        started[1].end()
        assert not jobs[1].done()
        pool.supervisor.refuses = True  # type: ignore[attr-defined]
        started[0].end()
        assert (await jobs[1])[0].error == "the reward's process did not start: no memory"

    asyncio.run(run())


def test_close_cancels_every_job_and_starts_no_process() -> None:
    async def run() -> None:
        pool, started = pool_of(workers=1)
        jobs = submitted(pool, "a", "b")
        await asyncio.sleep(0)
        started[0].start()
        pool.close()
        await asyncio.sleep(0)
        await asyncio.sleep(0)
        assert [job.cancelled() for job in jobs] == [True, True]
        started[0].end()
        assert (len(started), pool.supervisor.closed) == (1, True)  # type: ignore[attr-defined]

    asyncio.run(run())


@looped(
    ("error", "scored", "timed_out"),
    [
        (OutOfTime("x"), (0.0, "no reward within rollout.reward.timeout_s: 7"), True),
        (OutOfProcessorTime("x"), (0.0, None), False),
        (UserProcessEnded("died"), (0.0, "the reward's process died; see the engine's log"), False),
        (UserCodeError("KeyError: 1"), (0.0, "KeyError: 1"), False),
    ],
)
def test_a_failure_becomes_the_score_of_its_response(
    error: UserCodeError, scored: tuple[float, str | None], timed_out: bool
) -> None:
    async def run() -> None:
        pool, (first,) = pool_of()
        (job,) = submitted(pool, "a")
        await asyncio.sleep(0)
        first.start()
        await first.answer(1, error)
        (one,) = await job
        assert ((one.reward, one.error), one.timed_out) == (scored, timed_out)

    asyncio.run(run())


def test_a_group_is_one_job_with_a_score_for_each_response() -> None:
    async def run() -> None:
        pool, (first,) = pool_of()
        items = [RewardItem(PROMPT, one, RewardContext()) for one in "xy"]
        job = asyncio.ensure_future(pool.submit(items))
        await asyncio.sleep(0)
        first.start()
        assert first.given == [["x", "y"]]
        await first.answer(1, [(1.0, None), (2.0, None)])
        assert await job == [Scored(reward=1.0), Scored(reward=2.0)]
        failed = RewardJob(items)
        failed.fail(Scored(reward=0.0, error="e"))
        failed.finish([])  # too late
        assert await failed.result == [Scored(reward=0.0, error="e")] * 2

    asyncio.run(run())

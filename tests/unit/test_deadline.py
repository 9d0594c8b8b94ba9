"""Every wait has a name and a deadline."""

from __future__ import annotations

import asyncio
import pickle
import queue

import pytest

from megatron_async_rl.observe import deadline
from megatron_async_rl.observe.deadline import DeadlineExceeded, await_named, name_this_process, waiting


@pytest.fixture(autouse=True)
def _rank_0(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(deadline, "_process_name", None)
    name_this_process("rank 0")


def test_a_missed_deadline_says_who_waited_how_long_for_what() -> None:
    with pytest.raises(DeadlineExceeded, match=r"^rank 0 waited 0\.1 s for a batch, which did not come$") as caught:
        asyncio.run(await_named("a batch", asyncio.sleep(5), 0.05))
    assert 0.05 <= caught.value.waited_s < 1.0


def test_what_is_awaited_is_cancelled_at_the_deadline() -> None:
    ended: list[str] = []

    async def slow() -> None:
        try:
            await asyncio.sleep(5)
        except asyncio.CancelledError:
            ended.append("cancelled")
            raise

    with pytest.raises(DeadlineExceeded):
        asyncio.run(await_named("a batch", slow(), 0.02))
    assert ended == ["cancelled"]


def test_a_result_in_time_is_returned() -> None:
    assert asyncio.run(await_named("a batch", asyncio.sleep(0, "batch"), 5)) == "batch"


def test_a_blocking_call_with_its_own_timeout_is_named() -> None:
    with pytest.raises(DeadlineExceeded, match="for engine 0"), waiting("engine 0", 0.05):
        asyncio.run(asyncio.wait_for(asyncio.sleep(5), 0.05))


def test_other_failures_pass_unchanged() -> None:
    with pytest.raises(queue.Empty), waiting("a batch", 0.01):
        queue.Queue().get(timeout=0.01)
    with pytest.raises(TimeoutError, match="the other machine") as caught, waiting("a batch", 60):
        raise TimeoutError("the other machine timed out")
    assert not isinstance(caught.value, DeadlineExceeded)


def test_of_nested_waits_the_inner_name_is_kept() -> None:
    with pytest.raises(DeadlineExceeded, match="for engine 0"), waiting("all engines", 0.01):
        asyncio.run(await_named("engine 0", asyncio.sleep(5), 0.02))


def test_a_missed_deadline_travels_between_processes() -> None:
    error = pickle.loads(pickle.dumps(DeadlineExceeded("engine 1", "a bucket", 3.0)))
    assert str(error) == "engine 1 waited 3.0 s for a bucket, which did not come"

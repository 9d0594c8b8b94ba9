"""Every wait has a name and a deadline."""

from __future__ import annotations

import asyncio
import pickle
import queue
import re
from pathlib import Path

import pytest
import ray

from megatron_async_rl.watchdog import watch
from megatron_async_rl.watchdog.events import failure_of
from megatron_async_rl.watchdog.logs import SECONDARY
from megatron_async_rl.watchdog.watch import (
    DeadlineExceeded,
    ProcessDied,
    await_named,
    name_this_process,
    ray_get,
    waiting,
)
from tests.unit import virtual_time


@pytest.fixture(autouse=True)
def _rank_0(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(watch, "_process_name", None)
    name_this_process("rank 0")


def test_a_missed_deadline_names_who_waited_how_long_for_what() -> None:
    with pytest.raises(
        DeadlineExceeded, match=r"^rank 0 waited 0\.1 s for a batch, which did not come$"
    ) as caught:
        virtual_time.run(await_named("a batch", asyncio.sleep(5), 0.1))
    assert caught.value.waited_s == pytest.approx(0.1)


DEAD = """The actor died unexpectedly before finishing this task.
\tclass_name: Controller
\tactor_id: 1c895b61
\tpid: 3999
\tname: controller
\tip: 192.0.2.2
The actor is dead because its owner has died."""


@pytest.mark.parametrize(
    ("text", "who"),
    [
        (DEAD, "controller (pid 3999). The actor is"),
        ("It is dead.", "an actor (pid unknown). It is dead."),
    ],
)
def test_a_wait_for_a_dead_process_names_it_and_the_reason(
    monkeypatch: pytest.MonkeyPatch, text: str, who: str
) -> None:
    def get(*_: object, **__: object) -> None:
        error = ray.exceptions.ActorDiedError()
        error.error_msg = text
        raise error

    monkeypatch.setattr(ray, "get", get)
    with pytest.raises(
        ProcessDied,
        match=re.escape(
            f"rank 0 waited for a batch, and the process that should answer is dead: {who}"
        ),
    ) as caught:
        ray_get(None, "a batch", 1.0)
    # The dead process's own output has more detail.
    assert failure_of(caught.value, Path("log")).kind == SECONDARY


def test_what_is_awaited_is_cancelled_at_the_deadline() -> None:
    ended: list[str] = []

    async def slow() -> None:
        try:
            await asyncio.sleep(5)
        except asyncio.CancelledError:
            ended.append("cancelled")
            raise

    with pytest.raises(DeadlineExceeded):
        virtual_time.run(await_named("a batch", slow(), 0.02))
    assert ended == ["cancelled"]


def test_a_result_in_time_is_returned() -> None:
    assert virtual_time.run(await_named("a batch", asyncio.sleep(0, "batch"), 5)) == "batch"


def test_a_blocking_call_with_its_own_timeout_is_named() -> None:
    with pytest.raises(DeadlineExceeded, match="for engine 0"), waiting("engine 0", 0.05):
        asyncio.run(asyncio.wait_for(asyncio.sleep(5), 0.05))


def test_other_failures_pass_with_a_note_of_the_wait() -> None:
    with pytest.raises(queue.Empty) as empty, waiting("a batch", 0.01):
        queue.Queue().get(timeout=0.01)
    (note,) = empty.value.__notes__
    assert re.fullmatch(r"rank 0 had waited [\d.]+ s for a batch", note)
    with pytest.raises(TimeoutError, match="the other machine") as caught, waiting("a batch", 60):
        raise TimeoutError("the other machine timed out")
    assert not isinstance(caught.value, DeadlineExceeded)


def test_of_nested_waits_the_inner_name_is_kept() -> None:
    with pytest.raises(DeadlineExceeded, match="for engine 0"), waiting("all engines", 0.01):
        virtual_time.run(await_named("engine 0", asyncio.sleep(5), 0.02))


def test_a_missed_deadline_travels_between_processes() -> None:
    error = pickle.loads(pickle.dumps(DeadlineExceeded("engine 1", "a bucket", 3.0)))
    assert str(error) == "engine 1 waited 3.0 s for a bucket, which did not come"

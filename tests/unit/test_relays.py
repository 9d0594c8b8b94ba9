"""Weights on their way to other machines: which version goes where and when, who waits for it, and
what a failure costs."""

from __future__ import annotations

import asyncio
import math
import socket
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from dataclasses import replace
from functools import partial
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from megatron_async_rl.flow import distribution, engine_task
from megatron_async_rl.flow.engine_task import EngineSlot
from megatron_async_rl.flow.fleet import FleetSettings
from megatron_async_rl.flow.updates import Relayed, Staged, VersionCopies
from megatron_async_rl.rollout.spec import HERE
from megatron_async_rl.watchdog.watch import ProcessDied
from megatron_async_rl.weights.agents import AgentContext, AgentSpec, ReceivingEngine
from megatron_async_rl.weights.collective import Sender
from megatron_async_rl.weights.collective_agents import Communicators
from megatron_async_rl.weights.manifest import Meeting, WeightUpdate
from megatron_async_rl.weights.relay_agents import start_agent
from megatron_async_rl.weights.relay_server import RelayFailed
from tests.cases import looped
from tests.unit.fake_engine import FakeEngine, FakeLaunch, specs
from tests.unit.fleet_harness import FleetHarness
from tests.unit.flow_setup import run, until
from tests.unit.relay_harness import AgentHarness, Reader, copied, manifest

THERE, FURTHER = "there", "further"


@pytest.fixture(autouse=True)
def _soon(monkeypatch: pytest.MonkeyPatch) -> None:
    """Restarts come at once, and a death is seen soon."""
    monkeypatch.setattr(engine_task, "FIRST_DELAY_S", 0.0)
    monkeypatch.setattr(distribution, "REPORT_S", 0.001)


@asynccontextmanager
async def relayed(*engines: Reader, **settings: float) -> AsyncIterator[AgentHarness]:
    harness = AgentHarness(list(engines), **settings)
    try:
        yield harness
        assert harness.errors == []
    finally:
        await harness.agents.close(5.0)


def test_an_engine_loads_its_own_machines_copy() -> None:
    async def body() -> None:
        here, there = Reader(0), Reader(1, THERE)
        async with relayed(here, there) as harness:
            harness.stage(3)
            await asyncio.gather(here.load(harness.updates), there.load(harness.updates))
            assert here.loaded == [(3, "/3")]
            assert there.loaded == [(3, "there/3")]

    run(body)


def test_one_agent_serves_a_machine_and_a_machine_without_engines_has_none() -> None:
    async def body() -> None:
        engines = [Reader(0), Reader(1, THERE), Reader(2, THERE), Reader(3, FURTHER)]
        async with relayed(*engines) as harness:
            harness.stage(0)
            await asyncio.gather(*(one.load(harness.updates) for one in engines))
            machines = [relay.spec.machine for relay in harness.started]
            assert sorted(machines) == [FURTHER, THERE]
            assert [relay.fetched for relay in harness.started] == [[0], [0]]
            assert harness.updates.copies.last is not None
            assert harness.updates.copies.last.nbytes == 16

    run(body)


def test_a_copy_whose_place_the_next_version_takes_is_there_no_more() -> None:
    copies = VersionCopies()
    for version in (1, 2):
        staged = Staged(version=version, manifest=manifest(version), at=0.0)
        copies.begin(THERE, version)
        copies.add(THERE, staged, copied(manifest(version, THERE)))
    assert copies.replaced(THERE) == [1]
    copies.begin(THERE, 3)
    assert copies.find(THERE, 1) is None
    newest = copies.newest(THERE)
    assert newest is not None
    assert (newest.version, newest.manifest) == (2, manifest(2, THERE))
    copies.lose(THERE)
    assert copies.newest(THERE) is None


def test_what_a_version_took_is_the_slowest_machines_time_and_all_bytes() -> None:
    copies = VersionCopies()
    staged = {v: Staged(version=v, manifest=manifest(v), at=0.0) for v in (1, 2)}
    for machine, version, seconds in ((THERE, 1, 9.0), (THERE, 2, 3.0), (FURTHER, 2, 2.0)):
        arrived = copied(manifest(version), nbytes=10, seconds=seconds)
        copies.add(machine, staged[version], arrived)
    copies.add("late", staged[1], copied(manifest(1), nbytes=10, seconds=20.0))
    assert copies.last == Relayed(version=2, seconds=3.0, nbytes=20)


def test_no_engine_waits_for_the_copy_of_another_machine() -> None:
    async def body() -> None:
        here, there = Reader(0), Reader(1, THERE)
        async with relayed(here, there) as harness:
            harness.held_up = True
            harness.stage(1)
            waiting = asyncio.create_task(there.load(harness.updates))
            await here.load(harness.updates)
            await until(lambda: harness.started and harness.started[0].asked)
            assert not waiting.done()
            harness.started[0].gate.set()
            await waiting

    run(body)


def test_rank_0_overwrites_nothing_that_is_being_sent() -> None:
    async def body() -> None:
        there = Reader(0, THERE)
        async with relayed(there) as harness:
            harness.held_up = True
            harness.stage(1)
            await until(lambda: harness.started and harness.started[0].asked == [1])
            harness.stage(2)
            assert not await harness.released(2)
            harness.started[0].gate.set()
            await harness.updates.until_released(2)
            assert harness.started[0].fetched[0] == 1

    run(body)


def test_rank_0_does_not_wait_for_an_engine_that_reads_its_machines_copy() -> None:
    async def body() -> None:
        here, there, gate = Reader(0), Reader(1, THERE), asyncio.Event()
        async with relayed(here, there) as harness:
            harness.stage(1)
            loads = [asyncio.create_task(one.load(harness.updates, gate)) for one in (there, here)]
            await until(lambda: len(harness.updates._loading) == 2)
            harness.stage(2)
            assert not await harness.released(2), "the engine beside rank 0 reads version 1"
            harness.updates.forget(here.index)
            loads[1].cancel()
            assert await harness.released(2)
            gate.set()
            await loads[0]

    run(body)


def test_an_agent_overwrites_no_copy_that_an_engine_reads() -> None:
    async def body() -> None:
        slow, quick, gate = Reader(0, THERE), Reader(1, THERE), asyncio.Event()
        async with relayed(slow, quick) as harness:
            harness.stage(1)
            reading = asyncio.create_task(slow.load(harness.updates, gate))
            for version in (1, 2):
                await quick.load(harness.updates)
                harness.stage(version + 1)
            assert quick.version == 2
            await until(lambda: harness.updates._loading)
            for _ in range(50):
                await asyncio.sleep(0)
            (relay,) = harness.started
            assert relay.asked == [1, 2], "version 3 would take the place of 1, which is read"
            gate.set()
            await asyncio.gather(reading, quick.load(harness.updates))
            assert relay.fetched == [1, 2, 3]
            assert quick.version == 3

    run(body)


def test_of_versions_that_pass_while_one_is_sent_the_newest_is_next() -> None:
    async def body() -> None:
        there = Reader(0, THERE)
        async with relayed(there) as harness:
            harness.held_up = True
            harness.stage(1)
            await until(lambda: harness.started and harness.started[0].asked == [1])
            for version in (2, 3, 4):
                harness.stage(version)
            harness.started[0].gate.set()
            await until(lambda: harness.started[0].fetched == [1, 4])

    run(body)


def test_an_evaluating_engine_gets_just_the_version_it_is_to_evaluate() -> None:
    async def body() -> None:
        trains, evaluates = Reader(0, THERE), Reader(1, THERE, evaluates=True)
        async with relayed(trains, evaluates) as harness:
            harness.stage(1)
            harness.updates.request_version([1], 1)
            harness.stage(2)
            await until(lambda: harness.started and len(harness.started[0].fetched) == 2)
            assert harness.started[0].fetched == [1, 2], "rank 0 waits to overwrite version 1"
            await evaluates.load(harness.updates)
            assert evaluates.loaded == [(1, "there/1")]
            assert not harness.updates.is_requested(1)

    run(body)


def test_rank_0_keeps_what_is_to_be_evaluated_until_the_machine_has_it() -> None:
    async def body() -> None:
        evaluates = Reader(1, THERE, evaluates=True)
        async with relayed(evaluates) as harness:
            harness.held_up = True
            harness.stage(1)
            harness.updates.request_version([1], 1)
            harness.stage(2)
            assert not await harness.released(2)
            await until(lambda: harness.started)
            harness.started[0].gate.set()
            await harness.updates.until_released(2)
            assert harness.updates.is_requested(1), (
                "it has not loaded it yet, and its machine has it"
            )

    run(body)


@pytest.mark.parametrize("what", ["a fetch that fails", "no answer", "a start that fails"])
def test_a_lost_agent_starts_again_and_costs_no_engine(what: str) -> None:
    async def body() -> None:
        there = Reader(0, THERE)
        patience_s = 0.05 if what == "no answer" else 600.0
        async with relayed(there, unresponsive_s=patience_s) as harness:
            harness.held_up = True
            if what == "a start that fails":
                harness.broken.append(OSError("no room"))
            harness.stage(1)
            loading = asyncio.create_task(there.load(harness.updates))
            await until(lambda: harness.started and harness.started[0].asked)
            first = harness.started[0]
            harness.held_up = False
            if what == "no answer":
                first.deaf = True
            elif what == "a fetch that fails":
                first.failure = RelayFailed("bucket 0 arrived damaged twice")
                first.gate.set()
            else:
                first.gate.set()
            await loading
            assert there.loaded == [(1, "there/1")]
            assert [lost for lost in harness.lost if lost[2]] == []
            assert "restart 1 of 3 within an hour. Why: " in harness.notes[0]
            assert "machine there, is lost" in harness.notes[0]
            if what != "a start that fails":
                assert first.killed

    run(body)


def test_copies_go_with_their_agent_and_are_brought_anew_when_needed() -> None:
    async def body() -> None:
        there, late = Reader(0, THERE), Reader(1)
        async with relayed(there, late) as harness:
            harness.stage(1)
            await asyncio.gather(there.load(harness.updates), late.load(harness.updates))
            harness.started[0].death = ProcessDied("killed")
            await until(lambda: len(harness.started) == 2)
            await harness.start(late, THERE)
            await late.load(harness.updates)
            assert [relay.fetched for relay in harness.started] == [[1], [1]]
            assert "Why: ProcessDied: killed" in harness.notes[0]

    run(body)


def test_an_agent_starts_again_only_once_no_engine_reads_its_predecessors_copies() -> None:
    """It clears away what that one left."""

    async def body() -> None:
        reads, other, gate = Reader(0, THERE), Reader(1, THERE), asyncio.Event()
        async with relayed(reads, other) as harness:
            harness.stage(1)
            reading = asyncio.create_task(reads.load(harness.updates, gate))
            await other.load(harness.updates)
            await until(lambda: harness.updates._loading)
            harness.started[0].failure = RelayFailed("gone")
            harness.stage(2)
            await until(lambda: harness.notes)
            for _ in range(50):
                await asyncio.sleep(0)
            assert len(harness.started) == 1
            gate.set()
            await reading
            await other.load(harness.updates)
            assert len(harness.started) == 2

    run(body)


def test_an_agent_that_fails_for_good_costs_its_machines_engines_and_no_others() -> None:
    async def body() -> None:
        here, there = Reader(0), Reader(1, THERE)
        async with relayed(here, there, restarts_per_hour=2) as harness:
            harness.broken += [OSError("no route to host")] * 3
            harness.stage(1)
            await until(lambda: any(all_engines for *_, all_engines in harness.lost))
            await here.load(harness.updates)
            assert [lost[2] for lost in harness.lost] == [False, False, True]
            why = "no weights reached its machine: OSError: no route to host"
            assert harness.lost[-1] == (THERE, why, True)
            assert "and the engines there with it" in harness.notes[-1]
            assert await harness.released(1)

            await harness.start(there, THERE)  # and the machine can be reached
            await there.load(harness.updates)
            assert there.loaded == [(1, "there/1")]

    run(body)


def test_an_agent_that_is_lost_while_it_sends_holds_rank_0_up_no_longer() -> None:
    async def body() -> None:
        there = Reader(0, THERE)
        async with relayed(there, restarts_per_hour=0) as harness:
            harness.held_up = True
            harness.stage(1)
            await until(lambda: harness.started and harness.started[0].asked)
            harness.stage(2)
            harness.started[0].failure = RelayFailed("gone")
            harness.started[0].gate.set()
            await harness.updates.until_released(2)

    run(body)


def test_a_version_that_does_not_arrive_in_time_costs_the_agent() -> None:
    async def body() -> None:
        there = Reader(0, THERE)
        async with relayed(there, send_timeout_s=0.05) as harness:
            harness.held_up = True
            harness.stage(1)
            await until(lambda: harness.notes)
            assert "waited" in harness.notes[0]
            assert "for version 1 to reach elsewhere, which did not come" in harness.notes[0]
            assert harness.started[0].killed

    run(body)


def test_agents_end_with_the_run() -> None:
    async def body() -> None:
        async with relayed(Reader(0, THERE)) as harness:
            await until(lambda: harness.started)
            tasks = [harness.agents._task, *harness.agents._tasks.values()]
        assert harness.started[0].closed
        assert harness.started[0].killed
        assert all(task.cancelled() for task in tasks)
        assert len(tasks) == 2

    run(body)


def test_an_agent_that_does_not_stop_in_time_is_killed() -> None:
    async def body() -> None:
        ended: list[str] = []

        async def close() -> None:
            try:
                await asyncio.Event().wait()
            finally:
                ended.append("cancelled")

        harness = AgentHarness([Reader(0, THERE)])
        await until(lambda: harness.started)
        harness.started[0].close = close  # type: ignore[method-assign]
        began = asyncio.get_running_loop().time()
        await harness.agents.close(4.0)
        assert asyncio.get_running_loop().time() - began == pytest.approx(4.0)
        assert ended == ["cancelled"]
        assert harness.started[0].killed
        assert harness.source.calls == [("close",)]
        assert not harness.agents._running

    run(body)


def test_versions_are_announced_to_the_source_and_an_internal_error_ends_the_run() -> None:
    async def body() -> None:
        harness = AgentHarness([Reader(0, THERE)])

        async def broken(*_: object) -> None:
            raise RuntimeError("broken")

        harness.agents._keep = broken  # type: ignore[method-assign]
        harness.agents.stage(3, manifest(3))
        harness.agents.release(3)
        assert harness.source.calls == [("stage", 3, manifest(3)), ("release", 3)]
        await until(lambda: harness.errors)
        assert str(harness.errors[0]) == "broken"
        await harness.agents.close(5.0)

    run(body)


@looped("transport", ["shared_memory", "relay", "collective"])
def test_a_carrier_to_other_memory_has_agents_with_the_runs_limits(
    transport: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    made: list[Any] = []
    monkeypatch.setattr(distribution, "WeightAgents", lambda *given: made.append(given) or "agents")
    monkeypatch.setattr(
        distribution, "agent_source", lambda *given: made.append(given) or "the source"
    )
    (engine,) = specs(1)
    slot = EngineSlot(engine)
    fleet: Any = SimpleNamespace(updates="updates", slots=[slot])
    spec: Any = SimpleNamespace(
        engines=[replace(engine, transport=transport)],
        fleet=FleetSettings(unresponsive_s=5.0, update_timeout_s=6.0, restarts_per_hour=7),
        start_timeout_s=8.0,
        sender_gpu="2",
    )
    found: Any = distribution.weight_agents(spec, fleet, "listener")  # type: ignore[arg-type]
    if transport == "shared_memory":
        assert (found, made) == (None, [])
        return
    assert found == "agents"
    limits = {"unresponsive_s": 5.0, "send_timeout_s": 6.0, "start_timeout_s": 8.0}
    settings = distribution.AgentSettings(
        log_dir=Path("logs"),
        transport=transport,
        restarts_per_hour=7,
        **limits,
        at_once=1 if transport == "collective" else math.inf,
        with_engines=transport == "collective",
    )
    (module, context), given = made
    assert given == ("updates", "the source", "listener", settings)
    assert module == f"{transport}_agents"
    assert (context.log_dir, context.limit_s, context.sender_gpu) == (Path("logs"), 5.0, "2")
    assert context.engine_at(slot.machine) is None, "its engine has not started"
    slot.engine = SimpleNamespace(machine=slot.machine, receive="receive")  # type: ignore[assignment]
    receiving = ReceivingEngine(slot.name, engine.rollout.workers, "receive")  # type: ignore[arg-type]
    assert context.engine_at(slot.machine) == receiving
    assert context.engine_at("nowhere") is None


def test_weights_that_are_wrong_are_sent_nowhere() -> None:
    async def body() -> None:
        async with relayed(Reader(0, THERE)) as harness:
            harness.updates.halt(RuntimeError("mismatch"))
            harness.stage(1)
            await until(lambda: harness.started)
            for _ in range(50):
                await asyncio.sleep(0)
            assert harness.started[0].asked == []

    run(body)


SET = {"at_once": 1, "with_engines": True}
"""Each engine is a machine of its own."""


def test_sets_are_sent_to_one_after_another_and_each_in_its_turn() -> None:
    async def body() -> None:
        engines = [Reader(index, f"engine-{index}@a") for index in range(3)]
        async with relayed(*engines, **SET) as harness:
            harness.held_up = True
            await until(lambda: len(harness.started) == 3)
            order: list[int] = []
            harness.stage(1)
            for _ in engines:
                await until(lambda: len(asked(harness)) == len(order) + 1)
                for _ in range(50):
                    await asyncio.sleep(0)
                (now,) = set(asked(harness)) - set(order)
                if not order:
                    harness.stage(2)  # a machine that has had a turn waits for the others'
                order.append(now)
                harness.started[now].gate.set()
            await until(lambda: harness.updates.copies.newest(engines[order[0]].machine))
            assert sorted(order) == [0, 1, 2]

    run(body)


def asked(harness: AgentHarness) -> list[int]:
    """Relays that were asked for a version."""
    return [index for index, relay in enumerate(harness.started) if relay.asked]


def test_a_set_that_fails_costs_only_itself_and_is_made_anew() -> None:
    async def body() -> None:
        engines = [Reader(index, f"engine-{index}@a") for index in range(2)]
        async with relayed(*engines, **SET) as harness:
            harness.held_up = True
            await until(lambda: len(harness.started) == 2)
            harness.stage(1)
            await until(lambda: asked(harness))
            (first,) = asked(harness)
            broken, other = harness.started[first], engines[1 - first]
            harness.held_up = False
            broken.failure = RuntimeError("its worker has died")
            for relay in harness.started:
                relay.gate.set()
            await asyncio.gather(*(engine.load(harness.updates) for engine in engines))
            assert len(harness.started) == 3
            assert harness.started[1 - first].fetched == [1]
            assert other.loaded == [(1, f"{other.machine}/1")]
            assert broken.killed
            (note,) = harness.notes
            assert f"which copies weights to engine-{first}, is lost; restart 1 of 3" in note
            assert [lost for lost in harness.lost if lost[2]] == []

    run(body)


def test_a_set_that_failed_is_not_made_anew_for_an_engine_that_left() -> None:
    async def body() -> None:
        engine = Reader(0, "engine-0@a")
        async with relayed(engine, **SET) as harness:
            await until(lambda: len(harness.started) == 1)

            def leave(machine: str, reason: str, *, all_engines: bool) -> None:
                engine.machine = HERE
                harness.updates.forget(engine.index)

            harness.on_machine_lost = leave  # type: ignore[method-assign]
            harness.started[0].failure = RuntimeError("its worker has died")
            harness.stage(1)
            await until(lambda: harness.agents._tasks == {})
            assert len(harness.started) == 1
            (note,) = harness.notes
            assert "copies weights to engine-0, is lost; restart 1 of 3" in note

    run(body)


def test_a_set_ends_with_its_engine_and_the_one_in_its_place_has_nothing_yet() -> None:
    async def body() -> None:
        engine = Reader(0, "engine-0@a")
        async with relayed(engine, **SET) as harness:
            harness.held_up = True
            harness.stage(1)
            await until(lambda: harness.started and harness.started[0].asked)
            engine.machine = HERE
            harness.updates.forget(engine.index)
            await until(lambda: harness.started[0].killed)
            assert harness.notes == [], "the engine was lost, and not its communicator besides"
            await harness.updates.until_released(2)

            harness.held_up = False
            await harness.start(engine, "engine-0@b")
            await engine.load(harness.updates)
            assert engine.loaded == [(1, "engine-0@b/1")]
            engine.machine = HERE
            harness.updates.forget(engine.index)
            await until(lambda: harness.started[1].killed)
            assert harness.updates.copies.newest("engine-0@b") is None
            assert harness.agents._tasks == {}

    run(body)


def context_of(engines: dict[str, Any], limit_s: float = 60.0) -> AgentContext:
    """`engines`: machine -> what makes an engine's workers wait for a version."""

    def engine_at(machine: str) -> ReceivingEngine | None:
        receive = engines.get(machine)
        return None if receive is None else ReceivingEngine(machine, 1, receive)

    return AgentContext(log_dir=Path("logs"), limit_s=limit_s, sender_gpu=None, engine_at=engine_at)


def spec_of(index: int, machine: str) -> AgentSpec:
    return AgentSpec(
        index=index, machine=machine, log_dir=Path("logs"), transport="relay", silence_s=60.0
    )


class FakeSender:
    """The sender's actor. `death`: what its calls raise; `deaf`: it does not answer; `ready`: it
    has started."""

    def __init__(self, log: list[str]) -> None:
        self.log = log
        self.death: Exception | None = None
        self.deaf = False
        self.ready = asyncio.Event()
        self.ready.set()

    def __getattr__(self, method: str) -> SimpleNamespace:
        async def call(*arguments: Any) -> Any:
            self.log.append(method)
            await self.ready.wait()
            if self.death is not None:
                raise self.death
            if self.deaf:
                await asyncio.Event().wait()
            if method == "open":
                return Meeting(host="here", port=1, workers=arguments[0], limit_s=1.0)
            return copied(arguments[-1]) if method == "send" else None

        return SimpleNamespace(remote=call)


def test_an_engine_awaits_what_the_sender_sends_and_a_lost_sender_is_replaced(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    log: list[str] = []
    senders: list[FakeSender] = []
    killed: list[FakeSender] = []
    monkeypatch.setattr("ray.kill", killed.append)

    def start() -> FakeSender:
        senders.append(FakeSender(log))
        return senders[-1]

    async def receive(update: WeightUpdate) -> None:
        log.append(f"receive {update.version}, keep {update.kept}")

    async def body() -> None:
        engines = {"engine-0@a": receive}
        sets = Communicators.of(context_of(engines, 0.05))
        monkeypatch.setattr(sets, "_start", start)
        where = spec_of(0, "engine-0@a")
        relay = await sets.launch(where)
        for version in (1, 2):
            assert (await relay.fetch(version, manifest(version))).manifest == manifest(version)
        calls = ["alive", "open", "receive 1, keep None", "send", "receive 2, keep 1", "send"]
        assert log == calls

        senders[0].death = ProcessDied("killed")
        await sets.launch(where)
        senders[1].deaf = True
        await sets.launch(where)
        assert (len(senders), killed) == (3, senders[:2])
        engines.clear()
        with pytest.raises(RuntimeError, match="its engine no longer exists"):
            await sets.launch(where)

    run(body)


def test_a_sender_that_starts_for_longer_than_an_answer_may_take_serves_all_engines(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """It loads torch first, which on a busy machine takes its time."""
    killed: list[FakeSender] = []
    monkeypatch.setattr("ray.kill", killed.append)

    async def body() -> None:
        machines = ["engine-0@a", "engine-1@a"]
        sets = Communicators.of(context_of(dict.fromkeys(machines, "receive"), 0.05))
        ready = asyncio.Event()
        senders: list[FakeSender] = []

        def start() -> FakeSender:
            senders.append(FakeSender([]))
            senders[-1].ready = ready
            return senders[-1]

        monkeypatch.setattr(sets, "_start", start)
        launches = [asyncio.create_task(sets.launch(spec_of(0, machine))) for machine in machines]
        await asyncio.sleep(1.0)
        ready.set()
        await asyncio.gather(*launches)
        assert (len(senders), killed) == (1, [])

        sets.close()
        ready.clear()
        start_cancelled = asyncio.create_task(sets.launch(spec_of(0, machines[0])))
        await asyncio.sleep(0.01)
        start_cancelled.cancel()
        await asyncio.wait([start_cancelled])
        assert killed == senders, "one that is not waited for any more is not left running"

    run(body)


class OpenSender:
    """The sender's actor, with the sender itself. `before`: awaited before it opens; `after`:
    called then."""

    def __init__(self) -> None:
        self.sender = Sender("127.0.0.1", torch.device("cpu"), 60.0)
        self.meetings: list[Meeting] = []
        self.before = asyncio.Event()
        self.after: Callable[[], object] = lambda: None
        self.alive = SimpleNamespace(remote=partial(asyncio.sleep, 0))
        self.open = SimpleNamespace(remote=self._open)
        self.close = SimpleNamespace(remote=self.sender.close)

    async def _open(self, workers: int) -> Meeting:
        await self.before.wait()
        self.meetings.append(self.sender.open(workers))
        self.after()
        return self.meetings[-1]


@pytest.mark.parametrize("when", ["before it is open", "as it is open"])
def test_a_start_that_is_cancelled_leaves_no_port_in_use(
    when: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    async def body() -> None:
        sender = OpenSender()
        sets = Communicators.of(context_of({"engine-0@a": "receive"}))
        monkeypatch.setattr(sets, "_start", lambda: sender)
        where = spec_of(0, "engine-0@a")
        start = asyncio.create_task(sets.launch(where))
        await asyncio.sleep(0.01)
        if when == "as it is open":
            sender.after = start.cancel
        else:
            start.cancel()
            await asyncio.sleep(0.01)
        sender.before.set()
        await until(lambda: sender.meetings)
        await asyncio.sleep(0.01)
        assert start.cancelled()
        (meeting,) = sender.meetings
        with socket.create_server((meeting.host, meeting.port)):
            pass

    run(body)


def test_engines_of_a_machine_without_weights_are_lost_and_start_again() -> None:
    async def body() -> None:
        engines = [FakeEngine(), FakeEngine()]
        engines[1].machine = THERE
        harness = FleetHarness(FakeLaunch(engines), 0, FleetSettings(unresponsive_s=600.0))
        await harness.fleet.started()
        await harness.stage(0)
        await until(lambda: harness.serving() == [0])
        harness.fleet.lose_machine(THERE, "no route to host", all_engines=True)
        await until(lambda: harness.serving() == [0, 1])  # the new one is on rank 0's machine
        assert engines[1].killed
        assert any("no route to host" in note for note in harness.notes)
        assert not engines[0].killed
        await harness.close()

    run(body)


def test_an_engine_that_is_to_evaluate_is_lost_with_its_machines_agent() -> None:
    """Its version may be gone when the agent is back."""

    async def body() -> None:
        engines = [FakeEngine() for _ in range(3)]
        for engine in engines[1:]:
            engine.machine = THERE
        harness = FleetHarness(FakeLaunch(engines), 1, FleetSettings(unresponsive_s=600.0))
        await harness.fleet.started()
        await harness.stage(0)
        harness.fleet.prepare_evaluation(0)
        harness.fleet.lose_machine(THERE, "no route to host", all_engines=False)
        await until(lambda: engines[2].killed)
        assert not engines[1].killed
        await harness.close()

    run(body)


class Agents:
    """Stands in for Ray: makes the actor of an agent without a process, and ends it."""

    def __init__(self, failure: BaseException | None = None) -> None:
        self.failure, self.killed = failure, list[object]()

    def remote(self, **options: object) -> Callable[[type], Agents]:
        assert options == {"num_cpus": 0, "max_restarts": 0}
        return lambda actor: self

    def options(self, scheduling_strategy: Any) -> Any:
        strategy = (scheduling_strategy.node_id, scheduling_strategy.soft)
        return SimpleNamespace(
            remote=lambda spec, address: SimpleNamespace(
                made_of=(strategy, spec, address), where=SimpleNamespace(remote=self.where)
            )
        )

    async def where(self) -> str:
        if self.failure is not None:
            raise self.failure
        return "its machine"

    def kill(self, actor: object) -> None:
        self.killed.append(actor)


def test_an_agent_starts_on_its_machine_and_nowhere_else(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    ray = Agents()
    for name in ("remote", "kill"):
        monkeypatch.setattr(f"ray.{name}", getattr(ray, name))
    spec, address = spec_of(3, "aa" * 28), ("10.0.0.1", 4000)
    relay: Any = asyncio.run(start_agent(spec, address))
    assert relay.where == "its machine"
    assert relay.actor.made_of == (("aa" * 28, False), spec, address)
    assert ray.killed == []


@pytest.mark.parametrize("failure", [RuntimeError("no memory"), asyncio.CancelledError()])
def test_an_agent_that_does_not_start_is_killed(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, failure: BaseException
) -> None:
    ray = Agents(failure)
    for name in ("remote", "kill"):
        monkeypatch.setattr(f"ray.{name}", getattr(ray, name))
    with pytest.raises(type(failure)):
        asyncio.run(start_agent(spec_of(3, "aa" * 28), ("10.0.0.1", 4000)))
    assert len(ray.killed) == 1

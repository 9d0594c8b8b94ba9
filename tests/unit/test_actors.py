"""Actors that the controller starts, with a stand-in for Ray: engines, agents of other machines,
and the sender of weights. Which options they have, which calls reach them, and what a failure
leaves."""

from __future__ import annotations

import asyncio
import json
import os
import sys
from concurrent.futures import Future
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from megatron_async_rl.config.rollout import RewardConfig, RolloutConfig
from megatron_async_rl.config.sampling import SamplingConfig
from megatron_async_rl.flow import batches, rank0
from megatron_async_rl.flow.controller_spec import DataState
from megatron_async_rl.rollout import cluster, engine_process
from megatron_async_rl.rollout.engine import RolloutEngine
from megatron_async_rl.rollout.engine_process import EngineStartError, RemoteEngine, start_engine
from megatron_async_rl.rollout.spec import HERE, EngineSpec
from megatron_async_rl.watchdog.watch import DeadlineExceeded, ProcessDied
from megatron_async_rl.weights import collective_agents, relay_agents
from megatron_async_rl.weights.agents import AgentContext, AgentSpec, ReceivingEngine
from megatron_async_rl.weights.collective_agents import Communicators, EngineCommunicator
from megatron_async_rl.weights.manifest import WeightUpdate
from megatron_async_rl.weights.relay_agents import RelaySource, start_agent
from megatron_async_rl.weights.relay_server import RelayFailed


class FakeActor:
    """An actor whose methods record their calls and return, or raise, `results`."""

    def __init__(self, calls: list[Any], results: dict[str, Any]) -> None:
        self._calls, self._results = calls, results

    def __getattr__(self, name: str) -> Any:
        async def call(*given: Any) -> Any:
            self._calls.append((name, *given))
            result = self._results.get(name)
            if isinstance(result, BaseException):
                raise result
            return await result if asyncio.isfuture(result) else result

        return SimpleNamespace(remote=lambda *given: asyncio.ensure_future(call(*given)))


class FakeRay:
    """Stand-in for the module `ray` that makes FakeActors."""

    def __init__(self) -> None:
        self.calls: list[Any] = []
        self.results: dict[str, Any] = {}
        self.util = SimpleNamespace(get_node_ip_address=lambda: "10.0.0.1")

    def remote(self, made: type | None = None, **options: Any) -> Any:
        if made is None:
            return lambda one: self._chosen(one, options)
        return self._chosen(made, options)

    def _chosen(self, made: type, options: dict[str, Any]) -> Any:
        def start(*given: Any, **named: Any) -> FakeActor:
            self.calls.append((made, options, given))
            return FakeActor(self.calls, self.results)

        def more(**named: Any) -> Any:
            options.update(named)
            return SimpleNamespace(remote=start)

        return SimpleNamespace(options=more, remote=start)

    def kill(self, actor: FakeActor) -> None:
        self.calls.append("kill")

    def get_runtime_context(self) -> Any:
        return SimpleNamespace(get_node_id=lambda: "here")

    def nodes(self) -> list[dict[str, Any]]:
        return [{"NodeID": "a", "Alive": True}, {"NodeID": "b", "Alive": False}]


@pytest.fixture
def ray(monkeypatch: pytest.MonkeyPatch) -> FakeRay:
    fake = FakeRay()
    monkeypatch.setitem(sys.modules, "ray", fake)
    strategies = SimpleNamespace(
        NodeAffinitySchedulingStrategy=lambda node, soft: ("on", node, soft)
    )
    monkeypatch.setitem(sys.modules, "ray.util.scheduling_strategies", strategies)

    async def answer_of(call: Any) -> Any:
        return await call

    for module in (relay_agents, collective_agents, engine_process):
        monkeypatch.setattr(module, "answer_of", answer_of)
    return fake


SPEC = AgentSpec(index=3, machine="node-b", log_dir=Path("/logs"), transport="relay", silence_s=5.0)


def test_an_agent_starts_on_its_machine_and_passes_calls_on(ray: FakeRay) -> None:
    ray.results = {"where": "host-b", "fetch": "copy"}

    async def run() -> None:
        relay = await start_agent(SPEC, ("10.0.0.1", 5))  # type: ignore[arg-type]
        assert relay.where == "host-b"
        assert await relay.fetch(4, "manifest") == "copy"  # type: ignore[arg-type,comparison-overlap]
        await relay.alive()
        await relay.close()
        relay.kill()

    asyncio.run(run())
    strategy = {"scheduling_strategy": ("on", "node-b", False)}
    options = {"num_cpus": 0, "max_restarts": 0, **strategy}
    assert ray.calls == [
        (relay_agents.RelayActor, options, (SPEC, ("10.0.0.1", 5))),
        *(("where",), ("fetch", 4, "manifest"), ("alive",), ("close",), "kill"),
    ]
    assert SPEC.name == "relay-3"


def test_an_agent_that_does_not_start_leaves_nothing(ray: FakeRay) -> None:
    for error in (ProcessDied("died"), asyncio.CancelledError()):
        ray.calls.clear()
        ray.results = {"where": error}
        with pytest.raises(type(error)):
            asyncio.run(start_agent(SPEC, ("h", 5)))  # type: ignore[arg-type]
        assert ray.calls[1:] == [("where",), "kill"]


def test_a_server_listens_at_rays_address(ray: FakeRay, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(relay_agents, "RelayServer", lambda *given: given)
    assert relay_agents.serve_here(7.5) == ("10.0.0.1", 7.5)

    def fails(*_: Any) -> None:
        raise OSError("in use")

    monkeypatch.setattr(relay_agents, "RelayServer", fails)
    with pytest.raises(RelayFailed, match=r"cannot listen at 10\.0\.0\.1, .* machine: in use; "):
        relay_agents.serve_here(7.5)


def test_a_relay_serves_what_is_staged_to_the_agents_it_starts(
    ray: FakeRay, monkeypatch: pytest.MonkeyPatch
) -> None:
    calls: list[Any] = []

    class Server:
        address = ("10.0.0.1", 5)

        def __init__(self, *given: Any) -> None:
            calls.append(given)

        def __getattr__(self, name: str) -> Any:
            return lambda *given: calls.append((name, *given))

    monkeypatch.setattr(relay_agents, "RelayServer", Server)
    ray.results = {"where": "host-b"}
    context = AgentContext(log_dir=Path("/logs"), limit_s=7.5, sender_gpu=None, engine_at={}.get)
    source = RelaySource.of(context)
    agent = asyncio.run(source.launch(SPEC))
    source.stage(3, "manifest")  # type: ignore[arg-type]
    source.release(3)
    source.close()
    assert calls == [("10.0.0.1", 7.5), ("stage", 3, "manifest"), ("release", 3), ("close",)]
    assert (agent.where, ray.calls[0][2]) == ("host-b", (SPEC, ("10.0.0.1", 5)))


class FakeEngine:
    def __init__(self, calls: list[Any]) -> None:
        self._calls = calls

    async def receive(self, update: WeightUpdate) -> None:
        self._calls.append(update)


def communicators(ray: FakeRay, gpu: str | None = None) -> Communicators:
    engine = ReceivingEngine("engine-1", 2, FakeEngine(ray.calls).receive)
    return Communicators.of(
        AgentContext(
            log_dir=Path("/logs"),
            limit_s=5.0,
            sender_gpu=gpu,
            engine_at={"node-b": engine}.get,
        )
    )


def test_one_sender_opens_a_communicator_to_each_engine(ray: FakeRay) -> None:
    ray.results = {"open": "meeting", "send": "copy"}

    async def run() -> None:
        every = communicators(ray, "2")
        relay = await every.launch(SPEC)
        assert isinstance(relay, EngineCommunicator)
        assert (relay.where, relay.meeting, relay.held) == ("engine-1", "meeting", None)
        options = {
            "num_cpus": 0,
            "max_restarts": 0,
            "scheduling_strategy": ("on", "here", False),
        }
        given = ("10.0.0.1", Path("/logs"), 5.0, "2")
        started = [(collective_agents.SenderActor, options, given), ("alive",)]
        assert ray.calls == [*started, ("open", 2)]
        ray.calls.clear()
        for version, kept in ((4, None), (5, 4)):
            assert await relay.fetch(version, "manifest") == "copy"  # type: ignore[arg-type,comparison-overlap]
            update: Any = WeightUpdate(
                meeting="meeting",  # type: ignore[arg-type]
                version=version,
                manifest="manifest",  # type: ignore[arg-type]
                kept=kept,
            )
            assert ray.calls == [update, ("send", "meeting", version, "manifest")]
            assert relay.held == version
            ray.calls.clear()
        await relay.alive()
        await relay.close()
        relay.kill()
        await asyncio.sleep(0)
        assert ray.calls == [("alive",), ("close", "meeting"), ("close", "meeting")]
        ray.calls.clear()
        await every.launch(SPEC)
        assert ray.calls == [("alive",), ("open", 2)]  # the same sender, which still answers
        ray.results["send"] = RuntimeError("lost")
        with pytest.raises(RuntimeError, match="lost"):
            await relay.fetch(6, "manifest")  # type: ignore[arg-type]
        assert relay.held == 5
        every.close()
        every.close()
        assert ray.calls.count("kill") == 1

    asyncio.run(run())


def test_a_sender_that_does_not_answer_is_replaced(ray: FakeRay) -> None:
    async def run() -> None:
        every = communicators(ray)
        sender = await every._running_sender()
        ray.calls.clear()
        sender._results = {"alive": ProcessDied("died")}
        assert await every._running_sender() is not sender
        assert [one if isinstance(one, str) else one[0] for one in ray.calls] == [
            *("alive", "kill", collective_agents.SenderActor, "alive")
        ]
        # A sender that does not start is killed, and the next call starts another.
        every.close()
        ray.calls.clear()
        ray.results = {"alive": ProcessDied("died")}
        with pytest.raises(ProcessDied, match="died"):
            await every._running_sender()
        assert (ray.calls[-1], every._sender) == ("kill", None)

    asyncio.run(run())


def test_a_communicator_needs_its_engine_and_leaves_no_port_open(ray: FakeRay) -> None:
    async def run() -> None:
        every = communicators(ray)
        with pytest.raises(RuntimeError, match="its engine no longer exists"):
            await every.launch(replace(SPEC, machine="nowhere"))
        opening = asyncio.get_running_loop().create_future()
        ray.results["open"] = opening
        launch = asyncio.ensure_future(every.launch(SPEC))
        while ("open", 2) not in ray.calls:
            await asyncio.sleep(0)
        launch.cancel()
        with pytest.raises(asyncio.CancelledError):
            await launch
        ray.calls.clear()
        opening.set_result("meeting")
        while not ray.calls:
            await asyncio.sleep(0)
        assert ray.calls == [("close", "meeting")]
        # Nothing to close if it did not open.
        failed = asyncio.get_running_loop().create_future()
        failed.set_exception(RuntimeError("no"))
        cancelled = asyncio.get_running_loop().create_future()
        cancelled.cancel()
        for one in (failed, cancelled):
            collective_agents._close(every._sender, one)
        assert ray.calls == [("close", "meeting")]

    asyncio.run(run())


def engine_spec(folder: Path, **more: Any) -> EngineSpec:
    rollout = RolloutConfig(
        reward=RewardConfig(name="math"),
        sampling=SamplingConfig(max_tokens=8),
        tensor=2,
        start_timeout_s=more.pop("start_timeout_s", 500.0),
    )
    given: dict[str, Any] = {"device": "cuda", "transport": "cuda_ipc"}
    return EngineSpec(
        index=1,
        model_path=folder,
        dtype="float32",
        rollout=rollout,
        seed=0,
        log_dir=folder / "logs",
        **given | more,
    )


@pytest.fixture
def placed(ray: FakeRay, monkeypatch: pytest.MonkeyPatch) -> FakeRay:
    async def of(name: str, *given: Any) -> str:
        return name

    monkeypatch.setattr(engine_process, "place_of_engine", lambda spec: "place")
    monkeypatch.setattr(engine_process, "preloaded_worker", lambda: {"runtime_env": "r"})
    monkeypatch.setattr(engine_process, "node_of", lambda actor: of("here"))
    monkeypatch.setattr(engine_process, "memory_of", lambda spec, actor: of("memory"))
    return ray


@pytest.mark.parametrize(("device", "gpus"), [("cuda", 2), ("cpu", 0)])
def test_an_engine_starts_in_an_actor_of_its_own(
    placed: FakeRay, tmp_path: Path, device: str, gpus: int
) -> None:
    placed.results = {"__ray_call__": [(5, 1.0)], "report": "reported"}
    spec = engine_spec(tmp_path, device=device, transport="shared_memory")

    async def run() -> Any:
        engine: Any = await start_engine(spec)
        assert await engine.report(2.0) == "reported"
        return engine

    engine = asyncio.run(run())
    assert (engine.machine, engine.node, engine.processes) == ("memory", "here", [(5, 1.0)])
    options = {
        "num_cpus": 0,
        "num_gpus": gpus,
        "max_concurrency": engine_process.MAX_CALLS,
        "scheduling_strategy": "place",
        "runtime_env": "r",
    }
    assert placed.calls == [
        (RolloutEngine, options, (spec,)),
        *(("start",), ("__ray_call__", engine_process._processes), ("report", 2.0)),
    ]
    engine.kill()
    assert placed.calls[-1] == "kill"
    assert (tmp_path / "logs").is_dir()


def test_an_engine_on_another_machine_has_no_processes_here(
    placed: FakeRay, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    async def elsewhere(actor: Any) -> str:
        return "b"

    monkeypatch.setattr(engine_process, "node_of", elsewhere)
    engine: Any = asyncio.run(start_engine(engine_spec(tmp_path)))
    assert engine.processes == ()
    for node, lost in (("a", False), ("b", True), ("c", True), ("", False)):
        engine.node = node
        assert asyncio.run(engine.machine_is_lost()) is lost


def test_a_failed_start_has_the_end_of_the_log_and_leaves_no_process(
    placed: FakeRay, tmp_path: Path
) -> None:
    spec = engine_spec(tmp_path, start_timeout_s=0.05)
    spec.log_dir.mkdir()
    spec.log.write_text("".join(f"line {n}\n" for n in range(20)))
    lines = "".join(f"\n    line {n}" for n in range(5, 20))
    for error, what, memory in (
        (ValueError("bad"), "did not start: ValueError: bad", None),
        (RuntimeError("CUDA out of memory"), "RuntimeError: CUDA out of memory", "device"),
    ):
        placed.calls.clear()
        placed.results = {"start": error}
        with pytest.raises(EngineStartError) as failed:
            asyncio.run(start_engine(spec))
        assert what in str(failed.value)
        assert str(failed.value).endswith(f"last lines of {spec.log}:{lines}")
        assert (failed.value.out_of_memory, failed.value.phase) == (memory, "generate")
        assert placed.calls[-1] == "kill"

    name = "the reward score to be imported"
    wait = {"kind": "wait", "name": name, "since_s": 200.0, "deadline_s": 300.0}
    state = {"name": spec.name, "pid": 1, "host": "", "time": 1.0, "activities": [wait]}
    file = tmp_path / "watch" / f"{spec.name}.json"
    file.parent.mkdir()
    file.write_text(json.dumps(state))

    async def hangs(heartbeat: float) -> None:
        placed.results = {"start": asyncio.get_running_loop().create_future()}
        starting = asyncio.ensure_future(start_engine(spec, again=True))
        await asyncio.sleep(0)
        file.write_text(json.dumps(state | {"time": heartbeat}))
        await starting

    limit = r"did not start within rollout\.start_timeout_s: 0\.05"
    with pytest.raises(
        EngineStartError, match=rf"{limit}; it waits for {name} \(200\.0 of 300 s\)\n"
    ):
        asyncio.run(hangs(2.0))
    # No heartbeat since the start: the state is that of the former engine.
    with pytest.raises(EngineStartError, match=rf"{limit}\n"):
        asyncio.run(hangs(2.0))
    assert placed.calls[-1] == "kill"
    # Both starts kept an old log or found none.
    for old in spec.log_dir.glob(f"{spec.log.name}.*"):
        old.rename(old.with_suffix(".1"))
    # The old log was kept under the next free number.
    (spec.log_dir / f"{spec.log.name}.9x").touch()
    (spec.log_dir / f"{spec.log.name}.7").touch()
    spec.log.write_text("new")
    engine_process._keep_old_log(spec)
    assert (spec.log_dir / f"{spec.log.name}.8").read_text() == "new"
    engine_process._keep_old_log(spec)  # without a log, nothing happens
    assert {one.name.removeprefix(spec.log.name) for one in spec.log_dir.iterdir()} == {
        *(".1", ".7", ".8", ".9x")
    }

    placed.results = {"start": asyncio.CancelledError()}
    placed.calls.clear()
    with pytest.raises(asyncio.CancelledError):
        asyncio.run(start_engine(spec))
    assert placed.calls[-1] == "kill"


def test_the_processes_of_an_engine_have_their_start_times(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(engine_process, "descendants", lambda: [2**22 + 1])
    found = engine_process._processes(None)
    assert [pid for pid, _ in found] == [os.getpid()]
    assert RemoteEngine(None).processes == ()
    assert isinstance(found[0][1], float)


def test_an_engines_memory_is_named_by_its_place(ray: FakeRay, tmp_path: Path) -> None:
    context = ray.get_runtime_context()
    context.get_actor_id = lambda: 7
    ray.get_runtime_context = lambda: context  # type: ignore[method-assign]
    assert cluster._whereabouts(object()) == ("here", "7")

    async def found(transport: str, node: str) -> tuple[str, str]:
        actor = FakeActor([], {"__ray_call__": (node, "a1")})
        spec = engine_spec(tmp_path, transport=transport)
        return await cluster.node_of(actor), await cluster.memory_of(spec, actor)

    for transport, node, memory in (
        ("shared_memory", "here", HERE),
        ("shared_memory", "b", "b"),
        ("collective", "here", "engine-1@a1"),
    ):
        assert asyncio.run(found(transport, node)) == (node, memory)


def test_the_trainers_gpus_are_reserved_or_named(
    ray: FakeRay, monkeypatch: pytest.MonkeyPatch
) -> None:
    held: list[Any] = [["1", "0"]]
    waits: list[Any] = []

    def ray_get(call: Any, what: str, limit_s: float) -> Any:
        call.close()
        waits.append((what, limit_s))
        if isinstance(held[0], BaseException):
            raise held[0]
        return held[0]

    class Holder:
        gpus = SimpleNamespace(remote=lambda: SimpleNamespace(close=lambda: None))

    started: list[Any] = []

    def options(**given: Any) -> Any:
        started.append(given)
        return SimpleNamespace(remote=Holder)

    monkeypatch.setattr(ray, "remote", lambda made: SimpleNamespace(options=options))
    monkeypatch.setattr(cluster, "ray_get", ray_get)
    assert isinstance(cluster.reserve(["0", "1"], "node-b", "b"), Holder)
    strategy = ("on", "node-b", False)
    assert started == [{"num_cpus": 0, "num_gpus": 2, "scheduling_strategy": strategy}]
    assert waits == [("Ray to reserve the trainer's GPUs", cluster.RESERVE_S)]
    assert ray.calls == []
    fix = "; wait for the other jobs of this Ray cluster, give the trainer other GPUs, or start"
    for held[0], text in (
        (
            DeadlineExceeded("late", "x", 5.0),
            f"Ray has no 2 free GPUs on b for the trainer's ranks{fix}",
        ),
        (
            ["3", "1"],
            "the trainer's ranks use GPUs 0, 1 of b, and Ray has assigned some of them to other"
            f" jobs; free GPUs: 1, 3{fix}",
        ),
    ):
        ray.calls.clear()
        with pytest.raises(cluster.TrainerDevicesTaken) as taken:
            cluster.reserve(["0", "1"], "node-b", "b")
        assert str(taken.value).startswith(text)
        assert ray.calls == ["kill"]


def test_a_rank_uses_the_gpu_of_its_place(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "4,6")
    for rank, gpu in (("0", "4"), ("1", "6"), (None, "4")):
        monkeypatch.setenv("LOCAL_RANK", rank or "")
        if rank is None:
            monkeypatch.delenv("LOCAL_RANK")
        assert cluster.gpu_of_rank() == gpu
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "")
    monkeypatch.setattr("torch.cuda.device_count", lambda: 3)
    assert cluster.visible_gpus() == ["0", "1", "2"]
    monkeypatch.setattr(cluster, "executable", lambda name: None)
    assert cluster.preloaded_worker() == {}
    monkeypatch.setattr(cluster, "executable", lambda name: f"/{name}")
    assert cluster.preloaded_worker() == {"runtime_env": {"py_executable": "/engines"}}


def requests(monkeypatch: pytest.MonkeyPatch, answers: dict[str, Any]) -> tuple[Any, list[Any]]:
    """Return rank 0's requests to a controller that answers with `answers`, and their record."""
    calls: list[Any] = []

    class Controller:
        def __getattr__(self, name: str) -> Any:
            def remote(*given: Any) -> Any:
                calls.append((name, *given))
                future: Future[Any] = Future()
                if name in answers:
                    future.set_result(answers[name])
                return SimpleNamespace(future=lambda: future, answer=answers.get(name))

            return SimpleNamespace(remote=remote)

    def ray_get(pending: Any, what: str, limit_s: float) -> Any:
        calls.append((what, limit_s))
        return pending.answer

    monkeypatch.setattr(batches, "ray_get", ray_get)
    one: Any = batches.RolloutBatches.__new__(batches.RolloutBatches)
    vars(one).update(
        _controller=Controller(),
        _timeout_s=5.0,
        _separate=True,
        _released=None,
        _buffer_request=None,
        _buffer_filled=None,
        _evaluation=None,
        _results=[],
        data={"d": 1},
    )
    return one, calls


def test_rank_0_asks_the_controller_with_the_right_limits(monkeypatch: pytest.MonkeyPatch) -> None:
    state = DataState(state={"s": 1}, data={})
    one, calls = requests(monkeypatch, {"next_batch": "handout", "state": state})
    assert one.next_batch(4) == "handout"
    one.sleep()
    one.until_loaded(4)
    one.until_released(6)
    one.publish(6, "manifest")
    one.until_released(7)
    assert one.state() == DataState(state={"s": 1}, data={"d": 1})
    assert calls == [
        *(("next_batch", 4), ("the batch for version 4", batches.DAY_S)),
        *(("sleep",), ("the engines to sleep", batches.DAY_S)),
        *(("loaded", 4), ("the engines to load version 4", batches.DAY_S)),
        ("staged", 6, "manifest"),
        ("engines to be done with version 5 before 7 takes its place", 5.0),
        *(("state",), ("the controller's position", 5.0)),
    ]


def test_the_ranks_serve_one_buffer_request_at_a_time(monkeypatch: pytest.MonkeyPatch) -> None:
    answers: dict[str, Any] = {}
    one, calls = requests(monkeypatch, answers)
    made: Future[None] = Future()
    made.set_result(None)
    one.buffer_filled("bucket")
    assert one.next_buffer_request(made) is None
    assert one.next_buffer_request(made) is None  # the same request, without a second call
    assert calls == [("next_buffer_request", "bucket")]
    answers["next_buffer_request"] = "fill"
    one._buffer_request = None
    one.buffer_filled(None)
    for _ in range(2):
        assert one.next_buffer_request(Future()) == "fill"
    assert calls[1:] == [
        *(("next_buffer_request", None), ("the next bucket to fill", 5.0)) * 2,
    ]


def test_results_of_evaluations_come_once(monkeypatch: pytest.MonkeyPatch) -> None:
    one, calls = requests(monkeypatch, {"evaluate": "result"})
    ready = [False]
    monkeypatch.setattr(
        batches.ray, "wait", lambda pending, timeout: (pending if ready[0] else [], [])
    )
    taken = ("the evaluation", batches.DAY_S)
    one.evaluate(3)
    assert (one.evaluated(), calls) == ([], [("evaluate", 3)])
    ready[0] = True
    assert (one.evaluated(), one.evaluated()) == (["result"], [])
    one.evaluate(4)
    ready[0] = False
    one.evaluate(5)  # waits for the evaluation of 4
    assert calls == [("evaluate", 3), taken, ("evaluate", 4), taken, ("evaluate", 5)]
    assert one.evaluated(wait=True) == ["result", "result"]
    one._separate = False
    one.evaluate(6)
    assert calls[-2:] == [("evaluate", 6), taken]
    assert one.evaluated() == ["result"]


def test_recorded_steps_are_read_one_ahead(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    read: list[int] = []

    class Recorded:
        def __init__(self, run: Path) -> None:
            pass

        def batch(self, step: int) -> Any:
            read.append(step)
            return SimpleNamespace(version=step - 1)

    monkeypatch.setattr(batches, "RecordedBatches", Recorded)
    replay: Any = SimpleNamespace(run=tmp_path, first=3, last=5)
    steps = batches.RecordedSteps(replay, tmp_path, streams=True)
    versions = [steps.next_batch(version).batch.version for version in (2, 3, 4)]  # type: ignore[union-attr]
    assert (versions, read) == ([2, 3, 4], [3, 4, 5])
    with pytest.raises(ValueError, match="the batch of version 4 was read for 7"):
        steps.next_batch(7)
    (tmp_path / batches.watch.STOP).touch()
    assert steps.next_batch(7) is None
    assert steps.state() == DataState(state={}, data={})
    steps.close()
    with pytest.raises(RuntimeError, match="after shutdown"):
        steps._reader.submit(print)


def test_other_ranks_have_no_batches() -> None:
    other: Any = rank0.OtherRank()
    with pytest.raises(RuntimeError, match="only rank 0 of a run with engines reaches them"):
        other.engines  # noqa: B018
    with pytest.raises(RuntimeError, match="only rank 0 of a supervised run has its responses"):
        other.given  # noqa: B018
    for call in (other.take_batch, other.next_batch):
        with pytest.raises(RuntimeError, match="only rank 0 takes batches"):
            call()
    assert (other.position(), other.record_of(None)) == (None, {})


def test_an_agents_calls_run_in_threads_and_return_its_answers() -> None:
    calls: list[Any] = []

    class Tool:
        def __getattr__(self, name: str) -> Any:
            return lambda *given: calls.append((name, *given)) or f"{name}ed"

    relay: Any = relay_agents.RelayActor.__new__(relay_agents.RelayActor)
    relay._agent = Tool()
    sender: Any = collective_agents.SenderActor.__new__(collective_agents.SenderActor)
    sender._sender = Tool()

    async def body() -> list[Any]:
        return [
            *(await relay.fetch(3, "manifest"), await relay.alive(), await relay.close()),
            *(await sender.open(2), await sender.send("meeting", 3, "manifest")),
            *(await sender.alive(), await sender.close("meeting")),
        ]

    assert asyncio.run(body()) == ["fetched", None, None, "opened", "sended", None, None]
    assert calls == [
        *(("fetch", 3, "manifest"), ("close",), ("open", 2), ("send", "meeting", 3, "manifest")),
        ("close", "meeting"),
    ]

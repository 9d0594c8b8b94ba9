"""The engine's actor with a stand-in for vLLM: which calls reach vLLM, in which order, and what the
engine reports. tests/engine has the real vLLM."""

from __future__ import annotations

import asyncio
import os
import pickle
import sys
from collections.abc import Awaitable, Callable
from dataclasses import dataclass, field
from pathlib import Path
from types import SimpleNamespace
from typing import Any, Literal

import pytest

from megatron_async_rl.config.rollout import EnvironmentConfig, RewardConfig, RolloutConfig
from megatron_async_rl.config.sampling import SamplingConfig
from megatron_async_rl.rollout import engine as engine_module
from megatron_async_rl.rollout.engine import RolloutEngine
from megatron_async_rl.rollout.engine_state import (
    BusyClock,
    EngineState,
    EngineTimeline,
    ReportQueue,
    WrongState,
)
from megatron_async_rl.rollout.environments.episode import Episodes
from megatron_async_rl.rollout.spec import EngineSpec
from megatron_async_rl.rollout.vllm.client import EngineDied
from megatron_async_rl.samples.columns import SCHEMA
from tests.cases import looped

DIGESTS = {"w": "d1"}


def spec_of(folder: Path, device: Literal["cpu", "cuda"] = "cpu", **more: Any) -> EngineSpec:
    rollout = {"reward": RewardConfig(name="math"), "sampling": SamplingConfig(max_tokens=8)}
    rollout |= more.pop("rollout", {})
    return EngineSpec(
        index=0,
        model_path=folder,
        dtype="float32",
        rollout=RolloutConfig(**rollout),
        seed=0,
        device=device,
        log_dir=folder,
        transport="shared_memory",
        **more,
    )


@dataclass
class FakeVllm:
    """AsyncLLM that records its calls."""

    calls: list[Any] = field(default_factory=list)
    errored: bool = False
    loaded: dict[str, str] = field(default_factory=lambda: dict(DIGESTS))

    def __getattr__(self, name: str) -> Callable[..., Awaitable[Any]]:
        async def call(*arguments: Any, **named: Any) -> Any:
            self.calls.append((name, *arguments, *named.items()))
            return "7"

        return call

    @property
    def engine_core(self) -> FakeVllm:
        return self

    def shutdown(self, timeout: float) -> None:
        self.calls.append(("shutdown", timeout))


class Dead(Exception):
    """Stands for vLLM's EngineDeadError."""


@pytest.fixture
def vllm(monkeypatch: pytest.MonkeyPatch) -> FakeVllm:
    fake = FakeVllm()

    async def load(llm: Any, bucket: Any, version: int, **named: Any) -> dict[str, str]:
        llm.calls.append(("load", bucket, version, named))
        return llm.loaded if named["last"] else {}

    core = SimpleNamespace(load_between_steps=load)
    monkeypatch.setitem(sys.modules, "megatron_async_rl.rollout.vllm.engine_core", core)
    dead = SimpleNamespace(EngineDeadError=Dead)
    monkeypatch.setitem(sys.modules, "vllm.v1.engine.exceptions", dead)
    monkeypatch.setattr(engine_module, "ALIVE_POLL_S", 0.001)
    return fake


def started(folder: Path, vllm: FakeVllm, **more: Any) -> Any:
    """Return an engine in the state after `start`."""
    engine: Any = RolloutEngine.__new__(RolloutEngine)
    state = EngineState("engine-0")
    vars(engine).update(
        spec=spec_of(folder, **more),
        _state=state,
        _timeline=EngineTimeline(None, "engine-0", state),
        _busy=BusyClock(),
        _version=3,
        _llm=vllm,
        _responses=SimpleNamespace(
            reports=ReportQueue(), sampled=5, running=2, tokens=70, generated=50, oldest_s=12.4
        ),
        _environments=None,
        _agents=None,
        _sampled=0,
        _health=SimpleNamespace(silent_s=1.6),
        _watch=None,
        _scorer=SimpleNamespace(close=lambda: None),
    )
    return engine


def manifest(*buckets: str) -> Any:
    plain = [SimpleNamespace(as_plain=lambda one=one: one) for one in buckets]
    return SimpleNamespace(buckets=plain, digests=dict(DIGESTS))


def loads(vllm: FakeVllm) -> list[tuple[Any, ...]]:
    """Return (bucket, first, last) of each load."""
    named = [(bucket, named) for what, bucket, _, named in vllm.calls if what == "load"]
    return [(bucket, one["first"], one["last"]) for bucket, one in named]


def test_an_update_loads_every_bucket_and_resumes_with_the_right_digests(
    tmp_path: Path, vllm: FakeVllm
) -> None:
    for in_flight, clears in (("keep", False), ("recompute", True)):
        engine = started(tmp_path, vllm, rollout={"in_flight": in_flight})
        vllm.calls.clear()
        assert asyncio.run(engine.update(4, manifest("a", "b", "c"))) == DIGESTS
        named = {"clear_cache": clears, "resume_if": DIGESTS}
        assert vllm.calls == [
            ("load", "a", 4, {"first": True, "last": False} | named),
            ("load", "b", 4, {"first": False, "last": False} | named),
            ("load", "c", 4, {"first": False, "last": True} | named),
        ]
        assert (engine._state.state, engine._version, engine._busy._paused) == ("running", 4, False)


def test_an_update_in_several_calls_stays_paused_until_its_last_bucket(
    tmp_path: Path, vllm: FakeVllm
) -> None:
    engine = started(tmp_path, vllm)
    entered: list[tuple[str, bool]] = []
    engine._timeline.load = lambda: entered.append((engine._state.state, engine._busy._paused))
    assert asyncio.run(engine.update(4, manifest("a", "b"), True, False)) == {}
    assert entered == [("paused", False)]
    assert (engine._state.state, engine._version, engine._busy._paused) == ("paused", 3, True)
    assert asyncio.run(engine.update(4, manifest("c", "d"), False, True)) == DIGESTS
    assert loads(vllm) == [
        ("a", True, False),
        ("b", False, False),
        ("c", False, False),
        ("d", False, True),
    ]
    assert (engine._state.state, engine._version) == ("running", 4)


def test_weights_with_other_digests_are_not_sampled(tmp_path: Path, vllm: FakeVllm) -> None:
    vllm.loaded = {"w": "other"}
    engine = started(tmp_path, vllm)
    assert asyncio.run(engine.update(4, manifest("a"))) == {"w": "other"}
    assert (engine._state.state, engine._version, engine._busy._paused) == ("paused", 4, True)


def test_a_sleeping_engine_loads_once_its_weights_are_awake(tmp_path: Path, vllm: FakeVllm) -> None:
    engine = started(tmp_path, vllm)
    engine._state.sleep()
    with pytest.raises(WrongState, match=r"engine-0 cannot load weights: their memory is asleep"):
        asyncio.run(engine.update(4, manifest("a")))
    engine._state.wake(("weights",))
    assert asyncio.run(engine.update(4, manifest("a"))) == DIGESTS
    assert [one[3]["resume_if"] for one in vllm.calls] == [None]
    assert (engine._state.state, engine._version, engine._busy._paused) == ("asleep", 4, True)


PAUSE = ("pause_scheduler_async", ("mode", "keep"), ("clear_cache", False))


@looped(
    ("device", "sleep", "wake"),
    [
        ("cpu", [PAUSE], [[], []]),
        (
            "cuda",
            [("sleep", ("level", 2), ("mode", "keep"))],
            [[("wake_up", ["weights"])], [("wake_up", ["kv_cache"])]],
        ),
    ],
)
def test_an_engine_sleeps_and_wakes_in_two_parts(
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    device: Literal["cpu", "cuda"],
    sleep: list[Any],
    wake: list[Any],
) -> None:
    dead = SimpleNamespace(EngineDeadError=Dead)
    monkeypatch.setitem(sys.modules, "vllm.v1.engine.exceptions", dead)

    async def run() -> None:
        vllm = FakeVllm()
        engine = started(tmp_path, vllm, device=device)
        await engine.sleep()
        assert (vllm.calls, engine._state.state, engine._busy._paused) == (sleep, "asleep", True)
        for call in ("sleep", "pause", "resume"):
            with pytest.raises(WrongState, match=f"cannot {call}: it is asleep"):
                await getattr(engine, call)()
        vllm.calls.clear()
        await engine.wake(["weights"])
        assert (vllm.calls, engine._state.state) == (wake[0], "asleep")
        vllm.calls.clear()
        await engine.wake(None)
        assert vllm.calls == [*wake[1], ("resume_generation",)]
        assert (engine._state.state, engine._busy._paused) == ("running", False)

    asyncio.run(run())


def test_a_pause_stops_sampling_once(tmp_path: Path, vllm: FakeVllm) -> None:
    async def run() -> None:
        engine = started(tmp_path, vllm)
        for _ in range(2):
            await engine.pause()
            assert (vllm.calls, engine._state.state, engine._busy._paused) == (
                [PAUSE],
                "paused",
                True,
            )
        await engine.resume()
        assert vllm.calls[1:] == [("resume_generation",)]
        assert (engine._state.state, engine._busy._paused) == ("running", False)
        assert await engine.version() == 7

    asyncio.run(run())


def test_a_receive_reaches_every_worker(tmp_path: Path, vllm: FakeVllm) -> None:
    update = SimpleNamespace(version=9)
    asyncio.run(started(tmp_path, vllm).receive(update))
    ((call, method, (name, (sent,))),) = vllm.calls
    assert (call, method, name) == ("collective_rpc", "receive_version", "args")
    assert pickle.loads(sent) == update


def test_a_report_has_the_state_and_whether_vllm_sampled(tmp_path: Path, vllm: FakeVllm) -> None:
    async def run() -> None:
        engine = started(tmp_path, vllm)
        reports = []
        for sampled in (5, 5, 6):
            engine._responses.sampled = sampled
            reports.append(await engine.report(0.001))
        assert [one.sampling for one in reports] == [True, False, True]
        expected = {
            "aborted": (),
            "state": "running",
            "version": 3,
            "running": 2,
            "tokens": 70,
            "generated": 50,
            "busy_s": 0.0,
            "silent_s": 1.6,
            "sampling": True,
        }
        last = vars(reports[-1])
        assert {name: last[name] for name in expected} == expected
        assert (last["finished"].schema, last["finished"].num_rows) == (SCHEMA, 0)
        # A report with results restarts the count.
        engine._responses.reports.aborted.append("a")
        engine._responses.reports.notify()
        assert [(await engine.report(0.001)).sampling for _ in range(2)] == [False, True]
        assert engine.describe() == (
            "running, version 3, 2 responses running, the oldest for 12 s, vLLM silent for 2 s"
        )

    asyncio.run(run())


def test_an_engine_that_did_not_start_refuses_every_call(tmp_path: Path, vllm: FakeVllm) -> None:
    engine = started(tmp_path, vllm)
    for missing in ({"_responses": None}, {"_llm": None}):
        vars(engine).update(missing)
        with pytest.raises(RuntimeError, match="engine-0 is not running: call `start` first"):
            engine.describe()
    with pytest.raises(RuntimeError, match="engine-0 is not running: call `start` first"):
        asyncio.run(engine.version())


def test_a_call_ends_with_vllms_process(
    tmp_path: Path, vllm: FakeVllm, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(engine_module, "EngineDied", lambda spec, what: RuntimeError(what))

    async def run() -> None:
        engine = started(tmp_path, vllm)
        never: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        asyncio.get_running_loop().call_later(0.01, setattr, vllm, "errored", True)
        with pytest.raises(RuntimeError, match="the run waited for it to resume"):
            await engine._while_alive("resume", never)
        assert never.cancelled()

        async def reply() -> str:
            return "late"

        assert await engine._while_alive("resume", reply()) == "late"

    asyncio.run(run())

    async def dies() -> None:
        raise Dead

    with pytest.raises(EngineDied, match="vLLM process of engine-0 died while the run waited for"):
        asyncio.run(started(tmp_path, vllm)._while_alive("resume", dies()))


@looped(
    ("failure", "errored", "reported"),
    [
        (None, True, "the vLLM process of engine-0 died while it worked on 2 responses"),
        (ValueError("a probe"), False, "a probe"),
        (ValueError("a probe"), True, "the vLLM process of engine-0 died while it worked on 2"),
    ],
)
def test_the_reader_of_reports_learns_why_vllm_ended(
    tmp_path: Path, failure: Exception | None, errored: bool, reported: str
) -> None:
    engine = started(tmp_path, FakeVllm(errored=errored))

    async def until_dead() -> None:
        if failure is not None:
            raise failure

    async def run() -> None:
        engine._health = SimpleNamespace(until_dead=until_dead)
        await engine._watch_vllm(engine._responses)
        await engine.report(0.001)

    with pytest.raises((ValueError, EngineDied)) as raised:
        asyncio.run(run())
    assert reported in str(raised.value)


def test_stop_ends_every_part_and_vllm_last(tmp_path: Path, vllm: FakeVllm) -> None:
    engine = started(tmp_path, vllm)
    ended: list[str] = []

    async def close() -> None:
        ended.append("agents")

    def ends(name: str) -> SimpleNamespace:
        return SimpleNamespace(close=lambda: ended.append(name))

    async def run() -> None:
        engine._watch = asyncio.ensure_future(asyncio.sleep(3600))
        await engine.stop()
        assert engine._watch.cancelling()

    vars(engine).update(
        _responses=ends("responses"),
        _scorer=ends("scorer"),
        _agents=SimpleNamespace(close=close),
        _environments=ends("environments"),
        _timeline=ends("timeline"),
    )
    asyncio.run(run())
    assert ended == ["responses", "scorer", "agents", "environments", "timeline"]
    assert (vllm.calls, engine._llm) == ([("shutdown", engine_module.STOP_S)], None)


def test_each_kind_of_environment_has_its_player(
    tmp_path: Path, vllm: FakeVllm, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Only tools and agents need a parser of tool calls, and only agents an endpoint."""
    starts: list[str] = []

    class Endpoint:
        def __init__(self, *given: Any) -> None:
            self.given = given

        async def start(self) -> None:
            starts.append("agents")

    monkeypatch.setattr(engine_module, "Episodes", lambda *given: ("episodes", *given))
    monkeypatch.setattr(engine_module, "ToolParser", lambda *given: given)
    monkeypatch.setattr(engine_module, "Agents", Endpoint)
    engine = started(tmp_path, vllm, tools=({"type": "function"},))
    tokenizer = SimpleNamespace(eos_ids=(1,))
    parser = ("hermes", tmp_path, (1,), ({"type": "function"},))

    def player(name: str) -> Any:
        settings = EnvironmentConfig(name=name, tool_parser="hermes", settings=given.get(name, {}))
        environments = SimpleNamespace(settings=settings)
        made = asyncio.run(engine._converse(environments, tokenizer))
        return made, ("episodes", environments, tokenizer), environments

    given = {"tools": {"functions": "m:f"}, "agent": {"function": "m:f"}}
    made, episodes, _ = player("my:env")
    assert made == episodes
    made, episodes, _ = player("tools")
    assert made == (*episodes, parser)
    assert (engine._agents, starts) == (None, [])
    made, _, environments = player("agent")
    assert made is engine._agents
    assert made.given == (environments, tokenizer, parser)
    assert starts == ["agents"]


def test_requests_and_aborts_reach_the_responses(tmp_path: Path, vllm: FakeVllm) -> None:
    engine = started(tmp_path, vllm)
    engine._responses = responses = FakeVllm()
    asyncio.run(engine.submit(["request"]))
    asyncio.run(engine.abort(["id"]))
    assert responses.calls == [("submit", ["request"]), ("abort", ["id"])]


def test_a_version_below_that_of_an_engine_without_weights_is_refused(tmp_path: Path) -> None:
    assert spec_of(tmp_path, first_version=-1).first_version == -1
    with pytest.raises(ValueError, match=r"^engine 0: first_version is -2; it must be 0"):
        spec_of(tmp_path, first_version=-2)


def test_vllm_has_a_tokenizer_if_stop_strings_may_be_requested(tmp_path: Path) -> None:
    for name, needs in (("my:env", False), ("tools", False), ("agent", True), ("verifiers", True)):
        environment = EnvironmentConfig(name=name)
        assert spec_of(tmp_path, rollout={"environment": environment}).needs_tokenizer == needs
    stopping = SamplingConfig(max_tokens=8, stop=["!"])
    assert spec_of(tmp_path, evaluations={"held": stopping}).needs_tokenizer


def test_an_engine_starts_its_parts_in_order(
    tmp_path: Path, vllm: FakeVllm, monkeypatch: pytest.MonkeyPatch
) -> None:
    events: list[Any] = []
    log = [
        *("redirect_output", "name_this_process", "use_run_folder", "name_shared_memory"),
        *("drop_expandable_segments", "collect_rarely", "require_software", "require_gpus"),
    ]
    for name in log:
        monkeypatch.setattr(
            engine_module, name, lambda *given, name=name: events.append((name, *given))
        )
    watched = SimpleNamespace(
        join=lambda name: events.append(("join", name)),
        fact=lambda name, call: events.append(("fact", name, call.__name__)),
        phase=engine_module.watch.phase,
    )
    monkeypatch.setattr(engine_module, "watch", watched)

    class Part:
        def __init__(self, name: str) -> None:
            self.name, self.settings = name, EnvironmentConfig(name="my:env")

        def start(self) -> None:
            events.append(f"start {self.name}")

        async def ready(self) -> None:
            events.append(f"{self.name} ready")

    async def prepare(llm: Any, spec: EngineSpec) -> None:
        assert llm is vllm
        events.append("prepare")

    tokenizer = SimpleNamespace(eos_ids=(1, 2))
    arguments: list[Any] = []

    def responses(*given: Any) -> SimpleNamespace:
        arguments.extend(given)
        return SimpleNamespace(reports=ReportQueue(), running=0)

    for name, value in {
        "environment": lambda spec: {"VLLM_X": "1"},
        "Scorer": lambda reward: Part("scorer"),
        "Environments": lambda settings: Part("environments"),
        "load_tokenizer": lambda *given: (events.append(("tokenizer", *given)), tokenizer)[1],
        "launch": lambda spec: (events.append("launch"), vllm)[1],
        "prepare_updates": prepare,
        "Responses": responses,
        "Episodes": lambda *given: (Episodes, given[0].name, *given[1:]),
    }.items():
        monkeypatch.setattr(engine_module, name, value)
    parameters = SimpleNamespace(sampling_parameters=lambda settings, eos: (settings, eos))
    monkeypatch.setitem(sys.modules, "megatron_async_rl.rollout.vllm.engine_arguments", parameters)
    monkeypatch.delenv("VLLM_X", raising=False)
    held_out = SamplingConfig(max_tokens=9)
    spec = spec_of(
        tmp_path,
        rollout={"environment": EnvironmentConfig(name="my:env")},
        evaluations={"aime": held_out},
        software={"vllm": "1"},
        gpus={"a": ["0"]},
        chat_template="t",
        chat_template_options={"o": 1},
        first_version=5,
    )

    async def run() -> None:
        engine = RolloutEngine(spec)
        assert os.environ.pop("VLLM_X") == "1"
        assert events == [
            ("redirect_output", spec.log),
            ("name_this_process", "engine-0"),
            ("join", "engine-0"),
            ("use_run_folder",),
            ("name_shared_memory",),
            ("drop_expandable_segments", os.environ),
        ]
        events.clear()
        await engine.start()
        assert events == [
            ("require_software", {"vllm": "1"}),
            ("require_gpus", "engine-0", {"a": ["0"]}),
            ("tokenizer", tmp_path, "t", {"o": 1}),
            *("start scorer", "start environments", "launch", "prepare"),
            *("scorer ready", "environments ready"),
            ("collect_rarely",),
            ("fact", "engine", "describe"),
        ]
        assert arguments[:2] == [vllm, spec]
        assert arguments[2] == {
            None: (spec.rollout.sampling, (1, 2)),
            "aime": (held_out, (1, 2)),
        }
        assert arguments[3] is tokenizer
        assert arguments[4].name == "scorer"
        assert arguments[6] == (Episodes, "environments", tokenizer)
        assert arguments[7]() == 5
        assert engine._watch is not None
        engine._watch.cancel()

    asyncio.run(run())

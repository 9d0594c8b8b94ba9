"""Calls inside the processes of user code, without the processes: environments, agents, rewards,
and the loop that reads calls from a socket and writes replies."""

from __future__ import annotations

import asyncio
import json
import os
import pickle
import resource
import socket
import sys
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from types import SimpleNamespace
from typing import Any, ClassVar

import pytest

from megatron_async_rl.rollout import environments
from megatron_async_rl.rollout.environments import EpisodeStep
from megatron_async_rl.rollout.environments.built_in import openenv
from megatron_async_rl.rollout.environments.built_in.agent import AgentEnvironment
from megatron_async_rl.rollout.isolation import child
from megatron_async_rl.rollout.isolation.child import LENGTH, LoadedCode, described, framed
from megatron_async_rl.rollout.rewards import worker
from megatron_async_rl.rollout.rewards.registry import RewardContext, RewardItem
from megatron_async_rl.samples import Prompt
from tests.cases import looped

PROMPT = Prompt(id="p", text="6 * 7?", token_ids=(1,), fields={"answer": "42", "x": float("nan")})


class Game:
    """An environment whose methods record their calls. `run`: it is an agent, too."""

    calls: ClassVar[list[Any]] = []

    def reset(self, prompt: Any) -> str:
        self.calls.append(("reset", id(self), prompt))
        return "go\udcff"

    async def step(self, response: str) -> EpisodeStep:
        self.calls.append(("step", id(self), response))
        return EpisodeStep(
            observation="next", reward=0.5, done=True, train=False, measured={"m": 2}
        )

    def run(self, prompt: Any, base_url: str) -> float:
        self.calls.append(("run", prompt, base_url))
        return float(prompt)

    def close(self) -> None:
        self.calls.append("close")
        raise KeyError("close")


def test_each_sample_has_an_environment_of_its_own(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(Game, "calls", [])
    made: list[Game] = []

    def factory() -> Game:
        made.append(Game())
        return made[-1]

    calls = environments._EnvironmentCalls(factory)

    async def sample(number: int) -> None:
        assert await calls(("reset", number)) == "go\\udcff"
        assert await calls(("step", "a")) == {
            "observation": "next",
            "reward": 0.5,
            "measured": {"m": 2.0},
            "done": True,
            "train": False,
        }
        with pytest.raises(KeyError, match="close"):
            await calls(("close", None))
        # The object is released although its `close` raised.
        await calls(("close", None))

    asyncio.run(sample(1))
    asyncio.run(sample(2))
    first, second = map(id, made)
    assert first != second
    assert Game.calls == [
        *(("reset", first, 1), ("step", first, "a"), "close"),
        *(("reset", second, 2), ("step", second, "a"), "close"),
    ]
    assert asyncio.run(calls(("run", ("1.5", "http://x")))) == 1.5
    assert (len(made), Game.calls[-1]) == (3, ("run", "1.5", "http://x"))
    with pytest.raises(
        ValueError, match="the reward is nan, not a finite number of at most 1e\\+30"
    ):
        asyncio.run(calls(("run", ("nan", ""))))


@looped(
    ("content", "accepted"),
    [
        (None, ""),
        ("a\ud800", "a\\ud800"),
        (
            [{"role": "user", "content": "\udcff", "k": 1}],
            [{"role": "user", "content": "\\udcff", "k": 1}],
        ),
        ([], []),
        ([{"role": "user"}], None),
        ([{"role": 1, "content": ""}], None),
        (["text"], None),
        ({"role": "user", "content": ""}, None),
        (5, None),
    ],
)
def test_content_is_text_or_messages(content: Any, accepted: Any) -> None:
    if accepted is not None:
        assert environments.checked_content(content, "it") == accepted
        return
    text = "it must be text or a list of messages with role and content, both text: "
    with pytest.raises(TypeError) as refused:
        environments.checked_content(content, "it")
    assert str(refused.value) == text + json.dumps(content)


@looped(
    ("step", "message"),
    [
        ("text", "step returned a str, not an EpisodeStep"),
        (
            EpisodeStep(reward=float("inf")),
            "the reward of a step is inf, not a finite number of at most",
        ),
        (EpisodeStep(reward=-2e30), "the reward of a step is -2e+30, not a finite number"),
        (EpisodeStep(measured={"m": float("nan")}), "m of a step is nan, not a finite number"),
        (EpisodeStep(done="false"), "done of a step is 'false', not True or False"),  # type: ignore[arg-type]
        (EpisodeStep(train=2), "train of a step is 2, not True or False"),  # type: ignore[arg-type]
    ],
)
def test_a_step_with_an_invalid_field_names_it(step: Any, message: str) -> None:
    with pytest.raises((TypeError, ValueError)) as refused:
        environments.checked_step(step)
    assert str(refused.value).startswith(message)


PROGRAM = """
import json, os, sys
given = json.load(sys.stdin)
print(given, os.environ["OPENAI_BASE_URL"], os.environ["OPENAI_API_KEY"], os.environ["MINE"])
"""


def test_an_agents_program_reads_the_prompt_and_prints_its_reward(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setenv("MINE", "inherited")

    def play(source: str) -> float:
        agent = AgentEnvironment(command=[sys.executable, "-S", "-c", source])
        result: float = asyncio.run(agent.run(PROMPT, "http://h/v1"))
        return result

    seen = "{'text': '6 * 7?', 'fields': {'answer': '42', 'x': None}} http://h/v1 unused inherited"
    check = PROGRAM.replace("print(", f"assert {seen!r} == ' '.join(map(str, (").replace(
        '"MINE"])', '"MINE"])))'
    )
    assert play(f"{check}\nprint(7)\nprint(' 0.25 ')\nprint()") == 0.25
    with pytest.raises(RuntimeError, match=f"^{sys.executable} ended with code 3$"):
        play("print(1)\nraise SystemExit(3)")
    with pytest.raises(ValueError, match="printed no reward; its last line must be a number"):
        play("print()")
    assert AgentEnvironment(command="prog")._command == ["prog"]  # type: ignore[arg-type]
    for given in ({}, {"function": "m:f", "command": ["x"]}):
        with pytest.raises(ValueError, match="set either `function`, as module:function, or"):
            AgentEnvironment(**given)
    own = AgentEnvironment(function="os.path:join")
    assert own.run("a", "b") == "a/b"  # type: ignore[arg-type]


def openenv_of(
    monkeypatch: pytest.MonkeyPatch, results: Any = (), **settings: Any
) -> tuple[Any, list[Any]]:
    """Return the environment with a client that records its calls and returns `results`."""
    calls: list[Any] = []
    answers = iter(results)

    class Client:
        def __init__(self, **given: Any) -> None:
            calls.append(given)

        def __getattr__(self, name: str) -> Any:
            async def call(*given: Any, **named: Any) -> Any:
                calls.append((name, *given, *named.items()))
                answer = next(answers, None)
                if isinstance(answer, Exception):
                    raise answer
                return answer

            return call

    client = SimpleNamespace(GenericEnvClient=Client)
    monkeypatch.setattr(openenv, "package_modules", lambda *_: [client])
    monkeypatch.setattr(openenv, "_action_schema", lambda url: {})
    return openenv.OpenEnv(url="http://h", **settings), calls


def result(observation: Any, reward: float | None = None, done: bool = False) -> SimpleNamespace:
    return SimpleNamespace(observation=observation, reward=reward, done=done)


def test_an_openenv_episode_in_json(monkeypatch: pytest.MonkeyPatch) -> None:
    steps = [None, result({"a": "\u00e9"}), result({}, 2, True), RuntimeError("other")]
    env, calls = openenv_of(monkeypatch, steps, action=None, reset=("answer",))
    assert asyncio.run(env.reset(PROMPT)) == '{"a": "\u00e9"}'
    for response, expected in (
        ("x", "the action is not JSON: Expecting value: line 1 column 1 (char 0)"),
        ("[1]", "the action is not a JSON object"),
    ):
        assert asyncio.run(env.step(response)) == EpisodeStep(observation=expected)
    assert asyncio.run(env.step('{"b": 1}')) == EpisodeStep(observation="{}", reward=2.0, done=True)
    with pytest.raises(RuntimeError, match="other"):
        asyncio.run(env.step("{}"))
    asyncio.run(env.close())
    given = {"base_url": "http://h", "message_timeout_s": openenv.OPENENV_TIMEOUT_S}
    assert calls == [
        given,
        *(("connect",), ("reset", ("answer", "42"))),
        *(("step", {"b": 1}), ("step", {}), ("close",)),
    ]


def test_an_openenv_episode_with_fields(monkeypatch: pytest.MonkeyPatch) -> None:
    refused = RuntimeError(f"server: {openenv.NO_ACTION}")
    steps = [result({"o": 1, "p": 2}), refused, result({"p": 2}), result("text")]
    env, calls = openenv_of(monkeypatch, steps, observation="o")
    assert asyncio.run(env.step("hi")) == EpisodeStep(observation="1")
    assert calls[1] == ("step", {"message": "hi"})
    refusal = EpisodeStep(observation="the environment does not accept the action")
    assert asyncio.run(env.step("hi")) == refusal
    for has in ("p", "no fields"):
        with pytest.raises(KeyError, match=f"has no 'o', which .*observation names; it has {has}"):
            asyncio.run(env.step("hi"))
    env, _ = openenv_of(monkeypatch, reset=("level",))
    with pytest.raises(ValueError, match=r"prompt p has no column 'level', .* it has answer, x$"):
        asyncio.run(env.reset(PROMPT))
    monkeypatch.setattr(openenv, "_action_schema", lambda url: {"properties": {"move": {}}})
    with pytest.raises(ValueError, match=r"the server's actions have no field 'message': .* move$"):
        asyncio.run(openenv.OpenEnv(url="http://h").reset(PROMPT))


def test_a_reward_process_returns_a_row_for_each_item(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    (tmp_path / "rewards_of_rows.py").write_text(
        "def one(prompt, response): return len(response)\n"
        "async def later(prompt, response): return [1]\n"
        "def several(prompts, responses): return [float('nan'), 2][:len(responses) + extra]\n"
        "extra = 0\n"
    )
    monkeypatch.syspath_prepend(tmp_path)
    items = [RewardItem(PROMPT, text, RewardContext()) for text in ("abc", "d")]

    def loaded(name: str) -> LoadedCode:
        return worker.load_calls(f"rewards_of_rows:{name}", "rollout.reward", {}, 5.0)

    one, later, several = map(loaded, ("one", "later", "several"))
    assert (one.facts, one.function(items[:1])) == (
        {"concurrent": False, "batched": False},
        [(3.0, None)],
    )
    assert later.facts == {"concurrent": True, "batched": False}
    assert asyncio.run(later.function(items[:1])) == [
        (0.0, "the reward returned list [1], not a number")
    ]
    assert several.facts == {"concurrent": False, "batched": True}
    nan = "the reward is nan, not a finite number of at most 1e+30"
    assert several.function(items) == [(0.0, nan), (2.0, None)]
    with pytest.raises(ValueError, match="the reward returned 2 values for 3 responses"):
        several.function([*items, items[0]])
    imports: list[str] = []
    monkeypatch.setattr(worker, "importlib", SimpleNamespace(import_module=imports.append))
    needed = SimpleNamespace(requires="math_verify")
    monkeypatch.setattr(worker, "built_in", lambda name: needed)
    loaded("one")
    assert imports == ["math_verify"]


@looped(
    ("value", "scored"),
    [
        (1, (1.0, None)),
        (True, (1.0, None)),
        (1e30, (1e30, None)),
        (-1.1e30, (0.0, "the reward is -1.1e+30, not a finite number of at most 1e+30")),
        (None, (0.0, "the reward returned nothing, not a number")),
        ("1", (0.0, "the reward returned str '1', not a number")),
        ({"r": 1}, (0.0, "the reward returned dict {'r': 1}, not a number")),
        ("x" * 99, (0.0, f"the reward returned str {repr('x' * 99)[:80]}, not a number")),
        (1j, (0.0, "TypeError: float() argument must be a string or a real number, not 'complex'")),
    ],
)
def test_a_value_that_is_no_number_fails_the_response(value: Any, scored: Any) -> None:
    one = worker._one(value)
    assert (one.reward, one.error) == scored


@contextmanager
def loop_of(function: Any) -> Iterator[socket.socket]:
    """Yield the supervisor's end of a process that serves `function`, here in a thread."""
    local, remote = socket.socketpair()
    calls = child._CallLoop(remote, function)
    thread = threading.Thread(target=calls.run)
    thread.start()
    local.settimeout(120)
    try:
        yield local
    finally:
        local.close()
        thread.join()
        remote.close()


def send(end: socket.socket, *content: Any) -> None:
    end.sendall(framed(pickle.dumps(content)))


def reply(end: socket.socket) -> Any:
    def exactly(count: int) -> bytes:
        content = b""
        while len(content) < count:
            content += end.recv(count - len(content))
        return content

    (length,) = LENGTH.unpack(exactly(LENGTH.size))
    return json.loads(exactly(length))


def test_calls_are_answered_by_their_numbers() -> None:
    waiting: dict[str, asyncio.Event] = {}

    def function(what: Any) -> Any:
        if what == "fail":
            raise KeyError("no")
        if what == "exit":
            raise SystemExit(3)
        if what == "bytes":
            return b""
        if isinstance(what, str):
            return wait(what)
        return what

    async def wait(what: str) -> Any:
        if what == "fails later":
            raise ValueError("later")
        if what == "bytes later":
            return b""
        waiting[what] = asyncio.Event()
        try:
            await waiting[what].wait()
        except asyncio.CancelledError:
            if what == "stubborn":
                await asyncio.sleep(0)
                return "late"
            raise
        return what

    no_json = "TypeError: Object of type bytes is not JSON serializable"
    with loop_of(function) as end:
        for number, (what, answer) in enumerate(
            (
                (5, {"result": 5}),
                (None, {"result": None}),
                ("fail", {"error": "KeyError: 'no'"}),
                ("exit", {"error": "SystemExit: 3"}),
                ("bytes", {"error": no_json}),
                ("fails later", {"error": "ValueError: later"}),
                ("bytes later", {"error": no_json}),
            )
        ):
            send(end, number, what)
            assert reply(end) == {"call": number, **answer}
        # Two pending awaitables: both are cancelled, at once, whatever they do about it.
        for number, what in ((10, "gentle"), (11, "stubborn")):
            send(end, number, what)
        for number in (10, 99, 11):
            send(end, number)
        assert [reply(end), reply(end)] == [
            {"call": 10, "cancelled": True},
            {"call": 11, "cancelled": True},
        ]
        send(end, 12, 1)
        assert reply(end) == {"call": 12, "result": 1}


def test_an_exception_is_described_within_its_limit() -> None:
    limit = child.MAX_ERROR_CHARACTERS
    assert described(ValueError()) == "ValueError"
    assert described(ValueError("a\ud800")) == "ValueError: a\\ud800"
    assert described(ValueError("x" * limit)) == f"ValueError: {'x' * limit}"
    cut = f"ValueError: {'x' * limit}... ({limit + 1} characters)"
    assert described(ValueError("x" * (limit + 1))) == cut


def test_a_process_limits_its_memory_after_it_has_loaded(monkeypatch: pytest.MonkeyPatch) -> None:
    events: list[Any] = []
    hard = [resource.RLIM_INFINITY]
    monkeypatch.setattr(resource, "getrlimit", lambda which: (0, hard[0]))
    monkeypatch.setattr(resource, "setrlimit", lambda *given: events.append(given))
    function = lambda payload: payload  # noqa: E731
    loop = lambda connection, call: SimpleNamespace(run=lambda: events.append(call))  # noqa: E731
    monkeypatch.setattr(child, "_CallLoop", loop)

    def load() -> LoadedCode:
        events.append("load")
        return LoadedCode(function, {"concurrent": True})

    ready = {"ready": {"concurrent": True, "pid": os.getpid()}}
    for memory_mib, maximum, limits in (
        (None, 0, []),
        (5, resource.RLIM_INFINITY, [(5 * 2**20, resource.RLIM_INFINITY)]),
        (5, 7, [(7, 7)]),
        (5, 2**40, [(5 * 2**20, 2**40)]),
    ):
        events.clear()
        hard[0] = maximum
        local, remote = socket.socketpair()
        with local, remote:
            server: Any = child._ForkingServer.__new__(child._ForkingServer)
            server._load, server._memory_mib = load, memory_mib
            server._serve(remote)
            assert reply(local) == ready
            assert events == ["load", *((resource.RLIMIT_AS, one) for one in limits), function]
            server._load = lambda: 1 / 0
            with pytest.raises(ZeroDivisionError):
                server._serve(remote)
            assert reply(local) == {"failed": "ZeroDivisionError: division by zero"}

"""Samples of several turns: their tokens, masks and rewards, with environments in processes of
their own, and what it costs when one of these misbehaves."""

import asyncio
import io
import itertools
import json
import os
import shlex
import signal
import socket
import subprocess
import sys
from collections.abc import AsyncIterator, Callable, Iterator, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import psutil
import pytest

from megatron_async_rl.config.problem import DataError
from megatron_async_rl.config.rollout import EnvironmentConfig
from megatron_async_rl.config.rules import validated
from megatron_async_rl.data.prompts import MixturePart, PromptSet
from megatron_async_rl.plan.trials import _tasks
from megatron_async_rl.rollout.environments import (
    BUILT_IN,
    EnvironmentRefused,
    Step,
    checked_content,
    checked_step,
    load_factory,
)
from megatron_async_rl.rollout.environments.built_in import verifiers as verifiers_module
from megatron_async_rl.rollout.environments.built_in.openenv import _action_schema
from megatron_async_rl.rollout.environments.built_in.tools import Tools, prompt_tokenizer
from megatron_async_rl.rollout.environments.episode import Episodes, failures
from megatron_async_rl.rollout.environments.pool import EnvironmentFailed, Environments
from megatron_async_rl.rollout.environments.transcript import (
    EpisodeMessages,
    PlainText,
    Transcript,
    Turn,
    TurnRequest,
)
from megatron_async_rl.rollout.isolation import child
from megatron_async_rl.rollout.isolation.supervisor import UserCodeStartError
from megatron_async_rl.rollout.vllm.tool_parser import ToolParser
from megatron_async_rl.samples import Prompt
from megatron_async_rl.samples.types import PartialResponse
from megatron_async_rl.watchdog.processes import condition
from tests.cases import looped
from tests.characters import TEMPLATE, characters, read, save_characters

COUNTING = "tests.engine.environments:Counting"
OWN = {"name": "environment"}


def settings_of(**own: Any) -> EnvironmentConfig:
    return EnvironmentConfig(**{"name": COUNTING, "format": "text", **own})


def tools(functions: Any, **own: Any) -> dict[str, Any]:
    return {"name": "tools", "settings": {"functions": functions, **own}}


def prompt_of(**fields: Any) -> Prompt:
    return Prompt(id="p", text="?", token_ids=(90, 91), fields=fields)


class Words:
    """A tokenizer of `w7`-like words."""

    eos_ids = (0,)

    def encode(self, text: str, *, special_tokens: bool = True) -> list[int]:
        return [int(word[1:]) for word in text.split()]

    def decode(self, ids: Sequence[int]) -> str:
        return " ".join(f"w{one}" for one in ids)


class Sampler:
    """Turns of two tokens, the second one the end; the version grows with each turn."""

    def __init__(self, told: Callable[[int], None]) -> None:
        self.asked: list[tuple[list[int], int, int]] = []
        self.length, self.told = 2, told

    async def __call__(self, asked: TurnRequest) -> Turn:
        self.asked.append((list(asked.ids), asked.begun, asked.maximum))
        number, length = len(self.asked), min(self.length, asked.maximum)
        self.told(number)
        tokens = PartialResponse(
            response_ids=np.array([10 * number, 0][:length], dtype=np.int32),
            behavior_logprobs=np.full(length, -0.1 * number, dtype=np.float32),
            versions=np.full(length, number, dtype=np.int32),
        )
        reason = "stop" if length == self.length else "length"
        return Turn(tokens=tokens, text=f"turn {number}", reason=reason)  # type: ignore[arg-type]


class Played:
    """Conversations over one pool, whose processes the tests share."""

    def __init__(self, runner: asyncio.Runner) -> None:
        self.runner = runner
        self.pool = runner.run(self._started())

    @staticmethod
    async def _started() -> Environments:
        pool = Environments(settings_of(processes=4))
        pool.start()
        return pool

    def __call__(
        self, *prompts: Prompt, max_tokens: int = 100, **own: Any
    ) -> list[tuple[Transcript, str | None, Sampler]]:
        """One conversation for each prompt, at the same time."""

        async def one(prompt: Prompt) -> Any:
            tokenizer: Any = Words()
            transcript, sampler = Transcript(prompt), Sampler(hurried)
            conversations = Episodes(self.pool, tokenizer)
            return transcript, await conversations.play(transcript, sampler, max_tokens), sampler

        async def run() -> Any:
            return await asyncio.gather(*map(one, prompts))

        def hurried(number: int) -> None:
            """An episode that hangs at its second turn has no time from then on."""
            if number == 2 and any(prompt.fields.get("fault") == "hangs" for prompt in prompts):
                self.pool.settings = settings_of(timeout_s=0.1)

        self.pool.settings = settings_of(processes=4, **own)
        found: list[tuple[Transcript, str | None, Sampler]] = self.runner.run(run())
        return found


@pytest.fixture(scope="module")
def played() -> Iterator[Played]:
    with asyncio.Runner() as runner:
        played = Played(runner)
        yield played
        played.pool.close()


def test_what_was_sampled_stands_in_the_sample_as_it_was_between_the_environments_words(
    played: Played,
) -> None:
    ((transcript, error, sampler),) = played(prompt_of(opening="w5"))
    assert error is None
    assert transcript.prompt.token_ids == (90, 91, 5)
    tokens = transcript.tokens
    assert tokens.response_ids.tolist() == [10, 0, 7, 8, 20, 0, 7, 8, 30, 0]
    assert tokens.versions.tolist() == [1, 1, 1, 1, 2, 2, 2, 2, 3, 3]
    assert transcript.mask.tolist() == [1, 1, 0, 0, 1, 1, 0, 0, 1, 1]
    assert tokens.behavior_logprobs[[0, 2, 4, 8]].tolist() == pytest.approx([-0.1, 0, -0.2, -0.3])
    reward, steps = transcript.rewards(last=2.0)
    assert reward == 3.5
    assert steps.tolist() == [0, 0.25, 0, 0, 0, 0.5, 0, 0, 0, 2.75]
    assert transcript.text == "\n".join(
        f"turn {n}\n[environment, reward {0.25 * n:g}] w7 w8" for n in (1, 2, 3)
    )
    # Every turn is sampled after just the tokens of the sample, with what is left of its budget.
    prompt, response = [90, 91, 5], tokens.response_ids.tolist()
    assert sampler.asked == [([*prompt, *response[:n]], n, 99 - n) for n in (0, 4, 8)]


def test_a_sample_ends_with_a_turn_where_turns_or_tokens_run_out(played: Played) -> None:
    ((few, _, _),) = played(prompt_of(), max_turns=2)
    assert few.tokens.response_ids.tolist() == [10, 0, 7, 8, 20, 0]
    assert not few.truncated
    # Of seven tokens the second turn leaves one, which the environment's words would take.
    for maximum, length in ((7, 6), (5, 5), (4, 2), (1, 1)):
        ((cut, error, _),) = played(prompt_of(), max_tokens=maximum)
        assert (error, cut.truncated, cut.length) == (None, True, length)
        assert cut.mask[-1] == 1
    ((_, error, _),) = played(prompt_of(opening="w1 w2"), max_tokens=2)
    assert error is not None
    assert "no room for a turn" in error


def test_words_that_the_tokenizer_cannot_read_cost_their_sample(played: Played) -> None:
    ((_, error, _),) = played(prompt_of(opening="hello"))
    assert error is not None
    assert error.startswith("its content cannot be appended to a turn: invalid literal")


def test_a_turn_may_be_left_out_of_the_loss_by_its_environment(played: Played) -> None:
    ((transcript, _, _),) = played(prompt_of(fault="untrained"), max_turns=2)
    assert transcript.mask.tolist() == [0, 0, 0, 0, 1, 1]


def test_an_environment_that_fails_in_any_way_costs_only_its_sample(
    played: Played,
) -> None:
    faults = ["reset", "raises", "nan", "none", "exits", "huge", "parts", "unreadable", None]
    found = played(*(prompt_of(fault=fault) for fault in faults))
    errors = [error for _, error, _ in found]
    assert errors == [
        "reset raised KeyError: 'secret'",
        "step raised KeyError: 'answer'",
        "step raised ValueError: the reward of a step is nan, not a finite number of at most 1e+30",
        "step raised TypeError: step returned a NoneType, not a Step",
        "its process ended with code 3 in step; see the engine's log",
        "step raised ValueError: the reward of a step is 1e+39, not a finite number of at most"
        " 1e+30",
        "step raised TypeError: the observation of a step must be text or a list of messages with"
        ' role and content, both text: [{"role": "tool", "content": [{"text": "w7"}]}]',
        "its content cannot be appended to a turn: invalid literal for int() with base 10: 'hat'",
        None,
    ]
    # What was sampled until then is there, for the log.
    assert [len(transcript.turns) for transcript, _, _ in found] == [0, 2, 2, 2, 2, 2, 2, 2, 3]
    ((transcript, error, _),) = played(prompt_of(fault="hangs"))
    assert error == "no answer to step within rollout.environment.timeout_s: 0.1"
    assert len(transcript.turns) == 2


def test_a_process_serves_one_sample_after_the_other(played: Played) -> None:
    async def run() -> set[int]:
        seen = set()
        for _ in range(3):
            environment = await played.pool.open()
            seen.add(environment._process.number)
            await environment.reset(prompt_of())
            await environment.step("")
            await environment.close()
        return seen

    played.pool.settings = settings_of()
    assert len(played.runner.run(run())) == 1


def test_a_process_that_ended_between_two_samples_is_replaced(played: Played) -> None:
    async def run() -> tuple[bool, str]:
        environment = await played.pool.open()
        first = environment._process
        await environment.close()
        os.kill(first.pid, signal.SIGKILL)
        while not first.killed:
            await asyncio.sleep(0.01)
        other = await played.pool.open()
        opening = await other.reset(prompt_of(opening="w5"))
        await other.close()
        return other._process is not first, str(opening)

    played.pool.settings = settings_of()
    assert played.runner.run(run()) == (True, "w5")


def test_a_process_that_cannot_be_forked_is_reported(monkeypatch: pytest.MonkeyPatch) -> None:
    def refused() -> int:
        raise BlockingIOError(11, "Resource temporarily unavailable")

    monkeypatch.setattr(os, "fork", refused)
    local, remote = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
    with local, remote:
        server = child._ForkingServer(remote, lambda: child.LoadedCode(print), None)
        server._start(7, os.dup(local.fileno()))
        report = json.loads(local.recv(child.LONGEST_ORDER))
    how = "could not be started: [Errno 11] Resource temporarily unavailable"
    assert report == {"ended": 7, "how": how}


def test_a_process_without_descriptors_is_reported_and_the_server_continues(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """The limit of open files is reached."""

    def refused(_: int) -> int:
        raise OSError(24, "Too many open files")

    monkeypatch.setattr(os, "pidfd_open", refused)
    local, remote = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
    with local, remote, subprocess.Popen(["sleep", "20"]) as process:
        monkeypatch.setattr(os, "fork", lambda: process.pid)
        server = child._ForkingServer(remote, lambda: child.LoadedCode(print), None)
        server._start(7, os.dup(local.fileno()))
        local.send(json.dumps(["start", 8]).encode())
        assert server._follow_order()
        reports = [json.loads(local.recv(child.LONGEST_ORDER)) for _ in range(2)]
        assert not psutil.pid_exists(process.pid)
    assert reports == [
        {"ended": 7, "how": "could not be started: [Errno 24] Too many open files"},
        {"ended": 8, "how": "could not be started: no socket"},
    ]


def test_each_file_of_the_folder_is_a_built_in_environment() -> None:
    assert list(BUILT_IN) == ["agent", "openenv", "tools", "verifiers"]
    with pytest.raises(EnvironmentRefused, match="did you mean 'openenv'"):
        load_factory(settings_of(name="openenvs"))


def test_nothing_of_a_conversation_that_is_cancelled_is_left(played: Played) -> None:
    async def run() -> tuple[int, bool]:
        pool = played.pool
        environment = await pool.open()
        await environment.reset(prompt_of(fault="hangs"))
        await environment.step("1")
        process = environment._process
        hanging = asyncio.create_task(environment.step("2"))
        await asyncio.sleep(0)
        hanging.cancel()
        await asyncio.gather(hanging, return_exceptions=True)
        await environment.close()
        other = await pool.open()  # there is room again
        fresh = other._process is not process
        await other.reset(prompt_of())
        await other.close()
        return pool._room._value, fresh

    played.pool.settings = settings_of()
    assert played.runner.run(run()) == (4, True)


@pytest.mark.parametrize("ready", [False, True])
def test_a_process_that_starts_for_a_cancelled_sample_is_ended(
    played: Played, monkeypatch: pytest.MonkeyPatch, ready: bool
) -> None:
    """The task runs again when the process is ready, or before."""
    supervisor, begun = played.pool.supervisor, []
    start = supervisor.process

    def process(on_ready: Callable[[Any], None], on_end: Callable[..., None]) -> Any:
        def on_ready_and_cancelled(one: Any) -> None:
            on_ready(one)
            opening[0].cancel()

        begun.append(start(on_ready_and_cancelled, on_end))
        return begun[0]

    async def run() -> None:
        played.pool._idle.clear()
        opening.append(asyncio.create_task(played.pool.open()))
        await asyncio.sleep(0)
        if not ready:
            opening[0].cancel()
        with pytest.raises(asyncio.CancelledError):
            await opening[0]

    opening: list[asyncio.Task[Any]] = []
    monkeypatch.setattr(supervisor, "process", process)
    played.pool.settings = settings_of()
    played.runner.run(run())
    assert begun[0].killed
    assert played.pool._room._value == 4


def test_a_server_whose_reports_are_no_longer_read_ends() -> None:
    local, remote = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
    with remote:
        server = child._ForkingServer(remote, lambda: child.LoadedCode(print), None)
        child._report(remote, {"imported": True})
        local.close()  # with an unread report, which the kernel answers with an error
        server.run()
        child._report(remote, {"ended": 7, "how": "ended with code 0"})


def test_words_without_end_are_cut_off_before_they_are_tokenized(
    played: Played, monkeypatch: pytest.MonkeyPatch
) -> None:
    tokenized: list[int] = []
    encode = Words.encode

    def counting(self: Words, text: str, **how: bool) -> list[int]:
        tokenized.append(len(text))
        return encode(self, text, **how)

    monkeypatch.setattr(Words, "encode", counting)
    ((transcript, error, _),) = played(prompt_of(fault="floods"))
    assert (error, transcript.truncated, len(transcript.turns)) == (None, True, 2)
    ((_, error, _),) = played(prompt_of(opening="w7 " * 10_000))
    assert error is not None
    assert "reset returned 30000 characters" in error
    assert max(tokenized) < 100


def test_who_is_cancelled_while_an_environment_closes_leaves_its_room_and_does_not_wait(
    played: Played,
) -> None:
    async def run() -> int:
        pool = played.pool
        environment = await pool.open()
        await environment.reset(prompt_of(slow_to_close=True))
        closing = asyncio.create_task(environment.close())
        while not environment._process.calls:
            await asyncio.sleep(0)
        closing.cancel()
        await asyncio.gather(closing, return_exceptions=True)

        opened = asyncio.Event()

        async def aborted() -> None:
            other = await pool.open()
            try:
                await other.reset(prompt_of(slow_to_close=True))
                opened.set()
                await asyncio.Event().wait()
            finally:
                await other.close()

        task = asyncio.create_task(aborted())
        await opened.wait()
        task.cancel()
        await asyncio.gather(task, return_exceptions=True)
        ends = list(pool._closing)
        for one in ends:
            one.cancel()
        await asyncio.gather(*ends, return_exceptions=True)
        return pool._room._value

    played.pool.settings = settings_of()
    assert played.runner.run(run()) == 4


def test_all_that_an_environment_started_ends_with_it(played: Played, tmp_path: Path) -> None:
    async def run() -> None:
        environment = await played.pool.open()
        await environment.reset(prompt_of(fault="leaves", folder=str(tmp_path)))
        await environment.step("1")
        hanging = asyncio.create_task(environment.step("2"))
        while not (tmp_path / "left").exists() or not (tmp_path / "left").read_text():
            await asyncio.sleep(0.01)
        hanging.cancel()
        await asyncio.gather(hanging, return_exceptions=True)
        await environment.close()
        while condition(int((tmp_path / "left").read_text())) is not None:
            await asyncio.sleep(0.01)

    played.pool.settings = settings_of()
    played.runner.run(run())


def test_no_order_to_the_process_that_forks_is_lost() -> None:
    """However many it has not read yet."""

    async def run() -> int:
        pool = Environments(settings_of(processes=4))
        pool.start()
        await pool.ready()
        supervisor = pool.supervisor
        assert supervisor._server is not None
        supervisor._server.send_signal(signal.SIGSTOP)
        for number in range(1000, 3000):
            supervisor.order("kill", number)
        opening = asyncio.create_task(pool.open())
        await asyncio.sleep(0)
        waiting = len(supervisor._orders)
        supervisor._server.send_signal(signal.SIGCONT)
        environment = await opening
        await environment.reset(prompt_of())
        await environment.close()
        pool.close()
        return waiting

    assert asyncio.run(run()) > 100


@looped(
    ("own", "where", "what"),
    [
        ({"name": "verifiers", "settings": {"env": {}}}, "name", "needs the package verifiers"),
        ({"name": "game"}, "name", "is not module:factory"),
        (
            {"name": "openenv", "settings": {"url": "ws://x"}},
            "name",
            "needs the package openenv>=0.10,<0.11",
        ),
        ({"name": "no_such_game:Game"}, "name", "no module 'no_such_game'"),
        ({"name": "tests.engine.environments:Game"}, "name", "has no 'Game'"),
        ({"settings": {"turn": 3}}, "settings", "unexpected keyword argument 'turn'"),
        (tools("tests.unit.agents:time"), "settings", "did you mean 'times'?"),
        (tools("tests.unit.agents:untyped"), "settings", "parameter a has no type annotation"),
        (
            tools(["tests.unit.agents:times"] * 2),
            "settings",
            "two of the functions are named times",
        ),
        (tools("tests.unit.no_tools"), "settings", "no module 'tests.unit.no_tools'"),
        (tools("tests.unit.agents:times", timeout_s=-1), "settings", "timeout_s: -1"),
        (tools("tests.unit.agents:times", timeout_s=60), "settings.timeout_s", "is not below"),
        ({"name": "pathlib:Path"}, "name", "has no method reset(prompt)"),
    ],
)
def test_an_environment_that_cannot_be_is_refused_by_name(
    own: dict[str, Any], where: str, what: str
) -> None:
    with pytest.raises(EnvironmentRefused, match=r"rollout\.environment") as refused:
        load_factory(settings_of(**own))
    assert refused.value.where == f"rollout.environment.{where}"
    assert what in refused.value.what
    if "needs the package" in what:
        assert refused.value.fix == f"pip install -U {shlex.quote(what.split()[-1])}"


def test_a_trial_reports_what_fails_before_anything_starts() -> None:
    prompts = {"data.train": [prompt_of(fault="reset")] * 2, "data.eval": [prompt_of()]}
    found = asyncio.run(failures(settings_of(), prompts, "0", 60.0))
    assert list(found) == ["data.train"]
    assert "reset raised KeyError: 'secret'" in found["data.train"]
    follow = PlainText(Words())  # type: ignore[arg-type]
    prompts = {"data.train": [prompt_of(opening="what")], "data.eval": [prompt_of(opening="w1")]}
    found = asyncio.run(failures(settings_of(), prompts, "0", 60.0, follow))
    assert list(found) == ["data.train"]
    assert "its content cannot be appended to a turn" in found["data.train"]


def test_the_flags_of_a_step_may_be_numpys_and_nothing_else() -> None:
    step = checked_step(Step(done=np.bool_(True), train=np.bool_(False)))  # type: ignore[arg-type]
    assert json.loads(json.dumps(step)) == {
        "observation": "",
        "reward": 0.0,
        "done": True,
        "train": False,
        "measured": {},
    }
    with pytest.raises(TypeError, match="done of a step is 'no', not True or False"):
        checked_step(Step(done="no"))  # type: ignore[arg-type]


class Endless:
    """A task set of the package verifiers, in the form that its loop over tasks has."""

    def __iter__(self) -> Iterator[str]:
        return map("task {}".format, itertools.count())


@dataclass
class AgentOfVerifiers:
    harness: Any = None


class Verifiers:
    """The used part of the package verifiers 0.4.0 and of its loaders module;
    docs/environments.md describes the test with the real package."""

    AgentConfig = AgentOfVerifiers

    def __init__(self, environment: Any = None, agents: Any = None, own: str = "bash") -> None:
        self.environment, self.agents, self.own = environment, agents or {}, own
        self.EvalClientConfig = self.ModelContext = lambda **given: SimpleNamespace(**given)

    def resolve_env_config(self, given: Any) -> Any:
        self.given = given
        taskset = SimpleNamespace(id="tasks")

        class Resolved(SimpleNamespace):
            def __iter__(self) -> Iterator[Any]:
                return iter(vars(self).items())

        return Resolved(taskset=taskset, **self.agents)

    def load_environment(self, config: Any) -> Any:
        return self.environment

    def default_harness_id(self, taskset: str) -> str:
        assert taskset == "tasks"
        return self.own

    def harness_class(self, name: str) -> Any:
        return SimpleNamespace(EXECUTES_CODE=name != "null")


NULL, HERE = {"harness": {"id": "null"}}, {"runtime": {"type": "subprocess"}}


@pytest.mark.parametrize(
    ("own", "env", "placed"),
    [
        ("bash", {}, {"agent": NULL | HERE, "user": HERE}),
        ("bash", {"agent": {"turns": 3}}, {"agent": NULL | HERE | {"turns": 3}, "user": HERE}),
        ("theirs", {}, {"agent": {"harness": {"id": "theirs"}}, "user": HERE}),
        ("bash", {"user": {"runtime": 1}}, {"agent": NULL | HERE, "user": {"runtime": 1}}),
    ],
)
def test_agents_of_verifiers_have_a_harness_and_a_place_without_being_given_them(
    own: str, env: dict[str, Any], placed: dict[str, Any]
) -> None:
    """A model's code runs on this machine only if it is configured."""
    user = AgentOfVerifiers(harness=SimpleNamespace(id="null"))
    library = Verifiers(agents={"agent": AgentOfVerifiers(), "user": user}, own=own)
    assert verifiers_module._placed(library, library, env) == placed


@pytest.mark.parametrize("other", [True, False])
def test_an_agent_of_verifiers_that_is_not_to_be_trained_is_not_the_policy(
    monkeypatch: pytest.MonkeyPatch, other: bool
) -> None:
    """`other`: it has a model of its own."""

    class Episodes:
        taskset = ("task 0",)

        @asynccontextmanager
        async def serving(self) -> AsyncIterator[None]:
            yield

        async def run_episode(self, task: str, context: Any, *, on_trace: Any) -> Any:
            traces = []
            for name, reward in (("solver", 2.0), ("user", 5.0)):
                client = "theirs" if other and name == "user" else context.client
                config = SimpleNamespace(client=client)
                agent = SimpleNamespace(name=name, trainable=name == "solver", config=config)
                traces.append(SimpleNamespace(agent=agent, reward=reward, errors=()))
                on_trace(traces[-1])
            return SimpleNamespace(ok=True, errors=(), traces=traces)

    library = Verifiers(Episodes())
    monkeypatch.setattr(verifiers_module, "package_modules", lambda *_: (library, library))
    verifiers = verifiers_module.Verifiers(env={"of": [other]})
    playing = verifiers.run(prompt_of(task=0), "http://x/v1")
    if other:
        assert asyncio.run(playing) == 2.0
        return
    with pytest.raises(ValueError, match=r"agent user is not trainable, .*settings\.env\.user"):
        asyncio.run(playing)


@pytest.mark.parametrize(("tasks", "there"), [(Endless(), 10**6), (("task 0", "task 1"), 2)])
def test_a_prompt_without_a_task_of_verifiers_is_refused_before_the_start(
    monkeypatch: pytest.MonkeyPatch, tasks: Any, there: int
) -> None:
    library = Verifiers(SimpleNamespace(taskset=tasks))
    monkeypatch.setattr(verifiers_module, "package_modules", lambda *_: (library, library))
    settings: dict[str, Any] = {"env": {"taskset": {"id": str(there)}}, "task": "number"}
    config = EnvironmentConfig(name="verifiers", settings=settings)
    assert verifiers_module.Verifiers(**settings).task(prompt_of(number=1)) == "task 1"

    def told(**fields: Any) -> str:
        rows = (prompt_of(number="0"), prompt_of(**fields))
        parts = (MixturePart(count=2),)
        found = _tasks(config, {"data.train": PromptSet(prompts=rows, parts=parts)})
        return "; ".join(f"{one.key}: {one.what}" for one in found)

    key = "rollout.environment.settings: prompt p"
    wrong = f"{key} has %s as its `number`, which must be the number of a task, from 0"
    assert told(other=1) == wrong % "None"
    assert told(number="first") == wrong % "'first'"
    assert told(number=2) == ("" if there > 2 else f"{key} names task 2, and there are 2")


def test_what_is_no_character_is_escaped() -> None:
    step = checked_step(Step(measured={"a\udcff": 1.0}))
    assert step["measured"] == {"a\\udcff": 1.0}
    assert checked_content("\udcff", "it") == "\\udcff"
    said = [{"role": "tool", "content": "a\ud800"}]
    assert checked_content(said, "it") == [{"role": "tool", "content": "a\\ud800"}]


FORGETS = TEMPLATE.replace(
    "{% for m in messages %}", "{% for m in messages if m.role != 'assistant' %}"
)


def test_a_message_follows_a_turn_as_the_template_writes_it_without_the_turns_end_twice(
    tmp_path: Path,
) -> None:
    tokenizer = characters(tmp_path)
    chat = EpisodeMessages(tokenizer)
    next_turn = [ord(one) for one in "\n<|user|>higher\x01\n<|assistant|>"]
    assert chat.between([65, 1], "higher") == next_turn
    assert chat.between([65], "higher") == [1, *next_turn]
    tool = chat.between([65, 1], [{"role": "tool", "content": "21"}])
    assert read(tool) == "\n<|tool|>21\x01\n<|assistant|>"

    prompt = tokenizer.render_chat([{"role": "user", "content": "Guess."}], answer=True)
    asked = Prompt(id="p", text=prompt, token_ids=tuple(tokenizer.encode_rendered(prompt)))
    opened = chat.opened(asked, "1 to 7")
    assert read(opened.token_ids) == ("<|user|>Guess.\x01\n<|user|>1 to 7\x01\n<|assistant|>")
    plain = Prompt(id="p", text="Guess.", token_ids=(71,))
    with pytest.raises(DataError, match="does not end with the chat template"):
        chat.opened(plain, "1 to 7")


def test_a_template_that_changes_earlier_text_is_refused(tmp_path: Path) -> None:
    with pytest.raises(DataError, match="renders earlier messages differently"):
        EpisodeMessages(characters(tmp_path, FORGETS))


def test_plain_words_follow_as_they_are() -> None:
    tokenizer: Any = Words()
    assert PlainText(tokenizer).between([3], "w7 w8") == [7, 8]
    assert PlainText(tokenizer).between([3], [{"role": "tool", "content": "w9"}]) == [9]


def test_an_import_that_fails_is_raised_where_it_is_awaited() -> None:
    async def run() -> None:
        pool = Environments(settings_of(name="tests.engine.no_such_module:Game"))
        pool.start()
        try:
            with pytest.raises(UserCodeStartError, match="no module"):
                await pool.ready()
            with pytest.raises(EnvironmentFailed, match="no process for the environment"):
                await pool.open()
        finally:
            pool.close()

    asyncio.run(run())


CLIENT = """
class Result:
    def __init__(self, observation, reward=None, done=False):
        self.observation, self.reward, self.done = observation, reward, done

class GenericEnvClient:
    def __init__(
        self,
        base_url=None,
        connect_timeout_s=10.0,
        message_timeout_s=60.0,
        max_message_size_mb=100.0,
        websocket_ping_interval_s=20.0,
        websocket_ping_timeout_s=20.0,
        provider=None,
        mode=None,
        headers=None,
    ):
        self.said, self.patience_s = [base_url], message_timeout_s

    async def connect(self):
        self.said.append("connected")

    async def reset(self, **fields):
        self.said.append(fields)
        return Result({"text": "begin"})

    async def step(self, action):
        if "?" in action.values():
            raise RuntimeError("Server error: Invalid message (code: VALIDATION_ERROR)")
        if "!" in action.values():
            raise RuntimeError("Server error: boom (code: EXECUTION_ERROR)")
        self.said.append(action)
        return Result({"text": "on"}, reward=0.5, done=len(self.said) > 4)

    async def close(self):
        self.said.append("closed")
"""
"""The client of openenv 0.10.0, as far as it is used; docs/environments.md describes the test."""


@pytest.fixture
def openenv(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Any]:
    """A call makes the environment, with what of its settings it is given. Its server reports that
    an action has the fields `code` and, not needed, `retries`."""
    package = tmp_path / "openenv" / "core"
    package.mkdir(parents=True)
    (package / "generic_client.py").write_text(CLIENT)
    monkeypatch.syspath_prepend(tmp_path)
    action = {"properties": {"code": {}, "retries": {}}, "required": ["code"]}

    def urlopen(url: str, timeout: float) -> io.StringIO:
        assert url == "http://x/schema"
        return io.StringIO(json.dumps({"action": action}))

    monkeypatch.setattr("urllib.request.urlopen", urlopen)
    _action_schema.cache_clear()
    own = {"url": "ws://x", "action": "code", "observation": "text", "reset": ["seed"]}
    yield lambda **given: load_factory(settings_of(name="openenv", settings=own | given))()
    _action_schema.cache_clear()
    for name in [one for one in sys.modules if one.partition(".")[0] == "openenv"]:
        del sys.modules[name]


def test_an_openenv_server_is_asked_turn_by_turn(openenv: Any) -> None:
    server = openenv()

    async def run() -> Any:
        opening = await server.reset(prompt_of(seed=3))
        steps = [await server.step(one) for one in ("1", "2")]
        await server.close()
        return opening, steps

    opening, (first, second) = asyncio.run(run())
    assert (opening, first.observation, first.reward) == ("begin", "on", 0.5)
    assert (first.done, second.done) == (False, True)
    assert server._client.said == [
        "ws://x",
        "connected",
        {"seed": 3},
        {"code": "1"},
        {"code": "2"},
        "closed",
    ]


def test_a_step_of_openenv_may_take_as_long_as_any_environments(openenv: Any) -> None:
    assert openenv()._client.patience_s >= 86400


@pytest.mark.parametrize(("action", "said"), [("code", "?"), (None, '{"code": "?"}')])
def test_a_response_that_is_not_an_openenv_action_gets_an_error(
    openenv: Any, action: str | None, said: str
) -> None:
    """It costs its sample nothing but the reward."""
    server = openenv(action=action)
    step = asyncio.run(server.step(said))
    assert step == Step(observation="the environment does not accept the action")
    with pytest.raises(RuntimeError, match="boom"):
        asyncio.run(server.step(said.replace("?", "!")))


@pytest.mark.parametrize(
    ("settings", "fields", "what"),
    [
        ({"action": "mesage"}, {"seed": 1}, "have no field 'mesage': they have code, retries"),
        (
            {"action": "retries"},
            {"seed": 1},
            "also need code: set null, so that the model writes",
        ),
        ({}, {"sed": 1}, "prompt p has no column 'seed', which .*reset names; it has sed"),
    ],
)
def test_settings_that_no_session_of_an_openenv_server_can_have_are_named(
    openenv: Any, settings: dict[str, Any], fields: dict[str, Any], what: str
) -> None:
    with pytest.raises(ValueError, match=what):
        asyncio.run(openenv(**settings).reset(prompt_of(**fields)))


@looped(
    ("rollout", "what"),
    [
        ({}, "rollout.reward is missing"),
        ({"environment": {"name": COUNTING, "timeout_s": 600}}, "watchdog.timeout_s: 600"),
        ({"environment": {"name": COUNTING}}, None),
        ({"environment": {"name": "agent", "timeout_s": 1200}}, None),
        ({"environment": {"name": "agent", "max_segments": 3}}, None),
        (
            {"environment": {"name": COUNTING, "max_segments": 3}},
            "max_segments: 3 applies to agents",
        ),
        ({"environment": tools("my_tools")}, "tools has no reward of its own"),
        ({"environment": tools("my_tools"), "reward": {"name": "math"}}, None),
        ({"reward": {"name": "math", "timeout_s": 601}}, "reward.timeout_s: 601 .*watchdog"),
        ({"reward": {"name": "math", "timeout_s": 600}}, "reward.timeout_s: 600 .*watchdog"),
        ({"reward": {"name": "math", "timeout_s": 599}}, None),
        ({"reward": {"name": "arithmetic", "timeout_s": 601}}, None),
        ({"reward": {"parts": {"a": OWN, "b": {"name": "math"}}}}, "parts.a.name: environment is"),
        (
            {"reward": {"parts": {"a": {**OWN, "weight": 2}}}, "environment": {"name": COUNTING}},
            "parts.a.weight: 2 would have no effect",
        ),
        ({"reward": {"parts": {"a": OWN}}, "environment": {"name": COUNTING}}, None),
        (
            {
                "reward": {"parts": {"a": {"name": "math", "gate": True}, "b": OWN}},
                "environment": {"name": COUNTING},
            },
            "parts.a.gate: a gate multiplies the parts",
        ),
        (
            {"reward": {"name": "code", "settings": {"cpu_s": 60}, "timeout_s": 10}},
            "cpu_s: 60 .* set cpu_s to at most 8, or timeout_s to at least 75",
        ),
        (
            {"reward": {"parts": {"a": {"name": "code"}}, "timeout_s": 5}},
            "parts.a.settings.cpu_s: 5",
        ),
        ({"reward": {"name": "code", "settings": {"cpu_s": 8}, "timeout_s": 10}}, None),
    ],
)
def test_a_run_whose_reward_or_tool_cannot_work_is_refused(
    rollout: dict[str, Any], what: str | None
) -> None:
    settings = {
        "run": {"dir": "runs/x", "steps": 1},
        "model": {"path": "model"},
        "data": {"train": "train.jsonl"},
        "flow": {"prompts_per_step": 2, "group_size": 2},
        "rollout": {"sampling": {"max_tokens": 8}, **rollout},
    }
    if what is None:
        assert validated(settings).rollout is not None
    else:
        with pytest.raises(ValueError, match=what):
            validated(settings)


def test_tools_are_described_by_their_signatures_and_docstrings() -> None:
    (times,) = Tools(functions="tests.unit.agents:times").schemas
    assert times == {
        "type": "function",
        "function": {
            "name": "times",
            "description": "Multiplies two numbers.",
            "parameters": {
                "type": "object",
                "properties": {
                    "a": {"type": "integer", "description": "The one."},
                    "b": {"type": "integer", "description": "The other."},
                },
                "required": ["a"],
            },
        },
    }
    module = Tools(functions="tests.engine.tools").schemas
    assert [one["function"]["name"] for one in module] == ["add"]


def test_whatever_is_wrong_with_a_call_is_the_tools_answer_and_counted() -> None:
    names = ("times", "looked_up", "sleeps")
    functions = [f"tests.unit.agents:{name}" for name in names]

    def answered(*calls: tuple[str, str]) -> Any:
        made = [
            {"id": str(number), "function": {"name": name, "arguments": arguments}}
            for number, (name, arguments) in enumerate(calls)
        ]
        message = {"role": "assistant", "tool_calls": made}
        return asyncio.run(Tools(functions=functions, timeout_s=0.2).step(message))

    step = answered(
        ("times", '{"a": 6, "b": 7}'),
        ("times", '{"a": "4"}'),
        ("looked_up", '{"words": ["egg"]}'),
        ("times", '{"a": 13}'),
        ("times", '{"a": "many", "c": 1}'),
        ("times", "{"),
        ("time", "{}"),
    )
    counted = {"tool_calls": 7, "tool_errors": 4, "unread_tool_calls": 0}
    assert (step.done, step.measured) == (False, counted)
    assert [one["tool_call_id"] for one in step.observation] == list("0123456")
    texts = [one["content"] for one in step.observation]
    assert texts[:3] == ["42", "8", '{"egg": 3}']
    said = zip(
        texts[3:],
        (
            "error: ZeroDivisionError: not thirteen",
            "c: Extra inputs are not permitted",
            "Invalid JSON",
            "unknown tool 'time'; did you mean 'times'? the tools are times, looked_up, sleeps",
        ),
        strict=True,
    )
    assert all(what in text for text, what in said), texts
    for late in (("sleeps", "{}"), ("looked_up", '{"words": []}')):
        step = answered(late, ("times", '{"a": 1}'))
        assert "no answer within 0.2 s" in step.observation[0]["content"]
        assert step.measured["tool_errors"] >= 1
    step = answered()
    assert (step.done, step.measured) == (True, dict.fromkeys(counted, 0))


def test_tools_answer_what_the_model_calls_turn_by_turn(tmp_path: Path) -> None:
    """The prompt names them, vLLM's parser reads the calls, and the answers are put behind them; a
    call that it cannot read is answered, too."""
    tokenizer = characters(tmp_path)
    settings = settings_of(**tools("tests.unit.agents:times"), format="chat")
    schemas = Tools(functions="tests.unit.agents:times").schemas
    called = '<tool_call>{"name": "times", "arguments": {"a": 6, "b": 7}}</tool_call>'
    says = ["<tool_call>{broken}</tool_call>", called, "42"]

    async def sample(asked: TurnRequest) -> Turn:
        text = says[len(transcript.turns)]
        ids = np.array([*map(ord, text), 1], dtype=np.int32)
        zeros = np.zeros(len(ids))
        tokens = PartialResponse(
            response_ids=ids,
            behavior_logprobs=zeros.astype(np.float32),
            versions=zeros.astype(np.int32),
        )
        return Turn(tokens=tokens, text=text, reason="stop")

    async def run() -> str | None:
        pool = Environments(settings)
        pool.start()
        try:
            parser = ToolParser("hermes", tmp_path, tokenizer.eos_ids, schemas)
            conversations = Episodes(pool, tokenizer, parser)
            return await conversations.play(transcript, sample, 400)
        finally:
            pool.close()

    transcript = Transcript(Prompt(id="p", text="", token_ids=(60,)))
    assert asyncio.run(run()) is None
    reason = "error: the tool call cannot be read: JSONDecodeError: Expecting property name"
    said = read(transcript.tokens.response_ids)
    assert said.startswith(f"{says[0]}\x01\n<|user|>{reason}")
    assert said.endswith(f"\x01\n<|assistant|>{called}\x01\n<|tool|>42\x01\n<|assistant|>42\x01")
    assert transcript.measured == {"tool_calls": 2, "tool_errors": 1, "unread_tool_calls": 1}


def test_prompts_name_the_tools_where_their_template_can(tmp_path: Path) -> None:
    save_characters(tmp_path)

    def asked(template: str, **own: Any) -> str:
        config: Any = SimpleNamespace(
            data=SimpleNamespace(chat_template=template, chat_template_options={}),
            rollout=SimpleNamespace(environment=settings_of(**own)),
        )
        tokenizer = prompt_tokenizer(tmp_path, config)
        return tokenizer.render_chat([{"role": "user", "content": "?"}], answer=True)

    times = tools("tests.unit.agents:times")
    assert '"name": "times"' in asked(TEMPLATE, **times)
    assert '"name"' not in asked(TEMPLATE)
    with pytest.raises(DataError, match="does not read `tools`"):
        asked("{% for m in messages %}{{ m.content }}{% endfor %}", **times)

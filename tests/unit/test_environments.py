"""Multi-turn samples: their tokens, masks and rewards, with environments in processes of their own,
and failures of environments, which affect only their sample."""

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
from megatron_async_rl.plan.trials import _missing_tasks
from megatron_async_rl.rollout.environments import (
    BUILT_IN,
    EnvironmentRefused,
    EpisodeStep,
    checked_content,
    checked_step,
    load_factory,
)
from megatron_async_rl.rollout.environments.built_in import verifiers as verifiers_module
from megatron_async_rl.rollout.environments.built_in.openenv import _action_schema
from megatron_async_rl.rollout.environments.built_in.tools import Tools, prompt_tokenizer
from megatron_async_rl.rollout.environments.episode import Episodes, failures
from megatron_async_rl.rollout.environments.pool import (
    EnvironmentFailed,
    Environments,
    EnvironmentSession,
)
from megatron_async_rl.rollout.environments.transcript import (
    EpisodeMessages,
    PlainText,
    Transcript,
    Turn,
    TurnRequest,
)
from megatron_async_rl.rollout.isolation import child, supervisor
from megatron_async_rl.rollout.isolation.supervisor import UserCodeStartError, UserProcess
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
    """Tokenizer of words such as `w7`."""

    eos_ids = (0,)

    def encode(self, text: str, *, special_tokens: bool = True) -> list[int]:
        return [int(word[1:]) for word in text.split()]

    def decode(self, ids: Sequence[int]) -> str:
        return " ".join(f"w{one}" for one in ids)


class Sampler:
    """Sampler of turns with two tokens, the last an end-of-turn token. Each turn has a new
    version."""

    def __init__(self, on_turn: Callable[[int], None]) -> None:
        self.requested: list[tuple[list[int], int, int]] = []
        self.length, self.on_turn = 2, on_turn

    async def __call__(self, request: TurnRequest) -> Turn:
        self.requested.append((list(request.ids), request.begun, request.maximum))
        number, length = len(self.requested), min(self.length, request.maximum)
        self.on_turn(number)
        tokens = PartialResponse(
            response_ids=np.array([10 * number, 0][:length], dtype=np.int32),
            behavior_logprobs=np.full(length, -0.1 * number, dtype=np.float32),
            versions=np.full(length, number, dtype=np.int32),
        )
        reason = "stop" if length == self.length else "length"
        return Turn(tokens=tokens, text=f"turn {number}", reason=reason)  # type: ignore[arg-type]


class Played:
    """Conversations with one pool, whose processes the tests share."""

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
        """Return one conversation per prompt; all of them run concurrently."""

        async def one(prompt: Prompt) -> Any:
            tokenizer: Any = Words()
            transcript, sampler = Transcript(prompt), Sampler(hurried)
            conversations = Episodes(self.pool, tokenizer)
            return transcript, await conversations.play(transcript, sampler, max_tokens), sampler

        async def run() -> Any:
            return await asyncio.gather(*map(one, prompts))

        def hurried(number: int) -> None:
            """Shorten the time limit of an episode that hangs at its second turn."""
            if number == 2 and any(prompt.fields.get("fault") == "hangs" for prompt in prompts):
                self.pool.settings = settings_of(timeout_s=0.1)

        self.pool.settings = settings_of(processes=4, **own)
        played: list[tuple[Transcript, str | None, Sampler]] = self.runner.run(run())
        return played


@pytest.fixture(scope="module")
def played() -> Iterator[Played]:
    with asyncio.Runner() as runner:
        played = Played(runner)
        yield played
        played.pool.close()


def test_a_sample_has_the_sampled_tokens_between_content(
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
    # Each turn is sampled after exactly the tokens of the sample, up to the remaining budget.
    prompt, response = [90, 91, 5], tokens.response_ids.tolist()
    assert sampler.requested == [([*prompt, *response[:n]], n, 99 - n) for n in (0, 4, 8)]


def test_a_sample_at_its_limit_ends_with_a_turn(played: Played) -> None:
    ((few, _, _),) = played(prompt_of(), max_turns=2)
    assert few.tokens.response_ids.tolist() == [10, 0, 7, 8, 20, 0]
    assert not few.truncated
    # The second turn leaves one of seven tokens, too few for content and another turn.
    for maximum, length in ((7, 6), (5, 5), (4, 2), (1, 1)):
        ((cut, error, _),) = played(prompt_of(), max_tokens=maximum)
        assert (error, cut.truncated, cut.length) == (None, True, length)
        assert cut.mask[-1] == 1
    ((_, error, _),) = played(prompt_of(opening="w1 w2"), max_tokens=2)
    assert error is not None
    assert "no room for a turn" in error


def test_content_that_cannot_be_tokenized_fails_its_sample(played: Played) -> None:
    ((_, error, _),) = played(prompt_of(opening="hello"))
    assert error is not None
    assert error.startswith("its content cannot be appended to a turn: invalid literal")


def test_an_environment_may_exclude_a_turn_from_the_loss(played: Played) -> None:
    ((transcript, _, _),) = played(prompt_of(fault="untrained"), max_turns=2)
    assert transcript.mask.tolist() == [0, 0, 0, 0, 1, 1]


def test_a_failing_environment_affects_only_its_sample(
    played: Played,
) -> None:
    faults = ["reset", "raises", "nan", "none", "exits", "huge", "parts", "unreadable", None]
    samples = played(*(prompt_of(fault=fault) for fault in faults))
    errors = [error for _, error, _ in samples]
    assert errors == [
        "reset raised KeyError: 'secret'",
        "step raised KeyError: 'answer'",
        "step raised ValueError: the reward of a step is nan, not a finite number of at most 1e+30",
        "step raised TypeError: step returned a NoneType, not an EpisodeStep",
        "its process ended with code 3 in step; see the engine's log",
        "step raised ValueError: the reward of a step is 1e+39, not a finite number of at most"
        " 1e+30",
        "step raised TypeError: the observation of a step must be text or a list of messages with"
        ' role and content, both text: [{"role": "tool", "content": [{"text": "w7"}]}]',
        "its content cannot be appended to a turn: invalid literal for int() with base 10: 'hat'",
        None,
    ]
    # The transcript keeps the turns before the failure for the log.
    assert [len(transcript.turns) for transcript, _, _ in samples] == [0, 2, 2, 2, 2, 2, 2, 2, 3]
    ((transcript, error, _),) = played(prompt_of(fault="hangs"))
    assert error == "no answer to step within rollout.environment.timeout_s: 0.1"
    assert len(transcript.turns) == 2


def test_a_process_serves_several_samples_in_sequence(played: Played) -> None:
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
        report = json.loads(local.recv(child.MAX_MESSAGE_BYTES))
    how = "could not be started: [Errno 11] Resource temporarily unavailable"
    assert report == {"ended": 7, "how": how}


def test_a_process_without_descriptors_is_reported_and_the_server_continues(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """The process has reached its limit on open files."""

    def refused(_: int) -> int:
        raise OSError(24, "Too many open files")

    monkeypatch.setattr(os, "pidfd_open", refused)
    local, remote = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
    with local, remote, subprocess.Popen(["sleep", "20"]) as process:
        monkeypatch.setattr(os, "fork", lambda: process.pid)
        server = child._ForkingServer(remote, lambda: child.LoadedCode(print), None)
        server._start(7, os.dup(local.fileno()))
        local.send(json.dumps(["start", 8]).encode())
        assert server._follow_command()
        reports = [json.loads(local.recv(child.MAX_MESSAGE_BYTES)) for _ in range(2)]
        assert not psutil.pid_exists(process.pid)
    assert reports == [
        {"ended": 7, "how": "could not be started: [Errno 24] Too many open files"},
        {"ended": 8, "how": "could not be started: no socket"},
    ]


def test_each_file_of_built_in_is_an_environment() -> None:
    assert list(BUILT_IN) == ["agent", "openenv", "tools", "verifiers"]
    with pytest.raises(EnvironmentRefused, match="did you mean 'openenv'"):
        load_factory(settings_of(name="openenvs"))


def test_a_cancelled_conversation_releases_its_slot(played: Played) -> None:
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
        other = await pool.open()  # A slot is free again.
        fresh = other._process is not process
        await other.reset(prompt_of())
        await other.close()
        return pool._slots._value, fresh

    played.pool.settings = settings_of()
    assert played.runner.run(run()) == (4, True)


@pytest.mark.parametrize("ready", [False, True])
def test_a_process_started_for_a_cancelled_sample_is_killed(
    played: Played, monkeypatch: pytest.MonkeyPatch, ready: bool
) -> None:
    """`ready`: the sample is cancelled when its process is ready, otherwise before."""
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
    assert played.pool._slots._value == 4


def test_a_server_whose_reports_are_no_longer_read_ends() -> None:
    local, remote = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
    with remote:
        server = child._ForkingServer(remote, lambda: child.LoadedCode(print), None)
        child._report(remote, {"imported": True})
        local.close()  # With an unread report, for which the kernel returns an error.
        server.run()
        child._report(remote, {"ended": 7, "how": "ended with code 0"})


def test_huge_content_is_dropped_before_tokenization(
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


def test_a_task_cancelled_in_close_releases_its_slot_at_once(
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
        return pool._slots._value

    played.pool.settings = settings_of()
    assert played.runner.run(run()) == 4


def test_descendants_of_an_environment_end_with_it(played: Played, tmp_path: Path) -> None:
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


def test_no_order_to_the_fork_server_is_lost() -> None:
    """The orders exceed the buffer of the socket."""

    async def run() -> int:
        pool = Environments(settings_of(processes=4))
        pool.start()
        await pool.ready()
        supervisor = pool.supervisor
        assert supervisor._server is not None
        supervisor._server.send_signal(signal.SIGSTOP)
        for number in range(1000, 3000):
            supervisor.send_command("kill", number)
        opening = asyncio.create_task(pool.open())
        await asyncio.sleep(0)
        waiting = len(supervisor._commands)
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
        ({"name": "game"}, "name", "is not of the form module:factory"),
        (
            {"name": "openenv", "settings": {"url": "ws://x"}},
            "name",
            "needs the package openenv>=0.10,<0.11",
        ),
        ({"name": "no_such_game:Game"}, "name", "no module 'no_such_game'"),
        ({"name": "tests.engine.environments:Game"}, "name", "has no callable 'Game'"),
        ({"settings": {"turn": 3}}, "settings", "unexpected keyword argument 'turn'"),
        (tools("tests.unit.agents:time"), "settings", "did you mean 'times'?"),
        (tools("tests.unit.agents:untyped"), "settings", "parameter a has no type annotation"),
        (
            tools(["tests.unit.agents:times"] * 2),
            "settings",
            "two functions have the name times",
        ),
        (tools("tests.unit.no_tools"), "settings", "no module 'tests.unit.no_tools'"),
        (tools("tests.unit.agents:times", timeout_s=-1), "settings", "timeout_s: -1"),
        (tools("tests.unit.agents:times", timeout_s=60), "settings.timeout_s", "is not below"),
        ({"name": "pathlib:Path"}, "name", "has no method reset(prompt)"),
    ],
)
def test_an_invalid_environment_is_refused_with_its_key(
    own: dict[str, Any], where: str, what: str
) -> None:
    with pytest.raises(EnvironmentRefused, match=r"rollout\.environment") as refused:
        load_factory(settings_of(**own))
    assert refused.value.where == f"rollout.environment.{where}"
    assert what in refused.value.what
    if "needs the package" in what:
        assert refused.value.fix == f"pip install -U {shlex.quote(what.split()[-1])}"


def test_a_trial_reports_failures_before_anything_starts() -> None:
    prompts = {"data.train": [prompt_of(fault="reset")] * 2, "data.eval": [prompt_of()]}
    errors = asyncio.run(failures(settings_of(), prompts, "0", 60.0))
    assert list(errors) == ["data.train"]
    assert "reset raised KeyError: 'secret'" in errors["data.train"]
    follow = PlainText(Words())  # type: ignore[arg-type]
    prompts = {"data.train": [prompt_of(opening="what")], "data.eval": [prompt_of(opening="w1")]}
    errors = asyncio.run(failures(settings_of(), prompts, "0", 60.0, follow))
    assert list(errors) == ["data.train"]
    assert "its content cannot be appended to a turn" in errors["data.train"]


def test_a_trial_reports_an_environment_that_cannot_be_imported() -> None:
    settings = settings_of(name="tests.engine.no_such_module:Game")
    errors = asyncio.run(failures(settings, {"data.train": [prompt_of()]}, "0", 60.0))
    assert list(errors) == [""]
    assert errors[""].startswith("its import: ")
    assert "no module 'tests.engine.no_such_module'" in errors[""]


def test_a_trial_accepts_a_slow_environment(monkeypatch: pytest.MonkeyPatch) -> None:
    """The first prompt fails, and the second takes longer than the trial."""

    async def reset(session: EnvironmentSession, prompt: Prompt) -> str:
        raise prompt.fields["error"]

    monkeypatch.setattr(EnvironmentSession, "reset", reset)
    fails, hangs = prompt_of(error=EnvironmentFailed("reset raised")), prompt_of(error=TimeoutError)
    prompts = {"data.train": [fails, hangs, fails], "data.eval": [fails]}
    errors = asyncio.run(failures(settings_of(), prompts, "0", 60.0))
    assert errors == {"data.eval": "the first prompts of data.eval: reset raised"}


def test_a_closed_pool_cancels_environments_that_are_still_closing() -> None:
    async def run() -> None:
        pool = Environments(settings_of())
        pool.start()

        async def close() -> None:
            await asyncio.Event().wait()

        task = pool.closing(close())
        pool.close()
        assert task.cancelling()
        with pytest.raises(asyncio.CancelledError):
            await task

    asyncio.run(run())


def test_a_call_to_an_environment_whose_process_has_ended_fails(played: Played) -> None:
    async def run() -> None:
        environment = await played.pool.open()
        try:
            environment._process.kill()
            with pytest.raises(EnvironmentFailed, match=r"^its process has ended$"):
                await environment.step("0")
        finally:
            await environment.close()

    played.runner.run(run())


def test_flags_of_a_step_are_booleans_of_python_or_numpy() -> None:
    step = checked_step(EpisodeStep(done=np.bool_(True), train=np.bool_(False)))  # type: ignore[arg-type]
    assert json.loads(json.dumps(step)) == {
        "observation": "",
        "reward": 0.0,
        "done": True,
        "train": False,
        "measured": {},
    }
    with pytest.raises(TypeError, match="done of a step is 'no', not True or False"):
        checked_step(EpisodeStep(done="no"))  # type: ignore[arg-type]


class Endless:
    """Infinite task set with the interface of the package verifiers."""

    def __iter__(self) -> Iterator[str]:
        return map("task {}".format, itertools.count())


@dataclass
class AgentOfVerifiers:
    harness: Any = None


class Verifiers:
    """Stand-in for the used part of the package verifiers 0.4.0 and of its loaders module.
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
def test_agents_of_verifiers_have_a_default_harness_and_runtime(
    own: str, env: dict[str, Any], placed: dict[str, Any]
) -> None:
    """Code of the model runs on this machine only if the configuration requests it."""
    user = AgentOfVerifiers(harness=SimpleNamespace(id="null"))
    library = Verifiers(agents={"agent": AgentOfVerifiers(), "user": user}, own=own)
    assert verifiers_module._placed(library, library, env) == placed


@pytest.mark.parametrize("other", [True, False])
def test_an_untrained_agent_of_verifiers_may_not_use_the_policy(
    monkeypatch: pytest.MonkeyPatch, other: bool
) -> None:
    """`other`: the agent has a model of its own."""

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


def test_a_failed_episode_of_verifiers_is_raised(monkeypatch: pytest.MonkeyPatch) -> None:
    class Fails:
        taskset = ("task 0",)

        @asynccontextmanager
        async def serving(self) -> AsyncIterator[None]:
            yield

        async def run_episode(self, task: str, context: Any, *, on_trace: Any) -> Any:
            errors = [SimpleNamespace(type=one, message="no answer") for one in "ABC"]
            traces = [SimpleNamespace(errors=[one], reward=1.0) for one in errors[1:]]
            return SimpleNamespace(ok=False, errors=errors[:1], traces=traces)

    library = Verifiers(Fails())
    monkeypatch.setattr(verifiers_module, "package_modules", lambda *_: (library, library))
    playing = verifiers_module.Verifiers(env={"of": "a failure"}).run(prompt_of(task=0), "")
    with pytest.raises(RuntimeError, match=r"^A: no answer; B: no answer; C: no answer$"):
        asyncio.run(playing)


@pytest.mark.parametrize(("tasks", "there"), [(Endless(), 10**6), (("task 0", "task 1"), 2)])
def test_a_prompt_without_a_task_of_verifiers_is_refused(
    monkeypatch: pytest.MonkeyPatch, tasks: Any, there: int
) -> None:
    library = Verifiers(SimpleNamespace(taskset=tasks))
    monkeypatch.setattr(verifiers_module, "package_modules", lambda *_: (library, library))
    settings: dict[str, Any] = {"env": {"taskset": {"id": str(there)}}, "task": "number"}
    config = EnvironmentConfig(name="verifiers", settings=settings)
    assert verifiers_module.Verifiers(**settings).task(prompt_of(number=1)) == "task 1"

    def refusal(**fields: Any) -> str:
        rows = (prompt_of(number="0"), prompt_of(**fields))
        parts = (MixturePart(count=2),)
        problems = _missing_tasks(config, {"data.train": PromptSet(prompts=rows, parts=parts)})
        return "; ".join(f"{one.key}: {one.what}" for one in problems)

    key = "rollout.environment.settings: prompt p"
    wrong = f"{key} has %s as its `number`, which must be the number of a task, from 0"
    assert refusal(other=1) == wrong % "None"
    assert refusal(number="first") == wrong % "'first'"
    assert refusal(number=2) == (
        "" if there > 2 else f"{key} names task 2, but there are only 2 tasks"
    )


def test_a_lone_surrogate_is_escaped() -> None:
    step = checked_step(EpisodeStep(measured={"a\udcff": 1.0}))
    assert step["measured"] == {"a\\udcff": 1.0}
    assert checked_content("\udcff", "it") == "\\udcff"
    content = [{"role": "tool", "content": "a\ud800"}]
    assert checked_content(content, "it") == [{"role": "tool", "content": "a\\ud800"}]


FORGETS = TEMPLATE.replace(
    "{% for m in messages %}", "{% for m in messages if m.role != 'assistant' %}"
)


def test_a_message_after_a_turn_has_the_end_of_turn_only_once(
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
    rendered = Prompt(id="p", text=prompt, token_ids=tuple(tokenizer.encode_rendered(prompt)))
    opened = chat.opened(rendered, "1 to 7")
    assert read(opened.token_ids) == ("<|user|>Guess.\x01\n<|user|>1 to 7\x01\n<|assistant|>")
    plain = Prompt(id="p", text="Guess.", token_ids=(71,))
    with pytest.raises(DataError, match="does not end with the chat template"):
        chat.opened(plain, "1 to 7")


@looped(
    "template",
    [
        TEMPLATE.partition("{% if add_generation_prompt %}")[0],
        "{% if add_generation_prompt %}<|assistant|>{% endif %}" + TEMPLATE,
    ],
)
def test_a_template_that_does_not_mark_the_beginning_of_an_answer_is_refused(
    template: str, tmp_path: Path
) -> None:
    with pytest.raises(DataError, match="does not mark the beginning of an answer") as refused:
        EpisodeMessages(characters(tmp_path, template))
    assert str(refused.value).startswith("model.path")


def test_a_template_that_changes_earlier_text_is_refused(tmp_path: Path) -> None:
    with pytest.raises(DataError, match="renders earlier messages differently"):
        EpisodeMessages(characters(tmp_path, FORGETS))


def test_plain_content_is_appended_unchanged() -> None:
    tokenizer: Any = Words()
    assert PlainText(tokenizer).between([3], "w7 w8") == [7, 8]
    assert PlainText(tokenizer).between([3], [{"role": "tool", "content": "w9"}]) == [9]


def test_a_failed_import_is_raised_to_the_waiting_task() -> None:
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


def test_an_import_that_does_not_end_is_raised_to_the_waiting_task(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "never_imported.py").write_text("import signal\nsignal.pause()\n")
    monkeypatch.syspath_prepend(tmp_path)
    monkeypatch.setattr(supervisor, "START_S", 0.1)

    async def run() -> None:
        pool = Environments(settings_of(name="never_imported:Game"))
        pool.start()
        try:
            with pytest.raises(UserCodeStartError, match=r"^it was not imported within 0\.1 s$"):
                await pool.ready()
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
        self.calls, self.timeout_s = [base_url], message_timeout_s

    async def connect(self):
        self.calls.append("connected")

    async def reset(self, **fields):
        self.calls.append(fields)
        return Result({"text": "begin"})

    async def step(self, action):
        if "?" in action.values():
            raise RuntimeError("Server error: Invalid message (code: VALIDATION_ERROR)")
        if "!" in action.values():
            raise RuntimeError("Server error: boom (code: EXECUTION_ERROR)")
        self.calls.append(action)
        return Result({"text": "on"}, reward=0.5, done=len(self.calls) > 4)

    async def close(self):
        self.calls.append("closed")
"""
"""Stand-in for the used part of the client of openenv 0.10.0. docs/environments.md describes the
test with the real package."""


@pytest.fixture
def openenv(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Any]:
    """Function that makes an environment with the given settings. According to its server, an
    action has the field `code` and the optional field `retries`."""
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


def test_an_openenv_server_receives_each_turn(openenv: Any) -> None:
    server = openenv()

    async def run() -> Any:
        opening = await server.reset(prompt_of(seed=3))
        steps = [await server.step(one) for one in ("1", "2")]
        await server.close()
        return opening, steps

    opening, (first, second) = asyncio.run(run())
    assert (opening, first.observation, first.reward) == ("begin", "on", 0.5)
    assert (first.done, second.done) == (False, True)
    assert server._client.calls == [
        "ws://x",
        "connected",
        {"seed": 3},
        {"code": "1"},
        {"code": "2"},
        "closed",
    ]


def test_the_time_limit_of_the_openenv_client_never_applies(openenv: Any) -> None:
    assert openenv()._client.timeout_s >= 86400


@pytest.mark.parametrize(("action", "response"), [("code", "?"), (None, '{"code": "?"}')])
def test_a_response_that_is_not_an_openenv_action_gets_an_error(
    openenv: Any, action: str | None, response: str
) -> None:
    """The sample continues with reward 0."""
    server = openenv(action=action)
    step = asyncio.run(server.step(response))
    assert step == EpisodeStep(observation="the environment does not accept the action")
    with pytest.raises(RuntimeError, match="boom"):
        asyncio.run(server.step(response.replace("?", "!")))


@pytest.mark.parametrize(
    ("settings", "fields", "what"),
    [
        ({"action": "mesage"}, {"seed": 1}, "have no field 'mesage': they have code, retries"),
        (
            {"action": "retries"},
            {"seed": 1},
            "also need code: set null, and the model writes",
        ),
        ({}, {"sed": 1}, "prompt p has no column 'seed', which .*reset names; it has sed"),
    ],
)
def test_invalid_settings_of_openenv_are_named(
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
def test_an_invalid_reward_or_environment_is_refused(
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
            "description": "Multiply two numbers.",
            "parameters": {
                "type": "object",
                "properties": {
                    "a": {"type": "integer", "description": "First factor."},
                    "b": {"type": "integer", "description": "Second factor."},
                },
                "required": ["a"],
            },
        },
    }
    module = Tools(functions="tests.engine.tools").schemas
    assert [one["function"]["name"] for one in module] == ["add"]


def test_an_error_of_a_tool_call_is_its_answer_and_is_counted() -> None:
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
    expected = zip(
        texts[3:],
        (
            "error: ZeroDivisionError: not thirteen",
            "c: Extra inputs are not permitted",
            "Invalid JSON",
            "unknown tool 'time'; did you mean 'times'? the tools are times, looked_up, sleeps",
        ),
        strict=True,
    )
    assert all(what in text for text, what in expected), texts
    for late in (("sleeps", "{}"), ("looked_up", '{"words": []}')):
        step = answered(late, ("times", '{"a": 1}'))
        assert "no answer within 0.2 s" in step.observation[0]["content"]
        assert step.measured["tool_errors"] >= 1
    step = answered()
    assert (step.done, step.measured) == (True, dict.fromkeys(counted, 0))


def test_tools_respond_to_the_calls_of_each_turn(tmp_path: Path) -> None:
    """vLLM's parser reads the calls, and their results follow the turn. A call that cannot be
    parsed gets an error."""
    tokenizer = characters(tmp_path)
    settings = settings_of(**tools("tests.unit.agents:times"), format="chat")
    schemas = Tools(functions="tests.unit.agents:times").schemas
    called = '<tool_call>{"name": "times", "arguments": {"a": 6, "b": 7}}</tool_call>'
    turns = ["<tool_call>{broken}</tool_call>", called, "42"]

    async def sample(request: TurnRequest) -> Turn:
        text = turns[len(transcript.turns)]
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
    text = read(transcript.tokens.response_ids)
    assert text.startswith(f"{turns[0]}\x01\n<|user|>{reason}")
    assert text.endswith(f"\x01\n<|assistant|>{called}\x01\n<|tool|>42\x01\n<|assistant|>42\x01")
    assert transcript.measured == {"tool_calls": 2, "tool_errors": 1, "unread_tool_calls": 1}


def test_prompts_name_the_tools_if_their_template_can(tmp_path: Path) -> None:
    save_characters(tmp_path)

    def rendered_prompt(template: str, **own: Any) -> str:
        config: Any = SimpleNamespace(
            data=SimpleNamespace(chat_template=template, chat_template_options={}),
            rollout=SimpleNamespace(environment=settings_of(**own)),
        )
        tokenizer = prompt_tokenizer(tmp_path, config)
        return tokenizer.render_chat([{"role": "user", "content": "?"}], answer=True)

    times = tools("tests.unit.agents:times")
    assert '"name": "times"' in rendered_prompt(TEMPLATE, **times)
    assert '"name"' not in rendered_prompt(TEMPLATE)
    with pytest.raises(DataError, match="does not read `tools`"):
        rendered_prompt("{% for m in messages %}{{ m.content }}{% endfor %}", **times)


def test_a_process_that_is_killed_before_it_connects_ends_without_its_socket() -> None:
    sent, ended, aborted = [], [], []
    supervisor: Any = SimpleNamespace(send_command=lambda *command: sent.append(command))
    transport: Any = SimpleNamespace(abort=lambda: aborted.append(True))

    async def check() -> None:
        process = UserProcess(
            supervisor, 3, lambda _: None, lambda process, why: ended.append((process.number, why))
        )
        process.kill()
        process.ended("was killed")
        assert ended == [(3, "it was killed")]
        process.connection_made(transport)
        assert aborted == [True]

    asyncio.run(check())
    assert sent == [("kill", 3)]


@pytest.mark.parametrize("name", ["", "errors/timeouts"])
def test_a_measured_name_that_no_metric_can_contain_is_refused(name: str) -> None:
    """The metric of the step would end the run after the step has trained."""
    with pytest.raises(ValueError, match="cannot name a measured value"):
        checked_step(EpisodeStep(measured={name: 1.0}))

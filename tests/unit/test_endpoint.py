"""Agents at the OpenAI-compatible endpoint: a session is one sample with the sampled tokens, of one
or several segments."""

import asyncio
import contextlib
import json
import logging
import re
import sys
from collections.abc import Awaitable, Callable, Iterator, Sequence
from pathlib import Path
from typing import Any
from unittest.mock import MagicMock

import numpy as np
import pytest
from aiohttp import ClientSession
from transformers import AutoTokenizer

from megatron_async_rl.config.rollout import EnvironmentConfig
from megatron_async_rl.rollout.environments import (
    UNREAD,
    EnvironmentRefused,
    endpoint,
    load_factory,
    tool_parsers,
)
from megatron_async_rl.rollout.environments.completions import identity
from megatron_async_rl.rollout.environments.endpoint import Agents
from megatron_async_rl.rollout.environments.pool import AGENT_GRACE_S, Environments
from megatron_async_rl.rollout.environments.transcript import Transcript, Turn, TurnRequest
from megatron_async_rl.rollout.vllm.tool_parser import ToolParser, call_beginnings
from megatron_async_rl.samples import Prompt
from megatron_async_rl.samples.types import PartialResponse
from megatron_async_rl.watchdog import watch
from tests.cases import looped
from tests.characters import TEMPLATE, characters, read, save_characters

CALLED = '<tool_call>{"name": "times", "arguments": {"a": 6, "b": 7}}</tool_call>'
TURNS = [CALLED, "42"]
FUNCTION = {"function": "tests.unit.agents:run"}


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Model directory that has only a tokenizer."""
    folder = tmp_path_factory.mktemp("model")
    characters(folder)
    return folder


def sampler(requested: list[list[int]], turns: Sequence[str] = TURNS) -> Any:
    async def sample(request: TurnRequest) -> Turn:
        requested.append(list(request.ids))
        whole = [*map(ord, turns[(len(requested) - 1) % 2]), 1]
        sampled = whole[: request.maximum]
        tokens = PartialResponse(
            response_ids=np.array(sampled, dtype=np.int32),
            behavior_logprobs=np.full(len(sampled), -0.5, dtype=np.float32),
            versions=np.full(len(sampled), len(requested), dtype=np.int32),
        )
        text = read(one for one in sampled if one != 1)
        return Turn(tokens=tokens, text=text, reason="stop" if sampled == whole else "length")

    return sample


class Played:
    def __init__(
        self, runner: asyncio.Runner, model: Path, template: str = TEMPLATE, **settings: Any
    ) -> None:
        self.runner = runner
        runner.run(self._start(model, template, {"settings": FUNCTION, **settings}))

    async def _start(self, model: Path, template: str, settings: dict[str, Any]) -> None:
        config = EnvironmentConfig(name="agent", processes=2, **settings)
        self.pool = Environments(config)
        self.pool.start()
        tokenizer = characters(model, template, ("<turn>",))
        parser = ToolParser("hermes", model, tokenizer.eos_ids)
        self.agents = Agents(self.pool, tokenizer, parser)
        await self.agents.start()

    def __call__(
        self,
        max_tokens: int = 400,
        max_segments: int = 1,
        turns: Sequence[str] = TURNS,
        **fields: Any,
    ) -> tuple[Transcript, str | None, list[list[int]]]:
        update = {"max_segments": max_segments}
        self.pool.settings = self.pool.settings.model_copy(update=update)
        requested: list[list[int]] = []
        prompt = Prompt(id="p", text="", token_ids=(9,) * 30, fields=fields)
        transcript = Transcript(prompt)
        play = self.agents.play(transcript, sampler(requested, turns), max_tokens)
        return transcript, self.runner.run(play), requested

    async def close(self) -> None:
        await self.agents.close()
        self.pool.close()


@pytest.fixture(scope="module")
def played(model: Path) -> Iterator[Played]:
    with asyncio.Runner() as runner:
        played = Played(runner, model)
        yield played
        runner.run(played.close())


def test_a_call_is_the_same_however_its_arguments_are_written() -> None:
    def called(arguments: str, **message: Any) -> Any:
        call = {"id": arguments, "function": {"name": "f", "arguments": arguments}}
        return identity({"role": "assistant", "tool_calls": [call], **message})

    assert called('{"a": 1}') == called('{ "a":1 }', content=None) == called('{"a":1}', content="")
    assert called('{"a": 1}') != called('{"a": 2}')
    assert called("no JSON") != called("no JSON ")
    assert called("no JSON") != called("no JSON", content="text")


def test_a_closed_endpoint_refuses_connections(model: Path) -> None:
    async def run() -> None:
        agents = Agents(MagicMock(), characters(model), MagicMock())
        await agents.start()
        port = int(agents._url.rpartition(":")[2])
        _, writer = await asyncio.open_connection("127.0.0.1", port)
        writer.close()
        await agents.close()
        with pytest.raises(ConnectionRefusedError):
            await asyncio.open_connection("127.0.0.1", port)

    asyncio.run(run())


def test_an_abandoned_call_enters_no_sample_and_delays_no_end(model: Path) -> None:
    """One call is sampled after its agent has ended, another call never."""

    async def run(agents: Agents) -> Transcript:
        begun: list[list[int]] = []
        sample, requested, answered = sampler(begun), asyncio.Event(), asyncio.Event()

        async def slowly(request: TurnRequest) -> Turn:
            if begun:
                requested.set()
                await answered.wait()
            turn: Turn = await sample(request)
            return turn

        def prompt(**fields: Any) -> Prompt:
            return Prompt(id="p", text="", token_ids=(9,) * 30, fields={"question": "?", **fields})

        transcript = Transcript(prompt(fault="abandons a call"))
        assert await agents.play(transcript, slowly, 400) is None
        await requested.wait()
        answered.set()
        while len(begun) < 2:
            await asyncio.sleep(0)
        for _ in range(100):
            await asyncio.sleep(0)
        answered.clear()
        requested.clear()
        endless = asyncio.create_task(agents.play(Transcript(prompt()), slowly, 400))
        await requested.wait()
        await asyncio.wait_for(agents.close(), 30)
        endless.cancel()
        await asyncio.gather(endless, return_exceptions=True)
        return transcript

    with asyncio.Runner() as runner:
        played = Played(runner, model)
        transcript = runner.run(run(played.agents))
        played.pool.close()
    assert [turn.text for turn in transcript.turns] == [CALLED]
    assert set(transcript.mask.tolist()) == {1}
    assert transcript.rewards(0.0)[1].tolist()[-1] == 3.0


def test_only_an_agent_without_a_pending_call_is_at_work(played: Played, tmp_path: Path) -> None:
    """Check the phases of the watchdog, which last until the time limit of the agent, and the count
    that the engine reports."""
    pool, seen = played.pool, []
    begun: list[list[int]] = []
    sample = sampler(begun)

    def now() -> tuple[int, list[float]]:
        phases = [one for one in watch.state()["activities"] if one["kind"] == "phase"]
        return pool.at_work, [one["deadline_s"] for one in phases]

    async def observe(request: TurnRequest) -> Turn:
        seen.append(now())
        turn: Turn = await sample(request)
        return turn

    async def run() -> None:
        fields = {"question": "?", "fault": "works alone", "until": str(tmp_path / "go")}
        transcript = Transcript(Prompt(id="p", text="", token_ids=(9,) * 30, fields=fields))
        playing = asyncio.create_task(played.agents.play(transcript, observe, 400))
        while not pool.at_work:
            await asyncio.sleep(0.01)
        seen.append(now())
        (tmp_path / "go").touch()
        assert await playing is None

    played.runner.run(run())
    alone, *in_calls = seen
    longest = pool.settings.timeout_s + AGENT_GRACE_S
    assert alone == (1, [pytest.approx(longest, abs=20)])
    assert in_calls == [(0, []), (0, [])]
    assert now() == (0, [])


def test_connections_without_a_session_are_limited(
    played: Played, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The oldest connections that sent nothing or part of a request are closed. An agent is
    served."""
    monkeypatch.setattr(endpoint, "MAX_UNNAMED", 4)

    async def ends(reader: asyncio.StreamReader) -> bool:
        with contextlib.suppress(ConnectionError):
            return await reader.read() == b""
        return True

    async def flood() -> list[asyncio.StreamWriter]:
        host, port = played.agents._url.removeprefix("http://").split(":")
        pairs = [await asyncio.open_connection(host, int(port)) for _ in range(7)]
        for _, writer in pairs[4:]:
            writer.write(b"POST /session/x/v1/chat/completions HTTP/1.1\r\nContent-Le")
        assert [await ends(reader) for reader, _ in pairs[:3]] == [True] * 3
        return [writer for _, writer in pairs]

    writers = played.runner.run(flood())
    connections = played.agents._connections
    assert connections is not None
    assert len(connections._unnamed) == 4
    transcript, error, _ = played(question="6*7?")
    assert error is None
    assert transcript.turns
    assert len(connections._unnamed) < 4, "the agent's connection does not count"
    for writer in writers:
        writer.close()


@pytest.mark.parametrize("max_segments", [1, 2])
def test_a_retried_call_receives_the_turn_sampled_for_it(
    played: Played, max_segments: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The sample equals the sample of an agent that waited longer."""
    patient, _, _ = played(question="6*7?", max_segments=max_segments)
    begun: list[list[int]] = []
    sample, session = sampler(begun), played.agents._session
    called: list[Any] = []
    monkeypatch.setattr(
        played.agents, "_session", lambda request: called.append(request) or session(request)
    )

    async def late(request: TurnRequest) -> Turn:
        while len(called) < 2:  # Until the agent has abandoned its call and retried it.
            await asyncio.sleep(0.01)
        turn: Turn = await sample(request)
        return turn

    fields = {"question": "6*7?", "fault": "retries"}
    transcript = Transcript(Prompt(id="p", text="", token_ids=(9,) * 30, fields=fields))
    assert played.runner.run(played.agents.play(transcript, late, 400)) is None
    assert len(called) == 3
    assert [turn.text for turn in transcript.turns] == [CALLED, "42"]
    assert transcript.text == patient.text
    assert transcript.tokens.response_ids.tolist() == patient.tokens.response_ids.tolist()
    assert transcript.mask.tolist() == patient.mask.tolist()


def test_a_call_repeated_after_its_response_begins_a_segment(played: Played) -> None:
    transcript, error, requested = played(question="6*7?", fault="repeats", max_segments=2)
    assert error is None
    assert requested[0] == requested[1]
    assert [[turn.text for turn in one.turns] for one in transcript.segments] == [[CALLED], ["42"]]


@pytest.mark.parametrize("stream", [False, True])
def test_a_session_is_one_sample_of_the_sampled_tokens(played: Played, stream: bool) -> None:
    tools = [{"type": "function", "function": {"name": "times"}}]
    body = {"tools": tools, "stream": stream}
    transcript, error, requested = played(question="6 times 7?", body=body)
    assert error is None
    prompt, response = transcript.prompt.token_ids, transcript.tokens.response_ids.tolist()
    assert read([*prompt, *response]) == (
        f"{json.dumps(tools)}<|user|>6 times 7?\x01\n<|assistant|>{CALLED}\x01"
        "\n<|tool|>42\x01\n<|assistant|>42\x01"
    )
    first, second = len(CALLED) + 1, 3
    words = len(response) - first - second
    assert transcript.mask.tolist() == [1] * first + [0] * words + [1] * second
    assert transcript.tokens.versions.tolist() == [1] * (first + words) + [2] * second
    assert requested == [list(prompt), [*prompt, *response[: first + words]]]
    reward, steps = transcript.rewards(0.0)
    assert (reward, steps[-1]) == (42.0, 42.0)
    assert transcript.measured == {"unread_tool_calls": 0}


def test_an_unread_tool_call_is_counted_and_returned_as_text(
    played: Played,
) -> None:
    fields = {"question": "?", "body": {"tools": [{"type": "function", "function": {"name": "f"}}]}}
    transcript, error, _ = played(turns=[f"{CALLED}<tool_call>no", "42"], **fields)
    assert error is not None
    assert "could not convert string to float: '<tool_call>" in error
    assert transcript.measured == {"unread_tool_calls": 1}


def test_a_stop_string_of_an_agent_ends_its_turn(played: Played) -> None:
    requests: list[TurnRequest] = []
    sample = sampler([], ["42:", "42:"])

    async def record(requested: TurnRequest) -> Turn:
        requests.append(requested)
        turn: Turn = await sample(requested)
        return turn

    # The end of a turn ends every response, also as a stop string.
    fields = {"question": "?", "body": {"stop": [":", "<end>"]}}
    transcript = Transcript(Prompt(id="p", text="", token_ids=(9,) * 30, fields=fields))
    assert played.runner.run(played.agents.play(transcript, record, 400)) is None
    assert [list(one.stop) for one in requests] == [[":", "<end>"]]
    assert read(transcript.tokens.response_ids) == "42:\x01"
    assert transcript.rewards(0.0)[0] == 42.0  # The agent received 42.


def test_tool_choice_none_disables_tool_calls(played: Played) -> None:
    tools = [{"type": "function", "function": {"name": "times"}}]
    fields = {"question": "?", "body": {"tools": tools, "tool_choice": "none"}}
    transcript, error, _ = played(**fields)
    assert error is not None
    assert "could not convert string to float: '<tool_call>" in error
    assert (len(transcript.turns), dict(transcript.measured)) == (1, {})


def test_an_agent_that_reformats_its_messages_continues(played: Played) -> None:
    transcript, error, _ = played(question="6*7?", fault="rewrites")
    assert (error, len(transcript.segments), len(transcript.turns)) == (None, 1, 2)
    assert "<|user|>6*7?\x01" in read(transcript.prompt.token_ids)


def test_a_stream_has_token_counts_only_on_request(played: Played) -> None:
    """Other clients read only the first choice of each chunk."""
    for requested in (False, True):
        fields = {"question": "?", "fault": "reads chunks", "usage": requested}
        transcript, error, _ = played(**fields)
        assert (error, transcript.rewards(0.0)[0]) == (None, 1.0)


CALLS_NOTHING = {"role": "assistant", "tool_calls": [{"id": "1", "function": None}]}


@looped(
    ("fields", "what"),
    [
        ({"fault": "silent"}, "ended without a turn of the model"),
        ({"fault": "forgets"}, r"does not repeat the earlier messages.*messages\[0\] differs"),
        ({"fault": "retools"}, "its tools differ from the tools of the previous call"),
        ({"body": {"n": 2}}, "n must be 1"),
        ({"body": {"max_tokens": -1}}, "max_tokens must be a whole number above 0, not -1"),
        ({"body": {"max_tokens": 0}}, "max_tokens must be a whole number above 0, not 0"),
        ({"body": {"top_logprobs": 3}}, "only the log-prob of each sampled token is available"),
        ({"body": {"structured_outputs": {"regex": "a+"}}}, "structured_outputs constrains"),
        ({"body": {"guided_choice": ["a", "b"]}}, "guided_choice constrains sampling"),
        ({"body": {"logit_bias": {"7": 100}}}, "logit_bias constrains sampling"),
        (
            {"body": {"chat_template_kwargs": {"enable_thinking": False}}},
            r"chat_template_kwargs: .* set .*data\.chat_template_options for all calls",
        ),
        ({"body": {"continue_final_message": True}}, "every turn is a new message"),
        ({"body": {"add_generation_prompt": False}}, "every turn is a new message"),
        ({"body": {"tools": ["times"]}}, "tools must be a list of functions with their schemas"),
        ({"body": {"tools": [{"type": "function"}]}}, r"(?s)tools must be .*tools\.0\.function"),
        ({"body": {"tool_choice": "required"}}, "'required' constrains .*'auto' or 'none'"),
        ({"body": {"tool_choice": {"type": "function"}}}, "tool_choice: 'function' constrains"),
        ({"body": {"response_format": {"type": "json_object"}}}, "'json_object' .*'text'"),
        ({"body": {"functions": [{"name": "f"}]}}, "send tools"),
        ({"body": {"stop": [7]}}, r"stop must be text, or a list of texts, not \[7\]"),
        ({"body": {"stop": ["x", "a<turn>"]}}, "stop 'a<turn>' contains the special token 2"),
        ({"body": {"messages": [{"role": "user", "tool_calls": "f"}]}}, "tool_calls must be"),
        ({"body": {"messages": [CALLS_NOTHING]}}, "function whose name and arguments are text"),
        ({"body": {"messages": []}}, "messages must be a list of messages"),
        ({"body": {"messages": "?"}}, "messages must be a list of messages"),
        ({"body": {"messages": ["?"]}}, r"messages\[0\] is not an object with a role"),
        (
            {"body": {"messages": [{"role": "user"}, {"role": None}]}},
            r"messages\[1\] is not an object with a role",
        ),
        ({"question": "?" * 500}, "the sample is at its limit, rollout.sampling.max_tokens: 400"),
        (
            {"question": [{"type": "image_url"}]},
            r"messages\[0\] has content\[0\] of type image_url",
        ),
    ],
)
def test_a_refused_call_fails_the_sample_and_is_named(
    played: Played, fields: dict[str, Any], what: str
) -> None:
    transcript, error, _ = played(**{"question": "?", **fields})
    assert error is not None
    with pytest.raises(ValueError, match=what):
        raise ValueError(error)
    assert len(transcript.turns) == (fields.get("fault") in ("forgets", "retools"))


@pytest.mark.parametrize(
    ("path", "status", "what"),
    [
        ("/v1/responses", 404, "only POST BASE_URL/chat/completions and GET BASE_URL/models"),
        ("/chat/completions", 404, "only POST BASE_URL/chat/completions and GET BASE_URL/models"),
        ("/v1/v1/chat/completions", 404, "POST /session/.*/v1/v1/chat/completions: the endpoint"),
        ("/v1/chat/completions", 413, "the call has more than 0 MiB"),
    ],
)
def test_an_unknown_path_returns_an_error_and_fails_the_sample(
    played: Played, monkeypatch: pytest.MonkeyPatch, path: str, status: int, what: str
) -> None:
    """Errors have the format of OpenAI's servers, which OpenAI's clients read."""
    monkeypatch.setattr(endpoint, "MAX_REQUEST_BYTES", 1000)

    async def sample(request: TurnRequest) -> Turn:
        raise AssertionError

    async def run() -> str | None:
        agents = Agents(played.pool, played.agents._tokenizer, played.agents._parser)
        await agents.start()
        fields = {"question": "?" * 2000, "fault": "requests another path", "path": path}
        transcript = Transcript(Prompt(id="p", text="", token_ids=(9,) * 30, fields=fields))
        try:
            return await agents.play(transcript, sample, 400)
        finally:
            await agents.close()

    error = played.runner.run(run())
    assert error is not None
    response = json.loads(error.partition("ValueError: ")[2].partition(" (a call")[0])
    fields = (response["status"], response["type"], response["code"])
    assert fields == (status, "invalid_request_error", None)
    assert re.search(what, response["message"])


def test_the_error_of_a_full_sample_has_the_code_of_openai(played: Played) -> None:
    fields = {
        "question": "?" * 500,
        "fault": "requests another path",
        "path": "/v1/chat/completions",
    }
    _, error, _ = played(**fields)
    assert error is not None
    assert '"code": "context_length_exceeded"' in error


class LocalAgent:
    """Agent in the process of the endpoint. `talk`: receives a client and the base URL."""

    def __init__(self, talk: Callable[[ClientSession, str], Awaitable[float]]) -> None:
        self._talk = talk

    async def run(self, prompt: Prompt, base_url: str) -> float:
        async with ClientSession() as client:
            return await self._talk(client, base_url)

    async def close(self) -> None:
        pass


@pytest.fixture
def talked(played: Played, monkeypatch: pytest.MonkeyPatch) -> Any:
    """Return a function that plays a sample of a LocalAgent: its transcript, error and requests."""

    def play(
        talk: Callable[[ClientSession, str], Awaitable[float]], max_tokens: int = 400
    ) -> tuple[Transcript, str | None, list[list[int]]]:
        async def opened() -> LocalAgent:
            return LocalAgent(talk)

        monkeypatch.setattr(played.pool, "open", opened)
        return played(max_tokens=max_tokens)

    return play


async def refusal(response: Any) -> tuple[int, str, str | None]:
    """Return status, message and code of an error."""
    error = (await response.json())["error"]
    return response.status, error["message"], error["code"]


def test_a_body_that_is_not_a_json_object_is_refused(talked: Any) -> None:
    refused = []

    async def talk(client: ClientSession, url: str) -> float:
        for body in (b"[1]", b"{", b"[" * 100_000):
            async with client.post(f"{url}/chat/completions", data=body) as response:
                refused.append(await refusal(response))
        return 1.0

    _, error, requested = talked(talk)
    what = "the call is not a JSON object"
    assert refused[0] == (400, what, None)
    assert [status for status, _, _ in refused] == [400] * 3
    for (_, message, _), reason in zip(refused[1:], ("Expecting", "maximum rec"), strict=True):
        assert message.startswith(f"{what}: {reason}")
    assert error is not None
    assert error.endswith(f"(a call was refused: {refused[-1][1]})")
    assert requested == []


def test_an_agent_can_list_the_model(talked: Any) -> None:
    listed = []

    async def talk(client: ClientSession, url: str) -> float:
        for path in ("/models", "/models/any"):
            async with client.get(url + path) as response:
                listed.append(await response.json())
        return 1.0

    talked(talk)
    model = {"id": "policy", "object": "model", "created": 0, "owned_by": "megatron_async_rl"}
    assert listed == [{"object": "list", "data": [model]}, model]


def test_a_request_after_the_end_of_its_agent_is_refused(played: Played, talked: Any) -> None:
    urls = []

    async def talk(client: ClientSession, url: str) -> float:
        urls.append(url)
        return 1.0

    async def request() -> list[Any]:
        async with ClientSession() as client:
            body = {"messages": [{"role": "user", "content": "?"}]}
            async with (
                client.get(f"{urls[0]}/models") as models,
                client.post(f"{urls[0]}/chat/completions", json=body) as completed,
            ):
                return [await refusal(models), await refusal(completed)]

    talked(talk)
    ended = (404, "the session does not exist, or its agent has ended", None)
    assert played.runner.run(request()) == [ended, ended]


def test_a_huge_message_is_refused_before_it_is_tokenized(
    played: Played, talked: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The first message of a segment, and a message after a turn."""
    refused = []

    async def talk(client: ClientSession, url: str) -> float:
        huge = {"role": "user", "content": "?" * 100_000}
        messages = [{"role": "user", "content": "?"}]

        async def post(*messages: Any) -> Any:
            body = {"messages": messages}
            async with client.post(f"{url}/chat/completions", json=body) as response:
                if response.status != 200:
                    return refused.append(await refusal(response))
                return (await response.json())["choices"][0]["message"]

        await post(huge)
        messages.append(await post(*messages))
        await post(*messages, huge)
        return 1.0

    tokenizer = played.agents._tokenizer
    encode = tokenizer.encode_rendered
    encoded: list[int] = []
    monkeypatch.setattr(
        tokenizer, "encode_rendered", lambda text: encoded.append(len(text)) or encode(text)
    )
    transcript, error, _ = talked(talk)
    limit = "the sample is at its limit, rollout.sampling.max_tokens: 400"
    code = "context_length_exceeded"
    assert refused == [(400, f"{code}: {limit}", code)] * 2
    assert (error, len(transcript.turns), transcript.truncated) == (None, 1, True)
    assert max(encoded) < 1000


def test_tools_that_the_template_does_not_read_are_refused(tmp_path: Path) -> None:
    """Otherwise, the model would not receive them."""
    template = TEMPLATE.removeprefix("{% if tools %}{{ tools | tojson }}{% endif %}")
    with asyncio.Runner() as runner:
        played = Played(runner, tmp_path, template)
        tools = [{"type": "function", "function": {"name": "times"}}]
        transcript, error, _ = played(question="?", body={"tools": tools})
        runner.run(played.close())
    assert error is not None
    assert "has a chat template that does not read `tools`" in error
    assert not transcript.turns


def test_an_agent_may_run_an_event_loop_of_its_own(played: Played) -> None:
    transcript, error, _ = played(question="6*7?", fault="has a loop")
    assert error is None
    assert transcript.rewards(0.0)[0] == 42.0


def test_a_call_that_continues_no_segment_begins_a_new_one(played: Played) -> None:
    """The agent calls the model, calls a tool, keeps only a summary, and calls the model twice.
    Then it continues its first thread."""
    transcript, error, requested = played(question="6*7?", fault="compacts", max_segments=2)
    assert error is None
    first, second = transcript.segments
    assert read(first.prompt.token_ids) == "<|user|>6*7?\x01\n<|assistant|>"
    assert read(first.ids[len(first.prompt.token_ids) :]) == (
        f"{CALLED}\x01\n<|user|>so?\x01\n<|assistant|>42\x01"
    )
    assert read(second.prompt.token_ids) == "<|user|>it was 42\x01\n<|assistant|>"
    assert read(second.ids[len(second.prompt.token_ids) :]) == (
        f"42\x01\n<|user|>sure?\x01\n<|assistant|>{CALLED}\x01"
    )
    # Each turn was sampled after exactly the tokens of its segment.
    sampled = [turn.tokens.response_ids.tolist() for turn in transcript.turns]
    assert [[*one, *two] for one, two in zip(requested, sampled, strict=True)] == [
        first.ids[: len(requested[0]) + len(sampled[0])],
        second.ids[: len(requested[1]) + len(sampled[1])],
        second.ids,
        first.ids,
    ]

    response, mask = transcript.tokens.response_ids, transcript.mask
    assert transcript.segment_starts is not None
    (start,) = transcript.segment_starts.tolist()
    assert start == first.length
    assert response.tolist() == [*first.ids[len(first.prompt.token_ids) :], *second.ids]
    assert mask.sum() == sum(map(len, sampled))
    context = slice(start, start + len(second.prompt.token_ids))
    assert not mask[context].any()
    versions = transcript.tokens.versions
    assert set(versions[:start].tolist()) == {1, 4}
    assert versions[start:].tolist() == sorted(versions[start:].tolist())
    assert set(versions[context].tolist()) == {2}
    reward, steps = transcript.rewards(0.0)
    assert (reward, steps[-1], np.count_nonzero(steps)) == (7.0, 7.0, 1)
    assert "[segment] <|user|>it was 42<end>" in transcript.text


def test_a_segment_above_the_limit_is_refused(played: Played) -> None:
    _, error, _ = played(question="6*7?", fault="compacts", max_segments=1)
    assert error is not None
    assert "segment 2 of the sample; rollout.environment.max_segments: 1" in error


def test_no_segment_is_longer_than_a_sample_of_the_run(played: Played) -> None:
    """An agent whose first thread is full may continue with a shorter one."""
    transcript, error, _ = played(
        question="6*7?", fault="compacts when full", max_tokens=len(CALLED) + 1, max_segments=2
    )
    assert (error, transcript.reason) == (None, "stop")
    requested = len(transcript.requested.token_ids)
    for segment in transcript.segments:
        assert len(segment.ids) <= requested + len(CALLED) + 1
    assert len(transcript.segments) == 2


def test_a_sample_without_room_for_another_call_is_truncated(
    played: Played,
) -> None:
    for maximum in (len(CALLED) + 3, len(CALLED) + 10):
        transcript, error, _ = played(max_tokens=maximum, question="?")
        assert (error, transcript.truncated) == (None, True)
        assert transcript.mask[-1] == 1
        assert transcript.text.count("[environment") == 0  # Of the refused call.
        assert transcript.length <= maximum


def test_a_program_may_be_an_agent(model: Path, tmp_path: Path) -> None:
    file = tmp_path / "agent.py"
    file.write_text(
        "import json, os, sys\n"
        f"sys.path.insert(0, {str(Path(__file__).parents[2])!r})\n"
        "from tests.unit.agents import complete\n"
        "prompt = json.loads(sys.stdin.read(), parse_constant=str)\n"
        "assert prompt['fields']['hardness'] is None\n"
        "response = complete(os.environ['OPENAI_BASE_URL'], messages=[\n"
        "    {'role': 'user', 'content': prompt['fields']['question']}])\n"
        "print('done')\n"
        "print(len(response['choices'][0]['message']['tool_calls']))\n"
    )
    with asyncio.Runner() as runner:
        played = Played(runner, model, settings={"command": [sys.executable, str(file)]})
        transcript, error, _ = played(question="?", hardness=float("nan"))
        runner.run(played.close())
    assert error is None
    assert transcript.rewards(0.0)[0] == 1.0


def test_a_brace_does_not_begin_a_call_that_begins_with_a_token(tmp_path: Path) -> None:
    """Llama's parser reports an error for each brace that does not begin JSON."""
    save_characters(tmp_path, special=["<|python_tag|>"])
    tokenizer = AutoTokenizer.from_pretrained(tmp_path)
    parser = ToolParser("llama3_json", tmp_path, (1,))

    def message(text: str) -> dict[str, Any]:
        return parser.message(tokenizer.encode(text), text)

    text = "the answer is \\boxed{42}"
    assert message(text) == {"role": "assistant", "content": text}
    assert UNREAD in message("<|python_tag|>{broken}")


def test_text_without_a_valid_call_stays_text(model: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    parser = ToolParser("hermes", model, (1,))
    logged: list[logging.LogRecord] = []
    handler = logging.Handler()
    monkeypatch.setattr(handler, "emit", logged.append)
    monkeypatch.setattr(logging.getLogger("vllm"), "handlers", [handler])

    def message(text: str, parser: ToolParser = parser) -> dict[str, Any]:
        return parser.message([*map(ord, text), 1], text)

    text = "the answer is 42"
    assert message(text) == {"role": "assistant", "content": text}
    text = "<tool_call>{broken}</tool_call>"
    parsed = message(text)
    assert parsed.pop(UNREAD).startswith("JSONDecodeError: Expecting property name")
    assert parsed == {"role": "assistant", "content": text}
    assert logged == [], "a policy samples thousands of such texts"
    monkeypatch.setattr(parser._parser, "extract_tool_calls", MagicMock(side_effect=KeyError("id")))
    assert message(text) == {"role": "assistant", "content": text, UNREAD: "KeyError: 'id'"}
    monkeypatch.undo()
    parsed = message(f"let me see {CALLED}{CALLED}")
    assert parsed["content"] == "let me see "
    assert [json.loads(call["function"]["arguments"]) for call in parsed["tool_calls"]] == [
        {"a": 6, "b": 7}
    ] * 2


@pytest.mark.parametrize("name", ["qwen3_coder", "mimo", "minimax_m2", "seed_oss"])
def test_a_call_that_a_parser_ignores_is_unread(tmp_path: Path, name: str) -> None:
    marks = ("<tool_call>", "<minimax:tool_call>", "<seed:tool_call>")
    ends = [mark.replace("<", "</", 1) for mark in marks]
    save_characters(tmp_path, special=[*marks, *ends])
    tokenizer = AutoTokenizer.from_pretrained(tmp_path)
    parser = ToolParser(name, tmp_path, (1,))
    (begin,) = [one for one in marks if one in parser._begins]

    def message(text: str) -> dict[str, Any]:
        return parser.message(tokenizer.encode(text), text)

    for text in ("a call of a function", "1 < 2 and function=2"):
        assert message(text) == {"role": "assistant", "content": text}
    assert begin in message(f"let me see {begin}times of 6 and 7")[UNREAD]


def test_the_marks_of_a_parsers_calls_are_known() -> None:
    """Parsers without marks read lists in brackets or do not publish their marks. A word is not a
    mark."""
    from vllm.tool_parsers import ToolParserManager

    class Whatever(dict[str, int]):
        def get(self, name: str, otherwise: object = None) -> int:
            return 7

        def __contains__(self, name: object) -> bool:
            return True

        def __missing__(self, name: str) -> int:
            return 7

    tokenizer: Any = MagicMock(is_tekken=True, version=13, vocab=Whatever(), init_kwargs={})
    tokenizer.get_vocab = Whatever
    without = set()
    for name in tool_parsers():
        parser = ToolParserManager.get_tool_parser(name)(tokenizer, None)
        if not call_beginnings(parser):
            without.add(name)
    assert without <= {
        *("apertus", "gigachat3", "hy_v4", "internlm", "lfm2", "llama4_pythonic"),
        *("muse_glimmer", "olmo3", "phi4_mini_json", "pythonic", "xlam"),
    }


def test_a_call_may_be_between_special_tokens(tmp_path: Path) -> None:
    model = save_characters(tmp_path, special=("<tool_call>", "</tool_call>"))
    call = CALLED.removeprefix("<tool_call>").removesuffix("</tool_call>")
    parsed = ToolParser("hermes", model, (1,)).message([2, *map(ord, call), 3, 1], call)
    assert [one["function"]["name"] for one in parsed["tool_calls"]] == ["times"]


def test_tool_parsers_are_those_of_vllm_that_read_text(model: Path) -> None:
    from vllm.tool_parsers import ToolParserManager

    def reads(name: str) -> bool:
        try:
            parser = ToolParserManager.get_tool_parser(name)
            parser.extract_tool_calls(parser.__new__(parser), "", None)
        except NotImplementedError:
            return False
        except Exception:  # noqa: BLE001 - it would not fail for a model with its tokens
            return True
        return True

    assert [one for one in ToolParserManager.list_registered() if reads(one)] == [*tool_parsers()]
    with pytest.raises(EnvironmentRefused, match="jamba does not support this model"):
        ToolParser("jamba", model, (1,))
    with pytest.raises(EnvironmentRefused, match="no tool parser 'hermess'; did you mean 'hermes'"):
        load_factory(EnvironmentConfig(name="agent", settings=FUNCTION, tool_parser="hermess"))


@pytest.mark.parametrize(
    ("settings", "what"),
    [
        ({}, "set either `function`"),
        ({"function": "tests.unit.agents:walk"}, "has no attribute 'walk'"),
        ({"program": "x"}, "unexpected keyword argument"),
    ],
)
def test_invalid_settings_of_an_agent_are_refused(settings: dict[str, Any], what: str) -> None:
    with pytest.raises(EnvironmentRefused) as refused:
        load_factory(EnvironmentConfig(name="agent", settings=settings))
    assert refused.value.where == "rollout.environment.settings"
    assert what in refused.value.what

"""Agents at the OpenAI-compatible endpoint: a session is one sample, token by token."""

import asyncio
import json
import sys
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import jinja2
import numpy as np
import pytest

from megatron_async_rl.config.environment import EnvironmentConfig
from megatron_async_rl.rollout.environments.conversation import Transcript, Turn
from megatron_async_rl.rollout.environments.endpoint import Agents, parsed
from megatron_async_rl.rollout.environments.pool import Environments
from megatron_async_rl.rollout.environments.protocol import EnvironmentRefused, load_factory
from megatron_async_rl.samples import Prompt
from megatron_async_rl.samples.types import PartialResponse

TEMPLATE = (
    "{% for m in messages %}<|{{ m.role }}|>{{ m.content }}<end>\n{% endfor %}"
    "{% if add_generation_prompt %}<|assistant|>{% endif %}"
)
CALLED = '<tool_call>{"name": "times", "arguments": {"a": 6, "b": 7}}</tool_call>'
SAYS = [CALLED, "42"]
FUNCTION = {"function": "tests.unit.agents:run"}


class Characters:
    """One token a character; <end> is token 1."""

    eos_ids = (1,)

    def render_chat(self, messages: Any, *, answer: bool, tools: Any = None) -> str:
        said = jinja2.Template(TEMPLATE).render(messages=messages, add_generation_prompt=answer)
        return f"{json.dumps(tools)}{said}" if tools else said

    def encode_rendered(self, text: str) -> list[int]:
        return [ord(one) for one in text.replace("<end>", "\x01")]

    def decode(self, ids: Sequence[int]) -> str:
        return "".join(map(chr, ids)).replace("\x01", "")


def sampler(asked: list[list[int]]) -> Any:
    async def sample(ids: Sequence[int], begun: int, most: int) -> Turn:
        asked.append(list(ids))
        whole = [*map(ord, SAYS[(len(asked) - 1) % 2]), 1]
        tokens = PartialResponse(
            response_ids=np.array(whole[:most], dtype=np.int32),
            behavior_logprobs=np.full(min(most, len(whole)), -0.5, dtype=np.float32),
            versions=np.full(min(most, len(whole)), len(asked), dtype=np.int32),
        )
        text = Characters().decode(whole[:most])
        return Turn(tokens=tokens, text=text, reason="stop" if most >= len(whole) else "length")

    return sample


class Played:
    def __init__(self, runner: asyncio.Runner) -> None:
        self.runner = runner
        runner.run(self._start(FUNCTION))

    async def _start(self, settings: dict[str, Any]) -> None:
        config = EnvironmentConfig(name="agent", settings=settings, processes=2)
        self.pool = Environments(config)
        self.pool.start()
        tokenizer: Any = Characters()
        self.agents = Agents(self.pool, tokenizer)
        await self.agents.start()

    def __call__(
        self, max_tokens: int = 400, **fields: Any
    ) -> tuple[Transcript, str | None, list[list[int]]]:
        asked: list[list[int]] = []
        prompt = Prompt(id="p", text="", token_ids=(9,) * 30, fields=fields)
        transcript = Transcript(prompt)
        play = self.agents.play(transcript, sampler(asked), max_tokens)
        return transcript, self.runner.run(play), asked

    async def close(self) -> None:
        await self.agents.close()
        self.pool.close()


@pytest.fixture(scope="module")
def played() -> Iterator[Played]:
    with asyncio.Runner() as runner:
        played = Played(runner)
        yield played
        runner.run(played.close())


@pytest.mark.parametrize("stream", [False, True])
def test_an_agents_session_is_one_sample_of_what_was_sampled(played: Played, stream: bool) -> None:
    tools = [{"type": "function", "function": {"name": "times"}}]
    body = {"tools": tools, "stream": stream}
    transcript, error, asked = played(question="6 times 7?", body=body)
    assert error is None
    prompt, response = transcript.prompt.token_ids, transcript.tokens.response_ids.tolist()
    text = "".join(map(chr, [*prompt, *response]))
    assert text == (
        f"{json.dumps(tools)}<|user|>6 times 7?\x01\n<|assistant|>{CALLED}\x01"
        "\n<|tool|>42\x01\n<|assistant|>42\x01"
    )
    first, second = len(CALLED) + 1, 3
    words = len(response) - first - second
    assert transcript.mask.tolist() == [1] * first + [0] * words + [1] * second
    assert transcript.tokens.versions.tolist() == [1] * (first + words) + [2] * second
    assert asked == [list(prompt), [*prompt, *response[: first + words]]]
    reward, steps = transcript.rewards(0.0)
    assert (reward, steps[-1]) == (42.0, 42.0)


@pytest.mark.parametrize(
    ("fields", "what"),
    [
        ({"fault": "silent"}, "ended without a call"),
        ({"fault": "forgets"}, r"does not repeat what was said before.*messages\[0\] differs"),
        ({"body": {"n": 2}}, "n must be 1"),
        ({"question": ["?"]}, "content must be text"),
    ],
)
def test_a_call_that_makes_no_sample_costs_it_and_is_named(
    played: Played, fields: dict[str, Any], what: str
) -> None:
    _, error, _ = played(**{"question": "?", **fields})
    assert error is not None
    with pytest.raises(ValueError, match=what):
        raise ValueError(error)


def test_a_sample_that_has_no_room_for_another_call_is_cut_and_not_in_error(
    played: Played,
) -> None:
    for most in (len(CALLED) + 3, len(CALLED) + 10):
        transcript, error, _ = played(max_tokens=most, question="?")
        assert (error, transcript.truncated) == (None, True)
        assert transcript.mask[-1] == 1
        assert transcript.length <= most


def test_a_program_is_an_agent_too(tmp_path: Path) -> None:
    file = tmp_path / "agent.py"
    file.write_text(
        "import json, os, sys\n"
        f"sys.path.insert(0, {str(Path(__file__).parents[2])!r})\n"
        "from tests.unit.agents import ask\n"
        "asked = json.load(sys.stdin)\n"
        "said = ask(os.environ['OPENAI_BASE_URL'], messages=[\n"
        "    {'role': 'user', 'content': asked['fields']['question']}])\n"
        "print('done')\n"
        "print(len(said['choices'][0]['message']['tool_calls']))\n"
    )
    with asyncio.Runner() as runner:
        played = Played.__new__(Played)
        played.runner = runner
        runner.run(played._start({"command": [sys.executable, str(file)]}))
        transcript, error, _ = played(question="?")
        runner.run(played.close())
    assert error is None
    assert transcript.rewards(0.0)[0] == 1.0


def test_what_is_no_call_stays_text() -> None:
    assert parsed("the answer is 42") == ("the answer is 42", [])
    assert parsed("<tool_call>{broken}</tool_call>") == ("<tool_call>{broken}</tool_call>", [])
    content, calls = parsed(f"let me see {CALLED}{CALLED}")
    assert (content, len(calls)) == ("let me see", 2)
    assert json.loads(calls[0]["function"]["arguments"]) == {"a": 6, "b": 7}


@pytest.mark.parametrize(
    ("settings", "what"),
    [
        ({}, "give either `function`"),
        ({"function": "tests.unit.agents:walk"}, "has no attribute 'walk'"),
        ({"program": "x"}, "unexpected keyword argument"),
    ],
)
def test_an_agent_that_cannot_be_is_refused(settings: dict[str, Any], what: str) -> None:
    with pytest.raises(EnvironmentRefused) as refused:
        load_factory(EnvironmentConfig(name="agent", settings=settings))
    assert refused.value.where == "rollout.environment.settings"
    assert what in refused.value.what

"""An OpenAI-compatible endpoint of an engine: an existing agent becomes a rollout by its base URL.

    process of the agent --POST {base_url}/chat/completions--> Agents --> the engine, turn by turn
          +---------------------- its reward ------------------> the sample

A session is one sample: its base URL names it. The first call's messages become the prompt, and
every later call must repeat what was said before and add to it, which is all that is rendered: so
token in, token out holds as for any conversation (conversation.py).

Invariants:
- the server runs on the engine's event loop and listens on this machine alone; a session's name
  cannot be guessed, and is unknown once its agent has ended;
- how responses are drawn is the run's affair (rollout.sampling): a call's temperature and the like
  are read over, and what would need more than one sample is refused.
"""

from __future__ import annotations

import asyncio
import json
import re
import secrets
import time
from collections.abc import Mapping, Sequence
from typing import Any

import jinja2
from aiohttp import web

from megatron_async_rl.config.problem import DataError
from megatron_async_rl.data.tokenizer import Tokenizer
from megatron_async_rl.rollout.environments.conversation import ChatMessages, Sample, Transcript
from megatron_async_rl.rollout.environments.pool import EnvironmentFailed, Environments
from megatron_async_rl.rollout.environments.protocol import Message, Step
from megatron_async_rl.samples.types import Prompt

MODEL = "policy"
"""Name of the model; a call may give any."""
CALL = re.compile(r"<tool_call>\s*(\{.*?\})\s*</tool_call>", re.DOTALL)
"""A tool call in a response, as Hermes and Qwen write it: JSON with `name` and `arguments`."""


class Refused(Exception):
    """A call that cannot be answered; the agent gets the text with status 400."""


def parsed(text: str) -> tuple[str | None, list[dict[str, Any]]]:
    """A response's content and its tool calls. A call that is no JSON object with a name stays
    text."""
    calls: list[dict[str, Any]] = []

    def taken(match: re.Match[str]) -> str:
        try:
            said = json.loads(match[1])
            name, arguments = said["name"], said.get("arguments", {})
        except (ValueError, KeyError, TypeError):
            return match[0]
        given = arguments if isinstance(arguments, str) else json.dumps(arguments)
        calls.append(
            {
                "id": f"call_{secrets.token_hex(8)}",
                "type": "function",
                "function": {"name": str(name), "arguments": given},
            }
        )
        return ""

    content = CALL.sub(taken, text)
    return (content.strip() or None) if calls else content, calls


def _same(message: Message) -> tuple[Any, ...]:
    """What two forms of one message share: clients add keys that are null, and other ids."""
    calls = []
    for call in message.get("tool_calls") or ():
        function = call.get("function", {})
        calls.append((function.get("name"), function.get("arguments")))
    return message.get("role"), message.get("content") or "", tuple(calls)


class _Session:
    def __init__(
        self, transcript: Transcript, sample: Sample, max_tokens: int, max_turns: int
    ) -> None:
        self.transcript, self.sample = transcript, sample
        self.max_tokens, self.max_turns = max_tokens, max_turns
        self.said: list[Message] = []
        self.tools: Any = None
        self.lock = asyncio.Lock()
        self.refusal: str | None = None


class Agents:
    """Used by one event loop. Call `start` first."""

    def __init__(self, environments: Environments, tokenizer: Tokenizer) -> None:
        """Raises DataError where the chat template does not permit a second turn."""
        self._environments = environments
        self._tokenizer = tokenizer
        self._follow = ChatMessages(tokenizer)
        self._sessions: dict[str, _Session] = {}
        self._runner: web.AppRunner | None = None
        self._url = ""

    async def start(self) -> None:
        app = web.Application(client_max_size=64 * 2**20)
        app.router.add_post("/session/{name}/v1/chat/completions", self._complete)
        app.router.add_get("/session/{name}/v1/models", self._models)
        self._runner = web.AppRunner(app, access_log=None)
        await self._runner.setup()
        await web.TCPSite(self._runner, "127.0.0.1", 0).start()
        self._url = f"http://127.0.0.1:{self._runner.addresses[0][1]}"

    async def close(self) -> None:
        if self._runner is not None:
            await self._runner.cleanup()

    async def play(self, transcript: Transcript, sample: Sample, max_tokens: int) -> str | None:
        """Runs the agent, whose calls fill `transcript`; why it ended early, where it failed."""
        most = self._environments.settings.max_turns
        session, name = _Session(transcript, sample, max_tokens, most), secrets.token_urlsafe(16)
        process = None
        try:
            process = await self._environments.open()
            self._sessions[name] = session
            reward = await process.run(transcript.prompt, f"{self._url}/session/{name}/v1")
        except EnvironmentFailed as error:
            # An agent that is told that there is no room left may well raise.
            if transcript.truncated:
                return None
            return (
                f"{error} (a call was refused: {session.refusal})"
                if session.refusal
                else str(error)
            )
        finally:
            self._sessions.pop(name, None)
            if process is not None:
                await process.close()
        if not transcript.turns:
            return "the agent ended without a call of the model"
        transcript.take_step(Step(reward=reward, done=True))
        return None

    def _session(self, request: web.Request) -> _Session:
        session = self._sessions.get(request.match_info["name"])
        if session is None:
            raise web.HTTPNotFound(
                text=json.dumps({"error": {"message": "no such session, or its agent has ended"}}),
                content_type="application/json",
            )
        return session

    async def _models(self, request: web.Request) -> web.Response:
        self._session(request)
        model = {"id": MODEL, "object": "model", "created": 0, "owned_by": "megatron_async_rl"}
        return web.json_response({"object": "list", "data": [model]})

    async def _complete(self, request: web.Request) -> web.StreamResponse:
        session = self._session(request)
        try:
            body = await request.json()
            async with session.lock:
                answer = await self._answer(session, body)
            if body.get("stream"):
                return await _streamed(request, answer)
            return web.json_response(answer)
        except Refused as error:
            session.refusal = str(error)
        except (DataError, jinja2.TemplateError) as error:
            session.refusal = f"the messages cannot be rendered: {error}"
        except ValueError as error:
            session.refusal = f"the call is no JSON object: {error}"
        return web.json_response(
            {"error": {"message": session.refusal, "type": "invalid_request_error"}}, status=400
        )

    async def _answer(self, session: _Session, body: Any) -> dict[str, Any]:
        messages = _checked(body)
        transcript = session.transcript
        if not transcript.turns:
            self._open(session, messages, body.get("tools"))
        else:
            self._continue(session, messages, body.get("tools"))
        budget = session.max_tokens - max(0, transcript.opening) - transcript.length
        if budget < 1 or len(transcript.turns) == session.max_turns:
            transcript.truncated = True
            transcript.drop_words()
            limit = (
                f"rollout.sampling.max_tokens: {session.max_tokens}"
                if budget < 1
                else f"rollout.environment.max_turns: {session.max_turns}"
            )
            raise Refused(f"context_length_exceeded: the sample is at its limit, {limit}")
        asked = body.get("max_completion_tokens") or body.get("max_tokens") or budget
        most = min(budget, int(asked))
        turn = await session.sample(transcript.ids, transcript.length, most)
        transcript.take_turn(turn)
        if turn.reason == "length" and most == budget:
            transcript.truncated = True
        content, calls = parsed(turn.text)
        message: dict[str, Any] = {"role": "assistant", "content": content}
        if calls:
            message["tool_calls"] = calls
        session.said = [*messages, message]
        choice: dict[str, Any] = {"index": 0, "message": message}
        choice["finish_reason"] = (
            "length" if turn.reason == "length" else "tool_calls" if calls else "stop"
        )
        if body.get("logprobs"):
            choice["logprobs"] = {
                "content": [
                    {
                        "token": self._tokenizer.decode([token]),
                        "logprob": logprob,
                        "top_logprobs": [],
                    }
                    for token, logprob in zip(
                        turn.tokens.response_ids.tolist(),
                        turn.tokens.behavior_logprobs.tolist(),
                        strict=True,
                    )
                ]
            }
        sampled = len(turn.tokens.response_ids)
        before = len(transcript.ids) - sampled
        return {
            "id": f"chatcmpl-{secrets.token_hex(8)}",
            "object": "chat.completion",
            "created": int(time.time()),
            "model": MODEL,
            "choices": [choice],
            "usage": {
                "prompt_tokens": before,
                "completion_tokens": sampled,
                "total_tokens": before + sampled,
            },
        }

    def _open(self, session: _Session, messages: Sequence[Message], tools: Any) -> None:
        text = self._tokenizer.render_chat(messages, answer=True, tools=tools)
        old = session.transcript.prompt
        ids = tuple(self._tokenizer.encode_rendered(text))
        session.transcript.open(Prompt(id=old.id, text=text, token_ids=ids, fields=old.fields))
        session.tools = tools

    def _continue(self, session: _Session, messages: Sequence[Message], tools: Any) -> None:
        said = session.said
        same = [_same(one) == _same(other) for one, other in zip(said, messages, strict=False)]
        if tools != session.tools:
            raise Refused("the call has other tools than the one before, which is one sample's")
        if len(messages) <= len(said) or not all(same):
            where = same.index(False) if False in same else len(same)
            raise Refused(
                f"the call does not repeat what was said before and add to it: messages[{where}]"
                " differs or nothing follows. One session is one sample"
            )
        transcript = session.transcript
        new = [dict(one) for one in messages[len(said) :]]
        sampled = transcript.turns[-1].tokens.response_ids.tolist()
        ids = self._follow.between(sampled, new)
        transcript.take_step(Step(observation=new))
        transcript.take_words(ids)


async def _streamed(request: web.Request, answer: dict[str, Any]) -> web.StreamResponse:
    """The whole answer as the events of a stream: nothing of it is there before its end."""
    (choice,) = answer.pop("choices")
    usage = answer.pop("usage")
    calls = [
        {"index": index, **call}
        for index, call in enumerate(choice["message"].get("tool_calls", ()))
    ]
    delta = {**choice["message"], **({"tool_calls": calls} if calls else {})}
    first = {"index": 0, "delta": delta, "finish_reason": None}
    if "logprobs" in choice:
        first["logprobs"] = choice["logprobs"]
    last = {"index": 0, "delta": {}, "finish_reason": choice["finish_reason"]}
    response = web.StreamResponse(headers={"Content-Type": "text/event-stream"})
    await response.prepare(request)
    head = {**answer, "object": "chat.completion.chunk"}
    for chunk in (
        {**head, "choices": [first]},
        {**head, "choices": [last]},
        {**head, "choices": [], "usage": usage},
    ):
        await response.write(f"data: {json.dumps(chunk)}\n\n".encode())
    await response.write(b"data: [DONE]\n\n")
    await response.write_eof()
    return response


def _checked(body: Any) -> list[Message]:
    """The messages of a call. Raises Refused."""
    if not isinstance(body, Mapping):
        raise Refused("the call is no JSON object")
    if body.get("n") not in (None, 1):
        raise Refused("n must be 1: a session is one sample")
    messages = body.get("messages")
    if not isinstance(messages, list) or not messages:
        raise Refused("messages must be a list of messages")
    for index, one in enumerate(messages):
        if not isinstance(one, Mapping) or not isinstance(one.get("role"), str):
            raise Refused(f"messages[{index}] is no object with a role")
        if not isinstance(one.get("content"), (str, type(None))):
            raise Refused(f"messages[{index}]: content must be text")
    return [
        {
            **{key: value for key, value in one.items() if value is not None},
            "content": one.get("content") or "",
        }
        for one in messages
    ]

"""Requests and responses of OpenAI's chat-completions interface: supported keys, refused keys, and
response formats.

Invariant: a call is refused before anything is sampled for it.
"""

from __future__ import annotations

import json
import secrets
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from aiohttp import web

from megatron_async_rl.data.tokenizer import content_of
from megatron_async_rl.rollout.environments import Message
from megatron_async_rl.rollout.environments.transcript import Turn
from megatron_async_rl.rollout.vllm.tool_parser import ToolParser

MODEL = "policy"
"""Name of the model in responses. A call may name any model."""
UNCONSTRAINED = {"tool_choice": ("auto", "none"), "response_format": ("text",)}
"""Keys of a call, and their values or types that do not constrain sampling."""
CONSTRAINTS = (
    "structured_outputs",
    *(f"guided_{one}" for one in ("json", "regex", "choice", "grammar")),
)
"""Request keys of vLLM that constrain sampling, in addition to `logit_bias`."""
TEMPLATE = ("chat_template", "chat_template_kwargs", "documents")
"""Request keys of vLLM that change how messages are rendered."""
Decode = Callable[[Sequence[int]], str]


class CallRefused(Exception):
    """The endpoint refuses a call. The agent receives the message with HTTP `status` and OpenAI's
    error `code`."""

    def __init__(self, what: str, *, status: int = 400, code: str | None = None) -> None:
        super().__init__(what)
        self.status, self.code = status, code

    @property
    def response(self) -> web.Response:
        error = {"message": str(self), "type": "invalid_request_error", "param": None}
        return web.json_response({"error": {**error, "code": self.code}}, status=self.status)


def identity(message: Message) -> tuple[Any, ...]:
    """Return the parts of a message that identify it. Clients add null keys and change ids."""
    functions = [call["function"] for call in message.get("tool_calls") or ()]
    calls = [(one["name"], _parsed(one["arguments"])) for one in functions]
    return message.get("role"), message.get("content") or "", calls


def _parsed(arguments: str) -> Any:
    """Return the arguments of a tool call as a value, because clients may reformat the JSON."""
    try:
        return json.loads(arguments)
    except ValueError:
        return arguments


@dataclass(frozen=True, kw_only=True)
class ChatCompletion:
    """Supported keys of a chat-completion request. `maximum`: maximum tokens of the turn; None for
    all remaining tokens of the sample. `reads_calls`: parse tool calls in the model's text."""

    messages: Sequence[Message]
    tools: Any
    reads_calls: bool
    stop: Sequence[str]
    maximum: int | None
    logprobs: bool
    stream: bool
    usage: bool
    """True if the stream must end with token counts."""


def read_call(body: Any, parser: ToolParser) -> ChatCompletion:
    """Parse a request. Raises CallRefused for a request that a rollout cannot fulfil."""
    if not isinstance(body, Mapping):
        raise CallRefused("the call is not a JSON object")
    # Ignoring such a key would silently change what the agent does.
    if body.get("n") not in (None, 1):
        raise CallRefused("n must be 1: a session is one sample")
    for key in ("max_tokens", "max_completion_tokens"):
        maximum = body.get(key)
        if maximum is not None and (not isinstance(maximum, int) or maximum < 1):
            raise CallRefused(f"{key} must be a whole number above 0, not {maximum!r}")
    for key, free in UNCONSTRAINED.items():
        value = body.get(key)
        value = value.get("type", value) if isinstance(value, Mapping) else value
        if value is not None and value not in free:
            raise CallRefused(
                f"{key}: {value!r} constrains sampling, which a rollout does not support; omit it,"
                f" or set it to {' or '.join(map(repr, free))}"
            )
    _require_run_settings(body)
    if body.get("functions"):
        raise CallRefused("functions is OpenAI's former key for tools; send tools")
    stop, tools = body.get("stop") or [], body.get("tools") or None
    stop = [stop] if isinstance(stop, str) else stop
    if not isinstance(stop, list) or not all(isinstance(one, str) and one for one in stop):
        raise CallRefused(f"stop must be text, or a list of texts, not {stop!r:.80}")
    # Validate with vLLM's schema now: a parser would fail on invalid tools only after sampling.
    try:
        parser.request(tools)
    except (ValueError, TypeError) as error:
        raise CallRefused(
            f"tools must be a list of functions with their schemas: {error}"
        ) from None
    options = body.get("stream_options")
    return ChatCompletion(
        messages=_messages(body.get("messages")),
        tools=tools,
        reads_calls=body.get("tool_choice") != "none",
        stop=stop,
        maximum=body.get("max_completion_tokens") or body.get("max_tokens"),
        logprobs=bool(body.get("logprobs")),
        stream=bool(body.get("stream")),
        usage=isinstance(options, Mapping) and bool(options.get("include_usage")),
    )


def _require_run_settings(body: Mapping[str, Any]) -> None:
    """Raise CallRefused for keys that would change rendering or sampling. The log-probs used in
    training are valid only for the run's own settings."""
    for key in (*CONSTRAINTS, "logit_bias"):
        if body.get(key):
            raise CallRefused(
                f"{key} constrains sampling, which a rollout does not support; omit it"
            )
    for key in TEMPLATE:
        if body.get(key):
            raise CallRefused(
                f"{key}: the run renders all messages the same way; omit it, or set"
                " data.chat_template or data.chat_template_options for all calls"
            )
    for key, own in (("continue_final_message", False), ("add_generation_prompt", True)):
        if body.get(key) not in (None, own):
            raise CallRefused(f"{key}: every turn is a new message; omit it")
    if body.get("top_logprobs"):
        raise CallRefused(
            "top_logprobs: only the log-prob of each sampled token is available; omit it, and set"
            " logprobs: true"
        )


def _messages(value: Any) -> list[Message]:
    """Return the messages with their content as text and without null keys. Raises CallRefused."""
    if not isinstance(value, list) or not value:
        raise CallRefused("messages must be a list of messages")
    messages: list[Message] = []
    for index, one in enumerate(value):
        if not isinstance(one, Mapping) or not isinstance(one.get("role"), str):
            raise CallRefused(f"messages[{index}] is not an object with a role")
        calls = one.get("tool_calls") or []
        if not isinstance(calls, list) or not all(map(_is_call, calls)):
            raise CallRefused(
                f"messages[{index}]: tool_calls must be a list of objects with a function whose"
                " name and arguments are text"
            )
        try:
            content = "" if one.get("content") is None else content_of(one)
        except ValueError as error:
            raise CallRefused(f"messages[{index}] {error}") from None
        # Templates test whether a key exists, so a null key must render like an absent key.
        present = {key: each for key, each in one.items() if each is not None}
        messages.append({**present, "content": content})
    return messages


def _is_call(call: Any) -> bool:
    function = call.get("function") if isinstance(call, Mapping) else None
    return isinstance(function, Mapping) and all(
        isinstance(function.get(key), str) for key in ("name", "arguments")
    )


def completion(turn: Turn, message: Message, total: int, decode: Decode | None) -> dict[str, Any]:
    """Return the response to a request. `message`: message of the turn. `total`: number of tokens
    of its segment. `decode`: if given, the response lists each token with its log-prob."""
    choice: dict[str, Any] = {"index": 0, "message": message}
    # "length" takes precedence: a tool call in a truncated turn may be incomplete.
    choice["finish_reason"] = (
        "length" if turn.reason == "length" else "tool_calls" if "tool_calls" in message else "stop"
    )
    tokens = turn.tokens
    if decode is not None:
        pairs = zip(tokens.response_ids.tolist(), tokens.behavior_logprobs.tolist(), strict=True)
        content = [
            {"token": decode([one]), "logprob": logprob, "top_logprobs": []}
            for one, logprob in pairs
        ]
        choice["logprobs"] = {"content": content}
    sampled = len(tokens.response_ids)
    return {
        "id": f"chatcmpl-{secrets.token_hex(8)}",
        "object": "chat.completion",
        # Clients require this key. The sample does not depend on it.
        "created": int(time.time()),
        "model": MODEL,
        "choices": [choice],
        "usage": {
            "prompt_tokens": total - sampled,
            "completion_tokens": sampled,
            "total_tokens": total,
        },
    }


async def write(
    request: web.Request, answer: dict[str, Any], requested: ChatCompletion
) -> web.StreamResponse:
    if requested.stream:
        return await _streamed(request, answer, usage=requested.usage)
    response = web.json_response(answer)
    await response.prepare(request)
    await response.write_eof()
    return response


async def _streamed(
    request: web.Request, answer: dict[str, Any], *, usage: bool
) -> web.StreamResponse:
    """Write the response as a stream whose first event has the whole turn: a turn is sampled as a
    whole."""
    (choice,) = answer.pop("choices")
    tokens = answer.pop("usage")
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
    chunks: list[dict[str, Any]] = [{**head, "choices": [first]}, {**head, "choices": [last]}]
    # A chunk without choices: clients expect it only if they requested usage.
    if usage:
        chunks.append({**head, "choices": [], "usage": tokens})
    for chunk in chunks:
        await response.write(f"data: {json.dumps(chunk)}\n\n".encode())
    await response.write(b"data: [DONE]\n\n")
    await response.write_eof()
    return response

"""Agents and tools of tests. An agent calls the endpoint as its prompt requests."""

import asyncio
import json
import signal
import time
import urllib.error
import urllib.request
from contextlib import suppress
from pathlib import Path
from typing import Any

import pytest

from megatron_async_rl.samples import Prompt


def complete(base_url: str, limit_s: float | None = None, **body: Any) -> dict[str, Any]:
    if body.get("stream"):
        body.setdefault("stream_options", {"include_usage": True})
    request = urllib.request.Request(
        f"{base_url}/chat/completions",
        data=json.dumps({"model": "policy", **body}).encode(),
        headers={"Content-Type": "application/json"},
    )
    try:
        with urllib.request.urlopen(request, timeout=limit_s) as answer:
            text = answer.read().decode()
    except urllib.error.HTTPError as error:
        raise RuntimeError(json.loads(error.read())["error"]["message"]) from None
    response: dict[str, Any] = streamed(text) if body.get("stream") else json.loads(text)
    return response


def streamed(text: str) -> dict[str, Any]:
    """Return the response that the chunks of a stream form together."""
    *chunks, end = (line.removeprefix("data: ") for line in text.split("\n\n") if line)
    assert end == "[DONE]"
    first, last, *usage = map(json.loads, chunks)
    (begun,), (ended,) = first["choices"], last["choices"]
    assert begun["index"] == ended["index"] == 0
    message = begun.pop("delta")
    counts = {} if not usage else {"usage": usage[0]["usage"]}
    return first | counts | {"choices": [begun | ended | {"message": message}]}


def run(prompt: Prompt, base_url: str) -> float:
    """Call the model and its tools until the model calls no tool, as agents do."""
    fault = prompt.fields.get("fault")
    if fault == "silent":
        return 1.0
    if fault in ("compacts", "compacts when full"):
        return compacting_agent(prompt.fields["question"], base_url, full=fault != "compacts")
    if fault == "has a loop":
        asyncio.run(asyncio.sleep(0))
        signal.signal(signal.SIGALRM, signal.SIG_DFL)  # As time limits of the main thread do.
    if fault == "requests another path":
        raise ValueError(request_path(prompt.fields["question"], base_url, prompt.fields["path"]))
    if fault == "works alone":
        while not Path(prompt.fields["until"]).exists():
            time.sleep(0.01)
    messages: list[dict[str, Any]] = [{"role": "user", "content": prompt.fields["question"]}]
    body: dict[str, Any] = dict(prompt.fields.get("body", {}))
    messages = body.pop("messages", messages)
    if fault == "reads chunks":
        options = {"include_usage": True} if prompt.fields["usage"] else {}
        response = complete(base_url, messages=messages, stream=True, stream_options=options)
        return float(("usage" in response) == bool(options))
    if fault in ("retries", "repeats"):
        with suppress(TimeoutError):
            complete(base_url, 0.1 if fault == "retries" else None, messages=messages, **body)
    while True:
        answer = complete(base_url, messages=messages, logprobs=True, **body)
        choice = answer["choices"][0]
        assert len(choice["logprobs"]["content"]) == answer["usage"]["completion_tokens"]
        messages.append(choice["message"] | {"refusal": None})  # Clients add this key.
        if fault == "forgets":
            messages = [*messages[2:], {"role": "user", "content": "and now?"}]
            continue
        if fault == "abandons a call":
            messages.append({"role": "user", "content": "and?"})
            with suppress(TimeoutError):
                complete(base_url, limit_s=0.1, messages=messages)
            return 3.0
        if fault == "rewrites" and "tool_calls" in messages[-1]:
            (call,) = messages[-1]["tool_calls"]
            spaced = json.dumps(json.loads(call["function"]["arguments"]), indent=1)
            call["function"]["arguments"] = spaced
            messages[0]["content"] = [{"type": "text", "text": messages[0]["content"]}]
        if fault == "retools":
            body["tools"] = [{"type": "function", "function": {"name": "plus"}}]
        if choice["finish_reason"] != "tool_calls":
            return float(choice["message"]["content"])
        (call,) = choice["message"]["tool_calls"]
        arguments = json.loads(call["function"]["arguments"])
        result = str(arguments["a"] * arguments["b"])
        messages.append({"role": "tool", "tool_call_id": call["id"], "content": result})


def request_path(question: str, base_url: str, path: str) -> str:
    """Return the error of a request to `path`, as JSON."""
    request = urllib.request.Request(
        base_url.removesuffix("/v1") + path,
        data=json.dumps({"messages": [{"role": "user", "content": question}]}).encode(),
        headers={"Content-Type": "application/json"},
    )
    with pytest.raises(urllib.error.HTTPError) as caught, urllib.request.urlopen(request):
        pass
    error = json.loads(caught.value.read())["error"]
    return json.dumps({"status": caught.value.code, **error})


def compacting_agent(question: str, base_url: str, *, full: bool) -> float:
    """Run an agent with two threads of messages. `full`: the second begins when the first is
    full."""
    threads = [
        [{"role": "user", "content": question}],
        [{"role": "user", "content": "it was 42"}],
    ]
    for number, more in ((0, None), *([(0, "so?")] if full else []), (1, None)):
        try:
            continue_thread(threads[number], base_url, more)
        except RuntimeError as error:
            if not full or "context_length_exceeded" not in str(error):
                raise
    if not full:
        continue_thread(threads[1], base_url, "sure?")
        continue_thread(threads[0], base_url, "so?")
    return 7.0


def continue_thread(messages: list[dict[str, Any]], base_url: str, more: str | None) -> None:
    if more is not None:
        messages.append({"role": "user", "content": more})
    answer = complete(base_url, messages=messages)
    messages.append(answer["choices"][0]["message"])


# Tools


def times(a: int, b: int = 2) -> int:
    """Multiply two numbers.

    This paragraph is not part of the description.

    Args:
        a: First factor.
        b (int): Second factor.
    """
    if a == 13:
        raise ZeroDivisionError("not thirteen")
    return a * b


async def looked_up(words: list[str]) -> dict[str, int]:
    """Count the letters of each word."""
    await asyncio.sleep(0 if words else 3600)
    return {word: len(word) for word in words}


def sleeps() -> str:
    """Sleep for an hour."""
    time.sleep(3600)
    return ""


def untyped(a) -> str:  # type: ignore[no-untyped-def]
    """Return a parameter that has no type annotation."""
    return str(a)

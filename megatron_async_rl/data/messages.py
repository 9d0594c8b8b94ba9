"""Chat messages as data sets write them, to messages with `role` and `content`, which templates read.

A list of messages may be JSON text (every cell of CSV is text). ShareGPT's `from` and `value` become
`role` and `content`, and its `function_call` becomes `tool_calls`.
"""

from __future__ import annotations

import json
import re
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from megatron_async_rl.config.problem import DataError
from megatron_async_rl.data.chat_template import tool_calls_of
from megatron_async_rl.data.files import no_duplicate_keys
from megatron_async_rl.data.tokenizer import content_of

TABLE = ".parquet"
FUNCTION_CALL = "function_call"
"""Role of ShareGPT's calls of a function, whose value is `{"name": ..., "arguments": ...}`."""
SHAREGPT_ROLES = {
    "system": "system",
    "human": "user",
    "user": "user",
    "gpt": "assistant",
    "chatgpt": "assistant",
    "model": "assistant",
    "assistant": "assistant",
    "observation": "tool",
    "tool": "tool",
    FUNCTION_CALL: "assistant",
}
"""Values of `from`, with the roles that they stand for."""
TRAINED_KEYS = ("train", "weight", "step_loss_mask")
"""Keys of a message for the loss on it: ours, OpenAI's and slime's."""

_MESSAGES = re.compile(r"""\[\s*\{[^{}]*["'](?:role|from)["']\s*:""")
"""Beginning of a list of messages as text, as JSON or as Python writes it."""


def messages_in(value: Any) -> Any:
    """Return the list of messages that a text holds as JSON; any other value as it is. Raises
    ValueError for text that begins as a list of messages and is not JSON."""
    text = value.strip() if isinstance(value, str) else ""
    if not text.startswith("["):
        return value
    try:
        found = json.loads(text, object_pairs_hook=no_duplicate_keys)
    except (ValueError, RecursionError) as error:
        if _MESSAGES.match(text) is None:
            return value
        raise ValueError(f"holds chat messages as text that is not JSON: {error}") from error
    named = found and is_messages(found) and all("role" in one or "from" in one for one in found)
    return found if named else value


def is_messages(value: Any) -> bool:
    """True for a list of objects, which chat messages are."""
    return isinstance(value, list) and all(isinstance(one, Mapping) for one in value)


def message_of(file: Path, place: int, message: Any) -> dict[str, Any]:
    """Return one message. Keys that are null are left out: a table has every key of any message in
    all of them, and every argument of any call in all calls. Raises DataError."""
    if isinstance(message, Mapping) and message.get("role") is None and "from" in message:
        message = _from_sharegpt(file, place, message)
    calls = message.get("tool_calls") if isinstance(message, Mapping) else None
    if not (
        isinstance(message, Mapping)
        and isinstance(message.get("role"), str)
        and ("content" in message or calls)
    ):
        shown = json.dumps(message, default=str)[:80]
        what = f"a chat message must be an object with `role` and `content`, got {shown}"
        raise DataError(file, place, what, 'write [{"role": "user", "content": "..."}]')
    try:
        if message.get(FUNCTION_CALL) is not None:
            raise ValueError(
                "has a `function_call`, OpenAI's old form, which templates do not read"
            )
        content = content_of(message)
        if calls:
            tool_calls_of(message)
    except ValueError as error:
        fix = "write it as text; a message that calls tools may have null"
        if calls or message.get(FUNCTION_CALL) is not None:
            fix = (
                'write "tool_calls": [{"type": "function", "function": {"name": ..., "arguments":'
                " {...}}}]; arguments may be JSON text"
            )
        raise DataError(file, place, f"a message of the {message['role']} {error}", fix) from error
    if content is not None and not is_unicode(content):
        raise half_a_pair(file, place, f"a message of the {message['role']}")
    if file.suffix.lower() == TABLE:
        message = {**without_nulls(message), "content": content}
    found = {key: value for key, value in message.items() if value is not None}
    # A template may tell a content that is null from none.
    return {**found, "content": content} if "content" in message else found


def _from_sharegpt(file: Path, place: int, message: Mapping[str, Any]) -> dict[str, Any]:
    read = ("from", "value", "role", "content")
    rest = {key: one for key, one in message.items() if key not in read}
    said, value = message["from"], message.get("value")
    role = SHAREGPT_ROLES.get(said.lower()) if isinstance(said, str) else None
    if role is None:
        what = f"a chat message is `from` {said!r}"
        raise DataError(file, place, what, f"make it one of {', '.join(SHAREGPT_ROLES)}")
    if said.lower() != FUNCTION_CALL:
        return {**rest, "role": role, "content": value}
    calls: Any
    try:
        calls = json.loads(value) if isinstance(value, str) else value
    except ValueError as error:
        calls = str(error)
    calls = [calls] if isinstance(calls, Mapping) else calls
    if not is_messages(calls) or not all(isinstance(one.get("name"), str) for one in calls):
        what = f"a message `from` {said} is no JSON object with a name: {value!r:.80}"
        raise DataError(file, place, what, 'write {"name": ..., "arguments": {...}}')
    functions = [{"type": "function", "function": dict(one)} for one in calls]
    return {**rest, "role": role, "content": None, "tool_calls": functions}


def is_trained(message: Mapping[str, Any]) -> bool:
    """Return whether the loss is on the message: the assistant's are trained on unless one of
    TRAINED_KEYS is false or 0. On messages of others `weight` and `step_loss_mask` have no effect,
    as in the projects that they come from. Raises ValueError that names the key."""
    given = {key: message[key] for key in TRAINED_KEYS if message.get(key) is not None}
    for key, value in given.items():
        if not isinstance(value, (bool, int, float)) or value not in (0, 1):
            raise ValueError(f"has `{key}`: {value!r}")
    if len(set(map(bool, given.values()))) > 1:
        shown = " and ".join(f"`{key}`: {value!r}" for key, value in given.items())
        raise ValueError(f"has {shown}")
    if message["role"] != "assistant":
        if given.get("train"):
            raise ValueError(f"is the {message['role']}'s and has `train`: true")
        return False
    return all(given.values())


def without_nulls(value: Any) -> Any:
    """A value without keys that are null, as in a table those are that only other rows have."""
    if isinstance(value, Mapping):
        return {key: without_nulls(one) for key, one in value.items() if one is not None}
    return [without_nulls(one) for one in value] if isinstance(value, list) else value


def is_unicode(value: str) -> bool:
    """False with half of a surrogate pair, which JSON can hold and UTF-8 cannot."""
    try:
        value.encode()
    except UnicodeEncodeError:
        return False
    return True


def half_a_pair(file: Path, place: int, which: str) -> DataError:
    what = f"{which} is no valid Unicode: it has one half of a surrogate pair"
    return DataError(file, place, what, "write the character whole, or leave it out")


def as_conversation(prompt: Sequence[Any], completion: Sequence[Any]) -> list[dict[str, Any]]:
    """Return prompt and completion as one conversation that is trained on in the completion."""
    before = [{key: one[key] for key in one if key not in TRAINED_KEYS} for one in prompt]
    return [*({**one, "train": False} for one in before), *completion]

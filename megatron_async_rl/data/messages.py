"""Chat messages as data sets write them, to messages with `role` and `content`, which templates
read.

Invariants:
- messages may be JSON text, since every cell of CSV is text; text that begins as messages is read
  as messages or refused, and never reaches a model as plain text;
- ShareGPT's `from` and `value` become `role` and `content`, in any combination, its names of roles
  the usual ones, and its `function_call` becomes `tool_calls`.

A conversation to train on becomes tokens with a mask. Invariants:
- a message's tokens are those between the renderings of the messages before it, up to where an
  answer begins, and of the messages up to it; both must be prefixes of the whole, token by token,
  so that the policy learns from what an engine would have read and written;
- the mask of a trained message ends with the token that ends the message, so that the policy learns
  to stop, and covers nothing behind that token;
- nothing follows the last trained message.
"""

from __future__ import annotations

import contextlib
import json
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from megatron_async_rl.config.problem import DataError
from megatron_async_rl.data.chat_template import PROBE_ANSWER, function_name, tool_calls_of
from megatron_async_rl.data.files import no_duplicate_keys
from megatron_async_rl.data.tokenizer import Tokenizer, content_of

TABLE = ".parquet"
FUNCTION_CALL = "function_call"
"""Role of ShareGPT's calls of a function, whose value is `{"name": ..., "arguments": ...}`."""
ROLES_BY_NAME = {
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
"""Roles of messages by the names that data sets give them, in `role` or `from`."""
SPEAKER, BODY = ("role", "from"), ("content", "value", "tool_calls")
TRAINED_KEYS = ("train", "weight", "step_loss_mask")
"""Keys of a message for the loss on it: ours, OpenAI's and slime's."""
CONVERSATION_KEYS = ("messages", "conversations", "conversation")

_ROLE = rf"""\b(?:role|from)\b["'\\]*\s*:\s*["'\\]*(?i:{"|".join(ROLES_BY_NAME)})\b"""
_LIST = re.compile(r"""["'\\\s]*\[\s*\{""")
_OBJECT = re.compile(
    rf"""["'\\\s]*\{{["'\\\s]*(?:{_ROLE}|(?:{"|".join(CONVERSATION_KEYS)})["'\\]*\s*:\s*\[)"""
)
"""Beginnings of chat messages as text, also as Python writes them or as text inside of text."""
_KEYS = re.compile(rf"""{_ROLE}|["'\\](?:role|from)["'\\]*\s*:|"(?:content|value)\\?"\s*:""")
"""Keys of messages, also with a quote missing."""


class MessagesFault(ValueError):
    """A value that holds chat messages and cannot be read as one conversation."""

    def __init__(self, what: str, fix: str) -> None:
        super().__init__(what)
        self.what = what
        self.fix = fix


def messages_in(value: Any) -> Any:
    """Return the list of chat messages that a value is or holds as JSON text, whether one message,
    encoded twice or behind a byte order mark; any other value as it is. Raises MessagesFault for
    text that begins as messages and is not JSON, and for several conversations."""
    if not isinstance(value, str):
        messages = _conversation_in(value)
        return value if messages is None else messages
    text = value.strip().strip("\ufeff").strip()
    # Plain questions are the common case and must not cost a parse.
    if text[:1] not in ("[", "{", '"'):
        return value
    try:
        found = json.loads(text, object_pairs_hook=no_duplicate_keys)
    except (ValueError, RecursionError) as error:
        if not _begins_as_messages(text):
            return value
        what = f"holds chat messages as text that is not JSON: {error}"
        fix = "write them with json.dumps, not with str(); a question begins with other words"
        raise MessagesFault(what, fix) from error
    if isinstance(found, str):
        inside = messages_in(found)
        # JSON text of plain text stays as the user wrote it, quotes included.
        return value if isinstance(inside, str) else inside
    messages = _conversation_in(found)
    return value if messages is None else messages


def _conversation_in(value: Any) -> list[Any] | None:
    """Return the messages of a list, or of an object that is one; null for any other value."""
    if isinstance(value, Mapping):
        for key in CONVERSATION_KEYS:
            # Guessing the inner column would hide the other keys of the object, so the user names
            # it.
            if _holds_messages(value.get(key)):
                what = f"holds an object, and the chat messages are in its `{key}`"
                fix = f"name them by their path: data.messages_key=COLUMN.{key}"
                raise MessagesFault(what, fix)
        return [value] if _has_role(value) and not set(BODY).isdisjoint(value) else None
    if not isinstance(value, list):
        return None
    items = [_object_in(one) for one in value]
    for one in items:
        # One row with several conversations would train only one of them.
        inside = [one]
        if isinstance(one, Mapping):
            inside = [one.get(key) for key in CONVERSATION_KEYS]
        if any(map(_holds_messages, inside)):
            what = "holds a list of conversations, and a row is one of them"
            raise MessagesFault(what, "write one row for each conversation")
    if _holds_messages(items) or (items and all(map(_is_attributed, items))):
        return items
    return None


def _holds_messages(value: Any) -> bool:
    return isinstance(value, list) and any(map(_has_role, value))


def _object_in(value: Any) -> Any:
    """Return the object that a text holds as JSON; any other value as it is."""
    if isinstance(value, str) and value.lstrip()[:1] == "{":
        with contextlib.suppress(ValueError, RecursionError):
            return json.loads(value, object_pairs_hook=no_duplicate_keys)
    return value


def _has_role(value: Any) -> bool:
    """Return whether a value is an object with a known role."""
    return isinstance(value, Mapping) and any(
        isinstance(name := value.get(key), str) and name.strip().lower() in ROLES_BY_NAME
        for key in SPEAKER
    )


def _is_attributed(value: Any) -> bool:
    """Return whether a value is an object with a role, known or not, and content."""
    return (
        isinstance(value, Mapping)
        and any(isinstance(value.get(key), str) for key in SPEAKER)
        and not set(BODY).isdisjoint(value)
    )


def _begins_as_messages(text: str) -> bool:
    """Return whether a text that is not JSON was probably meant as chat messages."""
    # Two passes: cheap patterns for the beginning, and JSON only for text that could be messages.
    is_list = _LIST.match(text) is not None
    if not is_list and _OBJECT.match(text) is None:
        return False
    with contextlib.suppress(ValueError, RecursionError):
        beginning, _ = json.JSONDecoder().raw_decode(text)
        try:  # a question about data begins with JSON and continues as text
            return _conversation_in(beginning) is not None
        except MessagesFault:
            return True
    # Code and data in questions also begin with `[{`; without a message's keys it stays text.
    return not is_list or _KEYS.search(text) is not None


def is_messages(value: Any) -> bool:
    """Return whether a value is a list of objects, as chat messages are."""
    return isinstance(value, list) and all(isinstance(one, Mapping) for one in value)


def message_of(file: Path, place: int, message: Any) -> dict[str, Any]:
    """Return one message. Keys that are null are left out: a table has every key of any message in
    all of them, and every argument of any call in all calls. Raises DataError."""
    if isinstance(message, Mapping):
        message = _with_role_and_content(file, place, message)
    calls = message.get("tool_calls") if isinstance(message, Mapping) else None
    if not (
        isinstance(message, Mapping)
        and isinstance(message.get("role"), str)
        and message["role"].strip()
        and ("content" in message or calls)
    ):
        shown = json.dumps(message, default=str)[:80]
        what = f"a chat message must be an object with `role` and `content`, got {shown}"
        raise DataError(file, place, what, 'write [{"role": "user", "content": "..."}]')
    try:
        # Templates ignore the key, so the policy would learn an empty message.
        if message.get(FUNCTION_CALL) is not None:
            raise ValueError(
                "has a `function_call`, OpenAI's old form, which templates do not read"
            )
        content = content_of(message)
        if calls:
            _require_names(tool_calls_of(message))
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
        # Only Parquet adds nulls of other rows; in JSONL a null is the user's own.
        message = {**without_nulls(message), "content": content}
    found = {key: value for key, value in message.items() if value is not None}
    # Templates may treat null content differently from a message without `content`.
    return {**found, "content": content} if "content" in message else found


def _require_names(calls: Sequence[Mapping[str, Any]]) -> None:
    """Raise ValueError for a call without the name of its function, or with other arguments than
    `arguments`."""
    for index, call in enumerate(calls):
        if not function_name(call):
            raise ValueError(f"has no name of a function in tool_calls[{index}]")
        function = call if call.get("function") is None else call["function"]
        if "parameters" in function and not function["arguments"]:
            raise ValueError(f"has `parameters` instead of arguments in tool_calls[{index}]")


def _with_role_and_content(file: Path, place: int, message: Mapping[str, Any]) -> dict[str, Any]:
    """Return the message with `role` and `content`, where it may have `from` or `value`, and with
    the usual name of its role. A role that is not known stays: the template may read it."""
    key = "role" if message.get("role") is not None else "from"
    # `role` wins: Parquet files with mixed rows have both columns, one of them null.
    given = message.get(key)
    if not isinstance(given, str):
        return dict(message)
    name = given.strip().lower()
    role = ROLES_BY_NAME.get(name)
    if role is None and key == "from":
        what = f"a chat message is `from` {given!r}"
        raise DataError(file, place, what, f"make it one of {', '.join(ROLES_BY_NAME)}")
    found = {**message, "role": role or given}
    content, value = message.get("content"), message.get("value")
    # Next to a role, a `value` may also be a score.
    says = isinstance(value, (str, list)) or name == FUNCTION_CALL
    if key == "from":
        if content is not None and value is not None:
            what = f"a message `from` {given} has both `value` and `content`"
            raise DataError(file, place, what, "keep one of them")
        # ShareGPT's keys go, because a template that reads `value` would print the text twice.
        found = {one: each for one, each in found.items() if one not in ("from", "value")}
        found["content"] = value if content is None else content
    elif content is None and not message.get("tool_calls") and says:
        found["content"] = found.pop("value", None)
    return _with_calls(file, place, found, given) if name == FUNCTION_CALL else found


def _with_calls(file: Path, place: int, message: Mapping[str, Any], given: str) -> dict[str, Any]:
    """Return a message of ShareGPT's role `function_call`, whose content is a call or a list of
    them, as the assistant's with `tool_calls`."""
    value = message.get("content")
    calls: Any
    try:
        calls = json.loads(value) if isinstance(value, str) else value
    except ValueError as error:
        # Text is refused below, with the same error as any other value that is not a call.
        calls = str(error)
    calls = [calls] if isinstance(calls, Mapping) else calls
    if not calls or not is_messages(calls) or not all(function_name(one) for one in calls):
        what = f"a message `from` {given} is not a JSON object with a name: {value!r:.80}"
        raise DataError(file, place, what, 'write {"name": ..., "arguments": {...}}')
    functions = [
        dict(one) if "function" in one else {"type": "function", "function": dict(one)}
        for one in calls
    ]
    return {**message, "content": None, "tool_calls": functions}


def is_trained(message: Mapping[str, Any]) -> bool:
    """Return whether the loss is on the message: the assistant's are trained on unless one of
    TRAINED_KEYS is false or 0. On messages of others `weight` and `step_loss_mask` have no effect,
    as in the projects that they come from. Raises ValueError that names the key."""
    given = {key: message[key] for key in TRAINED_KEYS if message.get(key) is not None}
    for key, value in given.items():
        if not isinstance(value, (bool, int, float)) or value not in (0, 1):
            raise ValueError(f"has `{key}`: {value!r}")
    # Two keys that disagree: either choice would train on what the user excluded, or the reverse.
    if len(set(map(bool, given.values()))) > 1:
        shown = " and ".join(f"`{key}`: {value!r}" for key, value in given.items())
        raise ValueError(f"has {shown}")
    if message["role"] != "assistant":
        if given.get("train"):
            raise ValueError(f"is the {message['role']}'s and has `train`: true")
        return False
    return all(given.values())


def without_nulls(value: Any) -> Any:
    """Return a value without null keys: a table adds the keys of other rows as nulls."""
    if isinstance(value, Mapping):
        return {key: without_nulls(one) for key, one in value.items() if one is not None}
    return [without_nulls(one) for one in value] if isinstance(value, list) else value


def is_unicode(value: str) -> bool:
    """Return false for half of a surrogate pair, which JSON can hold and UTF-8 cannot."""
    try:
        value.encode()
    except UnicodeEncodeError:
        return False
    return True


def half_a_pair(file: Path, place: int, which: str) -> DataError:
    what = f"{which} is not valid Unicode: it has one half of a surrogate pair"
    return DataError(file, place, what, "write the character whole, or leave it out")


def as_conversation(prompt: Sequence[Any], completion: Sequence[Any]) -> list[dict[str, Any]]:
    """Return prompt and completion as one conversation that is trained on in the completion."""
    before = [{key: one[key] for key in one if key not in TRAINED_KEYS} for one in prompt]
    return [*({**one, "train": False} for one in before), *completion]


@dataclass(frozen=True, kw_only=True, eq=False)
class TrainingConversation:
    """Tokens of a conversation. `prompt`, `prompt_ids`: text and tokens before the first trained
    message. `ids` int32 and `mask` uint8, both [T]: all later tokens, and 1 for those that the loss
    covers. `text`: the rendered text of `ids`."""

    prompt: str
    prompt_ids: tuple[int, ...]
    ids: NDArray[np.int32]
    mask: NDArray[np.uint8]
    text: str


def conversation(
    file: Path,
    place: int,
    messages: Sequence[Mapping[str, Any]],
    tokenizer: Tokenizer,
    tools: Sequence[Any],
) -> TrainingConversation:
    """Return the tokens of a conversation. `tools`: schemas of functions that the assistant may
    call. Raises DataError for a message whose tokens cannot be separated from the others."""
    trained = _trained(file, place, messages)
    # Templates may print unknown keys, so the marks are removed before rendering.
    plain = [{key: one[key] for key in one if key not in TRAINED_KEYS} for one in messages]
    last = trained[-1]
    render = partial(tokenizer.render_chat, tools=tools)
    # Rendering stops at the last trained message: later tokens have no effect on the loss.
    whole = render(plain[: last + 1], answer=False)
    tokens = tokenizer.encode_rendered(whole)
    mask = np.zeros(len(tokens), dtype=np.uint8)
    ends = set(tokenizer.eos_ids)
    # Rendered text and number of tokens before the first trained message: the prompt.
    starts: list[str] = []
    first = 0
    for index in trained:
        before = render(plain[:index], answer=True)
        limit = whole if index == last else render(plain[: index + 1], answer=False)
        if limit == before:
            what = f"messages[{index}] is empty, and the chat template writes nothing for it"
            raise DataError(file, place, what, "write the assistant's content, or remove the row")
        begin, end = tokenizer.encode_rendered(before), tokenizer.encode_rendered(limit)
        if not starts:
            first = len(begin)
        starts.append(before)
        # Token by token, not text by text: a tokenizer may merge over the boundary of a message.
        if tokens[: len(begin)] != begin or tokens[: len(end)] != end or len(begin) >= len(end):
            raise DataError(
                file,
                place,
                f"the chat template writes what is before or in messages[{index}] in another way"
                " when more follows, so that its tokens cannot be separated from the others",
                "train on the last message alone (`train: false` in the others), or give"
                " data.chat_template a template that writes a message in one way",
            )
        # The loss ends at the token that ends the message; a line break after it is the template's.
        stop = len(end)
        while stop > len(begin) and tokens[stop - 1] not in ends:
            stop -= 1
        mask[len(begin) : stop if stop > len(begin) else len(end)] = 1
    length = int(np.flatnonzero(mask)[-1]) + 1
    ids = tokens[first:length]
    marks = mask[first:length].tolist()
    # Some templates end a conversation without a token; the policy must still learn to stop.
    if ids[-1] not in ends:
        ids, marks = [*ids, tokenizer.eos_ids[0]], [*marks, 1]
    return TrainingConversation(
        prompt=starts[0],
        prompt_ids=tuple(tokens[:first]),
        ids=np.asarray(ids, dtype=np.int32),
        mask=np.asarray(marks, dtype=np.uint8),
        text=whole[len(starts[0]) :],
    )


def answered(
    file: Path,
    place: int,
    messages: Sequence[Mapping[str, Any]],
    response: str,
    tokenizer: Tokenizer,
    tools: Sequence[Any],
) -> TrainingConversation:
    """Return a response to chat messages; all of its tokens are trained on.

    The response is the text as it is given, and ends as the chat template ends a turn: with the
    template's own token, or with the tokenizer's end of sequence where the template writes none.
    Raises DataError where the template leaves out answers.
    """
    prompt = tokenizer.render_chat(messages, answer=True, tools=tools)
    probe = [*messages, {"role": "assistant", "content": PROBE_ANSWER}]
    whole = tokenizer.render_chat(probe, answer=False, tools=tools)
    # A probe instead of the response: the template may strip or change the response's text.
    before, found, after = whole.rpartition(PROBE_ANSWER)
    if not found:
        what = "the chat template leaves out the assistant's messages"
        raise DataError(file, place, what, "give data.chat_template a template that writes them")
    # Llama 2's template writes a space before an answer; thoughts that a template adds do not
    # belong to the given response.
    lead = before.removeprefix(prompt) if before.startswith(prompt) else ""
    lead = lead if lead.isspace() else ""
    ends = set(tokenizer.eos_ids)
    tail = tokenizer.encode_rendered(after)
    length = next((index for index, one in enumerate(tail) if one in ends), -1) + 1

    prompt_ids = tokenizer.encode_rendered(prompt)
    ids = tokenizer.encode_rendered(prompt + lead + response + after)
    # Encoded with its surroundings, as the model reads it, unless tokens merge across the borders.
    if ids[: len(prompt_ids)] == prompt_ids and (not tail or ids[-len(tail) :] == tail):
        ids = ids[len(prompt_ids) : len(ids) - len(tail)]
    else:
        ids = tokenizer.encode_rendered(lead + response)
    end = tail[:length] if length else [tokenizer.eos_ids[0]]
    tokens = np.asarray([*ids, *end], dtype=np.int32)
    return TrainingConversation(
        prompt=prompt,
        prompt_ids=tuple(prompt_ids),
        ids=tokens,
        mask=np.ones(len(tokens), dtype=np.uint8),
        text=response,
    )


def response_text(file: Path | str, place: int | None, value: Any) -> str:
    """Return the text of a given response, which may be a whole number, such as Parquet keeps an
    answer as: rewards take these two alike. Raises DataError."""
    if isinstance(value, int) and not isinstance(value, bool):
        return str(value)
    if isinstance(value, str):
        return value
    fix = "give every row a `response` text for `loss: sft`, or name its column: data.answer_key"
    raise DataError(file, place, f"`response` is {value!r:.80}", fix)


def loss_weight(file: Path | str, place: int | None, fields: Mapping[str, Any]) -> float:
    """Return the weight of a row with a given response. Raises DataError."""
    weight = fields.get("weight", 1.0)
    if isinstance(weight, str):  # cells of CSV are text
        with contextlib.suppress(ValueError):
            weight = float(weight)
    number = isinstance(weight, (int, float)) and not isinstance(weight, bool)
    if not number or not 0 <= weight < float("inf"):
        fix = "make it a finite number >= 0, or leave it out"
        raise DataError(file, place, f"`weight` is {weight!r}", fix)
    return float(weight)


def _trained(file: Path, place: int, messages: Sequence[Mapping[str, Any]]) -> list[int]:
    """Return the indices of the messages that the loss covers."""
    found = []
    for index, message in enumerate(messages):
        try:
            train = is_trained(message)
        except ValueError as error:
            fix = (
                "train on messages of the assistant; `train` is true or false, `weight` and"
                " `step_loss_mask` are 0 or 1, and one of them is enough"
            )
            raise DataError(file, place, f"messages[{index}] {error}", fix) from error
        # The first token has no context, so a first message has no prompt to condition on.
        if train and index == 0:
            what = "messages[0] is the assistant's, and nothing is before it"
            fix = "begin with a message of the system or the user, or give it `train`: false"
            raise DataError(file, place, what, fix)
        if train:
            found.append(index)
    if not found:
        fix = "give the conversation a message of the assistant, or remove it"
        raise DataError(file, place, "has no message of the assistant to train on", fix)
    return found

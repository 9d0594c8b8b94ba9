"""Conversion of chat messages in data sets to messages with `role` and `content`, which templates
read.

Invariants:
- messages may be JSON text, because every cell of CSV is text; text that begins like messages is
  read as messages or refused, and never reaches a model as plain text;
- ShareGPT's `from` and `value` become `role` and `content`, in any combination, its role names
  become the usual names, and its `function_call` becomes `tool_calls`.

A conversation for training becomes tokens with a mask. Invariants:
- the tokens of a message are the difference of two renderings: the earlier messages with the
  beginning of an answer, and the messages including this one. The tokens of both must be prefixes
  of the whole conversation's tokens, so that the policy learns what an engine reads and writes;
- the mask of a trained message ends with the token that ends the message, so that the policy learns
  to stop;
- the tokens end with the last trained message.
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
from megatron_async_rl.config.visible_text import is_blank
from megatron_async_rl.data.chat_template import PROBE_ANSWER, function_name, tool_calls_of
from megatron_async_rl.data.files import no_duplicate_keys
from megatron_async_rl.data.tokenizer import Tokenizer, content_of

TABLE = ".parquet"
FUNCTION_CALL = "function_call"
"""Role of a function call in ShareGPT, whose value is `{"name": ..., "arguments": ...}`."""
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
"""Role name in data sets (`role` or `from`) -> role."""
SPEAKER, BODY = ("role", "from"), ("content", "value", "tool_calls")
TRAINED_KEYS = ("train", "weight", "step_loss_mask")
"""Keys of a message that include or exclude it in the loss: of this project, OpenAI and slime."""
CONVERSATION_KEYS = ("messages", "conversations", "conversation")

_ROLE = rf"""\b(?:role|from)\b["'\\]*\s*:\s*["'\\]*(?i:{"|".join(ROLES_BY_NAME)})\b"""
_LIST = re.compile(r"""["'\\\s]*\[\s*\{""")
_OBJECT = re.compile(
    rf"""["'\\\s]*\{{["'\\\s]*(?:{_ROLE}|(?:{"|".join(CONVERSATION_KEYS)})["'\\]*\s*:\s*\[)"""
)
"""Beginning of a chat message in text, also in Python's representation or in encoded text."""
_KEYS = re.compile(rf"""{_ROLE}|["'\\](?:role|from)["'\\]*\s*:|"(?:content|value)\\?"\s*:""")
"""Key of a message, also without its closing quote."""


class MessagesFault(ValueError):
    """Error for a value with chat messages that cannot be read as one conversation."""

    def __init__(self, what: str, fix: str) -> None:
        super().__init__(what)
        self.what = what
        self.fix = fix


def messages_in(value: Any) -> Any:
    """Return a value's chat messages as a list; any other value unchanged. The value is a list, one
    message, or JSON text of either, which may be encoded twice or follow a byte order mark. Raises
    MessagesFault for text that begins like messages and is not JSON, and for several
    conversations."""
    if not isinstance(value, str):
        messages = _conversation_in(value)
        return value if messages is None else messages
    text = value.strip().strip("\ufeff").strip()
    # Do not parse plain questions, which are the most common values.
    if text[:1] not in ("[", "{", '"'):
        return value
    try:
        parsed = json.loads(text, object_pairs_hook=no_duplicate_keys)
    except (ValueError, RecursionError) as error:
        if not _begins_as_messages(text):
            return value
        what = f"has chat messages as text that is not JSON: {error}"
        fix = "write them with json.dumps, not with str(); begin a question with other words"
        raise MessagesFault(what, fix) from error
    if isinstance(parsed, str):
        inside = messages_in(parsed)
        # JSON text of plain text stays unchanged, quotes included.
        return value if isinstance(inside, str) else inside
    messages = _conversation_in(parsed)
    return value if messages is None else messages


def _conversation_in(value: Any) -> list[Any] | None:
    """Return the messages of a list, or of an object that is a message; None for other values."""
    if isinstance(value, Mapping):
        for key in CONVERSATION_KEYS:
            # The user must name the inner column: a guess would drop the object's other keys.
            if _holds_messages(value.get(key)):
                what = f"is an object, and the chat messages are in its `{key}`"
                fix = f"name them by their path: data.messages_key=COLUMN.{key}"
                raise MessagesFault(what, fix)
        return [value] if _has_role(value) and not set(BODY).isdisjoint(value) else None
    if not isinstance(value, list):
        return None
    items = [_object_in(one) for one in value]
    for one in items:
        # Refuse several conversations, because a row trains a single conversation.
        inside = [one]
        if isinstance(one, Mapping):
            inside = [one.get(key) for key in CONVERSATION_KEYS]
        if any(map(_holds_messages, inside)):
            what = "is a list of conversations, and a row has one conversation"
            raise MessagesFault(what, "write one row for each conversation")
    if _holds_messages(items) or (items and all(map(_is_attributed, items))):
        return items
    return None


def _holds_messages(value: Any) -> bool:
    return isinstance(value, list) and any(map(_has_role, value))


def _object_in(value: Any) -> Any:
    """Return the object in a JSON text; any other value unchanged."""
    if isinstance(value, str) and value.lstrip()[:1] == "{":
        with contextlib.suppress(ValueError, RecursionError):
            return json.loads(value, object_pairs_hook=no_duplicate_keys)
    return value


def _has_role(value: Any) -> bool:
    """Return True for an object with a known role."""
    return isinstance(value, Mapping) and any(
        isinstance(name := value.get(key), str) and name.strip().lower() in ROLES_BY_NAME
        for key in SPEAKER
    )


def _is_attributed(value: Any) -> bool:
    """Return True for an object with content and any role, known or unknown."""
    return (
        isinstance(value, Mapping)
        and any(isinstance(value.get(key), str) for key in SPEAKER)
        and not set(BODY).isdisjoint(value)
    )


def _begins_as_messages(text: str) -> bool:
    """Return True for text that is not JSON and was probably meant as chat messages."""
    # Match cheap patterns first, and parse JSON only if the text may be messages.
    is_list = _LIST.match(text) is not None
    if not is_list and _OBJECT.match(text) is None:
        return False
    with contextlib.suppress(ValueError, RecursionError):
        beginning, _ = json.JSONDecoder().raw_decode(text)
        try:  # a question about data begins with JSON and continues as text
            return _conversation_in(beginning) is not None
        except MessagesFault:
            return True
    # Code and data in questions also begin with `[{`, so require a key of a message.
    return not is_list or _KEYS.search(text) is not None


def is_messages(value: Any) -> bool:
    """Return True for a list of objects."""
    return isinstance(value, list) and all(isinstance(one, Mapping) for one in value)


def message_of(file: Path, place: int, message: Any) -> dict[str, Any]:
    """Return one message without null keys: in a table, each message has the keys of all messages,
    and each call has the arguments of all calls. Raises DataError."""
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
        # Templates ignore `function_call`, so the policy would learn an empty message.
        if message.get(FUNCTION_CALL) is not None:
            raise ValueError(
                "has a `function_call`, OpenAI's old form, which templates do not read"
            )
        content = content_of(message)
        if calls:
            _require_names(tool_calls_of(message))
    except ValueError as error:
        fix = "write the content as text; only a message with tool calls may have null"
        if calls or message.get(FUNCTION_CALL) is not None:
            fix = (
                'write "tool_calls": [{"type": "function", "function": {"name": ..., "arguments":'
                " {...}}}]; arguments may be JSON text"
            )
        raise DataError(file, place, f"a message of the {message['role']} {error}", fix) from error
    if content is not None and not is_unicode(content):
        raise half_a_pair(file, place, f"a message of the {message['role']}")
    if file.suffix.lower() == TABLE:
        # Only Parquet adds nulls for keys of other rows; in JSONL a null is the user's.
        message = {**without_nulls(message), "content": content}
    given = {key: value for key, value in message.items() if value is not None}
    # Keep null content, because templates may treat it differently from a missing key.
    return {**given, "content": content} if "content" in message else given


def _require_names(calls: Sequence[Mapping[str, Any]]) -> None:
    """Raise ValueError for a call without a function name, or with `parameters` instead of
    `arguments`."""
    for index, call in enumerate(calls):
        if not function_name(call):
            raise ValueError(f"has no function name in tool_calls[{index}]")
        function = call if call.get("function") is None else call["function"]
        if "parameters" in function and not function["arguments"]:
            raise ValueError(f"has `parameters` instead of `arguments` in tool_calls[{index}]")


def _with_role_and_content(file: Path, place: int, message: Mapping[str, Any]) -> dict[str, Any]:
    """Return the message with `role` and `content` instead of `from` and `value`, and with the
    usual name of its role. An unknown `role` stays, because the template may support it."""
    key = "role" if message.get("role") is not None else "from"
    # `role` takes precedence: Parquet files with mixed rows have both keys, and one is null.
    given = message.get(key)
    if not isinstance(given, str):
        return dict(message)
    name = given.strip().lower()
    role = ROLES_BY_NAME.get(name)
    if role is None and key == "from":
        what = f"a chat message is `from` {given!r}"
        raise DataError(file, place, what, f"set it to one of {', '.join(ROLES_BY_NAME)}")
    usual = {**message, "role": role or given}
    content, value = message.get("content"), message.get("value")
    # In a message with `role`, a `value` may also be a score.
    is_content = isinstance(value, (str, list)) or name == FUNCTION_CALL
    if key == "from":
        if content is not None and value is not None:
            what = f"a message `from` {given} has both `value` and `content`"
            raise DataError(file, place, what, "keep one of them")
        # Remove ShareGPT's keys: a template that reads `value` would print the text twice.
        usual = {one: each for one, each in usual.items() if one not in ("from", "value")}
        usual["content"] = value if content is None else content
    elif content is None and not message.get("tool_calls") and is_content:
        usual["content"] = usual.pop("value", None)
    return _with_calls(file, place, usual, given) if name == FUNCTION_CALL else usual


def _with_calls(file: Path, place: int, message: Mapping[str, Any], given: str) -> dict[str, Any]:
    """Return a message of ShareGPT's role `function_call`, whose content is a call or a list of
    calls, as a message of the assistant with `tool_calls`."""
    value = message.get("content")
    calls: Any
    try:
        calls = json.loads(value) if isinstance(value, str) else value
    except ValueError as error:
        # The check below refuses the text, like any other value that is not a call.
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
    """Return True if the loss covers the message: a message of the assistant, unless one of
    TRAINED_KEYS is false or 0. On other messages `weight` and `step_loss_mask` have no effect, as
    in OpenAI's API and in slime. Raises ValueError, which names the key."""
    given = {key: message[key] for key in TRAINED_KEYS if message.get(key) is not None}
    for key, value in given.items():
        if not isinstance(value, (bool, int, float)) or value not in (0, 1):
            raise ValueError(f"has `{key}`: {value!r}")
    # Refuse keys that disagree, because one of them excludes the message from training.
    if len(set(map(bool, given.values()))) > 1:
        shown = " and ".join(f"`{key}`: {value!r}" for key, value in given.items())
        raise ValueError(f"has {shown}")
    if message["role"] != "assistant":
        if given.get("train"):
            raise ValueError(f"is the {message['role']}'s and has `train`: true")
        return False
    return all(given.values())


def without_nulls(value: Any) -> Any:
    """Return a value without null keys, which a table adds for the keys of other rows."""
    if isinstance(value, Mapping):
        return {key: without_nulls(one) for key, one in value.items() if one is not None}
    return [without_nulls(one) for one in value] if isinstance(value, list) else value


def is_unicode(value: str) -> bool:
    """Return False for text with half of a surrogate pair, which JSON allows and UTF-8 does not."""
    try:
        value.encode()
    except UnicodeEncodeError:
        return False
    return True


def half_a_pair(file: Path, place: int, which: str) -> DataError:
    what = f"{which} is not valid Unicode: it has one half of a surrogate pair"
    return DataError(file, place, what, "write the whole character, or remove it")


def as_conversation(prompt: Sequence[Any], completion: Sequence[Any]) -> list[dict[str, Any]]:
    """Return prompt and completion as one conversation; only the completion is trained on."""
    before = [{key: one[key] for key in one if key not in TRAINED_KEYS} for one in prompt]
    return [*({**one, "train": False} for one in before), *completion]


@dataclass(frozen=True, kw_only=True, eq=False)
class TrainingConversation:
    """Tokens of a conversation. `prompt`, `prompt_ids`: text and tokens before the first trained
    message. `ids`, int32 [T]: the tokens after these. `mask`, uint8 [T]: 1 for the tokens that the
    loss covers. `text`: the rendered text of `ids`."""

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
    """Return the tokens of a conversation. `tools`: schemas of the functions that the assistant may
    call. Raises DataError for a message whose tokens cannot be separated from the others."""
    trained = _trained(file, place, messages)
    # Remove TRAINED_KEYS before rendering, because templates may print unknown keys.
    plain = [{key: one[key] for key in one if key not in TRAINED_KEYS} for one in messages]
    last = trained[-1]
    render = partial(tokenizer.render_chat, tools=tools)
    # Render up to the last trained message: later tokens have no effect on the loss.
    whole = render(plain[: last + 1], answer=False)
    tokens = tokenizer.encode_rendered(whole)
    mask = np.zeros(len(tokens), dtype=np.uint8)
    ends = set(tokenizer.eos_ids)
    # `starts`: rendered text before each trained message. `first`: number of prompt tokens.
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
        # Compare tokens, not text: a tokenizer may merge tokens across the end of a message.
        if tokens[: len(begin)] != begin or tokens[: len(end)] != end or len(begin) >= len(end):
            raise DataError(
                file,
                place,
                f"the chat template writes messages up to messages[{index}] differently if another"
                " message follows, so its tokens cannot be separated from the others",
                "train on the last message only (`train: false` in the others), or set"
                " data.chat_template to a template that always writes a message in the same way",
            )
        # The mask ends at the token that ends the message; a line break after it is the template's.
        stop = len(end)
        while stop > len(begin) and tokens[stop - 1] not in ends:
            stop -= 1
        mask[len(begin) : stop if stop > len(begin) else len(end)] = 1
    length = int(np.flatnonzero(mask)[-1]) + 1
    ids = tokens[first:length]
    marks = mask[first:length].tolist()
    # Some templates end a conversation without a token, and the policy must still learn to stop.
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

    The text of the response is unchanged. It ends like a turn of the chat template: with the
    template's token, or with the tokenizer's end of sequence if the template writes no token.
    Raises DataError if the template leaves out answers.
    """
    prompt = tokenizer.render_chat(messages, answer=True, tools=tools)
    probe = [*messages, {"role": "assistant", "content": PROBE_ANSWER}]
    whole = tokenizer.render_chat(probe, answer=False, tools=tools)
    # Render a probe instead of the response, whose text the template may strip or change.
    before, separator, after = whole.rpartition(PROBE_ANSWER)
    if not separator:
        what = "the chat template leaves out the assistant's messages"
        raise DataError(file, place, what, "set data.chat_template to a template that writes them")
    # Keep white space before the answer, as in Llama 2's template, but no thoughts of the template.
    lead = before.removeprefix(prompt) if before.startswith(prompt) else ""
    lead = lead if lead.isspace() else ""
    ends = set(tokenizer.eos_ids)
    tail = tokenizer.encode_rendered(after)
    length = next((index for index, one in enumerate(tail) if one in ends), -1) + 1

    prompt_ids = tokenizer.encode_rendered(prompt)
    ids = tokenizer.encode_rendered(prompt + lead + response + after)
    # Encode the response in its context, as the model reads it, unless tokens merge at its ends.
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
    """Return the text of a given response. It may be an integer, because Parquet stores some
    answers as integers; rewards treat both alike. Raises DataError."""
    if isinstance(value, int) and not isinstance(value, bool):
        return str(value)
    # An empty one would train the policy to end every such response at once.
    if isinstance(value, str) and not is_blank(value):
        return value
    fix = "write one for `loss: sft`, name its column with data.answer_key, or remove the row"
    raise DataError(file, place, f"`response` is {value!r:.80}", fix)


def loss_weight(file: Path | str, place: int | None, fields: Mapping[str, Any]) -> float:
    """Return the loss weight of a row with a given response. Raises DataError."""
    weight = fields.get("weight", 1.0)
    if isinstance(weight, (str, int)) and not isinstance(weight, bool):  # cells of CSV are text
        with contextlib.suppress(ValueError, OverflowError):
            weight = float(weight)
    if not isinstance(weight, float) or not 0 <= weight < float("inf"):
        fix = "set it to a finite number >= 0, or remove it"
        raise DataError(file, place, f"`weight` is {weight!r:.80}", fix)
    return weight


def _trained(file: Path, place: int, messages: Sequence[Mapping[str, Any]]) -> list[int]:
    """Return the indices of the messages that the loss covers. Raises DataError."""
    trained = []
    for index, message in enumerate(messages):
        try:
            train = is_trained(message)
        except ValueError as error:
            fix = (
                "train only on messages of the assistant; set one key: `train` to true or false, or"
                " `weight` or `step_loss_mask` to 0 or 1"
            )
            raise DataError(file, place, f"messages[{index}] {error}", fix) from error
        # A trained first message would have no prompt.
        if train and index == 0:
            what = "messages[0] is the assistant's, and there is no message before it"
            fix = "begin with a message of the system or the user, or set its `train` to false"
            raise DataError(file, place, what, fix)
        if train:
            trained.append(index)
    if not trained:
        fix = "add a message of the assistant, or remove the row"
        raise DataError(file, place, "has no message of the assistant to train on", fix)
    return trained

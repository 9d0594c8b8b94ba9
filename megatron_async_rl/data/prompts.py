"""Conversion of data rows to prompts: columns, chat messages and length limits.

Invariants:
- every row is read and checked before the run starts a process; the first unusable row raises an
  error with its file and place;
- rows that are left out because of their length are counted and reported.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import batched
from pathlib import Path
from typing import Any

from megatron_async_rl.config.data import (
    TOOLS_COLUMN,
    DataColumns,
    DataConfig,
    FileConfig,
    SourceConfig,
)
from megatron_async_rl.config.problem import DataError
from megatron_async_rl.data.files import DataRow, a_kind, read_rows
from megatron_async_rl.data.locations import require_training_files
from megatron_async_rl.data.messages import (
    MessagesFault,
    TrainingConversation,
    answered,
    as_conversation,
    conversation,
    is_messages,
    is_unicode,
    loss_weight,
    message_of,
    messages_in,
    response_text,
    without_nulls,
)
from megatron_async_rl.data.row_columns import (
    MISSING,
    TOOLS_KEY,
    Required,
    checked_rows,
    fields_of,
    missing_column,
    nothing_more,
    prompt_value,
    read_json,
    value_of,
    with_fields,
)
from megatron_async_rl.data.tokenizer import Tokenizer, encode_rows
from megatron_async_rl.samples.types import Prompt

_log = logging.getLogger(__name__)


PromptQuery = str | list[dict[str, Any]]
"""Prompt of a row: text, or chat messages."""
BATCH_ROWS = 4096
"""Number of rows whose texts are tokenized in one call."""


@dataclass(frozen=True, kw_only=True)
class MixturePart:
    """One source of a mixture. `count`: number of its prompts. `too_long`: number of rows above
    data.max_prompt_tokens or data.max_tokens, which `count` excludes."""

    label: str = ""
    count: int
    weight: float = 1.0
    too_long: int = 0


@dataclass(frozen=True, kw_only=True)
class PromptSet:
    """Prompts of all parts, in the order of the parts."""

    prompts: tuple[Prompt, ...]
    parts: tuple[MixturePart, ...]

    @property
    def too_long(self) -> int:
        return sum(part.too_long for part in self.parts)


def log_too_long(data: PromptSet) -> None:
    if data.too_long:
        _log.warning(
            "%d rows are longer than data.max_prompt_tokens or data.max_tokens and are left out;"
            " %d rows remain",
            data.too_long,
            len(data.prompts),
        )


def read_training(
    data: DataConfig,
    tokenizer: Tokenizer,
    *,
    required: Required = nothing_more,
    room: int | None = None,
    limit: int | None = None,
    supervised: bool = False,
) -> PromptSet:
    """Return the prompts of all sources of the training data.

    `required`: columns and values that rewards need. `room`: largest number of tokens of a prompt
    that fits the run; a longer prompt is an error. `limit`: largest number of rows to read from
    each source. `supervised`: rows have given responses. Raises DataError.
    """
    sources = data.training
    prompts: list[Prompt] = []
    parts = []
    for source in sources:
        one = read_set(
            data,
            source,
            tokenizer,
            required=required,
            room=room,
            limit=limit,
            supervised=supervised,
        )
        # Prefix the ids, because two files may contain the same ids.
        before = f"{source.label}/" if len(sources) > 1 else ""
        prompts += [replace(each, id=before + each.id) for each in one.prompts]
        parts.append(replace(one.parts[0], label=source.label, weight=source.weight))
    return PromptSet(prompts=tuple(prompts), parts=tuple(parts))


def read_set(
    data: DataConfig,
    file: FileConfig,
    tokenizer: Tokenizer,
    *,
    required: Required = nothing_more,
    room: int | None = None,
    limit: int | None = None,
    supervised: bool = False,
) -> PromptSet:
    """Return the prompts of one file or folder, with the settings of `data`. Parameters are those
    of `read_training`. Raises DataError."""
    # Only training data is a SourceConfig; a held-out set may read any file.
    if isinstance(file, SourceConfig):
        require_training_files(file.path)
    columns = data.columns(file)
    chat = {
        "data.system_prompt": columns.system_prompt,
        "data.chat_template": data.chat_template,
        "data.chat_template_options": data.chat_template_options,
        "data.tools_key": columns.tools != TOOLS_COLUMN and columns.tools,
    }
    prompts, too_long = _read(
        file.path,
        tokenizer,
        columns,
        required=required,
        room=room,
        longest=data.max_prompt_tokens,
        limit=limit,
        as_chat=data.as_chat,
        chat_keys=[key for key, value in chat.items() if value],
        supervised=supervised,
    )
    part = MixturePart(count=len(prompts), too_long=too_long)
    return PromptSet(prompts=tuple(prompts), parts=(part,))


def read_prompts(
    path: Path,
    tokenizer: Tokenizer,
    *,
    max_prompt_tokens: int | None = None,
    limit: int | None = None,
    required: tuple[str, ...] = (),
) -> list[Prompt]:
    """Return the prompts of one file. Rows have a column `prompt` (text, or a list of chat
    messages) and, optionally, a unique `id`; other columns become `Prompt.fields`.

    `required`: further columns that every row must have. `limit`: largest number of rows to read.
    Raises DataError with file, line, fault and fix, also for a prompt above `max_prompt_tokens`.
    """
    prompts, _ = _read(
        path,
        tokenizer,
        DataColumns(),
        required=Required(lambda fields: required),
        room=max_prompt_tokens,
        limit=limit,
    )
    return prompts


def _read(
    path: Path,
    tokenizer: Tokenizer,
    columns: DataColumns,
    *,
    required: Required,
    room: int | None = None,
    longest: int | None = None,
    limit: int | None = None,
    as_chat: bool = False,
    chat_keys: Sequence[str] = (),
    supervised: bool = False,
) -> tuple[list[Prompt], int]:
    """Return the prompts, and the number of rows above `longest`."""
    path = Path(path)
    # Name under which the loss or a reward reads the user's answer column.
    field = "response" if supervised else "answer"
    conversations = supervised and columns.messages is not None
    if supervised and not conversations:
        required = Required(lambda fields: ("response",))  # supervised data has no reward
    # A conversation contains its answers, so an answer column would be ignored silently.
    if conversations and columns.answer is not None:
        what = f"is read as conversations, and data.answer_key: {columns.answer} names answers"
        raise DataError(path, None, what, "remove data.answer_key, or data.messages_key")
    # Generators parse, check and tokenize rows without a list of all rows in memory.
    rows_with_fields = with_fields(read_rows(path, limit), columns)
    rows = checked_rows(rows_with_fields, columns, field, required)
    queries = ((row, _messages_or_text(row, columns, as_chat, chat_keys)) for row in rows)
    prompts: list[Prompt] = []
    places: dict[str, tuple[Path, int]] = {}
    too_long = 0
    response_column = columns.answer or "response"
    for (file, place, values), prompt, encoded in _encoded(tokenizer, queries):
        given: TrainingConversation | None = None
        # A row is plain text, a conversation, a response to messages, or a chat prompt.
        text: str
        ids: Sequence[int]
        if isinstance(prompt, str):
            text, ids = prompt, encoded
            if supervised:
                _require_response(file, place, value_of(values, response_column))
        elif conversations:
            tools = _tools(file, place, values, columns)
            given = _rendered(file, place, conversation, prompt, tokenizer, tools)
            text, ids = given.prompt, given.prompt_ids
        elif supervised:
            tools = _tools(file, place, values, columns)
            response = value_of(values, response_column)
            given = _given_response(file, place, prompt, response, tokenizer, tools)
            text, ids = given.prompt, given.prompt_ids
        else:
            tools = _tools(file, place, values, columns)
            text, ids = _rendered(file, place, _chat, prompt, tokenizer, tools)
        # Read the id before the length limits, so that duplicate ids of long rows are errors, too.
        prompt_id = _identity(file, place, values, places)
        if not ids:
            fix = "write a prompt that the model's tokenizer can encode"
            raise DataError(file, place, f"`{columns.prompt}` has no tokens", fix)
        if longest is not None and len(ids) > longest:
            # Counted, not an error: `longest` is the user's filter; `room` is a hard limit of the
            # run.
            too_long += 1
            continue
        if room is not None and len(ids) > room:
            raise DataError(
                file,
                place,
                f"`{columns.prompt}` has {len(ids)} tokens, and the limit is {room}",
                f"leave such prompts out (data.max_prompt_tokens={room}), or raise the limit: raise"
                " rollout.max_context or lower rollout.sampling.max_tokens",
            )
        fields = fields_of(values, columns)
        if supervised:
            loss_weight(file, place, fields)
        if columns.answer is not None:
            fields[field] = value_of(values, columns.answer)
        if given is not None:
            fields["response"] = given
        prompts.append(Prompt(id=prompt_id, text=text, token_ids=tuple(ids), fields=fields))
    # An empty file and a filter that leaves no row need different fixes.
    if not places:
        fix = 'write a row for each prompt, in JSONL {"prompt": "1+1="}'
        raise DataError(path, None, "contains no prompts", fix)
    if not prompts:
        what = f"has no prompt of at most {longest} tokens: all {too_long} are longer"
        raise DataError(path, None, what, "raise data.max_prompt_tokens")
    return prompts, too_long


def _encoded(
    tokenizer: Tokenizer, queries: Iterator[tuple[DataRow, PromptQuery]]
) -> Iterator[tuple[DataRow, PromptQuery, list[int]]]:
    """Yield (row, prompt, ids). `ids`: token ids of a plain text; empty for chat messages. Texts
    are encoded in batches, because the tokenizer's result needs many times the memory of the
    ids."""
    for some in batched(queries, BATCH_ROWS):
        # Encode only plain text: chat prompts are rendered row by row.
        texts = [(row, prompt) for row, prompt in some if isinstance(prompt, str)]
        places = [(file, place) for (file, place, _), _ in texts]
        encoded = iter(encode_rows(tokenizer, [text for _, text in texts], places.__getitem__))
        for row, prompt in some:
            yield row, prompt, next(encoded) if isinstance(prompt, str) else []


def _identity(
    file: Path, place: int, values: Mapping[str, Any], places: dict[str, tuple[Path, int]]
) -> str:
    """Return the row's id, and add it to `places` (id -> file and place of an earlier row). Raises
    DataError for a duplicate id."""
    given = values.get("id")
    if given == "":  # an empty cell of CSV
        given = None
    # pandas writes whole numbers as floats if the column has gaps.
    if isinstance(given, float) and given.is_integer():
        given = int(given)
    if given is not None and (isinstance(given, bool) or not isinstance(given, (str, int))):
        fix = "write text or a whole number"
        raise DataError(file, place, f"`id` is {a_kind(given)}", fix)
    # Use the file's name, not its path, so that ids stay the same if a data folder is moved.
    name = f"{file.name}:{place}" if given is None else str(given)
    if given is None:
        # Files in several folders may have one name.
        for folder in file.absolute().parents:
            if name not in places:
                break
            name = f"{folder.name}/{name}"
    if not is_unicode(name):
        what = f"`id` {name!r} is not valid Unicode"
        raise DataError(file, place, what, "use other characters")
    if name in places:
        other, line = places[name]
        where = f"line {line}" if other == file else f"{other.name}:{line}"
        raise DataError(file, place, f"`id` {name!r} is also the id of {where}", "use unique ids")
    places[name] = (file, place)
    return name


def _messages_or_text(
    row: DataRow, columns: DataColumns, as_chat: bool, chat_keys: Sequence[str]
) -> PromptQuery:
    """Return the prompt as chat messages, or as text that is not rendered.

    `chat_keys`: config keys with a value that affects only chat messages. Raises DataError for a
    faulty message, and for plain text if there are `chat_keys`, which it would ignore.
    """
    file, place, values = row
    value = prompt_value(file, place, values, columns)
    if isinstance(value, str):
        if not as_chat:
            if chat_keys:
                what = f"the prompt is plain text, and {chat_keys[0]} is for chat messages"
                fix = f"set data.as_chat: true, or remove {chat_keys[0]}"
                raise DataError(file, place, what, fix)
            return value
        # From here on, text with `as_chat` is treated like messages.
        value = [{"role": "user", "content": value}]
    messages = [message_of(file, place, message) for message in value]
    if not any(one.get("tool_calls") or (one.get("content") or "").strip() for one in messages):
        fix = "write the question, or remove the row"
        raise DataError(file, place, "every chat message is empty", fix)
    # A row's system message takes precedence, because templates refuse two system messages.
    if columns.system_prompt and messages[0]["role"] != "system":
        messages.insert(0, {"role": "system", "content": columns.system_prompt})
    return messages


def _given_response(
    file: Path,
    place: int,
    messages: list[dict[str, Any]],
    response: Any,
    tokenizer: Tokenizer,
    tools: Sequence[Any],
) -> TrainingConversation:
    """Return the conversation of chat messages and a response, which is text, a number, or
    messages as in TRL. Raises DataError."""
    value = _messages_or_value(file, place, response)
    if value and is_messages(value):
        completion = [message_of(file, place, message) for message in value]
        # Render both together: separate renderings may tokenize the boundary differently.
        whole = as_conversation(messages, completion)
        return _rendered(file, place, conversation, whole, tokenizer, tools)
    text = response_text(file, place, value)

    def render(file: Path, place: int, messages: Any, tokenizer: Tokenizer, tools: Any) -> Any:
        _require_question(file, place, messages)
        return answered(file, place, messages, text, tokenizer, tools)

    return _rendered(file, place, render, messages, tokenizer, tools)


def _messages_or_value(file: Path, place: int, response: Any) -> Any:
    try:
        return messages_in(response)
    except MessagesFault as error:
        raise DataError(file, place, f"`response` {error.what}", error.fix) from error


def _require_response(file: Path, place: int, response: Any) -> None:
    """Raise DataError for a response to plain text that is not text. Messages are refused, because
    the policy would learn their JSON."""
    value = _messages_or_value(file, place, response)
    if value and is_messages(value):
        what = "`response` has chat messages, and the prompt is plain text"
        raise DataError(file, place, what, "set data.as_chat: true, or write the response as text")
    response_text(file, place, response)


def _tools(file: Path, place: int, values: Mapping[str, Any], columns: DataColumns) -> list[Any]:
    """Return the schemas of the functions that the row's messages may call."""
    if columns.tools is None:
        return []
    # The column is often JSON text, and so may each of its entries be.
    tools = read_json(value_of(values, columns.tools))
    # The default column is optional; a column that the user names is required.
    if tools is MISSING and columns.tools != TOOLS_COLUMN:
        raise missing_column(file, place, TOOLS_KEY, columns.tools, values)
    if tools is None or tools is MISSING or (isinstance(tools, str) and not tools.strip()):
        return []
    # Remove nulls, which a table adds for the parameters of other rows' functions.
    tools = [without_nulls(read_json(one)) for one in tools] if isinstance(tools, list) else tools
    if not isinstance(tools, list) or not all(isinstance(one, dict) for one in tools):
        what = f"`{columns.tools}` is not a list of JSON schemas: {tools!r:.80}"
        fix = (
            'write [{"type": "function", "function": {"name": ...}}]; if the column has other'
            " content, set data.tools_key: null"
        )
        raise DataError(file, place, what, fix)
    return tools


def _chat(
    file: Path,
    place: int,
    messages: list[dict[str, Any]],
    tokenizer: Tokenizer,
    tools: Sequence[Any],
) -> tuple[str, list[int]]:
    _require_question(file, place, messages)
    text = tokenizer.render_chat(messages, answer=True, tools=tools)
    return text, tokenizer.encode_rendered(text)


def _require_question(file: Path, place: int, messages: Sequence[Mapping[str, Any]]) -> None:
    if messages[-1]["role"] == "assistant":
        what = "the last message is the assistant's, so there is nothing to answer"
        fix = (
            "end the prompt with the user's message; to train on whole conversations, set"
            " data.messages_key and objective.loss: sft"
        )
        raise DataError(file, place, what, fix)


def _rendered[Result](
    file: Path,
    place: int,
    render: Callable[[Path, int, list[dict[str, Any]], Tokenizer, Sequence[Any]], Result],
    messages: list[dict[str, Any]],
    tokenizer: Tokenizer,
    tools: Sequence[Any],
) -> Result:
    """Return the result of `render`. Its errors become DataErrors that name the row."""
    try:
        return render(file, place, messages, tokenizer, tools)
    except DataError as error:
        # An error with a line already names the row; an error of the tokenizer names the model.
        if error.line is not None:
            raise
        what = f"cannot be rendered: {error.path} {error.what}"
        raise DataError(file, place, what, error.fix) from error
    except Exception as error:  # a template is a program: it may raise anything
        what = f"the chat template refuses the messages: {error}"
        raise DataError(file, place, what, "follow the template's rules") from error

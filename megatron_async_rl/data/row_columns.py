"""Columns of a row: values by the name of a column, also inside other columns, and checks that a
row has what training reads of it.

Invariants:
- a column that is called `a.b` goes before the value `b` of a column `a`;
- an object inside a column may be JSON text, as every cell of CSV is;
- the fix for a missing column names one whose value would be accepted in its place.
"""

from __future__ import annotations

import contextlib
import difflib
import json
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from megatron_async_rl.config.data import DataColumns
from megatron_async_rl.config.problem import DataError
from megatron_async_rl.config.visible_text import is_blank
from megatron_async_rl.data.files import DataRow, a_kind, columns_of_bytes
from megatron_async_rl.data.messages import (
    MessagesFault,
    half_a_pair,
    is_messages,
    is_unicode,
    messages_in,
)

MISSING: Any = object()
TOOLS_KEY = "tools_key"
SYNONYMS = {
    "prompt": (
        *("question", "problem", "instruction", "query", "input", "text"),
        *("messages", "conversations", "conversation"),
    ),
    "messages": ("conversations", "conversation", "prompt"),
    "answer": ("ground_truth", "solution", "final_answer", "target", "label", "gold", "output"),
    "response": ("answer", "completion", "output", "solution", "target", "chosen"),
}
"""Names that data sets give to the column of each role, the most certain first."""


@dataclass(frozen=True)
class Required:
    """Columns and values that the rewards read of a row. Both functions take the fields of its
    prompt."""

    columns: Callable[[Mapping[str, Any]], Sequence[str] | None] = lambda fields: ()
    """Further columns that the row must have; None if no part of the reward applies to it."""
    fault: Callable[[Mapping[str, Any]], tuple[str, str, str] | None] = lambda fields: None
    """(column, fault, fix) if a reward cannot use a value of the row, which has all `columns`. The
    column has the reward's name for it, and is empty if the fault concerns several columns."""


nothing_more = Required()


def value_of(values: Mapping[str, Any], name: str) -> Any:
    """Return the value of a column, or of `outer.inner` inside columns; MISSING where there is
    none."""
    # A literal column name always wins over a path.
    if name in values:
        return values[name]
    parts = name.split(".")
    # The longest outer name first: a column `a.b` takes precedence over `b` inside `a`.
    for count in range(len(parts) - 1, 0, -1):
        outer = read_json(values.get(".".join(parts[:count])))
        if isinstance(outer, Mapping):
            return value_of(outer, ".".join(parts[count:]))
    return MISSING


def read_json(value: Any) -> Any:
    """Return what a text holds as JSON; any other value, and any other text, as it is."""
    if isinstance(value, str):
        with contextlib.suppress(ValueError, RecursionError):
            return json.loads(value)
    return value


def with_fields(rows: Iterator[DataRow], columns: DataColumns) -> Iterator[DataRow]:
    """Yield the rows with the columns that the configuration adds to each of them."""
    for file, place, values in rows:
        for name, value in columns.fields.items():
            # A column that already holds the same value does no harm.
            if name in values and values[name] != value:
                what = f"has a column `{name}` of its own: {values[name]!r:.80}"
                fix = f"remove `{name}` from the `fields` of this file, or give it another name"
                raise DataError(file, place, what, fix)
        yield file, place, {**values, **columns.fields}


def checked_rows(
    rows: Iterator[DataRow], columns: DataColumns, field: str, required: Required
) -> Iterator[DataRow]:
    """Yield the rows that have every column which training reads. Raises DataError for others."""
    prompt = columns.messages or columns.prompt
    # Role to column. The role decides the hint that a missing column gets.
    always = {("messages" if columns.messages else "prompt"): prompt}
    if columns.answer is not None:
        always[field] = columns.answer
    for file, place, values in rows:
        # Rewards see what they will see in training: the fields of the prompt, not the row.
        fields = fields_of(values, columns)
        if columns.answer is not None and value_of(values, columns.answer) is not MISSING:
            fields[field] = value_of(values, columns.answer)
        more = required.columns(fields)
        if more is None:
            raise DataError(
                file,
                place,
                "is of no part of the reward: none has a `where` that it meets",
                "give a part of rollout.reward.parts a `where` for it, or none; `fields` of its"
                " source gives every row of a file a column",
            )
        # `prompt` is checked under the user's name for it, so a reward's request for it adds
        # nothing.
        wanted = always | {n: n for n in more if n not in always and n != "prompt"}
        for role, column in wanted.items():
            # Rewards read whole columns; only a key of `data` may name a value inside one.
            named = always.get(role) == column
            text = value_of(values, column) if named else values.get(column, MISSING)
            if text is MISSING:
                raise missing_column(file, place, role, column, values)
            # A reward or an engine would fail on it much later, and without the row's place.
            if not is_unicode(text if isinstance(text, str) else ""):
                raise half_a_pair(file, place, f"`{column}`")
        # After the columns: a reward's check may read every column that it required.
        if (fault := required.fault(fields)) is not None:
            raise _unusable(file, place, *fault, own={field: columns.answer or field})
        value = prompt_value(file, place, values, columns)
        if value in ("", [], {}) or (isinstance(value, str) and is_blank(value)):
            fix = "write the question, or remove the line"
            raise DataError(file, place, f"`{prompt}` is empty", fix)
        if not isinstance(value, list if columns.messages else (str, list)):
            what = f"`{prompt}` is {a_kind(value)}"
            fix = "make it text, or a list of chat messages"
            if columns.messages:
                fix = "make it a list of chat messages, or name a column of text as data.prompt_key"
            raise DataError(file, place, what, fix)
        yield file, place, values


def fields_of(values: Mapping[str, Any], columns: DataColumns) -> dict[str, Any]:
    """Return the columns of a row that become fields of its prompt under their own names."""
    # The prompt travels as tokens and the id as the prompt's own, so neither is copied into every
    # sample.
    taken = (columns.messages or columns.prompt, "id")
    return {key: value for key, value in values.items() if key not in taken}


def prompt_value(file: Path, place: int, values: Mapping[str, Any], columns: DataColumns) -> Any:
    """Return the prompt of a row; messages that are JSON text become a list."""
    column = columns.messages or columns.prompt
    try:
        return messages_in(value_of(values, column))
    except MessagesFault as error:
        fix = error.fix.replace("COLUMN", column)
        raise DataError(file, place, f"`{column}` {error.what}", fix) from error


def _unusable(
    file: Path, place: int, column: str, what: str, fix: str, *, own: Mapping[str, str]
) -> DataError:
    """Return the error for a value that a reward cannot use, with the user's name of its column.
    `own`: that name for the columns that a key of the configuration names."""
    if column:
        return DataError(file, place, f"`{own.get(column, column)}` {what}", fix)
    renamed = [f"`{role}` is the column `{name}`" for role, name in own.items() if role != name]
    return DataError(file, place, "; ".join((what, *renamed)), fix)


def missing_column(
    file: Path, place: int, role: str, column: str, values: Mapping[str, Any]
) -> DataError:
    """Return the error for a row without `column`, with the column that was probably meant."""
    # Inner columns are candidates, too: data sets often nest the answer.
    leaves = dict(_leaves(values))
    key = {"prompt": "prompt_key", "messages": "messages_key", TOOLS_KEY: TOOLS_KEY}.get(role)
    key = key or ("answer_key" if role in ("answer", "response") else None)
    fits: Callable[[Any], bool] = _FITS.get(role, lambda value: True)
    # Without a key that names it, a column cannot be inside another.
    named = [name for name in leaves if fits(leaves[name]) and (key or name in values)]
    near = difflib.get_close_matches(column, named, n=1)
    endings = [*SYNONYMS.get(role, ()), column.rpartition(".")[2]]
    # Similar spelling first, then names of the same role, then inner columns with such a name.
    near += [name for ending in endings for name in named if name == ending]
    near += [name for ending in endings for name in named if name.endswith(f".{ending}")]
    found = near[0] if near else None
    if key == "prompt_key" and found is not None and _is_messages(leaves[found]):
        key = "messages_key"
    fix = f"add `{column}` to every row"
    if key is not None:
        named_column = "COLUMN" if found is None else found
        fix += (
            f", or name its column: data.{key}={named_column} (of a source or a set: {key}, by its"
            " path)"
        )
    elif found is not None:
        fix = f"did you mean `{found}`? {fix}"
    # A column of bytes exists in the file and not in the row, which looks like a missing column.
    left_out = columns_of_bytes(file)
    if column.partition(".")[0] in left_out or column in left_out:
        what = f"has a column `{column}` that holds bytes, which are not read"
        fix = f'write it as text, in pandas df["{column}"] = df["{column}"].str.decode("utf-8")'
        return DataError(file, place, what, fix)
    shown = ", ".join(leaves) or "none"
    if left_out:
        shown += f"; left out, as they hold bytes: {', '.join(left_out)}"
    return DataError(file, place, f"has no `{column}` (its columns: {shown})", fix)


def _leaves(values: Mapping[str, Any], before: str = "") -> Iterator[tuple[str, Any]]:
    """Yield every column; the name of an inner column contains the outer names."""
    for name, value in values.items():
        inner = read_json(value) if isinstance(value, str) and value[:1] == "{" else value
        if isinstance(inner, Mapping) and inner:
            yield from _leaves(inner, f"{before}{name}.")
        else:
            yield before + name, value


def _is_messages(value: Any) -> bool:
    with contextlib.suppress(ValueError):
        # MessagesFault is a ValueError: such a value is not offered as a fix.
        value = messages_in(value)
    return is_messages(value) and all(not {"role", "from"}.isdisjoint(one) for one in value)


def _is_value(value: Any) -> bool:
    return isinstance(value, (str, int, float)) and not isinstance(value, bool)


_FITS: dict[str, Callable[[Any], bool]] = {
    "prompt": lambda value: isinstance(value, str) or _is_messages(value),
    "messages": _is_messages,
    "answer": _is_value,
    "response": lambda value: _is_value(value) or _is_messages(value),
    TOOLS_KEY: lambda value: isinstance(value, (str, list)),
}
"""Type that a column must hold to be suggested for each role."""

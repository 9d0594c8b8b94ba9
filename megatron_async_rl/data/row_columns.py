"""Columns of a row: look-up of values by column name, also inside other columns, and checks that a
row has the columns that training reads.

Invariants:
- a column with the name `a.b` takes precedence over the value `b` in a column `a`;
- an object inside a column may be JSON text, because every cell of CSV is text;
- the fix for a missing column names a column whose value would be accepted instead.
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
"""Role of a column -> its names in data sets, the most reliable first."""


@dataclass(frozen=True)
class Required:
    """Columns and values that the rewards read in a row. Both functions take the fields of the
    row's prompt."""

    columns: Callable[[Mapping[str, Any]], Sequence[str] | None] = lambda fields: ()
    """Further columns that the row must have; None if no part of the reward applies to it."""
    fault: Callable[[Mapping[str, Any]], tuple[str, str, str] | None] = lambda fields: None
    """(column, fault, fix) if a reward cannot use a value of the row, which has all `columns`;
    otherwise None. `column` is the reward's name for it; empty if the fault concerns several
    columns."""


nothing_more = Required()


def value_of(values: Mapping[str, Any], name: str) -> Any:
    """Return the value of a column, or the value at the path `outer.inner` inside a column; MISSING
    if there is no value."""
    # A column with the literal name takes precedence over a path.
    if name in values:
        return values[name]
    parts = name.split(".")
    # Try the longest outer name first: a column `a.b` takes precedence over `b` inside `a`.
    for count in range(len(parts) - 1, 0, -1):
        outer = read_json(values.get(".".join(parts[:count])))
        if isinstance(outer, Mapping):
            return value_of(outer, ".".join(parts[count:]))
    return MISSING


def read_json(value: Any) -> Any:
    """Return the value of JSON text; any other text and any other value unchanged."""
    if isinstance(value, str):
        with contextlib.suppress(ValueError, RecursionError):
            return json.loads(value)
    return value


def with_fields(rows: Iterator[DataRow], columns: DataColumns) -> Iterator[DataRow]:
    """Yield the rows with the constant columns of the configuration. Raises DataError for a row
    with another value in such a column."""
    for file, place, values in rows:
        for name, value in columns.fields.items():
            # Accept a column with the same value.
            if name in values and values[name] != value:
                what = f"has its own column `{name}`: {values[name]!r:.80}"
                fix = f"remove `{name}` from the `fields` of this file, or rename it there"
                raise DataError(file, place, what, fix)
        yield file, place, {**values, **columns.fields}


def checked_rows(
    rows: Iterator[DataRow], columns: DataColumns, field: str, required: Required
) -> Iterator[DataRow]:
    """Yield the rows. Raises DataError for a row that lacks a column which training reads, or whose
    values training or a reward cannot use."""
    prompt = columns.messages or columns.prompt
    # Role -> column. The role decides the fix for a missing column.
    always = {("messages" if columns.messages else "prompt"): prompt}
    if columns.answer is not None:
        always[field] = columns.answer
    for file, place, values in rows:
        # Check the fields of the prompt, which rewards get in training, and not the row.
        fields = fields_of(values, columns)
        if columns.answer is not None and value_of(values, columns.answer) is not MISSING:
            fields[field] = value_of(values, columns.answer)
        more = required.columns(fields)
        if more is None:
            raise DataError(
                file,
                place,
                "matches the `where` of no part of the reward",
                "set the `where` of a part in rollout.reward.parts so that it matches, or remove a"
                " `where`; `fields` of a source adds a column to every row of a file",
            )
        # `always` contains the prompt under the user's name, so skip a reward's request for it.
        needed = always | {n: n for n in more if n not in always and n != "prompt"}
        for role, column in needed.items():
            # Rewards read whole columns; only a key of `data` may name a value inside a column.
            named = always.get(role) == column
            text = value_of(values, column) if named else values.get(column, MISSING)
            if text is MISSING:
                raise missing_column(file, place, role, column, values)
            # Check here: a reward or an engine would fail later, without the place of the row.
            if not is_unicode(text if isinstance(text, str) else ""):
                raise half_a_pair(file, place, f"`{column}`")
        # Check values after columns: the check of a reward may read every column that it requires.
        if (fault := required.fault(fields)) is not None:
            raise _unusable(file, place, *fault, own={field: columns.answer or field})
        value = prompt_value(file, place, values, columns)
        if value in ("", [], {}) or (isinstance(value, str) and is_blank(value)):
            fix = "write the question, or remove the row"
            raise DataError(file, place, f"`{prompt}` is empty", fix)
        if not isinstance(value, list if columns.messages else (str, list)):
            what = f"`{prompt}` is {a_kind(value)}"
            fix = "write text, or a list of chat messages"
            if columns.messages:
                fix = "write a list of chat messages, or name a column of text as data.prompt_key"
            raise DataError(file, place, what, fix)
        yield file, place, values


def fields_of(values: Mapping[str, Any], columns: DataColumns) -> dict[str, Any]:
    """Return the columns of a row that become fields of its prompt under their own names."""
    # A prompt has its own attributes for text, tokens and id; do not copy them into every sample.
    taken = (columns.messages or columns.prompt, "id")
    return {key: value for key, value in values.items() if key not in taken}


def prompt_value(file: Path, place: int, values: Mapping[str, Any], columns: DataColumns) -> Any:
    """Return the prompt of a row. Messages that are JSON text become a list. Raises DataError."""
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
    `own`: the reward's name -> the user's name, for columns that a config key names."""
    if column:
        return DataError(file, place, f"`{own.get(column, column)}` {what}", fix)
    renamed = [f"`{role}` is the column `{name}`" for role, name in own.items() if role != name]
    return DataError(file, place, "; ".join((what, *renamed)), fix)


def missing_column(
    file: Path, place: int, role: str, column: str, values: Mapping[str, Any]
) -> DataError:
    """Return the error for a row without `column`. Its fix proposes the most similar column."""
    # Inner columns are candidates, too, because data sets often nest the answer.
    leaves = dict(_leaves(values))
    key = {"prompt": "prompt_key", "messages": "messages_key", TOOLS_KEY: TOOLS_KEY}.get(role)
    key = key or ("answer_key" if role in ("answer", "response") else None)
    fits: Callable[[Any], bool] = _FITS.get(role, lambda value: True)
    # Only a column that a config key names may be inside another column.
    named = [name for name in leaves if fits(leaves[name]) and (key or name in values)]
    near = difflib.get_close_matches(column, named, n=1)
    endings = [*SYNONYMS.get(role, ()), column.rpartition(".")[2]]
    # Prefer a similar spelling, then a name of the same role, then an inner column with such a
    # name.
    near += [name for ending in endings for name in named if name == ending]
    near += [name for ending in endings for name in named if name.endswith(f".{ending}")]
    nearest = near[0] if near else None
    if key == "prompt_key" and nearest is not None and _is_messages(leaves[nearest]):
        key = "messages_key"
    fix = f"add `{column}` to every row"
    if key is not None:
        named_column = "COLUMN" if nearest is None else nearest
        fix += (
            f", or name its column: data.{key}={named_column} (for a source or a set, set {key}"
            " next to its path)"
        )
    elif nearest is not None:
        fix = f"did you mean `{nearest}`? {fix}"
    # A column of bytes is in the file but not in the row, so it needs an error of its own.
    left_out = columns_of_bytes(file)
    if column.partition(".")[0] in left_out or column in left_out:
        what = f"has a column `{column}` of bytes, which are not read"
        fix = f'write it as text, in pandas df["{column}"] = df["{column}"].str.decode("utf-8")'
        return DataError(file, place, what, fix)
    shown = ", ".join(leaves) or "none"
    if left_out:
        shown += f"; left out because they contain bytes: {', '.join(left_out)}"
    return DataError(file, place, f"has no `{column}` (its columns: {shown})", fix)


def _leaves(values: Mapping[str, Any], before: str = "") -> Iterator[tuple[str, Any]]:
    """Yield (name, value) of every column; the name of an inner column contains the outer names."""
    for name, value in values.items():
        inner = read_json(value) if isinstance(value, str) and value[:1] == "{" else value
        if isinstance(inner, Mapping) and inner:
            yield from _leaves(inner, f"{before}{name}.")
        else:
            yield before + name, value


def _is_messages(value: Any) -> bool:
    with contextlib.suppress(ValueError):
        # MessagesFault is a ValueError; such a column is not proposed.
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
"""Role -> condition on the value of a column that the fix proposes."""

"""Values of a row by the name of a column, also inside other columns.

Invariants:
- a column that is called `a.b` goes before the value `b` of a column `a`;
- an object inside a column may be JSON text, as every cell of CSV is;
- the fix for a missing column names one whose value would be accepted in its place.
"""

from __future__ import annotations

import contextlib
import difflib
import json
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any

from megatron_async_rl.config.problem import DataError
from megatron_async_rl.data.files import columns_of_bytes
from megatron_async_rl.data.messages import is_messages, messages_in

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


def value_of(values: Mapping[str, Any], name: str) -> Any:
    """Return the value of a column, or of `outer.inner` inside columns; MISSING where there is
    none."""
    if name in values:
        return values[name]
    parts = name.split(".")
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


def missing_column(
    file: Path, place: int, role: str, column: str, values: Mapping[str, Any]
) -> DataError:
    """Return the error for a row without `column`, with the column that was probably meant."""
    leaves = dict(_leaves(values))
    key = {"prompt": "prompt_key", "messages": "messages_key", TOOLS_KEY: TOOLS_KEY}.get(role)
    key = key or ("answer_key" if role in ("answer", "response") else None)
    fits: Callable[[Any], bool] = _FITS.get(role, lambda value: True)
    # Without a key that names it, a column cannot be inside another.
    named = [name for name in leaves if fits(leaves[name]) and (key or name in values)]
    near = difflib.get_close_matches(column, named, n=1)
    endings = [*SYNONYMS.get(role, ()), column.rpartition(".")[2]]
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
    """Every column, those inside others by their whole name."""
    for name, value in values.items():
        inner = read_json(value) if isinstance(value, str) and value[:1] == "{" else value
        if isinstance(inner, Mapping) and inner:
            yield from _leaves(inner, f"{before}{name}.")
        else:
            yield before + name, value


def _is_messages(value: Any) -> bool:
    with contextlib.suppress(ValueError):
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

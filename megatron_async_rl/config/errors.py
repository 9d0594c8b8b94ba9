"""Translation of pydantic's validation errors into problems with the dotted key, the given value
and the expected value."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from typing import Any

from pydantic import ValidationError
from pydantic_core import ErrorDetails

from megatron_async_rl.config.aliases import alias_fix
from megatron_async_rl.config.keys import (
    ELSEWHERE_ONLY,
    REMOVED,
    describe,
    elsewhere,
    is_list,
    is_method,
    is_named,
    method_homes,
    method_name,
    models_at,
    models_in,
    nearest,
    nearest_anywhere,
    valid_keys,
)
from megatron_async_rl.config.problem import Problem
from megatron_async_rl.config.settings_model import Strict


class Origins:
    """Place at which each dotted key was set: a line of the file, or an override."""

    def __init__(self, file: str, lines: Mapping[str, int]) -> None:
        self._file = file
        self._where = {key: f"{file}:{line}" for key, line in lines.items()}

    def set(self, key: str, where: str) -> None:
        # The override replaces the section, so the line numbers inside it are stale.
        for inside in [known for known in self._where if known.startswith(key + ".")]:
            del self._where[inside]
        self._where[key] = where

    def of(self, key: str) -> str:
        """Return the place of the key itself, of a key set inside it, or of the nearest enclosing
        section that was set."""
        inside = [where for known, where in self._where.items() if known.startswith(key + ".")]
        if key not in self._where and inside:
            return inside[0]
        # A missing key has no line, so use the line of its section.
        while key and key not in self._where:
            key = key.rpartition(".")[0]
        return self._where.get(key, self._file)


def explain(error: ValidationError, tree: Mapping[str, Any], origins: Origins) -> list[Problem]:
    """Return one problem per pydantic error. Unknown keys come first because they often cause the
    other errors."""
    details = sorted(
        error.errors(include_url=False), key=lambda one: one["type"] != "extra_forbidden"
    )
    return [_problem(one, tree, origins) for one in details]


def _problem(detail: ErrorDetails, tree: Mapping[str, Any], origins: Origins) -> Problem:
    parts = _dotted(detail["loc"], tree)
    key = ".".join(str(part) for part in parts)
    where = origins.of(key)
    parents = models_at(parts[:-1], tree)
    # Branch on pydantic's error types, never on its messages.
    kind, context = detail["type"], detail.get("ctx", {})
    given = _show(detail["input"])
    # Removed keys come first: their nearest valid key would mislead.
    if kind == "extra_forbidden" and key in REMOVED:
        return Problem(key=key, what="is no longer a key", fix=REMOVED[key], where=where)
    if kind == "extra_forbidden":
        return Problem(
            key=key,
            what="is not a key of the configuration",
            fix=_unknown(key, parts, parents),
            where=where,
        )
    if kind == "union_tag_invalid":
        names = [name.strip().strip("'") for name in str(context["expected_tags"]).split(",")]
        return Problem(
            key=key,
            what=f"{context['tag']!r} is not a known name",
            fix=_choose(str(context["tag"]), names),
            where=where,
        )
    if kind == "union_tag_not_found":
        names = [name for name in (method_name(model) for model in models_at(parts, tree)) if name]
        return Problem(
            key=key,
            what=f"{given} has no `name`",
            fix=f"set `name` to one of: {', '.join(names)}",
            where=where,
        )
    if kind == "value_error":
        # A rule of this package raised the error; its text already has the reason and the fix.
        what = str(context["error"]) if "error" in context else detail["msg"]
        return Problem(
            key=key or "config", what=what, fix="change one of the keys named above", where=where
        )
    expected = _expected(parts, tree)
    if kind == "missing":
        return Problem(key=key, what="is missing", fix=f"add it: {expected}", where=where)
    if kind == "literal_error" and isinstance(detail["input"], str):
        names = [
            name.strip("' ") for name in str(context["expected"]).replace(" or ", ",").split(",")
        ]
        return Problem(
            key=key,
            what=f"{given} is not a known choice",
            fix=_choose(detail["input"], names),
            where=where,
        )
    what = f"got {given}: {detail['msg'].replace('Input should', 'it should')}"
    if kind in ("model_type", "model_attributes_type"):
        what = f"got {given}, which is not a section"
    return Problem(key=key, what=what, fix=f"expected {expected}", where=where)


def _dotted(location: Sequence[str | int], tree: Mapping[str, Any]) -> list[str | int]:
    """Return pydantic's location without the names that pydantic inserts for the chosen member of
    a union."""
    parts: list[str | int] = []
    for part in location:
        # Skip the tag of the chosen member, which pydantic inserts after the key of a union.
        models = models_at(parts, tree)
        names = [method_name(model) for model in models]
        if (
            isinstance(part, str)
            and is_method(models)
            and part in names
            and part not in valid_keys(models)
        ):
            continue
        parts.append(part)
    return parts


def _unknown(key: str, parts: Sequence[str | int], parents: Sequence[type[Strict]]) -> str:
    given, valid = str(parts[-1]), valid_keys(parents)
    section = key.rpartition(".")[0]
    # A known name of another library takes precedence over the nearest spelling.
    known = ELSEWHERE_ONLY.get(key) or alias_fix(given)
    if known is not None:
        return known
    homes, match = elsewhere(given), nearest(given, valid)
    # A name that is a valid key elsewhere is misplaced, not misspelled.
    if match and not homes:
        return f"did you mean `{section + '.' if section else ''}{match}`?"
    owners = [
        str(method_name(model))
        for model in models_at(parts[:-1], {})
        if given in model.model_fields
    ]
    if owners:
        return f"it belongs to {' and '.join(owners)}; valid keys here: {', '.join(valid)}"
    if homes:
        return f"set it as {' or '.join(f'`{home}`' for home in homes[:3])}"
    # Last resort: the misspelled key may belong to another section.
    far = nearest_anywhere(given)
    hint = f"; nearest elsewhere: `{far}`" if far else ""
    return f"valid keys of {section or 'the configuration'}: {', '.join(valid)}{hint}"


def _choose(given: str, names: Sequence[str]) -> str:
    known = alias_fix(given)
    if known is not None:
        return known
    choices = f"choose one of: {', '.join(names)}"
    homes = method_homes(given)
    if homes:
        return f"{given} is a value of {' and '.join(f'`{home}`' for home in homes)}; {choices}"
    match = nearest(given, names)
    return (f"did you mean `{match}`? " if match else "") + choices


def _expected(parts: Sequence[str | int], tree: Mapping[str, Any]) -> str:
    """Return a description of the values that the key accepts."""
    *section, last = parts
    is_entry = isinstance(last, int)
    if is_entry:  # the schema describes a list, not its entries
        *section, last = section
    models = models_at(section, tree)
    field = next(
        (model.model_fields[str(last)] for model in models if str(last) in model.model_fields), None
    )
    if field is None:  # an entry of a mapping, with a name that the user chose
        return f"a section with the keys {', '.join(valid_keys(models_at(parts, tree)))}"
    inner, many = models_in(field.annotation), is_list(field.annotation) and not is_entry
    if is_method(inner):
        names = ", ".join(str(method_name(model)) for model in inner)
        return f"a list of: {names}" if many else f"one of: {names}"
    if inner:
        keys = f"with the keys {', '.join(valid_keys(inner))}"
        if is_named(field.annotation):
            return f"a mapping of names to sections {keys}"
        return f"a list of sections {keys}" if many else f"a section {keys}"
    kind = describe(field)
    meaning = " ".join((field.description or "").split()).rstrip(".")
    return f"{kind} ({meaning})" if meaning and len(meaning) < 100 else kind


def _show(value: Any) -> str:
    text = json.dumps(value, default=str, ensure_ascii=False)
    return text if len(text) <= 80 else text[:77] + "..."

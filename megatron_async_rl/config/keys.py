"""Keys of the schema, read from its models: the valid keys at a place, the values that a key takes,
and the valid key nearest to a misspelled one.

A dotted key names a place: `policy.optimizer.lr`, `controls.0.c_low`. A section whose method is
selected by name (`objective.loss`) has the keys of that method.
"""

from __future__ import annotations

import difflib
import re
import types
from collections.abc import Iterator, Mapping, Sequence, Set
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Annotated, Any, Literal, Union, get_args, get_origin

from annotated_types import Ge, Gt, Le, Lt
from pydantic.fields import FieldInfo

from megatron_async_rl.config.schema import Config
from megatron_async_rl.config.settings_model import FromFile, Strict

NAMED = "NAME"
"""Placeholder in a dotted key for a name that the user chooses."""


@dataclass(frozen=True)
class ConfigKey:
    """One leaf of the schema. In `key`, a dotted key, `[]` stands for an index, `NAME` for a name
    that the user chooses, and `(name)` for a method."""

    key: str
    field: FieldInfo


def walk(
    model: type[Strict] = Config, prefix: str = ""
) -> Iterator[tuple[str, type[Strict], list[ConfigKey]]]:
    """Yield every section in order: its dotted key, its model and its own leaves. The sections
    inside it follow."""
    leaves: list[ConfigKey] = []
    sections: list[tuple[str, type[Strict]]] = []
    for name, field in model.model_fields.items():
        inner = models_in(field.annotation)
        # A field without models is a leaf.
        if not inner:
            leaves.append(ConfigKey(prefix + name, field))
        methods = is_method(inner)
        for one in inner:
            label = f"({one.model_fields['name'].default})" if methods else ""
            several = "[]" if is_list(field.annotation) else ""
            if is_named(field.annotation):
                several = f".{NAMED}"
            sections.append((f"{prefix}{name}{several}{label}", one))
    # Yield a section's own keys before its subsections, in the order of the page.
    yield prefix.rstrip("."), model, leaves
    for label, one in sections:
        yield from walk(one, f"{label}.")


def models_in(annotation: Any) -> tuple[type[Strict], ...]:
    """Return the config models that a field may hold: none for a leaf, one for a section, several
    for a method that is selected by name."""
    if isinstance(annotation, type) and issubclass(annotation, Strict):
        return (annotation,)
    models: list[type[Strict]] = []
    for part in get_args(annotation):
        # A union may contain one model through several aliases.
        models.extend(model for model in models_in(part) if model not in models)
    return tuple(models)


def is_method(models: Sequence[type[Strict]]) -> bool:
    """Return True if the models are the choices of a method, each with a default `name`."""
    return bool(models) and all(method_name(model) is not None for model in models)


def is_list(annotation: Any) -> bool:
    return get_origin(annotation) in (tuple, list)


def is_named(annotation: Any) -> bool:
    """Return True for a mapping of names that the user chooses to sections."""
    return get_origin(annotation) is Mapping and bool(models_in(annotation))


def models_at(dotted: Sequence[str | int], tree: Any) -> tuple[type[Strict], ...]:
    """Return the models whose keys are valid below `dotted`. `tree`, the user's values, selects the
    methods."""
    models: tuple[type[Strict], ...] = (Config,)
    named = False
    for part in dotted:
        tree = _child(tree, part)
        # This part is a name that the user chose, so the schema has no field for it.
        if named:
            named = False
            continue
        if isinstance(part, int) or str(part).isdecimal():
            # Each entry of a list selects its own method.
            models = _chosen(models, tree)
            continue
        fields = [
            model.model_fields[str(part)] for model in models if str(part) in model.model_fields
        ]
        if not fields:
            return ()
        named = is_named(fields[0].annotation)
        models = _chosen(models_in(fields[0].annotation), tree)
    return () if named else models


def leaf_types(dotted: Sequence[str], tree: Any) -> set[Any]:
    """Return the types that the value at `dotted` may have: `{Path}`, `{str, NoneType}`, `{Any}`.

    `tree`, the user's values, selects the methods. The result is `{Any}` in a plug-in's settings
    and empty for a place that does not exist.
    """
    allowed: set[Any] = {Config}
    for part in dotted:
        methods = _methods(allowed)
        # Only validation imports a plug-in's class, so its types are not available here.
        name = tree.get("name") if methods and isinstance(tree, dict) else None
        if name is not None and name not in [method_name(model) for model in methods]:
            return {Any}
        holders = set(_chosen(methods, tree)) if methods else allowed
        tree = _child(tree, part)
        allowed = {
            one for each in holders for inner in _inside(each, part) for one in _alternatives(inner)
        }
    return allowed


def _methods(types: Set[Any]) -> tuple[type[Strict], ...]:
    models = tuple(one for one in types if isinstance(one, type) and issubclass(one, Strict))
    return models if is_method(models) else ()


def _inside(annotation: Any, part: str) -> Iterator[Any]:
    """Yield the annotations of the child `part`, a key or an index, of a value of type
    `annotation`."""
    origin, parts = get_origin(annotation), get_args(annotation)
    if annotation is Any:
        yield Any
    elif isinstance(annotation, type) and issubclass(annotation, Strict):
        if part in annotation.model_fields:
            yield annotation.model_fields[part].annotation
    # The ellipsis of `tuple[X, ...]` is not the type of an entry.
    elif origin in (tuple, list) and part.isdecimal():
        yield from (one for one in parts if one is not Ellipsis)
    elif origin is Mapping:
        yield parts[1]


def _alternatives(annotation: Any) -> Iterator[Any]:
    """Yield the members of a union, without their `Annotated` metadata."""
    origin = get_origin(annotation)
    if origin is Annotated:
        yield from _alternatives(get_args(annotation)[0])
    elif origin in (Union, types.UnionType):
        for part in get_args(annotation):
            yield from _alternatives(part)
    else:
        yield annotation


def _child(tree: Any, part: str | int) -> Any:
    if isinstance(tree, dict):
        return tree.get(part)
    if isinstance(tree, list) and str(part).isdecimal() and int(part) < len(tree):
        return tree[int(part)]
    return None


def _chosen(models: tuple[type[Strict], ...], value: Any) -> tuple[type[Strict], ...]:
    name = value.get("name") if isinstance(value, dict) else value
    if not isinstance(name, str):
        return models
    # An unknown name keeps all choices, so that the error can list them.
    return tuple(model for model in models if method_name(model) == name) or models


def method_name(model: type[Strict]) -> str | None:
    field = model.model_fields.get("name")
    return field.default if field is not None and isinstance(field.default, str) else None


@cache
def path_keys() -> tuple[str, ...]:
    """Return the dotted keys of files and folders, with `[]` for an index."""
    # Cached, because the schema does not change and a walk takes longer than a load.
    return tuple(
        leaf.key for _, _, leaves in walk() for leaf in leaves if _holds_path(leaf.field.annotation)
    )


@cache
def text_keys() -> tuple[str, ...]:
    """Return the dotted keys whose text may be given as the path of a file."""
    return tuple(
        leaf.key for _, _, leaves in walk() for leaf in leaves if _may_be_a_file(leaf.field)
    )


def pattern_of(key: str) -> str:
    """Return `key` with `[]` for every index: `data.sources[].path` for `data.sources.0.path`."""
    return re.sub(r"\.\d+(?=\.|$)", "[]", key)


def _holds_path(annotation: Any) -> bool:
    return annotation is Path or any(_holds_path(part) for part in get_args(annotation))


def _may_be_a_file(field: FieldInfo) -> bool:
    annotated = (field.annotation, *get_args(field.annotation))
    marks = [mark for part in annotated for mark in getattr(part, "__metadata__", ())]
    return any(isinstance(mark, FromFile) for mark in (*field.metadata, *marks))


def valid_keys(models: Sequence[type[Strict]]) -> list[str]:
    return sorted({name for model in models for name in model.model_fields})


def nearest(given: str, valid: Sequence[str]) -> str | None:
    # Below a similarity of 0.5 a proposal is more often wrong than right.
    matches = difflib.get_close_matches(given.lower(), valid, n=1, cutoff=0.5)
    return matches[0] if matches else None


def elsewhere(given: str) -> list[str]:
    """Return the dotted keys, anywhere in the schema, whose last part is `given`."""
    return [_plain(key) for key in _all_keys() if key.rsplit(".", 1)[-1] == given]


def method_homes(name: str) -> list[str]:
    """Return the dotted keys that take a method called `name`."""
    sections = (section for section, _, _ in walk() if section.endswith(f"({name})"))
    return [section.removesuffix(f"({name})").replace("[]", "") for section in sections]


def nearest_anywhere(given: str) -> str | None:
    # Reversed, so that the first of several keys with the same last part is kept.
    by_last_part = {key.rsplit(".", 1)[-1]: key for key in reversed(_all_keys())}
    match = nearest(given, list(by_last_part))
    return _plain(by_last_part[match]) if match else None


def _plain(key: str) -> str:
    """Return the key as a user writes it: without the method's name, and with index 0 for a list
    entry."""
    return re.sub(r"\(\w+\)", "", key).replace("[]", ".0")


def _all_keys() -> list[str]:
    keys: list[str] = []
    for section, _, leaves in walk():
        if section and "(" not in section:
            keys.append(section)
        keys.extend(leaf.key for leaf in leaves)
    return keys


def describe(field: FieldInfo) -> str:
    """Describe the values of a leaf: `whole number, at least 1`; `one of: auto, never`."""
    return _describe(field.annotation, field.metadata)


_TYPE_NAMES = {
    int: "whole number",
    float: "number",
    bool: "true or false",
    str: "text",
    Path: "path",
    type(None): "null",
}


def _describe(annotation: Any, metadata: Sequence[Any] = ()) -> str:
    origin, parts = get_origin(annotation), get_args(annotation)
    if origin is Annotated:
        return _describe(parts[0], [*parts[1:], *metadata])
    if origin is Literal:
        return "one of: " + ", ".join(str(part) for part in parts)
    if origin in (Union, types.UnionType):
        return ", or ".join(
            # The bounds of an optional field apply to its number, not to null.
            _describe(part, () if part is type(None) else metadata)
            for part in parts
        )
    if origin in (tuple, list):
        if len(parts) == 2 and parts[1] is Ellipsis:
            return f"list of {_describe(parts[0])}"
        return f"list of {len(parts)}: each {_describe(parts[0])}"
    if origin is Mapping:
        return "mapping of names to values"
    bounds = [text for text in (_bound(one) for one in _flatten(metadata)) if text]
    return ", ".join(
        [_TYPE_NAMES.get(annotation, getattr(annotation, "__name__", str(annotation))), *bounds]
    )


def _flatten(metadata: Sequence[Any]) -> Iterator[Any]:
    for one in metadata:
        # Pydantic wraps the constraints of an Annotated alias in a FieldInfo.
        if isinstance(one, FieldInfo):
            yield from one.metadata
        else:
            yield one


def _bound(one: Any) -> str | None:
    if isinstance(one, Gt):
        return f"above {one.gt}"
    if isinstance(one, Ge):
        return f"at least {one.ge}"
    if isinstance(one, Lt):
        return f"below {one.lt}"
    if isinstance(one, Le):
        return f"at most {one.le}"
    return None


_NO_GRAMMAR = (
    "remove it: in training a grammar would exclude tokens that the trainer's log-probs count; for"
    " held-out prompts set eval.sampling."
)
ELSEWHERE_ONLY = {
    f"rollout.sampling.{name}": f"{_NO_GRAMMAR}{name}" for name in ("json_schema", "regex")
}
"""Key that a user might expect here -> the reason why it exists only elsewhere."""

REMOVED = {
    "flow.extra_responses": (
        "over-sampling applies to groups: set flow.oversample, such as 0.5, with flow.selection:"
        " windowed"
    ),
    "flow.requeue_cut": (
        "remove it: responses are no longer cut, and unfinished groups continue (see"
        " flow.oversample)"
    ),
    "flow.filter_equal_groups": "set flow.dynamic_sampling, which replaces it",
    "rollout.restarts": "restarts are counted per hour: set rollout.restarts_per_hour",
    "weights.update": (
        "set weights.max_paused: 0.5, the default, for `rolling`, or weights.max_paused: 1.0 for"
        " `together`"
    ),
}
"""Key of an earlier version -> the fix."""

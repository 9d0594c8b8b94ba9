"""A YAML file and dotted overrides to a Config, and back.

Invariants:
- nothing a user wrote is ignored: unknown keys, keys given twice and values of the wrong type raise ConfigError;
- relative paths in a file are taken from the file's folder, those in an override from the current folder;
- `load` of what `dump` wrote gives an equal Config.
"""

from __future__ import annotations

import json
import os
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from pydantic import ValidationError

from megatron_async_rl.config.explain import Origins, explain
from megatron_async_rl.config.keys import is_method, models_at, path_keys
from megatron_async_rl.config.problem import ConfigError, Problem
from megatron_async_rl.config.schema import Config
from megatron_async_rl.config.yaml_text import YamlFault, parse_value, read_tree, write

Tree = dict[str, Any]


def load(path: Path, overrides: Sequence[str] = ()) -> Config:
    """The configuration in `path`, changed by `overrides` (`dotted.key=value`, the value read as YAML), in order.

    Raises ConfigError, which names the file and line or the override, the key, what was given and what is expected.
    """
    path = Path(path)
    try:
        text = path.read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError) as error:
        reason = error.strerror if isinstance(error, OSError) else "it is not UTF-8 text"
        raise ConfigError(str(path), [Problem(key=str(path), what=f"cannot be read: {reason}", fix=_look_near(path))]) from error
    try:
        tree, lines = read_tree(text)
    except YamlFault as fault:
        where = f"{path}:{fault.line}" if fault.line else str(path)
        raise ConfigError(str(path), [Problem(key=fault.key or "YAML", what=fault.what, fix=fault.fix, where=where)]) from fault
    _resolve_paths(tree, "", path.parent)
    origins = Origins(str(path), lines)
    for override in overrides:
        _override(tree, override, origins)
    try:
        # As JSON, strict: a list is a tuple and text is a path, but "3" is no number and true is no 1.
        return Config.model_validate_json(json.dumps(tree, default=str), strict=True)
    except ValidationError as error:
        raise ConfigError(str(path), explain(error, tree, origins)) from error


def dump(config: Config) -> str:
    """YAML with every key, defaults included, that loads back to an equal Config."""
    return write(config.model_dump(mode="json"))


def _look_near(path: Path) -> str:
    if path.is_dir():
        return "name a YAML file, not a folder"
    near = sorted(str(one) for one in path.parent.glob("*.y*ml")) if path.parent.is_dir() else []
    return (
        f"these configs are in that folder: {', '.join(near[:5])}"
        if near
        else "check the path; examples/ holds configs to start from"
    )


def _resolve_paths(tree: Any, prefix: str, folder: Path) -> Any:
    """`tree`, the value at the dotted key `prefix`, with its relative paths made absolute from `folder`; edits in place."""
    for key in path_keys():
        if key == prefix and isinstance(tree, str):
            return os.path.abspath(folder / Path(tree).expanduser())
        if prefix and not key.startswith(prefix + "."):
            continue
        *parents, last = key[len(prefix) + 1 if prefix else 0 :].split(".")
        holder = tree
        for part in parents:
            holder = holder.get(part) if isinstance(holder, dict) else None
        if isinstance(holder, dict) and isinstance(holder.get(last), str):
            holder[last] = os.path.abspath(folder / Path(holder[last]).expanduser())
    return tree


def _override(tree: Tree, override: str, origins: Origins) -> None:
    key, equals, text = override.partition("=")
    key = key.strip()
    where = f"command line: {override}"
    parts = key.split(".")
    if not equals or not all(parts):
        fix = "write dotted.key=value, such as policy.optimizer.lr=1e-4"
        raise ConfigError("command line", [Problem(key=override, what="is not an override", fix=fix)])
    try:
        value = parse_value(text)
    except YamlFault as fault:
        raise ConfigError(
            "command line", [Problem(key=key, what=fault.what, fix="quote the value as YAML", where=where)]
        ) from fault
    value = _resolve_paths(value, key, Path.cwd())
    holder: Any = tree
    for depth, part in enumerate(parts[:-1]):
        holder = _step_into(holder, part, parts[: depth + 1], tree, where)
    last = parts[-1]
    if isinstance(holder, list):
        holder[_index(holder, last, key, where)] = value
    elif isinstance(holder, dict):
        holder[last] = value
    origins.set(key, where)


def _step_into(holder: Any, part: str, dotted: Sequence[str], tree: Mapping[str, Any], where: str) -> Any:
    """The section or list at `dotted`, made where it is absent; a method's bare name becomes `{name: ...}`."""
    position: Any = _index(holder, part, ".".join(dotted), where) if isinstance(holder, list) else part
    inside = holder[position] if isinstance(holder, list) else holder.get(position)
    if inside is None:
        inside = {}
    elif isinstance(inside, str) and is_method(models_at(dotted, tree)):
        inside = {"name": inside}
    if not isinstance(inside, (dict, list)):
        what = f"holds {json.dumps(inside, default=str)}, not a section"
        raise ConfigError("command line", [Problem(key=".".join(dotted), what=what, fix="set this key itself", where=where)])
    holder[position] = inside
    return inside


def _index(holder: Sequence[Any], part: str, key: str, where: str) -> int:
    if part.isdigit() and int(part) < len(holder):
        return int(part)
    entries = f"a list of {len(holder)}" + (", numbered from 0" if holder else "")
    problem = Problem(
        key=key, what=f"{part!r} is no entry of {entries}", fix="set the whole list, such as controls=[gac]", where=where
    )
    raise ConfigError("command line", [problem])

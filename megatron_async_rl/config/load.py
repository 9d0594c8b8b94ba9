"""A YAML file and dotted overrides to a Config, and back.

The YAML differs from that of PyYAML's safe loader in two ways: a key given twice is refused, and
numbers are YAML 1.2's, so that `1e-4` is a number and not text.

Invariants:
- nothing a user wrote is ignored: unknown keys, keys given twice and values of the wrong type raise
  ConfigError;
- relative paths in a file are taken from the file's folder, those in an override from the current
  folder;
- `load` of what `dump` wrote gives an equal Config, and text that was written reads back as it was.
"""

from __future__ import annotations

import json
import os
import re
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import yaml
from pydantic import ValidationError

from megatron_async_rl.config.errors import Origins, explain
from megatron_async_rl.config.keys import (
    is_method,
    models_at,
    path_keys,
    pattern_of,
    text_keys,
)
from megatron_async_rl.config.problem import ConfigError, Problem
from megatron_async_rl.config.schema import Config


class YamlFault(Exception):
    """`line` counts from 1, null where unknown; `key` is the dotted key in fault, where there is
    one."""

    def __init__(
        self, what: str, fix: str, *, line: int | None = None, key: str | None = None
    ) -> None:
        super().__init__(what)
        self.what = what
        self.fix = fix
        self.line = line
        self.key = key


HUB = "hf://"
"""Begins the name of a model or data set on a hub, which no folder has a part in."""

_FLOAT = re.compile(r"^[-+]?(\d+\.?\d*|\.\d+)[eE][-+]?\d+$")


class _Loader(yaml.SafeLoader):
    pass


class _Dumper(yaml.SafeDumper):
    """Quotes the texts that the loader would take for numbers, and escapes the line breaks it would
    fold into spaces."""

    def represent_str(self, data: str) -> yaml.ScalarNode:
        style = '"' if any(character in data for character in "\x85\u2028\u2029") else None
        return self.represent_scalar("tag:yaml.org,2002:str", data, style=style)


_Dumper.add_representer(str, _Dumper.represent_str)


for _side in (_Loader, _Dumper):
    _side.add_implicit_resolver("tag:yaml.org,2002:float", _FLOAT, list("-+.0123456789"))


def write(value: Any, *, one_line: bool = False) -> str:
    width = 10**6 if one_line else 120
    text = yaml.dump(
        value,
        Dumper=_Dumper,
        default_flow_style=one_line,
        sort_keys=False,
        allow_unicode=True,
        width=width,
    )
    return str(text)


def read_tree(text: str) -> tuple[dict[str, Any], dict[str, int]]:
    """The mapping in `text`, and the line of every dotted key in it. An empty text is an empty
    mapping."""
    value, lines = _read(text)
    if value is None:
        return {}, lines
    if not isinstance(value, dict):
        raise YamlFault(
            f"holds a {type(value).__name__}, not a mapping of sections",
            "write `run:`, `model:`, `data:`, ...",
            line=1,
        )
    return value, lines


def parse_value(text: str) -> Any:
    """One value as it would stand in the file: `1e-4`, `[]`, `null`, `{name: gac}`, text."""
    return _read(text)[0]


def _read(text: str) -> tuple[Any, dict[str, int]]:
    lines: dict[str, int] = {}
    loader = None
    try:
        loader = _Loader(text)
        node = loader.get_single_node()
        if node is None:
            return None, lines
        _index_lines(node, "", lines)
        return loader.construct_document(node), lines
    except yaml.YAMLError as error:
        mark = getattr(error, "problem_mark", None) or getattr(error, "context_mark", None)
        context = getattr(error, "context", None)
        problem = getattr(error, "problem", None) or str(error).splitlines()[0]
        what = f"is not YAML: {problem}" + (f" ({context})" if context else "")
        column = f", column {mark.column + 1}" if mark else ""
        fix = (
            f"look at line {mark.line + 1}{column} and the line before it: indentation, a colon, a"
            " quote or a bracket"
            if mark
            else "fix the YAML"
        )
        raise YamlFault(what, fix, line=mark.line + 1 if mark else None) from error
    except RecursionError as error:
        raise YamlFault("holds an anchor that contains itself", "write it out") from error
    finally:
        if loader is not None:
            loader.dispose()


def _index_lines(node: yaml.Node, prefix: str, lines: dict[str, int]) -> None:
    if isinstance(node, yaml.MappingNode):
        for key_node, value_node in node.value:
            key = (
                f"{prefix}{key_node.value}"
                if isinstance(key_node, yaml.ScalarNode)
                else f"{prefix}?"
            )
            line = key_node.start_mark.line + 1
            if key in lines and key_node.tag != "tag:yaml.org,2002:merge":
                raise YamlFault(
                    f"is given twice, on lines {lines[key]} and {line}",
                    "keep one of them",
                    line=line,
                    key=key,
                )
            lines[key] = line
            _index_lines(value_node, key + ".", lines)
    elif isinstance(node, yaml.SequenceNode):
        for position, item in enumerate(node.value):
            lines[f"{prefix}{position}"] = item.start_mark.line + 1
            _index_lines(item, f"{prefix}{position}.", lines)


Tree = dict[str, Any]


def load(path: Path, overrides: Sequence[str] = ()) -> Config:
    """The configuration in `path`, changed by `overrides` (`dotted.key=value`, the value read as
    YAML), in order.

    Raises ConfigError, which names the file and line or the override, the key, what was given and
    what is expected.
    """
    path = Path(path)
    try:
        text = path.read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError) as error:
        reason = error.strerror if isinstance(error, OSError) else "it is not UTF-8 text"
        raise ConfigError(
            str(path),
            [Problem(key=str(path), what=f"cannot be read: {reason}", fix=_look_near(path))],
        ) from error
    try:
        tree, lines = read_tree(text)
    except YamlFault as fault:
        where = f"{path}:{fault.line}" if fault.line else str(path)
        raise ConfigError(
            str(path),
            [Problem(key=fault.key or "YAML", what=fault.what, fix=fault.fix, where=where)],
        ) from fault
    resolve_paths(tree, "", path.parent)
    origins = Origins(str(path), lines)
    for override in overrides:
        _override(tree, override, origins)
    try:
        # As JSON, strict: a list is a tuple and text is a path, but "3" is no number and true is no
        # 1.
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
        else "check the path; `mar init` writes a config, and `mar examples` copies some"
    )


def resolve_paths(tree: Any, prefix: str, folder: Path) -> Any:
    """`tree`, the value at the dotted key `prefix`, with its relative paths made absolute from
    `folder` and files of text replaced by what they hold; edits in place. Raises ConfigError for
    such a file that cannot be read."""
    at = pattern_of(prefix)
    for key, resolve in (
        *((key, _absolute) for key in path_keys()),
        *((key, _content) for key in text_keys()),
    ):
        if key == at:
            return resolve(key, tree, folder)
        if not at or key.startswith((f"{at}.", f"{at}[]")):
            *parents, last = re.findall(r"[^.\[\]]+|\[\]", key[len(at) :])
            for holder in _holders(tree, parents):
                if last in holder:
                    holder[last] = resolve(key, holder[last], folder)
    return tree


def _holders(tree: Any, parents: Sequence[str]) -> Iterator[dict[str, Any]]:
    """The sections at `parents` in `tree`, `[]` standing for every entry of a list."""
    if not parents:
        if isinstance(tree, dict):
            yield tree
    elif parents[0] == "[]":
        for entry in tree if isinstance(tree, list) else ():
            yield from _holders(entry, parents[1:])
    elif isinstance(tree, dict):
        yield from _holders(tree.get(parents[0]), parents[1:])


def _absolute(key: str, value: Any, folder: Path) -> Any:
    if not isinstance(value, str) or value.startswith(HUB):
        return value
    return os.path.abspath(folder / Path(value).expanduser())


def _content(key: str, value: Any, folder: Path) -> Any:
    """A template holds a brace, and the name of a file none."""
    if not isinstance(value, str) or "{" in value or "\n" in value:
        return value
    path = Path(os.path.abspath(folder / Path(value).expanduser()))
    try:
        return path.read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError) as error:
        reason = error.strerror if isinstance(error, OSError) else "it is not UTF-8 text"
        fix = "name a file, or write the text itself, with its braces"
        problem = Problem(key=key, what=f"{path} cannot be read: {reason}", fix=fix)
        raise ConfigError("", [problem]) from error


def _override(tree: Tree, override: str, origins: Origins) -> None:
    key, equals, text = override.partition("=")
    key = key.strip()
    where = f"command line: {override}"
    parts = key.split(".")
    if not equals or not all(parts):
        fix = "write dotted.key=value, such as policy.optimizer.lr=1e-4"
        raise ConfigError(
            "command line", [Problem(key=override, what="is not an override", fix=fix)]
        )
    try:
        value = parse_value(text)
    except YamlFault as fault:
        raise ConfigError(
            "command line",
            [Problem(key=key, what=fault.what, fix="quote the value as YAML", where=where)],
        ) from fault
    value = resolve_paths(value, key, Path.cwd())
    holder: Any = tree
    for depth, part in enumerate(parts[:-1]):
        holder = _step_into(holder, part, parts[: depth + 1], tree, where)
    last = parts[-1]
    if isinstance(holder, list):
        holder[_index(holder, last, key, where)] = value
    elif isinstance(holder, dict):
        holder[last] = value
    origins.set(key, where)


def _step_into(
    holder: Any, part: str, dotted: Sequence[str], tree: Mapping[str, Any], where: str
) -> Any:
    """The section or list at `dotted`, made where it is absent; a method's bare name becomes
    `{name: ...}`."""
    position: Any = (
        _index(holder, part, ".".join(dotted), where) if isinstance(holder, list) else part
    )
    inside = holder[position] if isinstance(holder, list) else holder.get(position)
    if inside is None:
        inside = {}
    elif isinstance(inside, str) and is_method(models_at(dotted, tree)):
        inside = {"name": inside}
    if not isinstance(inside, (dict, list)):
        what = f"holds {json.dumps(inside, default=str)}, not a section"
        raise ConfigError(
            "command line",
            [Problem(key=".".join(dotted), what=what, fix="set this key itself", where=where)],
        )
    holder[position] = inside
    return inside


def _index(holder: Sequence[Any], part: str, key: str, where: str) -> int:
    if part.isdigit() and int(part) < len(holder):
        return int(part)
    entries = f"a list of {len(holder)}" + (", numbered from 0" if holder else "")
    problem = Problem(
        key=key,
        what=f"{part!r} is not an entry of {entries}",
        fix="set the whole list, such as controls=[gac]",
        where=where,
    )
    raise ConfigError("command line", [problem])

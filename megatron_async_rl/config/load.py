"""Conversion of a YAML file and dotted overrides to a Config, and of a Config to YAML.

Invariants:
- nothing that a user wrote is ignored: unknown keys, duplicate keys and values of the wrong type
  raise ConfigError;
- nothing that a user wrote is changed: a key that takes text or a path gets the text as written,
  even if YAML would read it as another type (`run.dir=2024-01-01`) or cut it
  (`data.system_prompt=Answer after ####`); other keys refuse text that YAML versions read
  differently (`010`, `on`) and text that YAML would cut;
- every path is absolute, so that it names the same file in all processes of a run: relative paths
  in a file start at the file's folder, those in an override at the current folder;
- `load` inverts `dump`: the Config is equal, and its text is unchanged.
"""

from __future__ import annotations

import json
import os
import re
import sys
from collections.abc import Iterator, Mapping, Sequence, Set
from pathlib import Path
from typing import Any

from pydantic import ValidationError

from megatron_async_rl.config.data import TASK_PREFIX
from megatron_async_rl.config.errors import Origins, explain
from megatron_async_rl.config.keys import (
    is_method,
    leaf_types,
    models_at,
    path_keys,
    pattern_of,
    text_keys,
)
from megatron_async_rl.config.problem import ConfigError, Problem
from megatron_async_rl.config.rules import validated
from megatron_async_rl.config.schema import Config
from megatron_async_rl.config.yaml_tree import (
    NO_VALUE,
    KeyPath,
    YamlDocument,
    YamlFault,
    doubt,
    is_null,
    mapping_of,
    read_document,
    write,
)

HUB = "hf://"
"""Prefix of a model or data set on the Hugging Face Hub, which is not a path."""

Tree = dict[str, Any]


def load(path: Path, overrides: Sequence[str] = ()) -> Config:
    """Return the configuration in `path`, changed by `overrides` (`dotted.key=value`), in order.

    Raises ConfigError, which names the file and line or the override, the key, the given value and
    the expected one.
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
        document = read_document(text)
        tree = mapping_of(document)
    except YamlFault as fault:
        where = f"{path}:{fault.line}" if fault.line else str(path)
        raise ConfigError(
            str(path),
            [Problem(key=fault.key or "YAML", what=fault.what, fix=fault.fix, where=where)],
        ) from fault
    origins = Origins(str(path), document.lines)
    problems: list[Problem] = []
    # Restore the text before validation: afterwards the text that the user wrote is lost.
    tree = as_written(tree, document.unquoted, (), tree, origins, problems)
    # Check only keys that take text: for other keys, `0.1 #note` has the meaning of YAML.
    for place, comment in document.cut.items():
        if _is_text(leaf_types(place, tree)):
            what = f"its text ends before {comment!r}, which is a comment in YAML"
            fix = "quote the whole text, or put a blank after the # of the comment"
            key = ".".join(place)
            problems.append(Problem(key=key, what=what, fix=fix, where=origins.of(key)))
    if problems:
        raise ConfigError(str(path), problems)
    # Resolve before the overrides are applied: their paths start at another folder.
    resolve_paths(tree, "", path.parent)
    # Apply them in order, so that a later override wins.
    for override in overrides:
        _override(tree, override, origins)
    try:
        return validated(tree)
    except ValidationError as error:
        raise ConfigError(str(path), explain(error, tree, origins)) from error


def dump(config: Config) -> str:
    """Return YAML with every key, defaults included, which loads to an equal Config."""
    return write(config.model_dump(mode="json"))


def _look_near(path: Path) -> str:
    if path.is_dir():
        return "name a YAML file, not a folder"
    # The most frequent mistake is a wrong file name in the right folder.
    near = sorted(str(one) for one in path.parent.glob("*.y*ml")) if path.parent.is_dir() else []
    return (
        f"name one of the configs in that folder: {', '.join(near[:5])}"
        if near
        else "check the path; `mar init` writes a config, and `mar examples` copies some"
    )


def as_written(
    value: Any,
    unquoted: Mapping[KeyPath, str],
    place: KeyPath,
    tree: Tree,
    origins: Origins,
    problems: list[Problem],
) -> Any:
    """Return `value`, which is at `place` in `tree`, with the text as written for every key that
    takes text.

    `unquoted`: as in YamlDocument, by places in `tree`. Appends to `problems` each value that is
    ambiguous or not valid text.
    """
    if isinstance(value, dict):
        return {
            # Pass the whole tree: the method that it selects decides the type of a key.
            key: as_written(one, unquoted, (*place, key), tree, origins, problems)
            for key, one in value.items()
        }
    if isinstance(value, list):
        return [
            as_written(one, unquoted, (*place, str(at)), tree, origins, problems)
            for at, one in enumerate(value)
        ]
    written, key = unquoted.get(place), ".".join(place)
    if isinstance(value, str) and (fault := _not_text(value)) is not None:
        problems.append(Problem(key=key, what=fault[0], fix=fault[1], where=origins.of(key)))
    if written is None:
        return value
    types = leaf_types(place, tree)
    if _is_text(types):
        # Null stays null; validation refuses it if the key does not take it.
        return value if is_null(written) else written
    # Quoted text has one meaning; only plain scalars may be ambiguous.
    fault = doubt(written) if types & {Any, bool, int, float} else None
    if fault is not None:
        problems.append(Problem(key=key, what=fault[0], fix=fault[1], where=origins.of(key)))
    return value


def _is_text(types: Set[Any]) -> bool:
    """Return True for a key that takes text and no number."""
    return bool(types & {str, Path}) and not types & {Any, bool, int, float}


def _not_text(value: str) -> tuple[str, str] | None:
    """Return (fault, fix) for text that UTF-8 cannot encode; None for other text."""
    if any("\ud800" <= character <= "\udfff" for character in value):
        fix = "write it in the encoding of your locale (`locale charmap`), or rename the file"
        return f"{_printable(value)} contains bytes that are not text in this locale", fix
    return None


def resolve_paths(tree: Any, prefix: str, folder: Path) -> Any:
    """Resolve the paths in `tree`, the value at the dotted key `prefix`, in place, and return it.

    Relative paths become absolute, starting at `folder`; for keys of text that name a file, the
    path becomes the file's content. Raises ConfigError if such a file cannot be read.
    """
    at = pattern_of(prefix)
    # The schema lists the keys, so a new path key needs no change here.
    for key, resolve in (
        *((key, _absolute) for key in path_keys()),
        *((key, _content) for key in text_keys()),
    ):
        if key == at:
            return resolve(key, tree, folder)
        # An override may set a whole section, which contains the key.
        if not at or key.startswith((f"{at}.", f"{at}[]")):
            *parents, last = re.findall(r"[^.\[\]]+|\[\]", key[len(at) :])
            for holder in _holders(tree, parents):
                if last in holder:
                    holder[last] = resolve(key, holder[last], folder)
    return tree


def _holders(tree: Any, parents: Sequence[str]) -> Iterator[dict[str, Any]]:
    """Yield the sections at `parents` in `tree`; `[]` stands for every entry of a list."""
    if not parents:
        if isinstance(tree, dict):
            yield tree
    elif parents[0] == "[]":
        for entry in tree if isinstance(tree, list) else ():
            yield from _holders(entry, parents[1:])
    elif isinstance(tree, dict):
        yield from _holders(tree.get(parents[0]), parents[1:])


def _absolute(key: str, value: Any, folder: Path) -> Any:
    # Names of data that is not a file.
    if not isinstance(value, str) or value.startswith((HUB, TASK_PREFIX)):
        return value
    return str(_path(key, value, folder))


def _path(key: str, value: str, folder: Path) -> Path:
    """Return the absolute path of `value`, starting at `folder`. Raises ConfigError for an invalid
    path, and for a path that some libraries would open as another file."""
    try:
        if "\0" in value:
            raise RuntimeError("a path cannot contain a NUL character")
        # abspath, not resolve(): a symbolic link keeps the name that the user chose.
        path = os.path.abspath(folder / Path(value).expanduser())
    except RuntimeError as error:  # also from expanduser, if the user of `~name` does not exist
        problem = Problem(key=key, what=f"{value!r}: {error}", fix="write the absolute path")
        raise ConfigError("", [problem]) from error
    encoding = sys.getfilesystemencoding()
    # Libraries in other languages (TensorBoard, safetensors, tokenizers) open a path by its UTF-8
    # bytes, and Python by its bytes in the locale: outside ASCII, these may be two files.
    if not path.isascii() and (encoding != "utf-8" or _not_text(path) is not None):
        what = f"{_printable(path)} is a path that some libraries cannot open in this locale"
        fix = "set LC_ALL=C.UTF-8 or another UTF-8 locale, or use a path of ASCII characters"
        raise ConfigError("", [Problem(key=key, what=f"{what} ({encoding})", fix=fix)])
    return Path(path)


def _content(key: str, value: Any, folder: Path) -> Any:
    """Return the content of the file that `value` names, or `value` itself if it is a template: it
    then contains a brace or a line break."""
    if not isinstance(value, str) or "{" in value or "\n" in value:
        return value
    path = _path(key, value, folder)
    try:
        return path.read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError) as error:
        reason = error.strerror if isinstance(error, OSError) else "it is not UTF-8 text"
        fix = "name a readable file, or write the template itself, with its braces"
        problem = Problem(key=key, what=f"{path} cannot be read: {reason}", fix=fix)
        raise ConfigError("", [problem]) from error


def _override(tree: Tree, override: str, origins: Origins) -> None:
    key, equals, text = override.partition("=")
    if key != key.rstrip():  # `key = value`: the blanks are around the sign
        text = text.lstrip()
    key = key.strip()
    where = f"command line: {_printable(override)}"
    parts = key.split(".")
    if not equals or not all(parts):
        fix = "write dotted.key=value, such as policy.optimizer.lr=1e-4"
        raise ConfigError(
            "command line",
            [Problem(key=_printable(override), what="is not an override", fix=fix)],
        )
    if (unreadable := _not_text(key)) is not None:
        what, fix = unreadable
        raise ConfigError(
            "command line", [Problem(key=_printable(key), what=what, fix=fix, where=where)]
        )
    # Set the origin first, so that every error below names the command line.
    origins.set(key, where)
    place = tuple(parts)
    try:
        document = _override_value(place, text, tree)
    except YamlFault as fault:
        raise ConfigError(
            "command line", [Problem(key=key, what=fault.what, fix=fault.fix, where=where)]
        ) from fault
    # The value was parsed by itself, so prefix its places with the key.
    unquoted = {(*place, *at): written for at, written in document.unquoted.items()}
    problems: list[Problem] = []
    value = as_written(document.value, unquoted, place, tree, origins, problems)
    if problems:
        raise ConfigError("command line", problems)
    # As in a shell, a path on the command line starts at the current folder.
    value = resolve_paths(value, key, Path.cwd())
    holder: Any = tree
    for depth, part in enumerate(parts[:-1]):
        holder = _step_into(holder, part, parts[: depth + 1], tree, where)
    last = parts[-1]
    if isinstance(holder, list):
        holder[_index(holder, last, key, where)] = value
    # _step_into has refused anything else.
    elif isinstance(holder, dict):
        holder[last] = value


def _override_value(place: KeyPath, text: str, tree: Tree) -> YamlDocument:
    """Return the value that `text` sets for the key at `place`. Raises YamlFault."""
    if not text.strip():
        raise YamlFault(*NO_VALUE)
    if _is_text(leaf_types(place, tree)) and not _is_quoted(text) and not is_null(text.strip()):
        # The text is not parsed as YAML, so `#`, colons, braces and line breaks stay in it.
        return YamlDocument(value=text)
    try:
        return read_document(text, comments=False)
    except YamlFault as fault:
        if fault.line is None:
            raise
        raise YamlFault(fault.what, "quote the value as YAML", line=fault.line) from fault


def _is_quoted(text: str) -> bool:
    """Return True if the whole of `text` is one quoted YAML scalar."""
    if text.strip()[:1] not in ("'", '"'):
        return False
    try:
        document = read_document(text, comments=False)
    except YamlFault:
        return False
    return isinstance(document.value, str)


def _printable(text: str) -> str:
    return text.encode("utf-8", "backslashreplace").decode("utf-8")


def _step_into(
    holder: Any, part: str, dotted: Sequence[str], tree: Mapping[str, Any], where: str
) -> Any:
    """Return the section or list at `dotted`, which is created if it is absent. A method's bare
    name becomes `{name: ...}`."""
    position: Any = (
        _index(holder, part, ".".join(dotted), where) if isinstance(holder, list) else part
    )
    inside = holder[position] if isinstance(holder, list) else holder.get(position)
    if inside is None:
        inside = {}
    # For `objective.loss.clip_low=0.1` on `loss: ppo_clip` in the file.
    elif isinstance(inside, str) and is_method(models_at(dotted, tree)):
        inside = {"name": inside}
    if not isinstance(inside, (dict, list)):
        what = f"is {json.dumps(inside, default=str)}, not a section"
        raise ConfigError(
            "command line",
            [Problem(key=".".join(dotted), what=what, fix="set this key itself", where=where)],
        )
    holder[position] = inside
    return inside


def _index(holder: Sequence[Any], part: str, key: str, where: str) -> int:
    if part.isdecimal() and int(part) < len(holder):
        return int(part)
    entries = f"a list of {len(holder)}" + (", numbered from 0" if holder else "")
    problem = Problem(
        key=key,
        what=f"{part!r} is not an entry of {entries}",
        fix="set the whole list, such as controls=[gac]",
        where=where,
    )
    raise ConfigError("command line", [problem])

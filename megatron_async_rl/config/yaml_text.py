"""YAML text to plain values, with the line of every key, and back.

Differs from PyYAML's safe loader in two ways: a key given twice is refused, and numbers are YAML 1.2's, so that `1e-4`
is a number and not text. What is written reads back as it was.
"""

from __future__ import annotations

import re
from typing import Any

import yaml


class YamlFault(Exception):
    """`line` counts from 1, null where unknown; `key` is the dotted key in fault, where there is one."""

    def __init__(self, what: str, fix: str, *, line: int | None = None, key: str | None = None) -> None:
        super().__init__(what)
        self.what = what
        self.fix = fix
        self.line = line
        self.key = key


_FLOAT = re.compile(r"^[-+]?(\d+\.?\d*|\.\d+)[eE][-+]?\d+$")


class _Loader(yaml.SafeLoader):
    pass


class _Dumper(yaml.SafeDumper):
    """Quotes the texts that the loader would take for numbers, and escapes the line breaks it would fold into spaces."""

    def represent_str(self, data: str) -> yaml.ScalarNode:
        style = '"' if any(character in data for character in "\x85\u2028\u2029") else None
        return self.represent_scalar("tag:yaml.org,2002:str", data, style=style)


_Dumper.add_representer(str, _Dumper.represent_str)


for _side in (_Loader, _Dumper):
    _side.add_implicit_resolver("tag:yaml.org,2002:float", _FLOAT, list("-+.0123456789"))


def write(value: Any, *, one_line: bool = False) -> str:
    width = 10**6 if one_line else 120
    text = yaml.dump(value, Dumper=_Dumper, default_flow_style=one_line, sort_keys=False, allow_unicode=True, width=width)
    return str(text)


def read_tree(text: str) -> tuple[dict[str, Any], dict[str, int]]:
    """The mapping in `text`, and the line of every dotted key in it. An empty text is an empty mapping."""
    value, lines = _read(text)
    if value is None:
        return {}, lines
    if not isinstance(value, dict):
        raise YamlFault(
            f"holds a {type(value).__name__}, not a mapping of sections", "write `run:`, `model:`, `data:`, ...", line=1
        )
    return value, lines


def parse_value(text: str) -> Any:
    """One value as it would stand in the file: `1e-4`, `[]`, `null`, `{name: gac}`, text."""
    return _read(text)[0]


def _read(text: str) -> tuple[Any, dict[str, int]]:
    loader = _Loader(text)
    lines: dict[str, int] = {}
    try:
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
            f"look at line {mark.line + 1}{column} and the line before it: indentation, a colon, a quote or a bracket"
            if mark
            else "fix the YAML"
        )
        raise YamlFault(what, fix, line=mark.line + 1 if mark else None) from error
    finally:
        loader.dispose()


def _index_lines(node: yaml.Node, prefix: str, lines: dict[str, int]) -> None:
    if isinstance(node, yaml.MappingNode):
        for key_node, value_node in node.value:
            key = f"{prefix}{key_node.value}" if isinstance(key_node, yaml.ScalarNode) else f"{prefix}?"
            line = key_node.start_mark.line + 1
            if key in lines and key_node.tag != "tag:yaml.org,2002:merge":
                raise YamlFault(f"is given twice, on lines {lines[key]} and {line}", "keep one of them", line=line, key=key)
            lines[key] = line
            _index_lines(value_node, key + ".", lines)
    elif isinstance(node, yaml.SequenceNode):
        for position, item in enumerate(node.value):
            lines[f"{prefix}{position}"] = item.start_mark.line + 1
            _index_lines(item, f"{prefix}{position}.", lines)

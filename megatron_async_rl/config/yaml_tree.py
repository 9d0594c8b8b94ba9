"""Conversion of YAML text to a tree of JSON values, and back.

YAML 1.1 and 1.2 read some text differently, and PyYAML follows 1.1: `010` is 8, `1:30` is 90,
`1_000` is 1000, `on` is true, `2024-01-01` is a date and `1e-4` is text. This reader converts the
values on which both versions agree, and the numbers of YAML 1.2. Everything else stays text, as it
was written.

Invariants:
- values are null, true, false, numbers, text, lists and mappings with text keys; other tags are
  refused;
- duplicate keys are refused, and no two places of the tree share a list or a mapping, so that a
  change at one place changes no other place;
- `read_document` inverts `write`, and so does PyYAML's loader.
"""

from __future__ import annotations

import copy
import functools
import re
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

import yaml

KeyPath = tuple[str, ...]
"""Keys and indices from the root of a tree."""

_NULL = re.compile(r"~|null|Null|NULL|")
_BOOL = {
    word: word.lower() == "true" for word in ["true", "True", "TRUE", "false", "False", "FALSE"]
}
_INT = re.compile(r"[-+]?(0|[1-9]\d*)", re.ASCII)
_HEX = re.compile(r"0x[\da-fA-F]+", re.ASCII)
_FLOAT = re.compile(r"[-+]?(\.\d+|(0|[1-9]\d*)\.\d*|(0|[1-9]\d*)(?=[eE]))([eE][-+]?\d+)?", re.ASCII)
_SPECIAL = re.compile(r"(?P<sign>[-+]?)\.(inf|Inf|INF)|\.(nan|NaN|NAN)")
_SWITCH = re.compile(r"yes|no|on|off", re.IGNORECASE)
_OTHER_NUMBER = re.compile(
    r"[-+]?(\d[\d_]*(\.[\d_]*)?([eE][-+]?\d+)?|\.[\d_]+|0b[01_]+|0o[0-7_]+|0x[\da-fA-F_]+"
    r"|\d[\d_]*(:[0-5]?\d)+(\.[\d_]*)?)",
    re.ASCII,
)
_CLOSE_COMMENT = re.compile(r"[ \t]+(#[^\s].*)")
_PLAIN = "plain"
"""Tag of a scalar without quotes and without a tag of its own."""
_TEXT, _LIST, _MAPPING = (f"tag:yaml.org,2002:{kind}" for kind in ("str", "seq", "map"))


class YamlFault(Exception):
    """Error for text that this reader refuses. `line` counts from 1; None if unknown. `key`: the
    dotted key; None if the fault has none."""

    def __init__(
        self, what: str, fix: str, *, line: int | None = None, key: str | None = None
    ) -> None:
        super().__init__(what)
        self.what = what
        self.fix = fix
        self.line = line
        self.key = key


@dataclass(frozen=True, kw_only=True)
class YamlDocument:
    """A tree, and the text that it was written as.

    `lines`: the line of each dotted key. `unquoted`: the text of every scalar without quotes that
    is not read as text, or that YAML versions read differently (`doubt`). `cut`: the comment behind
    a scalar without quotes if there is no blank after its `#`, as in `End with #### and the
    number`; it may be part of the text.
    """

    value: Any
    lines: dict[str, int] = field(default_factory=dict)
    unquoted: dict[KeyPath, str] = field(default_factory=dict)
    cut: dict[KeyPath, str] = field(default_factory=dict)


def read_document(text: str, *, comments: bool = True) -> YamlDocument:
    """Return the tree in `text`; its value is None if the text is empty. With `comments=False`, a
    comment is refused, because it would drop a part of the text. Raises YamlFault."""
    # Callers edit what they get.
    return copy.deepcopy(_document(text, comments))


@functools.lru_cache(maxsize=32)
def _document(text: str, comments: bool) -> YamlDocument:
    # Cached: a command reads its config several times, and PyYAML takes milliseconds for each.
    loader = None
    try:
        loader = (_Composer if comments else _NoComments)(text)
        node = loader.get_single_node()
        if node is None:
            return YamlDocument(value=None)
        # PyYAML's constructors follow YAML 1.1 and lose the text, so build the values here.
        builder = _Builder(text)
        value = builder.build(node, ())
        return YamlDocument(
            value=value, lines=builder.lines, unquoted=builder.unquoted, cut=builder.cut
        )
    except yaml.YAMLError as error:
        # PyYAML's scanner and parser report the place in different attributes.
        mark = getattr(error, "problem_mark", None) or getattr(error, "context_mark", None)
        context = getattr(error, "context", None)
        problem = getattr(error, "problem", None) or str(error).splitlines()[0]
        what = f"is not YAML: {problem}" + (f" ({context})" if context else "")
        column = f", column {mark.column + 1}" if mark else ""
        fix = (
            f"check line {mark.line + 1}{column} and the line before it: indentation, a colon, a"
            " quote or a bracket"
            if mark
            else "fix the YAML"
        )
        raise YamlFault(what, fix, line=mark.line + 1 if mark else None) from error
    # PyYAML is recursive, so deeply nested brackets reach Python's recursion limit.
    except RecursionError as error:
        raise YamlFault("is nested too deeply", "use fewer levels") from error
    finally:
        if loader is not None:
            loader.dispose()


def read_tree(text: str) -> tuple[dict[str, Any], dict[str, int]]:
    """Return the mapping in `text` and the line of every dotted key; an empty text is an empty
    mapping. Raises YamlFault."""
    document = read_document(text)
    return mapping_of(document), document.lines


def mapping_of(document: YamlDocument) -> dict[str, Any]:
    """Return the mapping in `document`; a null document is an empty mapping. Raises YamlFault."""
    if document.value is None:
        return {}
    if not isinstance(document.value, dict):
        raise YamlFault(
            f"is a {type(document.value).__name__}, not a mapping of sections",
            "write `run:`, `model:`, `data:`, ...",
            line=1,
        )
    return document.value


def parse_value(text: str) -> Any:
    """Return the value of a key whose type is unknown: `1e-4`, `[]`, `null`, `{name: gac}`, text.
    Raises YamlFault for text that YAML would cut, or that YAML versions read differently."""
    document = read_document(text, comments=False)
    # `key=` lacks a value; an empty text has quotes.
    if not text.strip():
        raise YamlFault(*NO_VALUE)
    for written in document.unquoted.values():
        if (fault := doubt(written)) is not None:
            raise YamlFault(*fault)
    return document.value


NO_VALUE = ("has no value", "write null for none, or '' (with the quotes) for an empty text")
"""(fault, fix) of an empty override."""


def doubt(written: str) -> tuple[str, str] | None:
    """Return (fault, fix) for text without quotes that YAML 1.1 and 1.2 read differently; None if
    both versions read the same value or text."""
    quoted = f"'{written}' (with the quotes) if it is text"
    if _SWITCH.fullmatch(written):
        meant = "true" if written.lower() in ("yes", "on") else "false"
        return (
            f"{written} is text in YAML 1.2 and {meant} in YAML 1.1",
            f"write {meant}, or {quoted}",
        )
    # A number that this reader accepts has the same value in both versions.
    if _OTHER_NUMBER.fullmatch(written) and isinstance(_resolve(written), str):
        return (
            f"{written} is read as different numbers, or as text, by different versions of YAML",
            f"write a decimal number without leading zeros, `_` and `:`, or {quoted}",
        )
    return None


def is_null(written: str) -> bool:
    return _NULL.fullmatch(written) is not None


def _resolve(written: str) -> Any:
    """Return the value of a scalar without quotes."""
    if is_null(written):
        return None
    if written in _BOOL:
        return _BOOL[written]
    if _INT.fullmatch(written):
        return int(written)
    if _HEX.fullmatch(written):
        return int(written, 16)
    if _FLOAT.fullmatch(written):
        return float(written)
    if (special := _SPECIAL.fullmatch(written)) is not None:
        number = "nan" if special["sign"] is None else f"{special['sign']}inf"
        return float(number)
    return written


class _Composer(yaml.BaseLoader):
    def resolve(self, kind: Any, value: Any, implicit: Any) -> str:
        # PyYAML sets implicit[0] for a scalar without quotes and without a tag.
        if kind is yaml.ScalarNode and implicit[0]:
            return _PLAIN
        return str(super().resolve(kind, value, implicit))


class _NoComments(_Composer):
    def scan_to_next_token(self) -> None:
        start = self.pointer
        super().scan_to_next_token()
        # There are only blanks and comments between two tokens.
        if "#" in self.buffer[start : self.pointer]:
            raise YamlFault(
                "contains `#` after a blank, which begins a comment in YAML, so the rest would be"
                " dropped",
                "quote the text, or remove the comment",
            )


class _Builder:
    """Builder of values from nodes. An alias is built again at each of its places."""

    def __init__(self, text: str) -> None:
        self.lines: dict[str, int] = {}
        self.unquoted: dict[KeyPath, str] = {}
        self.cut: dict[KeyPath, str] = {}
        self._text = text
        self._around: list[yaml.Node] = []

    def build(self, node: yaml.Node, place: KeyPath) -> Any:
        # An alias of an enclosing node would never end.
        if any(node is one for one in self._around):
            raise YamlFault(
                "has an anchor that contains itself", "write the values instead of the alias"
            )
        if isinstance(node, yaml.ScalarNode):
            return self._scalar(node, place)
        self._around.append(node)
        try:
            if isinstance(node, yaml.SequenceNode):
                _require_tag(node, _LIST)
                # Build aliases at every place, so that an override at one does not change another.
                return [self._entry(item, (*place, str(at))) for at, item in enumerate(node.value)]
            _require_tag(node, _MAPPING)
            return self._mapping(node, place)
        finally:
            self._around.pop()

    def _entry(self, node: yaml.Node, place: KeyPath) -> Any:
        self.lines[".".join(place)] = _line(node)
        return self.build(node, place)

    def _scalar(self, node: yaml.ScalarNode, place: KeyPath) -> Any:
        if node.tag == _TEXT:
            return node.value
        _require_tag(node, _PLAIN)
        # The scanner drops comments, so look for them in the source text.
        if (comment := _CLOSE_COMMENT.match(self._text, node.end_mark.index)) is not None:
            self.cut[place] = comment[1]
        value = _resolve(node.value)
        # Keep the text, because the key's type is known only later.
        if not isinstance(value, str) or doubt(value) is not None:
            self.unquoted[place] = node.value
        return value

    def _mapping(self, node: yaml.MappingNode, place: KeyPath) -> dict[str, Any]:
        own: dict[str, Any] = {}
        merged: list[yaml.Node] = []
        for key_node, value_node in node.value:
            line = _line(key_node)
            # Every key is text, also `010`, `on` and `1.0`.
            if not isinstance(key_node, yaml.ScalarNode) or key_node.tag not in (_PLAIN, _TEXT):
                raise YamlFault("has a key that is not text", "write a name", line=line)
            if key_node.tag == _PLAIN and key_node.value == "<<":
                merged += value_node.value if _is_list(value_node) else [value_node]
                continue
            key, inside = key_node.value, (*place, key_node.value)
            dotted = ".".join(inside)
            if key in own:
                raise YamlFault(
                    f"is set twice, on lines {self.lines[dotted]} and {line}",
                    "keep one of them",
                    line=line,
                    key=dotted,
                )
            self.lines[dotted] = line
            own[key] = self.build(value_node, inside)
        # Merge last, because the mapping's own keys take precedence wherever `<<` is.
        for one in merged:
            self._merge(one, own, place)
        return own

    def _merge(self, node: yaml.Node, own: dict[str, Any], place: KeyPath) -> None:
        """Add the keys of `node` that `own` lacks. The mapping's own keys, and the earlier of
        several merged mappings, take precedence."""
        if not isinstance(node, yaml.MappingNode):
            fix = "write `<<: *name` with the name of an anchor on a mapping"
            raise YamlFault("merges a value that is not a mapping", fix, line=_line(node))
        # A separate builder, so that lines and texts of overridden keys replace nothing.
        apart = _Builder(self._text)
        apart._around = self._around
        for key, value in apart.build(node, place).items():
            if key not in own:
                own[key] = value
                inside = (*place, key)
                dotted = ".".join(inside)
                for known, line in apart.lines.items():
                    if known == dotted or known.startswith(f"{dotted}."):
                        self.lines[known] = line
                for source, target in (
                    (apart.unquoted, self.unquoted),
                    (apart.cut, self.cut),
                ):
                    below = unquoted_below(source, inside)
                    target |= {(*inside, *at): written for at, written in below.items()}


def _is_list(node: yaml.Node) -> bool:
    return isinstance(node, yaml.SequenceNode)


def _line(node: yaml.Node) -> int:
    return int(node.start_mark.line) + 1


def _require_tag(node: yaml.Node, tag: str) -> None:
    if node.tag != tag:
        shown = node.tag.replace("tag:yaml.org,2002:", "!!")
        raise YamlFault(f"has the tag {shown}", "remove the tag", line=_line(node))


class _Dumper(yaml.SafeDumper):
    """Dumper that quotes text which any version of YAML would read as another value, and that
    escapes line breaks which YAML would fold into spaces."""

    def represent_str(self, data: str) -> yaml.ScalarNode:
        style = '"' if any(character in data for character in "\x85\u2028\u2029") else None
        return self.represent_scalar("tag:yaml.org,2002:str", data, style=style)


# PyYAML registers representers per class, so once is enough.
_Dumper.add_representer(str, _Dumper.represent_str)
# SafeDumper quotes the numbers of YAML 1.1; this resolver adds others, such as `1e-4` and `0o17`.
_Dumper.add_implicit_resolver(
    "tag:yaml.org,2002:float",
    re.compile(rf"(?:{_FLOAT.pattern}|{_OTHER_NUMBER.pattern})\Z", re.ASCII),
    list("-+.0123456789"),
)


def write(value: Any, *, one_line: bool = False) -> str:
    """Return a tree of JSON values as YAML."""
    text = yaml.dump(  # noqa: TID251
        value,
        Dumper=_Dumper,
        default_flow_style=one_line,
        # Keep the order: users read the sections in the order of the schema.
        sort_keys=False,
        allow_unicode=True,
        width=10**6 if one_line else 120,
    )
    return str(text)


def unquoted_below(unquoted: Mapping[KeyPath, str], place: KeyPath) -> dict[KeyPath, str]:
    """Return the entries of `unquoted` at `place` and inside it, by their place relative to
    `place`."""
    depth = len(place)
    return {at[depth:]: text for at, text in unquoted.items() if at[:depth] == place}

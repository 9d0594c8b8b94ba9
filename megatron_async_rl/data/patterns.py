"""Patterns of file names, as in a shell: `*`, `**`, `[ab]` and `{a,b}`.

Invariants:
- a name that exists as written is not a pattern;
- paths inside a data set on a hub are text with `/`, whatever the machine.
"""

from __future__ import annotations

import glob
import os
import re
from collections.abc import Collection
from fnmatch import fnmatchcase
from pathlib import Path, PurePosixPath


def paths_matching(folder: Path, pattern: str) -> list[Path]:
    """Return the paths under `folder` that match: a name that exists as written is not a pattern,
    and brackets that match nothing are part of the name."""
    found = [folder]
    for name in PurePosixPath(pattern).parts:
        inside: list[Path] = []
        for one in found:
            if os.path.lexists(one / name):
                inside.append(one / name)
                continue
            plain = re.sub(r"\[(?!\[\])", "[[]", name)
            names = glob.glob(name, root_dir=one) or glob.glob(plain, root_dir=one)
            inside += [one / each for each in sorted(names)]
        found = inside
    return found


def matches(path: str, pattern: str) -> bool:
    """Return whether `path` matches as in a shell: `*` stays in a folder, `**` does not."""
    if "**" in pattern:
        return fnmatchcase(path, pattern) or fnmatchcase(path, pattern.replace("**/", ""))
    return path.count("/") == pattern.count("/") and fnmatchcase(path, pattern)


def one_pattern(wanted: Collection[str], among: Collection[str]) -> str:
    """One that matches these paths and no other: with a `*` in some names where that does, else
    with such a pattern for each folder, or the names, as alternatives."""
    whole = _starred(wanted, among)
    if whole is not None:
        return whole
    folders: dict[str, list[str]] = {}
    for path in sorted(wanted):
        folders.setdefault(path.rpartition("/")[0], []).append(path)
    each: list[str] = []
    for paths in folders.values():
        of_folder = _starred(paths, among)
        each += [_escaped(path) for path in paths] if of_folder is None else [of_folder]
    return f"{{{','.join(each)}}}"


def _starred(wanted: Collection[str], among: Collection[str]) -> str | None:
    """Null where the paths have no such pattern to themselves."""
    parts = [path.split("/") for path in wanted]
    if len({len(one) for one in parts}) > 1:
        return None
    pattern = "/".join(_alike(list(names)) for names in zip(*parts, strict=True))
    return pattern if {one for one in among if matches(one, pattern)} == set(wanted) else None


def _alike(names: list[str]) -> str:
    before = os.path.commonprefix(names)  # noqa: RUF071 - letters in common
    if set(names) == {before}:
        return _escaped(before)
    after = os.path.commonprefix([name[len(before) :][::-1] for name in names])  # noqa: RUF071
    return f"{_escaped(before)}*{_escaped(after[::-1])}"


def _escaped(name: str) -> str:
    return re.sub(r"[{,}]", r"[\g<0>]", glob.escape(name))


def alternatives_of(pattern: str) -> list[str]:
    """Return the patterns that one with `{one,other}` in it stands for, as in a shell; any other
    pattern, also with a single name in braces, stands for itself."""
    found = re.fullmatch(r"(.*?)(?<!\[)\{(.*)(?<!\[)\}(.*)", pattern)
    if found is None:
        return [pattern]
    before, inside, after = found.groups()
    names = re.split(r"(?<!\[),", inside)
    return [pattern] if len(names) == 1 else [f"{before}{one}{after}" for one in names]

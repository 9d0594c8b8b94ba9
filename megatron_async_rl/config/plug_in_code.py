"""Digests of the Python files that a configuration names as `module:function`: a reward, an
environment, tools, a method of one's own. A resume notes those that have changed.

Invariant: nothing is imported. A file is looked up where Python would, by its name alone, so that
user code runs only where it is isolated.
"""

from __future__ import annotations

import os
import re
import sys
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

from megatron_async_rl.config.durable import file_digest

_NAMED = re.compile(r"([A-Za-z_]\w*(?:\.[A-Za-z_]\w*)*):[A-Za-z_]\w*(?:\.\w+)*")


def code_digests(tree: Mapping[str, Any]) -> dict[str, str]:
    """File -> digest, for each module that a value of `tree` (a whole configuration) names and that
    is a Python file. A module that imports others is one file: the others do not count."""
    found = {}
    for text in _texts(tree):
        # Any value may name code: plug-ins have keys that this schema does not know.
        matched = _NAMED.fullmatch(text)
        file = _file_of(matched[1]) if matched is not None else None
        if file is not None:
            try:
                found[str(file)] = file_digest(file)
            except OSError:
                continue  # it cannot be loaded either, which is reported where it is
    return found


def _texts(value: Any) -> Iterator[str]:
    if isinstance(value, str):
        yield value
    # Keys are names of settings and never name code.
    elif isinstance(value, Mapping):
        for one in value.values():
            yield from _texts(one)
    elif isinstance(value, list | tuple):
        for one in value:
            yield from _texts(one)


def _file_of(module: str) -> Path | None:
    parts = module.split(".")
    given = os.environ.get("PYTHONPATH", "").split(os.pathsep)
    # Children are started with the current folder and PYTHONPATH, which this process may lack.
    for folder in dict.fromkeys([*sys.path, *given, os.getcwd()]):
        base = Path(folder or os.getcwd(), *parts).absolute()
        for file in (base.with_name(f"{base.name}.py"), base / "__init__.py"):
            if file.is_file():
                return file
    return None

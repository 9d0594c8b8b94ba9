"""The `mar` command in a process forked from a process that has imported what it needs: most of the
time of a command that refuses its config is imports."""

from __future__ import annotations

import os
import runpy
import sys
from collections.abc import Mapping
from pathlib import Path

from tests.forked import Done, forked


def mar(
    *arguments: str | Path,
    folder: Path,
    environment: Mapping[str, str] | None = None,
    stdin: str = os.devnull,
) -> Done:
    """Run `mar ARGUMENTS` in `folder` to its end. Raises AssertionError if it does not end."""
    return forked(
        _run,
        ("megatron_async_rl", "mar"),
        arguments,
        folder=folder,
        environment=environment,
        stdin=stdin,
    )


def _run(module: str, name: str) -> None:
    sys.argv[0] = name
    runpy.run_module(module, run_name="__main__", alter_sys=True)

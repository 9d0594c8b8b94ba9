"""The `mar` command in a process forked from a template that has imported what it needs: most of
its time is imports, where it refuses a config."""

from __future__ import annotations

import os
import runpy
import sys
import tempfile
from dataclasses import dataclass
from pathlib import Path

from tests.parallel.ranks import FORKS

TIMEOUT_S = 600.0


@dataclass(frozen=True)
class Done:
    returncode: int
    stdout: str
    stderr: str


def mar(*arguments: str | Path, folder: Path) -> Done:
    """`mar ARGUMENTS` in `folder`, to its end. Raises AssertionError when it does not end."""
    with tempfile.TemporaryDirectory(prefix="mar-command-") as name:
        out, err = Path(name) / "out", Path(name) / "err"
        process = FORKS.Process(target=_be, args=([*map(str, arguments)], folder, out, err))
        process.start()
        process.join(TIMEOUT_S)
        ended = process.exitcode
        process.kill()
        process.join()
        printed = [file.read_text() if file.exists() else "" for file in (out, err)]
    assert ended is not None, f"mar {arguments} took over {TIMEOUT_S:g} s:\n{printed}"
    return Done(ended, *printed)


def _be(arguments: list[str], folder: Path, out: Path, err: Path) -> None:
    """A forked process's whole life."""
    os.chdir(folder)
    sys.path.insert(0, str(folder))
    nothing = os.open(os.devnull, os.O_RDONLY)
    os.dup2(nothing, 0)
    for stream, file in ((1, out), (2, err)):
        os.dup2(os.open(file, os.O_WRONLY | os.O_CREAT), stream)
    sys.argv = ["mar", *arguments]
    runpy.run_module("megatron_async_rl", run_name="__main__", alter_sys=True)

"""Python programs in processes forked from a process that has imported what they need: most of the
time of a fresh interpreter would be imports."""

from __future__ import annotations

import os
import sys
import tempfile
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path

from tests.parallel.ranks import FORKS

TIMEOUT_S = 600.0


@dataclass(frozen=True)
class Done:
    returncode: int
    stdout: str
    stderr: str


def python(
    code: str,
    *arguments: str | Path,
    folder: Path | None = None,
    environment: Mapping[str, str] | None = None,
    stdin: str = os.devnull,
) -> Done:
    """Run `python -c CODE ARGUMENTS` to its end, with the tests importable.

    A test needs a fresh interpreter instead if it checks which modules are loaded, or sets
    variables that libraries read when they are imported.
    """
    folder = folder or Path()
    return forked(_exec, (code,), arguments, folder=folder, environment=environment, stdin=stdin)


def forked(
    target: Callable[..., None],
    values: tuple[str, ...],
    arguments: tuple[str | Path, ...],
    *,
    folder: Path,
    environment: Mapping[str, str] | None = None,
    stdin: str = os.devnull,
) -> Done:
    """Run `target(*values)` in a process with these arguments, working directory, environment (this
    process's by default) and standard input (a file)."""
    with tempfile.TemporaryDirectory(prefix="mar-forked-") as name:
        out, err = Path(name) / "out", Path(name) / "err"
        given = dict(os.environ if environment is None else environment)
        process = FORKS.Process(
            target=_be,
            args=(
                target,
                values,
                [*map(str, arguments)],
                folder.absolute(),
                given,
                (stdin, out, err),
            ),
        )
        process.start()
        process.join(TIMEOUT_S)
        ended = process.exitcode
        process.kill()
        process.join()
        printed = [file.read_text(errors="replace") if file.exists() else "" for file in (out, err)]
    assert ended is not None, f"{target} {arguments} took over {TIMEOUT_S:g} s:\n{printed}"
    return Done(ended, *printed)


def _be(
    target: Callable[..., None],
    values: tuple[str, ...],
    arguments: list[str],
    folder: Path,
    environment: Mapping[str, str],
    streams: tuple[str, Path, Path],
) -> None:
    """Main function of the forked process."""
    os.chdir(folder)
    sys.path.insert(0, str(folder))
    os.environ.clear()
    os.environ.update(environment)
    stdin, out, err = streams
    os.dup2(os.open(stdin, os.O_RDONLY | os.O_NOCTTY), 0)
    sys.stdin = open(0, closefd=False)  # noqa: SIM115 - multiprocessing has closed its own
    for stream, file in ((1, out), (2, err)):
        os.dup2(os.open(file, os.O_WRONLY | os.O_CREAT), stream)
    sys.argv = ["-c", *arguments]
    target(*values)


def _exec(code: str) -> None:
    exec(compile(code, "<program>", "exec"), {"__name__": "__main__"})

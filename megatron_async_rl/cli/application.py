"""The Typer application: error screens, output streams, and arguments that commands share.

Invariant: a user error ends any command with one screen and exit code 2, never a traceback.
"""

from __future__ import annotations

import errno
import io
import os
import sys
from pathlib import Path
from typing import Annotated, Any

import typer
from rich.console import Console
from typer.core import TyperGroup

from megatron_async_rl import __version__
from megatron_async_rl.config.durable import reason
from megatron_async_rl.config.problem import UserError

USER_ERROR = 2
FULL = (errno.ENOSPC, errno.EDQUOT, errno.EFBIG)
"""Errors of a write if the disk is full, the user's share of it is used up, or a file exceeds the
largest size that is permitted."""
PIPE_WIDTH = 140
NAME_A_RUN = "name a run directory, the `run.dir` of its config"


class Commands(TyperGroup):
    """Ends any command that a user error stops with that error's screen and exit code 2; likewise
    for a file that cannot be read or written."""

    def invoke(self, ctx: Any) -> Any:
        try:
            return super().invoke(ctx)
        except UserError as error:
            print_error(error)
            raise typer.Exit(USER_ERROR) from None
        except OSError as error:
            # A write to a full disk fails without the name of the file. Other errors without a file
            # come from sockets and pipes: a bug or the system, not the request.
            if error.filename is None and error.errno not in FULL:
                raise
            fix = "check the file, its folder and their permissions, or name another one"
            if error.errno in FULL:
                fix = "free space on its disk, raise the limit of file sizes, or name another file"
            named = os.fsdecode(error.filename) if error.filename else "a file of this command"
            print_error(UserError.of(named, reason(error), fix))
            raise typer.Exit(USER_ERROR) from None


# Tracebacks of typer would show local variables, tokens included.
app = typer.Typer(
    name="mar",
    cls=Commands,
    help="Asynchronous RL post-training: Megatron-Core policies, vLLM rollouts.",
    no_args_is_help=True,
    pretty_exceptions_enable=False,
)

ConfigFile = Annotated[
    Path, typer.Argument(metavar="CONFIG", help="YAML file; `mar init` writes one.")
]
Overrides = Annotated[
    list[str] | None,
    typer.Argument(
        metavar="[KEY=VALUE]...", help="Dotted overrides, such as policy.optimizer.lr=1e-4."
    ),
]
NodeCount = Annotated[
    int,
    typer.Option(
        "--nnodes",
        min=1,
        help="Number of identical machines with ranks; start `mar train` on each.",
    ),
]


def console(*, stderr: bool = False) -> Console:
    """Console as wide as the terminal; outside a terminal, wide enough that no line is broken."""
    made = Console(stderr=stderr)
    # rich assumes 80 columns for a pipe and would break paths.
    return made if made.is_terminal else Console(stderr=stderr, width=PIPE_WIDTH)


def _show_version(wanted: bool) -> None:
    if wanted:
        print(f"megatron-async-rl {__version__}")  # noqa: T201
        raise typer.Exit


@app.callback()
def options(
    version: Annotated[
        bool,
        typer.Option("--version", callback=_show_version, is_eager=True, help="Show the version."),
    ] = False,
) -> None:
    """Asynchronous RL post-training: Megatron-Core policies, vLLM rollouts."""


def let_children_import_from_here() -> None:
    """A reward given as module:function is found from the current folder by ranks and engines
    too."""
    here = os.getcwd()
    known = [part for part in os.environ.get("PYTHONPATH", "").split(os.pathsep) if part]
    # Appended, so that the user's own order of paths stays.
    if here not in known:
        os.environ["PYTHONPATH"] = os.pathsep.join([*known, here])


def print_text(text: str) -> None:
    console().print(text, markup=False, highlight=False, soft_wrap=True)


def print_error(error: object) -> None:
    console(stderr=True).print(str(error), markup=False, highlight=False, soft_wrap=True)


def never_fail_to_print() -> None:
    """Print a replacement character where the locale's encoding (GBK, ISO-8859-1, ASCII) lacks one;
    a child process's output is read by this package, as UTF-8."""
    for stream in (sys.stdin, sys.stdout, sys.stderr):
        if isinstance(stream, io.TextIOWrapper):
            # A report must not fail over a character of a prompt.
            stream.reconfigure(errors="replace")
    # Inherited by ranks and engines, whose logs this package reads.
    os.environ["PYTHONIOENCODING"] = "utf-8:backslashreplace"

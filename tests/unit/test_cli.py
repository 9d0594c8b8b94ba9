"""The `mar` command itself: how commands are added, and how what a user got wrong ends."""

from __future__ import annotations

import importlib
import re
from collections.abc import Iterator
from pathlib import Path

import pytest
import typer
from typer.testing import CliRunner

from megatron_async_rl import cli
from tests.cases import looped

COMMANDS = typer.main.get_command(cli.app).commands  # type: ignore[attr-defined]
FILE = """
from megatron_async_rl.config.problem import UserError

def greet(name: str) -> None:
    if name == "nobody":
        raise UserError.of("NAME", "is nobody", "name somebody")
    print(f"hello {name}")
"""


@pytest.fixture
def greet(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """`mar greet`: one file, and one line."""
    (tmp_path / "added_command.py").write_text(FILE)
    monkeypatch.syspath_prepend(tmp_path)
    cli.app.command()(importlib.import_module("added_command").greet)
    yield
    cli.app.registered_commands.pop()


@pytest.mark.usefixtures("greet")
def test_a_command_is_one_file_and_one_line() -> None:
    done = CliRunner().invoke(cli.app, ["greet", "world"])
    assert (done.exit_code, done.output) == (0, "hello world\n")
    assert "greet" in CliRunner().invoke(cli.app, ["--help"]).output


@pytest.mark.usefixtures("greet")
def test_what_a_user_got_wrong_ends_any_command_with_its_screen_and_code_2() -> None:
    done = CliRunner().invoke(cli.app, ["greet", "nobody"])
    assert (done.exit_code, done.output) == (2, "NAME\n  is nobody\n  fix: name somebody\n")


@looped("name", sorted(COMMANDS))
def test_every_command_shows_its_help_with_every_word_of_it(name: str) -> None:
    """A text in brackets would be read as markup: left out, or refused."""
    done = CliRunner().invoke(cli.app, [name, "--help"], env={"COLUMNS": "400"})
    assert done.exit_code == 0, done.exception
    command = COMMANDS[name]
    shown = re.sub(r"[\s│]", "", done.output)
    for words in [command.help, *(one.help for one in command.params)]:
        assert re.sub(r"\s", "", words) in shown


@pytest.mark.parametrize(
    ("typed", "completed"),
    [("mar do", "doctor"), ("mar doctor --fix", "--fix-hints"), ("mar eval --", "--config")],
)
def test_a_shell_completes_commands_and_options(typed: str, completed: str) -> None:
    words = {"COMP_WORDS": typed, "COMP_CWORD": str(typed.count(" "))}
    done = CliRunner().invoke(
        cli.app, env={"_MAR_COMPLETE": "complete_bash", **words}, prog_name="mar"
    )
    assert completed in done.output.split()

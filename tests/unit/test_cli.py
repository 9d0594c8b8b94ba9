"""The `mar` command itself: how commands are added, and how what a user got wrong ends."""

from __future__ import annotations

import errno
import importlib
import os
import re
import shutil
import sys
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace

import pytest
import typer
from typer.testing import CliRunner

from megatron_async_rl import cli
from megatron_async_rl.cli import runs
from tests.cases import looped
from tests.written_run import write_run

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


def test_examples_are_never_written_over(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    share, folder = tmp_path / "share", tmp_path / "here"
    for name in ("docs/a.md", "examples/run.yaml", "examples/generated/x.jsonl"):
        (share / name).parent.mkdir(parents=True, exist_ok=True)
        (share / name).write_text(name)
    monkeypatch.setattr(runs, "SHARE", share)
    done = CliRunner().invoke(cli.app, ["examples", str(folder)])
    assert (done.exit_code, done.output) == (0, f"wrote {folder}/docs, {folder}/examples\n")
    copied = [str(file.relative_to(folder)) for file in folder.rglob("*.*")]
    assert sorted(copied) == ["docs/a.md", "examples/run.yaml"]
    (folder / "docs" / "a.md").unlink()
    (folder / "docs").rmdir()
    done = CliRunner().invoke(cli.app, ["examples", str(folder)])
    what = f"{folder}/examples exists\n  fix: name a new folder: mar examples FOLDER"
    assert (done.exit_code, done.output) == (2, f"FOLDER\n  {what}\n")
    assert not (folder / "docs").exists(), "all parts are checked before the first is copied"


def test_a_full_disk_ends_any_command_with_a_screen(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    share = tmp_path / "share"
    (share / "docs").mkdir(parents=True)
    (share / "docs" / "a.md").write_text("a")
    monkeypatch.setattr(runs, "SHARE", share)

    def full(source: Path, target: Path, **_: object) -> None:
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    def several(source: Path, target: Path, **_: object) -> None:
        reason = "[Errno 28] No space left on device"
        raise shutil.Error([(str(source), str(target), reason)] * 2)

    for copy, words in (
        (full, "a file of this command\n  No space left on device\n  fix: free space on its disk"),
        (several, f"FOLDER\n  {tmp_path}/here was not written: [Errno 28] No space left on device"),
    ):
        monkeypatch.setattr(shutil, "copytree", copy)
        done = CliRunner().invoke(
            cli.app, ["examples", str(tmp_path / "here")], env={"COLUMNS": "400"}
        )
        assert done.exit_code == 2, done.exception
        assert done.output.startswith(words)


def test_folders_that_are_not_what_a_command_reads_or_writes_are_refused(tmp_path: Path) -> None:
    (tmp_path / "checkpoint").mkdir()
    (tmp_path / "full").mkdir()
    (tmp_path / "full" / "model.safetensors").touch()
    (tmp_path / "file").touch()
    for words, key, what, fix in (
        ("report full", "RUN", "full holds no metrics.jsonl", "name a run directory"),
        ("convert nothing out", "CHECKPOINT", "nothing is not a directory", "name RUN/checkpoint"),
        ("convert file out", "CHECKPOINT", "file is not a directory", "name RUN/checkpoint"),
        ("convert checkpoint full", "OUT", "full already exists", "name a new directory"),
        ("convert checkpoint file", "OUT", "file already exists", "name a new directory"),
    ):
        command, *paths = words.split()
        given = [command, *(str(tmp_path / path) for path in paths)]
        done = CliRunner().invoke(cli.app, given, env={"COLUMNS": "400"})
        assert done.exit_code == 2
        first, second, third = done.output.splitlines()
        assert (first, second) == (key, f"  {tmp_path}/{what}")
        assert third.startswith(f"  fix: {fix}")


def test_convert_names_the_folder_that_it_wrote(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """tests/end_to_end converts a real checkpoint in `make test-all`."""
    made = SimpleNamespace(convert=lambda checkpoint, out, dtype: out.mkdir())
    monkeypatch.setitem(sys.modules, "megatron_async_rl.weights.convert", made)
    out = tmp_path / "out"
    done = CliRunner().invoke(cli.app, ["convert", str(tmp_path), str(out)], env={"COLUMNS": "400"})
    assert (done.exit_code, done.output) == (0, f"wrote {out}\n")
    assert out.is_dir()


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


@pytest.mark.parametrize(
    ("words", "key"),
    [
        ("doctor --models --json", "--json"),
        ("doctor --models --fix-hints", "--fix-hints"),
        ("simulate CONFIG --from RUN --hardware b200", "--hardware"),
        ("simulate CONFIG --from RUN --gpus 8", "--gpus"),
        ("simulate CONFIG --from RUN --grow", "--grow"),
        ("simulate CONFIG --out curves", "--out"),
        ("simulate CONFIG --gpus 64.5", "--gpus"),
        ("samples RUN --seed 5", "--seed"),
    ],
)
def test_an_option_without_effect_is_refused(tmp_path: Path, words: str, key: str) -> None:
    config = write_run(tmp_path)
    given = words.replace("CONFIG", str(config)).replace("RUN", str(tmp_path)).split()
    done = CliRunner().invoke(cli.app, given, env={"COLUMNS": "400"})
    assert done.exit_code == 2, done.exception
    assert done.output.startswith(f"{key}\n"), done.output

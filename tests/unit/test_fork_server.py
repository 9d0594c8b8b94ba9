"""The program that a fork runs, as an interpreter would: its arguments, its paths, its name."""

from __future__ import annotations

import json
import os
import sys
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from megatron_async_rl.watchdog import fork_server
from megatron_async_rl.watchdog.fork_server import Server, run

SHOW = """
import json, os, sys
with open(os.environ["SHOWN"], "w") as file:
    file.write(json.dumps([sys.argv, sys.orig_argv[1:], sys.path[0], __name__]))
"""


@pytest.fixture
def shown(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Any:
    """Return a function that runs a program and returns what it saw."""
    monkeypatch.setenv("SHOWN", str(tmp_path / "shown"))
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sys, "path", [*sys.path])
    for name in ("argv", "orig_argv"):
        monkeypatch.setattr(sys, name, getattr(sys, name))
    monkeypatch.setitem(sys.modules, "__main__", sys.modules["__main__"])

    def show(*arguments: str) -> list[Any]:
        run(arguments)
        return list(json.loads((tmp_path / "shown").read_text()))

    return show


def test_a_program_sees_what_an_interpreter_shows_it(shown: Any, tmp_path: Path) -> None:
    (tmp_path / "folder").mkdir()
    (tmp_path / "folder" / "program.py").write_text(SHOW)
    (tmp_path / "link.py").symlink_to("folder/program.py")
    file, folder = "link.py", str(tmp_path / "folder")
    for options in ([], ["-B"], ["-X", "dev", "-B"], ["-W", "ignore"]):
        given = [*options, file, "-a", "b"]
        assert shown(*given) == [[file, "-a", "b"], given, folder, "__main__"]
        given = [*options, "-c", SHOW, "-X"]
        assert shown(*given) == [["-c", "-X"], given, "", "__main__"]
    assert sys.modules["__main__"].__name__ == "__main__"


def test_a_module_runs_as_a_program_from_the_present_folder(
    shown: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "shown_module.py").write_text(SHOW)
    monkeypatch.setitem(sys.modules, "shown_module", SimpleNamespace())
    argv, given, path, name = shown("-m", "shown_module", "a")
    assert argv == [str(tmp_path / "shown_module.py"), "a"]
    assert (given, path, name) == (["-m", "shown_module", "a"], str(tmp_path), "__main__")


def test_output_is_not_buffered_on_request(shown: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    calls: list[Any] = []
    stream = SimpleNamespace(reconfigure=lambda **how: calls.append(how))
    for name in ("stdout", "stderr"):
        monkeypatch.setattr(sys, name, stream)
    shown("-u", "-c", SHOW)
    assert calls == [{"write_through": True}] * 2


def test_a_process_belongs_to_the_requesters_of_its_requester() -> None:
    server: Any = Server.__new__(Server)
    server._requesters = {11: 1, 12: 11, 13: 12, 21: 2, 22: 21}
    assert server._started_by({1}) == {11, 12, 13}
    assert server._started_by({2, 12}) == {13, 21, 22}
    assert server._started_by({13}) == set()


def test_a_request_with_other_search_paths_is_not_served(monkeypatch: pytest.MonkeyPatch) -> None:
    server: Any = Server.__new__(Server)
    server._environment = {"PYTHONPATH": "a"}
    monkeypatch.setattr(fork_server.os, "environ", {"PYTHONPATH": "b", "LD_LIBRARY_PATH": "c"})
    for environment, alike in (
        ({"PYTHONPATH": "a"}, True),
        ({"PYTHONPATH": "b", "LD_LIBRARY_PATH": "c"}, True),
        ({"PYTHONPATH": "a", "LD_LIBRARY_PATH": "d"}, False),
        ({"PYTHONPATH": "x"}, False),
        ({}, False),
        ({"PYTHONPATH": "a", "OTHER": "d"}, True),
    ):
        assert server._searches_alike(environment) == alike, environment
    assert os.environ is fork_server.os.environ

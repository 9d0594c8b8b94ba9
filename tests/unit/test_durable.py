"""One function writes the files that a later start depends on, and syncs before it renames."""

from __future__ import annotations

import ast
import errno
import os
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from megatron_async_rl.config.durable import digest, file_digest, publish, write_file

PACKAGE = Path(__file__).parents[2] / "megatron_async_rl"
WRITES = {"write_text", "write_bytes", "replace", "rename"}
ELSEWHERE = {
    "config/durable.py": "the function itself",
    "flow/sample_log.py": "segments of the sample log",
    "watchdog/progress_monitor.py": "status that other processes read only during the run",
    "metrics/sinks.py": "address of the present start",
    "launch/launcher.py": "logs of the previous start, which it renames",
    "rollout/engine_process.py": "the same",
    "weights/convert.py": "inside a folder that `publish` syncs and renames",
    "plan/new_config.py": "new file of the user",
    "simulate/choose.py": "a result that no start reads",
    "report/report.py": "a result that no start reads",
    "rollout/isolation/sandbox.py": "/proc",
    "samples/frames.py": "segments of the sample log",
    "watchdog/run_folder.py": "temporary files, which no start reads",
}
"""Module that writes or renames files in another way -> its files."""


def test_only_named_modules_write_files_in_another_way() -> None:
    found = {
        str(file.relative_to(PACKAGE))
        for file in PACKAGE.rglob("*.py")
        if "share" not in file.relative_to(PACKAGE).parts
        for node in ast.walk(ast.parse(file.read_text()))
        if isinstance(node, ast.Call) and _writes(node)
    }
    assert found <= ELSEWHERE.keys()


def _writes(call: ast.Call) -> bool:
    """Return True for `path.write_text(...)`, `os.replace(...)` and `path.rename(one)`, but not for
    methods of text and dataclasses with these names."""
    function = call.func
    if not isinstance(function, ast.Attribute) or function.attr not in WRITES:
        return False
    of_os = isinstance(function.value, ast.Name) and function.value.id == "os"
    return of_os or function.attr.startswith("write_") or function.attr == "rename"


def test_a_file_is_synced_before_it_is_renamed_and_its_folder_after(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    done: list[str] = []

    def noted(name: str, call: Callable[..., Any]) -> Callable[..., Any]:
        def noting(*arguments: Any) -> Any:
            if name == "fsync":
                place = os.readlink(f"/proc/self/fd/{arguments[0]}")
                done.append(f"fsync {'folder' if os.path.isdir(place) else 'file'}")
            else:
                done.append(name)
            return call(*arguments)

        return noting

    for name in ("fsync", "replace", "rename"):
        monkeypatch.setattr(os, name, noted(name, getattr(os, name)))
    write_file(tmp_path / "file", "new")
    assert done == ["fsync file", "replace", "fsync folder"]
    done.clear()
    (tmp_path / "unfinished" / "inner").mkdir(parents=True)
    (tmp_path / "unfinished" / "inner" / "file").touch()
    publish(tmp_path / "unfinished", tmp_path / "final")
    assert done == ["fsync folder", "fsync file", "fsync folder", "rename", "fsync folder"]


@pytest.mark.parametrize("fails", ["fsync", "replace"])
def test_a_failed_write_leaves_the_old_content(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, fails: str
) -> None:
    def failing(*_: object) -> None:
        raise OSError("the disk is gone")

    write_file(tmp_path / "file", b"old")
    monkeypatch.setattr(os, fails, failing)
    with pytest.raises(OSError, match="the disk is gone"):
        write_file(tmp_path / "file", b"new")
    assert [(path.name, path.read_bytes()) for path in tmp_path.iterdir()] == [("file", b"old")]


def test_the_digest_of_a_file_equals_that_of_its_content(tmp_path: Path) -> None:
    (tmp_path / "file").write_bytes(b"content")
    assert file_digest(tmp_path / "file") == digest(b"content")
    assert digest(b"content") != digest(b"contenu")


def test_a_write_to_a_full_disk_names_the_file(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def full(descriptor: int) -> None:
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    monkeypatch.setattr(os, "fsync", full)
    with pytest.raises(OSError, match="No space left on device") as caught:
        write_file(tmp_path / "result.json", "{}")
    assert caught.value.filename == str(tmp_path / "result.json")
    assert not list(tmp_path.iterdir())

"""Tests of failures that the launcher explains, such as full disks."""

from __future__ import annotations

import io
import shutil
from collections import namedtuple
from pathlib import Path

import pytest
from rich.console import Console

from megatron_async_rl.launch.ending import explain_failure
from megatron_async_rl.policy.checkpoint import _cleared_on_failure
from megatron_async_rl.watchdog.events import Status, write_status


def test_a_partial_checkpoint_is_removed_and_the_error_stays(tmp_path: Path) -> None:
    unfinished = tmp_path / "unfinished_step_00000004"
    (unfinished / "sharded").mkdir(parents=True)
    with pytest.raises(OSError, match="No space left"), _cleared_on_failure(unfinished):
        raise OSError(28, "No space left on device")
    assert list(tmp_path.iterdir()) == []


def test_any_error_on_a_full_disk_is_reported_as_a_full_disk(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    usage = namedtuple("usage", "total used free")
    monkeypatch.setattr(shutil, "disk_usage", lambda path: usage(2**31, 2**31 - 4096, 4096))
    (tmp_path / "unfinished").mkdir()
    with (
        pytest.raises(OSError, match="No space left for a checkpoint"),
        _cleared_on_failure(tmp_path / "unfinished"),
    ):
        raise RuntimeError("unexpected pos 704 vs 598")


@pytest.mark.parametrize(("free", "reported"), [(4096, True), (2**30, False)])
def test_the_launcher_reports_a_full_disk(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, free: int, reported: bool
) -> None:
    usage = namedtuple("usage", "total used free")
    monkeypatch.setattr(shutil, "disk_usage", lambda path: usage(2**31, 2**31 - free, free))
    (tmp_path / "logs").mkdir()
    written = io.StringIO()
    explain_failure(tmp_path, Console(file=written))
    assert (f"The file system that holds {tmp_path} is full" in written.getvalue()) == reported


@pytest.mark.parametrize("checkpoint", ["", "step_00000004"])
def test_a_failure_names_the_checkpoint_from_which_the_same_command_resumes(
    tmp_path: Path, checkpoint: str
) -> None:
    (tmp_path / "logs").mkdir()
    status = Status(phase="failed", step=5, steps=9, time=0.0, checkpoint=checkpoint)
    write_status(tmp_path, status)
    written = io.StringIO()
    explain_failure(tmp_path, Console(file=written, width=200))
    named = "The same command resumes from step_00000004" in written.getvalue()
    assert named == bool(checkpoint)

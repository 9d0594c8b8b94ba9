"""Tests of failures that the launcher explains, such as full disks."""

from __future__ import annotations

import io
import shutil
from collections import namedtuple
from pathlib import Path

import pytest
from rich.console import Console

from megatron_async_rl.config.load import load
from megatron_async_rl.launch.ending import explain_failure
from megatron_async_rl.plan.machine import GIB, Machine
from megatron_async_rl.plan.preflight import preflight
from megatron_async_rl.plan.totals import free_disk_problems
from megatron_async_rl.policy.checkpoint import _cleared_on_failure
from megatron_async_rl.watchdog.events import Status, write_status
from tests.written_run import write_run


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


def test_a_run_whose_checkpoints_do_not_fit_on_the_disk_is_refused_before_it_starts(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    settings = ["run.steps=40", "checkpoint.every=10", "checkpoint.keep=2"]
    config = load(write_run(tmp_path), [*settings, f"run.dir={tmp_path}/runs/new"])
    machine = Machine(cores=2, memory=64 * GIB, shared_memory=8 * GIB, gpus=())
    sums = preflight(config, all_data=False, machine=machine).totals
    assert sums is not None
    usage = namedtuple("usage", "total used free")
    asked = []

    def problems(free: int, total: int = 2**40) -> list[str]:
        def disk_usage(path: Path) -> object:
            asked.append(path)
            return usage(total, 0, free)

        monkeypatch.setattr(shutil, "disk_usage", disk_usage)
        return [f"{one.key}: {one.what}; {one.fix}" for one in free_disk_problems(config, sums)]

    needed = 3 * sums.checkpoint + sums.export
    assert problems(needed) == []
    (refused,) = problems(needed - 1)
    assert refused.startswith("run.dir: ")
    assert " are needed for 3 more checkpoints and the exported model, and the disk of " in refused
    assert refused.endswith(
        "free space there, set checkpoint.keep: 1, or set run.dir to a folder on a larger disk"
    )
    # Neither the folder nor its parent exists yet.
    assert set(asked) == {tmp_path}
    assert problems(0, total=0) == [], "the file system does not report its size"
    for step in (10, 20, 30):
        (config.run.dir / "checkpoint" / f"step_{step:08}").mkdir(parents=True)
    assert problems(sums.checkpoint + sums.export) == []
    assert problems(sums.checkpoint + sums.export - 1) != []
    (config.run.dir / "hf").mkdir()
    assert problems(sums.checkpoint) == []
    assert "for 1 more checkpoint, and the disk" in problems(sums.checkpoint - 1)[0]
    assert free_disk_problems(config, None) == []

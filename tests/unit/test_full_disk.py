"""Tests of failures that the launcher explains, such as full disks."""

from __future__ import annotations

import io
import shutil
from collections import namedtuple
from pathlib import Path

import pytest
from rich.console import Console

from megatron_async_rl.config.load import load
from megatron_async_rl.config.schema import Config, NumericsConfig
from megatron_async_rl.launch.ending import explain_failure
from megatron_async_rl.plan.machine import GIB, Machine
from megatron_async_rl.plan.preflight import preflight
from megatron_async_rl.plan.totals import Totals, checkpoints_at_once, free_disk_problems
from megatron_async_rl.policy import checkpoint_folder
from megatron_async_rl.policy.checkpoint import _cleared_on_failure
from megatron_async_rl.watchdog.events import Status, write_status
from tests.written_run import write_run


def test_a_partial_checkpoint_is_removed_and_the_error_stays(tmp_path: Path) -> None:
    unfinished = tmp_path / "unfinished_step_00000004"
    (unfinished / "sharded").mkdir(parents=True)
    with pytest.raises(OSError, match="No space left"), _cleared_on_failure(unfinished):
        raise OSError(28, "No space left on device")
    assert list(tmp_path.iterdir()) == []


def test_the_error_stays_if_another_rank_removes_the_partial_checkpoint_first(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    unfinished = tmp_path / "unfinished"
    unfinished.mkdir()
    disk_usage = shutil.disk_usage

    def removed_before(path: Path) -> object:
        unfinished.rmdir()
        return disk_usage(path)

    monkeypatch.setattr(shutil, "disk_usage", removed_before)
    with pytest.raises(RuntimeError, match="the disk is gone"), _cleared_on_failure(unfinished):
        raise RuntimeError("the disk is gone")


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


def planned(tmp_path: Path, *settings: str) -> tuple[Config, Totals]:
    overrides = ["run.steps=40", "checkpoint.every=10", f"run.dir={tmp_path}/runs/new", *settings]
    config = load(write_run(tmp_path), overrides)
    machine = Machine(cores=2, memory=64 * GIB, shared_memory=8 * GIB, gpus=())
    sums = preflight(config, all_data=False, machine=machine).totals
    assert sums is not None
    return config, sums


class Disk:
    """A file system of `total` bytes, and the folders whose free space was read."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.free, self.total, self.asked = 0, 2**40, list[Path]()
        usage = namedtuple("usage", "total used free")

        def disk_usage(path: Path) -> object:
            self.asked.append(path)
            return usage(self.total, 0, self.free)

        monkeypatch.setattr(shutil, "disk_usage", disk_usage)


def test_a_run_whose_checkpoints_do_not_fit_on_the_disk_is_refused_before_it_starts(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    config, sums = planned(tmp_path, "checkpoint.keep=3")
    disk = Disk(monkeypatch)

    def problems(free: int) -> list[str]:
        disk.free = free
        return [f"{one.key}: {one.what}; {one.fix}" for one in free_disk_problems(config, sums)]

    needed = 4 * sums.checkpoint + sums.export
    assert problems(needed) == []
    (refused,) = problems(needed - 1)
    assert refused.startswith("run.dir: ")
    assert " are needed for 4 more checkpoints and the exported model, and the disk of " in refused
    assert refused.endswith(
        "free space there, set checkpoint.keep: 1, or set run.dir to a folder on a larger disk"
    )
    # Neither the folder nor its parent exists yet.
    assert set(disk.asked) == {tmp_path}
    disk.total = 0
    assert problems(0) == [], "the file system does not report its size"
    disk.total = 2**40
    for step in (10, 20, 30, 40):
        (config.run.dir / "checkpoint" / f"step_{step:08}").mkdir(parents=True)
    # A new export is complete before the existing one is removed.
    (config.run.dir / "hf").mkdir()
    assert problems(sums.checkpoint + sums.export) == []
    assert "for 1 more checkpoint and the" in problems(sums.checkpoint + sums.export - 1)[0]
    assert free_disk_problems(config, None) == []
    numerics = config.model_copy(
        update={"run": config.run.model_copy(update={"numerics": NumericsConfig()})}
    )
    disk.free = 0
    assert free_disk_problems(numerics, sums) == [], "it writes neither"


def test_what_a_run_removes_before_it_writes_counts_as_free(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    config, sums = planned(tmp_path)
    disk = Disk(monkeypatch)
    for name in ("checkpoint/unfinished_step_00000010/sharded", "hf.unfinished"):
        folder = config.run.dir / name
        folder.mkdir(parents=True)
        (folder / "part").write_bytes(bytes(1000))
    disk.free = 3 * sums.checkpoint + sums.export - 2000
    assert free_disk_problems(config, sums) == []
    disk.free -= 1
    assert len(free_disk_problems(config, sums)) == 1


def test_checkpoints_on_another_disk_are_checked_there(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    config, sums = planned(tmp_path)
    config.run.dir.mkdir(parents=True)
    other = Path("/dev/shm") / f"mar-test-{tmp_path.parent.name}-{tmp_path.name}"
    other.mkdir()
    try:
        (config.run.dir / "checkpoint").symlink_to(other)
        usage = namedtuple("usage", "total used free")
        free = {config.run.dir: sums.export, config.run.dir / "checkpoint": 3 * sums.checkpoint}
        monkeypatch.setattr(shutil, "disk_usage", lambda path: usage(2**40, 0, free[path]))
        assert free_disk_problems(config, sums) == []
        free[config.run.dir] -= 1
        (export,) = free_disk_problems(config, sums)
        assert "needed for the exported model, and the disk of" in export.what
        assert export.fix == "free space there, or set run.dir to a folder on a larger disk"
        free[config.run.dir / "checkpoint"] -= 1
        assert len(free_disk_problems(config, sums)) == 2
    finally:
        other.rmdir()


@pytest.mark.parametrize(("keep", "most"), [(1, 3), (2, 3), (3, 4)])
def test_the_checkpoints_of_a_save_are_those_that_the_plan_counts(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, keep: int, most: int
) -> None:
    config, _ = planned(tmp_path, "run.steps=60", f"checkpoint.keep={keep}")
    assert checkpoints_at_once(config) == most
    assert checkpoints_at_once(planned(tmp_path, "run.steps=20", f"checkpoint.keep={keep}")[0]) == 2
    monkeypatch.setattr(checkpoint_folder, "looks_whole", lambda path: True)
    checked, seen, before = set[Path](), list[int](), None
    for step in range(10, 61, 10):
        current = tmp_path / "saved" / f"step_{step:08}"
        current.mkdir(parents=True)
        seen.append(len(list(current.parent.iterdir())))
        # As in a run: the step after the previous checkpoint has confirmed its weights.
        for path in checkpoint_folder.outdated(current, keep, checked, before):
            path.rmdir()
        before = current.name
    assert max(seen) == most

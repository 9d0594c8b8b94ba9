"""However a run is brought to its end from outside, its work is kept and nothing of it stays."""

from __future__ import annotations

import json

import psutil
import pytest

from megatron_async_rl.launch.run_lock import RunDirectoryError, lock_run_dir
from tests.end_to_end.conftest import Workspace, alive, started_by, wait_until

pytestmark = [pytest.mark.end_to_end, pytest.mark.faults, pytest.mark.slow]


def test_a_run_whose_launcher_is_killed_saves_its_work_and_leaves_nothing(
    workspace: Workspace,
) -> None:
    config = workspace.config(
        "orphan",
        run={"dir": "runs/orphan", "steps": 100000},
        policy={"parallel": {"ranks": 1, "tensor": 1}},
        checkpoint={"every": 0},
    )
    directory = workspace.folder / "runs" / "orphan"
    launcher = workspace.start("train", str(config))
    wait_until(lambda: len(workspace.metrics("orphan")) >= 2, launcher)
    processes = started_by(launcher)
    launcher.kill()
    launcher.communicate()
    with (
        pytest.raises(RunDirectoryError, match=rf"\(pid {launcher.pid}\) was killed"),
        lock_run_dir(directory),
    ):
        pytest.fail("another run could begin beside the ranks")
    _, left = psutil.wait_procs(processes, timeout=120)
    assert alive(left) == []
    status = json.loads((directory / "status.json").read_text())
    assert status["phase"] == "stopped"
    assert (directory / "checkpoint" / "latest").read_text() == f"step_{status['step']:08d}"

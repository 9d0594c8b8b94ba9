"""A process that stops moving ends the run with a message that names it, and what the others wait
for; nothing is left behind.

Each case is a run of its own through the command line, with real ranks, a real engine and real
signals.
"""

from __future__ import annotations

import json
import signal
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path

import psutil
import pytest

from tests.end_to_end.conftest import Workspace, alive, started_by, wait_until

pytestmark = [pytest.mark.end_to_end, pytest.mark.faults, pytest.mark.slow]

TIMEOUT_S = 10
AT_A_TIME = 2
"""Runs; most of a case is waiting."""
STOPPED = ("rank 0", "rank 1", "controller", "engine-0", "engine-0 EngineCore")
REWARD = """
import time
from pathlib import Path


def never(prompt, response):
    while Path(__file__).with_name("stuck").exists():
        time.sleep(3600)
    return 0.5
"""


@dataclass
class Ended:
    """How a run with something stuck in it ended. `left`: names of its processes that still
    live."""

    code: int
    said: str
    pid: int
    left: list[str]
    directory: Path


def pid_of(directory: Path, name: str) -> int:
    return int(json.loads((directory / "watch" / f"{name}.json").read_text())["pid"])


def run(workspace: Workspace, stopped: str | None) -> Ended:
    """A run in which the process `stopped` is stopped after two steps, or, without one, a reward
    never returns. It has one rank, where `stopped` is none."""
    name = (stopped or "reward").replace(" ", "_")
    ranks = 2 if stopped is not None and stopped.startswith("rank") else 1
    rollout: dict[str, object] = {"restarts_per_hour": 0, "unresponsive_s": TIMEOUT_S - 2}
    if stopped is None:
        rollout["reward"] = {"name": "stuck_reward:never", "timeout_s": 1000}
    config = workspace.config(
        name,
        run={"dir": f"runs/{name}", "steps": 100000},
        rollout=rollout,
        policy={"parallel": {"ranks": ranks, "tensor": ranks}},
        checkpoint={"every": 0},
        watchdog={"timeout_s": TIMEOUT_S},
    )
    directory = workspace.folder / "runs" / name
    process = workspace.start("train", str(config))
    if stopped is None:
        wait_until(lambda: (directory / "watch" / "engine-0 EngineCore.json").exists(), process)
        (workspace.folder / "stuck").touch()
    else:
        wait_until(lambda: len(workspace.metrics(name)) >= 2, process)
    processes = started_by(process)
    stuck = pid_of(directory, stopped or "engine-0")
    if stopped is not None:
        psutil.Process(stuck).send_signal(signal.SIGSTOP)
    output, _ = process.communicate(timeout=120)
    return Ended(
        process.returncode,
        output[output.rfind("The run failed:") :],
        stuck,
        alive(processes),
        directory,
    )


@pytest.fixture(scope="module")
def runs(workspace: Workspace) -> dict[str | None, Future[Ended]]:
    (workspace.folder / "stuck_reward.py").write_text(REWARD)
    pool = ThreadPoolExecutor(AT_A_TIME)
    return {stopped: pool.submit(run, workspace, stopped) for stopped in (*STOPPED, None)}


@pytest.mark.parametrize("name", STOPPED)
def test_a_stopped_process_ends_the_run_and_is_named(
    runs: dict[str | None, Future[Ended]], name: str
) -> None:
    ended = runs[name].result(timeout=500)
    assert ended.code == 1
    stopped = f"{name} (pid {ended.pid}) is stopped" in ended.said
    # The controller may have found out first that the engine does not answer.
    lost = (
        name.startswith("engine-0")
        and "engine 0: it" in ended.said
        and "did not answer" in ended.said
    )
    assert stopped or lost, ended.said
    assert " waits for " in ended.said
    assert ("rank 1 (pid" if name == "rank 0" else "rank 0 (pid") in ended.said
    assert "Traceback" not in ended.said
    assert len(ended.said.splitlines()) < 60
    assert json.loads((ended.directory / "status.json").read_text())["phase"] == "failed"
    assert "most recent call first" in (ended.directory / "stall.txt").read_text()
    assert ended.left == []


def test_a_reward_that_never_returns_is_named_with_its_prompt(
    runs: dict[str | None, Future[Ended]],
) -> None:
    ended = runs[None].result(timeout=500)
    assert ended.code == 1
    assert (
        f"engine-0 (pid {ended.pid}) is busy with the reward of a response to prompt " in ended.said
    ), ended.said
    assert ", stuck_reward:never" in ended.said
    assert "waits for" in ended.said
    assert ended.left == []

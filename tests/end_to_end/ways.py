"""Colocated with an exact lag, a window with over-sampling, and replay: real runs of one loop,
apart by settings alone. Each shows first what its settings do, and then how it ends when something
of it is killed, stopped or broken.

    exact    colocated, its weights shared; its launcher is killed; it is started again, and then
             its rank is stopped
    window   from a converted model, with two ranks; its controller is stopped
    replay   its reward no longer returns, which by the config ends the run
"""

from __future__ import annotations

import json
import signal
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import psutil

from megatron_async_rl.launch.run_lock import RunDirectoryError, lock_run_dir
from tests.end_to_end.workspace import Workspace, alive, started_by, wait_until

STEPS, LAG = 8, 2
"""Steps that a run makes at least before it is brought to its end."""
ONE_RANK, TWO_RANKS = (
    {"parallel": {"ranks": n, "tensor": n}, "optimizer": {"lr": 1e-3}} for n in (1, 2)
)
STILL_S = 30
"""watchdog.timeout_s of the runs that hang."""
STILL = {"watchdog": {"timeout_s": STILL_S}}
SOON = {"unresponsive_s": STILL_S - 2}
WAYS: dict[str, dict[str, Any]] = {
    "exact": {
        "flow": {"async_ratio": LAG, "selection": {"name": "exact_lag", "lag": LAG}},
        "rollout": {
            "placement": "colocated",
            "reward": {"name": "flaky_reward:varied", "timeout_s": STILL_S - 2},
            "sampling": {"max_tokens": 24},
            **SOON,
        },
        "weights": {"transport": "cuda_ipc", "bucket_mib": 1},
        "policy": ONE_RANK,
        **STILL,
    },
    "window": {
        "flow": {
            "async_ratio": 1.5,
            "selection": "windowed",
            "oversample": 0.5,
            "late": "drop",
        },
        "rollout": {
            "in_flight": "recompute",
            "reward": {"name": "flaky_reward:varied", "timeout_s": STILL_S - 2},
            "sampling": {"max_tokens": 48},
            **SOON,
        },
        "policy": TWO_RANKS,
        "model": {"path": "converted"},
        **STILL,
    },
    "replay": {
        "flow": {"async_ratio": 1, "selection": {"name": "replay", "recent": 0.3}},
        "rollout": {
            "reward": {"name": "flaky_reward:until_stuck", "timeout_s": 20, "on_error": "stop"}
        },
        "objective": {"loss": "trajectory_balance", "advantage": "none", "reference": {}},
        "data": {"train": "four.jsonl"},
        "policy": ONE_RANK,
    },
}


@dataclass
class Orphaned:
    """A run whose launcher was killed. `refusal`: of another launcher while its ranks live; `left`:
    names of its processes that still live; `status`: that of the run then."""

    pid: int
    refusal: str
    left: list[str]
    status: dict[str, Any]


@dataclass
class Ended:
    """How a run ended. `said`: from the failure on; `pid`: of what was stopped; `left`: names of
    its processes that still live."""

    code: int
    output: str
    pid: int
    left: list[str]
    directory: Path
    rows: list[dict[str, Any]]
    orphaned: Orphaned | None = None

    @property
    def said(self) -> str:
        return self.output[self.output.rfind("The run failed:") :]


def pid_of(directory: Path, name: str) -> int:
    return int(json.loads((directory / "watch" / f"{name}.json").read_text())["pid"])


def run(workspace: Workspace, name: str) -> Ended:
    settings = {"run": {"dir": f"runs/{name}", "steps": 100000}, "checkpoint": {"every": 0}}
    config = workspace.config(name, **settings, **WAYS[name])
    if name == "replay":
        lines = (workspace.folder / "train.jsonl").read_text().splitlines(keepends=True)
        (workspace.folder / "four.jsonl").write_text("".join(lines[:4]))
    directory, orphaned, steps = workspace.folder / "runs" / name, None, STEPS
    process = workspace.start("train", str(config))
    if name == "exact":
        wait_until(lambda: len(workspace.metrics(name)) >= steps, process)
        orphaned = orphan(directory, process)
        steps += orphaned.status["step"]
        process = workspace.start("train", str(config))
    if name == "window":
        wait_until(lambda: len(workspace.metrics(name)) >= steps and mixed(workspace), process)
    else:
        wait_until(lambda: len(workspace.metrics(name)) >= steps, process)
    processes = started_by(process)
    stopped = {"exact": "rank 0", "window": "controller"}.get(name)
    pid = pid_of(directory, stopped or "engine-0")
    if stopped is not None:
        psutil.Process(pid).send_signal(signal.SIGSTOP)
    else:
        (workspace.folder / "stuck").touch()
    output, _ = process.communicate(timeout=400)
    left, rows = alive(processes), workspace.metrics(name)
    return Ended(process.returncode, output, pid, left, directory, rows, orphaned)


def mixed(workspace: Workspace) -> bool:
    """True once the window's run has trained on a response that an update ran through."""
    return any(row["response/mixed_versions"] > 0 for row in workspace.metrics("window"))


def orphan(directory: Path, launcher: Any) -> Orphaned:
    processes = started_by(launcher)
    rank = psutil.Process(pid_of(directory, "rank 0"))
    rank.suspend()  # or it could have ended before another launcher tries
    launcher.kill()
    launcher.communicate()
    try:
        with lock_run_dir(directory):
            refusal = "none"
    except RunDirectoryError as error:
        refusal = str(error)
    rank.resume()
    _, left = psutil.wait_procs(processes, timeout=400)
    status = json.loads((directory / "status.json").read_text())
    return Orphaned(launcher.pid, refusal, alive(left), status)

"""A fleet of two engines in a real run, with a communicator for the weights of each: one stops
moving, does not come back and is lost permanently; then the other dies, comes back with proven
weights, and stops moving, with which the run ends."""

from __future__ import annotations

import json
import signal
from pathlib import Path

import psutil

from tests.end_to_end.workspace import Workspace, alive, started_by, wait_until
from tests.vllm_process import core_of

UNRESPONSIVE_S = 60.0
"""Time until a stopped engine counts as lost. Other runs use the cores at the same time, and a slow
engine must not count as lost: each engine has one restart."""


def trouble(workspace: Workspace) -> dict[str, object]:
    """The actor of engine 0 is stopped like a wedged process, and killed as soon as it is started
    again; with one restart allowed, engine 1 continues alone. Its vLLM process is killed, so that
    for a while there is none, restarted, and then stopped."""
    config = workspace.config(
        "fleet",
        run={"dir": "runs/fleet", "steps": 100000},
        flow={"async_ratio": 2},
        rollout={
            "engines": 2,
            "restarts_per_hour": 1,
            "unresponsive_s": UNRESPONSIVE_S,
            "reward": {"name": "flaky_reward:varied"},
            "in_flight": "recompute",
            "sampling": {"max_tokens": 24},
        },
        objective={
            "advantage": "none",
            "proximal": "snapshot",
            "loss": "decoupled_ppo",
            "snapshots": 3,
        },
        policy={"parallel": {"ranks": 1, "tensor": 1}, "optimizer": {"lr": 1e-4}},
        checkpoint={"every": 0},
        watchdog={"timeout_s": 900},
        weights={"transport": "collective"},
    )
    run = workspace.folder / "runs" / "fleet"
    process = workspace.start("train", str(config))
    wait_until(lambda: len(workspace.metrics("fleet")) >= 2, process)
    pid = pid_of(run, "engine-0")
    assert pid is not None
    actor = psutil.Process(pid)
    actor.send_signal(signal.SIGSTOP)
    wait_until(lambda: pid_of(run, "engine-0") not in (None, actor.pid), process)
    psutil.Process(pid_of(run, "engine-0")).kill()
    wait_until(lambda: any("lost permanently" in text for text in events(run)), process)
    alone_at = len(workspace.metrics("fleet"))
    wait_until(lambda: len(workspace.metrics("fleet")) >= alone_at + 3, process)
    core_of(run / "logs" / "engine-1.log").kill()
    wait_until(lambda: any("engine-1 is back" in text for text in events(run)), process)
    back_at = len(workspace.metrics("fleet"))
    wait_until(lambda: len(workspace.metrics("fleet")) >= back_at + 3, process)
    wait_until(
        lambda: any(row["response/mixed_versions"] > 0 for row in workspace.metrics("fleet")),
        process,
    )
    rows, processes = workspace.metrics("fleet"), started_by(process)
    core_of(run / "logs" / "engine-1.log").send_signal(signal.SIGSTOP)
    # Well under watchdog.timeout_s: the hang of the engine is detected, not waited out.
    output, _ = process.communicate(timeout=400)
    return {
        "code": process.returncode,
        "output": output,
        "rows": rows,
        "events": events(run),
        "back_at": back_at,
        "left": alive(processes),
        "run": run,
    }


def pid_of(run: Path, name: str) -> int | None:
    try:
        return int(json.loads((run / "watch" / f"{name}.json").read_text())["pid"])
    except FileNotFoundError:
        return None


def events(run: Path) -> list[str]:
    path = run / "events.jsonl"
    return (
        [json.loads(line)["text"] for line in path.read_text().splitlines()]
        if path.exists()
        else []
    )

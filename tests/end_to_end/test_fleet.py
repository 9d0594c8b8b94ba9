"""A fleet of two engines in a real run, with a communicator for the weights of each: one stops
moving, does not come back and is lost permanently; then the other dies, comes back with proven
weights, and stops moving, with which the run ends."""

from __future__ import annotations

import json
import re
import signal
from pathlib import Path

import psutil
import pytest

from tests.end_to_end.workspace import Workspace, alive, started_by, wait_until
from tests.vllm_process import core_of

pytestmark = [pytest.mark.end_to_end, pytest.mark.slow]

UNRESPONSIVE_S = 30.0


@pytest.fixture(scope="module")
def troubled(workspace: Workspace) -> dict[str, object]:
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


def test_the_loss_of_the_last_engine_ends_the_run_with_its_name_and_nothing_left_running(
    troubled: dict[str, object],
) -> None:
    output = str(troubled["output"])
    assert troubled["code"] == 1, output
    said = output[output.index("The run failed:") :]
    assert "engine 1: it" in said
    assert "did not answer" in said
    assert "Log:" in said
    assert re.search(r"rank 0 had waited [\d.]+ s for ", said)
    assert "rank 0 (pid" in said
    assert "Traceback" not in said
    assert len(said.splitlines()) < 60
    run = Path(str(troubled["run"]))
    assert json.loads((run / "status.json").read_text())["phase"] == "failed"
    assert "most recent call first" in (run / "stall.txt").read_text()
    assert troubled["left"] == []


def test_the_loss_return_and_end_of_an_engine_are_reported_to_the_user(
    troubled: dict[str, object],
) -> None:
    said = " ".join(troubled["events"])  # type: ignore[arg-type]
    assert "engine-0 is lost and its requests are sent again; restart 1 of 1" in said
    assert "engine-0 is lost permanently; 1 of 2 engines are left" in said
    assert "did not answer" in said
    assert "engine-1 is lost and its requests are sent again; restart 1 of 1" in said
    assert "engine-1 is back, with the weights of version" in said
    assert "1 of 2 engines are left" in str(troubled["output"])


def test_a_restarted_engine_samples_with_the_current_weights(troubled: dict[str, object]) -> None:
    rows = troubled["rows"]
    after = [row for row in rows if row["step"] > troubled["back_at"]]  # type: ignore[attr-defined, operator]
    used = [row for row in after if row["engine/tokens"][1] > 0]
    assert used, "the restarted engine took part"
    assert (
        max(row["ratio/logp_diff_lag0_max"] for row in rows if "ratio/logp_diff_lag0_max" in row)
        < 1e-5
    )  # type: ignore[attr-defined]
    assert max(row["engine/restarts"] for row in rows) == 2  # type: ignore[attr-defined]


def test_every_token_has_the_log_prob_of_the_version_it_carries(
    troubled: dict[str, object],
) -> None:
    """The trainer's snapshot of that version proves it, for responses that span updates too: each
    update has them recomputed."""
    rows = troubled["rows"]
    assert max(row["response/mixed_versions"] for row in rows) > 0  # type: ignore[attr-defined]
    assert max(row["ratio/logp_diff_max"] for row in rows) > 1e-4, "the weights did move"  # type: ignore[attr-defined]
    assert 0 < max(row["ratio/prox_diff_max"] for row in rows) < 1e-5  # type: ignore[attr-defined]


def test_no_step_is_missing_and_the_law_holds_throughout(troubled: dict[str, object]) -> None:
    rows = troubled["rows"]
    assert [row["step"] for row in rows] == list(range(1, len(rows) + 1))  # type: ignore[attr-defined, arg-type]
    assert max(row["lag/start_max"] for row in rows) <= 2  # type: ignore[attr-defined]
    assert rows[-1]["engine/alive"] == 1  # type: ignore[index]
    assert all(row["flow/consumed"] == 4 * row["step"] for row in rows)  # type: ignore[attr-defined]

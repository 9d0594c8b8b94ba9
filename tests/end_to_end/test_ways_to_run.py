"""Colocated with an exact lag, a window with over-sampling, and replay: real runs of one loop,
apart by settings alone. Each shows first what its settings do, and then how it ends when something
of it is killed, stopped or broken: the end names it, the work is kept, and nothing stays behind.

    exact    colocated, its weights shared; its launcher is killed and it is started again; then its
             controller is stopped
    window   rank 0 of its two ranks is stopped
    replay   its reward no longer returns, which by the config ends the run
"""

from __future__ import annotations

import json
import signal
import time
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import psutil
import pytest

from megatron_async_rl.flow.buffer import read_buffer
from megatron_async_rl.launch.run_lock import RunDirectoryError, lock_run_dir
from megatron_async_rl.metrics.timeline import read_timeline
from tests.end_to_end.workspace import Workspace, alive, started_by, wait_until

pytestmark = [pytest.mark.end_to_end, pytest.mark.faults, pytest.mark.slow]

STEPS, LAG = 8, 2
"""Steps that a run makes at least before it is brought to its end."""
AT_A_TIME = 3
"""Runs; most of their time is imports and waiting."""
RESULT_S = 1500
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
    directory, orphaned, steps = workspace.folder / "runs" / name, None, STEPS
    process = workspace.start("train", str(config))
    if name == "exact":
        wait_until(lambda: len(workspace.metrics(name)) >= LAG, process)
        orphaned = orphan(directory, process)
        steps += orphaned.status["step"]
        process = workspace.start("train", str(config))
    if name == "window":
        wait_until(lambda: len(workspace.metrics(name)) >= steps and mixed(workspace), process)
    else:
        wait_until(lambda: len(workspace.metrics(name)) >= steps, process)
    processes = started_by(process)
    stopped = {"exact": "controller", "window": "rank 0"}.get(name)
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


@pytest.fixture(scope="module")
def runs(workspace: Workspace) -> dict[str, Future[Ended]]:
    lines = (workspace.folder / "train.jsonl").read_text().splitlines(keepends=True)[:4]
    (workspace.folder / "four.jsonl").write_text("".join(lines))
    pool, begun = ThreadPoolExecutor(AT_A_TIME), {}
    for name in WAYS:
        begun[name] = pool.submit(run, workspace, name)
        time.sleep(2.0)
    return begun


@pytest.fixture
def exact(runs: dict[str, Future[Ended]]) -> Ended:
    return runs["exact"].result(RESULT_S)


@pytest.fixture
def window(runs: dict[str, Future[Ended]]) -> Ended:
    return runs["window"].result(RESULT_S)


@pytest.fixture
def replay(runs: dict[str, Future[Ended]]) -> Ended:
    return runs["replay"].result(RESULT_S)


def lags(row: dict[str, Any]) -> list[int]:
    return np.flatnonzero(row["lag/histogram"]).tolist()


def test_every_token_of_an_exact_lag_is_exactly_so_old(exact: Ended) -> None:
    """Samples of the first weights wait 0, 1, 2, ... updates, because no older weights exist."""
    assert [row["step"] for row in exact.rows] == list(range(1, len(exact.rows) + 1))
    assert [lags(row) for row in exact.rows] == [
        [min(step, LAG)] for step in range(len(exact.rows))
    ]
    assert all(row["response/mixed_versions"] == 0 for row in exact.rows)


def test_a_run_whose_launcher_is_killed_saves_its_work_and_leaves_nothing(exact: Ended) -> None:
    orphaned = exact.orphaned
    assert orphaned is not None
    # No other run starts while its ranks live.
    assert f"(pid {orphaned.pid}) was killed" in orphaned.refusal
    assert orphaned.left == []
    assert orphaned.status["phase"] == "stopped"
    latest = (exact.directory / "checkpoint" / "latest").read_text()
    assert latest == f"step_{orphaned.status['step']:08d}"


def test_after_a_resume_the_very_responses_that_were_waiting_are_trained_on(exact: Ended) -> None:
    (stopped,) = (exact.directory / "checkpoint").glob("step_*")
    version = int(stopped.name.removeprefix("step_"))
    assert version >= LAG
    left = read_buffer((stopped / "buffer.arrow").read_bytes()).groups
    for ahead in range(LAG):
        waited = [group.samples for group in left if group.version == version + ahead - LAG]
        assert [len(samples) for samples in waited] == [4] * 4
        responses = [sample for samples in waited for sample in samples]
        row = exact.rows[version + ahead]
        assert row["response/length_mean"] == np.mean([sample.length for sample in responses])
        assert row["reward/mean"] == pytest.approx(
            np.mean([sample.reward for sample in responses]), rel=1e-12
        )


def test_colocated_engines_do_not_sample_while_the_policy_trains(exact: Ended) -> None:
    spans = read_timeline(exact.directory)
    training = [span for span in spans["rank 0"] if span.state == "training"]
    busy = [span for span in spans["engine-0"] if span.state == "busy"]
    # The step in which the controller is stopped may not come to its line.
    assert len(training) - len(exact.rows) in (0, 1)
    assert sum(span.seconds for span in busy) > 0
    overlap = sum(
        max(0.0, min(a.end, b.end) - max(a.start, b.start)) for a in training for b in busy
    )
    assert overlap < 0.01
    assert any(span.state == "asleep" for span in spans["engine-0"])
    # Both starts of the run: the policy takes its memory back before a step, and gives it up after.
    states = [span.state for span in spans["rank 0"]]
    around = {
        (states[i - 1], states[i + 1]) for i in range(1, len(states) - 1) if states[i] == "training"
    }
    assert around == {("restoring", "releasing")}
    moved = [span for span in spans["rank 0"] if span.state in ("restoring", "releasing")]
    assert len(moved) >= 2 * len(exact.rows)
    assert all(0.0 < row["time/make_room_s"] < row["time/step_s"] for row in exact.rows)
    key = "ratio/logp_diff_lag0_max"  # absent in a step without such a token
    differences = [row[key] for row in exact.rows if key in row]
    assert differences
    assert max(differences) < 1e-5


def test_a_colocated_engine_loads_what_is_lent_while_the_policy_publishes(exact: Ended) -> None:
    spans = read_timeline(exact.directory)
    publishing = [span for span in spans["rank 0"] if span.state == "publishing"]
    # What follows the last is where the controller was stopped.
    end = publishing[-1].end
    loading = [s for s in spans["engine-0"] if s.state == "loading" and s.start < end]
    assert len(loading) >= len(exact.rows)
    within = [
        any(span.start < load.start and load.end < span.end for span in publishing)
        for load in loading
    ]
    assert all(within)


def test_a_window_with_over_sampling_balances_its_counts_within_the_bound(window: Ended) -> None:
    last = window.rows[-1]
    assert last["flow/consumed"] == 4 * last["step"]
    assert (
        last["flow/admitted"]
        >= last["flow/consumed"] + last["flow/dropped_late"] + last["flow/buffer"]
    )
    assert max(row["lag/start_max"] for row in window.rows) <= 2


def test_a_continued_response_keeps_the_versions_of_its_beginning(
    workspace: Workspace, window: Ended
) -> None:
    assert mixed(workspace)


def test_replay_trains_on_stored_responses_of_any_age(replay: Ended) -> None:
    assert replay.rows[-1]["flow/replayed"] > 0
    assert max(row["lag/start_max"] for row in replay.rows) > 1, (
        "older than the law lets anything enter the store"
    )
    assert all(row["flow/consumed"] == 4 * row["step"] for row in replay.rows)


@pytest.mark.parametrize(("way", "name"), [("window", "rank 0"), ("exact", "controller")])
def test_a_stopped_process_ends_the_run_and_is_named(
    runs: dict[str, Future[Ended]], way: str, name: str
) -> None:
    """Others are stopped in test_fleet.py (an engine's processes) and tests/network (a rank)."""
    ended = runs[way].result(RESULT_S)
    assert ended.code == 1
    assert f"{name} (pid {ended.pid}) is stopped" in ended.said, ended.said
    assert " waits for " in ended.said
    assert ("rank 1 (pid" if name == "rank 0" else "rank 0 (pid") in ended.said
    assert "Traceback" not in ended.said
    assert len(ended.said.splitlines()) < 60
    assert json.loads((ended.directory / "status.json").read_text())["phase"] == "failed"
    assert "most recent call first" in (ended.directory / "stall.txt").read_text()
    assert ended.left == []


def test_a_reward_that_never_returns_ends_the_run_if_configured(replay: Ended) -> None:
    """Rewards that raise: tests/loop."""
    assert replay.code == 1
    assert "RewardFailed: the reward failed on sample" in replay.said
    assert "no reward within rollout.reward.timeout_s: 20" in replay.said, replay.said
    assert "rollout.reward.on_error=drop" in replay.said
    assert "Traceback" not in replay.output
    assert len(replay.said.splitlines()) < 12
    assert replay.left == []

"""Colocated with an exact lag, a window with over-sampling, and replay: real runs of one loop,
apart by settings alone."""

from __future__ import annotations

import time
from typing import Any

import numpy as np
import pytest

from megatron_async_rl.flow.buffer_file import read
from megatron_async_rl.metrics.timeline import read_timeline
from tests.end_to_end.conftest import Workspace, wait_until

pytestmark = [pytest.mark.end_to_end, pytest.mark.slow]

STEPS, LAG = 8, 2
ONE_RANK = {"parallel": {"ranks": 1, "tensor": 1}, "optimizer": {"lr": 1e-3}}
WAYS: dict[str, dict[str, Any]] = {
    "exact": {
        "flow": {"async_ratio": LAG, "selection": {"name": "exact_lag", "lag": LAG}},
        "rollout": {
            "placement": "colocated",
            "reward": {"name": "flaky_reward:varied"},
            "sampling": {"max_tokens": 24},
        },
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
            "reward": {"name": "flaky_reward:varied"},
            "sampling": {"max_tokens": 48},
        },
    },
    "replay": {
        "flow": {"async_ratio": 1, "selection": {"name": "replay", "recent": 0.3}},
        "rollout": {"reward": {"name": "flaky_reward:varied"}},
        "objective": {"loss": "trajectory_balance", "advantage": "none", "reference": {}},
        "data": {"train": "four.jsonl"},
    },
}


@pytest.fixture(scope="module")
def rows(workspace: Workspace) -> dict[str, list[dict[str, Any]]]:
    """All at once: most of their time is imports. The exact one is stopped on the way and goes
    on."""
    lines = (workspace.folder / "train.jsonl").read_text().splitlines(keepends=True)[:4]
    (workspace.folder / "four.jsonl").write_text("".join(lines))
    running = {}
    for name, settings in WAYS.items():
        config = workspace.config(
            name,
            run={"dir": f"runs/{name}", "steps": STEPS},
            policy=ONE_RANK,
            checkpoint={"every": 0},
            **settings,
        )
        running[name] = workspace.start("train", str(config))
        time.sleep(2.0)
    wait_until(lambda: len(workspace.metrics("exact")) >= LAG, running["exact"])
    (workspace.folder / "runs" / "exact" / "stop").touch()
    output, _ = running["exact"].communicate(timeout=120)
    assert running["exact"].returncode == 130, output
    running["exact"] = workspace.start("train", str(workspace.folder / "exact.yaml"))
    said = {name: process.communicate(timeout=300)[0] for name, process in running.items()}
    for name, process in running.items():
        assert process.returncode == 0, said[name]
    return {name: workspace.metrics(name) for name in WAYS}


def lags(row: dict[str, Any]) -> list[int]:
    return np.flatnonzero(row["lag/histogram"]).tolist()


def test_every_token_of_an_exact_lag_is_exactly_so_old(
    rows: dict[str, list[dict[str, Any]]],
) -> None:
    """What the first weights made waits 0, 1, 2, ... updates, as nothing older exists."""
    assert [lags(row) for row in rows["exact"]] == [[min(step, LAG)] for step in range(STEPS)]
    assert all(row["response/mixed_versions"] == 0 for row in rows["exact"])


def test_after_a_resume_the_very_responses_that_were_waiting_are_trained_on(
    workspace: Workspace, rows: dict[str, list[dict[str, Any]]]
) -> None:
    stopped = min((workspace.folder / "runs" / "exact" / "checkpoint").glob("step_*"))
    version = int(stopped.name.removeprefix("step_"))
    assert LAG <= version <= STEPS - LAG
    left = read((stopped / "buffer.npz").read_bytes()).groups
    for ahead in range(LAG):
        waited = [group.samples for group in left if group.version == version + ahead - LAG]
        assert [len(samples) for samples in waited] == [4] * 4
        responses = [sample for samples in waited for sample in samples]
        row = rows["exact"][version + ahead]
        assert row["response/length_mean"] == np.mean([sample.length for sample in responses])
        assert row["reward/mean"] == pytest.approx(
            np.mean([sample.reward for sample in responses]), rel=1e-12
        )


def test_colocated_engines_do_not_sample_while_the_policy_trains(
    workspace: Workspace, rows: dict[str, list[dict[str, Any]]]
) -> None:
    spans = read_timeline(workspace.folder / "runs" / "exact")
    training = [span for span in spans["rank 0"] if span.state == "training"]
    busy = [span for span in spans["engine-0"] if span.state == "busy"]
    assert len(training) == STEPS
    assert sum(span.seconds for span in busy) > 0
    overlap = sum(
        max(0.0, min(a.end, b.end) - max(a.start, b.start)) for a in training for b in busy
    )
    assert overlap < 0.01
    assert any(span.state == "asleep" for span in spans["engine-0"])
    assert all(row["ratio/logp_diff_lag0_max"] < 1e-5 for row in rows["exact"])


def test_a_window_with_over_sampling_balances_its_counts_within_the_bound(
    rows: dict[str, list[dict[str, Any]]],
) -> None:
    last = rows["window"][-1]
    assert last["flow/consumed"] == 4 * STEPS
    assert (
        last["flow/admitted"]
        >= last["flow/consumed"] + last["flow/dropped_late"] + last["flow/buffer"]
    )
    assert max(row["lag/start_max"] for row in rows["window"]) <= 2


def test_a_continued_response_keeps_the_versions_of_its_beginning(
    rows: dict[str, list[dict[str, Any]]],
) -> None:
    assert any(row["response/mixed_versions"] > 0 for row in rows["window"])


def test_replay_trains_on_stored_responses_of_any_age(
    rows: dict[str, list[dict[str, Any]]],
) -> None:
    assert rows["replay"][-1]["flow/replayed"] > 0
    assert max(row["lag/start_max"] for row in rows["replay"]) > 1, (
        "older than the law lets anything enter the store"
    )
    assert all(row["flow/consumed"] == 4 * row["step"] for row in rows["replay"])

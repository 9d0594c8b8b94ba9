"""Runs of ways.py: what their settings do, and how they end: the end names what was killed, stopped
or broken, the work is kept, and nothing stays behind."""

from __future__ import annotations

import json
from concurrent.futures import Future
from typing import Any

import numpy as np
import pytest

from megatron_async_rl.flow.buffer import read_buffer
from megatron_async_rl.metrics.timeline import read_timeline
from tests.end_to_end.conftest import RESULT_S
from tests.end_to_end.ways import LAG, Ended, mixed
from tests.end_to_end.workspace import Workspace
from tests.thorough import thorough

pytestmark = [pytest.mark.end_to_end, pytest.mark.faults, pytest.mark.slow, thorough]


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
    # The step in which the run ends by its stopped rank may not come to its line.
    assert len(training) - len(exact.rows) in (0, 1)
    assert sum(span.seconds for span in busy) > 0
    overlap = sum(
        max(0.0, min(a.end, b.end) - max(a.start, b.start)) for a in training for b in busy
    )
    assert overlap < 0.01
    assert any(span.state == "asleep" for span in spans["engine-0"])
    # In both starts of the run, the policy takes its memory back before a step, and gives it up
    # after.
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


def test_a_colocated_engine_loads_shared_buckets_while_the_policy_publishes(exact: Ended) -> None:
    spans = read_timeline(exact.directory)
    publishing = [span for span in spans["rank 0"] if span.state == "publishing"]
    # What follows the last is where the run was brought to its end.
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


@pytest.mark.parametrize(("way", "name"), [("window", "controller"), ("exact", "rank 0")])
def test_a_stopped_process_ends_the_run_and_is_named(
    runs: dict[str, Future[Ended]], way: str, name: str
) -> None:
    """Others are stopped in test_fleet.py (an engine's processes) and tests/network (a rank)."""
    ended = runs[way].result(RESULT_S)
    assert ended.code == 1
    assert f"{name} (pid {ended.pid}) is stopped" in ended.said, ended.said
    assert " waits for " in ended.said
    assert ("controller (pid" if name == "rank 0" else "rank 0 (pid") in ended.said
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

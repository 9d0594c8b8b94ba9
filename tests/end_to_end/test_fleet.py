"""The run of fleet.py: what the loss of its engines costs, and how it ends."""

from __future__ import annotations

import json
import re
from concurrent.futures import Future
from pathlib import Path

import pytest

from tests.end_to_end.conftest import RESULT_S
from tests.thorough import thorough

pytestmark = [pytest.mark.end_to_end, pytest.mark.slow, thorough]


@pytest.fixture(scope="module")
def troubled(fleet_run: Future[dict[str, object]]) -> dict[str, object]:
    return fleet_run.result(RESULT_S)


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

"""Held-out evaluation beside a real run, on an engine of its own, and `mar eval` of the checkpoint
that the run leaves."""

from __future__ import annotations

import itertools
import json
from pathlib import Path
from typing import Any

import pytest

from tests.end_to_end.conftest import Workspace

pytestmark = [pytest.mark.end_to_end, pytest.mark.slow]

STEPS = 4
PROMPTS = 12
SAMPLES = 3


@pytest.fixture(scope="module")
def run(workspace: Workspace) -> Path:
    lines = (workspace.folder / "eval.jsonl").read_text().splitlines(keepends=True)
    (workspace.folder / "held_out.jsonl").write_text("".join(lines[:PROMPTS]))
    config = workspace.config(
        "evaluated",
        run={"dir": "runs/evaluated", "steps": STEPS},
        rollout={"reward": {"name": "flaky_reward:varied"}},
        policy={"parallel": {"ranks": 1}},
        data={"eval": "held_out.jsonl"},
        eval={
            "every": 2,
            "engines": 1,
            "samples_per_prompt": SAMPLES,
            "pass_at": [1, 2],
            "pass_reward": 1.0,
        },
    )
    code, output = workspace.mar("train", str(config))
    assert code == 0, output
    return workspace.folder / "runs" / "evaluated"


@pytest.fixture(scope="module")
def again(workspace: Workspace, run: Path) -> dict[str, Any]:
    """What `mar eval` says of the run's last checkpoint."""
    code, output = workspace.mar("eval", str(run / "checkpoint"))
    assert code == 0, output
    assert f"sampled {PROMPTS} of {PROMPTS} prompts" in output
    result: dict[str, Any] = json.loads((run / f"eval_{STEPS}.json").read_text())
    assert f"mean reward  {result['mean_reward']:.4f}" in output
    return result


def evaluations(run: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in (run / "eval.jsonl").read_text().splitlines()]


def test_every_second_version_is_evaluated_once_and_wholly(run: Path) -> None:
    lines = evaluations(run)
    assert [line["version"] for line in lines] == [0, 2, 4]
    assert all(
        (line["prompts"], line["samples"], line["reward_errors"]) == (PROMPTS, PROMPTS * SAMPLES, 0)
        for line in lines
    )
    assert all(
        [one["samples"] for one in line["per_prompt"]] == [SAMPLES] * PROMPTS for line in lines
    )


def test_mean_and_pass_at_k_are_those_of_the_prompts_in_the_log(run: Path) -> None:
    for line in evaluations(run):
        means, passed = ([one[key] for one in line["per_prompt"]] for key in ("mean", "passed"))
        assert line["mean_reward"] == pytest.approx(sum(means) / PROMPTS, rel=1e-12)
        assert 0 < sum(passed) < PROMPTS * SAMPLES
        for k in (1, 2):
            shares = []
            for count in passed:
                choices = list(
                    itertools.combinations([index < count for index in range(SAMPLES)], k)
                )
                shares.append(sum(map(any, choices)) / len(choices))
            assert line["pass_at"][str(k)] == pytest.approx(sum(shares) / PROMPTS, rel=1e-12)


def test_new_weights_give_other_responses_to_the_same_prompts(run: Path) -> None:
    assert len({json.dumps(line["per_prompt"]) for line in evaluations(run)}) == 3


def test_results_are_metrics_of_a_later_step_under_their_version(
    run: Path, workspace: Workspace
) -> None:
    by_version = {line["version"]: line for line in evaluations(run)}
    rows = [row for row in workspace.metrics("evaluated") if "eval/version" in row]
    assert rows
    for row in rows:
        line = by_version[row["eval/version"]]
        assert row["step"] >= row["eval/version"]
        assert (row["eval/mean"], row["eval/pass@2"]) == (line["mean_reward"], line["pass_at"]["2"])


def test_evaluation_is_not_counted_as_training(run: Path, workspace: Workspace) -> None:
    rows = workspace.metrics("evaluated")
    assert rows[-1]["flow/admitted"] == rows[-1]["flow/consumed"] == STEPS * 4
    assert all(row["flow/dropped_late"] == row["flow/dropped_equal"] == 0 for row in rows)


def test_mar_eval_of_the_last_checkpoint_repeats_what_the_run_measured(
    run: Path, again: dict[str, Any]
) -> None:
    measured = evaluations(run)[-1]
    assert again["version"] == measured["version"] == STEPS
    for key in ("per_prompt", "mean_reward", "pass_at", "tokens", "truncated"):
        assert again[key] == measured[key]


def test_mar_eval_leaves_the_run_as_it_was(run: Path, again: dict[str, Any]) -> None:
    assert len(evaluations(run)) == 3
    assert sorted(path.name for path in run.glob("eval*")) == [
        "eval.jsonl",
        f"eval_{STEPS}.json",
        f"eval_{STEPS}.logs",
    ]
    assert json.loads((run / "status.json").read_text())["phase"] == "finished"

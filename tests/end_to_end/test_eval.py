"""Held-out evaluation during a real run that is stopped and resumed, by training engines before the
stop and by an engine of its own after it, and `mar eval` of the checkpoint that the run leaves."""

from __future__ import annotations

import itertools
import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from megatron_async_rl.samples import Sample
from megatron_async_rl.samples.segments import load, read_entries
from tests.end_to_end.conftest import EVERY
from tests.end_to_end.conftest import HELD_OUT as PROMPTS
from tests.end_to_end.conftest import LOOP_STEPS as STEPS
from tests.end_to_end.conftest import PER_PROMPT as SAMPLES
from tests.end_to_end.workspace import Workspace
from tests.thorough import thorough

pytestmark = [pytest.mark.end_to_end, pytest.mark.slow]


VERSIONS = [*range(0, STEPS + 1, EVERY)]


@pytest.fixture(scope="module")
def run(interrupted: dict[str, object]) -> Path:
    """Directory of the run."""
    assert interrupted["code"] == 0, interrupted["output"]
    return Path(str(interrupted["run"]))


@pytest.fixture(scope="module")
def responses(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """File to which `mar eval` writes its samples."""
    return tmp_path_factory.mktemp("responses") / "responses.jsonl"


@pytest.fixture(scope="module")
def again(
    workspace: Workspace, interrupted: dict[str, object], run: Path, responses: Path
) -> dict[str, Any]:
    """Result of `mar eval` on the run's last checkpoint, with a TMPDIR longer than the path of a
    socket may be."""
    here = replace(workspace, environment={"TMPDIR": str(interrupted["long"])})
    code, output = here.mar("eval", str(run / "checkpoint"), "--responses", str(responses))
    assert code == 0, output
    assert f"sampled {PROMPTS} of {PROMPTS} prompts" in output
    result: dict[str, Any] = json.loads((run / f"eval_{STEPS}.json").read_text())
    assert f"mean reward  {result['mean_reward']:.4f}" in output
    return result


def evaluations(run: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in (run / "eval.jsonl").read_text().splitlines()]


def test_every_fourth_version_is_evaluated_once_and_wholly_over_stop_and_resume(run: Path) -> None:
    lines = evaluations(run)
    assert [line["version"] for line in lines] == VERSIONS
    assert all(
        (line["prompts"], line["samples"], line["reward_errors"]) == (PROMPTS, PROMPTS * SAMPLES, 0)
        for line in lines
    )
    assert all(
        [one["samples"] for one in line["per_prompt"]] == [SAMPLES] * PROMPTS for line in lines
    )


def test_mean_and_pass_at_k_are_those_of_the_prompts_in_the_log(run: Path) -> None:
    """How many of a prompt's responses pass here is up to the model: tests/unit/test_evaluation.py
    has all counts."""
    for line in evaluations(run):
        means, passed = ([one[key] for one in line["per_prompt"]] for key in ("mean", "passed"))
        assert line["mean_reward"] == pytest.approx(sum(means) / PROMPTS, rel=1e-12)
        for k in (1, 2):
            shares = []
            for count in passed:
                choices = list(
                    itertools.combinations([index < count for index in range(SAMPLES)], k)
                )
                shares.append(sum(map(any, choices)) / len(choices))
            assert line["pass_at"][str(k)] == pytest.approx(sum(shares) / PROMPTS, rel=1e-12)


def test_new_weights_give_other_responses_or_the_same_with_other_log_probs(
    run: Path,
) -> None:
    """The model may have come to give one answer only."""
    logged = [entry for entry in read_entries(run) if entry.state == "evaluated"]
    responses: dict[int, dict[str, Sample]] = {}
    for entry, sample in load(run, logged):
        responses.setdefault(*entry.steps, {})[sample.id] = sample
    assert {version: len(found) for version, found in responses.items()} == dict.fromkeys(
        VERSIONS, PROMPTS * SAMPLES
    )
    for before, after in itertools.pairwise(sorted(responses)):
        assert any(
            one.response_ids.tolist() != other.response_ids.tolist()
            or np.max(np.abs(one.behavior_logprobs - other.behavior_logprobs)) > 1e-5
            for one, other in ((one, responses[after][id]) for id, one in responses[before].items())
        ), (before, after)


def test_results_are_metrics_of_a_later_step_under_their_version(
    run: Path, workspace: Workspace
) -> None:
    by_version = {line["version"]: line for line in evaluations(run)}
    rows = [row for row in workspace.metrics(run.name) if "eval/version" in row]
    assert rows
    for row in rows:
        line = by_version[row["eval/version"]]
        assert row["step"] >= row["eval/version"]
        assert (row["eval/mean"], row["eval/pass@2"]) == (line["mean_reward"], line["pass_at"]["2"])


@thorough
def test_mar_eval_of_the_last_checkpoint_repeats_what_the_run_measured(
    run: Path, again: dict[str, Any]
) -> None:
    measured = evaluations(run)[-1]
    assert again["version"] == measured["version"] == STEPS
    for key in ("per_prompt", "mean_reward", "pass_at", "tokens", "truncated"):
        assert again[key] == measured[key]


@thorough
def test_mar_eval_writes_every_response_with_its_reward(
    again: dict[str, Any], responses: Path
) -> None:
    lines = [json.loads(line) for line in responses.read_text().splitlines()]
    rewards: dict[str, list[float]] = {}
    texts: dict[str, list[str]] = {}
    for line in lines:
        texts.setdefault(line["prompt_id"], []).append(line["response"])
    for line in lines:
        # As `flaky` and `unlike` of conftest.py give it.
        response, others = line["response"], texts[line["prompt_id"]]
        right = float(response.strip() == line["answer"]) + 0.1 * len(response)
        unlike = 1 - others.count(response) / len(others)
        assert line["reward"] == pytest.approx(right + 0.1 * unlike)
        rewards.setdefault(line["prompt_id"], []).append(line["reward"])
    assert [(id, sum(found) / len(found), len(found)) for id, found in rewards.items()] == [
        (one["id"], pytest.approx(one["mean"]), one["samples"]) for one in again["per_prompt"]
    ]


@thorough
def test_mar_eval_leaves_the_run_as_it_was(run: Path, again: dict[str, Any]) -> None:
    assert len(evaluations(run)) == len(VERSIONS)
    assert sorted(path.name for path in run.glob("eval*")) == [
        "eval.jsonl",
        f"eval_{STEPS}.json",
        f"eval_{STEPS}.logs",
    ]
    assert json.loads((run / "status.json").read_text())["phase"] == "finished"

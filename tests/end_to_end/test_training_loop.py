"""The whole loop through the command line: real ranks, real engines, real signals."""

from __future__ import annotations

import itertools
import json
import re
from ipaddress import ip_address
from pathlib import Path
from typing import cast

import numpy as np
import pytest
import torch
from safetensors.torch import load_file

from megatron_async_rl.metrics.timeline import read_timeline
from megatron_async_rl.samples import Sample
from megatron_async_rl.samples.segments import load, read_entries
from tests.end_to_end.conftest import LOOP_STEPS as STEPS
from tests.sample_history import account
from tests.thorough import thorough

pytestmark = [pytest.mark.end_to_end, pytest.mark.slow]

PROMPTS_PER_STEP = 4


def test_ctrl_c_stops_with_a_checkpoint_and_leaves_no_process(
    interrupted: dict[str, object],
) -> None:
    assert interrupted["stop_code"] == 130, interrupted["stop_output"]
    assert "resumes" in str(interrupted["stop_output"])
    assert (
        interrupted["processes"] >= 4
    )  # torchrun, two ranks, Ray and an engine at least: the check below can fail
    assert interrupted["left"] == []
    assert 4 <= int(str(interrupted["at_stop"])) < STEPS


def test_nothing_of_a_run_on_one_machine_listens_beyond_it(interrupted: dict[str, object]) -> None:
    """Ranks, torchrun, Ray, engine, relay, Prometheus and the dashboard."""
    sockets = cast("dict[tuple[str, int], str]", interrupted["sockets"])
    beyond = {
        at: name
        for at, name in sockets.items()
        if not ip_address(at[0].removeprefix("::ffff:")).is_loopback
    }
    assert beyond == {}
    # The check above can fail.
    owners = " ".join(sockets.values())
    for name in ("launch.torchrun", "megatron_async_rl.train", "gcs_server", "raylet", "dashboard"):
        assert name in owners
    assert "monitor.py" not in owners, "Ray's autoscaler, which a run does not use"
    ports = {str(port) for _, port in sockets}
    for url in (interrupted["page"], interrupted["prometheus"]):
        assert re.search(r":(\d+)/", str(url)).group(1) in ports  # type: ignore[union-attr]


def test_a_run_takes_its_temporary_files_along(interrupted: dict[str, object]) -> None:
    folder = str(interrupted["temporary"])
    assert re.fullmatch(r".*/mar-[0-9a-f]{8}", folder)
    assert not Path(folder).exists()
    digits = folder[-8:]
    assert [path.name for path in Path("/dev/shm").iterdir() if digits in path.name] == []


def test_a_run_works_in_a_tmpdir_that_is_too_long_for_ray(interrupted: dict[str, object]) -> None:
    assert interrupted["code"] == 0, interrupted["output"]
    left = [path.name for path in cast("Path", interrupted["long"]).iterdir()]
    assert [name for name in left if name.startswith("mar-")] == []


def test_the_second_start_resumes_and_no_step_is_logged_twice_or_missing(
    interrupted: dict[str, object],
) -> None:
    assert interrupted["code"] == 0, interrupted["output"]
    assert [row["step"] for row in interrupted["rows"]] == list(range(1, STEPS + 1))  # type: ignore[attr-defined]
    assert "training" in str(interrupted["output"])


def test_every_admitted_prompt_was_consumed_once_over_stop_and_resume(
    interrupted: dict[str, object],
) -> None:
    run = Path(str(interrupted["run"]))
    data = torch.load(run / "checkpoint" / f"step_{STEPS:08d}" / "state.pt", weights_only=True)[
        "run"
    ]["data"]
    assert data["consumed"] == STEPS * PROMPTS_PER_STEP
    # The prompts handed out by the source are those consumed: what was in flight at the stop was
    # asked again, not skipped.
    assert data["source"]["position"] == STEPS * PROMPTS_PER_STEP
    history = account(run, buffer=[])
    assert sorted(history.consumed) == list(range(STEPS * PROMPTS_PER_STEP)), "the log proves it"


def test_lags_are_0_1_and_2_at_async_ratio_2_and_never_more(interrupted: dict[str, object]) -> None:
    rows = interrupted["rows"]
    histogram = np.sum([row["lag/histogram"] for row in rows], axis=0)  # type: ignore[attr-defined]
    assert len(histogram) == 3
    assert np.all(histogram > 0)
    assert max(row["lag/start_max"] for row in rows) == 2  # type: ignore[attr-defined]


def test_responses_sampled_by_the_newest_weights_agree_with_the_trainer(
    interrupted: dict[str, object],
) -> None:
    key = "ratio/logp_diff_lag0_max"  # absent in a step without such a token
    differences = [row[key] for row in interrupted["rows"] if key in row]  # type: ignore[attr-defined]
    assert 0 < max(differences) < 1e-5
    assert max(row["ratio/logp_diff_max"] for row in interrupted["rows"]) > 1e-3  # type: ignore[attr-defined]


def test_failing_rewards_are_counted_and_logged_and_the_run_continues(
    interrupted: dict[str, object],
) -> None:
    assert sum(row["reward/errors"] for row in interrupted["rows"]) > 0  # type: ignore[attr-defined]
    lines = (
        (Path(str(interrupted["run"])) / "logs" / "engine-0.reward_errors.jsonl")
        .read_text()
        .splitlines()
    )
    errors = [json.loads(line) for line in lines]
    assert any("three is not supported" in error["error"] for error in errors)
    assert any("nan" in error["error"] for error in errors)
    assert all(error["response"] is not None and error["prompt"] for error in errors)


def test_the_reward_of_a_group_is_that_of_all_its_responses_over_stop_and_resume(
    interrupted: dict[str, object],
) -> None:
    run = Path(str(interrupted["run"]))
    trained = [entry for entry in read_entries(run) if entry.state == "trained"]
    groups: dict[int, list[Sample]] = {}
    for entry, sample in load(run, trained):
        groups.setdefault(entry.group, []).append(sample)
    assert len(groups) == STEPS * PROMPTS_PER_STEP
    for samples in groups.values():
        texts = [sample.text for sample in samples if sample.valid]
        for sample in samples:
            if sample.valid:
                parts = sample.reward_parts
                assert parts is not None
                assert parts["unlike"] == 1 - texts.count(sample.text) / len(texts)
                assert sample.reward == parts["right"] + 0.1 * parts["unlike"]
    assert any(0 < row["reward/part/unlike"] < 1 for row in interrupted["rows"])  # type: ignore[attr-defined]
    evaluated = json.loads((run / "eval.jsonl").read_text().splitlines()[-1])
    assert set(evaluated["parts"]) == {"right", "unlike"}
    total = evaluated["parts"]["right"] + 0.1 * evaluated["parts"]["unlike"]
    assert evaluated["mean_reward"] == pytest.approx(total)


def test_the_run_ends_with_accuracies_and_a_report(interrupted: dict[str, object]) -> None:
    assert "held-out reward" in str(interrupted["output"])
    run = Path(str(interrupted["run"]))
    assert (run / "report.png").read_bytes().startswith(b"\x89PNG")
    assert '"title":"Reward"' in (run / "report.html").read_text()
    page = (Path(__file__).parents[2] / "docs" / "run_directory.md").read_text()
    told = set(re.findall(r"`([a-z0-9._]+)/?`", page))
    assert cast("set[str]", interrupted["files"]) <= told


def test_the_run_reports_what_each_process_did_and_how_busy_its_engine_was(
    interrupted: dict[str, object],
) -> None:
    tracks = read_timeline(Path(str(interrupted["run"])))
    assert {"training", "publishing", "waiting"} <= {span.state for span in tracks["rank 0"]}
    assert {"busy", "loading"} <= {span.state for span in tracks["engine-0"]}
    for spans in tracks.values():
        assert all(before.end <= after.start + 1e-3 for before, after in itertools.pairwise(spans))
    rows = interrupted["rows"]
    assert all(
        0 <= row["engine/busy_share"] <= 1 and len(row["engine/versions"]) == 1 for row in rows
    )  # type: ignore[attr-defined]
    assert max(row["engine/busy_share"] for row in rows) > 0  # type: ignore[attr-defined]
    generated = sum(row["tokens/generated"] for row in rows)  # type: ignore[attr-defined]
    assert sum(row["engine/tokens"][0] for row in rows) >= generated > 0  # type: ignore[attr-defined]


@thorough
def test_a_converted_checkpoint_is_the_exported_model_and_loads_in_transformers(
    interrupted: dict[str, object], converted: Path
) -> None:
    from transformers import AutoModelForCausalLM, AutoTokenizer

    run = Path(str(interrupted["run"]))
    ours, exported = (
        load_file(converted / "model.safetensors"),
        load_file(run / "hf" / "model.safetensors"),
    )
    assert ours.keys() == exported.keys()
    assert all((ours[name] == exported[name]).all() for name in ours)
    model = AutoModelForCausalLM.from_pretrained(converted)
    tokens = AutoTokenizer.from_pretrained(converted)("1+1=", return_tensors="pt")
    assert model(**tokens).logits.isfinite().all()

"""A run directory takes its own run and no other: what may change on a resume, and what is
refused."""

from __future__ import annotations

import json
import zipfile
from pathlib import Path
from typing import Any

import pytest
import yaml
from typer.testing import CliRunner

from megatron_async_rl import cli
from megatron_async_rl.config.keys import models_in, walk
from megatron_async_rl.config.load import dump, load
from megatron_async_rl.config.problem import Problem
from megatron_async_rl.config.schema import Config
from megatron_async_rl.metrics.status import Status, write_status
from megatron_async_rl.plan.resume import ALLOWED, conflicts, differences
from tests.written_run import write_run

LOSS = "objective.loss=reinforce"


@pytest.fixture
def config(tmp_path: Path) -> Path:
    return write_run(tmp_path)


def made(config: Path, *overrides: str, step: int, phase: str = "stopped") -> Path:
    """The directory of the run after `step` of its steps."""
    loaded = load(config, overrides)
    loaded.run.dir.mkdir()
    (loaded.run.dir / "config.yaml").write_text(dump(loaded))
    write_status(loaded.run.dir, Status(phase=phase, step=step, steps=loaded.run.steps, time=0.0))
    (loaded.run.dir / "metrics.jsonl").write_text(
        "".join(json.dumps({"step": n, "version": n, "time": n}) + "\n" for n in range(1, step + 1))
    )
    return loaded.run.dir


def refused(config: Path, *overrides: str) -> list[Problem]:
    return conflicts(load(config, overrides))


def test_a_resume_with_another_objective_is_refused_with_both_values(config: Path) -> None:
    made(config, step=2)
    (problem,) = refused(config, LOSS)
    assert problem.key == "objective.loss"
    assert "ppo_clip there, reinforce here" in problem.what
    assert "run.dir" in problem.fix


@pytest.mark.parametrize(
    ("override", "key"),
    [
        ("model.dtype=bfloat16", "model.dtype"),
        ("run.seed=1", "run.seed"),
        ("controls=[gac]", "controls"),
        ("policy.optimizer.betas=[0.5, 0.95]", "policy.optimizer.betas.0"),
        ("rollout.sampling.temperature=0.7", "rollout.sampling.temperature"),
        ("rollout.reward.name=countdown", "rollout.reward"),
        ("objective.loss={name: ppo_clip, clip_low: 0.1}", "objective.loss.clip_low"),
    ],
)
def test_what_defines_the_run_stays(config: Path, override: str, key: str) -> None:
    made(config, step=2)
    found = refused(config, override)
    assert [problem.key for problem in found][:1] == [key] or key == "rollout.reward"
    assert found


@pytest.mark.parametrize(
    "override",
    [
        "run.steps=9",
        "policy.optimizer.lr=1e-5",
        "rollout.engines=2",
        "flow.async_ratio=2",
        "rollout.reward.workers=1",
        "rollout.reward.memory_mib=4096",
        "samples.keep_mib=0",
        "policy.on_anomaly=skip",
        "policy.sequence=packed",
        "policy.optimizer.log_update_norm=true",
    ],
)
def test_steps_learning_rate_engines_and_flow_may_change_and_are_named(
    config: Path, override: str
) -> None:
    made(config, step=2)
    assert refused(config, override) == []
    (difference,) = differences(load(config, [override]))
    assert str(difference).startswith(override.partition("=")[0] + ": ")


def test_fewer_steps_than_were_made_are_refused(config: Path) -> None:
    made(config, step=3)
    (problem,) = refused(config, "run.steps=2")
    assert (problem.key, problem.fix) == ("run.steps", "set it to 3 or more")


def test_before_the_first_step_anything_may_change(config: Path) -> None:
    made(config, step=0, phase="failed")
    assert refused(config, LOSS) == []
    assert differences(load(config, [LOSS])) == []


def test_a_finished_run_refuses_any_other_setting_until_its_steps_are_raised(config: Path) -> None:
    made(config, step=4, phase="finished")
    assert refused(config) == []
    (problem,) = refused(config, "policy.optimizer.lr=1e-5")
    assert "raise run.steps above 4" in problem.fix
    assert refused(config, "policy.optimizer.lr=1e-5", "run.steps=8") == []
    assert [one.key for one in refused(config, LOSS, "run.steps=8")] == ["objective.loss"]


def test_a_model_that_was_moved_is_the_same_and_another_one_is_not(config: Path) -> None:
    made(config, step=2)
    other = config.parent / "other"
    (config.parent / "model").rename(other)
    assert refused(config, f"model.path={other}") == []
    (config.parent / "model").mkdir()
    assert [one.key for one in refused(config, f"model.path={other}")] == ["model.path"]


def test_another_name_of_the_same_model_is_no_other_model(config: Path) -> None:
    made(config, step=4, phase="finished")
    link = config.parent / "link"
    link.symlink_to(config.parent / "model")
    assert refused(config, f"model.path={link}") == []
    assert refused(config, f"model.path={link}", "run.steps=8") == []


def test_a_refusal_offers_the_weights_of_a_checkpoint_only_where_there_is_one(config: Path) -> None:
    run_dir = made(config, step=2)
    assert "mar convert" not in refused(config, LOSS)[0].fix
    (run_dir / "checkpoint").mkdir()
    (run_dir / "checkpoint" / "latest").write_text("step_2")
    assert f"mar convert {run_dir}/checkpoint" in refused(config, LOSS)[0].fix


def test_a_run_that_an_older_release_began_has_nothing_to_compare_in_newer_keys(
    config: Path,
) -> None:
    run_dir = made(config, step=2)
    tree: dict[str, Any] = yaml.safe_load((run_dir / "config.yaml").read_text())
    del tree["objective"]["entropy_bonus"]
    tree["flow"]["gone"] = 1
    (run_dir / "config.yaml").write_text(yaml.safe_dump(tree))
    assert differences(load(config)) == []


def test_every_key_that_may_change_exists() -> None:
    known = {section for section, _, _ in walk()} | {
        leaf.key for _, _, leaves in walk() for leaf in leaves
    }
    assert set(ALLOWED) <= known
    assert models_in(Config)


@pytest.mark.parametrize("phase", ["stopped", "finished"])
def test_mar_train_refuses_another_run_in_the_directory_and_changes_nothing(
    config: Path, phase: str
) -> None:
    run_dir = made(config, step=4, phase=phase)
    before = {file.name: file.read_bytes() for file in run_dir.iterdir()}
    done = CliRunner().invoke(cli.app, ["train", str(config), LOSS])
    assert done.exit_code == 2, done.output
    assert "objective.loss\n" in done.output
    assert "ppo_clip there, reinforce here" in done.output
    assert {file.name: file.read_bytes() for file in run_dir.iterdir()} == before


def test_moments_that_config_and_checkpoint_both_refuse_are_told_once(config: Path) -> None:
    checkpoint = made(config, step=2) / "checkpoint"
    step = checkpoint / "step_2"
    (step / "sharded").mkdir(parents=True)
    (step / "sharded" / ".metadata").touch()
    with zipfile.ZipFile(step / "state.pt", "w") as state:
        state.writestr("data", "")
    (step / "about.json").write_text(json.dumps({"parameter_state": ["adam.exp_avg"]}))
    (checkpoint / "latest").write_text("step_2")
    other = "policy.optimizer.moment_dtype=bfloat16"
    assert "moment_dtype" in CliRunner().invoke(cli.app, ["plan", str(config), other]).output
    done = CliRunner().invoke(cli.app, ["train", str(config), other])
    assert done.exit_code == 2, done.output
    assert done.output.count("policy.optimizer.moment_dtype\n") == 1
    assert "float32 there, bfloat16 here" in done.output


def test_mar_train_of_a_finished_run_with_its_own_settings_shows_its_summary(config: Path) -> None:
    made(config, step=4, phase="finished")
    done = CliRunner().invoke(cli.app, ["train", str(config)])
    assert done.exit_code == 0, done.output
    assert "finished at step 4" in done.output

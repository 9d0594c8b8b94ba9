"""A run directory accepts only its own run: settings that may change on a resume, and settings that
are refused."""

from __future__ import annotations

import json
import shutil
import zipfile
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import yaml
from typer.testing import CliRunner

from megatron_async_rl import cli
from megatron_async_rl.config.data import FileConfig
from megatron_async_rl.config.keys import models_in, walk
from megatron_async_rl.config.load import dump, load
from megatron_async_rl.config.problem import Problem
from megatron_async_rl.config.schema import Config
from megatron_async_rl.data import DataIdentity, read_set, tokenizer_of
from megatron_async_rl.launch.run_lock import lock_run_dir
from megatron_async_rl.plan import machine
from megatron_async_rl.plan.machine import this_machine
from megatron_async_rl.plan.preflight import preflight
from megatron_async_rl.plan.resume import ALLOWED, checkpoint_notes, conflicts, differences
from megatron_async_rl.policy.checkpoint_folder import CONFIG_FILE, DATA_FILE, newest
from megatron_async_rl.policy.digested_folder import StoredFile, described
from megatron_async_rl.watchdog.events import Status, write_status
from tests.damaged_run import permissions_count
from tests.written_run import write_prompts, write_run

LOSS = "objective.loss=reinforce"


@pytest.fixture
def config(tmp_path: Path) -> Path:
    return write_run(tmp_path)


def made(config: Path, *overrides: str, step: int, phase: str = "stopped") -> Path:
    """Write the directory of the run after `step` of its steps."""
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
def test_settings_that_define_the_run_cannot_change(config: Path, override: str, key: str) -> None:
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
        "objective.snapshots=9",
        "rollout.reward.workers=1",
        "rollout.reward.memory_mib=4096",
        "samples.keep_mib=0",
        "policy.on_anomaly=skip",
        "policy.sequence=packed",
        "policy.optimizer.log_update_norm=true",
    ],
)
def test_steps_learning_rate_engines_and_flow_may_change_and_are_printed(
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


def test_a_moved_model_is_accepted_and_another_one_is_refused(config: Path) -> None:
    made(config, step=2)
    other = config.parent / "other"
    (config.parent / "model").rename(other)
    assert refused(config, f"model.path={other}") == []
    (config.parent / "model").mkdir()
    assert [one.key for one in refused(config, f"model.path={other}")] == ["model.path"]


def test_a_model_in_an_inaccessible_folder_counts_as_moved(config: Path) -> None:
    """The run was copied from another user, for example."""
    home = config.parent / "home"
    home.mkdir()
    (config.parent / "model").rename(home / "model")
    made(config, f"model.path={home / 'model'}", step=2)
    (home / "model").rename(config.parent / "model")
    (home / "model").mkdir()
    home.chmod(0)
    with permissions_count():
        assert refused(config) == []
    home.chmod(0o755)
    assert [one.key for one in refused(config)] == ["model.path"]


def test_a_copy_of_model_and_data_is_accepted_unless_it_was_changed(config: Path) -> None:
    made(config, step=2)
    folder = config.parent
    shutil.copytree(folder / "model", folder / "model2")
    shutil.copy(folder / "train.jsonl", folder / "train2.jsonl")
    copies = [f"model.path={folder / 'model2'}", f"data.train={folder / 'train2.jsonl'}"]
    assert refused(config, *copies) == []
    write_prompts(folder / "train2.jsonl", 9)
    for file in sorted((folder / "model2").iterdir()):
        whole = file.read_bytes()
        file.write_bytes(whole + b" ")
        found = [one.key for one in refused(config, *copies)]
        assert found == ["model.path", "data.train"], file
        file.write_bytes(whole)
    (folder / "model2" / "config.json").chmod(0)
    with permissions_count():
        assert [one.key for one in refused(config, copies[0])] == ["model.path"]


def test_a_server_of_the_reward_may_be_at_another_address(config: Path) -> None:
    reward = "rollout.reward={{name: http, settings: {{url: 'http://{}/score', headers: {}}}}}"
    made(config, reward.format("node1:8000", "{}"), step=2)
    moved = reward.format("node2:9000", "{}")
    assert refused(config, moved) == []
    assert [one.key for one in differences(load(config, [moved]))] == [
        "rollout.reward.settings.url"
    ]
    assert refused(config, reward.format("node1:8000", "{a: b}")) != []


@pytest.mark.parametrize(
    ("before", "now", "key"),
    [
        ("{name: math}", "{name: math, settings: {form: any}}", "rollout.reward.settings.form"),
        ("{name: math, settings: {form: any}}", "{name: math}", "rollout.reward.settings.form"),
        (
            "{parts: {a: {name: arithmetic}}}",
            "{parts: {a: {name: arithmetic}, b: {name: math}}}",
            "rollout.reward.parts.b",
        ),
        (
            "{parts: {a: {name: arithmetic}, b: {name: math}}}",
            "{parts: {a: {name: arithmetic}}}",
            "rollout.reward.parts.b",
        ),
    ],
)
def test_an_added_or_removed_setting_of_a_reward_is_refused(
    config: Path, before: str, now: str, key: str
) -> None:
    made(config, f"rollout.reward={before}", step=2)
    assert refused(config, f"rollout.reward={before}") == []
    assert [one.key for one in refused(config, f"rollout.reward={now}")] == [key]


def test_another_path_of_the_same_model_is_accepted(config: Path) -> None:
    made(config, step=4, phase="finished")
    link = config.parent / "link"
    link.symlink_to(config.parent / "model")
    assert refused(config, f"model.path={link}") == []
    assert refused(config, f"model.path={link}", "run.steps=8") == []


def test_a_refusal_proposes_mar_convert_only_if_there_is_a_checkpoint(config: Path) -> None:
    run_dir = made(config, step=2)
    assert "mar convert" not in refused(config, LOSS)[0].fix
    (run_dir / "checkpoint").mkdir()
    (run_dir / "checkpoint" / "latest").write_text("step_2")
    assert f"mar convert {run_dir}/checkpoint" in refused(config, LOSS)[0].fix


def test_keys_that_an_older_release_lacks_are_not_compared(
    config: Path,
) -> None:
    run_dir = made(config, step=2)
    tree: dict[str, Any] = yaml.safe_load((run_dir / "config.yaml").read_text())
    del tree["objective"]["entropy_bonus"]
    tree["flow"]["gone"] = 1
    (run_dir / "config.yaml").write_text(yaml.safe_dump(tree))
    assert differences(load(config)) == []


CUTS = 40


def test_a_truncated_unreadable_or_missing_config_is_a_problem(
    config: Path,
) -> None:
    run_dir = made(config, step=2)
    file = run_dir / "config.yaml"
    whole = file.read_bytes()
    contents: list[bytes | None] = [None, b"\xff\xfe", b"run: [", b"- a list", b""]
    contents += [whole[: len(whole) * part // CUTS] for part in range(CUTS)]
    for content in contents:
        file.unlink(missing_ok=True)
        if content is not None:
            file.write_bytes(content)
        for override in ([], [LOSS]):
            found = refused(config, *override)
            assert found, (content, override)
        assert differences(load(config, [LOSS])) == [] or content == whole
    assert "is missing" in _problem_of_missing(config, file).what
    file.write_bytes(whole)
    assert refused(config) == []


def _problem_of_missing(config: Path, file: Path) -> Problem:
    file.unlink()
    (problem,) = refused(config)
    return problem


def saved(config: Path, *overrides: str, step: int = 2, files: Sequence[str] = ()) -> Path:
    """Write the parts of a checkpoint that are read without torch. Return its folder."""
    loaded = load(config, overrides)
    checkpoint = loaded.run.dir / "checkpoint"
    path = checkpoint / f"step_{step:08d}"
    (path / "sharded").mkdir(parents=True)
    contents = {
        CONFIG_FILE: dump(loaded).encode(),
        DATA_FILE: json.dumps(digests(loaded)).encode(),
        "state.pt": b"state",
        "sharded/.metadata": b"index",
    }
    for name, content in contents.items():
        (path / name).write_bytes(content)
    stored = {name: StoredFile.of(content) for name, content in contents.items()}
    about = {"step": step, "model_path": str(loaded.model.path)}
    (path / "about.json").write_text(described(about, stored))
    (checkpoint / "latest").write_text(path.name)
    return path


def digests(config: Config) -> dict[str, Any]:
    tokenizer = tokenizer_of(config.model.path, config.data)

    def of(file: FileConfig) -> dict[str, Any]:
        return DataIdentity.of(read_set(config.data, file, tokenizer).prompts).as_json()

    return {
        "training": [of(one) for one in config.data.training],
        "held_out": {
            one.name: {"path": str(one.file.path), **of(one.file)} for one in config.held_out_files
        },
    }


def test_the_checkpoints_config_is_compared_if_the_runs_is_missing(config: Path) -> None:
    (made(config, step=2) / "config.yaml").unlink()
    saved(config)
    assert refused(config) == []
    (problem,) = refused(config, LOSS)
    assert problem.key == "objective.loss"


def trained(config: Path, *overrides: str) -> str:
    """Return the output of `mar train`, which must refuse to start."""
    done = CliRunner().invoke(cli.app, ["train", str(config), *overrides])
    assert done.exit_code == 2, done.output
    return done.output


def rows_of(file: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in file.read_text().splitlines()]


def write_rows(file: Path, rows: Sequence[dict[str, Any]]) -> None:
    file.write_text("".join(json.dumps(row) + "\n" for row in rows))


def test_changed_grown_and_shrunk_data_is_refused_before_anything_starts(config: Path) -> None:
    made(config, step=2)
    saved(config)
    file = config.parent / "train.jsonl"
    rows = rows_of(file)
    wrong = [{**row, "answer": "0"} for row in rows]
    for changed, said in (
        (wrong, "8 prompts there and here, with other text, columns or order"),
        ([*rows[:-1], {**rows[-1], "prompt": "9+9="}], "other text"),
        (rows[::-1], "order"),
        ([*rows, {**rows[0], "prompt": "1+2="}], "8 prompts there, 9 here"),
        (rows[:-1], "8 prompts there, 7 here"),
    ):
        write_rows(file, changed)
        assert f"data.train\n  the checkpoint in {config.parent / 'out'}" in trained(config)
        assert said in trained(config)
        write_rows(config.parent / "copy.jsonl", changed)
        assert said in trained(config, "data.train=" + str(config.parent / "copy.jsonl"))
    write_rows(file, rows)
    assert data_problems_of(config) == []


def data_problems_of(config: Path, *overrides: str) -> list[Problem]:
    """Return problems of data on a resume, from the config and from preflight."""
    loaded = load(config, overrides)
    return [*conflicts(loaded), *preflight(loaded, all_data=True).problems]


def test_the_same_data_under_another_name_is_accepted(config: Path) -> None:
    made(config, step=2)
    saved(config)
    file, other = config.parent / "train.jsonl", config.parent / "renamed.jsonl"
    other.write_bytes(file.read_bytes())
    assert data_problems_of(config, f"data.train={other}") == []
    file.unlink()
    assert data_problems_of(config, f"data.train={other}") == []


def test_settings_of_generated_data_may_change_if_the_prompts_are_the_same(config: Path) -> None:
    made(config, step=2)
    file = config.parent / "train.jsonl"
    folder = config.parent / "reasoning_gym" / "chain_sum-0123456789ab"
    folder.mkdir(parents=True)
    shutil.copy(file, folder / "train.jsonl")
    changed = [f"data.train={folder / 'train.jsonl'}", "data.generate={seed: 3}"]
    # Without digests in the checkpoint, the settings decide.
    assert "data.generate" in [one.key for one in refused(config, *changed)]
    saved(config)
    assert data_problems_of(config, *changed) == []
    (folder / "train.jsonl").write_text(file.read_text().splitlines(keepends=True)[0])
    assert [one.key for one in data_problems_of(config, *changed)] == ["data.train"]


def test_a_data_folder_with_an_added_or_renamed_file_is_refused(config: Path) -> None:
    folder = config.parent / "parts"
    folder.mkdir()
    for name, count in (("a.jsonl", 3), ("b.jsonl", 5)):
        write_prompts(folder / name, prompts=count)
    named = f"data.train={folder}"
    made(config, named, step=2)
    saved(config, named)
    assert data_problems_of(config, named) == []
    write_prompts(folder / "c.jsonl", prompts=2)
    (problem,) = data_problems_of(config, named)
    assert "8 prompts there, 10 here" in problem.what
    (folder / "c.jsonl").unlink()
    (folder / "a.jsonl").rename(folder / "z.jsonl")
    (problem,) = data_problems_of(config, named)
    assert "order" in problem.what
    (folder / "z.jsonl").rename(folder / "a.jsonl")
    assert data_problems_of(config, named) == []


def test_an_edited_config_of_the_run_is_noted_if_it_is_replaced(config: Path) -> None:
    run_dir = made(config, step=2)
    saved(config)
    file = run_dir / "config.yaml"
    whole = file.read_text()
    assert checkpoint_notes(load(config)) == []
    file.write_text(whole.replace("seed: 1234", "seed: 77"))
    assert refused(config) == [], "the checkpoint has its own"
    (note,) = checkpoint_notes(load(config))
    assert f"{file} has run.seed: 77 -> 1234" in note
    assert [one.key for one in refused(config, "run.seed=77")] == ["run.seed"]
    file.write_text("\ufeff" + whole)
    assert (refused(config), checkpoint_notes(load(config))) == ([], [])
    file.rename(config.parent / "elsewhere.yaml")
    file.symlink_to(config.parent / "elsewhere.yaml")
    assert (refused(config), checkpoint_notes(load(config))) == ([], [])


def test_each_source_of_a_mixture_is_compared(config: Path) -> None:
    other = write_prompts(config.parent / "other.jsonl", prompts=5)
    mixture = "data={sources: [{path: %s}, {path: %s}]}"
    same = mixture % (config.parent / "train.jsonl", other)
    made(config, same, step=2)
    saved(config, same)
    assert data_problems_of(config, same) == []
    renamed = other.rename(config.parent / "renamed.jsonl")
    assert data_problems_of(config, mixture % (config.parent / "train.jsonl", renamed)) == []
    write_rows(other, rows_of(renamed)[1:])
    (problem,) = data_problems_of(config, same)
    assert problem.key == "data.sources.1.path"
    assert "5 prompts there, 4 here" in problem.what


def test_a_held_out_set_may_be_another_file_but_its_file_may_not_change(config: Path) -> None:
    file = write_prompts(config.parent / "held.jsonl", prompts=3)
    evaluated = ("eval={}", f"data.eval={file}")
    made(config, *evaluated, step=2)
    saved(config, *evaluated)
    assert data_problems_of(config, *evaluated) == []
    other = write_prompts(config.parent / "others.jsonl", prompts=4)
    assert data_problems_of(config, "eval={}", f"data.eval={other}") == []
    write_prompts(file, prompts=4)
    (problem,) = data_problems_of(config, *evaluated)
    assert (problem.key, "3 prompts there, 4 here" in problem.what) == ("data.eval", True)
    assert data_problems_of(config, f"data.eval={file}") == [], "nothing is evaluated"


@pytest.mark.parametrize(
    "name", ["about.json", "state.pt", "config.yaml", "prompts.json", "sharded/.metadata"]
)
def test_a_damaged_checkpoint_is_refused_and_an_older_one_named(config: Path, name: str) -> None:
    made(config, step=4)
    saved(config, step=2)
    file = saved(config, step=4) / name
    content = file.read_bytes()
    flipped = bytearray(content)
    flipped[len(content) // 2] ^= 1
    for damaged in (bytes(flipped), content[:-1], b"", None):
        file.unlink()
        if damaged is not None:
            file.write_bytes(damaged)
        output = trained(config).replace("\n", " ")
        assert "step_00000004 is damaged: " + name in output
        assert "write step_00000002 into" in output
        file.write_bytes(content)


def test_notes_name_a_checkpoint_without_digests_and_a_newer_unused_one(config: Path) -> None:
    run_dir = made(config, step=4)
    older, newer = saved(config, step=2), saved(config, step=4)
    loaded = load(config)
    assert checkpoint_notes(loaded) == []
    (run_dir / "checkpoint" / "latest").write_text(older.name)
    (note,) = checkpoint_notes(loaded)
    assert f"{newer} is newer" in note
    (run_dir / "checkpoint" / "latest").unlink()
    assert newest(run_dir / "checkpoint") == newer
    (newer / "about.json").write_text(json.dumps({"step": 4}))
    (note,) = checkpoint_notes(loaded)
    assert "without digests" in note


def test_every_allowed_key_exists() -> None:
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


def test_moments_that_config_and_checkpoint_both_refuse_are_reported_once(config: Path) -> None:
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


def crowded(monkeypatch: pytest.MonkeyPatch) -> None:
    """Pretend that other programs use this machine's memory."""
    little = replace(this_machine(), free_memory=2**20)
    monkeypatch.setattr(machine, "this_machine", lambda *_: little)


def test_mar_train_of_a_finished_run_with_its_own_settings_shows_its_summary(
    config: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Neither memory nor model nor data is needed."""
    made(config, step=4, phase="finished")
    crowded(monkeypatch)
    loaded = load(config)
    (loaded.model.path / "config.json").unlink()
    assert loaded.data.train is not None
    loaded.data.train.unlink()
    done = CliRunner().invoke(cli.app, ["train", str(config)])
    assert done.exit_code == 0, done.output
    assert "finished at step 4" in done.output


def test_problems_of_the_run_directory_precede_those_of_memory(
    config: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A run that is active in the directory may be using the memory."""
    run_dir = made(config, step=2)
    crowded(monkeypatch)
    with lock_run_dir(run_dir):
        done = CliRunner().invoke(cli.app, ["train", str(config)])
    assert (done.exit_code, "is in use" in done.output) == (2, True), done.output
    assert "memory" not in done.output
    done = CliRunner().invoke(cli.app, ["train", str(config), "run.resume=never"])
    assert (done.exit_code, "already holds a run" in done.output) == (2, True), done.output
    assert "memory" not in done.output
    done = CliRunner().invoke(cli.app, ["train", str(config), "run.seed=7"])
    assert ("run.seed" in done.output, "host memory" in done.output) == (True, True), done.output

"""A resume compares the newest checkpoint with the run's records: a run that had a checkpoint never
starts again at step 0, and continues with its own files only."""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from typer.testing import CliRunner

from megatron_async_rl import cli
from megatron_async_rl.config.load import dump, load
from megatron_async_rl.config.problem import Problem
from megatron_async_rl.config.schema import SamplesConfig
from megatron_async_rl.config.settings_model import code_digests
from megatron_async_rl.flow.sample_log import SampleLogWriter
from megatron_async_rl.metrics.log import MetricsLog, digest_of_step
from megatron_async_rl.plan.resume import checkpoint_notes, checkpoint_problems
from megatron_async_rl.plan.run_record import record_of
from megatron_async_rl.policy.checkpoint_folder import CheckpointBroken, newest, steps
from megatron_async_rl.policy.digested_folder import StoredFile, described, files_of
from megatron_async_rl.samples.frames import MARK_FILE, LogMark
from megatron_async_rl.watchdog.events import Status, read_status, write_status
from tests.damaged_run import (
    DAMAGES,
    STEPS,
    damageable_run,
    name_of,
    permissions_count,
    remove,
    save,
)
from tests.json_lines import write_lines


@pytest.fixture
def config(tmp_path: Path) -> Path:
    return damageable_run(tmp_path)


def problems(config: Path, *overrides: str) -> list[Problem]:
    return checkpoint_problems(load(config, overrides), None)


def notes(config: Path, *overrides: str) -> list[str]:
    return checkpoint_notes(load(config, overrides))


def test_a_complete_run_resumes_without_a_message(config: Path) -> None:
    assert (problems(config), notes(config)) == ([], [])


def emptied(folder: Path) -> None:
    remove(folder)
    folder.mkdir()


def moved(folder: Path) -> None:
    folder.rename(folder.parent.parent / "moved")


LOSSES: dict[str, Callable[[Path], Any]] = {
    "deleted": remove,
    "emptied": emptied,
    "moved": moved,
    "another name": lambda folder: folder.rename(folder.with_name("checkpoint.old")),
    "its steps renamed": lambda folder: [
        (folder / "latest").unlink(),
        (folder / name_of(STEPS)).rename(folder / f"{name_of(STEPS)}.bak"),
    ],
    "its steps deleted": lambda folder: [
        (folder / "latest").unlink(),
        remove(folder / name_of(STEPS)),
    ],
}


@pytest.mark.parametrize("loss", LOSSES)
def test_a_run_whose_checkpoints_are_missing_is_refused(config: Path, loss: str) -> None:
    folder = config.parent / "out" / "checkpoint"
    before = sorted(path.name for path in folder.parent.iterdir())
    LOSSES[loss](folder)
    (problem,) = problems(config)
    assert problem.key == str(folder)
    assert f"names {name_of(STEPS)} as its newest checkpoint" in problem.what
    assert "would start again at step 0" in problem.what
    for way_out in ("restore the folder", "another run.dir", f"remove {folder.parent} to start"):
        assert way_out in problem.fix
    done = CliRunner().invoke(cli.app, ["train", str(config)])
    assert done.exit_code == 2
    assert "would start again at step 0" in done.output
    if loss == "deleted":
        after = sorted(path.name for path in folder.parent.iterdir())
        assert after == [name for name in before if name != "checkpoint"], "nothing was changed"


@pytest.mark.parametrize(
    ("status", "step", "said"),
    [
        (Status(phase="training", step=5, steps=9, time=0.0), 5, "made 5 steps, with a checkpoint"),
        (Status(phase="starting", step=0, steps=9, time=0.0), 3, "made 3 steps, with a checkpoint"),
        (None, 2, "made 2 steps, with a checkpoint every 2"),
        (Status(phase="finished", step=1, steps=1, time=0.0), 1, "that finished at step 1"),
    ],
)
def test_records_of_earlier_versions_show_checkpoints_too(
    config: Path, status: Status | None, step: int, said: str
) -> None:
    run_dir = config.parent / "out"
    remove(run_dir / "checkpoint")
    remove(run_dir / "status.json")
    if status is not None:
        write_status(run_dir, status)
    write_lines(run_dir / "metrics.jsonl", [{"step": n, "version": n} for n in range(1, step + 1)])
    (problem,) = problems(config)
    assert said in problem.what


def test_a_run_that_stopped_before_its_first_checkpoint_starts_again(config: Path) -> None:
    run_dir = config.parent / "out"
    remove(run_dir / "checkpoint")
    # The run was killed while it wrote its first checkpoint, or its disk was full.
    stopped = Status(phase="failed", step=5, steps=9, time=0.0, checkpoint="")
    write_status(run_dir, stopped)
    assert (problems(config), notes(config)) == ([], [])
    (run_dir / "checkpoint").mkdir()
    (run_dir / "checkpoint" / "unfinished_step_00000002").mkdir()
    assert (problems(config), notes(config)) == ([], [])
    # A run of an earlier release, after one of the two steps before a checkpoint.
    write_status(run_dir, replace(stopped, step=1, checkpoint=None))
    write_lines(run_dir / "metrics.jsonl", [{"step": 1, "version": 1}])
    assert (problems(config), notes(config)) == ([], [])
    for file in ("status.json", "metrics.jsonl"):
        remove(run_dir / file)
    assert (problems(config), notes(config)) == ([], [])


def test_a_finished_run_needs_no_checkpoint_until_its_steps_are_raised(config: Path) -> None:
    run_dir = config.parent / "out"
    write_status(
        run_dir, Status(phase="finished", step=9, steps=9, time=0.0, checkpoint=name_of(9))
    )
    remove(run_dir / "checkpoint")
    assert problems(config) == []
    assert len(problems(config, "run.steps=12")) == 1


def test_a_missing_newest_checkpoint_is_ignored_only_if_latest_names_another(config: Path) -> None:
    run_dir, loaded = config.parent / "out", load(config)
    folder = run_dir / "checkpoint"
    save(loaded, 4)
    (folder / "latest").write_text(name_of(STEPS))
    kept = shutil.copytree(folder / name_of(STEPS), run_dir / "kept")
    shutil.rmtree(folder / name_of(STEPS))
    with pytest.raises(CheckpointBroken, match="which is not a checkpoint"):
        newest(folder)
    (folder / "latest").unlink()
    (problem,) = problems(config)
    assert f"has no latest and no {name_of(STEPS)}" in problem.what
    assert f"write {name_of(4)} into {folder / 'latest'}" in problem.fix
    (folder / "latest").write_text(name_of(4))
    assert problems(config) == []
    assert notes(config) == [
        f"the run resumes from step 4: its newest checkpoint, {name_of(STEPS)}, does not exist"
    ]
    kept.rename(folder / name_of(STEPS))
    (folder / "latest").write_text(name_of(STEPS))
    assert (problems(config), notes(config)) == ([], [])


def test_a_checkpoint_under_another_step_or_description_is_damaged(config: Path) -> None:
    folder, loaded = config.parent / "out" / "checkpoint", load(config)
    older, newer = save(loaded, 4), folder / name_of(STEPS)
    (folder / "latest").write_text(newer.name)
    whole = (newer / "about.json").read_bytes()
    shutil.copy(older / "about.json", newer / "about.json")
    (problem,) = problems(config)
    assert "about.json is of step 4" in problem.what
    assert f"use {older}" in problem.fix
    (newer / "about.json").write_bytes(whole)
    assert problems(config) == []

    newer.rename(folder / name_of(7))
    (folder / "latest").write_text(name_of(7))
    (problem,) = problems(config)
    assert f"{folder / name_of(7)} is damaged: about.json is of step {STEPS}" in problem.what
    (folder / "latest").unlink()
    (problem,) = problems(config)
    assert "step_00000007 is damaged" in problem.what
    (folder / name_of(7)).rename(newer)
    (folder / "latest").write_text(newer.name)
    shutil.copytree(newer, folder / f"{newer.name}.bak")
    assert [path.name for path in steps(folder)] == [name_of(4), name_of(5)]
    assert problems(config) == []


def test_a_record_that_was_saved_damaged_is_reported(config: Path) -> None:
    """The digest of the file is that of its content."""
    checkpoint = config.parent / "out" / "checkpoint" / name_of(STEPS)
    about = json.loads((checkpoint / "about.json").read_text())
    for content, problem in (
        (b"[]", ""),
        (b"{", "record.json cannot be read (Expecting property name"),
    ):
        (checkpoint / "record.json").write_bytes(content)
        files = {**(files_of(about) or {}), "record.json": StoredFile.of(content)}
        (checkpoint / "about.json").write_text(described({"step": STEPS}, files))
        if problem:
            with pytest.raises(CheckpointBroken) as broken:
                record_of(checkpoint)
            assert problem in str(broken.value)
        else:
            assert record_of(checkpoint) == {}


def test_a_checkpoint_of_another_run_is_refused(config: Path) -> None:
    run_dir, folder = config.parent / "out", config.parent / "out" / "checkpoint"
    whole = (run_dir / "metrics.jsonl").read_bytes()
    for rows in (
        [{"step": n, "version": n, "time": n + 0.5} for n in range(1, 7)],  # another history
        [{"step": n, "version": n, "time": n} for n in range(1, 4)],  # that ends before
    ):
        write_lines(run_dir / "metrics.jsonl", rows)
        (problem,) = problems(config)
        assert problem.key == str(run_dir / "metrics.jsonl")
        assert f"line of step 5, at which {folder / name_of(5)} was saved" in problem.what
    (run_dir / "metrics.jsonl").unlink()  # a checkpoint may be copied into a new folder
    assert problems(config) == []
    assert "has no metrics.jsonl for the steps before" in notes(config)[0]
    # The run that continues there may crash before its first step or its next checkpoint.
    for rows in ([], [{"step": n, "version": n, "time": n} for n in (6, 7)]):
        write_lines(run_dir / "metrics.jsonl", rows)
        assert problems(config) == []
        assert "has no metrics.jsonl for the steps before" in notes(config)[0]
    (run_dir / "metrics.jsonl").write_bytes(whole + b'{"step": 6, "time": 7}\n{"step": 7, "ti')
    assert problems(config) == []


def test_a_checkpoint_has_the_digest_of_the_last_line_of_metrics(tmp_path: Path) -> None:
    log = MetricsLog(tmp_path, tensorboard=False, first_step=1)
    assert log.sync() is None
    for step in (1, 2, 3):
        log.log(step, {"time/step_s": 0.5 * step})
        found = log.sync()
        assert found == {"step": step, "digest": digest_of_step(tmp_path, step)}
    log.close()
    assert digest_of_step(tmp_path, 4) is None
    digests = {digest_of_step(tmp_path, step) for step in (1, 2, 3)}
    assert len(digests) == 3


def saved_mark(config: Path) -> Any:
    """Return the mark of the sample log in the newest checkpoint."""
    path = newest(config.parent / "out" / "checkpoint")
    assert path is not None
    return record_of(path)["samples"]


def test_a_sample_log_that_ends_before_the_checkpoint_is_refused(config: Path) -> None:
    run_dir = config.parent / "out"
    kept = {path: path.read_bytes() for path in (run_dir / "samples").iterdir()}

    def restored() -> None:
        remove(run_dir / "samples")
        (run_dir / "samples").mkdir()
        for path, content in kept.items():
            path.write_bytes(content)
        assert problems(config) == []

    for damage in (
        lambda: remove(run_dir / "samples"),
        lambda: emptied(run_dir / "samples"),
        lambda: [path.unlink() for path in kept],
    ):
        damage()
        (problem,) = problems(config)
        assert "is missing or empty, and the log had segments up to number 0" in problem.what
        assert "samples.keep_mib: 0" in problem.fix
        assert problems(config, "samples.keep_mib=0") == []
        restored()
    for path in kept:
        for name in (path, path.with_suffix(".open")):
            path.unlink(missing_ok=True)
            name.write_bytes(kept[path][:100])
            (problem,) = problems(config)
            assert f"{name} ends after 0 batches and had 1" in problem.what
            name.unlink()
            restored()
    remove(run_dir / "samples")
    mark = (run_dir / MARK_FILE).read_bytes()
    (run_dir / MARK_FILE).unlink()
    assert problems(config) == []
    assert "has no sample log for the steps before" in notes(config)[0]
    # The run that continues without them may crash before its next checkpoint.
    log = SampleLogWriter(run_dir, SamplesConfig())
    log.begin(6, after=LogMark.of(saved_mark(config)).segment)
    log.admitted(9, 6)
    log.close()
    assert problems(config) == []
    (run_dir / MARK_FILE).unlink()
    remove(run_dir / "samples")
    (run_dir / "samples").mkdir()
    (run_dir / MARK_FILE).write_bytes(mark)
    restored()


@pytest.mark.parametrize("damage", ["empty", "text", "dangling", "looping", "locked"])
def test_an_unreadable_checkpoint_folder_does_not_count_as_empty(config: Path, damage: str) -> None:
    """The records of the run do not show a checkpoint either."""
    run_dir = config.parent / "out"
    remove(run_dir / "status.json")
    remove(run_dir / "metrics.jsonl")
    DAMAGES[damage](run_dir / "checkpoint")
    with permissions_count():
        (problem,) = problems(config)
    assert problem.key == str(run_dir / "checkpoint")
    (run_dir / "checkpoint").chmod(0o755) if damage == "locked" else None


REWARD = "def score(prompt, response):\n    return 1.0\n"


def test_a_reward_whose_code_changed_since_the_checkpoint_is_noted(
    config: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(config.parent)
    package = config.parent / "own"
    package.mkdir()
    file = package / "rewards.py"
    file.write_text(REWARD)
    named = ("rollout.reward.name=own.rewards:score",)
    loaded = load(config, named)
    assert list(code_digests(loaded.model_dump(mode="json"))) == [str(file)]
    shutil.rmtree(config.parent / "out" / "checkpoint")
    save(loaded, STEPS)
    (config.parent / "out" / "config.yaml").write_text(dump(loaded))
    assert notes(config, *named) == []
    file.write_text(REWARD.replace("1.0", "2.0"))
    assert notes(config, *named) == [
        f"{file} has changed since {name_of(STEPS)} was saved, and the run continues with the new"
        " code"
    ]
    assert code_digests({"a": "gone.module:f", "b": "10:30", "c": ["no module: at all"]}) == {}


def test_the_status_of_a_run_names_its_newest_checkpoint(config: Path) -> None:
    status = read_status(config.parent / "out")
    assert status is not None
    assert status.checkpoint == name_of(STEPS)
    text = json.loads((config.parent / "out" / "status.json").read_text())
    del text["checkpoint"]
    (config.parent / "out" / "status.json").write_text(json.dumps(text))
    assert read_status(config.parent / "out") == replace(status, checkpoint=None)

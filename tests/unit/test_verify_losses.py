"""`mar verify RUN` of runs that lost records, trained a group twice, or are being written."""

from __future__ import annotations

import itertools
import shutil
import time
from pathlib import Path

import pyarrow as pa
import pytest
from rich.console import Console

from megatron_async_rl.config.load import dump, load
from megatron_async_rl.data import DataIdentity, read_set
from megatron_async_rl.data.tokenizer import tokenizer_of
from megatron_async_rl.launch.run_lock import lock_run_dir
from megatron_async_rl.samples.frames import (
    FOLDER,
    MARK_FILE,
    LogMark,
    SegmentBroken,
    lost_end,
    replace_whole,
    segments_in,
)
from megatron_async_rl.samples.segments import OUTCOMES, payload_of, read_batches
from megatron_async_rl.verify import verified_run
from megatron_async_rl.verify.scorecard import Scorecard, ScorecardRow
from megatron_async_rl.verify.verified_run import verify_run
from megatron_async_rl.watchdog.events import Status, write_status
from tests.healthy_run import STEPS, Alterations, scheduled, write_healthy_run
from tests.json_lines import read_objects, write_lines
from tests.mar_command import mar

NEWEST = f"step_{STEPS:08d}"


@pytest.fixture(scope="module")
def healthy(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_healthy_run(tmp_path_factory.mktemp("lost"), Alterations(metrics=scheduled))


@pytest.fixture
def run(healthy: Path, tmp_path: Path) -> Path:
    """A copy of the healthy run."""
    shutil.copytree(healthy, tmp_path / "run")
    return tmp_path / "run"


def verified(run_dir: Path) -> Scorecard:
    return verify_run(run_dir, Console(quiet=True))


def failing(run_dir: Path) -> dict[str, ScorecardRow]:
    """Return the failed rows by name."""
    return {one.name: one for one in verified(run_dir).failed}


def value(run_dir: Path, name: str) -> str:
    return next(one.value for one in verified(run_dir).rows if one.name == name)


def remove(run_dir: Path, pattern: str) -> None:
    for file in (run_dir / FOLDER).glob(pattern):
        file.unlink()


def ended(run_dir: Path, phase: str, step: int, checkpoint: str = NEWEST) -> None:
    """Write the run's status."""
    status = Status(phase=phase, step=step, steps=STEPS, time=time.time(), checkpoint=checkpoint)
    write_status(run_dir, status)


def train_again(run_dir: Path, group: int, step: int) -> None:
    """Let `group`, which trained before, train again at `step` instead of another group."""
    folder = run_dir / FOLDER
    keys = ("id", "finished_at", "group")
    every = [
        row
        for segment in segments_in(folder)
        for _, batch in read_batches(folder, "outcomes", segment)
        for row in batch.to_pylist()
        if row["outcome"] == "trained"
    ]
    given = [row for row in every if row["group"] == group]
    replaced = next(row["group"] for row in every if row["step"] == step)
    again = itertools.cycle(given)
    for segment in segments_in(folder):
        batches = [batch for _, batch in read_batches(folder, "outcomes", segment)]
        rows = [batch.to_pylist() for batch in batches]
        for row in itertools.chain(*rows):
            if row["outcome"] == "trained" and row["group"] == replaced:
                row |= {key: one for key, one in next(again).items() if key in keys}
        made = [pa.RecordBatch.from_pylist(one, schema=OUTCOMES) for one in rows]
        replace_whole(folder / f"outcomes-{segment:06d}.segment", map(payload_of, made))


def test_a_group_that_trained_twice_fails(run: Path) -> None:
    train_again(run, group=17, step=8)
    failed = failing(run)
    assert failed.keys() == {"sample log", "groups"}
    assert failed["groups"].details == ("group 17 trained at step 5, and again at step 8",)
    text = "sample 17-0, trained at step 8, trained before, or its row is missing"
    assert failed["sample log"].details[0] == text
    # Without the oldest segment, a sample may be missing because it was deleted.
    remove(run, "*-000000.*")
    assert failing(run).keys() == {"groups"}


def test_forgotten_samples_are_not_lost_ones(run: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(verified_run, "KNOWN_SAMPLES", 7)
    assert not failing(run)


def test_trained_samples_without_rows_fail(run: Path) -> None:
    path = run / FOLDER / "samples-000001.segment"
    _, *kept = [payload_of(batch) for _, batch in read_batches(run / FOLDER, "samples", 1)]
    replace_whole(path, kept)
    row = failing(run)["sample log"]
    assert row.details[0] == (
        "sample 16-0, trained at step 5, trained before, or its row is missing"
    )
    with lock_run_dir(run):
        assert "sample log" not in failing(run)


@pytest.mark.parametrize("table", ["samples", "outcomes"])
@pytest.mark.parametrize("marked", [True, False])
def test_a_lost_file_of_the_only_segment_fails(run: Path, table: str, marked: bool) -> None:
    remove(run, "*-000001.*")
    remove(run, "*-000002.*")
    (run / MARK_FILE).unlink()
    if marked:
        mark = LogMark(segment=0, closed=True, samples=1, outcomes=1)
        (run / MARK_FILE).write_text(mark.text())
    remove(run, f"{table}-*")
    with pytest.raises(SegmentBroken, match="is missing"):
        segments_in(run / FOLDER)
    (detail,) = failing(run)["sample log"].details
    assert detail.startswith(f"{table}-000000.segment is missing")


def test_a_lost_file_is_noticed_next_to_an_empty_one(run: Path) -> None:
    folder = run / FOLDER
    remove(run, "samples-000002.*")
    remove(run, "outcomes-000002.*")
    (folder / "outcomes-000002.open").touch()
    lost = lost_end(run)
    assert lost is not None
    assert "samples-000002.segment is missing, and had" in lost


def test_lost_samples_of_the_oldest_segment_fail_after_the_run(run: Path) -> None:
    remove(run, "samples-000000.*")
    (detail,) = failing(run)["sample log"].details
    assert detail.startswith("samples-000000.segment is missing: it was lost, or the run was")
    # A running run deletes the samples of its oldest segment first.
    with lock_run_dir(run):
        assert "sample log" not in failing(run)


def test_lines_that_a_running_run_adds_are_read_by_the_next_check(
    run: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    file = run / "metrics.jsonl"
    *before, newest = file.read_text().splitlines(keepends=True)
    file.write_text("".join(before))
    read = verified_run.digests_of_steps

    def meanwhile(run_dir: Path) -> dict[int, str]:
        digests = read(run_dir)
        file.write_text("".join([*before, newest]))
        return digests

    monkeypatch.setattr(verified_run, "digests_of_steps", meanwhile)
    with lock_run_dir(run):
        assert value(run, "chain of weights") == "11 steps, 0 resumes, 1 checkpoint"
        assert not failing(run)


def test_a_checkpoint_that_is_gone_fails(run: Path) -> None:
    shutil.rmtree(run / "checkpoint" / NEWEST)
    found = failing(run)["weights on disk"]
    assert found.details == (f"checkpoint/latest names {NEWEST}, which is missing",)
    with lock_run_dir(run):
        assert "weights on disk" not in failing(run)
    ended(run, "stopped", STEPS)
    shutil.rmtree(run / "checkpoint")
    found = failing(run)["weights on disk"]
    assert found.details == (f"status.json names {NEWEST}, which is missing",)


def test_an_export_without_digests_is_not_checked(run: Path) -> None:
    (run / "hf").mkdir()
    text = "1 checkpoint, exported model without digests (not checked)"
    assert value(run, "weights on disk") == text
    ended(run, "finished", STEPS)
    found = failing(run)["weights on disk"]
    assert found.details == ("hf: digests.json is missing",)


def cut(run_dir: Path, first: int, last: int) -> None:
    """Keep the lines of metrics of these steps."""
    file = run_dir / "metrics.jsonl"
    write_lines(file, [one for one in read_objects(file) if first <= one["step"] <= last])


def chain(run_dir: Path) -> tuple[str, ...]:
    """Return the faults of the chain, without those of the checkpoint at the last step."""
    found = failing(run_dir).get("chain of weights")
    details = () if found is None else found.details
    return tuple(one for one in details if NEWEST not in one)


def test_lost_lines_at_the_beginning_of_metrics_fail(run: Path) -> None:
    cut(run, 6, STEPS)
    assert chain(run) == ("metrics.jsonl begins with step 6, and the run with 1",)


@pytest.mark.parametrize(
    ("phase", "step", "last", "fault"),
    [
        ("finished", STEPS, STEPS - 1, "and status.json is of step 12"),
        # The status of a step may precede its line, and its samples precede both.
        ("stopped", STEPS, STEPS - 1, ""),
        ("evaluating", STEPS, STEPS - 1, ""),
        ("training", STEPS - 1, STEPS - 1, ""),
        ("training", STEPS, STEPS - 2, "and status.json is of step 12"),
        # A start that failed early has no step of its own.
        ("failed", 0, STEPS - 2, "and the sample log with step 12"),
        # A resume has cut the lines, and not yet the log.
        ("failed", 4, 4, ""),
        (None, 0, STEPS - 1, ""),
        (None, 0, STEPS - 2, "and the sample log with step 12"),
    ],
)
def test_lost_lines_at_the_end_of_metrics_fail(
    run: Path, phase: str | None, step: int, last: int, fault: str
) -> None:
    cut(run, 1, last)
    if phase is not None:
        ended(run, phase, step)
    faults = (f"metrics.jsonl ends with step {last}, {fault}",) if fault else ()
    assert chain(run) == faults
    with lock_run_dir(run):
        assert chain(run) == ()


def test_a_status_that_cannot_be_read_is_noted(run: Path) -> None:
    (run / "status.json").write_text("{}")
    (note,) = verified(run).notes
    assert note.startswith("status.json is not compared: ")


@pytest.mark.parametrize(
    ("name", "row"),
    [
        ("starts.jsonl", "chain of weights"),
        ("loads.jsonl", "weights in engines"),
        ("lag0.jsonl", "lag-0 evidence"),
    ],
)
@pytest.mark.parametrize("remains", [True, False])
def test_a_lost_record_fails_its_row(run: Path, name: str, row: str, remains: bool) -> None:
    if name != "starts.jsonl":
        # The others prove that the run wrote the file; if all are gone, a metric does.
        for other in () if remains else ("loads.jsonl", "lag0.jsonl"):
            (run / other).unlink()
        file = run / "metrics.jsonl"
        lines = read_objects(file)
        checked = {} if remains else {"response/without_logprob": 0}
        write_lines(file, [*lines[:-1], lines[-1] | checked])
    if remains:
        (run / name).unlink(missing_ok=True)
    elif name == "starts.jsonl":
        (run / name).write_text("")
    card = verified(run)
    assert row in {one.name for one in card.failed}
    assert not any("an earlier version" in note for note in card.notes)


def with_evaluation(run_dir: Path) -> Path:
    """Let the run evaluate a held-out file; return the file."""
    file = run_dir.parent / "held_out.jsonl"
    file.write_text('{"prompt": "1+1=", "answer": "2"}\n')
    config = load(run_dir / "config.yaml", [f"data.eval={file}", "eval={every: 4}"])
    (run_dir / "config.yaml").write_text(dump(config))
    (one,) = config.held_out_files
    tokenizer = tokenizer_of(config.model.path, config.data)
    identity = DataIdentity.of(read_set(config.data, one.file, tokenizer).prompts)
    starts = read_objects(run_dir / "starts.jsonl")
    held_out = {one.name: {"path": str(one.file.path), **identity.as_json()}}
    starts[0]["data"]["held_out"] = held_out
    write_lines(run_dir / "starts.jsonl", starts)
    return file


def test_held_out_files_are_compared_with_their_digests(run: Path) -> None:
    file = with_evaluation(run)
    assert not failing(run)
    file.write_text('{"prompt": "1+2=", "answer": "3"}\n')
    failed = failing(run)["data unchanged"]
    assert failed.details == (f"{file} differs from that of the last start",)
    assert failed.remedy.startswith("restore the held-out file, or")
    file.unlink()
    assert "cannot be read now" in value(run, "data unchanged")


def test_a_result_that_cannot_be_stored_is_shown(run: Path) -> None:
    # A folder of that name, because permissions do not apply to root.
    (run / "verify.json").mkdir()
    shown = mar("verify", run, folder=run)
    assert shown.returncode == 0, shown.stderr
    assert "30 checks: 30 passed" in shown.stdout
    assert "note: verify.json was not written: Is a directory" in shown.stdout
    other = mar("verify", run, "--json", run / "samples", folder=run)
    assert "30 checks: 30 passed" in other.stdout
    assert other.returncode == 2

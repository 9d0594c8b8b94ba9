"""`mar replay` of whole runs: every step is repeated with its own settings, to the last bit, and a
difference is named."""

from __future__ import annotations

import base64
import json
import math
import os
import shutil
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from megatron_async_rl.config.load import dump
from megatron_async_rl.config.problem import UserError
from megatron_async_rl.config.schema import Config, ReplayConfig
from megatron_async_rl.flow.batches import RecordedSteps
from megatron_async_rl.flow.starts import Start, read_starts
from megatron_async_rl.metrics.log import digests_of_steps, read_metrics
from megatron_async_rl.metrics.replay_record import ReplayRecord
from megatron_async_rl.metrics.weight_log import tensors_of_step
from megatron_async_rl.plan.machine import Gpu, Machine, this_machine
from megatron_async_rl.replay import repetition
from megatron_async_rl.replay.repetition import Comparison, compare
from megatron_async_rl.replay.replay_plan import stretches
from megatron_async_rl.samples.recorded import RecordedBatches
from tests.json_lines import read_objects, write_lines
from tests.loop.one_process import Crash, OneProcess
from tests.loop.replays import ASYNCHRONOUS, killed_and_resumed, repeated, replaying, run


@pytest.fixture(scope="module")
def loop(tmp_path_factory: pytest.TempPathFactory) -> Iterator[OneProcess]:
    with replaying(tmp_path_factory.mktemp("replays")) as process:
        yield process


@pytest.fixture(scope="module")
def resumed(loop: OneProcess) -> Path:
    return killed_and_resumed(loop)


def test_each_step_is_repeated_with_the_settings_of_its_start(resumed: Path) -> None:
    assert (resumed / "config.0.yaml").exists(), "the resume changed a setting"
    code, shown = repeated(resumed)
    assert code == 0
    assert shown.endswith("6 steps, identical bits\n")
    record = ReplayRecord.read(resumed / "replays" / "1")
    assert (record.parts, record.first_different) == (["part_1", "part_2"], None)
    assert [one.identical for one in record.steps] == [True] * 6
    parts = [digests_of_steps(resumed / "replays" / "1" / f"part_{n}") for n in (1, 2)]
    assert [list(part) for part in parts] == [[1, 2], [3, 4, 5, 6]]


def test_a_replay_starts_from_the_checkpoint_before_its_first_step(resumed: Path) -> None:
    code, shown = repeated(resumed, first=5)
    assert code == 0
    assert f"from {resumed}/checkpoint/step_00000004" in shown
    assert shown.endswith("2 steps, identical bits\n")
    code, shown = repeated(resumed, first=6)
    assert "note: no checkpoint of step 5 was kept" in shown
    assert shown.endswith("2 steps, identical bits\n")


def test_a_step_with_other_weights_is_named(resumed: Path) -> None:
    file = resumed / "metrics.jsonl"
    text = file.read_text()
    lines = read_objects(file)
    lines[3]["weights"] = "0" * 16
    try:
        write_lines(file, lines)
        code, shown = repeated(resumed)
        assert code == 1
        assert shown.endswith("step 4 is the first whose weights differ from the run's\n")
        # The bits of one tensor of the same step.
        weights = resumed / "weights.jsonl"
        bits = weights.read_text()
        write_lines(weights, _with_other_tensor(read_objects(weights), step=4, number=2))
        try:
            code, shown = repeated(resumed)
        finally:
            weights.write_text(bits)
        name = list(tensors_of_step(resumed, 4))[2]
        assert f"step 4 is the first whose weights differ from the run's: tensor {name} of" in shown
        for line in lines:
            line.pop("weights", None)
        write_lines(file, lines)
        code, shown = repeated(resumed)
        assert code == 1
        assert "6 steps have no digest in the run's metrics" in shown
        assert "identical" not in shown
    finally:
        file.write_text(text)


def _with_other_tensor(
    lines: list[dict[str, Any]], *, step: int, number: int
) -> list[dict[str, Any]]:
    (line,) = (one for one in lines if one.get("step") == step)
    bits = bytearray(base64.b64decode(line["tensors"]))
    bits[number] ^= 1
    line["tensors"] = base64.b64encode(bits).decode()
    return lines


def test_a_step_that_was_not_logged_before_a_crash_is_not_repeated(
    resumed: Path, tmp_path: Path
) -> None:
    """The log has a step's batch before metrics.jsonl has its line."""
    run_dir = tmp_path / "run"
    shutil.copytree(resumed, run_dir)
    metrics = run_dir / "metrics.jsonl"
    metrics.write_text("".join(metrics.read_text().splitlines(keepends=True)[:-1]))
    code, shown = repeated(run_dir, first=5)
    assert (code, shown.splitlines()[-1]) == (0, "1 step, identical bits")


def test_another_layout_has_a_tolerance_and_each_step_its_own_settings(resumed: Path) -> None:
    code, shown = repeated(resumed, "policy.tokens_per_micro_batch=64")
    assert code == 0
    assert "identical bits" in shown or "the tolerance is 0.001" in shown
    packed = ("policy.sequence=packed", "policy.prefix_sharing=always")
    code, shown = repeated(resumed, *packed, first=6)
    assert code == 0
    assert "the tolerance is 0.001" in shown, "no what-if analysis: samples and model are the same"


def test_a_replay_that_ends_early_compares_what_it_made_and_fails(
    resumed: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    launched = repetition.launch

    def stop_after_one_part(config: Config, *others: Any) -> int:
        launched(config, *others)
        return 130

    monkeypatch.setattr(repetition, "launch", stop_after_one_part)
    code, shown = repeated(resumed)
    assert code == 130
    assert "4 steps were not repeated\n2 steps, identical bits\n" in shown

    def fail(*_: Any) -> int:
        raise OSError("no space left")

    monkeypatch.setattr(repetition, "launch", fail)
    with pytest.raises(OSError, match="no space left"):
        repeated(resumed)
    newest = max((resumed / "replays").iterdir(), key=lambda path: int(path.name))
    record = ReplayRecord.read(newest)
    assert (record.steps, record.ended) == ([], True)


def test_a_damaged_file_of_the_run_is_named_before_a_step_or_next_to_the_result(
    resumed: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    run_dir = tmp_path / "run"
    shutil.copytree(resumed, run_dir)
    metrics, weights = run_dir / "metrics.jsonl", run_dir / "weights.jsonl"
    whole = metrics.read_text()
    lines = whole.splitlines(keepends=True)
    metrics.write_text("".join(["{damaged\n", *lines[1:]]))
    with monkeypatch.context() as patch:
        patch.setattr(repetition, "launch", lambda *_: pytest.fail("a step was repeated"))
        with pytest.raises(UserError, match=r"metrics\.jsonl:1"):
            repeated(run_dir, first=6)
    metrics.write_text(whole)
    rows = read_objects(metrics)
    write_lines(metrics, [*rows[:5], rows[5] | {"weights": "0" * 16}])
    weights.write_text("{damaged\n")
    code, shown = repeated(run_dir, first=6)
    assert (code, shown.splitlines()[-1]) == (
        1,
        "step 6 is the first whose weights differ from the run's; the tensors that differ are"
        f" unknown: {weights}:1 is damaged",
    )


def test_only_a_new_directory_takes_a_replay(resumed: Path, tmp_path: Path) -> None:
    for out in (resumed, resumed / "config.yaml"):
        with pytest.raises(UserError, match="is not an empty directory"):
            repeated(resumed, out=out)
    out = tmp_path / "own"
    assert repeated(resumed, first=5, out=out)[0] == 0
    assert (out / "metrics.jsonl").exists()


def test_a_replay_has_a_directory_that_no_other_replay_has(
    resumed: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    run_dir = tmp_path / "run"
    shutil.copytree(resumed, run_dir, ignore=shutil.ignore_patterns("replays"))
    with pytest.raises(UserError, match=rf"name a directory in it, such as {run_dir}/replays/1"):
        repeated(run_dir, out=run_dir / "replays")

    def machine() -> Machine:
        (run_dir / "replays" / "1").mkdir(parents=True)  # by a replay that began a moment later
        return this_machine()

    monkeypatch.setattr(repetition, "this_machine", machine)
    with pytest.raises(UserError, match=rf"another replay has just begun in {run_dir}/replays/1"):
        repeated(run_dir)


def test_steps_before_a_damaged_newest_segment_are_repeated(resumed: Path, tmp_path: Path) -> None:
    run_dir = tmp_path / "run"
    shutil.copytree(resumed, run_dir, ignore=shutil.ignore_patterns("replays"))
    files = sorted((run_dir / "samples").glob("outcomes-*"))
    _damage(files[-1])
    code, shown = repeated(run_dir)
    assert code == 0
    (note,) = (line for line in shown.splitlines() if "cannot be replayed" in line)
    assert f"to 6 cannot be replayed: {files[-1]} is damaged" in note
    last = RecordedBatches(run_dir).last_step
    assert 0 < last < 6
    assert shown.endswith(f"{last} steps, identical bits\n")
    message = rf"the last recorded step is {last}; steps {last + 1} to 6 cannot be replayed"
    with pytest.raises(UserError, match=message):
        repeated(run_dir, first=6)
    for file in files[:-1]:
        _damage(file)
    with pytest.raises(UserError, match=r"is damaged(.*\n)*.*restore it from a copy"):
        repeated(run_dir)


def _damage(file: Path) -> None:
    content = bytearray(file.read_bytes())
    for at in range(40, len(content), 40):
        content[at] ^= 1
    file.write_bytes(content)


def test_a_replay_starts_from_the_weights_that_it_needs_or_not_at_all(
    resumed: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    run_dir = tmp_path / "run"
    shutil.copytree(resumed, run_dir)
    launched = repetition.launch

    def launch_late(*arguments: Any) -> int:
        shutil.rmtree(run_dir / "checkpoint" / "step_00000004")  # by the run, which is active
        return launched(*arguments)

    monkeypatch.setattr(repetition, "launch", launch_late)
    with pytest.raises(UserError, match=r"weights before step 5 are needed"):
        repeated(run_dir, first=5)


def test_the_run_s_number_of_threads_is_used(
    resumed: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    found = []
    launched = repetition.launch

    def note(*arguments: Any) -> int:
        found.append(os.environ["OMP_NUM_THREADS"])
        return launched(*arguments)

    monkeypatch.setattr(repetition, "launch", note)
    monkeypatch.setenv("OMP_NUM_THREADS", "7")
    assert repeated(resumed, first=5)[0] == 0
    assert found == [str(read_starts(resumed)[0].threads)]
    assert os.environ["OMP_NUM_THREADS"] == "7"


def test_starts_with_other_arithmetic_are_repeated_apart(resumed: Path) -> None:
    first, *_ = read_starts(resumed)

    def parts(*starts: Start) -> list[tuple[int, int]]:
        return [(one.first, one.last) for one in stretches(resumed, list(starts), 1, 9)]

    again = first.model_copy(update={"step": 5, "time": 9.0})
    assert parts(first, again) == [(1, 9)]
    for change in ({"threads": 8}, {"device": "cuda"}, {"software": {}}, {"layout": {}}):
        assert parts(first, again.model_copy(update=change)) == [(1, 5), (6, 9)]
    assert parts(again) == [(1, 5), (6, 9)], "starts were not recorded before step 5"


def test_a_changed_setting_is_a_what_if_analysis(resumed: Path) -> None:
    code, shown = repeated(resumed, "policy.optimizer.lr=0.05", first=3)
    assert code == 0
    assert "step 3 is the first whose weights differ from the run's" in shown
    assert "ESS of the recorded samples, from then on" in shown
    assert "KL of the recorded samples, from then on" in shown


def test_a_what_if_analysis_records_its_distance_from_the_run_by_step(
    resumed: Path, tmp_path: Path
) -> None:
    _, shown = repeated(resumed, "policy.optimizer.lr=0.05", first=3, out=tmp_path / "own")
    record = ReplayRecord.read(tmp_path / "own")
    assert (record.run, record.changes) == (resumed, ["policy.optimizer.lr=0.05"])
    assert (record.first, record.last, record.first_different) == (3, 6, 3)
    assert record.parts == ["."]
    assert [one.step for one in record.steps] == [3, 4, 5, 6]
    assert [one.identical for one in record.steps] == [False] * 4
    of_run = {row["step"]: row for row in read_metrics(resumed)}
    here = {row["step"]: row for row in read_metrics(tmp_path / "own")}
    for one in record.steps:
        assert (one.ess, one.kl) == (here[one.step]["ratio/ess"], here[one.step]["ratio/kl_k2"])
        assert one.run_ess == of_run[one.step]["ratio/ess"]
        assert one.run_kl == of_run[one.step]["ratio/kl_k2"]
    # Step 3 itself begins with the run's weights.
    assert record.steps[0].kl == record.steps[0].run_kl
    assert record.steps[1].kl != record.steps[1].run_kl
    rows = [line.split() for line in shown.splitlines() if line.strip()[:1].isdigit()]
    assert [row[0] for row in rows] == ["4", "5", "6"], "the steps whose samples are off-policy"
    assert rows[0][1:] == [
        f"{record.steps[1].ess:.3g}",
        f"{record.steps[1].ess_share:.1%}",
        f"{record.steps[1].run_ess_share:.1%}",
        f"{record.steps[1].kl:.3g}",
        f"{record.steps[1].run_kl:.3g}",
    ]


@pytest.mark.parametrize(
    ("changes", "first", "message"),
    [
        (("rollout.engines=3",), None, r"rollout\.engines\n.*no effect on a replay"),
        ((), 9, r"--from\n.*last recorded step is 6"),
        (("policy.optimiser.lr=1",), None, r"policy\.optimiser"),
        (("lr=1",), None, r"lr .*\n.*is not a key"),
        (("kl_coef=1",), None, r"use `objective\.kl\.coef`"),
    ],
)
def test_a_request_that_cannot_be_met_is_refused(
    resumed: Path, changes: tuple[str, ...], first: int | None, message: str
) -> None:
    with pytest.raises(UserError, match=message):
        repeated(resumed, *changes, first=first)


def test_a_folder_without_a_run_or_without_a_log_is_refused(
    loop: OneProcess, tmp_path: Path
) -> None:
    with pytest.raises(UserError, match="is not a run"):
        repeated(tmp_path)
    (tmp_path / "config.yaml").write_text(dump(loop.config("not started")))
    with pytest.raises(UserError, match="no log of its samples"):
        repeated(tmp_path)


def test_a_run_on_several_machines_is_repeated_on_one_that_holds_its_ranks(
    resumed: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    run_dir = tmp_path / "run"
    shutil.copytree(resumed, run_dir)
    lines = [one.model_copy(update={"nodes": 2, "ranks": 4}) for one in read_starts(run_dir)]
    file = run_dir / "starts.jsonl"
    file.write_text("".join(one.model_dump_json() + "\n" for one in lines))
    code, shown = repeated(run_dir, first=5)
    assert code == 0
    assert "note: steps 5 to 6 were made on 2 machines; this one runs all ranks" in shown

    gpus = replace(this_machine(), gpus=(Gpu("H100", memory=80 * 2**30),) * 2)
    monkeypatch.setattr(repetition, "this_machine", lambda: gpus)
    layout = ("policy.device=cuda", "policy.parallel.ranks=4")
    message = r"4 ranks, which the run had on 2 machines(?s:.)*has 2(?s:.)*with 4 GPUs"
    with pytest.raises(UserError, match=message):
        repeated(run_dir, *layout, first=5)


def test_a_supervised_run_is_repeated_from_its_data(loop: OneProcess) -> None:
    given = ("rollout=null", "flow.group_size=1", "flow.async_ratio=0", "objective.loss=sft")
    settings = (*given, "objective.advantage=none", "policy.lora={rank: 4, dropout: 0.3}")
    config = loop.config("supervised", *ASYNCHRONOUS[1:], *settings)
    with pytest.raises(Crash):
        run(loop, config, crashes_at=("take_devices", 4))
    run_dir = run(loop, config)
    for first in (1, 4):
        code, shown = repeated(run_dir, first=first)
        assert (code, shown.splitlines()[-1]) == (
            0,
            "6 steps, identical bits" if first == 1 else "4 steps, identical bits",
        )


def test_a_loss_whose_terms_cancel_is_within_the_tolerance_of_another_layout(
    tmp_path: Path,
) -> None:
    def row(loss: float, norm: float) -> dict[str, Any]:
        return {"step": 1, "policy/loss": loss, "policy/grad_norm": norm}

    of_run = {1: row(-0.0012, 1.0)}
    (tmp_path / "metrics.jsonl").write_text(json.dumps(of_run[1]) + "\n")
    for loss, norm, expected in ((-0.0002, 1.0, (0.01, 0.0)), (1.0, 0.5, (1.0012, 0.5))):
        found = Comparison()
        compare(found, tmp_path, of_run, [row(loss, norm)], {})
        assert tuple(found.largest.values()) == pytest.approx(expected)


@pytest.mark.parametrize(
    ("loss", "of_run", "within"),
    [
        (1.0, 1.0, True),
        (math.nan, 1.0, False),
        (math.inf, 1.0, False),
        (-math.inf, math.inf, False),
        (math.nan, math.nan, True),
        (math.inf, math.inf, True),
        (None, 1.0, False),
        (1.0, None, False),
        (None, None, True),
    ],
)
def test_a_number_that_is_missing_or_not_finite_is_not_within_a_tolerance(
    tmp_path: Path, loss: float | None, of_run: float | None, within: bool
) -> None:
    def row(value: float | None) -> dict[str, Any]:
        return {"step": 1} | ({} if value is None else {"policy/loss": value})

    found = Comparison()
    compare(found, tmp_path, {1: row(of_run)}, [row(loss)], {})
    assert all(value == 0.0 for value in found.largest.values()) == within


def test_a_setting_that_changes_no_number_is_no_what_if_analysis(
    resumed: Path, tmp_path: Path
) -> None:
    run_dir = tmp_path / "run"
    shutil.copytree(resumed, run_dir)
    metrics = run_dir / "metrics.jsonl"
    rows = read_objects(metrics)
    write_lines(metrics, [*rows[:5], rows[5] | {"weights": "0" * 16}])
    code, shown = repeated(run_dir, "watchdog.timeout_s=900", first=6)
    assert "step 6 is the first whose weights differ" in shown
    assert code == 1


def test_what_is_lost_is_named_with_what_can_be_replayed(resumed: Path, tmp_path: Path) -> None:
    steps = RecordedSteps(ReplayConfig(run=resumed, first=7, last=7), tmp_path, streams=True)
    with pytest.raises(UserError, match=r"step 7\n.*no batch of step 7\n.*--steps"):
        steps.next_batch(6)
    steps.close()
    run_dir = tmp_path / "run"
    shutil.copytree(resumed, run_dir)
    for file in (run_dir / "samples").glob("samples-*"):
        _damage(file)
    with pytest.raises(UserError, match=r"is damaged(.*\n)*.*restore it from a copy"):
        repeated(run_dir)


def test_a_supervised_run_is_repeated_on_its_own_responses(
    loop: OneProcess, tmp_path: Path
) -> None:
    config = loop.config(
        "not started", "rollout=null", "flow.group_size=1", "flow.async_ratio=0",
        "objective={loss: sft, advantage: none}",
    )  # fmt: skip
    (tmp_path / "config.yaml").write_text(dump(config))
    for change in ("rollout.sampling.temperature=0.5", "data.train=other.jsonl"):
        key = change.partition("=")[0]
        with pytest.raises(UserError, match=rf"{key}\n.*the run's own responses"):
            repeated(tmp_path, change)

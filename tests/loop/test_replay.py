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
from megatron_async_rl.plan.machine import Gpu, this_machine
from megatron_async_rl.replay import repetition
from megatron_async_rl.replay.repetition import Comparison, compare
from megatron_async_rl.replay.replay_plan import stretches
from tests.loop.one_process import Crash, Engines, LoopEngine, OneProcess, varied
from tests.loop.replays import ASYNCHRONOUS, repeated, replaying, run


@pytest.fixture(scope="module")
def loop(tmp_path_factory: pytest.TempPathFactory) -> Iterator[OneProcess]:
    with replaying(tmp_path_factory.mktemp("replays")) as process:
        yield process


@pytest.fixture(scope="module")
def resumed(loop: OneProcess) -> Path:
    """A run that was killed in step 4 and resumed with another learning rate from step 2."""
    config = loop.config("resumed", *ASYNCHRONOUS)
    with pytest.raises(Crash):
        run(loop, config, crashes_at=("after await_batch", 4))
    changed = config.policy.optimizer.model_copy(update={"lr": 0.02})
    policy = config.policy.model_copy(update={"optimizer": changed})
    return run(loop, config.model_copy(update={"policy": policy}))


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
    lines = [json.loads(line) for line in text.splitlines()]
    lines[3]["weights"] = "0" * 16
    try:
        file.write_text("".join(json.dumps(line) + "\n" for line in lines))
        code, shown = repeated(resumed)
        assert code == 1
        assert shown.endswith("step 4 is the first whose weights differ from the run's\n")
        # The bits of one tensor of the same step.
        weights = resumed / "weights.jsonl"
        bits = weights.read_text()
        weights.write_text(_with_other_tensor(bits, step=4, number=2))
        try:
            code, shown = repeated(resumed)
        finally:
            weights.write_text(bits)
        name = list(tensors_of_step(resumed, 4))[2]
        assert f"step 4 is the first whose weights differ from the run's: tensor {name} of" in shown
        for line in lines:
            line.pop("weights", None)
        file.write_text("".join(json.dumps(line) + "\n" for line in lines))
        code, shown = repeated(resumed)
        assert code == 1
        assert "6 steps have no digest in the run's metrics" in shown
        assert "identical" not in shown
    finally:
        file.write_text(text)


def _with_other_tensor(text: str, *, step: int, number: int) -> str:
    lines = [json.loads(line) for line in text.splitlines()]
    (line,) = (one for one in lines if one.get("step") == step)
    bits = bytearray(base64.b64decode(line["tensors"]))
    bits[number] ^= 1
    line["tensors"] = base64.b64encode(bits).decode()
    return "".join(json.dumps(one) + "\n" for one in lines)


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
    (digest,) = (json.loads(line)["weights"] for line in lines[5:])
    metrics.write_text(whole.replace(digest, "0" * 16))
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


@pytest.fixture(scope="module")
def explained(resumed: Path) -> tuple[Path, str]:
    """Directory and output of a replay that explains step 4 from the checkpoint of step 2."""
    out = resumed.parent / "explained"
    code, shown = repeated(resumed, explained=4, out=out)
    assert code == 0
    return out, shown


def test_an_explained_step_keeps_its_bits_and_its_samples_add_up(
    resumed: Path, explained: tuple[Path, str]
) -> None:
    out, shown = explained
    assert "step 3 was kept, so the replay begins at step 3\n2 steps, identical bits\n" in shown
    content = json.loads((out / "explanation.json").read_text())
    (update,) = content["updates"]
    (row,) = [row for row in read_metrics(resumed) if row["step"] == content["step"] == 4]
    assert update["norm"] == pytest.approx(row["policy/grad_norm"], rel=1e-5)
    assert update["loss"] == row["policy/loss"]
    assert sum(one["share"] for one in update["parameters"]) == pytest.approx(1.0, abs=1e-2)
    assert update["sum_of_shares"] == pytest.approx(1.0, rel=1e-5)
    samples, groups = update["samples"], update["groups"]
    assert len(samples) == 2 * len(groups) == 8
    for of_all in (samples, groups):
        assert sum(one["share"] for one in of_all) == pytest.approx(1.0, rel=1e-5)
        assert sum(one["norm_share"] for one in of_all) == pytest.approx(1.0)
        norms = [one["norm"] for one in of_all]
        assert norms == sorted(norms, reverse=True)
    for group in groups:
        members = [one for one in samples if one["group"] == group["group"]]
        rewards = [one["reward"] for one in members]
        assert sum(one["share"] for one in members) == pytest.approx(group["share"], abs=1e-6)
        assert group["norm"] <= sum(one["norm"] for one in members) * (1 + 1e-6)
        # Equal rewards have no advantage, so these samples make no gradient.
        assert (len(set(rewards)) == 1) == (group["norm"] == 0.0)


def test_an_explained_token_has_the_derivative_of_the_loss_by_its_log_prob(
    explained: tuple[Path, str],
) -> None:
    out, shown = explained
    (update,) = json.loads((out / "explanation.json").read_text())["updates"]
    tokens = update["tokens"]
    assert tokens
    for token in tokens:
        ids = update["texts"][token["sample"]]
        assert token["token_id"] == ids["response_ids"][token["position"]]
        # A surrogate loss over 8 samples of 2 tokens, without the tokens that the clip leaves out.
        ratio = math.exp(token["log_ratio"])
        assert token["derivative"] == pytest.approx(-token["advantage"] * ratio / 16, rel=1e-4)
        # The model is almost uniform: |d logp / d logits| is close to 1.
        assert 0.8 < token["size"] / abs(token["derivative"]) < 1.0
        assert ids["prompt"] == "5 + 5 =" or ids["prompt"].endswith("=")
    sizes = [token["size"] for token in tokens]
    assert sizes == sorted(sizes, reverse=True)
    assert f"largest shares of its square: {update['parameters'][0]['name']}" in shown
    assert f"all samples and more tokens: {out / 'explanation.json'}" in shown


def test_an_explanation_of_each_optimizer_step_leaves_dropout_as_it_was(loop: OneProcess) -> None:
    """The second minibatch's dropout follows the explanation of the first."""
    config = loop.config(
        "dropout",
        "run.steps=2",
        "flow.async_ratio=0",
        "checkpoint.every=1",
        "objective.minibatches=2",
        "policy.lora={rank: 2, alpha: 4, dropout: 0.5}",
    )
    run_dir = run(loop, config)
    code, shown = repeated(run_dir, explained=2)
    assert (code, shown.splitlines()[1]) == (0, "1 step, identical bits")
    content = json.loads((run_dir / "replays" / "1" / "explanation.json").read_text())
    assert len(content["updates"]) == 2
    assert "gradient of step 2, optimizer step 2, before the controls:" in shown


def test_a_step_on_given_responses_is_explained(loop: OneProcess, tmp_path: Path) -> None:
    data = tmp_path / "sft.jsonl"
    rows = [{"prompt": f"{n} + {n} =", "response": str(2 * n)} for n in range(8)]
    data.write_text("".join(json.dumps(row) + "\n" for row in rows))
    config = loop.config(
        "given",
        "run.steps=1",
        "rollout=null",
        "eval=null",
        "flow={prompts_per_step: 4, group_size: 1, async_ratio: 0}",
        f"data={{train: {data}}}",
        "objective={loss: sft, advantage: none}",
    )
    run_dir = run(loop, config)
    code, shown = repeated(run_dir, explained=1)
    assert code == 0
    assert "1 step, identical bits" in shown
    content = json.loads((run_dir / "replays" / "1" / "explanation.json").read_text())
    (update,) = content["updates"]
    assert update["sum_of_shares"] == pytest.approx(1.0, rel=1e-5)
    # The loss is the mean of -log p.
    tokens = sum(one["length"] for one in update["samples"])
    assert {round(-1 / one["derivative"]) for one in update["tokens"]} == {tokens}


def test_a_step_without_a_gradient_has_no_explanation(loop: OneProcess, tmp_path: Path) -> None:
    def prepare(engine: LoopEngine) -> None:
        engine.alter = lambda sample: replace(varied(sample), loss_mask=sample.loss_mask * 0)

    config = loop.config("nothing to learn", "flow.async_ratio=0", "run.steps=1")
    run_dir = run(loop, config, engines=Engines(prepare=prepare))
    code, shown = repeated(run_dir, explained=1, out=tmp_path / "own")
    assert code == 0
    assert "step 1 has no gradient to explain" in shown


def test_only_a_recorded_step_is_explained(resumed: Path, tmp_path: Path) -> None:
    with pytest.raises(UserError, match=r"--explain\n.*last recorded step is 6"):
        repeated(resumed, explained=7)
    with pytest.raises(UserError, match=r"--explain\n(.*\n)*.*leave out --from"):
        repeated(resumed, first=2, explained=4)
    run_dir = tmp_path / "run"
    shutil.copytree(resumed, run_dir)
    shutil.rmtree(run_dir / "samples")
    with pytest.raises(UserError, match="no log of its samples"):
        repeated(run_dir, explained=4)


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
    digest = digests_of_steps(run_dir)[6]
    metrics.write_text(metrics.read_text().replace(digest, "0" * 16))
    code, shown = repeated(run_dir, "watchdog.timeout_s=900", first=6)
    assert "step 6 is the first whose weights differ" in shown
    assert code == 1


def test_what_is_lost_is_named_with_what_can_be_replayed(resumed: Path, tmp_path: Path) -> None:
    steps = RecordedSteps(ReplayConfig(run=resumed, first=7, last=7), tmp_path)
    with pytest.raises(UserError, match=r"step 7\n.*no batch of step 7\n.*--steps"):
        steps.next_batch(6)
    steps.close()
    run_dir = tmp_path / "run"
    shutil.copytree(resumed, run_dir)
    for file in (run_dir / "samples").glob("samples-*"):
        damaged = bytearray(file.read_bytes())
        for at in range(40, len(damaged), 40):
            damaged[at] ^= 1
        file.write_bytes(damaged)
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

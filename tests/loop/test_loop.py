"""Statements about whole runs: the trained data, the order of events, and the state after an
error."""

from __future__ import annotations

import json
import threading
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import example, given, settings
from hypothesis import strategies as st
from safetensors.numpy import load_file

from megatron_async_rl.flow import rank0
from megatron_async_rl.flow.buffer import read_buffer
from megatron_async_rl.flow.errors import RewardFailed, WeightsChanged
from megatron_async_rl.flow.rank0 import Rank0
from megatron_async_rl.metrics.timeline import read_timeline
from megatron_async_rl.policy.anomaly import AnomalyReport
from megatron_async_rl.policy.policy import Policy
from megatron_async_rl.samples.columns import NUMERIC
from megatron_async_rl.samples.recorded import RecordedBatches
from megatron_async_rl.samples.rows import TrainBatch
from megatron_async_rl.samples.segments import load, read_entries
from megatron_async_rl.samples.types import Sample
from megatron_async_rl.watchdog.events import Status, read_status
from megatron_async_rl.watchdog.watch import STOP
from megatron_async_rl.weights.version_digest import version_digest
from tests.loop.one_process import Crash, EngineDied, Engines, LoopEngine, OneProcess, varied
from tests.sample_history import account
from tests.thorough import examples

STEPS = 3
SYNCHRONOUS = ("flow.async_ratio=0",)
SUPERVISED = (
    *("rollout=null", "flow.group_size=1", "flow.async_ratio=0"),
    *("objective.loss=sft", "objective.advantage=none"),
)
COLOCATED = (*SYNCHRONOUS, "rollout.placement=colocated")
EVERY_STEP = ("checkpoint.every=1",)


@pytest.fixture(scope="module")
def loop(tmp_path_factory: pytest.TempPathFactory) -> Iterator[OneProcess]:
    with pytest.MonkeyPatch.context() as patch:
        yield OneProcess(tmp_path_factory.mktemp("loop"), patch)


@pytest.fixture(scope="module")
def weights(loop: OneProcess) -> dict[str, np.ndarray]:
    """Return the final weights of a synchronous run without disturbances."""
    return weights_of(loop.run(loop.config("undisturbed", *SYNCHRONOUS), Engines()))


def weights_of(run_dir: Path) -> dict[str, np.ndarray]:
    return {
        name: tensor
        for file in sorted((run_dir / "hf").glob("*.safetensors"))
        for name, tensor in load_file(file).items()
    }


def lines(file: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in file.read_text().splitlines()]


def require_whole(loop: OneProcess, run_dir: Path, steps: int = STEPS) -> None:
    """Check that every step trained its four groups, each group once, that every other admitted
    group still waits, and that the status reports the end."""
    history = account(run_dir, buffer=loop.pending)
    trained = list(history.consumed.values())
    assert sorted(trained) == sorted(list(range(1, steps + 1)) * 4)
    assert [line["step"] for line in lines(run_dir / "metrics.jsonl")] == [*range(1, steps + 1)]
    status = read_status(run_dir)
    assert status is not None
    assert (status.phase, status.step, status.error) == ("finished", steps, None)


def require_same(run_dir: Path, weights: dict[str, np.ndarray]) -> None:
    found = weights_of(run_dir)
    assert found.keys() == weights.keys()
    for name, tensor in weights.items():
        np.testing.assert_array_equal(found[name], tensor, err_msg=name)


def evaluated(loop: OneProcess) -> tuple[str, ...]:
    return (
        f"data.eval={loop.root / 'held_out.jsonl'}",
        "eval.every=1",
        "eval.samples_per_prompt=2",
    )


@pytest.mark.parametrize("ratio", [0, 1, 2])
def test_every_group_trains_once(loop: OneProcess, ratio: int) -> None:
    run_dir = loop.run(loop.config(f"whole {ratio}", f"flow.async_ratio={ratio}"), Engines())
    require_whole(loop, run_dir)
    rows = lines(run_dir / "metrics.jsonl")
    assert all(len(row["lag/histogram"]) == ratio + 1 and row["lag/max"] <= ratio for row in rows)


def test_two_synchronous_runs_end_with_the_same_bits(
    loop: OneProcess, weights: dict[str, np.ndarray]
) -> None:
    require_same(loop.run(loop.config("again", *SYNCHRONOUS), Engines()), weights)


def test_a_run_without_staleness_does_not_depend_on_the_placement(
    loop: OneProcess, weights: dict[str, np.ndarray]
) -> None:
    require_same(loop.run(loop.config("placed", *COLOCATED), Engines()), weights)


def test_colocated_engines_sleep_while_the_policy_trains(loop: OneProcess) -> None:
    engines = Engines()
    loop.run(loop.config("colocated", *COLOCATED), engines)
    update = ["sleep", "wake weights", "update {}", "wake cache"]
    expected = ["update 0", *(one.format(v) for v in (1, 2, 3) for one in update), "stop"]
    assert [engine.calls for engine in engines.all] == [expected] * 2


@pytest.mark.parametrize("own_engines", [0, 1])
def test_each_version_is_evaluated_once_with_its_own_weights(
    loop: OneProcess, own_engines: int
) -> None:
    engines = Engines()
    overrides = (*evaluated(loop), f"eval.engines={own_engines}")
    run_dir = loop.run(loop.config(f"evaluated {own_engines}", *overrides), engines)
    require_whole(loop, run_dir)
    assert [line["version"] for line in lines(run_dir / "eval.jsonl")] == [0, 1, 2, 3]
    asked = [
        (version, request.id)
        for engine in engines.all
        for version, request in zip(engine.versions, engine.asked, strict=True)
        if request.sampling is not None
    ]
    assert len(asked) == len(set(asked)) == 4 * 3 * 2
    assert {version for version, _ in asked} == {0, 1, 2, 3}


def test_evaluation_is_not_counted_as_training(
    loop: OneProcess, monkeypatch: pytest.MonkeyPatch
) -> None:
    phases: list[tuple[str, str, int]] = []
    write = rank0.write_status

    def written(run_dir: Path, status: Status) -> None:
        if not phases or phases[-1][:2] != (status.phase, status.detail):
            phases.append((status.phase, status.detail, status.step))
        write(run_dir, status)

    monkeypatch.setattr(rank0, "write_status", written)
    config = loop.config("evaluated and counted", *SYNCHRONOUS, *evaluated(loop), "eval.engines=1")
    rows = lines(loop.run(config, Engines()) / "metrics.jsonl")
    assert rows[-1]["flow/admitted"] == rows[-1]["flow/consumed"] == STEPS * 4
    assert all(row["flow/dropped_late"] == row["flow/dropped_equal"] == 0 for row in rows)
    exporting = ("exporting", "Hugging Face checkpoint", STEPS)
    assert phases[-2:] == [exporting, ("finished", "", STEPS)]


@pytest.mark.parametrize("settings", [SYNCHRONOUS, COLOCATED])
def test_the_wait_for_a_batch_ends_before_its_distribution(
    loop: OneProcess, settings: tuple[str, ...]
) -> None:
    run_dir = loop.run(loop.config(f"states {len(settings)}", *settings), Engines())
    spans = read_timeline(run_dir)["rank 0"]
    states = [f"{span.state} {span.waiting_for}".strip() for span in spans]
    own = {"waiting batch", "distributing", "training"}
    assert [state for state in states if state in own] == [
        *("waiting batch", "distributing", "training") * STEPS
    ]
    assert all(row["time/distribute_s"] > 0.0 for row in lines(run_dir / "metrics.jsonl"))


CRASHES = st.tuples(
    st.sampled_from(
        (
            "await_batch",
            "after await_batch",
            "take_devices",
            "give_devices",
            "publish",
            "log",
            "state",
        )
    ),
    st.integers(1, STEPS),
)
"""Call during which a run crashes, and the number of the call. The properties below run the
explicit examples, after which state differs, and draw more: the same four in each gate
(`derandomize` in tests/conftest.py), and up to 20 in `make test-all`."""


@example(("await_batch", 1), SYNCHRONOUS)
@example(("after await_batch", 2), SYNCHRONOUS)
@example(("give_devices", 2), COLOCATED)
@example(("log", 3), SYNCHRONOUS)
@example(("state", 3), COLOCATED)
@settings(max_examples=examples(20, 4))
@given(CRASHES, st.sampled_from([SYNCHRONOUS, COLOCATED]))
def test_a_resumed_run_ends_with_the_bits_of_one_that_never_stopped(
    loop: OneProcess,
    weights: dict[str, np.ndarray],
    crash: tuple[str, int],
    overrides: tuple[str, ...],
) -> None:
    name = f"crashed {crash} {overrides[-1]}"
    config = loop.config(name, *overrides, *EVERY_STEP)
    with pytest.raises(Crash):
        loop.run(config, Engines(), crashes_at=crash)
    status = read_status(config.run.dir)
    assert status is not None
    assert status.phase == "failed"
    require_whole(loop, loop.run(config, Engines()))
    require_same(config.run.dir, weights)


@example(("after await_batch", 2))
@example(("publish", 2))
@example(("log", 3))
@settings(max_examples=examples(10, 4))
@given(CRASHES)
def test_a_resumed_asynchronous_run_loses_nothing(loop: OneProcess, crash: tuple[str, int]) -> None:
    def prepare(engine: LoopEngine) -> None:
        engine.holds_back = True

    # More steps than are admitted ahead.
    overrides = (*EVERY_STEP, "flow.async_ratio=2", f"run.steps={2 * STEPS}")
    config = loop.config(f"asynchronous {crash}", *overrides)
    with pytest.raises(Crash):
        loop.run(config, Engines(prepare=prepare), crashes_at=crash)
    resumed = Engines(prepare=prepare)
    require_whole(loop, loop.run(config, resumed), 2 * STEPS)
    # The crash at the end of a step precedes that step's checkpoint.
    done = crash[1] - 1
    if crash[0] != "publish":
        assert resumed.all[0].updates[0] == done, "the run goes on where it was"


def test_responses_that_wait_for_their_exact_lag_train_after_a_resume(loop: OneProcess) -> None:
    """The engines of the second start give other responses."""

    def prepare(engine: LoopEngine) -> None:
        engine.alter = lambda sample: replace(varied(sample), reward=7.0)

    lag, stopped = 2, STEPS
    steps = stopped + lag + 2  # the last is sampled by the second start
    overrides = (
        *EVERY_STEP,
        f"flow.async_ratio={lag}",
        f"flow.selection={{name: exact_lag, lag: {lag}}}",
        f"run.steps={steps}",
    )
    config = loop.config("exact lag", *overrides)
    with pytest.raises(Crash):
        # After the checkpoint of the step before.
        loop.run(config, Engines(), crashes_at=("after await_batch", stopped + 1))
    checkpoint = config.run.dir / "checkpoint" / f"step_{stopped:08d}"
    waited = {
        sample.id: sample
        for group in read_buffer((checkpoint / "buffer.arrow").read_bytes()).groups
        for sample in group.samples
    }
    require_whole(loop, loop.run(config, Engines(prepare=prepare)), steps)

    trained: dict[int, list[Sample]] = {}
    entries = [entry for entry in read_entries(config.run.dir) if entry.state == "trained"]
    for entry, sample in load(config.run.dir, entries):
        trained.setdefault(*entry.steps, []).append(sample)
    for step in range(stopped + 1, stopped + lag + 1):
        assert len(trained[step]) == 8
        for sample in trained[step]:
            assert sample.reward == waited[sample.id].reward != 7.0
            assert sample.response_ids.tolist() == waited[sample.id].response_ids.tolist()
            assert set(sample.versions.tolist()) == {step - 1 - lag}
    assert {sample.reward for sample in trained[steps]} == {7.0}
    rows = lines(config.run.dir / "metrics.jsonl")
    assert [np.flatnonzero(row["lag/histogram"]).tolist() for row in rows] == [
        [min(step, lag)] for step in range(steps)
    ]


def test_each_line_of_metrics_has_the_digest_of_the_weights_that_engines_got(
    loop: OneProcess,
) -> None:
    engines = Engines()
    run_dir = loop.run(loop.config("digests", *SYNCHRONOUS), engines)
    digests = [line["weights"] for line in lines(run_dir / "metrics.jsonl")]
    sent = engines.all[0].digests
    assert digests == [version_digest(sent[step]) for step in range(1, STEPS + 1)]
    assert len(set(digests)) == STEPS


def test_a_resume_that_loads_other_weights_than_were_saved_ends_before_engines_get_them(
    loop: OneProcess, monkeypatch: pytest.MonkeyPatch
) -> None:
    config = loop.config("changed weights", *SYNCHRONOUS, *EVERY_STEP)
    with pytest.raises(Crash):
        loop.run(config, Engines(), crashes_at=("after await_batch", 3))
    load_checkpoint = Policy.load

    def flip_one_bit(self: Policy, directory: Path) -> dict[str, Any] | None:
        loaded = load_checkpoint(self, directory)
        weight = next(self.model.chunks[0].parameters()).data
        weight.view(torch.int32).view(-1)[:1].bitwise_xor_(1)
        return loaded

    with monkeypatch.context() as patch:
        patch.setattr(Policy, "load", flip_one_bit)
        engines = Engines()
        with pytest.raises(WeightsChanged, match="weights of step 2 had the digest"):
            loop.run(config, engines)
        assert not engines.all[0].updates
    require_whole(loop, loop.run(config, Engines()))


@pytest.mark.parametrize(
    "overrides",
    [
        SYNCHRONOUS,
        ("flow.async_ratio=2",),
        (
            "flow.selection={name: replay, recent: 0.3}",
            "objective={loss: trajectory_balance, advantage: none, reference: {}}",
            "run.steps=8",
        ),
    ],
)
def test_the_log_has_every_batch_as_it_was_handed_out(
    loop: OneProcess, monkeypatch: pytest.MonkeyPatch, overrides: tuple[str, ...]
) -> None:
    handed_out: dict[int, TrainBatch] = {}
    next_batch = Rank0.next_batch

    def kept(self: Rank0) -> TrainBatch | None:
        batch = next_batch(self)
        if batch is not None:
            handed_out[batch.version + 1] = batch
        return batch

    monkeypatch.setattr(Rank0, "next_batch", kept)
    config = loop.config(f"recorded {overrides[0]}", *overrides, *EVERY_STEP)
    with pytest.raises(Crash):
        loop.run(config, Engines(), crashes_at=("log", 3))
    run_dir = loop.run(config, Engines())
    recorded = RecordedBatches(run_dir)
    assert recorded.last_step == max(handed_out) == config.run.steps
    for step, batch in handed_out.items():
        found = recorded.batch(step)
        assert found.version == batch.version
        for name in NUMERIC.names:
            if name != "id":  # a replayed response has the id of its batch
                assert found.samples[name].equals(batch.samples[name]), (step, name)


@pytest.mark.parametrize("first", [1, 3])
def test_a_replay_of_the_recorded_batches_has_the_same_weights(
    loop: OneProcess, first: int
) -> None:
    asynchronous = ("flow.async_ratio=2", "run.steps=5", "checkpoint.keep=9", *EVERY_STEP)
    config = loop.config(f"replayed {first}", *asynchronous)
    with pytest.raises(Crash):
        loop.run(config, Engines(), crashes_at=("after await_batch", 4))
    run_dir = loop.run(config, Engines())
    repeated = {"run": run_dir, "first": first, "last": 5}
    if first > 1:
        repeated["checkpoint"] = run_dir / "checkpoint" / f"step_{first - 1:08d}"
    again = loop.config(
        f"replay {first}",
        *asynchronous,
        "checkpoint.every=0",
        f"run.replay={json.dumps(repeated, default=str)}",
    )
    engines = Engines()
    replay_dir = loop.run(again, engines)
    assert not engines.all
    found, expected = lines(replay_dir / "metrics.jsonl"), lines(run_dir / "metrics.jsonl")
    assert [line["step"] for line in found] == [*range(first, 6)]
    for line, of_run in zip(found, expected[first - 1 :], strict=True):
        assert line["weights"] == of_run["weights"]
        assert line["policy/loss"] == of_run["policy/loss"]
    assert not (replay_dir / "checkpoint").exists()
    assert not (replay_dir / "hf").exists()


def test_replay_trains_on_stored_responses_of_any_age(loop: OneProcess) -> None:
    config = loop.config(
        "replay",
        "flow.selection={name: replay, recent: 0.3}",
        "objective={loss: trajectory_balance, advantage: none, reference: {}}",
        "run.steps=8",
    )
    rows = lines(loop.run(config, Engines()) / "metrics.jsonl")
    assert rows[-1]["flow/replayed"] > 0
    assert max(row["lag/start_max"] for row in rows) > 1, (
        "older than the law lets anything enter the store"
    )
    assert all(row["flow/consumed"] == 4 * row["step"] for row in rows)


LOSSES = st.one_of(
    st.tuples(st.just("submit"), st.integers(1, 4)),
    st.tuples(st.just("update"), st.integers(1, 6)),
    st.tuples(st.just("evaluate"), st.integers(1, 4)),
    st.tuples(st.sampled_from(("sleep", "wake weights", "wake cache")), st.integers(1, 6)),
)


@example(("submit", 2))
@example(("update", 3))
@example(("evaluate", 2))
@example(("sleep", 2))
@example(("wake weights", 4))
@example(("wake cache", 3))
@settings(max_examples=examples(20, 4))
@given(LOSSES)
def test_an_engine_lost_in_any_phase_changes_no_weight(
    loop: OneProcess, weights: dict[str, np.ndarray], loss: tuple[str, int]
) -> None:
    engines = Engines(fails_at=loss)
    config = loop.config(f"lost {loss}", *COLOCATED, *evaluated(loop))
    require_whole(loop, loop.run(config, engines))
    require_same(config.run.dir, weights)
    assert engines.calls[loss[0]] >= loss[1], "the loss happened"
    assert len(engines.all) == 3, "one engine was started again"


def test_samples_whose_reward_fails_cost_nothing_but_themselves(loop: OneProcess) -> None:
    def prepare(engine: LoopEngine) -> None:
        engine.reward = lambda request: None if request.id in ("2-0", "6-0", "6-1") else 1.0

    run_dir = loop.run(loop.config("failing reward", *SYNCHRONOUS), Engines(prepare=prepare))
    require_whole(loop, run_dir)
    assert [line["reward/errors"] for line in lines(run_dir / "metrics.jsonl")] == [1, 2, 0]


def test_a_reward_that_must_not_fail_ends_the_run(loop: OneProcess) -> None:
    def prepare(engine: LoopEngine) -> None:
        engine.reward = lambda request: None if request.group == 5 else 1.0

    config = loop.config("stopping reward", *SYNCHRONOUS, "rollout.reward.on_error=stop")
    with pytest.raises(RewardFailed, match="no idea"):
        loop.run(config, Engines(prepare=prepare))
    status = read_status(config.run.dir)
    assert status is not None
    assert (status.phase, status.step) == ("failed", 1)
    assert "no idea" in str(status.error)


def test_a_failure_that_cannot_be_reported_is_still_the_error_of_the_run(
    loop: OneProcess, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def full(run_dir: Path, status: Status) -> None:
        if status.phase == "failed":
            raise OSError(28, "No space left on device")

    monkeypatch.setattr(rank0, "write_status", full)
    config = loop.config("unreported", *SYNCHRONOUS, "rollout.reward.on_error=stop")
    with pytest.raises(RewardFailed, match="no idea"):
        loop.run(config, Engines(prepare=no_reward))
    assert "OSError: [Errno 28] No space left on device" in capsys.readouterr().err


def no_reward(engine: LoopEngine) -> None:
    engine.reward = lambda request: None


def test_engines_that_do_not_start_end_the_run_and_its_controller(loop: OneProcess) -> None:
    def prepare(engine: LoopEngine) -> None:
        raise EngineDied("it has no device")

    config = loop.config("no engines")
    with pytest.raises(EngineDied, match="it has no device"):
        loop.run(config, Engines(prepare=prepare))
    assert "controller" not in [thread.name for thread in threading.enumerate()]
    status = read_status(config.run.dir)
    assert status is not None
    assert (status.phase, status.step) == ("failed", 0)


@pytest.mark.parametrize("settings", [SYNCHRONOUS, SUPERVISED])
def test_a_run_that_is_told_to_stop_saves_and_continues_later(
    loop: OneProcess, settings: tuple[str, ...]
) -> None:
    config = loop.config("stopped", *settings)
    config.run.dir.mkdir()
    (config.run.dir / STOP).touch()
    loop.run(config, Engines())
    status = read_status(config.run.dir)
    assert status is not None
    assert (status.phase, status.step, status.checkpoint) == ("stopped", 0, "step_00000000")
    assert not (config.run.dir / "hf").exists()
    (config.run.dir / STOP).unlink()
    loop.run(config, Engines())
    assert [line["step"] for line in lines(config.run.dir / "metrics.jsonl")] == [1, 2, 3]


def test_a_step_that_is_not_finite_is_skipped_and_traced(loop: OneProcess) -> None:
    def spoiled(sample: Sample) -> Sample:
        found = varied(sample)
        if sample.id.startswith("5-"):
            return replace(found, behavior_logprobs=np.full(2, np.nan, np.float32))
        return found

    def prepare(engine: LoopEngine) -> None:
        engine.alter = spoiled

    engines = Engines(prepare=prepare)
    run_dir = loop.run(loop.config("not finite", *SYNCHRONOUS), engines)
    require_whole(loop, run_dir)
    assert [line["policy/nonfinite"] for line in lines(run_dir / "metrics.jsonl")] == [0, 1, 1]
    (anomaly,) = lines(run_dir / "anomalies.jsonl")
    assert anomaly["step"] == 2
    assert [sample["id"] for sample in anomaly["samples"]] == ["5-0", "5-1"]
    digests = engines.all[0].digests
    assert digests[0] != digests[1] == digests[2] != digests[3], "step 2 was not taken"


def test_an_anomalous_gradient_is_traced_and_trained_on_unchanged(
    loop: OneProcess, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Step 6 has a group with rewards that differ 10,000 times as much as others."""
    squares: list[dict[str, float]] = []
    made: dict[str, Sample] = {}
    measure = AnomalyReport._squares_of_parameters

    def spiked(sample: Sample) -> Sample:
        made[sample.id] = varied(sample)
        if sample.id.startswith("22-"):
            made[sample.id] = replace(made[sample.id], reward=1e4 * (sample.id == "22-0"))
        return made[sample.id]

    def prepare(engine: LoopEngine) -> None:
        engine.alter = spiked

    def run(name: str) -> Path:
        settings = ("run.steps=6", "objective.advantage=rloo", "policy.optimizer.lr=1e-4")
        return loop.run(loop.config(name, *SYNCHRONOUS, *settings), Engines(prepare=prepare))

    monkeypatch.setattr(
        AnomalyReport,
        "_squares_of_parameters",
        lambda self, gradients: squares.append(measure(self, gradients)) or squares[-1],
    )
    run_dir = run("anomalous")
    require_whole(loop, run_dir, steps=6)
    norms = [line["policy/grad_norm"] for line in lines(run_dir / "metrics.jsonl")]
    (anomaly,) = lines(run_dir / "anomalies.jsonl")
    ((sample, *others),) = (anomaly["samples"],)
    assert not others
    name = sample["id"]
    assert name in ("22-0", "22-1"), "their advantages differ by their sign alone"
    assert sample == {
        "id": name,
        "reward": made[name].reward,
        "length": 2,
        "prompt_ids": list(made[name].prompt.token_ids),
        "response_ids": made[name].response_ids.tolist(),
        "loss_mask": [1, 1],
        "segment_starts": None,
        "behavior_logprobs": made[name].behavior_logprobs.tolist(),
        "versions": [5, 5],
    }
    assert (anomaly["step"], anomaly["norm"]) == (6, norms[-1])
    assert anomaly["median"] == sorted(norms[:5])[2]
    (of_parameters,) = squares
    total = sum(of_parameters.values())
    assert total == pytest.approx(norms[-1] ** 2)
    assert of_parameters[anomaly["parameter"]] == max(of_parameters.values())
    assert anomaly["share"] == max(of_parameters.values()) / total

    monkeypatch.setattr(AnomalyReport, "_culprits", lambda *_: [])
    require_same(run("not traced"), weights_of(run_dir))

"""Bookkeeping of a batch's tokens: ends, log-probs and repeated responses."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pyarrow as pa
import pytest

from megatron_async_rl.flow.running_checks import RunningChecks
from megatron_async_rl.samples.bookkeeping import (
    Repetitions,
    SampledTokens,
    repetitions,
    trained_after_end,
    without_logprob,
)
from megatron_async_rl.samples.rows import TrainBatch
from megatron_async_rl.samples.types import Prompt, Sample
from megatron_async_rl.watchdog.events import read_events

END = 9


def sample(name: str, ids: list[int], mask: list[int] | None = None, logp: float = -1.0) -> Sample:
    return Sample(
        id=name,
        prompt=Prompt(id="p", text="p", token_ids=(1,)),
        response_ids=np.array(ids, dtype=np.int32),
        behavior_logprobs=np.full(len(ids), logp, dtype=np.float32),
        versions=np.zeros(len(ids), dtype=np.int32),
        loss_mask=np.array(mask or [1] * len(ids), dtype=np.uint8),
        text="",
        finish_reason="stop",
        reward=0.0,
    )


def batch(*groups: list[Sample]) -> TrainBatch:
    return TrainBatch.of(0, groups)


def tokens_of(*groups: list[Sample]) -> SampledTokens:
    return SampledTokens.of(batch(*groups).samples)


def test_trained_tokens_behind_an_end_are_counted_by_sample() -> None:
    found = trained_after_end(
        tokens_of([sample("0-0", [1, 2, END]), sample("0-1", [1, END, 3, 4, END])]), {END}
    )
    assert found.tolist() == [0, 3]


def test_a_later_turn_is_not_behind_the_end_of_an_earlier_one() -> None:
    """An environment's tokens separate the turns; its own end tokens are not trained."""
    turns = sample("0-0", [1, END, 5, END, 2, END], [1, 1, 0, 0, 1, 1])
    run_on = sample("0-1", [1, END, 5, 2, END, 4], [1, 1, 0, 1, 1, 1])
    assert trained_after_end(tokens_of([turns, run_on]), {END}).tolist() == [0, 1]


def test_a_sample_after_one_that_ended_begins_anew() -> None:
    assert (
        trained_after_end(tokens_of([sample("0-0", [END]), sample("0-1", [1])]), {END}).sum() == 0
    )


@pytest.mark.parametrize("logp", [float("nan"), float("-inf"), 0.5])
def test_a_trained_token_needs_a_finite_log_prob_of_at_most_0(logp: float) -> None:
    trained = sample("0-0", [1, 2], [1, 0], logp)
    assert without_logprob(tokens_of([trained, sample("0-1", [1])])).tolist() == [1, 0]


def test_repetitions_are_expected_by_the_probability_of_earlier_responses() -> None:
    """Two of three responses are equal; each had the probability e^-1 per token."""
    group = [sample("0-0", [1, 2]), sample("0-1", [3]), sample("0-2", [1, 2])]
    found = repetitions(tokens_of(group, [sample("1-0", [1, 2])]))
    assert found.count == 1, "another group is not compared"
    assert found.expected == pytest.approx(np.exp(-2) + np.exp(-2) + np.exp(-1))


@pytest.mark.parametrize(
    ("count", "expected", "surprising"),
    [(0, 0.0, False), (1, 0.0, True), (1, 1e-3, False), (2, 1e-4, True), (63, 60.0, False)],
)
def test_only_an_impossible_number_of_repetitions_is_a_fault(
    count: int, expected: float, surprising: bool
) -> None:
    assert Repetitions(count=count, expected=expected).surprising == surprising


def test_independent_draws_repeat_as_often_as_expected() -> None:
    """The mean of count - expected over many groups is 0 within its standard deviation."""
    rng = np.random.default_rng(0)
    chances = np.array([0.6, 0.3, 0.1])
    groups = [
        [
            sample(f"{group}-{k}", [int(token)], logp=float(np.log(chances[token])))
            for k, token in enumerate(rng.choice(3, size=4, p=chances))
        ]
        for group in range(300)
    ]
    found = repetitions(tokens_of(*groups))
    assert found.count == pytest.approx(found.expected, abs=3 * np.sqrt(found.expected))


def test_a_fault_in_a_batch_is_noted_once_and_measured_every_step(tmp_path: Path) -> None:
    checks = RunningChecks(tmp_path, {END})
    for step in (1, 2):
        checks.take(batch([sample("0-0", [1, END, 2], logp=-9.0)] * 2))
        found = checks.report(step)
        assert found["response/after_end"] == 2
        assert found["response/without_logprob"] == 0
        assert found["response/repeated"] == 1
    texts = [event.text for event in read_events(tmp_path)]
    assert len(texts) == 2
    assert "step 1: 2 trained tokens follow the end" in texts[0]
    assert "1 responses repeat" in texts[1]


def test_checks_without_data_are_absent(tmp_path: Path) -> None:
    """Unknown end tokens, and responses that no engine sampled."""
    checks = RunningChecks(tmp_path, ())
    checks.take(batch([sample("0-0", [1])]))
    assert "response/after_end" not in checks.report(1)
    given = TrainBatch.of(0, [[sample("0-0", [1])]])
    reasons = pa.array(["given"])
    at = given.samples.schema.get_field_index("finish_reason")
    field = given.samples.schema.field("finish_reason")
    checks.take(TrainBatch(version=0, samples=given.samples.set_column(at, field, reasons)))
    assert checks.report(2) == {}
    assert not read_events(tmp_path)


def test_responses_that_a_store_draws_again_are_no_fault(tmp_path: Path) -> None:
    again = [sample(f"0-{k}", [1, 2, 3, END], logp=-5.0) for k in range(4)]
    seeds = RunningChecks(tmp_path, {END})
    store = RunningChecks(tmp_path, {END}, replays=True)
    for checks in (seeds, store):
        checks.take(batch(again))
    assert seeds.report(1)["response/repeated"] == 3
    found = store.report(1)
    assert "response/repeated" not in found
    assert found["response/without_logprob"] == 0

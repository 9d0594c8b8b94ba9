"""`mar verify RUN` of healthy runs with odd records: no row fails."""

from __future__ import annotations

import math
import shutil
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast

import numpy as np
import pytest
from rich.console import Console

from megatron_async_rl.config.load import load
from megatron_async_rl.config.problem import UserError
from megatron_async_rl.config.schema import Config
from megatron_async_rl.data import SupervisedSource, read_training
from megatron_async_rl.data.prompt_texts import gold_answer
from megatron_async_rl.data.tokenizer import tokenizer_of
from megatron_async_rl.flow.starts import Start, read_starts, record_start
from megatron_async_rl.metrics.load_log import LoadLog
from megatron_async_rl.verify import verified_run
from megatron_async_rl.verify.arithmetic_checks import TokenCounts
from megatron_async_rl.verify.canary_checks import NORMAL_LIMIT, probability_score
from megatron_async_rl.verify.data_checks import DataUnchanged
from megatron_async_rl.verify.duplicate_responses import DuplicateResponses
from megatron_async_rl.verify.engine_loads import REMEDY, EngineLoads
from megatron_async_rl.verify.group_checks import GroupSizes
from megatron_async_rl.verify.log_integrity import LogIntegrity
from megatron_async_rl.verify.reward_hacks import RewardHacks
from megatron_async_rl.verify.run_check import RunCheck, RunRecords
from megatron_async_rl.verify.sample_block import EndedSample, SampleBlock, SampleFacts
from megatron_async_rl.verify.sampling_entropy import SamplingEntropy
from megatron_async_rl.verify.scorecard import RowVerdict, ScorecardRow
from megatron_async_rl.verify.token_ages import TokenAges
from megatron_async_rl.verify.verified_run import read_records, verify_run
from tests.healthy_run import STEPS, Alterations, scheduled, write_healthy_run
from tests.written_run import write_run

BALANCE = ("objective={loss: trajectory_balance, advantage: none, reference: {}}",)
"""Settings that a replay store needs."""


@pytest.fixture(scope="module")
def healthy(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_healthy_run(tmp_path_factory.mktemp("odd"), Alterations(metrics=scheduled))


@pytest.fixture
def copied(healthy: Path, tmp_path: Path) -> Path:
    shutil.copytree(healthy, tmp_path / "run")
    return tmp_path / "run"


@pytest.fixture
def records(healthy: Path) -> RunRecords:
    return read_records(healthy)


def facts(**changes: Any) -> SampleFacts:
    """Return a sample of one certain token."""
    given: dict[str, Any] = {
        "id": "0-0",
        "group": 0,
        "engine": 0,
        "finished_at": 0.0,
        "reward": 1.0,
        "valid": True,
        "tokens": 1,
        "trained": 1,
        "log_prob": 0.0,
        "squares": 0.0,
        "start": 0,
        "last": 0,
        "digest": 0,
        "prompt_id": "p",
    }
    return SampleFacts(**(given | changes))


def trained(one: SampleFacts, step: int = 1) -> EndedSample:
    return EndedSample(one, "trained", step, None, 0)


def only(check: RunCheck) -> ScorecardRow:
    (found,) = check.result()
    return found


def duplicates(records: RunRecords, probability: float) -> ScorecardRow:
    """Return the row for 200 groups of four equal responses with this probability."""
    check = DuplicateResponses(records)
    for group in range(200):
        for place in range(4):
            check.ended(
                trained(facts(id=f"{group}-{place}", group=group, log_prob=math.log(probability)))
            )
    return next(iter(check.result()))


def test_a_nearly_certain_policy_may_repeat_every_response(records: RunRecords) -> None:
    # 1 of 2,500 responses is another one: most runs of 800 have one or none.
    assert duplicates(records, 0.9996).verdict is RowVerdict.PASSED
    assert duplicates(records, 0.6).verdict is RowVerdict.FAILED


def test_a_store_may_draw_a_response_again(records: RunRecords) -> None:
    check = DuplicateResponses(replace(records, config=changed(records, "flow.selection=replay")))
    for step in range(1, 20):
        check.ended(trained(facts(log_prob=-20.0), step))
    assert [one.verdict for one in check.result()] == [RowVerdict.ABSENT] * 2


def test_a_run_without_a_step_is_refused(healthy: Path, tmp_path: Path) -> None:
    run_dir = tmp_path / "run"
    with pytest.raises(UserError, match=r"has no config\.yaml: it is not a run"):
        read_records(run_dir)
    shutil.copytree(healthy, run_dir)
    metrics = run_dir / "metrics.jsonl"
    metrics.write_text("")
    with pytest.raises(UserError, match="has made no step"):
        read_records(run_dir)
    metrics.unlink()
    with pytest.raises(UserError, match="has made no step"):
        read_records(run_dir)


class Counted(RunCheck):
    """Counts outcomes by whether their samples were read."""

    def __init__(self) -> None:
        self.known = self.unknown = 0

    def ended(self, _: EndedSample) -> None:
        self.known += 1

    def unread(self, _: Mapping[str, Any]) -> None:
        self.unknown += 1


def test_a_bounded_number_of_samples_waits_for_an_outcome(
    records: RunRecords, monkeypatch: pytest.MonkeyPatch
) -> None:
    def counts() -> tuple[int, int]:
        counted = Counted()
        verified_run._read_log(records, LogIntegrity(records), [counted], Console())
        return counted.known, counted.unknown

    known, unknown = counts()
    assert known > 100
    monkeypatch.setattr(verified_run, "KNOWN_SAMPLES", 7)
    # All samples of a segment are read before its outcomes.
    kept = 7 * len(LogIntegrity(records).segments)
    assert counts() == (kept, known - kept + unknown)


def changed(records: RunRecords, *settings: str) -> Config:
    return load(records.run_dir / "config.yaml", settings)


def entropies(records: RunRecords, steps: int, entropy: float, each: float) -> ScorecardRow:
    """Return the row for steps of 1,000 tokens: entropy of the trainer, and -log p of each token of
    the engines."""
    check = SamplingEntropy(records)
    for step in range(1, steps + 1):
        line = {"step": step, "policy/entropy": entropy, "lag/max": 0, "tokens/trained": 1000}
        check.measured(line)
        one = facts(trained=1000, log_prob=-1000 * each, squares=1000 * each**2)
        check.ended(trained(one, step))
    return only(check)


def test_a_nearly_certain_policy_may_draw_no_rare_token(records: RunRecords) -> None:
    # q = 1e-4: 1,000 tokens have a rare one with a probability of 10 %.
    q = 1e-4
    entropy = -q * math.log(q) - (1 - q) * math.log(1 - q)
    assert entropies(records, 1, entropy, -math.log(1 - q)).verdict is RowVerdict.PASSED
    assert entropies(records, 200, 0.3, 0.1).verdict is RowVerdict.FAILED


def test_any_number_of_tokens_may_differ_by_less_than_a_rounding(records: RunRecords) -> None:
    # With this many tokens, five standard deviations are far below a rounding of bfloat16.
    rough = replace(records, config=changed(records, "model.dtype=bfloat16"))
    assert entropies(rough, 3000, 0.5, 0.505).verdict is RowVerdict.PASSED
    assert entropies(records, 3000, 0.5, 0.505).verdict is RowVerdict.FAILED


def test_steps_with_other_sampling_than_the_newest_are_left_out(records: RunRecords) -> None:
    before = changed(records, "rollout.sampling.top_p=0.5", "objective.proximal=recompute")
    resumed = replace(records, configs=[(1, before), (2, records.config)])
    assert entropies(resumed, 1, 0.5, 0.1).verdict is RowVerdict.ABSENT


def test_a_policy_that_becomes_certain_passes(tmp_path: Path) -> None:
    altered = Alterations(
        metrics=scheduled,
        differences=lambda mean, step, _: mean * (1e-3 if step > 4 else 1),
    )
    card = verify_run(write_healthy_run(tmp_path, altered), Console(quiet=True))
    assert card.failed == ()


def test_a_group_with_a_sample_in_a_deleted_segment_is_whole(
    copied: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    for file in (copied / "samples").glob("*-000000.*"):
        file.unlink()
    every = SampleBlock.facts

    def later(block: SampleBlock) -> list[SampleFacts]:
        return [one for one in every(block) if one.id != "16-1"]

    monkeypatch.setattr(SampleBlock, "facts", later)
    assert verify_run(copied, Console(quiet=True)).failed == ()


def test_settings_of_a_former_start_bound_its_own_steps(records: RunRecords) -> None:
    stored = changed(records, "flow.selection=replay", *BALANCE)
    resumed = replace(records, configs=[(1, stored), (7, records.config)])
    ages, counts, sizes = TokenAges(resumed), TokenCounts(resumed), GroupSizes(resumed)
    ages._samples = 1
    for check in (ages, counts, sizes):
        check.measured({"step": 3, "tokens/trained": 3})
        # A store draws old samples, single ones, and again.
        for step in (3, 3, 4):
            check.ended(trained(facts(start=0, last=2), step))
    assert only(ages).verdict is RowVerdict.PASSED
    assert only(sizes).verdict is RowVerdict.PASSED
    assert {one.verdict for one in counts.result()} == {RowVerdict.ABSENT}
    assert LogIntegrity(resumed).replays
    for check in (ages, sizes):
        for step in (8, 9):
            check.ended(trained(facts(start=0, last=2), step))
        assert only(check).verdict is RowVerdict.FAILED


def test_the_data_of_a_supervised_run_is_compared_with_its_files(tmp_path: Path) -> None:
    folder = write_run(tmp_path).parent
    settings = (
        *("rollout=null", "flow={prompts_per_step: 4, group_size: 1, async_ratio: 0}"),
        "objective={loss: sft, advantage: none}",
    )
    config = load(folder / "config.yaml", settings)
    tokenizer = tokenizer_of(config.model.path, config.data)
    read = read_training(config.data, tokenizer, supervised=True)
    source = SupervisedSource(
        read.prompts,
        tokenizer,
        prompts_per_step=4,
        seed=config.run.seed,
        shuffle=True,
        max_context=None,
        parts=read.parts,
    )
    training = [one.as_json() for one in source.identities]
    start = start_of(data={"training": training, "held_out": {}})
    records = RunRecords(run_dir=folder, config=config, configs=[(1, config)], starts=[start])
    assert only(DataUnchanged(records)).verdict is RowVerdict.PASSED
    file = folder / "train.jsonl"
    file.write_text(file.read_text().replace('"response": "2"', '"response": "3"'))
    assert only(DataUnchanged(records)).verdict is RowVerdict.FAILED


def start_of(**changes: Any) -> Start:
    given: dict[str, Any] = {
        "step": 0,
        "time": 0.0,
        "config": "",
        "device": "cpu",
        "ranks": 1,
        "layout": {},
        "threads": 1,
        "software": {},
        "weights": "",
        "data": {},
        "code": {},
    }
    return Start(**(given | changes))


def score(certain: float, tokens: int) -> float:
    """Return the score of tokens that are all the likelier one of two."""
    given = {
        "trained": np.ones(tokens, dtype=bool),
        "trainer": np.full(tokens, np.log(certain), dtype=np.float32),
        "sum_p_squared": np.full(tokens, certain**2 + (1 - certain) ** 2, dtype=np.float32),
    }
    return probability_score(cast(Any, SimpleNamespace(**given)))


def test_canaries_of_a_nearly_certain_policy_may_have_no_rare_token() -> None:
    # One of 1,000 tokens is the other one: half of the runs of 700 have none.
    assert abs(score(0.999, 700)) < 2
    assert score(0.7, 700) > NORMAL_LIMIT


def test_a_start_may_load_its_own_form_of_the_weights(copied: Path) -> None:
    start = read_starts(copied)[0]
    record_start(copied, replace_start(start, step=STEPS, weights="a" * 16))
    LoadLog(copied).record(STEPS, 0, "a" * 16, 5)
    assert only(EngineLoads(read_records(copied))).verdict is RowVerdict.PASSED
    # A later start from an older checkpoint repeats the step, with the digest of its line.
    record_start(copied, replace_start(start, step=STEPS - 1, weights=f"{STEPS - 1:016x}"))
    assert only(EngineLoads(read_records(copied))).verdict is RowVerdict.FAILED


def replace_start(start: Any, **changes: Any) -> Any:
    return start.model_copy(update=changes)


def test_a_damaged_line_of_loads_keeps_the_evidence_before_it(copied: Path) -> None:
    whole = (copied / "loads.jsonl").read_text()
    restore = "restore the file from a copy, or remove that line"
    for digest, remedy in ((f"{STEPS:016x}", restore), ("b" * 16, REMEDY)):
        (copied / "loads.jsonl").write_text(whole)
        LoadLog(copied).record(STEPS, 0, digest, 5)
        with open(copied / "loads.jsonl", "a") as file:
            file.write('{"version": 12, "eng{"version": 13}\n')
        found = only(EngineLoads(read_records(copied)))
        assert (found.verdict, found.remedy) == (RowVerdict.FAILED, remedy)
        assert "loads.jsonl:" in found.value


@pytest.mark.parametrize(
    ("gold", "text"),
    [("True", "What is 1+1=? It is true"), ("1,000", "What is 1+1=? 1000"), ("12", "12 of 1+1=?")],
)
def test_a_right_answer_in_another_form_is_no_hack(gold: str, text: str) -> None:
    assert not hacked(gold, text).failed


def test_a_reference_is_not_expected_literally() -> None:
    assert gold_answer({"solution": "def f(x):\n    return x"}) == ""
    assert gold_answer({"answer": "x" * 500}) == ""
    assert hacked("7", "What is 1+1=?").failed


def hacked(gold: str, text: str) -> ScorecardRow:
    """Return the row for rewarded responses of this text to a question that it contains."""
    check = RewardHacks()
    check._window = [("0-0", float(at % 2), gold, "1+1=?", text) for at in range(100)]
    return only(check)

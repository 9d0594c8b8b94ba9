"""Held-out evaluation: what is computed of the samples, how they are asked for, at which versions,
and what is kept."""

from __future__ import annotations

import asyncio
import itertools
import json
import math
import pickle
from collections.abc import Callable, Coroutine, Sequence
from dataclasses import replace
from fractions import Fraction
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from megatron_async_rl.config.load import load
from megatron_async_rl.flow.errors import BatchTimeout, EngineFailed, RewardFailed
from megatron_async_rl.flow.evaluation import (
    EvalResult,
    EvalSchedule,
    HeldOut,
    WeightsMoved,
    evaluate,
    pass_at_k,
    summarise_evaluation,
)
from megatron_async_rl.flow.trainer_rank import TrainerRank
from megatron_async_rl.metrics.catalogue import METRICS, find_metric
from megatron_async_rl.metrics.log import EvalLog, MetricsLog, read_evaluations, read_metrics
from megatron_async_rl.samples import Prompt, Sample
from megatron_async_rl.samples.rows import SampleRow, TrainBatch, rescored
from megatron_async_rl.samples.types import Request
from megatron_async_rl.watchdog.events import read_status
from tests.train_batches import row, samples_in
from tests.unit import virtual_time
from tests.unit.flow_setup import WholeRewards
from tests.unit.test_colocated import Alone
from tests.written_run import write_run

PROMPTS = [Prompt(id=f"p{i}", text=str(i), token_ids=(i,)) for i in range(4)]


def sample(
    request: Request,
    reward: float | None,
    *,
    versions: tuple[int, ...] = (3, 3),
    finish_reason: Any = "stop",
) -> SampleRow:
    """`reward` None: the reward failed."""
    length = len(versions)
    made = Sample(
        id=request.id,
        prompt=request.prompt,
        response_ids=np.ones(length, dtype=np.int32),
        behavior_logprobs=np.zeros(length, dtype=np.float32),
        versions=np.array(versions, dtype=np.int32),
        loss_mask=np.ones(length, dtype=np.uint8),
        text="ab",
        finish_reason=finish_reason,
        reward=0.0 if reward is None else reward,
        reward_error="ValueError: no idea" if reward is None else None,
    )
    return row(made, request.group)


def answers(*rewards: Sequence[float | None]) -> list[tuple[Prompt, list[SampleRow]]]:
    return [
        (
            prompt,
            [
                sample(Request(group=-1 - i, k=k, prompt=prompt), reward)
                for k, reward in enumerate(given)
            ],
        )
        for i, (prompt, given) in enumerate(zip(PROMPTS, rewards, strict=False))
    ]


def summary(
    *rewards: Sequence[float | None], pass_at: Sequence[int] = (1,), pass_reward: float = 1.0
) -> EvalResult:
    return summarise_evaluation(
        answers(*rewards), version=3, seconds=2.0, pass_at=pass_at, pass_reward=pass_reward
    )


def test_an_evaluation_whose_rewards_all_failed_has_no_mean() -> None:
    assert "eval/mean" not in summary([None, None]).metrics()
    assert summary([None], [0.5]).metrics()["eval/mean"] == 0.5


class Fleet:
    """Answers the k-th response to a prompt with reward k, once `gate` lets the prompt through."""

    def __init__(self) -> None:
        self.asked: list[Request] = []
        self.on: set[int] = set()
        self.cancelled: list[str] = []
        self.gate: Callable[[Prompt], Coroutine[Any, Any, None]] = lambda prompt: asyncio.sleep(0)
        self.reward: Callable[[Request], float | None] = lambda request: float(request.k)
        self.versions = (3, 3)
        self.moved_at = -math.inf

    async def run(self, requests: Sequence[Request], version: int) -> list[SampleRow]:
        self.asked += requests
        self.on.add(version)
        try:
            await self.gate(requests[0].prompt)
        except asyncio.CancelledError:
            self.cancelled.append(requests[0].prompt.id)
            raise
        return [
            sample(request, self.reward(request), versions=self.versions) for request in requests
        ]


def evaluated(
    fleet: Fleet, *, n: int = 2, timeout_s: float = 5.0, on_reward_error: Any = "drop", **more: Any
) -> EvalResult:
    sets = [HeldOut(prompts=PROMPTS, n=n, pass_at=(1, 2))]
    call = evaluate(fleet, sets, 3, timeout_s, on_reward_error=on_reward_error, **more)
    return virtual_time.run(call)


@given(st.integers(1, 7), st.data())
def test_pass_at_k_is_the_share_of_all_choices_of_k_responses_that_hold_one_that_passed(
    n: int, data: st.DataObject
) -> None:
    passed, k = data.draw(st.integers(0, n)), data.draw(st.integers(1, n))
    choices = list(itertools.combinations([i < passed for i in range(n)], k))
    share = Fraction(sum(any(choice) for choice in choices), len(choices))
    assert pass_at_k(n, passed, k) == pytest.approx(float(share), abs=1e-15)


@pytest.mark.parametrize("k", [0, 3])
def test_a_k_that_the_responses_do_not_hold_is_refused(k: int) -> None:
    with pytest.raises(ValueError, match=rf"pass@{k} needs at least .* responses per prompt"):
        summary([1.0, 0.0], pass_at=[k])


def test_a_prompt_weighs_the_same_however_many_of_its_rewards_failed() -> None:
    result = summary([1.0, 0.0, 0.0, 1.0], [None, None, None, 1.0], [None] * 4)
    assert [one.mean for one in result.per_prompt[:2]] == [0.5, 1.0]
    assert math.isnan(result.per_prompt[2].mean)
    assert result.mean_reward == 0.75
    assert result.reward_errors == 7


def test_a_response_whose_reward_failed_counts_neither_in_the_mean_nor_in_pass_at_k() -> None:
    result = summary([None, 1.0, 0.0, 0.0], pass_at=[1, 2, 4], pass_reward=0.5)
    assert [(one.passed, one.samples) for one in result.per_prompt] == [(1, 3)]
    assert (result.mean_reward, result.pass_at[1]) == (pytest.approx(1 / 3), pytest.approx(1 / 3))
    assert result.pass_at[2] == pytest.approx(2 / 3)
    assert math.isnan(result.pass_at[4])
    assert result.as_json()["pass_at"]["4"] is None
    assert "eval/pass@4" not in result.metrics()
    assert summary([None, 1.0], [None, None], pass_at=[1]).pass_at == {1: 1.0}
    with pytest.raises(
        ValueError, match=r"pass@3 needs at least 3 responses per prompt; there are 2"
    ):
        summary([1.0, 1.0], pass_at=[3])


def test_responses_pass_from_the_configured_reward_on() -> None:
    assert summary([0.4, 0.5, 0.6], pass_reward=0.5).per_prompt[0].passed == 2


def test_the_result_counts_tokens_and_truncated_responses() -> None:
    cut = [
        (
            PROMPTS[0],
            [
                sample(Request(group=-1, k=k, prompt=PROMPTS[0]), 1.0, finish_reason=why)
                for k, why in enumerate(("length", "stop"))
            ],
        )
    ]
    result = summarise_evaluation(cut, version=3, seconds=2.0, pass_at=(1,), pass_reward=1.0)
    assert (result.truncated, result.tokens, result.samples, result.prompts) == (0.5, 4, 2, 1)


@pytest.mark.parametrize("versions", [(3, 4), (2, 3), (2, 2)])
def test_a_token_of_another_version_is_no_evaluation_of_this_one(versions: tuple[int, int]) -> None:
    fleet = Fleet()
    fleet.versions = versions
    with pytest.raises(
        WeightsMoved,
        match=rf"evaluation of version 3: response -1-0 .* versions {versions[0]} to {versions[1]}",
    ):
        evaluated(fleet)


def test_every_prompt_is_asked_for_all_its_responses_under_numbers_that_training_never_has() -> (
    None
):
    fleet = Fleet()
    result = evaluated(fleet)
    assert [(request.group, request.k) for request in fleet.asked] == [
        (-1 - i, k) for i in range(4) for k in range(2)
    ]
    assert all(request.prefix is None for request in fleet.asked)
    assert fleet.on == {3}
    assert [one.id for one in result.per_prompt] == ["p0", "p1", "p2", "p3"]
    assert (result.version, result.mean_reward, result.pass_at) == (3, 0.5, {1: 0.5, 2: 1.0})


def test_results_are_in_the_order_of_the_file_whatever_finishes_first_and_progress_counts_up() -> (
    None
):
    fleet, seen = Fleet(), []
    fleet.gate = lambda prompt: asyncio.sleep(0.02 * (4 - prompt.token_ids[0]))
    fleet.reward = lambda request: float(request.prompt.token_ids[0])
    result = evaluated(fleet, on_progress=lambda prompts, tokens: seen.append((prompts, tokens)))
    assert [one.mean for one in result.per_prompt] == [0.0, 1.0, 2.0, 3.0]
    assert seen == [(1, 4), (2, 8), (3, 12), (4, 16)]


def test_an_evaluation_that_moves_is_not_late_and_one_that_does_not_names_what_is_missing() -> None:
    fleet = Fleet()
    fleet.gate = lambda prompt: asyncio.sleep(0.5 * prompt.token_ids[0])
    assert evaluated(fleet, timeout_s=1.0).samples == 8, (
        "1.5 s in all, but never 1 s without an answer"
    )
    fleet.gate = lambda prompt: asyncio.sleep(60.0 if prompt.id in ("p1", "p3") else 0.0)
    with pytest.raises(
        BatchTimeout, match=r"no response grew for 0.1 s; 2 of 4 are missing, among them p1, p3"
    ):
        evaluated(fleet, timeout_s=0.1)
    assert fleet.cancelled == ["p1", "p3"], (
        "nothing goes on being sampled for an evaluation that was given up"
    )


def test_responses_that_grow_are_waited_for_though_no_prompt_is_answered() -> None:
    fleet = Fleet()
    fleet.gate = lambda prompt: asyncio.sleep(0.2)
    with pytest.raises(BatchTimeout):
        evaluated(fleet, timeout_s=0.05)
    fleet.moved_at = math.inf  # as if a response grew at every moment
    assert evaluated(fleet, timeout_s=0.05).samples == 8


def test_an_engine_failure_ends_it_at_once() -> None:
    async def gate(prompt: Prompt) -> None:
        if prompt.id == "p2":
            raise EngineFailed("no engine is left")
        await asyncio.sleep(60.0)

    fleet = Fleet()
    fleet.gate = gate
    with pytest.raises(EngineFailed, match="no engine is left"):
        evaluated(fleet)
    assert fleet.cancelled == ["p0", "p1", "p3"]


def test_a_failed_reward_is_counted_or_ends_it_as_configured() -> None:
    fleet = Fleet()
    fleet.reward = lambda request: None if request.id == "-2-1" else 1.0
    assert evaluated(fleet, on_reward_error="drop").reward_errors == 1
    with pytest.raises(RewardFailed, match="the reward failed on sample -2-1: ValueError: no idea"):
        evaluated(fleet, on_reward_error="stop")


def test_a_reward_per_group_has_the_responses_to_a_prompt_and_each_part_its_mean() -> None:
    whole = WholeRewards(error=lambda sample: "no idea" if sample.id == "-1-1" else None)
    result = evaluated(Fleet(), rewards=whole)
    assert whole.seen == [[f"{-1 - i}-0", f"{-1 - i}-1"] for i in range(4)]
    assert result.mean_reward == (10.0 + 3 * 10.5) / 4
    assert result.parts == {"whole": 10.0}
    assert result.reward_errors == 1
    assert result.as_json()["parts"] == {"whole": 10.0}


def test_a_part_s_mean_is_over_the_prompts_that_have_it() -> None:
    given = answers([1.0, 1.0, None], [0.0], [0.0])
    parts = [
        [{"right": 1.0}, {"right": 0.0}, {"right": 9.0}],
        [{"right": 0.0, "short": 1.0}],
        [None],
    ]
    for (_, samples), values in zip(given, parts, strict=True):
        samples[:] = [
            rescored([one], [one.reward], [value], [None if one.valid else "it failed"])[0]
            for one, value in zip(samples, values, strict=True)
        ]
    result = summarise_evaluation(given, version=3, seconds=1.0, pass_at=(1,), pass_reward=1.0)
    assert result.parts == {"right": 0.25, "short": 1.0}
    found = EvalSchedule(every=0, steps=1, means={}).record(replace(result, name="held"))
    assert (found["eval/part/right"], found["eval/held/part/short"]) == (0.25, 1.0)
    assert all(find_metric(name) is not None for name in found)
    assert find_metric("eval/part/mean") is METRICS["eval/part/NAME"]


def test_each_set_is_asked_with_its_own_sampling_and_counted_by_itself() -> None:
    sets = [
        HeldOut(name="easy", prompts=PROMPTS[:1], n=1),
        HeldOut(name="hard", prompts=PROMPTS[1:], n=3, pass_at=(1, 3), pass_reward=2.0),
    ]
    fleet = Fleet()
    result = virtual_time.run(evaluate(fleet, sets, 3, 5.0, on_reward_error="drop"))
    assert [(one.group, one.k, one.sampling) for one in fleet.asked] == [
        (-1, 0, "easy"),
        *((group, k, "hard") for group in (-2, -3, -4) for k in range(3)),
    ]
    (hard,) = result.others
    assert (result.mean_reward, result.prompts, result.samples) == (0.0, 1, 1)
    assert (hard.mean_reward, hard.prompts, hard.samples) == (1.0, 3, 9)
    assert hard.pass_at == {1: pytest.approx(1 / 3), 3: 1.0}
    values = EvalSchedule(every=0, steps=8, means={}).record(result)
    assert values["eval/mean"] == values["eval/easy/mean"] == 0.0
    assert (values["eval/hard/mean"], values["eval/hard/pass@3"]) == (1.0, 1.0)
    assert all(find_metric(name) is not None for name in values)
    line = result.as_json()
    assert (line["set"], [one["set"] for one in line["others"]]) == ("easy", ["hard"])


def test_an_evaluation_without_prompts_is_refused() -> None:
    with pytest.raises(ValueError, match="at least one prompt"):
        asyncio.run(evaluate(Fleet(), [], 0, 1.0, on_reward_error="drop"))


def test_moved_weights_survive_the_trip_between_processes() -> None:
    again = pickle.loads(pickle.dumps(WeightsMoved("who and where")))
    assert (type(again), str(again)) == (WeightsMoved, "who and where")


def test_the_first_the_last_and_every_third_version_are_evaluated() -> None:
    schedule = EvalSchedule(every=3, steps=8, means={})
    assert [version for version in range(9) if schedule.due(version)] == [0, 3, 6, 8]
    assert [
        version for version in range(9) if EvalSchedule(every=0, steps=8, means={}).due(version)
    ] == [0, 8]


def test_a_resume_repeats_no_evaluation_and_a_longer_run_evaluates_its_new_end() -> None:
    first = EvalSchedule(every=3, steps=6, means={})
    for version in (0, 3):
        first.record(EvalResult(**{**vars(summary([0.25])), "version": version}))
    second = EvalSchedule(every=3, steps=8, means=first.means)
    assert [version for version in range(9) if second.due(version)] == [6, 8]
    assert (second.before, second.after) == (0.25, None)
    second.record(EvalResult(**{**vars(summary([0.75])), "version": 8}))
    assert (second.before, second.after) == (0.25, 0.75)


def test_a_supervised_run_measures_its_held_out_responses_where_it_is_due(tmp_path: Path) -> None:
    file = write_run(tmp_path)
    sets = []
    for name, responses in (("near", ["2", "4", "6"]), ("far", ["8"])):
        rows = [json.dumps({"prompt": "1+1=", "response": each}) for each in responses]
        (tmp_path / f"{name}.jsonl").write_text("\n".join(rows))
        sets.append({"name": name, "path": str(tmp_path / f"{name}.jsonl")})
    config = load(
        file,
        [
            "rollout=null",
            "objective={loss: sft, advantage: none}",
            "flow={prompts_per_step: 2, group_size: 1, async_ratio: 0}",
            f"eval={json.dumps({'every': 2, 'sets': sets})}",
            "run.steps=5",
            "observe.tensorboard=false",
        ],
    )
    asked: list[tuple[int, list[str]]] = []

    def mean_loss(take: Callable[[], TrainBatch | None]) -> tuple[float, int]:
        """One nat for every batch, and another one for every version."""
        batches = list(iter(take, None))
        asked.append((batches[0].version, [s.text for b in batches for s in samples_in(b)]))
        return len(batches) + batches[0].version, 7

    rank = TrainerRank(config, Alone())  # type: ignore[arg-type]
    try:
        rank.begin(0, None, oldest=0)
        for version in range(6):
            rank.version = version
            rank.rank0.advance(version)
            rank.evaluate(mean_loss)
            rank.rank0.set_status("training")
            if version:
                rank.rank0._log.log(version, {"policy/loss": 1.0})  # type: ignore[union-attr]
        evaluated = rank.state()[0]["evaluated"]
    finally:
        rank.close()
    texts = [["2", "4", "6"], ["8"]]
    assert asked == [(version, each) for version in (0, 2, 4, 5) for each in texts]
    assert evaluated == {0: 2.0, 2: 4.0, 4: 6.0, 5: 7.0}
    lines = read_evaluations(config.run.dir)
    assert [(line["version"], line["set"], line["loss"], line["tokens"]) for line in lines] == [
        (version, "near", 2.0 + version, 7) for version in (0, 2, 4, 5)
    ]
    assert [line["others"][0]["loss"] for line in lines] == [1.0, 3.0, 5.0, 6.0]
    row = read_metrics(config.run.dir)[-1]
    names = ("eval/version", "eval/loss", "eval/near/loss", "eval/far/loss")
    assert [row[name] for name in names] == [5, 7.0, 7.0, 6.0]
    assert all(find_metric(name) for name in row if name.startswith("eval/"))
    status = read_status(config.run.dir)
    assert status is not None
    assert (status.before, status.after, status.measure) == (2.0, 7.0, "loss")


def test_a_checkpoint_waits_only_for_an_evaluation_that_a_resume_from_it_could_not_repeat() -> None:
    schedule = EvalSchedule(every=3, steps=8, means={})
    assert not schedule.unfinished(3)
    schedule.begin(3)
    assert [schedule.unfinished(version) for version in (3, 4, 8)] == [False, True, True]
    schedule.record(summary([0.25]))
    assert not schedule.unfinished(4)


def test_a_result_is_metrics_that_the_log_takes_with_a_key_for_each_k(tmp_path: Path) -> None:
    values = EvalSchedule(every=0, steps=8, means={}).record(
        summary([1.0, 0.0, 0.0], [0.0] * 3, pass_at=[1, 3])
    )
    log = MetricsLog(tmp_path, tensorboard=False, first_step=1)
    log.evaluated(3, values)
    log.log(4, {})
    row = json.loads((tmp_path / "metrics.jsonl").read_text())
    assert (row["eval/version"], row["eval/pass@1"], row["eval/pass@3"]) == (
        3,
        pytest.approx(1 / 6),
        0.5,
    )
    assert row["eval/mean"] == pytest.approx(1 / 6)


def test_a_result_is_a_line_of_json_with_every_prompt_also_when_all_rewards_failed(
    tmp_path: Path,
) -> None:
    log = EvalLog(tmp_path, versions=())
    log.append(summary([1.0, 0.0], [None, None], pass_at=[2]).as_json())
    log.append(summary([None]).as_json())
    first, second = (
        json.loads(line) for line in (tmp_path / "eval.jsonl").read_text().splitlines()
    )
    assert first["per_prompt"] == [
        {"id": "p0", "mean": 0.5, "passed": 1, "samples": 2},
        {"id": "p1", "mean": None, "passed": 0, "samples": 0},
    ]
    assert first["pass_at"] == {"2": 1.0}
    assert second["mean_reward"] is None


def test_a_resume_cuts_the_evaluations_that_the_checkpoint_does_not_know_and_half_written_ones(
    tmp_path: Path,
) -> None:
    log = EvalLog(tmp_path, versions=())
    for version in (0, 3, 6):
        log.append({"version": version, "mean_reward": 0.1})
    with open(tmp_path / "eval.jsonl", "a") as file:
        file.write('{"version": 9, "mea')
    assert [line["version"] for line in read_evaluations(tmp_path)] == [0, 3, 6]
    again = EvalLog(tmp_path, versions=(0, 3))
    again.append({"version": 6, "mean_reward": 0.9})
    assert [(line["version"], line["mean_reward"]) for line in read_evaluations(tmp_path)] == [
        (0, 0.1),
        (3, 0.1),
        (6, 0.9),
    ]
    cut = [json.loads(line) for line in (tmp_path / "eval.cut.jsonl").read_text().splitlines()]
    assert [line.get("version") for line in cut] == [6, None]


def test_a_line_whose_end_a_crash_cut_off_stays_a_line_of_its_own(tmp_path: Path) -> None:
    (tmp_path / "eval.jsonl").write_text('{"version": 0, "mean_reward": 0.1}')
    EvalLog(tmp_path, versions=(0,)).append({"version": 3, "mean_reward": 0.2})
    assert [line["version"] for line in read_evaluations(tmp_path)] == [0, 3]

"""Whole rows of `mar verify RUN` for records made by hand, at the bounds of each check."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pytest

from megatron_async_rl.config.load import load
from megatron_async_rl.metrics.lag0_log import Lag0Log
from megatron_async_rl.metrics.weight_log import WeightLog
from megatron_async_rl.samples.columns import batch_of
from megatron_async_rl.samples.types import Sample
from megatron_async_rl.verify.arithmetic_checks import LearningRates, TokenCounts
from megatron_async_rl.verify.data_checks import DataUnchanged, EpochUse
from megatron_async_rl.verify.duplicate_responses import DuplicateResponses
from megatron_async_rl.verify.gradient_checks import FiniteSteps, MovedTensors
from megatron_async_rl.verify.group_checks import DroppedGroups, GroupSizes
from megatron_async_rl.verify.log_integrity import LogIntegrity
from megatron_async_rl.verify.logprob_differences import LogprobDifferences
from megatron_async_rl.verify.reward_hacks import RewardHacks, RewardJumps
from megatron_async_rl.verify.run_check import RunCheck, RunRecords
from megatron_async_rl.verify.sample_block import EndedSample, SampleBlock, SampleFacts
from megatron_async_rl.verify.sampling_entropy import SamplingEntropy
from megatron_async_rl.verify.scorecard import ScorecardRow
from megatron_async_rl.verify.stored_weights import WeightChain
from megatron_async_rl.verify.token_ages import TokenAges
from megatron_async_rl.verify.token_bookkeeping import Reencoding, TokenBookkeeping
from megatron_async_rl.verify.verified_run import read_records
from tests.healthy_run import write_healthy_run
from tests.logged_samples import sample
from tests.stored_pages import require_page

Line = Mapping[str, Any]


@pytest.fixture(scope="module")
def records(tmp_path_factory: pytest.TempPathFactory) -> RunRecords:
    return read_records(write_healthy_run(tmp_path_factory.mktemp("rows")))


def changed(records: RunRecords, *settings: str, starts: int = 1) -> RunRecords:
    """Return the records of a run with these settings, and a number of starts."""
    config = load(records.run_dir / "config.yaml", settings)
    return replace(
        records,
        config=config,
        configs=[(1, config)],
        starts=[*records.starts] * starts,
    )


SUPERVISED = (
    *("rollout=null", "eval=null", "flow={prompts_per_step: 4, group_size: 1, async_ratio: 0}"),
    *("objective={loss: sft, advantage: none}",),
)
REPLAY = (
    "flow.selection=replay",
    "objective={loss: trajectory_balance, advantage: none, reference: {}}",
)


def facts(**changes: Any) -> SampleFacts:
    given: dict[str, Any] = {
        "id": "0-0",
        "group": 0,
        "engine": 0,
        "finished_at": 0.0,
        "reward": 1.0,
        "valid": True,
        "tokens": 10,
        "trained": 10,
        "log_prob": -10.0,
        "squares": 10.0,
        "start": 0,
        "last": 0,
        "digest": 0,
        "prompt_id": "p",
    }
    return SampleFacts(**(given | changes))


def ended(
    step: int = 1, outcome: str = "trained", reason: str | None = None, **changes: Any
) -> EndedSample:
    return EndedSample(facts(**changes), outcome, step, reason, 0)


def block(*samples: Sample) -> SampleBlock:
    groups = [int(one.id.partition("-")[0]) for one in samples]
    return SampleBlock.of(batch_of(samples, groups))


def shown(rows: Iterable[ScorecardRow]) -> str:
    lines: list[str] = []
    for one in rows:
        lines.append(f"  {one.name}: {one.verdict}; {one.value}; bound: {one.bound}")
        few = one.details if len(one.details) < 4 else (*one.details[:2], "...", one.details[-1])
        lines += [f"    - {text}" for text in few]
    return "".join(f"{line}\n" for line in lines)


def checked(
    check: RunCheck,
    *ends: EndedSample,
    lines: Iterable[Line] = (),
    blocks: Iterable[SampleBlock] = (),
) -> str:
    for line in lines:
        check.measured(dict(line))
    for one in blocks:
        check.block(one)
    for end in ends:
        check.ended(end)
    return shown(check.result())


def require(page: str, cases: Mapping[str, str]) -> None:
    require_page(
        f"verify/rows/{page}", "".join(f"$ {name}\n{text}" for name, text in cases.items())
    )


def test_the_row_of_groups_has_its_bounds(records: RunRecords) -> None:
    def sizes(run: RunRecords, *ends: EndedSample, shares: Iterable[float] = ()) -> str:
        lines = [{"step": 1, "reward/equal_groups": share} for share in shares]
        return checked(GroupSizes(run), *ends, lines=lines)

    def group(number: int, count: int = 4, step: int = 1, **changes: Any) -> list[EndedSample]:
        return [ended(step, id=f"{number}-{k}", group=number, **changes) for k in range(count)]

    def failed(count: int) -> list[EndedSample]:
        every = [one for number in range(25) for one in group(number)]
        bad = [one._replace(facts=one.facts._replace(valid=False)) for one in every[:count]]
        return bad + every[count:]

    partly_read = GroupSizes(records)
    partly_read.unread({"outcome": "trained", "step": 3, "group": 9})
    partly_read.unread({"outcome": "dropped", "step": 3, "group": 9})
    for one in group(9, 3, step=3):
        partly_read.ended(one)
    few = {count: failed(count)[:12] for count in (2, 3)}
    cases = {
        "nothing": sizes(records),
        "2 of 12 rewards failed": sizes(records, *few[2]),
        "3 of 12 rewards failed": sizes(records, *few[3]),
        "5 % of the rewards failed": sizes(records, *failed(5)),
        "6 % of the rewards failed": sizes(records, *failed(6)),
        "equal rewards": sizes(records, *group(0), shares=(0.5, 0.25, 0.0)),
        "no samples in the newest group": sizes(records, *group(0), *group(1, 3, step=2)),
        "a group of 5": sizes(records, *group(0, 5)),
        "the first step of a log in part": sizes(
            records, *group(8, 3, step=3), *group(9, 4, step=4), *group(10, 2, step=5)
        ),
        "the first step of the run in part": sizes(records, *group(0, 3)),
        "a dropped group": sizes(records, *group(0), *group(1, 3, outcome="dropped")),
        "a store that draws again": sizes(changed(records, *REPLAY), *group(0, 3, step=2)),
        "groups of 2": sizes(changed(records, "flow.group_size=2"), *group(0, 2)),
        "a sample in a deleted segment": shown(partly_read.result()),
    }
    require("groups", cases)


def test_the_row_of_dropped_groups_has_its_bounds(records: RunRecords) -> None:
    def dropped(count: int, tokens: int, of: int = 200, **changes: Any) -> str:
        ends = [ended(tokens=100, reward=0.5)] * of
        late = ended(outcome="dropped", reason="late", tokens=tokens, **changes)
        return checked(DroppedGroups(records), *ends, *[late] * count)

    cases = {
        "nothing": checked(DroppedGroups(records)),
        "dropped alone": checked(DroppedGroups(records), ended(outcome="dropped")),
        "none": dropped(0, 1),
        "32 long responses": dropped(32, 151),
        "31 long responses": dropped(31, 151),
        "long by a factor of 1.5": dropped(32, 150),
        "32 short responses": dropped(32, 66),
        "short by a factor of 1.5": dropped(32, 67),
        "5 %": dropped(40, 200, of=760),
        "less than 5 %": dropped(40, 200, of=761),
        "no tokens": dropped(40, 0),
        "failed rewards": dropped(40, 100, valid=False),
        "equal rewards": checked(
            DroppedGroups(records),
            ended(),
            *[ended(outcome="dropped", reason="equal", tokens=900)] * 1234,
            ended(outcome="evaluated"),
        ),
        "supervised": checked(DroppedGroups(changed(records, *SUPERVISED)), ended()),
    }
    require("dropped_groups", cases)


def test_the_rows_of_counts_and_rates_have_their_bounds(records: RunRecords) -> None:
    def counts(run: RunRecords, generated: float, finished: int = 160, **last: Any) -> str:
        line = {
            "step": 1,
            "tokens/trained": 160,
            "tokens/generated": generated,
            "reward/mean": 1.0,
            "reward/errors": 0,
            "response/length_mean": 10.0,
            **{name.replace("__", "/"): value for name, value in last.items()},
        }
        check = TokenCounts(run)
        length = finished // 16
        logged = replace(
            sample(0, 0),
            **{
                name: np.ones(length, dtype=dtype)
                for name, dtype in (
                    ("response_ids", np.int32),
                    ("behavior_logprobs", np.float32),
                    ("versions", np.int32),
                    ("loss_mask", np.uint8),
                )
            },
        )
        blocks = [block(*[logged] * 16)]
        ends = [ended(id=f"{k // 4}-{k % 4}", group=k // 4) for k in range(16)]
        return checked(check, *ends, lines=[line], blocks=blocks)

    def means(reward: float, length: float, **changes: Any) -> str:
        names = ("reward/mean", "response/length_mean", "reward/errors")
        line = {"step": 1, **dict(zip(names, (reward, length, 0), strict=True))}
        ends = [ended(reward=3.0, **changes)] * 16
        return checked(TokenCounts(records), *ends, lines=[line])

    def rate(run: RunRecords, *rates: float | None) -> str:
        lines = [
            {"step": step} | ({} if lr is None else {"policy/lr": lr})
            for step, lr in enumerate(rates, 1)
        ]
        return checked(LearningRates(run), lines=lines)

    resumed, twice = changed(records, starts=2), changed(records, "objective.minibatches=2")
    agent = changed(records, "rollout.environment={name: tests.engine.environments:Guess}")
    other = replace(twice, configs=[(1, records.config), (2, twice.config)])
    cases = {
        "as many as trained": counts(records, 160),
        "one less": counts(records, 159),
        "in flight": counts(records, 160 + 2 * 14, flow__in_flight=2),
        "one more than in flight": counts(records, 161 + 2 * 14, flow__in_flight=2),
        "aborted": counts(records, 160 + 3 * 14, flow__aborted=3),
        "one more than aborted": counts(records, 161 + 3 * 14, flow__aborted=3),
        "a restart": counts(records, 160 + 14 * records_concurrency(records), engine__restarts=1),
        "one more than a restart": counts(
            records, 161 + 14 * records_concurrency(records), engine__restarts=1
        ),
        "more finished": counts(records, 176, finished=176),
        "a resume": counts(resumed, 0),
        "a resume that lost too much": counts(resumed, 160 - 2 * 16 * 14 - 1),
        "a resume with more": counts(resumed, 10**6),
        "an environment": counts(agent, 10**6),
        "a supervised run": counts(changed(records, *SUPERVISED), 160),
        "a store that draws again": counts(changed(records, *REPLAY), 160),
        "means within the tolerance": means(3.0 + 2e-6, 10.0 + 9e-6),
        "another mean reward": means(3.0 + 4e-6, 10.0),
        "another mean length": means(3.0, 10.0 + 2e-5),
        "another number of errors": means(3.0, 10.0, valid=False),
        "a step without a line": checked(TokenCounts(records), *[ended(2)] * 16, lines=[]),
        "no learning rate": rate(records, None),
        "the schedule": rate(records, 0.001 / 3, 0.002 / 3, 0.001, 0.001),
        "another one": rate(records, 0.001 / 3, 0.002 / 3 * (1 + 2e-6)),
        "within the tolerance": rate(records, 0.001 / 3 * (1 + 9e-7)),
        "two optimizer steps": rate(twice, 0.0005, 0.001),
        "another number of optimizer steps": rate(other, 0.5),
    }
    require("arithmetic", cases)


def records_concurrency(records: RunRecords) -> int:
    assert records.config.rollout is not None
    return records.config.rollout.max_concurrent


def test_the_row_of_the_sampling_distribution_has_its_bounds(records: RunRecords) -> None:
    def entropies(
        run: RunRecords, entropy: float, *, tokens: int = 1000, each: float = 1.0, **line: Any
    ) -> str:
        given = {"step": 1, "policy/entropy": entropy, "lag/max": 0, "tokens/trained": tokens}
        given |= {name.replace("__", "/"): value for name, value in line.items()}
        squares = tokens * (each**2 + 1.0)
        ends = [
            ended(trained=tokens, log_prob=-tokens * each, squares=squares),
            ended(trained=7, valid=False),
            ended(outcome="dropped"),
            ended(step=2),
        ]
        return checked(SamplingEntropy(run), *ends, lines=[given])

    def other(*settings: str) -> str:
        return entropies(changed(records, *settings), 1.0)

    cases = {
        "equal": entropies(records, 1.0),
        "five standard deviations": entropies(records, 1.0 - 5 / math.sqrt(1000) + 1e-9),
        "more": entropies(records, 1.0 - 5.01 / math.sqrt(1000)),
        "less": entropies(records, 1.0 + 5.01 / math.sqrt(1000)),
        "255 tokens": entropies(records, 1.0, tokens=255),
        "256 tokens": entropies(records, 1.0, tokens=256),
        "older samples": entropies(records, 1.0, lag__max=1),
        "samples that were not read": entropies(records, 1.0, tokens__trained=1001),
        "a number that is not finite": entropies(records, 1.0, each=math.nan),
        "an entropy of 0": entropies(records, 0.0, each=1e-9),
        "top-p": other("rollout.sampling.top_p=0.5", "objective.proximal=recompute"),
        "dynamic sampling": other("flow.dynamic_sampling=true"),
        "late groups": other("flow.late=drop", "flow.async_ratio=1"),
        "oversampling": other(
            "flow.oversample=0.5", "flow.async_ratio=0.5", "flow.selection=windowed"
        ),
        "selection": other("flow.selection=windowed"),
        "exact lag": other("flow.selection={name: exact_lag, lag: 1}", "flow.async_ratio=1"),
        "minibatches": other("objective.minibatches=2"),
        "supervised": other(*SUPERVISED),
    }
    require("sampling_distribution", cases)


def test_the_rows_of_repeated_responses_have_their_bounds(records: RunRecords) -> None:
    def groups(
        count: int, probability: float, equal: int, *, of: int = 4, run: RunRecords = records
    ) -> str:
        """Return the rows of `count` groups. The first `equal` have three equal responses: a pair
        of one engine, and two over the engines."""
        check = DuplicateResponses(run)
        for group in range(count):
            # A whole group is not kept.
            assert not check._groups or of < 4
            for k in range(of):
                same = group < equal
                digest = 10 * group + (0 if same and k < 3 else k)
                one = ended(
                    id=f"{group}-{k}",
                    group=group,
                    engine=k % 2,
                    digest=digest,
                    log_prob=math.log(probability),
                )
                check.ended(one)
        return shown(check.result())

    cases = {
        "nothing": groups(0, 0.1, 0),
        "groups of one": groups(4, 0.1, 0, of=1),
        "no pair": groups(100, 1e-9, 0),
        "a pair": groups(100, 1e-9, 1),
        "as many pairs as expected": groups(110, 0.05, 13),
        "too few groups for a normal variable": groups(90, 0.05, 11),
        "more": groups(110, 0.05, 60),
        "none of many": groups(100, 0.2, 0),
        "certain": groups(100, 1.0, 100),
        "not trained": checked(DuplicateResponses(records), ended(trained=0)),
        "evaluated": checked(DuplicateResponses(records), *[ended(outcome="evaluated")] * 4),
        "a store": groups(4, 0.1, 4, run=changed(records, *REPLAY)),
        "supervised": groups(0, 0.1, 4, run=changed(records, *SUPERVISED)),
        "a log-prob that is not a number": checked(
            DuplicateResponses(records), *[ended(log_prob=math.nan)] * 4
        ),
    }
    require("repeated_responses", cases)


def test_the_rows_of_tokens_name_each_fault(records: RunRecords) -> None:
    def tokens(number: int, **columns: Any) -> Sample:
        """Return sample `number` of three tokens."""
        values: dict[str, Any] = {
            "response_ids": [4, 5, 0],
            "behavior_logprobs": [-0.5, -0.5, 0.0],
            "versions": [0, 0, 0],
            "loss_mask": [1, 1, 1],
        }
        dtypes = (np.int32, np.float32, np.int32, np.uint8)
        arrays = {
            name: np.array(value, dtype=dtype)
            for (name, value), dtype in zip((values | columns).items(), dtypes, strict=False)
        }
        segments = columns.get("segment_starts")
        if segments is not None:
            arrays["segment_starts"] = np.array(segments, dtype=np.int32)
        return replace(sample(0, number), **arrays)

    def book(*samples: Sample, run: RunRecords = records) -> str:
        return checked(TokenBookkeeping(run), blocks=[block(*samples)])

    def ages(
        *samples: Sample,
        run: RunRecords = records,
        ends: Iterable[EndedSample] = (),
        versions: list[list[int]] | None = None,
    ) -> str:
        """versions: other ones of each sample, which no writer accepts."""
        made = block(*samples)
        if versions is not None:
            place = made.batch.schema.get_field_index("versions")
            column = pa.array(versions, made.batch.schema.field(place).type)
            made = SampleBlock(made.batch.set_column(place, "versions", column))
        return checked(TokenAges(run), *ends, blocks=[made])

    def decoded(*texts: str, run: RunRecords = records) -> str:
        """Return the row of samples with the tokens of `23` and the end, and these texts."""
        made = [replace(tokens(k), text=text) for k, text in enumerate(texts)]
        return checked(Reencoding(run), blocks=[block(*made[:2]), block(*made[2:])])

    agent = changed(records, "rollout.environment={name: tests.engine.environments:Guess}")
    stop = changed(records, "rollout.sampling.stop_token_ids=[4]")
    async_2 = changed(records, "flow.async_ratio=1.5")
    cases = {
        "no tokens": checked(TokenBookkeeping(records)),
        "sound": book(tokens(0), tokens(1)),
        "a log-prob above 0": book(tokens(0, behavior_logprobs=[-0.5, 0.0009, 0.0011])),
        "infinite": book(tokens(0), tokens(1, behavior_logprobs=[-math.inf, -1, math.nan])),
        "not trained": book(tokens(0, behavior_logprobs=[math.nan, -1, 0], loss_mask=[0, 1, 1])),
        "after the end": book(tokens(0, response_ids=[0, 5, 0]), tokens(1)),
        "after a stop token": book(tokens(0), run=stop),
        "of another turn": book(tokens(0, response_ids=[0, 5, 0], loss_mask=[1, 0, 1]), run=agent),
        "many": book(*[tokens(k, behavior_logprobs=[1, 1, 1]) for k in range(9)]),
        "text": decoded("23", " 2 3 ", "23\ufffd", "2", "23"),
        "one of five other texts": decoded("23", "23", "23", "23", "24"),
        "one of four": decoded("23", "23", "23", "24"),
        "text of an environment": decoded("24", "24", run=agent),
        "no ages": checked(TokenAges(records)),
        "one version": ages(tokens(0)),
        "two versions": ages(
            tokens(0, versions=[0, 0, 1]), tokens(1), tokens(2, versions=[1, 2, 3])
        ),
        "falling": ages(tokens(0), tokens(1), versions=[[1, 0, 0], [2, 2, 1]]),
        "falling in a further segment": ages(
            tokens(0, loss_mask=[1, 0, 1], segment_starts=[1]),
            tokens(1, loss_mask=[1, 0, 1], segment_starts=[1]),
            versions=[[1, 0, 0], [3, 2, 1]],
        ),
        "lag 2": ages(tokens(0), run=async_2, ends=[ended(3, start=0, last=2)]),
        "lag 3": ages(tokens(0), run=async_2, ends=[ended(4, start=0, last=3)]),
        "newer": ages(tokens(0), ends=[ended(4, start=3, last=4), ended(4, outcome="dropped")]),
        "of a store": ages(
            tokens(0), run=changed(records, *REPLAY), ends=[ended(9), ended(1, trained=0)]
        ),
    }
    require("tokens", cases)


def test_the_rows_of_gradients_have_their_bounds(records: RunRecords, tmp_path: Path) -> None:
    def finite(*totals: float | None, **line: Any) -> str:
        lines = [
            {"step": step, **({} if total is None else {"policy/nonfinite": float(total)}), **line}
            for step, total in enumerate(totals, 1)
        ]
        return checked(FiniteSteps(), lines=lines)

    def moved(
        name: str, *bits: Mapping[str, str], settings: tuple[str, ...] = (), **line: Any
    ) -> str:
        run = replace(changed(records, *settings), run_dir=tmp_path / name)
        run.run_dir.mkdir()
        log = WeightLog(run.run_dir, 0)
        for step, digests in enumerate(bits):
            log.log(step, digests)
        log.close()
        given = {"policy/lr": 0.1, "policy/grad_norm": 1.0} | line
        lines = [{"step": step, **given} for step in range(1, len(bits))]
        return checked(MovedTensors(run), lines=lines)

    def steps(count: int, *still: str) -> list[dict[str, str]]:
        names = ("a.weight", "norm.weight", "a.bias")
        return [{n: f"{n} {0 if n in still else at}" for n in names} for at in range(count + 1)]

    bf16 = ("model.dtype=bfloat16",)
    cases = {
        "nothing": finite(None),
        "one": finite(0, 1, 1),
        "two in a row": finite(0, *range(1, 3), *[2] * 200),
        "three in a row": finite(*range(1, 4), *[3] * 400),
        "three of 300": finite(1, 1, 2, 2, 3, *[3] * 295),
        "three of 299": finite(1, 1, 2, 2, 3, *[3] * 294),
        "a resume": finite(2, 0, 0),
        "spikes and zeros": finite(0, 0, **{"policy/grad_norm": 0.0, "policy/grad_anomaly": 30.0}),
        "no weights": moved("none"),
        "3 changes": moved("three", *steps(3)),
        "4 changes": moved("four", *steps(4)),
        "still": moved("still", *steps(4, "norm.weight", "a.bias")),
        "still in bfloat16": moved("bf16", *steps(4, "norm.weight", "a.bias"), settings=bf16),
        "a matrix in bfloat16": moved("matrix", *steps(4, "a.weight"), settings=bf16),
        "skipped": moved("skipped", *steps(9), **{"policy/skipped": 1.0}),
        "not skipped": moved("unskipped", *steps(9), **{"policy/skipped": 0.0}),
        "a learning rate of 0": moved("lr", *steps(9), **{"policy/lr": 0.0}),
        "a gradient of 0": moved("norm", *steps(9), **{"policy/grad_norm": 0.0}),
        "other names": moved("names", *steps(9, "a.bias"), *[{"b": f"{at}"} for at in range(6)]),
        "adapters": moved("lora", *steps(4), settings=("policy.lora={rank: 2}",)),
    }
    require("gradients", cases)


def test_the_rows_of_rewards_have_their_bounds(records: RunRecords) -> None:
    def hacks(*rows: tuple[float, str, str], each: int = 32, prompt: str = "What is 1+1=?") -> str:
        check = RewardHacks()
        many = [row for row in rows for _ in range(each)]
        made = [
            replace(
                sample(number, 0),
                prompt=replace(sample(number, 0).prompt, text=prompt, fields={"answer": gold}),
                text=text,
                reward=reward,
            )
            for number, (reward, gold, text) in enumerate(many)
        ]
        check.block(block(*made))
        return shown(check.result())

    def jumps(*steps: tuple[float, float, float]) -> str:
        names = ("reward/mean", "response/length_mean", "policy/entropy")
        lines = [
            {"step": at, **dict(zip(names, values, strict=True))}
            for at, values in enumerate(steps, 1)
        ]
        return checked(RewardJumps(), lines=lines)

    def jump(reward: float, length: float, entropy: float) -> str:
        return jumps(*[(0.0, 100.0, 1.0)] * 5, *[(reward, length, entropy)] * 5, (1.0, 100.0, 1.0))

    honest, copied = (1.0, "2", "It is 2."), (1.0, "2", "What is 1+1=?")
    low = (0.0, "2", "no")
    cases = {
        "31 rewarded": hacks((1.0, "2", "2"), low, each=31),
        "32 rewarded": hacks((1.0, "2", "2"), low),
        "everything rewarded": hacks(copied),
        "nothing rewarded": hacks((0.0, "2", "What is 1+1=?")),
        "equal negative rewards": hacks((-1.0, "2", "What is 1+1=?")),
        "5 % suspicious": hacks(*[honest] * 19, copied, low, each=4),
        "more": hacks(*[honest] * 18, copied, low, each=4),
        "in a full window": hacks(*[honest] * 15, copied, each=64),
        "in the second of two windows": hacks(*[honest] * 16, copied, low, each=64),
        "one text for two answers": hacks((1.0, "2", "any"), (1.0, "3", "any "), low),
        "one text for one answer": hacks((1.0, "2", "any"), low),
        "a piece of the prompt": hacks((1.0, "7", "What"), low),
        "a short piece of the prompt": hacks((1.0, "7", "Wha"), low),
        "no gold answer": hacks((1.0, "", "2"), low),
        "a reward that is not a number": hacks((math.nan, "2", "2")),
        "long texts": hacks((1.0, "8" * 30, "What is 1+1=?" * 9), low),
        "9 steps": jumps(*[(0.5, 10.0, 1.0)] * 9),
        "10 steps": jumps(*[(0.5, 10.0, 1.0)] * 10),
        "steps without an entropy": jumps(*[(0.5, 10.0, math.nan)] * 20),
        "a jump": jump(0.5, 50.0, 0.4),
        "a rise of a quarter": jump(0.25, 50.0, 0.4),
        "a length of 0.6": jump(0.5, 60.0, 0.4),
        "half of the entropy": jump(0.5, 50.0, 0.5),
        "no rise": jumps(*[(0.5, 100.0, 1.0)] * 5, *[(0.5, 10.0, 0.1)] * 5),
    }
    require("rewards", cases)


def test_the_rows_of_the_data_name_each_fault(records: RunRecords) -> None:
    def use(run: RunRecords, *prompts: tuple[int, str]) -> str:
        made = [
            replace(sample(group, k), prompt=replace(sample(group, k).prompt, id=prompt))
            for k, (group, prompt) in enumerate(prompts)
        ]
        return checked(EpochUse(run), blocks=[block(*made)] if made else [])

    (start,) = records.starts

    def starting(*training: list[dict[str, Any]], held_out: Any = None) -> RunRecords:
        data = [{"training": one, "held_out": held_out or {}} for one in training]
        starts = [start.model_copy(update={"step": at, "data": one}) for at, one in enumerate(data)]
        return replace(records, starts=starts)

    own = start.data["training"]
    count = own[0]["count"]
    other = [{**own[0], "rows": "other"}]
    mixed = [own[0], own[0]]
    hub = changed(records, "data.train=hf:openai/gsm8k")
    gone = changed(records, f"data.train={records.run_dir}/gone.jsonl")

    def evaluating(*sets: dict[str, dict[str, Any]]) -> str:
        """Return the row of starts with these held-out sets."""
        starts = [
            start.model_copy(update={"step": at, "data": {**start.data, "held_out": one}})
            for at, one in enumerate(sets)
        ]
        return checked(DataUnchanged(replace(records, starts=starts)))

    a, b = {"path": "a.jsonl", "rows": "1"}, {"path": "b.jsonl", "rows": "2"}
    cases = {
        "nothing": use(records),
        "no number of rows": use(replace(records, starts=[]), (0, "a")),
        "a mixture": use(starting(mixed), (0, "a")),
        "a supervised run": use(changed(records, *SUPERVISED)),
        "each once": use(records, (0, "a"), (0, "a"), (1, "b")),
        "twice": use(records, (0, "a"), (1, "a"), (2, "a")),
        "two prompts": use(records, (0, "a"), (0, "b")),
        "in the next epoch": use(records, (count - 1, "a"), (count, "a"), (2 * count, "a")),
        "twice in the next epoch": use(records, (count, "a"), (2 * count - 1, "a")),
        "twice in the epoch before": use(records, (0, "a"), (count, "b"), (count - 1, "a")),
        "the data": checked(DataUnchanged(records)),
        "another path": checked(DataUnchanged(starting([{**own[0], "path": "moved"}]))),
        "other data at the first start": checked(DataUnchanged(starting(other, own))),
        "other data at the last start": checked(DataUnchanged(starting(own, other))),
        "another held-out set": evaluating({}, {"": a}, {"": b}, {"": b, "new": a}, {"": a}),
        "a changed held-out set": evaluating({"": a}, {"": b}, {"": {**a, "rows": "3"}}),
        "on the hub": checked(DataUnchanged(hub)),
        "files that are gone": checked(DataUnchanged(gone)).replace(str(records.run_dir), "RUN"),
    }
    require("data", cases)


def test_the_row_of_the_log_names_each_fault(records: RunRecords, tmp_path: Path) -> None:
    def integrity(run: RunRecords, feed: Callable[[LogIntegrity], None] = lambda log: None) -> str:
        log = LogIntegrity(run)
        feed(log)
        notes = "".join(f"  note: {note}\n" for note in log.notes)
        text = shown(log.result()) + notes
        return text.replace(str(run.run_dir), "RUN")

    def numbers(*each: list[int]) -> Callable[[LogIntegrity], None]:
        def feed(log: LogIntegrity) -> None:
            for one in each:
                log.outcomes(np.array(one, dtype=np.int64))

        return feed

    def groups(*outcomes: tuple[str, int]) -> Callable[[LogIntegrity], None]:
        def feed(log: LogIntegrity) -> None:
            log.outcomes(np.arange(1))
            for outcome, group in outcomes:
                log.group({"outcome": outcome, "group": group})

        return feed

    def unequal(log: LogIntegrity) -> None:
        log.misaligned(block(sample(0, 0), sample(1, 0)), [1])
        log.outcomes(np.arange(1))

    empty = replace(records, run_dir=tmp_path)
    cases = {
        "none": integrity(empty),
        "none of a supervised run": integrity(
            replace(changed(records, *SUPERVISED), run_dir=tmp_path)
        ),
        "none by settings": integrity(
            replace(changed(records, "samples.keep_mib=0"), run_dir=tmp_path)
        ),
        "without outcomes": integrity(records),
        "whole": integrity(records, numbers(list(range(288)))),
        "in another order": integrity(records, numbers([2, 0], [], [1])),
        "one lost": integrity(records, numbers(list(range(287)))),
        "one twice": integrity(records, numbers(list(range(288)), [5])),
        "other columns": integrity(records, unequal),
        "not admitted": integrity(
            records,
            groups(("admitted", 1), ("consumed", 1), ("dropped", 3), ("consumed", 2)),
        ),
        "admitted later": integrity(records, groups(("dropped", 3), ("admitted", 3))),
        "others": integrity(records, groups(("evaluated", 3), ("admitted", 3), ("trained", 4))),
    }
    require("log", cases)


def test_the_rows_of_log_probs_have_their_bounds(records: RunRecords, tmp_path: Path) -> None:
    def differences(
        name: str, *steps: tuple[list[int], list[float]], settings: tuple[str, ...] = ()
    ) -> str:
        """Return the rows of steps with these tokens and sums by depth, and one sample each."""
        run = replace(changed(records, *settings), run_dir=tmp_path / name)
        run.run_dir.mkdir()
        log = Lag0Log(run.run_dir, 1)
        for step, (tokens, sums) in enumerate(steps, 1):
            mean = sum(sums) / max(sum(tokens), 1)
            log.log(step, tokens=tokens, sums=sums, ids=[f"{step}-0"], means=[mean])
        log.close()
        ends = [
            ended(step, id=f"{step}-0", engine=step % 2, trained=sum(tokens))
            for step, (tokens, _) in enumerate(steps, 1)
        ]
        text = checked(LogprobDifferences(run), *ends)
        return text.replace(str(run.run_dir), "RUN")

    def even(count: int, mean: float = 1e-6, tokens: int = 128) -> list[Any]:
        return [([0, tokens], [0.0, tokens * mean])] * count

    one = 8.0 * 2.0**-23 / math.sqrt(12.0) * math.sqrt(2.0)
    cases = {
        "63 tokens": differences("63", ([63], [1e-6])),
        "64 tokens": differences("64", ([64], [1e-6])),
        "two depths": differences("depths", ([64, 64, 63], [64e-7, 64e-8, 1.0])),
        "8 roundings": differences("eight", ([1024], [1024 * 8 * one])),
        "more": differences("nine", ([1024], [1024 * 8.001 * one])),
        "bfloat16": differences("bf16", *even(2), settings=("model.dtype=bfloat16",)),
        "fp8": differences(
            "fp8",
            *even(2),
            settings=("model.dtype=bfloat16", "rollout.vllm={quantization: fp8_per_tensor}"),
        ),
        "4 medians": differences("medians", *even(2), *even(1, 4e-6)),
        "more than 4 medians": differences("above", *even(2), *even(1, 4.001e-6)),
        "5 versions": differences("five", *even(5)),
        "6 versions": differences("six", *even(4), *even(2, 2.99e-6)),
        "3 times": differences("grown", *even(4), *even(2, 3.01e-6)),
        "a third of 8": differences("third", *even(6), *even(2, 3.5e-6)),
        "no sum": differences("zero", *even(7, 0.0)),
        "not a number": differences("nan", *even(1), ([128], [math.nan])),
        "most are infinite": differences("inf", *even(2), *even(4, math.inf)),
        "all are infinite": differences("all inf", *even(6, math.inf)),
        "supervised": differences("sft", settings=SUPERVISED),
        "65 steps": differences("many", *even(66, tokens=64)),
    }
    require("log_probs", cases)


def test_the_row_of_the_chain_names_each_break(records: RunRecords) -> None:
    def chain(
        steps: Iterable[int], digests: Mapping[int, str], *starts: Mapping[str, Any], **line: Any
    ) -> str:
        (own,) = records.starts
        run = replace(
            records,
            run_dir=records.run_dir / "samples",  # without checkpoints
            digests=dict(digests),
            starts=[
                own.model_copy(update=one) for one in (line.pop("at", {"weights": "d0"}), *starts)
            ],
            config=line.pop("config", records.config),
        )
        lines = [
            {"step": step, **{name.replace("__", "/"): value for name, value in line.items()}}
            for step in steps
        ]
        return checked(WeightChain(run), lines=lines)

    four = {step: f"d{step}" for step in range(1, 5)}
    later = {step: digest for step, digest in four.items() if step > 2}
    again = {"step": 2, "weights": "d2"}
    adapters = changed(records, "policy.lora={rank: 2}").config
    cases = {
        "no digests": chain(range(1, 5), {}),
        "sound": chain(range(1, 5), four),
        "a lost beginning": chain(range(3, 5), four),
        "a run that begins with a checkpoint": chain(
            range(3, 5), later, at={"step": 2, "weights": "d2"}
        ),
        "a lost start": chain(range(1, 5), four, at={"step": 2, "weights": "d2"}),
        "a gap": chain((1, 2, 4), four),
        "no digest": chain(range(1, 6), four),
        "skipped": chain(range(1, 5), dict.fromkeys(four, "d"), policy__skipped=1.0),
        "skipped, and changed": chain(range(1, 3), four, policy__skipped=1.0),
        "not skipped": chain(range(1, 3), four, policy__skipped=0.0),
        "a resume": chain(range(1, 5), four, again),
        "a resume from other weights": chain(range(1, 5), four, {**again, "weights": "x"}),
        "a repeated resume": chain(
            range(1, 5), four, {"step": 3, "weights": "x"}, {**again, "weights": "y"}
        ),
        "a resume of adapters": chain(
            range(1, 5), four, {**again, "weights": "x"}, config=adapters
        ),
        "a resume of adapters on another device": chain(
            range(1, 5), four, {**again, "weights": "x", "device": "cuda"}, config=adapters
        ),
    }
    require("chain", cases)

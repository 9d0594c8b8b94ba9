"""Streamed groups: the parts that the controller hands out, the record of parts in the log, the
methods that can be streamed, and the refused combinations."""

from __future__ import annotations

import asyncio
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from pydantic import ValidationError
from rich.console import Console

from megatron_async_rl.config.load import load
from megatron_async_rl.config.objective import ObjectiveConfig
from megatron_async_rl.config.problem import UserError
from megatron_async_rl.config.rules import validated
from megatron_async_rl.config.schema import SamplesConfig
from megatron_async_rl.config.stream_rules import KEY
from megatron_async_rl.flow.controller_spec import Handout
from megatron_async_rl.flow.sample_log import SampleLogWriter
from megatron_async_rl.flow.staleness import StalenessViolated
from megatron_async_rl.flow.step_parts import StepParts
from megatron_async_rl.objectives.objective import Objective
from megatron_async_rl.plan.pace import staleness_law
from megatron_async_rl.policy.batch_shares import split
from megatron_async_rl.policy.streamed_step import ReadsOtherGroups, require_same
from megatron_async_rl.samples.rank_batch import NO_RANK
from megatron_async_rl.samples.recorded import RecordedBatches
from megatron_async_rl.simulate.choose import predict_from_run
from megatron_async_rl.verify.numerics import numerics_overrides
from tests.cases import looped
from tests.logged_samples import row, sample
from tests.method_settings import every, label
from tests.train_batches import columns, ragged_batch, rank_batches, streamed
from tests.unit.fake_engine import FakeEngine
from tests.unit.flow_setup import begin, flow, groups_of, run, stage, until
from tests.unit.scheduler_harness import SchedulerHarness
from tests.written_run import config_tree, write_run

STREAM = {"async_ratio": 0.0, "stream": "groups"}
PARTS = ((2,), (0, 3), (1, 4))


def config(**changes: Any) -> Any:
    """Return a valid streamed configuration with changes; keys are paths with `__`."""
    tree = config_tree()
    tree["flow"] |= STREAM
    for path, value in changes.items():
        node, *rest = tree, *path.split("__")
        for name in rest[:-1]:
            node = node.setdefault(name, {})
        node[rest[-1]] = value
    return validated(tree)


def test_a_synchronous_run_with_engines_of_its_own_can_be_streamed() -> None:
    assert config().flow.stream == "groups"
    assert config(objective__advantage={"name": "gae", "whiten": False}, objective__value={})
    assert config(objective__loss="trajectory_balance", objective__reference={})


@looped(
    ("changes", "reason"),
    [
        ({"flow__async_ratio": 1}, "set flow.async_ratio: 0, or flow.stream: none"),
        ({"flow__selection": "windowed"}, "set flow.selection: oldest_first"),
        ({"flow__late": "drop"}, "set async_ratio above 0"),
        ({"rollout__placement": "colocated"}, "set rollout.placement: disaggregated"),
        (
            {
                "objective": {"loss": "sft", "advantage": "none"},
                "rollout": None,
                "flow__group_size": 1,
            },
            "objective.loss: sft has no engines",
        ),
        ({"objective__minibatches": 2}, "set objective.minibatches: 1"),
        ({"objective__epochs": 2}, "set objective.epochs: 1"),
        (
            {"objective": {"loss": "reinforce", "advantage": {"name": "opob", "mode": "exact"}}},
            "set mode: cheap",
        ),
        ({"policy__parallel__overlap_grad_reduce": True}, "remove overlap_grad_reduce"),
        ({"policy__lora": {"rank": 4, "dropout": 0.1}}, "set policy.lora.dropout: 0"),
        ({"policy__fp8": {"recipe": "delayed"}}, "delayed; set another recipe"),
        ({"objective__loss": "m2po"}, "objective.loss: m2po reads all groups"),
        ({"objective__loss": "bapo"}, "objective.loss: bapo reads all groups"),
        ({"objective__advantage": "reinforce_pp"}, "objective.advantage: reinforce_pp reads all"),
        (
            {"objective__advantage": "reinforce_pp_baseline"},
            "objective.advantage: reinforce_pp_baseline reads all",
        ),
        (
            {"objective": {"advantage": "gae", "value": {}}},
            "objective.advantage: gae reads all groups of the batch first; set whiten: false",
        ),
        (
            {
                "objective": {
                    "proximal": "recompute",
                    "corrections": [{"name": "tis", "normalize": True}],
                }
            },
            "objective.corrections: tis reads all groups of the batch first; set normalize: false",
        ),
        (
            {"objective": {"loss": "gmpo", "entropy_bonus": 0.1}},
            "objective.entropy_bonus over tokens; remove entropy_bonus",
        ),
        (
            {"objective": {"renormalize": True, "kl": {"coef": 0.1}}},
            "set objective.renormalize: false",
        ),
        (
            {"run__numerics": {"prompts": 4, "long_prompt": 0}},
            "run.numerics, which trains nothing; set flow.stream: none",
        ),
    ],
)
def test_each_setting_that_does_not_fit_is_refused_by_name(
    changes: dict[str, Any], reason: str
) -> None:
    with pytest.raises(ValidationError) as refused:
        config(**changes)
    assert reason in str(refused.value)


def test_every_refusal_names_the_key_and_another_value() -> None:
    with pytest.raises(ValidationError, match=f"{KEY}.*flow.stream: none"):
        config(objective__loss="m2po")


def test_the_check_before_a_run_does_not_stream(tmp_path: Path) -> None:
    given = config(run__dir=str(tmp_path))
    (overridden,) = [one for one in numerics_overrides(given) if one.startswith("flow=")]
    assert '"stream": "none"' in overridden


# Methods


def _objectives() -> dict[str, ObjectiveConfig]:
    """Return an objective for every variant of every method that fits into one."""
    found: dict[str, ObjectiveConfig] = {}
    for section in ("loss", "advantage", "corrections"):
        for method in every(section):
            for others in (
                {},
                {"proximal": "recompute"},
                {"proximal": "recompute", "loss": "reinforce"},
                {"loss": "reinforce", "aggregation": "seq-mean-token-mean"},
                {"reference": {}},
                {"value": {}},
            ):
                given = (method,) if section == "corrections" else method
                try:
                    found[f"{section} {label(method)}"] = ObjectiveConfig(
                        **{**others, section: given}
                    )
                except ValidationError:
                    continue
                break
    return found


def test_a_method_declares_if_it_reads_other_groups() -> None:
    alone, complete = streamed(ragged_batch(seed=3, version=2), PARTS)
    whole = columns(complete)
    whole = whole.select(np.flatnonzero(whole.valid))
    rng = torch.Generator().manual_seed(1)
    given = {
        name: torch.randn(len(whole.rows), generator=rng, dtype=torch.float64) - 4.0
        for name in ("logp", "logp_ref", "values", "logp_prox")
    } | {"sum_p_squared": torch.rand(len(whole.rows), generator=rng, dtype=torch.float64)}
    declared, tried = set(), _objectives()
    for name, settings in tried.items():
        objective = Objective(settings)
        if settings.advantage.name == "opob" and settings.advantage.mode == "exact":
            continue
        methods = (settings.loss, settings.advantage, *settings.corrections)
        targets = objective.decide(whole, objective.prepare(whole, given))
        reads = False
        for number, part in enumerate(alone):
            samples = columns(part)
            samples = samples.select(np.flatnonzero(samples.valid))
            rows = np.flatnonzero(whole.part == number)
            tokens = torch.from_numpy(np.isin(whole.rows, rows))
            own = objective.decide(
                samples, objective.prepare(samples, {k: v[tokens] for k, v in given.items()})
            )
            try:
                require_same(own.whole, targets.whole, whole, rows)
            except ReadsOtherGroups:
                reads = True
        # Thresholds of a decision are numbers of the batch, which no part has.
        decides = any(
            name.startswith("objective/clip") or name.endswith("cap") for name in targets.metrics
        )
        if reads or decides:
            declared.add(name)
        assert (reads or decides) == any(method.needs_batch for method in methods), name
    assert len(declared) >= 8
    assert len(tried) > 40


# Batches


@pytest.mark.parametrize("sharing", [None, 0.2])
@pytest.mark.parametrize("data_parallel", [1, 2, 3])
def test_a_part_has_the_same_owners_alone_and_in_its_batch(
    data_parallel: int, sharing: float | None
) -> None:
    alone, complete = streamed(ragged_batch(group_size=4), PARTS)
    for rank in range(data_parallel):
        whole = rank_batches(complete, data_parallel, sharing=sharing)[rank]
        for number, part in enumerate(alone):
            own = rank_batches(part, data_parallel, sharing=sharing)[rank]
            chosen = whole.select(np.flatnonzero(whole.part == number))
            assert own.ids.equals(chosen.ids)
            assert own.owner.tolist() == chosen.owner.tolist()
            assert own.shared.equals(chosen.shared)
            assert (own.token_starts >= 0).tolist() == (chosen.token_starts >= 0).tolist()
            assert own.part.tolist() == [number] * len(own)


@pytest.mark.parametrize("parts", [(), (1, 0, 1)])
def test_the_log_has_the_part_of_each_group(tmp_path: Path, parts: tuple[int, ...]) -> None:
    log = SampleLogWriter(tmp_path, SamplesConfig())
    log.begin(0)
    batch = [[row(sample(group, k), group) for k in range(2)] for group in range(3)]
    for group, samples in enumerate(batch):
        log.admitted(group, 4)
        for one in samples:
            log.finished(one)
    log.trained([0, 1, 2], batch, 4, parts)
    log.close()
    found = RecordedBatches(tmp_path).batch(4)
    assert found.parts == parts
    assert found.complete
    assert found.samples["group"].to_pylist() == [0, 0, 1, 1, 2, 2]


# Scheduler and controller


def test_parts_have_finished_groups_once_and_consume_nothing() -> None:
    harness = SchedulerHarness(4, 0.0)
    harness.admit()
    scheduler, parts = harness.scheduler, StepParts(streams=True)
    assert parts.next(scheduler, 0) is None
    harness.finish(2, 0)
    first = parts.next(scheduler, 0)
    assert first is not None
    assert (first.complete, first.parts) == (False, (0, 0))
    assert first.samples["id"].to_pylist() == ["0-0", "0-1", "2-0", "2-1"]
    assert parts.next(scheduler, 0) is None, "no group twice"
    assert parts.next(scheduler, 1) is None, "not those of another step"
    harness.finish(3)
    second = parts.next(scheduler, 0)
    assert second is not None
    assert second.parts == (1,)
    assert scheduler.counts()["consumed"] == 0
    assert [index for index, _ in scheduler.pending()] == [0, 1, 2, 3]
    harness.finish(1)
    groups = scheduler.take(0)
    assert groups is not None
    assert parts.complete(groups) == (0, 2, 0, 1)
    assert parts.complete(groups[:2]) == (0, 0), "the next batch begins with part 0"


def test_batches_that_are_not_streamed_have_no_parts() -> None:
    harness = SchedulerHarness(2, 0.0)
    harness.admit()
    harness.finish(0)
    parts = StepParts(streams=False)
    assert parts.next(harness.scheduler, 0) is None
    harness.finish(1)
    groups = harness.scheduler.take(0)
    assert groups is not None
    assert parts.complete(groups) == ()


def test_a_group_that_was_handed_out_must_be_in_its_batch() -> None:
    harness = SchedulerHarness(2, 0.0)
    harness.admit()
    harness.finish(0)
    parts = StepParts(streams=True)
    assert parts.next(harness.scheduler, 0) is not None
    harness.finish(1)
    groups = harness.scheduler.take(0)
    assert groups is not None
    with pytest.raises(RuntimeError, match=r"groups \[0\] were handed out"):
        parts.complete(groups[1:])


def test_a_part_obeys_the_staleness_law() -> None:
    harness = SchedulerHarness(2, 0.0)
    harness.admit()
    harness.finish(0, 1)
    assert harness.scheduler.take(0) is not None
    harness.scheduler.advance(1)
    harness.admit()
    for k in range(2):
        harness.answer(f"2-{k}", versions=(0, 1))
    with pytest.raises(StalenessViolated, match=r"flow\.async_ratio 0 permits 0"):
        StepParts(streams=True).next(harness.scheduler, 1)


def test_the_controller_hands_out_groups_as_they_finish() -> None:
    async def body() -> None:
        engine = FakeEngine(lambda request: 10.2 * (request.group % 3 + 1))
        controller = await begin([engine], flow(3, 0.0, stream="groups"))
        for version in range(2):
            handed: list[Handout] = []
            started = asyncio.get_running_loop().time()
            while not handed or not handed[-1].batch.complete:
                handout = await controller.next_batch(version)
                assert handout is not None
                # At once, not when the stop file is next looked for.
                waited = asyncio.get_running_loop().time() - started
                assert waited == pytest.approx(10.2 * (len(handed) + 1), abs=0.05)
                handed.append(handout)
                state = await controller.state()
                consumed = 3 * (version + handout.batch.complete)
                assert state.state["consumed"] == consumed
            sizes = [len(groups_of(one.batch)) for one in handed]
            assert sizes == [1, 1, 3]
            assert handed[-1].batch.parts == (0, 1, 2)
            assert [bool(one.metrics) for one in handed] == [False, False, True]
            await stage(controller, version + 1)
        await controller.close()

    run(body)


def test_a_group_of_a_lost_engine_arrives_in_a_later_part() -> None:
    async def body() -> None:
        slow, fast = FakeEngine(lambda request: 1000.0), FakeEngine(lambda request: 5.0)
        controller = await begin([slow, fast], flow(2, 0.0, stream="groups"))
        first = await controller.next_batch(0)
        assert first is not None
        assert not first.batch.complete
        slow.fail(RuntimeError("lost"))
        slow.delay = lambda request: 5.0
        rest = await controller.next_batch(0)
        assert rest is not None
        assert rest.batch.complete
        assert {group.index for group in groups_of(rest.batch)} == {0, 1}
        assert set(rest.batch.parts) == {0, 1}
        tokens = [sample.versions for group in groups_of(rest.batch) for sample in group.samples]
        assert {version for versions in tokens for version in versions} == {0}
        assert slow.asked, "the lost engine had a group"
        await until(lambda: controller.stats()["consumed"] == 2)
        await controller.close()

    run(body)


def test_a_plan_describes_what_streams(tmp_path: Path) -> None:
    file = write_run(tmp_path)
    text = staleness_law(load(file, ["flow.async_ratio=0", "flow.stream=groups"]))
    assert "stream     groups:" in text
    assert "stream " not in staleness_law(load(file, ["flow.async_ratio=0"]))


def test_a_simulation_of_a_streamed_run_is_refused(tmp_path: Path) -> None:
    streamed_run = load(write_run(tmp_path), ["flow.async_ratio=0", "flow.stream=groups"])
    with pytest.raises(UserError, match=r"flow\.stream\n.*\n.*add flow\.stream=none"):
        predict_from_run(streamed_run, [], (), 1, 0, Console())


def test_parts_are_balanced_over_data_parallel_ranks_together() -> None:
    groups, ranks = 12, 4
    alone, complete = streamed(
        ragged_batch(groups=groups, group_size=2), [(group,) for group in range(groups)]
    )
    owner = split(complete, ranks)[0].column("owner").to_numpy()
    counts = np.bincount(owner[owner != NO_RANK], minlength=ranks)
    # Two samples of a part go to two ranks; one reward failed.
    assert counts.sum() == 2 * groups - 1
    assert counts.max() - counts.min() <= 1
    apart = np.concatenate([split(part, ranks)[0].column("owner").to_numpy() for part in alone])
    assert apart.tolist() == owner.tolist()

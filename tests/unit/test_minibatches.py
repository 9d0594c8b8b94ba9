"""A batch is divided into minibatches of whole groups, and what does not go with several optimizer
steps per batch is refused."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
import torch

from megatron_async_rl.config.load import load
from megatron_async_rl.config.objective import ObjectiveConfig
from megatron_async_rl.config.problem import ConfigError
from megatron_async_rl.metrics.over_steps import over_steps
from megatron_async_rl.objectives.objective import Objective, valid_samples
from megatron_async_rl.plan.machine import Machine
from megatron_async_rl.plan.plan import make_plan
from megatron_async_rl.policy.batch_shares import divide
from megatron_async_rl.report.metric_rows import MetricRows
from megatron_async_rl.report.run_data import summarise_run
from megatron_async_rl.samples import Prompt
from megatron_async_rl.samples.rows import TrainBatch
from tests.token_batches import decided, part_of
from tests.train_batches import columns, make_sample, ragged_batch, rank_batches
from tests.written_run import write_run

GROUP = np.repeat(np.arange(10), 3)


def test_one_minibatch_is_the_batch_in_its_order():
    (rows,) = divide(GROUP, version=7, minibatches=1)
    assert rows.tolist() == list(range(30))


def test_every_sample_is_in_one_minibatch_with_its_whole_group():
    parts = divide(GROUP, version=7, minibatches=4)
    assert sorted(np.concatenate(parts).tolist()) == list(range(30))
    groups = [set(GROUP[rows].tolist()) for rows in parts]
    assert sum(map(len, groups)) == 10
    assert sorted(map(len, groups)) == [2, 2, 3, 3]


def test_the_version_alone_draws_the_division():
    again = [[rows.tolist() for rows in divide(GROUP, version=7, minibatches=4)] for _ in range(2)]
    other = [rows.tolist() for rows in divide(GROUP, version=8, minibatches=4)]
    assert again[0] == again[1] != other
    assert [part for part in again[0] if part != sorted(part)] == []


def test_fewer_groups_than_minibatches_leave_some_empty():
    parts = divide(np.array([4, 4, 9]), version=0, minibatches=3)
    assert sorted(len(rows) for rows in parts) == [0, 1, 2]


def test_each_minibatch_is_balanced_over_the_data_parallel_ranks():
    batch = ragged_batch(groups=8, group_size=4, seed=2)
    mine = rank_batches(batch, 2, minibatches=4)[0]
    valid = np.flatnonzero(mine.valid)
    for rows in divide(mine.group[valid], batch.version, 4):
        tokens = (mine.prompt_lengths + mine.lengths)[valid[rows]]
        shares = np.bincount(mine.owner[valid[rows]], tokens, minlength=2)
        assert abs(shares[0] - shares[1]) <= tokens.max()


def test_metrics_of_steps_are_combined_as_the_catalogue_states():
    steps = [
        {"policy/loss": 1.0, "policy/grad_anomaly": 30.0, "gac/skips": 1.0,
         "time/optimizer_s": 2.0},
        {"policy/loss": 3.0, "policy/grad_anomaly": 0.0, "gac/skips": 2.0, "time/optimizer_s": 3.0,
         "gac/cosine": 0.25, "ratio/logp_diff_lag0_max": 1.0},
        {"policy/loss": 2.0, "policy/grad_anomaly": 0.0, "gac/skips": 2.0, "time/optimizer_s": 1.0,
         "gac/cosine": 0.75, "ratio/logp_diff_lag0_max": 5.0},
    ]  # fmt: skip
    assert over_steps(steps) == {
        "policy/loss": 2.0,
        "policy/grad_anomaly": 30.0,
        "gac/skips": 2.0,
        "time/optimizer_s": 6.0,
        "gac/cosine": 0.5,
        "ratio/logp_diff_lag0_max": 1.0,
    }
    assert over_steps(steps[:1]) == steps[0]


@pytest.mark.parametrize(
    ("overrides", "says"),
    [
        (["objective.minibatches=5"], ("objective.minibatches: 5", "flow.prompts_per_step: 4")),
        (
            ["objective.epochs=2", "controls=[gac]"],
            ("gac", "same samples", "objective.minibatches to at least 2", "objective.epochs: 1"),
        ),
        (["objective.epochs=0"], ("above 0",)),
        (["objective.epochs=2", "controls=[{name: gac, calibrate: {steps: 400}}]",
          "objective.minibatches=2", "run.steps=100"], ("400",)),
        (["objective.corrections=[opsm]", "objective.proximal=recompute"], ("epochs above 1",)),
    ],
)  # fmt: skip
def test_what_does_not_go_together_is_refused_with_key_and_fix(
    tmp_path: Path, overrides: list[str], says: tuple[str, ...]
) -> None:
    with pytest.raises(ConfigError) as caught:
        load(write_run(tmp_path), ["flow.prompts_per_step=4", *overrides])
    text = " ".join(f"{one.key} {one.what} {one.fix}" for one in caught.value.problems)
    assert [word for word in says if word not in text] == []


def test_several_steps_make_opsm_and_gac_sensible(tmp_path: Path) -> None:
    config = load(
        write_run(tmp_path),
        [
            "flow.prompts_per_step=4",
            "objective={minibatches: 2, epochs: 3, corrections: [opsm], proximal: recompute}",
            "controls=[{name: gac, calibrate: {steps: 10}}]",
            "run.steps=7",
        ],
    )
    assert config.optimizer_steps == 42
    assert config.fresh_steps == 2, "11 optimizer steps are in two batches of six"


def test_the_plan_refuses_minibatches_that_leave_ranks_without_a_sample(tmp_path: Path) -> None:
    settings = ["flow.prompts_per_step=4", "flow.group_size=2", "policy.parallel.ranks=4"]
    found = {}
    for minibatches in (2, 4):
        config = load(write_run(tmp_path), [*settings, f"objective.minibatches={minibatches}"])
        plan = make_plan(config, Machine(cores=8, memory=2**36, shared_memory=2**33, gpus=()), None)
        found[minibatches] = [p for p in plan.problems if p.key == "objective.minibatches"]
    assert found[2] == []
    (problem,) = found[4]
    assert "a minibatch has 2 samples for 4 data-parallel ranks" in problem.what
    assert "at most 2" in problem.fix


def test_the_refusals_advice_is_not_refused_in_its_turn(tmp_path: Path) -> None:
    """12 samples on 6 ranks: two minibatches of whole groups would leave one with a single
    group of 4."""
    settings = ["flow.prompts_per_step=3", "flow.group_size=4", "policy.parallel.ranks=6"]
    machine = Machine(cores=8, memory=2**36, shared_memory=2**33, gpus=())

    def refused(minibatches: int) -> list[str]:
        config = load(write_run(tmp_path), [*settings, f"objective.minibatches={minibatches}"])
        problems = make_plan(config, machine, None).problems
        return [p.fix for p in problems if p.key == "objective.minibatches"]

    (fix,) = refused(3)
    assert "at most 1," in fix
    assert refused(2)
    assert not refused(1)


def ppo(**more) -> Objective:
    return Objective(ObjectiveConfig(proximal="recompute", **more))


def test_the_proximal_policy_is_precomputed_once_a_batch_makes_several_steps():
    assert ppo().needs == frozenset()
    assert ppo(epochs=2).needs == ppo(minibatches=2).needs == {"logp"}
    assert ppo(epochs=2).needs_again == frozenset()
    again = Objective(ObjectiveConfig(loss="m2po", epochs=2))
    assert again.needs_again == {"logp"}


def test_a_ratio_is_to_the_batchs_start_and_ppo_clips_it():
    objective, batch = ppo(epochs=2), columns(ragged_batch())
    start = torch.from_numpy(batch.behavior_logprobs).double()[
        np.isin(batch.rows, np.flatnonzero(batch.valid))
    ]
    targets = decided(objective, batch, {"logp": start - 1.0})
    part = part_of(targets, range(len(targets.samples)))
    logp = (start - 1.0 + 0.5).requires_grad_()
    loss = objective.loss(part.replace(logp=logp), targets.denominators, corrected=False)
    up = (part.advantages > 0) & (part.mask > 0)
    assert torch.equal(loss.clipped & (part.mask > 0), up), "r is e^0.5 everywhere"


def test_a_minibatch_has_its_own_denominators_and_the_batchs_advantages():
    objective, batch = ppo(minibatches=2), columns(ragged_batch())
    samples = valid_samples(batch)
    whole = objective.prepare(samples, {"logp": torch.zeros(len(samples.rows))})
    first, second = divide(samples.group, batch.version, 2)
    parts = [
        objective.decide(samples.select(rows), whole.select(torch.from_numpy(rows)))
        for rows in (first, second)
    ]
    tokens = [part.denominators.tokens for part in parts]
    assert sum(tokens) == objective.decide(samples, whole).denominators.tokens
    assert tokens[0] == int(samples.trained[first].sum())
    for rows, part in zip((first, second), parts, strict=True):
        place = np.isin(samples.rows, rows)
        assert torch.equal(part.whole.advantages, whole.advantages[place])
        assert torch.equal(part.whole.rewards, whole.rewards[rows])
        assert part.whole.sequence.tolist() == part.samples.rows.tolist()
        assert part.samples.ids.to_pylist() == samples.ids.take(rows).to_pylist()


def test_decisions_are_made_again_from_the_steps_own_log_probs():
    objective, batch = Objective(ObjectiveConfig(loss="m2po", epochs=2)), columns(ragged_batch())
    behavior = torch.from_numpy(batch.behavior_logprobs)[
        np.isin(batch.rows, np.flatnonzero(batch.valid))
    ]
    assert decided(objective, batch, {"logp": behavior}).metrics == {}, "no token is harmful"
    moved = decided(objective, batch, {"logp": behavior}, {"logp": behavior + 0.3})
    assert moved.metrics["objective/second_moment"] == pytest.approx(0.09)


def test_the_largest_lag_is_that_of_a_token_that_is_trained_on():
    """Neither of a failed sample nor of what an environment wrote."""
    prompt = Prompt(id="p", text="", token_ids=(1,))
    group = (
        make_sample(prompt, "0-0", [3, 3], versions=[0, 6], mask=[0, 1]),
        make_sample(prompt, "0-1", [3], versions=[1], reward_error="no"),
    )
    batch = columns(TrainBatch.of(7, [group]))
    assert valid_samples(batch).lag_max == 1


def test_the_summary_counts_gacs_optimizer_steps_not_lines():
    counts = [{"gac/kept": 4.0, "gac/projected": 4.0, "gac/skips": 0.0, "gac/regime": 1.0}]
    counts.append({"gac/kept": 9.0, "gac/projected": 6.0, "gac/skips": 1.0, "gac/regime": 2.0})
    summary = summarise_run(MetricRows(counts), None)
    assert summary.regimes == {"kept": 9, "projected": 6, "skipped": 1}

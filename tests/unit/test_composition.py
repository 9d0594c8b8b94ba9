"""Methods that the configuration accepts work together; others are refused before a run starts."""

from __future__ import annotations

import sys

import pytest
import torch

from megatron_async_rl import cli
from megatron_async_rl.config.load import dump, load
from megatron_async_rl.config.problem import ConfigError
from megatron_async_rl.objectives.objective import Objective, valid_samples
from tests.cases import looped
from tests.combinations import factors, label, pairwise, search, stored, trained
from tests.method_settings import ADVANTAGES, CORRECTIONS, LOSSES
from tests.thorough import THOROUGH, thorough
from tests.token_batches import decided, part_of
from tests.train_batches import columns, ragged_batch
from tests.written_run import write_run

CUTS = ([[0, 1, 2, 3, 4]], [[3], [0, 4], [], [2, 1]])
"""Five samples of a batch as micro-batches; a rank without samples gets a micro-batch without
rows."""


def surveyed(batch, objective, seed):
    """Return columns as in a survey, and log-probs near those of sampling: ([N] each, logp [N])."""
    generator = torch.Generator().manual_seed(seed)
    behavior = torch.tensor(valid_samples(batch).behavior_logprobs)

    def near():
        return behavior + 0.3 * torch.randn(len(behavior), generator=generator)

    logp = near()
    everything = {
        "logp": logp,
        "logp_prox": near(),
        "logp_ref": near(),
        "values": torch.randn(len(behavior), generator=generator),
        "sum_p_squared": torch.rand(len(behavior), generator=generator),
    }
    return {name: everything[name] for name in objective.needs}, logp


def loss_and_gradient(objective, targets, logp, rows_of_parts, dtype):
    """Return (loss, gradient by log-prob) over all micro-batches, each detached."""
    logp = logp.to(dtype).requires_grad_()
    nobody = torch.zeros(1, dtype=dtype, requires_grad=True)
    total = 0.0 * nobody.sum()
    for rows in rows_of_parts:
        part = part_of(targets, rows, dtype)
        starts = targets.samples.starts
        index = [torch.arange(starts[i], starts[i + 1]) for i in rows]
        own = logp[torch.cat(index)] if rows else nobody
        part = part.replace(logp=own, entropy=-own)
        if part.values is not None:
            part = part.replace(values_old=part.values)
        parts = objective.loss(part, targets.denominators, corrected=targets.corrected).parts
        assert rows or not parts.detach().any()
        total = total + parts.sum()
    gradient, of_nobody = torch.autograd.grad(total, (logp, nobody))
    assert of_nobody.item() == 0.0
    return total.detach(), gradient


def test_every_registered_method_is_in_some_combination():
    configs = pairwise()
    assert {config.objective.advantage.name for config in configs} == set(ADVANTAGES)
    assert {config.objective.loss.name for config in configs} == set(LOSSES)
    assert {
        correction.name for config in configs for correction in config.objective.corrections
    } == set(CORRECTIONS)
    assert {config.objective.proximal for config in configs} == set(factors()["proximal"])
    assert {control.name for config in configs for control in config.controls} == set(
        factors()["first control"]
    ) - {None}
    assert {config.objective.loss.name for config in trained()} == set(LOSSES)
    assert any(
        len(config.objective.corrections) == 2 and len(config.controls) == 2 for config in configs
    )


@thorough
def test_the_stored_combinations_are_those_that_a_search_finds():
    assert search() == stored(), "run python -m tests.combinations"


@looped("config", pairwise, ids=label)
def test_a_combination_has_a_finite_loss_and_gradient_whatever_the_cut(config):
    for seed in (0, 1) if THOROUGH else (0,):
        batch = columns(ragged_batch(groups=2, group_size=3, seed=seed, max_response=6))
        objective = Objective(config.objective)
        found, logp = surveyed(batch, objective, seed)
        targets = decided(objective, batch, found)
        found = [loss_and_gradient(objective, targets, logp, cut, torch.float64) for cut in CUTS]
        for value, gradient in [
            *found,
            loss_and_gradient(objective, targets, logp, CUTS[1], torch.float32),
        ]:
            assert torch.isfinite(value)
            assert torch.isfinite(gradient).all()
        torch.testing.assert_close(found[0], found[1], atol=1e-9, rtol=1e-9)


@looped(
    ("overrides", "reasons"),
    [
        (
            ["objective={loss: oapl, advantage: none}", "flow.async_ratio=1"],
            ["oapl", "a single weight version", "flow.async_ratio: 0"],
        ),
        (["objective={loss: ppo_clip, advantage: opob}"], ["opob", "ppo_clip", "reinforce"]),
        (
            ["objective={loss: trajectory_balance, advantage: none}"],
            ["trajectory_balance", "reference: {}"],
        ),
        (["objective.advantage=grpo", "flow.group_size=1"], ["grpo", "group", "at least 2"]),
        (
            [
                "objective={loss: reinforce, advantage: none}",
                "flow={prompts_per_step: 4, group_size: 1, dynamic_sampling: true}",
            ],
            ["dynamic_sampling", "of one response"],
        ),
        (
            ["objective={loss: kimi, advantage: none}", "flow.group_size=1"],
            ["kimi", "group", "at least 2"],
        ),
        (["objective={loss: gmpo, aggregation: token-mean}"], ["gmpo", "per sequence", "seq-mean"]),
        (
            ["objective={loss: gmpo, proximal: recompute, corrections: [tis]}"],
            ["tis", "gmpo", "sequence level"],
        ),
        (
            ["objective={loss: dppo_tv, proximal: recompute, corrections: [tis]}"],
            ["tis", "dppo_tv", "already contains"],
        ),
        (["objective.corrections=[tis]"], ["tis", "proximal: behavior", "proximal: recompute"]),
        (["objective={loss: topr, advantage: grpo}"], ["topr", "no advantage", "advantage: none"]),
        (["objective.advantage=gae"], ["gae", "add value"]),
        (["controls=[gac, matched_norm]"], ["gac", "matched_norm", "one per run"]),
    ],
    ids=lambda value: value[0] if "=" in value[0] else "",
)
def test_methods_that_do_not_compose_are_refused_with_the_reason(
    overrides, reasons, tmp_path, monkeypatch, capsys
):
    file = write_run(tmp_path)
    monkeypatch.setattr(sys, "argv", ["mar", "plan", str(file), *overrides])
    with pytest.raises(SystemExit) as left:
        cli.main()
    assert left.value.code == 2
    said = capsys.readouterr().err
    for reason in reasons:
        assert reason in said


def test_a_loss_that_reads_no_advantage_has_none_where_none_is_named(tmp_path):
    file = write_run(tmp_path)
    assert load(file, ["objective.loss=topr"]).objective.advantage.name == "none"
    assert load(file, ["objective.loss=gspo"]).objective.advantage.name == "grpo"
    kept = tmp_path / "kept.yaml"
    kept.write_text(dump(load(file, ["objective.loss=topr"])))
    assert load(kept) == load(file, ["objective.loss=topr"])


def test_a_limit_permits_its_own_value_and_not_the_next(tmp_path):
    file = write_run(tmp_path)  # four steps of four groups, async_ratio 1
    gac = "controls=[{name: gac, calibrate: {steps: %d}}]"
    momentum = "controls=[{name: momentum_by_alignment, beta1_min: %g}]"
    rare = ["policy.optimizer.moment_dtype=bfloat16", "model.dtype=bfloat16"]
    for key, permitted, refused in (
        ("minibatches", ["objective.minibatches=4"], ["objective.minibatches=5"]),
        (
            "snapshots",
            ["objective.proximal=snapshot", "objective.snapshots=2"],
            ["objective.proximal=snapshot", "objective.snapshots=1"],
        ),
        ("calibrate", [gac % 2], [gac % 3]),
        ("minibatches", ["objective.minibatches=2", "objective.epochs=2", "controls=[gac]"], None),
        ("minibatches", None, ["objective.minibatches=1", "objective.epochs=2", "controls=[gac]"]),
        ("beta1_min", [momentum % 0.89], [momentum % 0.9]),
        (
            "betas",
            [*rare, "policy.optimizer.betas=[0.9, 0.996]"],
            [*rare, "policy.optimizer.betas=[0.9, 0.9961]"],
        ),
    ):
        if permitted is not None:
            load(file, permitted)
        if refused is not None:
            with pytest.raises(ConfigError, match=key):
                load(file, refused)

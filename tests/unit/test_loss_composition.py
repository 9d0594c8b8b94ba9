"""Losses are refused before any process starts, with the reason."""

from __future__ import annotations

import pytest
import yaml

from megatron_async_rl.config.keys import models_in
from megatron_async_rl.config.load import load
from megatron_async_rl.config.losses import Loss
from megatron_async_rl.config.problem import ConfigError
from tests.written_run import config_tree

BARE = {"advantage": "none"}


@pytest.fixture
def configured(tmp_path):
    """Load the test config with this objective and these changes to `flow`."""

    def configured(objective, **flow):
        tree = config_tree()
        tree["objective"] = objective
        tree["flow"] |= flow
        file = tmp_path / "config.yaml"
        file.write_text(yaml.safe_dump(tree))
        return load(file)

    return configured


def refused(configured, objective, **flow):
    """Return the text of the refusal."""
    with pytest.raises(ConfigError) as caught:
        configured(objective, **flow)
    return str(caught.value)


@pytest.mark.parametrize("model", models_in(Loss), ids=lambda m: m.model_fields["name"].default)
def test_every_loss_can_be_configured_by_its_bare_name(configured, model):
    name = model.model_fields["name"].default
    if name == "sft":
        return
    objective = {"loss": name, "proximal": "recompute"}
    if not model.uses_advantage:
        objective["advantage"] = "none"
    if model.uses_reference:
        objective["reference"] = {}
    found = configured(objective, async_ratio=0 if model.whole_group_of_one_version else 1)
    assert found.objective.loss == model()
    assert found.objective.aggregation_used == model.default_aggregation


def test_trajectory_balance_without_a_reference_is_refused(configured):
    assert "add `reference: {}`" in refused(configured, BARE | {"loss": "trajectory_balance"})
    assert configured(
        BARE | {"loss": "trajectory_balance", "reference": {}}
    ).objective.needs_reference


def test_oapl_across_weight_updates_is_refused(configured):
    assert "groups of a single weight version" in refused(
        configured, BARE | {"loss": "oapl"}, async_ratio=0.5
    )
    configured(BARE | {"loss": "oapl"}, async_ratio=0)
    stored = refused(configured, BARE | {"loss": "oapl"}, async_ratio=0, selection="replay")
    assert "flow.selection: replay draws stored responses of several" in stored


def test_decoupled_ppo_without_a_proximal_policy_is_refused(configured):
    assert "it would equal ppo_clip" in refused(
        configured, {"loss": "decoupled_ppo", "proximal": "behavior"}
    )
    configured({"loss": "decoupled_ppo", "proximal": "snapshot"})


@pytest.mark.parametrize("loss", ["trajectory_balance", "oapl", "kimi"])
def test_a_loss_that_compares_responses_needs_groups(configured, loss):
    objective = BARE | {"loss": loss} | ({"reference": {}} if loss == "trajectory_balance" else {})
    assert "set flow.group_size to at least 2" in refused(
        configured, objective, group_size=1, async_ratio=0
    )


@pytest.mark.parametrize("loss", ["topr", "oapl", "kimi", "trajectory_balance"])
def test_an_advantage_beside_a_loss_that_reads_rewards_is_refused(configured, loss):
    reference = {"reference": {}} if loss == "trajectory_balance" else {}
    objective = {"loss": loss, "advantage": "grpo", **reference}
    assert "would have no effect" in refused(configured, objective, async_ratio=0)


@pytest.mark.parametrize(
    "loss", ["dppo_tv", "m2po", "bapo", "decoupled_ppo", "topr", "gipo", "minirl"]
)
def test_a_correction_of_a_loss_against_mu_would_correct_twice(configured, loss):
    objective = {"loss": loss, "proximal": "recompute", "corrections": [{"name": "tis"}]} | (
        BARE if loss == "topr" else {}
    )
    assert "already contains" in refused(configured, objective)


@pytest.mark.parametrize("loss", ["gmpo", "kimi"])
def test_a_loss_per_sequence_knows_one_aggregation(configured, loss):
    objective = {"loss": loss, "aggregation": "token-mean", "proximal": "recompute"} | (
        BARE if loss == "kimi" else {}
    )
    assert "defined per sequence" in refused(configured, objective)

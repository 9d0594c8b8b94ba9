import json
from pathlib import Path

import numpy as np
import pytest
import torch

from megatron_async_rl.config.advantages import GrpoAdvantage, NoAdvantage, RlooAdvantage
from megatron_async_rl.config.objective import ObjectiveConfig
from megatron_async_rl.objectives.advantages.grpo import grpo
from megatron_async_rl.objectives.advantages.rloo import rloo
from megatron_async_rl.objectives.objective import Objective
from megatron_async_rl.objectives.registry import UnknownName, advantage_method, loss_method
from tests.token_batches import rewarded, tokens
from tests.train_batches import rewards_batch

GOLDEN = [
    c for c in json.loads((Path(__file__).parents[1] / "data/golden/losses_seed1.json").read_text()) if c["kind"] == "advantage"
]
SETTINGS = {"grpo": GrpoAdvantage, "rloo": RlooAdvantage}


@pytest.mark.parametrize("case", [c for c in GOLDEN if c["name"] in SETTINGS], ids=lambda c: c["case"])
def test_an_advantage_equals_its_reference_vector(case):
    mask = torch.tensor(case["inputs"]["mask"])
    sequence = torch.arange(len(mask)).repeat_interleave(mask.shape[1])
    inputs = case["inputs"]
    batch = tokens(
        torch.zeros(mask.numel()),
        mask=mask.flatten(),
        sequence=sequence,
        rewards=inputs["rewards"],
        group=inputs["group"],
    )
    found = advantage_method(case["name"]).function(batch, SETTINGS[case["name"]](**case["params"])).tokens
    np.testing.assert_allclose(found.view(mask.shape).numpy(), np.array(case["expect"]["advantages"]), atol=1e-6)


@pytest.mark.parametrize(("function", "settings"), [(grpo, GrpoAdvantage()), (rloo, RlooAdvantage())])
@pytest.mark.parametrize("reward", [0.1, 1 / 3, -7.7e5])
def test_equal_rewards_give_exactly_zero(function, settings, reward):
    assert torch.all(function(rewarded([reward] * 7), settings).tokens == 0.0)


@pytest.mark.parametrize(("function", "settings"), [(grpo, GrpoAdvantage()), (rloo, RlooAdvantage())])
def test_a_group_of_one_has_nothing_to_compare_with(function, settings):
    assert function(rewarded([3.0]), settings).tokens.tolist() == [0.0]


def targets(advantage, groups):
    return Objective(ObjectiveConfig(advantage=advantage)).prepare(rewards_batch(groups), {})


@pytest.mark.parametrize("advantage", [GrpoAdvantage(), RlooAdvantage(), NoAdvantage()])
def test_a_failed_reward_takes_no_part(advantage):
    with_failure, without = (
        targets(advantage, [[1.0, None, 0.0, 0.5], [2.0, 1.0]]),
        targets(advantage, [[1.0, 0.0, 0.5], [2.0, 1.0]]),
    )
    assert [s.id for s in with_failure.samples] == ["p0-0", "p0-2", "p0-3", "p1-0", "p1-1"]
    np.testing.assert_array_equal(with_failure.whole.advantages, without.whole.advantages)
    assert with_failure.denominators == without.denominators
    assert with_failure.denominators.sequences == 5


def test_a_group_left_with_one_valid_sample_teaches_nothing():
    assert targets(GrpoAdvantage(), [[None, 5.0, None]]).whole.advantages.tolist() == [0.0]


def test_a_batch_without_any_valid_sample_is_empty_not_an_error():
    empty = targets(GrpoAdvantage(), [[None, None]])
    assert empty.samples == ()
    assert empty.denominators.tokens == 0


def test_a_reward_that_is_not_finite_is_named():
    with pytest.raises(ValueError, match=r"p0-1.*reward nan"):
        targets(GrpoAdvantage(), [[1.0, float("nan")]])


def test_grpo_whitens_each_group_by_itself():
    advantages = targets(GrpoAdvantage(), [[0.0, 1.0], [100.0, 102.0]]).whole.advantages
    np.testing.assert_allclose(advantages, np.array([-1, 1, -1, 1]) / np.sqrt(2), rtol=1e-5)


@pytest.mark.parametrize(("find", "name", "nearest"), [(loss_method, "ppo_clp", "ppo_clip"), (advantage_method, "gpro", "grpo")])
def test_an_unknown_name_gets_the_nearest_one(find, name, nearest):
    with pytest.raises(UnknownName, match=f"{name}.*nearest: {nearest}"):
        find(name)

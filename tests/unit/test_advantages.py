import numpy as np
import pytest
import torch

from megatron_async_rl.config.advantages import (
    GrpoAdvantage,
    NoAdvantage,
    OpoAdvantage,
    ReinforcePpBaselineAdvantage,
    RlooAdvantage,
)
from megatron_async_rl.config.objective import ObjectiveConfig
from megatron_async_rl.objectives.advantages.discounted import reinforce_pp_baseline
from megatron_async_rl.objectives.advantages.per_response import grpo, opo, rloo
from megatron_async_rl.objectives.objective import Objective
from tests.cases import looped
from tests.token_batches import decided, rewarded
from tests.train_batches import columns, rewards_batch

COMPARE = [
    (grpo, GrpoAdvantage()),
    (rloo, RlooAdvantage()),
    (opo, OpoAdvantage()),
    (reinforce_pp_baseline, ReinforcePpBaselineAdvantage()),
]


@looped(("function", "settings"), COMPARE)
@looped("reward", [0.1, 1 / 3, -7.7e5])
def test_equal_rewards_give_exactly_zero(function, settings, reward):
    assert torch.all(function(rewarded([reward] * 7), settings).tokens == 0.0)


@pytest.mark.parametrize(("function", "settings"), COMPARE)
def test_a_group_of_one_has_nothing_to_compare_with(function, settings):
    assert function(rewarded([3.0]), settings).tokens.tolist() == [0.0]


def test_opo_weighs_rewards_by_trained_tokens():
    batch = rewarded([1.0, 0.0, 5.0], group=[0, 0, 1], lengths=[3, 2, 1], mask=[1, 1, 1, 1, 0, 1])
    assert opo(batch, OpoAdvantage()).tokens.tolist() == [0.25, 0.25, 0.25, -0.75, 0.0, 0.0]


def test_a_group_in_which_nothing_is_trained_on_is_finite():
    batch = rewarded([1.0, 0.0, 2.0], group=[0, 0, 1], mask=[0, 0, 1])
    for function, settings in COMPARE:
        assert function(batch, settings).tokens.tolist() == [0.0, 0.0, 0.0]


def targets(advantage, groups):
    objective = Objective(ObjectiveConfig(advantage=advantage))
    return decided(objective, columns(rewards_batch(groups)), {})


@pytest.mark.parametrize("advantage", [GrpoAdvantage(), RlooAdvantage(), NoAdvantage()])
def test_a_failed_reward_takes_no_part(advantage):
    with_failure, without = (
        targets(advantage, [[1.0, None, 0.0, 0.5], [2.0, 1.0]]),
        targets(advantage, [[1.0, 0.0, 0.5], [2.0, 1.0]]),
    )
    trained = with_failure.samples.ids.to_pylist()
    assert trained == ["p0-0", "p0-2", "p0-3", "p1-0", "p1-1"]
    np.testing.assert_array_equal(with_failure.whole.advantages, without.whole.advantages)
    assert with_failure.denominators == without.denominators
    assert with_failure.denominators.sequences == 5


def test_a_group_left_with_one_valid_sample_teaches_nothing():
    assert targets(GrpoAdvantage(), [[None, 5.0, None]]).whole.advantages.tolist() == [0.0]


def test_a_batch_without_any_valid_sample_is_empty_not_an_error():
    empty = targets(GrpoAdvantage(), [[None, None]])
    assert len(empty.samples) == 0
    assert empty.denominators.tokens == 0


def test_a_reward_that_is_not_finite_is_named():
    with pytest.raises(ValueError, match=r"p0-1.*reward nan"):
        targets(GrpoAdvantage(), [[1.0, float("nan")]])


def test_grpo_whitens_each_group_by_itself():
    advantages = targets(GrpoAdvantage(), [[0.0, 1.0], [100.0, 102.0]]).whole.advantages
    np.testing.assert_allclose(advantages, np.array([-1, 1, -1, 1]) / np.sqrt(2), rtol=1e-5)

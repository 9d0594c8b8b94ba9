import pytest
import torch
from pydantic import ValidationError

from megatron_async_rl.config.advantages import PartialReturnAdvantage
from megatron_async_rl.objectives.advantages.partial_return import partial_return
from tests.cases import looped
from tests.token_batches import random_tokens, tokens

EXACT = torch.float64


def credited(rewards, mask, **settings):
    batch = tokens(
        [0.0] * len(rewards), mask=mask, token_rewards=torch.tensor(rewards, dtype=EXACT), group=[0]
    )
    return partial_return(
        batch, PartialReturnAdvantage(baseline="none", **settings)
    ).tokens.tolist()


TURNS = [1, 1, 0, 1, 0, 0, 1, 1, 0, 1]
REWARDS = [0.0, 1.0, 0.0, 2.0, 0.0, 0.0, 0.0, 4.0, 0.0, 8.0]


@looped(
    ("settings", "by_turn"),
    [
        ({"horizon": "full"}, [15.0, 14.0, 12.0, 8.0]),
        ({"horizon": "full", "gamma": 0.5}, [1 + 1 + 1 + 1, 2 + 2 + 2, 4 + 4, 8.0]),
        ({"horizon": "greedy"}, [1.0, 2.0, 4.0, 8.0]),
        ({"horizon": "k", "k": 1}, [1.0, 2.0, 4.0, 8.0]),
        ({"horizon": "k", "k": 2}, [3.0, 6.0, 12.0, 8.0]),
        ({"horizon": "k", "k": 3, "gamma": 0.5}, [1 + 1 + 1, 2 + 2 + 2, 4 + 4, 8.0]),
        ({"horizon": "k", "k": 99}, [15.0, 14.0, 12.0, 8.0]),
        ({"horizon": "segment", "k": 2}, [3.0, 2.0, 12.0, 8.0]),
        ({"horizon": "segment", "k": 3}, [7.0, 6.0, 4.0, 8.0]),
        ({"horizon": "segment", "k": 99}, [15.0, 14.0, 12.0, 8.0]),
    ],
)
def test_a_turn_gets_the_rewards_of_its_horizon(settings, by_turn):
    a, b, c, d = by_turn
    assert credited(REWARDS, TURNS, **settings) == [a, a, 0.0, b, 0.0, 0.0, c, c, 0.0, d]


def test_no_token_gets_earlier_rewards():
    assert credited([1.0, 2.0, 4.0], [1, 1, 1], horizon="greedy") == [7.0, 6.0, 4.0]


def test_token_steps_skip_environment_tokens():
    assert credited(REWARDS, TURNS, horizon="k", k=2, step="token") == [
        1.0,
        3.0,
        0.0,
        2.0,
        0.0,
        0.0,
        4.0,
        12.0,
        0.0,
        8.0,
    ]
    assert credited(REWARDS, TURNS, horizon="greedy", step="token") == REWARDS


@looped("seed", range(3))
@looped("step", ["turn", "token"])
@looped("horizon", ["full", "greedy", "k", "segment"])
def test_the_return_is_the_explicit_sum_over_the_subset(seed, step, horizon):
    batch = random_tokens(seed=seed, sequences=4, longest=14)
    rewards = (
        torch.randn(len(batch.mask), generator=torch.Generator().manual_seed(seed), dtype=EXACT)
        * batch.mask
    )
    k = 2 if horizon in ("k", "segment") else None
    settings = PartialReturnAdvantage(horizon=horizon, k=k, step=step, gamma=0.8, baseline="none")
    found = partial_return(batch.replace(token_rewards=rewards), settings).tokens
    for i in range(batch.sequences):
        own = torch.nonzero(batch.sequence == i).flatten().tolist()
        trained = [t for t in own if batch.mask[t]]
        number, steps = -1, {}
        for t in own:
            if batch.mask[t]:
                number += step == "token" or t == own[0] or not batch.mask[t - 1] or number < 0
                steps[t] = number
        subset = {
            "full": lambda s, j: True,
            "greedy": lambda s, j: j == s,
            "k": lambda s, j: j < s + 2,
            "segment": lambda s, j: j // 2 == s // 2,
        }[horizon]
        for t in trained:
            later = [u for u in trained if u >= t and subset(steps[t], steps[u])]
            expected = sum(0.8 ** (steps[u] - steps[t]) * float(rewards[u]) for u in later)
            assert float(found[t]) == pytest.approx(expected, abs=1e-12)


def grouped(rewards, sequence, group, mask=None):
    return tokens(
        [0.0] * len(rewards),
        mask=mask,
        sequence=sequence,
        token_rewards=torch.tensor(rewards, dtype=EXACT),
        group=group,
    )


def test_the_baseline_is_the_mean_of_responses_that_reach_the_step():
    batch = grouped(
        [1.0, 0.0, 5.0, 3.0, 0.0, 0.0, 8.0],
        [0, 0, 0, 1, 2, 2, 2],
        [0, 0, 0],
        mask=[1, 0, 1, 1, 1, 0, 1],
    )
    found = partial_return(batch, PartialReturnAdvantage(horizon="greedy")).tokens
    mean = (1.0 + 3.0 + 0.0) / 3
    torch.testing.assert_close(
        found, torch.tensor([1 - mean, 0.0, -1.5, 3 - mean, -mean, 0.0, 1.5], dtype=EXACT)
    )


def test_the_baseline_has_the_horizon_of_the_return():
    batch = grouped(
        [1.0, 0.0, 5.0, 3.0, 0.0, 7.0], [0, 0, 0, 1, 1, 1], [0, 0], mask=[1, 0, 1, 1, 0, 1]
    )
    found = partial_return(batch, PartialReturnAdvantage(horizon="full", gamma=0.5)).tokens
    first, second = (3.5 - 6.5) / 2, (5.0 - 7.0) / 2
    torch.testing.assert_close(
        found, torch.tensor([first, 0.0, second, -first, 0.0, -second], dtype=EXACT)
    )


def test_equal_rewards_and_a_group_of_one_give_exactly_zero():
    batch = grouped([0.1, 0.0, 0.1, 0.1, 7.0], [0, 1, 1, 2, 3], [0, 0, 0, 1], mask=[1, 1, 1, 1, 1])
    assert torch.all(partial_return(batch, PartialReturnAdvantage()).tokens == 0.0)


def test_k_without_a_horizon_that_counts_steps_is_refused():
    for settings in ({"horizon": "k"}, {"horizon": "segment"}, {"horizon": "full", "k": 3}):
        with pytest.raises(ValidationError, match="k is for horizon"):
            PartialReturnAdvantage(**settings)


def test_only_the_group_baseline_needs_a_group():
    assert PartialReturnAdvantage().needs_group
    assert not PartialReturnAdvantage(baseline="none").needs_group

import math

import pytest
import torch

from megatron_async_rl.config.advantages import OpobAdvantage
from megatron_async_rl.objectives.advantages.least_variance import (
    minimum_variance,
    opob,
    score_norm_proxy,
)
from tests.cases import looped
from tests.token_batches import tokens

EXACT = torch.float64


def bandit(seed=0, arms=6):
    """One-token responses, one per arm of a uniform behaviour policy: a group that is the whole
    distribution.

    -> (batch, [arms] importance weights, [arms, arms] scores with respect to the logits)
    """
    generator = torch.Generator().manual_seed(seed)
    logits = torch.randn(arms, generator=generator, dtype=EXACT)
    policy = logits.softmax(0)
    scores = torch.eye(arms, dtype=EXACT) - policy
    batch = tokens(
        policy.log(),
        behavior=torch.full((arms,), -math.log(arms), dtype=EXACT),
        sequence=torch.arange(arms),
        rewards=torch.randn(arms, generator=generator, dtype=EXACT),
        group=[0] * arms,
        sum_p_squared=policy.square().sum().expand(arms).clone(),
    )
    return batch.replace(logp=batch.logp.detach()), policy * arms, scores


def variance(batch, weights, scores, baseline):
    """Exact variance of the estimator w (R - b) s under the uniform behaviour policy."""
    estimates = (weights * (batch.rewards - baseline)).unsqueeze(1) * scores
    return float((estimates - estimates.mean(0)).square().sum(1).mean())


@pytest.mark.parametrize("seed", range(4))
def test_no_other_baseline_has_less_variance(seed):
    batch, weights, scores = bandit(seed)
    best = float(opob(batch, OpobAdvantage(mode="cheap", cap=1e9)).baselines[0])
    least = variance(batch, weights, scores, best)
    for other in torch.linspace(-3, 3, 601, dtype=EXACT).tolist():
        assert least <= variance(batch, weights, scores, other) + 1e-12
    mean = float(batch.rewards.mean())
    assert least < variance(batch, weights, scores, mean) - 1e-3


def test_no_baseline_changes_the_mean_of_the_estimator():
    _, weights, scores = bandit()
    for baseline in (0.0, 5.0):
        drift = ((weights * baseline).unsqueeze(1) * scores).mean(0)
        torch.testing.assert_close(drift, torch.zeros_like(drift), atol=1e-12, rtol=0)


def test_weights_are_cut_before_they_are_squared():
    batch, weights, scores = bandit()
    cut = weights.clamp(max=1.1)
    strength = cut.square() * scores.square().sum(1)
    expected = (strength * batch.rewards).sum() / strength.sum()
    found = opob(batch, OpobAdvantage(mode="cheap", cap=1.1))
    torch.testing.assert_close(found.baselines, expected.expand(6))
    torch.testing.assert_close(found.tokens, batch.rewards - expected)


def test_the_proxy_is_the_score_norm_where_the_logits_are_the_parameters():
    generator = torch.Generator().manual_seed(1)
    lengths, logp, squares, norms = [3, 5], [], [], []
    for length in lengths:
        logits = torch.randn(length, 7, generator=generator, dtype=EXACT).requires_grad_()
        table = torch.log_softmax(logits, -1)
        chosen = table[torch.arange(length), torch.randint(7, (length,), generator=generator)]
        norms.append(torch.autograd.grad(chosen.mean(), logits)[0].norm())
        logp.append(chosen.detach())
        squares.append(table.detach().exp().square().sum(-1))
    batch = tokens(torch.cat(logp), sequence=[0] * 3 + [1] * 5, sum_p_squared=torch.cat(squares))
    torch.testing.assert_close(score_norm_proxy(batch).detach(), torch.stack(norms))


def test_measured_score_norms_come_before_the_proxy():
    batch, weights, _ = bandit()
    norms = torch.arange(1.0, 7.0, dtype=EXACT)
    strength = (weights * norms).square()
    for mode in ("cheap", "exact"):
        found = opob(batch.replace(score_norms=norms), OpobAdvantage(mode=mode, cap=1e9))
        torch.testing.assert_close(
            found.baselines[0], (strength * batch.rewards).sum() / strength.sum()
        )


@looped("mode", ["cheap", "exact"])
@looped("reward", [0.1, 1 / 3, -7.7e5])
def test_equal_rewards_give_exactly_zero(mode, reward):
    batch, _, _ = bandit()
    batch = batch.replace(rewards=torch.full((6,), reward, dtype=EXACT))
    assert torch.all(opob(batch, OpobAdvantage(mode=mode)).tokens == 0.0)


@pytest.mark.parametrize("shift", [-700.0, 700.0, -5000.0])
def test_only_weights_relative_to_the_group_matter_however_small_or_large(shift):
    generator = torch.Generator().manual_seed(0)
    rewards, norms, log_weights = torch.randn(3, 4, generator=generator, dtype=EXACT)
    group = torch.zeros(4, dtype=torch.int64)
    _, near = minimum_variance(rewards, log_weights, norms.abs(), group, 1e300)
    _, far = minimum_variance(rewards, log_weights + min(shift, 600.0), norms.abs(), group, 1e300)
    torch.testing.assert_close(near, far)


def test_a_weight_of_e_to_700_is_cut_not_infinite():
    rewards, norms = torch.tensor([1.0, 0.0], dtype=EXACT), torch.ones(2, dtype=EXACT)
    _, baselines = minimum_variance(
        rewards, torch.tensor([700.0, 0.0], dtype=EXACT), norms, torch.tensor([0, 0]), 2.0
    )
    torch.testing.assert_close(baselines, torch.full((2,), 4 / 5, dtype=EXACT))


def test_a_group_without_any_score_has_the_plain_mean_and_disturbs_no_other():
    rewards = torch.tensor([1.0, 0.0, 3.0, 1.0], dtype=EXACT)
    norms = torch.tensor([0.0, 0.0, 1.0, 0.0], dtype=EXACT)
    centred, baselines = minimum_variance(
        rewards, torch.zeros(4, dtype=EXACT), norms, torch.tensor([0, 0, 1, 1]), 8.0
    )
    assert baselines.tolist() == [0.5, 0.5, 3.0, 3.0]
    assert centred.tolist() == [0.5, -0.5, 0.0, -2.0]


def test_a_response_without_trained_tokens_has_no_effect():
    batch, _, _ = bandit()
    masked = batch.replace(mask=torch.tensor([0.0, 1, 1, 1, 1, 1], dtype=EXACT))
    other = masked.replace(rewards=masked.rewards.clone().index_fill(0, torch.tensor([0]), 99.0))
    settings = OpobAdvantage(mode="cheap")
    torch.testing.assert_close(opob(masked, settings).tokens, opob(other, settings).tokens)
    assert opob(masked, settings).tokens[0] == 0.0


def test_the_standard_deviation_divides_what_the_baseline_left():
    batch, _, _ = bandit()
    plain, scaled = (
        opob(batch, OpobAdvantage(mode="cheap", normalize_std=n)).tokens for n in (False, True)
    )
    torch.testing.assert_close(scaled, plain / (batch.rewards.std() + 1e-6))

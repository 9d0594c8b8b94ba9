"""Losses that are one number per sequence: they sum over the whole sequence first, and groups are
decided on the whole batch."""

from __future__ import annotations

import math

import pytest
import torch

from megatron_async_rl.config.losses import GmpoLoss, KimiLoss, OaplLoss, TrajectoryBalanceLoss
from megatron_async_rl.objectives.objective import Denominators, aggregate
from tests.method_settings import LOSSES
from tests.token_batches import detached, random_tokens, tokens


def run(batch, settings):
    """(loss [S], gradient of its mean over the batch's sequences [N], what was decided)."""
    method = LOSSES[settings.name]
    if method.decide is not None:
        batch = batch.replace(decided=method.decide(detached(batch), settings))
    result = method.function(batch, settings)
    total = aggregate(result, batch, settings.default_aggregation, Denominators.of(batch)).sum()
    (gradient,) = torch.autograd.grad(total, batch.logp)
    return result, gradient, batch.decided


def close(found, expected):
    torch.testing.assert_close(
        found, torch.as_tensor(expected, dtype=torch.float64), atol=1e-12, rtol=1e-12
    )


def two_groups(**changes):
    """Groups of two: sequences of 2, 1, 1 and 2 tokens, the last one's second token masked."""
    given = {
        "ref": [-1.5, -2.0, -0.5, -1.0, -2.0, -5.0],
        "behavior": [-1.2, -2.1, -0.4, -1.1, -2.5, -3.0],
        "prox": [-1.1, -2.2, -0.3, -1.2, -2.4, -3.0],
        "sequence": [0, 0, 1, 2, 3, 3],
        "mask": [1, 1, 1, 1, 1, 0],
        "rewards": [1.0, 0.0, 0.25, 0.75],
        "group": [0, 0, 1, 1],
        "weights": [1.0] * 6,
    } | changes
    return tokens([-1.0, -2.0, -0.25, -1.5, -2.0, -4.0], **given)


def test_gmpo_weighs_a_sequence_by_the_geometric_mean_of_its_clipped_ratios():
    batch = tokens([-1.0, -1.0, -1.0], prox=[-1.2, -1.9, -0.2], advantages=[2.0] * 3)
    result, gradient, _ = run(batch, GmpoLoss())
    ratio = math.exp((0.2 + 0.4 - 0.8) / 3)
    close(result.loss, [-2 * ratio])
    close(gradient, [-2 * ratio / 3, 0.0, -2 * ratio / 3])
    assert result.clipped.tolist() == [False, True, False]


def test_gmpo_clips_the_other_side_for_negative_advantages():
    batch = tokens([-1.0, -1.0], prox=[-1.9, -0.2], advantages=[-2.0] * 2)
    result, gradient, _ = run(batch, GmpoLoss())
    ratio = math.exp((0.9 - 0.4) / 2)
    close(result.loss, [2 * ratio])
    close(gradient, [2 * ratio / 2, 0.0])
    assert result.clipped.tolist() == [False, True]


def test_trajectory_balance_is_the_groups_variance_of_the_residuals():
    beta = 0.5
    result, _, decided = run(two_groups(), TrajectoryBalanceLoss(beta=beta))
    residuals = torch.tensor(
        [0.5 + 0.0 - 1 / beta, 0.25 - 0.0, -0.5 - 0.25 / beta, 0.0 - 0.75 / beta],
        dtype=torch.float64,
    )
    means = residuals.reshape(2, 2).mean(1).repeat_interleave(2)
    close(decided.sequences["log_z"], -means)
    close(result.loss, (residuals - means).square())
    assert decided.scalars["objective/log_z"] == pytest.approx(-float(means.mean()))


def test_trajectory_balance_is_at_rest_at_the_reference_tilted_by_the_reward():
    beta, rewards = 0.5, [1.0, -0.5, 0.25, 2.0]
    ref = torch.tensor([-1.0, -1.5, -2.0, -3.0], dtype=torch.float64)
    logp = ref + torch.tensor(rewards, dtype=torch.float64) / beta - 7.0
    batch = tokens(logp, ref=ref, sequence=range(4), rewards=rewards, group=[0] * 4)
    result, gradient, decided = run(batch, TrajectoryBalanceLoss(beta=beta))
    close(result.loss, [0.0] * 4)
    close(gradient, [0.0] * 4)
    close(decided.sequences["log_z"], [7.0] * 4)


def test_oapl_regresses_the_summed_log_ratio_on_the_reward_above_the_groups_soft_value():
    settings = OaplLoss(beta_value=0.5, beta_policy=0.1)
    result, gradient, decided = run(two_groups(), settings)
    values = [
        0.5 * math.log((math.exp(a / 0.5) + math.exp(b / 0.5)) / 2)
        for a, b in ((1.0, 0.0), (0.25, 0.75))
    ]
    aims = [1.0 - values[0], 0.0 - values[0], 0.25 - values[1], 0.75 - values[1]]
    sums = [0.3, 0.15, -0.4, 0.5]
    close(decided.sequences["advantage"], aims)
    close(result.loss, [(0.1 * s - a) ** 2 for s, a in zip(sums, aims, strict=True)])
    slopes = [2 * 0.1 * (0.1 * s - a) / 4 for s, a in zip(sums, aims, strict=True)]
    close(gradient, [slopes[0], slopes[0], slopes[1], slopes[2], slopes[3], 0.0])


def test_oapls_value_goes_from_the_mean_to_the_best_reward_as_its_temperature_falls():
    batch = two_groups()
    values = [
        run(batch, OaplLoss(beta_value=b))[2].scalars["objective/value"]
        for b in (1e4, 1.0, 0.1, 1e-6)
    ]
    assert values == sorted(values)
    assert values[0] == pytest.approx(0.5, abs=1e-4)
    assert values[-1] == pytest.approx((1.0 + 0.75) / 2, abs=1e-5)


@pytest.mark.parametrize("reward", [0.1, 1e9, -1e9])
def test_equal_rewards_leave_oapl_and_kimi_nothing_to_aim_at(reward):
    batch = two_groups(rewards=[reward] * 4)
    assert run(batch, OaplLoss())[2].sequences["advantage"].tolist() == [0.0] * 4
    assert run(batch, KimiLoss())[2].sequences["centred"].tolist() == [0.0] * 4


def test_kimi_regresses_the_summed_log_ratio_on_the_centred_reward():
    result, gradient, _ = run(two_groups(), KimiLoss(tau=0.2))
    centred, sums = [0.5, -0.5, -0.25, 0.25], [0.3, 0.05, -0.3, 0.4]
    close(result.loss, [(c - 0.2 * s) ** 2 for c, s in zip(centred, sums, strict=True)])
    slopes = [-2 * 0.2 * (c - 0.2 * s) / 4 for c, s in zip(centred, sums, strict=True)]
    close(gradient, [slopes[0], slopes[0], slopes[1], slopes[2], slopes[3], 0.0])


@pytest.mark.parametrize(
    "settings", [TrajectoryBalanceLoss(), OaplLoss(), KimiLoss(), GmpoLoss()], ids=lambda s: s.name
)
def test_a_sequence_without_trained_tokens_has_loss_zero(settings):
    batch = two_groups(mask=[0, 0, 1, 1, 1, 1])
    result, gradient, _ = run(batch, settings)
    assert result.loss[0] == 0.0
    assert gradient[:2].tolist() == [0.0, 0.0]


@pytest.mark.parametrize(
    "settings", [TrajectoryBalanceLoss(), OaplLoss(), KimiLoss(), GmpoLoss()], ids=lambda s: s.name
)
def test_a_group_may_be_split_over_micro_batches(settings):
    whole = random_tokens()
    method = LOSSES[settings.name]
    result, _, decided = run(whole, settings)
    for s in range(whole.sequences):
        own = whole.sequence == s
        names = ("logp", "logp_prox", "logp_behavior", "logp_ref", "advantages", "mask", "weights")
        single = tokens(
            whole.logp.detach()[own],
            **{n.removeprefix("logp_"): getattr(whole, n)[own] for n in names[1:]},
            rewards=whole.rewards[s : s + 1],
        )
        mine = {name: value[s : s + 1] for name, value in decided.sequences.items()}
        single = single.replace(decided=type(decided)(sequences=mine, scalars=decided.scalars))
        close(method.function(single, settings).loss, result.loss[s : s + 1])

"""Defining properties of the token-level losses: values and gradients at points that can be
worked out."""

from __future__ import annotations

import math

import pytest
import torch

from megatron_async_rl.config.losses import (
    AspoLoss,
    CispoLoss,
    DecoupledPpoLoss,
    DppoKlLoss,
    DppoTvLoss,
    GipoLoss,
    GspoLoss,
    MinirlLoss,
    PpoClipLoss,
    SapoLoss,
    ToprLoss,
    VespoLoss,
)
from megatron_async_rl.objectives.losses.ppo_clip import ppo_clip
from tests.method_settings import LOSSES
from tests.token_batches import random_tokens, tokens

RATIOS = [0.05, 0.5, 0.79, 0.9, 1.0, 1.1, 1.25, 1.3, 3.0, 30.0]


def run(batch, settings):
    """(loss, gradient of its sum, clipped)."""
    result = LOSSES[settings.name].function(batch, settings)
    (gradient,) = torch.autograd.grad(result.loss.sum(), batch.logp)
    return result.loss.detach(), gradient, result.clipped


def swept(advantage, *, against="prox"):
    """One token per ratio of RATIOS, at log-prob -1; each is its own sequence."""
    logp = torch.full((len(RATIOS),), -1.0, dtype=torch.float64)
    moved = logp - torch.tensor(RATIOS, dtype=torch.float64).log()
    other = {"prox": logp, "behavior": logp} | {against: moved}
    return tokens(logp, advantages=[advantage] * len(RATIOS), sequence=range(len(RATIOS)), **other)


def close(found, expected):
    torch.testing.assert_close(
        found, torch.as_tensor(expected, dtype=torch.float64), atol=1e-12, rtol=1e-12
    )


@pytest.mark.parametrize("advantage", [2.0, -2.0])
def test_cispo_keeps_every_tokens_gradient_and_bounds_its_weight(advantage):
    _, gradient, clipped = run(swept(advantage), CispoLoss(clip_low=0.5, clip_high=0.2))
    close(gradient, [-advantage * min(max(r, 0.5), 1.2) for r in RATIOS])
    assert not clipped.any()


def test_gspo_gives_the_tokens_of_a_sequence_its_geometric_mean_ratio_as_weight():
    batch = tokens(
        [-1.0, -1.0, -1.0], prox=[-1.01, -1.03, 5.0], mask=[1, 1, 0], advantages=[3.0, 3.0, 3.0]
    )
    loss, gradient, clipped = run(batch, GspoLoss())
    s = math.exp(0.02)
    close(loss[:2], [-3 * s, -3 * s])
    close(gradient[:2], [-3 * s, -3 * s])
    assert not clipped[:2].any()


@pytest.mark.parametrize(
    ("advantage", "prox", "cut"),
    [(1.0, -1.05, True), (1.0, -0.9, False), (-1.0, -0.9, True), (-1.0, -1.05, False)],
)
def test_gspo_clips_whole_sequences_on_the_side_of_the_advantage(advantage, prox, cut):
    _, gradient, clipped = run(
        tokens([-1.0, -1.0], prox=[prox, prox], advantages=[advantage] * 2), GspoLoss()
    )
    assert clipped.tolist() == (gradient == 0).tolist() == [cut, cut]


def test_gspo_stops_at_log_s_of_ten():
    loss, gradient, clipped = run(tokens([-1.0], prox=[-12.0], advantages=[-2.0]), GspoLoss())
    close(loss, [2 * math.exp(10)])
    assert gradient.item() == 0.0
    assert clipped.item()


def test_sapo_has_the_policy_gradient_at_ratio_one_and_fades_faster_for_negative_advantages():
    gain, loss = run(swept(1.0), SapoLoss())[1], run(swept(-1.0), SapoLoss())[1]
    at = RATIOS.index(1.0)
    close(gain[at], -1.0)
    close(loss[at], 1.0)
    for i, ratio in enumerate(RATIOS):
        gate = 1 / (1 + math.exp(-1.05 * (ratio - 1)))
        close(loss[i], 4 * gate * (1 - gate) * ratio)
        assert loss[i].abs() <= gain[i].abs() + 1e-15


@pytest.mark.parametrize(
    ("policy", "behavior", "advantage", "cut"),
    [
        (0.5, 0.3, 1.0, True),
        (0.5, 0.3, -1.0, False),
        (0.3, 0.5, -1.0, True),
        (0.3, 0.5, 1.0, False),
        (0.5, 0.4, 1.0, False),
    ],
)
def test_dppo_tv_masks_tokens_beyond_the_threshold_on_the_advantages_side(
    policy, behavior, advantage, cut
):
    batch = tokens([math.log(policy)], behavior=[math.log(behavior)], advantages=[advantage])
    _, gradient, clipped = run(batch, DppoTvLoss())
    close(gradient, [0.0 if cut else -advantage * policy / behavior])
    assert clipped.item() == cut


def test_dppo_measures_probabilities_where_ppo_measures_ratios():
    rare = tokens([math.log(0.01)], behavior=[math.log(0.0001)])
    assert not run(rare, DppoTvLoss())[2].item()
    close(run(rare, DppoTvLoss(cap=20.0))[1], [-20.0])


@pytest.mark.parametrize(
    ("policy", "cut"), [(0.65, False), (0.66, True), (0.35, False), (0.34, False)]
)
def test_dppo_kl_cuts_by_the_divergence_of_the_token_against_all_others(policy, cut):
    divergence = 0.5 * math.log(0.5 / policy) + 0.5 * math.log(0.5 / (1 - policy))
    assert (divergence > 0.05) == (policy in (0.66, 0.34))
    batch = tokens([math.log(policy)], behavior=[math.log(0.5)], advantages=[1.0])
    assert run(batch, DppoKlLoss())[2].item() == cut
    batch = tokens([math.log(1 - policy)], behavior=[math.log(0.5)], advantages=[-1.0])
    assert run(batch, DppoKlLoss())[2].item() == cut


def test_a_certain_token_has_a_finite_divergence():
    for policy, behavior in ((0.0, math.log(0.5)), (math.log(0.5), 0.0), (0.0, 0.0), (-700.0, 0.0)):
        batch = tokens(
            [policy], behavior=[behavior], advantages=[-1.0 if policy < behavior else 1.0]
        )
        assert run(batch, DppoKlLoss())[2].item() == (policy != behavior)


def test_topr_is_reinforce_on_good_responses_and_truncates_the_sequences_weight_on_bad_ones():
    batch = tokens(
        [-1.0, -2.0, -1.0, -2.0, -1.0],
        behavior=[-9.0, -9.0, -0.5, -1.7, -3.0],
        sequence=[0, 0, 1, 1, 2],
        rewards=[2.0, -3.0, -1.0],
        advantages=[99.0] * 5,
    )
    _, gradient, clipped = run(batch, ToprLoss())
    weight = math.exp(-0.8)
    close(gradient, [-2.0, -2.0, 3 * weight, 3 * weight, 1.0])
    assert not clipped.any()


def test_decoupled_ppo_is_ppo_on_staleness_times_the_mismatch_weight():
    batch = random_tokens()
    loss, gradient, clipped = run(batch, DecoupledPpoLoss(clip_high=0.28))
    plain = ppo_clip(batch, PpoClipLoss(clip_high=0.28))
    (expected,) = torch.autograd.grad(plain.loss.sum(), batch.logp)
    rho = (batch.logp_prox - batch.logp_behavior).exp()
    close(loss, rho * plain.loss.detach())
    close(gradient, rho * expected)
    assert clipped.tolist() == plain.clipped.tolist()


def test_decoupled_ppo_with_prox_equal_to_the_policy_is_importance_sampling():
    batch = tokens([-1.0, -2.0], prox=[-1.0, -2.0], behavior=[-1.5, -1.0], advantages=[2.0, -3.0])
    close(run(batch, DecoupledPpoLoss())[1], [-2 * math.exp(0.5), 3 * math.exp(-1.0)])


@pytest.mark.parametrize(("advantage", "k", "scale"), [(1.0, 2.0, 3.0), (-1.0, 3.0, 2.0)])
def test_vespo_weighs_a_sequence_by_its_kernel_which_peaks_at_k_over_lambda(advantage, k, scale):
    _, gradient, clipped = run(swept(advantage), VespoLoss())
    close(gradient, [-advantage * math.exp(scale + k * math.log(w) - scale * w) for w in RATIOS])
    assert not clipped.any()
    peak = tokens([-1.0], prox=[-1.0 - math.log(k / scale)], advantages=[advantage])
    largest = run(peak, VespoLoss())[1].abs().item()
    assert largest > gradient.abs().max()


def test_vespo_counts_a_sequence_beyond_the_bound_as_at_it():
    found = [
        run(tokens([-1.0], prox=[-1.0 + far]), VespoLoss(k_pos=0.1))[1].item()
        for far in (20.0, 25.0, 700.0)
    ]
    assert found == [pytest.approx(-math.exp(3.0 - 2.0), rel=1e-6)] * 3


def test_vespo_takes_the_ratio_of_the_whole_sequence():
    batch = tokens([-1.0, -1.0, -1.0], prox=[-1.5, -0.8, 3.0], mask=[1, 1, 0])
    _, gradient, _ = run(batch, VespoLoss())
    w = math.exp(0.3)
    close(gradient[:2], [-math.exp(3 + 2 * 0.3 - 3 * w)] * 2)


@pytest.mark.parametrize("advantage", [2.0, -2.0])
def test_gipo_fades_with_the_square_of_the_log_weight_and_is_linear_in_the_advantage(advantage):
    _, gradient, _ = run(swept(advantage, against="behavior"), GipoLoss(sigma=0.7))
    close(gradient, [-advantage * w * math.exp(-0.5 * (math.log(w) / 0.7) ** 2) for w in RATIOS])


def test_aspo_turns_the_ratio_over_for_positive_advantages():
    _, gradient, clipped = run(swept(1.0), AspoLoss())
    close(gradient, [0.0 if r > 1.2 else -min(1 / r, 3.0) for r in RATIOS])
    assert clipped.tolist() == [r > 1.2 for r in RATIOS]


def test_aspo_is_ppo_with_a_soft_dual_clip_for_negative_advantages():
    _, gradient, clipped = run(swept(-1.0), AspoLoss())
    close(gradient, [0.0 if r < 0.8 else min(r, 3.0) for r in RATIOS])
    assert clipped.tolist() == [r < 0.8 for r in RATIOS]


@pytest.mark.parametrize("advantage", [2.0, -2.0])
def test_minirl_masks_by_the_ratio_to_prox_and_weighs_by_the_ratio_to_mu(advantage):
    _, gradient, clipped = run(swept(advantage), MinirlLoss())
    cut = [r > 1.27 if advantage > 0 else r < 0.8 for r in RATIOS]
    assert clipped.tolist() == cut
    close(gradient, [0.0 if c else -advantage for c in cut])
    _, gradient, clipped = run(swept(advantage, against="behavior"), MinirlLoss())
    close(gradient, [-advantage * min(w, 5.0) for w in RATIOS])
    assert not clipped.any()

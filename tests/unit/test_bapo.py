"""BAPO searches its bounds on the whole batch."""

from __future__ import annotations

import math
import random

import pytest
import torch
from pydantic import ValidationError

from megatron_async_rl.config.losses import BapoLoss
from megatron_async_rl.objectives.losses.bapo import bapo, decide_bapo
from tests.cases import looped
from tests.token_batches import detached, tokens


def batch_of(seed, *, drift=0.0, positive=0.5, count=80):
    draw = random.Random(seed)
    return tokens(
        [-3.0 + drift + draw.gauss(0, 0.6) for _ in range(count)],
        behavior=[-3.0] * count,
        advantages=[
            draw.uniform(0.1, 2) * (1 if draw.random() < positive else -1) for _ in range(count)
        ],
        mask=[float(draw.random() > 0.2) for _ in range(count)],
    )


def share(batch, low, high):
    """The share of positive tokens, token by token, exactly as it is written in the paper."""
    positive = total = 0.0
    for i in range(len(batch.logp)):
        if batch.mask[i] > 0:
            r, a = (
                math.exp((batch.logp[i] - batch.logp_behavior[i]).item()),
                batch.advantages[i].item(),
            )
            total += abs(min(r * a, min(max(r, low), high) * a))
            if a > 0:
                positive += min(r * a, min(max(r, 0), high) * a)
    return positive / total


def search(batch, settings):
    """The paper's loop."""
    (low, low_end, low_step), (high, high_end, high_step) = settings.low, settings.high
    while share(batch, low, high) < settings.target_share and low + low_step <= low_end + 1e-9:
        if high + high_step <= high_end + 1e-9:
            high += high_step
        else:
            low += low_step
    return low, high, share(batch, low, high)


@looped("target", [0.1, 0.4, 0.45, 0.5, 0.9])
@looped(("drift", "positive"), [(0.0, 0.5), (0.5, 0.45), (-0.3, 0.3), (0.8, 0.9)])
def test_the_search_ends_where_the_papers_loop_does(drift, positive, target):
    settings = BapoLoss(target_share=target)
    for seed in range(3):
        batch = detached(batch_of(seed, drift=drift, positive=positive))
        found = decide_bapo(batch, settings).scalars
        expected = search(batch, settings)
        values = [
            found[f"objective/{name}"] for name in ("clip_low", "clip_high", "positive_share")
        ]
        assert values == pytest.approx(expected, rel=1e-12)


def test_the_search_can_end_at_the_start_on_the_way_and_at_its_limits():
    batch = detached(batch_of(0, drift=0.5, positive=0.45))
    targets = (0.01, share(batch, 0.6, 2.02), 0.99)
    ends = [decide_bapo(batch, BapoLoss(target_share=t)).scalars for t in targets]
    highs = [end["objective/clip_high"] for end in ends]
    assert highs[0] == 1.2
    assert highs[1] == pytest.approx(2.05)
    assert (ends[2]["objective/clip_low"], highs[2]) == pytest.approx((0.9, 3.0))


def test_a_wider_upper_bound_gives_positive_tokens_more_of_the_loss():
    batch = detached(batch_of(1, drift=0.5))
    shares = [
        decide_bapo(
            batch, BapoLoss(target_share=1.0, low=(0.5, 0.5, 1.0), high=(h, h, 1.0))
        ).scalars["objective/positive_share"]
        for h in (1.0, 1.5, 2.0, 3.0)
    ]
    assert shares == sorted(shares)
    assert shares[0] < shares[-1]


def test_the_bounds_clip_as_ppos_do():
    batch = tokens(
        [-1.0, -2.0, -2.5, -3.0] * 2, behavior=[-2.0] * 8, advantages=[1.0] * 4 + [-1.0] * 4
    )
    settings = BapoLoss(target_share=0.01)
    batch = batch.replace(decided=decide_bapo(detached(batch), settings))
    result = bapo(batch, settings)
    (gradient,) = torch.autograd.grad(result.loss.sum(), batch.logp)
    assert result.clipped.tolist() == [True, False, False, False, False, False, False, True]
    kept = torch.where(result.clipped, 0.0, -batch.advantages * (batch.logp.detach() + 2.0).exp())
    torch.testing.assert_close(gradient, kept.detach())


def test_advantages_of_zero_leave_the_bounds_where_they_start():
    batch = detached(tokens([-1.0, -2.0], advantages=[0.0, 0.0]))
    assert decide_bapo(batch, BapoLoss()).scalars == {
        "objective/clip_low": 0.6,
        "objective/clip_high": 1.2,
    }


@pytest.mark.parametrize(
    "values",
    [
        {"low": (0.9, 0.6, 0.02)},
        {"low": (0.6, 0.9, 0.0)},
        {"high": (-1.0, 3.0, 0.1)},
        {"low": (0.6, 1.3, 0.02)},
    ],
)
def test_a_search_that_cannot_be_made_is_refused(values):
    with pytest.raises(ValidationError, match=r"expected|cross"):
        BapoLoss(**values)

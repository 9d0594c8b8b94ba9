"""Null baselines that any claim for GAC has to beat: the same gradient norms, the same update
norms, a lower beta1."""

import math

import pytest
import torch

from megatron_async_rl.config.controls import (
    Beta1Control,
    GacControl,
    MatchedLrControl,
    MatchedNormControl,
)
from megatron_async_rl.controls.gac import Beta1, Gac, MatchedLr, MatchedNorm
from tests.cases import looped
from tests.gradients import OneRank, Optimizer, Shard, aligned, flat, gradient, step


def copied(gradients):
    return OneRank([Shard(shard.grad.clone()) for shard in gradients.shards])


@looped("reference", ["raw", "applied"])
@looped("target", ["threshold", "zero"])
@looped("c", [-0.4, 0.1, 0.3, 0.6, 0.95])
def test_matched_norm_leaves_the_length_that_gac_leaves_and_the_direction_alone(
    c, target, reference
):
    settings = {"c_low": 0.15, "target": target, "reference": reference}
    gac, null = Gac(GacControl(**settings)), MatchedNorm(MatchedNormControl(**settings))
    first, second = aligned(c)
    gac.apply(step(copied(first)))
    null.apply(step(first))
    projected, raw = copied(second), flat(second).clone()
    judged = gac.apply(step(projected))
    decision = null.apply(step(second))
    assert torch.equal(flat(second), raw)
    assert decision.gradient_scale == pytest.approx(
        float(flat(projected).norm() / raw.norm()), rel=1e-6
    )
    shared = {name: value for name, value in judged.metrics.items() if name != "gac/removed"}
    assert {name: decision.metrics[name] for name in shared} == shared


def test_matched_norm_compares_each_gradient_with_the_one_before_as_gac_does():
    gac, null = Gac(GacControl(c_low=0.15)), MatchedNorm(MatchedNormControl(c_low=0.15))
    cosines = []
    for c in (0.6, 0.2, -0.7):
        for given in aligned(c, seed=int(10 * c) % 7):
            judged = gac.apply(step(copied(given))).metrics
            found = null.apply(step(copied(given))).metrics
            assert found.get("gac/cosine") == judged.get("gac/cosine")
            cosines.append(found.get("gac/cosine"))
    assert len(set(cosines)) == 6, "none is judged by an old gradient"


def test_matched_norm_skips_where_gac_does():
    null = MatchedNorm(MatchedNormControl(c_high=0.5))
    first, second = aligned(0.9)
    assert not null.apply(step(first)).skip
    assert null.apply(step(second)).skip


def test_matched_norm_of_a_repeated_gradient_is_nothing_not_a_rounding_below_zero():
    null = MatchedNorm(MatchedNormControl(c_low=0.0))
    for _ in range(2):
        decision = null.apply(step(gradient([3.0, 4.0])))
    assert decision.gradient_scale == pytest.approx(0.0, abs=1e-3)


def taken(number, norm):
    """The optimizer after `number` updates; the last had this norm."""
    return Optimizer(updates=number, last_update_norm=norm)


def test_matched_lr_makes_the_mean_update_as_long_as_the_target():
    """A toy optimizer whose updates at scale 1 have given norms: in the long run the scaled ones
    average to the target."""
    control = MatchedLr(MatchedLrControl(target_update_norm=0.5))
    norms = [2.0, 1.0, 3.0, 2.0] * 50
    made, optimizer = [], Optimizer()
    for number, norm in enumerate(norms):
        scale = control.apply(step(gradient([1.0, 1.0]), optimizer=optimizer)).lr_scale
        made.append(scale * norm)
        optimizer = taken(number + 1, made[-1])
    assert control.scale == pytest.approx(0.5 / 2.0, rel=1e-2)
    assert sum(made[20:]) / len(made[20:]) == pytest.approx(0.5, rel=3e-2)


def test_matched_lr_divides_each_past_update_by_the_scale_it_was_made_with():
    control = MatchedLr(MatchedLrControl(target_update_norm=1.0))
    gradients = gradient([1.0, 1.0])
    assert control.apply(step(gradients)).lr_scale == 1.0
    assert control.apply(step(gradients, optimizer=taken(1, 4.0))).lr_scale == pytest.approx(1 / 4)
    assert control.apply(step(gradients, optimizer=taken(2, 0.5))).lr_scale == pytest.approx(
        2 / (4.0 + 0.5 * 4)
    )


def test_matched_lr_counts_an_update_once_however_many_steps_are_skipped_after_it():
    control = MatchedLr(MatchedLrControl(target_update_norm=1.0))
    gradients = gradient([1.0, 1.0])
    control.apply(step(gradients))
    for _ in range(3):
        assert control.apply(step(gradients, optimizer=taken(1, 4.0))).lr_scale == pytest.approx(
            1 / 4
        )
    assert control.counted == 1
    assert gradients.reductions == 0


def test_matched_lr_continues_after_a_resume():
    control, resumed = (MatchedLr(MatchedLrControl(target_update_norm=1.0)) for _ in range(2))
    gradients = gradient([1.0, 1.0])
    control.apply(step(gradients))
    control.apply(step(gradients, optimizer=taken(1, 4.0)))
    resumed.load_state_dict(control.state_dict())
    assert resumed.apply(step(gradients, optimizer=taken(2, 0.5))) == control.apply(
        step(gradients, optimizer=taken(2, 0.5))
    )


def test_a_fixed_beta1_rules_every_step():
    control = Beta1(Beta1Control(beta1=0.5))
    assert [control.apply(step(gradient([float(n)]))).beta1 for n in range(3)] == [0.5] * 3
    assert math.isclose(control.apply(step(gradient([1.0]))).lr_scale, 1.0)

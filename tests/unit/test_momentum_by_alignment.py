"""Adam's beta1 by the alignment of the gradient with where the optimizer is going."""

import pytest
import torch

from megatron_async_rl.config.controls import MomentumByAlignmentControl
from megatron_async_rl.controls.momentum_by_alignment import MomentumByAlignment
from tests.cases import looped
from tests.gradients import Optimizer, aligned, gradient, step


def decide(c, *, turned=False, beta1=0.9, **settings):
    """On a gradient of cosine c with Adam's first moment, or with what the last update undid."""
    direction, gradients = aligned(c)
    going = [(-shard.grad if turned else shard.grad) * 1e-3 for shard in direction.shards]
    optimizer = Optimizer(beta1=beta1, updates=1, first_moment=going, update=going)
    control = MomentumByAlignment(MomentumByAlignmentControl(**settings))
    decision = control.apply(step(gradients, optimizer=optimizer))
    assert gradients.reductions == 1
    return decision


@looped(
    ("c", "beta1"),
    [(-0.9, 0.9), (0.0, 0.9), (0.2, 0.9), (0.3, 0.7), (0.4, 0.5), (0.6, 0.1), (0.95, 0.1)],
)
def test_beta1_falls_linearly_between_the_two_cosines(c, beta1):
    decision = decide(c, c_low=0.2, c_high=0.6, beta1_min=0.1)
    assert decision.beta1 == pytest.approx(beta1, abs=1e-6)
    assert decision.metrics["momentum/cosine"] == pytest.approx(c, abs=1e-6)


def test_the_longest_memory_may_be_another_than_the_optimizers():
    assert decide(0.0, beta1_max=0.95).beta1 == 0.95
    assert decide(0.0, beta1=0.8).beta1 == 0.8


def test_against_the_last_update_a_gradient_that_pushes_the_same_way_again_counts_as_aligned():
    decision = decide(0.4, turned=True, against="last_update", c_low=0.2, c_high=0.6, beta1_min=0.1)
    assert decision.metrics["momentum/cosine"] == pytest.approx(0.4, abs=1e-6)
    assert decision.beta1 == pytest.approx(0.5, abs=1e-6)


def test_before_the_first_update_beta1_is_the_longest_and_nothing_is_reduced():
    gradients = gradient([1.0, 2.0])
    decision = MomentumByAlignment(MomentumByAlignmentControl()).apply(step(gradients))
    assert (decision.beta1, dict(decision.metrics), gradients.reductions) == (0.9, {}, 0)


@pytest.mark.parametrize("values", [[0.0, 0.0], [float("nan"), 1.0], [float("inf"), 1.0]])
def test_a_gradient_without_a_direction_leaves_beta1_at_its_longest(values):
    optimizer = Optimizer(updates=1, first_moment=[torch.tensor([1.0, 1.0])])
    assert (
        MomentumByAlignment(MomentumByAlignmentControl())
        .apply(step(gradient(values), optimizer=optimizer))
        .beta1
        == 0.9
    )

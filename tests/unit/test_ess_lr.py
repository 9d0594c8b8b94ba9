"""The ESS learning rate: the published formula, and the failures of a released implementation that
must not come back."""

import math

import numpy as np
import pytest

from megatron_async_rl.config.controls import EssLrControl
from megatron_async_rl.controls.ess_lr import EssLr, lr_scale
from megatron_async_rl.objectives.off_policy import effective_sample_size
from tests.gradients import step


def scale_of(log_weights, lag_max=1, **settings):
    return (
        EssLr(EssLrControl(**settings))
        .apply(step(log_weights=log_weights, lag_max=lag_max))
        .lr_scale
    )


@pytest.mark.parametrize(
    ("log_weights", "ess"),
    [
        ([0.0] * 5, 5.0),
        ([math.log(4.0), 0.0, 0.0], 2.0),
        ([60.0, 0.0, 0.0], 1.0),
        ([math.log(3.0), 0.0], 16 / 10),
    ],
)
def test_the_effective_sample_size_is_the_squared_sum_over_the_sum_of_squares(log_weights, ess):
    assert effective_sample_size(np.array(log_weights)) == pytest.approx(ess)


@pytest.mark.parametrize("shift", [-5000.0, -200.0, 200.0, 5000.0])
def test_the_effective_sample_size_does_not_depend_on_a_common_factor(shift):
    log_weights = np.random.default_rng(0).normal(size=32)
    assert effective_sample_size(log_weights + shift) == pytest.approx(
        effective_sample_size(log_weights)
    )


@pytest.mark.parametrize(
    ("settings", "expected"),
    [
        ({}, math.sqrt(2 / 3)),
        ({"rule": "linear"}, 2 / 3),
        ({"reference_ratio": 0.8}, math.sqrt(2 / 3 / 0.8)),
        ({"reference_ratio": 0.55}, 1.0),
        ({"floor": 0.9}, 0.9),
    ],
)
def test_the_factor_is_the_rule_of_the_relative_effective_sample_size(settings, expected):
    assert scale_of([math.log(4.0), 0.0, 0.0], **settings) == pytest.approx(expected)


def test_weights_that_overflow_an_exponential_shrink_the_step():
    assert scale_of([900.0, 0.0, 0.0, 0.0]) == pytest.approx(0.5)
    assert scale_of([math.inf, 0.0, 0.0, 0.0]) == pytest.approx(0.5)
    assert scale_of([math.nan, 0.0, 0.0, 0.0], floor=0.25) == 0.25
    assert lr_scale(math.nan) == effective_sample_size(np.array([math.nan, 0.0])) == 0.0


def test_uniform_tiny_weights_leave_the_learning_rate_whole():
    assert scale_of([-2000.0] * 8) == pytest.approx(1.0)


def test_the_factor_depends_on_all_reduced_numbers_alone():
    """The released failure: ranks that hold no log-probs of their own got 0. Here the control gets
    no rank."""
    log_weights = [0.3, -0.2, 1.5]
    first, other = (EssLr(EssLrControl()) for _ in range(2))
    assert first.apply(step(None, log_weights=log_weights)) == other.apply(
        step(None, log_weights=log_weights)
    )
    assert 0.0 < scale_of(log_weights) < 1.0


def test_truncation_cuts_each_sequence_s_weight_to_the_cap_first():
    log_weights = [math.log(64.0), 0.0, 0.0]
    assert scale_of(log_weights, use_truncated=True, cap=4.0) == pytest.approx(math.sqrt(2 / 3))
    assert scale_of(log_weights, cap=4.0) == pytest.approx(scale_of(log_weights))
    assert scale_of(log_weights) < 0.61


def test_auto_leaves_out_a_fresh_batch_that_has_changed_the_weights():
    control = EssLr(EssLrControl(reference_ratio="auto"))
    control.apply(step(log_weights=[0.0, 0.0], lag_max=0))
    later = control.apply(step(log_weights=[math.log(3.0), 0.0], lag_max=0, moved=True))
    assert later.metrics["ess_lr/reference_ratio"] == 1.0
    assert later.lr_scale == pytest.approx(math.sqrt(0.8))


def test_auto_compares_with_the_mean_of_the_on_policy_steps_so_far():
    control = EssLr(EssLrControl(reference_ratio="auto"))
    uneven, even, poor = [math.log(4.0), 0.0, 0.0], [0.0, 0.0, 0.0], [60.0, 0.0, 0.0]
    stale = control.apply(step(log_weights=uneven, lag_max=2))
    assert "ess_lr/reference_ratio" not in stale.metrics, "not known yet"
    assert control.apply(step(log_weights=uneven, lag_max=0)).lr_scale == pytest.approx(1.0)
    control.apply(step(log_weights=even, lag_max=0))
    later = control.apply(step(log_weights=poor, lag_max=3))
    reference = (2 / 3 + 1.0) / 2
    assert later.metrics["ess_lr/reference_ratio"] == pytest.approx(reference)
    assert later.lr_scale == pytest.approx(math.sqrt(1 / 3 / reference))
    resumed = EssLr(EssLrControl(reference_ratio="auto"))
    resumed.load_state_dict(control.state_dict())
    assert resumed.apply(step(log_weights=poor, lag_max=3)) == later


def test_given_responses_leave_the_learning_rate_alone():
    assert scale_of([]) == 1.0

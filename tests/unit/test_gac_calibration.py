"""GAC's threshold from the run's own fresh data: what counts as fresh, and that nothing is touched
before."""

import numpy as np
import pytest

from megatron_async_rl.config.controls import CalibrateConfig, GacControl
from megatron_async_rl.controls.alignment import KEEP, PROJECT, CosineCalibration
from megatron_async_rl.controls.gac import Gac
from tests.gradients import flat, gradient, step


def turning(cosines):
    """Unit vectors in the plane, each with the given cosine to the one before."""
    angle, found = 0.0, [gradient([1.0, 0.0])]
    for cosine in cosines:
        angle += np.arccos(cosine)
        found.append(gradient([float(np.cos(angle)), float(np.sin(angle))]))
    return found


def calibrating(steps, quantile=0.5):
    return Gac(GacControl(calibrate=CalibrateConfig(steps=steps, quantile=quantile)))


def test_until_calibrated_every_gradient_is_kept_and_then_the_quantile_rules():
    cosines = [0.9, 0.1, 0.5, 0.3, 0.7, 0.8]
    control = calibrating(5, quantile=0.75)
    decisions = []
    for gradients in turning(cosines):
        before = flat(gradients)
        decision = control.apply(step(gradients))
        decisions.append((decision.metrics, bool((flat(gradients) == before).all())))
    calibrated = [metrics["gac/calibrated"] for metrics, _ in decisions]
    assert calibrated == [0, 0, 0, 0, 0, 1, 1]
    assert all(
        kept and metrics["gac/regime"] == KEEP and "gac/c_low" not in metrics
        for metrics, kept in decisions[:5]
    )
    assert decisions[-1][0]["gac/c_low"] == pytest.approx(np.quantile(cosines[:5], 0.75), abs=1e-6)
    assert decisions[-1][0]["gac/regime"] == PROJECT
    assert not decisions[-1][1]


def test_until_calibrated_nothing_is_skipped_either():
    control = Gac(GacControl(c_high=0.2, calibrate=CalibrateConfig(steps=3)))
    assert not any(control.apply(step(gradients)).skip for gradients in turning([0.99, 0.98]))


def test_only_cosines_between_two_fresh_batches_count():
    control = calibrating(10)
    lags = [0, 0, 1, 0, 0, 2, 2, 0, 0]
    for gradients, lag in zip(
        turning([0.11, 0.22, 0.33, 0.44, 0.55, 0.66, 0.77, 0.88]), lags, strict=True
    ):
        control.apply(step(gradients, lag_max=lag))
    assert control.calibration.cosines == pytest.approx([0.11, 0.44, 0.88], abs=1e-6)


def test_the_first_stale_step_settles_for_half_of_the_cosines_but_not_for_less():
    for seen, expected in ((2, None), (3, 0.2), (4, 0.2)):
        calibration = CosineCalibration(CalibrateConfig(steps=5, quantile=0.5))
        for _ in range(seen):
            calibration.observe(0.2, fresh=True)
        assert calibration.threshold is None
        calibration.observe(0.9, fresh=False)
        assert calibration.threshold == expected


def test_a_threshold_once_found_stays():
    calibration = CosineCalibration(CalibrateConfig(steps=2, quantile=1.0))
    for cosine in (0.1, 0.3, 0.9):
        calibration.observe(cosine, fresh=True)
    assert calibration.threshold == 0.3


def test_a_run_resumed_in_the_middle_of_its_calibration_finds_the_same_threshold():
    cosines = [0.9, 0.1, 0.5, 0.3, 0.7, 0.8]
    through = calibrating(5)
    for gradients in turning(cosines)[:4]:
        through.apply(step(gradients))
    resumed = calibrating(5)
    resumed.load_state_dict(through.state_dict())
    resumed.load_shard_state(through.shard_state())
    for one, other in zip(turning(cosines)[4:], turning(cosines)[4:], strict=True):
        assert through.apply(step(one)).metrics == resumed.apply(step(other)).metrics
    assert resumed.calibration.threshold == pytest.approx(0.5, abs=1e-6)


def test_a_reference_made_by_a_stale_batch_is_still_stale_after_a_resume():
    for lag, counted in ((3, 0), (0, 1)):
        through, resumed = calibrating(5), calibrating(5)
        first, second = turning([0.4])
        through.apply(step(first, lag_max=lag))
        resumed.load_state_dict(through.state_dict())
        resumed.load_shard_state(through.shard_state())
        resumed.apply(step(second))
        assert len(resumed.calibration.cosines) == counted


def test_identical_gradients_calibrate_to_a_threshold_that_can_still_be_projected_to():
    control = calibrating(2, quantile=1.0)
    for _ in range(4):
        metrics = control.apply(step(gradient([3.0, 4.0]))).metrics
    assert metrics["gac/c_low"] == 0.999


def test_a_quantile_below_0_calibrates_to_0_with_a_warning(caplog):
    control = calibrating(3, quantile=0.5)
    for gradients in turning([-0.5, -0.4, -0.3]):
        metrics = control.apply(step(gradients)).metrics
    assert metrics["gac/c_low"] == 0.0
    assert "quantile of 3 cosines is -0.400; c_low is 0" in caplog.text


def test_a_negative_threshold_of_an_earlier_version_is_taken_as_0():
    calibration = CosineCalibration(CalibrateConfig(steps=2))
    calibration.load_state_dict({"cosines": [-0.2, -0.2], "threshold": -0.2})
    assert calibration.threshold == 0.0


def test_a_run_begins_with_one_fresh_step_more_than_the_cosines_it_wants():
    assert GacControl(calibrate=CalibrateConfig(steps=7)).fresh_steps == 8
    assert GacControl().fresh_steps == 0

"""GAC on gradients of one process: regimes, projection, the reference, and what it does to a
delayed descent."""

import copy
import math

import numpy as np
import pytest
import torch
from pydantic import ValidationError

from megatron_async_rl.config.controls import (
    Beta1Control,
    EssLrControl,
    GacControl,
    MatchedLrControl,
    MatchedNormControl,
)
from megatron_async_rl.controls.alignment import KEEP, PROJECT, SKIP
from megatron_async_rl.controls.decision import build_controls
from megatron_async_rl.controls.gac import Gac as GacOfAStep
from megatron_async_rl.controls.gac import MatchedNorm
from megatron_async_rl.gradients import CPU_BLOCK, TERMS, dot, products_with, squared_norm
from tests.gradients import OneRank, Shard, aligned, cosine, flat, gradient, step


class Gac(GacOfAStep):
    """GAC looks at nothing of a step but its gradients, unless it calibrates."""

    def apply(self, gradients):
        return super().apply(step(gradients))


def step_twice(settings, c):
    control = Gac(settings)
    first, second = aligned(c)
    control.apply(first)
    raw = flat(second).clone()
    return control, flat(first), raw, second, control.apply(second)


def test_the_first_gradient_only_becomes_the_reference():
    first, _ = aligned(0.5)
    before = flat(first).clone()
    decision = Gac(GacControl()).apply(first)
    assert torch.equal(flat(first), before)
    assert not {"gac/cosine", "gac/removed"} & set(decision.metrics), "there is no number for them"
    assert not decision.skip
    assert "matched_norm/scale" not in MatchedNorm(MatchedNormControl()).apply(step(first)).metrics


@pytest.mark.parametrize("c", [-0.99, -0.5, 0.0, 0.149])
def test_up_to_c_low_and_for_every_negative_cosine_the_gradient_is_kept(c):
    _, _, raw, second, decision = step_twice(GacControl(c_low=0.15), c)
    assert torch.equal(flat(second), raw)
    assert decision.metrics["gac/regime"] == KEEP
    assert decision.metrics["gac/cosine"] == pytest.approx(c, abs=1e-6)


@pytest.mark.parametrize("c_low", [0.0, 0.1, 0.5])
@pytest.mark.parametrize("c", [0.6, 0.9, 0.999])
def test_projection_to_the_threshold_leaves_cosine_c_low_exactly(c_low, c):
    _, reference, raw, second, decision = step_twice(GacControl(c_low=c_low), c)
    assert cosine(flat(second), reference) == pytest.approx(c_low, abs=2e-6)
    u = reference / reference.norm()
    perpendicular = raw - (raw @ u) * u
    assert flat(second) - (flat(second) @ u) * u == pytest.approx(perpendicular, abs=1e-5)
    k = (c_low / c) * math.sqrt((1 - c**2) / (1 - c_low**2))
    assert float(flat(second) @ u) == pytest.approx(k * float(raw @ u), abs=1e-5)
    assert decision.metrics["gac/regime"] == PROJECT
    assert decision.metrics["gac/to_zero"] == 0.0
    assert decision.norm_before == pytest.approx(float(raw.norm()), rel=1e-6)
    assert decision.norm_after == pytest.approx(float(flat(second).norm()), rel=1e-5)
    assert decision.metrics["gac/removed"] == pytest.approx(
        float((raw - flat(second)).norm() / raw.norm()), abs=1e-6
    )


def test_projection_to_zero_removes_the_aligned_component():
    _, reference, _, second, _ = step_twice(GacControl(c_low=0.15, target="zero"), 0.8)
    assert cosine(flat(second), reference) == pytest.approx(0.0, abs=1e-6)


def test_a_gradient_equal_to_its_predecessor_is_removed_not_divided_by_zero():
    control = Gac(GacControl(c_low=0.15))
    control.apply(gradient([3.0, 4.0]))
    repeated = gradient([3.0, 4.0])
    control.apply(repeated)
    assert flat(repeated).abs().max() < 1e-6


@pytest.mark.parametrize("settings", [GacControl, MatchedNormControl])
def test_a_negative_threshold_is_refused_with_the_reason(settings):
    with pytest.raises(ValidationError, match="turn the gradient against its predecessor"):
        settings(c_low=-0.1)
    assert settings(c_low=0.0).c_low == 0.0


def test_at_a_cosine_of_1_within_rounding_the_aligned_part_is_removed_and_reported():
    for target in ("threshold", "zero"):
        _, reference, raw, second, decision = step_twice(
            GacControl(c_low=0.5, target=target), 1.0 - 1e-8
        )
        assert decision.metrics["gac/to_zero"] == 1.0
        assert decision.metrics["gac/removed"] == pytest.approx(1.0, abs=1e-6)
        assert abs(float(flat(second) @ reference)) < 1e-6 * float(raw.norm() * reference.norm())
    # Not yet: what is left across has a direction, and the threshold is met.
    _, reference, _, second, decision = step_twice(GacControl(c_low=0.5), 1.0 - 1e-5)
    assert decision.metrics["gac/to_zero"] == 0.0
    assert cosine(flat(second), reference) == pytest.approx(0.5, abs=1e-3)


@pytest.mark.parametrize("reference", ["raw", "applied"])
@pytest.mark.parametrize("dtype", ["fp32", "bf16", "fp8"])
def test_a_known_reference_norm_gives_the_measured_result(dtype, reference):
    gradients = [aligned(c)[1] for c in (0.9, 0.8, 0.5, 0.95, 0.1)]
    settings = GacControl(reference_dtype=dtype, reference=reference)
    known, measured = Gac(settings), Gac(settings)
    for each in gradients:
        again = OneRank([Shard(shard.grad.clone()) for shard in each.shards])
        measured.reference_square = None
        assert known.apply(each).metrics == measured.apply(again).metrics
    assert (known.reference_square is not None) == (dtype == "fp32")


def test_an_anomalous_gradient_is_unchanged_and_never_a_reference():
    control = GacOfAStep(GacControl(c_low=0.1))
    huge = lambda norm: norm > 100.0  # noqa: E731
    cosines = []
    for values in ([600.0, 800.0], [1.0, 0.0], [600.0, 800.0], [0.6, 0.8]):
        given = gradient(values)
        decision = control.apply(step(given, is_anomaly=huge))
        cosines.append(decision.metrics.get("gac/cosine"))
        if values[0] == 600.0:
            assert flat(given).tolist() == values
            assert decision.norm_before == decision.norm_after == pytest.approx(1000.0)
    assert cosines == [None, None, None, pytest.approx(0.6, abs=1e-6)]


def test_the_decision_does_not_depend_on_the_gradients_scale():
    decisions = []
    for scale in (1e-6, 1.0, 1e6):
        control = Gac(GacControl())
        first, second = aligned(0.7, scale=scale)
        control.apply(first)
        decisions.append(control.apply(second).metrics)
    assert decisions[0] == pytest.approx(decisions[1], rel=1e-6)
    assert decisions[1] == pytest.approx(decisions[2], rel=1e-6)


def test_skips_are_capped_then_the_step_is_projected():
    control = Gac(GacControl(c_low=0.1, c_high=0.8, max_consecutive_skips=2))
    regimes = []
    for _ in range(7):
        same = gradient([1.0, 2.0, 3.0])
        decision = control.apply(same)
        regimes.append(int(decision.metrics["gac/regime"]))
        if decision.skip:
            assert flat(same).tolist() == [1.0, 2.0, 3.0]
    assert regimes == [KEEP, SKIP, SKIP, PROJECT, SKIP, SKIP, PROJECT]
    assert decision.metrics["gac/skips"] == 4


def test_after_a_projection_raw_compares_with_the_gradient_as_it_came_and_applied_as_it_left():
    for reference in ("raw", "applied"):
        control, _, raw, second, _ = step_twice(GacControl(reference=reference), 0.9)
        expected = raw if reference == "raw" else flat(second)
        assert torch.cat([r.flatten() for r in control.reference]).double() == pytest.approx(
            expected, rel=1e-6
        )


def test_after_a_skip_raw_moves_on_and_applied_stays():
    for reference in ("raw", "applied"):
        control, first, raw, _, decision = step_twice(
            GacControl(reference=reference, c_high=0.5), 0.9
        )
        assert decision.skip
        assert torch.cat([r.flatten() for r in control.reference]).double() == pytest.approx(
            raw if reference == "raw" else first, rel=1e-6
        )


def test_a_gradient_that_is_not_finite_drops_the_reference():
    control = Gac(GacControl())
    control.apply(gradient([1.0, 0.0]))
    control.apply(gradient([float("nan"), 0.0]))
    assert control.reference is None
    assert "gac/cosine" not in control.apply(gradient([1.0, 0.0])).metrics
    assert control.apply(gradient([1.0, 0.0])).metrics["gac/cosine"] == pytest.approx(1.0)


def test_a_first_gradient_that_is_not_finite_does_not_become_the_reference():
    control = Gac(GacControl())
    control.apply(gradient([float("inf"), 0.0]))
    assert control.reference is None


def test_a_zero_gradient_leaves_the_reference_alone():
    control = Gac(GacControl())
    control.apply(gradient([1.0, 0.0]))
    control.apply(gradient([0.0, 0.0]))
    assert control.apply(gradient([0.0, 2.0])).metrics["gac/cosine"] == pytest.approx(0.0)


def test_state_survives_a_save_and_load():
    first, second = aligned(0.9)
    through, resumed = Gac(GacControl()), Gac(GacControl())
    through.apply(first)
    resumed.load_state_dict(copy.deepcopy(through.state_dict()))
    resumed.load_shard_state(copy.deepcopy(through.shard_state()))
    again = OneRank([Shard(shard.grad.clone()) for shard in second.shards])
    assert resumed.apply(again).metrics == through.apply(second).metrics
    assert torch.equal(flat(again), flat(second))


def test_a_shard_that_another_rank_counts_is_projected_but_not_counted():
    first, second = aligned(0.9)
    copies = OneRank([*second.shards, Shard(second.shards[0].grad.clone(), counted=False)])
    control, doubled = Gac(GacControl()), Gac(GacControl())
    control.apply(OneRank([*first.shards, Shard(first.shards[0].grad.clone(), counted=False)]))
    decision = control.apply(copies)
    assert decision.metrics["gac/cosine"] == pytest.approx(0.9, abs=1e-6)
    assert torch.equal(copies.shards[0].grad, copies.shards[2].grad)
    # Counting the copy too moves the cosine: the test above would see it.
    first, second = aligned(0.9)
    doubled.apply(OneRank([*first.shards, Shard(first.shards[0].grad.clone())]))
    assert (
        abs(
            doubled.apply(OneRank([*second.shards, Shard(second.shards[0].grad.clone())])).metrics[
                "gac/cosine"
            ]
            - 0.9
        )
        > 1e-4
    )


def test_one_all_reduce_per_step_serves_the_cosine():
    control = Gac(GacControl())
    first, second = aligned(0.3)
    control.apply(first)
    control.apply(second)
    assert (first.reductions, second.reductions) == (1, 1)


@pytest.mark.parametrize("size", [0, 1, CPU_BLOCK - 1, CPU_BLOCK, 3 * CPU_BLOCK + 17])
def test_inner_products_are_float64_sums(size):
    left, right = torch.randn(size), torch.randn(size)
    exact = float(left.double() @ right.double())
    assert float(dot(left, right)) == pytest.approx(
        exact, abs=1e-6 * float(left.norm() * right.norm())
    )
    both = OneRank([Shard(left), Shard(right.reshape(1, -1))])
    assert squared_norm(both) == pytest.approx(
        float(left.double().square().sum() + right.double().square().sum()), rel=1e-6
    )
    assert products_with(both, [right, left])[0] == pytest.approx(
        2 * exact, abs=1e-6 * float(left.norm() * right.norm())
    )


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_inner_products_are_exact_where_a_few_elements_are_the_most_of_them(dtype):
    """A plain float32 dot product of the blocks misses 2e-6 of the second step's norm."""
    draw = torch.Generator().manual_seed(0)
    size = ((TERMS + 3) * CPU_BLOCK + 17, CPU_BLOCK + 1)
    left, right = (
        [
            torch.randn(n, generator=draw) * torch.exp(2 * torch.randn(n, generator=draw))
            for n in size
        ]
        for _ in range(2)
    )
    right = [each.to(dtype) for each in right]
    both = OneRank([Shard(each) for each in left])
    x, y = (torch.cat([each.double() for each in side]) for side in (left, right))
    found = products_with(both, right)
    for value, exact, unit in zip(
        found, (x @ y, x @ x, y @ y), (x.norm() * y.norm(), x @ x, y @ y), strict=True
    ):
        assert value == pytest.approx(float(exact), abs=3e-7 * float(unit))
    assert products_with(both, right, reference_square=1.0) == (*found[:2], 1.0)
    assert squared_norm(both) == pytest.approx(float(x @ x), rel=3e-7)


@pytest.mark.parametrize(("delay", "bound"), [(4, 0.347), (8, 0.185), (16, 0.0952), (32, 0.0483)])
def test_the_linear_delay_model_is_stable_exactly_below_its_bound(delay, bound):
    """x_{t+1} = x_t - a x_{t-s} is stable iff a < 2 sin(pi / (2 (2s + 1)))."""
    exact = 2 * math.sin(math.pi / (2 * (2 * delay + 1)))
    assert exact == pytest.approx(bound, rel=3e-3)

    def radius(a):
        companion = np.eye(delay + 1, k=-1)
        companion[0, 0], companion[0, delay] = 1.0, companion[0, delay] - a
        return np.abs(np.linalg.eigvals(companion)).max()

    assert radius(exact * (1 - 1e-3)) < 1 < radius(exact * (1 + 1e-3))


def delayed_descent(control, rate, delay=8, steps=3000):
    """Largest |x| of x_{t+1} = x_t - rate g(x_{t-delay}) on |x|^2 / 2, two coordinates so that
    projection has somewhere to go."""
    past = [torch.tensor([1.0, 0.3])] * (delay + 1)
    largest = 0.0
    for _ in range(steps):
        stale = OneRank([Shard(past[-1 - delay].clone())])
        if control is not None:
            control.apply(stale)
        past.append(past[-1] - rate * stale.shards[0].grad)
        largest = max(largest, float(past[-1].norm()))
        if largest > 1e6:
            break
    return largest


@pytest.mark.parametrize("a", [1.1, 2.0])
def test_on_an_unstable_delayed_quadratic_gac_stays_bounded_where_plain_descent_blows_up(a):
    """a: step size over the bound at lag 8."""
    rate = a * 2 * math.sin(math.pi / 34)
    assert delayed_descent(None, rate) > 1e6
    assert delayed_descent(Gac(GacControl(c_low=0.15)), rate) < 1e3


@pytest.mark.parametrize("target", ["threshold", "zero"])
def test_comparing_with_the_applied_gradient_diverges_where_the_raw_one_stays_bounded(target):
    """Step size twice the bound at lag 8."""
    rate = 4 * math.sin(math.pi / 34)
    largest = {
        reference: delayed_descent(
            Gac(GacControl(c_low=0.15, target=target, reference=reference)), rate
        )
        for reference in ("raw", "applied")
    }
    assert largest["raw"] < 2.0
    assert largest["applied"] > 1e5


def test_controls_are_built_by_name_in_order():
    chosen = [
        EssLrControl(),
        Beta1Control(),
        MatchedLrControl(target_update_norm=1.0),
        MatchedNormControl(),
        GacControl(),
    ]
    names = ["ess_lr", "beta1", "matched_lr", "matched_norm", "gac"]
    assert list(build_controls(chosen)) == names


def test_a_reset_starts_the_comparison_anew():
    control, *_ = step_twice(GacControl(), 0.9)
    control.reset()
    assert "gac/cosine" not in control.apply(gradient([1.0], [[2.0]])).metrics


def test_counts_and_mean_cosines_of_each_regime_accumulate_over_the_run():
    control = Gac(GacControl(c_low=0.1, c_high=0.9))
    for values in ([1.0, 0.0], [0.6, 0.8], [0.6, 0.8], [0.8, -0.6], [0.28, -0.96]):
        metrics = control.apply(gradient(values)).metrics
    # Cosines 0.6, 1, 0 and 0.8, after the first, which has none and is kept.
    assert (metrics["gac/kept"], metrics["gac/projected"], metrics["gac/skips"]) == (2, 2, 1)
    assert metrics["gac/cosine_kept"] == pytest.approx(0.0, abs=1e-6)
    assert metrics["gac/cosine_projected"] == pytest.approx(0.7, abs=1e-6)
    assert metrics["gac/cosine_skipped"] == pytest.approx(1.0, abs=1e-6)


def test_what_is_one_number_and_what_is_one_tensor_per_shard_are_saved_apart():
    control = Gac(GacControl())
    assert control.shard_state() == {}
    first, _ = aligned(0.5)
    control.apply(first)
    (shards,) = control.shard_state().values()
    assert [shard.shape for shard in shards] == [shard.grad.shape for shard in first.shards]
    assert all(not isinstance(value, torch.Tensor) for value in control.state_dict().values())


def test_a_restored_reference_is_saved_again_before_any_step_has_used_it():
    control, resumed = Gac(GacControl()), Gac(GacControl())
    control.apply(aligned(0.5)[0])
    resumed.load_shard_state(control.shard_state())
    for kept, again in zip(
        control.shard_state()["reference"], resumed.shard_state()["reference"], strict=True
    ):
        assert torch.equal(kept, again)


def test_a_checkpoint_without_a_reference_leaves_none():
    control = Gac(GacControl())
    control.apply(aligned(0.5)[0])
    control.load_shard_state({})
    assert "gac/cosine" not in control.apply(aligned(0.5)[1]).metrics

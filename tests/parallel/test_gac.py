"""GAC's regimes on real Megatron gradients, on every layout."""

import math

import pytest
import torch

from tests.parallel import layouts
from tests.train_batches import samples_in

pytestmark = pytest.mark.parallel

LAYOUTS = layouts.OFFERED["layout_program"]


@pytest.mark.parametrize("layout", LAYOUTS)
def test_a_projected_gradient_has_the_norm_that_the_cosine_predicts(layout):
    """cos(g', u) = c_low leaves |g'| = |g| sqrt((1 - c^2) / (1 - c_low^2)): the raw |g| is the same
    everywhere."""
    second = layouts.results(layout)["tied"]["steps"][1]
    cosine = second["gac/cosine"]
    assert cosine > 0.5
    removed = abs(0.15 * math.sqrt((1 - cosine**2) / (1 - 0.15**2)) - cosine)
    assert second["gac/removed"] == pytest.approx(removed, rel=1e-9)
    # |g'|^2 = |g_perp|^2 + (c_low share)^2; the raw norm follows from either, and both must give
    # the same one.
    raw = second["policy/grad_norm"] / math.sqrt((1 - cosine**2) / (1 - 0.15**2))
    single = layouts.results("single")["tied"]["steps"][1]
    raw_single = single["policy/grad_norm"] / math.sqrt(
        (1 - single["gac/cosine"] ** 2) / (1 - 0.15**2)
    )
    assert raw == pytest.approx(raw_single, rel=1e-5)


@pytest.mark.parametrize("layout", LAYOUTS)
def test_a_skipped_step_changes_no_weight_no_moment_and_no_step_count(layout):
    result = layouts.results(layout)["skip"]
    (step,) = result["steps"]
    assert (step["gac/regime"], step["gac/skips"], step["policy/skipped"]) == (2, 1, 1)
    assert result["adam_states"] > 0
    assert result["adam_untouched"]
    for name, before in result["before"].items():
        assert torch.equal(result["weights"][name], before), name


@pytest.mark.parametrize("layout", LAYOUTS)
def test_after_the_cap_of_skips_the_step_is_projected(layout):
    after = layouts.results(layout)["after_skip"]
    assert after["steps"][0]["gac/regime"] == 1
    assert after["steps"][0]["policy/skipped"] == 0
    before = layouts.results(layout)["skip"]["weights"]
    assert any(not torch.equal(after["weights"][name], before[name]) for name in before)


@pytest.mark.parametrize("layout", LAYOUTS)
def test_a_loss_or_gradient_that_is_not_finite_is_never_applied_and_drops_the_reference(layout):
    """A loss in the second step, a gradient in the fifth."""
    result = layouts.results(layout)["bad"]
    steps = result["steps"]
    assert [step["policy/skipped"] for step in steps] == [0, 1, 0, 0, 1, 0, 0]
    assert [step["policy/nonfinite"] for step in steps] == [0, 1, 1, 1, 2, 2, 2]
    assert ["gac/cosine" in step for step in steps] == [False] * 3 + [True] + [False] * 2 + [True]
    assert [math.isfinite(steps[bad]["policy/loss"]) for bad in (1, 4)] == [False, True]
    for before, after in (result["around_loss"], result["around_gradient"]):
        for name, tensor in before.items():
            assert torch.equal(after[name], tensor), name


@pytest.mark.parametrize("layout", LAYOUTS)
def test_a_step_that_is_not_finite_is_traced_to_its_samples(layout):
    """A loss to the sample that has no finite one; a gradient that is spoiled whatever it is made
    of, to all."""
    loss, gradient = layouts.results(layout)["bad"]["written"][:2]
    batch = layouts.batch("a")
    assert [sample["id"] for sample in loss["samples"]] == [layouts.blamed(batch)]
    assert loss["loss"] == "nan"
    assert math.isfinite(gradient["loss"])
    assert gradient["norm"] in ("inf", "nan")
    assert gradient["parameters"] >= 1
    trained = [sample.id for sample in samples_in(batch) if sample.reward_error is None]
    assert sorted(sample["id"] for sample in gradient["samples"]) == sorted(trained)


@pytest.mark.parametrize("layout", LAYOUTS)
def test_weights_that_are_not_finite_on_one_rank_leave_the_older_checkpoint(layout):
    bad = layouts.results(layout)["bad"]
    saved, stepped, ended, refused = bad["refused"]
    assert (saved, stepped) == ("", "")
    assert "not finite: weights; they are neither published nor saved" in refused
    assert bad["kept"] == ["latest", "step_00000001"]
    assert "2 optimizer steps in a row, up to step 9, had a loss or a gradient" in ended
    assert layouts.blamed(layouts.batch("a")) in ended

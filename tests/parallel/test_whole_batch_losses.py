"""A loss that decides on the whole batch decides the same on every layout and for every cut into micro-batches."""

import pytest

from tests.parallel import layouts
from tests.parallel.test_layout_invariance import compare_weights
from tests.parallel.whole_batch_loss_program import LOSSES

pytestmark = pytest.mark.parallel

OTHERS = [name for name in layouts.LAYOUTS if name != "single"]


def results(layout):
    return layouts.results(layout, "whole_batch_loss_program")


def compare(found, expected):
    compare_weights(found["weights"], expected["weights"])
    for one, other in zip(found["steps"], expected["steps"], strict=True):
        keys = [key for key in other if key.startswith(("objective/", "clip/", "policy/loss", "policy/grad_norm"))]
        assert {key: one[key] for key in keys} == pytest.approx({key: other[key] for key in keys}, rel=1e-5, abs=1e-6)


@pytest.mark.parametrize("loss", LOSSES)
@pytest.mark.parametrize("layout", OTHERS)
def test_decisions_steps_and_weights_are_those_of_one_rank(layout, loss):
    compare(results(layout)[loss], results("single")[loss])


@pytest.mark.parametrize("loss", LOSSES)
def test_one_sample_per_micro_batch_makes_no_difference(loss):
    compare(results("single")[f"{loss}_one_by_one"], results("single")[loss])


def test_the_bounds_are_such_that_something_is_decided():
    first = {name: results("single")[name]["steps"][0] for name in LOSSES}
    for name in ("m2po_mask", "m2po_cap"):
        assert first[name]["objective/second_moment"] > 0.002
        assert 0 < first[name]["clip/positive"] < 1
        assert 0 < first[name]["clip/negative"] < 1
    ends = [step["objective/clip_high"] for step in results("single")["bapo"]["steps"]]
    assert ends == pytest.approx([1.01, 1.2])
    assert first["trajectory_balance"]["objective/log_z"] != 0.0
    assert first["oapl"]["objective/value"] != 0.0

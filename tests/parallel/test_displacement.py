"""The control `displacement` does on parallel layouts, and in either dtype, what it does on
one rank."""

import pytest

from tests.parallel import layouts
from tests.parallel.displacement_program import ADDED, runs_of
from tests.parallel.test_layout_invariance import compare_steps, compare_weights

pytestmark = pytest.mark.parallel

OFFERED = layouts.OFFERED["displacement_program"]
LAYOUTS = list(OFFERED)
ALONE = [name for name in ("single", "mixture_single") if name in OFFERED]
OTHERS = [name for name in LAYOUTS if name not in ALONE]
RUNS = runs_of(1)


def results(layout):
    return layouts.results(layout, "displacement_program")


def alone(layout):
    return results("mixture_single" if layout in layouts.MIXTURE_LAYOUTS else "single")


@pytest.mark.parametrize(
    ("layout", "run"),
    [(name, run) for name in OTHERS for run in runs_of(OFFERED[name]["ranks"])],
)
def test_metrics_and_weights_are_those_of_one_process(layout, run):
    found, expected = results(layout)[run], alone(layout)[run]
    # Four steps in, the largest difference of log-probs has the rounding of as many.
    compare_steps(found["steps"], expected["steps"], rel=3e-6)
    compare_weights(found["weights"], expected["weights"])
    for mine, theirs in zip(found["steps"], expected["steps"], strict=True):
        for key in ("displacement/cosine", "displacement/removed", "update/norm"):
            if key in theirs:
                # What a tolerated divergence spares has the rounding of log-probs.
                rel = 3e-6 if run == "spared" else 1e-6
                assert mine[key] == pytest.approx(theirs[key], rel=rel, abs=0.0), key


@pytest.mark.parametrize("layout", ALONE)
def test_the_steps_compared_turn_the_update_where_they_are_meant_to(layout):
    for run in RUNS:
        steps = results(layout)[run]["steps"]
        assert "displacement/cosine" not in steps[0]
        assert [step["displacement/removed"] > 0.05 for step in steps[1:]] == [run != "idle"] * 3


@pytest.mark.parametrize("layout", ALONE)
def test_a_tolerated_divergence_spares_its_share_of_the_component(layout):
    for step in results(layout)["spared"]["steps"][1:]:
        share = 1.0 - 0.005 / step["ratio/kl_k2"]
        assert 0.1 < share < 0.99
        assert step["displacement/removed"] == pytest.approx(share * step["displacement/cosine"])


@pytest.mark.parametrize("layout", LAYOUTS)
def test_all_ranks_decide_alike_to_the_bit(layout):
    assert results(layout)["ranks_agree"]


@pytest.mark.parametrize(
    ("layout", "run", "dtype"),
    [
        (layout, run, dtype)
        for layout in LAYOUTS
        for run in ("zero", "threshold")
        for dtype in ("float32", "bfloat16")
        if (run, dtype) in ADDED or OFFERED[layout]["ranks"] == 1
    ],
)
def test_what_the_optimizers_own_parameters_gain_has_the_cosine_asked_for(layout, run, dtype):
    cosine = {"zero": 0.0, "threshold": 0.05}[run]
    found = results(layout)["added"][run, dtype]
    assert found["step"]["displacement/cosine"] > cosine + 0.05
    # At the small rate of the bfloat16 run an update has more rounding of the weights it is added
    # to.
    rounding = 5e-6 if dtype == "float32" else 2e-4
    assert found["cosine"] == pytest.approx(cosine, abs=rounding)
    assert found["step"]["update/norm"] == pytest.approx(found["norm"], rel=rounding)
    assert found["model_follows"]


@pytest.mark.parametrize("layout", LAYOUTS)
def test_bfloat16_weights_would_have_shown_roundings_for_a_displacement(layout):
    """At this learning rate few of them move, so the cosines above are those of float32 ones."""
    assert results(layout)["added"]["zero", "bfloat16"]["cosine_of_the_models_own"] < 0.5


@pytest.mark.parametrize("layout", LAYOUTS)
def test_past_weights_come_back_from_a_checkpoint_to_the_bit(layout):
    found = results(layout)["resumed"]
    through, again = (
        {name: value for name, value in step.items() if not name.startswith("time/")}
        for step in found["steps"]
    )
    assert through["displacement/cosine"] > 0.05
    assert again == through
    assert found["oldest"] == 0

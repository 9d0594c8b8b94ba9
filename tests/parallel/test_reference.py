"""Log-probs of the reference and of the proximal policy are those of the weights they name, on
parallel layouts."""

import pytest
import torch

from tests.parallel import layouts
from tests.parallel.test_layout_invariance import compare_steps

pytestmark = pytest.mark.parallel

LAYOUTS = layouts.OFFERED["reference_program"]
RUNS = ["frozen", "refreshed", "path", "snapshot", "average"]


def results(layout):
    return layouts.results(layout, "reference_program")


def close(found, expected):
    torch.testing.assert_close(found.double(), expected.double(), atol=1e-5, rtol=0.0)


@pytest.mark.parametrize("run", RUNS)
@pytest.mark.parametrize("layout", [name for name in LAYOUTS if name != "single"])
def test_steps_and_precomputed_log_probs_are_those_of_one_rank(layout, run):
    found, expected = results(layout)[run], results("single")[run]
    compare_steps(found["steps"], expected["steps"])
    for mine, theirs in zip(found["precomputed"], expected["precomputed"], strict=True):
        assert mine.keys() == theirs.keys()
        for column in mine:
            close(mine[column], theirs[column])


@pytest.mark.parametrize("run", RUNS)
@pytest.mark.parametrize("layout", LAYOUTS)
def test_precomputing_leaves_the_weights_in_training_as_they_were_bit_for_bit(layout, run):
    untouched = results(layout)[run]["untouched"]
    assert len(untouched) == 3
    assert all(untouched)


@pytest.mark.parametrize("layout", LAYOUTS)
def test_the_reference_is_the_initial_model_so_its_divergence_is_zero_and_then_grows(layout):
    found = results(layout)["frozen"]
    for columns in found["precomputed"]:
        close(columns["logp_ref"], found["scores"][0])
    divergences = [step["ratio/kl_reference"] for step in found["steps"]]
    assert divergences[0] == pytest.approx(0.0, abs=1e-6)
    assert 1e-5 < divergences[1] < divergences[2]
    assert found["steps"][2]["loss/kl"] == pytest.approx(0.1 * divergences[2], rel=1e-4)


@pytest.mark.parametrize("layout", LAYOUTS)
def test_a_refreshed_reference_is_the_model_of_its_last_refresh(layout):
    found = results(layout)["refreshed"]
    for columns, scores in zip(
        found["precomputed"], [found["scores"][i] for i in (0, 0, 2)], strict=True
    ):
        close(columns["logp_ref"], scores)
    assert found["steps"][2]["ratio/kl_reference"] == pytest.approx(0.0, abs=1e-6)


@pytest.mark.parametrize("layout", LAYOUTS)
def test_a_reference_may_be_another_directory_of_the_same_shape(layout):
    found = results(layout)["path"]
    for columns in found["precomputed"]:
        close(columns["logp_ref"], found["expected"])
    assert (found["scores"][0] - found["expected"]).abs().max() > 0.1


@pytest.mark.parametrize("layout", LAYOUTS)
def test_snapshot_log_probs_are_those_the_trainer_computed_at_the_version_of_each_token(layout):
    found = results(layout)["snapshot"]
    close(found["precomputed"][2]["logp_prox"], found["expected"])
    assert set(found["versions"].tolist()) == {0, 1, 2}
    for version in range(3):
        own = found["versions"] == version
        for other in {0, 1, 2} - {version}:
            # Log-probs under another version differ by far more than the tolerance, or this would
            # show nothing.
            assert (found["scores"][other] - found["expected"])[own].abs().max() > 1e-3


@pytest.mark.parametrize("layout", LAYOUTS)
def test_a_resumed_policy_knows_the_snapshots_that_its_next_step_needs(layout):
    found = results(layout)["snapshot"]
    assert found["oldest"] == 0
    assert torch.equal(found["resumed"]["logp_prox"], found["precomputed"][2]["logp_prox"])


@pytest.mark.parametrize("layout", LAYOUTS)
def test_a_batch_older_than_the_snapshots_is_refused_with_the_number_that_would_do(layout):
    assert "set objective.snapshots (now 3) to at least 4" in results(layout)["snapshot"]["refused"]


@pytest.mark.parametrize("layout", LAYOUTS)
def test_the_average_policy_is_the_explicit_average_of_the_weights_so_far(layout):
    found = results(layout)["average"]
    close(found["precomputed"][2]["logp_prox"], found["expected"])
    assert (found["scores"][0] - found["expected"]).abs().max() > 1e-3

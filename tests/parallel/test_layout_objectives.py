"""Decisions about the whole batch, and step controls, are those of one process on every parallel layout."""

import numpy as np
import pytest
import torch

from tests.parallel import layouts
from tests.parallel.test_layout_invariance import PER_LAYOUT, compare_steps, compare_weights

pytestmark = pytest.mark.parallel

OBJECTIVES = ("m2po", "bapo", "whitened", "opob")
OTHERS = [layout for layout in layouts.ALL_LAYOUTS if layout not in ("single", "mixture_single")]
MIXTURES = list(layouts.MIXTURE_LAYOUTS)
REPLICATED = [layout for layout in OTHERS if layout not in ("data_distributed_optimizer", "expert")]
"""Where some parameter's gradient lies on more than one rank."""


def results(layout):
    return layouts.results(layout, "objective_program")


def alone(layout):
    return results("mixture_single" if layout in layouts.MIXTURE_LAYOUTS else "single")


@pytest.mark.parametrize("run", ["controls", *OBJECTIVES])
@pytest.mark.parametrize("layout", OTHERS)
def test_metrics_and_weights_are_those_of_one_process(layout, run):
    found, expected = results(layout)[run], alone(layout)[run]
    # OPOB's weights are, like the effective sample size, exponentials of sums over sequences of float32 log-probs.
    compare_steps(found["steps"], expected["steps"], rel=1e-5 if run == "opob" else 1e-6)
    compare_weights(found["weights"], expected["weights"])


@pytest.mark.parametrize("layout", OTHERS)
def test_cosine_projected_norm_and_ess_factor_agree_to_a_millionth(layout):
    for found, expected in zip(results(layout)["controls"]["steps"], alone(layout)["controls"]["steps"], strict=True):
        for key in ("gac/cosine", "gac/removed", "policy/grad_norm", "ess_lr/scale", "policy/lr_scale"):
            assert (key in found) == (key in expected)
            if key in expected:
                # A cosine is relative already: to both gradients' lengths.
                assert found[key] == pytest.approx(expected[key], rel=1e-6, abs=1e-7 if key == "gac/cosine" else 0.0), key


@pytest.mark.parametrize("layout", ["single", "mixture_single"])
def test_the_steps_compared_project_and_lower_the_learning_rate(layout):
    second = results(layout)["controls"]["steps"][1]
    assert second["gac/regime"] == 1
    assert 0.0 < second["policy/lr_scale"] < 0.99


@pytest.mark.parametrize("layout", layouts.ALL_LAYOUTS)
def test_all_ranks_decide_alike_to_the_bit(layout):
    assert results(layout)["ranks_agree"]


@pytest.mark.parametrize("run", OBJECTIVES)
@pytest.mark.parametrize("layout", OTHERS)
def test_advantages_masks_and_bounds_are_those_of_one_process(layout, run):
    for found, expected in zip(results(layout)[run]["decisions"], alone(layout)[run]["decisions"], strict=True):
        assert found.keys() == expected.keys()
        for key, value in expected.items():
            if key == "scalars":
                assert found[key] == pytest.approx(value, rel=1e-6)
            elif value.dtype == torch.bool or set(value.unique().tolist()) <= {0.0, 1.0}:
                assert torch.equal(found[key], value), key
            else:
                # Relative to the largest advantage: a baseline that takes off nearly all of a reward leaves its rounding.
                torch.testing.assert_close(found[key], value, rtol=1e-6, atol=1e-6 * float(value.abs().max()))


@pytest.mark.parametrize("layout", ["single", "mixture_single"])
def test_the_decisions_compared_are_not_trivial(layout):
    """M2PO cuts some tokens, BAPO has moved a bound, and baselines differ from the plain mean's."""
    m2po, bapo = (results(layout)[name]["decisions"][0] for name in ("m2po", "bapo"))
    assert 0 < m2po["keep"].double().mean() < 1
    assert bapo["scalars"]
    whitened, opob = (results(layout)[name]["decisions"][0]["advantages"] for name in ("whitened", "opob"))
    assert not torch.allclose(whitened, opob)


@pytest.mark.parametrize("layout", layouts.ALL_LAYOUTS)
def test_our_gradient_norm_is_megatrons(layout):
    norms = results(layout)["controls"]["norms"]
    assert norms["ours"] == pytest.approx(norms["megatron"], rel=1e-6)


@pytest.mark.parametrize("layout", layouts.ALL_LAYOUTS)
def test_a_replicated_parameter_counted_twice_is_seen(layout):
    """Tensor-parallel copies, the tied embedding's two stages, data-parallel replicas and expert replicas: each shows."""
    wrong, right = (results(layout)[name]["steps"] for name in ("twice", "once"))
    norm = abs(wrong[0]["policy/grad_norm"] / right[0]["policy/grad_norm"] - 1)
    cosine = abs(wrong[1]["gac/cosine"] / right[1]["gac/cosine"] - 1)
    if layout not in REPLICATED:
        assert norm == cosine == 0.0
        return
    assert norm > 1e-4
    # Data-parallel replicas hold everything: all inner products double, and the cosine stays.
    assert cosine > 1e-5 or layout == "data_replicated_optimizer"


@pytest.mark.parametrize("layout", layouts.ALL_LAYOUTS)
def test_the_number_of_collectives_does_not_depend_on_the_number_of_micro_batches(layout):
    """Few is one, or one round of the pipeline under virtual stages, where ranks could end up waiting for each other."""
    many, few = results(layout)["collectives"]
    assert few["micro_batches"] == (2 if layout == "virtual_pipeline" else 1)
    assert many["micro_batches"] > few["micro_batches"]
    assert many["calls"] == few["calls"] > 0


@pytest.mark.parametrize("layout", MIXTURES)
def test_a_mixture_scores_as_transformers_does(layout):
    reference = layouts.reference_model("mixture")
    for sample, score in zip(layouts.batch("mixture_a").samples(), results(layout)["scores"], strict=True):
        with torch.no_grad():
            np.testing.assert_allclose(score, layouts.reference_logprobs(reference, sample)[0].numpy(), atol=1e-5)


@pytest.mark.parametrize("layout", MIXTURES)
def test_a_resumed_mixture_goes_on_as_if_it_had_not_stopped(layout):
    """Two optimizers, one for experts and one for the rest, and GAC's reference: to the bit."""
    resumed = results(layout)["resumed"]
    compare_weights(resumed["loaded"], resumed["saved"], atol=0.0)
    through, again = resumed["runs"]
    for mine, theirs in zip(again["steps"], through["steps"], strict=True):
        assert {k: v for k, v in mine.items() if not k.startswith(PER_LAYOUT)} == {
            k: v for k, v in theirs.items() if not k.startswith(PER_LAYOUT)
        }
    assert "gac/cosine" in again["steps"][0]
    compare_weights(again["weights"], through["weights"], atol=0.0)

"""Samples packed into one row train as samples in rows of their own, on every parallel layout."""

import numpy as np
import pytest
import torch

from tests.parallel import layouts
from tests.parallel.packing_program import BUDGET, CONTEXT_PADDED_RUNS, DENSE_RUNS, runs_of
from tests.parallel.test_layout_invariance import (
    compare_steps,
    compare_weights,
    first_step_by_hand,
)
from tests.train_batches import samples_in

pytestmark = pytest.mark.parallel

LAYOUTS = layouts.OFFERED["packing_program"]
DENSE = [name for name in LAYOUTS if name not in layouts.MIXTURE_LAYOUTS]
MIXTURES = [name for name in LAYOUTS if name in layouts.MIXTURE_LAYOUTS]

RUNS = [
    (layout, run)
    for layout, settings in LAYOUTS.items()
    for run in runs_of(layout, settings.get("virtual_pipeline", 1))
]


def results(layout):
    return layouts.results(layout, "packing_program")


def padded(layout):
    return results("mixture_single" if layout in layouts.MIXTURE_LAYOUTS else "single")["padded"]


@pytest.mark.parametrize("layout", [name for name in LAYOUTS if "context" not in LAYOUTS[name]])
def test_steps_on_shared_prefixes_compute_fewer_tokens(layout):
    shared, whole = (
        results(layout)[run]["steps"][0]["policy/computed_tokens"] for run in ("gspo", "controls")
    )
    assert shared < 0.95 * whole
    assert results(layout)["gspo"]["steps"][0]["policy/shared_share"] > 0.0
    assert results(layout)["controls"]["steps"][0]["policy/shared_share"] == 0.0


@pytest.mark.parametrize(("layout", "run"), RUNS)
def test_steps_and_weights_are_those_of_padded_rows_on_one_rank(layout, run):
    found, expected = results(layout)[run], padded(layout)[run]
    compare_steps(found["steps"], expected["steps"], rel=1e-5 if run == "opob" else 1e-6)
    compare_weights(found["weights"], expected["weights"])


@pytest.mark.parametrize("run", CONTEXT_PADDED_RUNS)
def test_padded_rows_shared_by_two_ranks_train_as_on_one(run):
    found, expected = results("context")["padded"][run], padded("single")[run]
    compare_steps(found["steps"], expected["steps"], rel=1e-5 if run == "opob" else 1e-6)
    compare_weights(found["weights"], expected["weights"])


@pytest.mark.parametrize("layout", LAYOUTS)
def test_all_ranks_of_a_layout_receive_the_same_numbers(layout):
    assert results(layout)["ranks_agree"]


@pytest.mark.parametrize("layout", LAYOUTS)
def test_scores_are_those_of_padded_rows(layout):
    single = "mixture_single" if layout in layouts.MIXTURE_LAYOUTS else "single"
    for kind in ("scores", "shared_scores"):
        for found, expected in zip(
            results(layout)[kind], results(single)["padded_scores"], strict=True
        ):
            np.testing.assert_allclose(found, expected, atol=3e-6)


@pytest.mark.parametrize("layout", LAYOUTS)
def test_a_segment_scores_as_a_sample_of_its_own(layout):
    found = results(layout)
    samples = samples_in(layouts.batch("mixture_a" if layout in MIXTURES else "a"))
    for name in {"joined_scores", "shared_joined_scores", "padded_joined_scores"} & found.keys():
        alone = iter(zip(samples, found["scores"], strict=True))
        for score in found[name]:
            end = 0
            while end < len(score):
                sample, expected = next(alone)
                start = end + (len(sample.prompt.token_ids) if end else 0)
                end = start + sample.length
                np.testing.assert_allclose(score[start:end], expected, atol=3e-6)
        assert next(alone, None) is None


@pytest.mark.parametrize("layout", DENSE)
def test_scores_are_transformers_log_probs(layout):
    reference = layouts.reference_model("tied")
    for sample, score in zip(
        samples_in(layouts.batch("a")), results(layout)["scores"], strict=True
    ):
        with torch.no_grad():
            expected = layouts.reference_logprobs(reference, sample)[0].numpy()
        np.testing.assert_allclose(score, expected, atol=1e-5)


@pytest.mark.parametrize("layout", DENSE)
def test_the_first_step_has_the_loss_and_gradient_of_a_plain_autograd_loop(layout):
    loss, norm, entropy = first_step_by_hand()
    first = results(layout)["controls"]["steps"][0]
    assert first["policy/loss"] == pytest.approx(loss, rel=1e-5)
    assert first["policy/grad_norm"] == pytest.approx(norm, rel=1e-5)
    assert first["policy/entropy"] == pytest.approx(entropy, rel=1e-5)


@pytest.mark.parametrize("layout", DENSE)
def test_a_samples_log_probs_do_not_change_by_a_bit_with_its_neighbours_tokens(layout):
    found = results(layout)["among_others"]
    np.testing.assert_array_equal(*found["own"])
    assert not np.array_equal(*found["others"]), "the neighbours were meant to change"


@pytest.mark.parametrize("layout", MIXTURES)
def test_nor_do_those_of_experts_which_get_other_tokens_beside_them(layout):
    """An expert's product has as many rows as it has tokens, so its sums may round otherwise."""
    found = results(layout)["among_others"]
    np.testing.assert_allclose(*found["own"], atol=2e-6, rtol=0.0)
    assert not np.array_equal(*found["others"])


@pytest.mark.parametrize("layout", LAYOUTS)
def test_a_micro_batch_is_one_row_with_no_more_padding_than_the_layout_asks_for(layout):
    settings = LAYOUTS[layout]
    context = settings.get("context", 1)
    multiple = settings.get("tensor", 1) if settings.get("sequence") else 1
    multiple = 2 * context if context > 1 else multiple
    shapes = [(rows, length * context) for rows, length in results(layout)["shapes"]]
    assert {rows for rows, _ in shapes} == {1}
    assert all(length % multiple == 0 and length <= BUDGET for _, length in shapes)
    assert max(length for _, length in shapes) > 60, "several samples were meant to share a row"
    alone = settings["ranks"] == settings.get("tensor", 1) * settings.get("pipeline", 1)
    if alone and multiple == 1 and "virtual_pipeline" not in settings:
        # Elsewhere micro-batches of no sample fill up the ranks' numbers of them.
        shares = [step["policy/padding_share"] for step in results(layout)["controls"]["steps"]]
        assert shares == [0.0, 0.0]


def test_the_cuts_compared_were_really_different():
    counts = [
        results("single")[run]["steps"][0]["policy/micro_batches"]
        for run in ("all_at_once", "controls", "one_by_one")
    ]
    assert counts[0] == 1
    assert counts[0] < counts[1] < counts[2]
    assert padded("single")["controls"]["steps"][0]["policy/padding_share"] > 0.0
    assert set(DENSE_RUNS) <= set(padded("single"))

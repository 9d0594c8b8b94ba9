"""Decisions about the whole batch, and gradient controls, are those of one process on every
parallel layout."""

import numpy as np
import pytest
import torch

from tests.parallel import layouts
from tests.parallel.objective_program import (
    ANOMALOUS,
    DECIDING,
    SKIPPING,
    WHOLE_BATCH,
    objectives_of,
)
from tests.parallel.test_layout_invariance import PER_LAYOUT, compare_steps, compare_weights
from tests.train_batches import samples_in

pytestmark = pytest.mark.parallel

LAYOUTS = DECIDING
OTHERS = [layout for layout in LAYOUTS if layout not in ("single", "mixture_single")]
MIXTURES = [layout for layout in LAYOUTS if layout in layouts.MIXTURE_LAYOUTS]


RUNS = [
    (layout, run)
    for layout in OTHERS
    for run in (*(["controls"] if layout in MIXTURES else []), *objectives_of(layout))
]
"""The dense model's steps under controls are test_layout_invariance's."""


def results(layout):
    return layouts.results(layout, "objective_program")


def alone(layout):
    return results("mixture_single" if layout in layouts.MIXTURE_LAYOUTS else "single")


def controlled(layout):
    """Three steps under GAC and the ESS learning rate."""
    if layout in layouts.MIXTURE_LAYOUTS:
        return results(layout)["controls"]["steps"]
    return layouts.results(layout)["tied"]["steps"]


@pytest.mark.parametrize(("layout", "run"), RUNS)
def test_metrics_and_weights_are_those_of_one_process(layout, run):
    found, expected = results(layout)[run], alone(layout)[run]
    # OPOB's weights are, like the effective sample size, exponentials of sums over sequences of
    # float32 log-probs.
    compare_steps(found["steps"], expected["steps"], rel=1e-5 if run == "opob" else 1e-6)
    compare_weights(found["weights"], expected["weights"])


@pytest.mark.parametrize(
    "layout",
    [name for name in OTHERS if name in MIXTURES or name in layouts.OFFERED["layout_program"]],
)
def test_cosine_projected_norm_and_ess_factor_agree_to_a_millionth(layout):
    single = "mixture_single" if layout in layouts.MIXTURE_LAYOUTS else "single"
    for found, expected in zip(controlled(layout), controlled(single), strict=True):
        for key in (
            "gac/cosine",
            "gac/removed",
            "policy/grad_norm",
            "ess_lr/scale",
            "policy/lr_scale",
        ):
            assert (key in found) == (key in expected)
            if key in expected:
                # A cosine is relative already: to both gradients' lengths.
                assert found[key] == pytest.approx(
                    expected[key], rel=1e-6, abs=1e-7 if key == "gac/cosine" else 0.0
                ), key


@pytest.mark.parametrize("layout", ["single", "mixture_single"])
def test_the_steps_compared_project_and_lower_the_learning_rate(layout):
    second = controlled(layout)[1]
    assert second["gac/regime"] == 1
    assert 0.0 < second["policy/lr_scale"] < 0.99


@pytest.mark.parametrize("layout", LAYOUTS)
def test_all_ranks_decide_alike_to_the_bit(layout):
    assert results(layout)["ranks_agree"]


@pytest.mark.parametrize(("layout", "run"), [case for case in RUNS if case[1] != "controls"])
def test_advantages_masks_and_bounds_are_those_of_one_process(layout, run):
    for found, expected in zip(
        results(layout)[run]["decisions"], alone(layout)[run]["decisions"], strict=True
    ):
        assert found.keys() == expected.keys()
        for key, value in expected.items():
            if key == "scalars":
                assert found[key] == pytest.approx(value, rel=1e-6)
            elif value.dtype == torch.bool or set(value.unique().tolist()) <= {0.0, 1.0}:
                assert torch.equal(found[key], value), key
            else:
                # Relative to the largest advantage: a baseline that takes off nearly all of a
                # reward leaves its rounding.
                torch.testing.assert_close(
                    found[key], value, rtol=1e-6, atol=1e-6 * float(value.abs().max())
                )


@pytest.mark.parametrize("layout", ["single", "mixture_single"])
def test_the_decisions_compared_are_not_trivial(layout):
    """M2PO cuts some tokens, BAPO has moved a bound, and baselines differ from the plain mean's."""
    m2po, bapo = (results(layout)[name]["decisions"][0] for name in ("m2po", "bapo"))
    assert 0 < m2po["keep"].double().mean() < 1
    assert bapo["scalars"]
    whitened, opob = (
        results(layout)[name]["decisions"][0]["advantages"] for name in ("whitened", "opob")
    )
    assert not torch.allclose(whitened, opob)


@pytest.mark.parametrize(
    ("layout", "kind"),
    [*((layout, "report") for layout in ANOMALOUS), *((layout, "skip") for layout in SKIPPING)],
)
def test_an_anomalous_gradient_is_traced_to_its_parameter_and_sample(layout, kind):
    """A token that the model embeds as zeros multiplies the gradient of its embedding by
    1/sqrt(norm_eps)."""
    found, expected = results(layout)["anomalous"][kind], alone(layout)["anomalous"][kind]
    assert not any("policy/grad_anomaly" in step for step in found["usual"])
    step, (record,), (other,) = found["step"], found["written"], expected["written"]
    assert step["policy/grad_anomaly"] > 20
    assert record["norm"] / record["median"] == step["policy/grad_anomaly"]
    assert record["parameter"] == "embedding.word_embeddings.weight"
    assert 0.9 < record["share"] <= 1.0
    mixture = "mixture_" if layout in layouts.MIXTURE_LAYOUTS else ""
    batch = layouts.batch(f"{mixture}one_blank")
    (sample,) = record["samples"]
    assert sample["id"] == layouts.blamed(batch)
    (original,) = [s for s in samples_in(batch) if s.id == sample["id"]]
    assert sample["response_ids"] == original.response_ids.tolist()
    assert sample["response_ids"][1] == layouts.BLANK
    assert (sample["reward"], sample["length"]) == (original.reward, original.length)
    assert {**record, "norm": 0, "median": 0, "share": 0} == {
        **other,
        "norm": 0,
        "median": 0,
        "share": 0,
    }
    for key in ("norm", "median", "share"):
        assert record[key] == pytest.approx(other[key], rel=1e-5)


@pytest.mark.parametrize("layout", ANOMALOUS)
def test_a_reported_anomalous_step_continues_as_if_unreported(layout):
    reported = results(layout)["anomalous"]["report"]
    compare_weights(reported["after"], alone(layout)["anomalous"]["report"]["after"])
    assert reported["step"]["policy/skipped"] == 0.0


@pytest.mark.parametrize("layout", SKIPPING)
def test_a_skipped_anomalous_step_changes_nothing(layout):
    skipped = results(layout)["anomalous"]["skip"]
    assert skipped["step"]["policy/skipped"] == 1.0
    for name, weight in skipped["before"].items():
        assert torch.equal(skipped["after"][name], weight), name


@pytest.mark.parametrize("layout", ANOMALOUS)
def test_an_explanation_is_that_of_one_process_and_changes_nothing(layout):
    found, expected = results(layout)["explained"], alone(layout)["explained"]
    for name, weight in found["plain"]["weights"].items():
        assert torch.equal(found["trained"]["weights"][name], weight), name
    (update,), (other,) = (each["written"]["updates"] for each in (found, expected))
    (step,) = found["trained"]["steps"]
    assert update["loss"] == step["policy/loss"]
    # The cut gradient is rounded in float32: small contributions are differences of larger ones.
    close = {"rel": 1e-4, "abs": 1e-6}
    assert update["norm"] == pytest.approx(other["norm"], **close)
    assert update["sum_of_shares"] == pytest.approx(1.0, **close)
    assert update["texts"].keys() == other["texts"].keys()
    for kind, key in (
        ("parameters", "name"),
        ("groups", "group"),
        ("samples", "id"),
        ("tokens", ("sample", "position")),
    ):
        keys = (key,) if isinstance(key, str) else key
        ours, theirs = (
            {tuple(one[name] for name in keys): one for one in each[kind]}
            for each in (update, other)
        )
        assert ours.keys() == theirs.keys()
        assert ours
        for name, one in ours.items():
            for fact, value in one.items():
                expect = theirs[name][fact]
                same = expect if isinstance(expect, str) else pytest.approx(expect, **close)
                assert value == same, (kind, name, fact)


@pytest.mark.parametrize("layout", LAYOUTS)
def test_the_number_of_collectives_does_not_depend_on_the_number_of_micro_batches(layout):
    many, few = results(layout)["collectives"]
    assert many["micro_batches"] > few["micro_batches"]
    assert many["calls"] == few["calls"] > 0


@pytest.mark.parametrize("layout", MIXTURES)
def test_a_mixture_scores_as_transformers_does(layout):
    reference = layouts.reference_model("mixture")
    for sample, score in zip(
        samples_in(layouts.batch("mixture_a")), results(layout)["scores"], strict=True
    ):
        with torch.no_grad():
            np.testing.assert_allclose(
                score, layouts.reference_logprobs(reference, sample)[0].numpy(), atol=1e-5
            )


@pytest.mark.parametrize("layout", MIXTURES)
def test_a_resumed_mixture_continues_as_if_it_had_not_stopped(layout):
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


@pytest.mark.parametrize("loss", WHOLE_BATCH)
def test_one_sample_per_micro_batch_decides_alike(loss):
    found, expected = results("single")[f"{loss}_one_by_one"], results("single")[loss]
    compare_weights(found["weights"], expected["weights"])
    for one, other in zip(found["steps"], expected["steps"], strict=True):
        keys = [
            key
            for key in other
            if key.startswith(("objective/", "clip/", "policy/loss", "policy/grad_norm"))
        ]
        assert {key: one[key] for key in keys} == pytest.approx(
            {key: other[key] for key in keys}, rel=1e-5, abs=1e-6
        )


def test_the_bounds_are_such_that_something_is_decided():
    first = {name: results("single")[name]["steps"][0] for name in WHOLE_BATCH}
    for name in ("m2po", "m2po_cap"):
        assert first[name]["objective/second_moment"] > 0.002
        assert 0 < first[name]["clip/positive"] < 1
        assert 0 < first[name]["clip/negative"] < 1
    ends = [step["objective/clip_high"] for step in results("single")["bapo"]["steps"]]
    assert ends == pytest.approx([1.01, 1.2])
    assert first["trajectory_balance"]["objective/log_z"] != 0.0
    assert first["oapl"]["objective/value"] != 0.0

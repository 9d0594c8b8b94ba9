"""Demands of 8-bit products on loading, rows, copies and checkpoints, on several layouts: the
float32 weights are the file's, longer rows change nothing, and float32 weights stand in for those
kept in 8 bits, bit for bit."""

from __future__ import annotations

import json

import numpy as np
import pytest
import torch

from tests.gpu import test_fp8
from tests.gpu.test_train_step import flat
from tests.gradients import cosine
from tests.parallel import layouts
from tests.parallel.fp8_program import layouts_of
from tests.parallel.ranks import run_ranks
from tests.parallel.test_layout_invariance import compare_steps, compare_weights
from tests.thorough import thorough

pytestmark = pytest.mark.parallel


def results(layout):
    return layouts.results(layout, "fp8_program")


@pytest.mark.parametrize("layout", layouts.OFFERED["fp8_program"])
def test_float32_weights_are_the_files_and_the_models_are_their_rounding(layout):
    found = results(layout)["loaded"]
    assert [said for said, holds in found.items() if not holds] == []


@pytest.mark.parametrize("layout", layouts_of("rows"))
def test_rows_of_a_recipes_multiple_change_no_step(layout):
    rows = results(layout)["rows"]
    assert {sequence for sequence, _ in rows} == {"padded", "packed"}
    for (sequence, recipe), run in rows.items():
        plain = rows[sequence, "plain"]
        compare_steps(run["steps"], plain["steps"])
        compare_weights(run["weights"], plain["weights"])
        shares = [each["steps"][0]["policy/padding_share"] for each in (run, plain)]
        assert recipe == "plain" or shares[0] > shares[1]


@pytest.mark.parametrize("recipe", ["tensorwise", "blockwise"])
@pytest.mark.parametrize("layout", [each for each in layouts_of("rounded") if each != "single"])
def test_layouts_agree_within_the_rounding_of_a_recipe(layout, recipe):
    """Scales are of what a rank holds of a tensor in a micro-batch, so not to the bit."""
    divided, alone = (results(each)["rounded"] for each in (layout, "single"))
    rounded, usual = alone[recipe], alone["bfloat16"]
    for what, distance in (("logprob", of_log_probs), ("gradient", of_gradients)):
        rounding = distance(rounded, usual)
        assert rounding > 0.01, "nothing was rounded"
        most = test_fp8.between_layouts(recipe, what) * rounding
        assert distance(divided[recipe], rounded) < most
        assert distance(divided["bfloat16"], usual) < 0.15 * rounding


@thorough
def test_the_program_that_a_gpu_runs_on_divided_models_runs_on_one_rank_of_a_cpu():
    output = layouts.temporary() / "fp8.pt"
    arguments = ["cpu", "blockwise", json.dumps({"ranks": 1}), test_fp8.material(), output]
    run_ranks(1, "tests.gpu.fp8_layouts_program", arguments)
    found = torch.load(output, weights_only=False)
    assert of_log_probs(found["fp8"], found["bfloat16"]) == pytest.approx(
        test_fp8.ROUNDED["blockwise"]["logprob"], rel=0.05
    )
    resumed = found["resumed"]
    assert_same(resumed["loaded"], resumed["saved"])


def of_log_probs(one: dict, other: dict) -> float:
    """Nats, in the mean."""
    scores = (np.concatenate(each["scores"]).astype(np.float64) for each in (one, other))
    return float(np.abs(np.subtract(*scores)).mean())


def of_gradients(one: dict, other: dict) -> float:
    """1 - cosine."""
    return 1.0 - cosine(flat(one["gradient"]), flat(other["gradient"]))


@pytest.mark.parametrize("layout", layouts_of("averaged"))
def test_a_copy_of_the_optimizers_weights_is_put_in_place_and_taken_away(layout):
    found = results(layout)["averaged"]
    assert [said for said, holds in found.items() if not holds] == []


def assert_same(one, other):
    assert one.keys() == other.keys()
    assert [name for name in one if not torch.equal(one[name], other[name])] == []


@pytest.mark.parametrize("layout", layouts_of("kept"))
def test_a_policy_that_copies_float32_weights_takes_a_plain_ones_steps(layout):
    found = results(layout)["kept"]
    assert found["copies"] == {"MasterSnapshot", "WeightSnapshot"}
    kept, plain = found["runs"]["kept"], found["runs"]["plain"]
    assert kept["steps"] == plain["steps"]
    assert_same(kept["weights"], plain["weights"])
    assert plain["steps"][2]["displacement/cosine"] != 0.0


def test_copies_and_gacs_gradient_are_divided_over_data_parallel_ranks():
    found = results("data_distributed_optimizer")["kept"]
    whole = found["parameters"]
    for held in found["held"].values():
        kinds = {name.partition("_")[0] for name in held}
        assert kinds == {"reference", "past", "gac"}
        for name, shares in held.items():
            assert sum(shares) == whole, name
            assert max(shares) < 0.7 * whole, name


@pytest.mark.parametrize("layout", layouts_of("kept"))
def test_megatrons_optimizer_and_buffers_receive_fp8_weights(layout):
    assert results(layout)["kept"]["settings"] == {
        "kept": {"recipe of the optimizer": {"blockwise"}, "weights gathered in 8 bits": {True}},
        "plain": {"recipe of the optimizer": {None}, "weights gathered in 8 bits": {False}},
    }


@pytest.mark.parametrize("layout", layouts_of("reference"))
def test_it_compares_with_another_directorys_model_as_a_plain_one_does(layout):
    found = results(layout)["reference"]
    kept, plain = found["kept"], found["plain"]
    assert kept["steps"] == plain["steps"]
    assert kept["steps"][0]["ratio/kl_reference"] > 0.0
    assert_same(kept["weights"], plain["weights"])
    assert found["moved"]
    assert found["same masters"]


@pytest.mark.parametrize("layout", layouts_of("kept"))
def test_its_checkpoint_has_float32_weights_alone_and_continues_bit_for_bit(layout):
    found = results(layout)["kept"]
    assert found["models in the checkpoint"] == 0
    assert found["same masters"]
    for weights in found["loaded"].values():
        assert_same(weights, found["saved"])
    through, again = found["after"]["kept"], found["after"]["again"]
    assert again["steps"] == through["steps"]
    assert_same(again["weights"], through["weights"])


@pytest.mark.parametrize("layout", layouts_of("kept"))
def test_what_delayed_scaling_has_learnt_comes_back_to_the_rank_that_learnt_it(layout):
    assert results(layout)["kept"]["same scales"]


@pytest.mark.parametrize("layout", layouts_of("kept"))
def test_a_plain_policys_checkpoint_continues_with_fp8_weights(layout):
    assert results(layout)["kept"]["from a plain one"]

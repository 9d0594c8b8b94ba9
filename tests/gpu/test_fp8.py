"""FP8 GEMMs on one CUDA device: each recipe compared with bfloat16 on the same rows, GAC's cosine,
a step under every control, resumed runs, and FP8 weights.

The bounds are twice the cost of rounding by tests/float8.py for this model on a CPU, after a first
pass for delayed scaling. MAR_GPU_TESTS=cpu repeats this measurement, and docs/models.md shows it.
"""

from __future__ import annotations

import functools
import json
import pickle
import subprocess
from pathlib import Path

import numpy as np
import pytest
import torch

from megatron_async_rl.config.policy import RECIPES, lacking, version_of
from tests.gpu.fp8_program import CASES
from tests.gpu.hardware import DEVICE, ON_DEVICE_WITH_TE, run_program
from tests.gpu.test_train_step import flat, hold_gacs_cosine
from tests.gradients import cosine
from tests.method_settings import CONTROLS
from tests.parallel import layouts
from tests.parallel.test_export import assert_same
from tests.tiny_models import save_tiny_model
from tests.train_batches import ragged_batch

pytestmark = ON_DEVICE_WITH_TE
IN_BFLOAT16 = "bfloat16 on the same rows"
KEPT = [recipe for recipe, facts in RECIPES.items() if not facts.primary]
SIZES = {"hidden_size": 256, "heads": 4, "kv_heads": 2, "intermediate_size": 256, "layers": 2}
"""Sizes for which every side of a weight is a multiple of 128."""
ROUNDED = {
    "tensorwise": {"logprob": 0.080, "gradient": 0.078, "norm": 0.020},
    "delayed": {"logprob": 0.080, "gradient": 0.078, "norm": 0.020},
    "blockwise": {"logprob": 0.068, "gradient": 0.065, "norm": 0.016},
    "mxfp8": {"logprob": 0.067, "gradient": 0.065, "norm": 0.016},
}
"""Recipe -> largest cost of rounding on a CPU, over the cases: mean error of log-probs in nats; 1 -
cosine; relative."""
BETWEEN_LAYOUTS = {"tensorwise": 1.5, "delayed": 1.5, "blockwise": 0.7, "mxfp8": 0.7}
"""Recipe -> largest difference between two layouts, in units of the cost of rounding on one of
them. Two independent roundings would differ by about 1.4 units; blocks that a rank holds whole are
rounded equally on both."""
ALLOWED = 2.0


def between_layouts(recipe: str, what: str) -> float:
    """Return the tolerance of a number of ROUNDED. 1 - cosine is the square of a distance."""
    return BETWEEN_LAYOUTS[recipe] ** (2 if what == "gradient" else 1)


@functools.cache
def material() -> Path:
    directory = layouts.temporary()
    common = {"tied": True, "vocab_size": layouts.VOCABULARY, "scale": 2.0, **SIZES}
    save_tiny_model(directory / "tied", seed=1, **common)
    experts = {"num_experts": 4, "moe_intermediate_size": 128}
    save_tiny_model(directory / "mixture", "qwen3_moe", seed=2, **common, **experts)
    batches = {}
    for seed, name in enumerate(("a", "b")):
        raw = ragged_batch(vocabulary=layouts.VOCABULARY, seed=seed)
        batches[name] = layouts.with_behavior(directory / "tied", raw)
        batches[f"mixture_{name}"] = layouts.with_behavior(directory / "mixture", raw)
    (directory / "batches.pickle").write_bytes(pickle.dumps(batches))
    return directory


def refuse(recipe: str) -> None:
    """Skip the test if the device lacks the recipe."""
    if DEVICE == "cuda":
        capability = torch.cuda.get_device_capability()
        why = lacking(recipe, capability, version_of(torch.version.cuda))
        if why:
            pytest.skip(why)


def found(recipe: str) -> dict:
    """Return the program's results. Skips the test if the device lacks the recipe."""
    refuse(recipe)
    outcome = _found(recipe)
    if isinstance(outcome, Exception):
        raise outcome
    return outcome


LAYOUTS = {
    "tensor": {"ranks": 2, "tensor": 2, "sequence": True},
    "pipeline": {"ranks": 2, "pipeline": 2},
    "data": {"ranks": 2},
}


def on_layout(recipe: str, layout: str) -> dict:
    """Return the results with one layout. Skips the test if the device lacks the recipe, or if
    there are too few devices."""
    refuse(recipe)
    outcome = _on_layout(recipe, layout)
    if isinstance(outcome, Exception):
        raise outcome
    return outcome


@functools.cache
def _on_layout(recipe: str, layout: str) -> dict | Exception:
    output = layouts.temporary() / "fp8.pt"
    settings = LAYOUTS[layout]
    arguments = [DEVICE, recipe, json.dumps(settings), material(), output]
    try:
        run_program("tests.gpu.fp8_layouts_program", arguments, settings["ranks"])
    except subprocess.SubprocessError as failure:
        return failure
    return torch.load(output, weights_only=False, map_location="cpu")


@functools.cache
def _found(recipe: str) -> dict | Exception:
    """Return the results or the failure, so that a failure is awaited once and not by every
    test."""
    output = layouts.temporary() / "fp8.pt"
    try:
        run_program("tests.gpu.fp8_program", [DEVICE, recipe, material(), output])
    except subprocess.SubprocessError as failure:
        return failure
    return torch.load(output, weights_only=False, map_location="cpu")


@pytest.mark.parametrize("case", CASES)
@pytest.mark.parametrize("recipe", RECIPES)
def test_log_probs_are_near_those_of_bfloat16_and_others(recipe, case, figure):
    each = found(recipe)["cases"][case]
    assert each["layers"] == ("transformer_engine" if DEVICE == "cuda" else "local")
    rounded, usual = (np.concatenate(each[name]["scores"]) for name in ("fp8", "bfloat16"))
    apart = np.abs(rounded - usual).mean()
    assert apart > 1e-4, "nothing was rounded"
    bound = ALLOWED * ROUNDED[recipe]["logprob"]
    name = f"log-probs, {recipe}, {case}, mean error"
    figure(name, apart, at_most=bound, unit="nats", against=IN_BFLOAT16)


@pytest.mark.parametrize("case", CASES)
@pytest.mark.parametrize("recipe", RECIPES)
def test_gradients_point_where_those_of_bfloat16_do(recipe, case, figure):
    each = found(recipe)["cases"][case]
    rounded, usual = (flat(each[name]["gradient"]) for name in ("fp8", "bfloat16"))
    figure(
        f"cosine of the gradient, {recipe}, {case}",
        cosine(rounded, usual),
        at_least=1.0 - ALLOWED * ROUNDED[recipe]["gradient"],
        against=IN_BFLOAT16,
    )


@pytest.mark.parametrize("case", CASES)
@pytest.mark.parametrize("recipe", RECIPES)
def test_a_steps_gradient_norm_is_that_of_bfloat16(recipe, case, figure):
    each = found(recipe)["cases"][case]
    rounded, usual = (each[name]["step"]["policy/grad_norm"] for name in ("fp8", "bfloat16"))
    figure(
        f"gradient norm, {recipe}, {case}, relative error",
        abs(rounded / usual - 1.0),
        at_most=ALLOWED * ROUNDED[recipe]["norm"],
        against=IN_BFLOAT16,
    )


@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize("recipe", RECIPES)
def test_a_divided_model_is_as_near_to_bfloat16_as_one_ranks_bound(recipe, layout, figure):
    each = on_layout(recipe, layout)
    assert each["ranks_agree"]
    assert each["layers"] == ("transformer_engine" if DEVICE == "cuda" else "local")
    rounded, usual = (np.concatenate(each[name]["scores"]) for name in ("fp8", "bfloat16"))
    apart = np.abs(rounded - usual).mean()
    assert apart > 1e-4, "nothing was rounded"
    bound, at = ALLOWED * ROUNDED[recipe]["logprob"], f"{recipe}, {layout} of 2"
    name = f"log-probs, {at}, mean error"
    figure(name, apart, at_most=bound, unit="nats", against=IN_BFLOAT16)
    gradients = (flat(each[name]["gradient"]) for name in ("fp8", "bfloat16"))
    figure(
        f"cosine of the gradient, {at}",
        cosine(*gradients),
        at_least=1.0 - ALLOWED * ROUNDED[recipe]["gradient"],
        against=IN_BFLOAT16,
    )


@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize("recipe", RECIPES)
def test_a_divided_model_is_one_ranks_within_the_recipes_tolerance(recipe, layout, figure):
    divided, alone = on_layout(recipe, layout)["fp8"], found(recipe)["cases"]["tied"]["fp8"]
    apart = np.concatenate(divided["scores"]) - np.concatenate(alone["scores"])
    norms = [each["step"]["policy/grad_norm"] for each in (divided, alone)]
    for what, value, unit in (
        ("logprob", np.abs(apart).mean(), "nats"),
        ("gradient", 1.0 - cosine(flat(divided["gradient"]), flat(alone["gradient"])), ""),
        ("norm", abs(norms[0] / norms[1] - 1.0), ""),
    ):
        figure(
            f"{what}, {recipe}, {layout} of 2, distance",
            value,
            at_most=between_layouts(recipe, what) * ALLOWED * ROUNDED[recipe][what],
            unit=unit,
            against="one rank in the same recipe",
        )


@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize("recipe", KEPT)
def test_fp8_weights_continue_bit_for_bit_on_a_divided_model(recipe, layout):
    assert_goes_on(on_layout(recipe, layout)["resumed"])


@pytest.mark.parametrize("control", CONTROLS)
@pytest.mark.parametrize("recipe", RECIPES)
def test_every_control_takes_its_steps(recipe, control):
    run = found(recipe)["controls"][control]
    assert [step["policy/skipped"] for step in run["steps"]] == [0.0, 0.0, 0.0]
    assert all(np.isfinite(value) for step in run["steps"] for value in step.values())
    assert all(bool(tensor.isfinite().all()) for tensor in run["weights"].values())


@pytest.mark.parametrize("recipe", RECIPES)
def test_gacs_cosine_is_that_of_the_same_shards_in_float64(recipe, figure):
    hold_gacs_cosine(figure, recipe, *found(recipe)["cosines"], least=0.001)


def assert_goes_on(resumed: dict) -> None:
    assert_same(resumed["loaded"], resumed["saved"])
    through, again = resumed["runs"]
    assert_same(again["weights"], through["weights"])
    for mine, theirs in zip(again["steps"], through["steps"], strict=True):
        assert {k: v for k, v in mine.items() if not k.startswith("time/")} == {
            k: v for k, v in theirs.items() if not k.startswith("time/")
        }


@pytest.mark.parametrize("recipe", RECIPES)
def test_a_resumed_run_continues_bit_for_bit(recipe):
    assert_goes_on(found(recipe)["resumed"])


@pytest.mark.parametrize("recipe", KEPT)
def test_fp8_weights_continue_bit_for_bit(recipe):
    kept = found(recipe)["kept"]
    assert_goes_on(kept["resumed"])
    assert all(np.isfinite(step["policy/grad_norm"]) for step in kept["steps"])
    # Its reference is refreshed after every step, so it always equals the policy.
    assert [step["ratio/kl_reference"] for step in kept["steps"]] == [
        pytest.approx(0.0, abs=1e-6)
    ] * 3


@pytest.mark.parametrize("recipe", KEPT)
def test_float32_weights_are_the_files_where_weights_are_kept_in_8_bits(recipe):
    kept = found(recipe)["kept"]
    products = [name for name in kept["file"] if ".linear_" in name and name.endswith("weight")]
    assert len(products) == 2 * 4
    assert sorted(kept["names"]) == (sorted(products) if DEVICE == "cuda" else [])
    assert_same(kept["loaded"]["masters"], {k: v.float() for k, v in kept["file"].items()})


@pytest.mark.parametrize("when", ["loaded", "stepped"])
@pytest.mark.parametrize("recipe", KEPT)
def test_kept_weights_are_the_references_rounding_of_the_float32_ones(recipe, when, figure):
    kept = found(recipe)["kept"][when]
    weights, expected = flat(kept["weights"]), flat(kept["expected"])
    figure(
        f"weights kept in 8 bits, {recipe}, {when}, share that differ",
        float((weights != expected).double().mean()),
        at_most=0.0,
        against="tests/float8.py",
    )
    assert bool(((weights - expected).abs() <= expected.abs() / 7 + 1e-3).all())


@pytest.mark.parametrize("recipe", KEPT)
def test_engines_get_the_numbers_that_the_policy_multiplies_by(recipe):
    kept = found(recipe)["kept"]
    name = "decoder.layers.1.mlp.linear_fc2.weight"
    exported = kept["exported"]["model.layers.1.mlp.down_proj.weight"]
    assert torch.equal(exported, kept["stepped"]["weights"][name].float())

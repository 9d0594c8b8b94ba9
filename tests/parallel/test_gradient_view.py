"""The gradient, and its inner product, norm and clipping, are those of one process on every
parallel layout."""

import math

import pytest
import torch

from tests.parallel import layouts
from tests.parallel.objective_program import models_of

pytestmark = pytest.mark.parallel

ALL = layouts.OFFERED["objective_program"]


def is_mixture(layout):
    return layout.startswith(("mixture", "expert"))


CASES = [(layout, model) for layout in ALL for model in models_of(layout)]


def measured(layout, model):
    return layouts.results(layout, "objective_program")["gradients"][model]


def alone(layout, model):
    return measured("mixture_single" if is_mixture(layout) else "single", model)


def rules_of(layout, model):
    """The parts of the rule of what counts where that this layout and model need."""
    settings = {"tensor": 1, "context": 1, "pipeline": 1, "expert": 1}
    settings["distributed_optimizer"] = True
    settings |= ALL[layout]
    copies = settings["ranks"] // settings["pipeline"]
    data = copies // settings["tensor"]  # Context-parallel ranks among them.
    sliced = settings["distributed_optimizer"]
    return {
        "tied twice": settings["pipeline"] > 1 and model != "untied",
        "tensor copies": settings["tensor"] > 1,
        "slices as replicas": sliced and data > 1,
        # Experts of whose replicas there is one are counted everywhere by right.
        "replicas as slices": not sliced and data > 1,
        "experts as the rest": not sliced and settings["expert"] > 1 and data > 1,
        "every expert replica": not sliced and is_mixture(layout) and copies > settings["expert"],
        "every context replica": not sliced and settings["context"] > 1,
        "every data replica": not sliced and data > 1,
    }


def relative(found, expected):
    return max(abs(a / b - 1.0) for a, b in zip(found, expected, strict=True))


@pytest.mark.parametrize(("layout", "model"), CASES)
def test_products_and_cosine_are_those_of_one_process(layout, model):
    found, expected = measured(layout, model)["products"], alone(layout, model)["products"]
    product, norm, other = expected
    lengths = math.sqrt(norm * other)
    assert abs(product) > 0.05 * lengths
    assert found[1:] == pytest.approx(expected[1:], rel=1e-6)
    assert found[0] == pytest.approx(product, rel=0.0, abs=1e-6 * lengths)
    cosine = found[0] / math.sqrt(found[1] * found[2])
    assert cosine == pytest.approx(product / lengths, rel=0.0, abs=1e-6)


@pytest.mark.parametrize(("layout", "model"), CASES)
def test_the_norm_is_megatrons_and_that_of_the_whole_gradient(layout, model):
    """Tied embeddings on two stages, tensor-parallel copies, data-parallel and expert replicas
    count once in each."""
    found = measured(layout, model)
    exact = sum(float(tensor.double().square().sum()) for tensor in found["whole"].values())
    assert found["norms"]["ours"] == pytest.approx(found["norms"]["megatron"], rel=1e-6)
    assert found["norms"]["ours"] == pytest.approx(math.sqrt(exact), rel=1e-6)
    assert found["products"][1] == pytest.approx(found["norms"]["ours"] ** 2, rel=1e-9)


@pytest.mark.parametrize(("layout", "model"), CASES)
def test_every_tensor_of_the_gradient_is_that_of_one_process(layout, model):
    found, expected = measured(layout, model)["whole"], alone(layout, model)["whole"]
    assert found.keys() == expected.keys()
    scale = max(float(tensor.abs().max()) for tensor in expected.values())
    for name, tensor in expected.items():
        torch.testing.assert_close(found[name], tensor, rtol=0.0, atol=1e-6 * scale, msg=name)


@pytest.mark.parametrize(("layout", "model"), CASES)
def test_clipping_reaches_its_limit_and_scales_every_copy_alike(layout, model):
    found = measured(layout, model)
    assert found["clipped"] == pytest.approx(found["norms"]["ours"] / 4, rel=1e-6)
    for name, tensor in found["whole"].items():
        torch.testing.assert_close(found["clipped_whole"][name], tensor / 4, rtol=1e-5, atol=1e-9)


@pytest.mark.parametrize(("layout", "model"), CASES)
def test_each_part_of_the_rule_of_what_counts_is_decided(layout, model):
    """Breaking one part of the rule changes the norm on every layout that needs the part."""
    found = measured(layout, model)
    needed = rules_of(layout, model)
    for rule, products in found["broken"].items():
        off = relative(products[1:], found["products"][1:])
        assert (off > 1e-4) if needed[rule] else (off == 0.0), (rule, off)


def test_every_part_of_the_rule_is_needed_on_some_layout():
    needed = {rule for case in CASES for rule, decides in rules_of(*case).items() if decides}
    assert needed == rules_of(*CASES[0]).keys()

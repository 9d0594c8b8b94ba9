"""Transformer Engine's layers compared with the local ones on one CUDA device, in bfloat16 and with
the same weights: log-probs, gradients, a step, and checkpoints from one to the other."""

from __future__ import annotations

import numpy as np
import pytest
import torch

from tests.gpu.hardware import DEVICE, ON_DEVICE_WITH_TE, run_program
from tests.gpu.layers_program import CASES
from tests.gpu.test_train_step import TOLERANCES, cosine, flat, trained
from tests.parallel import layouts

pytestmark = ON_DEVICE_WITH_TE
FAMILIES = ("local", "transformer_engine" if DEVICE == "cuda" else "local")
ALLOWED = TOLERANCES["bfloat16"]
NO_FARTHER = 2.0
"""Limit of Transformer Engine's distance from float32 on the CPU, in units of the local layers'."""


@pytest.fixture(scope="module")
def found():
    output = layouts.temporary() / "layers.pt"
    run_program(
        "tests.gpu.layers_program",
        [DEVICE, layouts.material(layouts.MAX_LAYERS), output, *FAMILIES],
    )
    found = torch.load(output, weights_only=False, map_location="cpu")
    assert all([one["layers"] for one in each] == list(FAMILIES) for each in found.values())
    return found


@pytest.mark.parametrize("case", CASES)
def test_log_probs_are_as_near_to_float32s_as_the_local_layers(found, case):
    exact = np.concatenate(trained("cpu", "float32")[case]["scores"])
    local, engine = (np.concatenate(each["scores"]) for each in found[case])
    assert abs(engine - local).mean() < ALLOWED["logprob"]
    assert abs(engine - exact).mean() < NO_FARTHER * abs(local - exact).mean() + 1e-3


@pytest.mark.parametrize("case", CASES)
def test_gradients_are_as_near_to_float32s_as_the_local_layers(found, case):
    exact = flat(trained("cpu", "float32")[case]["gradient"])
    local, engine = (flat(each["gradient"]) for each in found[case])
    assert cosine(engine, local) > 1.0 - ALLOWED["gradient"]
    assert 1.0 - cosine(engine, exact) < NO_FARTHER * (1.0 - cosine(local, exact)) + 1e-4


@pytest.mark.parametrize("case", CASES)
def test_a_step_has_the_local_layers_loss_norm_and_weights(found, case):
    local, engine = found[case]
    for key, allowed in (("policy/loss", "loss"), ("policy/grad_norm", "norm")):
        assert engine["step"][key] == pytest.approx(
            local["step"][key], rel=ALLOWED[allowed], abs=0.1 * ALLOWED[allowed]
        )
    one, other = (flat(each["saved"]["weights"]) for each in found[case])
    first = [
        flat({name: held for name, held in each["saved"]["state"].items() if "exp_avg/" in name})
        for each in found[case]
    ]
    assert cosine(*first) > 1.0 - ALLOWED["gradient"]
    # Adam's step is at most the learning rate; the rest is the rounding of the weights.
    assert bool(((one - other).abs() <= other.abs() / 256 + 2 * 1e-3).all())


@pytest.mark.parametrize("case", CASES)
def test_each_family_loads_the_others_checkpoint_bit_for_bit(found, case):
    for one, other in (found[case], found[case][::-1]):
        for kind, tensors in other["saved"].items():
            assert one["from_other"][kind].keys() == tensors.keys()
            for name, tensor in tensors.items():
                assert torch.equal(one["from_other"][kind][name], tensor), f"{kind}/{name}"
    local, engine = found[case]
    assert engine["next"]["policy/grad_norm"] == pytest.approx(
        local["next"]["policy/grad_norm"], rel=ALLOWED["norm"]
    )

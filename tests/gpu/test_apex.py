"""Apex's kernels under local layers against torch's, on one CUDA device, in bfloat16."""

from __future__ import annotations

import json
from importlib.util import find_spec

import numpy as np
import pytest
import torch

from megatron_async_rl.policy.families import APEX_WEIGHT_GRADIENTS
from megatron_async_rl.policy.layers import NORMS
from tests.gpu.apex_program import CASES
from tests.gpu.hardware import DEVICE, ON_DEVICE, run_program
from tests.gpu.test_train_step import TOLERANCES, cosine, flat
from tests.parallel import layouts

MISSING = [one for one in (APEX_WEIGHT_GRADIENTS, NORMS) if find_spec(one) is None]
pytestmark = [
    *ON_DEVICE,
    pytest.mark.skipif(DEVICE == "cuda" and bool(MISSING), reason=f"needs Apex: {MISSING}"),
]
ALLOWED = TOLERANCES["bfloat16"]


@pytest.fixture(scope="module")
def found():
    output = layouts.temporary() / "apex"
    output.mkdir(exist_ok=True)
    arguments = [
        DEVICE,
        layouts.material(layouts.MAX_LAYERS),
        output,
        json.dumps({"ranks": 1}),
        *CASES,
    ]
    run_program("tests.gpu.apex_program", arguments)
    return torch.load(output / "apex.pt", weights_only=False, map_location="cpu")


@pytest.mark.parametrize("case", CASES)
def test_log_probs_gradients_and_steps_are_those_of_torchs_kernels(found, case):
    plain, fused = found[case]
    assert (plain["fused"], fused["fused"]) == (False, True)
    scores = [np.concatenate(each["scores"]) for each in (plain, fused)]
    assert abs(scores[0] - scores[1]).mean() < ALLOWED["logprob"]
    one, other = (flat(each["gradient"]) for each in (plain, fused))
    assert cosine(one, other) > 1.0 - ALLOWED["gradient"]
    assert float(other.norm()) == pytest.approx(float(one.norm()), rel=ALLOWED["norm"])
    norms = [each["step"]["policy/grad_norm"] for each in (plain, fused)]
    assert norms[1] == pytest.approx(norms[0], rel=ALLOWED["norm"])


def test_float32_models_and_adapters_take_no_fused_gradient(found):
    assert found["plain"] == {"float32": False, "lora": False}

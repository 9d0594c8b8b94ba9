"""Local layers call Apex's kernels where it is installed, on ranks that share tensors and
sequences.

Over a stand-in for its interface (tests/apex_stand_in.py); the kernels: tests/gpu/test_apex.py.
"""

from __future__ import annotations

import json

import numpy as np
import pytest
import torch

from tests.gpu.test_train_step import cosine, flat
from tests.parallel import layouts
from tests.parallel.ranks import run_ranks
from tests.thorough import thorough

pytestmark = [pytest.mark.parallel, thorough]
DONE = ("packed", "narrow", "mixture")
ROUNDING = 2.0**-8
"""Rounding of bfloat16: unfused weight gradients are rounded in each micro-batch."""


@pytest.fixture(scope="module")
def found(tmp_path_factory):
    output = tmp_path_factory.mktemp("apex")
    parallel = json.dumps(layouts.LAYOUTS["sequence"])
    run_ranks(2, "tests.gpu.apex_program", ["cpu", layouts.material(), output, parallel, *DONE])
    return torch.load(output / "apex.pt", weights_only=False)


@pytest.mark.parametrize("case", DONE)
def test_a_step_with_apex_is_the_step_without(found, case):
    plain, fused = found[case]
    assert (plain["fused"], fused["fused"]) == (False, True)
    assert all(map(np.array_equal, plain["scores"], fused["scores"])), "norms are the same here"
    one, other = (flat(each["gradient"]) for each in (plain, fused))
    assert cosine(one, other) > 1.0 - ROUNDING**2
    assert float(other.norm()) == pytest.approx(float(one.norm()), rel=ROUNDING)
    norms = [each["step"]["policy/grad_norm"] for each in (plain, fused)]
    assert norms[1] == pytest.approx(norms[0], rel=ROUNDING)


def test_gradients_go_into_the_buffer_in_its_dtype_and_norms_are_one_kernel(found):
    for case in DONE:
        gradient = "wgrad_gemm_accum_fp16" if case == "narrow" else "wgrad_gemm_accum_fp32"
        calls = {name for name, count in found[case][1]["calls"].items() if count}
        assert calls == {gradient, "fused_rms_norm_affine"}, case


def test_float32_models_and_adapters_take_no_fused_gradient(found):
    assert found["plain"] == {"float32": False, "lora": False}

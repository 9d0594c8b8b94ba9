"""GAC's kernels without a GPU: by Triton's interpreter the torch path's numbers, by its compiler
code for sm_90."""

from __future__ import annotations

import functools
import json
import os
import subprocess
import sys
from typing import Any

import pytest
import torch

triton = pytest.importorskip("triton")

from triton.backends.compiler import GPUTarget  # noqa: E402 - after the check that it is there
from triton.compiler import ASTSource  # noqa: E402

from megatron_async_rl.controls import gac_kernels, quantize, reference  # noqa: E402

KIND = {"fp32": "*fp32", "bf16": "*bf16", "fp8": "*fp8e4nv"}


@functools.cache
def interpreted() -> dict[str, Any]:
    ran = subprocess.run(
        [sys.executable, "-m", "tests.unit.gac_kernels_program"],
        env={**os.environ, "TRITON_INTERPRET": "1"},
        capture_output=True,
        text=True,
        check=False,
    )
    assert ran.returncode == 0, ran.stderr[-3000:]
    found: dict[str, Any] = json.loads(ran.stdout.splitlines()[-1])
    return found


def test_products_are_float64s_and_the_torch_paths_within_its_rounding() -> None:
    found = interpreted()["products"]
    assert found["error"] < 1e-14
    assert found["from_torch"] < 1e-6
    assert found["known_is_same"]


def test_projected_gradients_and_written_references_are_the_torch_paths_bit_for_bit() -> None:
    found = interpreted()["projection"]
    # One rounding of g + factor r on both sides; a processor without fused multiply-add has two.
    assert found["ulps"] <= 1
    assert found["references_apart"] == 0
    assert interpreted()["references_apart"] == 0


def test_every_number_is_read_and_written_once() -> None:
    """The bytes that kernels move against the floor: above it are the blocks' sums, and what the
    last block's fillers take."""
    assert 1.0 <= interpreted()["products"]["moved"] < 1.01
    assert 1.0 <= interpreted()["projection"]["moved"] < 1.01


def test_gac_takes_the_same_steps_with_kernels_as_without() -> None:
    """Raw and applied references of every type, offloaded too, through all regimes."""
    found = interpreted()["steps"]
    assert found["projected"] >= 12
    assert found["metrics"] < 2e-6
    assert found["gradients"] < 2e-6


def test_sums_do_not_depend_on_how_many_programs_there_are() -> None:
    assert interpreted()["spans"] < 1e-14
    assert interpreted()["repeated"]


def compiled(kernel: Any, gradient: str, kept: str, constants: dict[str, Any]) -> Any:
    """Every pointer and count divisible by 16, as a whole buffer's are."""
    types = {
        "gradient": gradient,
        "numbers": kept,
        "scales": "*fp32" if kept == KIND["fp8"] else kept,
        "partials": "*fp64",
        "factor": "fp32",
        "elements": "i64",
        "first": "i32",
    }
    names = list(kernel.arg_names)
    aligned = {
        (index,): [["tt.divisibility", 16]]
        for index, name in enumerate(names)
        if types.get(name, "").startswith("*")
    }
    source = ASTSource(
        fn=kernel,
        signature={name: types.get(name, "constexpr") for name in names},
        constexprs=constants,
        attrs=aligned,
    )
    try:
        return triton.compile(source, target=GPUTarget("cuda", 90, 32))
    except (FileNotFoundError, RuntimeError) as error:
        if "ptxas" in str(error) and "not found" in str(error).lower():
            pytest.skip(f"Triton has no ptxas here: {error}")
        raise


@pytest.mark.parametrize(
    ("number_format", "gradient", "masked"),
    [
        ("fp32", "*fp32", False),
        ("bf16", "*fp32", False),
        ("fp8", "*fp32", False),
        ("fp8", "*bf16", False),
        ("bf16", "*bf16", True),
        ("fp8", "*fp32", True),
    ],
)
def test_kernels_compile_for_sm_90(number_format: str, gradient: str, masked: bool) -> None:
    shape = {"columns": quantize.BLOCK, "rows": gac_kernels.ROWS, "masked": masked}
    scaled = {"scaled": number_format == "fp8"}
    products = compiled(
        gac_kernels.products_kernel,
        gradient,
        KIND[number_format],
        {**shape, **scaled, "known": False, "steps": gac_kernels.STEPS},
    )
    project = compiled(
        gac_kernels.project_kernel,
        gradient,
        KIND[number_format],
        {**shape, **scaled, "projects": True, "raw": False},
    )
    for kernel in (products, project):
        assert len(kernel.asm["cubin"]) > 1000
        assert "atom." not in kernel.asm["ptx"]
        assert "red.global" not in kernel.asm["ptx"]
    if not masked:
        for kernel in (products, project):
            assert "ld.global.v4.b32" in kernel.asm["ptx"], "16 bytes at once"
        assert "st.global.v4.b32" in project.asm["ptx"]
    if number_format == "fp8":
        assert "cvt.rn.satfinite.e4m3x2.f32" in project.asm["ptx"]
    if number_format == "bf16" or gradient == "*bf16":
        assert "cvt.rn.bf16" in project.asm["ptx"]


def test_only_a_cuda_device_gets_kernels() -> None:
    assert reference.kernels_for(torch.device("cpu"), "fp32") is None

"""Apex's interface over torch's operations, on any device. It has the same functions, arguments and
results (up to rounding), and counts calls."""

from __future__ import annotations

import sys
from types import ModuleType

import torch
from megatron.core.tensor_parallel import layers
from torch import Tensor

CALLS: dict[str, int] = {}
"""Number of calls of each function."""


def _added(input: Tensor, d_output: Tensor, d_weight: Tensor) -> None:
    assert input.dtype == d_output.dtype
    assert input.is_contiguous()
    assert d_output.is_contiguous()
    rows, outputs = (each.flatten(0, -2).float() for each in (input, d_output))
    d_weight += outputs.t() @ rows


def wgrad_gemm_accum_fp32(input: Tensor, d_output: Tensor, d_weight: Tensor) -> None:
    """Compute d_weight, float32, += d_output^T input."""
    _count("wgrad_gemm_accum_fp32")
    assert d_weight.dtype == torch.float32
    _added(input, d_output, d_weight)


def wgrad_gemm_accum_fp16(input: Tensor, d_output: Tensor, d_weight: Tensor) -> None:
    """Compute d_weight, of input's dtype, += d_output^T input."""
    _count("wgrad_gemm_accum_fp16")
    assert d_weight.dtype == input.dtype
    _added(input, d_output, d_weight)


def fused_rms_norm_affine(
    input: Tensor,
    weight: Tensor,
    normalized_shape: tuple[int, ...],
    eps: float = 1e-6,
    memory_efficient: bool = False,
) -> Tensor:
    _count("fused_rms_norm_affine")
    assert input.dtype == weight.dtype, "the other function is for mixed ones"
    return torch.nn.functional.rms_norm(input, normalized_shape, weight, eps)


def install() -> None:
    """Install the modules under Apex's names."""
    gradients = ModuleType("fused_weight_gradient_mlp_cuda")
    gradients.wgrad_gemm_accum_fp32 = wgrad_gemm_accum_fp32
    gradients.wgrad_gemm_accum_fp16 = wgrad_gemm_accum_fp16
    norms = ModuleType("apex.normalization.fused_layer_norm")
    norms.fused_rms_norm_affine = fused_rms_norm_affine
    sys.modules |= {
        gradients.__name__: gradients,
        "fused_layer_norm_cuda": ModuleType("fused_layer_norm_cuda"),
        norms.__name__: norms,
    }
    # Megatron looked for it when it was imported.
    layers.fused_weight_gradient_mlp_cuda = gradients
    layers._grad_accum_fusion_available = True


def _count(name: str) -> None:
    CALLS[name] = CALLS.get(name, 0) + 1

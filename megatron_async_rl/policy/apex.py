"""NVIDIA Apex's kernels for Megatron's local layers on CUDA, where Apex is built with its
extensions.

- weight gradients: the product adds to Megatron's float32 buffer. Without it the product is rounded
  to bfloat16 in memory of its own, and a second kernel adds that to the buffer;
- RMSNorm: one kernel each way;
- Adam: Megatron itself takes Apex's FusedAdam where Transformer Engine is not installed.

Transformer Engine's layers have such kernels of their own.

Invariants:
- without Apex everything works, on torch's kernels, with the same results up to rounding;
- float32 models use torch's kernels alone, so a GPU computes what a CPU does;
- adapters (policy.lora) need no gradient of the weights that they adapt.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from functools import cache
from importlib import import_module
from typing import Any

import torch
from torch import Tensor

from megatron_async_rl.policy.supported import APEX_WEIGHT_GRADIENTS

NORMS = "fused_layer_norm_cuda"
Norm = Callable[[Tensor, Tensor, tuple[int, ...], float], Tensor]
"""Function of hidden, weight, shape of the weight and epsilon."""


def settings(dtype: torch.dtype, device_type: str, *, lora: bool) -> Mapping[str, Any]:
    """Changes to Megatron's configuration for local layers."""
    fused = applies(dtype, device_type) and not lora and _imports(APEX_WEIGHT_GRADIENTS)
    return {"gradient_accumulation_fusion": True} if fused else {}


def norm(dtype: torch.dtype, device_type: str) -> Norm | None:
    """Apex's RMSNorm for a model in `dtype`; null where torch's is to be taken."""
    if not applies(dtype, device_type) or not _imports(NORMS):
        return None
    kernel: Norm = import_module("apex.normalization.fused_layer_norm").fused_rms_norm_affine
    return kernel


def applies(dtype: torch.dtype, device_type: str) -> bool:
    """True where the kernels are worth a look: they are CUDA's, and for bfloat16 models here."""
    return device_type == "cuda" and dtype == torch.bfloat16


@cache
def _imports(extension: str) -> bool:
    """True where the extension is there and was built for this torch."""
    try:
        import_module(extension)
    except ImportError:
        return False
    return True

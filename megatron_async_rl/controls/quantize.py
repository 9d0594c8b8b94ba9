"""Number formats of a gradient reference. 8-bit floats of a block share a scale that is a power of
two, so that scaling rounds nothing."""

from __future__ import annotations

from typing import Literal

import torch
from torch import Tensor

ReferenceDtype = Literal["fp32", "bf16", "fp8"]
BLOCK = 128
"""Elements that share a scale."""
LARGEST = 448.0
SMALLEST_EXPONENT = -126


def quantize(values: Tensor, dtype: ReferenceDtype) -> tuple[Tensor, ...]:
    """New tensors that hold `values` (any shape, finite): one, or 8-bit numbers [blocks, BLOCK] and
    their scales [blocks, 1]."""
    if dtype != "fp8":
        return (
            values.detach().to(torch.float32 if dtype == "fp32" else torch.bfloat16, copy=True),
        )
    flat = values.detach().reshape(-1).float()
    blocks = torch.nn.functional.pad(flat, (0, -flat.numel() % BLOCK)).view(-1, BLOCK)
    scales = scales_of(blocks.abs().amax(dim=1, keepdim=True), LARGEST)
    return (blocks / scales).to(torch.float8_e4m3fn), scales


def scales_of(largest: Tensor, limit: float) -> Tensor:
    """The smallest powers of two that bring `largest` (float32, not negative) within `limit`."""
    mantissa, exponent = torch.frexp(largest / limit)
    # frexp gives [0.5, 1) x 2^e: 0.5 is a power of two itself, which e - 1 reaches.
    exponent = torch.where(mantissa == 0.5, exponent - 1, exponent).clamp(min=SMALLEST_EXPONENT)
    return torch.ldexp(torch.ones_like(mantissa), exponent)


def dequantize(written: tuple[Tensor, ...], shape: torch.Size) -> Tensor:
    """float32 of `shape`; the tensor itself, not a copy, where that is what was kept."""
    if len(written) == 1:
        return written[0].float().view(shape)
    numbers, scales = written
    return (numbers.float() * scales).view(-1)[: shape.numel()].view(shape)

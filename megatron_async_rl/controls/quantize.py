"""Number formats of a gradient reference. FP8 numbers of a block share a scale that is a power of
two, so that scaling rounds nothing."""

from __future__ import annotations

from typing import Literal

import torch
from torch import Tensor

ReferenceDtype = Literal["fp32", "bf16", "fp8"]
BLOCK = 128
"""Number of elements that share a scale."""
LARGEST = 448.0
SMALLEST_EXPONENT = -126


QuantizedTensors = tuple[Tensor, ...]
"""One flat tensor, or FP8 numbers [blocks, BLOCK] and their scales [blocks, 1]."""


def room_for(elements: int, dtype: ReferenceDtype, device: torch.device) -> QuantizedTensors:
    """Return new, uninitialised tensors."""
    if dtype != "fp8":
        number = torch.float32 if dtype == "fp32" else torch.bfloat16
        return (torch.empty(elements, dtype=number, device=device),)
    blocks = -(-elements // BLOCK)
    return (
        torch.empty(blocks, BLOCK, dtype=torch.float8_e4m3fn, device=device),
        torch.empty(blocks, 1, dtype=torch.float32, device=device),
    )


def write(values: Tensor, written: QuantizedTensors) -> None:
    """Store `values` (of the same size, finite) in `written`."""
    flat = values.detach().reshape(-1)
    if len(written) == 1:
        written[0].copy_(flat)
        return
    numbers, scales = written
    flat = torch.nn.functional.pad(flat.float(), (0, -flat.numel() % BLOCK))
    blocks = flat.view(-1, BLOCK)
    scales.copy_(scales_of(blocks.abs().amax(dim=1, keepdim=True), LARGEST))
    numbers.copy_(blocks / scales)


def scales_of(largest: Tensor, limit: float) -> Tensor:
    """Return the smallest powers of two that scale `largest` (float32, not negative) to at most
    `limit`."""
    mantissa, exponent = torch.frexp(largest / limit)
    # frexp gives [0.5, 1) x 2^e; 0.5 itself is a power of two, for which e - 1 suffices.
    exponent = torch.where(mantissa == 0.5, exponent - 1, exponent).clamp(min=SMALLEST_EXPONENT)
    return torch.ldexp(torch.ones_like(mantissa), exponent)


def dequantize(written: QuantizedTensors, shape: torch.Size) -> Tensor:
    """Return float32 of `shape`; the stored tensor itself, not a copy, if it has that dtype."""
    if len(written) == 1:
        return written[0].float().view(shape)
    numbers, scales = written
    # The sign, exponent and fraction of an FP8 number, moved apart, form the float16 that is 2^8
    # times smaller. Torch's own conversion is five times slower on a CPU.
    halves = (numbers.view(torch.int8).to(torch.int16) << 7).bitwise_and_(~(1 << 14))
    values = halves.view(torch.float16).float().mul_(2.0**8).mul_(scales)
    return values.view(-1)[: shape.numel()].view(shape)

"""How a gradient that is kept for the next step is written: float32, bfloat16, or 8-bit floats with a scale per block.

What is read back differs from what was written, element by element, by at most
    bf16    2^-9 of the element
    fp8     2^-4 of the element (e4m3 has 3 bits after the point), and for elements below 2^-14 of their block's largest by
            at most 2^-18 of that largest
so a cosine taken against it moves by at most |error| / |reference|: 2^-9 and about 2^-4; and by far less for errors that do
not line up with the other gradient (of order c |error|^2 / 2 plus the same over the root of the number of elements).

A block's scale is the smallest power of two that brings its largest element within e4m3's 448. Scaling is then exact, and
writing again what was read gives the same bits.
"""

from __future__ import annotations

from typing import Literal

import torch
from torch import Tensor

NumberFormat = Literal["fp32", "bf16", "fp8"]
BLOCK = 128
"""Elements that share a scale."""
LARGEST = 448.0
SMALLEST_EXPONENT = -126


def encode(values: Tensor, number_format: NumberFormat) -> tuple[Tensor, ...]:
    """New tensors that hold `values` (any shape, finite): one, or 8-bit numbers [blocks, BLOCK] and their scales [blocks, 1]."""
    if number_format != "fp8":
        return (values.detach().to(torch.float32 if number_format == "fp32" else torch.bfloat16, copy=True),)
    flat = values.detach().reshape(-1).float()
    blocks = torch.nn.functional.pad(flat, (0, -flat.numel() % BLOCK)).view(-1, BLOCK)
    mantissa, exponent = torch.frexp(blocks.abs().amax(dim=1, keepdim=True) / LARGEST)
    # frexp gives [0.5, 1) x 2^e: 0.5 is a power of two itself, which e - 1 reaches.
    exponent = torch.where(mantissa == 0.5, exponent - 1, exponent).clamp(min=SMALLEST_EXPONENT)
    scales = torch.ldexp(torch.ones_like(mantissa), exponent)
    return (blocks / scales).to(torch.float8_e4m3fn), scales


def decode(written: tuple[Tensor, ...], shape: torch.Size) -> Tensor:
    """float32 of `shape`; the tensor itself, not a copy, where that is what was kept."""
    if len(written) == 1:
        return written[0].float().view(shape)
    numbers, scales = written
    return (numbers.float() * scales).view(-1)[: shape.numel()].view(shape)

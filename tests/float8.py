"""Reference of FP8 tensors, in torch's own types, for comparison with FP8 layers: one scale for a
tensor, or one for each block of a matrix."""

from __future__ import annotations

import torch
from torch import Tensor

from megatron_async_rl.controls.quantize import scales_of


def tensorwise(
    values: Tensor, dtype: torch.dtype = torch.float8_e4m3fn, *, ulps: int = 0
) -> tuple[Tensor, Tensor]:
    """Return (numbers, scale): of any shape, and a scalar; values are about numbers x scale. The
    largest value becomes the largest number of `dtype`, so the scale is not a power of two. Values
    are multiplied by its inverse, as in Transformer Engine, because a division rounds some values
    halfway between two numbers to the other one. ulps: offset of the inverse, in units in its last
    place; Transformer Engine divides approximately on a GPU, and can be off by one."""
    largest = values.float().abs().amax()
    limit = torch.finfo(dtype).max
    inverse = torch.where(largest == 0, 1.0, limit / largest)
    inverse = (inverse.view(torch.int32) + ulps).view(torch.float32)
    return (values.float() * inverse).clamp(-limit, limit).to(dtype), 1.0 / inverse


def blockwise(
    values: Tensor, block: tuple[int, int], dtype: torch.dtype = torch.float8_e4m3fn
) -> tuple[Tensor, Tensor]:
    """Return (numbers, scales) of a matrix [M, N] in blocks: [M, N] each, with each block's scale,
    a power of two, at all of its positions. block: (1, 128) for activations and gradients, (128,
    128) for weights; the last blocks may be smaller."""
    limit = torch.finfo(dtype).max
    rows, columns = (torch.arange(n) // size for n, size in zip(values.shape, block, strict=True))
    across = int(columns[-1]) + 1
    place = (rows[:, None] * across + columns[None]).flatten()
    magnitudes = values.float().abs().flatten()
    largest = torch.zeros(int(place[-1]) + 1).scatter_reduce(0, place, magnitudes, "amax")
    scales = scales_of(largest, limit)[place].view(values.shape)
    return (values.float() / scales).to(dtype), scales


def restored(numbers: Tensor, scales: Tensor) -> Tensor:
    """Return float32, of the shape of `numbers`."""
    return numbers.float() * scales

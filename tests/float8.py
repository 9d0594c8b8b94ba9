"""Reference of FP8 tensors, in torch's own types: one scale for a tensor, or one for each block of
a matrix. FP8 layers are compared with it."""

from __future__ import annotations

import torch
from torch import Tensor

from megatron_async_rl.controls.quantize import scales_of


def tensorwise(
    values: Tensor, dtype: torch.dtype = torch.float8_e4m3fn, *, ulps: int = 0
) -> tuple[Tensor, Tensor]:
    """(numbers, scale): of any shape, and a scalar; values are about numbers x scale. The largest
    value becomes the largest number of `dtype`, so that the scale is not a power of two: values are
    multiplied by its inverse, as Transformer Engine does, since a division rounds some of those
    that lie halfway between two numbers to the other one. ulps: of the inverse, in units in its
    last place; Transformer Engine divides approximately on a GPU, and can be one off."""
    largest = values.float().abs().amax()
    limit = torch.finfo(dtype).max
    inverse = torch.where(largest == 0, 1.0, limit / largest)
    inverse = (inverse.view(torch.int32) + ulps).view(torch.float32)
    return (values.float() * inverse).clamp(-limit, limit).to(dtype), 1.0 / inverse


def blockwise(
    values: Tensor, block: tuple[int, int], dtype: torch.dtype = torch.float8_e4m3fn
) -> tuple[Tensor, Tensor]:
    """(numbers, scales) of a matrix [M, N] in blocks: [M, N] and [M, N], each block's scale at all
    of its places, a power of two. block: (1, 128) as activations and gradients have them, (128,
    128) as weights do; the last blocks may be cut short."""
    limit = torch.finfo(dtype).max
    rows, columns = (torch.arange(n) // size for n, size in zip(values.shape, block, strict=True))
    across = int(columns[-1]) + 1
    place = (rows[:, None] * across + columns[None]).flatten()
    magnitudes = values.float().abs().flatten()
    largest = torch.zeros(int(place[-1]) + 1).scatter_reduce(0, place, magnitudes, "amax")
    scales = scales_of(largest, limit)[place].view(values.shape)
    return (values.float() / scales).to(dtype), scales


def restored(numbers: Tensor, scales: Tensor) -> Tensor:
    """float32, of the shape of `numbers`."""
    return numbers.float() * scales

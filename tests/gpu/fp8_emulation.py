"""FP8 GEMMs of Megatron's own layers, emulated with tests/float8.py: the precision that a recipe
costs, without a GPU. Sums have the tensors' dtype."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any
from unittest import mock

import torch
from megatron.core.tensor_parallel import (
    copy_to_tensor_model_parallel_region,
    gather_from_sequence_parallel_region,
    layers,
)
from torch import Tensor

from tests.float8 import blockwise, restored, tensorwise

Rounding = Callable[[Tensor], Tensor]


def by_tensor(kind: torch.dtype = torch.float8_e4m3fn) -> Rounding:
    return lambda matrix: restored(*tensorwise(matrix, kind)).to(matrix.dtype)


def by_block(*block: int) -> Rounding:
    return lambda matrix: restored(*blockwise(matrix, block)).to(matrix.dtype)


ROUNDINGS: dict[str, tuple[Rounding, Rounding, Rounding]] = {
    "tensorwise": (by_tensor(), by_tensor(), by_tensor(torch.float8_e5m2)),
    "delayed": (by_tensor(), by_tensor(), by_tensor(torch.float8_e5m2)),
    "blockwise": (by_block(1, 128), by_block(128, 128), by_block(1, 128)),
    "mxfp8": (by_block(1, 32), by_block(1, 32), by_block(1, 32)),
}
"""Recipe -> rounding of inputs, weights and gradients, along the sum. `delayed`: by the largest
value of this pass instead of earlier ones."""


class Product(torch.autograd.Function):
    @staticmethod
    def forward(ctx, values: Tensor, weight: Tensor, recipe: str) -> Tensor:  # type: ignore[override]
        inputs, weights, _ = ROUNDINGS[recipe]
        ctx.save_for_backward(values, weight)
        ctx.recipe = recipe
        flat = inputs(values.reshape(-1, values.shape[-1]))
        return (flat @ weights(weight).t()).view(*values.shape[:-1], -1)

    @staticmethod
    def backward(ctx, gradient: Tensor):  # type: ignore[override]
        values, weight = ctx.saved_tensors
        inputs, weights, gradients = ROUNDINGS[ctx.recipe]
        flat = gradient.reshape(-1, gradient.shape[-1])
        into = gradients(flat) @ weights(weight.t().contiguous()).t()
        # Both operands of this GEMM are rounded along the rows over which it sums.
        across = gradients(flat.t().contiguous())
        own = inputs(values.reshape(-1, values.shape[-1]).t().contiguous())
        return into.view(values.shape), across @ own.t(), None


@contextmanager
def in_8_bits(recipe: str) -> Iterator[None]:
    """Round every GEMM of a layer in the body; those of router, logits and attention are not
    rounded."""

    def product(
        input: Tensor,
        weight: Tensor,
        bias: Tensor | None,
        *,
        allreduce_dgrad: bool,
        sequence_parallel: bool,
        tp_group: Any,
        **_: object,
    ) -> Tensor:
        if sequence_parallel:
            input = gather_from_sequence_parallel_region(input, group=tp_group)
        elif allreduce_dgrad:
            input = copy_to_tensor_model_parallel_region(input, group=tp_group)
        found = Product.apply(input, weight, recipe)
        return found if bias is None else found + bias

    name = "linear_with_grad_accumulation_and_async_allreduce"
    with mock.patch.object(layers, name, product):
        yield

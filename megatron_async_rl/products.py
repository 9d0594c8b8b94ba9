"""GEMMs of the output layer: bfloat16 operands, float32 results.

Invariants:
- an element of a result is a sum of exact products in the result's dtype, on every device;
- only one block of the vocabulary at a time is converted to float32, never the whole weight.

torch multiplies bfloat16 operands into float32 only on CUDA. On the CPU the operands are converted
to float32, which is exact, and the GEMM is marked as exact in bfloat16: a processor with bfloat16
instructions (AMX, AVX512-BF16) then uses them with float32 sums, others multiply float32. The mark
is a setting of the process, so it is set only while such a GEMM runs.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

import torch
from torch import Tensor

WEIGHT_BLOCK = {"cpu": 1 << 21, "cuda": 1 << 26}
"""Elements of the weight in one block, by device type: 8 MiB as float32; on CUDA enough work to
hide the launch."""


def logits_into(out: Tensor, hidden: Tensor, weight: Tensor) -> None:
    """Compute out = hidden weight^T. out: [N, V] float32, or float64 with float64 operands. hidden:
    [N, H]. weight: [V, H], in the dtype of `hidden`."""
    if hidden.dtype == out.dtype:
        torch.mm(hidden, weight.t(), out=out)
    elif hidden.is_cuda:
        torch.mm(hidden, weight.t(), out_dtype=out.dtype, out=out)
    else:
        # Exact, because every bfloat16 number is a float32 number.
        wide = hidden.to(out.dtype)
        with _exact_in(hidden.dtype):
            for rows in _weight_blocks(weight):
                torch.mm(wide, weight[rows].to(out.dtype).t(), out=out[:, rows])


def add_weight_gradient(out: Tensor, grad_logits: Tensor, hidden: Tensor) -> None:
    """Compute out += grad_logits^T hidden. out: [V, H] of any float dtype. grad_logits: [N, V];
    hidden: [N, H], of one dtype. Each element is summed over the N tokens before it is rounded to
    `out`."""
    if out.dtype == hidden.dtype:
        out.addmm_(grad_logits.t(), hidden)
        return
    wide = hidden if hidden.is_cuda else hidden.float()
    with _exact_in(hidden.dtype):
        for rows in _weight_blocks(out):
            left = grad_logits[:, rows].t()
            if hidden.is_cuda:
                out[rows].add_(torch.mm(left, wide, out_dtype=torch.float32))
            elif out.dtype == torch.float32:
                out[rows].addmm_(left.float(), wide)
            else:
                out[rows].add_(torch.mm(left.float(), wide))


def _weight_blocks(weight: Tensor) -> Iterator[slice]:
    size = max(1, WEIGHT_BLOCK[weight.device.type] // weight.shape[1])
    for start in range(0, weight.shape[0], size):
        yield slice(start, min(start + size, weight.shape[0]))


@contextmanager
def _exact_in(dtype: torch.dtype) -> Iterator[None]:
    """Permit float32 GEMMs on the CPU to treat their operands as numbers of `dtype`."""
    settings = torch.backends.mkldnn.matmul
    before = settings.fp32_precision
    if dtype == torch.bfloat16:
        settings.fp32_precision = "bf16"
    try:
        yield
    finally:
        settings.fp32_precision = before

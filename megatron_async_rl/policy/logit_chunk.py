"""One chunk of the output layer on one rank: its logits, their softmax, and the weight's gradient,
without rounding to the model's type.

torch has a bfloat16 product with float32 output on CUDA only. Elsewhere the operands are made
float32, which is exact, and the product is marked as exact in bfloat16: where the processor has
bfloat16 instructions (AMX, AVX512-BF16) it then uses them, with float32 sums and a float32 result;
where it has none it multiplies float32. That setting is torch's, for the process: it stands only
while a product of such operands runs.

Invariants:
- results are the sums of exact products in the result's type, on every device;
- what is made float32 is one block of the vocabulary at a time, never the whole weight.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

import torch
from torch import Tensor

WEIGHT_BLOCK = {"cpu": 1 << 21, "cuda": 1 << 26}
"""Elements of the weight in one block, by the device's type: 8 MiB as float32; on CUDA enough work
to hide the launch."""
LOGIT_BLOCK = {"cpu": 1 << 18, "cuda": 1 << 24}
"""Logits that are worked on in one go: two blocks stay in the cache; on CUDA as above, and little
compared with a chunk of a large vocabulary."""


def logits_into(out: Tensor, hidden: Tensor, weight: Tensor) -> None:
    """out = hidden weight^T. out: [N, V] float32, or float64 with float64 operands. hidden: [N, H].
    weight: [V, H], of the type of `hidden`."""
    if hidden.dtype == out.dtype:
        torch.mm(hidden, weight.t(), out=out)
    elif hidden.is_cuda:
        torch.mm(hidden, weight.t(), out_dtype=out.dtype, out=out)
    else:
        wide = hidden.to(out.dtype)
        with _exact_in(hidden.dtype):
            for rows in _weight_blocks(weight):
                torch.mm(wide, weight[rows].to(out.dtype).t(), out=out[:, rows])


def add_weight_gradient(out: Tensor, grad_logits: Tensor, hidden: Tensor) -> None:
    """out += grad_logits^T hidden. out: [V, H] of any float type. grad_logits: [N, V]; hidden:
    [N, H], of one type. Each element is summed over the N tokens before it is rounded to `out`."""
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


def local_softmax(
    logits: Tensor,
    temperature: float,
    here: Tensor,
    row: Tensor,
    local: Tensor,
    kept: Tensor | None,
) -> None:
    """Makes `local` [4, n] and, overwriting the logits [n, V/tp] of temperature 1, their softmax;
    copies that into `kept`, where it is other memory."""
    below = torch.empty_like(logits[next(row_blocks(logits))])
    for block in row_blocks(logits):
        z = logits[block]
        if temperature != 1.0:
            z.div_(temperature)
        largest, at_target = z.amax(1, keepdim=True), z.gather(1, row[block])[:, 0]
        less = torch.sub(z, largest, out=below[: len(z)])
        p = torch.exp(less, out=z)
        total = p.sum(1, keepdim=True)
        p.div_(total)
        # L in float64: it is large compared with differences of logits and of ranks.
        log_sum = total[:, 0].double().log()
        local[0, block] = largest[:, 0].double() + log_sum
        local[1, block] = log_sum - torch.linalg.vecdot(p, less)
        local[2, block] = torch.linalg.vecdot(p, p)
        local[3, block] = torch.where(here[block][:, 0], at_target - local[0, block], 0.0)
        if kept is not None and kept is not logits:
            kept[block] = p


def subtract_targets(p: Tensor, logp: Tensor, here: Tensor, row: Tensor) -> None:
    """p [n, V/tp] less 1 at the targets of this rank; exact where p is 1 within rounding."""
    set_targets(p, torch.expm1(logp)[:, None], here, row)


def set_targets(matrix: Tensor, values: Tensor, here: Tensor, row: Tensor) -> None:
    values = torch.where(here, values.to(matrix.dtype), matrix.gather(1, row))
    # Not `scatter_`: of bfloat16 on the CPU it copies the whole matrix.
    line = torch.arange(len(matrix), device=matrix.device)
    matrix.index_put_((line, row[:, 0]), values[:, 0])


def row_blocks(matrix: Tensor) -> Iterator[slice]:
    """Rows of a matrix, as many as are worked on in one go."""
    size = max(1, LOGIT_BLOCK[matrix.device.type] // matrix.shape[1])
    for first in range(0, len(matrix), size):
        yield slice(first, min(first + size, len(matrix)))


def _weight_blocks(weight: Tensor) -> Iterator[slice]:
    size = max(1, WEIGHT_BLOCK[weight.device.type] // weight.shape[1])
    for start in range(0, weight.shape[0], size):
        yield slice(start, min(start + size, weight.shape[0]))


@contextmanager
def _exact_in(dtype: torch.dtype) -> Iterator[None]:
    """Float32 products on the CPU may take their operands for numbers of `dtype`."""
    settings = torch.backends.mkldnn.matmul
    before = settings.fp32_precision
    if dtype == torch.bfloat16:
        settings.fp32_precision = "bf16"
    try:
        yield
    finally:
        settings.fp32_precision = before

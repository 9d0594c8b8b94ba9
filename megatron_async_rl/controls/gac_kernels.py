"""GAC's two sweeps over gradient memory as Triton kernels, for references of every dtype of
reference.py: inner products, and projection combined with the writing of the new reference.

Bytes moved for n elements of a gradient of G bytes and a reference of R (4, 2, or 1 + 4/128):

    three_products   n (G + R)          both read
    project          n (2 G + 2 R)      both read and written
    keep             n (G + R)          the gradient read, the reference written

Invariants:
- the results equal those of the torch path: |products| to float64's rounding, g + factor r up to
  one rounding, the written reference bit for bit;
- sums do not depend on the grid: a program sums SPAN elements in float64 wherever it runs, and the
  programs' sums are added in their order; no atomics;
- every access except those to a shard's last SPAN elements is whole and unmasked, so that 16 bytes
  can be moved at once if the memory is aligned.
"""

from __future__ import annotations

import numpy as np
import torch
import triton
import triton.language as tl
from torch import Tensor

from megatron_async_rl.controls.quantize import BLOCK

ROWS = 8
"""Blocks of a reference that a program processes at a time; it holds them in registers."""
STEPS = 16
"""Number of times that one program of `three_products` does so."""
SPAN = ROWS * STEPS * BLOCK
"""Number of elements that one program sums."""


@triton.jit
def _places(row: tl.tensor, elements: tl.tensor, columns: tl.constexpr) -> tl.tensor:
    at = row[:, None] * columns + tl.arange(0, columns)[None, :]
    return at, at < elements


@triton.jit
def _load(pointer: tl.tensor, at: tl.tensor, inside: tl.tensor, masked: tl.constexpr) -> tl.tensor:
    if masked:
        return tl.load(pointer + at, mask=inside, other=0.0).to(tl.float32)
    else:
        return tl.load(pointer + at).to(tl.float32)


@triton.jit
def _store(
    pointer: tl.tensor, at: tl.tensor, values: tl.tensor, inside: tl.tensor, masked: tl.constexpr
) -> None:
    values = values.to(pointer.dtype.element_ty)
    if masked:
        tl.store(pointer + at, values, mask=inside)
    else:
        tl.store(pointer + at, values)


@triton.jit(do_not_specialize=["elements", "first"])
def products_kernel(
    gradient: tl.tensor,
    numbers: tl.tensor,
    scales: tl.tensor,
    partials: tl.tensor,
    elements: tl.tensor,
    first: tl.tensor,
    known: tl.constexpr,
    scaled: tl.constexpr,
    masked: tl.constexpr,
    columns: tl.constexpr,
    rows: tl.constexpr,
    steps: tl.constexpr,
) -> None:
    # int64, because offsets of a shard may exceed 2^31.
    program = (tl.program_id(0) + first).to(tl.int64)
    product = tl.zeros((rows, columns), tl.float64)
    square = tl.zeros((rows, columns), tl.float64)
    reference = tl.zeros((rows, columns), tl.float64)
    for step in range(steps):
        row = (program * steps + step) * rows + tl.arange(0, rows)
        at, inside = _places(row, elements, columns)
        g = _load(gradient, at, inside, masked)
        r = _load(numbers, at, inside, masked)
        if scaled:
            r = r * _load(scales, row, row * columns < elements, masked)[:, None]
        g = g.to(tl.float64)
        r = r.to(tl.float64)
        # float64 in registers: a float32 sum over SPAN elements would depend on the order.
        product += g * r
        square += g * g
        if not known:
            reference += r * r
    out = partials + program * 3
    tl.store(out, tl.sum(tl.sum(product, 1), 0))
    tl.store(out + 1, tl.sum(tl.sum(square, 1), 0))
    tl.store(out + 2, tl.sum(tl.sum(reference, 1), 0))


@triton.jit(do_not_specialize=["factor", "elements", "first"])
def project_kernel(
    gradient: tl.tensor,
    numbers: tl.tensor,
    scales: tl.tensor,
    factor: tl.tensor,
    elements: tl.tensor,
    first: tl.tensor,
    projects: tl.constexpr,
    raw: tl.constexpr,
    scaled: tl.constexpr,
    masked: tl.constexpr,
    columns: tl.constexpr,
    rows: tl.constexpr,
) -> None:
    program = (tl.program_id(0) + first).to(tl.int64)
    row = program * rows + tl.arange(0, rows)
    at, inside = _places(row, elements, columns)
    kept = _load(gradient, at, inside, masked)
    row_inside = row * columns < elements
    if projects:
        r = _load(numbers, at, inside, masked)
        if scaled:
            r = r * _load(scales, row, row_inside, masked)[:, None]
        # The product of two float32 is exact in float64: one rounding, whatever the compiler fuses.
        sum64 = kept.to(tl.float64) + r.to(tl.float64) * factor
        changed = sum64.to(tl.float32).to(gradient.dtype.element_ty)
        _store(gradient, at, changed, inside, masked)
        if not raw:
            kept = changed.to(tl.float32)
    if scaled:
        # The smallest power of two that scales the block's largest element to at most 448 = 1.75 x
        # 2^8, from its bits; at least 2^-126, and 1 for a block of zeros.
        bits = tl.max(tl.abs(kept), 1).to(tl.int32, bitcast=True)
        exponent = (bits >> 23) - 8 + ((bits & 0x7FFFFF) > 0x600000).to(tl.int32)
        exponent = tl.where(bits == 0, 127, tl.maximum(exponent, 1))
        scale = (exponent << 23).to(tl.float32, bitcast=True)
        inverse = ((254 - exponent) << 23).to(tl.float32, bitcast=True)
        kept = kept * inverse[:, None]
        # The last block is written to its end; elements beyond the gradient are 0.
        inside = (row_inside[:, None]) & (at >= 0)
        _store(scales, row, scale, row_inside, masked)
    _store(numbers, at, kept, inside, masked)


def three_products(gradient: Tensor, written: tuple[Tensor, ...], known: bool) -> Tensor:
    """Return [3] float64: (<g, r>, |g|^2, |r|^2), with one read of each. known: leave |r|^2 at 0.

    gradient: contiguous, float32 or bfloat16. written: tensors of quantize.py, of the same size.
    """
    flat, numbers, scales = gradient.view(-1), written[0], written[-1]
    elements = flat.numel()
    programs = triton.cdiv(elements, SPAN)
    if not programs:
        return torch.zeros(3, dtype=torch.float64, device=gradient.device)
    partials = torch.empty(programs, 3, dtype=torch.float64, device=gradient.device)
    for grid, first, masked in _launches(elements, SPAN):
        products_kernel[(grid,)](
            flat,
            numbers,
            scales,
            partials,
            elements,
            first,
            known=known,
            scaled=len(written) == 2,
            masked=masked,
            columns=BLOCK,
            rows=ROWS,
            steps=STEPS,
        )
    # The programs' sums are added in their order, so the result does not depend on the grid.
    return partials.sum(0)


def project(gradient: Tensor, written: tuple[Tensor, ...], factor: float, *, raw: bool) -> None:
    """Compute gradient += factor reference, and make the gradient before (raw) or after this change
    the reference."""
    _write(gradient, written, factor, projects=True, raw=raw)


def keep(gradient: Tensor, written: tuple[Tensor, ...]) -> None:
    """Make the gradient the reference."""
    _write(gradient, written, 0.0, projects=False, raw=True)


def _write(
    gradient: Tensor, written: tuple[Tensor, ...], factor: float, *, projects: bool, raw: bool
) -> None:
    flat, numbers, scales = gradient.view(-1), written[0], written[-1]
    # A kernel computes in float32, as torch does with its factor.
    factor = float(np.float32(factor))
    for grid, first, masked in _launches(flat.numel(), ROWS * BLOCK):
        project_kernel[(grid,)](
            flat,
            numbers,
            scales,
            factor,
            flat.numel(),
            first,
            projects=projects,
            raw=raw,
            scaled=len(written) == 2,
            masked=masked,
            columns=BLOCK,
            rows=ROWS,
        )


def _launches(elements: int, span: int) -> list[tuple[int, int, bool]]:
    """Return (programs, first program, masked): the programs with `span` elements, and the one with
    fewer."""
    whole, rest = divmod(elements, span)
    launches = [(whole, 0, False)] if whole else []
    return [*launches, (1, whole, True)] if rest else launches

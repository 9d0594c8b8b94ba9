"""Shards of the reduced gradient on a rank, and inner products over the whole model.

Every rank holds shards of the reduced gradient. A shard counts on one rank only
(`GradientShard.counted`): every rank holds and changes its copy of a parameter that is replicated
over tensor- or pipeline-parallel ranks, but sums include the parameter once. Sums of products
accumulate a few terms in float32 and the partial sums in float64. The error is at most 3e-7 of
|g| |r|, also with heavy tails, and usually 5e-8. The result therefore does not depend on the
sharding of the parameters, except for float32 rounding of the gradient itself.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from itertools import cycle
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

CPU_BLOCK = 1 << 17
"""Number of elements of a block on the CPU. The cache holds a few blocks of this size during all
operations on them, and an operation on one takes ten times as long as the call overhead."""
TERMS = 32
"""Number of products, one from each block, that are added in float32 on the CPU before a tree adds
the sums. A plain dot product adds thousands in sequence: with 2^15 elements of a heavy-tailed
gradient, its error is 2e-6."""
SHORT = 4096
"""Largest number of elements whose products are summed in float64. This costs nothing, and biases
and norms lose no precision."""
CUDA_BLOCK = 1 << 24
"""Number of elements of a block on CUDA: enough work to hide the kernel launch. cuBLAS sums in a
tree, so the longer block does not increase the rounding error."""

CLIP_EPSILON = 1e-6
"""Constant added to the norm before the division, as in torch's `clip_grad_norm_`."""


@dataclass(frozen=True, eq=False)
class GradientShard:
    """Part of the reduced gradient that this rank can read and change in place.

    grad: any shape, float32 or bfloat16. counted: False if another rank counts the same elements.
    """

    grad: Tensor
    counted: bool


@dataclass(frozen=True, eq=False)
class Gradients:
    """The reduced gradient of one step on this rank. `group`: the ranks whose counted shards
    together form the whole gradient."""

    shards: tuple[GradientShard, ...]
    group: Any
    device: torch.device

    def all_reduce_sum(self, values: Tensor) -> Tensor:
        """Sum a float64 tensor over `group`, in place, and return it. Collective."""
        # In float64, the order of the ranks has no visible effect on the sum.
        dist.all_reduce(values, group=self.group)
        return values


def block_elements(device: torch.device) -> int:
    return CUDA_BLOCK if device.type == "cuda" else CPU_BLOCK


def blocks(*tensors: Tensor) -> Iterator[tuple[Tensor, ...]]:
    """Yield flat views of the tensors in blocks of at most `block_elements`. All tensors have the
    same size and are split at the same positions."""
    size = block_elements(tensors[0].device)
    yield from zip(*(tensor.reshape(-1).split(size) for tensor in tensors), strict=True)


def dot(left: Tensor, right: Tensor) -> Tensor:
    """Return <left, right>, a float64 scalar, of two tensors of the same size. Reads each tensor
    once and makes no float64 copy of either."""
    return _sums_of_products((((x,), (y,)) for x, y in _pieces(left, right)), 1, left.device)[0]


def _pieces(left: Tensor, right: Tensor) -> Iterator[tuple[Tensor, ...]]:
    """Yield the blocks of both tensors, converted to float32 if longer than SHORT. float32 tensors
    on the CPU need no conversion: yield pieces as large as `_sums_of_products` adds in one call."""
    if left.device.type == "cpu" and left.dtype == right.dtype == torch.float32:
        # A piece fills one call of `_added`; only the last piece of a tensor may be shorter.
        size = TERMS * CPU_BLOCK
        yield from zip(left.reshape(-1).split(size), right.reshape(-1).split(size), strict=True)
        return
    for x, y in blocks(left, right):
        # In bfloat16, products would lose half of their digits.
        yield (x, y) if x.numel() <= SHORT else (x.float(), y.float())


def _sums_of_products(
    pieces: Iterable[tuple[tuple[Tensor, ...], tuple[Tensor, ...]]],
    count: int,
    device: torch.device,
) -> Tensor:
    """Return [count] float64: inner products of the i-th left and the i-th right tensor, summed
    over the pieces. A piece has `count` left and `count` right tensors, flat, as `_pieces` yields
    them."""
    # Keep the totals on the device: a scalar on the host would wait for every kernel.
    totals = torch.zeros(count, dtype=torch.float64, device=device)
    short: list[tuple[tuple[Tensor, ...], tuple[Tensor, ...]]] = []
    lefts: list[Tensor] = []
    rights: list[Tensor] = []
    for left, right in pieces:
        if left[0].numel() <= SHORT:
            short.append((left, right))
        elif device.type == "cuda":
            totals += torch.stack([torch.dot(x, y) for x, y in zip(left, right, strict=True)])
        else:
            # `_added` expects this order: block after block and, within a block, tensor after
            # tensor.
            for side, tensors in ((lefts, left), (rights, right)):
                for block in zip(*(tensor.split(CPU_BLOCK) for tensor in tensors), strict=True):
                    side.extend(block)
            if len(lefts) >= TERMS * count:
                totals += _added(lefts, rights, count)
                lefts, rights = [], []
    if lefts:
        totals += _added(lefts, rights, count)
    if short:
        sides = (zip(*side, strict=True) for side in zip(*short, strict=True))
        totals += torch.stack(
            [
                torch.dot(torch.cat(x).double(), torch.cat(y).double())
                for x, y in zip(*sides, strict=True)
            ]
        )
    return totals


def _added(lefts: list[Tensor], rights: list[Tensor], count: int) -> Tensor:
    """Return [count] float32. Element i is the sum of the products of pairs i, i + count,
    i + 2 count, ... A tensor has at most CPU_BLOCK elements."""
    longest = max(x.numel() for x in lefts)
    sums = torch.zeros(count, longest)
    targets = [
        lane if x.numel() == longest else lane[: x.numel()]
        for lane, x in zip(cycle(sums.unbind()), lefts, strict=False)
    ]
    # Make one call for all pairs: each call would first reload Python's own data, which the
    # streamed blocks have displaced from the cache.
    torch._foreach_addcmul_(targets, lefts, rights)
    return sums.sum(1)


def squared_norm(gradients: Gradients) -> float:
    """Return |g|^2 over the model. The result is not finite if any element of the gradient is not
    finite. Collective: one all-reduce of one scalar."""
    return squared_norm_of(gradients, (shard.grad for shard in gradients.shards))


def squared_norm_of(gradients: Gradients, values: Iterable[Tensor]) -> float:
    """Return |v|^2 over the model, where `values` has one tensor for each shard of `gradients`. A
    tensor counts on the ranks where its shard counts. Collective: one all-reduce of one scalar."""
    total = torch.zeros(1, dtype=torch.float64, device=gradients.device)
    for shard, value in zip(gradients.shards, values, strict=True):
        if shard.counted:
            total += dot(value, value)
    return float(gradients.all_reduce_sum(total)[0])


def three_products(
    pairs: Iterable[tuple[Tensor, Tensor]], known: bool, device: torch.device
) -> Tensor:
    """Return [3] float64: (<g, r>, |g|^2, |r|^2), summed over pairs (g, r) of tensors of equal
    size. Reads each element from memory once, block by block. known: |r|^2 is known to the caller;
    return 0 for it."""
    pieces = (piece for g, r in pairs for piece in _pieces(g, r))
    if known:
        sums = _sums_of_products((((g, g), (r, g)) for g, r in pieces), 2, device)
        return torch.nn.functional.pad(sums, (0, 1))
    return _sums_of_products((((g, g, r), (r, g, r)) for g, r in pieces), 3, device)


Products = Callable[[Iterable[tuple[Tensor, Any]], bool, torch.device], Tensor]
"""A function with the signature of `three_products`."""


def products_with(
    gradients: Gradients,
    reference: Iterable[Any],
    *,
    reference_square: float | None = None,
    products: Products = three_products,
) -> tuple[float, float, float]:
    """Return (<g, r>, |g|^2, |r|^2) over the model. Collective: one all-reduce of three scalars.

    reference: one argument of `products` for each shard, by default a tensor of the shard's size;
    read once, in order. reference_square: |r|^2, if it is already known.
    """
    grads = (shard.grad for shard in gradients.shards)
    return products_of(gradients, grads, reference, reference_square, products)


def products_of(
    gradients: Gradients,
    left: Iterable[Tensor],
    right: Iterable[Any],
    right_square: float | None = None,
    products: Products = three_products,
) -> tuple[float, float, float]:
    """Return (<l, r>, |l|^2, |r|^2) over the model. Collective: one all-reduce of three scalars.

    left, right: one tensor for each shard of `gradients`, which counts on the ranks where its shard
    counts; read once, in order. right_square: |r|^2, if it is already known.
    """
    known = right_square is not None
    counted = (
        (one, other)
        for shard, one, other in zip(gradients.shards, left, right, strict=True)
        if shard.counted
    )
    totals = products(counted, known, gradients.device)
    product, left_norm, right_norm = gradients.all_reduce_sum(totals).tolist()
    return product, left_norm, right_norm if right_square is None else right_square


def scale(gradients: Gradients, factor: float) -> None:
    """Multiply every shard in place. A rank may hold no shard: the distributed optimizer slices by
    bytes, so all slices of a small model may be on other ranks."""
    # Include shards that are not counted: all copies of a parameter must stay equal.
    shards = [shard.grad for shard in gradients.shards]
    if shards and factor != 1.0:
        torch._foreach_mul_(shards, factor)


def clip_to(gradients: Gradients, norm: float, limit: float | None) -> None:
    """Scale all gradients in place by one factor, so that their global norm is at most `limit`.
    norm: |g| over the model."""
    if limit is not None and norm > limit:
        scale(gradients, limit / (norm + CLIP_EPSILON))

"""The shards of the reduced gradient on a rank, and inner products over the model, in which each
parameter counts once.

Every rank holds shards of the reduced gradient. A shard counts on one rank only
(`GradientShard.counted`): tensor- and pipeline-parallel copies of one parameter are held and
changed on every rank, but summed once. Products are added in float32 for a few terms and in float64
above that (within 3e-7 of |g| |r|, heavy tails included; 5e-8 is usual). The result therefore does
not depend on how the parameters are sharded, beyond float32 rounding of the gradient itself.
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
"""Elements of one block on the CPU: a few blocks stay in the cache during all operations on them,
and an operation takes ten times as long as its call."""
TERMS = 32
"""Number of products that are added in float32 on the CPU, one from each block, before a tree adds
the sums. A plain dot product adds thousands in a row: with 2^15 elements its error is 2e-6 if a
gradient has heavy tails."""
SHORT = 4096
"""Number of elements up to which products are summed in float64: this costs nothing, and biases and
norms lose no precision."""
CUDA_BLOCK = 1 << 24
"""Elements of one block on CUDA: enough work to hide the launch. cuBLAS sums in a tree, so the
longer block has no larger rounding error."""

CLIP_EPSILON = 1e-6


@dataclass(frozen=True, eq=False)
class GradientShard:
    """A piece of the reduced gradient that this rank can read and change in place.

    grad: any shape, float32 or bfloat16. counted: False if another rank counts the same elements.
    """

    grad: Tensor
    counted: bool


@dataclass(frozen=True, eq=False)
class Gradients:
    """The reduced gradient of one step on this rank. `group`: the ranks whose counted shards
    together are the whole gradient."""

    shards: tuple[GradientShard, ...]
    group: Any
    device: torch.device

    def all_reduce_sum(self, values: Tensor) -> Tensor:
        """Sum a float64 tensor over `group`, in place, and return it. Collective."""
        # float64, so that the order of ranks has no visible effect.
        dist.all_reduce(values, group=self.group)
        return values


def block_elements(device: torch.device) -> int:
    return CUDA_BLOCK if device.type == "cuda" else CPU_BLOCK


def blocks(*tensors: Tensor) -> Iterator[tuple[Tensor, ...]]:
    """Yield the tensors, of equal size, cut in the same way into flat views small enough to be
    processed at once."""
    size = block_elements(tensors[0].device)
    yield from zip(*(tensor.reshape(-1).split(size) for tensor in tensors), strict=True)


def dot(left: Tensor, right: Tensor) -> Tensor:
    """Return scalar float64 <left, right> of two tensors of the same size, with one read of each
    and no float64 copy of either."""
    return _sums_of_products((((x,), (y,)) for x, y in _pieces(left, right)), 1, left.device)[0]


def _pieces(left: Tensor, right: Tensor) -> Iterator[tuple[Tensor, ...]]:
    """Iterate over `blocks`, converting those longer than SHORT to float32. On the CPU, tensors
    that need no conversion are split into the sizes that `_sums_of_products` adds at a time."""
    if left.device.type == "cpu" and left.dtype == right.dtype == torch.float32:
        # A multiple of the elements that one call adds, so that no piece remains.
        size = TERMS * CPU_BLOCK
        yield from zip(left.reshape(-1).split(size), right.reshape(-1).split(size), strict=True)
        return
    for x, y in blocks(left, right):
        # bfloat16 products would lose half of their digits.
        yield (x, y) if x.numel() <= SHORT else (x.float(), y.float())


def _sums_of_products(
    pieces: Iterable[tuple[tuple[Tensor, ...], tuple[Tensor, ...]]],
    count: int,
    device: torch.device,
) -> Tensor:
    """Return [count] float64: inner products of the left and the right tensors of a piece (`count`
    of each, flat, as from `_pieces`), added over the pieces."""
    # Stays on the device, because a scalar on the host would wait for every kernel.
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
            # Block after block; within a block, tensor after tensor.
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
    """Return [count]: the sum of every `count`-th pair's product, of at most CPU_BLOCK elements."""
    longest = max(x.numel() for x in lefts)
    sums = torch.zeros(count, longest)
    targets = [
        lane if x.numel() == longest else lane[: x.numel()]
        for lane, x in zip(cycle(sums.unbind()), lefts, strict=False)
    ]
    # One call: between two calls, a processor that has just streamed megabytes must fetch Python.
    torch._foreach_addcmul_(targets, lefts, rights)
    return sums.sum(1)


def squared_norm(gradients: Gradients) -> float:
    """Return |g|^2 over the model, with one all-reduce of one scalar. Not finite if any element of
    the gradient is not."""
    return squared_norm_of(gradients, (shard.grad for shard in gradients.shards))


def squared_norm_of(gradients: Gradients, values: Iterable[Tensor]) -> float:
    """Return |v|^2 of one tensor per shard of `gradients`, each counted where its shard is, with
    one all-reduce of one scalar."""
    total = torch.zeros(1, dtype=torch.float64, device=gradients.device)
    for shard, value in zip(gradients.shards, values, strict=True):
        if shard.counted:
            total += dot(value, value)
    return float(gradients.all_reduce_sum(total)[0])


def three_products(
    pairs: Iterable[tuple[Tensor, Tensor]], known: bool, device: torch.device
) -> Tensor:
    """Return [3] float64: (<g, r>, |g|^2, |r|^2) over pairs of tensors of equal size, in one sweep,
    block by block, so that each element is read from memory once. known: leave |r|^2 at 0."""
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
    """Return (<g, r>, |g|^2, |r|^2) over the model, with one all-reduce of three scalars.

    reference: for every shard the argument of `products`, by default a tensor of the shard's size;
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
    """Return (<l, r>, |l|^2, |r|^2) of tensors like the shards of `gradients`, each counted where
    its shard is, with one all-reduce of three scalars. Both are read once, in order. right_square:
    |r|^2, if it is already known."""
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
    """Multiply every shard in place, copies included. A rank may hold none: the distributed
    optimizer slices by bytes, and all slices of a small model may be on other ranks."""
    # Copies are scaled as well, because all copies of a parameter must stay equal.
    shards = [shard.grad for shard in gradients.shards]
    if shards and factor != 1.0:
        torch._foreach_mul_(shards, factor)


def clip_to(gradients: Gradients, norm: float, limit: float | None) -> None:
    """Scale all gradients in place so that their global norm is at most `limit`, copies by the same
    factor, so that replicas stay equal. norm: |g| over the model."""
    if limit is not None and norm > limit:
        scale(gradients, limit / (norm + CLIP_EPSILON))

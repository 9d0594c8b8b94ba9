"""The reduced gradient as a rank holds it, and inner products over the model, each parameter
counted once.

Every rank holds shards of the reduced gradient. A shard counts on one rank only
(`GradientShard.counted`): tensor- and pipeline-parallel copies of one parameter are held, and
changed, everywhere, and summed once. Products are summed in float32 over blocks of elements and in
float64 above that (about 5e-8 of |g| |r|), so the result does not depend on how the parameters are
sharded beyond float32 rounding of the gradient itself.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

CPU_BLOCK = 1 << 15
"""Elements of one block on the CPU: two of them stay in the cache while all their products are
taken."""
SHORT = 4096
"""Elements up to which products are summed in float64 at once: it costs nothing, and biases and
norms lose nothing."""
CUDA_BLOCK = 1 << 24
"""On CUDA: enough work to hide the launch; cuBLAS sums in a tree, so the longer block rounds no
more."""


@dataclass(frozen=True, eq=False)
class GradientShard:
    """A piece of the reduced gradient that this rank can read and change in place.

    grad: any shape, float32 or bfloat16. counted: False where another rank counts the same
    elements.
    """

    grad: Tensor
    counted: bool


@dataclass(frozen=True, eq=False)
class Gradients:
    """The reduced gradient of one step as this rank holds it. `group`: the ranks whose counted
    shards make the whole."""

    shards: tuple[GradientShard, ...]
    group: Any
    device: torch.device

    def all_reduce_sum(self, values: Tensor) -> Tensor:
        """Sums a float64 tensor over `group`, in place; returns it. Collective."""
        dist.all_reduce(values, group=self.group)
        return values


def block_elements(device: torch.device) -> int:
    return CUDA_BLOCK if device.type == "cuda" else CPU_BLOCK


def blocks(*tensors: Tensor) -> Iterator[tuple[Tensor, ...]]:
    """The tensors, of equal size, cut alike into flat views short enough to be worked on in one
    go."""
    size = block_elements(tensors[0].device)
    yield from zip(*(tensor.reshape(-1).split(size) for tensor in tensors), strict=True)


def dot(left: Tensor, right: Tensor) -> Tensor:
    """Scalar float64 <left, right> of two tensors of the same size; one read of each, no float64
    copy of either."""
    return _summed(
        [torch.dot(x.to(_working(x)), y.to(_working(x))) for x, y in blocks(left, right)],
        left.device,
    )


def _working(block: Tensor) -> torch.dtype:
    return torch.float64 if block.numel() <= SHORT else torch.float32


def _summed(products: list[Tensor], device: torch.device) -> Tensor:
    if not products:
        return torch.zeros((), dtype=torch.float64, device=device)
    return torch.stack([product.double() for product in products]).sum()


def squared_norm(gradients: Gradients) -> float:
    """|g|^2 over the model; one all-reduce of one scalar. Not finite when any gradient element is
    not."""
    return squared_norm_of(gradients, (shard.grad for shard in gradients.shards))


def squared_norm_of(gradients: Gradients, values: Iterable[Tensor]) -> float:
    """|v|^2 of one tensor per shard of `gradients`, each counted where its shard is; one all-reduce
    of one scalar."""
    total = torch.zeros(1, dtype=torch.float64, device=gradients.device)
    for shard, value in zip(gradients.shards, values, strict=True):
        if shard.counted:
            total += dot(value, value)
    return float(gradients.all_reduce_sum(total)[0])


def three_products(gradient: Tensor, reference: Tensor, known: bool) -> Tensor:
    """[3] float64: (<g, r>, |g|^2, |r|^2) in one sweep, block by block, so that each element comes
    from memory once. known: |r|^2 is left at 0."""
    products: tuple[list[Tensor], list[Tensor], list[Tensor]] = ([], [], [])
    for g, r in blocks(gradient, reference):
        g, r = g.to(_working(g)), r.to(_working(g))
        products[0].append(torch.dot(g, r))
        products[1].append(torch.dot(g, g))
        if not known:
            products[2].append(torch.dot(r, r))
    return torch.stack([_summed(part, gradient.device) for part in products])


def products_with(
    gradients: Gradients,
    reference: Iterable[Any],
    *,
    reference_square: float | None = None,
    products: Callable[[Tensor, Any, bool], Tensor] = three_products,
) -> tuple[float, float, float]:
    """(<g, r>, |g|^2, |r|^2) over the model; one all-reduce of three scalars.

    reference: for every shard what `products` takes for it, else a tensor of the shard's size; read
    once, in order. reference_square: |r|^2, where it is known already.
    """
    grads = (shard.grad for shard in gradients.shards)
    return products_of(gradients, grads, reference, reference_square, products)


def products_of(
    gradients: Gradients,
    left: Iterable[Tensor],
    right: Iterable[Any],
    right_square: float | None = None,
    products: Callable[[Tensor, Any, bool], Tensor] = three_products,
) -> tuple[float, float, float]:
    """(<l, r>, |l|^2, |r|^2) of tensors like the shards of `gradients`, each counted where its
    shard is; one all-reduce of three scalars. Both are read once, in order. right_square: |r|^2,
    where it is known already. products: the three of one shard, (left, right, |r|^2 is known)."""
    known = right_square is not None
    totals = torch.zeros(3, dtype=torch.float64, device=gradients.device)
    for shard, one, other in zip(gradients.shards, left, right, strict=True):
        if shard.counted:
            totals += products(one, other, known)
    product, left_norm, right_norm = gradients.all_reduce_sum(totals).tolist()
    return product, left_norm, right_norm if right_square is None else right_square


def scale(gradients: Gradients, factor: float) -> None:
    """Multiplies every shard in place, copies alike. A rank may hold none: the distributed
    optimizer slices by bytes, and a small model's slices can all lie elsewhere."""
    shards = [shard.grad for shard in gradients.shards]
    if shards and factor != 1.0:
        torch._foreach_mul_(shards, factor)

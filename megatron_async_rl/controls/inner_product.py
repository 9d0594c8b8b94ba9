"""Inner products over the model's parameters, each counted once, on any parallel layout.

Every rank holds shards of the reduced gradient. A shard counts on one rank only (`GradientShard.counted`): tensor- and
pipeline-parallel copies of one parameter are held, and changed, everywhere, and summed once. Products are summed in
float32 over short runs of elements and in float64 above that, so the result does not depend on how the parameters are
sharded beyond float32 rounding of the gradient itself.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import TYPE_CHECKING

import torch
from torch import Tensor

if TYPE_CHECKING:
    from megatron_async_rl.policy.parallel import Gradients

RUN = 4096
"""Elements whose products are summed in float32 before they go to float64."""


def dot(left: Tensor, right: Tensor) -> Tensor:
    """Scalar float64 <left, right> of two tensors of the same size; one read of each, no float64 copy of either."""
    left, right = left.reshape(-1), right.reshape(-1)
    whole = left.numel() // RUN * RUN
    total = torch.zeros((), dtype=torch.float64, device=left.device)
    if whole:
        rows = torch.bmm(left[:whole].view(-1, 1, RUN).float(), right[:whole].view(-1, RUN, 1).float())
        total = total + rows.sum(dtype=torch.float64)
    if whole < left.numel():
        total = total + torch.dot(left[whole:].double(), right[whole:].double())
    return total


def squared_norm(gradients: Gradients) -> float:
    """|g|^2 over the model; one all-reduce of one scalar. Not finite when any gradient element is not."""
    return squared_norm_of(gradients, (shard.grad for shard in gradients.shards))


def squared_norm_of(gradients: Gradients, values: Iterable[Tensor]) -> float:
    """|v|^2 of one tensor per shard of `gradients`, each counted where its shard is; one all-reduce of one scalar."""
    total = torch.zeros(1, dtype=torch.float64, device=gradients.device)
    for shard, value in zip(gradients.shards, values, strict=True):
        if shard.counted:
            total += dot(value, value)
    return float(gradients.all_reduce_sum(total)[0])


def products_with(gradients: Gradients, reference: Iterable[Tensor]) -> tuple[float, float, float]:
    """(<g, r>, |g|^2, |r|^2) over the model; one all-reduce of three scalars.

    reference: one tensor per shard, of the shard's size; read once, in order.
    """
    totals = torch.zeros(3, dtype=torch.float64, device=gradients.device)
    for shard, previous in zip(gradients.shards, reference, strict=True):
        if shard.counted:
            totals += torch.stack((dot(shard.grad, previous), dot(shard.grad, shard.grad), dot(previous, previous)))
    product, norm, reference_norm = gradients.all_reduce_sum(totals).tolist()
    return product, norm, reference_norm

"""How far the weights are from those that the batch's samples began under, in the optimizer's shards.

    D = theta - sum_v share_v theta_v        share_v: of the batch's trained tokens, those of samples whose first token
                                             version v sampled

Differences are taken between weights in the model's own dtype (kept copies have no other), in the shards' float32. Past weights
lie in host memory and come to the device a block at a time; one shard of D exists at a time.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn

from megatron_async_rl.controls.inner_product import block_elements
from megatron_async_rl.policy.parameter_state import cut

if TYPE_CHECKING:
    from megatron.core.optimizer import MegatronOptimizer

    from megatron_async_rl.policy.held_weights import HeldWeights, Snapshots
    from megatron_async_rl.policy.model import PolicyModel
    from megatron_async_rl.samples.types import Sample


class Displacement:
    """D, one tensor per gradient shard of this rank, computed when iterated over: between `prepare_grads` and the step.

    past: (share, weights) of each version but the present one; not empty.
    """

    def __init__(self, past: Sequence[tuple[float, HeldWeights]], model: PolicyModel, optimizer: MegatronOptimizer) -> None:
        self._past = past
        self._model = model
        self._optimizer = optimizer

    def __iter__(self) -> Iterator[Tensor]:
        return (difference for _, _, difference in self._shards())

    @torch.no_grad()
    def add(self, amount: float) -> None:
        """Makes the coming step end `amount` D further: the optimizer's parameters are moved now, and weight decay, which will
        act on what they are then, is allowed for."""
        for parameter, group, difference in self._shards():
            kept = 1.0 - group["lr"] * group["weight_decay"]
            parameter.add_(difference, alpha=amount / kept)

    def _shards(self) -> Iterator[tuple[nn.Parameter, dict[str, Any], Tensor]]:
        now = [{name: parameter.detach() for name, parameter in chunk.named_parameters()} for chunk in self._model.chunks]
        present = cut(now, self._model, self._optimizer)
        past = [(share, cut(held.tensors, self._model, self._optimizer)) for share, held in self._past]
        owned = [(parameter, group) for group in self._optimizer.param_groups for parameter in group["params"]]
        for index, (parameter, group) in enumerate(owned):
            if parameter.grad is not None:
                then = [(share, tensors[index]) for share, tensors in past]
                yield parameter, group, _difference(present[index], then, parameter.dtype)


def displacement(
    samples: Sequence[Sample], version: int, past: Snapshots, model: PolicyModel, optimizer: MegatronOptimizer
) -> Displacement | None:
    """Of a batch that `version` trains on; null where all its samples began under it. Raises SnapshotMissing."""
    shares = start_shares(samples)
    shares.pop(version, None)
    weights = [(share, past.of(each, current=version)) for each, share in sorted(shares.items())]
    return Displacement(weights, model, optimizer) if weights else None


def start_shares(samples: Sequence[Sample]) -> dict[int, float]:
    """Version -> its share of the trained tokens, each counted for the version that its sample began under."""
    counts: dict[int, int] = {}
    for sample in samples:
        trained = int(sample.loss_mask.sum())
        if trained:
            counts[sample.start_version] = counts.get(sample.start_version, 0) + trained
    total = sum(counts.values())
    return {version: count / total for version, count in counts.items()}


def _difference(now: Tensor, then: Sequence[tuple[float, Tensor]], dtype: torch.dtype) -> Tensor:
    """sum_v share_v (now - then_v) in `dtype`, where `now` lies. What has the present version's share is no difference."""
    found = torch.zeros(now.shape, dtype=dtype, device=now.device)
    size = block_elements(now.device)
    for share, weights in then:
        for total, new, old in zip(*(x.reshape(-1).split(size) for x in (found, now, weights)), strict=True):
            old = old.to(now.device, non_blocking=True).to(dtype)
            total.add_(new.to(dtype) - old, alpha=share)
    return found

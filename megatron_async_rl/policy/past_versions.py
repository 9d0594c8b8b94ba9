"""The weights of the newest versions, and how far the present ones are from those that a batch's
samples began under:

    D = theta - sum_v share_v theta_v        share_v: of the batch's trained tokens, those of
                                             samples whose first token version v sampled

theta are the optimizer's own parameters, float32 whatever the model's dtype. Past ones come to the
device a block at a time; one shard of D exists at a time.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import TYPE_CHECKING, Any, Protocol

import numpy as np
import torch
from torch import Tensor, nn

from megatron_async_rl.gradients import block_elements
from megatron_async_rl.policy.parameter_state import Sliced
from megatron_async_rl.policy.weight_copies import MasterSnapshot

if TYPE_CHECKING:
    from megatron.core.optimizer import MegatronOptimizer

    from megatron_async_rl.samples.rank_batch import RankBatch


class SnapshotMissing(ValueError):
    """A token was sampled by a version whose weights are no longer, or not yet, kept."""

    def __init__(self, version: int, current: int, held: Sequence[int], size: int) -> None:
        kept = ", ".join(map(str, held)) or "none"
        super().__init__(
            f"the batch needs the weights of version {version} at version {current}, and those kept"
            f" are of versions: {kept}; set objective.snapshots (now {size}) to at least"
            f" {current - version + 1}."
        )


class PastVersion(Protocol):
    def update(self) -> None: ...

    def slices(self) -> Sliced: ...


class Snapshots[C: PastVersion]:
    """The weights of the newest `size` versions, oldest first. Every rank holds the same versions.

    copy: makes a copy of the present weights.
    """

    def __init__(self, copy: Callable[[], C], size: int) -> None:
        self._copy = copy
        self._size = size
        self._held: OrderedDict[int, C] = OrderedDict()

    @property
    def versions(self) -> Mapping[int, C]:
        return self._held

    def begin(self, version: int) -> None:
        """Keeps the present weights as those of `version`, in the memory of the oldest when there
        are enough."""
        if version in self._held:
            return
        if len(self._held) < self._size:
            self._held[version] = self._copy()
            return
        _, oldest = self._held.popitem(last=False)
        oldest.update()
        self._held[version] = oldest

    @property
    def lasting(self) -> Mapping[int, C]:
        """Versions that are still kept when the next version begins."""
        count = min(len(self._held), self._size - 1)
        return dict(list(self._held.items())[len(self._held) - count :])

    def of(self, version: int, *, current: int) -> C:
        """Raises SnapshotMissing."""
        if version not in self._held:
            raise SnapshotMissing(version, current, list(self._held), self._size)
        return self._held[version]

    def clear(self) -> None:
        self._held.clear()


class WeightDisplacement:
    """D, one tensor per gradient shard of this rank, computed when iterated over: between
    `prepare_grads` and the step.

    past: (share, weights) of each version but the present one; not empty.
    """

    def __init__(
        self, past: Sequence[tuple[float, MasterSnapshot]], optimizer: MegatronOptimizer
    ) -> None:
        self._past = past
        self._optimizer = optimizer

    def __iter__(self) -> Iterator[Tensor]:
        return (difference for _, _, difference in self._shards())

    @torch.no_grad()
    def add(self, amount: float) -> None:
        """Makes the coming step end `amount` D further: the optimizer's parameters are moved now,
        and weight decay, which will act on what they are then, is allowed for."""
        for parameter, group, difference in self._shards():
            kept = 1.0 - group["lr"] * group["weight_decay"]
            parameter.add_(difference, alpha=amount / kept)

    def _shards(self) -> Iterator[tuple[nn.Parameter, dict[str, Any], Tensor]]:
        owned = [
            (parameter, group)
            for group in self._optimizer.param_groups
            for parameter in group["params"]
        ]
        for index, (parameter, group) in enumerate(owned):
            then = [(share, held.shards[index]) for share, held in self._past]
            yield parameter, group, _difference(parameter.detach(), then)


def weight_displacement(
    samples: RankBatch,
    past: Snapshots[MasterSnapshot],
    optimizer: MegatronOptimizer,
    *,
    moved: bool = False,
) -> WeightDisplacement | None:
    """The displacement of an optimizer step's samples; null where all of them began under the
    present weights. moved: the present weights are no longer those of the version that is trained.
    Raises SnapshotMissing."""
    shares, version = start_shares(samples), samples.version
    if not moved:
        shares.pop(version, None)
    weights = [(share, past.of(each, current=version)) for each, share in sorted(shares.items())]
    return WeightDisplacement(weights, optimizer) if weights else None


def start_shares(samples: RankBatch) -> dict[int, float]:
    """Version -> its share of the trained tokens, each counted for the version that its sample
    began under."""
    versions, which = np.unique(samples.start_versions, return_inverse=True)
    counts = np.bincount(which, samples.trained, minlength=len(versions))
    total = counts.sum()
    return {
        int(version): float(count / total)
        for version, count in zip(versions, counts, strict=True)
        if count
    }


def _difference(now: Tensor, then: Sequence[tuple[float, Tensor]]) -> Tensor:
    """sum_v share_v (now - then_v), where `now` lies. The present version's share makes no
    difference."""
    found = torch.zeros_like(now)
    size = block_elements(now.device)
    for share, weights in then:
        for total, new, old in zip(
            *(x.reshape(-1).split(size) for x in (found, now, weights)), strict=True
        ):
            total.add_(new - old.to(now.device, non_blocking=True), alpha=share)
    return found

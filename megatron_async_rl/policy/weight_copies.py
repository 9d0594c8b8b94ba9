"""Copies of weights in host memory, of the model's parameters or of the optimizer's, and how far
the weights have moved since.

Copies of the model's parameters are put in place for a forward pass and taken away again. Every
rank holds copies of its own chunks' parameters, or of its own shards of the optimizer's, so copying
needs no collective. On CUDA host memory is page-locked.

The displacement is how far the weights are from those that the batch's samples began under:

    D = theta - sum_v share_v theta_v        share_v: of the batch's trained tokens, those of
                                             samples whose first token version v sampled

theta are the optimizer's own parameters, float32 whatever the model's dtype. Past ones come to the
device a block at a time; one shard of D exists at a time.

Invariants:
- parameters are written in place: gradient buffers, the distributed optimizer's buffers and tied
  weights alias them;
- the weights in training are back after `restored_after`, bit for bit, also when the pass raised.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any, Generic, Protocol, TypeVar

import numpy as np
import torch
from torch import Tensor, nn

from megatron_async_rl.gradients import block_elements
from megatron_async_rl.policy.optimizer import optimizer_parameters
from megatron_async_rl.policy.parameter_state import ModelTensors, assembled, cut

if TYPE_CHECKING:
    from megatron.core.optimizer import MegatronOptimizer

    from megatron_async_rl.policy.model import PolicyModel
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


class HeldWeights:
    """One copy of the parameters of `chunks`; at first, of what they are now.

    dtype: null keeps each parameter's own; an average wants float32, which small changes do not
    vanish in.
    """

    def __init__(self, chunks: Sequence[nn.Module], dtype: torch.dtype | None = None) -> None:
        self._parameters = [dict(chunk.named_parameters()) for chunk in chunks]
        self.tensors = [
            {
                name: torch.empty(
                    p.shape, dtype=dtype if dtype is not None else p.dtype, pin_memory=p.is_cuda
                )
                for name, p in parameters.items()
            }
            for parameters in self._parameters
        ]
        """Per chunk: the parameter's name -> its copy, on the CPU."""
        self.update()

    @torch.no_grad()
    def update(self) -> None:
        """The copy becomes the parameters as they are."""
        for parameter, held in self._pairs():
            held.copy_(parameter, non_blocking=True)
        self._finish()

    @torch.no_grad()
    def average(self, decay: float) -> None:
        """copy = decay copy + (1 - decay) parameters."""
        for parameter, held in self._pairs():
            # On the parameter's device, which computes faster than the host and holds one more
            # tensor meanwhile.
            moved = held.to(parameter.device, copy=True)
            held.copy_(moved.lerp_(parameter.to(moved.dtype), 1.0 - decay))

    @torch.no_grad()
    def place(self) -> None:
        """The parameters become the copy (rounded, where the copy is more precise)."""
        for parameter, held in self._pairs():
            parameter.copy_(held, non_blocking=True)
        self._finish()

    def model_tensors(self) -> ModelTensors:
        return self.tensors

    def load(self, tensors: ModelTensors) -> None:
        """The copy becomes `tensors`."""
        for held, given in zip(self.tensors, tensors, strict=True):
            for name, tensor in held.items():
                tensor.copy_(given[name])

    @contextmanager
    def restored_after(self) -> Iterator[None]:
        """Takes a copy now and puts it in place at the end. Wants the parameters' own dtype."""
        self.update()
        try:
            yield
        finally:
            self.place()

    def _pairs(self) -> Iterator[tuple[nn.Parameter, Tensor]]:
        for parameters, held in zip(self._parameters, self.tensors, strict=True):
            for name, parameter in parameters.items():
                yield parameter, held[name]

    def _finish(self) -> None:
        """Host memory may be read, or reused, once the copies are through."""
        if any(parameter.is_cuda for parameter, _ in self._pairs()):
            torch.cuda.synchronize()


class HeldMasters:
    """One copy of this rank's shards of the optimizer's parameters; at first, of what they are now.

    Those are float32 whatever the model's dtype: at the learning rates of RL most bfloat16 weights
    do not move in a step, and those that do move by a rounding. 4 bytes per parameter whose
    optimizer state this rank has.
    """

    def __init__(self, model: PolicyModel, optimizer: MegatronOptimizer) -> None:
        self._model = model
        self._optimizer = optimizer
        self.shards = [
            torch.empty(shard.shape, dtype=shard.dtype, pin_memory=shard.is_cuda)
            for shard in optimizer_parameters(optimizer)
        ]
        """In the order of the optimizer's parameters, on the CPU."""
        self.update()

    @torch.no_grad()
    def update(self) -> None:
        """The copy becomes the shards as they are."""
        shards = optimizer_parameters(self._optimizer)
        for held, shard in zip(self.shards, shards, strict=True):
            held.copy_(shard, non_blocking=True)
        if any(shard.is_cuda for shard in shards):
            torch.cuda.synchronize()

    def model_tensors(self) -> ModelTensors:
        """Collective over data-parallel ranks; see parameter_state.assembled."""
        return assembled(self.shards, self._model, self._optimizer)

    def load(self, tensors: ModelTensors) -> None:
        """The copy becomes this rank's shards of `tensors`."""
        for held, given in zip(
            self.shards, cut(tensors, self._model, self._optimizer), strict=True
        ):
            held.copy_(given)


class Copy(Protocol):
    def update(self) -> None: ...

    def load(self, tensors: ModelTensors) -> None: ...

    def model_tensors(self) -> ModelTensors: ...


C = TypeVar("C", bound=Copy)


class Snapshots(Generic[C]):
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
        """Those that are still kept when the next version begins."""
        count = min(len(self._held), self._size - 1)
        return dict(list(self._held.items())[len(self._held) - count :])

    def load(self, version: int, tensors: ModelTensors) -> None:
        """Keeps `tensors` as the weights of `version`, which is newer than those kept."""
        self.begin(version)
        self._held[version].load(tensors)

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
        self, past: Sequence[tuple[float, HeldMasters]], optimizer: MegatronOptimizer
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
            if parameter.grad is not None:
                then = [(share, held.shards[index]) for share, held in self._past]
                yield parameter, group, _difference(parameter.detach(), then)


def weight_displacement(
    samples: RankBatch,
    past: Snapshots[HeldMasters],
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
    """sum_v share_v (now - then_v), where `now` lies. What has the present version's share is no
    difference."""
    found = torch.zeros_like(now)
    size = block_elements(now.device)
    for share, weights in then:
        for total, new, old in zip(
            *(x.reshape(-1).split(size) for x in (found, now, weights)), strict=True
        ):
            total.add_(new - old.to(now.device, non_blocking=True), alpha=share)
    return found

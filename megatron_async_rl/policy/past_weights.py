"""The weights of the newest versions, and the distance of the present weights from those under
which a batch's samples began:

    D = theta - sum_v share_v theta_v        share_v: share of the batch's trained tokens whose
                                             sample got its first token from version v

theta are the optimizer's own parameters, float32 whatever the model's dtype. Past ones are copied
to the device one block at a time; one shard of D exists at a time.

`WeightSnapshot` and `MasterSnapshot` are copies in host memory (page-locked on CUDA): of the
model's parameters, or of the optimizer's weights if the model has FP8 weights. Copies of parameters
are divided over the replicas of each parameter: every rank copies its part, which needs no
collective, and the parts are gathered when they are restored for a forward pass.

Invariants:
- parameters are written in place, because gradient buffers, the distributed optimizer's buffers and
  tied weights alias them;
- `restored_after` restores the trained weights at its end, bit for bit;
- a divided copy contains and restores the same bits as a whole one;
- besides the model, a device never holds more than two buckets of GATHERED bytes.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any, NamedTuple, Protocol
from weakref import WeakKeyDictionary

import numpy as np
import torch
import torch.distributed as dist
from megatron.core.optimizer import MegatronOptimizer
from torch import Tensor, nn

from megatron_async_rl.gradients import block_elements
from megatron_async_rl.policy.adam_view import (
    Slice,
    Sliced,
    masters_of,
    optimizer_state,
    replica_part,
)
from megatron_async_rl.policy.megatron_private import weights_from_masters
from megatron_async_rl.policy.model import PolicyModel
from megatron_async_rl.policy.parallel import Layout
from megatron_async_rl.policy.parameters import trainable
from megatron_async_rl.samples.rank_batch import RankBatch


class SnapshotMissing(ValueError):
    """A token was sampled by a version whose weights are no longer kept, or not yet."""

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
        """Keep the present weights as those of `version`, in the memory of the oldest version if
        the store is full."""
        if version in self._held:
            return
        if len(self._held) < self._size:
            self._held[version] = self._copy()
            return
        # Reused, because allocating page-locked memory is slow.
        _, oldest = self._held.popitem(last=False)
        oldest.update()
        self._held[version] = oldest

    @property
    def lasting(self) -> Mapping[int, C]:
        """Return the versions that will still be kept when the next version begins."""
        # The oldest version of a full store is overwritten when the next version begins.
        count = min(len(self._held), self._size - 1)
        return dict(list(self._held.items())[len(self._held) - count :])

    def of(self, version: int, *, current: int) -> C:
        """Return the copy of `version`. Raises SnapshotMissing."""
        if version not in self._held:
            raise SnapshotMissing(version, current, list(self._held), self._size)
        return self._held[version]

    def clear(self) -> None:
        self._held.clear()


class WeightDisplacement:
    """D, one tensor per gradient shard of this rank. Iteration computes it, between `prepare_grads`
    and the step.

    past: (share, weights) of each version except the present one; not empty.
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
        """Shift the result of the coming step by `amount` D. The optimizer's parameters are shifted
        now, with compensation for the weight decay that the step will apply to them."""
        for parameter, group, difference in self._shards():
            # AdamW multiplies by `kept` in the step that follows: (x + a D / kept) kept = x kept
            # + a D.
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
    """Return the displacement of an optimizer step's samples; null if all of them began under the
    present weights. moved: True if the present weights are no longer those of the version that is
    trained. Raises SnapshotMissing."""
    shares, version = start_shares(samples), samples.version
    if not moved:
        # theta - theta_v is 0 for the present version, until an optimizer step changes the weights.
        shares.pop(version, None)
    weights = [(share, past.of(each, current=version)) for each, share in sorted(shares.items())]
    return WeightDisplacement(weights, optimizer) if weights else None


def start_shares(samples: RankBatch) -> dict[int, float]:
    """Return version -> share of the trained tokens whose sample began under it."""
    versions, which = np.unique(samples.start_versions, return_inverse=True)
    counts = np.bincount(which, samples.trained, minlength=len(versions))
    total = counts.sum()
    return {
        int(version): float(count / total)
        for version, count in zip(versions, counts, strict=True)
        if count
    }


def _difference(now: Tensor, then: Sequence[tuple[float, Tensor]]) -> Tensor:
    """Return sum_v share_v (now - then_v), on the device of `now`. The present version's share has
    no effect."""
    found = torch.zeros_like(now)
    size = block_elements(now.device)
    for share, weights in then:
        for total, new, old in zip(
            *(x.reshape(-1).split(size) for x in (found, now, weights)), strict=True
        ):
            # Subtracted before scaling: a difference of similar numbers is exact in float32.
            total.add_(new - old.to(now.device, non_blocking=True), alpha=share)
    return found


GATHERED = 256 * 2**20
"""Number of bytes of parameters that are gathered at a time."""


class WeightSnapshot:
    """One copy of the trainable parameters of `chunks`; initially of their present values. If those
    are adapters, so is the copy, and the base model does not change.

    dtype: null keeps each parameter's own; an average needs float32, in which small changes do not
    vanish. layout: divides the copy over the replicas of each parameter, so that `place` is
    collective over them; null keeps a whole copy here.
    """

    def __init__(
        self,
        chunks: Sequence[nn.Module],
        dtype: torch.dtype | None = None,
        layout: Layout | None = None,
    ) -> None:
        self._layout = layout
        self._parameters = [dict(trainable(chunk)) for chunk in chunks]
        self.tensors = [
            {
                name: torch.empty(
                    self._here(p).shape,
                    dtype=dtype if dtype is not None else p.dtype,
                    pin_memory=p.is_cuda,
                )
                for name, p in parameters.items()
            }
            for parameters in self._parameters
        ]
        """Per chunk: the parameter's name -> its copy, or this replica's part of it, flat; on the
        CPU."""
        self.update()

    @torch.no_grad()
    def update(self) -> None:
        """Copy the present parameters."""
        for parameter, held in self._pairs():
            # `_finish` waits once for all copies.
            held.copy_(self._here(parameter), non_blocking=True)
        self._finish()

    @torch.no_grad()
    def average(self, decay: float) -> None:
        """Compute copy = decay copy + (1 - decay) parameters."""
        for parameter, held in self._pairs():
            # On the parameter's device, which is faster than the host, at the cost of one more
            # tensor there.
            moved = held.to(parameter.device, copy=True)
            held.copy_(moved.lerp_(self._here(parameter).to(moved.dtype), 1.0 - decay))

    @torch.no_grad()
    def place(self) -> None:
        """Set the parameters to the copy (rounded, if the copy is more precise)."""
        if self._layout is None:
            for parameter, held in self._pairs():
                parameter.copy_(held, non_blocking=True)
        else:
            _gather(self._pairs(), self._layout)
        self._finish()

    def slices(self) -> Sliced:
        """Return slices of the parameters, with the copy of each."""
        return [
            (Slice(parameter, *self._part(parameter), own=self._layout is not None), held)
            for parameter, held in self._pairs()
        ]

    @contextmanager
    def restored_after(self) -> Iterator[None]:
        """Copy the parameters now and restore them at the end. The copy must have their dtype.
        After a pass that raised, parts are not gathered: another rank's pass may not have raised,
        and the run is over."""
        self.update()
        try:
            yield
        except BaseException:
            if self._layout is None:
                self.place()
            raise
        self.place()

    def _part(self, parameter: Tensor) -> tuple[int, int]:
        if self._layout is None:
            return 0, parameter.numel()
        group = self._layout.replicas_of(parameter)
        return replica_part(parameter.numel(), dist.get_rank(group), group.size())

    def _here(self, parameter: Tensor) -> Tensor:
        if self._layout is None:
            return parameter
        start, end = self._part(parameter)
        return parameter.detach().view(-1)[start:end]

    def _pairs(self) -> Iterator[tuple[nn.Parameter, Tensor]]:
        for parameters, held in zip(self._parameters, self.tensors, strict=True):
            for name, parameter in parameters.items():
                yield parameter, held[name]

    def _finish(self) -> None:
        """Wait until the copies are complete, so that host memory may be read or reused."""
        if any(parameter.is_cuda for parameter, _ in self._pairs()):
            torch.cuda.synchronize()


class _Piece(NamedTuple):
    """Elements start..start+length of each replica's part of a parameter, as far as the part has
    them. whole: the parameter, flat; held: this replica's part, flat, on the CPU."""

    whole: Tensor
    held: Tensor
    start: int
    length: int


def _gather(pairs: Iterable[tuple[nn.Parameter, Tensor]], layout: Layout) -> None:
    """Set every parameter from the parts of its replicas. Collective over them, for at most
    GATHERED bytes of parameters at a time."""
    waiting: dict[tuple[int, torch.dtype], tuple[Any, list[_Piece]]] = {}
    for parameter, held in pairs:
        group = layout.replicas_of(parameter)
        if group.size() == 1:
            parameter.copy_(held.view_as(parameter), non_blocking=True)
            continue
        _, bucket = waiting.setdefault((id(group), parameter.dtype), (group, []))
        maximum = max(1, GATHERED // (group.size() * parameter.element_size()))
        # Parts of replicas have the same length, except the last ones.
        width = replica_part(parameter.numel(), 0, group.size())[1]
        for start in range(0, width, maximum):
            length = min(maximum, width - start)
            # Pieces of one group are gathered together, in the model's order on each replica.
            if sum(piece.length for piece in bucket) + length > maximum:
                _gather_bucket(bucket, group)
                bucket.clear()
            bucket.append(_Piece(parameter.detach().view(-1), held.view(-1), start, length))
    for group, bucket in waiting.values():
        _gather_bucket(bucket, group)


def _gather_bucket(bucket: Sequence[_Piece], group: Any) -> None:
    """Gather pieces of one dtype and of the same replicas, in the model's order on each of them."""
    lengths, replicas = [piece.length for piece in bucket], group.size()
    like = bucket[0].whole
    # Zeros, because the last replica's part may be shorter than the piece.
    mine = torch.zeros(sum(lengths), dtype=like.dtype, device=like.device)
    for part, (_, held, start, length) in zip(mine.split(lengths), bucket, strict=True):
        own = held[start : start + length]
        part[: own.numel()].copy_(own, non_blocking=True)
    found = torch.empty(replicas, mine.numel(), dtype=like.dtype, device=like.device)
    # As bytes, which every backend accepts.
    dist.all_gather_into_tensor(
        found.view(torch.uint8).view(-1), mine.view(torch.uint8), group=group
    )
    for parts, (whole, _, start, _) in zip(found.split(lengths, dim=1), bucket, strict=True):
        for replica, part in enumerate(parts):
            first, end = replica_part(whole.numel(), replica, replicas)
            place = whole[first:end][start : start + part.numel()]
            place.copy_(part[: place.numel()])


class MasterSnapshot:
    """One copy of this rank's shards of the optimizer's parameters; initially of their present
    values.

    Those are float32 whatever the model's dtype: at the learning rates of RL most bfloat16 weights
    do not change in a step, and the others change by a rounding unit. It costs 4 bytes per
    parameter whose optimizer state this rank has.

    For a model with FP8 weights this is also a copy of the weights: `place` computes them from the
    optimizer's, which reproduces every byte and scale. `place`, and methods that use it, are
    collective over the world.
    """

    def __init__(self, optimizer: MegatronOptimizer) -> None:
        self._optimizer = optimizer
        self.shards = [
            torch.empty(shard.shape, dtype=shard.dtype, pin_memory=shard.is_cuda)
            for shard in masters_of(optimizer)
        ]
        """Copies in the order of the optimizer's parameters, on the CPU."""
        self.update()

    @torch.no_grad()
    def update(self) -> None:
        """Copy the present shards."""
        for held, shard in self._pairs():
            held.copy_(shard, non_blocking=True)
        self._finish()

    @torch.no_grad()
    def average(self, decay: float) -> None:
        """Compute copy = decay copy + (1 - decay) shards."""
        for held, shard in self._pairs():
            held.copy_(held.to(shard.device, copy=True).lerp_(shard.detach(), 1.0 - decay))

    @torch.no_grad()
    def place(self) -> None:
        """Set the optimizer's parameters to the copy, and the model's weights to the rounded
        copy."""
        for held, shard in self._pairs():
            shard.copy_(held, non_blocking=True)
        self._finish()
        weights_from_masters(self._optimizer)

    @contextmanager
    def restored_after(self) -> Iterator[None]:
        """Copy the weights now and restore them at the end, except after a pass that raised:
        another rank's may not have raised, and the run is over."""
        self.update()
        yield
        self.place()

    def slices(self) -> Sliced:
        """Return slices of the model's parameters, with the copy of each."""
        return optimizer_state(self._optimizer, self.shards)

    def _pairs(self) -> Iterator[tuple[Tensor, nn.Parameter]]:
        yield from zip(self.shards, masters_of(self._optimizer), strict=True)

    def _finish(self) -> None:
        """Wait until the copies are complete, so that host memory may be read or reused."""
        if any(shard.is_cuda for _, shard in self._pairs()):
            torch.cuda.synchronize()


_digests: WeakKeyDictionary[PolicyModel, str] = WeakKeyDictionary()

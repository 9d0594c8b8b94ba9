"""The weights of the newest versions, and how far the present ones are from those that a batch's
samples began under:

    D = theta - sum_v share_v theta_v        share_v: of the batch's trained tokens, those of
                                             samples whose first token version v sampled

theta are the optimizer's own parameters, float32 whatever the model's dtype. Past ones come to the
device a block at a time; one shard of D exists at a time.

`WeightSnapshot` and `MasterSnapshot` are copies in host memory (page-locked on CUDA): of the
model's parameters, or of the optimizer's weights if the model has FP8 weights. Copies of parameters
are divided over the replicas of each parameter: every rank copies its part, which needs no
collective, and the parts are gathered when they are put in place for a forward pass.

Invariants:
- parameters are written in place: gradient buffers, the distributed optimizer's buffers and tied
  weights alias them;
- the weights in training are back after `restored_after`, bit for bit;
- a divided copy holds and restores the bits of a whole one;
- a device never holds more than two buckets of GATHERED bytes besides the model.
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
        """Keep the present weights as those of `version`, in the memory of the oldest when there
        are enough."""
        if version in self._held:
            return
        if len(self._held) < self._size:
            self._held[version] = self._copy()
            return
        # Reused, not reallocated: page-locked memory is slow to get.
        _, oldest = self._held.popitem(last=False)
        oldest.update()
        self._held[version] = oldest

    @property
    def lasting(self) -> Mapping[int, C]:
        """Versions that are still kept when the next version begins."""
        # The oldest of a full store is overwritten when the next version begins.
        count = min(len(self._held), self._size - 1)
        return dict(list(self._held.items())[len(self._held) - count :])

    def of(self, version: int, *, current: int) -> C:
        """Raise SnapshotMissing."""
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
        """Move the end of the coming step by `amount` D: the optimizer's parameters are moved now,
        and weight decay, which will act on what they are then, is allowed for."""
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
    """The displacement of an optimizer step's samples; null where all of them began under the
    present weights. moved: the present weights are no longer those of the version that is trained.
    Raises SnapshotMissing."""
    shares, version = start_shares(samples), samples.version
    if not moved:
        # theta - theta_v is 0 for the present version, until an optimizer step moves the weights.
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
            # Subtracted before it is scaled: a difference of near numbers is exact in float32.
            total.add_(new - old.to(now.device, non_blocking=True), alpha=share)
    return found


GATHERED = 256 * 2**20
"""Bytes of parameters that are gathered at a time."""


class WeightSnapshot:
    """One copy of the trainable parameters of `chunks`; at first, of what they are now. Where those
    are adapters, so is the copy, and the base model stays in place under it.

    dtype: null keeps each parameter's own; an average needs float32, in which small changes do not
    vanish. layout: divides the copy over the replicas of each parameter, and then `place` is
    collective over them; null keeps it whole here.
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
        """The copy becomes the parameters as they are."""
        for parameter, held in self._pairs():
            # `_finish` waits once for all copies.
            held.copy_(self._here(parameter), non_blocking=True)
        self._finish()

    @torch.no_grad()
    def average(self, decay: float) -> None:
        """copy = decay copy + (1 - decay) parameters."""
        for parameter, held in self._pairs():
            # On the parameter's device, which computes faster than the host and holds one more
            # tensor meanwhile.
            moved = held.to(parameter.device, copy=True)
            held.copy_(moved.lerp_(self._here(parameter).to(moved.dtype), 1.0 - decay))

    @torch.no_grad()
    def place(self) -> None:
        """The parameters become the copy (rounded, where the copy is more precise)."""
        if self._layout is None:
            for parameter, held in self._pairs():
                parameter.copy_(held, non_blocking=True)
        else:
            _gather(self._pairs(), self._layout)
        self._finish()

    def slices(self) -> Sliced:
        """Slices of the parameters, with the copy of each."""
        return [
            (Slice(parameter, *self._part(parameter), own=self._layout is not None), held)
            for parameter, held in self._pairs()
        ]

    @contextmanager
    def restored_after(self) -> Iterator[None]:
        """Copy the parameters now and put the copy in place at the end. Needs their own dtype.
        After a pass that raised, parts are not put together: another rank's pass may not have
        raised, and the run is over."""
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
        """Host memory may be read, or reused, once the copies are through."""
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
    """Every parameter becomes what its replicas hold parts of. Collective over them, for at most
    GATHERED bytes of parameters at a time."""
    waiting: dict[tuple[int, torch.dtype], tuple[Any, list[_Piece]]] = {}
    for parameter, held in pairs:
        group = layout.replicas_of(parameter)
        if group.size() == 1:
            parameter.copy_(held.view_as(parameter), non_blocking=True)
            continue
        _, bucket = waiting.setdefault((id(group), parameter.dtype), (group, []))
        maximum = max(1, GATHERED // (group.size() * parameter.element_size()))
        # Replicas have parts of one length, but for the last ones.
        width = replica_part(parameter.numel(), 0, group.size())[1]
        for start in range(0, width, maximum):
            length = min(maximum, width - start)
            # Pieces of one group are gathered together, in the order of the model on each
            # replica.
            if sum(piece.length for piece in bucket) + length > maximum:
                _gather_bucket(bucket, group)
                bucket.clear()
            bucket.append(_Piece(parameter.detach().view(-1), held.view(-1), start, length))
    for group, bucket in waiting.values():
        _gather_bucket(bucket, group)


def _gather_bucket(bucket: Sequence[_Piece], group: Any) -> None:
    """Gather pieces of one dtype and of the same replicas, in the order of the model on each of
    them."""
    lengths, replicas = [piece.length for piece in bucket], group.size()
    like = bucket[0].whole
    # Zeros: the last replica's part may be shorter than the piece.
    mine = torch.zeros(sum(lengths), dtype=like.dtype, device=like.device)
    for part, (_, held, start, length) in zip(mine.split(lengths), bucket, strict=True):
        own = held[start : start + length]
        part[: own.numel()].copy_(own, non_blocking=True)
    found = torch.empty(replicas, mine.numel(), dtype=like.dtype, device=like.device)
    # As bytes: every backend takes them.
    dist.all_gather_into_tensor(
        found.view(torch.uint8).view(-1), mine.view(torch.uint8), group=group
    )
    for parts, (whole, _, start, _) in zip(found.split(lengths, dim=1), bucket, strict=True):
        for replica, part in enumerate(parts):
            first, end = replica_part(whole.numel(), replica, replicas)
            place = whole[first:end][start : start + part.numel()]
            place.copy_(part[: place.numel()])


class MasterSnapshot:
    """One copy of this rank's shards of the optimizer's parameters; at first, of what they are now.

    Those are float32 whatever the model's dtype: at the learning rates of RL most bfloat16 weights
    do not move in a step, and those that do move by a rounding. 4 bytes per parameter whose
    optimizer state this rank has.

    For a model with FP8 weights this is a copy of the weights, too: they are made of the
    optimizer's when it is put in place, which gives every byte and scale back. `place` and what
    rests on it are collective over the world.
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
        """The copy becomes the shards as they are."""
        for held, shard in self._pairs():
            held.copy_(shard, non_blocking=True)
        self._finish()

    @torch.no_grad()
    def average(self, decay: float) -> None:
        """copy = decay copy + (1 - decay) shards."""
        for held, shard in self._pairs():
            held.copy_(held.to(shard.device, copy=True).lerp_(shard.detach(), 1.0 - decay))

    @torch.no_grad()
    def place(self) -> None:
        """The optimizer's parameters become the copy, and the model's weights what they round
        to."""
        for held, shard in self._pairs():
            shard.copy_(held, non_blocking=True)
        self._finish()
        weights_from_masters(self._optimizer)

    @contextmanager
    def restored_after(self) -> Iterator[None]:
        """Copy the weights now and put the copy in place at the end, but for a pass that raised:
        another rank's may not have, and the run is over."""
        self.update()
        yield
        self.place()

    def slices(self) -> Sliced:
        """Slices of the model's parameters, with the copy of each."""
        return optimizer_state(self._optimizer, self.shards)

    def _pairs(self) -> Iterator[tuple[Tensor, nn.Parameter]]:
        yield from zip(self.shards, masters_of(self._optimizer), strict=True)

    def _finish(self) -> None:
        """Host memory may be read, or reused, once the copies are through."""
        if any(shard.is_cuda for _, shard in self._pairs()):
            torch.cuda.synchronize()


_digests: WeakKeyDictionary[PolicyModel, str] = WeakKeyDictionary()

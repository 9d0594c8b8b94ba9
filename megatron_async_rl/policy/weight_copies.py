"""Copies of weights in host memory, of the model's parameters or of the optimizer's.

Copies of the model's parameters are put in place for a forward pass and taken away again; if the
model has FP8 weights, copies of the optimizer's weights are (MasterSnapshot). The former are
divided over the replicas of each parameter: every rank copies its part, which needs no collective,
and parts are gathered when they are put in place. Copies of the optimizer's are of this rank's
shards. On CUDA host memory is page-locked.

Invariants:
- parameters are written in place: gradient buffers, the distributed optimizer's buffers and tied
  weights alias them;
- the weights in training are back after `restored_after`, bit for bit;
- a divided copy holds and restores the bits of a whole one;
- a device never holds more than two buckets of GATHERED bytes besides the model.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any, NamedTuple

import torch
import torch.distributed as dist
from torch import Tensor, nn

from megatron_async_rl.policy.adam_view import masters_of
from megatron_async_rl.policy.megatron_private import weights_from_masters
from megatron_async_rl.policy.parameter_state import Slice, Sliced, optimizer_state, replica_part
from megatron_async_rl.policy.parameters import trainable

if TYPE_CHECKING:
    from megatron.core.optimizer import MegatronOptimizer

    from megatron_async_rl.policy.parallel import Layout

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
        """Takes a copy now and puts it in place at the end. Wants the parameters' own dtype. After
        a pass that raised, parts are not put together: another rank's pass may not have raised, and
        the run is over."""
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
            if sum(piece.length for piece in bucket) + length > maximum:
                _gather_bucket(bucket, group)
                bucket.clear()
            bucket.append(_Piece(parameter.detach().view(-1), held.view(-1), start, length))
    for group, bucket in waiting.values():
        _gather_bucket(bucket, group)


def _gather_bucket(bucket: Sequence[_Piece], group: Any) -> None:
    """Gathers pieces of one dtype and of the same replicas, in the order of the model on each of
    them."""
    lengths, replicas = [piece.length for piece in bucket], group.size()
    like = bucket[0].whole
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
        """Takes a copy now and puts it in place at the end, but for a pass that raised: another
        rank's may not have, and the run is over."""
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

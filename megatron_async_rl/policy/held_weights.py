"""Copies of the model's parameters in host memory, to be put in place for a forward pass and taken away again.

Every rank holds copies of its own chunks' parameters, so copying needs no collective. On CUDA host memory is page-locked.

Invariants:
- parameters are written in place: gradient buffers, the distributed optimizer's buffers and tied weights alias them;
- the weights in training are back after `restored_after`, bit for bit, also when the pass raised.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager

import torch
from torch import Tensor, nn

from megatron_async_rl.policy.parameter_state import ModelTensors


class SnapshotMissing(ValueError):
    """A token was sampled by a version whose weights are no longer, or not yet, kept."""

    def __init__(self, version: int, current: int, held: Sequence[int], size: int) -> None:
        kept = ", ".join(map(str, held)) or "none"
        super().__init__(
            f"the batch needs the weights of version {version} at version {current}, and those kept are of versions: "
            f"{kept}; set objective.snapshots (now {size}) to at least {current - version + 1}."
        )


class HeldWeights:
    """One copy of the parameters of `chunks`; at first, of what they are now.

    dtype: null keeps each parameter's own; an average wants float32, which small changes do not vanish in.
    """

    def __init__(self, chunks: Sequence[nn.Module], dtype: torch.dtype | None = None) -> None:
        self._parameters = [dict(chunk.named_parameters()) for chunk in chunks]
        self.tensors = [
            {
                name: torch.empty(p.shape, dtype=dtype if dtype is not None else p.dtype, pin_memory=p.is_cuda)
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
            # On the parameter's device, which computes faster than the host and holds one more tensor meanwhile.
            moved = held.to(parameter.device, copy=True)
            held.copy_(moved.lerp_(parameter.to(moved.dtype), 1.0 - decay))

    @torch.no_grad()
    def place(self) -> None:
        """The parameters become the copy (rounded, where the copy is more precise)."""
        for parameter, held in self._pairs():
            parameter.copy_(held, non_blocking=True)
        self._finish()

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


class Snapshots:
    """The weights of the newest `size` versions, oldest first. Every rank holds the same versions."""

    def __init__(self, chunks: Sequence[nn.Module], size: int) -> None:
        self._chunks = chunks
        self._size = size
        self._held: OrderedDict[int, HeldWeights] = OrderedDict()

    @property
    def versions(self) -> Mapping[int, HeldWeights]:
        return self._held

    def begin(self, version: int) -> None:
        """Keeps the present weights as those of `version`, in the memory of the oldest when there are enough."""
        if version in self._held:
            return
        if len(self._held) < self._size:
            self._held[version] = HeldWeights(self._chunks)
            return
        _, oldest = self._held.popitem(last=False)
        oldest.update()
        self._held[version] = oldest

    @property
    def lasting(self) -> Mapping[int, HeldWeights]:
        """Those that are still kept when the next version begins."""
        count = min(len(self._held), self._size - 1)
        return dict(list(self._held.items())[len(self._held) - count :])

    def load(self, version: int, tensors: ModelTensors) -> None:
        """Keeps `tensors` as the weights of `version`, which is newer than those kept."""
        self.begin(version)
        self._held[version].load(tensors)

    def of(self, version: int, *, current: int) -> HeldWeights:
        """Raises SnapshotMissing."""
        if version not in self._held:
            raise SnapshotMissing(version, current, list(self._held), self._size)
        return self._held[version]

    def clear(self) -> None:
        self._held.clear()

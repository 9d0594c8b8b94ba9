"""Digests of the weights that an engine's workers hold after an update, by their positions in the
trainer's tensors.

    bucket --offer--> vLLM's loaders --copy--> parameter: rows and columns of the tensor
                                                 |
              worker's parts: {name: Loaded} <---+    all workers' parts --digests_of--> one digest

vLLM decides how an engine shards and fuses tensors. `LoadWatch` observes each copy from an offered
tensor, which shows the part and its destination. The engine core imports this file, too, without
vLLM, so the file is separate from receive.py, which imports vLLM.

Invariants:
- a digest is computed from the written memory, not from the source: for a lasting parameter at the
  end of the update, for temporary memory (the source of a packed or quantized weight) as soon as it
  is written;
- a part that several workers hold with equal values counts once. If their values differ, or if no
  worker took a part, the digest differs from the trainer's;
- an address identifies an offered tensor only until the tensor is freed or its memory is offered
  again; this module does not keep an offered tensor alive.
"""

from __future__ import annotations

from bisect import bisect_left, bisect_right
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor
from torch.multiprocessing.reductions import StorageWeakRef
from torch.utils._python_dispatch import TorchDispatchMode

from megatron_async_rl.weights.digest import digest_text, matrix_shape, partial_digest

_COPIES = (torch.ops.aten.clone.default, torch.ops.aten._to_copy.default)


@dataclass
class Loaded:
    """Parts of a tensor that one worker took. `parts`: (row, column, rows, columns, d1, d2); d1 and
    d2 are the sums of `partial_digest`."""

    dtype: torch.dtype
    shape: tuple[int, ...]
    parts: set[tuple[int, ...]] = field(default_factory=set)


def digests_of(workers: Sequence[dict[str, Loaded]]) -> dict[str, str]:
    """Return name -> digest of every tensor from which a worker took a part."""
    merged: dict[str, Loaded] = {}
    for loaded in workers:
        for name, one in loaded.items():
            # A union of sets: equal replicas of a part count once. Replicas that differ count
            # twice, which changes the digest.
            merged.setdefault(name, Loaded(one.dtype, one.shape)).parts |= one.parts
    return {
        name: digest_text(
            one.dtype,
            one.shape,
            [
                sum(d1 for *_, d1, _ in one.parts),
                sum(d2 for *_, d2 in one.parts),
                sum(rows * columns for _, _, rows, columns, *_ in one.parts),
            ],
        )
        for name, one in merged.items()
        if one.parts
    }


@dataclass(frozen=True)
class _TensorRegion:
    """A range of rows and columns of the tensor `name`."""

    name: str
    row: int
    column: int
    rows: int
    columns: int


@dataclass(frozen=True)
class _TensorMemory:
    """Addresses [start, end) of a tensor, and the size of an element in bytes."""

    start: int
    end: int
    element: int

    @classmethod
    def of(cls, tensor: Tensor) -> _TensorMemory:
        start, element = tensor.data_ptr(), tensor.element_size()
        return cls(start, start + tensor.numel() * element, element)

    def has(self, part: Tensor) -> bool:
        """Return True if `part` begins in this memory and has elements of this size."""
        return part.element_size() == self.element and self.start <= part.data_ptr() < self.end


@dataclass(frozen=True)
class _OfferedTensor:
    name: str
    shape: tuple[int, ...]
    memory: _TensorMemory
    storage: StorageWeakRef


class LoadWatch(TorchDispatchMode):
    """Context manager that records the copies of an engine's loaders. Call `begin` at the start of
    each update, and `loaded` at its end."""

    def __init__(self) -> None:
        super().__init__()
        self._paused = False
        """True while this object computes a digest, whose own copies must not be recorded."""
        self.begin(())

    def begin(self, lasting: Iterable[Tensor]) -> None:
        """Start an update. `lasting`: parameters that keep their memory during the update. Memory
        of any other tensor may be reused, so its digest is computed at once."""
        self._lasting = {
            p.untyped_storage().data_ptr() for p in lasting if p.numel() and not p.is_meta
        }
        self._loaded: dict[str, Loaded] = {}
        self._starts: list[int] = []
        self._offered: list[_OfferedTensor] = []
        """Offered tensors in the order of their addresses, which `_starts` has."""
        self._copy: tuple[_TensorRegion, _TensorMemory, Tensor] | None = None
        """Last temporary copy of a part that a loader made: its region, its memory and the copy
        itself, a reference that keeps the memory from being reused."""
        self._written: list[tuple[_TensorRegion, Tensor]] = []
        """Parts in lasting memory, whose digests are computed at the end of the update."""
        self._taken: list[tuple[_TensorRegion, Tensor]] = []
        """Parts and their digests, on the device."""

    @property
    def names(self) -> frozenset[str]:
        """Names of the tensors that were offered in this update."""
        return frozenset(self._loaded)

    def offer(self, name: str, tensor: Tensor) -> None:
        """Register the tensor that the loaders receive next. Its memory must not change until the
        tensor is freed or the memory is offered again."""
        shape = tuple(tensor.shape)
        self._loaded[name] = Loaded(tensor.dtype, shape)
        if not tensor.numel():
            return
        memory, starts = _TensorMemory.of(tensor), self._starts
        first, last = bisect_left(starts, memory.start), bisect_left(starts, memory.end)
        # Replace the offers whose memory this tensor reuses: they are no longer valid.
        starts[first:last] = [memory.start]
        storage = StorageWeakRef(tensor.untyped_storage())
        self._offered[first:last] = [_OfferedTensor(name, shape, memory, storage)]

    def take(self, part: Tensor) -> None:
        """Record that a kernel uses `part` of an offered tensor without a copy."""
        region = self._region(part)
        assert region is not None, "the tensor of this part was not offered"
        self._paused = True
        try:
            self._digest(region, part)
        finally:
            self._paused = False

    def loaded(self) -> dict[str, Loaded]:
        """End the update, and return name -> the parts that this worker took of the tensor."""
        for region, memory in self._written:
            self._digest(region, memory)
        if self._taken:
            # Stacked, so that all digests need a single transfer from the device.
            sums = torch.stack([digest for _, digest in self._taken]).tolist()
            for (region, _), (d1, d2, _) in zip(self._taken, sums, strict=True):
                self._loaded[region.name].parts.add(
                    (region.row, region.column, region.rows, region.columns, d1, d2)
                )
        self._starts, self._offered, self._copy = [], [], None
        self._written, self._taken = [], []
        return self._loaded

    def __torch_dispatch__(
        self, func: Any, types: Any, args: Any = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        result = func(*args, **(kwargs or {}))
        if self._paused:
            return result
        # vLLM counts elements by copies to meta tensors, which hold no data.
        if func is torch.ops.aten.copy_.default and not args[0].is_meta:
            region = self._region(args[1])
            if region is None:
                pass
            elif args[0].untyped_storage().data_ptr() in self._lasting:
                self._written.append((region, args[0]))
            else:
                self._digest(region, args[0])
        elif func in _COPIES:
            region = self._region(args[0])
            if region is not None:
                self._copy = region, _TensorMemory.of(result), result
        return result

    def _digest(self, region: _TensorRegion, memory: Tensor) -> None:
        # The trainer computes digests in its own dtype. A parameter of a wider dtype has the same
        # values.
        part = memory.detach().to(self._loaded[region.name].dtype)
        part = part.reshape(region.rows, region.columns)
        self._taken.append((region, partial_digest(part, region.row, region.column)))

    def _region(self, part: Tensor) -> _TensorRegion | None:
        """Return the region of an offered tensor that `part` views or copies; None if there is no
        such tensor. Raises RuntimeError if the region is not a range of rows and columns."""
        if part.is_meta or not part.numel():
            return None
        if self._copy is not None and self._copy[1].has(part):
            origin, memory, _ = self._copy
        else:
            at = bisect_right(self._starts, part.data_ptr()) - 1
            offered = self._offered[at] if at >= 0 else None
            # `expired`: the tensor was freed, and other data may be in its memory.
            if offered is None or not offered.memory.has(part) or offered.storage.expired():
                return None
            memory = offered.memory
            origin = _TensorRegion(offered.name, 0, 0, *matrix_shape(offered.shape))
        if not part.dim():
            part = part.reshape(1)
        offset = (part.data_ptr() - memory.start) // memory.element
        row, column = divmod(offset, origin.columns)
        rows, columns = matrix_shape(part.shape)
        strides = [*(origin.columns * rows for rows in part.shape[-2:-1]), origin.columns, 1]
        regular = all(
            size == 1 or stride == expected
            for size, stride, expected in zip(
                part.shape[-3:], part.stride()[-3:], strides[-part.dim() :], strict=True
            )
        )
        if part.dim() > 3 or not regular or column + columns > origin.columns:
            raise RuntimeError(
                f"vLLM loads a part of tensor {origin.name} that is not a range of its rows and"
                f" columns (shape {list(part.shape)}, strides {list(part.stride())}), so its digest"
                " cannot be compared with the trainer's"
            )
        return _TensorRegion(origin.name, origin.row + row, origin.column + column, rows, columns)

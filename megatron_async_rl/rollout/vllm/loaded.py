"""Digests of the weights in an engine worker's memory after loading, by position in the trainer's
tensors.

    bucket --offer--> vLLM's loaders --copy--> parameter: rows and columns of the tensor
                                                 |
              worker's parts: {name: Loaded} <---+    all workers' parts --digests_of--> one digest

vLLM decides how an engine shards and fuses tensors. Each copy from an offered tensor shows which
part of it went where. The engine core reads `Loaded` objects, too, so this file imports no vLLM.

Invariants:
- digests read back the written memory: of a lasting parameter at the end of the update; of
  temporary memory (the source of a packed or quantized weight) as soon as it is written;
- a part that several workers hold counts once if they hold the same values. If they differ, or no
  worker took a part, the digest differs from the trainer's;
- an address identifies an offered tensor only while the tensor lives and until its memory is
  offered again; this module keeps no tensor alive.
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
    """Parts of a tensor that one worker took. `parts`: (row, column, rows, columns, d1, d2)."""

    dtype: torch.dtype
    shape: tuple[int, ...]
    parts: set[tuple[int, ...]] = field(default_factory=set)


def digests_of(workers: Sequence[dict[str, Loaded]]) -> dict[str, str]:
    """Return name -> digest of every tensor from which a worker took a part."""
    found: dict[str, Loaded] = {}
    for loaded in workers:
        for name, one in loaded.items():
            # A set: replicas with equal digests count once, differing replicas twice, which shows.
            found.setdefault(name, Loaded(one.dtype, one.shape)).parts |= one.parts
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
        for name, one in found.items()
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
    """Address range [start, end) of a tensor in bytes, and the size of an element."""

    start: int
    end: int
    element: int

    @classmethod
    def of(cls, tensor: Tensor) -> _TensorMemory:
        start, element = tensor.data_ptr(), tensor.element_size()
        return cls(start, start + tensor.numel() * element, element)

    def has(self, part: Tensor) -> bool:
        return part.element_size() == self.element and self.start <= part.data_ptr() < self.end


@dataclass(frozen=True)
class _OfferedTensor:
    name: str
    shape: tuple[int, ...]
    memory: _TensorMemory
    storage: StorageWeakRef


class LoadWatch(TorchDispatchMode):
    """Context manager around an engine's loaders that records their copies. Call `begin` at the
    start of each update."""

    def __init__(self) -> None:
        super().__init__()
        self._reading = False
        self.begin(())

    def begin(self, lasting: Iterable[Tensor]) -> None:
        """Start an update. `lasting`: parameters that keep their memory throughout. The address of
        any other tensor may be reused during the update, so it identifies nothing."""
        self._lasting = {
            p.untyped_storage().data_ptr() for p in lasting if p.numel() and not p.is_meta
        }
        self._loaded: dict[str, Loaded] = {}
        self._starts: list[int] = []
        self._offered: list[_OfferedTensor] = []
        """Offered parameters in the order of their addresses, `_starts`."""
        self._copy: tuple[_TensorRegion, _TensorMemory, Tensor] | None = None
        """A loader's temporary copy of a part, not yet written to a parameter."""
        self._written: list[tuple[_TensorRegion, Tensor]] = []
        """Parts in lasting memory, whose digests are computed at the end."""
        self._taken: list[tuple[_TensorRegion, Tensor]] = []
        """Parts and their digests."""

    @property
    def names(self) -> frozenset[str]:
        """Names of the tensors offered in this update."""
        return frozenset(self._loaded)

    def offer(self, name: str, tensor: Tensor) -> None:
        """Announce the tensor that the loaders receive next. Its memory must not change until it is
        offered again or the tensor is freed."""
        shape = tuple(tensor.shape)
        self._loaded[name] = Loaded(tensor.dtype, shape)
        if not tensor.numel():
            return
        memory, starts = _TensorMemory.of(tensor), self._starts
        first, last = bisect_left(starts, memory.start), bisect_left(starts, memory.end)
        # Offers whose memory this tensor reuses are no longer valid.
        starts[first:last] = [memory.start]
        storage = StorageWeakRef(tensor.untyped_storage())
        self._offered[first:last] = [_OfferedTensor(name, shape, memory, storage)]

    def take(self, part: Tensor) -> None:
        """Record that a kernel reads `part` of an offered tensor in place."""
        place = self._place(part)
        assert place is not None, "the part of a tensor that was not offered"
        self._reading = True  # do not record copies that the digest itself makes
        try:
            self._digest(place, part)
        finally:
            self._reading = False

    def loaded(self) -> dict[str, Loaded]:
        """End the update and return the parts taken of each tensor."""
        for place, memory in self._written:
            self._digest(place, memory)
        if self._taken:
            # One transfer from the device for all digests.
            sums = torch.stack([digest for _, digest in self._taken]).tolist()
            for (place, _), (d1, d2, _) in zip(self._taken, sums, strict=True):
                self._loaded[place.name].parts.add(
                    (place.row, place.column, place.rows, place.columns, d1, d2)
                )
        self._starts, self._offered, self._copy = [], [], None
        self._written, self._taken = [], []
        return self._loaded

    def __torch_dispatch__(
        self, func: Any, types: Any, args: Any = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        result = func(*args, **(kwargs or {}))
        if self._reading:
            return result
        if func is torch.ops.aten.copy_.default and not args[0].is_meta:
            place = self._place(args[1])
            if place is None:
                pass
            elif args[0].untyped_storage().data_ptr() in self._lasting:
                self._written.append((place, args[0]))
            else:
                self._digest(place, args[0])
        elif func in _COPIES:
            place = self._place(args[0])
            if place is not None:
                self._copy = place, _TensorMemory.of(result), result
        return result

    def _digest(self, place: _TensorRegion, memory: Tensor) -> None:
        # The trainer computes digests in its dtype; a wider parameter holds the same numbers.
        part = memory.detach().to(self._loaded[place.name].dtype)
        part = part.reshape(place.rows, place.columns)
        self._taken.append((place, partial_digest(part, place.row, place.column)))

    def _place(self, part: Tensor) -> _TensorRegion | None:
        """Return the region of an offered tensor that `part` views or was copied from, or None.
        Raises RuntimeError if it is not a range of rows and columns."""
        if part.is_meta or not part.numel():
            return None
        if self._copy is not None and self._copy[1].has(part):
            origin, memory, _ = self._copy
        else:
            at = bisect_right(self._starts, part.data_ptr()) - 1
            offered = self._offered[at] if at >= 0 else None
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
            size == 1 or stride == wanted
            for size, stride, wanted in zip(
                part.shape[-3:], part.stride()[-3:], strides[-part.dim() :], strict=True
            )
        )
        if part.dim() > 3 or not regular or column + columns > origin.columns:
            raise RuntimeError(
                f"tensor {origin.name} is loaded in an order of vLLM's own, {list(part.shape)} at"
                f" strides {list(part.stride())}: its digest would not be the trainer's"
            )
        return _TensorRegion(origin.name, origin.row + row, origin.column + column, rows, columns)

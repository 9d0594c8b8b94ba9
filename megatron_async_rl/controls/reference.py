"""The gradient of an earlier step, kept shard by shard: its number format, and its place in memory.

`for shard in reference` reads float32 tensors in the order of the gradient's shards, one at a time:
a compressed or offloaded reference never exists whole in float32. Offloaded, the next shard is
fetched while the present one is used, and the gradient passed to `put` is copied out during the
optimizer's step. On CUDA this uses device memory of the reference's size until the copies are
complete, at a time without activations.

Number formats: float32, bfloat16, or FP8 with a scale per block. The numbers read differ from the
numbers written, element by element, by at most
    bf16    2^-9 of the element
    fp8     2^-4 of the element (e4m3 has 3 bits after the point), and for elements below 2^-14 of
            their block's largest by at most 2^-18 of that largest
so a cosine with it changes by at most |error| / |reference|: 2^-9 and about 2^-4. The change is far
smaller for errors that are not aligned with the other gradient (of order c |error|^2 / 2 plus the
same over the root of the number of elements). A block's scale is the smallest power of two that
brings its largest element within e4m3's 448. Scaling is then exact, and writing the read numbers
again gives the same bits.

Sweeps: on CUDA, products, projection and writing are Triton kernels (gac_kernels.py), which read
and write each number once; elsewhere they are torch operations, block by block.

Memory: on CUDA a separate stream copies between device and host concurrently with other work, after
the work that produced the source; elsewhere copies are synchronous. Copies are made in the order in
which they were started, so a copy that reads a buffer comes after the copy that writes it.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from importlib.util import find_spec
from typing import Any, Protocol

import torch
from torch import Tensor

from megatron_async_rl.controls.quantize import (
    BLOCK,
    QuantizedTensors,
    ReferenceDtype,
    dequantize,
    room_for,
    write,
)
from megatron_async_rl.gradients import block_elements, three_products

Wait = Callable[[], None]


class ReferenceCopies(Protocol):
    def start(self, source: Tensor, target: Tensor) -> Wait:
        """Begin target <- source (same shape and dtype). Return a function that makes the device's
        later work wait for the copy.

        Neither tensor may be changed before that; a device tensor that is dropped keeps its memory
        until the copy is complete.
        """
        ...

    def finish(self) -> None:
        """Wait until every copy started so far is complete, so that this process may read host
        memory."""
        ...

    def host_room(self, elements: int, dtype: ReferenceDtype) -> QuantizedTensors:
        """Return the tensors of `room_for`, in host memory."""
        ...


class CudaCopies:
    """Copies to page-locked host memory on a separate stream, concurrently with the optimizer and
    the next forward pass."""

    def __init__(self, device: torch.device) -> None:
        self._stream = torch.cuda.Stream(device)

    def start(self, source: Tensor, target: Tensor) -> Wait:
        # The copy starts after the work that produced the source.
        self._stream.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(self._stream):
            target.copy_(source, non_blocking=True)
            done = torch.cuda.Event()
            done.record(self._stream)
        for tensor in (source, target):
            if tensor.is_cuda:
                # The allocator must not reuse this memory before the copy is complete.
                tensor.record_stream(self._stream)
        # Only the device waits, never this thread.
        return lambda: torch.cuda.current_stream().wait_event(done)

    def finish(self) -> None:
        self._stream.synchronize()

    def host_room(self, elements: int, dtype: ReferenceDtype) -> QuantizedTensors:
        return tuple(part.pin_memory() for part in room_for(elements, dtype, torch.device("cpu")))


def copies_for(device: torch.device) -> ReferenceCopies | None:
    """Return the copies for `device`; null if the device is the host."""
    return CudaCopies(device) if device.type == "cuda" else None


def kernels_for(device: torch.device, dtype: ReferenceDtype) -> Any:
    """Return the module gac_kernels if it can run, else None. FP8 needs compute capability 8.9."""
    if device.type != "cuda" or torch.version.cuda is None or find_spec("triton") is None:
        return None
    # Triton's e4m3 conversions need Ada or Hopper.
    if dtype == "fp8" and torch.cuda.get_device_capability(device) < (8, 9):
        return None
    from megatron_async_rl.controls import gac_kernels

    return gac_kernels


class BlockSweeps:
    """The writing sweeps of gac_kernels in torch operations. They process blocks that fit the
    cache, so all operations on a block cost one transfer from memory."""

    @staticmethod
    def project(gradient: Tensor, written: QuantizedTensors, factor: float, *, raw: bool) -> None:
        for g, r in _blocks(gradient, written):
            # The raw values are needed after the gradient has changed.
            kept = g.clone() if raw else g
            # In float32: with two bfloat16 tensors torch would round the product, too.
            g.add_(dequantize(r, g.shape), alpha=factor)
            write(kept, r)

    @staticmethod
    def keep(gradient: Tensor, written: QuantizedTensors) -> None:
        for g, r in _blocks(gradient, written):
            write(g, r)


def _blocks(
    gradient: Tensor, written: QuantizedTensors
) -> Iterator[tuple[Tensor, QuantizedTensors]]:
    size = block_elements(gradient.device)
    # FP8 numbers are rows of BLOCK, with one row of scales for each.
    parts = [part.split(size // BLOCK if len(written) == 2 else size) for part in written]
    return zip(gradient.view(-1).split(size), zip(*parts, strict=True), strict=True)


class GradientReference:
    """Reference gradient, not initialised before the first `put`. device: the gradient's, whose
    shards have `shapes`. copies: null keeps the reference on the gradient's device.

    A flat reference that torch operations sweep on the gradient's own device has room for one
    additional block: see `_slide`.
    """

    def __init__(
        self,
        dtype: ReferenceDtype,
        device: torch.device,
        copies: ReferenceCopies | None,
        shapes: Sequence[torch.Size],
    ) -> None:
        self._dtype = dtype
        self._device = device
        self._copies = copies
        self._shapes = shapes
        self._kernels = kernels_for(device, dtype)
        # FP8 has scales per block, which cannot be shifted by one block.
        self._slides = self._kernels is None and copies is None and dtype != "fp8"
        sizes = [shape.numel() for shape in shapes]
        if self._slides:
            self._gap = min(block_elements(device), max(sizes, default=0))
            (self._room,) = room_for(sum(sizes) + self._gap, dtype, device)
            self._kept = self._places(0)
            self._start = 0
        else:
            self._kept = [
                room_for(size, dtype, device) if copies is None else copies.host_room(size, dtype)
                for size in sizes
            ]

    def put(self, gradients: Iterable[Tensor]) -> None:
        """Make the gradients (finite, copied) the reference, one for each shard."""
        for index, gradient in enumerate(gradients):
            written = (
                self._kept[index]
                # Offloaded, a device buffer is written and then copied out.
                if self._copies is None
                else room_for(gradient.numel(), self._dtype, gradient.device)
            )
            (self._kernels or BlockSweeps).keep(gradient, written)
            self._write_out(index, written)

    def products(
        self, pairs: Iterable[tuple[Tensor, QuantizedTensors]], known: bool, device: torch.device
    ) -> Tensor:
        """Return [3] float64: (<g, r>, |g|^2, |r|^2) over the shards of a gradient and those of
        `written`. known: leave |r|^2 at 0."""
        if self._kernels is not None:
            totals = torch.zeros(3, dtype=torch.float64, device=device)
            for gradient, written in pairs:
                totals += self._kernels.three_products(gradient, written, known)
            return totals
        return three_products(
            (
                (g, r[0] if len(r) == 1 else dequantize(r, g.shape))
                for gradient, written in pairs
                for g, r in (
                    _blocks(gradient, written) if len(written) == 2 else [(gradient, written)]
                )
            ),
            known,
            device,
        )

    def project(self, gradients: Sequence[Tensor], factor: float, *, raw: bool) -> None:
        """Compute gradient += factor reference, in place, and make the gradient before (raw) or
        after this change the reference."""
        if raw and self._slides:
            self._slide(gradients, factor)
            return
        for index, (gradient, written) in enumerate(zip(gradients, self.written(), strict=True)):
            (self._kernels or BlockSweeps).project(gradient, written, factor, raw=raw)
            self._write_out(index, written)

    def _slide(self, gradients: Sequence[Tensor], factor: float) -> None:
        """Write each block of the raw gradient over the block of the reference that the previous
        iteration has read, and which is still in the cache: no temporary copy is needed, and two
        operations suffice. The whole reference shifts by one block, alternately down and up."""
        start = self._gap - self._start
        places = self._places(start)
        size = block_elements(self._device)
        blocks = [
            block
            for gradient, (old,), (new,) in zip(gradients, self._kept, places, strict=True)
            for block in zip(*(x.view(-1).split(size) for x in (gradient, old, new)), strict=True)
        ]
        for g, old, new in blocks if start == 0 else reversed(blocks):
            # Before the gradient changes, because the reference is the raw one.
            new.copy_(g)
            # In float32: with two bfloat16 tensors torch would round the product, too.
            g.add_(old.float(), alpha=factor)
        self._kept, self._start = places, start

    def _places(self, start: int) -> list[QuantizedTensors]:
        sizes = [shape.numel() for shape in self._shapes]
        return [(part,) for part in self._room[start : start + sum(sizes)].split(sizes)]

    def _write_out(self, index: int, written: QuantizedTensors) -> None:
        if self._copies is not None:
            for part, host in zip(written, self._kept[index], strict=True):
                self._copies.start(part, host)

    def __iter__(self) -> Iterator[Tensor]:
        """Yield float32 shards; with `fp32` on the device they are the reference itself, not
        copies."""
        for written, shape in zip(self.written(), self._shapes, strict=True):
            yield dequantize(written, shape)

    def written(self) -> Iterator[QuantizedTensors]:
        """Yield shards on the gradient's device, in their stored format; the reference itself if it
        is stored there."""
        if self._copies is None:
            yield from self._kept
            return
        # One shard is being fetched while the one before it is used.
        ahead = self._fetch(0) if self._kept else None
        for index in range(len(self._kept)):
            assert ahead is not None
            written, waits = ahead
            ahead = self._fetch(index + 1) if index + 1 < len(self._kept) else None
            for wait in waits:
                wait()
            yield written

    def _fetch(self, index: int) -> tuple[QuantizedTensors, list[Wait]]:
        assert self._copies is not None
        hosts = self._kept[index]
        written = tuple(
            torch.empty(host.shape, dtype=host.dtype, device=self._device) for host in hosts
        )
        return written, [
            self._copies.start(host, part) for host, part in zip(hosts, written, strict=True)
        ]

    def on_device(self) -> list[Tensor]:
        """Tensors that hold the reference, if they are on the gradient's device."""
        return [] if self._copies is not None else [part for kept in self._kept for part in kept]

    def shards(self) -> list[Tensor]:
        """Return float32 shards, all at once and in the memory where they are kept, for a
        checkpoint."""
        if self._copies is not None:
            # This process reads host memory, which no device event protects.
            self._copies.finish()
        return [
            dequantize(written, shape)
            for written, shape in zip(self._kept, self._shapes, strict=True)
        ]

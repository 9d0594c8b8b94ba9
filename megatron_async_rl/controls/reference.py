"""The gradient of an earlier step, kept shard by shard: in which numbers, and in whose memory.

`for shard in reference` reads float32 tensors in the order of the gradient's shards, one at a time:
a compressed or offloaded reference never exists whole in float32. Offloaded, the next shard is on
its way while the present one is used, and what `put` was given is copied out beside the optimizer's
step; on CUDA that takes device memory of the reference's size until the copies are through, at a
time when there are no activations.

Numbers. float32, bfloat16, or 8-bit floats with a scale per block. What is read back differs from
what was written, element by element, by at most
    bf16    2^-9 of the element
    fp8     2^-4 of the element (e4m3 has 3 bits after the point), and for elements below 2^-14 of
            their block's largest by at most 2^-18 of that largest
so a cosine taken against it moves by at most |error| / |reference|: 2^-9 and about 2^-4; and by far
less for errors that do not line up with the other gradient (of order c |error|^2 / 2 plus the same
over the root of the number of elements). A block's scale is the smallest power of two that brings
its largest element within e4m3's 448. Scaling is then exact, and writing again what was read gives
the same bits.

Sweeps. On CUDA, products, projection and writing are Triton's kernels (gac_kernels.py), which read
and write each number once; elsewhere torch's operations, block by block.

Memory. On CUDA a stream of its own copies between device and host beside the work that is running,
after the work that made the source; elsewhere a copy is a copy, at once. Copies are made in the
order they were started, so one that reads a place another writes comes after it.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from importlib.util import find_spec
from typing import Any, Protocol

import torch
from torch import Tensor

from megatron_async_rl.controls.quantize import BLOCK, ReferenceDtype, dequantize, quantize
from megatron_async_rl.gradients import block_elements, three_products

Wait = Callable[[], None]


class Copies(Protocol):
    def start(self, source: Tensor, target: Tensor) -> Wait:
        """Begins target <- source (same shape and dtype). What is returned holds back the device's
        later work until it is done.

        Neither tensor may be changed before; a device tensor that is dropped keeps its memory until
        the copy is through.
        """
        ...

    def finish(self) -> None:
        """Returns when every copy started so far is done, so that this process may read host
        memory."""
        ...

    def host_memory(self, like: Tensor) -> Tensor:
        """Host memory of the shape and dtype of `like`, not initialised."""
        ...


class PlainCopies:
    """The device is the host."""

    def start(self, source: Tensor, target: Tensor) -> Wait:
        target.copy_(source)
        return _nothing

    def finish(self) -> None:
        pass

    def host_memory(self, like: Tensor) -> Tensor:
        return torch.empty(like.shape, dtype=like.dtype)


class CudaCopies:
    """Page-locked host memory and a stream of its own: the copy runs while the optimizer and the
    next forward do."""

    def __init__(self, device: torch.device) -> None:
        self._stream = torch.cuda.Stream(device)

    def start(self, source: Tensor, target: Tensor) -> Wait:
        self._stream.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(self._stream):
            target.copy_(source, non_blocking=True)
            done = torch.cuda.Event()
            done.record(self._stream)
        for tensor in (source, target):
            if tensor.is_cuda:
                tensor.record_stream(self._stream)
        return lambda: torch.cuda.current_stream().wait_event(done)

    def finish(self) -> None:
        self._stream.synchronize()

    def host_memory(self, like: Tensor) -> Tensor:
        return torch.empty(like.shape, dtype=like.dtype, pin_memory=True)


def copies_for(device: torch.device) -> Copies:
    return CudaCopies(device) if device.type == "cuda" else PlainCopies()


def _nothing() -> None:
    pass


def kernels_for(device: torch.device, dtype: ReferenceDtype) -> Any:
    """The module gac_kernels where it can run, else None. 8-bit floats need compute capability
    8.9."""
    if device.type != "cuda" or torch.version.cuda is None or find_spec("triton") is None:
        return None
    if dtype == "fp8" and torch.cuda.get_device_capability(device) < (8, 9):
        return None
    from megatron_async_rl.controls import gac_kernels

    return gac_kernels


class GradientReference:
    """copies: null keeps the reference where the gradient is. `device`: the gradient's."""

    def __init__(self, dtype: ReferenceDtype, device: torch.device, copies: Copies | None) -> None:
        self._dtype = dtype
        self._device = device
        self._copies = copies
        self._kernels = kernels_for(device, dtype)
        self._kept: list[tuple[Tensor, ...]] = []
        self._shapes: list[torch.Size] = []

    def put(self, index: int, gradient: Tensor) -> None:
        """Shard `index` becomes `gradient` (finite, copied). A new reference is put in order, from
        0."""
        if index < len(self._kept) and self._in_place:
            self._kept[index][0].copy_(gradient)
            return
        written = self._quantized(gradient)
        if index == len(self._kept):
            self._shapes.append(gradient.shape)
            self._kept.append(
                written
                if self._copies is None
                else tuple(self._copies.host_memory(part) for part in written)
            )
        self._write_out(index, written)

    def products(self, gradient: Tensor, written: tuple[Tensor, ...], known: bool) -> Tensor:
        """[3] float64: (<g, r>, |g|^2, |r|^2) of one shard; known: |r|^2 is left at 0. written: of
        `written`."""
        if self._kernels is not None:
            return self._kernels.three_products(gradient, written, known)
        # A bfloat16 reference is made float32 block by block, in the cache.
        plain = written[0] if len(written) == 1 else dequantize(written, gradient.shape)
        return three_products(gradient, plain, known)

    def project(
        self, index: int, gradient: Tensor, written: tuple[Tensor, ...], factor: float, *, raw: bool
    ) -> None:
        """gradient += factor reference, in place, and the reference becomes the gradient: as it was
        (raw), or as it is then. written: of shard `index`."""
        if self._kernels is not None:
            self._kernels.project(gradient, written, factor, raw=raw)
            self._write_out(index, written)
            return
        if raw and self._in_place:
            _add_and_exchange(gradient, written[0], factor)
            return
        reference = dequantize(written, gradient.shape)
        before = gradient.clone() if raw else gradient
        gradient.add_(reference, alpha=factor)
        self.put(index, before)

    @property
    def _in_place(self) -> bool:
        """True where the reference is kept in one tensor on the gradient's device."""
        return self._dtype != "fp8" and self._copies is None

    def _quantized(self, gradient: Tensor) -> tuple[Tensor, ...]:
        if self._kernels is None or self._dtype != "fp8":
            return quantize(gradient, self._dtype)
        blocks = -(-gradient.numel() // BLOCK)
        written = (
            gradient.new_empty(blocks, BLOCK, dtype=torch.float8_e4m3fn),
            gradient.new_empty(blocks, 1, dtype=torch.float32),
        )
        self._kernels.keep(gradient, written)
        return written

    def _write_out(self, index: int, written: tuple[Tensor, ...]) -> None:
        if self._copies is None:
            self._kept[index] = written
            return
        for part, host in zip(written, self._kept[index], strict=True):
            self._copies.start(part, host)

    def __iter__(self) -> Iterator[Tensor]:
        """float32 shards; with `fp32` kept on the device they are the reference itself, not
        copies."""
        for written, shape in zip(self.written(), self._shapes, strict=True):
            yield dequantize(written, shape)

    def written(self) -> Iterator[tuple[Tensor, ...]]:
        """Shards on the gradient's device, in the numbers they are kept in; the reference itself
        where it is kept there."""
        if self._copies is None:
            yield from self._kept
            return
        ahead = self._fetch(0) if self._kept else None
        for index in range(len(self._kept)):
            assert ahead is not None
            written, waits = ahead
            ahead = self._fetch(index + 1) if index + 1 < len(self._kept) else None
            for wait in waits:
                wait()
            yield written

    def _fetch(self, index: int) -> tuple[tuple[Tensor, ...], list[Wait]]:
        assert self._copies is not None
        hosts = self._kept[index]
        written = tuple(
            torch.empty(host.shape, dtype=host.dtype, device=self._device) for host in hosts
        )
        return written, [
            self._copies.start(host, part) for host, part in zip(hosts, written, strict=True)
        ]

    def on_device(self) -> list[Tensor]:
        """The tensors that it is kept in, where that is the gradient's memory."""
        return [] if self._copies is not None else [part for kept in self._kept for part in kept]

    def shards(self) -> list[Tensor]:
        """float32 shards, all at once and in the memory they are kept in: for a checkpoint."""
        if self._copies is not None:
            self._copies.finish()
        return [
            dequantize(written, shape)
            for written, shape in zip(self._kept, self._shapes, strict=True)
        ]


def _add_and_exchange(gradient: Tensor, reference: Tensor, factor: float) -> None:
    """gradient += factor reference, and reference = the gradient as it was: one sweep, without a
    copy of either in whole."""
    size = block_elements(gradient.device)
    for g, r in zip(gradient.view(-1).split(size), reference.view(-1).split(size), strict=True):
        before = g.clone()
        # In float32: of two bfloat16 tensors torch would round the product, too.
        g.add_(r.float(), alpha=factor)
        r.copy_(before)

"""The gradient of an earlier step, kept shard by shard: in which numbers, and in whose memory.

`for shard in reference` reads float32 tensors in the order of the gradient's shards, one at a time: a compressed or offloaded
reference never exists whole in float32. Offloaded, the next shard is on its way while the present one is used, and what `put`
was given is copied out beside the optimizer's step; on CUDA that takes device memory of the reference's size until the copies
are through, at a time when there are no activations.
"""

from __future__ import annotations

from collections.abc import Iterator

import torch
from torch import Tensor

from megatron_async_rl.controls.number_format import NumberFormat, decode, encode
from megatron_async_rl.controls.offload import Copies, Wait


class GradientReference:
    """copies: null keeps the reference where the gradient is. `device`: the gradient's."""

    def __init__(self, number_format: NumberFormat, device: torch.device, copies: Copies | None) -> None:
        self._format = number_format
        self._device = device
        self._copies = copies
        self._kept: list[tuple[Tensor, ...]] = []
        self._shapes: list[torch.Size] = []

    @property
    def in_place(self) -> bool:
        """What iterating yields is the memory that is kept."""
        return self._format == "fp32" and self._copies is None

    def put(self, index: int, gradient: Tensor) -> None:
        """Shard `index` becomes `gradient` (finite, copied). A new reference is put in order, from 0."""
        if index == len(self._kept):
            self._shapes.append(gradient.shape)
            written = encode(gradient, self._format)
            self._kept.append(written if self._copies is None else tuple(self._copies.host_memory(part) for part in written))
            self._write_out(index, written)
        elif self.in_place:
            self._kept[index][0].copy_(gradient)
        else:
            self._write_out(index, encode(gradient, self._format))

    def _write_out(self, index: int, written: tuple[Tensor, ...]) -> None:
        if self._copies is None:
            self._kept[index] = written
            return
        for part, host in zip(written, self._kept[index], strict=True):
            self._copies.start(part, host)

    def __iter__(self) -> Iterator[Tensor]:
        """float32 shards; with `fp32` kept on the device they are the reference itself, not copies."""
        if self._copies is None:
            for written, shape in zip(self._kept, self._shapes, strict=True):
                yield decode(written, shape)
            return
        ahead = self._fetch(0) if self._kept else None
        for index, shape in enumerate(self._shapes):
            assert ahead is not None
            written, waits = ahead
            ahead = self._fetch(index + 1) if index + 1 < len(self._kept) else None
            for wait in waits:
                wait()
            yield decode(written, shape)

    def _fetch(self, index: int) -> tuple[tuple[Tensor, ...], list[Wait]]:
        assert self._copies is not None
        hosts = self._kept[index]
        written = tuple(torch.empty(host.shape, dtype=host.dtype, device=self._device) for host in hosts)
        return written, [self._copies.start(host, part) for host, part in zip(hosts, written, strict=True)]

    def shards(self) -> list[Tensor]:
        """float32 shards, all at once and in the memory they are kept in: for a checkpoint."""
        if self._copies is not None:
            self._copies.finish()
        return [decode(written, shape) for written, shape in zip(self._kept, self._shapes, strict=True)]

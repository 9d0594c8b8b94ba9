"""Copies between a device and host memory beside the work that is running, each waited for before its target is read.

On CUDA a stream of its own does the copying, after the work that made the source; elsewhere a copy is a copy, at once. Copies
are made in the order they were started, so one that reads a place another writes comes after it.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Protocol

import torch
from torch import Tensor

Wait = Callable[[], None]


class Copies(Protocol):
    def start(self, source: Tensor, target: Tensor) -> Wait:
        """Begins target <- source (same shape and dtype). What is returned holds back the device's later work until it is done.

        Neither tensor may be changed before; a device tensor that is dropped keeps its memory until the copy is through.
        """
        ...

    def finish(self) -> None:
        """Returns when every copy started so far is done, so that this process may read host memory."""
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
    """Page-locked host memory and a stream of its own: the copy runs while the optimizer and the next forward do."""

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

"""One bucket of weights in a file that the sender writes once and any number of engine processes map.

Invariants:
- a bucket file is written completely before its `BucketRef` exists, and never written again;
- it is unlinked when its `with` block ends, also on failure; memory already mapped by a reader stays valid;
- the writer holds an exclusive `flock` on the file while it lives, so a file nobody holds belongs to a dead
  process, and `remove_stale` deletes exactly those. Process ids are not used: containers may share the directory.
"""

from __future__ import annotations

import fcntl
import mmap
import os
import uuid
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from math import prod
from pathlib import Path
from typing import Protocol

import torch
from torch import Tensor

PREFIX = "mar-weights-"
ALIGNMENT = 64
"""Bytes. Every tensor starts on a cache line, so it can be viewed as any dtype."""


class NamedTensors(Protocol):
    """What a transport sends: full tensors under their Hugging Face names."""

    @property
    def names(self) -> Sequence[str]: ...

    @property
    def tensors(self) -> Sequence[Tensor | None]: ...


@dataclass(frozen=True, kw_only=True)
class TensorEntry:
    """Where one tensor lies in the bucket file. `dtype` is torch's name (`bfloat16`); offset and nbytes in bytes."""

    name: str
    dtype: str
    shape: tuple[int, ...]
    offset: int
    nbytes: int


@dataclass(frozen=True, kw_only=True)
class BucketRef:
    """A complete bucket file and its manifest; small and picklable. `nbytes` is the size of the tensors alone."""

    path: str
    size: int
    nbytes: int
    entries: tuple[TensorEntry, ...]


@contextmanager
def write_bucket(bucket: NamedTensors, directory: Path) -> Iterator[BucketRef]:
    """Lend `bucket` as a file in `directory` for the length of the `with` block.

    Raises ValueError for a tensor that is absent or of a dtype torch has no byte view of, OSError when the directory is full.
    """
    entries: list[TensorEntry] = []
    end = 0
    for name, tensor in zip(bucket.names, bucket.tensors, strict=True):
        if tensor is None:
            raise ValueError(f"{name}: only the rank that holds the gathered tensors can send a bucket")
        offset = -(-end // ALIGNMENT) * ALIGNMENT
        nbytes = tensor.numel() * tensor.element_size()
        entries.append(
            TensorEntry(
                name=name, dtype=str(tensor.dtype).removeprefix("torch."), shape=tuple(tensor.shape), offset=offset, nbytes=nbytes
            )
        )
        end = offset + nbytes
    if end == 0:
        raise ValueError(f"a bucket of {len(entries)} tensors holds no bytes; there is nothing to send")
    path, descriptor = _create(directory)
    try:
        os.posix_fallocate(descriptor, 0, end)  # a full directory fails here with ENOSPC, not later with SIGBUS
        with mmap.mmap(descriptor, end) as memory:
            _copy(bucket.tensors, entries, memory)
        yield BucketRef(path=str(path), size=end, nbytes=sum(e.nbytes for e in entries), entries=tuple(entries))
    finally:
        path.unlink(missing_ok=True)
        os.close(descriptor)


def read_bucket(ref: BucketRef) -> Iterator[tuple[str, Tensor]]:
    """The tensors of `ref`, in manifest order, as private views of the mapped file: no copy is made.

    A view stays valid after the file is unlinked. Raises ValueError when the file is not the one the manifest describes.
    """
    with open(ref.path, "rb") as file:
        size = os.fstat(file.fileno()).st_size
        if size != ref.size:
            raise ValueError(f"{ref.path} holds {size} bytes, its manifest says {ref.size}")
        memory = mmap.mmap(file.fileno(), size, access=mmap.ACCESS_COPY)
    for entry in ref.entries:
        dtype = getattr(torch, entry.dtype)
        count = prod(entry.shape)
        flat = torch.frombuffer(memory, dtype=dtype, count=count, offset=entry.offset) if count else torch.empty(0, dtype=dtype)
        yield entry.name, flat.view(entry.shape)


def remove_stale(directory: Path) -> list[Path]:
    """Delete the bucket files of dead processes in `directory`; returns what was deleted. Live ones are left alone."""
    removed = []
    for path in sorted(directory.glob(f"{PREFIX}*")):
        try:
            descriptor = os.open(path, os.O_RDWR)
        except (FileNotFoundError, PermissionError):  # gone meanwhile, or another user's
            continue
        try:
            fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
            path.unlink(missing_ok=True)
            removed.append(path)
        except BlockingIOError:
            pass  # its writer lives
        finally:
            os.close(descriptor)
    return removed


def _copy(tensors: Sequence[Tensor | None], entries: Sequence[TensorEntry], memory: mmap.mmap) -> None:
    """In its own function so that no view of `memory` outlives it: a mapping with views cannot be closed."""
    for tensor, entry in zip(tensors, entries, strict=True):
        if tensor is not None and entry.nbytes:
            flat = torch.frombuffer(memory, dtype=tensor.dtype, count=tensor.numel(), offset=entry.offset)
            flat.view(tensor.shape).copy_(tensor.detach())


def _create(directory: Path) -> tuple[Path, int]:
    """A new, locked, still linked file. A sweeper may take and unlink it between creation and lock; then try again."""
    while True:
        path = directory / f"{PREFIX}{uuid.uuid4().hex}"
        descriptor = os.open(path, os.O_RDWR | os.O_CREAT | os.O_EXCL, 0o600)
        fcntl.flock(descriptor, fcntl.LOCK_EX)
        if os.fstat(descriptor).st_nlink:
            return path, descriptor
        os.close(descriptor)

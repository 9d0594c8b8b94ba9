"""Buckets of weights in files that the sender writes and any number of engine processes map.

Invariants:
- a `BucketRef` describes what its file holds, until the sender writes the file again: it does so only in place, with a
  manifest of the same size, and only while no engine reads (`publish.py` sees to that);
- both ends keep a file mapped: new pages of shared memory cost many times the copy itself, and kept ones nothing;
- a file goes with its `BucketFile`; memory already mapped by a reader stays valid;
- the writer holds an exclusive `flock` on the file while it lives, so a file nobody holds belongs to a dead
  process, and `stale_files.remove_stale` deletes exactly those. Process ids are not used: containers may share the directory.
"""

from __future__ import annotations

import fcntl
import mmap
import os
import uuid
import weakref
from collections.abc import Collection, Iterator, Sequence
from dataclasses import dataclass
from math import prod
from pathlib import Path
from typing import Protocol

import torch
from torch import Tensor

from megatron_async_rl.weights.stale_files import PREFIX

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


def manifest(bucket: NamedTensors) -> tuple[TensorEntry, ...]:
    """Where the tensors of `bucket` lie in its file. Raises ValueError for an absent tensor or a bucket without bytes."""
    entries: list[TensorEntry] = []
    end = 0
    for name, tensor in zip(bucket.names, bucket.tensors, strict=True):
        if tensor is None:
            raise ValueError(f"{name}: only the rank that holds the gathered tensors can send a bucket")
        offset = -(-end // ALIGNMENT) * ALIGNMENT
        nbytes = tensor.numel() * tensor.element_size()
        dtype = str(tensor.dtype).removeprefix("torch.")
        entries.append(TensorEntry(name=name, dtype=dtype, shape=tuple(tensor.shape), offset=offset, nbytes=nbytes))
        end = offset + nbytes
    if end == 0:
        raise ValueError(f"a bucket of {len(entries)} tensors holds no bytes; there is nothing to send")
    return tuple(entries)


def manifest_size(entries: Sequence[TensorEntry]) -> int:
    return max(entry.offset + entry.nbytes for entry in entries)


class BucketFile:
    """The sender's end of one file in `directory`, of `size` bytes, all of them reserved. Deleted by `close`, or at exit."""

    def __init__(self, directory: Path, size: int) -> None:
        """Raises OSError when the directory is full."""
        self.size = size
        self.path, descriptor = _create(directory)
        self.close = weakref.finalize(self, _discard, self.path, descriptor)
        try:
            os.posix_fallocate(descriptor, 0, size)  # a full directory fails here with ENOSPC, not later with SIGBUS
            self._memory = mmap.mmap(descriptor, size)
        except BaseException:
            self.close()
            raise

    def views(self, entries: Sequence[TensorEntry]) -> Iterator[Tensor]:
        """The places of `entries` in the file, to be written."""
        return (_view(self._memory, entry) for entry in entries)

    def ref(self, entries: tuple[TensorEntry, ...]) -> BucketRef:
        return BucketRef(path=str(self.path), size=self.size, nbytes=sum(entry.nbytes for entry in entries), entries=entries)


class BucketReader:
    """An engine's end: files once read stay mapped, until `keep` says that they are out of use."""

    def __init__(self) -> None:
        self._mapped: dict[str, mmap.mmap] = {}

    def read(self, ref: BucketRef) -> Iterator[tuple[str, Tensor]]:
        """The tensors of `ref`, in manifest order, as private views of the mapped file: no copy is made.

        A view shows what the file holds, until it is written to or the sender fills the file again.
        Raises ValueError when the file is not the one the manifest describes.
        """
        size = os.stat(ref.path).st_size
        if size != ref.size:
            raise ValueError(f"{ref.path} holds {size} bytes, its manifest says {ref.size}")
        memory = self._mapped.get(ref.path)
        if memory is None:
            with open(ref.path, "rb") as file:
                memory = self._mapped[ref.path] = mmap.mmap(file.fileno(), size, access=mmap.ACCESS_COPY)
        for entry in ref.entries:
            yield entry.name, _view(memory, entry)

    def keep(self, paths: Collection[str]) -> None:
        """Lets go of every other file; its memory is freed with the last view of it."""
        self._mapped = {path: memory for path, memory in self._mapped.items() if path in paths}


def _view(memory: mmap.mmap, entry: TensorEntry) -> Tensor:
    dtype = getattr(torch, entry.dtype)
    count = prod(entry.shape)
    flat = torch.frombuffer(memory, dtype=dtype, count=count, offset=entry.offset) if count else torch.empty(0, dtype=dtype)
    return flat.view(entry.shape)


def _create(directory: Path) -> tuple[Path, int]:
    """A new, locked, still linked file. A sweeper may take and unlink it between creation and lock; then try again."""
    while True:
        path = directory / f"{PREFIX}{uuid.uuid4().hex}"
        descriptor = os.open(path, os.O_RDWR | os.O_CREAT | os.O_EXCL, 0o600)
        fcntl.flock(descriptor, fcntl.LOCK_EX)
        if os.fstat(descriptor).st_nlink:
            return path, descriptor
        os.close(descriptor)


def _discard(path: Path, descriptor: int) -> None:
    path.unlink(missing_ok=True)
    os.close(descriptor)

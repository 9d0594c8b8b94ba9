"""The carrier `shared_memory`: files that the sender writes and any number of engine processes of
the same machine map.

Invariants:
- a file is written again only in place, with a manifest of the same size;
- both ends keep a file mapped: new pages of shared memory cost many times the copy itself, and kept
  ones nothing;
- a file goes with its `BucketFile`; memory already mapped by a reader stays valid;
- the writer holds an exclusive `flock` on the file while it lives, so a file nobody holds belongs
  to a dead process, and `stale_files.remove_stale` deletes exactly those. Process ids are not used:
  containers may share the directory.
"""

from __future__ import annotations

import fcntl
import mmap
import os
import uuid
import weakref
from collections.abc import Collection, Iterator, Sequence
from math import prod
from pathlib import Path

import torch
from torch import Tensor

from megatron_async_rl.weights.manifest import BucketRef, TensorEntry
from megatron_async_rl.weights.stale_files import PREFIX, SHARED_MEMORY
from megatron_async_rl.weights.transport import Carrier, Place, Reader


class BucketFile(Place):
    """The sender's end of one file in `directory`, of `size` bytes, all of them reserved. Deleted
    by `close`, or at exit."""

    def __init__(self, directory: Path, size: int) -> None:
        """Raises OSError when the directory is full."""
        self.size = size
        self.path, descriptor = _create(directory)
        self._discard = weakref.finalize(self, _discard, self.path, descriptor)
        try:
            os.posix_fallocate(
                descriptor, 0, size
            )  # a full directory fails here with ENOSPC, not later with SIGBUS
            self._memory = mmap.mmap(descriptor, size)
        except BaseException:
            self.close()
            raise

    def close(self) -> None:
        self._discard()

    def views(self, entries: Sequence[TensorEntry]) -> Iterator[Tensor]:
        """The places of `entries` in the file, to be written."""
        return (_view(self._memory, entry) for entry in entries)

    def ref(self, entries: tuple[TensorEntry, ...]) -> BucketRef:
        return BucketRef(
            path=str(self.path),
            size=self.size,
            nbytes=sum(entry.nbytes for entry in entries),
            entries=entries,
        )


class BucketReader(Reader):
    """An engine's end: files once read stay mapped, until `keep` says that they are out of use."""

    def __init__(self) -> None:
        self._mapped: dict[str, mmap.mmap] = {}

    def read(self, ref: BucketRef) -> Iterator[tuple[str, Tensor]]:
        """The tensors of `ref`, in manifest order, as private views of the mapped file: no copy is
        made.

        A view shows what the file holds, until it is written to or the sender fills the file again.
        Raises ValueError when the file is not the one the manifest describes.
        """
        size = os.stat(ref.path).st_size
        if size != ref.size:
            raise ValueError(f"{ref.path} holds {size} bytes, its manifest says {ref.size}")
        memory = self._mapped.get(ref.path)
        if memory is None:
            with open(ref.path, "rb") as file:
                memory = self._mapped[ref.path] = mmap.mmap(
                    file.fileno(), size, access=mmap.ACCESS_COPY
                )
        for entry in ref.entries:
            yield entry.name, _view(memory, entry)

    def keep(self, paths: Collection[str]) -> None:
        """Lets go of every other file; its memory is freed with the last view of it."""
        self._mapped = {path: memory for path, memory in self._mapped.items() if path in paths}


class SharedMemory(Carrier):
    """Files in `directory`."""

    def __init__(self, directory: Path = SHARED_MEMORY) -> None:
        self._directory = directory

    def place(self, size: int) -> BucketFile:
        return BucketFile(self._directory, size)

    def reader(self) -> BucketReader:
        return BucketReader()


CARRIER = SharedMemory


def _view(memory: mmap.mmap, entry: TensorEntry) -> Tensor:
    dtype = getattr(torch, entry.dtype)
    count = prod(entry.shape)
    flat = (
        torch.frombuffer(memory, dtype=dtype, count=count, offset=entry.offset)
        if count
        else torch.empty(0, dtype=dtype)
    )
    return flat.view(entry.shape)


def _create(directory: Path) -> tuple[Path, int]:
    """A new, locked, still linked file. A sweeper may take and unlink it between creation and lock;
    then try again."""
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

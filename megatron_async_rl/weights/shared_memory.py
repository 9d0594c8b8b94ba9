"""The carrier `shared_memory`: files of one process that ranks and engine processes of the same
machine map.

Invariants:
- a file is written again only in place, with a manifest of the same size;
- all ends keep a file mapped: new pages of shared memory cost many times the copy itself, and
  mapped ones cost nothing;
- a file is deleted with its `BucketFile`; memory that is already mapped stays valid;
- the process holds an exclusive `flock` on its file while it lives, so an unlocked file belongs to
  a dead process, and `run_folder.remove_stale` deletes exactly those. Process ids are not used,
  because containers may share the directory.
"""

from __future__ import annotations

import fcntl
import mmap
import os
import shutil
import socket
import uuid
import weakref
from collections.abc import Collection, Iterator
from math import prod
from pathlib import Path

import torch
from torch import Tensor

from megatron_async_rl.watchdog.run_folder import SHARED_MEMORY, WEIGHTS_PREFIX
from megatron_async_rl.weights.manifest import BucketRef, TensorEntry
from megatron_async_rl.weights.transport import (
    BucketMemory,
    Carrier,
    TransportReader,
    TransportWriter,
)


class SharedMemoryFull(OSError):
    """There is not enough memory for a bucket."""

    fix = (
        "enlarge /dev/shm (docker run --shm-size), or remove what others left there: two versions"
        " of the model have to fit"
    )


class BucketFile(BucketMemory):
    """File in `directory` with `size` reserved bytes. Deleted by `close`, or at exit."""

    def __init__(self, directory: Path, size: int) -> None:
        """Raise SharedMemoryFull if the memory cannot be reserved."""
        self.size = size
        self.path, descriptor = _create(directory)
        # Runs at exit, too, if `close` was never called.
        self._discard = weakref.finalize(self, _discard, self.path, descriptor)
        try:
            os.posix_fallocate(
                descriptor, 0, size
            )  # a full directory fails here with ENOSPC, not later with SIGBUS
        except OSError as error:
            self.close()
            free = shutil.disk_usage(directory).free
            raise SharedMemoryFull(
                f"{directory} of {socket.gethostname()} has {free / 2**20:.1f} MiB free, too few"
                f" for a bucket of weights of {size / 2**20:.1f} MiB: {error}"
            ) from error
        except BaseException:
            self.close()
            raise

    def close(self) -> None:
        self._discard()


class _MappedFiles:
    """Files that stay mapped until `keep` declares them unused. access: mmap's."""

    def __init__(self, access: int) -> None:
        self._access = access
        self._mapped: dict[str, mmap.mmap] = {}

    def map(self, ref: BucketRef) -> mmap.mmap:
        """Return the file's mapping. Raises ValueError if the file is not the one described by
        `ref`."""
        # A file of another size belongs to another version.
        size = os.stat(ref.path).st_size
        if size != ref.size:
            raise ValueError(f"{ref.path} holds {size} bytes, its manifest has {ref.size}")
        memory = self._mapped.get(ref.path)
        if memory is None:
            with open(ref.path, "r+b" if self._access == mmap.ACCESS_WRITE else "rb") as file:
                memory = mmap.mmap(file.fileno(), size, access=self._access)
            self._mapped[ref.path] = memory
        return memory

    def keep(self, paths: Collection[str]) -> None:
        """Unmap every other file; its memory is freed with the last view of it."""
        # No `close`: a tensor may still be a view of the mapping.
        self._mapped = {path: memory for path, memory in self._mapped.items() if path in paths}


class BucketWriter(TransportWriter):
    """A rank's end of the carrier."""

    def __init__(self) -> None:
        self._files = _MappedFiles(mmap.ACCESS_WRITE)

    def reaches(self, path: str) -> bool:
        return os.access(path, os.R_OK | os.W_OK)

    def view(self, ref: BucketRef, entry: TensorEntry) -> Tensor:
        """Return a view of the tensor. Raises ValueError if `ref` does not describe the file."""
        return _view(self._files.map(ref), entry)

    def keep(self, paths: Collection[str]) -> None:
        self._files.keep(paths)


class BucketReader(TransportReader):
    """An engine's end of the carrier."""

    def __init__(self) -> None:
        # Copy on write, so that an engine cannot change the memory that others read.
        self._files = _MappedFiles(mmap.ACCESS_COPY)

    def read(self, ref: BucketRef) -> Iterator[tuple[str, Tensor]]:
        """Yield the tensors of `ref`, in manifest order, as private views of the mapped file,
        without a copy.

        A view shows the file's content until the view is written to or the file is filled again.
        Raises ValueError if `ref` does not describe the file.
        """
        memory = self._files.map(ref)
        for entry in ref.entries:
            yield entry.name, _view(memory, entry)

    def keep(self, paths: Collection[str]) -> None:
        self._files.keep(paths)


class SharedMemory(Carrier):
    """Carrier with files in `directory`."""

    def __init__(self, directory: Path = SHARED_MEMORY) -> None:
        self._directory = directory

    def place(self, size: int) -> BucketFile:
        return BucketFile(self._directory, size)

    def writer(self) -> BucketWriter:
        return BucketWriter()

    def reader(self) -> BucketReader:
        return BucketReader()


CARRIER = SharedMemory


def _view(memory: mmap.mmap, entry: TensorEntry) -> Tensor:
    dtype = getattr(torch, entry.dtype)
    count = prod(entry.shape)
    # torch.frombuffer rejects a count of 0.
    flat = (
        torch.frombuffer(memory, dtype=dtype, count=count, offset=entry.offset)
        if count
        else torch.empty(0, dtype=dtype)
    )
    return flat.view(entry.shape)


def _create(directory: Path) -> tuple[str, int]:
    """Return a new, locked file that still has its name. A sweeper may remove the file between its
    creation and the lock; then try again."""
    while True:
        path = directory / f"{WEIGHTS_PREFIX}{uuid.uuid4().hex}"
        descriptor = os.open(path, os.O_RDWR | os.O_CREAT | os.O_EXCL, 0o600)
        # Held until the process ends: it shows that the file is in use.
        fcntl.flock(descriptor, fcntl.LOCK_EX)
        if os.fstat(descriptor).st_nlink:
            return str(path), descriptor
        os.close(descriptor)


def _discard(path: str, descriptor: int) -> None:
    Path(path).unlink(missing_ok=True)
    os.close(descriptor)

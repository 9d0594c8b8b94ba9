"""Interface of weight carriers: ranks write parts of named tensors into the buckets of a carrier,
and an engine's workers read them from there.

    every rank: staging.py --> bucket   BucketRef (small, picklable)   bucket --> engine

A carrier is one file, `weights/<name>.py`, which assigns its class to `CARRIER`, and one line of
`config.weights.CARRIERS`: its name and its capabilities. No other code tests for its name. The
capabilities name the agents that copy versions to other machines: those of an existing carrier, or
another file (`agents.py`).

Invariants:
- a `BucketRef` describes the content of its bucket until the ranks write the bucket again, which
  they do only while no engine reads (`staging.py`);
- tensors are read in the order and with the names, dtypes and shapes with which they were written.
"""

from __future__ import annotations

import importlib
from abc import ABC, abstractmethod
from collections.abc import Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass
from math import prod
from types import ModuleType
from typing import Protocol, Self

import torch
from torch import Tensor

from megatron_async_rl.weights.digest import matrix_shape, tensor_digest
from megatron_async_rl.weights.manifest import BucketRef, TensorEntry, WeightUpdate

ALIGNMENT = 64
"""Alignment in bytes. Every tensor starts on a cache line, so it can be viewed as any dtype."""


@dataclass(frozen=True)
class TensorSpec:
    """A full tensor under its Hugging Face name."""

    name: str
    dtype: torch.dtype
    shape: tuple[int, ...]

    @classmethod
    def of(cls, name: str, tensor: Tensor) -> TensorSpec:
        return cls(name, tensor.dtype, tuple(tensor.shape))

    @property
    def nbytes(self) -> int:
        return prod(self.shape) * self.dtype.itemsize


@dataclass(frozen=True, eq=False)
class ShardSlice:
    """Rows and columns of the tensor `name`, as a matrix, from (`row`, `column`) on. A vector is
    one row; a tensor of more dimensions has the size of its last dimension as number of columns."""

    name: str
    row: int
    column: int
    tensor: Tensor

    @classmethod
    def whole(cls, name: str, tensor: Tensor) -> ShardSlice:
        return cls(name, 0, 0, tensor.reshape(matrix_shape(tensor.shape)))


class BucketMemory(ABC):
    """Memory of one bucket, of `size` bytes, owned by the process that allocated it. `path`: its
    name in all processes."""

    path: str
    size: int

    @abstractmethod
    def close(self) -> None:
        """Free the bucket's memory. A reader's mapping stays valid."""


class TransportWriter(ABC):
    """A rank's end of the carrier."""

    @abstractmethod
    def reaches(self, path: str) -> bool:
        """Return True if this rank can write to the bucket at `path`."""

    @abstractmethod
    def view(self, ref: BucketRef, entry: TensorEntry) -> Tensor:
        """Return a writable view of one tensor of the bucket."""

    @abstractmethod
    def keep(self, paths: Collection[str]) -> None:
        """Release every bucket that is not at one of `paths`."""


class TransportReader(ABC):
    """An engine worker's end of the carrier."""

    lasting = True
    """True if a bucket's content is valid until the update ends; else it is valid until the worker
    requests the next bucket."""

    @abstractmethod
    def read(self, ref: BucketRef) -> Iterator[tuple[str, Tensor]]:
        """Yield the tensors of `ref`, in order. A tensor is a view of the bucket, valid until the
        sender writes the bucket again."""

    @abstractmethod
    def keep(self, paths: Collection[str]) -> None:
        """Release every bucket that is not at one of `paths`."""


class Carrier(ABC):
    """Carrier of weights to engines: the memory of buckets, and both ends."""

    @classmethod
    def on(cls, device: torch.device) -> Self:
        """Return the carrier of weights that are on `device`."""
        return cls()

    @abstractmethod
    def place(self, size: int) -> BucketMemory:
        """Allocate a bucket. Raises OSError if there is no room."""

    @abstractmethod
    def writer(self) -> TransportWriter: ...

    @abstractmethod
    def reader(self) -> TransportReader: ...


class VersionReceiver(Protocol):
    """A worker's end of a carrier that sends every version to each engine: the class `Receiver` of
    the carrier's file, constructed with the worker's number in the engine and its device."""

    def receive(self, update: WeightUpdate) -> None:
        """Begin to receive a version, and return."""

    def close(self) -> None:
        """Free the memory."""


def carrier(name: str) -> Carrier:
    """Return the carrier of that name (`weights.transport` of the configuration)."""
    made: Carrier = carrier_module(name).CARRIER()
    return made


def carrier_module(name: str) -> ModuleType:
    # Imported on demand, because a carrier may need libraries that the others do not.
    return importlib.import_module(f"megatron_async_rl.weights.{name}")


def whole_bucket(ref: BucketRef) -> TensorEntry:
    """Return the bucket as one tensor of bytes."""
    return TensorEntry(name="", dtype="uint8", shape=(ref.size,), offset=0, nbytes=ref.size)


def view_of(memory: Tensor, entry: TensorEntry) -> Tensor:
    """Return one tensor of the bucket in `memory`, [bytes] uint8."""
    # A view: nothing is copied.
    flat = memory[entry.offset : entry.offset + entry.nbytes]
    return flat.view(getattr(torch, entry.dtype)).view(entry.shape)


def damaged_tensor(
    writer: TransportWriter, ref: BucketRef, digests: Mapping[str, str]
) -> str | None:
    """Return the name of a tensor of the bucket that differs from the staged one; None if all are
    equal."""
    for entry in ref.entries:
        # A tensor that has no digest counts as damaged.
        if tensor_digest(writer.view(ref, entry)) != digests.get(entry.name):
            return entry.name
    return None


def entries_of(bucket: Sequence[TensorSpec]) -> tuple[TensorEntry, ...]:
    """Return the positions of the tensors of `bucket`. Raises ValueError for a bucket without
    bytes."""
    entries: list[TensorEntry] = []
    end = 0
    for spec in bucket:
        # Rounded up, so that a view of any dtype starts at a whole element.
        offset = -(-end // ALIGNMENT) * ALIGNMENT
        entries.append(
            TensorEntry(
                name=spec.name,
                dtype=str(spec.dtype).removeprefix("torch."),
                shape=spec.shape,
                offset=offset,
                nbytes=spec.nbytes,
            )
        )
        end = offset + spec.nbytes
    # Memory of zero bytes can be neither allocated nor mapped.
    if end == 0:
        raise ValueError(
            f"a bucket of {len(entries)} tensors holds no bytes; there is nothing to send"
        )
    return tuple(entries)


def size_of(entries: Sequence[TensorEntry]) -> int:
    return max(entry.offset + entry.nbytes for entry in entries)

"""How weights travel: a sender writes buckets of named tensors into a carrier, and an engine's
workers read them out of it.

    rank 0: staging.py --write--> Carrier   BucketRef (small, picklable)   Carrier --read--> engine

A carrier is one file, `weights/<name>.py`, with its class under the name `CARRIER`, and one line:
its name in `config.schema.Transport`.

Invariants:
- a `BucketRef` describes what its bucket holds until the sender writes the bucket again, which it
  does only while no engine reads (`staging.py`);
- tensors come out under the names, with the dtypes and shapes, and in the order in which they went
  in.
"""

from __future__ import annotations

import importlib
from abc import ABC, abstractmethod
from collections.abc import Collection, Iterator, Sequence
from typing import Protocol

import torch
import xxhash
from torch import Tensor

from megatron_async_rl.weights.manifest import BucketRef, TensorEntry

ALIGNMENT = 64
"""Bytes. Every tensor starts on a cache line, so it can be viewed as any dtype."""


class NamedTensors(Protocol):
    """Full tensors under their Hugging Face names."""

    @property
    def names(self) -> Sequence[str]: ...

    @property
    def tensors(self) -> Sequence[Tensor | None]: ...


class Place(ABC):
    """The sender's end of one bucket, of `size` bytes."""

    size: int

    @abstractmethod
    def views(self, entries: Sequence[TensorEntry]) -> Iterator[Tensor]:
        """The places of `entries` in the bucket, to be written."""

    @abstractmethod
    def ref(self, entries: tuple[TensorEntry, ...]) -> BucketRef: ...

    @abstractmethod
    def close(self) -> None:
        """Gives the bucket's memory back. What a reader still maps stays valid."""


class Reader(ABC):
    """An engine worker's end."""

    @abstractmethod
    def read(self, ref: BucketRef) -> Iterator[tuple[str, Tensor]]:
        """The tensors of `ref`, in their order. A tensor shows what the bucket holds until the
        sender writes it again."""

    @abstractmethod
    def keep(self, paths: Collection[str]) -> None:
        """Lets go of every bucket that is not at one of `paths`."""


class Carrier(ABC):
    """Both ends of one way for weights to travel."""

    @abstractmethod
    def place(self, size: int) -> Place:
        """Raises OSError when there is no room."""

    @abstractmethod
    def reader(self) -> Reader: ...


def carrier(name: str) -> Carrier:
    """The carrier of that name: `weights.transport` of the configuration."""
    made: Carrier = importlib.import_module(f"megatron_async_rl.weights.{name}").CARRIER()
    return made


def entries_of(bucket: NamedTensors) -> tuple[TensorEntry, ...]:
    """Where the tensors of `bucket` lie in it. Raises ValueError for an absent tensor or a bucket
    without bytes."""
    entries: list[TensorEntry] = []
    end = 0
    for name, tensor in zip(bucket.names, bucket.tensors, strict=True):
        if tensor is None:
            raise ValueError(
                f"{name}: only the rank that holds the gathered tensors can send a bucket"
            )
        offset = -(-end // ALIGNMENT) * ALIGNMENT
        nbytes = tensor.numel() * tensor.element_size()
        entries.append(
            TensorEntry(
                name=name,
                dtype=str(tensor.dtype).removeprefix("torch."),
                shape=tuple(tensor.shape),
                offset=offset,
                nbytes=nbytes,
            )
        )
        end = offset + nbytes
    if end == 0:
        raise ValueError(
            f"a bucket of {len(entries)} tensors holds no bytes; there is nothing to send"
        )
    return tuple(entries)


def size_of(entries: Sequence[TensorEntry]) -> int:
    return max(entry.offset + entry.nbytes for entry in entries)


def tensor_digest(tensor: Tensor) -> str:
    """32 hexadecimal digits over dtype, shape and elements in row-major order; device and strides
    do not matter.

    XXH3 in 128 bits: it reads as fast as memory does, and two different tensors agree with
    probability 2^-128. It guards against wrong, missing, swapped and damaged bytes; it is no
    signature against somebody who makes bytes to fit. A CUDA tensor is copied to the host first.
    """
    state = xxhash.xxh3_128(f"{tensor.dtype}{list(tensor.shape)}".encode())
    flat = tensor.detach().to("cpu").contiguous().reshape(-1)
    if flat.numel():
        state.update(flat.view(torch.uint8).numpy().data)
    return state.hexdigest()

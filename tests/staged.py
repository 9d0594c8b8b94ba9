"""Whole tensors as a staged version, in buckets of the caller's choice."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence

from torch import Tensor

from megatron_async_rl.weights.manifest import Manifest
from megatron_async_rl.weights.staging import Staging
from megatron_async_rl.weights.transport import ShardSlice, TensorSpec

Bucket = Mapping[str, Tensor]


def specs(buckets: Iterable[Bucket]) -> list[list[TensorSpec]]:
    return [[TensorSpec.of(name, tensor) for name, tensor in b.items()] for b in buckets]


def parts(buckets: Iterable[Bucket]) -> Iterator[ShardSlice]:
    return (ShardSlice.whole(name, tensor) for bucket in buckets for name, tensor in bucket.items())


def stage(staging: Staging, version: int, buckets: Sequence[Bucket]) -> Manifest:
    return staging.stage(version, specs(buckets), parts(buckets))


def flip_a_bit(manifest: Manifest, name: str) -> None:
    """Flip a bit of the staged tensor `name`, whose version is in one bucket."""
    (staged,) = manifest.buckets
    (entry,) = (entry for entry in staged.entries if entry.name == name)
    with open(staged.path, "r+b") as file:
        file.seek(entry.offset + 5)
        byte = file.read(1)[0]
        file.seek(entry.offset + 5)
        file.write(bytes([byte ^ 1]))

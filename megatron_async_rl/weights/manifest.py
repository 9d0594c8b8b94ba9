"""Description of a staged version: the locations and the expected digests of its tensors. Loads no
torch, because the controller passes it on.

Invariant: a `BucketRef` describes the content of its bucket until the sender writes the bucket
again, which it does only while no engine reads (`staging.py`).
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from datetime import timedelta
from typing import Any

IN_FLIGHT = 2
"""Number of buckets in flight, from the sender to an engine and to each of its workers."""


@dataclass(frozen=True, kw_only=True)
class TensorEntry:
    """Position of one tensor in its bucket. `dtype` is torch's name (`bfloat16`); offset and
    nbytes in bytes."""

    name: str
    dtype: str
    shape: tuple[int, ...]
    offset: int
    nbytes: int


@dataclass(frozen=True, kw_only=True)
class BucketRef:
    """Location of a complete bucket. `nbytes` is the size of the tensors alone."""

    path: str
    size: int
    nbytes: int
    entries: tuple[TensorEntry, ...]

    def as_plain(self) -> dict[str, Any]:
        """Return plain values, which vLLM's message queue accepts."""
        # The queue accepts no classes of this package.
        return {**vars(self), "entries": [vars(entry) for entry in self.entries]}


@dataclass(frozen=True, kw_only=True)
class Manifest:
    """One staged version: locations of its buckets, and name -> digest of every tensor. `seconds`:
    duration of staging, including gathering. `on_demand`: the buckets do not exist yet; the ranks
    fill each when engines request it (cuda_ipc.py)."""

    buckets: tuple[BucketRef, ...]
    digests: Mapping[str, str]
    seconds: float = 0.0
    on_demand: bool = False

    @property
    def paths(self) -> list[str]:
        return [bucket.path for bucket in self.buckets]

    @property
    def nbytes(self) -> int:
        """Bytes of the tensors, each once."""
        return sum(bucket.nbytes for bucket in self.buckets)


@dataclass(frozen=True, kw_only=True)
class StagedCopy:
    """A version in memory other than rank 0's. `nbytes`: bytes received for it, including repeated
    buckets. `seconds`: duration of the transfer."""

    manifest: Manifest
    nbytes: int
    seconds: float


@dataclass(frozen=True, kw_only=True)
class Meeting:
    """Rendezvous of a communicator's members: the sender, which is its rank 0, and the workers
    of one engine. `limit_s`: longest wait for a member, or for a bucket."""

    host: str
    port: int
    workers: int
    limit_s: float

    @property
    def limit(self) -> timedelta:
        return timedelta(seconds=self.limit_s)


@dataclass(frozen=True, kw_only=True)
class WeightUpdate:
    """A version that the workers of an engine must receive. `kept`: version in their memory that
    stays; None if none does."""

    meeting: Meeting
    version: int
    manifest: Manifest
    kept: int | None


class WeightMismatch(RuntimeError):
    """An engine loaded another tensor than the trainer sent. `None` stands for a tensor that one
    side does not have."""

    def __init__(self, name: str, engine: str, sent: str | None, loaded: str | None) -> None:
        super().__init__(
            f"weights of {engine} are not the trainer's: tensor {name} was sent as {sent} and"
            f" loaded as {loaded}"
        )
        self.name = name
        self.engine = engine
        self.sent = sent
        self.loaded = loaded

    def __reduce__(self) -> tuple[Any, ...]:
        # The message alone would not rebuild the fields in another process.
        return (WeightMismatch, (self.name, self.engine, self.sent, self.loaded), self.__dict__)


def require_equal(engine: str, sent: Mapping[str, str], loaded: Mapping[str, str]) -> None:
    """Raise WeightMismatch for the first tensor, by name, whose digests differ or that only one
    side has."""
    # Names of both sides: a missing tensor and an unknown one count as different.
    for name in sorted(sent.keys() | loaded.keys()):
        if sent.get(name) != loaded.get(name):
            raise WeightMismatch(name, engine, sent.get(name), loaded.get(name))

"""Complete versions of the weights in memory that every engine of this machine can read: for an
update, after a restart, or when an engine joins.

    rank 0 allocates memory       every rank writes its parts,    the digests are added up over
    for a version, and sends      and computes their digests      all ranks: there is a manifest,
    its paths to all ranks        from its own memory             and the version, only if every
                                                                  tensor is whole

Invariants:
- there are two slots, written alternately: staging a version leaves the previous one unchanged, for
  engines that are reading it, and overwrites the one before that, but only once no engine reads it
  any more (`when_free`);
- a version is staged completely or not at all;
- a digest is computed from the sender's own memory, so nothing between that memory and an engine's
  needs to be trusted;
- each tensor is sent once; no tensor passes through another rank;
- buckets of the same sizes are reused: after the first time they are written at memory speed.
"""

from __future__ import annotations

import contextlib
import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from math import prod
from typing import Protocol

import torch
from torch import Tensor

from megatron_async_rl.weights.digest import digest_text, matrix_shape, partial_digests
from megatron_async_rl.weights.manifest import BucketRef, Manifest, TensorEntry
from megatron_async_rl.weights.transport import (
    BucketMemory,
    Carrier,
    ShardSlice,
    TensorSpec,
    carrier_module,
    entries_of,
    size_of,
)

PROBE_BYTES = 64


class StagingRanks(Protocol):
    """The ranks that stage a version together: the policy's layout."""

    @property
    def rank(self) -> int: ...
    def from_rank_zero[T](self, make: Callable[[], T]) -> T: ...
    def gathered[T](self, mine: T) -> list[T]: ...
    def summed(self, numbers: Tensor) -> Tensor: ...


class SingleProcess:
    """A process that stages by itself."""

    rank = 0

    def from_rank_zero[T](self, make: Callable[[], T]) -> T:
        return make()

    def gathered[T](self, mine: T) -> list[T]:
        return [mine]

    def summed(self, numbers: Tensor) -> Tensor:
        return numbers


class NotStaged(RuntimeError):
    """Other ranks could not write their parts of a version."""

    consequence = True


class WeightDigests:
    """Digests of complete versions, for a run without engines. Every rank of `ranks` makes the
    object. reached: for each rank, True if it contributes its parts."""

    def __init__(self, ranks: StagingRanks | None = None) -> None:
        """Collective."""
        self._ranks: StagingRanks = ranks or SingleProcess()
        self._entries: tuple[Sequence[Sequence[TensorSpec]], list[TensorEntry]] = [], []
        """Buckets of the last version, and their entries."""
        self.reached = self._reached()

    def _reached(self) -> list[bool]:
        return self._ranks.gathered(True)

    def digests(
        self,
        version: int,
        buckets: Sequence[Sequence[TensorSpec]],
        parts: Iterable[ShardSlice],
    ) -> dict[str, str]:
        """Return the digest of every tensor by name. Arguments and errors: see `Staging.stage`.
        Collective."""
        if self._entries[0] is not buckets:
            entries = entries_of_version(version, buckets)
            self._entries = buckets, [entry for bucket in entries for entry in bucket]
        return self._digests(version, self._entries[1], parts, lambda _: None)

    def _digests(
        self,
        version: int,
        entries: Sequence[TensorEntry],
        parts: Iterable[ShardSlice],
        put: Callable[[ShardSlice], None],
    ) -> dict[str, str]:
        """Call `put` with each of this rank's parts; return the digests over all ranks."""
        number = {entry.name: index for index, entry in enumerate(entries)}
        digests = {}
        for entry, (d1, d2, elements) in zip(entries, self._sums(number, parts, put), strict=True):
            # The counts add up over ranks, so a part that is missing or repeated is detected.
            if elements != prod(entry.shape):
                raise ValueError(
                    f"the ranks wrote {elements} of the {prod(entry.shape)} elements of"
                    f" {entry.name} in the update to version {version}"
                )
            dtype = getattr(torch, entry.dtype)
            digests[entry.name] = digest_text(dtype, entry.shape, (d1, d2, elements))
        return digests

    def _sums(
        self,
        number: Mapping[str, int],
        parts: Iterable[ShardSlice],
        put: Callable[[ShardSlice], None],
    ) -> list[list[int]]:
        """Return [d1, d2, elements] of every tensor, over all ranks. Raises the error of `put`, and
        NotStaged if only another rank's raised one."""
        names: list[int] = []
        remaining = iter(parts)

        def placed() -> Iterator[tuple[Tensor, int, int]]:
            for part in remaining:
                put(part)
                names.append(number[part.name])
                yield part.tensor, part.row, part.column

        sums = torch.zeros(len(number) + 1, 3, dtype=torch.int64)
        failure: Exception | None = None
        try:
            digests = partial_digests(placed())
            sums.index_add_(0, torch.tensor(names, dtype=torch.int64), digests)
        except Exception as error:  # noqa: BLE001 - raised once the other ranks know
            failure = error
            sums[-1] = 1
            # Other ranks may still be writing their parts, which may need this rank's. A second
            # error must not keep this rank from the reduction, in which the others wait.
            with contextlib.suppress(Exception):
                for _ in remaining:
                    pass
        # One reduction carries digests and failures, so all ranks raise together or none does.
        *found, (failed, _, _) = self._ranks.summed(sums).tolist()
        if failure is not None:
            raise failure
        if failed:
            raise NotStaged(f"{failed} other ranks could not write their parts of the weights")
        return found


def entries_of_version(
    version: int, buckets: Sequence[Sequence[TensorSpec]]
) -> list[tuple[TensorEntry, ...]]:
    """Return the entries of each bucket. Raises ValueError for an update without buckets, or with a
    repeated tensor."""
    entries = [entries_of(bucket) for bucket in buckets]
    if not entries:
        raise ValueError(f"the update to version {version} has no buckets")
    seen = set[str]()
    for entry in (entry for bucket in entries for entry in bucket):
        if entry.name in seen:
            raise ValueError(f"tensor {entry.name} comes twice in one update")
        seen.add(entry.name)
    return entries


class Staging(WeightDigests):
    """Staged versions of one carrier. Every rank of `ranks` makes the object, and one thread of
    each uses it; rank 0's object owns the memory, which `close` frees. reached: for each rank, True
    if it can write to that memory."""

    on_demand = False
    """True if a bucket exists only once `fill` has filled it, while engines load."""

    def __init__(self, carrier: Carrier, ranks: StagingRanks | None = None) -> None:
        """Collective. Raises OSError if even a first byte of memory cannot be allocated."""
        self._carrier = carrier
        self._slots = (StagingSlot(carrier), StagingSlot(carrier))
        self._next = 0
        self._writer = carrier.writer()
        self._paths: list[str] = []
        super().__init__(ranks)

    def _reached(self) -> list[bool]:
        probes: list[BucketMemory] = []

        def probe() -> str:
            probes.append(self._carrier.place(PROBE_BYTES))
            return probes[0].path

        path = self._ranks.from_rank_zero(probe)
        reached = self._ranks.gathered(self._writer.reaches(path))
        for place in probes:
            place.close()
        return reached

    def stage(
        self,
        version: int,
        buckets: Sequence[Sequence[TensorSpec]],
        parts: Iterable[ShardSlice],
        when_free: Callable[[], None] = lambda: None,
    ) -> Manifest:
        """Stage a version; return its manifest. Collective. buckets: of the whole version, equal on
        every rank. parts: this rank's parts; each is copied before the next is requested.
        when_free: on rank 0, returns once the slot may be written.

        Raises ValueError for an update without buckets, with a repeated tensor, or with a tensor
        that the parts of all ranks do not fill; OSError if memory is exhausted; and NotStaged if
        only another rank failed. The version staged last then remains valid.
        """
        entries = entries_of_version(version, buckets)
        # Only rank 0 allocates memory, and all ranks write to it.
        paths = self._ranks.from_rank_zero(lambda: self._open(entries, when_free))
        started = time.monotonic()
        refs = [
            BucketRef(
                path=path,
                size=size_of(bucket),
                nbytes=sum(entry.nbytes for entry in bucket),
                entries=bucket,
            )
            for path, bucket in zip(paths, entries, strict=True)
        ]
        where = {entry.name: (ref, entry) for ref in refs for entry in ref.entries}
        try:
            digests = self._digests(
                version,
                [entry for bucket in entries for entry in bucket],
                parts,
                lambda part: self._put(part, *where[part.name]),
            )
        finally:
            self._writer.keep({*self._paths, *paths})  # of both slots
            self._paths = paths
        # Only a complete version switches slots: after a failure the newest one stays valid.
        self._next = 1 - self._next
        return Manifest(buckets=tuple(refs), digests=digests, seconds=time.monotonic() - started)

    def fill(self, number: int, place: int, parts: Iterable[ShardSlice]) -> BucketRef:
        """Fill bucket `number` of the staged version if buckets are filled on demand. Collective.
        Raises TypeError for other stagings, whose buckets are complete."""
        raise TypeError(f"{type(self).__name__} fills no bucket on demand")

    def release(self) -> None:
        """Free the buckets that were filled on demand; engines must have stopped reading."""

    def close(self) -> None:
        self._writer.keep(())
        for slot in self._slots:
            slot.discard_from(0)

    def _open(
        self, entries: Sequence[Sequence[TensorEntry]], when_free: Callable[[], None]
    ) -> list[str]:
        when_free()
        return self._slots[self._next].places([size_of(bucket) for bucket in entries])

    def _put(self, part: ShardSlice, ref: BucketRef, entry: TensorEntry) -> None:
        rows, columns = part.tensor.shape
        whole = self._writer.view(ref, entry).view(matrix_shape(entry.shape))
        place = whole[part.row : part.row + rows, part.column : part.column + columns]
        if place.shape != part.tensor.shape:
            raise ValueError(
                f"{rows} x {columns} elements from ({part.row}, {part.column}) on are not within"
                f" {part.name}, {list(entry.shape)}"
            )
        # Detached, because the parameter is a leaf of autograd.
        place.copy_(part.tensor.detach())


def staging_of(name: str, device: torch.device, ranks: StagingRanks) -> Staging:
    """Return the staging of the carrier `name` for weights on `device`: STAGING of its file, or
    `Staging`. Collective."""
    module = carrier_module(name)
    staging: Staging = getattr(module, "STAGING", Staging)(module.CARRIER.on(device), ranks)
    return staging


class StagingSlot:
    """Memory of one version's buckets, in order."""

    def __init__(self, carrier: Carrier) -> None:
        self._carrier = carrier
        self._places: list[BucketMemory] = []

    def places(self, sizes: Sequence[int]) -> list[str]:
        """Return paths of buckets of these sizes. Raises OSError if memory is out."""
        self.discard_from(len(sizes))
        for index, size in enumerate(sizes):
            # Reused, because new pages of shared memory cost far more than the copy.
            if index < len(self._places) and self._places[index].size == size:
                continue
            self.discard_from(index)  # before more memory is allocated
            self._places.append(self._carrier.place(size))
        return [place.path for place in self._places]

    def discard_from(self, index: int) -> None:
        for place in self._places[index:]:
            place.close()
        del self._places[index:]

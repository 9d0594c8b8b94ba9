"""Versions of the weights, whole, where every engine of this machine can read them: for an update,
after a restart, or when it joins.

Invariants:
- there are two slots, written in turn: staging a version leaves the one before it as it is, for
  engines that are reading it, and takes the place of the one before that. The caller stages only
  once nobody reads that one any more (`Controller.staged` answers when that is so);
- a version is there completely or not at all;
- a digest is taken of the sender's own tensor as it is copied, so that nothing between it and an
  engine's memory is trusted;
- a tensor comes once;
- buckets of the same sizes are written in place: memory speed after the first time.
"""

from __future__ import annotations

import time
from collections.abc import Iterable

from megatron_async_rl.weights.manifest import BucketRef, Manifest
from megatron_async_rl.weights.transport import (
    Carrier,
    NamedTensors,
    Place,
    entries_of,
    size_of,
    tensor_digest,
)


class Staging:
    """For one thread. The slots' memory is given back by `close`."""

    def __init__(self, carrier: Carrier) -> None:
        self._slots = (_Slot(carrier), _Slot(carrier))
        self._next = 0

    def stage(self, version: int, buckets: Iterable[NamedTensors]) -> Manifest:
        """Copies every bucket; its tensors are free again when the next one is asked for.

        Raises ValueError for an update without buckets or with a tensor that comes twice, OSError
        when memory is out; then the version staged last is still there.
        """
        started = time.monotonic()
        refs, digests = self._slots[self._next].write(buckets)
        if not refs:
            raise ValueError(f"the update to version {version} has no buckets")
        self._next = 1 - self._next
        return Manifest(buckets=tuple(refs), digests=digests, seconds=time.monotonic() - started)

    def close(self) -> None:
        for slot in self._slots:
            slot.discard_from(0)


class _Slot:
    """The places of one version's buckets, in order."""

    def __init__(self, carrier: Carrier) -> None:
        self._carrier = carrier
        self._places: list[Place] = []

    def write(self, buckets: Iterable[NamedTensors]) -> tuple[list[BucketRef], dict[str, str]]:
        refs: list[BucketRef] = []
        digests: dict[str, str] = {}
        for bucket in buckets:
            refs.append(self._write(len(refs), bucket, digests))
        self.discard_from(len(refs))
        return refs, digests

    def discard_from(self, index: int) -> None:
        for place in self._places[index:]:
            place.close()
        del self._places[index:]

    def _write(self, index: int, bucket: NamedTensors, digests: dict[str, str]) -> BucketRef:
        entries = entries_of(bucket)
        for entry in entries:
            if entry.name in digests:
                raise ValueError(f"tensor {entry.name} comes twice in one update")

        place = self._place(index, size_of(entries))
        for entry, tensor, view in zip(entries, bucket.tensors, place.views(entries), strict=True):
            assert tensor is not None
            on_host = tensor.device.type == "cpu"
            if on_host:
                digests[entry.name] = tensor_digest(tensor)
            view.copy_(tensor.detach())
            if not on_host:  # of what arrived from the device, instead of fetching it twice
                digests[entry.name] = tensor_digest(view)
        return place.ref(entries)

    def _place(self, index: int, size: int) -> Place:
        if index < len(self._places) and self._places[index].size == size:
            return self._places[index]
        self.discard_from(index)  # before more memory is asked for
        self._places.append(self._carrier.place(size))
        return self._places[index]

"""Buckets of a version that the ranks fill on demand, on devices that engines and policy share.

Invariants:
- nothing here waits;
- a bucket's memory is overwritten only while no engine reads it. The queue waits for engines that
  are behind, so each bucket is filled once for all engines that load; it does not wait for a lost
  engine.
"""

from __future__ import annotations

from dataclasses import dataclass

from megatron_async_rl.weights.manifest import IN_FLIGHT, BucketRef


@dataclass(frozen=True, kw_only=True)
class BufferRequest:
    """Request to all ranks: fill a place with bucket `number` of a version, or, with null, release
    the memory of all places."""

    version: int
    number: int | None
    place: int = 0


class IpcBucketQueue:
    """Requests for the buckets of one version. An engine requests a bucket, reads it once it is
    filled, and then requests the next."""

    def __init__(self, version: int, count: int) -> None:
        self.version = version
        self._count = count
        self._requested: dict[int, int] = {}
        self._reads: dict[int, int] = {}
        """Bucket by engine."""
        self._there: list[int | None] = [None] * IN_FLIGHT
        self._refs: dict[int, BucketRef] = {}
        """Filled buckets by number."""
        self._filling: BufferRequest | None = None
        self._taken = False
        """True while the ranks hold memory for places."""

    def request(self, engine: int, number: int) -> None:
        self._requested[engine] = number

    def take(self, engine: int) -> BucketRef | None:
        """Return the bucket that the engine requested and reads from now on; None until it is
        filled."""
        ref = self._refs.get(self._requested[engine])
        if ref is not None:
            self._reads[engine] = self._requested.pop(engine)
        return ref

    def leave(self, engine: int) -> None:
        """Record that the engine neither reads nor requests a bucket."""
        self._requested.pop(engine, None)
        self._reads.pop(engine, None)

    def next_buffer_request(self) -> BufferRequest | None:
        """Return the ranks' next request; None if there is nothing to do."""
        # The ranks fill collectively, one bucket at a time.
        if self._filling is not None:
            return None
        reads = set(self._reads.values())
        # Engines read in order: the bucket after each present one is needed next.
        soon = reads | {n for n in self._requested.values() if n in self._refs}
        ahead = {*self._requested.values(), *(n + 1 for n in soon if n + 1 < self._count)}
        if not self._requested and not reads:
            if not self._taken:
                return None
            self._taken, self._there, self._refs = False, [None] * IN_FLIGHT, {}
            return BufferRequest(version=self.version, number=None)
        free = [place for place, n in enumerate(self._there) if n not in ahead | reads]
        missing = ahead.difference(self._there)
        if not free or not missing:
            return None
        place, number = free[0], min(missing)
        # An engine that requests the replaced bucket later waits until the ranks fill it again.
        gone = self._there[place]
        if gone is not None:
            del self._refs[gone]
        self._there[place], self._taken = None, True
        self._filling = BufferRequest(version=self.version, number=number, place=place)
        return self._filling

    def buffer_filled(self, ref: BucketRef | None) -> None:
        """Record the ranks' answer to the last request. `ref`: location of the bucket."""
        fill, self._filling = self._filling, None
        if fill is not None and fill.number is not None and ref is not None:
            self._there[fill.place] = fill.number
            self._refs[fill.number] = ref

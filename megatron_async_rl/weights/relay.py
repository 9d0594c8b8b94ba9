"""The carrier `relay`: shared memory on every machine. On machines other than rank 0's an agent
copies the staged versions into it.

    rank 0's machine                              another machine
    ranks -> /dev/shm -> relay server ==TCP==> agent -> /dev/shm -> engines
                         (relay_server.py)

Invariants:
- `fetch` returns once a version is complete and every tensor is verified; otherwise it raises;
- there are two slots, written alternately as on rank 0 (staging.py): a fetch leaves the newest
  version unchanged and overwrites the previous one, which no engine may be reading any more;
- a broken transfer resumes at the byte where it stopped. It fails once no byte has arrived for
  `silence_s`, however often the connection was reopened;
- a bucket that arrives damaged is requested again once, and then the fetch fails.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Mapping
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace

from megatron_async_rl.watchdog import watch
from megatron_async_rl.weights.manifest import BucketRef, Manifest, StagedCopy
from megatron_async_rl.weights.relay_server import Address, RelayFailed, requested
from megatron_async_rl.weights.shared_memory import SharedMemory
from megatron_async_rl.weights.staging import StagingSlot
from megatron_async_rl.weights.transport import Carrier, damaged_tensor, whole_bucket

log = logging.getLogger(__name__)

AT_ONCE = 4
"""Number of buckets in flight."""
ATTEMPTS = 3
"""Number of successive connections without a byte after which the fetch fails."""
RETRY_S = 0.1
"""Delay before the connection is reopened; doubled after each connection without a byte."""

CARRIER = SharedMemory
"""The memory that ranks write and engines read, each on its own machine."""


class WeightAgent:
    """Agent that copies versions to this machine's memory, which `close` frees. One fetch at a
    time.

    `silence_s`: longest time without a byte.
    """

    def __init__(
        self, address: Address, carrier: Carrier | None = None, *, silence_s: float
    ) -> None:
        carrier = carrier or CARRIER()
        self._address = address
        self._silence_s = silence_s
        self._slots = (StagingSlot(carrier), StagingSlot(carrier))
        self._next = 0
        self._writer = carrier.writer()
        self._paths: list[str] = []
        """Files of the version that arrived last."""

    def fetch(self, version: int, manifest: Manifest) -> StagedCopy:
        """Copy `version`, which rank 0 has staged as `manifest`.

        Raises RelayFailed if it cannot be fetched completely, and OSError if there is no memory;
        the previous version then remains valid.
        """
        began = time.monotonic()
        paths = self._slots[self._next].places([ref.size for ref in manifest.buckets])
        # Both slots stay mapped, because new mappings would cost more than the copy.
        self._writer.keep({*self._paths, *paths})
        refs = [replace(ref, path=p) for ref, p in zip(manifest.buckets, paths, strict=True)]

        pool = ThreadPoolExecutor(AT_ONCE, thread_name_prefix="relay")
        try:
            buckets = [
                pool.submit(self._bucket, version, number, ref, manifest.digests)
                for number, ref in enumerate(refs)
            ]
            nbytes = sum(bucket.result() for bucket in buckets)
        finally:
            pool.shutdown(cancel_futures=True)

        # Only a complete version switches slots; a failed fetch overwrites its own slot again.
        self._next, self._paths = 1 - self._next, paths
        copy = replace(manifest, buckets=tuple(refs))
        return StagedCopy(manifest=copy, nbytes=nbytes, seconds=time.monotonic() - began)

    def close(self) -> None:
        self._writer.keep(())
        for slot in self._slots:
            slot.discard_from(0)

    def _bucket(self, version: int, number: int, ref: BucketRef, digests: Mapping[str, str]) -> int:
        """Return the number of bytes received until the bucket was intact."""
        for repeated in (False, True):
            self._receive(version, number, ref)
            # The digests come from the trainer's memory through Ray, not from the server.
            wrong = damaged_tensor(self._writer, ref, digests)
            if wrong is None:
                return ref.size * (1 + repeated)
            log.warning(
                "bucket %d of version %d arrived damaged: tensor %s", number, version, wrong
            )
        raise RelayFailed(
            f"bucket {number} of version {version} arrived damaged twice: tensor {wrong} is not"
            " what was staged"
        )

    def _receive(self, version: int, number: int, ref: BucketRef) -> None:
        memory = memoryview(self._writer.view(ref, whole_bucket(ref)).numpy())
        at = fruitless = 0
        while at < ref.size:
            stood = at
            try:
                limit_s = self._silence_s / (ATTEMPTS + 1)  # the stalled one counts, too
                connection, count = requested(self._address, version, number, at, silence_s=limit_s)
                with connection:
                    if count != ref.size - at:
                        raise RelayFailed(
                            f"bucket {number} of version {version} has {ref.size} bytes, and the"
                            f" server at {self._address} has {count} from byte {at} on"
                        )
                    while at < ref.size:
                        received = connection.recv_into(memory[at:])
                        if not received:
                            raise ConnectionError("the server closed the connection")
                        at += received
                        watch.progress("bytes relayed", received)
            except OSError as error:
                # Any byte proves that the server works, however often the connection broke.
                fruitless = 0 if at > stood else fruitless + 1
                log.warning(
                    "bucket %d of version %d stopped at byte %d of %d: %s",
                    *(number, version, at, ref.size, error),
                )
                if fruitless == ATTEMPTS:
                    raise RelayFailed(
                        f"bucket {number} of version {version} stopped at byte {at} of {ref.size}:"
                        f" {ATTEMPTS} connections to {self._address} received nothing, the last"
                        f" within {limit_s:g} s: {error}"
                    ) from error
                time.sleep(RETRY_S * 2**fruitless)

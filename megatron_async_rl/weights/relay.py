"""The carrier `relay`: shared memory on every machine. On machines other than rank 0's an agent
copies the staged versions into it.

    rank 0's machine                              another machine
    ranks -> /dev/shm -> relay server ==TCP==> agent -> /dev/shm -> engines
                         (relay_server.py)

Invariants:
- a version is there whole and verified, tensor by tensor, or `fetch` raises;
- there are two slots, written in turn, as rank 0 has them (staging.py): a fetch leaves the version
  that came last as it is and takes the place of the one before, which no engine may read any more;
- a broken transfer resumes at the byte where it stopped. It fails once no byte has come for
  `silence_s`, however often the connection was made anew;
- a bucket that arrives damaged is asked for once more, and then the fetch fails.
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
"""Buckets on their way at a time."""
ATTEMPTS = 3
"""Connections in a row that bring no byte: the last of them fails the fetch."""
RETRY_S = 0.1
"""Before the connection is made anew; doubled with each that brought no byte."""

CARRIER = SharedMemory
"""The memory that ranks write and engines read, each on its own machine."""


class WeightAgent:
    """Keeps this machine's copies; `close` gives their memory back. One fetch at a time.

    `silence_s`: longest time without a byte.
    """

    def __init__(
        self, address: Address, carrier: Carrier | None = None, *, silence_s: float = 60.0
    ) -> None:
        carrier = carrier or CARRIER()
        self._address = address
        self._silence_s = silence_s
        self._slots = (StagingSlot(carrier), StagingSlot(carrier))
        self._next = 0
        self._writer = carrier.writer()
        self._paths: list[str] = []
        """Files of the version that came last."""

    def fetch(self, version: int, manifest: Manifest) -> StagedCopy:
        """Copies `version`, which rank 0 has staged as `manifest`.

        Raises RelayFailed where it cannot be had whole, and OSError when memory is out; then the
        version that came last is still there.
        """
        began = time.monotonic()
        paths = self._slots[self._next].places([ref.size for ref in manifest.buckets])
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

        self._next, self._paths = 1 - self._next, paths
        copy = replace(manifest, buckets=tuple(refs))
        return StagedCopy(manifest=copy, nbytes=nbytes, seconds=time.monotonic() - began)

    def close(self) -> None:
        self._writer.keep(())
        for slot in self._slots:
            slot.discard_from(0)

    def _bucket(self, version: int, number: int, ref: BucketRef, digests: Mapping[str, str]) -> int:
        """Bytes received until the bucket was right."""
        for asked_before in (False, True):
            self._receive(version, number, ref)
            wrong = damaged_tensor(self._writer, ref, digests)
            if wrong is None:
                return ref.size * (1 + asked_before)
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
                fruitless = 0 if at > stood else fruitless + 1
                log.warning(
                    "bucket %d of version %d stands at byte %d of %d: %s",
                    *(number, version, at, ref.size, error),
                )
                if fruitless == ATTEMPTS:
                    raise RelayFailed(
                        f"bucket {number} of version {version} stands at byte {at} of {ref.size}:"
                        f" {ATTEMPTS} connections to {self._address} brought nothing, the last"
                        f" within {limit_s:g} s: {error}"
                    ) from error
                time.sleep(RETRY_S * 2**fruitless)

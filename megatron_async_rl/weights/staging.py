"""One version of the weights, whole, in shared memory: what every engine is fed from, now and after a restart.

Invariants:
- what was staged stays until the next version is staged over it; a version is there completely or not at all;
- a digest is taken of the sender's own tensor as it is copied, so that nothing between it and an engine's memory is trusted;
- a tensor comes once;
- the same manifests give the same files, written in place: memory speed after the first time.
"""

from __future__ import annotations

import time
from collections.abc import Iterable
from pathlib import Path

from megatron_async_rl.weights.digest import tensor_digest
from megatron_async_rl.weights.shared_memory import BucketFile, BucketRef, NamedTensors, manifest, manifest_size


class StagedWeights:
    """Not for two threads at once: its owner orders who writes and who reads."""

    def __init__(self, directory: Path) -> None:
        self._directory = directory
        self._files: list[BucketFile] = []
        self.version: int | None = None
        """None before the first version, and after one that failed on the way."""
        self.buckets: tuple[BucketRef, ...] = ()
        self.digests: dict[str, str] = {}
        """Name -> digest of every staged tensor."""
        self.seconds = 0.0
        """What staging took, gathering included."""

    @property
    def nbytes(self) -> int:
        return sum(bucket.nbytes for bucket in self.buckets)

    def stage(self, version: int, buckets: Iterable[NamedTensors]) -> None:
        """Takes every bucket; its tensors are free again when the next one is asked for.

        Raises ValueError for an update without buckets or with a tensor that comes twice, OSError when memory is out.
        """
        started = time.monotonic()
        self.version = None
        refs: list[BucketRef] = []
        digests: dict[str, str] = {}
        for bucket in buckets:
            refs.append(self._write(len(refs), bucket, digests))
        if not refs:
            raise ValueError(f"the update to version {version} has no buckets")
        self._discard_from(len(refs))
        self.buckets, self.digests = tuple(refs), digests
        self.seconds = time.monotonic() - started
        self.version = version

    def close(self) -> None:
        self.version = None
        self._discard_from(0)

    def _write(self, index: int, bucket: NamedTensors, digests: dict[str, str]) -> BucketRef:
        entries = manifest(bucket)
        for entry in entries:
            if entry.name in digests:
                raise ValueError(f"tensor {entry.name} comes twice in one update")
        file = self._file(index, manifest_size(entries))
        for entry, tensor, view in zip(entries, bucket.tensors, file.views(entries), strict=True):
            assert tensor is not None
            on_host = tensor.device.type == "cpu"
            if on_host:
                digests[entry.name] = tensor_digest(tensor)
            view.copy_(tensor.detach())
            if not on_host:  # what arrived from the device, instead of fetching it twice
                digests[entry.name] = tensor_digest(view)
        return file.ref(entries)

    def _file(self, index: int, size: int) -> BucketFile:
        if index < len(self._files) and self._files[index].size == size:
            return self._files[index]
        self._discard_from(index)  # before more memory is asked for
        self._files.append(BucketFile(self._directory, size))
        return self._files[index]

    def _discard_from(self, index: int) -> None:
        for file in self._files[index:]:
            file.close()
        del self._files[index:]

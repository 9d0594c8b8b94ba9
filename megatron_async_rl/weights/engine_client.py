"""A rollout engine as the publisher sees it, and its Ray form."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from concurrent.futures import Future
from typing import Any, Protocol

from megatron_async_rl.weights.shared_memory import BucketRef


class EngineClient(Protocol):
    """Calls return at once, with a future."""

    @property
    def name(self) -> str: ...
    def update(self, buckets: Sequence[BucketRef], version: int, digests: Mapping[str, str]) -> Future[dict[str, str]]:
        """`pause`, `load_bucket` for each bucket and, where just these `digests` were loaded, `resume`, in one call.

        The answer: name -> digest of every tensor as loaded.
        """
        ...

    def pause(self) -> Future[None]: ...
    def load_bucket(self, bucket: BucketRef, version: int, first: bool, last: bool) -> Future[dict[str, str]]:
        """`first` and `last` open and close the update. The last answer: name -> digest of every tensor as loaded."""
        ...

    def resume(self) -> Future[None]: ...
    def sleep(self) -> Future[None]: ...
    def wake(self, tags: Sequence[str] | None) -> Future[None]:
        """`("weights",)`: enough to load; None: wholly, and sampling goes on."""
        ...


class RayEngine:
    """`EngineClient` on the handle of a `rollout.actor.EngineActor`."""

    def __init__(self, name: str, handle: Any) -> None:
        self.name = name
        self.handle = handle

    def update(self, buckets: Sequence[BucketRef], version: int, digests: Mapping[str, str]) -> Future[dict[str, str]]:
        return self._future(self.handle.update.remote(buckets, version, digests))

    def pause(self) -> Future[None]:
        return self._future(self.handle.pause.remote())

    def load_bucket(self, bucket: BucketRef, version: int, first: bool, last: bool) -> Future[dict[str, str]]:
        return self._future(self.handle.load_bucket.remote(bucket, version, first, last))

    def resume(self) -> Future[None]:
        return self._future(self.handle.resume.remote())

    def sleep(self) -> Future[None]:
        return self._future(self.handle.sleep.remote())

    def wake(self, tags: Sequence[str] | None) -> Future[None]:
        return self._future(self.handle.wake.remote(None if tags is None else list(tags)))

    @staticmethod
    def _future(reference: Any) -> Future[Any]:
        future: Future[Any] = reference.future()
        return future

"""New weights from the trainer to every engine, proved before sampling goes on.

Invariants:
- the engines pause only once the first bucket lies ready, and all of them load before any resumes;
- an engine resumes only after its digest of every tensor equals the sender's; on any failure the engines stay paused
  and the caller ends the run, so no token is ever sampled by weights nobody vouched for;
- every wait has a deadline, and its error names the engine and the phase.
"""

from __future__ import annotations

import time
from collections.abc import Iterable, Sequence
from concurrent.futures import Future
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Protocol, TypeVar

from megatron_async_rl.observe.deadline import DeadlineExceeded, this_process
from megatron_async_rl.observe.remote import remote_cause
from megatron_async_rl.weights.digest import tensor_digest
from megatron_async_rl.weights.shared_memory import BucketRef, NamedTensors, remove_stale, write_bucket

T = TypeVar("T")


class PublishFailed(RuntimeError):
    """An engine raised during a publish. It stays paused."""


class WeightMismatch(RuntimeError):
    """An engine loaded another tensor than the trainer sent. `None` stands for a tensor that one side does not have."""

    def __init__(self, name: str, engine: str, sent: str | None, loaded: str | None) -> None:
        super().__init__(f"weights of {engine} are not the trainer's: tensor {name} was sent as {sent} and loaded as {loaded}")
        self.name = name
        self.engine = engine
        self.sent = sent
        self.loaded = loaded

    def __reduce__(self) -> tuple[Any, ...]:
        return (WeightMismatch, (self.name, self.engine, self.sent, self.loaded))


class EngineClient(Protocol):
    """An engine as the publisher sees it: calls return at once, with a future."""

    @property
    def name(self) -> str: ...
    def pause(self) -> Future[None]: ...
    def load_bucket(self, bucket: BucketRef, version: int, first: bool, last: bool) -> Future[dict[str, str]]: ...
    def resume(self) -> Future[None]: ...


class RayEngine:
    """`EngineClient` on the handle of a `rollout.actor.EngineActor`."""

    def __init__(self, name: str, handle: Any) -> None:
        self.name = name
        self._handle = handle

    def pause(self) -> Future[None]:
        return self._future(self._handle.pause.remote())

    def load_bucket(self, bucket: BucketRef, version: int, first: bool, last: bool) -> Future[dict[str, str]]:
        return self._future(self._handle.load_bucket.remote(bucket, version, first, last))

    def resume(self) -> Future[None]:
        return self._future(self._handle.resume.remote())

    @staticmethod
    def _future(reference: Any) -> Future[Any]:
        future: Future[Any] = reference.future()
        return future


@dataclass(frozen=True, kw_only=True)
class PublishReport:
    """`seconds`: the whole publish, gathering included; `paused_s`: how long sampling stood still; `bytes`: of tensors, once."""

    version: int
    seconds: float
    paused_s: float
    bytes: int
    tensors: int


class Publisher:
    """Sends through bucket files in `directory`, on the machine of the engines. `timeout_s`: longest wait for one phase."""

    def __init__(self, engines: Sequence[EngineClient], *, timeout_s: float, directory: Path = Path("/dev/shm")) -> None:
        self._engines = tuple(engines)
        self._timeout_s = timeout_s
        self._directory = directory
        remove_stale(directory)

    def publish(self, version: int, buckets: Iterable[NamedTensors]) -> PublishReport:
        """Blocks until every engine samples with the weights in `buckets`, numbered `version`.

        Raises WeightMismatch; DeadlineExceeded and PublishFailed, which name the engine and the phase (a version that is not
        newer fails so); ValueError for an update without buckets.
        """
        started = time.monotonic()
        paused_at = 0.0
        sent: dict[str, str] = {}
        loaded: list[dict[str, str]] = []
        total = 0
        upcoming = iter(buckets)
        bucket = next(upcoming, None)
        if bucket is None:
            raise ValueError(f"the update to version {version} has no buckets")
        first = True
        while bucket is not None:
            sent |= _digests(bucket)
            with write_bucket(bucket, self._directory) as ref:
                # The file is a copy: the sender's tensors are free again, and the next bucket is gathered before this one loads.
                bucket = next(upcoming, None)
                if first:
                    paused_at = time.monotonic()
                    self._pause()
                loaded = self._load(ref, version, first=first, last=bucket is None)
            total += ref.nbytes
            first = False
        for engine, digests in zip(self._engines, loaded, strict=True):
            compare(engine.name, sent, digests)
        self._resume()
        ended = time.monotonic()
        return PublishReport(version=version, seconds=ended - started, paused_s=ended - paused_at, bytes=total, tensors=len(sent))

    def _pause(self) -> None:
        self._answers("pause", [engine.pause() for engine in self._engines])

    def _load(self, ref: BucketRef, version: int, *, first: bool, last: bool) -> list[dict[str, str]]:
        calls = [engine.load_bucket(ref, version, first, last) for engine in self._engines]
        return self._answers(f"load weights of version {version}", calls)

    def _resume(self) -> None:
        self._answers("resume", [engine.resume() for engine in self._engines])

    def _answers(self, phase: str, calls: Sequence[Future[T]]) -> list[T]:
        """One answer from each engine, in order."""
        deadline = time.monotonic() + self._timeout_s
        answers = []
        for engine, call in zip(self._engines, calls, strict=True):
            try:
                answers.append(call.result(timeout=max(0.0, deadline - time.monotonic())))
            except Exception as error:  # noqa: BLE001 - raised again with the engine and the phase
                if isinstance(error, TimeoutError) and not call.done():
                    raise DeadlineExceeded(this_process(), f"{engine.name} to {phase}", self._timeout_s) from None
                raise PublishFailed(f"{engine.name} failed to {phase}: {remote_cause(error)}") from None
        return answers


def _digests(bucket: NamedTensors) -> dict[str, str]:
    pairs = zip(bucket.names, bucket.tensors, strict=True)
    return {name: tensor_digest(tensor) for name, tensor in pairs if tensor is not None}


def compare(engine: str, sent: dict[str, str], loaded: dict[str, str]) -> None:
    """Raises WeightMismatch for the first tensor, by name, whose digests differ or that only one side has."""
    for name in sorted(sent.keys() | loaded.keys()):
        if sent.get(name) != loaded.get(name):
            raise WeightMismatch(name, engine, sent.get(name), loaded.get(name))

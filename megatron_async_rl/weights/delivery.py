"""One staged version into a set of engines at the same time, proved before any of them samples with it.

Invariants:
- an engine goes on only after its digest of every tensor equals the sender's; with others they do not, nobody goes on;
- none of the set goes on before all of it has loaded; one alone is asked once, and compares for itself before it goes on;
- an engine that fails or does not answer is lost, with the reason, and holds up nobody beyond the deadline.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import Future
from functools import partial
from typing import Any, TypeVar

from megatron_async_rl.observe import watch
from megatron_async_rl.observe.deadline import DeadlineExceeded, this_process
from megatron_async_rl.observe.remote import remote_cause
from megatron_async_rl.weights.engine_client import EngineClient
from megatron_async_rl.weights.shared_memory import BucketRef
from megatron_async_rl.weights.staging import StagedWeights

T = TypeVar("T")


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


class Delivery:
    """Of what is staged to `engines`, all at once; `timeout_s` for the whole of it. Used once."""

    def __init__(self, engines: Sequence[EngineClient], staged: StagedWeights, timeout_s: float) -> None:
        assert staged.version is not None
        self._engines = list(engines)
        self._staged = staged
        self._version = staged.version
        self._deadline = time.monotonic() + timeout_s
        self._timeout_s = timeout_s
        self.paused_s: dict[str, float] = {}
        """Engines that sample with the new weights now, and how long they stood still for them."""
        self.lost: dict[str, str] = {}
        """Engines that failed or did not answer, and at what."""

    def run(self, *, asleep: bool = False) -> Delivery:
        """`asleep`: the engines sleep already, and wake in the course of it. Raises WeightMismatch; all then stay stopped."""
        began = time.monotonic()
        if len(self._engines) == 1 and not asleep:
            self._update_alone()
        else:
            self._update_together(asleep)
        watch.progress("weight deliveries")
        ended = time.monotonic()
        self.paused_s = {engine.name: ended - began for engine in self._engines}
        return self

    def _update_alone(self) -> None:
        version, buckets, digests = self._version, self._staged.buckets, self._staged.digests
        self._compare(self._ask(f"take weights of version {version}", lambda engine: engine.update(buckets, version, digests)))

    def _update_together(self, asleep: bool) -> None:
        version, buckets = self._version, self._staged.buckets
        if asleep:
            self._ask("wake up for new weights", lambda engine: engine.wake(("weights",)))
        else:
            self._ask("pause", lambda engine: engine.pause())
        loaded: Mapping[str, dict[str, str]] = {}
        for index, ref in enumerate(buckets):
            first, last = index == 0, index == len(buckets) - 1
            load = partial(_load, ref=ref, version=version, first=first, last=last)
            loaded = self._ask(f"load weights of version {version}", load)
        self._compare(loaded)
        if asleep:
            self._ask("wake up", lambda engine: engine.wake(None))
        else:
            self._ask("resume", lambda engine: engine.resume())

    def _compare(self, loaded: Mapping[str, dict[str, str]]) -> None:
        for name, digests in loaded.items():
            compare(name, self._staged.digests, digests)

    def _ask(self, phase: str, call: Callable[[EngineClient], Future[T]]) -> dict[str, T]:
        """One answer from each engine that is still with us."""
        calls = [(engine, _begun(engine, call)) for engine in self._engines]
        answers = {}
        for engine, pending in calls:
            try:
                left = max(0.0, self._deadline - time.monotonic())
                with watch.doing("wait", f"{engine.name} to {phase}", left):
                    answers[engine.name] = pending.result(timeout=left)
            except Exception as error:  # noqa: BLE001 - it is the reason
                if isinstance(error, TimeoutError) and not pending.done():
                    error = DeadlineExceeded(this_process(), f"{engine.name} to {phase}", self._timeout_s)
                    self.lost[engine.name] = str(error)
                else:
                    self.lost[engine.name] = f"{engine.name} failed to {phase}: {remote_cause(error)}"
        self._engines = [engine for engine in self._engines if engine.name in answers]
        return answers


def compare(engine: str, sent: Mapping[str, str], loaded: Mapping[str, str]) -> None:
    """Raises WeightMismatch for the first tensor, by name, whose digests differ or that only one side has."""
    for name in sorted(sent.keys() | loaded.keys()):
        if sent.get(name) != loaded.get(name):
            raise WeightMismatch(name, engine, sent.get(name), loaded.get(name))


def _load(engine: EngineClient, *, ref: BucketRef, version: int, first: bool, last: bool) -> Future[dict[str, str]]:
    return engine.load_bucket(ref, version, first, last)


def _begun(engine: EngineClient, call: Callable[[EngineClient], Future[T]]) -> Future[T]:
    """A call that fails at once, as on a handle that is gone, is one that was answered so."""
    try:
        return call(engine)
    except Exception as error:  # noqa: BLE001 - raised by the future
        failed: Future[T] = Future()
        failed.set_exception(error)
        return failed

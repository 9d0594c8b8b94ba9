"""New weights from the trainer to every engine: staged while the trainer waits, delivered while it trains on.

Two steps. `stage` copies one version into shared memory, where it stays; `deliver` brings it into the engines from a thread in
the background. An engine that was started again is fed from the same copy by `bring_up`, at any time.

Invariants:
- `update: rolling`: the engines load one after the other, so that never all are paused unless there is only one;
  `together`: all pause, load and resume as one;
- engines are fed by one thread, one delivery or bring-up after the other, and nothing is staged before those are through:
  no engine reads what is being written;
- an engine samples with weights only after it proved them (`delivery.py`). A mismatch is raised, and nothing is delivered
  after it; an engine that is lost on the way is reported, and the others go on;
- every wait has a name and a deadline.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Iterable, Iterator, Mapping, Sequence
from concurrent.futures import Future
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Literal, TypeVar

from megatron_async_rl.observe.deadline import DeadlineExceeded, this_process, waiting
from megatron_async_rl.weights.background import SerialThread
from megatron_async_rl.weights.delivery import Delivery
from megatron_async_rl.weights.delivery import WeightMismatch as WeightMismatch
from megatron_async_rl.weights.engine_client import EngineClient
from megatron_async_rl.weights.engine_client import RayEngine as RayEngine
from megatron_async_rl.weights.shared_memory import NamedTensors
from megatron_async_rl.weights.staging import StagedWeights
from megatron_async_rl.weights.stale_files import SHARED_MEMORY, remove_stale

Taken = TypeVar("Taken")

UNKNOWN = -1
"""Version of an engine that has not been fed yet."""


class PublishFailed(RuntimeError):
    """No engine took the weights."""


@dataclass(frozen=True, kw_only=True)
class PublishReport:
    """What one delivery did. `seconds`: staging and delivery; `staged_s`: staging alone, gathering included."""

    version: int
    seconds: float
    staged_s: float
    bytes: int
    """Of the tensors, once."""
    tensors: int
    pauses: Mapping[str, float]
    """Seconds that sampling stood still, of every engine that took the weights."""
    lost: Mapping[str, str]
    """Engines that failed or did not answer, and how; they hold no known weights and stay out of use until brought up."""

    @property
    def paused_s(self) -> float:
        """The longest pause of an engine; 0 when none had to take the weights."""
        return max(self.pauses.values(), default=0.0)


class Publisher:
    """For one trainer thread that stages and delivers, and any that bring engines up or remove them.

    Sends through files in `directory`, on the machine of the engines, which must hold the whole model.
    `timeout_s`: longest wait for one engine (`together`: for all of them) to take a version, from its pause to its resumption.
    """

    def __init__(
        self,
        engines: Sequence[EngineClient],
        *,
        timeout_s: float,
        update: Literal["rolling", "together"] = "rolling",
        directory: Path = SHARED_MEMORY,
    ) -> None:
        self._timeout_s = timeout_s
        self._update = update
        self._lock = threading.Lock()
        """Of who the engines are and what they hold."""
        self._engines = {engine.name: engine for engine in engines}
        self._versions = dict.fromkeys(self._engines, UNKNOWN)
        self._fed: set[str] = set()
        """Names of the engines that hold what is staged now. A number does not tell: an engine judges itself what it takes."""
        self._files = threading.Lock()
        """Held by whoever writes or reads what is staged."""
        self._delivery: Future[PublishReport] | None = None
        self._thread = SerialThread("publisher")
        remove_stale(directory)
        self._staged = StagedWeights(directory)

    @property
    def versions(self) -> dict[str, int]:
        """What each engine is known to hold; -1: nothing that was proved."""
        with self._lock:
            return dict(self._versions)

    def publish(self, version: int, buckets: Iterable[NamedTensors]) -> PublishReport:
        """`stage`, `deliver`, and the wait for it. Raises PublishFailed where no engine took the weights."""
        self.stage(version, buckets)
        report = self._result(self.deliver(version), f"version {version} to be delivered")
        with self._lock:
            taken = bool(self._fed)
        if not taken:
            raise PublishFailed(
                f"no engine took the weights of version {version}: {'; '.join(report.lost.values()) or 'there is none left'}"
            )
        return report

    def stage(self, version: int, buckets: Iterable[NamedTensors]) -> None:
        """Copies the weights in `buckets`, numbered `version`, over those staged before. Waits for the delivery of those.

        Raises DeadlineExceeded, and what `StagedWeights.stage` raises; then nothing is staged.
        """
        if self._delivery is not None:
            with waiting(f"the delivery before version {version} can be staged", self._longest_s):
                self._delivery.exception(timeout=self._longest_s)
        with self._holding_files(f"an engine's bring-up before version {version} can be staged"):
            with self._lock:
                self._fed.clear()
            self._staged.stage(version, buckets)

    def deliver(self, version: int, *, asleep: bool = False) -> Future[PublishReport]:
        """Brings what is staged to every engine that does not hold it; returns at once. `asleep`: the engines sleep, and wake
        with the new weights, all together.

        The future raises WeightMismatch. That every engine is lost is no error here: one may be brought up. Raises ValueError
        for another version than the staged one.
        """
        if version != self._staged.version:
            raise ValueError(f"version {version} cannot be delivered: staged is {self._staged.version}")
        self._delivery = self._thread.submit(lambda: self._deliver(version, asleep))
        return self._delivery

    def bring_up(self, engine: EngineClient) -> int:
        """Feeds one newly started engine with what is staged, and puts it in the place of the one of its name, if there is one;
        blocks. Returns the version it holds now.

        Raises RuntimeError before anything is staged, PublishFailed when the engine fails, WeightMismatch, DeadlineExceeded.
        """
        return self._result(self._thread.submit(lambda: self._bring_up(engine)), f"{engine.name} to be brought up")

    def remove(self, name: str) -> None:
        """The engine of that name gets no more weights. Unknown names are ignored."""
        with self._lock:
            self._engines.pop(name, None)
            self._versions.pop(name, None)
            self._fed.discard(name)

    def close(self) -> None:
        """Gives the shared memory back. Engines that are loading keep what they have mapped."""
        self._staged.close()

    @property
    def _longest_s(self) -> float:
        """For what the thread has to do: each engine in its turn, and one being brought up before them and one after."""
        with self._lock:
            return self._timeout_s * (len(self._engines) + 3)

    def _deliver(self, version: int, asleep: bool) -> PublishReport:
        started = time.monotonic()
        pauses: dict[str, float] = {}
        lost: dict[str, str] = {}
        with self._holding_files(f"version {version} to be staged before it is delivered"):
            for group in self._groups(at_once=asleep or self._update == "together"):
                delivery = self._feed(group, asleep=asleep)
                pauses |= delivery.paused_s
                lost |= delivery.lost
            staged_s, size, tensors = self._staged.seconds, self._staged.nbytes, len(self._staged.digests)
        with self._lock:
            lost = {name: reason for name, reason in lost.items() if name in self._engines}
        return PublishReport(
            version=version,
            seconds=staged_s + time.monotonic() - started,
            staged_s=staged_s,
            bytes=size,
            tensors=tensors,
            pauses=pauses,
            lost=lost,
        )

    def _groups(self, *, at_once: bool) -> Iterator[list[EngineClient]]:
        """Who loads together. Asked for one after the other, so that an engine removed meanwhile is left out."""
        with self._lock:
            names = [name for name in self._engines if name not in self._fed]
        for group in [names] if at_once else [[name] for name in names]:
            with self._lock:
                engines = [self._engines[name] for name in group if name in self._engines]
            if engines:
                yield engines

    def _feed(self, engines: Sequence[EngineClient], *, asleep: bool = False) -> Delivery:
        """Engines that are among ours are known by what they hold afterwards; of others nothing is kept."""
        version = self._staged.version
        assert version is not None
        delivery = Delivery(engines, self._staged, self._timeout_s)
        try:
            return delivery.run(asleep=asleep)
        finally:
            with self._lock:
                for engine in engines:
                    if self._engines.get(engine.name) is engine:
                        self._hold(engine.name, version if engine.name in delivery.paused_s else UNKNOWN)

    def _hold(self, name: str, version: int) -> None:
        self._versions[name] = version
        if version == UNKNOWN:
            self._fed.discard(name)
        else:
            self._fed.add(name)

    def _bring_up(self, engine: EngineClient) -> int:
        with self._holding_files(f"the staging to end before {engine.name} is brought up"):
            version = self._staged.version
            if version is None:
                raise RuntimeError(f"{engine.name} cannot be brought up: no weights are staged")
            delivery = self._feed([engine])
            if delivery.lost:
                raise PublishFailed(delivery.lost[engine.name])
            with self._lock:
                self._engines[engine.name] = engine
                self._hold(engine.name, version)
        return version

    def _result(self, future: Future[Taken], name: str) -> Taken:
        with waiting(name, self._longest_s):
            return future.result(timeout=self._longest_s)

    @contextmanager
    def _holding_files(self, name: str) -> Iterator[None]:
        longest_s = self._longest_s
        with waiting(name, longest_s):
            if not self._files.acquire(timeout=longest_s):
                raise DeadlineExceeded(this_process(), name, longest_s)
        try:
            yield
        finally:
            self._files.release()

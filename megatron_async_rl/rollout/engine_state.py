"""State of an engine (running, paused or asleep), its sampling time, its track in the run's
timeline, and the queue of its reports.

    running --pause--> paused --resume--> running
    running, paused --sleep--> asleep --wake--> running

New weights load while the engine is paused, or asleep with awake weights.

Invariant: a call that the state does not permit is refused before it reaches vLLM. Pausing a paused
engine and resuming a running engine are permitted.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable, Collection
from pathlib import Path

import pyarrow as pa

from megatron_async_rl.metrics.timeline import Timeline
from megatron_async_rl.samples.columns import SampleColumns
from megatron_async_rl.samples.rows import StateName
from megatron_async_rl.samples.types import Aborted

COALESCE_S = 0.005
"""Time for which a report waits for further responses, because a step of vLLM often ends several
responses."""

TAGS = ("weights", "kv_cache")
"""Parts of an engine that can sleep, in the order in which they wake: weights are loaded before the
cache is filled."""


class WrongState(RuntimeError):
    """A call that the engine's state does not permit."""


class EngineState:
    """State of the engine `name`, and checks of the calls that the state permits."""

    def __init__(self, name: str) -> None:
        self._name = name
        self._paused = False
        self._asleep: frozenset[str] = frozenset()

    @property
    def state(self) -> StateName:
        if self._asleep:
            return "asleep"
        return "paused" if self._paused else "running"

    @property
    def runs(self) -> bool:
        return self.state == "running"

    def require_awake(self, what: str) -> None:
        if self._asleep:
            raise WrongState(f"{self._name} cannot {what}: it is asleep; wake it first")

    def sleeps(self, tag: str) -> bool:
        return tag in self._asleep

    def sleepers(self, tags: Collection[str] | None) -> tuple[str, ...]:
        """Return the parts to wake, in the order of TAGS. `tags`: names of parts, or None for all
        sleeping parts.

        Raises WrongState for a part that is awake, ValueError for an unknown part.
        """
        unknown = sorted(set(tags or ()) - set(TAGS))
        if unknown:
            raise ValueError(
                f"{self._name} cannot wake {', '.join(unknown)}; its parts are {' and '.join(TAGS)}"
            )
        requested = self._asleep if tags is None else frozenset(tags)
        if not requested or not requested <= self._asleep:
            awake = ", ".join(tag for tag in TAGS if tag in requested - self._asleep) or "it"
            raise WrongState(f"{self._name} cannot wake: {awake} is awake already")
        return tuple(tag for tag in TAGS if tag in requested)

    def pause(self) -> None:
        self._paused = True

    def resume(self) -> None:
        self._paused = False

    def sleep(self) -> None:
        self._asleep = frozenset(TAGS)

    def wake(self, tags: Collection[str]) -> None:
        """Mark parts as awake. The engine runs again once all parts are awake."""
        self._asleep -= frozenset(tags)
        # The engine may have been paused before it slept; waking it completely ends the pause, too.
        if not self._asleep:
            self._paused = False


class BusyClock:
    """Clock of the time in which an engine samples: at least one response is in vLLM, and the
    engine is not paused.

    `changed`: called with the number of responses in vLLM when the first response begins, the last
    one ends, or a pause begins or ends. `now`: monotonic clock, in seconds."""

    def __init__(
        self,
        changed: Callable[[int], None] = lambda responses: None,
        now: Callable[[], float] = time.monotonic,
    ) -> None:
        self._changed = changed
        self._now = now
        self._sampling = 0
        self._paused = False
        self._seconds = 0.0
        self._since: float | None = None

    @property
    def seconds(self) -> float:
        return self._seconds + (0.0 if self._since is None else self._now() - self._since)

    def begin(self) -> None:
        """Count a response that entered vLLM."""
        self._sampling += 1
        if self._sampling == 1:
            self._update()

    def end(self) -> None:
        self._sampling -= 1
        if self._sampling == 0:
            self._update()

    def pause(self, paused: bool) -> None:
        """Record that a pause begins or ends."""
        self._paused = paused
        self._update()

    def _update(self) -> None:
        """Start or stop the clock, and call `changed`."""
        runs = self._sampling > 0 and not self._paused
        if runs and self._since is None:
            self._since = self._now()
        elif not runs and self._since is not None:
            self._seconds += self._now() - self._since
            self._since = None
        self._changed(self._sampling)


class EngineTimeline:
    """Track of an engine in the run's timeline. `run_dir`: directory of the run; with None, nothing
    is written.

    Invariant: an engine is `loading` from the first bucket of new weights until it samples again,
    even if responses arrive or it sleeps meanwhile.
    """

    def __init__(self, run_dir: Path | None, track: str, state: EngineState) -> None:
        self._timeline = Timeline(run_dir, track) if run_dir is not None else None
        self._state = state
        self._loading = False

    def changed(self, responses: int) -> None:
        """Record a change of the state or of the number of `responses` in vLLM."""
        if self._state.runs:
            self._loading = False
            self._enter(*(("busy", "") if responses else ("idle", "prompts")))
        elif not self._loading:
            self._enter(
                *(
                    ("asleep", "the policy")
                    if self._state.state == "asleep"
                    else ("paused", "weights")
                )
            )

    def load(self) -> None:
        """Record that the first bucket of new weights is about to be loaded."""
        self._loading = True
        self._enter("loading")

    def close(self) -> None:
        if self._timeline is not None:
            self._timeline.close()

    def _enter(self, state: str, waiting_for: str = "") -> None:
        if self._timeline is not None:
            self._timeline.enter(state, waiting_for)


class ReportQueue:
    """Queue of the results since the last report, for one event loop and one reader. Call `notify`
    after each append to `finished` or `aborted`.

    Invariants: reports contain every result exactly once, in order. After a failure, every call of
    `take` raises it, even if results are queued: the engine cannot be used any more.
    """

    def __init__(self) -> None:
        self.finished = SampleColumns()
        self.aborted: list[Aborted] = []
        self._failure: BaseException | None = None
        self._news = asyncio.Event()

    def notify(self) -> None:
        self._news.set()

    def fail(self, error: BaseException) -> None:
        """Record a failure. Later failures are ignored, because they follow from the first one."""
        if self._failure is None:
            self._failure = error
        self._news.set()

    async def take(self, timeout_s: float) -> tuple[pa.RecordBatch, tuple[Aborted, ...]]:
        """Return the samples (rows of columns.SCHEMA) and aborts since the last call, as soon as
        there are any. Return none after `timeout_s`. Raises the recorded failure."""
        try:
            await asyncio.wait_for(self._news.wait(), timeout_s)
            # If the reader is cancelled here, no result is lost: results leave the queue below.
            if self._failure is None:
                await asyncio.sleep(COALESCE_S)
        except TimeoutError:
            pass
        if self._failure is not None:
            raise self._failure
        # No await from here on, so that no result arrives between the two removals: it would lose
        # its notification.
        aborted, self.aborted = tuple(self.aborted), []
        self._news.clear()
        try:
            return self.finished.take(), aborted
        # The aborts of this report are lost, so every later report must raise this error.
        except Exception as error:
            self.fail(error)
            raise

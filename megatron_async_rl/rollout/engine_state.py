"""State of an engine (running, paused or asleep), its sampling time, its track in the run's
timeline, and the queue of its reports.

    running --pause--> paused --resume--> running          new weights load while paused
    running, paused --sleep--> asleep --wake--> running    and while asleep with its weights awake

Invariant: calls out of order are refused before they reach vLLM. Pausing a
paused engine and resuming a running engine are permitted.
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
"""Time that a report waits for further responses: one step of vLLM often ends several."""

TAGS = ("weights", "kv_cache")
"""Parts that sleep, in the order of waking: weights must load before the cache fills."""


class WrongState(RuntimeError):
    """A call that the engine's state does not permit."""


class EngineState:
    """State of the engine `name`, and checks of the calls that it permits."""

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
        """Return the parts to wake, in order. `tags`: parts, or None for all that sleep.

        Raises WrongState for what is awake, ValueError for anything else.
        """
        unknown = sorted(set(tags or ()) - set(TAGS))
        if unknown:
            raise ValueError(
                f"{self._name} cannot wake {', '.join(unknown)}; its parts are {' and '.join(TAGS)}"
            )
        wanted = self._asleep if tags is None else frozenset(tags)
        if not wanted or not wanted <= self._asleep:
            awake = ", ".join(tag for tag in TAGS if tag in wanted - self._asleep) or "it"
            raise WrongState(f"{self._name} cannot wake: {awake} is awake already")
        return tuple(tag for tag in TAGS if tag in wanted)

    def pause(self) -> None:
        self._paused = True

    def resume(self) -> None:
        self._paused = False

    def sleep(self) -> None:
        self._asleep = frozenset(TAGS)

    def wake(self, tags: Collection[str]) -> None:
        """Mark parts as awake. The engine runs again once all parts are awake."""
        self._asleep -= frozenset(tags)
        # The engine may have been paused before it slept; waking ends both.
        if not self._asleep:
            self._paused = False


class BusyClock:
    """Clock of the time in which an engine samples: at least one response is in vLLM, and no pause.

    `changed`: called with the number of responses in vLLM when the first begins, the last ends, or
    a pause begins or ends. `now`: monotonic clock, in seconds."""

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
            self._turn()

    def end(self) -> None:
        self._sampling -= 1
        if self._sampling == 0:
            self._turn()

    def pause(self, paused: bool) -> None:
        self._paused = paused
        self._turn()

    def _turn(self) -> None:
        runs = self._sampling > 0 and not self._paused
        if runs and self._since is None:
            self._since = self._now()
        elif not runs and self._since is not None:
            self._seconds += self._now() - self._since
            self._since = None
        self._changed(self._sampling)


class EngineTimeline:
    """An engine's track in the run's timeline. `run_dir`: directory of the run; None writes
    nothing.

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
    """Queue of results since the last report, for one event loop and one reader. Call `notify`
    after each append to `finished` or `aborted`.

    Invariants: reports contain every result exactly once, in order. A failure comes first, and
    again at every later call: the engine cannot be used any more.
    """

    def __init__(self) -> None:
        self.finished = SampleColumns()
        self.aborted: list[Aborted] = []
        self._failure: BaseException | None = None
        self._news = asyncio.Event()

    def notify(self) -> None:
        self._news.set()

    def fail(self, error: BaseException) -> None:
        """Record a failure. Only the first counts, because the others follow from it."""
        if self._failure is None:
            self._failure = error
        self._news.set()

    async def take(self, timeout_s: float) -> tuple[pa.RecordBatch, tuple[Aborted, ...]]:
        """Return the samples (rows of columns.SCHEMA) and aborts since the last call, as soon as
        there are any, or none after `timeout_s`. Raises the failure."""
        try:
            await asyncio.wait_for(self._news.wait(), timeout_s)
            # Results are not lost if the reader is cancelled here: they are taken only below.
            if self._failure is None:
                await asyncio.sleep(COALESCE_S)
        except TimeoutError:
            pass
        if self._failure is not None:
            raise self._failure
        # No await from here on: a response that ends meanwhile belongs to the next report.
        aborted, self.aborted = tuple(self.aborted), []
        self._news.clear()
        try:
            return self.finished.take(), aborted
        # The aborts of this report are gone, so the engine must count as failed from now on.
        except Exception as error:
            self.fail(error)
            raise

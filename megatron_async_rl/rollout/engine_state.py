"""State of an engine between sampling and loading (running, paused or asleep), the time it sampled,
its track in the run's timeline, and the health check of vLLM's process.

    running --pause--> paused --resume--> running          new weights load while paused
    running, paused --sleep--> asleep --wake--> running    and while asleep with its weights awake

Invariants: calls out of order are refused before they reach vLLM. Pausing what is paused and
resuming what runs is in order. `silent_s` of the health check grows from the last answer on,
whatever keeps the next one away; one question is open at a time.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Awaitable, Callable, Collection, Iterable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Literal

from megatron_async_rl.metrics.timeline import Timeline
from megatron_async_rl.rollout.spec import EngineSpec
from megatron_async_rl.samples.rows import StateName
from megatron_async_rl.watchdog.host_memory import (
    MemoryKind,
    Shortage,
    kernel_shortage,
    look_for_kernel_kills,
)
from megatron_async_rl.watchdog.logs import KILLED, PRIMARY, find_cause, survived

EVERY_S = 1.0
DEADLINE_S = 10.0
"""After which a question counts as lost and is asked anew. vLLM answers between two steps, not
while it loads weights."""

TAGS = ("weights", "kv_cache")
"""Parts that sleep, and wake in this order: weights are loaded before there is a cache to fill."""


class WrongState(RuntimeError):
    """An engine was asked for something that its state does not permit."""


class EngineState:
    """`name` of the engine, for its errors."""

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
            raise WrongState(f"{self._name} was to {what}, and is asleep: wake it first")

    def sleeps(self, tag: str) -> bool:
        return tag in self._asleep

    def sleepers(self, tags: Collection[str] | None) -> tuple[str, ...]:
        """The `tags` (None: all that sleeps) that are to be woken, in order.

        Raises WrongState for what is awake, ValueError for anything else.
        """
        unknown = sorted(set(tags or ()) - set(TAGS))
        if unknown:
            raise ValueError(
                f"{self._name} cannot wake {', '.join(unknown)}: what sleeps is"
                f" {' and '.join(TAGS)}"
            )
        wanted = self._asleep if tags is None else frozenset(tags)
        if not wanted or not wanted <= self._asleep:
            awake = ", ".join(tag for tag in TAGS if tag in wanted - self._asleep) or "it"
            raise WrongState(f"{self._name} was to wake, and {awake} is awake")
        return tuple(tag for tag in TAGS if tag in wanted)

    def pause(self) -> None:
        self._paused = True

    def resume(self) -> None:
        self._paused = False

    def sleep(self) -> None:
        self._asleep = frozenset(TAGS)

    def wake(self, tags: Collection[str]) -> None:
        """The last wake-up starts the engine."""
        self._asleep -= frozenset(tags)
        if not self._asleep:
            self._paused = False


class BusyClock:
    """Seconds in which an engine sampled: with at least one response in vLLM, and not paused.

    `changed`: called with the number of responses in vLLM when the first came, the last left or the
    pause changed. `now`: seconds of a clock that never goes back."""

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
        """One more response is in vLLM."""
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
    """An engine's track in the run's timeline. `run_dir`: of the run; null writes none.

    Invariant: from the first bucket of new weights to the moment it samples again an engine is
    `loading`, whatever arrives meanwhile.
    """

    def __init__(self, run_dir: Path | None, track: str, state: EngineState) -> None:
        self._timeline = Timeline(run_dir, track) if run_dir is not None else None
        self._state = state
        self._loading = False

    def changed(self, responses: int) -> None:
        """The state changed, or how many responses are in vLLM: `responses` now."""
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
        """The first bucket of new weights is about to be loaded."""
        self._loading = True
        self._enter("loading")

    def close(self) -> None:
        if self._timeline is not None:
            self._timeline.close()

    def _enter(self, state: str, waiting_for: str = "") -> None:
        if self._timeline is not None:
            self._timeline.enter(state, waiting_for)


_vllm_processes: frozenset[int] = frozenset()


def name_vllm_processes(pids: Iterable[int]) -> None:
    """Have EngineDied look for these processes among the kernel's kills."""
    global _vllm_processes
    _vllm_processes = frozenset(pids)


class EngineDied(RuntimeError):
    """vLLM's own process ended while the engine was in use.

    `last_error`: default: the last error in the engine's log, since vLLM reports here only that
    the process is gone. `kernel`: the kernel's kill of it for want of host memory; default: as this
    machine's kernel reports. `outside` and `out_of_memory` are as in ProcessDied."""

    def __init__(
        self,
        spec: EngineSpec,
        while_what: str,
        last_error: str | None = None,
        kernel: Shortage | Literal["look"] | None = "look",
    ) -> None:
        if last_error is None:
            found = find_cause(spec.log_dir, spec.log.name)
            last_error = ""
            if found is not None and found.kind in (PRIMARY, KILLED) and not survived(found):
                last_error = found.message.splitlines()[0]
        reported = f"; the last error in its log: {last_error}" if last_error else ""
        if isinstance(kernel, str):
            # Every call that meets this one death raises an error of its own: none uses up the
            # kill.
            kernel = kernel_shortage(_vllm_processes, used=False)
        what = f"the vLLM process of {spec.name} died while {while_what}{reported}; see {spec.log}"
        super().__init__(what if kernel is None else f"{what}. {kernel.message}")
        self.outside = kernel is not None and kernel.certain
        self.out_of_memory: MemoryKind | None = "host" if self.outside else None
        # The error is made anew on another machine, whose kernel has another count.
        self._arguments = (spec, while_what, last_error, kernel)

    def __reduce__(self) -> tuple[type[EngineDied], tuple[EngineSpec, str, str, Shortage | None]]:
        return (type(self), self._arguments)


@contextmanager
def named_death(spec: EngineSpec, while_what: str) -> Iterator[None]:
    """Raise EngineDied in place of vLLM's error that its process is gone, which names neither the
    cause nor the log."""
    from vllm.v1.engine.exceptions import EngineDeadError

    try:
        yield
    except EngineDeadError:
        raise EngineDied(spec, while_what) from None


class HealthCheck:
    """Watches that vLLM's process still answers: a cheap question once a second, while it samples
    and while it is paused. `probe` is answered by vLLM's process; `dead` reports that this process
    has ended."""

    def __init__(self, probe: Callable[[], Awaitable[object]], dead: Callable[[], bool]) -> None:
        self._ask = probe
        self._dead = dead
        self._answered = time.monotonic()

    @property
    def silent_s(self) -> float:
        return time.monotonic() - self._answered

    async def until_dead(self) -> None:
        """Asks until vLLM's process has ended. Raises what an answer raises."""
        self._answered = time.monotonic()  # it has just started, which may have taken minutes
        while not self._dead():
            look_for_kernel_kills()
            question = asyncio.ensure_future(self._ask())
            requested = time.monotonic()
            while (
                not question.done()
                and time.monotonic() - requested < DEADLINE_S
                and not self._dead()
            ):
                await asyncio.wait((question,), timeout=EVERY_S)
            if question.done():
                question.result()
                self._answered = time.monotonic()
                await asyncio.sleep(EVERY_S)
            else:
                question.cancel()

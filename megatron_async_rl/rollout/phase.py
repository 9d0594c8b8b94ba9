"""Where an engine stands between sampling and loading: running, paused, or asleep.

    running --pause--> paused --resume--> running          new weights load while paused
    running, paused --sleep--> asleep --wake--> running    and while asleep with its weights awake

Invariant: what is out of order is refused before vLLM hears of it. Pausing what is paused and resuming what runs is in order.
"""

from __future__ import annotations

from collections.abc import Collection

from megatron_async_rl.samples.requests import EngineState

TAGS = ("weights", "kv_cache")
"""What sleeps, and wakes in this order: weights are loaded before there is a cache to fill."""


class WrongPhase(RuntimeError):
    """An engine was asked for something that its state does not permit."""


class Phase:
    """`name` of the engine, for the refusals."""

    def __init__(self, name: str) -> None:
        self._name = name
        self._paused = False
        self._asleep: frozenset[str] = frozenset()

    @property
    def state(self) -> EngineState:
        if self._asleep:
            return "asleep"
        return "paused" if self._paused else "running"

    @property
    def runs(self) -> bool:
        return self.state == "running"

    def require_awake(self, what: str) -> None:
        if self._asleep:
            raise WrongPhase(f"{self._name} was to {what}, and is asleep: wake it first")

    def require_loadable(self) -> None:
        if self.runs:
            raise WrongPhase(f"{self._name} was to load weights, and is running: pause it first")
        if "weights" in self._asleep:
            raise WrongPhase(f"{self._name} was to load weights, and its weights are asleep: wake them first")

    def sleepers(self, tags: Collection[str] | None) -> tuple[str, ...]:
        """What of `tags` (None: all that sleeps) is to be woken, in order.

        Raises WrongPhase for what is awake, ValueError for anything else.
        """
        unknown = sorted(set(tags or ()) - set(TAGS))
        if unknown:
            raise ValueError(f"{self._name} cannot wake {', '.join(unknown)}: what sleeps is {' and '.join(TAGS)}")
        wanted = self._asleep if tags is None else frozenset(tags)
        if not wanted or not wanted <= self._asleep:
            awake = ", ".join(tag for tag in TAGS if tag in wanted - self._asleep) or "it"
            raise WrongPhase(f"{self._name} was to wake, and {awake} is awake")
        return tuple(tag for tag in TAGS if tag in wanted)

    def pause(self) -> None:
        self._paused = True

    def resume(self) -> None:
        self._paused = False

    def sleep(self) -> None:
        self._asleep = frozenset(TAGS)

    def wake(self, tags: Collection[str]) -> None:
        """The last one that wakes sets the engine going."""
        self._asleep -= frozenset(tags)
        if not self._asleep:
            self._paused = False

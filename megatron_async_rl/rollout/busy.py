"""How long an engine sampled: with at least one response in vLLM, and not paused."""

from __future__ import annotations

import time
from collections.abc import Callable


class BusyClock:
    """`turned`: told how many responses are in vLLM, whenever that or the pause changed. `now`: seconds of a clock that never
    goes back."""

    def __init__(self, turned: Callable[[int], None] = lambda responses: None, now: Callable[[], float] = time.monotonic) -> None:
        self._turned = turned
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
        self._turn()

    def end(self) -> None:
        self._sampling -= 1
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
        self._turned(self._sampling)

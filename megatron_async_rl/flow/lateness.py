"""How long groups have been running, and what is said of them when a batch is late.

Invariant: what is kept is for groups that were running at the last batch or were admitted since.
"""

from __future__ import annotations

import time
from collections.abc import Iterable

from megatron_async_rl.flow.fleet import Fleet
from megatron_async_rl.flow.scheduler import Scheduler

SHOWN = 8


class Ages:
    """Seconds since each group was admitted, by its number."""

    def __init__(self) -> None:
        self._admitted_at: dict[int, float] = {}

    def begin(self, group: int) -> None:
        self._admitted_at[group] = time.monotonic()

    def keep(self, groups: Iterable[int]) -> None:
        """The others run no longer."""
        self._admitted_at = {group: self._admitted_at[group] for group in groups}

    def of(self, group: int) -> float:
        return time.monotonic() - self._admitted_at[group]

    def oldest(self, groups: Iterable[int]) -> float:
        """0 where there are none."""
        now = time.monotonic()
        return now - min((self._admitted_at[group] for group in groups), default=now)


def lateness(version: int, timeout_s: float, scheduler: Scheduler, fleet: Fleet, ages: Ages) -> str:
    """Why there is no batch for `version`: the groups that have been running longest, and the engines that have them."""
    running = scheduler.running()
    shown = [
        f"group {index} (prompt {prompt.id}): {ages.of(index):.1f} s, on "
        + (", ".join(f"engine {holder}" for holder in fleet.holder(index)) or "no engine yet")
        for index, prompt in running[:SHOWN]
    ]
    more = [f"and {len(running) - SHOWN} more"] if len(running) > SHOWN else []
    return (
        f"no response grew for the batch of version {version} in {timeout_s:g} s; {len(running)} groups are running, the "
        f"engines hold version {scheduler.version}\n  " + "\n  ".join(shown + more)
    )

"""Decides, in the launcher, that a run has come to a standstill.

The run stands still when no mark of any process grew for `timeout_s` and no process is in a phase that may last longer, such
as an engine's start. Before all its ranks have appeared the run is starting, and `start_s` is its limit.
"""

from __future__ import annotations

import time
from pathlib import Path

from megatron_async_rl.observe.movement import Movement
from megatron_async_rl.observe.processes import of_run
from megatron_async_rl.observe.stall import Stall, gather

LOOK_S = 1.0


class Watchdog:
    """`ranks`: how many processes named `rank N` the run has."""

    def __init__(self, run_dir: Path, run_id: str, *, timeout_s: float, start_s: float, ranks: int) -> None:
        self._run_dir = run_dir
        self._run_id = run_id
        self._timeout_s = timeout_s
        self._start_s = max(timeout_s, start_s)
        self._ranks = ranks
        self._movement = Movement(run_dir)
        self._looked_at = float("-inf")
        self._all_here = False

    def look(self) -> Stall | None:
        """What holds the run up, when it stands still; else None. Cheap: call it a few times a second."""
        if time.monotonic() - self._looked_at < LOOK_S:
            return None
        self._looked_at = time.monotonic()
        movement = self._movement
        movement.look()
        self._all_here = self._all_here or sum(state.name.startswith("rank ") for state in movement.states) >= self._ranks
        limit, key = (self._timeout_s, "watchdog.timeout_s") if self._all_here else (self._start_s, "rollout.start_timeout_s")
        if movement.still_s < limit or movement.allowed_s > 0:
            return None
        headline = f"Nothing moved for {movement.still_s:.0f} s ({key}: {limit:g}). The last thing that did: {movement.last}."
        return gather(self._run_dir, headline, still_s=movement.still_s, others=of_run(self._run_id))

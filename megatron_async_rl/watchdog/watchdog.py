"""Watchdog in the launcher: detects that a run has stalled or that another machine is lost.

The run has stalled when no mark of any process grew for `timeout_s` and no process is in a phase
that may last longer, such as an engine's start. Until all its ranks have appeared, the run is
starting, and its limit is `start_s`. Each machine's launcher decides for itself; the first notifies
the others, and all end the run with the same snapshot.
"""

from __future__ import annotations

import time
from dataclasses import replace
from pathlib import Path

from megatron_async_rl.watchdog.processes import of_run
from megatron_async_rl.watchdog.progress_monitor import FRESH_S, LAUNCHER, ProgressMonitor
from megatron_async_rl.watchdog.stall import Stall, gather, look_here, publish, read_others

LOOK_S = 1.0
LEFT_S = 30.0
"""Longest time that the others' ranks continue once a launcher has ended. They fail by themselves,
with better messages."""


class Watchdog:
    """Watchdog of node `node` of `nodes`. `ranks`: number of the run's processes named `rank N`, on
    all nodes. `start_key`: key of the config that extends `start_s`."""

    def __init__(
        self,
        run_dir: Path,
        run_id: str,
        *,
        timeout_s: float,
        start_s: float,
        start_key: str = "rollout.start_timeout_s",
        ranks: int,
        node: int = 0,
        nodes: int = 1,
    ) -> None:
        self._run_dir = run_dir
        self._run_id = run_id
        self._timeout_s = timeout_s
        # A start may take longer than any wait of the run, but its limit is never shorter.
        self._start_s = max(timeout_s, start_s)
        self._start_key = start_key if start_s >= timeout_s else "watchdog.timeout_s"
        self._ranks = ranks
        self._other_launchers = [f"{LAUNCHER}{other}" for other in range(nodes) if other != node]
        self._hosts: dict[str, str] = {}
        self._monitor = ProgressMonitor(run_dir)
        # The first check happens at once.
        self._looked_at = float("-inf")
        self._all_here = self._answered = False

    def look(self) -> Stall | None:
        """Return the cause of a stall or of the loss of a machine; else None. The call is cheap:
        make it a few times a second."""
        if time.monotonic() - self._looked_at < LOOK_S:
            return None
        self._looked_at = time.monotonic()
        monitor = self._monitor
        monitor.look_at_all()
        # Stays true, so that the end of a rank does not restore the start's limit.
        self._all_here = (
            self._all_here
            or sum(state.name.startswith("rank ") for state in monitor.states) >= self._ranks
        )
        others = read_others(self._run_dir)
        ends = next((other.ends for other in others if other.ends is not None), None)
        # Another launcher has decided: all report the same cause.
        if ends is not None:
            return self._gather(ends)
        # Another process takes a snapshot: answer once, whatever this launcher's own judgement is.
        if others and not self._answered:
            self._answered = True
            publish(self._run_dir, look_here(self._run_dir, of_run(self._run_id)))
        for name in self._other_launchers:
            if (stall := self._gone(name)) is not None:
                return stall
        limit, key = (
            (self._timeout_s, "watchdog.timeout_s")
            if self._all_here
            else (self._start_s, self._start_key)
        )
        if monitor.still_s < limit or monitor.allowed_s > 0:
            return None
        return self._gather(
            f"Nothing moved for {monitor.still_s:.0f} s ({key}: {limit:g}). The last thing that"
            f" did: {monitor.last}."
        )

    def _gone(self, launcher: str) -> Stall | None:
        state = next((state for state in self._monitor.states if state.name == launcher), None)
        if state is not None:
            self._hosts[launcher] = state.host
        silent_s = self._monitor.silent_s(launcher)
        # It removed its state file, so it ended by itself.
        if state is None and silent_s >= LEFT_S:
            message = (
                f"{self._node(launcher)} ended {silent_s:.0f} s ago, before the run did; its"
                " terminal shows the reason."
            )
            return replace(self._gather(message), kind="NodeEnded", consequence=True)
        # The file exists and does not change, so the machine is lost.
        if state is not None and silent_s >= self._timeout_s:
            return self._gather(
                f"{self._node(launcher)} has not reported for {silent_s:.0f} s"
                f" (watchdog.timeout_s: {self._timeout_s:g}): the machine, or `mar train` on it, is"
                " lost."
            )
        return None

    def _gather(self, headline: str) -> Stall:
        silent = {launcher: self._monitor.silent_s(launcher) for launcher in self._hosts}
        lost = [
            f"{self._node(launcher)} last reported {silent_s:.0f} s ago."
            for launcher, silent_s in silent.items()
            if silent_s >= FRESH_S and not headline.startswith(self._node(launcher))
        ]
        return gather(
            self._run_dir,
            headline,
            still_s=self._monitor.still_s,
            others=of_run(self._run_id),
            lost=lost,
            ends_run=True,
        )

    def _node(self, launcher: str) -> str:
        """Return the name of a launcher's node for the beginning of a sentence."""
        return f"Node {launcher.removeprefix(LAUNCHER)} ({self._hosts[launcher]})"

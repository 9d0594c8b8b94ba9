"""Whether the run moves, read from the state files of its processes.

The run has moved when a mark of any process grew, or a process appeared. Clocks of machines are not compared: ages are
those that the writer measured, and what changes between two looks is timed here.
"""

from __future__ import annotations

import json
import time
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

FOLDER = "watch"
"""Of state files, in the run's directory."""
LAUNCHER = "launcher "
"""How the names of the launchers' own states begin; the number of the node follows."""
FRESH_S = 10.0
"""A process whose state changed within so many seconds is alive and runs Python."""


@dataclass(frozen=True, kw_only=True)
class ProcessState:
    """One state file. Activities: kind, name, since_s, deadline_s. Progress: mark -> (count, seconds since it grew)."""

    name: str
    pid: int
    host: str
    time: float
    """Unix seconds, by the writer's clock."""
    activities: list[dict[str, Any]] = field(default_factory=list)
    progress: dict[str, tuple[int, float]] = field(default_factory=dict)
    facts: dict[str, Any] = field(default_factory=dict)

    @property
    def is_launcher(self) -> bool:
        return self.name.startswith(LAUNCHER)

    def of_kind(self, kind: str) -> list[dict[str, Any]]:
        """The longest-lasting first."""
        return sorted((one for one in self.activities if one["kind"] == kind), key=lambda one: -one["since_s"])


def read_states(run_dir: Path) -> list[ProcessState]:
    """Every readable state of `run_dir`, by name. Files are replaced whole, so one that is not readable is not ours."""
    states = []
    for path in sorted((run_dir / FOLDER).glob("*.json")):
        try:
            states.append(ProcessState(**json.loads(path.read_text())))
        except (OSError, ValueError, TypeError):  # it ended meanwhile
            continue
    return states


class Movement:
    """Call `look` every second or so; the other members speak of the time of the last look."""

    def __init__(self, run_dir: Path) -> None:
        self._run_dir = run_dir
        self._counts: dict[tuple[str, int], dict[str, int]] = {}
        self._beats: dict[str, tuple[float, float]] = {}
        self._moved_at = time.monotonic()
        self._now = self._moved_at
        self.last = "the start"
        """What moved last, and where."""
        self.states: list[ProcessState] = []
        self.allowed_s = 0.0
        """How much longer the run may be without progress, by the phases its processes are in."""

    @property
    def still_s(self) -> float:
        """Seconds since the run moved."""
        return self._now - self._moved_at

    def look(self) -> None:
        self._now = time.monotonic()
        self.states = read_states(self._run_dir)
        self.allowed_s = 0.0
        for state in self.states:
            key, counts = (state.name, state.pid), {mark: count for mark, (count, _) in state.progress.items()}
            known = self._counts.get(key)
            if known is None and not state.is_launcher:
                self._move(f"the start of {state.name}")
            for mark in counts:
                if known is not None and counts[mark] != known.get(mark, 0):
                    self._move(f"{mark} in {state.name}")
            self._counts[key] = counts
            seen = self._beats.get(state.name)
            if seen is None or seen[0] != state.time:
                self._beats[state.name] = (state.time, self._now)
            for phase in state.of_kind("phase"):
                self.allowed_s = max(self.allowed_s, phase["deadline_s"] - phase["since_s"] - self.silent_s(state.name))

    def silent_s(self, name: str) -> float:
        """Seconds since the state of process `name` was seen to change; 0 when there is none."""
        return self._now - self._beats[name][1] if name in self._beats else 0.0

    def launcher_watches(self) -> bool:
        return any(state.is_launcher and self.silent_s(state.name) < FRESH_S for state in self.states)

    def _move(self, what: str) -> None:
        self._moved_at = self._now
        self.last = what

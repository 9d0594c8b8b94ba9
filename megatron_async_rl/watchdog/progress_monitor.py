"""Progress of the run, and each node's summary of its processes.

Every process replaces its own state file each second. One process of each node, the aggregator,
reads the files of its node and publishes `RUN/watch/<host>.summary`: the states, and whether the
run moves, as far as it knows. All other processes of the node read that one file, so the number of
reads on a node grows with its processes and not with their square.

Invariants:
- the launcher or a rank aggregates. A process that finds the summary missing, or unchanged for
  STALE_S, takes over, and an aggregator that finds another's fresh summary yields. So a dead or
  stopped aggregator is replaced, and of two the last to publish remains;
- an aggregator reads every state file that no other node's fresh summary contains, so a node
  without an aggregator of its own (engines alone) is included, too;
- the run has moved when a mark of any process grew, or a process appeared;
- clocks of machines are not compared: the writer of a state measures its age, and changes between
  two reads are timed here.
"""

from __future__ import annotations

import itertools
import json
import os
import socket
import threading
import time
from collections.abc import Container
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

from megatron_async_rl.config.durable import PARTIAL

FOLDER = "watch"
"""Name of the folder of the state files in the run's directory."""
LAUNCHER = "launcher "
"""Prefix of the names of the launchers' states; the number of the node follows."""
FRESH_S = 10.0
"""Time within which the state of a live process that runs Python changes, in seconds."""
STALE_S = 3.0
"""Age at which an unchanged summary has lost its aggregator."""

# Several monitors in one process need different names.
_numbers = itertools.count()


@dataclass(frozen=True, kw_only=True)
class ProcessState:
    """Content of one state file. Activities: kind, name, since_s, deadline_s. Progress: mark ->
    (count, seconds since it grew)."""

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
        """Return the activities of this kind, the longest first."""
        return sorted(
            (one for one in self.activities if one["kind"] == kind), key=lambda one: -one["since_s"]
        )


@dataclass(frozen=True, kw_only=True)
class NodeSummary:
    """The summary that the aggregator `by` of the node `host` published with its beat `beat`.
    `still_s`, `allowed_s`, `last` and `launcher_watches` describe the whole run, and `states` the
    node."""

    host: str
    by: str
    beat: int
    still_s: float
    allowed_s: float
    last: str
    launcher_watches: bool
    states: list[ProcessState]


def write_whole(path: Path, text: str) -> None:
    """Replace a file that others read during the run: they read the old content or the new one.
    Raises OSError. Files that a later start needs are written by `write_file` instead.

    The temporary name belongs to this thread alone: a process writes files that differ only in
    their suffix, from several threads, and launchers of several machines write the same file.
    """
    # Thread ids are unique only within a host.
    writer = f"{socket.gethostname()}.{threading.get_native_id()}"
    partial = path.with_name(f"{path.name}.{writer}{PARTIAL}")
    partial.write_text(text, encoding="utf-8")
    os.replace(partial, path)


def read_states(run_dir: Path, leave_out: Container[str] = ()) -> list[ProcessState]:
    """Return every readable state of `run_dir`, by name, except files whose stem is in `leave_out`.
    Files are replaced whole, so an unreadable file does not belong to this run."""
    states = []
    for path in sorted((run_dir / FOLDER).glob("*.json")):
        if path.stem not in leave_out and (tree := _read_json(path)) is not None:
            # A state of another version has other fields and is skipped.
            states += _state_from(tree)
    return states


class ProgressMonitor:
    """Progress as this process knows it. Call `look` about every second; the other members refer to
    the last call."""

    def __init__(self, run_dir: Path) -> None:
        self._folder = run_dir / FOLDER
        self._run_dir = run_dir
        self._host = socket.gethostname()
        self._name = f"{os.getpid()}/{next(_numbers)}"
        self._counts: dict[tuple[str, int], dict[str, int]] = {}
        self._beats: dict[str, tuple[float, float]] = {}
        self._summaries: dict[str, tuple[tuple[str, int], float]] = {}
        """Host -> (name and beat of its newest summary, time when it was first read)."""
        self._beat = 0
        self._followed = False
        self._moved_at = time.monotonic()
        self._now = self._moved_at
        self.last = "the start"
        """The mark that moved last, and its process."""
        self.states: list[ProcessState] = []
        """States of the whole run if this process aggregates them, else of this node."""
        self.launcher_watches = False
        """True if a launcher can notice a run that does not move."""
        self.allowed_s = 0.0
        """Seconds for which the run may still be without progress, according to the phases of its
        processes."""

    @property
    def still_s(self) -> float:
        """Seconds since the run moved."""
        return self._now - self._moved_at

    def look(self) -> None:
        """Read this node's summary and use it; publish it unless another process does."""
        self._now = time.monotonic()
        path = self._folder / f"{self._host}.summary"
        summary = self._read_summary(path)
        # Yield to a live aggregator, because two would read every file twice.
        if summary is not None and summary.by != self._name and self._is_fresh(summary):
            self._follow(summary)
            return

        self._see(self._run_states(path))
        self._publish(path)

    def look_at_all(self) -> None:
        """Do the same as `look`, but read the states of the whole run even if another process
        aggregates them: from the summaries, one file for each node."""
        self.look()
        if self._followed:
            # The summary just read is newer than the files from which it was made.
            own = {state.name: state for state in self.states}
            others = self._run_states(None, known=own)
            self._learn(others)
            self.states = others

    def silent_s(self, name: str) -> float:
        """Return the seconds since the state of process `name` changed; 0 if there is none."""
        return self._now - self._beats[name][1] if name in self._beats else 0.0

    def _follow(self, summary: NodeSummary) -> None:
        """Use the aggregator's results."""
        # The summary describes the moment when it was published, not the present.
        age_s = self._now - self._summaries[summary.host][1]
        self._learn(summary.states)
        self.states = summary.states
        self._moved_at = self._now - summary.still_s - age_s
        self.last = summary.last
        self.allowed_s = max(0.0, summary.allowed_s - age_s)
        self.launcher_watches = summary.launcher_watches
        self._followed = True

    def _see(self, states: list[ProcessState]) -> None:
        """Evaluate the states of the whole run."""
        # A monitor that has just taken over knows only its own node: values that are new to it are
        # not progress.
        moves = self._learn(states)
        if not self._followed and moves:
            self._moved_at = self._now
            self.last = moves[-1]
        self._followed = False
        self.states = states
        phases = [(state, phase) for state in states for phase in state.of_kind("phase")]
        self.allowed_s = max(
            (
                phase["deadline_s"] - phase["since_s"] - self.silent_s(state.name)
                for state, phase in phases
            ),
            default=0.0,
        )
        self.allowed_s = max(0.0, self.allowed_s)
        self.launcher_watches = any(
            state.is_launcher and self.silent_s(state.name) < FRESH_S for state in states
        )

    def _learn(self, states: list[ProcessState]) -> list[str]:
        """Record beats and counts. Return the names of those that grew or appeared since the last
        call."""
        moves = []
        for state in states:
            key = (state.name, state.pid)
            counts = {mark: count for mark, (count, _) in state.progress.items()}
            known = self._counts.get(key)
            # A new launcher is not progress, because it only watches.
            if known is None and not state.is_launcher:
                moves.append(f"the start of {state.name}")
            if known is not None:
                grown = [mark for mark in counts if counts[mark] != known.get(mark, 0)]
                moves += [f"{mark} in {state.name}" for mark in grown]
            self._counts[key] = counts

            seen = self._beats.get(state.name)
            # Compared for equality only, because clocks of other machines may be wrong.
            if seen is None or seen[0] != state.time:
                self._beats[state.name] = (state.time, self._now)
        return moves

    def _run_states(
        self, own: Path | None, known: dict[str, ProcessState] | None = None
    ) -> list[ProcessState]:
        """Return the states of the whole run: those in fresh summaries of other nodes, those in
        `known`, and those in all other files. `own`: the summary to ignore."""
        carried = dict(known or {})
        for path in self._folder.glob("*.summary"):
            # This node's summary is the one being made.
            if path == own or path.stem == self._host:
                continue
            summary = self._read_summary(path)
            if summary is not None and self._is_fresh(summary):
                carried |= {state.name: state for state in summary.states}
        left = read_states(self._run_dir, {_stem(name) for name in carried})
        return sorted([*carried.values(), *left], key=lambda state: state.name)

    def _read_summary(self, path: Path) -> NodeSummary | None:
        if (tree := _read_json(path)) is None:
            return None
        try:
            states = [state for one in tree.pop("states") for state in _state_from(one)]
            summary = NodeSummary(**tree, states=states)
        except (KeyError, TypeError):
            return None
        sign = (summary.by, summary.beat)
        # Timed when first read here, by this machine's clock.
        if summary.host not in self._summaries or self._summaries[summary.host][0] != sign:
            self._summaries[summary.host] = (sign, self._now)
        return summary

    def _is_fresh(self, summary: NodeSummary) -> bool:
        return self._now - self._summaries[summary.host][1] < STALE_S

    def _publish(self, path: Path) -> None:
        self._beat += 1
        summary = NodeSummary(
            host=self._host,
            by=self._name,
            beat=self._beat,
            still_s=round(self.still_s, 1),
            allowed_s=round(self.allowed_s, 1),
            last=self.last,
            launcher_watches=self.launcher_watches,
            states=[state for state in self.states if state.host == self._host],
        )
        try:
            write_whole(path, json.dumps(asdict(summary)))
        except OSError:  # a full disk, or no directory yet: other processes read the files
            return


def _stem(name: str) -> str:
    return name.replace("/", "_")


def _read_json(path: Path) -> dict[str, Any] | None:
    """Return the content of a file; None if the file is gone or belongs to another program."""
    try:
        tree = json.loads(path.read_text(encoding="utf-8"))
    except (OSError, ValueError):
        return None
    return tree if isinstance(tree, dict) else None


def _state_from(tree: Any) -> list[ProcessState]:
    """Return the state, or None if the file does not contain one."""
    try:
        return [ProcessState(**tree)]
    except TypeError:
        return []

"""`RUN/timeline/<track>.jsonl`: what one process did when, a line for each span.

Invariants:
- a track is written by one process, and its spans follow each other: one ends when the next begins;
- a span is on disk when `enter` or `close` returns; the span in progress is not there yet;
- a span that cannot be written, as on a full disk, is lost, and that is logged once: a process's
  work does not depend on its timeline;
- a resumed run, or a restarted engine, appends to the track; the time between is in no span.

The tracks are `rank 0` and `engine-0`, `engine-1`, ...; their states are `RANK` and `ENGINE`.
"""

from __future__ import annotations

import json
import logging
import time
from collections import deque
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from threading import Lock
from typing import BinaryIO

from megatron_async_rl.config.durable import reading
from megatron_async_rl.metrics.json_lines import GrowingFile

_log = logging.getLogger(__name__)

FOLDER = "timeline"
NEWEST_BYTES = 8 * 2**20
SPANS_KEPT = 40_000
"""Number of spans of a track that a following reader keeps."""

RANK = (
    "training",
    "publishing",
    "evaluating",
    "checkpointing",
    "restoring",
    "releasing",
    "waiting",
)
"""`restoring` and `releasing`: colocated, the policy takes back and gives up its training state."""
ENGINE = ("busy", "loading", "paused", "asleep", "idle")
"""`busy` samples; `idle` has nothing to sample; `loading` takes new weights; `paused` and `asleep`
may not sample."""
WAITING = frozenset({"waiting", "paused", "asleep", "idle"})
"""The states in which a process does no work."""


@dataclass(frozen=True, kw_only=True)
class Span:
    track: str
    state: str
    waiting_for: str = ""
    start: float
    """Unix seconds, as `end`."""
    end: float

    @property
    def seconds(self) -> float:
        return self.end - self.start


class Timeline:
    """One process's track. Any thread may call it."""

    def __init__(self, run_dir: Path, track: str) -> None:
        folder = run_dir / FOLDER
        folder.mkdir(parents=True, exist_ok=True)
        self._track = track
        # Unbuffered: what could not be written is not kept to fail again later.
        self._file: BinaryIO | None = open(folder / f"{track}.jsonl", "ab", buffering=0)  # noqa: SIM115 - closed by close()
        self._broken = False
        self._lock = Lock()
        self._now: tuple[str, str, float] | None = None
        if self._file.tell():
            # What a crash left half written stays a line of its own.
            self._write("\n")

    def enter(self, state: str, waiting_for: str = "") -> None:
        """End the current span and begin one. Repeating the state and reason changes nothing."""
        with self._lock:
            # Calls after close come from threads that end later.
            if self._file is not None and (
                self._now is None or self._now[:2] != (state, waiting_for)
            ):
                now = time.time()
                self._end(now)
                # The same moment ends one span and begins the next: a track has no gap.
                self._now = (state, waiting_for, now)

    def close(self) -> None:
        """End the last span. Later calls do nothing."""
        with self._lock:
            if self._file is not None:
                self._end(time.time())
                self._file.close()
                self._file = None

    def _end(self, now: float) -> None:
        if self._now is None or self._file is None:
            return
        state, waiting_for, start = self._now
        line = {
            "track": self._track,
            "state": state,
            "for": waiting_for,
            "start": round(start, 4),
            "end": round(now, 4),
        }
        self._write(json.dumps(line) + "\n")

    def _write(self, text: str) -> None:
        assert self._file is not None
        try:
            # After a failure part of a line may stand there: the next one begins again.
            self._file.write(("\n" + text if self._broken else text).encode())
            self._broken = False
        except OSError as error:
            if not self._broken:
                _log.warning("the timeline of %s was not written: %s", self._track, error)
            self._broken = True


def read_timeline(run_dir: Path) -> dict[str, list[Span]]:
    """Return the spans of each track in order of time; `rank 0` first. Lines that are not spans,
    such as a line that a crash cut, are skipped. Raises UserError for a file that cannot be
    read."""
    tracks: dict[str, list[Span]] = {}
    for path in _tracks(run_dir):
        # Absent tracks are simply not listed.
        with reading(path):
            lines = path.read_bytes().splitlines()
        spans = sorted(_spans(path.stem, lines), key=lambda span: span.start)
        if spans:
            tracks[path.stem] = spans
    return tracks


class TimelineReader:
    """The newest spans of each track while the run continues, each line read once."""

    def __init__(self, run_dir: Path) -> None:
        self._run_dir = run_dir
        self._files: dict[Path, GrowingFile] = {}
        self._spans: dict[Path, deque[Span]] = {}

    def read(self) -> dict[str, list[Span]]:
        """Return the spans of each track as `read_timeline` does, limited to the newest
        NEWEST_BYTES and SPANS_KEPT."""
        tracks: dict[str, list[Span]] = {}
        for path in _tracks(self._run_dir):
            # Tracks appear when engines join.
            file = self._files.setdefault(path, GrowingFile(path, NEWEST_BYTES))
            kept = self._spans.setdefault(path, deque(maxlen=SPANS_KEPT))
            lines, restarted = file.new_lines()
            # The file was replaced: its spans are others.
            if restarted:
                kept.clear()
            kept.extend(_spans(path.stem, lines))
            if kept:
                tracks[path.stem] = sorted(kept, key=lambda span: span.start)
        return tracks


def shares(spans: Sequence[Span], start: float, end: float) -> Mapping[tuple[str, str], float]:
    """Return the share of `start` to `end` spent in each (state, waiting for), largest first; the
    shares sum to 1 if the track has no gap."""
    seconds: dict[tuple[str, str], float] = {}
    for span in spans:
        # A span may reach beyond the window on either side.
        inside = min(span.end, end) - max(span.start, start)
        if inside > 0:
            kind = (span.state, span.waiting_for)
            seconds[kind] = seconds.get(kind, 0.0) + inside
    whole = end - start
    return {kind: part / whole for kind, part in sorted(seconds.items(), key=lambda item: -item[1])}


def _tracks(run_dir: Path) -> list[Path]:
    return sorted((run_dir / FOLDER).glob("*.jsonl"), key=lambda path: _place(path.stem))


def _place(track: str) -> tuple[bool, str, int]:
    name, _, number = track.replace("-", " ").rpartition(" ")
    # By number: engine-10 comes after engine-9.
    return name != "rank", name, int(number) if number.isdigit() else -1


def _spans(track: str, lines: Iterable[bytes]) -> Iterator[Span]:
    for line in lines:
        try:
            entry = json.loads(line)
            span = Span(
                track=track,
                state=str(entry["state"]),
                waiting_for=str(entry.get("for", "")),
                start=float(entry["start"]),
                end=float(entry["end"]),
            )
        except (ValueError, KeyError, TypeError, AttributeError):
            continue
        # A clock that was set back gives a span of negative length.
        if span.end >= span.start:
            yield span

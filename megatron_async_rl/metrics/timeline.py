"""Timelines of processes. `RUN/timeline/<track>.jsonl` has the states of one process over time, one
line for each span.

Invariants:
- one process writes a track, and each of its spans ends when the next one begins;
- a span is on disk when the `enter` or `close` that ends it returns; the current span is not in the
  file;
- if a span cannot be written, for example because the disk is full, it is lost, and the first loss
  is logged; the process continues;
- a resumed run or a restarted engine appends to its track; no span covers the time in between.

The tracks are `rank 0`, with the states `RANK`, and `engine-0`, `engine-1`, ..., with the states
`ENGINE`.
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
"""Number of bytes at the end of a track's file that `TimelineReader` reads."""
SPANS_KEPT = 40_000
"""Number of spans of a track that `TimelineReader` keeps."""

RANK = (
    "distributing",
    "training",
    "publishing",
    "evaluating",
    "checkpointing",
    "restoring",
    "releasing",
    "waiting",
)
"""States of rank 0. `distributing`: it divides a batch and sends it to the ranks. `restoring` and
`releasing`: with colocated engines, the policy restores its training state to the device, or
releases its memory."""
ENGINE = ("busy", "loading", "paused", "asleep", "idle")
"""States of an engine. `busy`: it samples; `idle`: it has no requests; `loading`: it loads new
weights; `paused`, `asleep`: it may not sample."""
WAITING = frozenset({"waiting", "paused", "asleep", "idle"})
"""States in which a process does no work."""


@dataclass(frozen=True, kw_only=True)
class Span:
    """Period in which a process was in one state."""

    track: str
    state: str
    waiting_for: str = ""
    """Event for which the process waits, such as `batch`; may be empty."""
    start: float
    """Unix seconds."""
    end: float
    """Unix seconds."""

    @property
    def seconds(self) -> float:
        return self.end - self.start


class Timeline:
    """Writer of one process's track. Its methods are thread-safe."""

    def __init__(self, run_dir: Path, track: str) -> None:
        folder = run_dir / FOLDER
        folder.mkdir(parents=True, exist_ok=True)
        self._track = track
        # Unbuffered: a buffer would keep text that could not be written, and fail again later.
        self._file: BinaryIO | None = open(folder / f"{track}.jsonl", "ab", buffering=0)  # noqa: SIM115 - closed by close()
        self._broken = False
        self._lock = Lock()
        self._now: tuple[str, str, float] | None = None
        if self._file.tell():
            # End a partial line that a crash may have left.
            self._write("\n")

    def enter(self, state: str, waiting_for: str = "") -> None:
        """End the current span and begin a new one. Does nothing if `state` and `waiting_for` are
        those of the current span."""
        with self._lock:
            # A thread that ends after `close` may still call this method.
            if self._file is not None and (
                self._now is None or self._now[:2] != (state, waiting_for)
            ):
                now = time.time()
                self._end(now)
                # Use the same time for the end and the next start, so that a track has no gap.
                self._now = (state, waiting_for, now)

    def close(self) -> None:
        """End the last span and close the file. Later calls of any method do nothing."""
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
            # After a failure the file may end with a partial line, so begin a new line.
            self._file.write(("\n" + text if self._broken else text).encode())
            self._broken = False
        except OSError as error:
            if not self._broken:
                _log.warning("the timeline of %s cannot be written: %s", self._track, error)
            self._broken = True


def read_timeline(run_dir: Path) -> dict[str, list[Span]]:
    """Return the spans of each track in order of time, `rank 0` first. Omits tracks without spans,
    and lines that are not spans, such as a line that a crash truncated.

    Raises UserError for a file that cannot be read.
    """
    tracks: dict[str, list[Span]] = {}
    for path in _tracks(run_dir):
        with reading(path):
            lines = path.read_bytes().splitlines()
        spans = sorted(_spans(path.stem, lines), key=lambda span: span.start)
        if spans:
            tracks[path.stem] = spans
    return tracks


class TimelineReader:
    """Reader of the newest spans of each track while the run continues. Reads each line once."""

    def __init__(self, run_dir: Path) -> None:
        self._run_dir = run_dir
        self._files: dict[Path, GrowingFile] = {}
        self._spans: dict[Path, deque[Span]] = {}

    def read(self) -> dict[str, list[Span]]:
        """Return the spans of each track as `read_timeline` does, but at most SPANS_KEPT, and none
        from before the last NEWEST_BYTES of the file at the first call."""
        tracks: dict[str, list[Span]] = {}
        for path in _tracks(self._run_dir):
            # A new track appears when an engine joins.
            file = self._files.setdefault(path, GrowingFile(path, NEWEST_BYTES))
            kept = self._spans.setdefault(path, deque(maxlen=SPANS_KEPT))
            lines, restarted = file.new_lines()
            # The file was replaced, so the spans of the old file are no longer valid.
            if restarted:
                kept.clear()
            kept.extend(_spans(path.stem, lines))
            if kept:
                tracks[path.stem] = sorted(kept, key=lambda span: span.start)
        return tracks


def shares(spans: Sequence[Span], start: float, end: float) -> Mapping[tuple[str, str], float]:
    """Return the share of the time from `start` to `end` spent in each (state, waiting for),
    largest first. The shares sum to 1 if the spans cover the whole time."""
    seconds: dict[tuple[str, str], float] = {}
    for span in spans:
        # A span may begin before `start` or end after `end`.
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
    # Sort by number, so that engine-10 comes after engine-9.
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
        # If the clock was set back, a span may end before it starts; skip it.
        if span.end >= span.start:
            yield span

"""Activities of a run's processes during its last steps."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from statistics import median

from megatron_async_rl.metrics.log import MetricRow, number
from megatron_async_rl.metrics.timeline import Span, shares

WINDOW_STEPS = 12
"""Number of last steps in the timeline."""
STOP_S, STOP_STEPS = 60.0, 10
"""Limits of the time between two steps (seconds, median steps). Above both, the run had stopped."""
PARTS = 4
"""Maximum number of activities per process in the table of the last steps."""


@dataclass(frozen=True, kw_only=True)
class TimelineWindow:
    """Activities of each process during the last steps of a run. Times are Unix seconds."""

    start: float
    end: float
    steps: Sequence[tuple[int, float]]
    """(step, time of its end) of each step in the window."""
    tracks: Mapping[str, Sequence[Span]]
    """Process -> its spans, clipped to the window; `rank 0` first."""

    def as_text(self) -> list[tuple[str, str]]:
        """Return (process, text with its activities, longest first) of each process."""
        lines = []
        for track, spans in self.tracks.items():
            parts = list(shares(spans, self.start, self.end).items())[:PARTS]
            lines.append(
                (track, ", ".join(f"{_activity(*kind)} {part:.0%}" for kind, part in parts))
            )
        return lines


def timeline_window(
    rows: Sequence[MetricRow], tracks: Mapping[str, Sequence[Span]], steps: int = WINDOW_STEPS
) -> TimelineWindow | None:
    """Return the window of at most `steps` last steps since the run's last stop; None if no process
    has a span in it."""
    ended = [
        (int(step), at)
        for row in rows
        if (step := number(row, "step")) and (at := number(row, "time")) is not None
    ]
    durations = [second for row in rows if (second := number(row, "time/step_s")) is not None]
    if not ended or not durations:
        return None

    stop = max(STOP_S, STOP_STEPS * median(durations))
    shown = [ended[-1]]
    for one in reversed(ended[:-1]):
        # Begin the window after a stop, whose duration would make all bars invisibly short.
        if len(shown) > steps or shown[-1][1] - one[1] > stop:
            break
        shown.append(one)
    if len(shown) > steps:
        # The first step began when the step before it ended.
        start = shown.pop()[1]
    else:
        # There is no earlier step, so estimate the start from a step's duration.
        start = shown[-1][1] - (durations[-1] if len(shown) == 1 else median(durations))
    end = ended[-1][1]

    clipped = {track: _clip(spans, start, end) for track, spans in tracks.items()}
    inside = {track: spans for track, spans in clipped.items() if spans}
    if not inside or end <= start:
        return None
    return TimelineWindow(start=start, end=end, steps=shown[::-1], tracks=inside)


def _clip(spans: Sequence[Span], start: float, end: float) -> list[Span]:
    return [
        replace(span, start=max(start, span.start), end=min(end, span.end))
        for span in spans
        if span.end > start and span.start < end
    ]


def _activity(state: str, waiting_for: str) -> str:
    if state == "waiting" and waiting_for:
        return f"waiting for {waiting_for}"
    return f"{state} (waits for {waiting_for})" if waiting_for else state

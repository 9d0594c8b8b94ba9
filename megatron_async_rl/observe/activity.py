"""The last steps of a run as each process spent them: the window of the timelines that the report draws."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from statistics import median

from megatron_async_rl.observe.read import Row, number
from megatron_async_rl.observe.timeline import Span, shares

STEPS = 12
HOLE_S = 60.0
HOLE_STEPS = 10
"""A step that ended later after the one before than both of these, the second in steps, came after a stop of the run."""
PARTS = 4


@dataclass(frozen=True, kw_only=True)
class Activity:
    start: float
    """Unix seconds, as `end`."""
    end: float
    steps: Sequence[tuple[int, float]]
    """(step, when it ended); all in the window."""
    tracks: Mapping[str, Sequence[Span]]
    """The spans that touch the window, cut to it; `rank 0` first."""

    def in_words(self) -> list[tuple[str, str]]:
        """(track, what it did), the most of the time first."""
        lines = []
        for track, spans in self.tracks.items():
            parts = shares(spans, self.start, self.end)
            lines.append((track, ", ".join(f"{_name(*kind)} {share:.0%}" for kind, share in list(parts.items())[:PARTS])))
        return lines


def recent_activity(rows: Sequence[Row], tracks: Mapping[str, Sequence[Span]], steps: int = STEPS) -> Activity | None:
    """Of the last `steps` steps, fewer where the run was stopped in between; None where no process wrote what it did."""
    ended = [(int(step), at) for row in rows if (step := number(row, "step")) and (at := number(row, "time")) is not None]
    took = [second for row in rows if (second := number(row, "time/step_s")) is not None]
    if not ended or not took:
        return None
    hole = max(HOLE_S, HOLE_STEPS * median(took))
    shown = [ended[-1]]
    start = ended[-1][1] - took[-1]
    for step, at in reversed(ended[:-1]):
        if shown[-1][1] - at > hole:
            break
        start = at
        if len(shown) == steps:
            break
        shown.append((step, at))
        start = at - median(took)
    end = ended[-1][1]
    cut = {track: _cut(spans, start, end) for track, spans in tracks.items()}
    inside = {track: spans for track, spans in cut.items() if spans}
    return Activity(start=start, end=end, steps=shown[::-1], tracks=inside) if inside and end > start else None


def _cut(spans: Sequence[Span], start: float, end: float) -> list[Span]:
    return [
        Span(
            track=span.track,
            state=span.state,
            waiting_for=span.waiting_for,
            start=max(start, span.start),
            end=min(end, span.end),
        )
        for span in spans
        if min(end, span.end) > max(start, span.start)
    ]


def _name(state: str, waiting_for: str) -> str:
    if not waiting_for:
        return state
    return f"{state} for {waiting_for}" if state == "waiting" else f"{state} (waits for {waiting_for})"

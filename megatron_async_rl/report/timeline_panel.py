"""Panel with the activity of each process over the time of a run's last steps."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

from megatron_async_rl.metrics.timeline import Span
from megatron_async_rl.report.panel import Bar, Panel
from megatron_async_rl.report.timeline_window import TimelineWindow

STATE_COLOURS = {
    "distributing": "muted",
    "training": "blue",
    "publishing": "purple",
    "evaluating": "teal",
    "checkpointing": "brown",
    "restoring": "muted",
    "releasing": "muted",
    "waiting": "sand",
    "busy": "green",
    "loading": "purple",
    "paused": "amber",
    "asleep": "grey",
    "idle": "pale",
}
"""State in a timeline -> colour. Other states are drawn in `ink`."""
TRACKS_SHOWN = 12
BARS = 600
"""Resolution of a row of the timeline: spans below 1 / BARS of the window are merged, so a row has
at most 2 * BARS bars."""


def timeline_panel(window: TimelineWindow) -> Panel:
    """Return the panel with a row of bars for each process, over the time of the last steps."""
    tracks = list(window.tracks)[:TRACKS_SHOWN]
    shortest = (window.end - window.start) / BARS
    spans = [
        (row, *part)
        for row, track in enumerate(tracks)
        for part in merge_short(window.tracks[track], shortest)
    ]
    used = {state for _, state, *_ in spans}
    names: dict[str, str] = {}
    for state in (*STATE_COLOURS, *sorted(used - set(STATE_COLOURS))):
        if state in used:
            colour = STATE_COLOURS.get(state, "ink")
            names[colour] = f"{names[colour]}, {state}" if colour in names else state
    return Panel(
        title=f"Activity of each process, last {len(window.steps)} steps",
        unit="",
        kind="bars",
        x_label="seconds; vertical lines mark the ends of steps",
        categories=tracks,
        bars=[
            Bar(row, start - window.start, end - start, STATE_COLOURS.get(state, "ink"))
            for row, state, start, end in spans
        ],
        bar_names=names,
        ends=[(step, at - window.start) for step, at in window.steps],
        x_range=(0.0, window.end - window.start),
        wide=True,
        overview=True,
    )


def merge_short(spans: Sequence[Span], shortest: float) -> Iterator[tuple[str, float, float]]:
    """Yield (state, start, end) of each span. Consecutive spans shorter than `shortest` seconds are
    merged into pieces of about that length, each with the state that took the most time in it."""
    short: list[Span] = []
    for span in [*spans, None]:
        ended = span is None or span.seconds >= shortest
        if short and (ended or (span and span.start - short[0].start >= shortest)):
            seconds: dict[str, float] = {}
            for one in short:
                seconds[one.state] = seconds.get(one.state, 0.0) + one.seconds
            yield max(seconds, key=seconds.__getitem__), short[0].start, short[-1].end
            short = []
        if span is not None and ended:
            yield span.state, span.start, span.end
        elif span is not None:
            short.append(span)

"""The page's panels about engines: who did what when, how busy each was, and what was dropped."""

from __future__ import annotations

import plotly.graph_objects as go

from megatron_async_rl.observe import colours
from megatron_async_rl.observe.activity import Activity
from megatron_async_rl.observe.colours import BLUE, INK, RED
from megatron_async_rl.observe.page_frame import figure_of
from megatron_async_rl.observe.record import Record
from megatron_async_rl.observe.series import doubling_bins, per_engine, summed

TRACK_HEIGHT = 26


def fleet_figures(record: Record) -> list[go.Figure]:
    """None for a run whose engines were not counted."""
    if record.summary.busy_share is None:
        return []
    lines = (
        (f"Engines busy, mean {record.summary.busy_share:.0%}", "share of the time between steps", "engine/busy_shares"),
        ("In flight per engine", "responses", "engine/in_flight"),
        ("Weights of each engine, when a step ends", "versions behind the policy", "engine/versions"),
        ("Tokens finished per engine", "tokens since the last step", "engine/tokens"),
    )
    return [*(_lines(record, *line) for line in lines), _lengths(record)]


def activity_figure(record: Record, shown: Activity) -> go.Figure:
    """One bar a process over the seconds of the last steps; upright lines are the ends of steps."""
    figure = figure_of(record, f"What each process did, last {len(shown.steps)} steps", "")
    states = {span.state for spans in shown.tracks.values() for span in spans}
    for state in (*colours.STATES, *sorted(states - set(colours.STATES))):
        spans = [span for track in shown.tracks.values() for span in track if span.state == state]
        if spans:
            figure.add_bar(
                orientation="h", y=[span.track for span in spans], base=[span.start - shown.start for span in spans],
                x=[span.seconds for span in spans], name=state, marker={"color": colours.STATES.get(state, colours.UNKNOWN)},
                customdata=[[span.seconds, f" for {span.waiting_for}" if span.waiting_for else ""] for span in spans],
                hovertemplate=f"%{{y}}: {state}%{{customdata[1]}}, %{{customdata[0]:.3f}} s<extra></extra>",
            )  # fmt: skip
    for step, at in shown.steps:
        figure.add_vline(
            x=at - shown.start, line={"color": INK, "width": 1}, annotation_text=f"{step}", annotation_position="top left"
        )
    figure.update_layout(barmode="overlay", hovermode="closest", bargap=0.2, height=150 + TRACK_HEIGHT * len(shown.tracks))
    figure.update_xaxes(title="seconds; upright lines: a step ends", range=[0, shown.end - shown.start], dtick=None)
    figure.update_yaxes(autorange="reversed", showgrid=False, categoryorder="array", categoryarray=list(shown.tracks))
    return figure


def _lines(record: Record, title: str, unit: str, key: str) -> go.Figure:
    figure = figure_of(record, title, unit, from_zero=True)
    steps, values = per_engine(record.rows, key)
    for engine, numbers in enumerate(values):
        colour = colours.ENGINES[engine % len(colours.ENGINES)]
        mode = "lines+markers" if len(steps) < 30 else "lines"
        line = {"color": colour, "width": 1.3}
        figure.add_scatter(x=steps, y=numbers, mode=mode, line=line, name=f"engine {engine}", showlegend=True)
    return figure


def _lengths(record: Record) -> go.Figure:
    figure = figure_of(record, "Lengths of the responses", "share of the responses")
    counts = [summed(record.rows, "trained/length_histogram"), summed(record.rows, "dropped/length_histogram")]
    names, shares = doubling_bins(counts)
    for values, name, colour in ((shares[0], "trained on", BLUE), (shares[1], "dropped", RED)):
        if values.any():
            figure.add_bar(x=names, y=values, name=name, marker={"color": colour}, showlegend=True)
    figure.update_xaxes(title="tokens", type="category", range=None, autorange=True, tickformat=None, dtick=None)
    figure.update_yaxes(tickformat=".0%")
    return figure

"""What the panels of the report's page share: axes over the run's steps, and curves over their trend."""

from __future__ import annotations

import plotly.graph_objects as go

from megatron_async_rl.observe.colours import AXIS, GRID, INK, MUTED
from megatron_async_rl.observe.record import Record
from megatron_async_rl.observe.series import column, numbers, smooth

CONFIG = {"displayModeBar": False, "responsive": True}


def figure_of(record: Record, title: str, unit: str, *, from_zero: bool = False) -> go.Figure:
    """An empty panel."""
    figure = go.Figure()
    first, last = numbers(record.rows, "step")[[0, -1]]
    margin = max(1.0, 0.015 * (last - first))
    ticks = {"dtick": 1} if last - first < 8 else {}
    extent = [first - margin, last + margin]
    axis = {
        "gridcolor": GRID,
        "linecolor": AXIS,
        "zeroline": False,
        "tickfont": {"size": 11, "color": MUTED},
        "automargin": True,
    }
    figure.update_layout(
        title={
            "text": f"<b>{title}</b>",
            "font": {"size": 15, "color": INK},
            "x": 0.0,
            "xref": "paper",
            "xanchor": "left",
            "y": 0.97,
            "yanchor": "top",
        },
        height=340,
        margin={"l": 60, "r": 20, "t": 72, "b": 48},
        paper_bgcolor="white",
        plot_bgcolor="white",
        hovermode="x unified",
        font={"family": "system-ui, -apple-system, 'Segoe UI', sans-serif", "color": MUTED},
        legend={"orientation": "h", "x": 0.0, "xanchor": "left", "y": 1.02, "yanchor": "bottom", "font": {"size": 11}},
        xaxis=axis | {"title": {"text": "optimizer step", "font": {"size": 12}}, "tickformat": ",d", "range": extent, **ticks},
        yaxis=axis
        | {
            "title": {"text": unit, "font": {"size": 12}},
            "rangemode": "tozero" if from_zero else "normal",
            "exponentformat": "e",
        },
    )
    return figure


def draw_curve(figure: go.Figure, record: Record, key: str, name: str, colour: str) -> None:
    """Raw values over their trend, a wide light line."""
    steps, values = column(record.rows, key)
    if not len(steps):
        return
    trend = smooth(values)
    if trend is not None:
        figure.add_scatter(
            x=steps, y=trend, mode="lines", line={"color": colour, "width": 6}, opacity=0.3, name=f"{name}, trend",
            showlegend=False, hoverinfo="skip",
        )  # fmt: skip
    mode = "lines+markers" if len(steps) < 30 else "lines"
    figure.add_scatter(x=steps, y=values, mode=mode, line={"color": colour, "width": 1.3}, name=name, showlegend=True)

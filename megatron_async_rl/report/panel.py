"""Description of a panel: its data, kind and labels, but not its drawing. page.js draws a panel on
a page from `as_json`; report.py draws it on a picture.

Invariant: the number of drawn points does not grow with the run. A curve has at most POINTS points,
including its spikes; a grid has at most CELLS columns.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Literal

import numpy as np

from megatron_async_rl.report.anomalies import GRAVE, KINDS, Anomaly
from megatron_async_rl.report.metric_rows import Floats, thin

STEPS = "optimizer step"
COLOURS = {
    "ink": "#1f2933",
    "muted": "#5f6b78",
    "line": "#e6e9ed",
    "axis": "#b8c0c9",
    "blue": "#2563a8",
    "green": "#2e8b57",
    "amber": "#d98a00",
    "red": "#c8372d",
    "purple": "#7a4fa3",
    "teal": "#3aa6b9",
    "brown": "#8c6d46",
    "sand": "#f0c878",
    "grey": "#9aa5b1",
    "pale": "#dde2e7",
}
"""Colours on a white background by name. page.css has the colours of the dark theme."""

POINTS = 300
"""Maximum number of points of a curve."""
CELLS = 120
"""Maximum number of columns of a grid."""
SHADES = 10
"""Number of shades of a grid's cells."""


AxisForm = Literal["number", "share", "whole"]
"""Format of the numbers of an axis."""
CurveStyle = Literal["line", "dotted", "points", "diamonds"]
LegendKey = Literal["line", "dotted", "diamond"]
"""Symbol of a curve in a legend."""


@dataclass(frozen=True, kw_only=True)
class Curve:
    """A curve of a panel."""

    name: str
    """Name in the legend; a curve with an empty name is not in the legend."""
    colour: str
    """Name in COLOURS."""
    x: Floats
    """Ascending, shape [n]."""
    y: Floats
    """Shape [n]; may contain NaN."""
    style: CurveStyle = "line"
    trend: Floats | None = None
    """Moving average, drawn as a wide light line below the curve; shape [n]."""

    @property
    def key(self) -> LegendKey:
        """Symbol of the curve in a legend."""
        # Several diamonds are joined by a line, a single one is not.
        if self.style == "diamonds" and len(self.x) == 1:
            return "diamond"
        return "dotted" if self.style == "dotted" else "line"


@dataclass(frozen=True, kw_only=True)
class Level:
    """A horizontal dashed line at `value`."""

    name: str
    colour: str
    value: float


@dataclass(frozen=True, kw_only=True)
class OffPolicyMark:
    """A vertical dashed line: from `step` on, the samples of a replay are off-policy. replay: its
    name."""

    step: int
    colour: str
    replay: str


@dataclass(frozen=True)
class Bar:
    """A bar in a row, with its start and length on the horizontal axis."""

    row: int
    start: float
    length: float
    colour: str


@dataclass(frozen=True, kw_only=True)
class Panel:
    """A panel of one of five kinds:

    - `lines`: curves over the horizontal axis;
    - `stack`: areas of the curves on top of each other;
    - `shades`: `grid` as cells, below curves;
    - `columns`: a column of each curve for every category;
    - `bars`: a row of `bars` for each category, from top to bottom.
    """

    title: str
    unit: str
    kind: Literal["lines", "stack", "shades", "columns", "bars"] = "lines"
    x_label: str = STEPS
    curves: Sequence[Curve] = ()
    levels: Sequence[Level] = ()
    off_policy: Sequence[OffPolicyMark] = ()
    grid: tuple[Floats, Floats] | None = None
    """(steps [n], shares [bins, n])."""
    categories: Sequence[str] = ()
    bars: Sequence[Bar] = ()
    bar_names: Mapping[str, str] = field(default_factory=dict)
    """Meaning of the bars by colour."""
    ends: Sequence[tuple[int, float]] = ()
    """(step, position) of each vertical line, which marks the end of a step."""
    x_range: tuple[float, float] | None = None
    low: float | None = None
    high: float | None = None
    form: AxisForm = "number"
    log: bool = False
    marks: Sequence[Anomaly] = ()
    empty: str = ""
    """Text to show if there are no curves."""
    wide: bool = False
    """True if the panel is as wide as the page."""
    overview: bool = False
    """True if the picture contains the panel, too."""

    @property
    def legend(self) -> list[tuple[str, str, LegendKey]]:
        """(name, colour, symbol) of each entry."""
        named = [(one.name, one.colour, one.key) for one in self.curves if one.name]
        named += [(level.name, level.colour, "dotted") for level in self.levels]
        return named + [(name, colour, "line") for colour, name in self.bar_names.items()]

    def as_json(self) -> dict[str, Any]:
        """Return plain JSON for page.js. Numbers that are not finite become null. If the x of a
        curve are consecutive integers, only the first is included."""
        return {
            "title": self.title,
            "unit": self.unit,
            "kind": self.kind,
            "x": self.x_label,
            "form": self.form,
            "log": self.log,
            "wide": self.wide,
            "low": self.low,
            "high": self.high,
            "range": self.x_range,
            "empty": self.empty,
            "legend": self.legend,
            "curves": [
                drawn
                for curve in self.curves
                if (drawn := _curve(curve, stacked=self.kind == "stack")) is not None
            ],
            "levels": [[level.value, level.colour] for level in self.levels],
            "offPolicy": [[one.step, one.colour, one.replay] for one in self.off_policy],
            "cells": list(shades_of(self.grid)) if self.grid else [],
            "names": list(self.categories),
            "bars": [
                [bar.row, round(bar.start, 3), round(bar.length, 3), bar.colour]
                for bar in self.bars
            ],
            "ends": [[step, round(at, 3)] for step, at in self.ends],
            "marks": [
                [one.step, one.colour, f"{KINDS[one.kind][0]}: {one.detail}", one.kind in GRAVE]
                # Sort grave marks to the front, because only the first POINTS marks are drawn.
                for one in sorted(self.marks, key=lambda one: one.kind not in GRAVE)[:POINTS]
            ],
        }


def _curve(curve: Curve, *, stacked: bool) -> dict[str, Any] | None:
    """Return the JSON of a curve; None if there is nothing to draw. Its `trend` is [x, y], because
    the trend is thinned separately."""
    if stacked:
        # Thin all curves of a stack at the same steps, because page.js adds them.
        every = max(1, -(-len(curve.x) // POINTS))
        x, y = curve.x[::every], curve.y[::every]
    else:
        x, y = thin(curve.x, curve.y, POINTS)
    trend = None
    if curve.trend is not None:
        # A moving average is smooth, so half the points are enough.
        smooth_x, smooth_y = thin(curve.x, curve.trend, POINTS // 2)
        trend = [_positions(smooth_x), _numbers(smooth_y)]
    if trend is None and not np.isfinite(y).any():
        return None
    return {
        "name": curve.name,
        "colour": curve.colour,
        "style": curve.style,
        "x": _positions(x),
        "y": _numbers(y),
        "trend": trend,
    }


def _positions(x: Floats) -> int | list[float]:
    # Steps are usually consecutive; their first number alone keeps the page small.
    consecutive = len(x) > 0 and bool((np.diff(x) == 1).all()) and x[0] == int(x[0])
    return int(x[0]) if consecutive else [float(f"{position:.6g}") for position in x]


def _numbers(y: Floats) -> list[float | None]:
    # Round to five digits, more than a screen shows: JSON would have up to 17.
    return [float(f"{value:.5g}") if np.isfinite(value) else None for value in y]


def shades_of(grid: tuple[Floats, Floats]) -> Iterator[tuple[int, int, float, float]]:
    """Yield (row, depth from 1 to SHADES, start, end) of each rectangle of a grid. Cells with share
    0 have none."""
    steps, shares = grid
    # Neighbouring steps share a cell, so that the page does not grow with the run.
    groups = np.array_split(np.arange(len(steps)), min(CELLS, len(steps)))
    means = np.stack([shares[:, group].mean(axis=1) for group in groups], axis=1)
    # Scale by the 90th percentile: with the maximum, one concentrated step would make all others
    # pale.
    deepest = max(1e-9, float(np.quantile(means.max(axis=0), 0.9)))
    # Round up, so that a bin with a single token is visible.
    depths = np.where(means > 0, np.ceil(SHADES * np.minimum(1.0, means / deepest)), 0)
    # Extend by half a step at both ends, so that a single step has a width.
    edges = [steps[group[0]] - 0.5 for group in groups] + [steps[-1] + 0.5]
    for row, values in enumerate(depths):
        # Merge neighbouring cells of one depth into one rectangle, which keeps the page small.
        breaks = np.flatnonzero(np.diff(values)) + 1
        for stretch in np.split(np.arange(len(values)), breaks):
            if values[stretch[0]] > 0:
                first, last = int(stretch[0]), int(stretch[-1])
                yield row, int(values[first]), float(edges[first]), float(edges[last + 1])

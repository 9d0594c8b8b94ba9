"""A panel: data, kind and labels, independent of how it is drawn. page.js draws it on a page, from
`as_json`; report.py draws it on a picture.

Invariant: the number of drawn points does not grow with the run. A curve has at most POINTS points,
with its spikes; shades have at most CELLS columns.
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
"""Colour on white paper by name. page.css has the values for a dark theme."""

POINTS = 300
CELLS = 120
SHADES = 10


AxisForm = Literal["number", "share", "whole"]
"""Format of the numbers of an axis."""
CurveStyle = Literal["line", "dotted", "points", "diamonds"]
LegendKey = Literal["line", "dotted", "diamond"]
"""Sign of a curve in a legend."""


@dataclass(frozen=True, kw_only=True)
class Curve:
    name: str
    colour: str
    """Name in COLOURS."""
    x: Floats
    """Ascending, shape [n]."""
    y: Floats
    """Shape [n]; may hold NaN."""
    style: CurveStyle = "line"
    trend: Floats | None = None
    """Drawn as a wide light line below the curve, shape [n]."""

    @property
    def key(self) -> LegendKey:
        """Sign of the curve in a legend."""
        # One diamond marks a single measured point; several are joined by a line.
        if self.style == "diamonds" and len(self.x) == 1:
            return "diamond"
        return "dotted" if self.style == "dotted" else "line"


@dataclass(frozen=True, kw_only=True)
class Level:
    """A horizontal dashed line."""

    name: str
    colour: str
    value: float


@dataclass(frozen=True)
class Bar:
    """Bar of a row, with its place on the horizontal axis."""

    row: int
    start: float
    length: float
    colour: str


@dataclass(frozen=True, kw_only=True)
class Panel:
    """A panel of one of five kinds.

    - `lines`: curves over the steps;
    - `stack`: curves on top of each other;
    - `shades`: `grid` as cells, under curves;
    - `columns`: a column of every curve for each category;
    - `bars`: a row of `bars` for each category, from the top.
    """

    title: str
    unit: str
    kind: Literal["lines", "stack", "shades", "columns", "bars"] = "lines"
    x_label: str = STEPS
    curves: Sequence[Curve] = ()
    levels: Sequence[Level] = ()
    grid: tuple[Floats, Floats] | None = None
    """(steps [n], shares [bins, n])."""
    categories: Sequence[str] = ()
    bars: Sequence[Bar] = ()
    bar_names: Mapping[str, str] = field(default_factory=dict)
    """Meaning of the bars by colour."""
    ends: Sequence[tuple[int, float]] = ()
    """(step, place) of each upright line."""
    x_range: tuple[float, float] | None = None
    low: float | None = None
    high: float | None = None
    form: AxisForm = "number"
    log: bool = False
    marks: Sequence[Anomaly] = ()
    empty: str = ""
    """Text that is shown if there are no curves."""
    wide: bool = False
    overview: bool = False
    """True if the panel is on the picture, too."""

    @property
    def legend(self) -> list[tuple[str, str, LegendKey]]:
        """(name, colour, sign) of each entry."""
        # A curve without a name is explained by the panel's title.
        named = [(one.name, one.colour, one.key) for one in self.curves if one.name]
        named += [(level.name, level.colour, "dotted") for level in self.levels]
        return named + [(name, colour, "line") for colour, name in self.bar_names.items()]

    def as_json(self) -> dict[str, Any]:
        """Return plain JSON for page.js. Numbers that are not finite are null; the first of
        consecutive steps represents them."""
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
            "cells": list(shades_of(self.grid)) if self.grid else [],
            "names": list(self.categories),
            "bars": [
                [bar.row, round(bar.start, 3), round(bar.length, 3), bar.colour]
                for bar in self.bars
            ],
            "ends": [[step, round(at, 3)] for step, at in self.ends],
            "marks": [
                [one.step, one.colour, f"{KINDS[one.kind][0]}: {one.detail}", one.kind in GRAVE]
                # Grave marks first, because only the first POINTS of them are drawn.
                for one in sorted(self.marks, key=lambda one: one.kind not in GRAVE)[:POINTS]
            ],
        }


def _curve(curve: Curve, *, stacked: bool) -> dict[str, Any] | None:
    """Return a curve for page.js; None if there is nothing to draw. `trend` is [x, y], which is
    thinned at places of its own."""
    if stacked:
        # Curves of a stack are added up, so all of them keep the same places.
        every = max(1, -(-len(curve.x) // POINTS))
        x, y = curve.x[::every], curve.y[::every]
    else:
        x, y = thin(curve.x, curve.y, POINTS)
    trend = None
    if curve.trend is not None:
        # A moving average needs fewer points than the curve below it.
        smooth_x, smooth_y = thin(curve.x, curve.trend, POINTS // 2)
        trend = [_places(smooth_x), _numbers(smooth_y)]
    # A curve of NaN alone would leave its entry in the legend and no line.
    if trend is None and not np.isfinite(y).any():
        return None
    return {
        "name": curve.name,
        "colour": curve.colour,
        "style": curve.style,
        "x": _places(x),
        "y": _numbers(y),
        "trend": trend,
    }


def _places(x: Floats) -> int | list[float]:
    # Steps are usually 1, 2, 3, ...: one number instead of a list keeps the page small.
    consecutive = len(x) > 0 and bool((np.diff(x) == 1).all()) and x[0] == int(x[0])
    return int(x[0]) if consecutive else [float(f"{place:.6g}") for place in x]


def _numbers(y: Floats) -> list[float | None]:
    # Five digits are more than a screen shows, and JSON of floats has up to 17.
    return [float(f"{value:.5g}") if np.isfinite(value) else None for value in y]


def shades_of(grid: tuple[Floats, Floats]) -> Iterator[tuple[int, int, float, float]]:
    """Yield (row, depth from 1 to SHADES, start, end) of each stretch of one depth."""
    steps, shares = grid
    # Neighbouring steps share a cell, so that the page does not grow with the run.
    groups = np.array_split(np.arange(len(steps)), min(CELLS, len(steps)))
    means = np.stack([shares[:, group].mean(axis=1) for group in groups], axis=1)
    # The 90th percentile: a single concentrated step must not make all others pale.
    deepest = max(1e-9, float(np.quantile(means.max(axis=0), 0.9)))
    # Rounded up: a bin with a single token is pale, not invisible.
    depths = np.where(means > 0, np.ceil(SHADES * np.minimum(1.0, means / deepest)), 0)
    # Half a step to each side: cells touch, and a single step has a width.
    edges = [steps[group[0]] - 0.5 for group in groups] + [steps[-1] + 0.5]
    for row, values in enumerate(depths):
        # Neighbouring cells of one depth become one rectangle, which keeps the page small.
        breaks = np.flatnonzero(np.diff(values)) + 1
        for stretch in np.split(np.arange(len(values)), breaks):
            if values[stretch[0]] > 0:
                first, last = int(stretch[0]), int(stretch[-1])
                yield row, int(values[first]), float(edges[first]), float(edges[last + 1])

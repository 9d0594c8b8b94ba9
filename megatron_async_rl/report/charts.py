"""Draws a panel with matplotlib, without a display.

One function draws a panel for the page (as SVG) and for the sheet (report.py). On the page a
panel's title and legend are HTML, so that they wrap, and its colours are CSS variables, so that
they follow a dark theme; on the sheet matplotlib writes all of them.

Invariant: the size of an SVG does not grow with the run: a curve has at most POINTS points, a spike
among them, and shades at most CELLS columns.
"""

from __future__ import annotations

import io
import re
from collections.abc import Iterator
from typing import Any

import matplotlib as mpl
import numpy as np
from matplotlib.axes import Axes
from matplotlib.backends.backend_svg import FigureCanvasSVG
from matplotlib.collections import PatchCollection
from matplotlib.figure import Figure
from matplotlib.patches import Rectangle
from matplotlib.ticker import FuncFormatter, MaxNLocator, PercentFormatter

from megatron_async_rl.report.anomalies import GRAVE
from megatron_async_rl.report.panel import STEPS, Panel
from megatron_async_rl.report.series import Floats, thin

COLOURS = {
    "ink": "#1f2933",
    "muted": "#6b7785",
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
"""Name -> colour on white paper. The page has a second value of each for a dark theme."""

POINTS = 300
CELLS = 120
SHADES = 10
MARGINS = {"left": 46, "right": 12, "top": 10, "bottom": 36}
"""Around the axes of an SVG, in its units."""
TRACK_HEIGHT = 24
DASHED = (0, (5, 4))
MIN_STACKED_AREAS = 12
"""With fewer steps a stack is drawn as bars."""
_FEW = 30
"""With fewer points each is shown by a marker."""


def to_svg(panel: Panel, name: str, width: int, height: int) -> tuple[str, tuple[float, ...]]:
    """The SVG, and (left, top, right, bottom) of its axes in its units, then the smallest and the
    largest x. `name` tells its inner identifiers from those of other SVGs of a page."""
    with mpl.rc_context(
        {"svg.fonttype": "none", "svg.hashsalt": name, "font.family": "sans-serif"}
    ):
        figure = Figure(figsize=(width / 72, height / 72), dpi=72)
        FigureCanvasSVG(figure)
        left = MARGINS["left"] + (18 if panel.kind == "bars" else 0)
        place = (
            left / width,
            MARGINS["bottom"] / height,
            (width - left - MARGINS["right"]) / width,
            (height - MARGINS["top"] - MARGINS["bottom"]) / height,
        )
        axes = figure.add_axes(place)
        draw(panel, axes, scale=1.0)
        file = io.StringIO()
        figure.savefig(file, format="svg", transparent=True, metadata={"Date": None})
    frame = (left, MARGINS["top"], width - MARGINS["right"], height - MARGINS["bottom"])
    return _for_page(file.getvalue()), (*frame, *axes.get_xlim())


def draw(panel: Panel, axes: Axes, *, scale: float) -> None:
    """Everything but title, legend and unit. `scale`: of the letters, 10 points at 1."""
    _frame(panel, axes, scale)
    draws = {
        "lines": _lines,
        "stack": _stack,
        "shades": _shades,
        "columns": _columns,
        "bars": _bars,
    }
    draws[panel.kind](panel, axes)
    for level in panel.levels:
        axes.axhline(
            level.value, color=COLOURS[level.colour], linewidth=1.1, linestyle=DASHED, zorder=2.5
        )
    if panel.empty and not panel.curves:
        axes.text(
            0.5, 0.5, panel.empty, transform=axes.transAxes, ha="center", color=COLOURS["muted"]
        )
    _limit(panel, axes)
    _mark(panel, axes)


def _frame(panel: Panel, axes: Axes, scale: float) -> None:
    small = 10 * scale
    axes.set_xlabel(panel.x_label, fontsize=small, color=COLOURS["muted"], labelpad=2)
    axes.tick_params(which="both", labelsize=small, colors=COLOURS["muted"], length=3)
    axes.tick_params(which="minor", length=0)
    if panel.kind not in ("shades", "bars"):
        axes.grid(True, color=COLOURS["line"], linewidth=0.8)
    axes.set_axisbelow(True)
    axes.set_facecolor("none")
    for side in ("top", "right"):
        axes.spines[side].set_visible(False)
    for side in ("left", "bottom"):
        axes.spines[side].set_color(COLOURS["axis"])
    axes.xaxis.set_major_formatter(FuncFormatter(_short))
    if panel.log:
        axes.set_yscale("log")
        axes.yaxis.set_minor_formatter(FuncFormatter(lambda *_: ""))
    if panel.form == "share":
        axes.yaxis.set_major_formatter(PercentFormatter(1.0, decimals=0))
    else:
        axes.yaxis.set_major_formatter(FuncFormatter(_short))
    if panel.kind in ("lines", "stack", "shades"):
        whole = panel.x_label == STEPS
        axes.xaxis.set_major_locator(MaxNLocator(integer=whole, nbins=7, min_n_ticks=1))
        if not panel.log:
            axes.yaxis.set_major_locator(
                MaxNLocator(integer=panel.form == "whole", nbins=5, min_n_ticks=1)
            )


def _lines(panel: Panel, axes: Axes) -> None:
    for curve in panel.curves:
        colour = COLOURS[curve.colour]
        if curve.trend is not None:
            x, y = thin(curve.x, curve.trend, POINTS)
            axes.plot(x, y, color=colour, alpha=0.3, linewidth=4.5, solid_capstyle="round")
        x, y = thin(curve.x, curve.y, POINTS)
        if not np.isfinite(y).any():
            continue
        few = len(curve.x) < _FEW
        if curve.style == "points":
            axes.plot(x, y, color=colour, linestyle="", marker="o", markersize=4 if few else 2.6)
        elif curve.style == "diamonds":
            axes.plot(x, y, color=colour, linewidth=1.1, marker="D", markersize=4.5 if few else 3)
        else:
            axes.plot(
                x,
                y,
                color=colour,
                linewidth=1.4 if curve.style == "dotted" else 1.1,
                linestyle=":" if curve.style == "dotted" else "-",
                marker="o" if few else None,
                markersize=3,
            )


def _stack(panel: Panel, axes: Axes) -> None:
    if not panel.curves or not len(panel.curves[0].x):
        return
    steps = panel.curves[0].x
    if len(steps) < MIN_STACKED_AREAS:
        base = np.zeros(len(steps))
        for curve in panel.curves:
            axes.bar(steps, curve.y, bottom=base, width=0.6, color=COLOURS[curve.colour])
            base = base + curve.y
        return

    every = max(1, len(steps) // (POINTS // 2))
    colours = [COLOURS[curve.colour] for curve in panel.curves]
    axes.stackplot(
        steps[::every], *(curve.y[::every] for curve in panel.curves), colors=colours, linewidth=0
    )


def _shades(panel: Panel, axes: Axes) -> None:
    if panel.grid is not None:
        steps, shares = panel.grid
        groups = np.array_split(np.arange(len(steps)), min(CELLS, len(steps)))
        means = np.stack([shares[:, group].mean(axis=1) for group in groups], axis=1)
        deepest = max(1e-9, float(np.quantile(means.max(axis=0), 0.9)))
        # The paper shows through, so that shades suit a light page and a dark one.
        depths = np.where(means > 0, np.ceil(SHADES * np.minimum(1.0, means / deepest)), 0)
        edges = [steps[group[0]] - 0.5 for group in groups] + [steps[-1] + 0.5]
        for row, depth, first, end in _runs(depths):
            cell = Rectangle((edges[first], row - 0.5), edges[end] - edges[first], 1, linewidth=0)
            cell.set(facecolor=COLOURS["blue"], alpha=0.8 * depth / SHADES, gid="cell")
            axes.add_patch(cell)
    _lines(panel, axes)


def _runs(depths: Floats) -> Iterator[tuple[int, float, int, int]]:
    """(row, depth, first column, the one after the last) of each stretch of one depth above 0."""
    for row, values in enumerate(depths):
        breaks = np.flatnonzero(np.diff(values)) + 1
        for stretch in np.split(np.arange(len(values)), breaks):
            if values[stretch[0]] > 0:
                yield row, float(values[stretch[0]]), int(stretch[0]), int(stretch[-1]) + 1


def _columns(panel: Panel, axes: Axes) -> None:
    width = 0.8 / max(1, len(panel.curves))
    for index, curve in enumerate(panel.curves):
        places = curve.x + (index - (len(panel.curves) - 1) / 2) * width
        axes.bar(places, curve.y, width=0.94 * width, color=COLOURS[curve.colour])
    # Names of neighbours must not touch.
    every = max(1, -(-len(panel.categories) // 6))
    shown = range(0, len(panel.categories), every)
    axes.set_xticks(list(shown), [panel.categories[index] for index in shown])
    axes.set_xlim(-0.6, max(1, len(panel.categories)) - 0.4)


def _bars(panel: Panel, axes: Axes) -> None:
    colours = dict.fromkeys(bar.colour for bar in panel.bars)
    for colour in colours:
        rectangles = [
            Rectangle((bar.start, bar.row - 0.38), bar.length, 0.76)
            for bar in panel.bars
            if bar.colour == colour
        ]
        axes.add_collection(
            PatchCollection(
                rectangles, facecolor=COLOURS[colour], linewidth=0, match_original=False
            )
        )
    for step, at in panel.ends:
        axes.axvline(at, color=COLOURS["ink"], linewidth=0.7)
        axes.annotate(
            f"{step}",
            (at, -0.5),
            xytext=(-2, 1),
            textcoords="offset points",
            ha="right",
            va="bottom",
            fontsize=8,
            color=COLOURS["muted"],
            annotation_clip=False,
        )
    axes.set_ylim(len(panel.categories) - 0.5, -1.0)
    axes.set_yticks(range(len(panel.categories)), panel.categories)
    axes.xaxis.set_major_locator(MaxNLocator(nbins=8))


def _limit(panel: Panel, axes: Axes) -> None:
    if panel.x_range is not None:
        axes.set_xlim(*panel.x_range)
    elif panel.kind != "columns" and (steps := _steps(panel)) is not None:
        margin = max(0.5, 0.015 * (steps[-1] - steps[0]))
        axes.set_xlim(steps[0] - margin, steps[-1] + margin)
    if panel.kind == "bars":
        return
    if panel.low is not None or panel.high is not None:
        axes.set_ylim(panel.low, panel.high)
    if panel.form == "whole" and panel.high is None:
        axes.set_ylim(-0.2, max(1.0, axes.get_ylim()[1]) + 0.2)


def _mark(panel: Panel, axes: Axes) -> None:
    """A tick at the upper edge for each step with an anomaly, and a line down for a grave one."""
    transform = axes.get_xaxis_transform()
    for colour in dict.fromkeys(mark.colour for mark in panel.marks):
        steps = sorted({mark.step for mark in panel.marks if mark.colour == colour})
        x, y = thin(np.array(steps, dtype=np.float64), np.ones(len(steps)), POINTS)
        axes.plot(
            x,
            y,
            linestyle="",
            marker="v",
            markersize=5,
            color=COLOURS[colour],
            transform=transform,
            clip_on=False,
            zorder=5,
        )
    for step in sorted({mark.step for mark in panel.marks if mark.kind in GRAVE})[:CELLS]:
        axes.axvline(step, color=COLOURS["red"], linewidth=0.7, alpha=0.45, zorder=1)


def _steps(panel: Panel) -> Floats | None:
    columns = [curve.x for curve in panel.curves] + ([panel.grid[0]] if panel.grid else [])
    columns = [column for column in columns if len(column)]
    return np.sort(np.concatenate(columns)) if columns else None


def _short(value: float, _: Any = None) -> str:
    """`12,000`, `0.25`, `3e-4`."""
    if value == 0 or 1e-3 <= abs(value) < 1e5:
        return f"{value:,.4g}" if abs(value) < 1e3 else f"{value:,.0f}"
    return re.sub(r"e([+-])0*", lambda sign: "e" + sign[1].replace("+", ""), f"{value:.2g}")


def _for_page(svg: str) -> str:
    """The SVG as it stands inside a page: no preamble, no names of groups, one decimal, colours as
    CSS variables."""
    svg = svg[svg.index("<svg") :]
    svg = re.sub(r"<metadata>.*?</metadata>|<!--.*?-->", "", svg, flags=re.DOTALL)
    svg = re.sub(
        r'<svg[^>]*viewBox="([^"]*)"[^>]*>', r'<svg viewBox="\1" role="img">', svg, count=1
    )
    svg = svg.replace('<g id="cell">', '<g class="cell">')
    svg = re.sub(r'<g id="[^"]*">', "<g>", svg)
    svg = re.sub(r'(?<= )(d|x|y|transform)="[^"]*"', _rounded, svg)
    svg = re.sub(r"font: [^;\"]*?([\d.]+)px [^;\"]*", r"font-size: \1px", svg)
    svg = re.sub(r"font-family: [^;\"]*; |<style.*?</style>", "", svg, flags=re.DOTALL)
    svg = svg.replace("xlink:href", "href")
    for name, value in COLOURS.items():
        svg = svg.replace(value, f"var(--{name})")
    return re.sub(r"\n\s*", "\n", svg)


def _rounded(attribute: re.Match[str]) -> str:
    return re.sub(r"-?\d+\.\d+", lambda found: f"{float(found[0]):.1f}", attribute[0])

"""Draws panels with matplotlib, without a display: one on axes, or all of a run's overview on a
sheet (PNG), where matplotlib writes titles and legends, too."""

from __future__ import annotations

import re
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
from matplotlib.axes import Axes
from matplotlib.backends.backend_agg import FigureCanvasAgg
from matplotlib.collections import PatchCollection
from matplotlib.figure import Figure
from matplotlib.patches import Rectangle
from matplotlib.ticker import Formatter, FuncFormatter, MaxNLocator, PercentFormatter

from megatron_async_rl.report.anomalies import GRAVE
from megatron_async_rl.report.metric_rows import Floats, thin
from megatron_async_rl.report.panel import (
    CELLS,
    COLOURS,
    POINTS,
    SHADES,
    STEPS,
    LegendKey,
    Panel,
    shades_of,
)

DASHED = (0, (5, 4))
LINE = 0.23
"""Height of a line under a sheet's title; inches."""
MIN_STACKED_AREAS = 12
"""Number of steps below which a stack is drawn as bars."""
_FEW = 30
"""Number of points below which each point has a marker."""


def draw_sheet(
    title: str, lines: Sequence[tuple[str, str]], panels: Sequence[Panel], path: Path
) -> None:
    """The panels of the overview, two in a row, wide ones alone. `lines`: (text, colour) under the
    title."""
    shown = [panel for panel in panels if panel.overview]
    rows: list[list[Panel]] = []
    for panel in sorted(shown, key=lambda panel: panel.kind == "bars"):
        if panel.wide or not rows or rows[-1][0].wide or len(rows[-1]) == 2:
            rows.append([panel])
        else:
            rows[-1].append(panel)
    heights = [1.5 + 0.3 * len(row[0].categories) if row[0].kind == "bars" else 3.4 for row in rows]
    head, width = 0.67 + LINE * max(1, len(lines)), 13.0
    total = head + sum(heights)
    figure = Figure(figsize=(width, total), dpi=120, facecolor="white")
    FigureCanvasAgg(figure)
    _write_head(figure, title, lines)

    below = total - head
    for row, height in zip(rows, heights, strict=True):
        below -= height
        for side, panel in enumerate(row):
            # In inches: room on the left for the unit, above for title and legend.
            left, right = 0.75 + side * width / 2, width if panel.wide else (side + 1) * width / 2
            place = (left, below + 0.55, right - 0.2 - left, height - 1.15)
            share = (width, total, width, total)
            axes = figure.add_axes([size / of for size, of in zip(place, share, strict=True)])
            draw(panel, axes, scale=0.92)
            ink, muted = COLOURS["ink"], COLOURS["muted"]
            axes.set_title(
                panel.title, loc="left", fontsize=11.5, fontweight="bold", color=ink, pad=24
            )
            axes.set_ylabel(panel.unit, fontsize=9, color=muted)
            _write_legend(panel, axes)
    figure.savefig(path)


def _write_head(figure: Figure, title: str, lines: Sequence[tuple[str, str]]) -> None:
    height = figure.get_figheight()
    style = {"ha": "left", "va": "center", "fontsize": 15, "fontweight": "bold"}
    figure.text(0.015, 1 - 0.27 / height, title, color=COLOURS["ink"], **style)
    for index, (text, colour) in enumerate(lines):
        place = 1 - (0.55 + LINE * index) / height
        figure.text(0.015, place, text, ha="left", va="center", fontsize=10.5, color=colour)


def _write_legend(panel: Panel, axes: Axes) -> None:
    """Draw the legend in one line between title and plot, outside the curves."""
    if not panel.legend:
        return
    signs: dict[LegendKey, dict[str, Any]] = {
        "line": {"linewidth": 2},
        "dotted": {"linewidth": 2, "linestyle": DASHED},
        "diamond": {"linestyle": "", "marker": "D", "markersize": 4},
    }
    handles = [
        axes.plot([], [], color=COLOURS[colour], **signs[sign])[0]
        for _, colour, sign in panel.legend
    ]
    axes.legend(
        handles,
        [name for name, _, _ in panel.legend],
        loc="lower left",
        bbox_to_anchor=(0.0, 1.0),
        ncols=min(8, len(handles)),
        frameon=False,
        fontsize=8.5,
        labelcolor=COLOURS["muted"],
        handlelength=1.2,
        columnspacing=1.3,
        borderpad=0.0,
        borderaxespad=0.6,
    )


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
    axes.xaxis.set_major_formatter(_Short())
    if panel.log:
        axes.set_yscale("log")
        axes.yaxis.set_minor_formatter(FuncFormatter(lambda *_: ""))
    if panel.form == "share":
        axes.yaxis.set_major_formatter(PercentFormatter(1.0, decimals=None))
    else:
        axes.yaxis.set_major_formatter(_Short())
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
        for row, depth, start, end in shades_of(panel.grid):
            cell = Rectangle((start, row - 0.5), end - start, 1, linewidth=0)
            # The paper shows through, as on the page.
            cell.set(facecolor=COLOURS["blue"], alpha=0.8 * depth / SHADES)
            axes.add_patch(cell)
    _lines(panel, axes)


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


class _Short(Formatter):
    """Formatter with the fewest digits that distinguish the ticks of an axis."""

    def __call__(self, value: float, pos: int | None = None) -> str:
        return _short(value)

    def format_ticks(self, values: Sequence[float]) -> list[str]:
        for digits in range(4, 13):
            found = [_short(value, digits) for value in values]
            if len(set(found)) == len(found):
                break
        return found


def _short(value: float, digits: int = 4) -> str:
    """`12,000`, `0.25`, `3e-4`."""
    if value == 0 or 1e-3 <= abs(value) < 1e5:
        return f"{value:,.{digits}g}" if abs(value) < 1e3 else f"{value:,.0f}"
    text = f"{value:.{digits - 2}g}"
    return re.sub(r"e([+-])0*", lambda sign: "e" + sign[1].replace("+", ""), text)

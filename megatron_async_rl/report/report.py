"""Report of one run, or of several (`mar report`): a page (HTML) and a picture (PNG).

The page's script draws the panels in a browser; this module draws those of the overview with
matplotlib. Import this module only to draw a picture, because matplotlib takes a second to load.
"""

from __future__ import annotations

import os
import re
from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
from matplotlib.axes import Axes
from matplotlib.backends.backend_agg import FigureCanvasAgg
from matplotlib.figure import Figure
from matplotlib.ticker import FuncFormatter, MaxNLocator, NullFormatter

from megatron_async_rl.config.problem import UserError
from megatron_async_rl.report.anomalies import GRAVE
from megatron_async_rl.report.comparison import name_runs, page_of_runs
from megatron_async_rl.report.metric_rows import thin
from megatron_async_rl.report.page import page_of
from megatron_async_rl.report.panel import (
    CELLS,
    COLOURS,
    POINTS,
    SHADES,
    STEPS,
    Panel,
    shades_of,
)
from megatron_async_rl.report.run_data import read_run
from megatron_async_rl.report.samples import samples_section

WIDTH, HEIGHT, LINE = 13.0, 3.4, 0.23
"""Width of the picture, height of a panel, and height of a line of text below the title, in
inches."""
DASHED = (0, (5, 4))
FEW = 30
"""Number of points below which every point of a curve has a marker."""
SIGNS: dict[str, dict[str, Any]] = {
    "line": {"linewidth": 2},
    "dotted": {"linewidth": 2, "linestyle": DASHED},
    "diamond": {"linestyle": "", "marker": "D", "markersize": 4},
}
"""Style of each symbol of a legend."""
STYLES: dict[str, dict[str, Any]] = {
    "line": {"linewidth": 1.1},
    "dotted": {"linewidth": 1.4, "linestyle": ":"},
    "points": {"linestyle": "", "marker": "o", "markersize": 2.6},
    "diamonds": {"linewidth": 1.1, "marker": "D", "markersize": 3.5},
}
"""Style of a curve by `Curve.style`."""


def write_report(run_dir: Path) -> tuple[Path, Path]:
    """Write RUN/report.html (a single file, below 1 MB) and RUN/report.png; return both paths. The
    run may still be active.

    Raises ReportError if the run has no finished step.
    """
    # Read the run once, so that page and picture show the same state.
    run = read_run(run_dir, alone=False)
    page = page_of(run, samples_section(run_dir))
    # The picture has no tiles and tables, so its head shows their main facts.
    lines = [(run.headline, COLOURS["muted"])]
    if run.dropped is not None:
        lines.append((f"{run.dropped.sentence}.", COLOURS["red"]))
    # The legend of a small panel has room for the name of a replay, not for its settings.
    lines += [(one.label, COLOURS[one.colour]) for one in run.replays]
    names = {one.label: one.name for one in run.replays}
    panels = [_with_names(panel, names) for panel in page.panels]
    html_path, png_path = run_dir / "report.html", run_dir / "report.png"
    html_path.write_text(page.as_html(), encoding="utf-8")
    draw_sheet(run_dir.name, lines, panels, png_path)
    return html_path, png_path


def _with_names(panel: Panel, names: Mapping[str, str]) -> Panel:
    """Return the panel with other names of curves: old one -> new one."""
    curves = [replace(one, name=names.get(one.name, one.name)) for one in panel.curves]
    return replace(panel, curves=curves)


def write_comparison(run_dirs: Sequence[Path], folder: Path | None = None) -> tuple[Path, Path]:
    """Write comparison.html and comparison.png of at least two runs to `folder`; return both paths.
    By default, `folder` is the innermost folder that contains all run directories.

    Raises ReportError for a run without a finished step, UserError for a repeated directory.
    """
    paths = [path.absolute() for path in run_dirs]
    if len(set(paths)) < len(paths):
        raise UserError.of("RUN", "a run is named twice", "name each run once")
    # Use the parents, because the common path of nested runs would be a run directory.
    folder = folder or Path(os.path.commonpath([path.parent for path in paths]))
    compared = name_runs(paths, [read_run(path) for path in paths])
    page = page_of_runs(compared)
    # List the names of the runs once in the head, because they are too long for every legend.
    lines = [
        (
            f"{one.name}{' (dotted)' if one.dotted else ''}   ·   {one.run.headline}",
            COLOURS[one.colour],
        )
        for one in compared
    ]
    nameless = [
        replace(panel, curves=[replace(curve, name="") for curve in panel.curves])
        for panel in page.panels
    ]
    folder.mkdir(parents=True, exist_ok=True)
    html_path, png_path = folder / "comparison.html", folder / "comparison.png"
    html_path.write_text(page.as_html(), encoding="utf-8")
    draw_sheet(page.parts["TITLE"], lines, nameless, png_path)
    return html_path, png_path


def draw_sheet(
    title: str, lines: Sequence[tuple[str, str]], panels: Sequence[Panel], path: Path
) -> None:
    """Draw the panels of the overview to `path`: two in a row, or one wide panel. `lines`: (text,
    colour) of each line below the title."""
    rows: list[list[Panel]] = []
    # Move timelines, whose height varies, to the end. The sort is stable, so the others keep their
    # order.
    for panel in sorted(panels, key=lambda panel: panel.kind == "bars"):
        if not panel.overview:
            continue
        if panel.wide or not rows or rows[-1][0].wide or len(rows[-1]) == 2:
            rows.append([panel])
        else:
            rows[-1].append(panel)
    # The height of a timeline depends on its number of processes.
    bars = [len(row[0].categories) if row[0].kind == "bars" else None for row in rows]
    heights = [HEIGHT if count is None else 1.5 + 0.3 * count for count in bars]
    head = 0.67 + LINE * max(1, len(lines))
    # `below` is the position of the current row's lower edge in inches from the bottom.
    below, total = sum(heights), head + sum(heights)
    figure = Figure(figsize=(WIDTH, total), dpi=120, facecolor="white")
    # The Agg canvas needs no display.
    FigureCanvasAgg(figure)
    style: dict[str, Any] = {"color": COLOURS["ink"], "fontsize": 15, "fontweight": "bold"}
    figure.text(0.015, 1 - 0.27 / total, title, va="center", **style)
    for index, (text, colour) in enumerate(lines):
        place = 1 - (0.55 + LINE * index) / total
        figure.text(0.015, place, text, va="center", fontsize=10.5, color=colour)

    for row, height in zip(rows, heights, strict=True):
        below -= height
        for side, panel in enumerate(row):
            # Compute positions directly, which is far faster than a layout engine. The margins are
            # for the unit (left), and for title and legend (top).
            share = 1.0 if panel.wide else 0.5
            box = (side * share * WIDTH + 0.75, below + 0.55, share * WIDTH - 0.95, height - 1.15)
            scale = (WIDTH, total, WIDTH, total)
            relative = [inches / whole for inches, whole in zip(box, scale, strict=True)]
            draw(panel, figure.add_axes(relative))
    figure.savefig(path)


def draw(panel: Panel, axes: Axes) -> None:
    """Draw a panel with its title, unit, legend and marks on `axes`."""
    ink, muted = COLOURS["ink"], COLOURS["muted"]
    axes.set_title(panel.title, loc="left", fontsize=11.5, fontweight="bold", color=ink, pad=24)
    axes.set_xlabel(panel.x_label, fontsize=9, color=muted, labelpad=2)
    axes.set_ylabel(panel.unit, fontsize=9, color=muted)
    axes.tick_params(labelsize=9, colors=muted, length=3)
    if panel.kind not in ("shades", "bars"):
        axes.grid(visible=True, color=COLOURS["line"], linewidth=0.8)
    # Draw the grid lines behind the curves.
    axes.set_axisbelow(True)
    axes.spines[["top", "right"]].set_visible(False)
    axes.spines[["left", "bottom"]].set_color(COLOURS["axis"])
    if panel.log:
        axes.set_yscale("log")
        # Omit labels between the decades, which would overlap in a small panel.
        axes.yaxis.set_minor_formatter(NullFormatter())
    else:
        axes.yaxis.set_major_locator(_locator(5, whole=panel.form == "whole"))
    axes.xaxis.set_major_locator(_locator(7, whole=panel.x_label == STEPS))
    axes.xaxis.set_major_formatter(FuncFormatter(tick))
    axes.yaxis.set_major_formatter(FuncFormatter(percent if panel.form == "share" else tick))

    # Draw the curves first, because the limits below depend on them.
    {"stack": _stack, "columns": _columns, "bars": _bars}.get(panel.kind, _lines)(panel, axes)
    for level in panel.levels:
        style = {"linewidth": 1.1, "linestyle": DASHED, "zorder": 2.5}
        axes.axhline(level.value, color=COLOURS[level.colour], **style)
    for mark in panel.off_policy:
        style = {"linewidth": 1.1, "linestyle": DASHED, "zorder": 2.5}
        axes.axvline(mark.step, color=COLOURS[mark.colour], **style)
    if panel.empty and not panel.curves:
        axes.text(0.5, 0.5, panel.empty, transform=axes.transAxes, ha="center", color=muted)
    _limit(panel, axes)
    _mark(panel, axes)
    _legend(panel, axes)


def _locator(count: int, *, whole: bool) -> MaxNLocator:
    return MaxNLocator(integer=whole, nbins=count, min_n_ticks=1)


def tick(value: float, _: object = None) -> str:
    """Format the value of a tick with enough digits to distinguish neighbours: `12,000`, `0.25`,
    `2.01e-6`. matplotlib passes the position as second argument."""
    # Remove the padding of the exponent, as page.js does.
    return re.sub(r"e([-+])0*", lambda sign: f"e{sign[1].strip('+')}", f"{value:,.6g}")


def percent(value: float, _: object = None) -> str:
    """Format the value of a tick as a percentage."""
    return f"{100 * value:.6g}%"


def _lines(panel: Panel, axes: Axes) -> None:
    """Draw the curves of a panel over its cells, if it has a grid."""
    for row, depth, start, end in shades_of(panel.grid) if panel.grid is not None else ():
        style = {"color": COLOURS["blue"], "alpha": 0.8 * depth / SHADES, "linewidth": 0}
        axes.broken_barh([(start, end - start)], (row - 0.5, 1), **style)
    for curve in panel.curves:
        colour = COLOURS[curve.colour]
        if curve.trend is not None:
            x, y = thin(curve.x, curve.trend, POINTS)
            axes.plot(x, y, color=colour, alpha=0.3, linewidth=4.5, solid_capstyle="round")
        x, y = thin(curve.x, curve.y, POINTS)
        if np.isfinite(y).any():
            # Mark the points of a short curve, because a line through one point is invisible.
            marker = {"marker": "o", "markersize": 3} if len(curve.x) < FEW else {}
            axes.plot(x, y, color=colour, **(marker | STYLES[curve.style]))


def _stack(panel: Panel, axes: Axes) -> None:
    """Draw the curves of a panel as areas on top of each other."""
    if not panel.curves or not len(panel.curves[0].x):
        return
    # Thin all curves at the same steps, because they are added. Extend them by half a step at both
    # ends, so that the area of a single step is visible.
    every = slice(None, None, max(1, len(panel.curves[0].x) // (POINTS // 2)))
    steps = panel.curves[0].x[every]
    x = np.concatenate([[steps[0] - 0.5], steps, [steps[-1] + 0.5]])
    areas = [np.pad(curve.y[every], 1, mode="edge") for curve in panel.curves]
    colours = [COLOURS[curve.colour] for curve in panel.curves]
    axes.stackplot(x, *areas, colors=colours, linewidth=0)


def _columns(panel: Panel, axes: Axes) -> None:
    """Draw a column of each curve for every category."""
    width = 0.8 / max(1, len(panel.curves))
    for index, curve in enumerate(panel.curves):
        positions = curve.x + (index - (len(panel.curves) - 1) / 2) * width
        axes.bar(positions, curve.y, width=0.94 * width, color=COLOURS[curve.colour])
    # Label at most 6 categories, so that the labels do not overlap.
    shown = range(0, len(panel.categories), max(1, -(-len(panel.categories) // 6)))
    axes.set_xticks(list(shown), [panel.categories[index] for index in shown])


def _bars(panel: Panel, axes: Axes) -> None:
    """Draw the bars of a timeline and the ends of its steps."""
    for row, colour in sorted({(bar.row, bar.colour) for bar in panel.bars}):
        spans = [(b.start, b.length) for b in panel.bars if (b.row, b.colour) == (row, colour)]
        axes.broken_barh(spans, (row - 0.38, 0.76), color=COLOURS[colour], linewidth=0)
    for step, at in panel.ends:
        axes.axvline(at, color=COLOURS["ink"], linewidth=0.7)
        style = {"ha": "right", "va": "bottom", "fontsize": 8, "color": COLOURS["muted"]}
        axes.text(at, -0.55, f"{step} ", **style)
    axes.set_yticks(range(len(panel.categories)), panel.categories)


def _limit(panel: Panel, axes: Axes) -> None:
    """Set the ranges of both axes."""
    if panel.kind == "columns":
        axes.set_xlim(-0.6, max(1, len(panel.categories)) - 0.4)
    elif panel.x_range is not None:
        axes.set_xlim(*panel.x_range)
    else:
        positions = [curve.x for curve in panel.curves] + ([panel.grid[0]] if panel.grid else [])
        if len(x := np.concatenate([[], *positions])):
            margin = max(0.5, 0.015 * (x.max() - x.min()))
            axes.set_xlim(x.min() - margin, x.max() + margin)
    if panel.kind == "bars":
        # Invert the axis, so that row 0 is at the top, as on the page.
        axes.set_ylim(len(panel.categories) - 0.5, -1.0)
    elif panel.form == "whole" and panel.high is None:
        # Extend the axis to 1 at least: around a constant 0 it would show fractions.
        axes.set_ylim(-0.2, max(1.0, axes.get_ylim()[1]) + 0.2)
    else:
        axes.set_ylim(panel.low, panel.high)


def _mark(panel: Panel, axes: Axes) -> None:
    """Draw a triangle above each step with an anomaly, and a vertical line at a grave one."""
    above = {"transform": axes.get_xaxis_transform(), "clip_on": False, "zorder": 5}
    for colour in dict.fromkeys(mark.colour for mark in panel.marks):
        # Draw one triangle for all anomalies of one colour at a step.
        steps = sorted({float(mark.step) for mark in panel.marks if mark.colour == colour})
        x, y = thin(np.array(steps), np.ones(len(steps)), POINTS)
        axes.plot(x, y, "v", markersize=5, color=COLOURS[colour], **above)
    for step in sorted({mark.step for mark in panel.marks if mark.kind in GRAVE})[:CELLS]:
        axes.axvline(step, color=COLOURS["red"], linewidth=0.7, alpha=0.45, zorder=1)


def _legend(panel: Panel, axes: Axes) -> None:
    """Draw the legend in one line between title and plot, where it hides no curve."""
    if not panel.legend:
        return
    axes.legend(
        # Draw the symbols from empty curves, because their lines are thicker than the panel's.
        [axes.plot([], [], color=COLOURS[one], **SIGNS[sign])[0] for _, one, sign in panel.legend],
        [name for name, *_ in panel.legend],
        loc="lower left",
        bbox_to_anchor=(0.0, 1.0),
        ncols=min(8, len(panel.legend)),
        frameon=False,
        fontsize=8.5,
        labelcolor=COLOURS["muted"],
        handlelength=1.2,
        columnspacing=1.3,
        borderpad=0.0,
        borderaxespad=0.6,
    )

"""`mar report`: one run, or several, as a page (HTML) and as a picture for terminals (PNG).

Both show the same panels. The page's script draws them in a browser; here matplotlib draws those of
the overview. Import this module only where a picture is drawn: matplotlib takes a second to load.
"""

from __future__ import annotations

import os
import re
from collections.abc import Sequence
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
"""Width of the picture, height of a panel, and height of a line under the title; inches."""
DASHED = (0, (5, 4))
FEW = 30
"""Number of points below which each point of a curve has a marker."""
SIGNS: dict[str, dict[str, Any]] = {
    "line": {"linewidth": 2},
    "dotted": {"linewidth": 2, "linestyle": DASHED},
    "diamond": {"linestyle": "", "marker": "D", "markersize": 4},
}
"""Style of each sign of a legend."""
STYLES: dict[str, dict[str, Any]] = {
    "line": {"linewidth": 1.1},
    "dotted": {"linewidth": 1.4, "linestyle": ":"},
    "points": {"linestyle": "", "marker": "o", "markersize": 2.6},
    "diamonds": {"linewidth": 1.1, "marker": "D", "markersize": 3.5},
}
"""Style of a curve."""


def write_report(run_dir: Path) -> tuple[Path, Path]:
    """Write RUN/report.html (one file, below 1 MB) and RUN/report.png; return both paths.

    The run may still be running. Raises ReportError if there is nothing to report.
    """
    # Read once for both files, so that page and picture show the same moment.
    run = read_run(run_dir, alone=False)
    page = page_of(run, samples_section(run_dir))
    # The picture has no tiles or tables; its head has their main facts.
    lines = [(run.headline, COLOURS["muted"])]
    if run.dropped is not None:
        lines.append((f"{run.dropped.sentence}.", COLOURS["red"]))
    html_path, png_path = run_dir / "report.html", run_dir / "report.png"
    html_path.write_text(page.as_html(), encoding="utf-8")
    draw_sheet(run_dir.name, lines, page.panels, png_path)
    return html_path, png_path


def write_comparison(run_dirs: Sequence[Path], folder: Path | None = None) -> tuple[Path, Path]:
    """Write comparison.html and comparison.png of at least two runs to `folder`, by default the
    innermost folder that holds all of them; return both paths.

    Raises ReportError for a directory without a finished step, UserError for a repeated one.
    """
    paths = [path.absolute() for path in run_dirs]
    if len(set(paths)) < len(paths):
        raise UserError.of("RUN", "a run is named twice", "name each run once")
    # The parents, so that runs of one folder are compared next to them and not inside one.
    folder = folder or Path(os.path.commonpath([path.parent for path in paths]))
    compared = name_runs(paths, [read_run(path) for path in paths])
    page = page_of_runs(compared)
    # Names of runs are long: the head has them once, in their colours, instead of every legend.
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
    """Draw the panels of the overview, two in a row, wide ones alone. `lines` are (text, colour)
    under the title."""
    rows: list[list[Panel]] = []
    # The sort is stable: only timelines move, to the end, where their height disturbs no pair.
    for panel in sorted(panels, key=lambda panel: panel.kind == "bars"):
        if not panel.overview:
            continue
        if panel.wide or not rows or rows[-1][0].wide or len(rows[-1]) == 2:
            rows.append([panel])
        else:
            rows[-1].append(panel)
    # A timeline is as high as its number of processes.
    bars = [len(row[0].categories) if row[0].kind == "bars" else None for row in rows]
    heights = [HEIGHT if count is None else 1.5 + 0.3 * count for count in bars]
    head = 0.67 + LINE * max(1, len(lines))
    # `below` is the height that is left, measured from the bottom as matplotlib does.
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
            # Placed by hand, which is far faster than a layout engine: room on the left for the
            # unit, above for title and legend.
            share = 1.0 if panel.wide else 0.5
            box = (side * share * WIDTH + 0.75, below + 0.55, share * WIDTH - 0.95, height - 1.15)
            scale = (WIDTH, total, WIDTH, total)
            draw(panel, figure.add_axes([size / of for size, of in zip(box, scale, strict=True)]))
    figure.savefig(path)


def draw(panel: Panel, axes: Axes) -> None:
    """Draw a panel with its title, unit, legend and marks."""
    ink, muted = COLOURS["ink"], COLOURS["muted"]
    axes.set_title(panel.title, loc="left", fontsize=11.5, fontweight="bold", color=ink, pad=24)
    axes.set_xlabel(panel.x_label, fontsize=9, color=muted, labelpad=2)
    axes.set_ylabel(panel.unit, fontsize=9, color=muted)
    axes.tick_params(labelsize=9, colors=muted, length=3)
    if panel.kind not in ("shades", "bars"):
        axes.grid(visible=True, color=COLOURS["line"], linewidth=0.8)
    # Grid lines behind the curves.
    axes.set_axisbelow(True)
    axes.spines[["top", "right"]].set_visible(False)
    axes.spines[["left", "bottom"]].set_color(COLOURS["axis"])
    if panel.log:
        axes.set_yscale("log")
        # Labels between the decades would overlap in a small panel.
        axes.yaxis.set_minor_formatter(NullFormatter())
    else:
        axes.yaxis.set_major_locator(_places(5, whole=panel.form == "whole"))
    axes.xaxis.set_major_locator(_places(7, whole=panel.x_label == STEPS))
    axes.xaxis.set_major_formatter(FuncFormatter(tick))
    axes.yaxis.set_major_formatter(FuncFormatter(percent if panel.form == "share" else tick))

    # Curves first: the limits and marks below depend on what is drawn.
    {"stack": _stack, "columns": _columns, "bars": _bars}.get(panel.kind, _lines)(panel, axes)
    for level in panel.levels:
        style = {"linewidth": 1.1, "linestyle": DASHED, "zorder": 2.5}
        axes.axhline(level.value, color=COLOURS[level.colour], **style)
    # An empty panel explains itself; a missing one would look like an error.
    if panel.empty and not panel.curves:
        axes.text(0.5, 0.5, panel.empty, transform=axes.transAxes, ha="center", color=muted)
    _limit(panel, axes)
    _mark(panel, axes)
    _legend(panel, axes)


def _places(count: int, *, whole: bool) -> MaxNLocator:
    return MaxNLocator(integer=whole, nbins=count, min_n_ticks=1)


def tick(value: float, _: object = None) -> str:
    """Format a tick with enough digits to distinguish neighbours: `12,000`, `0.25`, `2.01e-6`."""
    # Without the exponent's padding, as page.js writes it.
    return re.sub(r"e([-+])0*", lambda sign: f"e{sign[1].strip('+')}", f"{value:,.6g}")


def percent(value: float, _: object = None) -> str:
    return f"{100 * value:.6g}%"


def _lines(panel: Panel, axes: Axes) -> None:
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
            # A line through one point is invisible without a marker.
            marker = {"marker": "o", "markersize": 3} if len(curve.x) < FEW else {}
            axes.plot(x, y, color=colour, **(marker | STYLES[curve.style]))


def _stack(panel: Panel, axes: Axes) -> None:
    if not panel.curves or not len(panel.curves[0].x):
        return
    # Curves of a stack are thinned at the same places, and reach half a step beyond their ends, so
    # that a single step has an area, too.
    every = slice(None, None, max(1, len(panel.curves[0].x) // (POINTS // 2)))
    steps = panel.curves[0].x[every]
    x = np.concatenate([[steps[0] - 0.5], steps, [steps[-1] + 0.5]])
    areas = [np.pad(curve.y[every], 1, mode="edge") for curve in panel.curves]
    colours = [COLOURS[curve.colour] for curve in panel.curves]
    axes.stackplot(x, *areas, colors=colours, linewidth=0)


def _columns(panel: Panel, axes: Axes) -> None:
    width = 0.8 / max(1, len(panel.curves))
    for index, curve in enumerate(panel.curves):
        places = curve.x + (index - (len(panel.curves) - 1) / 2) * width
        axes.bar(places, curve.y, width=0.94 * width, color=COLOURS[curve.colour])
    # Names of neighbours must not touch.
    shown = range(0, len(panel.categories), max(1, -(-len(panel.categories) // 6)))
    axes.set_xticks(list(shown), [panel.categories[index] for index in shown])


def _bars(panel: Panel, axes: Axes) -> None:
    for row, colour in sorted({(bar.row, bar.colour) for bar in panel.bars}):
        spans = [(b.start, b.length) for b in panel.bars if (b.row, b.colour) == (row, colour)]
        axes.broken_barh(spans, (row - 0.38, 0.76), color=COLOURS[colour], linewidth=0)
    for step, at in panel.ends:
        axes.axvline(at, color=COLOURS["ink"], linewidth=0.7)
        style = {"ha": "right", "va": "bottom", "fontsize": 8, "color": COLOURS["muted"]}
        axes.text(at, -0.55, f"{step} ", **style)
    # Row 0 is at the top, as on the page: _limit inverts the axis.
    axes.set_yticks(range(len(panel.categories)), panel.categories)


def _limit(panel: Panel, axes: Axes) -> None:
    if panel.kind == "columns":
        axes.set_xlim(-0.6, max(1, len(panel.categories)) - 0.4)
    elif panel.x_range is not None:
        axes.set_xlim(*panel.x_range)
    else:
        places = [curve.x for curve in panel.curves] + ([panel.grid[0]] if panel.grid else [])
        if len(x := np.concatenate([[], *places])):
            margin = max(0.5, 0.015 * (x.max() - x.min()))
            axes.set_xlim(x.min() - margin, x.max() + margin)
    if panel.kind == "bars":
        axes.set_ylim(len(panel.categories) - 0.5, -1.0)
    elif panel.form == "whole" and panel.high is None:
        # At least up to 1, so that a constant 0 does not fill the panel with fractions.
        axes.set_ylim(-0.2, max(1.0, axes.get_ylim()[1]) + 0.2)
    else:
        axes.set_ylim(panel.low, panel.high)


def _mark(panel: Panel, axes: Axes) -> None:
    """Draw a triangle above each step with an anomaly, and a line down for a grave one."""
    above = {"transform": axes.get_xaxis_transform(), "clip_on": False, "zorder": 5}
    for colour in dict.fromkeys(mark.colour for mark in panel.marks):
        # Several anomalies of one kind at one step are one triangle.
        steps = sorted({float(mark.step) for mark in panel.marks if mark.colour == colour})
        x, y = thin(np.array(steps), np.ones(len(steps)), POINTS)
        axes.plot(x, y, "v", markersize=5, color=COLOURS[colour], **above)
    for step in sorted({mark.step for mark in panel.marks if mark.kind in GRAVE})[:CELLS]:
        axes.axvline(step, color=COLOURS["red"], linewidth=0.7, alpha=0.45, zorder=1)


def _legend(panel: Panel, axes: Axes) -> None:
    """Draw the legend in one line between title and plot, outside the curves."""
    if not panel.legend:
        return
    axes.legend(
        # Empty curves: the signs are thicker than the lines of the panel.
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

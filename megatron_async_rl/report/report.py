"""`mar report RUN`: one run as a page to look into (HTML) and a sheet to glance at (PNG), drawn
from the same panels. Loads matplotlib.
"""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

from matplotlib.axes import Axes
from matplotlib.backends.backend_agg import FigureCanvasAgg
from matplotlib.figure import Figure

from megatron_async_rl.report.charts import COLOURS, DASHED, draw
from megatron_async_rl.report.panel import Panel
from megatron_async_rl.report.panels import panels_of
from megatron_async_rl.report.report_html import write_page
from megatron_async_rl.report.run_data import RunData, read_run
from megatron_async_rl.report.samples import samples_section

HTML_FILE = "report.html"
PNG_FILE = "report.png"
LINE = 0.23
"""Height of a line under the title; inches."""


def write_report(run_dir: Path) -> tuple[Path, Path]:
    """Writes RUN/report.html (one file, below 1 MB) and RUN/report.png; returns both paths.

    Works on a run that is still going. Raises ReportError when there is nothing to report.
    """
    run = read_run(run_dir, alone=False)
    html_path, png_path = run_dir / HTML_FILE, run_dir / PNG_FILE
    panels = panels_of(run)
    write_sheet(run, panels, png_path)
    write_page(run, panels, html_path, [samples_section(run_dir)])
    return html_path, png_path


def write_sheet(run: RunData, panels: Sequence[Panel], path: Path) -> None:
    """The PNG of a run, under its headline and a sentence on what was dropped."""
    lines = [(run.headline, COLOURS["muted"])]
    if run.dropped is not None:
        lines.append((f"{run.dropped.sentence}.", COLOURS["red"]))
    draw_sheet(run.run_dir.name, lines, panels, path)


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
    """In one line between title and plot, where no curve can be."""
    if not panel.legend:
        return
    handles = [
        axes.plot([], [], color=COLOURS[colour], linestyle=DASHED if dashed else "-", linewidth=2)[
            0
        ]
        for _, colour, dashed in panel.legend
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

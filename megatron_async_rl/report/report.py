"""`mar report`: one run, or several, as a page to look into (HTML) and a sheet to glance at (PNG),
drawn from the same panels. Loads matplotlib.
"""

from __future__ import annotations

import os
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

from megatron_async_rl.config.problem import UserError
from megatron_async_rl.report.charts import draw_sheet
from megatron_async_rl.report.comparison import name_runs, page_of_runs
from megatron_async_rl.report.page import page_of
from megatron_async_rl.report.panel import COLOURS
from megatron_async_rl.report.run_data import read_run
from megatron_async_rl.report.samples import samples_section


def write_report(run_dir: Path) -> tuple[Path, Path]:
    """Writes RUN/report.html (one file, below 1 MB) and RUN/report.png; returns both paths.

    Works on a run that is still going. Raises ReportError when there is nothing to report.
    """
    run = read_run(run_dir, alone=False)
    page = page_of(run, samples_section(run_dir))
    lines = [(run.headline, COLOURS["muted"])]
    if run.dropped is not None:
        lines.append((f"{run.dropped.sentence}.", COLOURS["red"]))
    html_path, png_path = run_dir / "report.html", run_dir / "report.png"
    html_path.write_text(page.as_html(), encoding="utf-8")
    draw_sheet(run_dir.name, lines, page.panels, png_path)
    return html_path, png_path


def write_comparison(run_dirs: Sequence[Path], folder: Path | None = None) -> tuple[Path, Path]:
    """Writes comparison.html and comparison.png of at least two runs to `folder`, by default the
    innermost that holds all of them; returns both paths.

    Raises ReportError for a directory without a finished step, UserError for one named twice.
    """
    paths = [path.absolute() for path in run_dirs]
    if len(set(paths)) < len(paths):
        raise UserError.of("RUN", "a run is named twice", "name each run once")
    folder = folder or Path(os.path.commonpath([path.parent for path in paths]))
    compared = name_runs(paths, [read_run(path) for path in paths])
    page = page_of_runs(compared)
    # Names of runs are long: they stand once, in their colours, and not over every panel.
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

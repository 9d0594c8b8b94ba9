"""`mar report RUN`: one run as a page to look into (HTML) and a sheet to glance at (PNG), drawn
from the same panels."""

from __future__ import annotations

from pathlib import Path

from megatron_async_rl.report.run_data import ReportError, read_run

__all__ = ["HTML_FILE", "PNG_FILE", "ReportError", "write_report"]

HTML_FILE = "report.html"
PNG_FILE = "report.png"


def write_report(run_dir: Path) -> tuple[Path, Path]:
    """Writes RUN/report.html (one file, below 1 MB) and RUN/report.png; returns both paths.

    Works on a run that is still going. Raises ReportError when there is nothing to report.
    """
    run = read_run(run_dir)

    # matplotlib takes a second to load, and the launcher imports this module before every run.
    from megatron_async_rl.report.panels import panels_of
    from megatron_async_rl.report.report_html import write_page
    from megatron_async_rl.report.report_png import write_sheet
    from megatron_async_rl.report.samples import samples_section

    html_path, png_path = run_dir / HTML_FILE, run_dir / PNG_FILE
    panels = panels_of(run)
    write_sheet(run, panels, png_path)
    write_page(run, panels, html_path, [samples_section(run_dir)])
    return html_path, png_path

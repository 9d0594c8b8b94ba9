"""`mar report RUN`: one run as a sheet to glance at (PNG) and a page to look into (HTML)."""

from __future__ import annotations

from pathlib import Path

from megatron_async_rl.observe.record import ReportError, read_record

__all__ = ["HTML_FILE", "PNG_FILE", "ReportError", "write_report"]

HTML_FILE = "report.html"
PNG_FILE = "report.png"


def write_report(run_dir: Path) -> tuple[Path, Path]:
    """Writes RUN/report.html (self-contained, about 5 MB) and RUN/report.png; returns both paths.

    Works on a run that is still going. Raises ReportError when there is nothing to report.
    """
    record = read_record(run_dir)
    from megatron_async_rl.observe import page, picture

    html_path, png_path = run_dir / HTML_FILE, run_dir / PNG_FILE
    picture.draw(record, png_path)
    page.write(record, html_path)
    return html_path, png_path

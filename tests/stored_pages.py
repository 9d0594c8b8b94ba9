"""Whole outputs in tests/data/pages, which tests compare with those of the package.

Other tests derive single values by hand; a page shows everything that a change alters. After an
intended change, `MAR_WRITE_PAGES=1 pytest TEST_FILE` writes its pages again: review the difference.
"""

from __future__ import annotations

import difflib
import itertools
import json
import os
from dataclasses import asdict, is_dataclass
from io import StringIO
from pathlib import Path
from typing import Any

from rich.console import Console

PAGES = Path(__file__).parent / "data" / "pages"
CHECKOUT = Path(__file__).parents[1]
DIFFERENCES = 60
"""Maximum number of lines of a difference that an error shows."""


def require_page(name: str, text: str) -> None:
    """Fail unless `text` is that of the page. Pages name this checkout CHECKOUT."""
    text = text.replace(str(CHECKOUT), "CHECKOUT")
    page = PAGES / f"{name}.txt"
    if os.environ.get("MAR_WRITE_PAGES"):
        page.parent.mkdir(parents=True, exist_ok=True)
        page.write_text(text, encoding="utf-8")
    stored = page.read_text(encoding="utf-8")
    if text != stored:
        lines = difflib.unified_diff(stored.splitlines(), text.splitlines(), "stored", "now", n=1)
        changed = "\n".join(line[:400] for line in itertools.islice(lines, DIFFERENCES))
        raise AssertionError(f"{page} differs; MAR_WRITE_PAGES=1 writes it again:\n{changed}")


def cases_of(name: str) -> list[str]:
    """Return the cases of a page that has them itself: in lines that begin with `$ `, before their
    results."""
    lines = (PAGES / f"{name}.txt").read_text(encoding="utf-8").splitlines()
    return [line[2:] for line in lines if line.startswith("$ ")]


def listed(values: dict[str, Any]) -> str:
    """Return the values, one a line, as JSON."""
    return "".join(f"{key}: {json.dumps(plain(value))}\n" for key, value in values.items())


def plain(value: Any) -> Any:
    """Return `value` as JSON stores it; floats with seven digits, as on any machine."""
    if is_dataclass(value) and not isinstance(value, type):
        return plain(asdict(value))
    if isinstance(value, dict):
        return {str(key): plain(one) for key, one in value.items()}
    if isinstance(value, list | tuple):
        return [plain(one) for one in value]
    if hasattr(value, "tolist"):
        return plain(value.tolist())
    if isinstance(value, float):
        return float(f"{value:.7g}")
    return value if isinstance(value, str | int | float | None) else str(value)


class RecordedConsole(Console):
    """A console of 100 columns whose output `text` returns."""

    def __init__(self) -> None:
        self._written = StringIO()
        super().__init__(file=self._written, width=100)

    @property
    def text(self) -> str:
        return self._written.getvalue()

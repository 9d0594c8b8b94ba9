"""What is wrong with a user's data, where it is, and what would be right."""

from __future__ import annotations

from pathlib import Path


class DataError(ValueError):
    """Refused data. `line` counts from 1; null where the file as a whole is wrong. Survives pickling across processes."""

    def __init__(self, path: Path | str, line: int | None, what: str, fix: str) -> None:
        super().__init__(str(path), line, what, fix)
        self.path = Path(path)
        self.line = line
        self.what = what
        self.fix = fix

    def __str__(self) -> str:
        where = str(self.path) if self.line is None else f"{self.path}:{self.line}"
        return f"{where}: {self.what}\n  fix: {self.fix}"

"""Reading `RUN/metrics.jsonl` while it grows.

Invariants: a line is read once and only when it is whole; when the file is replaced (a resume cuts it), reading starts
over and says so.
"""

from __future__ import annotations

import json
import os
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from megatron_async_rl.observe.metrics import FILE, MetricsError, Value

Row = dict[str, Value]
"""One line: `step`, `version`, `time` and the keys of the catalogue; a value that was not finite is a float again."""


def number(row: Row, key: str) -> float | None:
    """The number under `key`; None where the row has none."""
    value = row.get(key)
    return value if isinstance(value, int | float) else None


@dataclass(frozen=True)
class News:
    rows: list[Row]
    restarted: bool
    """True: forget every row read before."""


class MetricsReader:
    def __init__(self, run_dir: Path) -> None:
        self.path = run_dir / FILE
        self._inode = -1
        self._offset = 0
        self._line = 0

    def news(self) -> News:
        """Rows written since the last call; none while the file does not exist.

        Raises MetricsError, with file and line, for a whole line that is not an object with a step.
        """
        try:
            with open(self.path, "rb") as file:
                about = os.fstat(file.fileno())
                replaced = about.st_ino != self._inode or about.st_size < self._offset
                restarted = replaced and self._offset > 0
                if replaced:
                    self._inode, self._offset, self._line = about.st_ino, 0, 0
                file.seek(self._offset)
                whole = file.read()
        except FileNotFoundError:
            restarted, self._offset = self._offset > 0, 0
            return News([], restarted)
        whole = whole[: whole.rfind(b"\n") + 1]
        self._offset += len(whole)
        return News([self._row(line) for line in whole.splitlines()], restarted)

    def _row(self, line: bytes) -> Row:
        self._line += 1
        try:
            row = {key: _value(value) for key, value in json.loads(line).items()}
            row["step"] = int(row["step"])
        except (ValueError, AttributeError, KeyError, TypeError) as error:
            raise MetricsError(f"{self.path}:{self._line} is not a line of metrics: {error}") from error
        return row


def _value(value: Any) -> Any:
    """A string is a number that was not finite."""
    if isinstance(value, list):
        return [_value(entry) for entry in value]
    return float(value) if isinstance(value, str) else value


def read_metrics(run_dir: Path) -> list[Row]:
    """Every row of a run, in order of steps; empty when nothing was logged."""
    return MetricsReader(run_dir).news().rows

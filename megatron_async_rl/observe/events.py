"""`RUN/events.jsonl`: what happened to the run that a user should know although it went on, such as a restarted engine.

Invariant: one JSON object per line, `time` (Unix seconds) and `text`; lines are only appended.
"""

from __future__ import annotations

import json
import time
from pathlib import Path

FILE = "events.jsonl"


def note(run_dir: Path, text: str) -> None:
    """Adds a line; the launcher shows it. A single write, so that lines of several processes do not mix."""
    run_dir.mkdir(parents=True, exist_ok=True)
    with open(run_dir / FILE, "a", encoding="utf-8") as file:
        file.write(json.dumps({"time": round(time.time(), 3), "text": text}) + "\n")


class EventReader:
    """Reads what is added after it was made."""

    def __init__(self, run_dir: Path) -> None:
        self._path = run_dir / FILE
        self._position = self._path.stat().st_size if self._path.exists() else 0

    def new(self) -> list[str]:
        """Texts of the complete lines since the last call."""
        if not self._path.exists():
            return []
        with open(self._path, "rb") as file:
            file.seek(self._position)
            whole, newline, _ = file.read().rpartition(b"\n")
        self._position += len(whole) + len(newline)
        return [str(json.loads(line)["text"]) for line in whole.splitlines() if line]

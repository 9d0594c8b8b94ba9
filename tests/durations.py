"""Record of the duration of each test file. With it, xdist's workers run long files first.

`make durations` writes the record, on a machine without other work. Files that are not in it count
as short.
"""

from __future__ import annotations

import json
from collections import defaultdict
from collections.abc import Iterable, Mapping
from pathlib import Path

import pytest

STORED = Path(__file__).with_name("durations.json")
MIN_S = 0.5
"""Shorter files are not recorded: their order does not matter."""


def stored() -> dict[str, float]:
    """Return seconds by file."""
    if not STORED.exists():
        return {}
    found: dict[str, float] = json.loads(STORED.read_text())
    return found


def longest_first(
    files: Iterable[str], scopes: Mapping[str, str], seconds: Mapping[str, float]
) -> list[str]:
    """Return `files` with the longest scopes first in each part of the tests.

    `scopes` names the unit that a worker runs at once: the file, or several files together. Parts,
    the folders under tests/, keep their order, and so do the files of a scope.
    """
    listed = list(files)
    parts = list(dict.fromkeys(map(part_of, listed)))
    total = defaultdict[str, float](float)
    for file in listed:
        total[scopes[file]] += seconds.get(file, 0.0)
    began = {scope: n for n, scope in reversed([*enumerate(scopes[file] for file in listed)])}
    return sorted(
        listed,
        key=lambda file: (
            parts.index(part_of(file)),
            -total[scopes[file]],
            began[scopes[file]],
            listed.index(file),
        ),
    )


def part_of(file: str) -> str:
    """Return the folder of `file` under tests/."""
    return "/".join(file.split("/")[:2])


class Recorder:
    """Plug-in of the process that hands out the tests: it sums up the seconds of each file, and
    writes them if all tests passed."""

    def __init__(self, path: Path = STORED) -> None:
        self._path = path
        self._seconds = defaultdict[str, float](float)

    def pytest_runtest_logreport(self, report: pytest.TestReport) -> None:
        self._seconds[report.nodeid.partition("::")[0]] += report.duration

    def pytest_sessionfinish(self, exitstatus: int) -> None:
        if exitstatus != pytest.ExitCode.OK:
            return
        kept = {
            file: round(seconds, 1)
            for file, seconds in sorted(self._seconds.items())
            if seconds >= MIN_S
        }
        self._path.write_text(json.dumps(kept, indent=0) + "\n")

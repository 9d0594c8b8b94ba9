"""Scorecard of `mar verify`: one row for each check, with value, bound, verdict and remedy.

Invariants:
- a row without data is ABSENT with the reason; it never passes with a value of 0;
- a row whose own record is lost or cannot be read is FAILED, because its content is unknown;
- the verdict is text in the table, so that it does not depend on colours;
- one failed row makes the exit code 1; absent rows do not.
"""

from __future__ import annotations

import json
from collections.abc import Iterable, Sequence
from dataclasses import asdict, dataclass
from enum import StrEnum
from typing import Any

from rich.console import Console
from rich.table import Table
from rich.text import Text

from megatron_async_rl.config.problem import UserError

SHOWN_DETAILS = 5
"""Number of details of a row that the table shows; the JSON has all."""
MAX_DETAILS = 20
"""Number of details that a check collects: the first places of a fault are enough to find it."""


class RowVerdict(StrEnum):
    """Result of one check."""

    PASSED = "passed"
    FAILED = "failed"
    ABSENT = "absent"


STYLES = {RowVerdict.PASSED: "green", RowVerdict.FAILED: "bold red", RowVerdict.ABSENT: "yellow"}


@dataclass(frozen=True, kw_only=True)
class ScorecardRow:
    """Result of one check.

    value: the measured quantity, or the reason why it is absent. bound: its limit. remedy: the next
    action after a failure. details: the first places of the fault, such as a sample, a step or a
    tensor, one short line each.
    """

    name: str
    value: str
    bound: str
    verdict: RowVerdict
    remedy: str
    details: tuple[str, ...] = ()

    @property
    def failed(self) -> bool:
        return self.verdict is RowVerdict.FAILED


def row(
    name: str, value: str, bound: str, ok: bool, remedy: str, details: Iterable[str] = ()
) -> ScorecardRow:
    """Return the row of a check that had data."""
    verdict = RowVerdict.PASSED if ok else RowVerdict.FAILED
    kept = tuple(details)[:MAX_DETAILS]
    return ScorecardRow(
        name=name, value=value, bound=bound, verdict=verdict, remedy=remedy, details=kept
    )


def absent(name: str, why: str, bound: str, remedy: str) -> ScorecardRow:
    """Return the row of a check without data. why: the reason, as the row's value."""
    return ScorecardRow(name=name, value=why, bound=bound, verdict=RowVerdict.ABSENT, remedy=remedy)


def damaged(name: str, error: UserError, bound: str, read: str = "") -> ScorecardRow:
    """Return the row of a check whose record cannot be read. error: of the reader; its only problem
    names the file and the fix. read: the value of what was read before."""
    problem = error.problems[0]
    why = f"{problem.key} {problem.what}"
    return row(name, f"{read}; {why}" if read else why, bound, False, problem.fix)


def lost(name: str, file: str, bound: str) -> ScorecardRow:
    """Return the row of a check whose record `file` is missing, although the run wrote it."""
    why = f"{file} is missing or empty, and other records show that the run wrote it"
    return row(name, why, bound, False, "restore the file from a copy")


def one_line(error: Exception) -> str:
    """Return the beginning of an error in one line, without its fix."""
    lines = [line.strip() for line in str(error).splitlines()]
    return " ".join(line for line in lines if not line.startswith("fix: "))[:200]


@dataclass(frozen=True, kw_only=True)
class Scorecard:
    """Rows of one verification. subject: the run or config that was checked. notes: facts about
    the check as a whole, such as a run that still runs."""

    subject: str
    rows: tuple[ScorecardRow, ...]
    notes: tuple[str, ...] = ()

    @property
    def failed(self) -> tuple[ScorecardRow, ...]:
        return tuple(row for row in self.rows if row.failed)

    @property
    def exit_code(self) -> int:
        return int(bool(self.failed))

    def count(self, verdict: RowVerdict) -> int:
        return sum(row.verdict is verdict for row in self.rows)

    @property
    def summary(self) -> str:
        """One sentence with the number of rows by verdict."""
        counts = ", ".join(f"{self.count(verdict)} {verdict}" for verdict in RowVerdict)
        return f"{len(self.rows)} checks: {counts}"

    def as_json(self) -> dict[str, Any]:
        """Return plain JSON values. `verdict` is `failed` if a row failed, else `passed`."""
        whole = RowVerdict.FAILED if self.failed else RowVerdict.PASSED
        return {
            "subject": self.subject,
            "verdict": str(whole),
            "notes": list(self.notes),
            "rows": [
                {**asdict(row), "verdict": str(row.verdict), "details": list(row.details)}
                for row in self.rows
            ],
        }

    def text(self) -> str:
        """Return the JSON as text, with a line break at the end."""
        return json.dumps(self.as_json(), indent=1, ensure_ascii=False) + "\n"

    def show(self, console: Console) -> None:
        """Print the table, the remedies of failed rows with the first details, and the summary."""
        table = Table(box=None, pad_edge=False)
        table.add_column("check", no_wrap=True)
        table.add_column("verdict", no_wrap=True)
        table.add_column("value", overflow="fold")
        table.add_column("bound", overflow="fold")
        for one in self.rows:
            # Text, because values and bounds may contain brackets of markup.
            verdict = Text(str(one.verdict).upper() if one.failed else str(one.verdict))
            verdict.stylize(STYLES[one.verdict])
            table.add_row(Text(one.name), verdict, Text(one.value), Text(one.bound))
        console.print(table)
        for one in self.failed:
            _print(console, "")
            _print(console, f"FAILED: {one.name}")
            _print_details(console, one.details)
            _print(console, f"  remedy: {one.remedy}")
        for note in self.notes:
            _print(console, f"note: {note}")
        _print(console, f"{self.summary}")


def _print_details(console: Console, details: Sequence[str]) -> None:
    for line in details[:SHOWN_DETAILS]:
        _print(console, f"  {line}")
    if len(details) > SHOWN_DETAILS:
        _print(console, f"  and {len(details) - SHOWN_DETAILS} more (--json FILE has more)")


def _print(console: Console, text: str) -> None:
    console.print(text, markup=False, highlight=False, soft_wrap=True)

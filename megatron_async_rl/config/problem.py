"""What is wrong with what a user said, where, and what would be right; rendered to fit on one screen."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

SCREEN_PROBLEMS = 6
"""Problems shown at once: at most four lines each, so that a screen of 30 lines holds them."""


@dataclass(frozen=True, kw_only=True)
class Problem:
    """`key`: dotted config key, or the file in fault. `where`: file:line, or the command line, that set it."""

    key: str
    what: str
    fix: str
    where: str | None = None

    def __str__(self) -> str:
        place = f"  ({self.where})" if self.where else ""
        return f"{self.key}{place}\n  {self.what}\n  fix: {self.fix}"


def screen(title: str, problems: Sequence[Problem]) -> str:
    """`title` and the problems, the first six of them."""
    lines = [title, *(str(problem) for problem in problems[:SCREEN_PROBLEMS])]
    if len(problems) > SCREEN_PROBLEMS:
        lines.append(f"... and {len(problems) - SCREEN_PROBLEMS} more")
    return "\n".join(lines)


class ConfigError(Exception):
    """A configuration that cannot be read, does not follow the schema or cannot run. `str()` is the screen to show."""

    def __init__(self, source: str, problems: Sequence[Problem]) -> None:
        super().__init__(source, tuple(problems))
        self.source = source
        self.problems = tuple(problems)

    def __str__(self) -> str:
        count = "1 problem" if len(self.problems) == 1 else f"{len(self.problems)} problems"
        return screen(f"{self.source}: {count}", self.problems)

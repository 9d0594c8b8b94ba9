"""User errors: the fault, its place and its fix, as fields. Only this module renders them as text.

Invariants:
- an error carries fields, and no code parses a message;
- six problems and a title fit on one screen.
"""

from __future__ import annotations

import difflib
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Self

SCREEN_PROBLEMS = 6
"""Number of problems shown at once. Each has at most four lines, so they fit on 30 lines."""

SHARE = Path(__file__).parents[1] / "share"
"""Pages, examples, launchers and reference vectors: links in a checkout, copies in a wheel."""


def shipped(name: str) -> str:
    """Return the path of a file in SHARE, such as docs/study.md, for a message: relative if the
    file is below the current folder, else absolute."""
    path, here = (SHARE / name).resolve(), Path.cwd()
    # A path that the user can paste into a command.
    return str(path.relative_to(here) if path.is_relative_to(here) else path)


def suggestion(name: str, known: Iterable[str]) -> str:
    """Return the question "did you mean ...? " with the nearest name in `known` and a trailing
    blank; empty if no name is near."""
    near = difflib.get_close_matches(name, known, n=1)
    return f"did you mean {near[0]!r}? " if near else ""


def number_of(noun: str, count: int, singular: str = "", plural: str = "") -> str:
    """Return the count, the noun and the matching verb form: `1 rank does`, `2 ranks do`."""
    ending = "es" if noun.endswith("ch") else "s"
    text = (noun, singular) if count == 1 else (f"{noun}{ending}", plural)
    return " ".join((str(count), *filter(None, text)))


@dataclass(frozen=True, kw_only=True)
class Problem:
    """One fault in a user's input, and its fix.

    `key`: dotted config key, command-line option, or name of the faulty file. `where`: the
    file:line or the command line that set it.
    """

    # Fields, not a sentence: commands, `mar init` and tests read them.
    key: str
    what: str
    fix: str
    where: str | None = None

    def __str__(self) -> str:
        place = f"  ({self.where})" if self.where else ""
        return f"{self.key}{place}\n  {self.what}\n  fix: {self.fix}"


class UserError(Exception):
    """An error that the user can fix. Commands print `str()` and exit with code 2.

    `source`: the file or command line with the problems; empty if each problem names its own.
    """

    def __init__(self, source: str, problems: Sequence[Problem]) -> None:
        # Positional arguments, so that the error survives pickling between processes.
        super().__init__(source, tuple(problems))
        self.source = source
        self.problems = tuple(problems)

    @classmethod
    def of(cls, key: str, what: str, fix: str, *, source: str = "") -> Self:
        return cls(source, [Problem(key=key, what=what, fix=fix)])

    def __str__(self) -> str:
        count = number_of("problem", len(self.problems))
        lines = [f"{self.source}: {count}"] if self.source else []
        # Later problems are often consequences of the first.
        lines += [str(problem) for problem in self.problems[:SCREEN_PROBLEMS]]
        if len(self.problems) > SCREEN_PROBLEMS:
            lines.append(f"... and {len(self.problems) - SCREEN_PROBLEMS} more")
        return "\n".join(lines)


class ConfigError(UserError):
    """Error for a configuration that cannot be read, does not follow the schema, or cannot run."""


class DataError(ValueError):
    """Error for refused data. `line` counts from 1; None if the fault concerns the whole file. The
    error survives pickling between processes."""

    def __init__(self, path: Path | str, line: int | None, what: str, fix: str) -> None:
        # Pass the arguments of __init__ in order: unpickling calls __init__ with `args`.
        super().__init__(str(path), line, what, fix)
        self.path = Path(path)
        self.line = line
        self.what = what
        self.fix = fix

    def problem(self, key: str) -> Problem:
        """Return the fault as a configuration problem; `key` is the config key of the data."""
        where = str(self.path) if self.line is None else f"{self.path}:{self.line}"
        return Problem(key=key, what=f"{where}: {self.what}", fix=self.fix)

    def __str__(self) -> str:
        problem = self.problem("")
        return f"{problem.what}\n  fix: {problem.fix}"

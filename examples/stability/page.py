"""docs/stability.md from its template, page.md (Jinja), and a study's CSV, so that no number on the
page is written by hand.

The template knows, for a setting such as `chain b16 s8 ppo_clip` (the values of all axes but rate
and seed)
- best(setting)           its runs at the scan's best rate; .lr, .area, .final, .cosine, .collapsed
- at(setting, lr)         its scan's runs at this rate
- decided(setting)        its runs on the seeds that decide, at the scan's best rate
- decided_at(setting, lr) those at this rate
- verdict(words, setting) of a comparison of questions.py, its words: .difference, .p (after Holm's
                          correction) and .holds
- width(setting, by=SETTING)  highest over lowest rate of its plateau, as text; `by`: measured by
                          the largest area of another
- collapse_rate(setting) the lowest rate that collapses, as text
- seconds(setting, lr)    seconds of the steps up to accuracy 0.8, in the scan's runs that had the
                          machine alone, as text
- count(STATE, ...)       runs in these states; hours, of all runs
and the filters `n` (so many digits) and `rate` (2e-4).
A setting without runs is an error, not a gap.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from statistics import fmean

from jinja2 import Environment, StrictUndefined
from measures import Row, read_csv
from questions import chosen, verdicts
from rates import Measured, by_group, fresh, group_axes, measured, plateau, scanned
from tables import seconds_to_reach

from megatron_async_rl.config.problem import UserError

HERE = Path(__file__).parent
TEMPLATE = HERE / "page.md"
PAGE = HERE.parents[1] / "docs" / "stability.md"


@dataclass(frozen=True, kw_only=True)
class Verdict:
    difference: float
    p: float
    holds: str


class Facts:
    """Facts about the runs that the template may use."""

    def __init__(self, rows: Sequence[Row], curves: Sequence[Row]) -> None:
        self._rows = rows
        self._groups = {" ".join(group): rates for group, rates in by_group(scanned(rows)).items()}
        self._decided = {" ".join(group): one for group, one in chosen(rows).items()}
        self._decided_at = {
            (" ".join(one.group), one.lr): one for one in measured(fresh(rows)) if one.runs
        }
        self._verdicts = {
            (one.words, one.where): Verdict(difference=one.difference, p=p, holds=holds)
            for one, p, holds in verdicts(rows)
            if p is not None
        }
        self._reached = seconds_to_reach(curves)

    @property
    def hours(self) -> float:
        return sum(float(row["wall_seconds"] or 0) for row in self._rows) / 3600

    @property
    def axes(self) -> list[str]:
        return group_axes(self._rows)

    def count(self, *states: str) -> int:
        return sum(not states or row["state"] in states for row in self._rows)

    def rates(self, setting: str) -> Sequence[Measured]:
        if setting not in self._groups:
            raise UserError.of("page.md", f"{setting} has no runs", "name one of the study's")
        return self._groups[setting]

    def best(self, setting: str) -> Measured:
        return plateau(self.rates(setting))[0]

    def at(self, setting: str, lr: float) -> Measured:
        for one in self.rates(setting):
            if one.lr == lr and one.runs:
                return one
        raise UserError.of("page.md", f"{setting} has no run at {lr:g}", "name a rate it has")

    def decided(self, setting: str) -> Measured:
        if setting not in self._decided:
            what = f"{setting} has no run on the seeds that decide"
            raise UserError.of("page.md", what, "run the grid that `choose` writes")
        return self._decided[setting]

    def decided_at(self, setting: str, lr: float) -> Measured:
        if (setting, lr) not in self._decided_at:
            what = f"{setting} has no run at {lr:g} on the seeds that decide"
            raise UserError.of("page.md", what, "run the grid that `choose` writes")
        return self._decided_at[setting, lr]

    def verdict(self, words: str, setting: str) -> Verdict:
        if (words, setting) not in self._verdicts:
            what = f"{words} at {setting} lacks seeds, or is not a comparison of questions.py"
            raise UserError.of("page.md", what, "run what `choose` writes, or mend the words")
        return self._verdicts[words, setting]

    def width(self, setting: str, by: str | None = None) -> str:
        area = None if by is None else self.best(by).area
        return f"{plateau(self.rates(setting), area)[1]:.3g}"

    def collapse_rate(self, setting: str) -> str:
        lr = plateau(self.rates(setting))[2]
        return "none" if lr is None else rate(lr)

    def seconds(self, setting: str, lr: float) -> str:
        alone = [run for run in self.at(setting, lr).runs if run["jobs"] == "1"]
        if not alone:
            what = f"{setting} has no run at {lr:g} that had the machine alone"
            raise UserError.of("page.md", what, "run it with --jobs 1")
        known = [self._reached[run["run"]] for run in alone if run["run"] in self._reached]
        return f"{fmean(known):.0f} s" if len(known) == len(alone) else "not reached"


def rate(lr: float) -> str:
    """2e-4 of 0.0002, as grids and tables of the page write learning rates."""
    digits, _, power = f"{lr:e}".partition("e")
    return f"{float(digits):g}e{int(power)}"


def page(folder: Path, template: Path = TEMPLATE) -> str:
    """The text for the runs of `folder`. Raises UserError for a setting that has none."""
    facts = Facts(*(read_csv(folder / name) for name in ("runs.csv", "curves.csv")))
    environment = Environment(
        undefined=StrictUndefined, autoescape=False, keep_trailing_newline=True
    )
    environment.filters["rate"] = rate
    environment.filters["n"] = lambda value, digits=2: f"{float(value):.{digits}f}"
    names = (
        *("best", "at", "decided", "decided_at", "verdict"),
        *("width", "collapse_rate", "seconds", "count"),
    )
    asked = {name: getattr(facts, name) for name in names} | {"hours": facts.hours}
    return environment.from_string(template.read_text(encoding="utf-8")).render(asked)

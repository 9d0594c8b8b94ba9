"""Runs that share all settings but learning rate and seed: their means, the best rate, its plateau.

Seeds that decide (`FRESH`) and seeds that choose are never averaged together.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import groupby
from statistics import fmean, stdev

from measures import Row, axes_of

PLATEAU = 0.95
"""Learning rates whose mean area is at least this share of the best one's are its plateau."""
NEAR_TIE = 0.02
"""Two best rates whose areas are closer than this need the scan's second seed."""
FRESH = ("seed11", "seed12", "seed13", "seed14", "seed15")
COUNTED = ("finished", "diverged")

Group = tuple[str, ...]


@dataclass(frozen=True, kw_only=True)
class Measured:
    """A group's runs at one learning rate."""

    group: Group
    """Values of the axes other than `rate` and `seed`."""
    lr: float
    runs: Sequence[Row]
    """Runs that count: finished, or diverged."""
    missing: int
    """Number of runs that failed or have not ended."""

    def values(self, measure: str) -> list[float]:
        return [float(run[measure]) for run in self.runs if run[measure]]

    def mean(self, measure: str) -> float:
        values = self.values(measure)
        return fmean(values) if values else math.nan

    @property
    def area(self) -> float:
        """Never NaN, so that no unknown area is the best."""
        area = self.mean("area")
        return area if math.isfinite(area) else -math.inf

    def in_words(self, measure: str, digits: int = 3) -> str:
        values = self.values(measure)
        if not values:
            return "–"
        spread = f" ± {stdev(values):.{digits}f}" if len(values) > 1 else ""
        return f"{fmean(values):.{digits}f}{spread}"

    @property
    def collapsed(self) -> int:
        return sum(run["collapsed"] == "1" for run in self.runs)

    @property
    def seeds(self) -> str:
        planned = len(self.runs) + self.missing
        return f"{len(self.runs)} of {planned}" if self.missing else str(planned)


def scanned(rows: Sequence[Row]) -> list[Row]:
    return [row for row in rows if row.get("seed") not in FRESH]


def fresh(rows: Sequence[Row]) -> list[Row]:
    return [row for row in rows if row.get("seed") in FRESH]


def group_axes(rows: Sequence[Row]) -> list[str]:
    return [axis for axis in axes_of(rows) if axis not in ("rate", "seed")]


def measured(rows: Sequence[Row]) -> list[Measured]:
    """Measurements in the order in which the groups first appear in the CSV, by ascending
    learning rate."""
    if not rows:
        return []
    axes = group_axes(rows)
    order: dict[Group, int] = {}
    for row in rows:
        order.setdefault(tuple(row[axis] for axis in axes), len(order))

    def place(row: Row) -> tuple[int, float]:
        return order[tuple(row[axis] for axis in axes)], float(row["lr"])

    found = []
    for (_, lr), together in groupby(sorted(rows, key=place), key=place):
        runs = list(together)
        counted = [run for run in runs if run["state"] in COUNTED]
        group = tuple(runs[0][axis] for axis in axes)
        missing = len(runs) - len(counted)
        found.append(Measured(group=group, lr=lr, runs=counted, missing=missing))
    return found


def by_group(rows: Sequence[Row]) -> dict[Group, list[Measured]]:
    """Groups that have an area at some rate; their rates ascending."""
    groups: dict[Group, list[Measured]] = {}
    for one in measured(rows):
        groups.setdefault(one.group, []).append(one)
    return {
        group: rates
        for group, rates in groups.items()
        if any(math.isfinite(one.area) for one in rates)
    }


def plateau(
    rates: Sequence[Measured], by: float | None = None
) -> tuple[Measured, float, float | None]:
    """Three facts on one group at several learning rates, ascending: the rate of largest mean area;
    the width of its plateau, highest rate over lowest, through neighbouring rates without a missing
    run; and the lowest rate at which at least half of the seeds collapsed, None where there is
    none.

    by: the area that rates are measured by, else the group's own largest; a group that comes
    nowhere near it has a plateau of width 0.
    """
    top = max(range(len(rates)), key=lambda index: rates[index].area)
    minimum = PLATEAU * (rates[top].area if by is None else by)

    def level(index: int) -> bool:
        return not rates[index].missing and rates[index].area >= minimum

    low = high = top
    while low > 0 and level(low - 1):
        low -= 1
    while high + 1 < len(rates) and level(high + 1):
        high += 1
    width = rates[high].lr / rates[low].lr if rates[top].area >= minimum else 0.0
    collapses = (one.lr for one in rates if one.runs and 2 * one.collapsed >= len(one.runs))
    return rates[top], width, next(collapses, None)


def near_tie(rates: Sequence[Measured]) -> list[Measured]:
    """The two best rates where they are within NEAR_TIE and one of them has a single seed,
    ascending by rate; else none."""
    best = sorted((one for one in rates if math.isfinite(one.area)), key=lambda one: -one.area)[:2]
    if len(best) < 2 or best[0].area - best[1].area >= NEAR_TIE:
        return []
    return sorted(best, key=lambda one: one.lr) if min(len(one.runs) for one in best) < 2 else []

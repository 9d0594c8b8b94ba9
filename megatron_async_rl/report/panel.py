"""A panel of a run's report: its data, its kind and its labels, whatever it is drawn on."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Literal

from megatron_async_rl.report.anomalies import Anomaly
from megatron_async_rl.report.series import Floats

STEPS = "optimizer step"


@dataclass(frozen=True, kw_only=True)
class Curve:
    name: str
    colour: str
    """A name of `charts.COLOURS`."""
    x: Floats
    """[n], growing; with `y` [n], which may be nan."""
    y: Floats
    style: Literal["line", "dotted", "points", "diamonds"] = "line"
    trend: Floats | None = None
    """[n]: drawn as a wide light line below the curve."""


@dataclass(frozen=True, kw_only=True)
class Level:
    """A horizontal dashed line."""

    name: str
    colour: str
    value: float


@dataclass(frozen=True, kw_only=True)
class Bar:
    row: int
    start: float
    length: float
    colour: str


@dataclass(frozen=True, kw_only=True)
class Panel:
    """`lines`: curves over the steps. `stack`: curves on top of each other. `shades`: `grid` as
    cells under curves. `columns`: for each category a column of every curve. `bars`: `bars` in
    `categories` from above."""

    title: str
    unit: str
    kind: Literal["lines", "stack", "shades", "columns", "bars"] = "lines"
    x_label: str = STEPS
    curves: Sequence[Curve] = ()
    levels: Sequence[Level] = ()
    grid: tuple[Floats, Floats] | None = None
    """(steps [n], shares [bins, n])."""
    categories: Sequence[str] = ()
    bars: Sequence[Bar] = ()
    bar_names: Mapping[str, str] = field(default_factory=dict)
    """Colour -> what bars of this colour are."""
    ends: Sequence[tuple[int, float]] = ()
    """(step, place) of upright lines."""
    x_range: tuple[float, float] | None = None
    low: float | None = None
    high: float | None = None
    form: Literal["number", "share", "whole"] = "number"
    log: bool = False
    marks: Sequence[Anomaly] = ()
    empty: str = ""
    """Shown where there is nothing to draw."""
    wide: bool = False
    overview: bool = False
    """On the sheet, too."""

    @property
    def legend(self) -> list[tuple[str, str, bool]]:
        """(name, colour, dashed)."""
        named = [(one.name, one.colour, one.style == "dotted") for one in self.curves if one.name]
        named += [(level.name, level.colour, True) for level in self.levels]
        return named + [(name, colour, False) for colour, name in self.bar_names.items()]

"""Figures of a study from its CSV (results.py), as SVG: the same bytes for the same CSV.

- curves-GROUP.svg   held-out accuracy and gradient cosine over the steps, a line for each method
                     and lag at its best learning rate: mean over the seeds (the deciding seeds if
                     they were run), the range as a shade
- rates-GROUP.svg    area under the accuracy curve by learning rate, a row for each method and lag,
                     on the scan's seeds, the plateau in bold; only if there are several rates
GROUP is the task and batch, where the study has them.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path

import matplotlib as mpl
import numpy as np
from matplotlib.axes import Axes
from matplotlib.backends.backend_svg import FigureCanvasSVG
from matplotlib.figure import Figure
from measures import Row
from questions import chosen
from rates import PLATEAU, Group, Measured, fresh, group_axes, measured, plateau, scanned

COLOURS = (
    "#2563a8",
    "#c8372d",
    "#2e8b57",
    "#d98a00",
    "#7a4fa3",
    "#3aa6b9",
    "#8c6d46",
    "#1f2933",
    "#9aa5b1",
    "#d77fa1",
)
DARK = 0.55
"""Area below which a cell is dark."""
SPLIT = ("task", "batch")
"""Axes with a figure for each of their values."""


def write_figures(rows: Sequence[Row], curves: Sequence[Row], folder: Path) -> None:
    if not rows:
        return
    axes = group_axes(rows)
    split = [index for index, axis in enumerate(axes) if axis in SPLIT]
    parts: dict[str, list[Measured]] = {}
    for one in measured(scanned(rows) or fresh(rows)):
        if one.runs:
            name = "-".join(one.group[index] for index in split) or "all"
            parts.setdefault(name, []).append(one)
    for name, found in parts.items():
        rest = [index for index in range(len(axes)) if index not in split]
        # Rows of one lag (of the first axis, whatever it is) stand together.
        together = list(dict.fromkeys(_first(one, rest) for one in found))
        found.sort(key=lambda one: together.index(_first(one, rest)))
        groups = {one.group: [o for o in found if o.group == one.group] for one in found}
        draw_curves(groups, chosen(rows), curves, rest, folder / f"curves-{name}.svg")
        if any(len(rates) > 1 for rates in groups.values()):
            draw_plateaus(groups, rest, folder / f"rates-{name}.svg")


def _first(one: Measured, rest: Sequence[int]) -> Group:
    return tuple(one.group[index] for index in rest[:1])


def values_by_step(
    runs: Sequence[Row], by_run: Mapping[str, Sequence[Row]], key: str
) -> dict[int, list[float]]:
    """Return step -> values of the runs. by_run: points of each run that has any."""
    points = {
        run["run"]: {
            int(point["step"]): float(point[key])
            for point in by_run.get(run["run"], ())
            if point[key]
        }
        for run in runs
    }
    at: dict[int, list[float]] = {}
    for step in sorted({step for own in points.values() for step in own}):
        for run in runs:
            own = points[run["run"]]
            if step in own:
                at.setdefault(step, []).append(own[step])
            # A diverged run has the accuracy 0 from its end on, as in its measures, so a mean is
            # never that of the remaining runs alone.
            elif key == "accuracy" and run["state"] == "diverged" and step > max(own, default=-1):
                at.setdefault(step, []).append(0.0)
    return at


def draw_curves(
    groups: dict[Group, list[Measured]],
    decided: dict[Group, Measured],
    curves: Sequence[Row],
    rest: Sequence[int],
    path: Path,
) -> None:
    figure, panels = make_figure(("Held-out accuracy", "Cosine of consecutive gradients"))
    by_run: dict[str, list[Row]] = {}
    for point in curves:
        by_run.setdefault(point["run"], []).append(point)
    for index, (group, rates) in enumerate(groups.items()):
        best = decided.get(group) or plateau(rates)[0]
        label = f"{' '.join(group[i] for i in rest)}, lr {best.lr:g}"
        colour, style = COLOURS[index % len(COLOURS)], "-" if index < len(COLOURS) else ":"
        for panel, key in zip(panels, ("accuracy", "cosine"), strict=True):
            at = values_by_step(best.runs, by_run, key)
            steps = sorted(at)
            means = [float(np.mean(at[step])) for step in steps]
            panel.plot(steps, means, style, color=colour, label=label)
            if len(best.runs) > 1:
                low, high = ([edge(at[step]) for step in steps] for edge in (min, max))
                panel.fill_between(steps, low, high, color=colour, alpha=0.12, linewidth=0)
    for panel in panels:
        panel.set_xlabel("optimizer step")
    panels[0].set_ylim(0, 1)
    _save(figure, panels, path)


def draw_plateaus(groups: dict[Group, list[Measured]], rest: Sequence[int], path: Path) -> None:
    """A row for each group, a column for each learning rate; `x` where at least half of the seeds
    collapsed."""
    rates = sorted({one.lr for found in groups.values() for one in found})
    areas = np.full((len(groups), len(rates)), np.nan)
    figure = Figure(
        figsize=(2.6 + 0.85 * len(rates), 1.1 + 0.3 * len(groups)), layout="constrained"
    )
    FigureCanvasSVG(figure)
    axes = figure.add_subplot()
    for row, found in enumerate(groups.values()):
        best = max(one.area for one in found)
        for one in found:
            column = rates.index(one.lr)
            areas[row, column] = one.mean("area")
            if not one.runs:
                continue
            collapsed = " ×" if 2 * one.collapsed >= len(one.runs) else ""
            axes.text(
                column, row, f"{areas[row, column]:.2f}{collapsed}", ha="center", va="center",
                color="white" if areas[row, column] < DARK else "#1f2933", fontsize=9,
                fontweight="bold" if one.area >= PLATEAU * best else "normal",
            )  # fmt: skip
    axes.imshow(areas, cmap="viridis", vmin=0, vmax=1, aspect="auto")
    axes.set_xticks(range(len(rates)), [f"{rate:g}" for rate in rates])
    axes.set_yticks(range(len(groups)), [" ".join(group[i] for i in rest) for group in groups])
    axes.set_xlabel("learning rate")
    axes.set_title("Mean held-out accuracy over the run", loc="left", fontsize=11)
    axes.spines[:].set_visible(False)
    axes.tick_params(length=0)
    with mpl.rc_context({"svg.fonttype": "none", "svg.hashsalt": path.name}):
        figure.savefig(path, metadata={"Date": None})


def make_figure(titles: Sequence[str]) -> tuple[Figure, list[Axes]]:
    figure = Figure(figsize=(5.2 * len(titles), 4.2), layout="constrained")
    FigureCanvasSVG(figure)
    panels = [figure.add_subplot(1, len(titles), index + 1) for index in range(len(titles))]
    for panel, title in zip(panels, titles, strict=True):
        panel.set_title(title, loc="left", fontsize=11)
        panel.grid(True, color="#e6e9ed", linewidth=0.8)
        panel.spines[["top", "right"]].set_visible(False)
    return figure, panels


def _save(figure: Figure, panels: Sequence[Axes], path: Path) -> None:
    """One legend for all panels, below them."""
    entries: dict[str, object] = {}
    for panel in panels:
        handles, labels = panel.get_legend_handles_labels()
        entries |= dict(zip(labels, handles, strict=True))
    columns = min(4, max(1, len(entries)))
    figure.legend(
        list(entries.values()), list(entries), loc="outside lower center", ncols=columns,
        frameon=False, fontsize=8.5,
    )  # fmt: skip
    with mpl.rc_context({"svg.fonttype": "none", "svg.hashsalt": path.name}):
        figure.savefig(path, metadata={"Date": None})

"""Figures of a study from its CSV (results.py), as SVG: the same bytes for the same CSV.

- curves-GROUP.svg   held-out accuracy and gradient cosine over the steps, a line for each method and
                     lag at its best learning rate: mean over the seeds, those that decide where they
                     were run, the range as a shade
- rates-GROUP.svg    area under the accuracy curve over the learning rate, a panel for each lag, a
                     line for each method, on the scan's seeds; only where there are several rates
GROUP is the task and batch, where the study has them.
"""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

import matplotlib as mpl
import numpy as np
from matplotlib.axes import Axes
from matplotlib.backends.backend_svg import FigureCanvasSVG
from matplotlib.figure import Figure
from measures import Row
from questions import chosen
from rates import Group, Measured, fresh, group_axes, measured, plateau, scanned

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
    lag = axes.index("lag") if "lag" in axes else None
    for name, found in parts.items():
        groups = {one.group: [o for o in found if o.group == one.group] for one in found}
        rest = [index for index in range(len(axes)) if index not in split]
        draw_curves(groups, chosen(rows), curves, rest, folder / f"curves-{name}.svg")
        if any(len(rates) > 1 for rates in groups.values()):
            draw_rates(groups, lag, rest, folder / f"rates-{name}.svg")


def draw_curves(
    groups: dict[Group, list[Measured]],
    decided: dict[Group, Measured],
    curves: Sequence[Row],
    rest: Sequence[int],
    path: Path,
) -> None:
    figure, panels = _figure(("Held-out accuracy", "Cosine of consecutive gradients"))
    by_run: dict[str, list[Row]] = {}
    for point in curves:
        by_run.setdefault(point["run"], []).append(point)
    for index, (group, rates) in enumerate(groups.items()):
        best = decided.get(group) or plateau(rates)[0]
        label = f"{' '.join(group[i] for i in rest)}, lr {best.lr:g}"
        colour, style = COLOURS[index % len(COLOURS)], "-" if index < len(COLOURS) else ":"
        for panel, key in zip(panels, ("accuracy", "cosine"), strict=True):
            at: dict[int, list[float]] = {}
            for run in best.runs:
                for point in by_run[run["run"]]:
                    if point[key]:
                        at.setdefault(int(point["step"]), []).append(float(point[key]))
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


def draw_rates(
    groups: dict[tuple[str, ...], list[Measured]],
    lag: int | None,
    rest: Sequence[int],
    path: Path,
) -> None:
    lags = list(dict.fromkeys(group[lag] for group in groups)) if lag is not None else [""]
    names = {group: " ".join(group[i] for i in rest if i != lag) or "all" for group in groups}
    order = list(dict.fromkeys(names.values()))
    figure, panels = _figure([f"lag {one}" if one else "" for one in lags])
    for group, rates in groups.items():
        panel = panels[lags.index(group[lag]) if lag is not None else 0]
        index = order.index(names[group])
        areas = [one.values("area") for one in rates]
        panel.plot(
            [one.lr for one in rates],
            [float(np.mean(values)) for values in areas],
            "-" if index < len(COLOURS) else ":",
            marker="o",
            markersize=3,
            color=COLOURS[index % len(COLOURS)],
            label=names[group],
        )
    for panel in panels:
        panel.set_xscale("log")
        panel.set_xlabel("learning rate")
        panel.set_ylim(0, 1)
    panels[0].set_ylabel("area under the accuracy curve")
    _save(figure, panels, path)


def _figure(titles: Sequence[str]) -> tuple[Figure, list[Axes]]:
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

"""Runs of a study -> compact CSV -> tables and figures.

    python examples/stability/results.py collect GRID... --out FOLDER   # from the runs' directories
    python examples/stability/results.py choose FOLDER GRID             # the grid of fresh seeds
    python examples/stability/results.py show FOLDER                    # from FOLDER's CSV alone

`collect` writes two files, which are what is kept of a study:
- runs.csv     one row per run: its settings by axis, learning rate, steps, and the measures below
- curves.csv   one row per run and evaluation: held-out accuracy, and the means since the evaluation
               before of cosine, ESS ratio, entropy and reward trained on
`choose` prints a grid that runs each method at its best learning rate on fresh seeds (choose.py).
`show` writes tables.md and figures (SVG) from the CSV, the same bytes for the same CSV.

Measures, as PLAN.md defines them: `final` is the mean held-out accuracy of the last four
evaluations, `area` the mean over the whole curve (trapezoids), `best` the highest evaluation, and a
run has `collapsed` when its final accuracy is below half of its best. A run that did not finish has
no measures and is counted apart.
"""

from __future__ import annotations

import argparse
import csv
import json
import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from itertools import combinations, groupby
from pathlib import Path
from statistics import fmean, stdev

import numpy as np
from numpy.typing import NDArray

LAST_EVALUATIONS = 4
COLLAPSED_BELOW = 0.5
"""Of its best accuracy."""
PLATEAU = 0.95
"""Learning rates whose mean area is at least this share of the best one's are its plateau."""
FRESH_SEEDS = 5
LEAST_GAIN = 0.02
P_VALUE = 0.05
MEASURES = ("final", "area", "best", "collapsed", "cosine", "update_norm", "seconds")
ABOUT = ("state", "lr", "steps", "wall_seconds", "jobs")
CURVE = ("run", "step", "accuracy", "cosine", "ess_ratio", "entropy", "reward", "seconds")
SINCE = {
    "cosine": "gac/cosine",
    "ess_ratio": "ratio/ess_ratio",
    "entropy": "policy/entropy",
    "reward": "reward/mean",
}

Row = dict[str, str]
Floats = NDArray[np.float64]


@dataclass(frozen=True, kw_only=True)
class Measured:
    """Runs that share all settings but learning rate and seed, at one learning rate."""

    group: tuple[str, ...]
    """Values of the axes other than `rate` and `seed`."""
    lr: float
    runs: Sequence[Row]
    """The finished ones."""
    failed: int

    def values(self, measure: str) -> list[float]:
        return [float(run[measure]) for run in self.runs if run[measure]]

    def mean(self, measure: str) -> float:
        values = self.values(measure)
        return fmean(values) if values else math.nan

    def in_words(self, measure: str, digits: int = 3) -> str:
        values = self.values(measure)
        if not values:
            return "–"
        spread = f" ± {stdev(values):.{digits}f}" if len(values) > 1 else ""
        return f"{fmean(values):.{digits}f}{spread}"

    @property
    def collapsed(self) -> int:
        return sum(run["collapsed"] == "1" for run in self.runs)


# --- collect --------------------------------------------------------------------------------------


def collect(grids: Sequence[Path], out: Path) -> None:
    from megatron_async_rl.config.grid import read_grid, runs_of
    from megatron_async_rl.study import outcome_of

    rows: list[dict[str, object]] = []
    curves: list[dict[str, object]] = []
    axes: list[str] = []
    for path in grids:
        grid = read_grid(path)
        axes += [axis for axis in grid.axes if axis not in axes]
        for run in runs_of(grid):
            state = outcome_of(run).state
            if state not in ("finished", "failed") or any(row["run"] == run.name for row in rows):
                continue
            row: dict[str, object] = {"run": run.name, **run.settings}
            row |= about_run(run.directory) | {"state": state}
            curve = curve_of(run.directory)
            if state == "finished":
                row |= measures_of(run.directory, curve)
            rows.append(row)
            curves += [{"run": run.name, **point} for point in curve]
    out.mkdir(parents=True, exist_ok=True)
    write_csv(out / "runs.csv", ["run", *axes, *ABOUT, *MEASURES], rows)
    write_csv(out / "curves.csv", CURVE, curves)


def about_run(directory: Path) -> dict[str, object]:
    from megatron_async_rl.report.run_data import read_config

    config = read_config(directory)
    about = {"lr": config["policy"]["optimizer"]["lr"], "steps": config["run"]["steps"]}
    file = directory / "study.json"
    started = json.loads(file.read_text()) if file.exists() else {}
    return about | {"wall_seconds": started.get("seconds"), "jobs": started.get("jobs")}


def curve_of(directory: Path) -> list[dict[str, object]]:
    """One point per evaluation, in order of versions."""
    from megatron_async_rl.metrics.log import read_metrics
    from megatron_async_rl.report.series import evaluation_curves

    rows = read_metrics(directory)
    evaluated = evaluation_curves(directory)
    seconds = np.concatenate([[0.0], np.cumsum([float(row["time/step_s"]) for row in rows])])
    points: list[dict[str, object]] = []
    before = 0
    for version, accuracy in zip(evaluated.versions.tolist(), evaluated.mean, strict=True):
        since = rows[before:version]
        point: dict[str, object] = {"step": version, "accuracy": accuracy}
        for name, key in SINCE.items():
            point[name] = mean([float(row[key]) for row in since if key in row])
        points.append(point | {"seconds": seconds[min(version, len(rows))]})
        before = version
    return points


def measures_of(directory: Path, curve: Sequence[Mapping[str, object]]) -> dict[str, object]:
    from megatron_async_rl.metrics.log import read_metrics

    rows = read_metrics(directory)
    steps = np.array([point["step"] for point in curve], dtype=np.float64)
    accuracy = np.array([point["accuracy"] for point in curve], dtype=np.float64)
    result = measures(steps, accuracy)
    for name, key in (("cosine", "gac/cosine"), ("update_norm", "update/norm")):
        result[name] = mean([float(row[key]) for row in rows if key in row])
    result["seconds"] = sum(float(row["time/step_s"]) for row in rows)
    return result


def measures(steps: Floats, accuracy: Floats) -> dict[str, object]:
    """Of a curve of held-out accuracy over steps, [n] each."""
    final = float(accuracy[-LAST_EVALUATIONS:].mean())
    best = float(accuracy.max())
    length = float(steps[-1] - steps[0])
    area = float(np.trapezoid(accuracy, steps)) / length if length else final
    return {
        "final": final,
        "area": area,
        "best": best,
        "collapsed": int(final < COLLAPSED_BELOW * best),
    }


def mean(values: Sequence[float]) -> float | None:
    finite = [value for value in values if math.isfinite(value)]
    return fmean(finite) if finite else None


def write_csv(path: Path, columns: Sequence[str], rows: Iterable[Mapping[str, object]]) -> None:
    with open(path, "w", newline="", encoding="utf-8") as file:
        writer = csv.writer(file, lineterminator="\n")
        writer.writerow(columns)
        for row in rows:
            writer.writerow([_plain(row.get(column)) for column in columns])


def _plain(value: object) -> object:
    return "" if value is None else f"{value:.5g}" if isinstance(value, float) else value


# --- show -----------------------------------------------------------------------------------------


def read_csv(path: Path) -> list[Row]:
    with open(path, newline="", encoding="utf-8") as file:
        return list(csv.DictReader(file))


def axes_of(rows: Sequence[Row]) -> list[str]:
    return [column for column in rows[0] if column not in ("run", *ABOUT, *MEASURES)]


def measured(rows: Sequence[Row]) -> list[Measured]:
    """In the order in which the groups first stand in the CSV, learning rates ascending."""
    axes = [axis for axis in axes_of(rows) if axis not in ("rate", "seed")]
    order: dict[tuple[str, ...], int] = {}
    for row in rows:
        order.setdefault(tuple(row[axis] for axis in axes), len(order))

    def place(row: Row) -> tuple[int, float]:
        return order[tuple(row[axis] for axis in axes)], float(row["lr"])

    found = []
    for (_, lr), together in groupby(sorted(rows, key=place), key=place):
        runs = list(together)
        finished = [run for run in runs if run["state"] == "finished"]
        group = tuple(runs[0][axis] for axis in axes)
        failed = len(runs) - len(finished)
        found.append(Measured(group=group, lr=lr, runs=finished, failed=failed))
    return found


def plateau(rates: Sequence[Measured]) -> tuple[Measured, float, float | None]:
    """Of one group at several learning rates, ascending: the rate of largest mean area; the width
    of its plateau, highest rate over lowest, through rates next to each other; and the lowest rate
    at which at least half of the seeds collapsed, None where there is none."""
    known = [one for one in rates if one.runs]
    areas = [one.mean("area") for one in known]
    top = int(np.argmax(areas))
    low = high = top
    while low > 0 and areas[low - 1] >= PLATEAU * areas[top]:
        low -= 1
    while high + 1 < len(known) and areas[high + 1] >= PLATEAU * areas[top]:
        high += 1
    collapses = (one.lr for one in known if 2 * one.collapsed >= len(one.runs))
    return known[top], known[high].lr / known[low].lr, next(collapses, None)


def tables(rows: Sequence[Row]) -> str:
    axes = [axis for axis in axes_of(rows) if axis not in ("rate", "seed")]
    found = measured(rows)
    finished = [row for row in rows if row["state"] == "finished"]
    hours = sum(float(row["wall_seconds"] or 0) for row in rows) / 3600
    lines = [
        f"{len(rows)} runs, {len(finished)} finished, {len(rows) - len(finished)} failed;"
        f" {hours:.1f} hours of runs.",
        "",
        "## Every setting",
        "",
        "Mean ± standard deviation over the seeds.",
        "",
        *_header(*axes, "lr", "seeds", "final", "area", "collapsed", "failed", "cosine", "s/step"),
    ]
    for one in found:
        per_step = [float(run["seconds"]) / float(run["steps"]) for run in one.runs]
        cells = [one.in_words("final"), one.in_words("area")]
        cells += [str(one.collapsed), str(one.failed), one.in_words("cosine", 2)]
        cells += [f"{fmean(per_step):.2f}" if per_step else "–"]
        lines.append(_line(*one.group, f"{one.lr:g}", str(len(one.runs)), *cells))
    lines += [
        "",
        "## Each method at its best learning rate, and its plateau",
        "",
        f"Plateau: the rates next to the best whose area is at least {PLATEAU:g} of its; width is"
        " highest over lowest. Collapse: the lowest rate at which at least half of the seeds"
        " collapsed.",
        "",
        *_header(*axes, "rates", "best lr", "seeds", "area", "final", "width", "collapse"),
    ]
    for group, together in groupby(found, key=lambda one: one.group):
        rates = list(together)
        if not any(one.runs for one in rates):
            continue
        best, width, collapse = plateau(rates)
        cells = [str(len(rates)), f"{best.lr:g}", str(len(best.runs))]
        cells += [best.in_words("area"), best.in_words("final"), f"{width:.3g}"]
        lines.append(_line(*group, *cells, "none" if collapse is None else f"{collapse:g}"))
    return "\n".join([*lines, *beaten(rows)]) + "\n"


def _header(*cells: str) -> list[str]:
    return [_line(*cells), _line(*("---" for _ in cells))]


def _line(*cells: str) -> str:
    return f"| {' | '.join(cells)} |"


def beaten(rows: Sequence[Row]) -> list[str]:
    """Of each method, at its best rate, those of the same other settings that it beats as PLAN.md
    says; only methods that have enough seeds."""
    axes = [axis for axis in axes_of(rows) if axis not in ("rate", "seed")]
    where = axes.index("method") if "method" in axes else None
    if where is None:
        return []
    best: dict[tuple[str, ...], dict[str, Measured]] = {}
    for group, together in groupby(measured(rows), key=lambda one: one.group):
        rates = [one for one in together if len(one.runs) >= FRESH_SEEDS]
        if rates:
            others = tuple(value for index, value in enumerate(group) if index != where)
            best.setdefault(others, {})[group[where]] = plateau(rates)[0]
    lines = []
    for others, methods in best.items():
        for name, one in methods.items():
            wins = [other for other, rival in methods.items() if beats(one, rival)]
            cells = [one.in_words("area"), ", ".join(wins) or "none"]
            lines.append(_line(*others, name, f"{one.lr:g}", *cells))
    if not lines:
        return []
    rest = [axis for axis in axes if axis != "method"]
    title = [
        "",
        f"## What beats what, on at least {FRESH_SEEDS} seeds",
        "",
        f"Mean area larger by at least {LEAST_GAIN:g}, and two-sided p < {P_VALUE:g} by permutation.",
        "",
    ]
    return [*title, *_header(*rest, "method", "lr", "area", "beats"), *lines]


def beats(one: Measured, other: Measured) -> bool:
    mine, theirs = one.values("area"), other.values("area")
    if one is other or fmean(mine) - fmean(theirs) < LEAST_GAIN:
        return False
    return permutation_p(mine, theirs) < P_VALUE


def permutation_p(first: Sequence[float], second: Sequence[float]) -> float:
    """Two-sided p of the difference of means: the share of all ways to deal the values into groups
    of these sizes that differ at least as much. Exact, and of five against five 1/126 at least."""
    values = np.array([*first, *second])
    observed = abs(fmean(first) - fmean(second))
    extreme = dealt = 0
    for chosen in combinations(range(len(values)), len(first)):
        mine = values[list(chosen)]
        theirs = (values.sum() - mine.sum()) / len(second)
        extreme += abs(mine.mean() - theirs) >= observed - 1e-12
        dealt += 1
    return extreme / dealt


def show(folder: Path) -> None:
    from figures import write_figures

    rows = read_csv(folder / "runs.csv")
    (folder / "tables.md").write_text(tables(rows), encoding="utf-8")
    write_figures(rows, read_csv(folder / "curves.csv"), folder)


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    commands = parser.add_subparsers(dest="command", required=True)
    collecting = commands.add_parser("collect")
    collecting.add_argument("grids", nargs="+", type=Path, metavar="GRID")
    collecting.add_argument("--out", required=True, type=Path, metavar="FOLDER")
    choosing = commands.add_parser("choose")
    choosing.add_argument("folder", type=Path, metavar="FOLDER")
    choosing.add_argument("grid", type=Path, metavar="GRID")
    commands.add_parser("show").add_argument("folder", type=Path, metavar="FOLDER")
    arguments = parser.parse_args()
    if arguments.command == "collect":
        collect(arguments.grids, arguments.out)
    elif arguments.command == "choose":
        from choose import fresh_grid

        print(fresh_grid(read_csv(arguments.folder / "runs.csv"), arguments.grid), end="")
    else:
        show(arguments.folder)


if __name__ == "__main__":
    main()

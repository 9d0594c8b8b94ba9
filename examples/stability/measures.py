"""A study's runs as CSV: one row per run with its measures, one row per evaluation (PLAN.md).

A run that failed at a step whose loss, gradient or reward was not finite, or whose gradient was far
outside its history, has `diverged`: that is a collapse, with accuracy 0 from its end on. A run that
failed after its last step and evaluation (a full disk at the final checkpoint, say) is `finished`.
Any other failure is the machine's: `failed`, no measures, to be repeated with `mar study --retry`.
A run that began and has not ended is `unfinished`.
"""

from __future__ import annotations

import csv
import json
import math
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from statistics import fmean

import numpy as np
from numpy.typing import NDArray

from megatron_async_rl.config.grid import StudyRun, read_grid, runs_of
from megatron_async_rl.config.problem import UserError
from megatron_async_rl.metrics.log import MetricRow as MetricsRow
from megatron_async_rl.metrics.log import read_evaluations, read_metrics
from megatron_async_rl.report.anomalies import AnomalyFinder
from megatron_async_rl.report.metric_rows import evaluation_curves
from megatron_async_rl.report.run_data import read_config
from megatron_async_rl.study import outcome_of

LAST_EVALUATIONS = 4
COLLAPSED_BELOW = 0.5
"""Share of its best accuracy below which a run has collapsed."""
DIVERGED = ("gradient", "nonfinite")
"""Kinds of anomalies (report/anomalies.py)."""
MEASURES = ("final", "area", "best", "collapsed", "cosine", "update_norm", "seconds")
ABOUT = ("state", "lr", "steps", "wall_seconds", "jobs")
CURVE = ("run", "step", "accuracy", "cosine", "ess_ratio", "kl", "entropy", "reward", "seconds")
SINCE = {
    "cosine": "gac/cosine",
    "ess_ratio": "ratio/ess_ratio",
    "kl": "ratio/kl_k3",
    "entropy": "policy/entropy",
    "reward": "reward/mean",
}

Row = dict[str, str]
Floats = NDArray[np.float64]


def collect(grids: Sequence[Path], out: Path) -> None:
    """Writes `out`/runs.csv and curves.csv, with a run that is in several grids once. A run of the
    grids that has left its directory (it ran on another machine, say) keeps the rows that `out` has
    of it. Raises UserError for two runs of one name, whose rows could not be distinguished."""
    rows: list[dict[str, object]] = []
    curves: list[dict[str, object]] = []
    axes: list[str] = []
    folders: dict[str, Path] = {}
    for path in grids:
        grid = read_grid(path)
        axes += [axis for axis in grid.axes if axis not in axes]
        for run in runs_of(grid):
            if folders.get(run.name) == run.directory:
                continue
            if run.name in folders:
                what = f"{run.name} is in {folders[run.name]} and, by {path}, in {run.directory}"
                raise UserError.of("GRID", what, "collect these grids into two folders")
            folders[run.name] = run.directory
            rows += (found := row_of(run))[0]
            curves += found[1]
    out.mkdir(parents=True, exist_ok=True)
    here = {row["run"] for row in rows}
    for name, found_here in (("runs.csv", rows), ("curves.csv", curves)):
        before = read_csv(out / name) if (out / name).exists() else []
        found_here += [row for row in before if row["run"] in folders.keys() - here]
        found_here.sort(key=lambda row: list(folders).index(str(row["run"])))
    write_csv(out / "runs.csv", ["run", *axes, *ABOUT, *MEASURES], rows)
    write_csv(out / "curves.csv", CURVE, curves)


def row_of(run: StudyRun) -> tuple[list[dict[str, object]], list[dict[str, object]]]:
    """Its row and its curve; both empty where it has not begun."""
    state: str = outcome_of(run).state
    if state == "waiting":
        return [], []
    logged = read_metrics(run.directory)
    curve = curve_of(run.directory, logged)
    row: dict[str, object] = {"run": run.name, **run.settings, **about_run(run.directory)}
    if state == "stopped":
        state = "unfinished"
    if state == "failed" and diverged(run.directory, logged):
        state = "diverged"
    elif state == "failed" and curve and curve[-1]["step"] == row["steps"]:
        # The measures are complete: only the final checkpoint or the export is missing.
        state = "finished"
    if state in ("finished", "diverged"):
        steps = np.array([point["step"] for point in curve], dtype=np.float64)
        accuracy = np.array([point["accuracy"] for point in curve], dtype=np.float64)
        if state == "diverged":
            row |= measures_diverged(
                steps, accuracy, end=len(logged), planned=int(str(row["steps"]))
            )
        else:
            row |= measures(steps, accuracy)
        for name, key in (("cosine", "gac/cosine"), ("update_norm", "update/norm")):
            row[name] = mean([float(one[key]) for one in logged if key in one])
        row["seconds"] = sum(float(one["time/step_s"]) for one in logged)
    points: list[dict[str, object]] = [{"run": run.name, **point} for point in curve]
    return [row | {"state": state}], points


def diverged(directory: Path, logged: Sequence[MetricsRow]) -> bool:
    """Return for a failed run whether its last step shows why."""
    last = logged[-1]["step"] if logged else None
    found = AnomalyFinder(directory).find(logged)
    return any(one.step == last and one.kind in DIVERGED for one in found)


def about_run(directory: Path) -> dict[str, object]:
    config = read_config(directory)
    about = {"lr": config["policy"]["optimizer"]["lr"], "steps": config["run"]["steps"]}
    file = directory / "study.json"
    started = json.loads(file.read_text(encoding="utf-8")) if file.exists() else {}
    return about | {"wall_seconds": started.get("seconds"), "jobs": started.get("jobs")}


def curve_of(directory: Path, rows: Sequence[MetricsRow]) -> list[dict[str, object]]:
    """One point per evaluation, in order of versions."""
    evaluated = evaluation_curves(read_evaluations(directory))
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


def measures(steps: Floats, accuracy: Floats) -> dict[str, object]:
    """Measures of a curve of held-out accuracy over steps, [n] each; none of an empty one."""
    if not len(steps):
        return {}
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


def measures_diverged(
    steps: Floats, accuracy: Floats, *, end: int, planned: int
) -> dict[str, object]:
    """Measures of a run that ended after step `end` of `planned`: accuracy is 0 from there on."""
    best = float(accuracy.max()) if len(accuracy) else 0.0
    to_the_end = np.concatenate([steps, [float(end), float(planned)]])
    area = float(np.trapezoid(np.concatenate([accuracy, [0.0, 0.0]]), to_the_end)) / planned
    return {"final": 0.0, "area": area, "best": best, "collapsed": 1}


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


def read_csv(path: Path) -> list[Row]:
    with open(path, newline="", encoding="utf-8") as file:
        return list(csv.DictReader(file))


def axes_of(rows: Sequence[Row]) -> list[str]:
    return [column for column in rows[0] if column not in ("run", *ABOUT, *MEASURES)]

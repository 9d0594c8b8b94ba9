"""The stability study's files: its grids load, its models have embeddings, and its tables follow
from its CSV."""

from __future__ import annotations

import csv
import re
import sys
from pathlib import Path

import numpy as np
import pytest
import yaml

from megatron_async_rl.config.grid import read_grid, runs_of
from megatron_async_rl.config.load import dump, load
from megatron_async_rl.metrics.log import EvalLog, MetricsLog
from megatron_async_rl.metrics.status import Status, write_status
from tests.written_run import write_run

STUDY = Path(__file__).parents[2] / "examples" / "stability"
AXES = ("lag", "method", "rate", "seed")


@pytest.fixture(autouse=True)
def _scripts(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.syspath_prepend(str(STUDY))
    for name in ("results", "choose", "figures"):
        monkeypatch.delitem(sys.modules, name, raising=False)


def row(
    method: str, lr: float, seed: int, area: float, *, collapsed: int = 0, state: str = "finished"
) -> dict[str, str]:
    name = f"s8-{method}-lr{lr:g}-seed{seed}"
    settings = {"lag": "s8", "method": method, "rate": f"lr{lr:g}", "seed": f"seed{seed}"}
    about = {"state": state, "lr": f"{lr:g}", "steps": "300", "wall_seconds": "100", "jobs": "1"}
    measures = dict.fromkeys(
        ("final", "area", "best", "collapsed", "cosine", "update_norm", "seconds"), ""
    )
    if state == "finished":
        measures |= {"final": f"{area}", "area": f"{area}", "best": "0.9", "cosine": "0.25"}
        measures |= {"collapsed": str(collapsed), "update_norm": "0.125", "seconds": "60"}
    return {"run": name, **settings, **about, **measures}


def write_study(folder: Path, runs: str = "runs") -> Path:
    """A grid of three seeds."""
    folder.mkdir(exist_ok=True)
    write_run(folder)
    axes = {
        "method": {"none": {}},
        "rate": {"lr1e-4": {"policy.optimizer.lr": 1e-4}},
        "seed": {f"seed{seed}": {"run.seed": seed} for seed in (1, 2, 3)},
    }
    tree = {"base": "config.yaml", "runs": runs, "axes": axes, "sweeps": {"all": {}}}
    grid = folder / "grid.yaml"
    grid.write_text(yaml.safe_dump(tree, sort_keys=False))
    return grid


def write_ended(grid: Path, seed: int, phase: str, *, steps: int = 4, nonfinite: int = 0) -> None:
    """What a run of the grid leaves that was evaluated every two steps: 0.25, 0.5, 0.75."""
    read = read_grid(grid)
    [run] = runs_of(read, [f"*-seed{seed}"])
    run.directory.mkdir(parents=True)
    (run.directory / "config.yaml").write_text(dump(load(read.base, run.overrides)))
    log = MetricsLog(run.directory, tensorboard=False, first_step=1)
    evaluations = EvalLog(run.directory, ())
    for step in range(steps + 1):
        if step:
            values = {"time/step_s": 2.0, "gac/cosine": 0.5, "update/norm": 0.125}
            log.log(step, values | {"policy/nonfinite": nonfinite})
        if step % 2 == 0:
            evaluations.append({"version": step, "mean_reward": 0.25 + step / 8})
    log.close()
    error = "ValueError: it broke" if phase == "failed" else None
    status = Status(phase=phase, step=steps, steps=4, time=0.0, error=error)
    write_status(run.directory, status)


def test_runs_are_collected_and_shown_finished_or_failed(tmp_path: Path) -> None:
    from results import collect, read_csv, tables

    grid = write_study(tmp_path)
    write_ended(grid, 1, "finished")
    write_ended(grid, 2, "failed", steps=2)
    collect([grid], tmp_path / "out")
    rows = {row["seed"]: row for row in read_csv(tmp_path / "out" / "runs.csv")}
    assert [rows[seed]["state"] for seed in rows] == ["finished", "failed"]
    assert (rows["seed1"]["area"], rows["seed1"]["seconds"]) == ("0.5", "8")
    assert rows["seed1"]["cosine"] == "0.5"
    points = read_csv(tmp_path / "out" / "curves.csv")
    assert [(point["step"], point["seconds"]) for point in points[:3]] == [
        ("0", "0"), ("2", "4"), ("4", "8")
    ]  # fmt: skip
    assert "2 runs, 1 finished, 1 failed" in tables(list(rows.values()))


@pytest.mark.parametrize("grid", sorted(STUDY.glob("*.yaml")), ids=lambda path: path.stem)
def test_every_run_of_every_grid_is_a_configuration(grid: Path) -> None:
    if grid.stem in ("base", "sft"):
        load(grid)
        return
    read = read_grid(grid)
    runs = runs_of(read)
    assert runs
    for run in runs:
        load(read.base, run.overrides)


def test_measures_of_a_curve() -> None:
    from results import measures

    steps = np.arange(0, 101, 20, dtype=np.float64)
    found = measures(steps, np.array([0.4, 0.8, 0.8, 0.2, 0.2, 0.2]))
    assert found["best"] == 0.8
    assert found["final"] == pytest.approx(0.35)
    assert found["collapsed"] == 1
    assert found["area"] == pytest.approx((0.6 + 0.8 + 0.5 + 0.2 + 0.2) / 5)
    assert measures(steps, np.array([0.4, 0.8, 0.1, 0.7, 0.8, 0.9]))["collapsed"] == 0


def test_a_plateau_is_what_lies_next_to_the_best_rate() -> None:
    from results import measured, plateau

    areas = {1e-4: 0.70, 2e-4: 0.77, 4e-4: 0.80, 8e-4: 0.78, 1.6e-3: 0.10, 3.2e-3: 0.79}
    rows = [
        row("clip", lr, seed, area, collapsed=int(area < 0.2))
        for lr, area in areas.items()
        for seed in (1, 2)
    ]
    best, width, collapse = plateau(measured(rows))
    assert best.lr == 4e-4
    assert width == pytest.approx(4.0)
    assert collapse == 1.6e-3


def test_failures_are_counted_apart_from_collapses() -> None:
    from results import measured

    rows = [row("none", 1e-4, 1, 0.1, collapsed=1), row("none", 1e-4, 2, 0.0, state="failed")]
    [one] = measured(rows)
    assert (one.collapsed, one.failed, len(one.runs), one.mean("area")) == (1, 1, 1, 0.1)


def test_a_method_beats_another_by_enough_and_not_by_chance() -> None:
    from results import beaten, permutation_p

    assert permutation_p([5, 6, 7, 8, 9], [0, 1, 2, 3, 4]) == pytest.approx(2 / 252)
    assert permutation_p([0, 1], [0, 1]) == 1.0
    rows = [
        row(method, 1e-4, seed, start + seed / 1000)
        for method, start in (("sure", 0.80), ("close", 0.79), ("low", 0.50))
        for seed in (11, 12, 13, 14, 15)
    ]
    rows += [row("few", 1e-4, seed, 0.99) for seed in (11, 12)]
    lines = {cells[2].strip(): cells[-2].strip() for line in beaten(rows)
             if len(cells := line.split("|")) > 4}  # fmt: skip
    assert lines["sure"] == "low"  # 0.01 above `close` is too little, whatever its p
    assert lines["low"] == "none"
    assert "few" not in lines


def test_the_grid_of_fresh_seeds_takes_each_best_rate_and_adds_the_null_of_gac(
    tmp_path: Path,
) -> None:
    from choose import fresh_grid

    from megatron_async_rl.config.load import read_tree

    areas = {"none": {1e-4: 0.6, 6e-4: 0.2}, "gac": {1e-4: 0.5, 6e-4: 0.51}}
    rows = [row(name, lr, 1, area) for name, by in areas.items() for lr, area in by.items()]
    scan = tmp_path / "scan.yaml"
    axes = {
        "lag": {"s8": {}},
        "method": {"none": {}, "gac": {}},
        "rate": {"lr0.0001": {}, "lr0.0006": {}},
        "seed": {"seed1": {}},
    }
    scan.write_text(str({"base": "base.yaml", "runs": "runs", "axes": axes, "sweeps": {}}))
    text = fresh_grid(rows, scan)
    written, _ = read_tree(text)
    assert written["runs"] == "runs-fresh"
    assert list(written["axes"]["seed"]) == [f"seed{seed}" for seed in (11, 12, 13, 14, 15)]
    assert written["sweeps"]["s8-none"]["rate"] == ["lr0.0001"]
    assert written["sweeps"]["s8-gac"]["rate"] == ["lr0.0006"]
    null = written["sweeps"]["s8-gac-matched_lr"]["method"][0]
    [control] = written["axes"]["method"][null]["controls"]
    assert control == {"name": "matched_lr", "target_update_norm": 0.125}
    assert re.search(r"^# .*s8-gac are within 0\.02", text, re.MULTILINE)
    (tmp_path / "fresh.yaml").write_text(text)
    assert len(runs_of(read_grid(tmp_path / "fresh.yaml"))) == 15


@pytest.mark.parametrize(
    "folder", sorted(path.parent for path in STUDY.glob("results/*/runs.csv")), ids=lambda p: p.name
)
def test_the_stored_tables_follow_from_the_stored_csv(folder: Path) -> None:
    from results import read_csv, tables

    assert tables(read_csv(folder / "runs.csv")) == (folder / "tables.md").read_text()
    with open(folder / "curves.csv", newline="") as file:
        curves = {point["run"] for point in csv.DictReader(file)}
    assert curves == {run["run"] for run in read_csv(folder / "runs.csv") if run["area"]}


def test_figures_are_the_same_for_the_same_csv(tmp_path: Path) -> None:
    from figures import write_figures

    rows = [row("none", lr, 1, 0.5) for lr in (1e-4, 6e-4)]
    curves = [
        {"run": one["run"], "step": str(step), "accuracy": "0.5", "cosine": "0.1" if step else ""}
        for one in rows
        for step in (0, 20, 40)
    ]
    for name in ("first", "second"):
        (tmp_path / name).mkdir()
        write_figures(rows, curves, tmp_path / name)
    written = sorted(path.name for path in (tmp_path / "first").iterdir())
    assert written == ["curves-all.svg", "rates-all.svg"]
    for name in written:
        text = (tmp_path / "first" / name).read_text()
        assert text == (tmp_path / "second" / name).read_text()
        assert "none" in text

"""The stability study's files: its grids load, and its tables follow from its CSV."""

from __future__ import annotations

import csv
import re
import shutil
import sys
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import yaml

from megatron_async_rl.config.grid import read_grid, runs_of
from megatron_async_rl.config.load import dump, load
from megatron_async_rl.config.problem import UserError
from megatron_async_rl.config.yaml_tree import read_tree
from megatron_async_rl.metrics.log import EvalLog, MetricsLog
from megatron_async_rl.watchdog.events import Status, write_status
from tests.cases import looped
from tests.written_run import write_run

STUDY = Path(__file__).parents[2] / "examples" / "stability"
AXES = ("lag", "method", "rate", "seed")


@pytest.fixture(autouse=True)
def _scripts(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.syspath_prepend(str(STUDY))
    for name in (
        "measures",
        "rates",
        "questions",
        "tables",
        "choose",
        "figures",
        "page",
        "results",
        "smollm2",
    ):
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
    """Write the files of a run of the grid that was evaluated every two steps: 0.25, 0.5, 0.75."""
    read = read_grid(grid)
    [run] = runs_of(read, [f"*-seed{seed}"])
    run.directory.mkdir(parents=True)
    (run.directory / "config.yaml").write_text(dump(load(read.base, run.overrides)))
    log = MetricsLog(run.directory, tensorboard=False, first_step=1)
    evaluations = EvalLog(run.directory, ())
    for step in range(steps + 1):
        if step:
            values = {"time/step_s": 2.0, "gac/cosine": 0.5, "update/norm": 0.125}
            last = {"policy/nonfinite": nonfinite if step == steps else 0}
            log.log(step, values | last)
        if step % 2 == 0:
            evaluations.append({"version": step, "mean_reward": 0.25 + step / 8})
    log.close()
    error = "ValueError: it broke" if phase == "failed" else None
    status = Status(phase=phase, step=steps, steps=4, time=0.0, error=error)
    write_status(run.directory, status)


def test_runs_are_collected_and_shown_finished_or_failed(tmp_path: Path) -> None:
    from measures import collect, read_csv
    from tables import tables

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


def test_runs_that_have_left_their_directories_keep_their_rows(tmp_path: Path) -> None:
    from measures import collect, read_csv

    grid, out = write_study(tmp_path), tmp_path / "out"
    write_ended(grid, 1, "finished")
    write_ended(grid, 3, "finished")
    collect([grid], out)
    before = [read_csv(out / name) for name in ("runs.csv", "curves.csv")]
    shutil.rmtree(read_grid(grid).runs)
    write_ended(grid, 2, "failed", steps=2)
    collect([grid], out)
    rows, points = (read_csv(out / name) for name in ("runs.csv", "curves.csv"))
    assert [row["seed"] for row in rows] == ["seed1", "seed2", "seed3"]
    assert [row for row in rows if row["seed"] != "seed2"] == before[0]
    assert [point for point in points if "seed2" not in point["run"]] == before[1]


@looped("grid", sorted(STUDY.glob("*.yaml")), ids=lambda path: path.stem)
def test_every_run_of_every_grid_is_a_configuration(grid: Path) -> None:
    if grid.stem in ("base", "smollm2_base", "sft"):
        load(grid)
        return
    read = read_grid(grid)
    runs = runs_of(read)
    assert runs
    # Of runs that differ in seed and learning rate alone one is enough: those are numbers.
    numbers = ("run.", "policy.optimizer.lr=")
    settings = {tuple(o for o in run.overrides if not o.startswith(numbers)): run for run in runs}
    for run in settings.values():
        load(read.base, run.overrides)


def test_measures_of_a_curve() -> None:
    from measures import measures

    steps = np.arange(0, 101, 20, dtype=np.float64)
    found = measures(steps, np.array([0.4, 0.8, 0.8, 0.2, 0.2, 0.2]))
    assert found["best"] == 0.8
    assert found["final"] == pytest.approx(0.35)
    assert found["collapsed"] == 1
    assert found["area"] == pytest.approx((0.6 + 0.8 + 0.5 + 0.2 + 0.2) / 5)
    assert measures(steps, np.array([0.4, 0.8, 0.1, 0.7, 0.8, 0.9]))["collapsed"] == 0


def test_a_plateau_is_what_lies_next_to_the_best_rate() -> None:
    from rates import measured, plateau

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
    assert [plateau(measured(rows), by=area)[1] for area in (0.82, 0.73, 0.9)] == [2.0, 8.0, 0.0]


def test_a_variants_width_comes_from_its_losss_best_area() -> None:
    from tables import tables

    scans = {"tis": (0.7, 0.84, 0.83, 0.1), "tis_spared": (0.7, 0.84, 0.9, 0.82)}
    rows = [
        row(method, lr, 1, area)
        for method, areas in scans.items()
        for lr, area in zip((1e-4, 2e-4, 4e-4, 8e-4), areas, strict=True)
    ]
    section = tables(rows).split("## Plateaus measured by the loss alone")[1]
    assert "| s8 | tis_spared | 4 | tis | 2 |" in section
    own = tables(rows).split("## Each method")[1].split("##")[0]
    assert "| s8 | tis_spared | 4 | 0.0004 | 1 | 0.900 |" in own


def test_how_runs_that_did_not_finish_are_counted(tmp_path: Path) -> None:
    from measures import collect, read_csv

    grid = write_study(tmp_path)
    write_ended(grid, 1, "failed", steps=2)
    write_ended(grid, 2, "failed", steps=2, nonfinite=1)
    write_ended(grid, 3, "training", steps=2)  # killed hard
    collect([grid], tmp_path / "out")
    rows = {row["seed"]: row for row in read_csv(tmp_path / "out" / "runs.csv")}
    states = {seed: row["state"] for seed, row in rows.items()}
    assert states == {"seed1": "failed", "seed2": "diverged", "seed3": "unfinished"}
    assert [rows[seed]["area"] for seed in ("seed1", "seed3")] == ["", ""]
    # 0.25 and 0.5 at versions 0 and 2, then nothing to version 4.
    one = rows["seed2"]
    assert (one["area"], one["final"], one["best"], one["collapsed"]) == (
        "0.1875", "0", "0.5", "1"
    )  # fmt: skip


def test_a_run_that_failed_after_its_last_evaluation_has_its_measures(tmp_path: Path) -> None:
    from measures import collect, read_csv

    grid = write_study(tmp_path)
    write_ended(grid, 1, "failed", steps=4)
    write_ended(grid, 2, "failed", steps=3)
    write_ended(grid, 3, "failed", steps=4, nonfinite=1)
    collect([grid], tmp_path / "out")
    rows = {row["seed"]: row for row in read_csv(tmp_path / "out" / "runs.csv")}
    states = {seed: (row["state"], row["best"]) for seed, row in rows.items()}
    assert states == {
        "seed1": ("finished", "0.75"), "seed2": ("failed", ""), "seed3": ("diverged", "0.75")
    }  # fmt: skip


def test_the_page_on_a_real_model_has_the_numbers_of_its_runs(tmp_path: Path) -> None:
    import smollm2
    from measures import read_csv

    rows, curves = (read_csv(smollm2.RESULTS / name) for name in ("runs.csv", "curves.csv"))
    stored = smollm2.PAGE.read_text()
    assert smollm2.filled(stored, rows, curves) == stored
    smollm2.draw(rows, curves, tmp_path / smollm2.FIGURE)
    drawn = (tmp_path / smollm2.FIGURE).read_text()
    assert drawn == smollm2.PAGE.with_name(smollm2.FIGURE).read_text()
    # A cell with several seeds has their means, and a run without measures is left out.
    again = [row | {"seed": "seed2", "final": "0.1", "run": "other"} for row in rows[:1]]
    lost = [row | {"area": "", "run": "lost"} for row in rows[:1]]
    first = smollm2.table([*rows, *again, *lost], curves).splitlines()[2]
    assert first.startswith("| 0 | 2e-05 | no correction | 2 | 0.35 | ")
    # Methods with several seeds at step 24 have a row there, also those whose runs were cut short.
    assert {row["state"] for row in rows} == {"finished", "unfinished"}
    early = smollm2.seeds_table(rows, curves).splitlines()[2:]
    assert [line.split(" | ")[1] for line in early] == [
        "no correction", "GAC", "sequence TIS", "TIS with `displacement`"
    ]  # fmt: skip


def test_the_grid_on_a_real_model_differs_in_what_its_plan_names() -> None:
    grid = read_grid(STUDY / "smollm2.yaml")
    runs = runs_of(grid)
    assert len(runs) == 3 * 6 * 2 * 3
    cells: dict[str, set[str]] = {}
    for run in runs:
        if run.settings["seed"] != "seed1":
            continue
        config = load(grid.base, run.overrides)
        assert config.flow.selection.name == "exact_lag"
        assert config.flow.async_ratio == config.flow.selection.lag == int(run.settings["lag"][1:])
        assert config.policy.optimizer.lr == float(run.settings["rate"][2:])
        method = (config.objective, config.controls)
        # Snapshots follow the lag, not the method.
        written = repr(method).replace(f"snapshots={config.objective.snapshots}", "")
        cells.setdefault(run.settings["method"], set()).add(written)
    assert all(len(found) == 1 for found in cells.values())
    assert len(set.union(*cells.values())) == len(cells) == 6


def test_two_runs_of_one_name_are_not_collected(tmp_path: Path) -> None:
    from measures import collect

    grids = [write_study(tmp_path / name) for name in ("first", "second")]
    with pytest.raises(UserError) as refused:
        collect(grids, tmp_path / "out")
    for name in ("first", "second"):
        assert str(tmp_path / name / "runs" / "none-lr1e-4-seed1") in str(refused.value)


def test_a_run_that_is_in_two_grids_is_collected_once(tmp_path: Path) -> None:
    from measures import collect, read_csv

    grid = write_study(tmp_path)
    write_ended(grid, 1, "finished")
    collect([grid, grid], tmp_path / "out")
    assert len(read_csv(tmp_path / "out" / "runs.csv")) == 1
    assert len(read_csv(tmp_path / "out" / "curves.csv")) == 3


def test_every_control_has_its_nulls_in_the_grid() -> None:
    from choose import MATCHED
    from questions import FAMILIES, MATCHED_LR

    grid, second = (read_grid(STUDY / f"round{number}.yaml") for number in (1, 2))
    assert second.runs == grid.runs
    for family, (methods, rivals) in FAMILIES.items():
        axes = (second if family.startswith("2, ") else grid).axes
        assert set(methods) | set(rivals) - {MATCHED_LR} <= set(axes["method"]), family
    for axis in grid.axes:
        for value, overrides in second.axes[axis].items():
            assert grid.axes[axis].get(value, overrides) == overrides, value
        assert MATCHED_LR not in rivals or set(methods) <= set(MATCHED)
    for sweep in ("scan8", "sync"):
        assert "rate" not in grid.sweeps[sweep]
        assert len(grid.axes["rate"]) == 6


def test_a_study_without_runs_is_shown_as_such(tmp_path: Path) -> None:
    from measures import collect
    from results import show

    collect([write_study(tmp_path)], tmp_path / "out")
    show(tmp_path / "out")
    assert (tmp_path / "out" / "tables.md").read_text() == "No run has begun.\n"


def test_a_missing_run_ends_a_plateau_and_an_unknown_area_is_never_best() -> None:
    from rates import by_group, plateau

    areas = {1e-4: 0.79, 2e-4: 0.80, 4e-4: 0.79, 8e-4: 0.79}
    rows = [row("clip", lr, seed, area) for lr, area in areas.items() for seed in (1, 2)]
    rows.append(row("clip", 4e-4, 3, 0.0, state="failed"))
    rows.append(row("clip", 5e-5, 1, 0.0, state="unfinished"))
    [rates] = by_group(rows).values()
    best, width, _ = plateau(rates)
    assert (best.lr, best.seeds, width) == (2e-4, "2", 2.0)
    assert [one.seeds for one in rates] == ["0 of 1", "2", "2", "2 of 3", "2"]
    assert by_group(rows[-1:]) == {}


def fresh_rows(method: str, area: float, **options: Any) -> list[dict[str, str]]:
    lr = options.pop("lr", 1e-4)
    return [row(method, lr, seed, area + seed / 1000, **options) for seed in range(11, 16)]


def found_in(rows: list[dict[str, str]]) -> dict[tuple[str, str], tuple[str, float | None]]:
    from questions import verdicts

    return {(one.family, one.words): (verdict, p) for one, p, verdict in verdicts(rows)}


def test_p_values_are_exact_and_corrected() -> None:
    from questions import holm, permutation_p

    assert permutation_p([5, 6, 7, 8, 9], [0, 1, 2, 3, 4]) == pytest.approx(2 / 252)
    assert permutation_p([5, 6, 7], [0, 1, 2], one_sided=True) == pytest.approx(1 / 20)
    assert permutation_p([0, 1, 2], [5, 6, 7], one_sided=True) == 1.0
    assert permutation_p([0, 1], [0, 1]) == 1.0
    assert holm([0.01, 0.04, 0.02], of=4) == pytest.approx([0.04, 0.08, 0.06])


def test_no_family_is_too_large_to_find_anything() -> None:
    from questions import BY_LAG, FAMILIES, LAG_RATES

    for methods, rivals in FAMILIES.values():
        assert len(methods) * len(rivals) * 2 / 252 < 0.05
    assert len(BY_LAG) * len(LAG_RATES) * 2 / 252 < 0.05


def test_a_method_beats_another_by_enough_and_not_by_chance() -> None:
    rows = [*fresh_rows("none", 0.5), *fresh_rows("ppo_clip", 0.8), *fresh_rows("tis", 0.51)]
    rows += fresh_rows("m2po", 0.9)[:3]
    rows += [row("m2po", 1e-4, 14, 0.9, state="failed")]
    found = found_in(rows)
    assert found["b", "ppo_clip > none"] == ("yes", pytest.approx(6 * 2 / 252))
    assert found["b", "tis > none"][0] == "no"  # by too little, whatever its p
    assert found["b", "m2po > none"] == ("3 of 5", None)
    assert found["b", "beta1_0 > none"] == ("0 of 5", None)


def test_only_the_chosen_rate_and_the_fresh_seeds_are_compared() -> None:
    scan = [row("none", lr, 1, area) for lr, area in ((1e-4, 0.3), (4e-4, 0.6))]
    scan += [row("ppo_clip", 1e-4, seed, 0.9) for seed in (1, 2)]
    fixed = fresh_rows("none", 0.95)
    found = found_in([*scan, *fixed, *fresh_rows("none", 0.5, lr=4e-4), *fresh_rows("tis", 0.7)])
    assert found["b", "tis > none"][0] == "yes"
    assert found["b", "ppo_clip > none"] == ("0 of 5", None)


def test_a_control_is_compared_with_its_own_matched_learning_rate() -> None:
    rows = fresh_rows("matched_lr_of_displacement_at_0.2", 0.9)
    rows += [*fresh_rows("gac", 0.8), *fresh_rows("matched_lr_of_gac_at_0.125", 0.5)]
    found = found_in(rows)
    assert found["c", "gac > matched_lr_of_gac_at_0.125"][0] == "yes"
    assert found["c", "gac > matched_norm"] == ("0 of 5", None)


def test_at_a_lag_not_worse_than_synchronous_by_the_margin() -> None:
    synchronous = [one | {"lag": "s0"} for one in fresh_rows("none", 0.8)]
    words = "displacement ≥ none at s0, less 0.02"
    for area, verdict in ((0.795, "yes"), (0.779, "no")):
        found = found_in([*synchronous, *fresh_rows("displacement", area)])
        assert found["d", words][0] == verdict


def test_a_variant_of_the_second_round_is_no_lower_than_its_loss_at_the_same_lag() -> None:
    words = "tis_spared ≥ tis, less 0.02"
    for area, verdict in ((0.795, "yes"), (0.779, "no")):
        found = found_in([*fresh_rows("tis", 0.8), *fresh_rows("tis_spared", area)])
        assert found["2, no lower", words][0] == verdict


def test_lag_is_compared_at_the_same_rate() -> None:
    rows = [
        one | {"lag": lag}
        for lag, area in (("s0", 0.8), ("s8", 0.5), ("s24", 0.79))
        for lr in (1e-4, 4e-4)
        for one in fresh_rows("none", area, lr=lr)
    ]
    found = found_in(rows)
    assert found["a, area", "s8 ≠ s0 at lr 0.0004"] == ("yes", pytest.approx(4 * 2 / 252))
    assert found["a, area", "s24 ≠ s0 at lr 0.0001"][0] == "no"
    assert found["a, cosine", "s8 ≠ s0 at lr 0.0001"] == ("no", 1.0)


def test_the_time_to_an_accuracy_keeps_runs_side_by_side_apart() -> None:
    from tables import tables

    rows = [row("none", 1e-4, seed, 0.5) for seed in (1, 2, 3)]
    rows[2]["jobs"] = "2"
    curves = [
        {"run": one["run"], "step": str(step), "accuracy": accuracy, "seconds": str(10 * index)}
        for index, one in enumerate(rows, start=1)
        for step, accuracy in ((0, "0.1"), (20, "0.85" if index != 2 else "0.5"), (40, "0.9"))
    ]
    text = tables(rows, [point for point in curves if point["run"] != rows[1]["run"]])
    assert "| s8 | none | 0.0001 | 1 | 1 of 2 | 10 |" in text
    assert "| s8 | none | 0.0001 | 2 | 1 of 1 | 30 |" in text


def write_scan(folder: Path) -> Path:
    methods: dict[str, dict[str, Any]] = {
        "none": {},
        "gac": {"controls": [{"name": "gac"}]},
        "clip_gac": {"objective.loss": "ppo_clip", "controls": [{"name": "gac"}]},
    }
    axes = {
        "lag": {"s8": {}, "a1": {}},
        "method": methods,
        "rate": {"lr0.0001": {}, "lr0.0006": {}},
        "seed": {"seed1": {}},
    }
    sweeps = {"scan8": {"lag": ["s8"]}, "alpha": {"lag": ["a1"]}, "lags": {"method": ["none"]}}
    tree = {"base": "base.yaml", "runs": "runs", "axes": axes, "sweeps": sweeps}
    (folder / "scan.yaml").write_text(yaml.safe_dump(tree, sort_keys=False))
    return folder / "scan.yaml"


def scan_rows() -> list[dict[str, str]]:
    areas = {
        "none": {1e-4: 0.6, 6e-4: 0.2},
        "gac": {1e-4: 0.5, 6e-4: 0.51},
        "clip_gac": {1e-4: 0.5, 6e-4: 0.8},
    }
    rows = [row(name, lr, 1, area) for name, by in areas.items() for lr, area in by.items()]
    return [*rows, *(one | {"lag": "a1", "run": "a1"} for one in rows)]


def test_the_fresh_grid_has_each_best_rate_of_the_sweeps_named_and_the_nulls(
    tmp_path: Path,
) -> None:
    from choose import fresh_grid

    scan, rows = write_scan(tmp_path), scan_rows()
    text = fresh_grid(rows, scan, ["scan8"], ["lags"])
    written, _ = read_tree(text)
    assert written["runs"] == "runs-fresh"
    assert list(written["axes"]["seed"]) == [f"seed{seed}" for seed in (11, 12, 13, 14, 15)]
    assert not [name for name in written["sweeps"] if name.startswith("a1")]
    assert written["sweeps"]["s8-none"]["rate"] == ["lr0.0001"]
    assert written["sweeps"]["s8-gac"]["rate"] == ["lr0.0006"]
    assert written["sweeps"]["s8-gac-matched_lr"]["method"] == ["matched_lr_of_gac_at_0.125"]
    control = {"name": "matched_lr", "target_update_norm": 0.125}
    assert written["axes"]["method"]["matched_lr_of_clip_gac_at_0.125"] == {
        "objective.loss": "ppo_clip",
        "controls": [control],
    }
    assert re.search(r"^# s8-gac: a near tie", text, re.MULTILINE)
    (tmp_path / "fresh.yaml").write_text(text)
    # `lags`: two lags, two rates, one already chosen.
    assert len(runs_of(read_grid(tmp_path / "fresh.yaml"))) == 5 * (3 + 2 + 3)


def test_the_fresh_grid_of_the_first_round_is_of_configurations(tmp_path: Path) -> None:
    from choose import fresh_grid
    from questions import verdicts

    scan = STUDY / "round1.yaml"
    measures = row("none", 1e-4, 1, 0.5)
    rows = [
        measures | run.settings | {"run": run.name, "lr": run.settings["rate"].removeprefix("lr")}
        for run in runs_of(read_grid(scan), ["scan8", "sync"])
    ]
    path = tmp_path / "fresh.yaml"
    path.write_text(fresh_grid(rows, scan, ["scan8", "sync"], ["lags"]))
    grid = read_grid(path)
    runs = runs_of(grid)
    # 17 methods, 5 nulls and 2 synchronous ones at one rate, and `none` at the two rates of `lags`.
    assert len({run.name for run in runs}) == 5 * (17 + 5 + 2 + 6)
    for run in runs:
        if run.settings["seed"] == "seed11":
            load(STUDY / "base.yaml", run.overrides)
    decided = [
        measures | run.settings | {"run": run.name, "lr": run.settings["rate"].removeprefix("lr")}
        for run in runs
    ]
    found = verdicts([*rows, *decided])
    assert {verdict for _, _, verdict in found} <= {"yes", "no"}
    assert len(found) == 2 * 4 + 6 + 4 + 4 + 3 + 3 + 3 + 2


def test_another_norm_is_another_run(tmp_path: Path) -> None:
    from choose import fresh_grid

    scan, rows = write_scan(tmp_path), scan_rows()
    moved = [one | {"update_norm": "0.25"} for one in rows]
    texts = [fresh_grid(which, scan, ["scan8"]) for which in (rows, moved)]
    first, second = (set(read_tree(text)[0]["axes"]["method"]) for text in texts)
    assert "matched_lr_of_gac_at_0.125" in first - second
    assert "matched_lr_of_gac_at_0.25" in second - first


def test_near_ties_of_the_two_best_rates_get_a_grid_that_parts_them(tmp_path: Path) -> None:
    from choose import ties_grid
    from rates import measured, near_tie

    scan, rows = write_scan(tmp_path), scan_rows()
    text = ties_grid(rows, scan, ["scan8"])
    (tmp_path / "ties.yaml").write_text(text)
    names = [run.name for run in runs_of(read_grid(tmp_path / "ties.yaml"))]
    assert names == ["s8-gac-lr0.0001-seed2", "s8-gac-lr0.0006-seed2"]
    assert read_grid(tmp_path / "ties.yaml").runs == tmp_path / "runs"
    # A lowest rate that has both seeds hides no tie of the others, and two seeds part one.
    areas = ((1e-4, 0.1), (2e-4, 0.80), (4e-4, 0.81))
    three = [row("m2po", lr, 1, area) for lr, area in areas] + [row("m2po", 1e-4, 2, 0.1)]
    assert [one.lr for one in near_tie(measured(three))] == [2e-4, 4e-4]
    parted = [*three, row("m2po", 2e-4, 2, 0.80), row("m2po", 4e-4, 2, 0.81)]
    assert near_tie(measured(parted)) == []


@pytest.mark.parametrize(
    "folder", sorted(path.parent for path in STUDY.glob("results/*/runs.csv")), ids=lambda p: p.name
)
def test_the_stored_tables_follow_from_the_stored_csv(folder: Path) -> None:
    from measures import read_csv
    from tables import tables

    rows, points = (read_csv(folder / name) for name in ("runs.csv", "curves.csv"))
    assert tables(rows, points) == (folder / "tables.md").read_text()
    with open(folder / "curves.csv", newline="") as file:
        curves = {point["run"] for point in csv.DictReader(file)}
    # An unfinished run has a curve without measures.
    begun = [run for run in rows if run["area"] or run["state"] == "unfinished"]
    assert curves == {run["run"] for run in begun}


def test_the_page_follows_from_the_stored_csv() -> None:
    from page import PAGE, page

    assert page(STUDY / "results" / "round1") == PAGE.read_text(), (
        "run: python examples/stability/results.py page examples/stability/results/round1"
    )


def test_the_page_asks_for_no_run_that_is_missing(tmp_path: Path) -> None:
    from page import page

    rows = [row("none", 1e-4, 1, 0.5), row("gac", 1e-4, 11, 0.75)]
    rows += [*fresh_rows("tis", 0.5), *fresh_rows("displacement", 0.75)]
    for name, lines in (("runs.csv", rows), ("curves.csv", [{"run": "", "accuracy": ""}])):
        with open(tmp_path / name, "w", newline="") as file:
            writer = csv.DictWriter(file, list(lines[0]))
            writer.writeheader()
            writer.writerows(lines if name == "runs.csv" else [])

    def rendered(text: str) -> str:
        (tmp_path / "page.md").write_text(text)
        return page(tmp_path, tmp_path / "page.md")

    assert (
        rendered("{{ best('s8 none').area|n }} {{ decided('s8 gac').area|n(3) }}") == "0.50 0.750"
    )
    assert (
        rendered("{{ count() }} {{ width('s8 none') }} {{ collapse_rate('s8 none') }}")
        == "12 1 none"
    )
    assert rendered("{{ decided_at('s8 gac', 1e-4).area|n(3) }}") == "0.750"
    for missing in (
        "best('s8 tis')",
        "at('s8 none', 4e-4)",
        "decided('s8 none')",
        "decided_at('s8 gac', 4e-4)",
        "verdict('gac > none', 's8')",
    ):
        with pytest.raises(UserError):
            rendered("{{ " + missing + " }}")


def test_the_page_gives_a_comparison_as_the_tables_do(tmp_path: Path) -> None:
    from page import Facts

    rows = [*fresh_rows("none", 0.5), *fresh_rows("ppo_clip", 0.75)]
    found = Facts(rows, []).verdict("ppo_clip > none", "s8")
    assert found.difference == pytest.approx(0.25)
    assert (found.p, found.holds) == (pytest.approx(6 * 2 / 252), "yes")


def test_the_page_gives_the_time_of_runs_that_were_alone() -> None:
    from page import Facts

    rows = [row("none", 1e-4, 1, 0.5), row("none", 4e-4, 1, 0.5), row("gac", 1e-4, 1, 0.5)]
    rows[2]["jobs"] = "2"
    curves = [
        {"run": rows[0]["run"], "accuracy": accuracy, "seconds": seconds}
        for accuracy, seconds in (("0.5", "0"), ("0.8", "12.4"), ("0.9", "30"))
    ]
    facts = Facts(rows, [*curves, {"run": rows[2]["run"], "accuracy": "0.9", "seconds": "5"}])
    assert facts.seconds("s8 none", 1e-4) == "12 s"
    assert facts.seconds("s8 none", 4e-4) == "not reached"
    with pytest.raises(UserError, match="had the machine alone"):
        facts.seconds("s8 gac", 1e-4)


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


def test_a_diverged_run_has_the_accuracy_zero_from_its_end_on(tmp_path: Path) -> None:
    from figures import values_by_step, write_figures

    rows = [row("none", 1e-4, seed, 0.5) for seed in (1, 2, 3)]
    rows[1]["state"] = rows[2]["state"] = "diverged"
    curves = [
        {"run": rows[which]["run"], "step": str(step), "accuracy": "0.5", "cosine": "0.1"}
        for which, steps in ((0, (0, 20, 40)), (1, (0, 20)))
        for step in steps
    ]
    by_run = {rows[0]["run"]: curves[:3], rows[1]["run"]: curves[3:]}
    assert values_by_step(rows, by_run, "accuracy") == {
        0: [0.5, 0.5, 0.0],
        20: [0.5, 0.5, 0.0],
        40: [0.5, 0.0, 0.0],
    }
    assert values_by_step(rows, by_run, "cosine")[40] == [0.1]
    # The third run diverged before its first evaluation, so it has no curve.
    write_figures(rows, curves, tmp_path)
    assert (tmp_path / "curves-all.svg").is_file()

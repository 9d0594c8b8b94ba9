"""Tests of the comparison of several runs on one page (`mar report A B C`)."""

from __future__ import annotations

import html
import re
from pathlib import Path

import numpy as np
import pytest
import yaml
from typer.testing import CliRunner

from megatron_async_rl.cli import app
from megatron_async_rl.config.problem import UserError
from megatron_async_rl.metrics.log import EvalLog, MetricsLog
from megatron_async_rl.report.comparison import (
    COLOURS,
    SECONDS,
    TOKENS,
    differing,
    ends_of,
    name_runs,
    panels_of,
)
from megatron_async_rl.report.panel import STEPS
from megatron_async_rl.report.report import write_comparison
from megatron_async_rl.report.run_data import read_run
from megatron_async_rl.watchdog.events import Status, write_status


def write_run(run_dir: Path, *, lr: float, step_s: float = 1.0, steps: int = 8) -> Path:
    log = MetricsLog(run_dir, tensorboard=False, first_step=1)
    for step in range(1, steps + 1):
        values = {"reward/mean": step / 10, "ratio/ess_ratio": 0.9, "tokens/trained": 100}
        log.log(step, {**values, "time/step_s": step_s, "gac/cosine": 0.25, "policy/lr": lr})
    log.close()
    evaluations = EvalLog(run_dir, versions=())
    for version in (0, 4, 8):
        line = {"version": version, "mean_reward": version / 10, "pass_at": {"1": 0.0}}
        evaluations.append(line)
    config = {
        "run": {"dir": str(run_dir), "seed": 1},
        "policy": {"optimizer": {"lr": lr, "betas": [0.9, 0.95]}},
        "controls": [{"name": "gac", "c_low": lr}],
    }
    (run_dir / "config.yaml").write_text(yaml.safe_dump(config))
    status = Status(phase="finished", step=steps, steps=steps, time=0.0, before=0.0, after=0.8)
    write_status(run_dir, status)
    return run_dir


def compared(*run_dirs: Path):
    return name_runs(run_dirs, [read_run(run_dir) for run_dir in run_dirs])


@pytest.fixture
def two(tmp_path: Path) -> tuple[Path, Path]:
    return (
        write_run(tmp_path / "slow", lr=0.125, step_s=2.0),
        write_run(tmp_path / "fast", lr=0.5),
    )


def test_reward_is_drawn_over_steps_tokens_and_seconds(two: tuple[Path, Path]) -> None:
    panels = {(panel.title, panel.x_label): panel for panel in panels_of(compared(*two))}
    ends = {STEPS: (8, 8), TOKENS: (800, 800), SECONDS: (16, 8)}
    for axis, last in ends.items():
        trained = panels["Reward trained on", axis].curves
        assert [curve.x[-1] for curve in trained] == list(last)
        held_out = panels["Held-out reward", axis].curves
        assert [curve.x[-1] for curve in held_out] == list(last)
        for curve, end in zip(held_out, last, strict=True):
            np.testing.assert_array_equal(curve.x, [0, end / 2, end])
            np.testing.assert_array_equal(curve.y, [0.0, 0.4, 0.8])
    assert [curve.name for curve in trained] == ["slow", "fast"]


def test_supervised_runs_show_their_loss_and_no_reward(tmp_path: Path) -> None:
    for name in ("one", "other"):
        log = MetricsLog(tmp_path / name, tensorboard=False, first_step=1)
        for step in range(1, 21):
            log.log(step, {"policy/loss": 3.0 - step / 10, "tokens/trained": 100})
        log.close()
        status = Status(phase="finished", step=20, steps=20, time=0.0, measure="loss")
        write_status(tmp_path / name, status)
    runs = compared(tmp_path / "one", tmp_path / "other")
    titles = {panel.title for panel in panels_of(runs)}
    assert "Loss trained on" in titles
    assert "Reward trained on" not in titles
    ends = dict(ends_of(runs))
    assert ends["loss trained on, last tenth"] == ["1.050", "1.050"]
    assert "reward trained on, last tenth" not in ends
    text = write_comparison((tmp_path / "one", tmp_path / "other"))[0].read_text()
    assert "loss at the end, one" in text
    assert "reward at the end" not in text


def test_only_settings_that_differ_are_listed(two: tuple[Path, Path]) -> None:
    assert dict(differing(compared(*two))) == {
        "policy.optimizer.lr": ["0.125", "0.5"],
        "controls": ["gac (c_low 0.125)", "gac (c_low 0.5)"],
    }


def test_the_results_of_the_runs_are_in_one_table(two: tuple[Path, Path]) -> None:
    ends = dict(ends_of(compared(*two)))
    assert ends["time in steps"] == ["0:16", "0:08"]
    assert ends["held-out reward after"] == ["0.800", "0.800"]
    assert ends["mean cosine of consecutive gradients"] == ["0.250", "0.250"]


def test_a_run_without_a_metric_has_no_last_value_of_it(
    tmp_path: Path, two: tuple[Path, Path]
) -> None:
    log = MetricsLog(tmp_path / "bare", tensorboard=False, first_step=1)
    # A run that samples responses, all of whose rewards failed.
    log.log(1, {"time/step_s": 1.0, "tokens/generated": 9})
    log.close()
    bare = tmp_path / "bare"
    ends = dict(ends_of(compared(two[0], bare)))
    assert ends["mean cosine of consecutive gradients"] == ["0.250", "–"]
    assert ends["reward trained on, last tenth"] == ["0.800", "–"]
    with pytest.raises(UserError) as refused:
        write_comparison([bare])
    (problem,) = refused.value.problems
    assert problem.what == "the runs have logged none of the compared metrics"
    assert (problem.key, problem.fix) == ("RUN", "see their metrics.jsonl")


def test_runs_with_the_same_name_are_distinguished_by_their_folders(tmp_path: Path) -> None:
    runs = [write_run(tmp_path / folder / "run", lr=0.5) for folder in ("a", "b")]
    assert [one.name for one in compared(*runs)] == ["a/run", "b/run"]


def test_every_run_has_its_own_colour_and_line_style(tmp_path: Path) -> None:
    runs = [write_run(tmp_path / f"run{i}", lr=0.5) for i in range(len(COLOURS) + 2)]
    styles = {(one.colour, one.dotted) for one in compared(*runs)}
    assert len(styles) == len(runs)


@pytest.mark.filterwarnings("error", "ignore::ResourceWarning")
def test_the_page_and_the_picture_are_written_to_the_folder_of_the_runs(
    tmp_path: Path, two: tuple[Path, Path]
) -> None:
    html_path, png_path = write_comparison(two)
    assert (html_path, png_path) == (tmp_path / "comparison.html", tmp_path / "comparison.png")
    assert png_path.read_bytes()[:4] == b"\x89PNG"
    page = re.sub(r"<head>.*?</head>", "", html.unescape(html_path.read_text()), flags=re.DOTALL)
    assert not re.search(r"@[A-Z]+@", page)
    for text in ("2 runs compared", "Settings that differ", "seconds in steps", "slow", "fast"):
        assert text in page


def test_the_command_compares_several_runs_and_reports_one(
    tmp_path: Path, two: tuple[Path, Path]
) -> None:
    slow, fast = map(str, two)
    done = CliRunner().invoke(app, ["report", slow, fast, "--out", str(tmp_path / "out")])
    assert done.exit_code == 0
    assert (tmp_path / "out" / "comparison.html").is_file()
    assert not (tmp_path / "slow" / "report.html").exists()
    assert CliRunner().invoke(app, ["report", slow]).exit_code == 0
    assert (tmp_path / "slow" / "report.html").is_file()
    assert CliRunner().invoke(app, ["report", slow, "--out", "x"]).exit_code == 2
    with pytest.raises(UserError, match="twice"):
        write_comparison([two[0], two[0]])

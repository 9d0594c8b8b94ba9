"""Tests of the live display and the summary of a run."""

from __future__ import annotations

import io
import json
import re
import time
from dataclasses import replace
from pathlib import Path
from typing import Literal

import pytest
from rich.console import Console

from megatron_async_rl.config.problem import UserError
from megatron_async_rl.metrics.log import MetricsLog
from megatron_async_rl.report import progress as progress_module
from megatron_async_rl.report.progress import Progress, print_summary, sparkline
from megatron_async_rl.watchdog.events import Status, read_status, write_status
from tests.logged_samples import logged_run


class Run:
    """Files of a run, and a console for its display."""

    def __init__(self, run_dir: Path, *, terminal: bool) -> None:
        self.dir = run_dir
        self.text = io.StringIO()
        self.console = Console(
            file=self.text,
            force_terminal=terminal,
            width=100,
            color_system=None,
            legacy_windows=False,
        )
        self.log = MetricsLog(run_dir, tensorboard=False, first_step=1)

    def set_status(
        self,
        phase: str,
        step: int = 0,
        *,
        before: float | None = None,
        after: float | None = None,
        detail: str = "",
        measure: Literal["reward", "loss"] = "reward",
    ) -> None:
        write_status(
            self.dir,
            Status(
                phase=phase,
                step=step,
                steps=50,
                time=time.time(),
                detail=detail,
                measure=measure,
                before=before,
                after=after,
            ),
        )

    def step(self, step: int, **changes: object) -> None:
        values = {
            "reward/mean": step / 100,
            "policy/loss": 0.25,
            "ratio/ess_ratio": 0.875,
            "gac/cosine": 0.25,
            "gac/regime": 1,
            "gac/skips": 3,
            "lag/mean": 1.25,
            "lag/max": 2,
            "lag/histogram": [0, 3, 1],
            "tokens/generated": 1000,
            "tokens/trained": 900,
            "time/step_s": 2.0,
            "time/wait_batch_s": 0.5,
            "time/train_s": 1.0,
            "time/publish_s": 0.5,
        }
        self.log.log(
            step, {key: value for key, value in (values | changes).items() if value is not None}
        )

    @property
    def shown(self) -> str:
        return re.sub(r"\x1b\[[0-9;?]*[A-Za-z]", "", self.text.getvalue())


@pytest.fixture
def terminal(tmp_path: Path) -> Run:
    return Run(tmp_path, terminal=True)


@pytest.fixture
def pipe(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Run:
    monkeypatch.setattr(progress_module, "PLAIN_EVERY_S", 0.0)
    return Run(tmp_path, terminal=False)


def test_the_panel_shows_the_state_of_the_run(terminal: Run) -> None:
    progress = Progress(terminal.dir, 50, terminal.console)
    terminal.set_status("training", before=0.31)
    for step in range(1, 41):
        terminal.step(step)
    progress.close()
    shown = terminal.shown
    for expected in (
        "step 40/50",
        "about 0:20 left",
        "0.400",
        "held-out reward before 0.310",
        "mean 1.25  max 2",
        "0.875",
        "cosine +0.250 projected",
        "3 steps skipped",
        "500 tokens/s",
        "published in 0.50 s",
        "50% training, 25% publishing, 25% waiting",
    ):
        assert expected in shown
    assert "▁" in shown
    assert "█" in shown


def test_the_panel_shows_a_sample_of_the_newest_step_as_plain_text(terminal: Run) -> None:
    hostile = "so \x1b[2J it is [red]7[/red]\nand " + "so on " * 40
    logged_run(terminal.dir, lambda one: replace(one, text=hostile))
    progress = Progress(terminal.dir, 50, terminal.console)
    progress.update()
    assert "reward 4.3" not in terminal.shown, "no step has trained on a sample yet"
    terminal.step(5)
    progress.close()
    lines = [line.strip("│ ") for line in terminal.shown.splitlines()]
    at = next(i for i, line in enumerate(lines) if line.startswith("sample"))
    assert lines[at].split() == ["sample", "reward", "4.300", "4+0="], (
        "a waiting sample is not trained on"
    )
    assert lines[at + 1].startswith("so \\x1b[2J it is [red]7[/red] and so on so on")
    assert lines[at + 1].endswith("…")
    assert "\x1b[2J it" not in terminal.text.getvalue()


def test_the_panel_does_not_need_a_readable_sample_log(terminal: Run) -> None:
    logged_run(terminal.dir)
    for path in (terminal.dir / "samples").iterdir():
        path.write_bytes(b"hello world")
    progress = Progress(terminal.dir, 50, terminal.console)
    terminal.step(5)
    progress.close()
    assert "step 5/50" in terminal.shown


def add_anomaly(run: Run, step: int, norm: float) -> None:
    """Append a line of metrics and a line of details, as rank 0 does."""
    detail = {
        "step": step,
        "norm": norm,
        "median": 2.1,
        "parameter": "w",
        "samples": [{"id": "7/0"}],
    }
    with open(run.dir / "anomalies.jsonl", "a") as file:
        file.write(json.dumps(detail) + "\n")
    with open(run.dir / "metrics.jsonl", "a") as file:
        file.write(json.dumps({"step": step, "policy/grad_anomaly": 100.0}) + "\n")


def test_a_gradient_anomaly_causes_a_warning(terminal: Run) -> None:
    progress = Progress(terminal.dir, 50, terminal.console)
    terminal.step(1)
    progress.update()
    assert "warning" not in terminal.shown
    for step, norm in ((2, 50.0), (3, 1798.0)):
        add_anomaly(terminal, step, norm)
    progress.close()
    shown = " ".join(terminal.shown.replace("│", " ").split())
    assert "warning: step 3: Gradient far outside the run's history, norm 1,798, median" in shown
    assert "samples 7/0 (2 anomalies so far)" in shown


def test_a_pipe_receives_each_warning_once(pipe: Run) -> None:
    progress = Progress(pipe.dir, 50, pipe.console)
    add_anomaly(pipe, 2, 50.0)
    pipe.step(3, **{"policy/nonfinite": 1})
    for _ in range(3):
        progress.update()
    progress.close()
    assert [line for line in pipe.shown.splitlines() if line.startswith("warning")] == [
        "warning: step 2: Gradient far outside the run's history, norm 50, median 2.1, mostly in w;"
        " samples 7/0",
        "warning: step 3: Loss, gradient or reward that is not finite, the step was not applied",
    ]


def test_a_damaged_line_causes_a_warning_and_the_display_continues(pipe: Run) -> None:
    progress = Progress(pipe.dir, 50, pipe.console)
    with open(pipe.dir / "metrics.jsonl", "a") as file:
        file.write("\0\0\n")
    progress.update()
    pipe.step(2)
    pipe.set_status("training", 2)
    progress.update()
    progress.close()
    assert f"warning: {pipe.dir}/metrics.jsonl:1 is not a line of metrics" in pipe.shown
    assert "step 2/50" in pipe.shown


def test_the_panel_shows_the_phase_before_the_first_step(terminal: Run) -> None:
    progress = Progress(terminal.dir, 50, terminal.console)
    progress.update()
    terminal.set_status("starting", detail="Ray, engines and controller")
    progress.update()
    assert "starting: Ray, engines and controller" in terminal.shown
    progress.close()


def test_a_lag_without_a_maximum_is_shown_without_one(terminal: Run) -> None:
    progress = Progress(terminal.dir, 50, terminal.console)
    terminal.set_status("training")
    terminal.step(1, **{"lag/max": None})
    progress.close()
    assert re.search(r"mean 1\.25 +weight versions behind", terminal.shown)
    print_summary(terminal.dir, terminal.console)
    assert "mean 1.25 versions" in terminal.shown


def test_a_supervised_run_shows_its_loss_and_no_lag(terminal: Run) -> None:
    progress = Progress(terminal.dir, 50, terminal.console)
    unsampled = {
        "ratio/ess_ratio": None,
        "tokens/generated": None,
        "gac/regime": None,
        "gac/cosine": None,
    }
    terminal.step(1, **unsampled)
    progress.close()
    assert "loss" in terminal.shown
    assert "0.2500" in terminal.shown
    assert "450 tokens/s" in terminal.shown
    for absent in ("reward", "lag", "ESS", "gradient", "published"):
        assert absent not in terminal.shown


def test_the_panel_shows_the_busy_share_and_number_of_the_engines(terminal: Run) -> None:
    progress = Progress(terminal.dir, 50, terminal.console)
    engines = {
        "engine/busy_share": 0.875,
        "engine/versions": [1, -1],
        "engine/alive": 1,
        "engine/restarts": 3,
    }
    terminal.step(1, **engines)
    progress.close()
    assert "88% busy  1 of 2 alive" in terminal.shown
    assert "3 restarts so far" in terminal.shown


def test_the_panel_shows_the_newest_evaluation_until_the_next(terminal: Run) -> None:
    progress = Progress(terminal.dir, 50, terminal.console)
    terminal.set_status("training", before=0.31)
    for step, version in ((1, 0), (2, None), (3, 3), (4, None)):
        terminal.step(
            step,
            **(
                {}
                if version is None
                else {"eval/version": version, "eval/mean": 0.5 + version / 10}
            ),
        )
        if step == 2:
            progress.update()
            assert "held-out reward before 0.310 " in terminal.shown
    progress.close()
    assert "held-out reward before 0.310, version 3: 0.800" in terminal.shown


def test_the_panel_shows_the_held_out_loss_of_a_supervised_run(terminal: Run) -> None:
    progress = Progress(terminal.dir, 50, terminal.console)
    terminal.set_status("training", before=2.5, measure="loss")
    progress.update()
    assert "loss" in terminal.shown
    assert "held-out loss before 2.500 " in terminal.shown
    terminal.step(1, **{"eval/version": 2, "eval/loss": 1.25, "ratio/ess_ratio": None})
    progress.close()
    assert "held-out loss before 2.500, version 2: 1.250" in terminal.shown
    assert "0.2500" in terminal.shown, "the training loss is missing"
    for absent in ("reward", "lag", "ESS"):
        assert absent not in terminal.shown


def test_a_silent_run_is_reported(terminal: Run, monkeypatch: pytest.MonkeyPatch) -> None:
    now = 1000.0
    monkeypatch.setattr(progress_module.time, "monotonic", lambda: now)
    progress = Progress(terminal.dir, 50, terminal.console)
    terminal.set_status("training")
    terminal.step(1)
    progress.update()
    assert "no step for" not in terminal.shown
    now += 95
    progress.update()
    assert "no step for 1:35" in terminal.shown
    count = terminal.shown.count("no step for")
    terminal.set_status("evaluating")
    progress.update()
    progress.close()
    assert terminal.shown.count("no step for") == count


def test_a_pipe_receives_one_plain_line_per_change(
    pipe: Run, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(progress_module.time, "monotonic", lambda: 1000.0)
    progress = Progress(pipe.dir, 50, pipe.console)
    pipe.set_status("training", before=0.31)
    pipe.step(1)
    progress.update()
    progress.update()
    pipe.step(2)
    progress.update()
    progress.close()
    assert "\x1b" not in pipe.text.getvalue()
    first, second = pipe.shown.splitlines()
    assert re.fullmatch(
        r"\[0:00\]  training  step 1/50  reward 0\.010  lag 1\.25  ESS 0\.875  .*500 tokens/s "
        r" about 1:38 left",
        first,
    )
    assert "step 2/50" in second


def test_rewards_that_fail_are_reported_during_and_after_the_run(
    terminal: Run, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(progress_module, "PLAIN_EVERY_S", 0.0)
    piped = Run(tmp_path / "piped", terminal=False)
    for run in (terminal, piped):
        progress = Progress(run.dir, 50, run.console)
        run.set_status("training")
        run.step(1, **{"reward/errors": 0})
        progress.update()
        assert "failed" not in run.shown
        run.step(2, **{"reward/errors": 1500})
        progress.update()
        progress.close()
        run.step(3, **{"reward/errors": 500})
        print_summary(run.dir, run.console)
    assert "1,500 rewards failed" in piped.shown
    assert re.search(r"failed +1,500 rewards +logs/\*\.reward_errors\.jsonl", terminal.shown)
    for run in (terminal, piped):
        assert re.search(r"rewards +2,000 failed: .*reward_errors\.jsonl", run.shown)


def test_a_partial_line_is_shown_when_it_is_complete(pipe: Run) -> None:
    progress = Progress(pipe.dir, 50, pipe.console)
    pipe.set_status("training")
    with open(pipe.dir / "metrics.jsonl", "a") as file:
        file.write('{"step": 1, "time/ste')
        file.flush()
        progress.update()
        file.write('p_s": 2.0}\n')
    progress.update()
    assert [line.split("  ")[1:3] for line in pipe.shown.splitlines()] == [
        ["training"],
        ["training", "step 1/50"],
    ]


def test_the_display_drops_the_steps_that_a_resume_cuts(pipe: Run) -> None:
    for step in range(1, 11):
        pipe.step(step)
    progress = Progress(pipe.dir, 50, pipe.console)
    progress.update()
    pipe.log = MetricsLog(pipe.dir, tensorboard=False, first_step=1)
    pipe.set_status("training")
    progress.update()
    pipe.step(1)
    progress.update()
    assert [line.split("  ")[2] for line in pipe.shown.splitlines() if "step" in line] == [
        "step 10/50",
        "step 1/50",
    ]
    assert len(pipe.shown.splitlines()) == 3


def test_the_status_of_an_earlier_start_is_ignored(pipe: Run) -> None:
    pipe.set_status("failed", detail="the earlier start")
    progress = Progress(pipe.dir, 50, pipe.console)
    progress.update()
    assert "failed" not in pipe.shown
    assert "starting" in pipe.shown


def test_the_summary_shows_the_results_of_the_run(pipe: Run) -> None:
    for step in range(1, 4):
        pipe.step(step)
    pipe.set_status("finished", 3, before=0.31, after=0.875)
    (pipe.dir / "report.png").touch()
    print_summary(pipe.dir, pipe.console)
    shown = " ".join(pipe.shown.split())
    assert "held-out reward 0.310 → 0.875 (+0.565)" in shown
    assert "3 in 0:06" in shown
    assert "3,000 generated, 2,700 trained on (500 tokens/s)" in shown
    assert "50% training, 25% publishing, 25% waiting" in shown
    assert "mean 1.25, max 2 versions" in shown
    assert "0 kept, 3 projected, 0 skipped" in shown
    assert "report.png" in shown
    assert "report.html" not in shown


def test_the_summary_shows_the_run_in_observe_beside(pipe: Run, tmp_path: Path) -> None:
    other = Run(tmp_path / "without_control", terminal=False)
    other.step(1)
    other.set_status("finished", 1, before=0.31, after=0.25)
    pipe.step(1)
    (pipe.dir / "config.yaml").write_text(f"observe: {{beside: {other.dir}}}\n")
    print_summary(pipe.dir, pipe.console)
    assert "without control 0.310 → 0.250 (-0.060)" in " ".join(pipe.shown.split())


def test_a_narrow_terminal_does_not_wrap_paths_of_the_summary(tmp_path: Path) -> None:
    run = Run(tmp_path / ("[bold]" + 60 * "x"), terminal=True)
    run.console.width = 40
    run.step(1)
    (run.dir / "report.html").touch()
    print_summary(run.dir, run.console)
    lines = [line.split() for line in run.shown.splitlines()]
    assert ["run", str(run.dir)] in lines
    assert ["plot", f"{run.dir}/report.html"] in lines


def test_the_summary_of_a_run_without_steps_is_not_an_error(pipe: Run) -> None:
    print_summary(pipe.dir, pipe.console)
    assert "steps" in pipe.shown


def test_the_summary_of_a_run_without_a_report_counts_its_steps(pipe: Run) -> None:
    for step in range(1, 4):
        pipe.step(step)
    (pipe.dir / "config.yaml").write_text("[")
    print_summary(pipe.dir, pipe.console)
    assert re.search(r"steps +3", pipe.shown), pipe.shown


def test_a_status_is_read_as_it_was_written(tmp_path: Path) -> None:
    assert read_status(tmp_path) is None
    status = Status(
        phase="failed", step=3, steps=9, time=1.5, before=0.25, error="boom", log="rank_0.log"
    )
    write_status(tmp_path, status)
    assert read_status(tmp_path) == status
    assert [path.name for path in tmp_path.iterdir()] == ["status.json"]


def test_the_error_for_an_invalid_status_names_the_file(tmp_path: Path) -> None:
    (tmp_path / "status.json").write_text("[1, 2]")
    with pytest.raises(UserError, match=r"status\.json is not a run's status"):
        read_status(tmp_path)


def test_a_sparkline_is_scaled_to_its_own_range() -> None:
    assert sparkline([0, 1, 2, 3, 4, 5, 6, 7]) == "▁▂▃▄▅▆▇█"
    assert sparkline([5.0, 5.0]) == "▁▁"
    assert sparkline([]) == ""
    assert sparkline([0, 0, 7, 7], width=2) == "▁█"
    assert sparkline([1.0, float("nan"), float("inf"), 2.0]) == "▁█"

"""The report of long, short, supervised and empty runs."""

from __future__ import annotations

import math
import re
from pathlib import Path

import numpy as np
import pytest
import yaml

from megatron_async_rl.observe.metrics import MetricsLog
from megatron_async_rl.observe.record import read_record
from megatron_async_rl.observe.report import ReportError, write_report
from megatron_async_rl.observe.series import smooth
from megatron_async_rl.observe.status import Status, write_status
from megatron_async_rl.observe.summary import span

CONFIG = {
    "model": {"path": "/models/<tiny>", "dtype": "float32"},
    "policy": {"parallel": {"ranks": 2, "tensor": 2, "pipeline": 1}, "optimizer": {"lr": 3e-4}},
    "objective": {"advantage": {"name": "grpo"}, "loss": {"name": "ppo_clip", "clip_low": 0.2, "dual_clip": None}},
    "controls": [{"name": "gac", "c_low": 0.15, "c_high": 0.7}],
    "flow": {"async_ratio": 1.5, "prompts_per_step": 32, "group_size": 8},
}


def sampled_run(run_dir: Path, steps: int, config: dict[str, object] | None = None) -> Path:
    log = MetricsLog(run_dir, tensorboard=False, first_step=1)
    for step in range(1, steps + 1):
        values: dict[str, object] = {
            "reward/mean": math.nan if step == 3 else 0.3 + step / 1000,
            "response/length_mean": 20.0,
            "response/truncated": 0.1,
            "ratio/ess_ratio": 0.9,
            "gac/regime": step % 3,
            "lag/mean": 0.75,
            "lag/max": 1 if step == 1 else 2,
            "lag/histogram": [1, 3] if step == 1 else [2, 1, 1],
            "tokens/generated": 1000,
            "tokens/trained": 900,
            "time/wait_batch_s": 0.2,
            "time/train_s": 0.6,
            "time/publish_s": 0.1,
            "time/step_s": 1.0,
        }
        log.log(step, values | ({"gac/cosine": 0.2} if step > 1 else {}))
    log.close()
    (run_dir / "config.yaml").write_text(yaml.safe_dump(CONFIG if config is None else config))
    write_status(run_dir, Status(phase="finished", step=steps, steps=steps, time=0.0, before=0.31, after=0.91))
    return run_dir


def supervised_run(run_dir: Path, steps: int) -> Path:
    log = MetricsLog(run_dir, tensorboard=False, first_step=1)
    for step in range(1, steps + 1):
        values = {"policy/loss": 3.0 / step, "policy/grad_norm": 0.5, "policy/lr": 1e-3, "time/train_s": 0.9, "time/step_s": 1.0}
        log.log(step, {**values, "tokens/trained": 500, "lag/mean": 0.0, "lag/histogram": [500], "reward/mean": 0.0})
    log.close()
    return run_dir


def png_size(path: Path) -> tuple[int, int]:
    header = path.read_bytes()[:24]
    assert header[:8] == b"\x89PNG\r\n\x1a\n"
    return int.from_bytes(header[16:20], "big"), int.from_bytes(header[20:24], "big")


def page_without_plotly(path: Path) -> str:
    """The page's own text, its scripts that draw included, the library left out."""
    return re.sub(r"<head>.*?</head>", "", path.read_text(), flags=re.DOTALL)


@pytest.mark.filterwarnings("error")
@pytest.mark.parametrize("steps", [1, 2, 40])
def test_a_run_of_any_length_has_a_sheet_and_a_page(tmp_path: Path, steps: int) -> None:
    html_path, png_path = write_report(sampled_run(tmp_path / "demo", steps))
    assert (html_path.name, png_path.name) == ("report.html", "report.png")
    width, height = png_size(png_path)
    assert width > 1000
    assert height > 1000
    page = page_without_plotly(html_path)
    for title in ("Reward", "Lag of the tokens trained on", "Effective sample size", "Cosine of consecutive gradients"):
        assert f"<b>{title}" in page.replace("\\u003cb\\u003e", "<b>")
    assert "held-out accuracy 0.310 → 0.910" in page


def test_the_page_opens_offline(tmp_path: Path) -> None:
    html_path, _ = write_report(sampled_run(tmp_path / "demo", 3))
    text = html_path.read_text()
    assert len(text) > 1_000_000
    assert not re.search(r"<(script|link|img)[^>]+(src|href)=", page_without_plotly(html_path))
    assert not re.search(r"<(script|link)[^>]+(src|href)=[\"']?(https?:)?//", text)


def test_the_tables_say_what_was_run_and_how_fast(tmp_path: Path) -> None:
    record = read_record(sampled_run(tmp_path / "demo", 40))
    tables = {title: dict(facts) for title, facts in record.facts()}
    assert tables["Result"]["lag of a token"] == "mean 0.75, largest 2 versions"
    assert tables["Result"]["gradients projected"] == "14"
    assert tables["Speed"]["throughput"] == "1,000 tokens/s"
    assert [tables["Speed"][f"of it {name}"] for name in ("training", "publishing", "waiting", "other")] == [
        "60.0%",
        "10.0%",
        "20.0%",
        "10.0%",
    ]
    assert tables["Method"]["objective.loss"] == "ppo_clip (clip_low 0.2)"
    assert tables["Method"]["controls"] == "gac (c_high 0.7, c_low 0.15)"
    assert tables["Policy"]["policy.optimizer.lr"] == "0.0003"


def test_a_calibrated_threshold_is_drawn_where_the_run_found_it(tmp_path: Path) -> None:
    config = {**CONFIG, "controls": [{"name": "gac", "c_low": 0.15, "calibrate": {"steps": 4, "quantile": 0.9}}]}
    run = sampled_run(tmp_path, 3, config)
    assert read_record(run).gac == {"name": "gac", "c_low": None, "calibrate": {"steps": 4, "quantile": 0.9}}
    write_report(run)
    log = MetricsLog(run, tensorboard=False, first_step=4)
    log.log(4, {"gac/cosine": 0.4, "gac/regime": 1, "gac/c_low": 0.31})
    log.close()
    gac = read_record(run).gac
    assert gac is not None
    assert gac["c_low"] == 0.31
    assert "c_low 0.31" in write_report(run)[0].read_text()


def test_text_of_the_config_is_escaped(tmp_path: Path) -> None:
    html_path, _ = write_report(sampled_run(tmp_path / "demo", 2))
    assert "/models/&lt;tiny&gt;" in page_without_plotly(html_path)


@pytest.mark.filterwarnings("error")
@pytest.mark.parametrize("steps", [1, 40])
def test_a_supervised_run_reports_its_loss_and_no_reward(tmp_path: Path, steps: int) -> None:
    html_path, png_path = write_report(supervised_run(tmp_path / "warm", steps))
    page = page_without_plotly(html_path)
    assert "Loss" in page
    for absent in ("Reward", "Lag of", "Effective sample size", "lag of a token", "held-out"):
        assert absent not in page
    assert png_size(png_path)[1] < 1100


def test_a_run_without_its_config_or_control_still_reports(tmp_path: Path) -> None:
    run_dir = sampled_run(tmp_path / "demo", 3, config={"controls": []})
    (run_dir / "config.yaml").unlink()
    (run_dir / "status.json").unlink()
    html_path, _ = write_report(run_dir)
    assert "held-out" not in page_without_plotly(html_path)


def test_an_unfinished_run_says_how_far_it_came(tmp_path: Path) -> None:
    run_dir = sampled_run(tmp_path / "demo", 3)
    write_status(run_dir, Status(phase="training", step=3, steps=80, time=0.0, before=0.31))
    assert read_record(run_dir).headline.endswith("training at step 3 of 80")


def test_a_run_without_steps_has_nothing_to_report(tmp_path: Path) -> None:
    with pytest.raises(ReportError, match="is not a directory"):
        write_report(tmp_path / "missing")
    with pytest.raises(ReportError, match="no run was started in it"):
        write_report(tmp_path)
    write_status(tmp_path, Status(phase="starting", step=0, steps=9, time=0.0))
    with pytest.raises(ReportError, match="its last phase was `starting`"):
        write_report(tmp_path)


def test_smoothing_keeps_constants_ignores_gaps_and_leaves_short_columns_alone() -> None:
    constant = np.full(50, 0.4)
    constant[[0, 7, 49]] = np.nan, np.inf, np.nan
    trend = smooth(constant)
    assert trend is not None
    np.testing.assert_allclose(trend, 0.4)
    assert smooth(np.arange(5.0)) is None
    noise = np.random.default_rng(0).normal(size=400)
    assert np.std(smooth(noise)) < 0.35 * np.std(noise)


def test_spans_read_like_a_clock() -> None:
    assert [span(seconds) for seconds in (0.4, 7, 751, 11109)] == ["0:00", "0:07", "12:31", "3:05:09"]

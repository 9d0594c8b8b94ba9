"""Tests of the report for long, short, supervised and empty runs."""

from __future__ import annotations

import base64
import hashlib
import html
import json
import math
import re
from dataclasses import replace
from itertools import combinations
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import yaml
from matplotlib.transforms import Bbox

from megatron_async_rl.metrics.log import EvalLog, MetricRow, MetricsLog
from megatron_async_rl.metrics.timeline import Span
from megatron_async_rl.report import report
from megatron_async_rl.report.anomalies import Anomaly, AnomalyFinder, steps_text
from megatron_async_rl.report.metric_rows import per_engine, smooth, thin
from megatron_async_rl.report.page import _wrong, page_of, tables_of
from megatron_async_rl.report.panel import POINTS
from megatron_async_rl.report.panels import panels_of
from megatron_async_rl.report.report import tick, write_report
from megatron_async_rl.report.run_data import ReportError, read_run, span
from megatron_async_rl.report.timeline_window import timeline_window
from megatron_async_rl.watchdog.events import Event, Status, write_status
from tests.json_lines import read_objects, write_lines

CONFIG = {
    "model": {"path": "/models/<tiny>", "dtype": "float32"},
    "policy": {"parallel": {"ranks": 2, "tensor": 2, "pipeline": 1}, "optimizer": {"lr": 3e-4}},
    "objective": {
        "advantage": {"name": "grpo"},
        "loss": {"name": "ppo_clip", "clip_low": 0.2, "dual_clip": None},
    },
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
    write_status(
        run_dir,
        Status(phase="finished", step=steps, steps=steps, time=0.0, before=0.31, after=0.91),
    )
    return run_dir


def test_a_report_accepts_rows_without_some_metrics(tmp_path: Path) -> None:
    run = sampled_run(tmp_path / "demo", 6)
    file, rare = run / "metrics.jsonl", ("ratio/logp_diff_lag0_max", "clip/positive", "reward/std")
    rows = read_objects(file)
    for row in rows[1:]:
        for name in ("ratio/ess_ratio", "lag/histogram", "tokens/generated", "engine/busy_share"):
            row.pop(name, None)
    rows[3] |= dict.fromkeys(rare, 0.5)
    write_lines(file, rows)
    assert all(path.exists() for path in write_report(run))
    curves = {
        curve.name: list(curve.y)
        for panel in panels_of(read_run(run, alone=False))
        for curve in getattr(panel, "curves", ())
    }
    assert curves["max at lag 0"] == [0.5]


def test_a_missing_largest_lag_is_not_shown(tmp_path: Path) -> None:
    run = sampled_run(tmp_path / "demo", 4)
    file = run / "metrics.jsonl"
    rows = read_objects(file)
    shown = {}
    for key in ("", "lag/max", "lag/histogram"):
        for row in rows:
            row.pop(key, None)
        write_lines(file, rows)
        shown_page = page(run)
        assert "None" not in re.sub(r"<script.*?</script>", "", shown_page, flags=re.DOTALL)
        shown[key] = re.findall(
            r"<small>(mean lag[^<]*)|lag of a token</th><td>([^<]*)", shown_page
        )
    assert shown[""] == [("mean lag, max 2", ""), ("", "mean 0.75, max 2 versions")]
    assert shown["lag/max"] == [("mean lag", ""), ("", "mean 0.75 versions")]
    assert shown["lag/histogram"] == []


def fleet_run(run_dir: Path, steps: int, *, dropped: bool = True) -> Path:
    """Write a run with two engines, which loses the second one in the last step. The run starts at
    second 1000, and each step takes ten seconds."""
    log = MetricsLog(run_dir, tensorboard=False, first_step=1)
    for step in range(1, steps + 1):
        engines = {
            "engine/busy_share": 0.5,
            "engine/busy_shares": [0.75, 0.25],
            "engine/versions": [step - 1, step - 2 if 1 < step < steps else -1],
            "engine/in_flight": [4, 2],
            "engine/tokens": [300, 100],
            "engine/alive": 2 if step < steps else 1,
            "engine/restarts": 3,
        }
        drops = {
            "dropped/responses": step,
            "dropped/length_mean": 60.0,
            "dropped/reward_mean": 0.25,
            "dropped/length_histogram": [0, 0, 0, 0, 0, step],
            "flow/dropped_late": step,
        }
        trained = {
            "response/length_mean": 20.0,
            "reward/mean": 0.5,
            "trained/length_histogram": [0, 0, 0, 4, 4],
        }
        others = {
            "ratio/ess_ratio": 0.9,
            "lag/mean": 0.5,
            "lag/histogram": [1, 1],
            "time/step_s": 10.0,
            "staleness/drift": 0.5,
        }
        log.log(step, {**engines, **trained, **others, **(drops if dropped and step % 2 else {})})
    log.close()
    file = run_dir / "metrics.jsonl"
    rows = read_objects(file)
    write_lines(file, [row | {"time": 1000.0 + 10.0 * row["step"]} for row in rows])
    spans = {
        "rank 0": (("waiting", "batch", 4.0), ("training", "", 6.0)),
        "engine-0": (("busy", "", 9.0), ("loading", "", 1.0)),
    }
    (run_dir / "timeline").mkdir()
    for track, parts in spans.items():
        at, lines = 1000.0, []
        for state, waiting_for, seconds in parts * steps:
            lines.append(
                json.dumps({"state": state, "for": waiting_for, "start": at, "end": at + seconds})
            )
            at += seconds
        (run_dir / "timeline" / f"{track}.jsonl").write_text("\n".join(lines) + "\n")
    return run_dir


def supervised_run(run_dir: Path, steps: int) -> Path:
    log = MetricsLog(run_dir, tensorboard=False, first_step=1)
    for step in range(1, steps + 1):
        values = {
            "policy/loss": 3.0 / step,
            "policy/grad_norm": 0.5,
            "policy/lr": 1e-3,
            "time/train_s": 0.9,
            "time/step_s": 1.0,
        }
        log.log(
            step,
            {
                **values,
                "tokens/trained": 500,
                "lag/mean": 0.0,
                "lag/histogram": [500],
                "reward/mean": 0.0,
            },
        )
    log.close()
    return run_dir


def png_size(path: Path) -> tuple[int, int]:
    header = path.read_bytes()[:24]
    assert header[:8] == b"\x89PNG\r\n\x1a\n"
    return int.from_bytes(header[16:20], "big"), int.from_bytes(header[20:24], "big")


def text_of(page: str) -> str:
    """Return the text of a page, without its head and its panels."""
    body = page.partition("</head>")[2].partition("<script")[0]
    return html.unescape(re.sub(r"<noscript>.*?</noscript>", "", body, flags=re.DOTALL))


def drawn_in(page: str) -> dict[str, dict[str, Any]]:
    """Return title -> panel, as JSON for the page's script."""
    data = re.search(r'<script id="panels-data" type="application/json">(.*?)</script>', page)
    assert data is not None
    return {panel["title"]: panel for panel in json.loads(data[1])}


def page(run_dir: Path) -> str:
    """Return the page of a run, without drawing the picture, which takes longer."""
    return page_of(read_run(run_dir)).as_html()


@pytest.mark.filterwarnings("error", "ignore::ResourceWarning")
@pytest.mark.parametrize("steps", [1, 2, 40])
def test_a_run_of_any_length_has_a_picture_and_a_page(tmp_path: Path, steps: int) -> None:
    html_path, png_path = write_report(sampled_run(tmp_path / "demo", steps))
    assert (html_path.name, png_path.name) == ("report.html", "report.png")
    width, height = png_size(png_path)
    assert width > 1000
    assert height > 1000
    text = html_path.read_text()
    assert {
        "Reward",
        "Lag of the tokens trained on",
        "Effective sample size",
        "Cosine of consecutive gradients",
    } <= drawn_in(text).keys()
    assert "0.310 → 0.910" in text_of(text)


@pytest.mark.filterwarnings("error", "ignore::ResourceWarning")
def test_every_evaluation_of_the_run_is_drawn_at_its_version(tmp_path: Path) -> None:
    run = sampled_run(tmp_path / "evaluated", 8)
    assert "Held-out prompts" not in drawn_in(page(run))
    log = EvalLog(run, versions=())
    for version, mean, pass_at in (
        (0, 0.25, {"1": 0.25}),
        (4, None, {"1": 0.375, "8": 0.75}),
        (8, 0.5, {"1": 0.5, "8": 0.875}),
    ):
        log.append({"version": version, "mean_reward": mean, "pass_at": pass_at})
    seen = read_run(run).evaluations
    assert seen.versions.tolist() == [0, 4, 8]
    np.testing.assert_array_equal(seen.mean, [0.25, np.nan, 0.5])
    assert list(seen.pass_at) == [1, 8]
    np.testing.assert_array_equal(seen.pass_at[8], [np.nan, 0.75, 0.875])
    drawn = drawn_in(page(run))
    held_out = {curve["name"]: curve for curve in drawn["Reward"]["curves"]}["held out"]
    assert (held_out["x"], held_out["y"]) == ([0, 4, 8], [0.25, None, 0.5])
    passed = {curve["name"]: curve["y"] for curve in drawn["Held-out prompts"]["curves"]}
    assert passed == {"pass@1": [0.25, 0.375, 0.5], "pass@8": [None, 0.75, 0.875]}


@pytest.mark.filterwarnings("error", "ignore::ResourceWarning")
@pytest.mark.parametrize("steps", [1, 40])
def test_the_report_shows_the_activity_of_each_engine(tmp_path: Path, steps: int) -> None:
    html_path, png_path = write_report(fleet_run(tmp_path / "fleet", steps))
    assert png_size(png_path)[1] > 2000
    text = html_path.read_text()
    drawn = drawn_in(text)
    assert {
        "Engines busy, mean 50%",
        "In flight per engine",
        "Weights of each engine",
    } <= drawn.keys()
    timeline = drawn[f"Activity of each process, last {min(steps, 12)} steps"]
    assert timeline["names"] == ["rank 0", "engine-0"]
    assert [1, 0.0, 9.0, "green"] in timeline["bars"], "engine 0 was busy for nine seconds"
    run_data = read_run(tmp_path / "fleet")
    assert run_data.dropped is not None
    assert run_data.dropped.sentence in text_of(text)
    tables = {title: dict(facts) for title, facts in tables_of(run_data)}
    assert tables["Speed"]["engines busy"] == "50.0%"
    assert tables["Speed"]["engines alive"] == "1 of 2, 3 restarts"
    assert tables["Result"]["staleness drift, last step"] == "0.5"
    assert tables[f"The last {min(steps, 12)} steps"] == {
        "rank 0": "training 60%, waiting for batch 40%",
        "engine-0": "busy 90%, loading 10%",
    }


def test_dropped_responses_are_compared_with_the_trained_ones(tmp_path: Path) -> None:
    run = fleet_run(tmp_path / "dropping", 5)
    dropped = read_run(run).dropped
    assert dropped is not None
    assert (
        dropped.sentence
        == "9 responses were dropped (groups: 5 late): mean length 60.0 tokens (trained on: 20.0),"
        " mean reward 0.250 (trained on: 0.500)"
    )
    assert read_run(fleet_run(tmp_path / "waiting", 5, dropped=False)).dropped is None


def test_counters_that_a_resume_restarts_are_summed(tmp_path: Path) -> None:
    log = MetricsLog(tmp_path, tensorboard=False, first_step=1)
    drops = {"dropped/responses": 1, "dropped/length_mean": 9.0}
    for step, late in enumerate((2, 5, 1, 1), start=1):
        log.log(step, {"flow/dropped_late": late, "flow/dropped_equal": 1, **drops})
    dropped = read_run(tmp_path).dropped
    assert dropped is not None
    assert dropped.groups == {"late": 6, "of equal reward": 1}


def test_versions_of_engines_are_shown_as_lag_and_a_lost_engine_has_none() -> None:
    rows: list[MetricRow] = [
        {"step": 4, "version": 4, "engine/versions": [3, 1]},
        {"step": 5, "version": 5, "engine/versions": [4, -1]},
    ]
    steps, behind = per_engine(rows, "engine/versions")
    assert steps.tolist() == [4, 5]
    np.testing.assert_array_equal(behind, [[0, 0], [2, np.nan]])


def test_the_timeline_covers_the_last_steps_since_the_last_stop(tmp_path: Path) -> None:
    tracks = {"rank 0": [Span(track="rank 0", state="training", start=0.0, end=1e6)]}

    def ended(stopped_s: float) -> list[MetricRow]:
        return [
            {"step": i, "time": 10.0 * i + (stopped_s if i > 27 else 0), "time/step_s": 10.0}
            for i in range(1, 31)
        ]

    rows = ended(0.0)
    rows[17]["time"] = 178.0
    shown = timeline_window(rows, tracks)
    assert shown is not None
    assert ([step for step, _ in shown.steps], shown.start, shown.end) == (
        list(range(19, 31)),
        178.0,
        300.0,
    )
    shown = timeline_window(ended(9000.0), tracks)
    assert shown is not None
    assert ([step for step, _ in shown.steps], shown.start, shown.end) == (
        [28, 29, 30],
        9270.0,
        9300.0,
    )
    assert shown.tracks["rank 0"] == [
        Span(track="rank 0", state="training", start=9270.0, end=9300.0)
    ]
    assert timeline_window(rows, {}) is None


def test_the_page_is_small_and_needs_no_network(tmp_path: Path) -> None:
    run = sampled_run(tmp_path / "demo", 3000)
    text = page(run)
    assert len(text) < 300_000
    assert not re.search(r"<(script|img|image|use|iframe)[^>]+(src|href)=[\"']?[^#\"']", text)
    assert re.findall(r"<link[^>]*>", text) == ['<link rel="icon" href="data:,">']
    assert "://" not in text.replace("http://www.w3.org/2000/svg", "")


def test_the_page_begins_with_the_reward_and_ends_with_the_settings(tmp_path: Path) -> None:
    run = sampled_run(tmp_path / "demo", 40)
    write_status(
        run,
        Status(phase="failed", step=40, steps=80, time=0.0, error="EngineFailed: no <memory>"),
    )
    whole = html.unescape(page(run))
    places = [
        whole.index(text)
        for text in (
            "failed at step 40 of 80",
            "EngineFailed: no <memory>",
            'id="first"',
            "40 of 80</b><small>steps",
            "Anomalies and dropped responses",
            'id="panels"',
            "<details",
            "path: /models/<tiny>",
        )
    ]
    assert places == sorted(places)
    assert next(iter(drawn_in(page(run)))) == "Reward", "the reward is not the first panel"


def test_no_heading_stands_above_nothing(tmp_path: Path) -> None:
    run = replace(read_run(sampled_run(tmp_path / "demo", 40)), anomalies=(), dropped=None)
    assert _wrong(replace(run, events=[])) == ""
    event = Event(1.0, "engine <0> was replaced")
    assert _wrong(replace(run, events=[event])) == (
        '<section class="card wrong"><h2>Events</h2><ul>'
        "<li>engine &lt;0&gt; was replaced</li></ul></section>"
    )


def test_the_tables_show_the_result_and_the_speed_of_the_run(tmp_path: Path) -> None:
    run_data = read_run(sampled_run(tmp_path / "demo", 40))
    tables = {title: dict(facts) for title, facts in tables_of(run_data)}
    assert tables["Result"]["lag of a token"] == "mean 0.75, max 2 versions"
    assert tables["Result"]["gradients projected"] == "14"
    assert tables["Speed"]["throughput"] == "1,000 tokens/s"
    assert [
        tables["Speed"][f"share of the time: {name}"]
        for name in ("training", "publishing", "waiting", "other")
    ] == [
        "60.0%",
        "10.0%",
        "20.0%",
        "10.0%",
    ]


def rows_of(**columns: list[float | None]) -> list[MetricRow]:
    """Return rows from step 1 on. `a_b=[...]` has the values of the key `a/b`; None is absent."""
    count = max(len(values) for values in columns.values())
    return [
        {"step": index + 1}
        | {
            key.replace("_", "/", 1): value
            for key, values in columns.items()
            if (value := values[index]) is not None
        }
        for index in range(count)
    ]


def test_every_kind_of_anomaly_is_detected_at_its_step(tmp_path: Path) -> None:
    rows = rows_of(
        policy_grad_anomaly=[0, 856.0, 0, 0, 0, 0],
        policy_grad_norm=[2.0, 1798.0, 2.0, math.inf, 2.0, 2.0],
        policy_nonfinite=[0, 0, 0, 1, 1, 1],
        policy_skipped=[0, 0, 1, 1, 1, 0],
        gac_regime=[0, 0, 0, 0, 2, 0],
        engine_alive=[2, 2, 1, 2, 2, 2],
        engine_restarts=[0, 0, 0, 1, 1, 1],
        reward_errors=[0, 0, 0, 0, 3, 0],
        flow_dropped_late=[0, None, 0, None, 4, 4],
        flow_admitted=[8, 16, 24, 32, 40, 8],
    )
    (tmp_path / "anomalies.jsonl").write_text(
        json.dumps(
            {"step": 2, "norm": 1798.2, "median": 2.1, "parameter": "w", "samples": [{"id": "7/0"}]}
        )
        + "\n{half"
    )
    assert AnomalyFinder(tmp_path).find(rows) == [
        Anomaly(step=step, kind=kind, detail=detail)
        for step, kind, detail in (
            (
                2,
                "gradient",
                "norm 1,798, median 2.1, mostly in w; samples 7/0",
            ),
            (3, "engine", "1 of 2 engines left"),
            (3, "skipped", "no optimizer step"),
            (4, "nonfinite", "policy/grad_norm is inf"),
            (4, "engine", "1 restart"),
            (5, "reward", "3 samples"),
            (5, "dropped", "4 groups"),
            (6, "resumed", "the counters restarted"),
        )
    ]
    assert steps_text([1, 2, 3, 7, 9, 10]) == "1–3, 7, 9–10"


def test_anomalies_are_marked_on_the_curves_and_listed(tmp_path: Path) -> None:
    run = sampled_run(tmp_path / "demo", 12)
    without = page(run)
    file = run / "metrics.jsonl"
    rows = read_objects(file)
    rows[6] |= {"policy/grad_anomaly": 856.0}
    write_lines(file, rows)
    whole = page(run)
    title = "Gradient far outside the run's history"
    detail = "856 times the median of the last steps"
    assert title not in html.unescape(without)
    assert f"{title}</td><td>7</td><td>step 7: {detail}</td>" in text_of(whole)
    assert [7, "red", f"{title}: {detail}", True] in drawn_in(whole)["Reward"]["marks"]


def test_thinning_keeps_the_order_the_spikes_and_short_curves() -> None:
    steps = np.arange(10_000.0)
    values = np.sin(steps)
    values[7321], values[100:400] = 1798.0, np.nan
    x, y = thin(steps, values, POINTS)
    assert len(x) <= POINTS
    assert (np.diff(x) > 0).all()
    assert y[x == 7321] == [1798.0]
    assert np.isnan(y).any()
    assert thin(steps[:POINTS], values[:POINTS], POINTS)[0].tolist() == steps[:POINTS].tolist()


def test_a_calibrated_threshold_is_drawn_once_it_is_known(tmp_path: Path) -> None:
    config = {
        **CONFIG,
        "controls": [{"name": "gac", "c_low": 0.15, "calibrate": {"steps": 4, "quantile": 0.9}}],
    }
    run = sampled_run(tmp_path, 3, config)
    assert read_run(run).gac == {
        "name": "gac",
        "c_low": None,
        "calibrate": {"steps": 4, "quantile": 0.9},
    }
    legend = drawn_in(page(run))["Cosine of consecutive gradients"]["legend"]
    assert not [name for name, *_ in legend if name.startswith("c_low")]
    log = MetricsLog(run, tensorboard=False, first_step=4)
    log.log(4, {"gac/cosine": 0.4, "gac/regime": 1, "gac/c_low": 0.31})
    log.close()
    gac = read_run(run).gac
    assert gac is not None
    assert gac["c_low"] == 0.31
    cosine = drawn_in(page(run))["Cosine of consecutive gradients"]
    assert ["c_low 0.31", "amber", "dotted"] in cosine["legend"]
    assert [0.31, "amber"] in cosine["levels"]


def test_every_part_of_the_reward_has_a_curve(tmp_path: Path) -> None:
    run = sampled_run(tmp_path, 2)
    assert "Parts of the reward" not in drawn_in(page(run))
    log = MetricsLog(run, tensorboard=False, first_step=3)
    log.log(3, {"reward/part/right": 0.25, "reward/part/short": -1.0})
    log.close()
    curves = drawn_in(page(run))["Parts of the reward"]["curves"]
    assert [(curve["name"], curve["y"][-1]) for curve in curves] == [("right", 0.25), ("short", -1)]


def test_ticks_have_the_fewest_digits_that_distinguish_them() -> None:
    assert list(map(tick, [0.0, 0.25, 12_000])) == ["0", "0.25", "12,000"]
    assert list(map(tick, [0.999990, 0.999995, 1.0])) == ["0.99999", "0.999995", "1"]
    assert list(map(tick, [2e-6, 2.01e-6])) == ["2e-6", "2.01e-6"]
    assert list(map(tick, [2e10, -3e-12])) == ["2e10", "-3e-12"]


def test_panels_of_the_picture_do_not_overlap_its_title_or_each_other(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    boxes: list[Bbox] = []
    monkeypatch.setattr(report, "draw", lambda _, axes: boxes.append(axes.get_position()))
    write_report(fleet_run(tmp_path / "fleet", 3))
    assert max(box.y1 for box in boxes) < 0.97
    assert min(box.y0 for box in boxes) > 0
    assert not [True for one, other in combinations(boxes, 2) if one.overlaps(other)]


def test_text_of_a_run_is_escaped(tmp_path: Path) -> None:
    run = sampled_run(tmp_path / "<b>demo @TABLES@", 2)
    text = page(run)
    assert "/models/&lt;tiny&gt;" in text
    assert "&lt;b&gt;demo @TABLES@" in text
    other = sampled_run(tmp_path / "<script><!--", 13)
    config = {"observe": {"beside": str(other)}}
    text = page_of(read_run(sampled_run(tmp_path / "b", 2, config), alone=False)).as_html()
    assert "<script><!--" not in text
    assert "<script><!--" in {one["name"] for one in drawn_in(text)["Reward"]["curves"]}


def test_only_the_pages_own_script_may_run(tmp_path: Path) -> None:
    text = page(sampled_run(tmp_path, 2))
    script = text.rpartition("<script>")[2].partition("</script>")[0]
    digest = base64.b64encode(hashlib.sha256(script.encode()).digest()).decode()
    policy = re.search(r'Security-Policy" content="([^"]*)"', text)
    assert policy is not None
    rules = dict(rule.split(" ", 1) for rule in policy[1].split("; "))
    assert rules["default-src"] == rules["connect-src"] == "'none'"
    assert rules["script-src"] == f"'sha256-{digest}'"


@pytest.mark.filterwarnings("error", "ignore::ResourceWarning")
@pytest.mark.parametrize("steps", [1, 40])
def test_a_supervised_run_reports_its_loss_and_no_reward(tmp_path: Path, steps: int) -> None:
    html_path, png_path = write_report(supervised_run(tmp_path / "warm", steps))
    text = html_path.read_text()
    drawn = drawn_in(text)
    assert next(iter(drawn)) == "Loss"
    for absent in ("Reward", "Lag of", "Effective sample size", "lag of a token", "held-out"):
        assert absent not in text_of(text)
        assert not [title for title in drawn if title.startswith(absent)]
    assert png_size(png_path)[1] < 1400


def test_the_held_out_loss_is_drawn_with_the_training_loss_and_may_improve(tmp_path: Path) -> None:
    run_dir = supervised_run(tmp_path / "warm", 20)
    log = EvalLog(run_dir, ())
    for version, loss in ((0, 3.0), (10, 1.0), (20, 1.5)):
        log.append({"version": version, "loss": loss, "tokens": 9})
    status = Status(phase="finished", step=20, steps=20, time=0.0, before=3.0, after=1.5)
    write_status(run_dir, replace(status, measure="loss"))
    text = page(run_dir)
    curves = {curve["name"]: curve for curve in drawn_in(text)["Loss"]["curves"]}
    assert list(curves) == ["trained on", "held out"]
    assert (curves["held out"]["x"], curves["held out"]["y"]) == ([0, 10, 20], [3.0, 1.0, 1.5])
    assert '<span class="better">-1.500</span>' in text
    assert "held-out loss, before and after" in text
    assert "reward" not in text_of(text)


def test_a_run_without_config_status_or_control_has_a_report(tmp_path: Path) -> None:
    run_dir = sampled_run(tmp_path / "demo", 3, config={"controls": []})
    (run_dir / "config.yaml").unlink()
    (run_dir / "status.json").unlink()
    assert "held-out" not in text_of(page(run_dir))


def test_the_run_in_observe_beside_is_drawn_in_the_compared_panels(tmp_path: Path) -> None:
    other = sampled_run(tmp_path / "without_control", 30)
    config = {**CONFIG, "observe": {"beside": str(other)}}
    run_dir = sampled_run(tmp_path / "demo", 40, config=config)

    def drawn() -> dict[str, list[float]]:
        panels = panels_of(read_run(run_dir, alone=False))
        return {
            panel.title: curve.x.tolist()
            for panel in panels
            for curve in panel.curves
            if curve.name == "without control"
        }

    every = [float(step) for step in range(1, 31)]
    titles = ("Reward", "Effective sample size", "Cosine of consecutive gradients")
    assert drawn() == dict(zip(titles, (every, every, every[1:]), strict=True))
    whole = page_of(read_run(run_dir, alone=False)).as_html()
    assert "without control" in {one["name"] for one in drawn_in(whole)["Reward"]["curves"]}
    (other / "metrics.jsonl").unlink()
    assert drawn() == {}


def test_the_headline_of_an_unfinished_run_has_its_last_step(tmp_path: Path) -> None:
    run_dir = sampled_run(tmp_path / "demo", 3)
    write_status(run_dir, Status(phase="training", step=3, steps=80, time=0.0, before=0.31))
    assert read_run(run_dir).headline.endswith("training at step 3 of 80")


def test_a_run_without_steps_has_no_report(tmp_path: Path) -> None:
    with pytest.raises(ReportError, match="is not a directory"):
        write_report(tmp_path / "missing")
    with pytest.raises(ReportError, match="no run was started in it"):
        write_report(tmp_path)
    write_status(tmp_path, Status(phase="starting", step=0, steps=9, time=0.0))
    with pytest.raises(ReportError, match="its last phase was `starting`"):
        write_report(tmp_path)


def test_smoothing_keeps_constants_ignores_gaps_and_skips_short_columns() -> None:
    constant = np.full(50, 0.4)
    constant[[0, 7, 49]] = np.nan, np.inf, np.nan
    trend = smooth(constant)
    assert trend is not None
    np.testing.assert_allclose(trend, 0.4)
    assert smooth(np.arange(5.0)) is None
    noise = np.random.default_rng(0).normal(size=400)
    assert np.std(smooth(noise)) < 0.35 * np.std(noise)


def test_durations_are_formatted_as_a_clock() -> None:
    assert [span(seconds) for seconds in (0.4, 7, 751, 11109)] == [
        "0:00",
        "0:07",
        "12:31",
        "3:05:09",
    ]

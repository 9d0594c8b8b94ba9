"""Tests of the Prometheus endpoint: it serves the newest line and no metrics of other libraries."""

from __future__ import annotations

import math
import re
import socket
import urllib.error
import urllib.request
from pathlib import Path

import prometheus_client
import pytest
from prometheus_client.parser import text_string_to_metric_families

from megatron_async_rl.config.problem import UserError
from megatron_async_rl.metrics.catalogue import METRICS
from megatron_async_rl.metrics.log import MetricsLog
from megatron_async_rl.metrics.sinks import gauge_name

Scraped = dict[tuple[str, str], float]
"""(name of the metric, value of its label) -> value."""


def scrape(run_dir: Path) -> tuple[Scraped, str]:
    port = (run_dir / "prometheus.txt").read_text().strip().rpartition(":")[2]
    with urllib.request.urlopen(f"http://127.0.0.1:{port}", timeout=600) as answer:
        text = answer.read().decode()
    samples = [
        sample for family in text_string_to_metric_families(text) for sample in family.samples
    ]
    return {
        (sample.name, next(iter(sample.labels.values()), "")): sample.value for sample in samples
    }, text


def test_a_scrape_has_exactly_the_numbers_of_the_newest_line(tmp_path: Path) -> None:
    prometheus_client.Gauge("of_another_library", "In the process's registry.")
    log = MetricsLog(tmp_path, tensorboard=False, first_step=1, prometheus_port=0)
    assert scrape(tmp_path)[0] == {}
    log.log(1, {"gac/cosine": 0.5, "reward/mean": 0.25})
    lists = {
        "engine/busy_shares": [0.5, 0.75],
        "lag/histogram": [3, 4],
        "trained/length_histogram": [0, 2, 1],
    }
    log.log(2, {"reward/mean": 0.75, "policy/loss": math.inf, **lists})
    scraped, text = scrape(tmp_path)
    assert scraped == {
        ("mar_step", ""): 2.0,
        ("mar_reward_mean", ""): 0.75,
        ("mar_policy_loss", ""): math.inf,
        ("mar_engine_busy_shares", "0"): 0.5,
        ("mar_engine_busy_shares", "1"): 0.75,
        ("mar_lag_histogram", "0"): 3.0,
        ("mar_lag_histogram", "1"): 4.0,
        ("mar_trained_length_histogram", "1"): 0.0,
        ("mar_trained_length_histogram", "2"): 2.0,
        ("mar_trained_length_histogram", "4"): 1.0,
    }
    assert "# HELP mar_reward_mean Mean reward of a sample. Unit: reward." in text
    assert 'mar_engine_busy_shares{engine="0"}' in text
    assert 'mar_lag_histogram{bin="0"}' in text
    log.close()


def test_an_evaluation_is_served_at_once_and_until_the_next_one(tmp_path: Path) -> None:
    log = MetricsLog(tmp_path, tensorboard=False, first_step=1, prometheus_port=0)
    log.evaluated(0, {"eval/mean": 0.25, "eval/version": 0, "eval/pass@4": 0.5})
    first = {
        ("mar_eval_mean", ""): 0.25,
        ("mar_eval_version", ""): 0.0,
        ("mar_eval_pass_4", ""): 0.5,
    }
    assert scrape(tmp_path)[0] == first
    for step in (1, 2):
        log.log(step, {})
        assert scrape(tmp_path)[0] == first | {("mar_step", ""): step}
    log.evaluated(2, {"eval/mean": 0.75, "eval/version": 2})
    assert scrape(tmp_path)[0] == {
        ("mar_eval_mean", ""): 0.75,
        ("mar_eval_version", ""): 2.0,
        ("mar_step", ""): 2.0,
    }
    log.close()


def test_totals_are_counters_and_all_other_metrics_are_gauges(tmp_path: Path) -> None:
    log = MetricsLog(tmp_path, tensorboard=False, first_step=1, prometheus_port=0)
    values = {
        name: [1] if "count" in key.kind or key.kind == "per engine" else 1
        for name, key in METRICS.items()
        if "@" not in name
    }
    log.log(1, values)
    scraped, text = scrape(tmp_path)
    counters = {name for name in values if f"# TYPE {gauge_name(name)}_total counter" in text}
    assert counters == {name for name, key in METRICS.items() if key.kind == "total"}
    assert {"flow/consumed", "gac/skips", "engine/restarts"} <= counters
    assert scraped[("mar_flow_consumed_total", "")] == 1.0
    assert text.count(" gauge\n") == 1 + len(values) - len(counters), "mar_step is a gauge, too"
    log.close()


def test_a_closed_log_stops_the_server_and_removes_its_address(tmp_path: Path) -> None:
    log = MetricsLog(tmp_path, tensorboard=False, first_step=1, prometheus_port=0)
    port = int((tmp_path / "prometheus.txt").read_text().split(":")[2].partition("/")[0])
    log.close()
    assert not (tmp_path / "prometheus.txt").exists()
    with pytest.raises(urllib.error.URLError):
        urllib.request.urlopen(f"http://127.0.0.1:{port}", timeout=600)


def test_the_error_for_a_port_in_use_names_the_config_key(tmp_path: Path) -> None:
    with socket.create_server(("0.0.0.0", 0)) as taken:
        port = taken.getsockname()[1]
        with pytest.raises(
            UserError,
            match=rf"observe\.prometheus_port\n  cannot listen on port {port}: Address already in",
        ):
            MetricsLog(tmp_path, tensorboard=False, first_step=1, prometheus_port=port)


def test_names_of_parts_that_differ_have_gauges_that_differ() -> None:
    names = ("数学", "语文", "a_b")
    gauges = {gauge_name(f"reward/part/{name}") for name in names}
    assert len(gauges) == len(names)
    assert all(re.fullmatch("[a-zA-Z_][a-zA-Z0-9_]*", gauge) for gauge in gauges)
    assert gauge_name("eval/pass@4") == "mar_eval_pass_4"

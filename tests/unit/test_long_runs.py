"""Tests of runs with hundreds of thousands of steps: a resume reads only the ends of files, and a
report uses bounded memory."""

from __future__ import annotations

import json
import subprocess
import sys
import threading
from pathlib import Path

import numpy as np
import pytest

from megatron_async_rl.config.schema import SamplesConfig
from megatron_async_rl.flow import sample_log
from megatron_async_rl.flow.sample_log import SampleLogWriter
from megatron_async_rl.report import metric_rows
from megatron_async_rl.report.anomalies import KEPT, Anomaly, AnomalyList
from megatron_async_rl.report.metric_rows import MetricRows
from megatron_async_rl.report.run_data import summarise_run
from tests.logged_samples import row, sample
from tests.thorough import examples

LINES = examples(200_000, 60_000)
SPIKE_AT = LINES * 3 // 5
MIB = 2**20

PROGRAM = """
import io, json, resource, sys
from pathlib import Path
from rich.console import Console
from megatron_async_rl.metrics.log import MetricsLog, cut_unreadable
from megatron_async_rl.report.progress import Progress
from megatron_async_rl.report.page import page_of
from megatron_async_rl.report.run_data import read_run

run_dir, lines = Path(sys.argv[1]), int(sys.argv[2])
def read_bytes():
    about = dict(line.split(": ") for line in Path("/proc/self/io").read_text().splitlines())
    return int(about["rchar"])
def peak():
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024

console, before, read = Console(file=io.StringIO()), peak(), read_bytes()
cut_unreadable(run_dir)
Progress(run_dir, lines, console).update()
MetricsLog(run_dir, tensorboard=False, first_step=lines - 99).close()
found = {"resume_read": read_bytes() - read, "resume_peak": peak() - before}

before = peak()
run = read_run(run_dir)
page = page_of(run)
found |= {"report_peak": peak() - before, "page": len(page.as_html()), "steps": run.summary.steps}
found |= {"trained": run.summary.trained, "anomalies": dict(run.anomaly_counts)}
found["kept"] = len(run.rows)
norm = next(panel for panel in page.panels if panel.title.startswith("Gradient norm"))
found["spike"] = [float(norm.curves[0].x[norm.curves[0].y.argmax()]), norm.curves[0].y.max()]
print(json.dumps(found))
"""


def test_a_long_run_is_resumed_and_reported_in_bounded_memory(tmp_path: Path) -> None:
    with open(tmp_path / "metrics.jsonl", "w", encoding="utf-8") as file:
        for step in range(1, LINES + 1):
            norm = 1e4 if step == SPIKE_AT else 1.0 + step % 7
            file.write(
                f'{{"step": {step}, "version": {step}, "time": {1.7e9 + 2 * step},'
                f' "policy/grad_norm": {norm}, "policy/loss": {1 / step}, "reward/mean":'
                f' {step / LINES}, "ratio/ess_ratio": 0.5, "tokens/trained": 3, "tokens/generated":'
                f' 3, "time/step_s": 2.0, "reward/errors": 1, "lag/histogram": [1, 2],'
                f' "engine/versions": [{step}, {step}]}}\n'
            )
        file.write('{"step": 999999, "rew')
    size = (tmp_path / "metrics.jsonl").stat().st_size

    command = [sys.executable, "-c", PROGRAM, str(tmp_path), str(LINES)]
    found = json.loads(subprocess.run(command, check=True, capture_output=True, text=True).stdout)
    assert found["resume_read"] < 12 * MIB < 0.7 * size
    assert found["resume_peak"] < 64 * MIB
    # As Python objects, a line takes 2 KiB.
    assert found["report_peak"] < 80 * MIB < 1500 * LINES
    assert found["page"] < MIB
    assert found["steps"] == LINES - 100
    assert found["trained"] == 3 * (LINES - 100)
    assert found["anomalies"]["reward"] == LINES - 100
    assert found["kept"] <= metric_rows.KEPT + 1
    assert found["spike"] == [SPIKE_AT, 1e4]
    cut = (tmp_path / "metrics.cut.jsonl").read_text().splitlines()
    assert len(cut) == 101


def test_thinned_metrics_keep_totals_and_spikes(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(metric_rows, "KEPT", 64)
    monkeypatch.setattr(metric_rows, "BUCKETS", 32)
    chance = np.random.default_rng(0)
    rows = [
        {
            "step": step,
            "version": step,
            "policy/loss": float(chance.normal()),
            "time/step_s": 1.0 + step % 3,
            "tokens/trained": step,
            "lag/max": step % 5,
            "lag/histogram": [1] * (1 + step % 4),
            "flow/dropped_late": step % 400,
            **({"dropped/responses": 2, "dropped/length_mean": float(step)} if step % 2 else {}),
            **({"policy/entropy": float("nan")} if step > 900 else {}),
        }
        for step in range(1, 1001)
    ]
    rows[777]["policy/loss"] = -99.0
    whole, thinned = MetricRows.__new__(MetricRows), MetricRows()
    for start in range(0, 1000, 37):
        thinned.add(rows[start : start + 37])
    monkeypatch.setattr(metric_rows, "KEPT", 10**6)
    whole = MetricRows(rows)
    assert (whole.thinned, thinned.thinned) == (False, True)
    assert len(thinned) <= 66
    assert thinned[-1] is rows[-1]
    assert summarise_run(whole, None) == summarise_run(thinned, None)
    for key in ("policy/loss", "time/step_s", "tokens/trained"):
        assert thinned.total(key) == pytest.approx(whole.total(key))
        assert thinned.mean(key) == pytest.approx(whole.mean(key))
        x, y, trend = thinned.curve(key)
        every = dict(zip(*whole.column(key), strict=True))
        assert len(x) <= 2 * 32
        assert all(every[at] == value for at, value in zip(x, y, strict=True)), "not logged points"
        assert (y.min(), y.max()) == (min(every.values()), max(every.values()))
        assert trend is not None
        assert len(trend) == len(x)
    assert 778.0 in thinned.column("policy/loss")[0]
    assert thinned.summed("lag/histogram") == whole.summed("lag/histogram")
    assert (
        thinned.counted("flow/dropped_late") == whole.counted("flow/dropped_late") == 399 * 2 + 200
    )
    weighted = [one.mean("dropped/length_mean", weighted=True) for one in (whole, thinned)]
    assert weighted[0] == weighted[1] == pytest.approx(500.0)
    steps, sums = thinned.cumulative("tokens/trained")
    assert sums[-1] == 1000 * 1001 / 2
    assert np.interp(500, steps, sums) == pytest.approx(500 * 501 / 2, rel=0.02)
    assert np.isnan(thinned.column("policy/entropy")[1]).all()
    assert len(thinned.column("policy/entropy")[1]) > 0


def test_anomalies_of_a_kind_are_counted_and_the_first_are_kept() -> None:
    anomalies = AnomalyList()
    for step in range(3 * KEPT):
        anomalies.add([Anomaly(step=step, kind="reward", detail="1 sample")])
    anomalies.add([Anomaly(step=9, kind="engine", detail="1 restart")])
    assert anomalies.counts == {"reward": 3 * KEPT, "engine": 1}
    assert len(anomalies.kept()) == KEPT + 1


def test_outcomes_are_trimmed_outside_the_controllers_loop(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """`begin` returns before the first outcome is read."""
    log = SampleLogWriter(tmp_path, SamplesConfig())
    log.begin(0)
    log.trained([0], [row(sample(0, 0))], 1)
    log.close()
    has_returned, readers = threading.Event(), list[threading.Thread]()
    read = sample_log.read_batches

    def waits(*arguments: object) -> object:
        readers.append(threading.current_thread())
        assert has_returned.wait(600)
        return read(*arguments)  # type: ignore[arg-type]

    monkeypatch.setattr(sample_log, "read_batches", waits)
    log = SampleLogWriter(tmp_path, SamplesConfig())
    log.begin(1)
    has_returned.set()
    log.close()
    assert [one.name for one in readers] == ["sample log"]

"""Tests of `mar dashboard`: the server's responses, and the page in a real browser."""

from __future__ import annotations

import errno
import json
import os
import re
import signal
import socket
import subprocess
import sys
import threading
import urllib.error
import urllib.request
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import replace
from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest
from typer.testing import CliRunner

from megatron_async_rl.cli import app
from megatron_async_rl.config.problem import UserError
from megatron_async_rl.metrics.json_lines import GrowingFile
from megatron_async_rl.metrics.log import MetricsLog
from megatron_async_rl.metrics.timeline import Span
from megatron_async_rl.report import sample_browser
from megatron_async_rl.report.dashboard import Dashboard, _DashboardServer, _unavailable
from megatron_async_rl.report.sample_browser import SampleBrowser
from megatron_async_rl.report.timeline_panel import merge_short
from megatron_async_rl.samples.types import Sample
from tests.browser import BROWSER, DRIVER, MISSING, browser
from tests.json_lines import read_objects, write_lines
from tests.logged_samples import GROUP, STEPS, logged_run
from tests.unit.test_recorded import STARTS, remove, run_of_several_segments
from tests.unit.test_replay_curves import replayed
from tests.unit.test_report import CONFIG, fleet_run, sampled_run

PREDICTED = {
    "async_ratio": [0, 0.5, 2],
    "tokens_per_s": [100, 150, 180],
    "engine_busy": [0.4, 0.6, 0.7],
    "trainer_busy": [0.6, 0.9, 1],
    "lag_mean": [0, 0.5, 2],
}
HOSTILE = "</pre><script>document.title = 'taken'</script><img src=x onerror=alert(1)>"


def state_of(dashboard: Dashboard, view: str = "0") -> dict[str, Any]:
    state = dashboard.state(view, "")
    assert state is not None
    return json.loads(state)


def add_step(run: Path, step: int) -> None:
    log = MetricsLog(run, tensorboard=False, first_step=step)
    log.log(step, {"reward/mean": 0.5, "ratio/ess_ratio": 0.9, "time/step_s": 1.0})
    log.close()


@contextmanager
def served(*runs: Path, host: str = "localhost", allowed: Sequence[str] = ()) -> Iterator[str]:
    server = _DashboardServer(host, 0, Dashboard(runs), allowed)
    threading.Thread(target=server.serve_forever, args=(0.05,), daemon=True).start()
    try:
        yield f"http://localhost:{server.server_port}/"
    finally:
        server.shutdown()
        server.server_close()


def get(url: str, **headers: str) -> tuple[int, bytes]:
    try:
        with urllib.request.urlopen(urllib.request.Request(url, headers=headers)) as response:
            return response.status, response.read()
    except urllib.error.HTTPError as error:
        return error.code, error.read()


def test_a_view_is_sent_again_only_after_its_run_has_changed(tmp_path: Path) -> None:
    run = sampled_run(tmp_path / "run", 3)
    dashboard = Dashboard([run])
    first = state_of(dashboard)
    assert dashboard.state("0", first["tag"]) is None
    add_step(run, 4)
    second = state_of(dashboard)
    assert second["tag"] != first["tag"]
    assert [len(one["panels"][0]["curves"][0]["y"]) for one in (first, second)] == [3, 4]


def test_a_line_is_read_once_and_only_when_it_is_complete(tmp_path: Path) -> None:
    path = tmp_path / "lines"
    file = GrowingFile(path)
    assert file.new_lines() == ([], False)
    path.write_bytes(b"one\ntw")
    assert file.new_lines() == ([b"one"], False)
    with path.open("ab") as more:
        more.write(b"o\n")
    assert file.new_lines() == ([b"two"], False)
    assert file.new_lines() == ([], False)
    (tmp_path / "other").write_bytes(b"new\n")
    os.replace(tmp_path / "other", path)
    assert file.new_lines() == ([b"new"], True)
    path.write_bytes(b"x" * 50 + b"\nlast\n")
    assert GrowingFile(path, newest=10).new_lines() == ([b"last"], False)


def test_a_run_is_shown_before_and_after_its_first_step(tmp_path: Path) -> None:
    run = tmp_path / "run"
    run.mkdir()
    dashboard = Dashboard([run])
    assert "no run was started in it" in state_of(dashboard)["parts"]["WRONG"]
    add_step(run, 1)
    with (run / "metrics.jsonl").open("a") as file:
        file.write('{"step": 2, "rew')
    state = state_of(dashboard)
    assert state["panels"][0]["title"] == "Reward"
    assert state["panels"][0]["curves"][0]["y"] == [0.5]
    # The status of a killed run stays `training`.
    assert re.search(r"newest step \d{4}-\d\d-\d\d \d\d:\d\d:\d\d", state["parts"]["WHERE"])


def test_the_page_shows_a_damaged_line_until_it_is_repaired(tmp_path: Path) -> None:
    run = sampled_run(tmp_path / "run", 2)
    dashboard = Dashboard([run])
    state_of(dashboard)
    path = run / "metrics.jsonl"
    whole = path.read_text()
    for damage in ("hello\n", "hello\nagain\n"):
        path.write_text(whole + damage)
        assert f"{path}:3" in state_of(dashboard)["parts"]["ERROR"]
    path.write_text(whole)
    state = state_of(dashboard)
    assert state["parts"]["ERROR"] == ""
    assert len(state["panels"][0]["curves"][0]["y"]) == 2


def test_several_runs_share_panels_and_each_has_a_page(tmp_path: Path) -> None:
    runs = [sampled_run(tmp_path / name, 3) for name in ("a", "b")]
    begun, damaged = tmp_path / "begun", tmp_path / "damaged"
    begun.mkdir()
    damaged.mkdir()
    (damaged / "metrics.jsonl").write_text("hello\n")
    dashboard = Dashboard([*runs, begun, damaged])
    together = state_of(dashboard, "all")
    assert [curve["name"] for curve in together["panels"][0]["curves"]] == ["a", "b"]
    assert f"begun: {begun} has no finished step" in together["parts"]["WRONG"]
    assert f"damaged: {damaged}/metrics.jsonl:1 is not a line" in together["parts"]["WRONG"]
    links = re.findall(r'href="(#\w+)"', together["parts"]["RUNS"])
    assert links == ["#all", "#0", "#1", "#2", "#3"]
    assert state_of(dashboard, "1")["parts"]["TITLE"] == "b"


def test_a_run_with_a_damaged_status_is_shown_as_damaged(tmp_path: Path) -> None:
    begun = tmp_path / "begun"
    begun.mkdir()
    (begun / "status.json").write_text("{")
    state = state_of(Dashboard([begun]))
    assert f"{begun}/status.json" in state["parts"]["ERROR"]
    assert "No steps yet" not in json.dumps(state["parts"])


def test_runs_without_a_compared_metric_share_no_panel(tmp_path: Path) -> None:
    runs = [tmp_path / name for name in ("a", "b")]
    for run in runs:
        log = MetricsLog(run, tensorboard=False, first_step=1)
        log.log(1, {"time/step_s": 1.0})
        log.close()
    state = state_of(Dashboard(runs), "all")
    assert "the runs have logged none of the compared metrics" in json.dumps(state["parts"])
    assert state["panels"] == []


def test_only_the_runs_are_served_and_only_under_names_of_this_host(tmp_path: Path) -> None:
    run = sampled_run(tmp_path / "run", 2)
    (tmp_path / "secret").write_text("secret")
    with served(run) as url:
        assert get(url)[0] == 200
        for path in (
            "../secret",
            "%2e%2e/secret",
            "state/../secret",
            "state/..%2f..%2fsecret",
            "state/1",
            "state/-1",
            "state/all",
            "state/0/config.yaml",
            "run/config.yaml",
            "samples/1",
            "/etc/passwd",
        ):
            status, content = get(url + path)
            assert (status, b"secret" in content) == (404, False), path
        assert get(url + "state/0", Host="evil.example:80")[0] == 403
        assert get(url + "state/0", Host="127.0.0.1")[0] == 200


@pytest.mark.parametrize("host", ["localhost", "0.0.0.0"])
def test_a_request_for_another_host_name_is_refused_and_the_error_names_the_option(
    tmp_path: Path, host: str
) -> None:
    # A page of another site may resolve its own name to this machine (DNS rebinding).
    run = sampled_run(tmp_path / "run", 1)
    with served(run, host=host, allowed=["Runs.Example."]) as url:
        for name in ("evil.example", "evil.example:8470", "[::1", "127.0.0.1.evil.example"):
            status, content = get(url, Host=name)
            assert status == 403, name
        assert b"does not accept the host name '127.0.0.1.evil.example'" in content
        assert b"--allow-host 127.0.0.1.evil.example" in content
        names = [
            "192.0.2.7:80",
            "[2001:db8::7]:80",
            "LOCALHOST",
            "runs.example:443",
            "runs.example.",
        ]
        own = socket.gethostname()
        for name in [*names, *([own, f"{own}:8470"] if host == "0.0.0.0" else [])]:
            assert get(url, Host=name)[0] == 200, name


def test_a_request_without_a_host_is_refused(tmp_path: Path) -> None:
    with served(sampled_run(tmp_path / "run", 1)) as url:
        port = int(url.rsplit(":", 1)[1].strip("/"))
        with socket.create_connection(("127.0.0.1", port)) as connection:
            connection.sendall(b"GET / HTTP/1.0\r\n\r\n")
            assert connection.recv(100).split()[1] == b"403"


# Samples


def shown(browser: SampleBrowser, **query: str) -> list[str]:
    return re.findall(r"sample ([\d-]+) ·", browser.answer(query)["html"])


def test_samples_are_browsed_by_step_and_reward(tmp_path: Path) -> None:
    log = SampleBrowser(logged_run(tmp_path))
    assert shown(log)[:2] == ["4-3", "4-2"]
    assert shown(log, step="3", order="best") == ["2-3", "2-2", "2-1", "2-0"]
    assert shown(log, order="worst")[:3] == ["0-0", "0-1", "0-2"]
    assert shown(log, minimum="1.1", maximum="2") == ["2-0", "1-3", "1-2", "1-1"]
    assert shown(log, kind="evaluated", step="0") == ["-1-1", "-1-0"]
    assert shown(log, kind="all", order="best")[0] == "5-3", "`all` includes waiting samples"
    drawn = shown(log, order="random")
    assert sorted(drawn) == sorted(shown(log))
    assert drawn != shown(log)
    assert "which has steps 1 to 5" in log.answer({"step": "9"})["message"]
    for query in ({"order": "up"}, {"path": "/etc/passwd"}, {"step": "-1"}, {"minimum": "nan"}):
        with pytest.raises(UserError):
            log.answer(query)


def test_a_sample_whose_reward_failed_is_shown_with_its_error(tmp_path: Path) -> None:
    def fail(one: Sample) -> Sample:
        wrong = one.id == "4-3"
        return replace(one, reward_error="ValueError: <red>") if wrong else one

    found = SampleBrowser(logged_run(tmp_path, fail)).answer({})["html"]
    assert found.count("ValueError: &lt;red&gt;") == 1
    assert found.count('class="error"') == 1


def test_a_long_response_comes_in_parts(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sample_browser, "AT_ONCE", 8)
    log = SampleBrowser(logged_run(tmp_path))
    parts = [shown(log, order="best", start=str(start)) for start in (0, 8, 16)]
    assert list(map(len, parts)) == [8, 8, 4]
    assert len({one for part in parts for one in part}) == GROUP * STEPS
    assert [log.answer({"start": start})["more"] for start in ("8", "16")] == [True, False]


def test_a_file_of_the_log_is_read_again_only_if_it_has_grown(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    log = SampleBrowser(logged_run(tmp_path))
    before = shown(log)
    reads: list[Path] = []
    read = sample_browser.read_batches
    monkeypatch.setattr(
        sample_browser, "read_batches", lambda path, *rest: reads.append(path) or read(path, *rest)
    )
    assert shown(log) == before
    assert reads == []


def test_samples_of_a_segment_that_the_run_removed_are_not_kept(tmp_path: Path) -> None:
    run = run_of_several_segments(tmp_path)
    browser = SampleBrowser(run)
    whole = shown(browser)
    assert len(browser._files) == 2 * STARTS
    remove(run, 0)
    assert set(shown(browser)) < set(whole)
    assert len(browser._files) == 2 * (STARTS - 1)


def test_short_spans_of_a_process_are_merged() -> None:
    states = ("busy", "idle")
    spans = [
        Span(track="e", state=states[i % 5 == 4], start=i / 100, end=(i + 1) / 100)
        for i in range(1000)
    ]
    spans.append(Span(track="e", state="loading", start=10.0, end=12.0))
    pieces = list(merge_short(spans, 1.0))
    assert [state for state, *_ in pieces] == ["busy"] * (len(pieces) - 1) + ["loading"]
    assert len(pieces) <= 12
    assert (pieces[0][1], pieces[-1][1:]) == (0.0, (10.0, 12.0))


# The command


def test_a_port_in_use_and_invalid_arguments_are_refused_with_a_fix(tmp_path: Path) -> None:
    run = sampled_run(tmp_path / "run", 1)
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = str(taken.getsockname()[1])
        result = CliRunner().invoke(app, ["dashboard", str(run), "--port", port])
    assert result.exit_code == 2
    assert f"port {port} is already in use on localhost\n  fix: name another port" in result.output
    for arguments, what in (
        ([tmp_path / "none"], "none is not a directory"),
        ([tmp_path], "is not a run; it contains 1"),
        ([run, run], "named twice"),
        ([run, "--host", "192.0.2.1", "--port", "0"], "cannot listen on 192.0.2.1"),
        (
            [run, "--host", "192.0.2.1", "--allow-host", "http://a/"],
            "'http://a/' is not a host name",
        ),
    ):
        result = CliRunner().invoke(app, ["dashboard", *map(str, arguments)])
        assert (result.exit_code, what in result.output) == (2, True), result.output


def test_a_port_that_needs_permission_is_refused_with_a_fix() -> None:
    error = _unavailable("localhost", 80, PermissionError(errno.EACCES, "Permission denied"))
    (problem,) = error.problems
    assert (problem.key, problem.fix) == ("--port", "name a port above 1023")
    assert problem.what == "this user has no permission to listen on port 80"


def test_ctrl_c_stops_the_dashboard_with_exit_code_0(tmp_path: Path) -> None:
    run = sampled_run(tmp_path / "run", 1)
    command = [sys.executable, "-m", "megatron_async_rl", "dashboard", str(run), "--port", "0"]
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as process:
        assert process.stdout is not None
        url = process.stdout.readline().split()[0]
        assert get(url)[0] == 200
        process.send_signal(signal.SIGINT)
        assert process.wait(timeout=120) == 0


# In a browser


@pytest.mark.skipif(DRIVER is None or BROWSER is None, reason=MISSING)
def test_the_page_works_in_a_browser_on_a_phone_and_with_a_dark_theme(tmp_path: Path) -> None:
    parts = {"parts": {"alignment": {"settings": {"learner": "a long key"}}}}
    config = CONFIG | {"rollout": {"reward": parts}}
    runs = [sampled_run(tmp_path / "plain", 12, config), fleet_run(tmp_path / "fleet", 12)]
    metrics = runs[1] / "metrics.jsonl"
    rows = read_objects(metrics)
    (late,) = (row for row in rows if row["time"] == 1110.0)
    late["time"] = 1119.0
    write_lines(metrics, rows)
    for path in (run / "metrics.jsonl" for run in runs):
        rows = read_objects(path)
        write_lines(path, [row | {"ratio/ess_ratio": 1 - 1e-6 * row["step"]} for row in rows])
    logged_run(runs[1], lambda one: replace(one, text=HOSTILE))
    (runs[1] / "simulation.json").write_text(json.dumps(PREDICTED))
    replayed(runs[1], "1", "policy.optimizer.lr=0.003", different=4)
    with served(*runs) as url, browser(tmp_path) as page:
        page.show_as(width=1200)
        page.open(url)
        page.wait_for("document.querySelectorAll('#panels figure').length > 2")
        assert page.run("return document.title") == "2 runs compared"
        ess = (
            "[...document.querySelectorAll('figure')].find(one => /Effective/.test(one.innerText))"
        )
        ends = f"[...{ess}.querySelectorAll('text[text-anchor=end]')].map(one => one.textContent)"
        ticks = page.run(f"return {ends}")
        assert len(set(ticks)) == len(ticks) > 1, "ticks close to 1 have different labels"
        legend = "[...document.querySelectorAll('#first .legend button')]"
        assert page.run(f"return {legend}.map(one => one.textContent)") == ["plain", "fleet"]
        page.run(f"{legend}[0].click()")
        assert page.run(f"return {legend}[0].getAttribute('aria-pressed')") == "false"

        page.run("location.hash = '#1'")
        page.wait_for("document.querySelector('.sample')")
        assert page.run("return document.title") == "fleet", "the script of a response ran"
        assert HOSTILE in page.run("return document.querySelector('.sample .response').textContent")
        assert (
            page.run("return document.querySelectorAll('.sample img, .sample script').length") == 0
        )
        assert page.run("return document.querySelectorAll('svg path.bars').length") == 4
        top = page.run("return document.querySelector('#first svg').getBoundingClientRect().top")
        assert top < 300, "the reward is not on the first screen"

        assert page.run(f"return {ess}.querySelectorAll('line.off-policy').length") == 1
        assert "replay 1: policy.optimizer.lr=0.003; weights differ from step 4" in page.run(
            f"return {ess}.querySelector('.legend').innerText"
        ).split("\n")
        page.run(f"{ess}.querySelector('svg').focus()")
        for _ in range(8):  # from step 12 to step 5
            page.press("ArrowLeft")
        tip = page.run(f"return {ess}.querySelector('.tip').innerText")
        assert "step 5" in tip
        assert "samples of replay 1 off-policy from here on" in tip

        page.run("document.querySelector('#first svg').focus()")
        page.press("ArrowLeft")
        assert "step 12" in page.run("return document.querySelector('#first .tip').textContent")
        page.press("ArrowLeft")
        assert "step 11" in page.run("return document.querySelector('#first .tip').textContent")

        lag = "[...document.querySelectorAll('figure')].find(one => /Lag over/.test(one.innerText))"
        signs = page.run(f"return [...{lag}.querySelectorAll('.legend i')].map(i => i.className)")
        assert signs == ["line", "diamond"], "the prediction, and this run"
        page.run(f"{lag}.querySelector('svg').focus()")
        tips = {}
        for _ in PREDICTED["async_ratio"]:
            page.press("ArrowLeft")
            at, *rows = page.run(f"return {lag}.querySelector('.tip').innerText").split("\n")
            tips[at] = rows
        assert {at: len(rows) for at, rows in tips.items()} == {
            "async_ratio 2": 1,
            "async_ratio 0.5": 1,
            "async_ratio 0": 2,
        }, "the run's own async_ratio is 0"

        light = page.run("return getComputedStyle(document.body).backgroundColor")
        page.show_as(width=360, dark=True)
        page.wait_for("document.querySelector('#first svg').viewBox.baseVal.width < 360")
        assert page.run("return getComputedStyle(document.body).backgroundColor") != light
        assert page.run("return document.documentElement.scrollWidth") == 360
        ends = page.run(
            "return [...document.querySelectorAll('text.end')].map(one =>"
            " one.getBoundingClientRect())"
        )
        assert ends[-1]["right"] < 360
        assert all(one["right"] < other["left"] for one, other in pairwise(ends))

        add_step(runs[1], 13)
        page.wait_for("document.querySelector('.numbers').textContent.includes('13steps')")

        page.run("location.hash = '#all'")
        page.wait_for("document.title === '2 runs compared' && document.querySelector('td')")
        values = "[...document.querySelectorAll('.compared td:nth-child(2)')]"
        places = page.run(f"return {values}.map(one => one.offsetLeft)")
        assert max(places) < 200, "the values of the settings are not on the first screen"
        assert page.complaints == []

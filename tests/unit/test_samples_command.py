"""Tests of `mar samples` and of the samples in the report, with hostile responses and damaged
files."""

from __future__ import annotations

import io
import json
import shutil
from dataclasses import replace
from pathlib import Path
from typing import Literal

import pytest
import yaml
from rich.console import Console
from typer.testing import CliRunner, Result

from megatron_async_rl.cli import app
from megatron_async_rl.config.schema import SamplesConfig
from megatron_async_rl.flow.sample_log import SampleLogWriter
from megatron_async_rl.launch import launcher
from megatron_async_rl.metrics.log import EvalLog
from megatron_async_rl.report import report as report_module
from megatron_async_rl.report.report import write_report
from megatron_async_rl.report.samples import SampleQuery, choose, print_samples, samples_section
from megatron_async_rl.samples.frames import FOLDER, MARK_FILE, OPEN, path_of
from megatron_async_rl.samples.types import Sample
from tests.cases import looped
from tests.json_lines import read_objects, write_lines
from tests.logged_samples import GROUP, STEPS, logged_run, row, sample
from tests.unit.test_report import sampled_run


def mar(*arguments: object, width: int = 140) -> Result:
    return CliRunner(env={"COLUMNS": str(width)}).invoke(app, ["samples", *map(str, arguments)])


def ids(*arguments: object) -> list[str]:
    result = mar(*arguments, "--json")
    assert result.exit_code == 0, result.output
    return [json.loads(line)["id"] for line in result.stdout.splitlines()]


def test_the_newest_samples_are_shown_by_default(tmp_path: Path) -> None:
    result = mar(logged_run(tmp_path))
    assert result.exit_code == 0
    assert "not trained on yet · reward 5.3 · sample 5-3 · prompt sum-5" in result.stdout
    assert "response: answer 8" in result.stdout
    assert ids(tmp_path) == ["5-3", "5-2", "5-1", "5-0", "4-3"]


def test_the_samples_of_a_step_are_those_that_it_trained_on(tmp_path: Path) -> None:
    result = mar(logged_run(tmp_path), "--step", 4)
    assert result.stdout.count("trained at step 4 ·") == GROUP
    assert "2 tokens, stop · versions 2 to 3 · lag 1 · engine 0" in result.stdout
    assert ids(tmp_path, "--step", 4) == ["3-0", "3-1", "3-2", "3-3"]


def test_best_worst_and_random_select_from_a_step_or_the_whole_log(tmp_path: Path) -> None:
    logged_run(tmp_path)
    assert ids(tmp_path, "--best", 2) == ["5-3", "5-2"]
    assert ids(tmp_path, "--worst", 3) == ["0-0", "0-1", "0-2"]
    assert ids(tmp_path, "--step", 3, "--worst", 1) == ["2-0"]
    drawn = ids(tmp_path, "--random", 6, "--seed", 3)
    assert drawn == ids(tmp_path, "--random", 6, "--seed", 3)
    assert drawn != ids(tmp_path, "--random", 6, "--seed", 4)
    assert len(set(drawn)) == 6
    assert len(ids(tmp_path, "--random", 1000)) == GROUP * (STEPS + 1), "not all samples"


def test_a_failed_reward_is_neither_best_nor_worst_and_is_shown(tmp_path: Path) -> None:
    failed = {"0-0": float("nan"), "0-1": -1.0, "4-3": 99.0}

    def fails(one: Sample) -> Sample:
        if one.id not in failed:
            return one
        return replace(one, reward=failed[one.id], reward_error="no\x1b number")

    logged_run(tmp_path, fails)
    assert ids(tmp_path, "--worst", 1) == ["0-2"]
    assert ids(tmp_path, "--best", 1) == ["5-3"]
    assert len(ids(tmp_path, "--best", 100)) == GROUP * (STEPS + 1) - len(failed)
    shown = mar(tmp_path, "--step", 1).stdout
    assert "reward failed · sample 0-0" in shown
    assert r"reward failed: no\x1b number" in shown
    line = json.loads(mar(tmp_path, "--step", 1, "--json").stdout.splitlines()[0])
    assert (line["reward"], line["reward_error"]) == (None, "no\x1b number")


def test_samples_of_evaluations_are_shown_separately(tmp_path: Path) -> None:
    assert ids(logged_run(tmp_path), "--eval") == ["-1-1", "-1-0"]
    assert ids(tmp_path, "--eval", "--step", 0) == ["-1-0", "-1-1"]
    assert "evaluation of version 0" in mar(tmp_path, "--eval").stdout


def test_json_has_the_whole_sample(tmp_path: Path) -> None:
    logged_run(tmp_path, lambda one: replace(one, text="long " * 1000))
    line = json.loads(mar(tmp_path, "--step", 4, "--json").stdout.splitlines()[0])
    assert line["response"] == "long " * 1000
    assert (line["state"], line["steps"], line["lag"]) == ("trained", [4], 1)
    assert (line["prompt_ids"], line["response_ids"]) == ([5, 6], [7, 8])
    assert line["behavior_logprobs"] == [-0.5, -0.25]
    assert "3,000 more characters (use --json" in mar(tmp_path, "--step", 4).stdout


@pytest.mark.parametrize("width", [30, 200])
def test_a_narrow_terminal_wraps_lines_and_loses_no_text(tmp_path: Path, width: int) -> None:
    logged_run(tmp_path, lambda one: replace(one, text="0123456789" * 20))
    console = Console(file=io.StringIO(), width=width, force_terminal=False)
    print_samples(choose(tmp_path, SampleQuery(step=4, best=1)), console, as_json=False)
    shown = console.file.getvalue()
    assert max(len(line) for line in shown.splitlines()) <= width
    assert "0123456789" * 20 in shown.replace("\n", "")


# Missing runs, steps and samples


@pytest.mark.parametrize(
    ("options", "message"),
    [
        (["--step", "99"], "no sample of step 99\n  fix: name a step in the log: 1 to 5"),
        (["--step", "1", "--eval"], "no sample of version 1\n  fix: name a version in the log: 0"),
        (["--best", "1", "--worst", "1"], "--worst and --best\n  exclude each other"),
    ],
)
def test_a_missing_file_or_step_is_reported_with_its_fix(
    tmp_path: Path, options: list[str], message: str
) -> None:
    result = mar(logged_run(tmp_path), *options)
    assert result.exit_code == 2
    assert message in result.output
    assert len(result.output.splitlines()) == 3


@pytest.mark.parametrize(
    ("config", "message"),
    [
        (None, "is not a run"),
        ({"run": {}, "rollout": None}, "is a supervised run"),
        ({"rollout": {}, "samples": {"keep_mib": 0}}, "samples.keep_mib: 0"),
        ({"rollout": {}}, "has no samples yet"),
    ],
)
def test_a_run_without_samples_reports_the_reason(
    tmp_path: Path, config: dict[str, object] | None, message: str
) -> None:
    if config is not None:
        (tmp_path / "config.yaml").write_text(yaml.safe_dump(config))
    result = mar(tmp_path)
    assert (result.exit_code, len(result.output.splitlines())) == (2, 3)
    assert message in result.output


def test_a_missing_folder_is_reported(tmp_path: Path) -> None:
    result = mar(tmp_path / "none")
    assert result.exit_code == 2
    assert "none is not a directory" in result.output


def test_samples_that_were_removed_from_the_log_are_counted(tmp_path: Path) -> None:
    """The outcomes of a step are in a later segment than some of its samples."""
    log = SampleLogWriter(tmp_path, SamplesConfig())
    log.begin(0)
    old, new = sample(0, 0), sample(0, 1)
    log.finished(row(old))
    log.close()
    log = SampleLogWriter(tmp_path, SamplesConfig())
    log.begin(0)
    log.finished(row(new))
    log.trained([0], [[row(old), row(new)]], 1)
    log.close()
    position = log.position
    log = SampleLogWriter(tmp_path, SamplesConfig())
    log.begin(position)
    log.finished(row(sample(1, 0)))
    log.close()
    for table in ("samples", "outcomes"):
        path_of(tmp_path / FOLDER, table, 0).unlink()  # type: ignore[arg-type]
    shown = mar(tmp_path, "--step", 1).stdout
    assert "sample 0-1" in shown
    assert "1 more are no longer in the log" in shown
    # The samples of the oldest of several segments are deleted first.
    path_of(tmp_path / FOLDER, "samples", 1).unlink()
    assert "no longer has the samples of step 1" in mar(tmp_path, "--step", 1).output


# Untrusted text

HOSTILE = "\x1b[2J\x9b31m</pre><script>alert(1)</script>@TABLES@ @WHERE@ [red]\u202e\r&amp;"


def test_a_response_cannot_control_the_terminal(tmp_path: Path) -> None:
    logged_run(tmp_path, lambda one: replace(one, text=HOSTILE))
    shown = mar(tmp_path).stdout
    assert not {"\x1b", "\x9b", "\u202e", "\r"} & set(shown)
    assert r"\x1b[2J\x9b31m</pre>" in shown
    assert "[red]" in shown


def test_a_response_is_only_text_in_the_report(tmp_path: Path) -> None:
    logged_run(sampled_run(tmp_path, STEPS), lambda one: replace(one, text=HOSTILE))
    page = write_report(tmp_path)[0].read_text()
    assert "<script>alert(1)" not in page
    assert "&lt;/pre&gt;&lt;script&gt;alert(1)&lt;/script&gt;@TABLES@ @WHERE@ [red]" in page


def test_the_report_shows_best_worst_and_random_of_the_last_steps(tmp_path: Path) -> None:
    section = samples_section(logged_run(tmp_path))
    assert "Samples that steps 3 to 5 trained on" in section
    best, rest = section.split("<h3>Worst</h3>")
    worst, drawn = rest.split("<h3>Random</h3>")
    assert [f"sample {one}" in best for one in ("4-3", "4-2", "4-1")] == [True] * 3
    assert [f"sample {one}" in worst for one in ("2-0", "2-1", "2-2")] == [True] * 3
    assert drawn.count('class="sample"') == 3
    assert "5-0" not in section, "a waiting sample was not trained on"
    assert section == samples_section(tmp_path)


def test_long_text_is_folded_and_very_long_text_truncated(tmp_path: Path) -> None:
    logged_run(tmp_path, lambda one: replace(one, text="<" * 15_000))
    section = samples_section(tmp_path)
    assert "<details><summary>15,000 characters</summary>" in section
    assert "... 10,000 more characters" in section
    assert section.count("&lt;") == section.count('class="sample"') * 5_400


def test_a_run_without_samples_has_no_section_of_samples(tmp_path: Path) -> None:
    assert samples_section(tmp_path) == ""


# Damaged runs


def damaged(run_dir: Path) -> Path:
    """Return a run with every file that a report reads, for tests that damage one of them."""
    logged_run(sampled_run(run_dir, STEPS))
    config = {"rollout": {"engines": 1}, "flow": {"async_ratio": 1}, "controls": ["gac"]}
    (run_dir / "config.yaml").write_text(yaml.safe_dump(config))
    EvalLog(run_dir, []).append({"version": 0, "mean_reward": 0.5, "pass_at": {"1": 0.5}})
    return run_dir


@pytest.fixture(autouse=True)
def no_sheet(monkeypatch: pytest.MonkeyPatch) -> None:
    """Skip the picture, which is slow to draw and shows no samples; test_report.py tests it."""
    monkeypatch.setattr(report_module, "draw_sheet", lambda *_: None)


def report(run_dir: Path) -> Result:
    return CliRunner(env={"COLUMNS": "200"}).invoke(app, ["report", str(run_dir)])


def is_one_problem(result: Result, where: Path, what: str) -> bool:
    lines = result.output.splitlines()
    return (
        result.exit_code == 2
        and len(lines) == 3
        and lines[0].startswith(str(where))
        and what in lines[1]
        and lines[2].startswith("  fix: ")
    )


@looped(
    ("text", "what"),
    [
        (b"run: [1", "is not YAML"),
        (b"- 1", "is a list"),
        (b"run: \x00", "is not YAML"),
        (b"\xff\xfe", "codec can't decode"),
        (b"run: &a [*a]", "an anchor that contains itself"),
        (b"flow: 3", "flow: "),
        (b"flow: {async_ratio: two}", "flow.async_ratio: "),
        (b"controls: 3", "controls: "),
        (b"controls: [{name: gac, c_low: low}]", "controls.0.c_low: "),
    ],
)
def test_the_error_for_a_damaged_config_names_the_file(
    tmp_path: Path, text: bytes, what: str
) -> None:
    config = sampled_run(tmp_path, 2) / "config.yaml"
    config.write_bytes(text)
    for result in (report(tmp_path), mar(tmp_path)):
        assert is_one_problem(result, config, "is not a valid config: "), result.output
        assert what in result.output


def test_a_config_of_another_version_is_shown_unchanged(tmp_path: Path) -> None:
    run_dir = damaged(tmp_path)
    with (run_dir / "config.yaml").open("a") as file:
        file.write("removed: {key: 1}\n")
    assert report(run_dir).exit_code == 0
    assert "removed:\n  key: 1" in (run_dir / "report.html").read_text()


def test_a_page_reports_missing_settings_and_samples(tmp_path: Path) -> None:
    run_dir = damaged(tmp_path)
    shutil.rmtree(run_dir / FOLDER)
    assert report(run_dir).exit_code == 0
    page = (run_dir / "report.html").read_text()
    assert "The samples folder of the run is missing" in page
    assert "has no config.yaml" not in page
    (run_dir / "config.yaml").unlink()
    assert report(run_dir).exit_code == 0
    assert "has no config.yaml" in (run_dir / "report.html").read_text()


@looped(
    ("file", "line", "what"),
    [
        ("metrics.jsonl", "hello", "is not a line of metrics"),
        ("metrics.jsonl", "[]", "is not a line of metrics"),
        ("metrics.jsonl", '{"time": 1.0}', "it has no step"),
        ("metrics.jsonl", '{"step": 1e400}', "is not a line of metrics"),
        ("metrics.jsonl", '{"step": 9, "engine/tokens": [[1]]}', "'engine/tokens' is neither a"),
        ("metrics.jsonl", '{"step": 9, "old/key": {}}', "'old/key' is neither a number nor"),
        ("eval.jsonl", "hello", "is not an evaluation"),
        ("eval.jsonl", "[]", "is not an evaluation"),
        ("eval.jsonl", '{"version": 2, "pass_at": [1]}', "pass_at: "),
    ],
)
def test_the_error_for_an_invalid_line_names_its_number(
    tmp_path: Path, file: str, line: str, what: str
) -> None:
    path = damaged(tmp_path) / file
    lines = path.read_text().splitlines()
    path.write_text("\n".join([*lines, line, ""]))
    result = report(tmp_path)
    assert is_one_problem(result, Path(f"{path}:{len(lines) + 1}"), what), result.output


def test_metrics_logged_with_another_kind_are_omitted_and_named(tmp_path: Path) -> None:
    """Every line has a number that is a list in this version, and a list that is a number."""
    path = damaged(tmp_path) / "metrics.jsonl"
    lines = read_objects(path)
    other = {"reward/mean": [0.5, 1.0], "lag/histogram": 3.0, "engine/versions": 4}
    write_lines(path, [line | other for line in lines])
    result = report(tmp_path)
    assert result.exit_code == 0, result.output
    page = (tmp_path / "report.html").read_text()
    assert "engine/versions, lag/histogram, reward/mean" in page
    assert f"<td>{len(lines)}</td>" in page


@pytest.mark.parametrize("file", ["metrics.jsonl", "eval.jsonl"])
def test_a_last_line_that_a_crash_truncated_is_ignored(tmp_path: Path, file: str) -> None:
    with (damaged(tmp_path) / file).open("a") as lines:
        lines.write('{"step": 9, "ver')
    assert report(tmp_path).exit_code == 0


@pytest.mark.parametrize("content", ["hello", "[]", '{"phase": "training"}', "\xff"])
def test_the_error_for_an_invalid_status_names_the_file(tmp_path: Path, content: str) -> None:
    (damaged(tmp_path) / "status.json").write_text(content, encoding="latin-1")
    result = report(tmp_path)
    assert (result.exit_code, len(result.output.splitlines())) == (2, 3), result.output
    assert "status.json is not a run's status" in result.output


def test_complete_samples_of_a_truncated_open_segment_are_shown(tmp_path: Path) -> None:
    """A killed run leaves a truncated open segment; a truncated closed segment is damaged."""
    folder = damaged(tmp_path) / FOLDER
    path, outcomes = (path_of(folder, table, 0) for table in ("samples", "outcomes"))  # type: ignore[arg-type]
    whole = path.read_bytes()
    for length in (*range(0, len(whole), len(whole) // 25), len(whole) - 1):
        path.write_bytes(whole[:length])
        assert is_one_problem(mar(tmp_path), path, "is damaged: it ends before"), length
    path.unlink()
    (tmp_path / MARK_FILE).unlink()  # killed before its first checkpoint
    path = path.with_suffix(OPEN)
    for length in (*range(0, len(whole), len(whole) // 25), len(whole) - 1):
        path.write_bytes(whole[:length])
        result = mar(tmp_path, "--json")
        assert (result.exit_code, len(result.output.splitlines())) in ((0, 5), (2, 3)), length
        samples_section(tmp_path)
    path.write_bytes(whole)
    outcomes.rename(outcomes.with_suffix(OPEN)).write_bytes(b"")
    assert "lost in a crash" in mar(tmp_path, "--best", 1).output
    assert report(tmp_path).exit_code == 0
    page = (tmp_path / "report.html").read_text()
    assert "The samples folder of the run is missing, or contains no sample" in page


@pytest.mark.parametrize("table", ["samples", "outcomes"])
def test_the_error_for_an_invalid_segment_names_the_file(
    tmp_path: Path, table: Literal["samples", "outcomes"]
) -> None:
    folder = damaged(tmp_path) / FOLDER
    path, others = (path_of(folder, one, 0) for one in (table, OTHER[table]))
    for content in (b"hello world", others.read_bytes()):
        path.write_bytes(content)
        what = "is damaged: it ends" if content[:1] == b"h" else "has other columns"
        for result in (mar(tmp_path), mar(tmp_path, "--step", 3)):
            assert is_one_problem(result, path, what), result.output
        assert report(tmp_path).exit_code == 0, "the report does not need the samples"
        page = (tmp_path / "report.html").read_text()
        assert f"The samples cannot be shown. {path} {what}" in page


OTHER: dict[str, Literal["samples", "outcomes"]] = {"samples": "outcomes", "outcomes": "samples"}


def test_fields_that_are_not_finite_are_null_in_json(tmp_path: Path) -> None:
    """A prompt may contain NaN, which Python reads from JSON and other tools refuse."""
    fields = {"answer": float("nan"), "more": [float("inf"), {"x": 1.5}]}
    logged_run(tmp_path, lambda one: replace(one, prompt=replace(one.prompt, fields=fields)))
    written = io.StringIO()
    print_samples(choose(tmp_path, SampleQuery(best=1)), Console(file=written), as_json=True)
    assert json.loads(written.getvalue())["fields"] == {"answer": None, "more": [None, {"x": 1.5}]}


def test_a_run_whose_report_cannot_be_written_is_finished(tmp_path: Path) -> None:
    (damaged(tmp_path) / "metrics.jsonl").write_text("hello\n")
    console = Console(file=io.StringIO(), width=200)
    launcher._report(tmp_path, console)
    assert isinstance(console.file, io.StringIO)
    output = console.file.getvalue()
    assert "The report was not written." in output
    assert "is not a line of metrics" in output
    assert not (tmp_path / "report.html").exists()

"""`mar samples` and the samples in the report: what is shown, and that no response can do more than
be shown."""

from __future__ import annotations

import io
import json
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import yaml
from rich.console import Console
from typer.testing import CliRunner, Result

from megatron_async_rl.cli import app
from megatron_async_rl.config.schema import SamplesConfig
from megatron_async_rl.flow.sample_log import SampleLogWriter
from megatron_async_rl.report.report import write_report
from megatron_async_rl.report.samples import Wanted, choose, print_samples, samples_section
from megatron_async_rl.samples.segments import FOLDER, path_of
from megatron_async_rl.samples.types import Prompt, Sample
from tests.train_batches import row
from tests.unit.test_report import sampled_run

STEPS, GROUP = 5, 4
Change = Callable[[Sample], Sample]


def sample(group: int, k: int, change: Change = lambda one: one) -> Sample:
    """Trained at step group + 1; the reward of sample k of group g is g + k / 10."""
    made = Sample(
        id=f"{group}-{k}",
        prompt=Prompt(id=f"sum-{group}", text=f"{group}+{k}=", token_ids=(5, 6)),
        response_ids=np.array([7, 8], dtype=np.int32),
        behavior_logprobs=np.array([-0.5, -0.25], dtype=np.float32),
        versions=np.array([max(0, group - 1), group], dtype=np.int32),
        loss_mask=np.ones(2, dtype=np.uint8),
        text=f"answer {group + k}",
        finish_reason="stop",
        reward=group + k / 10,
        finished_at=1000.0 * group + k,
    )
    return change(made)


def logged_run(run_dir: Path, change: Change = lambda one: one) -> Path:
    """STEPS steps of one group each, one more group that waits, and an evaluation of version 0."""
    log = SampleLogWriter(run_dir, SamplesConfig())
    log.begin(0)
    prompt = sample(0, 0).prompt
    held_out = [row(replace(sample(0, k), id=f"-1-{k}", text="held out"), -1) for k in range(2)]
    log.evaluated([(prompt, held_out)], 0)
    for group in range(STEPS + 1):
        samples = tuple(sample(group, k, change) for k in range(GROUP))
        samples = tuple(replace(one, prompt=samples[0].prompt) for one in samples)
        for one in samples:
            log.finished(row(one, group))
        if group < STEPS:
            log.trained([row(one, group) for one in samples], group + 1)
    log.close()
    return run_dir


def mar(*arguments: object, width: int = 140) -> Result:
    return CliRunner(env={"COLUMNS": str(width)}).invoke(app, ["samples", *map(str, arguments)])


def ids(*arguments: object) -> list[str]:
    result = mar(*arguments, "--json")
    assert result.exit_code == 0, result.output
    return [json.loads(line)["id"] for line in result.stdout.splitlines()]


def test_the_newest_few_are_shown_by_default(tmp_path: Path) -> None:
    result = mar(logged_run(tmp_path))
    assert result.exit_code == 0
    assert "not trained on so far · reward 5.3 · sample 5-3 · prompt sum-5" in result.stdout
    assert "response: answer 8" in result.stdout
    assert ids(tmp_path) == ["5-3", "5-2", "5-1", "5-0", "4-3"]


def test_a_step_shows_what_it_trained_on(tmp_path: Path) -> None:
    result = mar(logged_run(tmp_path), "--step", 4)
    assert result.stdout.count("trained at step 4 ·") == GROUP
    assert "2 tokens, stop · versions 2 to 3 · lag 1 · engine 0" in result.stdout
    assert ids(tmp_path, "--step", 4) == ["3-0", "3-1", "3-2", "3-3"]


def test_best_worst_and_random_choose_among_a_step_or_all(tmp_path: Path) -> None:
    logged_run(tmp_path)
    assert ids(tmp_path, "--best", 2) == ["5-3", "5-2"]
    assert ids(tmp_path, "--worst", 3) == ["0-0", "0-1", "0-2"]
    assert ids(tmp_path, "--step", 3, "--worst", 1) == ["2-0"]
    drawn = ids(tmp_path, "--random", 6, "--seed", 3)
    assert drawn == ids(tmp_path, "--random", 6, "--seed", 3)
    assert drawn != ids(tmp_path, "--random", 6, "--seed", 4)
    assert len(set(drawn)) == 6
    assert len(ids(tmp_path, "--random", 1000)) == GROUP * (STEPS + 1), "what there is"


def test_a_failed_reward_is_neither_best_nor_worst_and_says_so(tmp_path: Path) -> None:
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


def test_evaluations_are_shown_apart(tmp_path: Path) -> None:
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
    assert "3,000 more characters; --json has all" in mar(tmp_path, "--step", 4).stdout


@pytest.mark.parametrize("width", [30, 200])
def test_a_narrow_terminal_breaks_lines_and_loses_nothing(tmp_path: Path, width: int) -> None:
    logged_run(tmp_path, lambda one: replace(one, text="0123456789" * 20))
    console = Console(file=io.StringIO(), width=width, force_terminal=False)
    print_samples(choose(tmp_path, Wanted(step=4, best=1)), console, as_json=False)
    shown = console.file.getvalue()
    assert max(len(line) for line in shown.splitlines()) <= width
    assert "0123456789" * 20 in shown.replace("\n", "")


# What is not there


@pytest.mark.parametrize(
    ("options", "message"),
    [
        (["--step", "99"], "no sample of step 99\n  fix: its log holds step 1 to 5"),
        (["--step", "1", "--eval"], "no sample of version 1\n  fix: its log holds version 0"),
        (["--best", "1", "--worst", "1"], "--worst and --best\n  exclude each other"),
    ],
)
def test_what_is_not_there_is_said_with_its_fix(
    tmp_path: Path, options: list[str], message: str
) -> None:
    result = mar(logged_run(tmp_path), *options)
    assert result.exit_code == 2
    assert message in result.output
    assert len(result.output.splitlines()) == 3


@pytest.mark.parametrize(
    ("config", "message"),
    [
        (None, "holds no run"),
        ({"run": {}, "rollout": None}, "is a supervised run"),
        ({"rollout": {}, "samples": {"keep_mib": 0}}, "samples.keep_mib: 0"),
        ({"rollout": {}}, "has no samples yet"),
    ],
)
def test_a_run_without_samples_says_why(
    tmp_path: Path, config: dict[str, object] | None, message: str
) -> None:
    if config is not None:
        (tmp_path / "config.yaml").write_text(yaml.safe_dump(config))
    result = mar(tmp_path)
    assert (result.exit_code, len(result.output.splitlines())) == (2, 3)
    assert message in result.output


def test_a_folder_that_is_not_there_is_said(tmp_path: Path) -> None:
    result = mar(tmp_path / "none")
    assert result.exit_code == 2
    assert "none is not a directory" in result.output


def test_samples_that_made_room_are_counted(tmp_path: Path) -> None:
    """The outcomes of a step stand in a later segment than some of its samples."""
    log = SampleLogWriter(tmp_path, SamplesConfig())
    log.begin(0)
    old, new = sample(0, 0), sample(0, 1)
    log.finished(row(old))
    log.close()
    log = SampleLogWriter(tmp_path, SamplesConfig())
    log.begin(0)
    log.finished(row(new))
    log.trained([row(old), row(new)], 1)
    log.close()
    for table in ("samples", "outcomes"):
        path_of(tmp_path / FOLDER, table, 0).unlink()  # type: ignore[arg-type]
    shown = mar(tmp_path, "--step", 1).stdout
    assert "sample 0-1" in shown
    assert "1 more of them are no longer kept" in shown
    path_of(tmp_path / FOLDER, "samples", 1).unlink()
    assert "keeps the samples of step 1 no longer" in mar(tmp_path, "--step", 1).output


# Untrusted text

HOSTILE = "\x1b[2J\x9b31m</pre><script>alert(1)</script>@TABLES@ @WHERE@ [red]\u202e\r&amp;"


def test_a_response_cannot_drive_the_terminal(tmp_path: Path) -> None:
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
    assert "5-0" not in section, "what waits has trained nothing"
    assert section == samples_section(tmp_path)


def test_long_text_is_folded_and_very_long_text_cut(tmp_path: Path) -> None:
    logged_run(tmp_path, lambda one: replace(one, text="<" * 15_000))
    section = samples_section(tmp_path)
    assert "<details><summary>15,000 characters</summary>" in section
    assert "... 10,000 more characters" in section
    assert section.count("&lt;") == section.count('class="sample"') * 5_400


def test_a_run_without_samples_has_no_such_section(tmp_path: Path) -> None:
    assert samples_section(tmp_path) == ""


@pytest.mark.parametrize("text", ["run: [1", "- 1"])
def test_a_config_that_was_damaged_is_named(tmp_path: Path, text: str) -> None:
    sampled_run(tmp_path, 2)
    (tmp_path / "config.yaml").write_text(text)
    for command in ("samples", "report"):
        shown = CliRunner().invoke(app, [command, str(tmp_path)])
        assert shown.exit_code == 2, shown.output
        assert f"{tmp_path / 'config.yaml'}\n  is not a configuration: " in shown.output


def test_fields_that_are_not_finite_are_null_in_json(tmp_path: Path) -> None:
    """Python reads NaN in a prompt's line, and other tools do not."""
    fields = {"answer": float("nan"), "more": [float("inf"), {"x": 1.5}]}
    logged_run(tmp_path, lambda one: replace(one, prompt=replace(one.prompt, fields=fields)))
    written = io.StringIO()
    print_samples(choose(tmp_path, Wanted(best=1)), Console(file=written), as_json=True)
    assert json.loads(written.getvalue())["fields"] == {"answer": None, "more": [None, {"x": 1.5}]}

"""The metrics log, its catalogue of keys, and reading it back."""

from __future__ import annotations

import io
import json
import math
import re
import urllib.request
from pathlib import Path

import numpy as np
import pytest
from rich.console import Console

import megatron_async_rl
from megatron_async_rl.config.problem import UserError
from megatron_async_rl.launch import launcher
from megatron_async_rl.metrics import catalogue as keys
from megatron_async_rl.metrics import json_lines
from megatron_async_rl.metrics.catalogue import Metric, MetricsError
from megatron_async_rl.metrics.log import (
    MetricsLog,
    MetricsReader,
    cut_from,
    cut_unreadable,
    digests_of_steps,
    read_evaluations,
    read_metrics,
    read_newest,
)
from tests.cases import looped

PACKAGE = Path(megatron_async_rl.__file__).parent


def lines_of(path: Path) -> list[dict[str, object]]:
    """Return the JSON objects of a file. Fails for NaN and Infinity, which are not valid JSON."""

    def refuse(constant: str) -> None:
        raise AssertionError(f"{constant} is not JSON")

    return [json.loads(line, parse_constant=refuse) for line in path.read_text().splitlines()]


def logged(run_dir: Path, steps: range, reward: float = 0.5, first_step: int | None = None) -> None:
    log = MetricsLog(
        run_dir, tensorboard=False, first_step=steps.start if first_step is None else first_step
    )
    for step in steps:
        log.log(step, {"reward/mean": reward})
    log.close()


def test_a_step_is_one_line_on_disk_when_log_returns(tmp_path: Path) -> None:
    log = MetricsLog(tmp_path, tensorboard=False, first_step=1)
    log.log(
        1, {"reward/mean": np.float32(0.5), "lag/histogram": [3, np.int64(4)], "tokens/trained": 7}
    )
    (line,) = lines_of(tmp_path / "metrics.jsonl")
    assert line.pop("time") > 1.7e9  # type: ignore[operator]
    assert len(str(line.pop("checksum"))) == 32
    assert line == {
        "step": 1,
        "version": 1,
        "reward/mean": 0.5,
        "lag/histogram": [3, 4],
        "tokens/trained": 7,
    }


def test_values_that_are_not_finite_are_valid_json_and_read_back(tmp_path: Path) -> None:
    log = MetricsLog(tmp_path, tensorboard=False, first_step=1)
    log.log(1, {"policy/loss": math.nan, "policy/grad_norm": math.inf, "ratio/chi2": -math.inf})
    (line,) = lines_of(tmp_path / "metrics.jsonl")
    assert (line["policy/loss"], line["policy/grad_norm"], line["ratio/chi2"]) == (
        "nan",
        "inf",
        "-inf",
    )
    (row,) = read_metrics(tmp_path)
    assert math.isnan(row["policy/loss"])  # type: ignore[arg-type]
    assert (row["policy/grad_norm"], row["ratio/chi2"]) == (math.inf, -math.inf)


def test_a_metric_per_engine_is_a_list_that_reads_back(tmp_path: Path) -> None:
    log = MetricsLog(tmp_path, tensorboard=False, first_step=1)
    log.log(1, {"engine/busy_shares": (0.5, math.nan), "engine/tokens": np.array([3, 4]).tolist()})
    (line,) = lines_of(tmp_path / "metrics.jsonl")
    assert (line["engine/busy_shares"], line["engine/tokens"]) == ([0.5, "nan"], [3, 4])
    (row,) = read_metrics(tmp_path)
    np.testing.assert_array_equal(row["engine/busy_shares"], [0.5, math.nan])


def test_the_error_for_an_unknown_key_names_the_nearest_key(tmp_path: Path) -> None:
    log = MetricsLog(tmp_path, tensorboard=False, first_step=1)
    with pytest.raises(
        MetricsError, match=r"unknown metric 'reward/meen'; the nearest one is 'reward/mean'"
    ):
        log.log(1, {"reward/meen": 1.0})
    assert lines_of(tmp_path / "metrics.jsonl") == []


@looped(
    ("key", "value"),
    [
        ("reward/mean", "high"),
        ("reward/mean", [1]),
        ("lag/histogram", 2),
        ("lag/histogram", [0.5]),
        ("trained/length_histogram", [0.5]),
        ("engine/busy_shares", 0.5),
        ("engine/busy_shares", ["busy"]),
    ],
)
def test_a_value_of_another_kind_is_refused(tmp_path: Path, key: str, value: object) -> None:
    log = MetricsLog(tmp_path, tensorboard=False, first_step=1)
    with pytest.raises(MetricsError, match=key):
        log.log(1, {key: value})


def test_a_step_is_never_logged_twice(tmp_path: Path) -> None:
    log = MetricsLog(tmp_path, tensorboard=False, first_step=1)
    log.log(1, {})
    with pytest.raises(MetricsError, match="step 1"):
        log.log(1, {})


def test_a_resume_moves_the_steps_that_it_repeats_to_another_file(tmp_path: Path) -> None:
    logged(tmp_path, range(1, 6), reward=0.1)
    logged(tmp_path, range(3, 5), reward=0.9)
    assert [(row["step"], row["reward/mean"]) for row in read_metrics(tmp_path)] == [
        (1, 0.1),
        (2, 0.1),
        (3, 0.9),
        (4, 0.9),
    ]
    assert [
        (line["step"], line["reward/mean"]) for line in lines_of(tmp_path / "metrics.cut.jsonl")
    ] == [
        (3, 0.1),
        (4, 0.1),
        (5, 0.1),
    ]


def test_a_resume_moves_a_partial_line_to_another_file(tmp_path: Path) -> None:
    logged(tmp_path, range(1, 3))
    with open(tmp_path / "metrics.jsonl", "a") as file:
        file.write('{"step": 3, "rewa')
    logged(tmp_path, range(3, 4))
    assert [row["step"] for row in read_metrics(tmp_path)] == [1, 2, 3]
    assert lines_of(tmp_path / "metrics.cut.jsonl") == [{"unreadable": '{"step": 3, "rewa'}]


def test_a_reader_returns_each_line_once_when_it_is_complete(tmp_path: Path) -> None:
    reader = MetricsReader(tmp_path)
    assert reader.new_rows().rows == []
    path = tmp_path / "metrics.jsonl"
    with open(path, "w") as file:
        file.write('{"step": 1}\n{"ste')
        file.flush()
        assert [row["step"] for row in reader.new_rows().rows] == [1]
        assert reader.new_rows().rows == []
        file.write('p": 2}\n')
        file.flush()
        new = reader.new_rows()
    assert [row["step"] for row in new.rows] == [2]
    assert not new.restarted


def test_invalid_lines_at_the_end_are_moved_and_every_step_stays(tmp_path: Path) -> None:
    good = '{"step": 1}\n{"step": 2}\n'
    path = tmp_path / "metrics.jsonl"
    for tail, cut in (("", 0), ('{"step": 3, "rewa', 1), ("\0\0\n[3]\n", 2), ("\0\0", 1)):
        path.write_text(good + tail)
        assert cut_unreadable(tmp_path).get("metrics.jsonl", 0) == cut
        assert path.read_text() == good
    moved = lines_of(tmp_path / "metrics.cut.jsonl")
    assert moved == [{"unreadable": one} for one in ('{"step": 3, "rewa', "\0\0", "[3]", "\0\0")]
    path.write_text(f'{{"step": 1}}\n\0\0\n{good}')
    assert cut_unreadable(tmp_path) == {}
    with pytest.raises(UserError, match=r"metrics\.jsonl:2"):
        read_metrics(tmp_path)


def test_the_end_of_a_file_is_read_correctly_with_any_block_size(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = tmp_path / "metrics.jsonl"
    lines = [json.dumps({"step": step, "reward/mean": step / 8}) + "\n" for step in range(1, 40)]
    for block in (1, 7, 64, 1000, 10**6):
        monkeypatch.setattr(json_lines, "BLOCK_BYTES", block)
        path.write_text("".join(lines))
        assert [row["step"] for row in read_newest(tmp_path, 5)] == [35, 36, 37, 38, 39]
        assert len(read_newest(tmp_path, 100)) == len(read_metrics(tmp_path)) == 39
        assert cut_from(tmp_path, 33) == 7
        assert path.read_text() == "".join(lines[:32])
        assert cut_from(tmp_path, 1) == 32
        assert path.read_text() == ""


def test_a_reader_detects_that_a_file_was_cut_and_has_grown_again(tmp_path: Path) -> None:
    """Between two reads, the file is cut and grows beyond its earlier size."""
    reader = MetricsReader(tmp_path)
    path = tmp_path / "metrics.jsonl"
    path.write_text('{"step": 1}\n{"step": 2, "reward/mean": 1.0}\n')
    assert len(reader.new_rows().rows) == 2
    cut_from(tmp_path, 2)
    with path.open("a") as file:
        file.write('{"step": 2, "reward/mean": 0.0}\n{"step": 3}\n')
    new = reader.new_rows()
    assert new.restarted
    assert [row.get("reward/mean") for row in new.rows] == [None, 0.0, None]


def test_a_new_line_is_not_appended_to_a_last_line_without_line_break(tmp_path: Path) -> None:
    (tmp_path / "metrics.jsonl").write_text('{"step": 1}')
    log = MetricsLog(tmp_path, tensorboard=False, first_step=2)
    log.log(2, {"reward/mean": 0.5})
    log.close()
    assert [line["step"] for line in lines_of(tmp_path / "metrics.jsonl")] == [1, 2]


def test_a_reader_starts_over_when_a_resume_cuts_the_file(tmp_path: Path) -> None:
    logged(tmp_path, range(1, 5))
    reader = MetricsReader(tmp_path)
    assert len(reader.new_rows().rows) == 4
    logged(tmp_path, range(3, 8), reward=0.9)
    new = reader.new_rows()
    assert new.restarted
    assert [row["step"] for row in new.rows] == [1, 2, 3, 4, 5, 6, 7]


def test_the_error_for_a_damaged_line_names_file_and_line(tmp_path: Path) -> None:
    (tmp_path / "metrics.jsonl").write_text('{"step": 1}\nnonsense\n')
    with pytest.raises(UserError, match=r"metrics\.jsonl:2"):
        read_metrics(tmp_path)


@pytest.mark.parametrize(
    ("line", "why"),
    [
        ("nonsense", "is not an evaluation: Expecting value"),
        ('{"version": "x"}', "is not an evaluation: version: Input should be a valid integer"),
        ('{"version": 1, "pass_at": {"x": 1}}', "is not an evaluation: pass_at.x"),
    ],
)
def test_the_error_for_a_damaged_evaluation_names_file_and_line(
    tmp_path: Path, line: str, why: str
) -> None:
    (tmp_path / "eval.jsonl").write_text(f'{{"version": 2}}\n{{"version": 0}}\n{line}\n')
    with pytest.raises(UserError, match=rf"eval\.jsonl:3\n  {why}"):
        read_evaluations(tmp_path)
    (tmp_path / "eval.jsonl").write_text('{"version": 2}\n{"version": 0}\n')
    assert read_evaluations(tmp_path) == [{"version": 0}, {"version": 2}]


def test_a_line_has_the_digest_of_its_weights_which_is_no_metric(tmp_path: Path) -> None:
    log = MetricsLog(tmp_path, tensorboard=False, first_step=1)
    log.log(1, {}, "abc")
    log.log(2, {})
    log.close()
    assert digests_of_steps(tmp_path) == {1: "abc"}
    assert all("weights" not in row for row in read_metrics(tmp_path))
    (tmp_path / "metrics.jsonl").write_text('{"step": "x", "weights": "a"}\n')
    with pytest.raises(UserError, match=r"metrics\.jsonl:1\n  is not a line of metrics"):
        digests_of_steps(tmp_path)


def test_moved_lines_are_on_disk_before_the_original_is_shortened(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path, cut = tmp_path / "metrics.jsonl", tmp_path / "metrics.cut.jsonl"
    path.write_text('{"step": 1}\n{"step": 2}\n')
    synced = []

    def sync(descriptor: int) -> None:
        synced.append((Path(f"/proc/self/fd/{descriptor}").resolve(), path.stat().st_size))

    monkeypatch.setattr(json_lines.os, "fsync", sync)
    assert cut_from(tmp_path, 2) == 1
    assert synced == [(cut, 24), (path, 12)]


@pytest.mark.parametrize("step", ["2", "1", "2.5"])
def test_a_step_that_does_not_increase_is_refused(tmp_path: Path, step: str) -> None:
    """A damaged or manually edited file may have such lines; totals would count a step twice."""
    path = tmp_path / "metrics.jsonl"
    path.write_text(f'{{"step": 1}}\n{{"step": 2}}\n{{"step": {step}}}\n{{"step": 4}}\n')
    with pytest.raises(UserError, match=r"metrics\.jsonl:3"):
        read_metrics(tmp_path)
    with pytest.raises(UserError, match=r"metrics\.jsonl, near its end"):
        read_newest(tmp_path, 3)


def test_an_endless_line_is_refused_before_it_fills_memory(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(json_lines, "BLOCK_BYTES", 1000)
    monkeypatch.setattr(json_lines, "LONGEST_LINE", 5000)
    (tmp_path / "metrics.jsonl").write_bytes(b'{"step": 1}\n' + bytes(10_000))
    with pytest.raises(UserError, match=r"metrics\.jsonl:2"):
        read_metrics(tmp_path)


def test_the_launcher_reports_the_invalid_lines_that_it_moved(tmp_path: Path) -> None:
    (tmp_path / "metrics.jsonl").write_text('{"step": 1}\n{"step": 2, "rewa')
    (tmp_path / "eval.jsonl").write_text('{"version": 1}\n\0\0\n{"vers')
    written = io.StringIO()
    launcher._put_aside(tmp_path, Console(file=written, width=60))
    launcher._put_aside(tmp_path, Console(file=written, width=60))
    assert [line.split(", as after")[0] for line in written.getvalue().splitlines()] == [
        f"note: 1 line at the end of {tmp_path}/metrics.jsonl cannot be read",
        f"note: 2 lines at the end of {tmp_path}/eval.jsonl cannot be read",
    ]
    assert lines_of(tmp_path / "eval.cut.jsonl") == [
        {"unreadable": "\0\0"},
        {"unreadable": '{"vers'},
    ]


def test_tensorboard_has_numbers_and_histograms_and_drops_cut_steps(tmp_path: Path) -> None:
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    for steps, reward in ((range(1, 5), 0.1), (range(3, 5), 0.9)):
        log = MetricsLog(tmp_path, tensorboard=True, first_step=steps.start)
        for step in steps:
            lengths, shares = (
                {"trained/length_histogram": [0, 2, 1]},
                {"engine/busy_shares": [reward, 0.75]},
            )
            log.log(step, {"reward/mean": reward, "lag/histogram": [step, 1], **lengths, **shares})
        log.close()
    events = EventAccumulator(
        str(tmp_path / "tensorboard"), size_guidance={"scalars": 0, "histograms": 0}
    ).Reload()
    assert [(event.step, round(event.value, 3)) for event in events.Scalars("reward/mean")] == [
        (1, 0.1),
        (2, 0.1),
        (3, 0.9),
        (4, 0.9),
    ]
    assert list(events.Histograms("lag/histogram")[-1].histogram_value.bucket) == [4.0, 1.0]
    lengths_seen = events.Histograms("trained/length_histogram")[-1].histogram_value
    assert (lengths_seen.bucket_limit, lengths_seen.bucket) == ([1.5, 3.5, 7.5], [0.0, 2.0, 1.0])
    assert lengths_seen.sum == 2 * 2.5 + 5.5
    assert [
        round(events.Scalars(f"engine/busy_shares/{engine}")[-1].value, 3) for engine in (0, 1)
    ] == [0.9, 0.75]


def test_an_evaluation_is_in_the_next_line_and_in_tensorboard_at_its_version(
    tmp_path: Path,
) -> None:
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    log = MetricsLog(tmp_path, tensorboard=True, first_step=1)
    for version, mean in ((0, 0.125), (1, 0.25)):
        log.evaluated(version, {"eval/mean": mean, "eval/version": version})
    for step in (1, 2):
        log.log(step, {"reward/mean": 0.5})
    log.evaluated(2, {"eval/mean": 0.75, "eval/version": 2})
    log.close()
    assert [row.get("eval/version") for row in read_metrics(tmp_path)] == [1, None]
    events = EventAccumulator(str(tmp_path / "tensorboard"), size_guidance={"scalars": 0}).Reload()
    assert [(event.step, event.value) for event in events.Scalars("eval/mean")] == [
        (0, 0.125),
        (1, 0.25),
        (2, 0.75),
    ]
    assert [event.step for event in events.Scalars("reward/mean")] == [1, 2]


def test_an_evaluation_with_an_unknown_key_is_refused(tmp_path: Path) -> None:
    with pytest.raises(MetricsError, match=r"unknown metric 'eval/meen'"):
        MetricsLog(tmp_path, tensorboard=False, first_step=1).evaluated(0, {"eval/meen": 1.0})


def test_the_page_of_metrics_is_up_to_date() -> None:
    page = PACKAGE.parent / "docs" / "metrics.md"
    assert page.read_text() == keys.page(), (
        "run: python -m megatron_async_rl.metrics.catalogue > docs/metrics.md"
    )


def test_the_package_logs_exactly_the_metrics_of_the_catalogue() -> None:
    prefixes = "|".join(sorted({name.split("/")[0] for name in keys.METRICS}))
    readers = {"metrics", "report"}
    sources = [path for path in PACKAGE.rglob("*.py") if path.parent.name not in readers]
    literal = re.compile(rf'"((?:{prefixes})/(?:SET/)?[a-z_0-9@]+(?:/NAME)?)"')
    written = {name for path in sources for name in literal.findall(path.read_text())}
    assert written - set(keys.METRICS) == set()
    # Logged by users' methods.
    assert set(keys.METRICS) - written == {"own/NAME"}


def test_a_method_of_a_user_logs_metrics_of_its_own(tmp_path: Path) -> None:
    log = MetricsLog(tmp_path, tensorboard=True, first_step=1, prometheus_port=0)
    log.log(1, {"own/margin-1": 0.5})
    address = (tmp_path / "prometheus.txt").read_text().strip()
    with urllib.request.urlopen(address, timeout=600) as answer:
        served = answer.read().decode()
    for name in ("own/a/b", "own/", "own"):
        with pytest.raises(MetricsError, match=r"unknown metric .* names its metrics own/NAME"):
            log.log(2, {name: 1.0})
    log.close()
    assert [row["own/margin-1"] for row in read_metrics(tmp_path)] == [0.5]
    assert "mar_own_margin_1 0.5" in served


def test_one_line_of_the_catalogue_adds_a_metric_everywhere(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    with pytest.raises(MetricsError, match="unknown metric 'reward/median'"):
        MetricsLog(tmp_path / "before", tensorboard=False, first_step=1).log(
            1, {"reward/median": 1}
        )

    group = keys.GROUPS["Reward"][1]
    monkeypatch.setitem(group, "reward/median", Metric("reward", "Median reward of a sample."))  # type: ignore[arg-type]
    monkeypatch.setattr(keys, "METRICS", dict(keys.METRICS) | group)
    log = MetricsLog(tmp_path, tensorboard=True, first_step=1, prometheus_port=0)
    log.log(1, {"reward/median": 0.5})
    address = (tmp_path / "prometheus.txt").read_text().strip()
    with urllib.request.urlopen(address, timeout=600) as answer:
        served = answer.read().decode()
    log.close()

    assert [row["reward/median"] for row in read_metrics(tmp_path)] == [0.5]
    assert "mar_reward_median 0.5" in served
    assert "Median reward of a sample. Unit: reward." in served
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    events = EventAccumulator(str(tmp_path / "tensorboard")).Reload()
    assert [event.value for event in events.Scalars("reward/median")] == [0.5]
    assert "| `reward/median` | reward | Median reward of a sample. |" in keys.page()

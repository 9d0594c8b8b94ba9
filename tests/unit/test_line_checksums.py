"""Checksums of JSON lines: a flipped bit in a record of a run is reported."""

from __future__ import annotations

import json
import math
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from megatron_async_rl.config.durable import digest
from megatron_async_rl.config.problem import UserError
from megatron_async_rl.flow.starts import read_starts, record_start
from megatron_async_rl.metrics.json_lines import with_checksum, without_checksum
from megatron_async_rl.metrics.lag0_log import Lag0Log, read_lag0
from megatron_async_rl.metrics.load_log import LoadLog, read_loads
from megatron_async_rl.metrics.log import (
    EvalLog,
    MetricsLog,
    cut_unreadable,
    digest_of_step,
    digests_of_steps,
    read_evaluations,
    read_metrics,
    read_newest,
)
from megatron_async_rl.metrics.weight_log import WeightLines, WeightLog
from tests.unit.test_starts import start


def write_metrics(run_dir: Path) -> None:
    log = MetricsLog(run_dir, tensorboard=False, first_step=1)
    log.log(1, {"reward/mean": 0.5, "lag/histogram": [3, 4]}, weights="0f1e2d3c4b5a6978")
    log.close()


def write_lag0(run_dir: Path) -> None:
    log = Lag0Log(run_dir, 1)
    log.log(1, [2], [0.25], ["7-0"], [0.125])
    log.close()


def write_weights(run_dir: Path) -> None:
    log = WeightLog(run_dir, 1)
    log.log(1, {f"tensor {i}": f"digest {i}" for i in range(6)})
    log.close()


Write = Callable[[Path], object]
RECORDS: dict[str, tuple[Write, tuple[Callable[[Path], object], ...]]] = {
    "metrics.jsonl": (
        write_metrics,
        (read_metrics, lambda run_dir: read_newest(run_dir, 1), digests_of_steps),
    ),
    "eval.jsonl": (
        lambda run_dir: EvalLog(run_dir, ()).append({"version": 2, "mean_reward": 0.5}),
        (read_evaluations,),
    ),
    "starts.jsonl": (lambda run_dir: record_start(run_dir, start(3)), (read_starts,)),
    "loads.jsonl": (
        lambda run_dir: LoadLog(run_dir).record(3, 0, "0f1e2d3c4b5a6978", 22),
        (lambda run_dir: list(read_loads(run_dir)),),
    ),
    "lag0.jsonl": (write_lag0, (lambda run_dir: list(read_lag0(run_dir)),)),
    "weights.jsonl": (write_weights, (lambda run_dir: list(WeightLines(run_dir)),)),
}


def test_a_difference_that_is_not_finite_is_read_as_infinite(tmp_path: Path) -> None:
    log = Lag0Log(tmp_path, 1)
    for value in (math.inf, math.nan):
        log.log(1, [2], [value], ["7-0"], [value])
    log.close()
    line = '{"step": 1, "tokens": [2], "sums": [%s], "ids": ["7-0"], "means": [%s]}\n'
    path = tmp_path / "lag0.jsonl"
    earlier = path.read_text() + line % ("NaN", "NaN")
    path.write_text(earlier)
    for read in read_lag0(tmp_path):
        assert (read.sums, read.means) == ((math.inf,), (math.inf,))
    for value in ("-Infinity", "-0.5"):
        path.write_text(earlier + line % (value, "0.5"))
        with pytest.raises(UserError, match="a difference is at least 0"):
            list(read_lag0(tmp_path))


@pytest.mark.parametrize("name", RECORDS)
def test_every_reader_reports_a_flipped_bit(tmp_path: Path, name: str) -> None:
    write, readers = RECORDS[name]
    write(tmp_path)
    path = tmp_path / name
    whole = path.read_bytes()
    for read in readers:
        read(tmp_path)
    # The last line break is excluded: a last line without one is a line that a crash truncated.
    for at in range(len(whole) - 1):
        damaged = bytearray(whole)
        damaged[at] ^= 1 << at % 8
        path.write_bytes(damaged)
        for read in readers:
            with pytest.raises(UserError, match=name.replace(".", r"\.")):
                read(tmp_path)


@pytest.mark.parametrize("values", [{"a": 1}, {"name": "x", "text": "y"}, {"rows": [{}]}])
def test_no_flipped_bit_of_a_line_leaves_a_valid_line(values: dict[str, object]) -> None:
    line = with_checksum(json.dumps(values)).encode()
    assert json.loads(without_checksum(line + b"\n")) == values
    for bit in range(8 * len(line)):
        damaged = bytearray(line)
        damaged[bit // 8] ^= 1 << bit % 8
        with pytest.raises(
            ValueError, match=r"checksum|JSON|[Ee]xpecting|delimiter|decode|[Ii]nvalid"
        ):
            json.loads(without_checksum(bytes(damaged)))


def test_a_line_of_an_earlier_version_is_read_as_it_is() -> None:
    # The last value has the length of a checksum, as 24 tensors in weights.jsonl have in base64.
    for line in (b'{"step": 1}', b'{"tensors": "' + b"x" * 32 + b'"}', b"", b"[]", b"not JSON"):
        assert without_checksum(line + b"\n") == line


def flip(path: Path, number: int) -> None:
    """Change a digit in a value of line `number`."""
    lines = path.read_text().splitlines(keepends=True)
    lines[number] = lines[number].replace("7", "5", 1)
    path.write_text("".join(lines))


def test_a_start_leaves_a_damaged_line_where_readers_report_it(tmp_path: Path) -> None:
    for step in (0, 7, 8):
        record_start(tmp_path, start(step))
        if step == 7:
            flip(tmp_path / "starts.jsonl", 1)
    with pytest.raises(UserError, match=r"starts\.jsonl:2\n.*checksum"):
        read_starts(tmp_path)


def test_a_resume_leaves_a_damaged_line_where_readers_report_it(tmp_path: Path) -> None:
    for version in range(7, 9):
        loads = LoadLog(tmp_path)
        loads.record(version, 0, "0" * 16, 22)
        if version == 7:
            # A digit of the number of the engine, after that of the version.
            text = (tmp_path / "loads.jsonl").read_text()
            (tmp_path / "loads.jsonl").write_text(text.replace('"engine": 0', '"engine": 1'))
    with pytest.raises(UserError, match=r"loads\.jsonl:1\n.*checksum"):
        list(read_loads(tmp_path))


def test_the_damaged_line_of_a_checkpoint_is_named(tmp_path: Path) -> None:
    write_metrics(tmp_path)
    path = tmp_path / "metrics.jsonl"
    assert digest_of_step(tmp_path, 1) == digest(path.read_bytes().rstrip())
    path.write_text(path.read_text().replace("0.5", "0.25"))
    with pytest.raises(UserError, match=r"metrics\.jsonl, step 1\n.*checksum"):
        digest_of_step(tmp_path, 1)
    assert cut_unreadable(tmp_path) == {}, "the line stays"


@pytest.mark.parametrize(
    "options", [{"separators": (",", ":")}, {"sort_keys": True}, {"indent": 1}]
)
def test_a_line_that_another_program_wrote_again_is_named(
    tmp_path: Path, options: dict[str, Any]
) -> None:
    EvalLog(tmp_path, ()).append({"version": 2, "mean_reward": 0.5})
    path = tmp_path / "eval.jsonl"
    line = json.dumps(json.loads(path.read_text()), **options).replace("\n", "")
    path.write_text(line + "\n")
    with pytest.raises(UserError, match=r"its checksum(?s:.)*remove its checksum"):
        read_evaluations(tmp_path)

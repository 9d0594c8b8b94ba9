"""Log of each tensor's digest: a resume replaces the lines that it repeats, and damage is named."""

from __future__ import annotations

from pathlib import Path

import pytest

from megatron_async_rl.config.problem import UserError
from megatron_async_rl.metrics.lag0_log import Lag0Log, read_lag0
from megatron_async_rl.metrics.load_log import LoadLog, read_loads
from megatron_async_rl.metrics.weight_log import FILE, WeightLog, short_digest, tensors_of_step


def digests(step: int) -> dict[str, str]:
    return {"b": f"b of {step}", "a": "the same"}


def write(run_dir: Path, *steps: int) -> None:
    log = WeightLog(run_dir, steps[0])
    for step in steps:
        log.log(step, digests(step))
    log.close()


def test_each_step_has_the_digests_of_its_tensors(tmp_path: Path) -> None:
    write(tmp_path, 0, 1, 2)
    for step in range(3):
        found = tensors_of_step(tmp_path, step)
        assert found == {name: short_digest(one) for name, one in digests(step).items()}
    assert tensors_of_step(tmp_path, 3) == {}
    assert len({short_digest(f"b of {step}") for step in range(99)}) > 50


def test_a_resume_replaces_the_lines_that_it_repeats(tmp_path: Path) -> None:
    write(tmp_path, 0, 1, 2)
    write(tmp_path, 2, 3)
    log = WeightLog(tmp_path, 1)
    log.log(1, {"a": "other weights"})
    log.close()
    assert tensors_of_step(tmp_path, 0) == {
        name: short_digest(one) for name, one in digests(0).items()
    }
    assert tensors_of_step(tmp_path, 1) == {"a": short_digest("other weights")}
    assert tensors_of_step(tmp_path, 2) == {}
    assert (tmp_path / "weights.cut.jsonl").read_text().count('"step"') == 5


@pytest.mark.parametrize("line", ['{"step": 1, "tensors": "AAAA"}', '{"tensors": "AA=="}', "[1]"])
def test_a_damaged_line_is_named(tmp_path: Path, line: str) -> None:
    write(tmp_path, 0)
    with open(tmp_path / FILE, "a", encoding="utf-8") as file:
        file.write(line + "\n")
    with pytest.raises(UserError, match=rf"{FILE}:3(?s:.)*digests of tensors"):
        tensors_of_step(tmp_path, 1)


def test_a_line_that_is_being_written_and_a_missing_file_have_no_digests(tmp_path: Path) -> None:
    assert tensors_of_step(tmp_path, 1) == {}
    write(tmp_path, 0)
    with open(tmp_path / FILE, "a", encoding="utf-8") as file:
        file.write('{"step": 1, "tens')
    assert tensors_of_step(tmp_path, 1) == {}


def lag0_lines(run_dir: Path, *steps: int) -> list[int]:
    """Log these steps, after a start before the first; return the steps in the file."""
    log = Lag0Log(run_dir, steps[0])
    for step in steps:
        log.log(step, [0, 3], [0.0, 0.123456], [f"{step}-0"], [0.041152])
    log.close()
    return [line.step for line in read_lag0(run_dir)]


def test_differences_at_lag_0_keep_four_digits_and_a_resume_replaces_lines(tmp_path: Path) -> None:
    assert lag0_lines(tmp_path, 1, 2, 3) == [1, 2, 3]
    assert next(read_lag0(tmp_path)).sums == (0.0, 0.1235)
    assert lag0_lines(tmp_path, 3, 4) == [1, 2, 3, 4]
    with open(tmp_path / "lag0.jsonl", "a") as file:
        file.write('{"step": 5}\n')
    with pytest.raises(UserError, match=r"lag0\.jsonl:5"):
        list(read_lag0(tmp_path))


def loads(run_dir: Path, *versions: int) -> list[int]:
    log = LoadLog(run_dir)
    for version in versions:
        log.record(version, 0, f"{version:016x}", 25)
    return [load.version for load in read_loads(run_dir)]


def test_a_resume_replaces_the_loads_of_the_versions_that_it_loads_again(tmp_path: Path) -> None:
    assert list(read_loads(tmp_path)) == []
    assert loads(tmp_path, 0, 1, 2, 3) == [0, 1, 2, 3]
    assert loads(tmp_path, 2, 3) == [0, 1, 2, 3]
    with open(tmp_path / "loads.jsonl", "a") as file:
        file.write("no line\n")
    with pytest.raises(UserError, match=r"loads\.jsonl:5"):
        list(read_loads(tmp_path))

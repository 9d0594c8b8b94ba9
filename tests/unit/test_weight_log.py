"""Log of each tensor's digest: a resume replaces the lines that it repeats, and damage is named."""

from __future__ import annotations

from pathlib import Path

import pytest

from megatron_async_rl.config.problem import UserError
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

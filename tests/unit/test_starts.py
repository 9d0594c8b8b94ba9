"""Record of a run's starts: which start made a step, with which settings."""

from __future__ import annotations

from pathlib import Path

import pytest

from megatron_async_rl.config.durable import digest
from megatron_async_rl.config.problem import UserError
from megatron_async_rl.flow.starts import (
    FILE,
    Start,
    config_of,
    read_starts,
    record_start,
    start_of_step,
)
from megatron_async_rl.metrics.json_lines import CHECKSUM, EARLIER_CHECKSUM, with_checksum


def start(step: int, config: str = "") -> Start:
    return Start(
        step=step,
        time=1.0,
        config=config,
        device="cpu",
        ranks=2,
        layout={"tensor": 2},
        threads=1,
        software={"torch": "2"},
        weights="0" * 16,
        data={},
        code={},
    )


def test_lines_are_read_as_they_were_written(tmp_path: Path) -> None:
    assert read_starts(tmp_path) == []
    written = [start(0), start(5, "a")]
    for one in written:
        record_start(tmp_path, one)
    with open(tmp_path / FILE, "a", encoding="utf-8") as file:
        file.write('{"step": 9')  # a crash cut the line
    assert read_starts(tmp_path) == written
    record_start(tmp_path, start(9))
    assert read_starts(tmp_path) == [*written, start(9)], "the next start cuts it off"


def test_a_step_was_made_by_the_last_start_before_it() -> None:
    first, crashed, resumed, rewound = start(0), start(5), start(5, "again"), start(3)
    starts = [first, crashed, resumed, rewound]
    assert start_of_step(starts, 3) is first
    assert start_of_step(starts, 4) is rewound
    assert start_of_step(starts[:3], 5) is first
    assert start_of_step(starts[:3], 6) is resumed
    assert start_of_step([resumed], 5) is None


def test_the_settings_of_a_start_are_found_by_their_digest(tmp_path: Path) -> None:
    (tmp_path / "config.yaml").write_text("new")
    (tmp_path / "config.0.yaml").write_text("old")
    assert config_of(tmp_path, start(0, digest(b"old"))).name == "config.0.yaml"
    assert config_of(tmp_path, start(4, digest(b"new"))).name == "config.yaml"
    with pytest.raises(UserError, match=r"start at step 4(?s:.)*restore config\.yaml"):
        config_of(tmp_path, start(4, digest(b"lost")))


@pytest.mark.parametrize("line", ["[]", '{"step": 1}', "not json"])
def test_a_damaged_line_is_named(tmp_path: Path, line: str) -> None:
    record_start(tmp_path, start(0))
    with open(tmp_path / FILE, "a", encoding="utf-8") as file:
        file.write(line + "\n")
    with pytest.raises(UserError, match=rf"{FILE}:2(?s:.)*a start of a run"):
        read_starts(tmp_path)


def test_lines_of_earlier_versions_have_another_checksum_or_none(tmp_path: Path) -> None:
    written = start(3).model_dump_json()
    lines = [written, with_checksum(written).replace(CHECKSUM, EARLIER_CHECKSUM)]
    (tmp_path / FILE).write_text("".join(f"{line}\n" for line in lines))
    assert read_starts(tmp_path) == [start(3), start(3)]
    (tmp_path / FILE).write_text(lines[1].replace('"step":3', '"step":4') + "\n")
    with pytest.raises(UserError, match=rf"{FILE}:1\n  is not a start of a run: .* checksum"):
        read_starts(tmp_path)

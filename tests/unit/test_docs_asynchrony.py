"""The page on asynchrony keeps what it promises: each way to run, set as the page sets it, is
accepted."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from megatron_async_rl.config.load import load
from megatron_async_rl.plan.preflight import preflight
from tests.written_run import write_run

PAGE = Path(__file__).resolve().parents[2] / "docs" / "asynchrony.md"
WAYS = dict(
    re.findall(r"^\| ([^|]+) \| (`[a-z_]+\.[a-z_]+: [^|]+) \|$", PAGE.read_text(), re.MULTILINE)
)


def test_the_page_has_six_ways() -> None:
    assert len(WAYS) == 6


@pytest.mark.parametrize("way", WAYS)
def test_a_way_to_run_is_accepted_as_it_stands_on_the_page(way: str, tmp_path: Path) -> None:
    settings = [f"{key}={value}" for key, value in re.findall(r"`([a-z_.]+): ([^`]+)`", WAYS[way])]
    assert settings
    assert (
        preflight(load(write_run(tmp_path), [*settings, "run.steps=100"]), all_data=False).problems
        == ()
    )

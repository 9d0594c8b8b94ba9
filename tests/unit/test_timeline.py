"""Tests of the timeline of a process: writing while it runs, and reading, also after a crash."""

from __future__ import annotations

from pathlib import Path

import pytest

from megatron_async_rl.metrics import timeline as module
from megatron_async_rl.metrics.timeline import Span, Timeline, read_timeline, shares


class Clock:
    def __init__(self) -> None:
        self.now = 1000.0

    def time(self) -> float:
        return self.now


@pytest.fixture
def clock(monkeypatch: pytest.MonkeyPatch) -> Clock:
    clock = Clock()
    monkeypatch.setattr(module, "time", clock)
    return clock


def test_a_span_is_on_disk_when_the_next_one_begins(tmp_path: Path, clock: Clock) -> None:
    track = Timeline(tmp_path, "rank 0")
    for at, state, waiting_for in (
        (0, "waiting", "batch"),
        (2, "training", ""),
        (3, "training", ""),
        (7, "publishing", ""),
    ):
        clock.now = 1000.0 + at
        track.enter(state, waiting_for)
    spans = read_timeline(tmp_path)["rank 0"]
    assert [(span.state, span.waiting_for, span.start, span.end) for span in spans] == [
        ("waiting", "batch", 1000.0, 1002.0),
        ("training", "", 1002.0, 1007.0),
    ]
    clock.now = 1008.0
    track.close()
    track.enter("training")
    track.close()
    assert [span.state for span in read_timeline(tmp_path)["rank 0"]] == [
        "waiting",
        "training",
        "publishing",
    ]


def test_a_restart_continues_after_a_truncated_line(tmp_path: Path, clock: Clock) -> None:
    first = Timeline(tmp_path, "engine-0")
    first.enter("busy")
    clock.now += 1
    first.enter("idle")
    with open(tmp_path / "timeline" / "engine-0.jsonl", "a") as file:
        file.write('{"state": "idle", "sta')
    second = Timeline(tmp_path, "engine-0")
    second.enter("loading")
    clock.now += 1
    second.close()
    assert [span.state for span in read_timeline(tmp_path)["engine-0"]] == ["busy", "loading"]


def test_rank_0_comes_first_and_engines_are_sorted_by_number(tmp_path: Path, clock: Clock) -> None:
    for track in ("engine-10", "engine-2", "rank 0"):
        timeline = Timeline(tmp_path, track)
        timeline.enter("busy")
        clock.now += 1
        timeline.close()
    assert list(read_timeline(tmp_path)) == ["rank 0", "engine-2", "engine-10"]


def test_a_run_without_timelines_has_no_tracks(tmp_path: Path) -> None:
    assert read_timeline(tmp_path) == {}


def test_shares_cover_the_window_and_name_the_event_waited_for() -> None:
    def span(state: str, start: float, end: float, waiting_for: str = "") -> Span:
        return Span(track="engine-0", state=state, waiting_for=waiting_for, start=start, end=end)

    spans = [
        span("busy", 0, 4),
        span("idle", 4, 6, "prompts"),
        span("loading", 6, 7),
        span("busy", 7, 20),
    ]
    parts = shares(spans, 2.0, 12.0)
    assert parts == pytest.approx(
        {("busy", ""): 0.7, ("idle", "prompts"): 0.2, ("loading", ""): 0.1}
    )
    assert next(iter(parts)) == ("busy", "")


def test_a_full_disk_loses_spans_and_is_logged_once(
    tmp_path: Path, clock: Clock, caplog: pytest.LogCaptureFixture
) -> None:
    # Every write to /dev/full fails as on a full disk.
    (tmp_path / "timeline").mkdir()
    (tmp_path / "timeline" / "engine-0.jsonl").symlink_to("/dev/full")
    track = Timeline(tmp_path, "engine-0")
    for state in ("busy", "paused", "busy"):
        track.enter(state)
    track.close()
    assert [record.getMessage() for record in caplog.records] == [
        "the timeline of engine-0 cannot be written: [Errno 28] No space left on device"
    ]

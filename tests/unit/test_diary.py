"""What an engine's timeline says it did, from its phase and its responses."""

from __future__ import annotations

from pathlib import Path

from megatron_async_rl.observe.timeline import read_timeline
from megatron_async_rl.rollout.busy import BusyClock
from megatron_async_rl.rollout.diary import Diary
from megatron_async_rl.rollout.phase import TAGS, Phase


def test_an_engine_is_busy_paused_loading_idle_and_asleep_in_its_timeline(tmp_path: Path) -> None:
    phase = Phase("engine-3")
    diary = Diary(tmp_path, "engine-3", phase)
    busy = BusyClock(diary.turned)
    busy.begin()
    busy.begin()
    phase.pause()
    busy.pause(True)
    busy.begin()
    diary.load()
    busy.end()
    phase.resume()
    busy.pause(False)
    busy.end()
    busy.end()
    phase.sleep()
    busy.pause(True)
    diary.load()
    phase.wake(TAGS)
    busy.pause(False)
    diary.close()
    assert [(span.state, span.waiting_for) for span in read_timeline(tmp_path)["engine-3"]] == [
        ("busy", ""),
        ("paused", "weights"),
        ("loading", ""),
        ("busy", ""),
        ("idle", "prompts"),
        ("asleep", "the policy"),
        ("loading", ""),
        ("idle", "prompts"),
    ]


def test_an_engine_of_no_run_writes_no_timeline(tmp_path: Path) -> None:
    diary = Diary(None, "engine-0", Phase("engine-0"))
    diary.turned(1)
    diary.close()
    assert list(tmp_path.iterdir()) == []

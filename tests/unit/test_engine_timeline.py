"""An engine's timeline, written from its state and its responses."""

from __future__ import annotations

from pathlib import Path

from megatron_async_rl.metrics.timeline import read_timeline
from megatron_async_rl.rollout.engine_state import TAGS, BusyClock, EngineState, EngineTimeline


def test_an_engine_is_busy_paused_loading_idle_and_asleep_in_its_timeline(tmp_path: Path) -> None:
    state = EngineState("engine-3")
    timeline = EngineTimeline(tmp_path, "engine-3", state)
    busy = BusyClock(timeline.changed)
    busy.begin()
    busy.begin()
    state.pause()
    busy.pause(True)
    busy.begin()
    timeline.load()
    busy.end()
    state.resume()
    busy.pause(False)
    busy.end()
    busy.end()
    state.sleep()
    busy.pause(True)
    timeline.load()
    state.wake(TAGS)
    busy.pause(False)
    timeline.close()
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
    timeline = EngineTimeline(None, "engine-0", EngineState("engine-0"))
    timeline.changed(1)
    timeline.close()
    assert list(tmp_path.iterdir()) == []

"""Whole displays and summaries of runs, as a terminal and a pipe show them."""

from __future__ import annotations

import json
from collections import deque
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from rich.console import Console

from megatron_async_rl.report import progress
from megatron_async_rl.report.progress import (
    ASCII_BLOCKS,
    DisplayState,
    Progress,
    live_panel,
    plain_line,
    print_summary,
    sampling_progress,
    show_evaluation,
    sparkline,
)
from megatron_async_rl.samples.types import Prompt, Sample
from megatron_async_rl.watchdog.events import Status
from tests.full_run import row_of, written
from tests.stored_pages import RecordedConsole, require_page


def sample(text: str, prompt: str, reward: float) -> Sample:
    zeros = np.zeros(2, dtype=np.int32)
    return Sample(
        id="1-0",
        prompt=Prompt(id="p", text=prompt, token_ids=(1,)),
        response_ids=zeros,
        behavior_logprobs=zeros.astype(np.float32),
        versions=zeros,
        loss_mask=np.ones(2, dtype=np.uint8),
        text=text,
        finish_reason="stop",
        reward=reward,
        started_at=0.0,
        finished_at=1.0,
    )


def rows(first: int, last: int, **changes: Any) -> deque[dict[str, Any]]:
    found = deque(row_of(step, 60) | changes for step in range(first, last + 1))
    return deque({k: v for k, v in one.items() if v is not None} for one in found)


TRAINING = Status(phase="training", step=3, steps=60, time=0.0, before=0.25, detail="step 4")
SUPERVISED = {"ratio/ess_ratio": None, "tokens/generated": None, "reward/mean": None}
STATES = {
    "no row": DisplayState(run_dir="RUN", steps=9),
    "a phase": DisplayState(
        run_dir="RUN", steps=9, status=replace(TRAINING, phase="starting"), phase_s=61.0
    ),
    "one row": DisplayState(run_dir="RUN", steps=60, rows=rows(1, 1), status=TRAINING),
    "many": DisplayState(
        run_dir="RUN",
        steps=60,
        rows=rows(2, 46),
        status=TRAINING,
        elapsed_s=3700.0,
        phase_s=59.0,
        silence_s=50.0,
        anomalies=1,
        warning="[bold]one[/bold]",
        sample=sample("a\x1b[31m response", "short", 0.5),
    ),
    "silent": DisplayState(
        run_dir="RUN",
        steps=46,
        rows=rows(2, 46, **{"eval/version": 44, "eval/mean": 0.5}),
        status=TRAINING,
        silence_s=50.1,
        anomalies=2,
        warning="two",
        sample=sample("x" * 200, "".join(chr(97 + index % 26) for index in range(61)), 0.25),
    ),
    "supervised": DisplayState(
        run_dir="RUN",
        steps=60,
        rows=rows(2, 8, **SUPERVISED, **{"eval/version": 4, "eval/loss": 0.5}),
        status=replace(TRAINING, measure="loss"),
        sample=sample("y", "q" * 60, float("nan")),
    ),
    "without its parts": DisplayState(
        run_dir="RUN",
        steps=60,
        rows=rows(9, 9, **{"engine/versions": None, "gac/skips": 2, "lag/max": None}),
    ),
    "no loss": DisplayState(
        run_dir="RUN",
        steps=60,
        rows=rows(20, 20, **SUPERVISED, **{"policy/loss": None, "time/step_s": 0.0}),
        status=TRAINING,
    ),
    "nothing trained": DisplayState(
        run_dir="RUN", steps=60, rows=rows(20, 20, **SUPERVISED, **{"tokens/trained": None})
    ),
}


def test_whole_displays_are_those_stored() -> None:
    text = ""
    for name, state in STATES.items():
        console = RecordedConsole()
        console.print(live_panel(state, ascii_only=False))
        console.print(live_panel(state, ascii_only=True))
        text += f"{name}\n{plain_line(state)}\n{console.text}"
        text += f"left {state.left_s}, speed {state.tokens_per_s}, step {state.step_s}\n"
    require_page("progress/displays", text)


def test_whole_summaries_are_those_stored(tmp_path: Path) -> None:
    other = written(tmp_path / "the_other", 5)
    run = written(tmp_path / "run", observe={"beside": str(other)})
    (run / "report.png").touch()
    text = ""
    for change in ("", "eval", "steps"):
        if change == "eval":
            (run / "status.json").unlink()
        elif change == "steps":
            (run / "metrics.jsonl").unlink()
        console = RecordedConsole()
        print_summary(run, console)
        text += f"{change}\n{console.text}"
    require_page("progress/summaries", text.replace(str(tmp_path), "FOLDER"))


def test_whole_evaluations_are_those_stored() -> None:
    one = {"mean_reward": 0.5, "reward_errors": 0, "pass_at": {"1": 0.5, "4": None}}
    one |= {"samples": 8, "prompts": 2, "truncated": 0.125, "tokens": 1200}
    other = {**one, "set": "sums", "mean_reward": None, "reward_errors": 3, "parts": {"a": 0.25}}
    text = ""
    for result in ({**one, "seconds": 2.0}, {**other, "seconds": 0.0, "others": [other]}):
        console = RecordedConsole()
        show_evaluation(result, "FILE", console)
        text += console.text
    require_page("progress/evaluations", text)


class Clock:
    """Stands in for the module `time`."""

    def __init__(self) -> None:
        self.now = 100.0

    def monotonic(self) -> float:
        return self.now


def test_a_pipe_gets_a_line_every_few_seconds_and_at_the_last_prompt(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(progress, "time", clock := Clock())
    console = RecordedConsole()
    with sampling_progress(console, 9) as shown:
        for seconds, answered in ((0.0, 1), (4.9, 2), (0.1, 3), (4.9, 4), (0.2, 5), (0.1, 9)):
            clock.now += seconds
            shown(answered, 100 * answered)
    assert console.text.splitlines() == [
        "sampled 3 of 9 prompts, 60 tokens/s",
        "sampled 5 of 9 prompts, 50 tokens/s",
        "sampled 9 of 9 prompts, 88 tokens/s",
    ]


def test_a_terminal_gets_a_bar_of_the_prompts(monkeypatch: pytest.MonkeyPatch) -> None:
    console = Console(file=(recorded := RecordedConsole()).file, force_terminal=True, width=100)
    with sampling_progress(console, 9) as shown:
        shown(4, 100)
    assert "4/9" in recorded.text
    erase_line = "\x1b[2K"
    assert recorded.text.endswith(erase_line), "the bar is removed at the end"


def test_a_pipe_gets_lines_at_new_phases_and_after_some_seconds(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(progress, "time", clock := Clock())
    console = RecordedConsole()
    shown = Progress(tmp_path, 9, console)
    lines = [json.dumps(row_of(step, 9)) + "\n" for step in range(1, 6)]
    file, status = tmp_path / "metrics.jsonl", tmp_path / "status.json"
    plan = ((0, "loading", 0.0), (1, "training", 1.0), (2, "training", 4.9), (2, "training", 0.1))
    for count, phase, seconds in (*plan, (2, "training", 60.0), (5, "training", 1.0)):
        clock.now += seconds
        file.write_text("".join(lines[:count]))
        status.write_text(json.dumps({"phase": phase, "step": count, "steps": 9, "time": 0.0}))
        shown.update()
    shown.close()
    require_page("progress/pipe", console.text)


def test_a_terminal_is_redrawn_at_most_twice_a_second(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(progress, "time", clock := Clock())
    recorded = RecordedConsole()
    shown = Progress(tmp_path, 9, Console(file=recorded.file, force_terminal=True, width=100))
    drawn = []
    for seconds, phase in (
        (0.0, "a"),
        (0.49, "a"),
        (0.01, "a"),
        (0.1, "b"),
        (0.4, "b"),
        (1.0, "b"),
    ):
        clock.now += seconds
        status = {"phase": phase, "step": 0, "steps": 9, "time": 0.0}
        (tmp_path / "status.json").write_text(json.dumps(status))
        before = len(recorded.text)
        shown.update()
        drawn.append(len(recorded.text) > before)
    shown.close()
    assert drawn == [True, False, True, True, False, True]


def test_a_sparkline_shows_means_of_equal_parts() -> None:
    for values, width, blocks, line in (
        ([], 4, "01", ""),
        ([float("nan"), float("inf")], 4, "01", ""),
        ([1.0], 4, "01", "0"),
        ([1.0, 1.0], 4, "01", "00"),
        ([0.0, 1.0, 2.0, 3.0], 4, "0123", "0123"),
        ([3.0, 2.0, float("nan"), 1.0, 0.0], 4, "0123", "3210"),
        ([0.0, 2.0, 2.0, 4.0, 8.0, 8.0], 3, "0123456789", "039"),
        ([0.0, 1.0, 2.0], 2, ASCII_BLOCKS, "_%"),
    ):
        assert sparkline(values, width, blocks) == line, values

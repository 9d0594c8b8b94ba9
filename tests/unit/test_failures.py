"""The failure of a run is handed over as fields, and chosen by what the errors are."""

from __future__ import annotations

import io
import os
import socket
import time
from dataclasses import replace
from pathlib import Path

import pytest
from rich.console import Console

from megatron_async_rl.config.rules import validated
from megatron_async_rl.flow.errors import (
    LATE_SHOWN,
    EngineFailed,
    LateGroup,
    RewardFailed,
    batch_timeout,
    require_a_reward,
    reward_failed,
)
from megatron_async_rl.launch import launcher
from megatron_async_rl.launch.ending import explain_failure
from megatron_async_rl.policy.parallel import RankZeroFailed
from megatron_async_rl.samples.types import Sample
from megatron_async_rl.watchdog.events import (
    Failure,
    Status,
    failure_of,
    first_failure,
    record_failure,
    timed_out,
    write_status,
)
from megatron_async_rl.watchdog.logs import DEADLINE, PRIMARY, SECONDARY
from megatron_async_rl.watchdog.progress_monitor import ProgressMonitor, write_whole
from megatron_async_rl.watchdog.stall import HostSnapshot, publish
from megatron_async_rl.watchdog.watch import DeadlineExceeded, ProcessDied
from tests.cases import looped
from tests.logged_samples import row, sample
from tests.written_run import config_tree


class Foreign(RuntimeError):
    """An error as torch or Ray raises it."""


@looped(
    ("error", "kind"),
    [
        (RewardFailed("Connection refused by the grader; the reward timed out"), PRIMARY),
        (ValueError("a bad tensor"), PRIMARY),
        (DeadlineExceeded("rank 0", "a batch", 5.0), DEADLINE),
        (ProcessDied("the process that should answer is dead"), SECONDARY),
        (RankZeroFailed("ValueError: a bad tensor"), SECONDARY),
        (BrokenPipeError("[Errno 32]"), SECONDARY),
        (Foreign("Connection closed by peer [127.0.0.1]:5"), SECONDARY),
    ],
)
def test_what_an_error_is_does_not_rest_on_words_of_our_own(
    error: BaseException, kind: int
) -> None:
    assert failure_of(error, Path("log")).kind == kind


def chained(error: BaseException, cause: BaseException) -> BaseException:
    error.__cause__ = cause
    return error


@looped(
    ("error", "over"),
    [
        (DeadlineExceeded("rank 0", "a batch", 5.0), True),
        (chained(ValueError("no batch"), TimeoutError()), True),
        (EngineFailed("no rollout engine is left"), True),
        (RankZeroFailed("no words", timed_out=True), True),
        (Foreign("[gloo] Timed out waiting 1800000ms"), True),
        (RankZeroFailed("the reward timed out"), False),
        (RewardFailed("the reward timed out"), False),
        (ValueError("a bad tensor"), False),
    ],
)
def test_a_wait_that_was_over_is_known_by_its_fields(error: BaseException, over: bool) -> None:
    assert timed_out(error) == over


def failure(process: str, kind: int, at: float) -> Failure:
    return Failure(process=process, what=f"of {process}", where="log", kind=kind, time=at)


def test_a_failure_that_cannot_be_recorded_raises_nothing(tmp_path: Path) -> None:
    (tmp_path / "watch").write_text("a file where the folder would be")
    record_failure(tmp_path, failure("rank 0", PRIMARY, 1.0))
    assert first_failure(tmp_path) is None


def test_files_of_one_name_are_not_written_over_each_other_before_they_are_whole(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A rank's heartbeat and its failure, a node's summary and its snapshot: each pair comes from
    two threads. The snapshot of a stall comes from every machine's launcher."""
    host, replace_file = socket.gethostname(), os.replace
    partial: list[str] = []

    def watched(source: Path, target: Path) -> None:
        partial.append(Path(source).name)
        replace_file(source, target)

    monkeypatch.setattr(os, "replace", watched)
    publish(tmp_path, HostSnapshot(host=host, processes=()))
    ProgressMonitor(tmp_path).look()
    record_failure(tmp_path, failure(host, PRIMARY, 1.0))
    for machine in (host, "second"):
        monkeypatch.setattr(socket, "gethostname", lambda machine=machine: machine)
        write_whole(tmp_path / "stall.txt", "picture")
    assert len(set(partial)) == len(partial) == 5
    assert {path.suffix for path in (tmp_path / "watch").iterdir()} == {
        ".snapshot",
        ".summary",
        ".failure",
    }


def test_what_killed_processes_left_half_written_goes_with_the_next_start(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    config = validated({**config_tree(), "run": {"dir": str(tmp_path), "steps": 1}})
    write_status(tmp_path, Status(phase="failed", step=0, steps=1, time=0.0))
    (tmp_path / "mine.partial").touch()
    kept = {path.name for path in tmp_path.iterdir()}
    monkeypatch.setattr(os, "replace", lambda *_: None)  # as if it were killed before
    (tmp_path / "samples").mkdir()
    (tmp_path / "watch").mkdir()
    halves = ("status.json", "config.yaml", "stall.txt", "watch/rank 0.json", "samples/outcomes-0")
    for name in (*halves, "logmark.json", "trackers.json", "engines"):
        write_whole(tmp_path / name, "")
    assert len(list(tmp_path.rglob("*.partial"))) == 9
    monkeypatch.undo()
    launcher._prepare_directory(config)
    left = {path.name for path in tmp_path.rglob("*") if path.is_file()}
    assert left == {*kept, "config.yaml"}


def test_the_earliest_of_the_gravest_kind_is_the_failure_of_the_run(tmp_path: Path) -> None:
    assert first_failure(tmp_path) is None
    for one in (
        failure("rank 2", SECONDARY, 1.0),
        failure("rank 0", PRIMARY, 3.0),
        failure("rank 1", PRIMARY, 2.0),
        failure("rank 3", DEADLINE, 0.5),
    ):
        record_failure(tmp_path, one)
    (tmp_path / "watch" / "half.failure").write_text("{")
    assert first_failure(tmp_path) == failure("rank 1", PRIMARY, 2.0)


def explained(run_dir: Path) -> str:
    written = io.StringIO()
    explain_failure(run_dir, Console(file=written, width=200))
    return written.getvalue()


def test_the_launcher_shows_what_where_and_the_fix_and_logs_only_for_consequences(
    tmp_path: Path,
) -> None:
    (tmp_path / "logs").mkdir()
    (tmp_path / "logs" / "engine-0.log").write_text(
        "Traceback (most recent call last):\n  File 'x', line 1\nMemoryError: no room\n"
    )
    own = replace(failure("rank 0", SECONDARY, time.time()), what="ProcessDied: it is dead")
    record_failure(tmp_path, own)
    assert "The run failed: MemoryError: no room" in explained(tmp_path)
    record_failure(tmp_path, replace(own, kind=PRIMARY, what="DataError: line 3", fix="mend it"))
    assert "The run failed: DataError: line 3\n  fix: mend it\nLog: log" in explained(tmp_path)


def test_a_wait_that_was_over_keeps_its_fix_unless_a_log_holds_a_cause(tmp_path: Path) -> None:
    (tmp_path / "logs").mkdir()
    log = tmp_path / "logs" / "rank_1.log"
    own = replace(failure("rank 0", DEADLINE, 1.0), what="DeadlineExceeded: it", fix="wait more")
    record_failure(tmp_path, own)
    log.write_text("Traceback (most recent call last):\n  File 'x', line 1\nEOFError: gone\n")
    assert "DeadlineExceeded: it\n  fix: wait more" in explained(tmp_path)
    log.write_text("Traceback (most recent call last):\n  File 'x', line 1\nMemoryError: no room\n")
    assert "The run failed: MemoryError: no room" in explained(tmp_path)


def test_a_batch_that_does_not_come_names_its_first_groups_and_why_they_wait() -> None:
    late = [
        LateGroup(index=one, prompt=f"p{one}", seconds=9.0 - one, engines=range(one))
        for one in range(LATE_SHOWN)
    ]
    late[2] = replace(late[2], unscored=True)
    message = str(batch_timeout(7, 60.0, late, [6, 7]))
    first, *groups = message.splitlines()
    assert f"version 7 in 60 s; {LATE_SHOWN} groups" in first
    assert "the engines hold version 6, 7" in first
    assert [group.strip() for group in groups[:3]] == [
        "group 0 (prompt p0): 9.0 s, on no engine yet",
        "group 1 (prompt p1): 8.0 s, on engine 0",
        "group 2 (prompt p2): 7.0 s, waits for its reward (per: group)",
    ]
    assert len(groups) == LATE_SHOWN, "all are shown"
    more = str(batch_timeout(7, 60.0, [*late, late[0]], [6, 7])).splitlines()
    assert len(more) == LATE_SHOWN + 2
    assert more[-1].strip() == "and 1 more"


def test_samples_without_a_reward_stop_the_run_only_if_all_are() -> None:
    def unrewarded(one: Sample) -> Sample:
        return replace(one, reward=float("nan"), reward_error="KeyError: no answer")

    sound, failed = row(sample(1, 0)), row(sample(0, 0, unrewarded))
    require_a_reward([failed, sound], 3)
    with pytest.raises(RewardFailed, match=r"all 2 responses of the batch for step 3(?s:.)*answer"):
        require_a_reward([failed, failed], 3)
    assert "on sample 0-0: KeyError: no answer" in str(reward_failed([failed]))
    assert "on sample 0-0 (and 1 more of its group): Key" in str(reward_failed([failed] * 2))

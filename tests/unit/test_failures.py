"""The failure of a run is handed over as fields, and chosen by what the errors are."""

from __future__ import annotations

import io
import time
from dataclasses import replace
from pathlib import Path

import pytest
from rich.console import Console

from megatron_async_rl.flow.errors import EngineFailed, RewardFailed
from megatron_async_rl.launch import launcher
from megatron_async_rl.policy.parallel import RankZeroFailed
from megatron_async_rl.watchdog.deadline import DeadlineExceeded, ProcessDied
from megatron_async_rl.watchdog.events import (
    Failure,
    failure_of,
    first_failure,
    record_failure,
    timed_out,
)
from megatron_async_rl.watchdog.logs import DEADLINE, PRIMARY, SECONDARY


class Foreign(RuntimeError):
    """As torch or Ray raises."""


@pytest.mark.parametrize(
    ("error", "kind"),
    [
        (RewardFailed("Connection refused by the grader; the reward timed out"), PRIMARY),
        (ValueError("a bad tensor"), PRIMARY),
        (DeadlineExceeded("rank 0", "a batch", 5.0), DEADLINE),
        (ProcessDied("who was to answer is dead"), SECONDARY),
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


@pytest.mark.parametrize(
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
    launcher._explain_failure(run_dir, Console(file=written, width=200))
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

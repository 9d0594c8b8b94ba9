"""However a run ends, its status is final and names the process and the signal that ended it."""

from __future__ import annotations

import io
import os
import signal
import subprocess
import time
from collections.abc import Callable
from contextlib import ExitStack
from pathlib import Path

import pytest
from rich.console import Console

from megatron_async_rl.config.rules import validated
from megatron_async_rl.launch import launcher
from megatron_async_rl.launch.addresses import Nodes
from megatron_async_rl.launch.launcher import LocalRanks
from megatron_async_rl.launch.rendezvous import PeerNodes
from megatron_async_rl.launch.run_lock import RunDirectoryError, usable
from megatron_async_rl.report.progress import Progress
from megatron_async_rl.watchdog import watch
from megatron_async_rl.watchdog.events import Status, described, read_status
from megatron_async_rl.watchdog.processes import RUN_ID_VARIABLE
from tests.written_run import config_tree

TRAINING = (
    """echo '{"phase": "training", "step": 3, "steps": 5, "time": 1.0}' > s; mv s status.json; """
)
SUMMARY = """echo '
Root Cause (first observed failure):
[0]:
  rank      : 0 (local_rank: 0)
  exitcode  : -{number} (pid: 4712)  ({name})
  traceback : Signal {number} ({name}) received by PID 4712'; exit 1"""
GOT = "torch.distributed.elastic.multiprocessing.api.SignalException: Process 5 got signal: 15"

Ended = tuple[int, Status, str]


@pytest.fixture
def run_of(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Callable[[str], Ended]:
    """`run_of(script)`: the launcher's work, with `script` instead of torchrun and its ranks;
    returns its exit code, the final status, and what it showed."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(launcher, "POLL_S", 0.02)
    config = validated({**config_tree(), "run": {"dir": str(tmp_path / "run"), "steps": 5}})

    def begin(script: str) -> Callable[[LocalRanks, str, ExitStack], subprocess.Popen[bytes]]:
        def start(ranks: LocalRanks, run_id: str, held: ExitStack) -> subprocess.Popen[bytes]:
            with open(ranks.log, "wb") as log:
                process = subprocess.Popen(
                    ["bash", "-c", script],
                    cwd=config.run.dir,
                    env={**os.environ, RUN_ID_VARIABLE: run_id},
                    stdout=log,
                    stderr=log,
                    start_new_session=True,
                )
            # Before the launcher begins to watch, as ranks may be quick.
            while script.startswith(TRAINING) and read_status(config.run.dir) is None:
                time.sleep(0.01)
            return process

        return start

    def run(script: str) -> Ended:
        monkeypatch.setattr(launcher, "_start_ranks", begin(script))
        shown, nodes = io.StringIO(), Nodes()
        try:
            code = launcher.launch(
                config, Console(file=shown, width=300), nodes, PeerNodes(nodes), {}
            )
        finally:
            watch.stop()
        status = read_status(config.run.dir)
        assert status is not None
        return code, status, shown.getvalue()

    return run


@pytest.mark.parametrize(
    ("script", "words"),
    [
        ("kill -KILL $$", r"torchrun (pid {pid}), which holds the ranks, was ended by SIGKILL"),
        (
            f"echo '{GOT}'; exit 1",
            r"torchrun (pid {pid}), which holds the ranks, was ended by SIGTERM",
        ),
        (
            SUMMARY.format(number=9, name="SIGKILL"),
            "rank 0: Signal 9 (SIGKILL) received by PID 4712",
        ),
        (
            SUMMARY.format(number=15, name="SIGTERM"),
            "rank 0: Signal 15 (SIGTERM) received by PID 4",
        ),
        ("exit 3", "no process left a message"),
    ],
)
def test_a_crash_is_final_with_the_process_and_its_signal(
    run_of: Callable[[str], Ended], script: str, words: str
) -> None:
    code, status, shown = run_of(f"{TRAINING}echo $$ > pid; {script}")
    words = words.format(pid=Path("run/pid").read_text().strip())
    assert (code, status.phase, status.step) == (1, "failed", 3)
    assert words in (status.error or "")
    assert words in shown
    assert Path((status.log or "").rpartition(":")[0] or status.log or "").exists()


def test_a_run_that_never_wrote_a_status_has_one_in_the_end(run_of: Callable[[str], Ended]) -> None:
    code, status, _ = run_of("kill -KILL $$")
    assert (code, status.phase, status.step, status.steps) == (1, "failed", 0, 5)


def test_rank_0s_account_of_its_failure_stays(run_of: Callable[[str], Ended]) -> None:
    failed = TRAINING.replace("training", "failed").replace("1.0}", '1.0, "error": "E: its own"}')
    failure = (
        """{"process": "rank 0", "what": "E: its own", "where": "log", "kind": 0, "time": 1}"""
    )
    _, status, _ = run_of(
        f"{failed}mkdir -p watch; echo '{failure}' > 'watch/rank 0.failure'; exit 1"
    )
    assert status.error == "E: its own"


def test_a_run_that_is_killed_by_a_second_ctrl_c_is_stopped(run_of: Callable[[str], Ended]) -> None:
    """The first is for a stop after the step."""
    twice = "kill -INT $PPID; until [[ -e stop ]]; do sleep 0.02; done; kill -INT $PPID; sleep 3600"
    code, status, _ = run_of(f"{TRAINING}sleep 0.2; {twice}")
    assert (code, status.phase, status.step) == (130, "stopped", 3)
    assert (
        status.detail == f"mar train (pid {os.getpid()}) received SIGINT, SIGINT and ended the run"
    )


def raising(monkeypatch: pytest.MonkeyPatch, error: BaseException) -> None:
    def update(_: object) -> None:
        raise error

    monkeypatch.setattr(Progress, "update", update)


def test_a_launcher_that_crashes_reports_it_in_the_status(
    run_of: Callable[[str], Ended], monkeypatch: pytest.MonkeyPatch
) -> None:
    raising(monkeypatch, RuntimeError("a mistake of ours"))
    with pytest.raises(RuntimeError, match="a mistake of ours"):
        run_of("sleep 3600")
    status = read_status(Path("run"))
    assert status is not None
    assert status.phase == "failed"
    assert status.error == f"mar train (pid {os.getpid()}): RuntimeError: a mistake of ours"


@pytest.mark.parametrize("filename", ["run/events.jsonl", None])
def test_a_directory_that_is_lost_on_the_way_ends_the_run_without_a_traceback(
    run_of: Callable[[str], Ended], monkeypatch: pytest.MonkeyPatch, filename: str | None
) -> None:
    raising(monkeypatch, OSError(30, "Read-only file system", filename))
    code, status, shown = run_of("sleep 3600")
    assert (code, status.phase) == (1, "failed")
    told, _, fix = shown.partition("\n  fix: ")
    assert "The run was ended because its directory cannot be used: [Errno 30] Read-only" in told
    assert fix == "free space there or correct its permissions, or choose another run.dir\n"


@pytest.mark.parametrize("where", ["run", "run/watch", "run/logs", "run/lock", "run/config.yaml"])
def test_a_directory_that_cannot_be_written_is_refused_with_its_name(
    run_of: Callable[[str], Ended], where: str
) -> None:
    place = Path(where)
    place.parent.mkdir(exist_ok=True)
    place.mkdir() if where.endswith(("lock", "yaml")) else place.touch()
    with pytest.raises(RunDirectoryError, match=rf"run\.dir\n  .*{where}"), usable(Path("run")):
        run_of("exit 0")
    if where == "run/watch":
        joined = os.environ.get(watch.INHERITED, "").partition("\n")[0]
        assert joined != str(Path("run").resolve()), "processes that start later would join it"


def test_errors_elsewhere_are_not_taken_for_the_run_s_directory(tmp_path: Path) -> None:
    elsewhere = FileNotFoundError(2, "No such file", "/usr/bin/nothing")
    with pytest.raises(FileNotFoundError), usable(tmp_path):
        raise elsewhere


def test_a_process_that_received_a_signal_is_named_with_it(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Ray turns SIGTERM into this exception."""
    monkeypatch.setattr(watch, "_process_name", "rank 0")
    words = f"rank 0 (pid {os.getpid()}) was ended by SIGTERM"
    assert described(SystemExit(int(signal.SIGTERM))) == words
    assert described(SystemExit(2)) == "SystemExit: 2"

"""One run at a time in a run's directory, whatever becomes of the launcher."""

from __future__ import annotations

import errno
import fcntl
import os
import socket
import subprocess
import sys
from pathlib import Path

import pytest

from megatron_async_rl.launch import run_lock
from megatron_async_rl.launch.run_lock import (
    RunDirectoryError,
    lock_run_dir,
    refuse_taken,
    request_engines,
)

LAUNCHER = """
import subprocess, sys, os, signal
from pathlib import Path
from megatron_async_rl.launch.run_lock import lock_run_dir
with lock_run_dir(Path(sys.argv[1])) as lock:
    ranks = subprocess.Popen(["cat"], stdout=subprocess.DEVNULL, pass_fds=(lock,))
    print("ready", flush=True)
    os.kill(os.getpid(), signal.SIGKILL)
"""


def test_a_second_run_is_refused_and_the_first_named_until_it_has_ended(tmp_path: Path) -> None:
    (tmp_path / "run").mkdir()
    (tmp_path / "run" / "lock").write_text(f"{os.getpid()} {'an-earlier-host' * 9}\n")
    with (
        lock_run_dir(tmp_path / "run"),
        pytest.raises(
            RunDirectoryError,
            match=rf"`mar train` runs in it \(pid {os.getpid()} on {socket.gethostname()}\)",
        ),
        lock_run_dir(tmp_path / "run"),
    ):
        pytest.fail("two runs have the directory")
    with lock_run_dir(tmp_path / "run"):
        pass


def test_a_machine_with_the_number_of_another_is_refused_with_the_numbers(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    with lock_run_dir(tmp_path):
        monkeypatch.setattr(socket, "gethostname", lambda: "node1")
        with (
            pytest.raises(RunDirectoryError, match=r"give each its own --node-rank \(NODE_RANK\)"),
            lock_run_dir(tmp_path),
        ):
            pytest.fail("two machines have the directory")


def test_ranks_that_outlive_their_killed_launcher_keep_the_directory(tmp_path: Path) -> None:
    command = [sys.executable, "-c", LAUNCHER, str(tmp_path)]
    launcher = subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)
    assert launcher.stdin is not None
    assert launcher.stdout is not None
    assert launcher.stdout.readline() == "ready\n"
    launcher.wait(600)
    with (
        pytest.raises(
            RunDirectoryError, match=rf"\(pid {launcher.pid}\) was killed, and its ranks stop"
        ),
        lock_run_dir(tmp_path),
    ):
        pytest.fail("the ranks do not hold the directory")
    launcher.stdin.close()  # what the ranks wait for
    ended = subprocess.run(["flock", str(tmp_path / "lock"), "true"], timeout=600, check=False)
    assert ended.returncode == 0
    with lock_run_dir(tmp_path):
        pass


def test_a_directory_is_checked_for_another_run_without_a_change(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    file = tmp_path / "file"
    file.touch()
    with pytest.raises(RunDirectoryError, match=r"file is a file\n  fix: name a directory"):
        refuse_taken(file)
    run = tmp_path / "run"
    refuse_taken(run)
    assert not run.exists()
    with lock_run_dir(run), pytest.raises(RunDirectoryError, match="`mar train` runs in it"):
        refuse_taken(run)
    refuse_taken(run)

    def no_locks(descriptor: int, operation: int) -> None:
        raise OSError(errno.ENOLCK, os.strerror(errno.ENOLCK))

    monkeypatch.setattr(fcntl, "flock", no_locks)
    refuse_taken(run)


@pytest.mark.parametrize("number", [errno.ENOLCK, errno.ENOSYS, errno.EOPNOTSUPP])
def test_a_file_system_without_locks_is_reported_and_accepted(
    number: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    def refuse(descriptor: int, operation: int) -> None:
        raise OSError(number, os.strerror(number))

    monkeypatch.setattr(fcntl, "flock", refuse)
    with lock_run_dir(tmp_path) as lock:
        os.fstat(lock)
    assert f"{tmp_path}: no locks there ({os.strerror(number)})" in caplog.text


def test_another_fault_of_the_lock_is_raised(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def refuse(descriptor: int, operation: int) -> None:
        raise OSError(errno.EIO, "the disk is broken")

    monkeypatch.setattr(fcntl, "flock", refuse)
    with pytest.raises(OSError, match="the disk is broken"), lock_run_dir(tmp_path):
        pytest.fail("nothing was raised")


CONFIG = """
run: {dir: RUN, steps: 1}
model: {path: M}
data: {train: T}
flow: {prompts_per_step: 1, group_size: 2, async_ratio: 1}
rollout: {placement: PLACEMENT, sampling: {max_tokens: 4}, reward: {name: arithmetic}}
policy: {device: cpu, optimizer: {lr: 1.0e-3}}
objective: {loss: reinforce}
"""


def test_only_a_run_that_works_and_can_add_engines_accepts_a_new_number(
    tmp_path: Path,
) -> None:
    run_dir = tmp_path / "run"
    with pytest.raises(RunDirectoryError, match="it is not a run"):
        request_engines(run_dir, 2)
    run_dir.mkdir()
    config = run_dir / "config.yaml"
    config.write_text(CONFIG.replace("PLACEMENT", "colocated"))
    with lock_run_dir(run_dir):
        with pytest.raises(RunDirectoryError, match="on the policy's devices"):
            request_engines(run_dir, 2)
        config.write_text(CONFIG.replace("PLACEMENT", "disaggregated"))
        request_engines(run_dir, 2)
    assert (run_dir / "engines").read_text() == "2"
    with pytest.raises(RunDirectoryError, match="is not running"):
        request_engines(run_dir, 2)


def test_a_reader_that_holds_the_lock_for_a_moment_refuses_no_run(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    flock, waits = fcntl.flock, list[float]()
    with open(tmp_path / "lock", "w+b") as reader:
        flock(reader, fcntl.LOCK_SH)

        def wait(seconds: float) -> None:
            waits.append(seconds)
            if len(waits) == 2:
                flock(reader, fcntl.LOCK_UN)

        monkeypatch.setattr(run_lock.time, "sleep", wait)
        with lock_run_dir(tmp_path):
            assert len(waits) == 2
        refuse_taken(tmp_path)

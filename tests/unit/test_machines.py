"""The picture of a run over several machines: each looks at its own processes, and one that is gone
is named."""

from __future__ import annotations

import json
import os
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path

import pytest

from megatron_async_rl.watchdog import snapshots as views
from megatron_async_rl.watchdog import watchdog
from megatron_async_rl.watchdog.processes import RUN_ID_VARIABLE
from megatron_async_rl.watchdog.progress_monitor import FOLDER
from megatron_async_rl.watchdog.stall import Stall, gather
from megatron_async_rl.watchdog.watchdog import Watchdog

BEGIN = """
import socket, sys, time
from pathlib import Path
socket.gethostname = lambda: "second"
from megatron_async_rl.watchdog import watch, watchdog
watch.BEAT_S = watchdog.LOOK_S = 0.1
run_dir = Path(sys.argv[1])
watch.start(run_dir, sys.argv[2])
print("ready", flush=True)
"""
RANK = """
def train_on():
    with watch.working("training"):
        while True:
            watch.progress("steps")
            time.sleep(0.1)
train_on()
"""
LAUNCHER = """
looking = watchdog.Watchdog(run_dir, "second's", timeout_s=60, start_s=60, ranks=2, node=1, nodes=2)
while (stall := looking.look()) is None:
    time.sleep(0.1)
print(stall.text, flush=True)
"""
LEAVES = """
sys.stdin.read()
"""


@dataclass
class SecondMachine:
    """Its processes, which are these little programs."""

    run_dir: Path
    started: list[subprocess.Popen[str]] = field(default_factory=list)

    def start(self, name: str, code: str) -> subprocess.Popen[str]:
        command = [sys.executable, "-c", BEGIN + code, str(self.run_dir), name]
        environment = {**os.environ, RUN_ID_VARIABLE: "second's"}
        pipe = subprocess.PIPE
        process = subprocess.Popen(command, stdin=pipe, stdout=pipe, text=True, env=environment)
        self.started.append(process)
        assert process.stdout is not None
        assert process.stdout.readline() == "ready\n"
        return process


@pytest.fixture
def second(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[SecondMachine]:
    monkeypatch.setattr(watchdog, "LOOK_S", 0.1)
    machine = SecondMachine(tmp_path)
    (tmp_path / FOLDER).mkdir()
    own = {
        "name": "launcher 0",
        "pid": os.getpid(),
        "host": socket.gethostname(),
        "time": time.time(),
    }
    (tmp_path / FOLDER / "launcher 0.json").write_text(json.dumps(own))
    yield machine
    for process in machine.started:
        process.kill()
        process.communicate()


def look_for(watching: Watchdog, seconds: float) -> Stall | None:
    end = time.monotonic() + seconds
    while (found := watching.look()) is None and time.monotonic() < end:
        time.sleep(0.1)
    return found


def first(run_dir: Path, timeout_s: float) -> Watchdog:
    return Watchdog(run_dir, "first's", timeout_s=timeout_s, start_s=timeout_s, ranks=2, nodes=2)


def test_the_picture_has_what_the_other_machine_sees_of_its_processes(
    second: SecondMachine,
) -> None:
    second.start("launcher 1", LAUNCHER)
    stopped, running = second.start("rank 1", RANK), second.start("rank 2", RANK)
    stopped.send_signal(signal.SIGSTOP)
    found = gather(second.run_dir, "A wait was over.", still_s=1)
    assert found.suspects == (
        f"rank 1 (pid {stopped.pid} on second) is stopped (T): it does not run until SIGCONT.",
    )
    assert f"rank 2 (pid {running.pid} on second): " in found.text
    assert "train_on" in found.text


def test_what_ends_the_run_on_one_machine_ends_it_on_the_other_with_the_same_words(
    second: SecondMachine,
) -> None:
    launcher, stopped = second.start("launcher 1", LAUNCHER), second.start("rank 1", RANK)
    gather(second.run_dir, "A wait was over.", still_s=1)
    stopped.send_signal(signal.SIGSTOP)
    found = gather(second.run_dir, "Nothing moved.", still_s=1, ends_run=True)
    assert found.suspects == (
        f"rank 1 (pid {stopped.pid} on second) is stopped (T): it does not run until SIGCONT.",
    )
    said, _ = launcher.communicate(timeout=600)
    assert said.splitlines()[:2] == [
        found.headline,
        *found.suspects,
    ], "the first picture was no end"


def test_a_machine_that_does_not_answer_is_in_the_picture_as_its_processes_said_last(
    second: SecondMachine, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(views, "ANSWER_S", 0.3)
    second.start("launcher 1", LEAVES)
    rank = second.start("rank 1", RANK)
    found = gather(second.run_dir, "Nothing moved.", still_s=1)
    assert f"rank 1 (pid {rank.pid} on second): on another machine" in found.text


def test_a_machine_that_vanishes_ends_the_run_although_the_rest_moves(
    second: SecondMachine, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(views, "ANSWER_S", 0.3)
    launcher = second.start("launcher 1", LEAVES)
    second.start("rank 0", RANK)
    watching = first(second.run_dir, timeout_s=5)
    assert look_for(watching, 6) is None
    launcher.kill()
    found = look_for(watching, 600)
    assert found is not None
    assert found.error.startswith(
        "Stalled: Node 1 (second) has not been heard of for 5 s (watchdog.timeout_s: 5): the"
        " machine, "
    )
    assert found.suspects == (), "what still moves holds nothing up"


def test_a_machine_whose_launcher_ended_ends_the_run_and_leaves_the_words_to_it(
    second: SecondMachine, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(views, "ANSWER_S", 0.3)
    monkeypatch.setattr(watchdog, "LEFT_S", 0.5)
    launcher = second.start("launcher 1", LEAVES)
    second.start("rank 0", RANK)
    watching = first(second.run_dir, timeout_s=60)
    assert look_for(watching, 0.5) is None
    launcher.communicate(timeout=600)
    found = look_for(watching, 600)
    assert found is not None
    assert found.error.startswith("NodeEnded: Node 1 (second) ended ")

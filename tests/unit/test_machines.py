"""The picture of a run over several machines: each looks at its own processes, and a missing one is
named."""

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
from types import SimpleNamespace

import psutil
import pytest

from megatron_async_rl.watchdog import progress_monitor, watchdog
from megatron_async_rl.watchdog import stall as views
from megatron_async_rl.watchdog.processes import RUN_ID_VARIABLE
from megatron_async_rl.watchdog.progress_monitor import FOLDER
from megatron_async_rl.watchdog.stall import Stall, gather
from megatron_async_rl.watchdog.watchdog import Watchdog

BEGIN = """
import socket, sys, time
from pathlib import Path
socket.gethostname = lambda: "second"
from megatron_async_rl.watchdog import stall as stalls, watch, watchdog
watch.BEAT_S = watchdog.LOOK_S = 0.1
stalls.STACKS_S = 300.0
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
limits = {"timeout_s": 3600, "start_s": 3600}
looking = watchdog.Watchdog(run_dir, "second's", **limits, ranks=2, node=1, nodes=2)
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
    monkeypatch.setattr(views, "ANSWER_S", 300.0)  # the answer ends the wait, however late it is
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


def stop(process: subprocess.Popen[str]) -> None:
    process.send_signal(signal.SIGSTOP)
    while psutil.Process(process.pid).status() != psutil.STATUS_STOPPED:
        time.sleep(0.01)


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
    stop(stopped)
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
    stop(stopped)
    found = gather(second.run_dir, "Nothing moved.", still_s=1, ends_run=True)
    assert found.suspects == (
        f"rank 1 (pid {stopped.pid} on second) is stopped (T): it does not run until SIGCONT.",
    )
    said, _ = launcher.communicate(timeout=600)
    assert said.splitlines()[:2] == [
        found.headline,
        *found.suspects,
    ], "the first picture was no end"


def test_a_silent_machine_is_shown_with_its_last_known_state(
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
    """Its processes are their files, and a second passes from one look to the next."""
    monkeypatch.setattr(views, "ANSWER_S", 0.3)
    now = 1000.0
    clock = SimpleNamespace(monotonic=lambda: now)
    monkeypatch.setattr(watchdog, "time", clock)
    monkeypatch.setattr(progress_monitor, "time", clock)
    watching = first(second.run_dir, timeout_s=5)

    def look(*heard_of: str) -> Stall | None:
        nonlocal now
        now += 1.0
        for name in heard_of:
            # Clocks of machines are not compared: this one's is ahead.
            state = {"name": name, "pid": 1, "host": "second", "time": time.time() + 60 + now}
            state |= {"progress": {"steps": [now, 0.0]}}
            training = {"kind": "work", "name": "training", "since_s": now, "deadline_s": None}
            state |= {"activities": [training]} if name == "rank 0" else {}
            (second.run_dir / FOLDER / f"{name}.json").write_text(json.dumps(state))
        return watching.look()

    assert [look("launcher 1", "rank 0") for _ in range(20)] == [None] * 20
    assert [look("rank 0") for _ in range(4)] == [None] * 4
    found = look("rank 0")
    assert found is not None
    assert found.error.startswith(
        "Stalled: Node 1 (second) has not reported for 5 s (watchdog.timeout_s: 5): the machine, "
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

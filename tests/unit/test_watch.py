"""Every process shows what it waits for, what it achieved and how its parts stand, also when it is
stuck."""

from __future__ import annotations

import json
import os
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from megatron_async_rl.watchdog import watch
from megatron_async_rl.watchdog.watch import waiting

PROGRAM = """
import argparse, time
from pathlib import Path
from megatron_async_rl.watchdog import watch
arguments = argparse.ArgumentParser()
arguments.add_argument("run", type=Path)
arguments.add_argument("--in", dest="folder", default=".")
arguments.add_argument("--end-after", type=float)
given = arguments.parse_args()
watch.start(given.run / given.folder, "rank 0", end_after_s=given.end_after)
"""
WAITS = """
def outer():
    with watch.doing("wait", "the batch for version 3", 9.0):
        watch.progress("samples", 5)
        watch.fact("queue", lambda: 7)
        watch.fact("broken", lambda: 1 // 0)
        print("ready", flush=True)
        time.sleep(3600)
outer()
"""
STUCK_IN_C = """
print("ready", flush=True)
10 ** (10 ** 8)
"""

Start = Callable[..., "subprocess.Popen[str]"]


@pytest.fixture
def start(tmp_path: Path) -> Iterator[Start]:
    started: list[subprocess.Popen[str]] = []

    def begin(code: str, *arguments: str) -> subprocess.Popen[str]:
        command = [sys.executable, "-c", PROGRAM + code, str(tmp_path), *arguments]
        process = subprocess.Popen(command, stdout=subprocess.PIPE, text=True)
        started.append(process)
        return process

    yield begin
    for process in started:
        process.kill()
        process.wait(600)
        if process.stdout:
            process.stdout.close()


def ready(process: subprocess.Popen[str]) -> None:
    assert process.stdout is not None
    assert process.stdout.readline() == "ready\n"


def state_of(folder: Path, name: str = "rank 0") -> dict[str, Any]:
    return json.loads((folder / "watch" / f"{name}.json").read_text())


def until(done: Callable[[], bool], timeout_s: float = 600) -> None:
    end = time.monotonic() + timeout_s
    while not done():
        assert time.monotonic() < end
        time.sleep(0.05)


def test_the_state_shows_what_the_process_waits_for_achieved_and_offers(
    tmp_path: Path, start: Start
) -> None:
    process = start(WAITS)
    ready(process)
    until(lambda: "broken" in state_of(tmp_path)["facts"])
    state = state_of(tmp_path)
    (wait,) = state["activities"]
    assert (wait["kind"], wait["name"], wait["deadline_s"]) == (
        "wait",
        "the batch for version 3",
        9.0,
    )
    assert state["pid"] == process.pid
    assert state["progress"]["samples"][0] == 5
    assert state["facts"]["queue"] == 7
    assert state["facts"]["broken"].startswith("ZeroDivisionError")  # and the heartbeat continues:
    until(lambda: state_of(tmp_path)["activities"][0]["since_s"] > wait["since_s"])


def test_a_signal_writes_the_stacks_of_a_process_that_is_stuck_in_one_call(
    tmp_path: Path, start: Start
) -> None:
    process = start("def stuck():\n    print('ready', flush=True)\n    10 ** (10 ** 8)\nstuck()")
    ready(process)
    time.sleep(0.2)
    process.send_signal(signal.SIGUSR1)
    stack = tmp_path / "watch" / "rank 0.stack"
    until(lambda: "in stuck" in stack.read_text())
    assert process.poll() is None


def test_a_process_that_ends_by_itself_takes_its_state_along_and_a_killed_one_does_not(
    tmp_path: Path, start: Start
) -> None:
    path = tmp_path / "watch" / "rank 0.json"
    assert start("raise SystemExit(0)").wait(600) == 0
    assert not path.exists()
    killed = start(WAITS)
    ready(killed)
    killed.kill()
    killed.wait(600)
    assert path.exists()


def test_a_heartbeat_that_comes_late_brings_no_state_back(tmp_path: Path, start: Start) -> None:
    assert (
        start("heart = watch._beating\nwatch.stop()\nheart._beat()\nimport os; os._exit(0)").wait(
            600
        )
        == 0
    )
    assert not (tmp_path / "watch" / "rank 0.json").exists()


def test_without_a_launcher_a_process_of_a_run_that_does_not_move_ends_itself(
    tmp_path: Path, start: Start
) -> None:
    began = time.monotonic()
    assert start(STUCK_IN_C, "--end-after=2").wait(600) == 1
    assert time.monotonic() - began > 2
    assert "Timeout" in (tmp_path / "watch" / "rank 0.stack").read_text()


def test_a_moving_run_and_one_that_a_launcher_watches_are_not_ended(
    tmp_path: Path, start: Start
) -> None:
    launcher = tmp_path / "watched" / "watch" / "launcher 0.json"
    launcher.parent.mkdir(parents=True)

    def watch_them() -> None:
        state = {"name": "launcher 0", "pid": 1, "host": "here", "time": time.time()}
        launcher.write_text(json.dumps(state))

    def are_left_alone() -> bool:
        watch_them()
        moving = start(
            "for _ in range(40):\n    watch.progress('samples')\n    time.sleep(0.1)",
            "--end-after=2.5",
        )
        watched = start("time.sleep(4)", "--end-after=2.5", "--in=watched")
        while watched.poll() is None or moving.poll() is None:
            watch_them()
            time.sleep(0.2)
        return (moving.returncode, watched.returncode) == (0, 0)

    # A busy machine may keep one from its heartbeats, but not each time.
    assert any(are_left_alone() for _ in range(20))


def test_when_the_launcher_is_killed_the_run_is_asked_to_stop_and_not_while_it_is_stopped(
    tmp_path: Path, start: Start
) -> None:
    launcher = start(
        "watch.stop()\nwatch.start(given.run, 'launcher 0')\nprint('ready',"
        " flush=True)\ntime.sleep(3600)"
    )
    assert launcher.stdout is not None
    assert launcher.stdout.readline() == "ready\n"
    ended = subprocess.run(["sh", "-c", "echo $$"], stdout=subprocess.PIPE, check=True)
    before = {
        "name": "launcher 1",
        "pid": int(ended.stdout),
        "host": socket.gethostname(),
        "time": time.time(),
    }
    (tmp_path / "watch" / "launcher 1.json").write_text(
        json.dumps(before)
    )  # killed before this process began
    start("time.sleep(3600)", "--end-after=3600")
    state = tmp_path / "watch" / "rank 0.json"

    def beats(count: int) -> None:
        seen = set[str]()
        while len(seen) < count:
            assert launcher.returncode is None
            seen |= {state.read_text()} if state.exists() else set()
            time.sleep(0.1)

    beats(3)
    launcher.send_signal(signal.SIGSTOP)
    beats(3)
    assert not (tmp_path / watch.STOP).exists()
    launcher.send_signal(signal.SIGKILL)
    until((tmp_path / watch.STOP).exists)


def test_a_named_wait_shows_while_it_lasts() -> None:
    def names() -> list[str]:
        return [one["name"] for one in watch.state()["activities"]]

    with waiting("a batch", 5):
        assert "a batch" in names()
    assert "a batch" not in names()
    with pytest.raises(KeyError), waiting("a batch", 5):
        raise KeyError
    assert "a batch" not in names()


def test_outside_a_run_joining_does_nothing(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.delenv(watch.INHERITED, raising=False)
    watch.join("engine 0")
    assert watch.INHERITED not in os.environ

"""Ctrl-C, SIGTERM and a closed terminal request a stop of the run; the launcher itself continues
until everything has ended."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest
from rich.console import Console

from megatron_async_rl.launch import launcher as launch
from megatron_async_rl.launch.addresses import Nodes
from megatron_async_rl.launch.ending import deferred_signals
from megatron_async_rl.watchdog import watch
from megatron_async_rl.watchdog.events import Status, write_status

IN_A_TERMINAL = """
import signal, sys, time
from pathlib import Path
from megatron_async_rl.launch.ending import deferred_signals
signal.signal(signal.SIGHUP, signal.SIG_DFL)
with deferred_signals() as seen:
    print("ready", flush=True)
    while not seen:
        time.sleep(0.01)
    print("to nobody", flush=True)
    Path(sys.argv[1]).write_text(str(seen))
"""


@pytest.fixture
def as_in_a_terminal() -> Iterator[None]:
    """Also where the tests run in the background, or under nohup."""
    usual = {signal.SIGHUP: signal.SIG_DFL, signal.SIGINT: signal.default_int_handler}
    earlier = {number: signal.signal(number, handler) for number, handler in usual.items()}
    yield
    for number, handler in earlier.items():
        signal.signal(number, handler)


@pytest.mark.usefixtures("as_in_a_terminal")
def test_each_ctrl_c_and_the_first_hang_up_counts() -> None:
    with deferred_signals() as seen:
        for number in (signal.SIGHUP, signal.SIGHUP, signal.SIGINT, signal.SIGHUP, signal.SIGTERM):
            os.kill(os.getpid(), number)
        assert seen == [signal.SIGHUP, signal.SIGINT, signal.SIGTERM]
    with pytest.raises(KeyboardInterrupt):
        os.kill(os.getpid(), signal.SIGINT)


def test_a_run_that_is_to_outlive_its_terminal_does() -> None:
    earlier = signal.signal(signal.SIGHUP, signal.SIG_IGN)
    try:
        with deferred_signals() as seen:
            os.kill(os.getpid(), signal.SIGHUP)
            assert seen == []
    finally:
        signal.signal(signal.SIGHUP, earlier)


def test_a_closed_terminal_is_heard_and_written_to_no_more(tmp_path: Path) -> None:
    ours, theirs = os.openpty()
    command = ["setsid", "--ctty", sys.executable, "-c", IN_A_TERMINAL, str(tmp_path / "seen")]
    process = subprocess.Popen(command, stdin=theirs, stdout=theirs, stderr=theirs)
    os.close(theirs)
    assert b"ready" in os.read(ours, 100)
    os.close(ours)
    assert process.wait(600) == 0
    assert (tmp_path / "seen").read_text() == "[1]"


class Idle:
    def look(self) -> None:
        """Nothing holds the run up."""


class Script:
    """Stand-in for the display: events of the run between two looks of the launcher."""

    def __init__(self, run_dir: Path, phase: str | None, interrupts: list[int]) -> None:
        self.run_dir, self.phase, self.interrupts = run_dir, phase, interrupts

    def update(self) -> None:
        stopping = (self.run_dir / watch.STOP).exists()  # from then on the run writes
        if self.phase is not None and not stopping:
            write_status(self.run_dir, Status(phase=self.phase, step=0, steps=9, time=2.0))
        if not self.interrupts:
            self.interrupts.append(signal.SIGINT)


@pytest.mark.parametrize(
    ("phase", "nodes", "code"),
    [
        (None, Nodes(), launch.INTERRUPTED),
        ("starting", Nodes(), launch.INTERRUPTED),
        ("training", Nodes(), 0),
        ("starting", Nodes(2, 1, "node0:1"), 0),
    ],
)
def test_before_the_first_step_one_ctrl_c_ends_the_run_and_after_it_the_run_ends_itself(
    tmp_path: Path, phase: str | None, nodes: Nodes, code: int
) -> None:
    earlier = Status(phase="training", step=3, steps=9, time=1.0)
    write_status(tmp_path, earlier)
    interrupts: list[int] = []
    script = Script(tmp_path, phase, interrupts)
    until_stopped = (
        'while [ ! -e stop ]; do sleep 0.05; done; rm status.json; echo \'{"phase": "stopped",'
        ' "step": 4,'
    )
    until_stopped += ' "steps": 9, "time": 3}\' > status.json'
    script_process = subprocess.Popen(["sh", "-c", until_stopped], cwd=tmp_path)
    try:
        ended = launch._watch(
            script_process,
            earlier,
            script,
            Idle(),
            tmp_path,
            Console(quiet=True),
            nodes,
            interrupts,
            resumes=True,
        )
        assert ended == (code, None)
        assert (tmp_path / watch.STOP).exists() == (code == 0)
    finally:
        script_process.kill()
        script_process.wait()

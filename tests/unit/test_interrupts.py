"""Ctrl-C, SIGTERM and a closed terminal ask a run to stop; the launcher itself goes on until everything has ended."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from pathlib import Path

import pytest

from megatron_async_rl import launch

IN_A_TERMINAL = """
import signal, sys
from pathlib import Path
from megatron_async_rl.launch import _interrupts
with _interrupts() as seen:
    print("ready", flush=True)
    while not seen:
        signal.pause()
    print("to nobody", flush=True)
    Path(sys.argv[1]).write_text(str(seen))
"""


def test_each_ctrl_c_and_the_first_hang_up_counts() -> None:
    with launch._interrupts() as seen:
        for number in (signal.SIGHUP, signal.SIGHUP, signal.SIGINT, signal.SIGHUP, signal.SIGTERM):
            os.kill(os.getpid(), number)
        assert seen == [signal.SIGHUP, signal.SIGINT, signal.SIGTERM]
    with pytest.raises(KeyboardInterrupt):
        os.kill(os.getpid(), signal.SIGINT)


def test_a_run_that_is_to_outlive_its_terminal_does() -> None:
    earlier = signal.signal(signal.SIGHUP, signal.SIG_IGN)
    try:
        with launch._interrupts() as seen:
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
    assert process.wait(20) == 0
    assert (tmp_path / "seen").read_text() == "[1]"

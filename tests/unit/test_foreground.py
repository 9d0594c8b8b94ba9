"""A command of a script receives its signals and ends by itself."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

from megatron_async_rl.launch.foreground import run_in_foreground

COMMAND = """
import signal, sys, time
from pathlib import Path

received = []
signal.signal(signal.SIGINT, lambda number, _: received.append(number))
Path(sys.argv[1], "ready").touch()
while not received:
    time.sleep(0.01)
Path(sys.argv[1], "saved").write_text(str(len(received)))
sys.exit(130)
"""
SCRIPT = """
import sys
from megatron_async_rl.launch.foreground import run_in_foreground

run_in_foreground([sys.executable, "-c", sys.argv[1], sys.argv[2]])
print("not reached")
"""


def test_a_command_that_is_interrupted_ends_by_itself(tmp_path: Path) -> None:
    script = subprocess.Popen(
        [sys.executable, "-c", SCRIPT, COMMAND, str(tmp_path)],
        stdout=subprocess.PIPE,
        start_new_session=True,
    )
    while not (tmp_path / "ready").exists():
        assert script.poll() is None
        time.sleep(0.02)
    # As a terminal does: to the whole group of the script.
    os.killpg(script.pid, signal.SIGINT)
    output, _ = script.communicate(timeout=600)
    assert (script.returncode, output) == (130, b"")
    assert (tmp_path / "saved").read_text() == "1", "the command received the signal once"


@pytest.mark.parametrize(("end", "code"), [("sys.exit(3)", 3), ("os.kill(os.getpid(), 9)", 137)])
def test_a_failed_command_ends_the_script_with_its_code(end: str, code: int) -> None:
    with pytest.raises(SystemExit) as ended:
        run_in_foreground([sys.executable, "-c", f"import os, sys; {end}"])
    assert ended.value.code == code


def test_a_command_that_succeeds_returns_to_the_script(tmp_path: Path) -> None:
    command = "import os; open('here', 'w').write(os.environ['WORD'])"
    run_in_foreground(
        [sys.executable, "-c", command], cwd=tmp_path, env={**os.environ, "WORD": "yes"}
    )
    assert (tmp_path / "here").read_text() == "yes"

"""The fork server that the workers of pytest-xdist share (tests/parallel/ranks.py)."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

ROOT = Path(__file__).parents[2]
SERVE = """
import subprocess, sys
from tests.parallel import ranks
ranks.FORKS.set_forkserver_preload([])
ranks.serve_workers()
for _ in range(2):
    subprocess.run([sys.executable, "-c", sys.argv[1]], check=True)
print(ranks.forkserver._forkserver._forkserver_pid)
"""
FORK = """
from tests.parallel.ranks import FORKS
FORKS.set_forkserver_preload([])
if __name__ == "__main__":
    receives, sends = FORKS.Pipe(duplex=False)
    fork = FORKS.Process(target=receives.recv)  # it lives until its parent is read
    fork.start()
    with open(f"/proc/{fork.pid}/stat") as file:
        parent = file.read().rpartition(")")[2].split()[1]
    sends.send(None)
    fork.join()
    print(parent, fork.exitcode)
"""


def run(program: str, *arguments: str, **environment: str) -> list[str]:
    """Return the lines that a program prints."""
    given = {name: value for name, value in os.environ.items() if name != "MAR_TESTS_FORK_SERVER"}
    done = subprocess.run(
        [sys.executable, "-c", program, *arguments],
        cwd=ROOT,
        env=given | environment,
        capture_output=True,
        text=True,
        timeout=300,
    )
    assert done.returncode == 0, done.stderr
    return done.stdout.split("\n")[:-1]


def test_processes_fork_from_the_server_that_another_process_started() -> None:
    first, second, server = run(SERVE, FORK)
    assert first == second == f"{server} 0"


def test_a_process_starts_a_server_of_its_own_if_the_other_has_ended() -> None:
    ended = subprocess.Popen(["true"])
    ended.wait()
    (found,) = run(FORK, MAR_TESTS_FORK_SERVER=f"{ended.pid} /nowhere")
    assert found.endswith(" 0")

"""A process of an engine ends with its parent: real processes, real signals."""

import os
import signal
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]

CHILD = """
import os, sys, time
if sys.argv[1] == "late":  # the parent is killed before the child comes to it
    mother = os.getppid()
    print("begun", flush=True)
    while os.getppid() == mother:
        time.sleep(0.01)
from megatron_async_rl.watchdog.processes import die_with_parent
die_with_parent()
die_with_parent()
print("watched", flush=True)
if sys.argv[1] == "early":
    time.sleep(300)
    print("outlived", flush=True)
"""

PARENT = """
import os, subprocess, sys, time
named = os.getpid() if sys.argv[2] == "itself" else os.getppid()
environment = {**os.environ, "MAR_ENGINE_PARENT": str(named)}
subprocess.Popen([sys.executable, "-c", sys.argv[3], sys.argv[1]], env=environment)
time.sleep(600)
"""


def started(when: str, named: str = "itself") -> "subprocess.Popen[str]":
    """A parent of one child; the child writes to its standard output, and holds it open for as long
    as it lives."""
    command = [sys.executable, "-c", PARENT, when, named, CHILD]
    return subprocess.Popen(
        command, stdout=subprocess.PIPE, text=True, env={**os.environ, "PYTHONPATH": str(ROOT)}
    )


@pytest.mark.parametrize(("when", "said"), [("early", "watched\n"), ("late", "begun\n")])
def test_it_ends_with_its_parent_also_one_that_was_still_starting(when: str, said: str) -> None:
    parent = started(when)
    assert parent.stdout is not None
    assert parent.stdout.readline() == said
    os.kill(
        parent.pid, signal.SIGKILL
    )  # and not waited for: its remains are there while the child looks
    assert parent.stdout.read() == ""
    parent.wait(timeout=600)


def test_one_that_descends_otherwise_from_a_living_actor_is_left_alone() -> None:
    parent = started("late", named="the one before")
    assert parent.stdout is not None
    assert parent.stdout.readline() == "begun\n"
    parent.kill()
    assert parent.stdout.read() == "watched\n"
    parent.wait(timeout=600)

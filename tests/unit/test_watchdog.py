"""When nothing moves, the run reports who waits for what, on every process, and who most likely
holds up the others."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
import uuid
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import psutil
import pytest

from megatron_async_rl.flow.errors import EngineFailed
from megatron_async_rl.watchdog import stall
from megatron_async_rl.watchdog import watchdog as watchdog_module
from megatron_async_rl.watchdog.processes import RUN_ID_VARIABLE, of_run
from megatron_async_rl.watchdog.progress_monitor import ProcessState, read_states
from megatron_async_rl.watchdog.stall import (
    ProcessSnapshot,
    gather,
    gather_if_timed_out,
    is_whole,
    places,
    read_summary,
    suspects,
)
from megatron_async_rl.watchdog.watch import DeadlineExceeded
from megatron_async_rl.watchdog.watchdog import Watchdog
from tests.cases import looped

PROGRAM = """
import sys, time
from pathlib import Path
from typing import Any
from megatron_async_rl.watchdog import watch
watch.BEAT_S = 0.1
watch.start(Path(sys.argv[1]), sys.argv[2])
"""
WAITS = """
with watch.doing("wait", "the batch for version 3", 9.0):
    watch.progress("optimizer steps", 3)
    print("ready", flush=True)
    time.sleep(3600)
"""
SAMPLES = """
def sample_on():
    watch.fact("in flight", lambda: 12)
    print("ready", flush=True)
    time.sleep(3600)
sample_on()
"""
MOVES = """
print("ready", flush=True)
while True:
    watch.progress("samples")
    time.sleep(0.1)
"""
STARTS = """
with watch.phase("starting vLLM", float(sys.argv[3])):
    print("ready", flush=True)
    time.sleep(3600)
"""
HOLDS_THE_INTERPRETER = """
def multiply():
    print("ready", flush=True)
    10 ** (10 ** 8)
multiply()
"""


@dataclass
class RunOfProcesses:
    """A run whose processes are these little programs."""

    folder: Path
    identity: str = field(default_factory=lambda: uuid.uuid4().hex)
    started: list[subprocess.Popen[str]] = field(default_factory=list)

    def start(self, name: str, code: str, *arguments: str) -> subprocess.Popen[str]:
        command = [sys.executable, "-c", PROGRAM + code, str(self.folder), name, *arguments]
        environment = {**os.environ, RUN_ID_VARIABLE: self.identity}
        process = subprocess.Popen(command, stdout=subprocess.PIPE, text=True, env=environment)
        self.started.append(process)
        assert process.stdout is not None
        assert process.stdout.readline() == "ready\n"
        return process

    def beaten(self, *names: str) -> None:
        """Waits until a heartbeat of each has what they do now."""
        for _ in range(2):  # one may have been under way
            now = time.time()
            while any(one.time < now for one in read_states(self.folder) if one.name in names):
                time.sleep(0.05)

    def watchdog(self, timeout_s: float, *, ranks: int = 1, start_s: float = 60) -> Watchdog:
        return Watchdog(
            self.folder, self.identity, timeout_s=timeout_s, start_s=start_s, ranks=ranks
        )


@pytest.fixture
def run(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[RunOfProcesses]:
    """Processes under a watchdog whose clocks are ten and three times as fast."""
    monkeypatch.setattr(watchdog_module, "LOOK_S", 0.1)
    monkeypatch.setattr(stall, "SILENT_S", 1.5)
    monkeypatch.setattr(stall, "STACKS_S", 60.0)  # the stacks end the wait, however busy it is
    processes = RunOfProcesses(tmp_path)
    yield processes
    for process in processes.started:
        process.kill()
        process.wait(600)
        if process.stdout:
            process.stdout.close()


def stop(process: subprocess.Popen[str] | subprocess.Popen[bytes]) -> None:
    process.send_signal(signal.SIGSTOP)
    while psutil.Process(process.pid).status() != psutil.STATUS_STOPPED:
        time.sleep(0.01)


def look_for(watchdog: Watchdog, seconds: float) -> stall.Stall | None:
    end = time.monotonic() + seconds
    while time.monotonic() < end:
        if (found := watchdog.look()) is not None:
            return found
        time.sleep(0.1)
    return None


def test_a_stall_shows_every_process_and_names_the_stopped_one(run: RunOfProcesses) -> None:
    rank, engine = run.start("rank 0", WAITS), run.start("engine-0", SAMPLES)
    run.beaten("rank 0", "engine-0")
    stop(engine)
    found = look_for(run.watchdog(1.0), 600)
    assert found is not None
    assert found.suspects == (
        f"engine-0 (pid {engine.pid}) is stopped (T): it does not run until SIGCONT.",
    )
    assert "watchdog.timeout_s: 1" in found.headline
    for words in (
        f"rank 0 (pid {rank.pid}): ",
        "waits for the batch for version 3 (",
        " of 9 s)",
        "optimizer steps 3",
        f"engine-0 (pid {engine.pid}): stopped",
        "in flight 12",
        "in <string>",
    ):
        assert words in found.text
    assert read_summary(run.folder) == found.text
    whole = (run.folder / stall.FILE).read_text()
    assert whole.startswith(found.text)
    assert "most recent call first" in whole


def test_a_run_moves_while_any_process_of_it_does(run: RunOfProcesses) -> None:
    run.start("rank 0", WAITS)
    run.start("engine-0", MOVES)
    # A busy machine may keep the working one from moving, but not each time.
    assert any(look_for(run.watchdog(2.0), 3) is None for _ in range(20))


def test_a_phase_may_last_as_long_as_it_announced_and_no_longer(run: RunOfProcesses) -> None:
    run.start("rank 0", WAITS)
    began = time.monotonic()
    run.start("engine-0", STARTS, "2")
    run.beaten("engine-0")
    found = look_for(run.watchdog(0.5), 600)
    assert found is not None
    assert time.monotonic() - began > 1.5
    assert "is starting vLLM (" in found.text


def test_ranks_that_never_appear_count_under_the_limit_of_the_start(run: RunOfProcesses) -> None:
    run.start("rank 0", WAITS)
    found = look_for(run.watchdog(0.5, ranks=2, start_s=1.5), 600)
    assert found is not None
    assert "rollout.start_timeout_s: 1.5" in found.headline


def test_a_start_is_named_by_the_key_that_limits_it(tmp_path: Path) -> None:
    def key(timeout_s: float, **settings: Any) -> str:
        limits = {"timeout_s": timeout_s, "start_s": 60.0, "ranks": 1}
        return Watchdog(tmp_path, "id", **limits, **settings)._start_key

    assert key(30.0) == "rollout.start_timeout_s"
    assert key(90.0) == "watchdog.timeout_s", "the longer limit counts"
    assert key(30.0, start_key="watchdog.timeout_s") == "watchdog.timeout_s"


def test_a_process_that_is_stuck_in_one_call_is_named_with_its_place(run: RunOfProcesses) -> None:
    run.start("rank 0", WAITS)
    stuck = run.start("engine-0", HOLDS_THE_INTERPRETER)
    times = psutil.Process(stuck.pid).cpu_times
    began = times().user
    while times().user < began + 1.0:  # only the one call takes so much
        time.sleep(0.05)
    time.sleep(stall.SILENT_S + 0.5)
    found = gather(run.folder, "Nothing moved.", still_s=6)
    (said,) = (one for one in found.suspects if one.startswith("engine-0"))
    assert f"engine-0 (pid {stuck.pid}) does not answer" in said
    assert "multiply" in said


def test_the_dead_and_stopped_processes_without_a_state_are_named(run: RunOfProcesses) -> None:
    run.start("rank 0", WAITS)
    engine = run.start("engine-0", SAMPLES)
    other = subprocess.Popen(["sleep", "3600"], env={**os.environ, RUN_ID_VARIABLE: run.identity})
    try:
        engine.kill()
        engine.wait(600)
        stop(other)
        found = gather(run.folder, "Nothing moved.", still_s=600, others=of_run(run.identity))
    finally:
        other.kill()
        other.wait(600)
    assert f"engine-0 (pid {engine.pid}) is dead." in found.suspects
    assert f"sleep (pid {other.pid}) is stopped." in found.suspects


def test_only_a_missed_deadline_takes_the_picture(tmp_path: Path) -> None:
    gather_if_timed_out(tmp_path, ValueError("a bad tensor"), 5)
    assert read_summary(tmp_path) is None
    gather_if_timed_out(tmp_path, DeadlineExceeded("rank 0", "engine-0 to pause", 5.0), 5)
    assert (read_summary(tmp_path) or "").startswith(
        "DeadlineExceeded: rank 0 waited 5.0 s for engine-0 to pause, which did not come."
    )
    lost = EngineFailed("no engine is left")
    lost.add_note("rank 0 had waited 8.0 s for the batch")
    lost.add_note("in phase publish")
    gather_if_timed_out(tmp_path, lost, 5)
    assert (read_summary(tmp_path) or "").startswith(
        "EngineFailed: no engine is left (rank 0 had waited 8.0 s for the batch; in phase publish)."
    )


class OtherRankFailed(RuntimeError):
    """Stand-in for the error that policy/parallel.py raises on ranks that wait for rank 0."""

    consequence = True

    def __init__(self, text: str, *, timed_out: bool) -> None:
        super().__init__(text)
        self.timed_out = timed_out


def test_other_ranks_stay_while_rank_0_takes_the_picture(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    waited: list[float] = []
    monkeypatch.setattr(stall.time, "monotonic", lambda: sum(waited))
    monkeypatch.setattr(stall.time, "sleep", waited.append)
    gather_if_timed_out(tmp_path, OtherRankFailed("no engine is left", timed_out=True), 5)
    assert stall.GATHER_S <= sum(waited) < stall.GATHER_S + 1
    assert read_summary(tmp_path) is None
    waited.clear()
    gather_if_timed_out(tmp_path, OtherRankFailed("of a bad tensor", timed_out=False), 5)
    assert waited == []


def view(
    name: str, condition: str | None = "sleeping", silent_s: float = 0.3, **activities: float
) -> ProcessSnapshot:
    kinds = [
        {"kind": kind, "name": f"{kind} of {name}", "since_s": s, "deadline_s": None}
        for kind, s in activities.items()
    ]
    return ProcessSnapshot(
        state=ProcessState(name=name, pid=1, host="h", time=0.0, activities=kinds),
        condition=condition,
        silent_s=silent_s,
    )


@looped(
    ("views", "named"),
    [
        ([view("rank 0", wait=9), view("rank 1", "stopped"), view("engine-0", None)], ["rank 1"]),
        (
            [
                view("rank 0", wait=9),
                view("controller", None, silent_s=10),
                view("engine-0", silent_s=20),
            ],
            ["controller"],
        ),
        # It died long before the others stalled: they continued without it.
        (
            [
                view("rank 0", wait=9),
                view("engine-1", None, silent_s=500),
                view("engine-0", silent_s=20),
            ],
            ["engine-0"],
        ),
        (
            [view("rank 0", wait=9), view("rank 1", "disk-sleep", silent_s=20), view("engine-0")],
            ["rank 1"],
        ),
        (
            [view("rank 0", wait=9), view("controller", wait=9), view("engine-0", work=9, wait=1)],
            ["engine-0"],
        ),
        (
            [
                view("rank 0", wait=9),
                view("controller", wait=9),
                view("engine-0", work=1, wait=1),
                view("core"),
            ],
            ["core"],
        ),
    ],
)
def test_the_surest_evidence_alone_is_named(views: list[ProcessSnapshot], named: list[str]) -> None:
    sentences = suspects(views, still_s=10)
    assert [sentence.split(" (pid")[0] for sentence in sentences] == named


def test_in_a_run_that_moves_no_process_is_named_for_long_work() -> None:
    assert suspects([view("rank 0", work=60), view("core")], still_s=1) == ()


def test_of_a_stack_the_frames_of_this_package_are_shown_and_its_heartbeat_is_not() -> None:
    root = "/x/megatron_async_rl"
    dump = f'''Thread 0x00007f01 (most recent call first):
  File "/y/time.py", line 1 in sleep
  File "{root}/watchdog/watch.py", line 9 in run
Thread 0x00007f02 (most recent call first):
  File "/home/me/slow_reward.py", line 12 in never
  File "{root}/rollout/scoring.py", line 85 in _call
  File "{root}/rollout/scoring.py", line 70 in _work
  File "/y/threading.py", line 975 in run
Thread 0x00007f03 (most recent call first):
  File "{root}/rollout/scoring.py", line 69 in _work
Thread 0x00007f04 (most recent call first):
  File "{root}/rollout/scoring.py", line 69 in _work

Current thread 0x00007f05 (most recent call first):
  File "/y/selectors.py", line 468 in select
'''
    assert places(dump) == [
        "y/selectors.py:468 select",
        "me/slow_reward.py:12 never < rollout/scoring.py:85 _call < rollout/scoring.py:70 _work",
        "rollout/scoring.py:69 _work (2 threads)",
    ]


@pytest.mark.parametrize("frames", [1, 150], ids=["shallow", "deeper than faulthandler shows"])
def test_stacks_are_read_when_they_are_written_to_their_end(tmp_path: Path, frames: int) -> None:
    program = f"""
import faulthandler, sys, threading
def call(frames):
    if frames: call(frames - 1)
    else: faulthandler.dump_traceback(sys.stdout, all_threads=True)
threading.Thread(target=threading.Event().wait, daemon=True).start()
call({frames})
"""
    command = [sys.executable, "-c", program]
    dump = subprocess.run(command, capture_output=True, text=True, check=True).stdout
    lines = dump.splitlines(keepends=True)
    assert sum("most recent call first" in line for line in lines) == 2
    cuts = ["".join(lines[:count]) for count in range(len(lines))] + [dump[:-1]]
    assert [cut for cut in cuts if is_whole(cut)] == []
    assert is_whole(dump)


def test_the_launcher_ends_stopped_processes_too_and_at_once(
    run: RunOfProcesses, monkeypatch: pytest.MonkeyPatch
) -> None:
    from megatron_async_rl.launch import launcher

    monkeypatch.setattr(launcher, "KILL_GRACE_S", 300.0)
    stopped = run.start("engine-0", SAMPLES)
    stop(stopped)
    began = time.monotonic()
    launcher._kill_leftovers(run.identity)
    assert time.monotonic() - began < launcher.KILL_GRACE_S
    assert not psutil.pid_exists(stopped.pid)

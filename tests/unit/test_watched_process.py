"""Parts of a watched process, with a clock and a system of the test: its state, its heartbeat, the
end that follows its parent's, and the errors of waits."""

from __future__ import annotations

import asyncio
import ctypes
import gc
import json
import logging
import os
import re
import signal
import socket
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import psutil
import pytest
import ray

from megatron_async_rl.watchdog import lost_actors, preloaded, processes, watch
from megatron_async_rl.watchdog.events import (
    Event,
    EventReader,
    described,
    note,
    out_of_memory,
    read_events,
    timed_out,
    with_notes,
)
from megatron_async_rl.watchdog.host_memory import Shortage
from megatron_async_rl.watchdog.logs import Cause, judge, survived, tail
from megatron_async_rl.watchdog.processes import PARENT, RUN_ID_VARIABLE
from megatron_async_rl.watchdog.watch import (
    DeadlineExceeded,
    KilledForMemory,
    ProcessDied,
    ServerEnded,
)


class Clock:
    """Stands in for the module `time`."""

    def __init__(self) -> None:
        self.now = 100.0
        self.sleep = lambda seconds: None

    def monotonic(self) -> float:
        return self.now

    def time(self) -> float:
        return 5000.0


@pytest.fixture
def clock(monkeypatch: pytest.MonkeyPatch) -> Clock:
    clock = Clock()
    monkeypatch.setattr(watch, "time", clock)
    monkeypatch.setattr(watch, "_process", watch._WatchedProcess())
    return clock


def test_the_state_has_what_runs_how_long_and_what_grew(clock: Clock) -> None:
    watch.enter("wait", "a batch")
    watch.progress("samples", 3)
    clock.now += 1.26
    watch.progress("samples")
    watch.fact("number", lambda: 3)
    watch.fact("list", lambda: [1])
    watch.fact("broken", lambda: 1 // 0)
    with watch.working("training"), watch.phase("building", 60.0):
        clock.now += 2.0
        shown = watch.state()
    assert shown == {
        "pid": os.getpid(),
        "host": socket.gethostname(),
        "time": 5000.0,
        "activities": [
            {"kind": "wait", "name": "a batch", "since_s": 3.3, "deadline_s": None},
            {"kind": "work", "name": "training", "since_s": 2.0, "deadline_s": None},
            {"kind": "phase", "name": "building", "since_s": 2.0, "deadline_s": 60.0},
        ],
        "progress": {"loop": [1, 3.3], "samples": [4, 2.0]},
        "facts": {
            "number": 3,
            "list": "[1]",
            "broken": "ZeroDivisionError: integer division or modulo by zero",
        },
    }
    after = watch.state()
    assert [one["name"] for one in after["activities"]] == ["a batch"]
    assert after["progress"]["phases"] == [1, 0.0], "the end of a phase is progress"


class Timer:
    """Stands in for faulthandler, and records its calls."""

    def __init__(self) -> None:
        self.calls: list[Any] = []

    def register(self, number: int, **given: Any) -> None:
        self.calls.append(("register", number, given["all_threads"], given["chain"]))

    def cancel_dump_traceback_later(self) -> None:
        self.calls.append("cancel")

    def dump_traceback_later(self, seconds: float, **given: Any) -> None:
        self.calls.append((seconds, given["exit"], given["file"]))


@pytest.fixture
def timer(monkeypatch: pytest.MonkeyPatch) -> Timer:
    timer = Timer()
    monkeypatch.setattr(watch, "faulthandler", timer)
    monkeypatch.setattr(watch.atexit, "register", timer.calls.append)
    return timer


@pytest.fixture
def heart(tmp_path: Path, clock: Clock, timer: Timer) -> Iterator[watch._HeartbeatThread]:
    heart = watch._HeartbeatThread(tmp_path / "watch", "rank/0", None)
    yield heart
    os.close(heart._stack)


def test_a_heartbeat_writes_its_state_until_it_leaves(
    tmp_path: Path, heart: watch._HeartbeatThread, timer: Timer, caplog: pytest.LogCaptureFixture
) -> None:
    assert timer.calls == [("register", signal.SIGUSR1, True, False), heart.leave]
    assert (heart.name, heart.daemon, heart.pid) == ("watch", True, os.getpid())
    file = tmp_path / "watch" / "rank_0.json"
    assert json.loads(file.read_text())["name"] == "rank/0"
    assert file.with_suffix(".stack").read_text() == ""
    assert os.fstat(heart._stack).st_mode & 0o777 == 0o644 & ~os.umask(os.umask(0))
    os.write(heart._stack, b"old")
    assert file.with_suffix(".stack").read_text() == "old"

    # A full disk is reported once, and again after a state was written.
    with pytest.MonkeyPatch.context() as patch, caplog.at_level(logging.WARNING):

        def full(path: Path, text: str) -> None:
            raise OSError("full")

        patch.setattr(watch, "write_whole", full)
        heart._beat()
        heart._beat()
        assert [one.message for one in caplog.records] == [
            "the state of rank/0 was not written: full"
        ]
        patch.undo()
        heart._beat()
        patch.setattr(watch, "write_whole", full)
        heart._beat()
        assert len(caplog.records) == 2

    heart.pid = -1
    heart.leave()
    assert file.exists(), "a fork does not remove the state"
    heart.pid = os.getpid()
    heart.leave()
    heart._beat()
    assert not file.exists()
    heart.leave()  # again, at the exit of the process
    assert timer.calls[2:] == ["cancel", "cancel"]


@pytest.mark.parametrize(
    ("launcher", "still_s", "allowed_s", "calls"),
    [
        (True, 0.0, 0.0, ["cancel"]),
        (False, 2 * watch.BEAT_S, 0.0, []),
        (False, 2 * watch.BEAT_S - 0.01, 0.0, [30.0]),
        (False, 99.0, 5.0, [35.0]),
        (False, 0.0, 5.0, [35.0]),
    ],
)
def test_the_end_is_put_off_while_the_run_moves(
    heart: watch._HeartbeatThread,
    timer: Timer,
    launcher: bool,
    still_s: float,
    allowed_s: float,
    calls: list[Any],
) -> None:
    looked: list[int] = []
    monitor: Any = SimpleNamespace(
        look=lambda: looked.append(1),
        launcher_watches=launcher,
        still_s=still_s,
        allowed_s=allowed_s,
    )
    timer.calls.clear()
    heart._timed = True
    heart._put_off_the_end(monitor, 30.0)
    assert looked == [1]
    assert timer.calls == [one if one == "cancel" else (one, True, heart._stack) for one in calls]


def test_a_hang_that_began_under_a_launcher_that_died_still_ends(
    heart: watch._HeartbeatThread, timer: Timer
) -> None:
    monitor: Any = SimpleNamespace(look=lambda: None, launcher_watches=True, allowed_s=0.0)

    def beat(still_s: float, *, launcher: bool) -> list[Any]:
        monitor.still_s, monitor.launcher_watches = still_s, launcher
        timer.calls.clear()
        heart._put_off_the_end(monitor, 30.0)
        return [one if one == "cancel" else one[0] for one in timer.calls]

    assert beat(20.0, launcher=True) == ["cancel"]
    assert beat(22.0, launcher=False) == [8.0], "the rest of the time"
    assert beat(24.0, launcher=False) == [], "the timer runs"
    assert beat(0.0, launcher=False) == [30.0]
    assert beat(99.0, launcher=True) == ["cancel"]
    assert beat(99.0, launcher=False) == [watch.BEAT_S], "long overdue"


def test_a_killed_launcher_requests_a_stop_once(
    tmp_path: Path, heart: watch._HeartbeatThread, monkeypatch: pytest.MonkeyPatch
) -> None:
    alive = {7: "sleeping", 8: "sleeping"}
    here = socket.gethostname()

    def state(pid: int, host: str = here, launcher: bool = True) -> Any:
        return SimpleNamespace(pid=pid, time=3.0, host=host, is_launcher=launcher, name="launcher")

    def known(pid: int, written_at: float) -> str | None:
        assert written_at == 3.0
        return alive.get(pid)

    monkeypatch.setattr(watch, "condition", known)
    stop = tmp_path / watch.STOP

    def looked(*states: Any) -> bool:
        heart._monitor = SimpleNamespace(states=states)  # type: ignore[assignment]
        heart._stop_without_launcher()
        found = stop.exists()
        stop.unlink(missing_ok=True)
        return found

    assert not looked(state(9)), "a launcher that this process never saw alive"
    assert not looked(state(7), state(8, host="another"), state(8, launcher=False))
    assert heart._launcher == 7
    alive.clear()
    assert not looked(state(8), state(7, host="another"), state(7, launcher=False))
    assert looked(state(7))
    assert not looked(state(7)), "only once"


def test_a_process_has_one_heartbeat_and_its_children_its_folder(
    tmp_path: Path, clock: Clock, timer: Timer, monkeypatch: pytest.MonkeyPatch
) -> None:
    started: list[Any] = []

    class Heart:
        def __init__(self, folder: Path, name: str, end_after_s: float | None) -> None:
            self.pid = os.getpid()
            started.append((folder, name, end_after_s))

        def start(self) -> None:
            started.append("thread")

        def leave(self) -> None:
            started.append("left")

    monkeypatch.setattr(watch, "_HeartbeatThread", Heart)
    monkeypatch.setattr(watch, "_beating", None)
    monkeypatch.delenv(watch.INHERITED, raising=False)
    watch.join("engine")
    assert started == [], "no run to join"
    watch.start(tmp_path, "rank 0", end_after_s=3.0)
    assert started == [(tmp_path.resolve() / "watch", "rank 0", 3.0), "thread"]
    assert os.environ[watch.INHERITED] == f"{tmp_path.resolve()}\nrank 0"
    watch.start(tmp_path, "another")
    watch.join("another")
    assert len(started) == 2
    watch._beating.pid = -1  # type: ignore[union-attr]
    watch.join()
    assert len(started) == 2, "a main process without a name"
    own = watch.multiprocessing.current_process()
    monkeypatch.setattr(own, "_config", own._config)  # type: ignore[attr-defined]
    monkeypatch.setattr(
        watch.multiprocessing, "current_process", lambda: SimpleNamespace(name="Process-1")
    )
    watch.join()
    assert started[2:] == [(tmp_path.resolve() / "watch", "rank 0 Process-1", None), "thread"]
    watch.stop()
    watch.stop()
    assert started[4:] == ["left"]
    assert watch._beating is None


def wait_and_fail(clock: Clock, waited: float, error: Exception) -> None:
    with watch.waiting("a batch", 10.0):
        assert watch.state()["activities"][0]["deadline_s"] == 10.0
        clock.now += waited
        raise error


def test_a_wait_that_reached_its_deadline_is_named(
    clock: Clock, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(watch, "_process_name", "rank 3")
    for waited, error, expected in (
        (9.8125, TimeoutError("x"), "rank 3 waited 9.8 s for a batch, which did not come"),
        (9.78125, TimeoutError("x"), "x (rank 3 had waited 9.8 s for a batch)"),
        (20.0, ValueError("y\nz"), "y (rank 3 had waited 20.0 s for a batch)\nz"),
        (20.0, DeadlineExceeded("w", "n", 1.0), "w waited 1.0 s for n, which did not come"),
    ):
        with pytest.raises(type(error)) as raised:
            wait_and_fail(clock, waited, error)
        assert with_notes(raised.value) == expected
        assert isinstance(raised.value, DeadlineExceeded) == ("did not come" in expected)
    assert watch.state()["activities"] == []
    monkeypatch.setattr(watch, "_process_name", None)
    assert watch.this_process() == f"process {os.getpid()}"
    watch.name_this_process("engine 1")
    assert watch.this_process() == "engine 1"


RAY_TEXT = """The actor died unexpectedly before finishing this task.
\tclass_name: EngineActor
\tactor_id: 5
\tpid: 4711
\tname: engine 1
\tip: 10.9.8.7
The actor is dead because its worker process has died. Some common causes include: (1) OOM."""


def test_rays_reason_for_a_death_is_one_sentence() -> None:
    seen = " Unless it was killed on purpose, `dmesg` shows whether the kernel did, for lack of"
    seen += " memory."
    reason = "The actor is dead because its worker process has died."
    assert lost_actors.death_reason(RAY_TEXT) == f"engine 1 (pid 4711). {reason}{seen}"
    text = "a\nclass_name: Engine\n\nIt was killed.\n"
    assert lost_actors.death_reason(text) == "Engine (pid unknown). It was killed."
    assert lost_actors.death_reason("gone") == "an actor (pid unknown). gone"
    assert lost_actors.named_pids(RAY_TEXT) == [4711]
    assert lost_actors.named_pids("pid: x\n  pid: 5 \npid: 6") == [6]
    assert not lost_actors.was_here(RAY_TEXT)
    assert lost_actors.was_here("no address")
    assert lost_actors.was_here(RAY_TEXT.replace("10.9.8.7", "127.0.0.1"))


class Died(ray.exceptions.ActorDiedError):
    def __init__(self, preempted: bool = False) -> None:
        self._preempted = preempted

    @property
    def preempted(self) -> bool:
        return self._preempted

    def __str__(self) -> str:
        return RAY_TEXT.replace("10.9.8.7", "127.0.0.1")


def test_errors_of_actors_are_those_of_their_processes(monkeypatch: pytest.MonkeyPatch) -> None:
    looks: list[int] = []
    shortage: list[Shortage | None] = [None]
    monkeypatch.setattr(watch, "look_for_kernel_kills", lambda: looks.append(1))
    monkeypatch.setattr(watch, "kernel_shortage", lambda pids: shortage[0] if pids == [4711] else 1)
    monkeypatch.setattr(watch, "_process_name", "rank 3")
    task = ray.exceptions.RayTaskError("f", "traceback", ValueError("inner"))
    reason = lost_actors.death_reason(str(Died()))
    waited = "rank 3 waited for it, and the process that should answer is dead: "
    certain = Shortage("The kernel killed it.", certain=True)
    possible = Shortage("The kernel may have killed it.", certain=False)
    for error, kernel, kind, text, outside in (
        (Died(), None, ProcessDied, reason, False),
        (Died(preempted=True), None, ProcessDied, reason, True),
        (Died(), certain, KilledForMemory, f"{reason} The kernel killed it.", True),
        (Died(), possible, ProcessDied, f"{reason} The kernel may have killed it.", False),
        (ray.exceptions.OutOfMemoryError("x"), None, KilledForMemory, None, True),
        (task, None, ValueError, "inner", None),
        (KeyError("own"), None, KeyError, "'own'", None),
    ):
        shortage[0] = kernel

        def get(ref: Any, timeout: float, error: BaseException = error) -> Any:
            assert (ref, timeout) == ("ref", 9.0)
            raise error

        async def answer(error: BaseException = error) -> None:
            raise error

        monkeypatch.setattr(ray, "get", get)
        with pytest.raises(kind) as gotten:
            watch.ray_get("ref", "it", 9.0)
        with pytest.raises(kind) as answered:
            asyncio.run(watch.answer_of(answer()))
        for raised, before in ((gotten, waited), (answered, "")):
            assert type(raised.value) is kind
            if outside is not None:
                assert raised.value.outside == outside  # type: ignore[attr-defined]
                assert text is None or str(raised.value) == before + text
                assert str(raised.value).startswith(before)
            else:
                assert str(raised.value) == text
            if isinstance(error, Died | ray.exceptions.RayTaskError):
                assert raised.value.__suppress_context__
    assert len(looks) == 14
    assert (ProcessDied.consequence, ProcessDied.out_of_memory) == (True, None)
    assert (KilledForMemory.consequence, KilledForMemory.out_of_memory) == (False, "host")

    async def fine() -> int:
        return 3

    monkeypatch.setattr(ray, "get", lambda ref, timeout: 4)
    assert (watch.ray_get("r", "it", 9.0), asyncio.run(watch.answer_of(fine()))) == (4, 3)


def ended_process(number: signal.Signals) -> subprocess.Popen[bytes]:
    process = subprocess.Popen(["sleep", "1000"])
    process.send_signal(number)
    process.wait()
    return process


def test_a_wait_ends_at_once_if_a_server_of_ray_has_ended(monkeypatch: pytest.MonkeyPatch) -> None:
    raylet = ended_process(signal.SIGKILL)
    with subprocess.Popen(["sleep", "1000"]) as gcs:
        servers = {"gcs_server": [gcs], "raylet": [raylet]}
        node = SimpleNamespace(
            all_processes={
                name: [SimpleNamespace(process=one) for one in own] for name, own in servers.items()
            }
        )
        node.dead_processes = lambda: ray._private.node.Node.dead_processes(node)
        monkeypatch.setattr(ray._private.worker, "_global_node", node)
        asked: list[str] = []
        monkeypatch.setattr(ray, "get", lambda ref, timeout: asked.append(ref))
        named = f"Ray's raylet (pid {raylet.pid}) has ended by SIGKILL."
        with pytest.raises(ServerEnded, match=f"needs it. {re.escape(named)}$") as raised:
            watch.ray_get("r", "it", 9.0)
        assert (asked, raised.value.consequence, raised.value.outside) == ([], False, True)

        del node.all_processes["raylet"]
        watch.ray_get("r", "it", 9.0)
        assert asked == ["r"]
        gcs.terminate()


def test_the_loss_of_an_actor_names_the_server_that_ended_with_it(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    def reason() -> str:
        with pytest.raises(ProcessDied) as raised:
            asyncio.run(watch.answer_of(lost()))
        return str(raised.value)

    async def lost() -> None:
        raise Died()

    monkeypatch.setattr(watch, "kernel_shortage", lambda pids: None)
    monkeypatch.setattr(ray._private.worker, "_global_node", None)
    monkeypatch.chdir(tmp_path)  # a short name for the socket
    alone = reason()
    with socket.socket(socket.AF_UNIX) as server:
        server.bind("server")
        server.listen()
        monkeypatch.setenv(f"{preloaded.VARIABLE}ENGINES", "server")
        monkeypatch.setattr(preloaded, "ANSWER_S", 0.05)
        assert reason() == alone, "the server is busy with its imports"
    assert reason() == (
        f"{alone} The fork server of engines has ended, and with it the processes it forked."
    )
    Path("server").unlink()
    assert reason() != alone
    monkeypatch.setattr(watch, "was_here", lambda text: False)
    assert reason() == alone, "an actor of another machine"


def test_a_child_dies_with_the_parent_that_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    done: list[Any] = []
    system = SimpleNamespace(parent=7, refused=0)
    library = SimpleNamespace(prctl=lambda *given: done.append(given) or system.refused)
    monkeypatch.setattr(ctypes, "CDLL", lambda name, use_errno: library)
    monkeypatch.setattr(os, "getppid", lambda: system.parent)
    monkeypatch.setattr(os, "kill", lambda *given: done.append(given))
    states = {7: "sleeping", 8: None}
    monkeypatch.setattr(processes, "condition", states.get)
    monkeypatch.delenv(PARENT, raising=False)

    def bound(named: int | None, parent: int) -> list[Any]:
        done.clear()
        system.parent = parent
        if named is not None:
            monkeypatch.setenv(PARENT, str(named))
        processes.die_with_parent()
        return list(done)

    assert bound(None, 7) == []
    assert bound(7, 7) == [(1, signal.SIGKILL)]
    assert os.environ[PARENT] == str(os.getpid())
    assert bound(7, 6) == [], "a later descendant of a process that lives"
    assert os.environ[PARENT] == "7"
    assert bound(8, 6) == [(os.getpid(), signal.SIGKILL)]
    system.refused = -1
    with pytest.raises(OSError, match="PR_SET_PDEATHSIG"):
        bound(7, 7)


def test_processes_are_found_by_their_run_and_their_requester(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    class One:
        def __init__(self, pid: int, environment: dict[str, str] | None, *children: int) -> None:
            self.pid, self._environment, self._children = pid, environment, children

        def environ(self) -> dict[str, str]:
            if self._environment is None:
                raise psutil.AccessDenied(self.pid)
            return self._environment

        def children(self, recursive: bool) -> list[One]:
            assert recursive
            return [every[child] for child in self._children]

    own = os.getpid()
    every = {
        own: One(own, {RUN_ID_VARIABLE: "id"}, 1, 2),
        1: One(1, {RUN_ID_VARIABLE: "id"}),
        2: One(2, {RUN_ID_VARIABLE: "other"}),
        3: One(3, None),
        4: One(4, {}, 5),
        5: One(5, {RUN_ID_VARIABLE: "id"}),
    }

    def process(pid: int = own) -> One:
        if pid not in every:
            raise psutil.NoSuchProcess(pid)
        return every[pid]

    monkeypatch.setattr(psutil, "process_iter", every.values)
    monkeypatch.setattr(psutil, "Process", process)
    assert [one.pid for one in processes.of_run("id")] == [1, 5]
    monkeypatch.setenv(f"{preloaded.VARIABLE}ENGINES", "address")
    requests: list[Any] = []

    def started_by(address: str | None, requesters: set[int]) -> set[int]:
        requests.append((address, requesters))
        return {4, 99}

    monkeypatch.setattr(preloaded, "started_by", started_by)
    assert processes.descendants() == {1, 2, 4, 5, 99}
    assert requests == [("address", {own, 1, 2})]
    # What others started; a process that has ended started none.
    monkeypatch.setattr(preloaded, "started_by", lambda _, requesters: {99} & requesters)
    assert processes.descendants({4, 7}) == {5}
    assert processes.descendants({99}) == {99}


def test_the_condition_of_a_process_is_none_after_its_end(monkeypatch: pytest.MonkeyPatch) -> None:
    began = psutil.Process().create_time()
    assert processes.condition(os.getpid()) in ("running", "sleeping")
    assert processes.condition(os.getpid(), began - 1.9) is not None
    assert processes.condition(os.getpid(), began - 2.1) is None
    monkeypatch.setattr(psutil.Process, "status", lambda self: psutil.STATUS_ZOMBIE)
    assert processes.condition(os.getpid()) is None
    assert processes.condition(2**22 + 1) is None


def test_a_handler_is_seen_from_outside() -> None:
    before = signal.signal(signal.SIGUSR2, lambda *_: None)
    try:
        assert processes.handles(os.getpid(), signal.SIGUSR2)
        signal.signal(signal.SIGUSR2, signal.SIG_DFL)
        assert not processes.handles(os.getpid(), signal.SIGUSR2)
    finally:
        signal.signal(signal.SIGUSR2, before)
    assert not processes.handles(2**22 + 1, signal.SIGUSR2)


def test_rare_collections_leave_out_what_is_there(monkeypatch: pytest.MonkeyPatch) -> None:
    done: list[Any] = []
    for name in ("collect", "freeze", "set_threshold"):
        monkeypatch.setattr(gc, name, lambda *given, name=name: done.append((name, *given)))
    processes.collect_rarely()
    assert done == [("collect",), ("freeze",), ("set_threshold", 100_000)]


def test_a_process_survived_what_its_later_lines_show(tmp_path: Path) -> None:
    log = tmp_path / "a.log"
    error, alive = "(Engine pid=3) ValueError: x", "(Engine pid=3) INFO 01-02 03:04:05 [a.py:1] y"
    for lines, line, found in (
        ([error, alive], 1, True),
        ([error], 1, False),
        ([error, alive.replace("pid=3", "pid=4")], 1, False),
        ([error, alive.replace("y", "[shutdown] y")], 1, False),
        ([alive, error], 2, False),
        ([error, alive], 3, False),
        ([error, alive], 0, False),
        ([alive, error, "text", alive], 2, True),
    ):
        log.write_text("\n".join(lines) + "\n")
        assert survived(Cause("x", log, line, 0)) == found, (lines, line)
    assert tail(log, 2) == ["text", alive]
    assert tail(log, 0) == []


def test_lines_of_logs_are_judged_by_their_exception() -> None:
    for line, kind, message in (
        ("a.b.ValueError: x: y", 0, "ValueError: x: y"),
        ("ValueError", 0, "ValueError"),
        ("ray.exceptions.RayTaskError(ValueError): x", 0, "RayTaskError: x"),
        ("x.DeadlineExceeded: y", 2, "DeadlineExceeded: y"),
        ("ConnectionResetError: [Errno 104]", 3, "ConnectionResetError: [Errno 104]"),
        ("RuntimeError: Connection closed by peer", 3, "RuntimeError: Connection closed by peer"),
        ("some text", 0, "some text"),
    ):
        assert judge(line) == (kind, message), line


def test_events_are_read_whole_or_from_their_end(tmp_path: Path) -> None:
    assert read_events(tmp_path) == []
    reader = EventReader(tmp_path)
    assert reader.new() == []
    for text in ("first", "second"):
        note(tmp_path / "run", text)
    file = tmp_path / "run" / "events.jsonl"
    assert [one.text for one in read_events(tmp_path / "run")] == ["first", "second"]
    lines = ['{"time": 1, "text": "a"}', "[]", "{", '{"time": "x", "text": 3}', '{"time": 2}']
    file.write_text("\n".join([*lines, '{"time": 2.5, "text": 3}']) + "\n")
    assert read_events(tmp_path / "run") == [Event(1.0, "a"), Event(2.5, "3")]
    size = file.stat().st_size
    for newest, count in ((size, 2), (size - 1, 1), (26, 1), (25, 0)):
        assert len(read_events(tmp_path / "run", newest)) == count, newest

    later = EventReader(tmp_path / "run")
    with open(file, "a") as other:
        other.write('{"time": 3, "text": "b"}\n{"time": 4, ')
    assert later.new() == ["b"]
    with open(file, "a") as other:
        other.write('"text": "c"}\n')
    assert later.new() == ["c"]
    assert later.new() == []


def test_errors_are_described_with_their_notes_and_kinds(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(watch, "_process_name", "rank 2")
    error = ValueError("first\nsecond")
    error.add_note("a note")
    assert described(error) == "ValueError: first (a note)\nsecond"
    assert described(SystemExit(15)) == f"rank 2 (pid {os.getpid()}) was ended by SIGTERM"
    assert described(SystemExit(1)) == "SystemExit: 1"

    chained = ValueError("x")
    chained.__cause__ = TimeoutError()
    circular = ValueError("x")
    circular.__context__ = chained.__context__ = circular
    suppressed = ValueError("x")
    suppressed.__context__, suppressed.__suppress_context__ = TimeoutError(), True
    for one, late in (
        (TimeoutError("x"), True),
        (chained, True),
        (circular, False),
        (suppressed, False),
        (RuntimeError("it timed out"), True),
        (RuntimeError("no answer yet"), True),
        (RuntimeError("a timeline"), False),
        (ProcessDied("no answer"), False),
        (SimpleNamespace, False),
    ):
        if isinstance(one, BaseException):
            assert timed_out(one) == late, one
    for one, kind in (
        (MemoryError(), "host"),
        (OSError(12, "x"), "host"),
        (OSError(11, "x"), None),
        (type("OutOfMemoryError", (Exception,), {})(), "device"),
        (type("OutOfMemoryError", (Exception,), {"__module__": "ray.x"})(), "host"),
        (RuntimeError("CUDA out of memory"), "device"),
        (RuntimeError("std::bad_alloc"), "host"),
        (ValueError("No available memory for the cache"), "device"),
        (KeyError("out of memory"), None),
        (KilledForMemory("x"), "host"),
        (ProcessDied("out of memory"), None),
    ):
        assert out_of_memory(one) == kind, one
    assert sys.version_info >= (3, 12)

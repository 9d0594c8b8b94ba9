"""The launcher's parts, without processes: what it starts, prepares, watches and records."""

from __future__ import annotations

import dataclasses
import os
import signal
import socket
import subprocess
import sys
from collections.abc import Callable
from contextlib import ExitStack, nullcontext
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import psutil
import pytest
from torch.distributed.elastic.rendezvous import RendezvousParameters

from megatron_async_rl.config.load import dump
from megatron_async_rl.config.problem import UserError
from megatron_async_rl.config.rules import validated
from megatron_async_rl.config.schema import Config
from megatron_async_rl.launch import ending, launcher, torchrun
from megatron_async_rl.launch.addresses import Nodes
from megatron_async_rl.launch.ending import explain_failure, record_end, record_stall
from megatron_async_rl.launch.launcher import LocalRanks, environment_of_ranks
from megatron_async_rl.launch.rendezvous import RankStore
from megatron_async_rl.plan.layout import PLANNED_DEVICE
from megatron_async_rl.watchdog import preloaded, stall, watch
from megatron_async_rl.watchdog.events import (
    Failure,
    Status,
    first_failure,
    note,
    read_status,
    record_failure,
    write_status,
)
from megatron_async_rl.watchdog.logs import PRIMARY, SECONDARY
from megatron_async_rl.watchdog.processes import RUN_ID_VARIABLE
from megatron_async_rl.watchdog.run_folder import RunFolder
from tests.stored_pages import RecordedConsole
from tests.written_run import config_tree

ENDPOINT = "127.0.0.1:1234"


@pytest.fixture
def config(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Config:
    monkeypatch.chdir(tmp_path)
    return validated({**config_tree(), "run": {"dir": str(tmp_path / "run"), "steps": 5}})


def test_torchrun_starts_with_what_it_inherits(
    config: Config, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    started: list[Any] = []
    monkeypatch.setattr(
        subprocess, "Popen", lambda command, **given: started.append((command, given))
    )
    monkeypatch.setattr(launcher, "_preload", lambda *_: [77])
    (config.run.dir / "logs").mkdir(parents=True)
    folder = RunFolder(tmp_path / "folder", tmp_path / "folder", (55, 56))
    for lock, number, log_name in ((None, 0, "torchrun.log"), (66, 1, "torchrun_1.log")):
        listener = socket.create_server(("127.0.0.1", 0)) if number == 0 else None
        held_number = listener.fileno() if listener is not None else -1
        store = RankStore("id", "127.0.0.1", 1234, listener)
        nodes = Nodes(count=2, rank=number, endpoint=ENDPOINT)
        ranks = LocalRanks(config, nodes, store, {"OWN": "1"}, folder, lock)
        assert ranks.log == config.run.dir / "logs" / log_name
        with ExitStack() as held:
            launcher._start_ranks(ranks, "the id", held)
        command, given = started.pop()
        assert command == [
            sys.executable,
            "-m",
            "megatron_async_rl.launch.torchrun",
            *("--nnodes=2", "--nproc-per-node=0", "--rdzv-backend=bound"),
            "--rdzv-endpoint=127.0.0.1:1234",
            f"--rdzv-conf=rank={number}" + (f",descriptor={held_number}" if number == 0 else ""),
            "--rdzv-id=id",
            "-m",
            "megatron_async_rl.train",
            str(config.run.dir / "config.yaml"),
        ]
        expected = [55, 56, 77, held_number] if number == 0 else [55, 56, 66, 77]
        assert given["pass_fds"] == expected
        assert given["start_new_session"] is True
        assert (given["stdin"], given["stderr"]) == (subprocess.DEVNULL, subprocess.STDOUT)
        assert given["stdout"].name == str(ranks.log)
        assert given["stdout"].closed
        assert listener is None or listener.fileno() == -1
        environment = given["env"]
        assert (environment["OWN"], environment[RUN_ID_VARIABLE]) == ("1", "the id")
        assert environment["TMPDIR"] == str(tmp_path / "folder")


def test_the_environment_of_ranks_is_the_users_with_the_runs_variables() -> None:
    given = {"A": "user", "OMP_NUM_THREADS": "3", f"{preloaded.VARIABLE}RANKS": "x"}
    found = environment_of_ranks(given, "id", {"A": "default", "B": "default"})
    loopback = found.pop("GLOO_SOCKET_IFNAME")
    assert found.pop("NCCL_SOCKET_IFNAME") == loopback
    assert found == {
        "A": "user",
        "B": "default",
        "OMP_NUM_THREADS": "3",
        RUN_ID_VARIABLE: "id",
        "SPT_NOENV": "1",
        "PYTHONUTF8": "1",
        "RAY_USAGE_STATS_ENABLED": "0",
        "RAY_worker_niceness": "0",
        "RAY_ENABLE_WINDOWS_OR_OSX_CLUSTER": "0",
        "CUDA_VISIBLE_DEVICES": "",
        "HF_HUB_OFFLINE": "1",
        "PYTORCH_ALLOC_CONF": found["PYTORCH_ALLOC_CONF"],
    }
    others = {"CUDA_VISIBLE_DEVICES": "2", "RAY_ADDRESS": "a:1", "HF_HUB_OFFLINE": "0"}
    found = environment_of_ranks({**others, PLANNED_DEVICE: "cuda"}, "id", {}, nodes=2)
    assert found.items() >= {**others, "OMP_NUM_THREADS": "1"}.items()
    assert not {"GLOO_SOCKET_IFNAME", "RAY_ENABLE_WINDOWS_OR_OSX_CLUSTER"} & found.keys()


def test_a_start_keeps_earlier_configs_and_removes_what_the_last_one_left(config: Config) -> None:
    run_dir = config.run.dir
    launcher._prepare_directory(config)
    assert (run_dir / "config.yaml").read_text() == dump(config)
    assert sorted(path.name for path in run_dir.iterdir()) == ["config.yaml", "logs"]

    left = ["stop", "engines", "logs/rank0.log", "watch/rank 0.json", "stall.txt"]
    left += ["status.json.1.partial", "config.yaml.2.partial", "samples/a.partial"]
    for name in (*left, "samples/kept", "metrics.jsonl", "logs/rank0.log.old", "config.x.yaml"):
        (run_dir / name).parent.mkdir(parents=True, exist_ok=True)
        (run_dir / name).write_text(name)
    kept = ["config.x.yaml", "config.yaml", "logs/rank0.log.old", "metrics.jsonl", "samples/kept"]

    def files() -> list[str]:
        found = (path for path in run_dir.rglob("*") if path.is_file())
        return sorted(str(path.relative_to(run_dir)) for path in found)

    launcher._prepare_directory(config)
    assert [name for name in files() if "partial" not in name] == kept
    assert (run_dir / "logs/rank0.log.old").read_text() == "logs/rank0.log"

    for number, text in ((0, "earlier"), (1, "another")):
        (run_dir / "config.yaml").write_text(text)
        launcher._prepare_directory(config)
        assert (run_dir / f"config.{number}.yaml").read_text() == text
        assert (run_dir / "config.yaml").read_text() == dump(config)
    assert not (run_dir / "config.2.yaml").exists()


class Watched:
    """A run whose process ends after `polls` polls, with `changes` of the run before each."""

    def __init__(self, run_dir: Path, monkeypatch: pytest.MonkeyPatch, code: int = 0) -> None:
        self.run_dir, self.code = run_dir, code
        self.console, self.interrupts = RecordedConsole(), list[int]()
        self.now, self.updates = 0.0, 0
        self.stalls: list[Any] = []
        self.returncode: int | None = None
        self.changes: list[Callable[[], object]] = []
        clock = SimpleNamespace(monotonic=lambda: self.now, sleep=self.sleep)
        monkeypatch.setattr(launcher, "time", clock)
        run_dir.mkdir(parents=True, exist_ok=True)

    def sleep(self, seconds: float) -> None:
        assert seconds == launcher.POLL_S
        self.now += 1.0

    def poll(self) -> int | None:
        if self.changes:
            self.changes.pop(0)()
        else:
            self.returncode = self.code
        return self.returncode

    def update(self) -> None:
        self.updates += 1

    def look(self) -> Any:
        return self.stalls.pop(0) if self.stalls else None

    def status(self, phase: str, step: int = 1) -> Callable[[], object]:
        status = Status(phase=phase, step=step, steps=5, time=0.0)
        return lambda: write_status(self.run_dir, status)

    def signal(self) -> None:
        self.interrupts.append(2)

    def wait(self) -> None:
        pass

    def watch(
        self,
        earlier: Status | None = None,
        *,
        nodes: int = 1,
        rank: int = 0,
        resumes: bool = True,
    ) -> Any:
        return launcher._watch(
            self,  # type: ignore[arg-type]
            earlier,
            self,  # type: ignore[arg-type]
            self,  # type: ignore[arg-type]
            self.run_dir,
            self.console,
            Nodes(count=nodes, rank=rank, endpoint=ENDPOINT),
            self.interrupts,
            resumes=resumes,
        )


EARLY = "Stopped before a step was made: nothing is lost, and the same command starts it again.\n"
STOPPING = "Stopping after this step. Ctrl-C again kills at once.\n"
KILLED = "Killed. The last checkpoint is intact; the same command resumes from it.\n"
KILLED_REPLAY = "Killed. A replay cannot be resumed; the same command starts a new one.\n"


def test_a_run_is_watched_to_its_end(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    number = iter(range(99))

    def run(code: int = 0) -> Watched:
        return Watched(tmp_path / str(next(number)), monkeypatch, code)

    for code, result in ((0, 0), (1, 1), (-9, 1)):
        one = run(code)
        one.changes = [one.wait, one.status("training")]
        assert one.watch() == (result, None)
        assert one.updates == 3
        assert one.console.text == ""

    earlier = Status(phase="stopped", step=3, steps=5, time=0.0)
    for before in ([], ["starting"], ["stopped"]):
        one = run()
        one.changes = [one.status(phase, 3) for phase in before] + [one.signal]
        assert one.watch(earlier) == (launcher.INTERRUPTED, None)
        assert one.console.text == EARLY
        assert not (one.run_dir / watch.STOP).exists()

    # Of several machines, another one may have begun a step.
    for nodes, before in ((2, "starting"), (1, "training")):
        one = run()
        one.changes = [one.status(before), one.signal, one.wait]
        assert one.watch(nodes=nodes) == (0, None)
        assert one.console.text == STOPPING
        assert (one.run_dir / watch.STOP).exists()

    for resumes, text in ((True, KILLED), (False, KILLED_REPLAY)):
        one = run()
        one.changes = [one.status("training"), one.signal, one.wait, one.signal, one.wait]
        assert one.watch(resumes=resumes) == (launcher.INTERRUPTED, None)
        assert one.console.text == STOPPING + text


def test_a_failure_or_a_stall_ends_the_watch(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    one = Watched(tmp_path / "failed", monkeypatch)
    monkeypatch.setattr(launcher, "CLOSING_S", 3.0)
    one.changes = [one.status("failed")] + [one.wait] * 9
    assert one.watch() == (1, None)
    assert one.now == 4.0

    # The status of the previous start is not this one's.
    one = Watched(tmp_path / "before", monkeypatch, code=1)
    earlier = Status(phase="failed", step=1, steps=5, time=0.0)
    one.changes = [one.status("failed")] + [one.wait] * 9
    assert one.watch(earlier) == (1, None)
    assert one.now == 10.0

    one = Watched(tmp_path / "stalled", monkeypatch)
    found = stall.Stall(headline="nothing moved", suspects=(), text="text")
    one.stalls = [None, None, found]
    one.changes = [one.wait] * 9
    assert one.watch() == (1, found)
    assert one.now == 2.0


def test_another_machine_waits_for_the_end_that_rank_0_records(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    one = Watched(tmp_path, monkeypatch)
    polls = iter([one.status("exporting"), one.wait, one.status("finished"), one.wait])

    def poll() -> int:
        next(polls, one.wait)()
        one.returncode = 0
        return 0

    monkeypatch.setattr(one, "poll", poll)
    assert one.watch(nodes=2, rank=1) == (0, None)
    assert one.now == 2.0
    one.now = 0.0
    assert one.watch(nodes=2, rank=0) == (0, None)
    assert one.now == 0.0


def ended(code: int | None, log: str, tmp_path: Path) -> str | None:
    (tmp_path / "log").write_text(log)
    process: Any = SimpleNamespace(returncode=code, pid=7)
    failure = ending.torchrun_failure(process, tmp_path / "log")
    if failure is None:
        return None
    assert (failure.process, failure.where) == ("launcher", str(tmp_path / "log"))
    assert (failure.kind, failure.fix) == (PRIMARY, "")
    return failure.what.partition(", was ended by ")[2]


def test_the_signal_that_ended_torchrun_is_named(tmp_path: Path) -> None:
    line = "SignalException: Process 5 got signal: {0}"
    for code, log, name in (
        (None, "", None),
        (0, line.format(15), None),
        (-9, "", "SIGKILL"),
        (-60, "", "signal 60"),
        (1, "Error", None),
        (1, line.format(1) + "\n" + line.format(15), "SIGTERM"),
        (1, line.format(15) + "\nx" * 101, None),
    ):
        assert ended(code, log, tmp_path) == name, (code, log)


def test_the_end_is_recorded_unless_rank_0_did(tmp_path: Path) -> None:
    done = Status(phase="finished", step=5, steps=5, time=1.0)
    training = Status(phase="training", step=2, steps=5, time=1.0)
    own = f"mar train (pid {os.getpid()})"

    def recorded(
        status: Status | None,
        code: int,
        *,
        node: int = 0,
        earlier: Status | None = None,
        error: BaseException | None = None,
    ) -> tuple[str, str, str | None] | None:
        (tmp_path / "status.json").unlink(missing_ok=True)
        if status is not None:
            write_status(tmp_path, status)
        record_end(tmp_path, 5, node, code, earlier, error, [2, 15])
        found = read_status(tmp_path)
        return None if found in (status, None) else (found.phase, found.detail, found.error)

    assert recorded(training, 0) is None
    assert recorded(None, 0) is None
    stopped = ("stopped", f"{own} received SIGINT, SIGTERM and ended the run", None)
    assert recorded(training, 130) == recorded(None, 130) == stopped
    assert recorded(done, 130) is None
    assert recorded(done, 130, earlier=done) is None
    assert recorded(done, 1, node=1) is None
    none_left = ("failed", "", "no process left a message")
    assert recorded(done, 1) == recorded(done, 1, node=1, earlier=done) == none_left
    assert recorded(training, 1) == none_left
    assert recorded(training, 1, error=ValueError("x")) == ("failed", "", f"{own}: ValueError: x")
    failure = Failure(
        process="rank 1", what="E: why", where="there", fix="that", kind=PRIMARY, time=1.0
    )
    record_failure(tmp_path, failure)
    assert recorded(training, 1) == ("failed", "", "E: why\n  fix: that")


def test_a_stall_is_recorded_with_its_stacks(tmp_path: Path) -> None:
    for consequence, kind in ((False, PRIMARY), (True, SECONDARY)):
        found = stall.Stall(
            headline="nothing moved",
            suspects=("rank 1 waits.",),
            text="text",
            consequence=consequence,
        )
        record_stall(tmp_path, found)
        status, failure = read_status(tmp_path), first_failure(tmp_path)
        assert status is not None
        assert failure is not None
        text = "Stalled: nothing moved rank 1 waits."
        place = str(tmp_path / "stall.txt")
        assert (status.phase, status.error, status.log) == ("failed", text, place)
        assert (failure.process, failure.what, failure.where) == ("launcher", text, place)
        assert failure.kind == kind
        assert status.time == failure.time > 1e9


def test_a_failure_is_explained_with_its_place_and_the_waits(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    free = ending.FULL_BYTES
    monkeypatch.setattr(
        ending.shutil,
        "disk_usage",
        lambda path: SimpleNamespace(free=free if path == tmp_path else 0),
    )

    def explained() -> str:
        console = RecordedConsole()
        explain_failure(tmp_path, console)
        return console.text.replace(str(tmp_path), "RUN")

    text = "The run failed: no process left a message\nLog: RUN/logs\n"
    assert explained() == text
    free -= 1
    full = "The file system that holds RUN is full, and logs may lack their last lines.\n"
    assert explained() == f"{text}{full}  fix: free space there\n"
    (tmp_path / "stall.txt").write_text("[rank 0] waits\n")
    waits = "\nWho waited for what (stacks: RUN/stall.txt):\n[rank 0] waits\n"
    assert explained() == f"{text}{full}  fix: free space there\n{waits}"


def test_a_rank_is_forked_from_its_server_or_started_like_torchruns(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    requests: list[Any] = []
    forked: list[Any] = ["forked", None]
    monkeypatch.setattr(
        preloaded, "start", lambda *given, **named: requests.append((given, named)) or forked.pop(0)
    )
    monkeypatch.setattr(torchrun, "_start_interpreter", lambda *given: given)
    monkeypatch.setenv(f"{preloaded.VARIABLE}RANKS", "address")
    handler: Any = object()
    command, environment = [sys.executable, "-u", "x.py"], {"A": "1"}
    assert torchrun._start_rank(handler, command, environment) == "forked"
    request = (("address", ["-u", "x.py"], environment, (0, 1, 2)), {"new_session": True})
    assert requests == [request]
    assert torchrun._start_rank(handler, command, environment) == (
        handler,
        tuple(command),
        environment,
    )
    bound = ["numactl", *command]
    assert torchrun._start_rank(handler, bound, environment)[1] == tuple(bound)
    assert len(requests) == 2


def test_a_rendezvous_reads_its_number_and_socket(monkeypatch: pytest.MonkeyPatch) -> None:
    served: list[Any] = []
    monkeypatch.setattr(
        torchrun, "serve_store", lambda *given, **named: served.append((given, named)) or "store"
    )
    monkeypatch.setattr(
        torchrun.StaticTCPRendezvous, "next_rendezvous", lambda self: (self.rank, self._store)
    )
    first = -1
    for rank, store in ((0, "store"), (1, None)):
        listener = socket.create_server(("127.0.0.1", 0))
        number = listener.fileno()
        extra = {"descriptor": str(number)} if rank == 0 else {}
        parameters = RendezvousParameters(
            *("bound", "[::1]:1234", "id", 2, 2), rank=str(rank), timeout="33", **extra
        )
        one = torchrun.BoundRendezvous(parameters)
        assert one.get_backend() == "bound"
        assert one.next_rendezvous() == one.next_rendezvous() == (rank, store)
        if rank == 0:
            first = listener.detach()
        else:
            listener.close()
    (((listener, timeout), named),) = served
    assert (listener.fileno(), timeout.total_seconds(), named) == (first, 33, {"clients": 2})
    listener.close()


def test_leftovers_get_a_signal_that_they_can_handle_first(monkeypatch: pytest.MonkeyPatch) -> None:
    sent: list[tuple[int, str]] = []

    class One:
        def __init__(self, pid: int, status: str) -> None:
            self.pid, self._status = pid, status

        def status(self) -> str:
            if self._status == "gone":
                raise psutil.NoSuchProcess(self.pid)
            return self._status

    for name in ("terminate", "kill"):
        monkeypatch.setattr(
            psutil.Process, name, lambda one, name=name: sent.append((one.pid, name))
        )
    waited: list[Any] = []
    ones = [One(1, "running"), One(2, "stopped"), One(3, "gone"), One(4, "sleeping")]
    found = iter([ones, ones[:1]])
    monkeypatch.setattr(launcher, "of_run", lambda run_id: next(found) if run_id == "id" else [])
    monkeypatch.setattr(
        psutil, "wait_procs", lambda alive, timeout: waited.append((alive, timeout))
    )
    removed: list[Any] = []
    monkeypatch.setattr(launcher, "remove_stale", removed.append)
    launcher._kill_leftovers("id")
    assert sent == [(1, "terminate"), (2, "kill"), (4, "terminate"), (1, "kill")]
    assert waited == [(ones, 10.0), (ones[:1], 10.0)]
    assert removed == [launcher.SHARED_MEMORY]


def test_a_report_that_fails_does_not_fail_the_run(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    console = RecordedConsole()
    launcher._report(tmp_path, console)
    assert console.text.startswith("The report was not written. ")
    assert "no finished step" in console.text


def test_signals_are_collected_and_handlers_restored() -> None:
    before = {one: signal.getsignal(one) for one in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)}
    files = len(os.listdir("/proc/self/fd"))
    with ending.deferred_signals() as seen:
        for number in (signal.SIGTERM, signal.SIGHUP, signal.SIGINT, signal.SIGHUP, signal.SIGINT):
            os.kill(os.getpid(), number)
        assert seen == [15, 2, 2], "a hang-up after another signal adds nothing"
    assert {one: signal.getsignal(one) for one in before} == before
    assert len(os.listdir("/proc/self/fd")) == files


def test_a_status_that_cannot_be_read_is_an_error_with_its_file(tmp_path: Path) -> None:
    (tmp_path / "status.json").write_text("{}")
    with pytest.raises(UserError, match="is not a run's status"):
        read_status(tmp_path)
    assert dataclasses.asdict(Status(phase="x", step=0, steps=0, time=0.0))["measure"] == "reward"


class Launch:
    """A launch whose ranks only write the status `phase`, at step 3, and end with `code`."""

    def __init__(self, config: Config, monkeypatch: pytest.MonkeyPatch) -> None:
        self.config, self.calls = config, list[Any]()
        self.console = RecordedConsole()
        monkeypatch.setattr(launcher, "run_folder", lambda: nullcontext("folder"))
        monkeypatch.setattr(launcher, "remove_stale", lambda path: self.calls.append(path))
        monkeypatch.setattr(launcher, "print_summary", lambda *_: self.calls.append("summary"))
        monkeypatch.setattr(launcher, "_report", lambda *_: self.calls.append("report"))
        monkeypatch.setattr(launcher, "_prepare_directory", lambda _: self.calls.append("prepare"))
        monkeypatch.setattr(launcher, "_run", self._run)

    def _run(self, ranks: LocalRanks, console: Any, start_s: float) -> int:
        self.calls.append((ranks.store, ranks.folder, ranks.lock is not None, start_s))
        if self.phase:
            status = Status(phase=self.phase, step=3, steps=5, time=0.0)
            write_status(self.config.run.dir, status)
        return self.code

    def meet(self, config: Config, start_s: float) -> str:
        self.calls.append(("meet", start_s))
        return "store"

    def run(self, code: int, phase: str = "", *, nodes: int = 1, rank: int = 0, **run: Any) -> int:
        self.code, self.phase = code, phase
        self.calls.clear()
        self.console = RecordedConsole()
        config = self.config.model_copy(update={"run": self.config.run.model_copy(update=run)})
        (config.run.dir / "status.json").unlink(missing_ok=True)
        where = Nodes(count=nodes, rank=rank, endpoint=ENDPOINT)
        return launcher.launch(config, self.console, where, self, {})  # type: ignore[arg-type]


def test_the_end_of_a_launch_is_shown(config: Config, monkeypatch: pytest.MonkeyPatch) -> None:
    one = Launch(config, monkeypatch)
    run_dir = config.run.dir
    begun: list[Any] = [launcher.SHARED_MEMORY, "prepare", ("meet", 600.0)]
    begun.append(("store", "folder", True, 600.0))
    assert one.run(0, "finished") == 0
    assert (one.calls, one.console.text) == ([*begun, "report", "summary"], "")
    assert one.run(1, "failed") == 1
    assert (one.calls, one.console.text) == (begun, "")
    numerics: Any = SimpleNamespace()
    assert one.run(0, "finished", numerics=numerics) == 0
    assert (one.calls, one.console.text) == (begun, "")

    again = f"; the same command resumes. Run directory: {run_dir}\n"
    replay: Any = SimpleNamespace(last=7)
    assert one.run(0, "stopped") == one.run(0) == launcher.INTERRUPTED
    assert one.console.text == f"Stopped at step 0 of 5{again}"
    for settings, text in (
        ({}, f"5{again}"),
        ({"replay": replay}, "7\n"),
        ({"numerics": numerics}, "2\n"),
    ):
        assert one.run(0, "stopped", **settings) == launcher.INTERRUPTED
        assert (one.calls, one.console.text) == (begun, f"Stopped at step 3 of {text}")

    assert one.run(0, "finished", nodes=3, rank=1) == 0
    text = "node 1 of 3: waiting for the other nodes, up to 600 s\n"
    found = [begun[0], begun[2], ("store", "folder", False, 600.0), "summary"]
    assert (one.calls, one.console.text) == (found, text)


def test_a_finished_run_is_not_started_again(
    config: Config, monkeypatch: pytest.MonkeyPatch
) -> None:
    one = Launch(config, monkeypatch)
    run_dir = config.run.dir
    for step, phase, done in ((5, "finished", True), (4, "finished", False), (5, "stopped", False)):
        write_status(run_dir, Status(phase=phase, step=step, steps=5, time=0.0))
        console = RecordedConsole()
        one.calls.clear()
        assert launcher.already_finished(config, console) == done
        assert launcher.finished_before(config, console) == done
        text = (
            f"{run_dir} already holds this run, finished at step 5. To continue, raise run.steps;"
            " to repeat, change run.dir.\n"
        )
        assert console.text == text * 2 * done
        assert one.calls == ["summary"] * 2 * done
    (run_dir / "status.json").unlink()
    assert not launcher.already_finished(config, console)
    assert not launcher.finished_before(config, console)
    write_status(run_dir, Status(phase="finished", step=5, steps=5, time=0.0))
    one.calls.clear()
    monkeypatch.setattr(Path, "unlink", lambda *_, **__: None)
    assert one.run(0) == 0
    assert one.calls == ["summary"]


def test_a_stall_is_recorded_and_explained(
    config: Config, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    calls: list[Any] = []
    console = RecordedConsole()
    process = SimpleNamespace(pid=7, returncode=None)
    found = stall.Stall(headline="Nothing moved.", suspects=(), text="")
    results: list[Any] = [(1, found), (1, None), (0, None), (launcher.INTERRUPTED, None)]
    monkeypatch.setattr(launcher, "_start_ranks", lambda *_: process)
    monkeypatch.setattr(launcher, "_kill_leftovers", lambda run_id: calls.append("kill"))
    monkeypatch.setattr(launcher, "_watch", lambda *_, **how: calls.append(how) or results[0])
    monkeypatch.setattr(launcher, "record_stall", lambda run_dir, one: calls.append((run_dir, one)))
    monkeypatch.setattr(launcher, "explain_failure", lambda *_: calls.append("explain"))
    monkeypatch.setattr(launcher, "record_end", lambda *given: calls.append(given[1:4]))
    config.run.dir.mkdir()
    store = RankStore("id", "127.0.0.1", 1234, None)
    ranks = LocalRanks(config, Nodes(), store, {}, Path("folder"), None)  # type: ignore[arg-type]
    while results:
        code, stalled = results[0]
        calls.clear()
        assert launcher._run(ranks, console, 9.0) == code
        assert calls == [
            {"resumes": True},
            "kill",
            *([(config.run.dir, found)] if stalled else []),
            (5, 0, code),
            *(["explain"] if code == 1 else []),
        ]
        results.pop(0)
    assert console.text == ""


def test_notes_are_shown_while_a_run_is_watched(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    one = Watched(tmp_path, monkeypatch)
    note(tmp_path, "of an earlier start")
    one.changes = [
        lambda: note(tmp_path, "engine-0 is [lost]"),
        one.wait,
        lambda: note(tmp_path, "engine-0 is back"),
    ]
    assert one.watch() == (0, None)
    assert one.console.text == "note: engine-0 is [lost]\nnote: engine-0 is back\n"


def test_a_damaged_status_hides_no_failure(tmp_path: Path) -> None:
    (tmp_path / "status.json").write_text("{}")
    console = RecordedConsole()
    explain_failure(tmp_path, console)
    text = "The run failed: no process left a message\nLog: RUN/logs\n"
    assert console.text.replace(str(tmp_path), "RUN").startswith(text)
    assert "resumes from" not in console.text

"""Fork server: its processes do what an interpreter would do, and none outlives its requester or
the server. The server of these tests imports one small module."""

from __future__ import annotations

import multiprocessing
import os
import select
import shlex
import signal
import socket
import subprocess
import sys
import threading
from collections.abc import Iterator
from contextlib import ExitStack, nullcontext
from multiprocessing import context
from pathlib import Path

import psutil
import pytest

from megatron_async_rl.config.schema import Config
from megatron_async_rl.launch import launcher
from megatron_async_rl.launch.addresses import Nodes
from megatron_async_rl.launch.launcher import LocalRanks, environment_of_ranks
from megatron_async_rl.launch.rendezvous import RankStore
from megatron_async_rl.plan.layout import PLANNED_DEVICE
from megatron_async_rl.watchdog import preloaded
from megatron_async_rl.watchdog.processes import PARENT, descendants
from megatron_async_rl.watchdog.run_folder import RunFolder
from tests.written_run import config_tree

ROOT = Path(__file__).resolve().parents[2]
FOR_EVER = "import time; print('begun', flush=True); time.sleep(600)"


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[tuple[str, dict[str, str]]]:
    """Address of a server, and the environment that names it."""
    folder = tmp_path_factory.mktemp("of us", numbered=False)
    environment = {**os.environ, "PYTHONPATH": str(ROOT), "PYTHONUTF8": "1"}
    own = {"OF_SERVER": "1"}
    with preloaded.serving("engines", "wave", environment, own, folder, folder / "log"):
        yield environment[f"{preloaded.VARIABLE}ENGINES"], environment


@pytest.fixture
def here(server: tuple[str, dict[str, str]], monkeypatch: pytest.MonkeyPatch) -> str:
    """This process has the server's address and environment."""
    address, environment = server
    for name in ("PYTHONPATH", f"{preloaded.VARIABLE}ENGINES"):
        monkeypatch.setenv(name, environment[name])
    monkeypatch.setattr(context.SpawnProcess, "_Popen", context.SpawnProcess._Popen)
    return address


def command() -> list[str]:
    return shlex.split(preloaded.executable("engines") or sys.executable)


def told(code: str, *arguments: str, cwd: Path | None = None) -> tuple[int, str]:
    """Exit code and output of `python -c CODE ARGUMENTS` from the server."""
    process = subprocess.run(
        [*command(), "-u", "-c", code, *arguments],
        capture_output=True,
        text=True,
        cwd=cwd,
        check=False,
    )
    return process.returncode, process.stdout + process.stderr


def test_it_is_what_the_interpreter_would_have_started(here: str, tmp_path: Path) -> None:
    code = (
        "import os, sys; print(__name__, sys.argv, os.getcwd(), 'wave' in sys.modules,"
        " os.environ.get('OF_SERVER')); print('bad', file=sys.stderr); sys.exit(3)"
    )
    said = f"__main__ ['-c', 'a b'] {tmp_path} True None\nbad\n"
    assert told(code, "a b", cwd=tmp_path) == (3, said)


@pytest.mark.parametrize("kind", ["script", "module"])
def test_scripts_and_modules_run_as_programs(here: str, tmp_path: Path, kind: str) -> None:
    (tmp_path / "beside.py").write_text("NAME = 'beside'", encoding="utf-8")
    text = "import sys, beside; print(__name__, beside.NAME, sys.argv[1:])"
    (tmp_path / "program.py").write_text(text, encoding="utf-8")
    how = ["-m", "program"] if kind == "module" else [str(tmp_path / "program.py")]
    ran = subprocess.run([*command(), *how, "x"], capture_output=True, text=True, cwd=tmp_path)
    assert ran.stdout == "__main__ beside ['x']\n", ran.stderr


def test_its_end_is_its_requesters_end(here: str) -> None:
    assert told("import os; os.kill(os.getpid(), 9)")[0] == -signal.SIGKILL
    assert told("raise SystemExit('why')") == (1, "why\n")
    # Blocked, so that no signal is lost between the output and the wait.
    code = "import signal, sys; signal.pthread_sigmask(signal.SIG_BLOCK, [15]);"
    code += " print('begun', flush=True); signal.sigwait([15]); sys.exit(7)"
    process = subprocess.Popen([*command(), "-c", code], stdout=subprocess.PIPE)
    assert process.stdout is not None
    process.stdout.readline()
    process.terminate()
    assert process.wait(60) == 7


def test_it_ends_with_its_requester(here: str) -> None:
    process = subprocess.Popen([*command(), "-c", FOR_EVER], stdout=subprocess.PIPE)
    assert process.stdout is not None
    process.stdout.readline()
    (pid,) = preloaded.started_by(here, [process.pid])
    assert psutil.Process(pid).parent() != psutil.Process(process.pid)
    process.kill()
    # The process has the other end of the pipe: it is gone where that is.
    assert process.stdout.read() == b""
    process.wait()


def test_it_ends_with_the_server(tmp_path: Path) -> None:
    environment = dict(os.environ)
    with preloaded.serving("ranks", "wave", environment, {}, tmp_path, tmp_path / "log"):
        address, (read, write) = environment[f"{preloaded.VARIABLE}RANKS"], os.pipe()
        process = preloaded.start(address, ["-c", FOR_EVER], environment, (0, write, 2))
        assert process is not None
        os.close(write)
    with open(read, "rb") as end:
        assert end.read() == b""
    assert process.wait() == -signal.SIGKILL


def test_a_process_is_polled_and_signalled_like_one_of_subprocess(
    here: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    def refuse(pid: int, number: int) -> None:
        raise AssertionError("another process may have got the id")

    for end, number in (
        (preloaded.Process.terminate, signal.SIGTERM),
        (preloaded.Process.kill, signal.SIGKILL),
    ):
        process = preloaded.start(here, ["-c", "import time; time.sleep(600)"], os.environ, ())
        assert process is not None
        assert process.poll() is None
        end(process)
        assert select.select([process], [], [], 60)[0] == [process]
        assert process.poll() == -number
        with monkeypatch.context() as patch:
            patch.setattr(os, "kill", refuse)
            end(process)
        assert process.wait() == -number


def test_a_process_whose_server_is_gone_counts_as_killed() -> None:
    ours, theirs = socket.socketpair()
    ours.send(b"x")
    theirs.close()  # with a byte unread, which resets the connection
    process = preloaded.Process(ours, os.getpid())
    assert process.wait() == process.returncode == -signal.SIGKILL


def test_a_server_has_ended_once_it_leaves_a_request_unanswered(
    here: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    assert not preloaded.has_ended("engines")
    monkeypatch.chdir(tmp_path)  # a short name for the socket
    monkeypatch.setenv(f"{preloaded.VARIABLE}ENGINES", "server")
    assert preloaded.has_ended("engines")
    with socket.socket(socket.AF_UNIX) as server:
        server.bind("server")
        server.listen()
        # A server whose main thread has ended: its socket closes after it accepted the connection.
        closing = threading.Thread(target=lambda: server.accept()[0].close())
        closing.start()
        assert preloaded.has_ended("engines")
        closing.join()
        monkeypatch.setattr(preloaded, "ANSWER_S", 0.05)
        assert not preloaded.has_ended("engines"), "it is busy with its imports"


def test_a_request_that_no_server_accepts_starts_nothing(here: str, tmp_path: Path) -> None:
    nowhere = str(tmp_path / "none")
    many = range(preloaded.MAX_DESCRIPTORS + 1)
    for address, descriptors in ((None, ()), (here, many), (nowhere, ())):
        assert preloaded.start(address, ["-c", ""], os.environ, descriptors) is None
    assert preloaded.started_by(None, [os.getpid()]) == set()
    assert preloaded.started_by(nowhere, [os.getpid()]) == set()


def answer(connection: object, value: object) -> None:
    named = os.environ.get(PARENT)
    connection.send((value, os.getppid(), named, os.getpid()))  # type: ignore[attr-defined]
    connection.recv()  # type: ignore[attr-defined]


def test_spawned_processes_come_from_the_server(here: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """They have descriptors of their own, and PARENT names the process itself."""
    monkeypatch.setenv(PARENT, str(os.getpid()))
    preloaded.spawn_by_fork("engines")
    ours, theirs = multiprocessing.Pipe()
    process = multiprocessing.get_context("spawn").Process(target=answer, args=(theirs, [1]))
    process.start()
    theirs.close()
    value, parent, named, pid = ours.recv()
    assert value == [1]
    assert parent != os.getpid()
    assert named == str(pid) == str(process.pid)
    assert pid in descendants()
    assert process.is_alive()
    ours.send(None)
    process.join(60)
    assert process.exitcode == 0
    assert pid not in descendants()


@pytest.mark.parametrize("why", ["no server", "an import that fails", "another PYTHONPATH"])
def test_without_a_server_the_interpreter_starts(
    here: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, why: str
) -> None:
    environment = dict(os.environ)
    code = "import sys; print('wave' in sys.modules)"
    if why == "another PYTHONPATH":
        monkeypatch.setenv("PYTHONPATH", str(tmp_path))
        assert told(code) == (0, "False\n")
        return
    if why == "an import that fails":
        log = tmp_path / "log"
        with preloaded.serving("engines", "not_there", environment, {}, tmp_path, log):
            monkeypatch.setenv(f"{preloaded.VARIABLE}ENGINES", str(tmp_path / "preloaded-engines"))
            assert told(code) == (0, "False\n")
        assert f"{preloaded.VARIABLE}ENGINES" not in environment, "the server has ended"
        return
    monkeypatch.setenv(f"{preloaded.VARIABLE}ENGINES", str(tmp_path / "none"))
    assert told(code) == (0, "False\n")
    preloaded.spawn_by_fork("engines")
    ours, theirs = multiprocessing.Pipe()
    process = multiprocessing.get_context("spawn").Process(target=answer, args=(theirs, [1]))
    process.start()
    assert ours.recv()[1] == os.getpid()
    ours.send(None)
    process.join(60)
    assert process.exitcode == 0


SUPERVISED = {
    "objective": {"loss": "sft", "advantage": "none"},
    "flow": {"prompts_per_step": 4, "group_size": 1, "async_ratio": 0},
    "rollout": None,
}


@pytest.mark.parametrize(
    ("environment", "tree", "kinds"),
    [
        ({}, {}, ["ranks", "engines"]),
        ({}, SUPERVISED, ["ranks"]),
        ({"RAY_ADDRESS": "node0:6379"}, {}, ["ranks"]),  # its engines inherit nothing
        ({PLANNED_DEVICE: "cuda"}, {}, []),  # imports may initialise CUDA
    ],
)
def test_a_run_has_the_servers_that_it_can_use(
    environment: dict[str, str],
    tree: dict[str, object],
    kinds: list[str],
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    def serving(kind: str, *_: object) -> nullcontext[str]:
        return nullcontext(kind)

    monkeypatch.setattr(launcher, "serving", serving)
    monkeypatch.setattr(launcher, "serving_engines", lambda *_: nullcontext("engines"))
    config = Config.model_validate({**config_tree(), **tree})
    folder = RunFolder(tmp_path, tmp_path, ())
    ranks = LocalRanks(config, Nodes(), RankStore("id", "127.0.0.1", 0, None), {}, folder, None)
    with ExitStack() as held:
        assert launcher._preload(ranks, environment, held) == kinds


def test_servers_of_another_run_are_not_used() -> None:
    given = {f"{preloaded.VARIABLE}ENGINES": "/tmp/of-another"}
    assert not given.keys() & environment_of_ranks(given, "id", {}).keys()


class Ended(Exception):
    """Stands in for the end of this process."""


def test_a_replaced_process_forwards_signals_and_ends_like_its_fork(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    forwarded = (signal.SIGTERM, signal.SIGINT, signal.SIGHUP)
    handlers = {number: signal.getsignal(number) for number in forwarded}
    done: list[object] = []
    readable: list[int] = []

    class Fork:
        pid = 4711
        codes: list[int | None]

        def fileno(self) -> int:
            return 0

        def poll(self) -> int | None:
            if len(self.codes) == 3:
                signal.raise_signal(signal.SIGHUP)
            return self.codes.pop(0)

    def exit_with(code: int) -> None:
        raise Ended(code)

    def selected(read: list[int], *_: object) -> None:
        ready, _, _ = wait(read[1:], [], [], 0.0)
        readable.append(len(ready))

    fork, wait = Fork(), select.select
    given: list[object] = []
    monkeypatch.setattr(preloaded, "start", lambda *those: given.append(those) or fork)
    monkeypatch.setattr(select, "select", selected)
    monkeypatch.setattr(os, "_exit", exit_with)
    monkeypatch.setattr(os, "kill", lambda *those: done.append(those))
    mask = signal.pthread_sigmask(signal.SIG_BLOCK, [])
    try:
        for code, ends in ((5, []), (-signal.SIGTERM, [(os.getpid(), signal.SIGTERM)])):
            fork.codes = [None, None, code]
            done.clear()
            readable.clear()
            with pytest.raises(Ended) as ended:
                preloaded._replace("address", ["-c", "pass"])
            assert ended.value.args == (code,)
            assert done == [(4711, signal.SIGHUP), *ends]
            assert readable == [1, 0], "a signal wakes the wait once"
            assert signal.pthread_sigmask(signal.SIG_BLOCK, []) == mask
            expected = signal.SIG_DFL if ends else None
            assert expected is None or signal.getsignal(signal.SIGTERM) == expected
        address, arguments, environment, held = given[0]  # type: ignore[misc]
        assert (address, arguments, environment) == ("address", ["-c", "pass"], os.environ)
        assert {0, 1, 2} <= set(held)
        assert all(os.path.exists(f"/proc/self/fd/{number}") for number in held)
    finally:
        signal.set_wakeup_fd(-1)
        for number, handler in handlers.items():
            signal.signal(number, handler)

"""Steps in which a sandboxed program gives up its rights (sandboxed.py), with recorded system
calls, for kernels and machines that the tests may not have. test_sandbox.py runs real programs."""

from __future__ import annotations

import ctypes
import errno
import json
import os
import resource
import select
import signal
import socket
import struct
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import psutil
import pytest

from megatron_async_rl.rollout.isolation import sandboxed
from tests.cases import looped

ALLOW, EPERM, ENOSYS = "allow", "EPERM", "ENOSYS"
CALLS = {
    "x86_64": {
        "arch": 0xC000003E,
        "socket": 41,
        "socketpair": 53,
        "clone": 56,
        "read": 0,
        "refused": [29, 64, 68, 319, 447, 272, 308, 240, 425, 248, 249, 250, 251],
        "on_self": [302, 142, 144, 203, 314],
        "setpriority": 141,
    },
    "aarch64": {
        "arch": 0xC00000B7,
        "socket": 198,
        "socketpair": 199,
        "clone": 220,
        "read": 63,
        "refused": [194, 190, 186, 279, 447, 97, 268, 180, 425, 217, 218, 219, 30],
        "on_self": [261, 118, 119, 122, 274],
        "setpriority": 140,
    },
}


class Libc:
    """C library that records its calls. `results`: result of a call, by its first argument."""

    def __init__(self, results: Callable[..., int] = lambda *_: 0) -> None:
        self.calls: list[tuple[Any, ...]] = []
        self._results = results

    def __getattr__(self, name: str) -> Any:
        def call(*arguments: Any) -> int:
            plain = tuple(getattr(one, "value", one) for one in arguments)
            self.calls.append((name, *plain))
            return self._results(name, *plain)

        return call


def installed(machine: str, families: tuple[int, ...], monkeypatch: pytest.MonkeyPatch) -> Any:
    """Return the instructions of the seccomp filter."""
    filters: list[Any] = []

    def prctl(name: str, option: int, mode: int, head: bytes, *_: int) -> int:
        assert (name, option, mode) == ("prctl", 22, 2)
        length, address = struct.unpack("HxxxxxxP", head)
        code = ctypes.string_at(address, 8 * length)
        filters.append([struct.unpack_from("HBBI", code, 8 * at) for at in range(length)])
        return 0

    monkeypatch.setattr(sandboxed, "libc", Libc(prctl))
    monkeypatch.setattr(os, "uname", lambda: SimpleNamespace(machine=machine))
    sandboxed.refuse_calls(families)
    (program,) = filters
    return program


def decided(program: Any, arch: int, call: int, *arguments: int) -> str:
    """Run the filter on a call, as the kernel does (seccomp_data: nr, arch, ip, args)."""
    data = struct.pack("=IIQ6Q", call, arch, 0, *arguments, *[0] * (6 - len(arguments)))
    place = accumulator = 0
    while True:
        code, true, false, operand = program[place]
        place += 1
        if code == 0x20:
            (accumulator,) = struct.unpack_from("=I", data, operand)
        elif code == 0x54:
            accumulator &= operand
        elif code == 0x06:
            names = {
                0x7FFF0000: ALLOW,
                0x50000 | errno.EPERM: EPERM,
                0x50000 | errno.ENOSYS: ENOSYS,
            }
            return names[operand]
        else:
            tests = {0x15: accumulator == operand, 0x35: accumulator >= operand}
            place += true if (tests | {0x45: bool(accumulator & operand)})[code] else false


@pytest.mark.parametrize("machine", CALLS)
def test_the_filter_refuses_what_the_isolation_promises(
    machine: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    calls: dict[str, Any] = CALLS[machine]
    arch = calls["arch"]
    confined = tuple(map(int, sandboxed.FAMILIES))
    for families in (confined, ()):
        program = installed(machine, families, monkeypatch)

        def decide(call: str | int, *given: int, program: Any = program) -> str:
            return decided(program, arch, calls[call] if isinstance(call, str) else call, *given)

        assert {decide(one) for one in calls["refused"]} == {EPERM}
        assert decide("read", 3) == decide("read", 0) == ALLOW
        assert decided(program, arch + 1, calls["read"]) == ENOSYS
        assert decide(435) == ENOSYS
        assert (decide(0x40000000), decide(0x3FFFFFFF), decide(0x40000001)) == (
            *(ENOSYS, ALLOW, ENOSYS),
        )
        sockets = [decide("socket", one) for one in (1, 2, 10, 16, 38, 40)]
        assert sockets == [*[ALLOW if families else EPERM] * 3, *[EPERM] * 3]
        # SOCK_STREAM, SOCK_SEQPACKET, SOCK_DGRAM, and streams with SOCK_CLOEXEC | SOCK_NONBLOCK.
        pairs = [decide("socketpair", 1, one) for one in (1, 5, 2, 3, 0o2004001, 0o2004002)]
        refused = ALLOW if families else EPERM
        assert pairs == [ALLOW, ALLOW, refused, refused, ALLOW, refused]
        assert decide("clone", 0x11) == ALLOW
        assert decide("clone", 0x10000011) == decide("clone", 0x10000000) == EPERM
        for call in calls["on_self"]:
            assert (decide(call, 0), decide(call, 1), decide(call, 0, 5)) == (ALLOW, EPERM, ALLOW)
        priority = [decide("setpriority", *one) for one in ((0, 0), (0, 1), (2, 0), (1, 1))]
        assert priority == [ALLOW, EPERM, EPERM, EPERM]


@looped(
    ("version", "handled", "scopes"),
    [
        (1, 0x1FF2, 0),
        (2, 0x3FF2, 0),
        (3, 0x7FF2, 0),
        (5, 0x7FF2, 0),
        (6, 0x7FF2, 3),
        (7, 0x7FF2, 3),
    ],
)
def test_landlock_permits_writes_only_below_the_folder(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, version: int, handled: int, scopes: int
) -> None:
    opened: list[tuple[int, str]] = []
    opens = os.open

    def record(path: str, flags: int) -> int:
        descriptor = opens(path, flags)
        opened.append((descriptor, path))
        assert flags == os.O_PATH | os.O_CLOEXEC
        return descriptor

    rules = opens(tmp_path, os.O_RDONLY)

    def results(_: str, call: int, *given: Any) -> int:
        if call == 444:
            return version if given[0] is None else rules
        return 0

    monkeypatch.setattr(os, "open", record)
    libc = Libc(results)
    monkeypatch.setattr(sandboxed, "libc", libc)
    assert sandboxed.restrict_with_landlock() is True
    (folder, null), paths = zip(*opened, strict=True)
    assert paths == (".", "/dev/null")
    below = struct.pack("=Qi", handled, folder)
    written = struct.pack("=Qi", handled & (0x2 | 0x4000), null)
    assert libc.calls == [
        ("syscall", 444, None, 0, 1),
        ("syscall", 444, struct.pack("QQQ", handled, 0, scopes), 24, 0),
        ("syscall", 445, rules, 1, below, 0),
        ("syscall", 445, rules, 1, written, 0),
        ("syscall", 446, rules, 0),
    ]
    for descriptor in (folder, null, rules):
        with pytest.raises(OSError, match="Bad file descriptor"):
            os.fstat(descriptor)


def test_a_failure_of_landlock_is_raised_and_its_absence_reported(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    for absent in (-1, 0):
        monkeypatch.setattr(sandboxed, "libc", Libc(lambda *_, absent=absent: absent))
        assert sandboxed.restrict_with_landlock() is False

    def fails_at(number: int) -> Libc:
        def results(_: str, call: int, first: Any, *given: Any) -> int:
            if call == 444 and first is None:
                return 3
            failed = -1 if call == number else 0
            return failed if call != 444 else (failed or os.dup(0))

        return Libc(results)

    for number, what in ((444, "restricting writes"), (445, "writes to ."), (446, "restricting")):
        monkeypatch.setattr(sandboxed, "libc", fails_at(number))
        with pytest.raises(OSError, match=what):
            sandboxed.restrict_with_landlock()


def test_a_program_has_its_limits_but_never_more_than_its_parent(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    hard = {resource.RLIMIT_CPU: 3, resource.RLIMIT_AS: 7 * 2**20}
    found: dict[int, Any] = {}
    monkeypatch.setattr(
        resource, "getrlimit", lambda which: (0, hard.get(which, resource.RLIM_INFINITY))
    )
    monkeypatch.setattr(resource, "setrlimit", found.__setitem__)
    settings = {"cpu_s": 5, "memory_mib": 6, "file_mib": 4, "processes": 8}
    for user, processes in ((None, 10), (70000, 8)):
        sandboxed.limit({**settings, "user": user})
        assert found == {
            resource.RLIMIT_CPU: (3, 3),
            resource.RLIMIT_AS: (6 * 2**20, 6 * 2**20),
            resource.RLIMIT_FSIZE: (4 * 2**20, 4 * 2**20),
            resource.RLIMIT_NPROC: (processes, processes),
            resource.RLIMIT_NOFILE: (64, 64),
            resource.RLIMIT_CORE: (0, 0),
        }


def test_tmp_is_limited_and_capabilities_are_dropped(monkeypatch: pytest.MonkeyPatch) -> None:
    libc, modes = Libc(), []
    monkeypatch.setattr(sandboxed, "libc", libc)
    monkeypatch.setattr(os, "chmod", lambda *given: modes.append(given))
    sandboxed.bound_files(16)
    options = b"size=16m,nr_inodes=4096"
    assert libc.calls == [("mount", b"tmpfs", b"/tmp", b"tmpfs", 0x20 | 0x2 | 0x4, options)]
    assert modes == [("/tmp", 0o1777)]
    for machine, number in (("x86_64", 126), ("aarch64", 91)):
        libc.calls.clear()
        monkeypatch.setattr(os, "uname", lambda machine=machine: SimpleNamespace(machine=machine))
        sandboxed.drop_capabilities()
        assert libc.calls[:-1] == [("prctl", 24, one, 0, 0, 0) for one in range(64)]
        header = struct.pack("Ii", 0x20080522, 0)
        assert libc.calls[-1] == ("syscall", number, header, bytes(24))
    monkeypatch.setattr(sandboxed, "libc", Libc(lambda *_: -1))
    with pytest.raises(OSError, match="dropping capabilities: "):
        sandboxed.drop_capabilities()
    with pytest.raises(OSError, match="limiting /tmp: "):
        sandboxed.bound_files(16)


@pytest.mark.parametrize("code", [None, errno.EINVAL, errno.EPERM])
def test_a_program_switches_to_its_user_and_keeps_its_library(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, code: int | None
) -> None:
    readable, private = tmp_path / "readable", tmp_path / "private"
    for one in (readable, private):
        one.mkdir()
    calls: list[Any] = []
    for name in ("chown", "setgroups", "setresgid", "setresuid"):
        monkeypatch.setattr(os, name, lambda *given, name=name: calls.append((name, *given)))
    if code is not None:

        def fails(*_: int) -> None:
            raise OSError(code, "no")

        monkeypatch.setattr(os, "setresgid", fails)
    reachable = {str(readable)}
    monkeypatch.setattr(
        os,
        "access",
        lambda path, mode: (
            mode == os.R_OK | os.X_OK and (path in reachable or path.startswith("/proc/self/fd/"))
        ),
    )
    monkeypatch.setattr(sys, "path", ["missing.zip", str(readable), str(private)])
    if code == errno.EPERM:
        with pytest.raises(OSError, match="no"):
            sandboxed.switch_user(70000, "/f")
        return
    sandboxed.switch_user(70000, "/f")
    switched = [("setresgid", 70000, 70000, 70000), ("setresuid", 70000, 70000, 70000)]
    assert calls == [
        ("chown", "/f", 70000, 70000),
        ("setgroups", []),
        *(switched if not code else []),
    ]
    assert sys.path[:2] == ["missing.zip", str(readable)]
    assert os.path.realpath(sys.path[2]) == str(private)
    os.close(int(sys.path[2].rpartition("/")[2]))
    monkeypatch.setattr(os, "access", lambda *_: False)
    monkeypatch.setattr(sys, "path", [str(private)])
    with pytest.raises(OSError, match="only root can read Python's library"):
        sandboxed.switch_user(70000, "/f")


WAITS = """
import os, signal
from megatron_async_rl.rollout.isolation.sandboxed import wait_for
def child(end):
    pid = os.fork()
    if pid == 0:
        end()
    return pid
child(lambda: os._exit(1))
# One after the other: each wait reaps every child that has ended.
exited = wait_for(child(lambda: os._exit(4)))
killed = wait_for(child(lambda: os.kill(os.getpid(), signal.SIGTERM)))
print(exited, killed)
"""


def test_an_exit_code_is_that_of_a_shell() -> None:
    assert [sandboxed.exit_code(one) for one in (0, 3, -9)] == [0, 3, 137]
    program = [sys.executable, "-c", WAITS]
    ended = subprocess.run(program, capture_output=True, text=True, check=True)
    assert ended.stdout == "4 -15\n"


def test_the_end_of_a_process_is_awaited_for_a_time() -> None:
    child = subprocess.Popen(["cat"], stdin=subprocess.PIPE)
    process = os.pidfd_open(child.pid)
    waits: list[float] = []

    class Poll:
        def register(self, descriptor: int, events: int) -> None:
            assert (descriptor, events) == (process, select.POLLIN)

        def poll(self, milliseconds: float) -> list[int]:
            waits.append(milliseconds)
            return []

    assert sandboxed.ends_within(process, 0.001) is False
    child.communicate()
    assert sandboxed.ends_within(process, 600) is True
    polls, sandboxed.select.poll = sandboxed.select.poll, Poll  # type: ignore[assignment,misc]
    try:
        assert sandboxed.ends_within(process, 2.5) is False
    finally:
        sandboxed.select.poll = polls  # type: ignore[misc]
    assert waits == [2500.0]
    os.close(process)


def test_a_source_runs_as_the_main_module(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sys, "argv", ["other"])
    monkeypatch.setitem(sys.modules, "__main__", sys.modules["__main__"])
    found: list[Any] = []
    monkeypatch.setattr(sandboxed, "found", found, raising=False)
    sandboxed.run(
        "import sys\nfrom megatron_async_rl.rollout.isolation import sandboxed\n"
        "x = 5\nsandboxed.found += [__name__, sys.modules['__main__'].x, list(sys.argv)]\n"
        "sandboxed.found.append(sys._getframe().f_code.co_filename)"
    )
    assert found == ["__main__", 5, ["program.py"], "program.py"]


SUBREAPER = """
import os, signal, sys, time
from megatron_async_rl.rollout.isolation.sandboxed import fork_under_subreaper
read, write = os.pipe()
subreaper = fork_under_subreaper((signal.SIGUSR1,))
assert os.getppid() == subreaper
signal.signal(signal.SIGUSR1, lambda *_: os._exit(7))
signal.pthread_sigmask(signal.SIG_BLOCK, [signal.SIGUSR2])
if os.fork() == 0:
    os.setsid()
    time.sleep(600)
print(subreaper, flush=True)
HOW
time.sleep(600)
"""


@looped(
    ("how", "sent", "code"),
    [
        ("os._exit(3)", None, 3),
        ("os.kill(os.getpid(), signal.SIGKILL)", None, -signal.SIGKILL),
        ("os.kill(os.getpid(), signal.SIGHUP)", None, -signal.SIGHUP),
        ("pass", signal.SIGUSR1, 7),
        ("pass", signal.SIGTERM, 1),
    ],
)
def test_a_subreaper_ends_as_its_child_and_leaves_no_process(
    how: str, sent: signal.Signals | None, code: int
) -> None:
    program = [sys.executable, "-c", SUBREAPER.replace("HOW", how)]
    child = subprocess.Popen(program, stdout=subprocess.PIPE, text=True)
    assert child.stdout is not None
    assert int(child.stdout.readline()) == child.pid
    if sent is not None:
        others = psutil.Process(child.pid).children(recursive=True)
        child.send_signal(sent)
    assert child.wait(600) == code
    # The pipe closes once no descendant holds it.
    assert child.stdout.read() == ""
    child.stdout.close()
    if sent is not None:
        assert len(others) == 2


class Exited(BaseException):
    """Stands for the end of the process."""


@looped(
    ("isolated", "user", "forked", "expected"),
    [
        (
            True,
            70000,
            0,
            [
                *(("bound_files", 16), "fork", ("chdir", "/f"), "limit", ("switch_user", 70000)),
                *("drop_capabilities", ("prctl", 38, 1, 0, 0, 0)),
                *(("refuse_calls", sandboxed.FAMILIES), ("dup2", 2)),
            ],
        ),
        (
            False,
            None,
            0,
            [
                *("fork_under_subreaper", ("chdir", "/f"), "limit", ("end_with", 77)),
                *(
                    "drop_capabilities",
                    ("prctl", 38, 1, 0, 0, 0),
                    "landlock",
                    ("refuse_calls", ()),
                    ("dup2", 2),
                ),
            ],
        ),
        (True, None, 9, [("bound_files", 16), "fork", ("wait_for", 9), ("exit", 137)]),
    ],
)
def test_the_source_runs_once_the_isolation_is_complete(
    monkeypatch: pytest.MonkeyPatch, isolated: bool, user: int | None, forked: int, expected: Any
) -> None:
    events: list[Any] = []

    def record(name: str, result: Any = None, only: slice = slice(None)) -> Callable[..., Any]:
        def call(*given: Any) -> Any:
            events.append((name, *given[only]) if given[only] else name)
            return result

        return call

    def leave(code: int) -> None:
        events.append(("exit", code))
        raise Exited

    nothing = slice(0, 0)
    for name, made in {
        "bound_files": record("bound_files"),
        "fork_under_subreaper": record("fork_under_subreaper", 77),
        "end_with": record("end_with"),
        "wait_for": record("wait_for", -9),
        "limit": record("limit", only=nothing),
        "switch_user": record("switch_user", only=slice(0, 1)),
        "drop_capabilities": record("drop_capabilities"),
        "restrict_with_landlock": record("landlock"),
        "refuse_calls": record("refuse_calls"),
        "run": record("run"),
    }.items():
        monkeypatch.setattr(sandboxed, name, made)
    libc = Libc()
    libc.calls = events
    monkeypatch.setattr(sandboxed, "libc", libc)
    monkeypatch.setattr(os, "fork", record("fork", forked))
    monkeypatch.setattr(os, "chdir", record("chdir"))
    monkeypatch.setattr(os, "dup2", record("dup2", only=slice(1, None)))
    monkeypatch.setattr(os, "_exit", leave)
    monkeypatch.setenv("PWD", "/")
    local, remote = socket.socketpair()
    settings = {
        "control": remote.detach(),
        "isolated": isolated,
        "folder": "/f",
        "file_mib": 16,
        "user": user,
    }
    monkeypatch.setattr(sys, "argv", ["x", json.dumps(settings)])
    source = "print('\u00e9')"
    with local:
        local.sendall(struct.pack("!I", len(source.encode())) + source.encode() + b"more")
        if forked:
            # This process does not end here, so `main` continues and uses its closed socket.
            with pytest.raises(OSError, match="Bad file descriptor"):
                sandboxed.main()
            assert events == expected
            return
        sandboxed.main()
        assert events == [*expected, ("run", source)]
        assert local.recv(100) == b"ready\n"
        assert local.recv(100) == b""
    assert "PWD" not in os.environ


def test_a_failure_of_the_isolation_is_reported_and_runs_no_source(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    def fail() -> None:
        raise OSError("no subreaper")

    codes: list[int] = []

    def leave(code: int) -> None:
        codes.append(code)
        raise Exited

    monkeypatch.setattr(sandboxed, "fork_under_subreaper", fail)
    monkeypatch.setattr(sandboxed, "run", lambda source: pytest.fail("the source runs"))
    monkeypatch.setattr(os, "_exit", leave)
    local, remote = socket.socketpair()
    settings = {"control": remote.detach(), "isolated": False, "folder": "/f"}
    monkeypatch.setattr(sys, "argv", ["x", json.dumps(settings)])
    with local:
        with pytest.raises(Exited):
            sandboxed.main()
        assert (local.recv(100), codes) == (b"failed no subreaper\n", [1])

"""Sandbox of unreviewed programs, and the reward that runs the code of a response in it. A program
cannot do what the sandbox forbids, and no trick of the code makes a test pass."""

import contextlib
import ctypes
import functools
import os
import resource
import signal
import socket
import subprocess
import sys
import tempfile
import time
import uuid
from dataclasses import replace
from pathlib import Path
from typing import Any

import psutil
import pytest

from megatron_async_rl.rollout.isolation import sandbox
from megatron_async_rl.rollout.isolation.sandbox import (
    Limits,
    ProgramEnd,
    Sandbox,
    SandboxError,
    Usage,
    run,
)
from megatron_async_rl.rollout.isolation.sandboxed import ends_within
from megatron_async_rl.rollout.rewards import code as code_module
from megatron_async_rl.rollout.rewards.code import ProgramsStarved, code, source_of
from megatron_async_rl.rollout.rewards.registry import RewardError, load_reward
from megatron_async_rl.samples import Prompt
from megatron_async_rl.watchdog.run_folder import LOCK, VARIABLE
from tests.cases import looped
from tests.thorough import thorough


@functools.cache
def refusal() -> str | None:
    """Return the reason why this machine cannot run a program in namespaces; None if it can."""
    try:
        run("pass")
    except SandboxError as error:
        return str(error)
    return None


@pytest.fixture
def namespaces() -> None:
    if (reason := refusal()) is not None:
        pytest.skip(f"needs bubblewrap and user namespaces: {reason}")


NAMESPACES = pytest.mark.usefixtures("namespaces")
"""Mark of a test that only `isolation: namespaces` can pass."""


@pytest.fixture(params=["namespaces", "rlimits"])
def isolation(request: pytest.FixtureRequest) -> Any:
    if request.param == "namespaces":
        request.getfixturevalue("namespaces")
    return request.param


def limited(**limits: Any) -> Limits:
    """Return limits with the strictest isolation that this machine permits."""
    return Limits(**{"isolation": "rlimits" if refusal() else "namespaces"} | limits)


def printed(source: str, **limits: Any) -> str:
    ended = run(source, limits=limited(**limits))
    assert ended.code == 0
    return ended.output


LANDLOCK = ctypes.CDLL(None).syscall(444, None, 0, 1)
"""Version of Landlock in the kernel; negative if the kernel lacks it."""


def test_a_program_reads_prints_and_uses_the_standard_library() -> None:
    source = "import decimal, sqlite3, ssl, threading\nprint(int(input()) + 1, __name__)"
    ended = run(source, stdin="41\n", limits=limited())
    assert ended == ProgramEnd(code=0, output="42 __main__\n")
    assert run("raise SystemExit(3)", limits=limited()) == ProgramEnd(code=3, output="")


@NAMESPACES
def test_a_program_can_neither_read_nor_write_files_of_the_machine(tmp_path: Path) -> None:
    secret = tmp_path / "secret"
    secret.write_text("s")
    source = f"""
import os
def attempt(do):
    try:
        return do()
    except OSError:
        return "refused"
places = ["/etc/passwd", {str(secret)!r}, {os.getcwd()!r} + "/setup.py", "/proc/self/environ"]
print([attempt(lambda: open(one).read()) for one in places])
folders = ("", "/dev", os.path.dirname(os.__file__))
print([attempt(lambda: open(one + "/x", "w")) for one in folders])
print(attempt(lambda: os.mkdir({str(tmp_path)!r} + "/x")), os.getcwd(), os.listdir("."))
print(attempt(lambda: open("mine", "w").write("ab")))
print(attempt(lambda: os.open(os.__file__, os.O_RDWR)), os.getuid() == 0)
"""
    assert printed(source).splitlines() == [
        str(["refused"] * 4),
        str(["refused"] * 3),
        "refused /tmp []",
        "2",
        "refused False",
    ]
    assert [one.name for one in tmp_path.iterdir()] == ["secret"]


def test_a_program_runs_in_an_empty_folder_of_its_own(isolation: Any) -> None:
    source = "import os\nprint(os.listdir('.'))\nprint(os.getcwd())\nopen('mine', 'w').write('a')"
    listed, folder = printed(source, isolation=isolation).splitlines()
    assert listed == "[]"
    assert Path(folder) != Path.cwd()
    assert not Path("mine").exists()


@NAMESPACES
def test_a_program_sees_the_linkers_cache() -> None:
    """A Python that is linked to libpython.so cannot start without the cache."""
    source = f"import os\nprint(os.path.isfile({sandbox.LINKER_CACHE!r}), os.listdir('/etc'))"
    exists = os.path.isfile(sandbox.LINKER_CACHE)
    assert printed(source) == f"{exists} {[Path(sandbox.LINKER_CACHE).name] if exists else []}\n"


def test_a_process_with_many_open_files_can_run_programs(isolation: Any) -> None:
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (min(hard, 4096), hard))
    held: list[int] = []
    try:
        with open(os.devnull) as file:
            while not held or held[-1] < 1100:
                held.append(os.dup(file.fileno()))
        assert printed("print(1)", isolation=isolation) == "1\n"
    finally:
        for one in held:
            os.close(one)
        resource.setrlimit(resource.RLIMIT_NOFILE, (soft, hard))


@NAMESPACES
def test_a_program_inherits_no_variable_and_no_open_file(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("JUDGE_API_KEY", "k")
    with open(__file__) as file:
        os.set_inheritable(file.fileno(), True)
        source = """
import os
def is_open(fd):
    try:
        os.fstat(fd)
    except OSError:
        return False
    return True
print(sorted(os.environ), [fd for fd in range(64) if is_open(fd)])
"""
        assert printed(source) == "['HOME', 'LANG', 'PATH'] [0, 1, 2]\n"


@NAMESPACES
def test_a_program_reaches_no_network_and_no_port_of_this_machine() -> None:
    name = uuid.uuid4().hex
    with (
        socket.create_server(("127.0.0.1", 0)) as server,
        socket.socket(socket.AF_UNIX) as abstract,
    ):
        abstract.bind(f"\0{name}")
        abstract.listen()
        source = f"""
import socket
for kind, place in (
    (socket.AF_INET, ("127.0.0.1", {server.getsockname()[1]})),
    (socket.AF_INET, ("192.0.2.1", 80)),
    (socket.AF_UNIX, "\\x00{name}"),
):
    try:
        socket.socket(kind).connect(place)
        print("connected")
    except OSError as error:
        print(type(error).__name__)
"""
        output = printed(source).split()
    # No server listens on its own loopback device, and it has no other device.
    assert output == ["ConnectionRefusedError", "OSError", "ConnectionRefusedError"]


def test_a_program_opens_no_other_kind_of_socket_and_reads_no_keys(isolation: Any) -> None:
    """AF_VSOCK reaches the host of a virtual machine from every network namespace."""
    source = """
import ctypes, os, socket
libc = ctypes.CDLL(None, use_errno=True)
for family in (40, socket.AF_NETLINK, 38):
    try:
        socket.socket(family, socket.SOCK_STREAM)
        print("opened")
    except OSError as error:
        print(error.strerror)
keyctl = {"x86_64": 250, "aarch64": 219}[os.uname().machine]
print(libc.syscall(keyctl, 0, -3, 0), os.strerror(ctypes.get_errno()))
"""
    refused = "Operation not permitted"
    output = printed(source, isolation=isolation).splitlines()
    assert output == [refused, refused, refused, f"-1 {refused}"]


def test_without_namespaces_a_program_reaches_no_port_and_opens_none() -> None:
    """This includes ports of the run (stores, Ray, the dashboard), and Unix sockets with a path or
    an abstract name."""
    path, name = f"/tmp/{uuid.uuid4().hex}", uuid.uuid4().hex
    with (
        socket.create_server(("127.0.0.1", 0)) as server,
        socket.create_server(("::1", 0), family=socket.AF_INET6) as sixth,
        socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as udp,
        socket.socket(socket.AF_UNIX) as by_path,
        socket.socket(socket.AF_UNIX) as abstract,
    ):
        udp.bind(("127.0.0.1", 0))
        by_path.bind(path)
        os.chmod(path, 0o777)
        abstract.bind(f"\0{name}")
        for one in (by_path, abstract):
            one.listen()
        source = f"""
import asyncio, multiprocessing, socket
def connect(family, kind, place):
    return lambda: socket.socket(family, kind).connect(place)
def listen(family, place):
    return lambda: socket.create_server(place, family=family)
for act in (
    connect(socket.AF_INET, socket.SOCK_STREAM, {server.getsockname()!r}),
    connect(socket.AF_INET6, socket.SOCK_STREAM, {sixth.getsockname()!r}),
    connect(socket.AF_INET, socket.SOCK_DGRAM, {udp.getsockname()!r}),
    connect(socket.AF_UNIX, socket.SOCK_STREAM, {path!r}),
    connect(socket.AF_UNIX, socket.SOCK_STREAM, "\\x00{name}"),
    listen(socket.AF_INET, ("127.0.0.1", 0)),
    listen(socket.AF_INET6, ("::1", 0)),
):
    try:
        act()
        print("done")
    except PermissionError:
        print("refused")
async def nothing():
    await asyncio.sleep(0)
asyncio.run(nothing())
receiver, sender = multiprocessing.Pipe()
sender.send(7)
print(receiver.recv())
"""
        output = printed(source, isolation="rlimits", memory_mib=1024).split()
        os.unlink(path)
    assert output == [*["refused"] * 7, "7"]


@pytest.mark.skipif(LANDLOCK < 6, reason="the kernel's Landlock has no scopes")
def test_without_namespaces_a_program_cannot_end_or_limit_processes_of_its_user(
    tmp_path: Path,
) -> None:
    """The attacking process runs as the user of this process, so only Landlock and the filter
    protect this process."""
    source = """
import os, resource, signal, time
from megatron_async_rl.rollout.isolation import sandboxed as program
parent = os.getppid()
program.libc.prctl(program.PR_SET_NO_NEW_PRIVS, 1, 0, 0, 0)
assert program.restrict_with_landlock()
program.refuse_calls(())
for act in (
    lambda: os.kill(parent, 0),
    lambda: signal.pidfd_send_signal(os.pidfd_open(parent), 0),
    lambda: resource.prlimit(parent, resource.RLIMIT_NOFILE),
    lambda: os.setpriority(os.PRIO_PROCESS, parent, 19),
    lambda: os.setpriority(os.PRIO_USER, 0, os.getpriority(os.PRIO_USER, 0)),
    lambda: os.sched_setaffinity(parent, os.sched_getaffinity(parent)),
    lambda: os.sched_setscheduler(parent, os.SCHED_IDLE, os.sched_param(0)),
    lambda: os.sched_setparam(parent, os.sched_param(0)),
):
    try:
        act()
        print("done")
    except PermissionError:
        print("refused")
os.nice(1)
os.sched_setaffinity(0, os.sched_getaffinity(0))
child = os.fork()
if not child:
    time.sleep(600)
os.kill(child, signal.SIGKILL)
print(os.waitpid(child, 0)[1], resource.getrlimit(resource.RLIMIT_NOFILE)[0] > 0)
"""
    ended = subprocess.run(
        [sys.executable, "-c", source], cwd=tmp_path, capture_output=True, text=True, check=True
    )
    assert ended.stdout.split() == [*["refused"] * 8, "9", "True"]


@NAMESPACES
def test_the_number_of_files_is_limited() -> None:
    """An empty file uses memory, too."""
    source = """
import os
made = 0
try:
    while made < 10**6:
        open(str(made), "w").close()
        made += 1
except OSError as error:
    print(error.strerror, 1000 < made < 10**4)
"""
    assert printed(source) == "No space left on device True\n"


@NAMESPACES
def test_a_program_gains_no_privileges_and_sees_only_its_own_processes() -> None:
    source = """
import ctypes, os, signal
libc = ctypes.CDLL(None, use_errno=True)
def refused(call):
    try:
        call()
    except OSError:
        return True
    return False
print(os.getpid() < 10, refused(lambda: os.setuid(0)), refused(lambda: os.setresuid(0, 0, 0)))
print(libc.mount(b"x", b"/tmp", b"tmpfs", 0, None), libc.umount2(b"/tmp", 2), os.getppid())
print(libc.sethostname(b"x", 1), libc.ptrace(16, 1, 0, 0))
"""
    assert printed(source).splitlines() == ["True True True", "-1 -1 1", "-1 -1"]


@pytest.mark.parametrize("ends", ["", "time.sleep(600)"])
def test_no_process_that_a_program_started_outlives_it(isolation: Any, ends: str) -> None:
    """The processes are daemons: they have sessions of their own, and their parents have ended."""
    mark = f"daemon-{uuid.uuid4().hex}"
    read_end, write_end = os.pipe()
    source = f"""
import ctypes, os, signal, time
signal.signal(signal.SIGTERM, signal.SIG_IGN)
for _ in range(8):
    if os.fork() == 0:
        os.setsid()
        if os.fork() == 0:
            ctypes.CDLL(None).prctl(15, b"{mark[:15]}", 0, 0, 0)
            time.sleep(600)
        os._exit(0)
    os.wait()
os.write({write_end}, b"started")
{ends}
"""
    limits = Limits(isolation=isolation, wall_s=600)
    with Sandbox(source, limits=limits, passed=[write_end]) as box:
        os.close(write_end)
        assert os.read(read_end, 7) == b"started"
        if not ends:
            assert box.wait().code == 0
    os.close(read_end)
    assert [one for one in psutil.process_iter(["name"]) if one.info["name"] == mark[:15]] == []


def test_memory_outside_of_address_spaces_is_refused(isolation: Any) -> None:
    """This includes shared memory, message queues, files in memory, and namespaces, in which a
    program could mount memory. Threads and processes can still start."""
    source = """
import ctypes, os, subprocess, threading
libc = ctypes.CDLL(None, use_errno=True)
for call in (
    lambda: libc.shmget(0, 4096, 0o1600),
    lambda: libc.msgget(0, 0o1600),
    lambda: libc.semget(0, 1, 0o1600),
    lambda: libc.memfd_create(b"x", 0),
    lambda: libc.unshare(0x10000000),
    lambda: libc.unshare(0x00020000),
    lambda: libc.syscall(
        {"x86_64": 56, "aarch64": 220}[os.uname().machine], 0x10000011, 0, 0, 0, 0
    ),
    lambda: libc.setns(0, 0),
):
    print(call(), os.strerror(ctypes.get_errno()))
thread = threading.Thread(target=lambda: print("thread", flush=True))
thread.start()
thread.join()
if os.fork() == 0:
    print("child", flush=True)
else:
    os.wait()
"""
    refused = ["-1 Operation not permitted"] * 8
    output = sorted(printed(source, isolation=isolation).splitlines())
    assert output == [*refused, "child", "thread"]


@pytest.mark.skipif(os.getuid() != 0, reason="without namespaces, only root can switch users")
def test_without_namespaces_a_program_of_root_runs_as_a_user_of_its_own() -> None:
    """The program can use the standard library and write to its folder, and cannot end other
    processes."""
    source = """
import os, decimal, sqlite3, ssl
open("mine", "w").close()
print(os.getuid() > 65534, os.getresuid() == (os.getuid(),) * 3, os.getgroups(), os.listdir("."))
for pid in (os.getppid(), 1):
    try:
        os.kill(pid, 0)
    except PermissionError:
        print("refused")
"""
    output = printed(source, isolation="rlimits").splitlines()
    assert output == ["True True [] ['mine']", "refused", "refused"]


def test_a_signal_that_ends_the_launcher_counts_as_the_programs() -> None:
    with Sandbox("import time\ntime.sleep(600)", limits=limited(wall_s=600)) as box:
        os.kill(box._process.pid, signal.SIGHUP)
        assert box.wait().code == 128 + signal.SIGHUP


def test_no_program_outlives_its_launcher(isolation: Any) -> None:
    limits = Limits(isolation=isolation, wall_s=600)
    with Sandbox("import time\ntime.sleep(600)", limits=limits) as box:
        inside = list(map(os.pidfd_open, sandbox._descendants(box._process.pid)))
        os.kill(box._process.pid, signal.SIGKILL)
        assert box.wait().code == 128 + signal.SIGKILL
    assert inside
    assert all(ends_within(process, 120) for process in inside)
    for process in inside:
        os.close(process)


@looped(
    ("source", "code", "length"),
    [
        ("while True: pass", None, 0),
        ("x = bytearray(2**30)", 1, 0),
        ("while True: print('x' * 10**6)", 1, 2**20),
        ("import os\nwhile True: os.write(1, b'x' * 10**6)", 1, 2**20),
        ("open('a', 'wb').write(bytes(2**21))", 1, 0),
        ("import os\nos.closerange(0, 64)\nos._exit(0)", 0, 0),
        ("import os\nos.kill(os.getpid(), 11)", 139, 0),
    ],
)
def test_resources_of_a_program_are_limited(source: str, code: int | None, length: int) -> None:
    ended = run(source, limits=limited(cpu_s=1, memory_mib=256, file_mib=1))
    assert (ended.code, len(ended.output)) == (code, length)


def test_only_a_program_that_used_its_cpu_time_reached_the_limit(isolation: Any) -> None:
    limits = Limits(cpu_s=1, isolation=isolation)
    for number in (signal.SIGKILL, signal.SIGXCPU):
        source = f"import os\nos.kill(os.getpid(), {int(number)})"
        assert run(source, limits=limits).code == 128 + number
    # The case of namespaces is in the table above.
    if isolation == "rlimits":
        ended = run("while True: pass", limits=limits)
        assert (ended.code, ended.timed_out) == (None, False)


@looped("file", ["many", "deep", "long", "empty", "removed", "mapped"])
def test_without_namespaces_all_files_together_are_limited(
    file: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The program is killed at the limit, and its files are removed."""
    monkeypatch.setattr(sandbox, "_parent", lambda: tmp_path)
    source = {
        "many": "for i in range(10**6): open(f'f{i}', 'wb').write(bytes(2**18))",
        "deep": (
            "import os\n"
            "for i in range(10**6):\n"
            "    open('f', 'wb').write(bytes(2**12)); os.mkdir('d'); os.chdir('d')"
        ),
        "long": (
            "import os, time\n"
            "for i in range(25): os.mkdir('d' * 200); os.chdir('d' * 200)\n"
            "for i in range(4): open(f'f{i}', 'wb').write(bytes(2**22))\n"
            "time.sleep(300)"
        ),
        "empty": "for i in range(10**6): open(f'f{i}', 'wb').close()",
        "removed": (
            "import os, time\n"
            "held = [open(f'f{i}', 'wb', 0) for i in range(4)]\n"
            "for i, one in enumerate(held): os.remove(f'f{i}'); one.write(bytes(2**22))\n"
            "time.sleep(300)"
        ),
        "mapped": (
            "import mmap, os, time\n"
            "held = []\n"
            "for i in range(4):\n"
            "    with open('f', 'w+b') as one:\n"
            "        one.write(bytes(2**22)); one.flush(); os.remove('f')\n"
            "        held.append(mmap.mmap(one.fileno(), 2**22))\n"
            "time.sleep(300)"
        ),
    }[file]
    limits = Limits(file_mib=8, cpu_s=300, wall_s=600, isolation="rlimits")
    assert run(source, limits=limits).code == sandbox.TOO_LARGE
    assert list(tmp_path.iterdir()) == []


@pytest.mark.skipif(LANDLOCK < 1, reason="the kernel does not have Landlock")
def test_without_namespaces_a_program_writes_only_to_its_own_folder(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The temporary folder is private here, like that of a run."""
    tmp_path.chmod(0o700)
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))
    source = """
import os, tempfile
for place in ("/tmp", "/var/tmp", "/dev/shm"):
    try:
        open(f"{place}/left-behind", "w")
    except PermissionError:
        print("refused")
with tempfile.NamedTemporaryFile() as file, open(os.devnull, "w") as nothing:
    print(os.path.dirname(file.name) == os.getcwd(), file.write(b"x"), nothing.write("x"))
"""
    assert printed(source, isolation="rlimits").splitlines() == [*["refused"] * 3, "True 1 1"]


def test_without_namespaces_pairs_of_datagram_sockets_are_refused(tmp_path: Path) -> None:
    """`socketpair` creates them without a call of `socket`, and they could send to any Unix socket
    of the machine."""
    source = """
import socket
for kind in (socket.SOCK_DGRAM, socket.SOCK_RAW, socket.SOCK_DGRAM | socket.SOCK_CLOEXEC):
    try:
        socket.socketpair(socket.AF_UNIX, kind)
        print("opened")
    except PermissionError:
        print("refused")
for kind in (socket.SOCK_STREAM, socket.SOCK_SEQPACKET | socket.SOCK_NONBLOCK):
    one, other = socket.socketpair(socket.AF_UNIX, kind)
    one.send(b"x")
    print(other.recv(1))
"""
    output = printed(source, isolation="rlimits").splitlines()
    assert output == [*["refused"] * 3, *["b'x'"] * 2]


@NAMESPACES
def test_a_pool_of_processes_works_in_namespaces() -> None:
    source = """
import multiprocessing
with multiprocessing.get_context("fork").Pool(2) as pool:
    print(pool.map(abs, [-1, -2]))
"""
    assert printed(source).strip() == "[1, 2]"


def test_a_program_that_ends_while_its_files_exceed_their_limit_is_reaped(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    def ended(*arguments: Any) -> bool:
        time.sleep(1.0)  # the launcher ends meanwhile
        return True

    monkeypatch.setattr(sandbox, "_exceeds", ended)
    assert run("", limits=Limits(isolation="rlimits")).code == sandbox.TOO_LARGE


def test_a_later_run_can_find_the_folder_of_a_killed_program(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The folder is in the run's own folder or, if the program could not reach that, next to it."""
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))
    monkeypatch.setenv(VARIABLE, str(tmp_path))
    for one in (tmp_path, *tmp_path.parents):
        if not one.stat().st_mode & 0o001:  # a private folder of pytest
            one.chmod(0o711)
    assert sandbox._parent() == tmp_path
    monkeypatch.delenv(VARIABLE)
    assert sandbox._parent().parent == tmp_path
    tmp_path.chmod(0o700)
    parent = Path("/tmp") if os.getuid() == 0 else tmp_path
    assert sandbox._parent().parent == parent
    assert (sandbox._parent() / LOCK).exists()


def test_the_limits_also_apply_to_code_that_tests_call() -> None:
    """The code runs in a sandbox of its own, and only the sandbox of the tests is waited for."""
    source = """
def grow():
    for i in range(10**6):
        open(f"f{i}", "wb").write(bytes(2**18))
"""
    fields = {"tests": ["assert grow() is None"]}
    item = Prompt(id="p", text="?", token_ids=(1,), fields=fields)
    reward = load_reward("code", {"isolation": "rlimits", "cpu_s": 60.0}).function
    assert reward(item, source, isolation="rlimits", cpu_s=60.0, timeout_s=600.0) == 0.0


@looped(
    "response",
    [
        *("", " ", "...", "```python\n```", "assert True", "pass", "exit()", "f"),
        "Write f(n) that adds one.\nassert f(1) == 2",
        "def f(n): ...",
        "1 " * 10**5,
        "def f(n):\n    return n + 1\n```python\nraise SystemExit(0)\n```",
    ],
)
def test_code_accepts_neither_the_question_nor_its_tests_nor_nothing(response: str) -> None:
    for tests in (["assert f(1) == 2"], [{"input": "1\n", "output": "2\n"}]):
        item = Prompt(id="p", text="?", token_ids=(1,), fields={"tests": tests})
        assert code(item, response, timeout_s=60.0, isolation=limited().isolation) == 0.0


def test_the_number_of_processes_is_limited(isolation: Any) -> None:
    source = """
import os, time
started = 0
while True:
    try:
        if os.fork() == 0:
            time.sleep(600)
        started += 1
    except BlockingIOError:
        break
print(started)
"""
    started = int(printed(source, processes=8, isolation=isolation))
    if os.getuid() == 0:
        assert started == 7
    else:  # other processes of the same user may count
        assert started <= 9


def test_a_failure_of_the_isolation_is_reported_and_no_program_runs(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    """The cases are a machine without bubblewrap, a container that forbids namespaces, and an error
    in the sandbox."""
    with monkeypatch.context() as patch:
        patch.setenv("PATH", str(tmp_path))
        with pytest.raises(RewardError, match=r"bwrap\) is not installed; .*isolation: rlimits"):
            load_reward("code")
        bubblewrap = tmp_path / "bwrap"
        bubblewrap.write_text(
            "#!/bin/sh\necho bwrap: No permissions to make namespaces >&2\nexit 1"
        )
        bubblewrap.chmod(0o755)
        with pytest.raises(SandboxError, match="bwrap: No permissions to make"):
            run("print(1)")
        with pytest.raises(RewardError, match=r"--cap-add SYS_ADMIN.*isolation: rlimits"):
            load_reward("code")
        assert load_reward("code", {"isolation": "rlimits"}).settings == {"isolation": "rlimits"}
        assert printed("print(1)", isolation="rlimits") == "1\n"
    program = tmp_path / "program.py"
    text = Path(sandbox._PROGRAM).read_text()
    program.write_text(text.replace('control.sendall(b"ready\\n")', "1 / 0"))
    monkeypatch.setattr(sandbox, "_PROGRAM", program)
    with pytest.raises(RewardError, match=r"isolation: programs cannot run: .*division by zero"):
        load_reward("code", {"isolation": "rlimits"})


ASSERTS = ["assert f(2) == 4", "assert f(3) == 9"]
SQUARE = "def f(x): return x * x"


def score(source: str, tests: Any, entry_point: str | None = None, **settings: Any) -> float:
    fields = {"tests": tests, "entry_point": entry_point}
    prompt = Prompt(id="p7", text="?", token_ids=(1,), fields=fields)
    own = {"timeout_s": 300.0, "isolation": limited().isolation}
    return code(prompt, source, **(own | settings))


def test_the_last_block_of_python_is_the_program() -> None:
    assert source_of("x = 1") == "x = 1"
    assert source_of("a\n```python\n1\n```\nthen\n```Python3\n2\n```\nend") == "2\n"
    assert source_of("```\n1\n```\nthen\n```\n2\n```\nend") == "2\n"
    assert source_of("```bash\nls\n```") == "```bash\nls\n```"
    assert source_of("```bash\nls\n```\nThen:\n```python\n1\n```\nso") == "1\n"
    assert source_of("```python\n1\n```\nIt prints:\n```\n4\n```\n") == "1\n"
    assert source_of("```python\n1\n```\n```sh\nx\n```") == "1\n"
    assert source_of("```python\n1\n``\n") == "1\n``\n"
    assert source_of("````py\nx = 1\n```\n````") == "x = 1\n```\n"
    assert source_of("see ```x``` or\n```py\n1\n```") == "1\n"
    assert source_of("1. So:\n   ```py\n   if x:\n       y\n\n   ```") == "if x:\n    y\n\n"


@looped(
    ("source", "tests", "reward"),
    [
        ("print(sum(map(int, input().split())))", [("1 2", "3"), ("5 5\n", " 10 \n\n")], 1.0),
        ("print(3)", [("1 2", "3"), ("5 5", "10")], 0.0),
        ("print(3)\n1/0", [("1 2", "3")], 0.0),
        (SQUARE, ASSERTS, 1.0),
        (SQUARE, "\n".join(ASSERTS), 1.0),
        ("def f(x): return 4", ASSERTS, 0.0),
        ("def f(x): x.sort()", "l = [2, 1]\nf(l)\nassert l == [1, 2]", 1.0),
        ("def f(x): raise KeyError(x)", "try: f(1)\nexcept KeyError: pass\nelse: assert 0", 1.0),
        (
            "class S:\n  def __init__(s): s.l = []\n  def push(s, x): s.l.append(x)\n"
            "  def pop(s): return s.l.pop()",
            "s = S()\ns.push((1, {2}))\nassert s.pop() == (1, {2})",
            1.0,
        ),
        ("def f(n): yield from range(n)", "assert list(f(3)) == [0, 1, 2]", 1.0),
        (SQUARE, "def test_it():\n  assert f(2) == 5", 0.0),
        (
            "from collections import *\ndef f(x): return Counter(x)",
            "assert f('aab') == {'a': 2, 'b': 1}",
            1.0,
        ),
        (
            "from collections import *\ndef f(x): return Counter(x)",
            "assert f('aab') == {'a': 3, 'b': 1}",
            0.0,
        ),
        (
            "from collections import *\ndef f(x): return Counter(x)",
            "assert f('aab').most_common(1) == [('a', 2)]",
            1.0,
        ),
        (
            "from collections import *\ndef f():\n  d = defaultdict(int)\n  d[1]\n  return d",
            "assert [f()] == [{1: 0}] and f()[7] == 0",
            1.0,
        ),
        (
            "from collections import *\ndef f():\n  d = OrderedDict(a=1, b=2)\n"
            "  d.move_to_end('a')\n  return d",
            "assert list(f()) == ['b', 'a']",
            1.0,
        ),
        (
            "from collections import *\nP = namedtuple('P', 'x y')\ndef g(p): return p.x + p.y",
            "assert P(1, 2) == (1, 2) and P(1, 2).y == 2 and g(P(1, 2)) == 3",
            1.0,
        ),
        (
            "import enum\nclass E(enum.IntEnum): A = 3\nclass T(enum.StrEnum): B = 'b'\n"
            "def f(): return [E.A, T.B]",
            "assert f() == [3, 'b'] and f()[0].name == 'A'",
            1.0,
        ),
        (
            "def f(d): return sum(d.values())",
            "import collections\nassert f(collections.Counter('aa')) == 2",
            1.0,
        ),
        ("def f(x): return -(1 << 20000) + x", "assert f(1) == 1 - (1 << 20000)", 1.0),
        ("T = list(range(3 * 10**5))\ndef f(n): return T[n]", "assert f(5) == 5 == T[5]", 1.0),
        ("a = []\na.append(a)\nLONG = 'x' * 10**7\ndef f(n): return n", "assert f(5) == 5", 1.0),
    ],
)
def test_code_is_right_when_it_passes_every_test(source: str, tests: Any, reward: float) -> None:
    if isinstance(tests, list) and isinstance(tests[0], tuple):
        tests = [{"input": one, "output": other} for one, other in tests]
    assert score(source, tests) == reward


def test_a_check_function_is_called_with_the_entry_point() -> None:
    check = "def check(candidate):\n  assert candidate(2) == 4"
    assert score(SQUARE, check, "f") == 1.0
    assert score("def f(x): return 5", check, "f") == 0.0


def test_a_test_sets_attributes_and_items_of_what_the_code_made() -> None:
    node = "class Node(object):\n  def __init__(self, x):\n    self.x, self.left = x, None\n"
    depth = "def depth(node): return 0 if node is None else 1 + depth(node.left)\n"
    items = "class Box:\n  def __setitem__(self, key, value): self.value = key, value\n"
    test = "root = Node(1)\nroot.left = Node(2)\nassert depth(root) == 2"
    assert score(node + depth, [test]) == 1.0
    assert score(items, ["box = Box()\nbox[1] = 2\nassert box.value == (1, 2)"]) == 1.0
    assert score("class Node: pass\ndef depth(node): return 1", [test]) == 0.0


def test_each_test_begins_with_the_names_of_the_code_afresh() -> None:
    check = "def check(candidate):\n  assert candidate({}) == {}"
    assert score(SQUARE, [check.format(2, 4), check.format(3, 9)], "f") == 1.0
    assert score("def f(x): return 4", [check.format(2, 4), check.format(3, 9)], "f") == 0.0
    assert score("L = [1]", ["L.append(2)\nassert L == [1, 2]", "assert L == [1]"]) == 1.0


def test_a_test_that_does_not_end_costs_none_before_it() -> None:
    """Here it ends the process of the tests; where its time is up, another does."""
    tests = [*ASSERTS, "import os\nos._exit(f(0))\nassert f(1) == 1"]
    assert score(SQUARE, tests, partial=True) == 2 / 3
    assert score(SQUARE, tests) == 0.0


def test_partial_is_the_share_of_the_tests() -> None:
    assert score("def f(x): return 4", ASSERTS, partial=True) == 0.5
    pairs = {"inputs": ["1", "2"], "outputs": ["1", "2"]}
    assert score("print(1)", pairs, partial=True) == 0.5


ALWAYS = "class A:\n  def __eq__(s, o): return True\n  __bool__ = lambda s: True\n"


TALK = """
import json, sys
channel = sys._getframe(1).f_locals["channel"]
def say(message):
    channel.write(json.dumps(message) + "\\n")
    channel.flush()
say(["f", {"object": 0}])
"""


@pytest.mark.parametrize(
    ("test", "names"),
    [
        ("assert abs(f(2) - 3.5) < 1e-6", ["abs", "__builtins__"]),
        ("assert set(f(2)) == set([1, 2, 3])", ["set", "__builtins__"]),
        ("assert sorted(f(2)) == [1]", ["sorted", "__builtins__", "__name__"]),
    ],
)
def test_the_code_cannot_replace_what_a_test_judges_with(test: str, names: list[str]) -> None:
    """Names that no honest code would send, of a channel that it has found."""
    every = {"dict": [[name, {"object": 1}] for name in names]}
    forged = "".join(
        f"say({[name, every if name == '__builtins__' else {'object': 1}]!r})\n" for name in names
    )
    answers = "say(None)\nfor _ in channel: say({'value': 0.0, 'args': {'list': []}})"
    assert score(f"{TALK}{forged}{answers}", test) == 0.0
    assert score(f"{TALK}{forged}{answers}", "assert f(2) == 0.0") == 1.0  # it is listened to


@looped("named", ["check = 0", "def check(c): pass", "def test_f(): pass", "test_f = 1"])
@looped(
    "test",
    ["def check(candidate):\n  assert candidate(2) == 4", "def test_f():\n  assert f(2) == 4"],
)
def test_the_code_cannot_name_a_test_away(named: str, test: str) -> None:
    assert score(f"{named}\ndef f(x): return 0", test, "f") == 0.0
    assert score(f"{named}\n{SQUARE}", test, "f") == 1.0


@looped(
    "source",
    [
        "import os\nos._exit(0)",
        "import sys\nsys.exit(0)",
        "def f(x):\n  import os\n  os._exit(0)",
        f"{ALWAYS}def f(x): return A()",
        "class I(int):\n  def __eq__(s, o): return True\ndef f(x): return I(0)",
        "class I(int):\n  __index__ = __int__ = lambda s: 4\n  __class__ = A = None\ndef f(x):"
        " return I(0)",
        "class D(dict):\n  def __eq__(s, o): return True\n  __missing__ = lambda s, k: s\n"
        "def f(x): return D()",
        "abs = set = lambda *_: 4\ndef f(x): return 0",
        "import builtins\nbuiltins.AssertionError = Exception\ndef f(x): return 0",
        "print('[true, true]', flush=True)\nimport os\nos._exit(0)",
        "import os\nfor n in range(1, 64):\n  try: os.write(n, b'[true, true]\\n')\n"
        "  except OSError: pass\nos._exit(0)",
        "import gc\nfor o in gc.get_objects():\n  if type(o) is list and o and "
        "isinstance(o[0], str): o[:] = ['']\ndef f(x): return 0",
        "def f(x): return f",
        "def f(x):\n  while True: pass",
        "def f(x): return [0] * 10**7",
        "def f(x):\n  l = []\n  for _ in range(10**5): l = [l]\n  return l",
        "def f(x): raise AssertionError",
        "def f(x): return float('nan')",
        "",
        "def f(:",
    ],
)
def test_no_trick_of_the_code_makes_an_assert_pass(
    source: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(code_module, "WALL_PER_CPU", 300)  # a busy machine starves none
    assert score(source, ASSERTS, cpu_s=1.0) == 0.0


@pytest.mark.parametrize(
    "test",
    [
        "assert all(map(f, [2, 3]))",
        "assert sum(map(f, [2, 3])) == 0",
        "for got, wanted in zip(map(f, [2, 3]), [4, 9]):\n  assert got == wanted",
    ],
)
def test_the_code_cannot_end_a_loop_of_a_test(test: str) -> None:
    assert score("def f(x): raise StopIteration", [test]) == 0.0


def test_a_program_cannot_find_the_output_that_is_expected() -> None:
    source = """
import gc, sys
frame = sys._getframe()
seen = ""
while frame:
    seen += str(frame.f_locals) + str(frame.f_globals)
    frame = frame.f_back
print("expected-" + "4711" if "4711" * 2 in seen + str(sys.argv) + str(gc.get_objects()) else "no")
"""
    assert score(source, [{"input": "x", "output": "expected-47114711"}]) == 0.0


@looped(
    "tests",
    [None, "", [], 3, ["f(2)"], [{"input": "1"}], {"fn_name": "f", "inputs": [], "outputs": []}],
)
def test_code_names_the_prompt_without_tests(tests: Any) -> None:
    with pytest.raises(RewardError, match=r"prompt p7: `tests` (is|has)"):
        score(SQUARE, tests)


@pytest.mark.parametrize(
    ("test", "said"),
    [
        ("class TestF:\n  def test_it(self): assert f(2) == 4", "has a class of tests"),
        ("import unittest\nclass T(unittest.TestCase):\n  def test_it(self): assert 0", "a class"),
        ("def check(candidate):\n  assert candidate(2) == 4", "the row has no `entry_point`"),
    ],
)
def test_tests_that_nothing_would_call_are_refused(test: str, said: str) -> None:
    with pytest.raises(RewardError, match=f"prompt p7: `tests` .*{said}"):
        score(SQUARE, test)


EMPTY = "def f(x): return []"
RAISES = "def f(x): raise ValueError"


@looped(
    ("source", "test", "said"),
    [
        (EMPTY, "for x in f(3):\n  assert x > 0", "no assertion ran"),
        (EMPTY, "if f(3):\n  assert f(2) == 4", "no assertion ran"),
        (RAISES, "try:\n  assert f(2) == 4\nexcept ValueError: pass", "no assertion ran"),
        (RAISES, "try: f(1)\nexcept Exception: pass\nelse: assert 0", "without any code"),
        (SQUARE, "if __name__ != '__main__':\n  assert f(2) == 4", "no assertion ran"),
        (SQUARE, "def helper(x):\n  assert x\nhelper(True)", "without any code"),
        (SQUARE, "g = lambda: f(1)\nassert g", "without any code"),
    ],
)
def test_a_test_that_passes_without_having_tested_is_an_error(
    source: str, test: str, said: str
) -> None:
    with pytest.raises(RewardError, match=f"prompt p7: `tests` passe.*{said}"):
        score(source, test)
    with pytest.raises(RewardError, match=r"`tests` \(test 2 of 2\) passe"):
        score(source, ["assert f(3) != 1" if source != RAISES else ASSERTS[0], test], partial=True)


def test_code_that_fails_one_test_is_wrong_whatever_the_others_are_worth() -> None:
    assert score(EMPTY, ["assert f(2) == 4", "for x in f(3):\n  assert x > 0"]) == 0.0


def test_a_check_of_what_the_code_raises_counts_as_one() -> None:
    expected = "try:\n  f(-1)\n  assert False\nexcept ValueError:\n  pass"
    assert score(RAISES, expected) == 1.0
    assert score(SQUARE, expected) == 0.0
    assert score(SQUARE, "match f(2):\n  case 4: pass\n  case _: assert False") == 1.0
    assert score(SQUARE, "if f(2) != 4:\n  raise ValueError\nassert f(1) == 1") == 1.0


STDIN = [{"input": "", "output": "1"}]
BURN = "while True: pass"


def test_a_program_that_sleeps_is_not_computing() -> None:
    read_end, write_end = os.pipe()
    source = f"import os, time\nos.write({write_end}, b'x')\ntime.sleep(600)"
    with Sandbox(source, limits=limited(wall_s=600), passed=[write_end]) as box:
        assert os.read(read_end, 1) == b"x"
        deadline = time.monotonic() + 120
        while box._usage().computing:
            assert time.monotonic() < deadline
    os.close(read_end)
    os.close(write_end)


def usage(cpu_s: float, elapsed_s: float, computing: bool = True) -> ProgramEnd:
    return ProgramEnd(
        code=None,
        output="",
        timed_out=True,
        usage=Usage(cpu_s=cpu_s, elapsed_s=elapsed_s, computing=computing),
    )


@looped(
    ("cpu_s", "elapsed_s", "computing", "starved"),
    [
        (1.9, 2.0, True, False),  # cut by the deadline of all tests: it had what there was
        (0.03, 0.03, True, False),
        (3.0, 20.0, True, False),  # of 5 s that it might have had
        (8.0, 2.0, True, False),  # in several processes
        (0.4, 2.0, True, True),
        (1.0, 20.0, True, True),
        (0.0, 20.0, False, False),  # it slept
    ],
)
def test_code_is_starved_where_it_had_little_of_the_processor(
    cpu_s: float, elapsed_s: float, computing: bool, starved: bool
) -> None:
    budget = code_module._Budget(timeout_s=600.0, cpu_s=5.0)
    with pytest.raises(ProgramsStarved) if starved else contextlib.nullcontext():
        budget.count(usage(cpu_s, elapsed_s, computing))


def test_a_late_test_is_wrong_when_the_earlier_ones_had_the_time() -> None:
    budget = code_module._Budget(timeout_s=600.0, cpu_s=5.0)
    for _ in range(3):
        budget.count(replace(usage(1.0, 1.1), code=0, timed_out=False))
    budget.count(usage(0.0, 0.02))
    budget.require_fair()


@pytest.mark.parametrize(
    ("source", "tests"),
    [(BURN, STDIN), pytest.param(f"def f(x):\n  {BURN}", ASSERTS, marks=thorough)],
)
def test_code_that_was_starved_is_no_answer(
    source: str, tests: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Eight other processes compete for the one processor of its processes once the isolation is
    set up."""
    processor = min(os.sched_getaffinity(0))
    opened = Sandbox._open

    def open_and_pin(box: Sandbox, *given: Any) -> None:
        opened(box, *given)
        for one in psutil.Process(box._process.pid).children(recursive=True):
            one.cpu_affinity([processor])

    monkeypatch.setattr(Sandbox, "_open", open_and_pin)
    others = f"""
import os
os.sched_setaffinity(0, [{processor}])
for _ in range(8):
    if (pid := os.fork()) == 0:
        os.setsid()  # its share of the processor is that of a session
        os.close(1)
        {BURN}
    print(pid, flush=True)
"""
    command = [sys.executable, "-I", "-S", "-c", others]
    burning = subprocess.run(command, stdout=subprocess.PIPE, text=True, check=True).stdout.split()
    try:
        with pytest.raises(ProgramsStarved, match="the machine is too busy"):
            score(source, tests, timeout_s=1.5)
    finally:
        for pid in burning:
            os.kill(int(pid), signal.SIGKILL)


@NAMESPACES
def test_the_cpu_time_of_all_processes_of_a_program_counts() -> None:
    source = "import os\nfor _ in range(3): os.fork()\nwhile True: pass"
    with Sandbox(source, limits=Limits(processes=16, wall_s=600)) as box:
        (init,), largest_s = psutil.Process(box._process.pid).children(), 0.0
        while largest_s < 0.1:
            processes = init.children(recursive=True)
            largest_s = max((sum(one.cpu_times()[:2]) for one in processes), default=0.0)
            largest_s = largest_s if len(processes) == 8 else 0.0
        assert box._usage().cpu_s > 3 * largest_s
        assert box._usage().computing

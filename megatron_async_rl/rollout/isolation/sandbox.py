"""A sandbox for unreviewed Python programs: what a model wrote, or the tests of a data set.

    run("print(input())", stdin="4\\n")  ->  Ended(code=0, output="4\\n")

With `isolation: namespaces` (bubblewrap, `bwrap`, completed by sandboxed.py) a program
- has no network, and sees only its own processes;
- sees of the file system Python's interpreter and standard library and the linker's cache,
  read-only, and an empty /tmp of its own: not the run, not the home directory, nothing else of
  /etc, not /proc;
- inherits no environment variable and no open file;
- has limits on processor time, memory, processes, and the size of files and output; memory that
  they would not see is refused;
- ends with all it started, whatever that did to hide, when it ends or its time is up.
The kernel enforces this; the program does not run on a machine of its own.

With `isolation: rlimits`, for machines that do not allow namespaces, only the limits, the empty
environment, the end of all its processes and the refusal of sockets are left: it reaches no network
and no port of this machine. If root starts it, it is a user of its own, reads what every user can
and cannot end other users' processes; if another user does, it reads what that user can, and only
Landlock (Linux 6.12 or newer) keeps it from ending that user's processes, the run's and its own
launcher too. It writes only into a folder of its own, which is removed with whatever it holds:
Landlock refuses other places (Linux 5.13 or newer; an older kernel does not). The size of that
folder, with files that the program has removed and still holds open, is checked CHECKS_PER_S times
a second, and a program that exceeds it is killed. Locks and pools of `multiprocessing` do not work
there: they are in /dev/shm.
"""

from __future__ import annotations

import contextlib
import errno
import functools
import json
import os
import secrets
import shutil
import signal
import socket
import stat
import struct
import subprocess
import sys
import sysconfig
import tempfile
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Literal

import psutil

from megatron_async_rl.rollout.isolation.sandboxed import ends_within
from megatron_async_rl.watchdog.run_folder import SHORT, VARIABLE, public_folder, remove_tree

Isolation = Literal["namespaces", "rlimits"]
START_S = 30.0
"""Longest time to set up the isolation, on the busiest machine."""
TIME_UP = (128 + signal.SIGXCPU, 128 + signal.SIGKILL)
END_S = 5.0
"""Longest time for the processes of a program to end."""
CAP_SYS_ADMIN = 21
LINKER_CACHE = "/etc/ld.so.cache"
"""Places of shared libraries outside the standard folders, such as that of Python itself in
/usr/local/lib."""
DEVICES = ("null", "zero", "random", "urandom")
NAMESPACES = (
    *("--unshare-ipc", "--unshare-pid", "--unshare-net", "--unshare-uts", "--unshare-cgroup-try"),
    *("--die-with-parent", "--as-pid-1"),
)
IN_USER_NAMESPACE = ("--unshare-user", "--cap-add", "CAP_SYS_ADMIN", "--cap-add", "CAP_SETPCAP")
"""Options where the starter may not make other namespaces itself: it has these capabilities only
inside, and sandboxed.py drops them."""
_INSIDE = "/sandboxed.py"
CHECKS_PER_S = 20
MAX_FILES = 4096
"""Limit of the files of a program under `isolation: rlimits`, as in the /tmp of one in
namespaces."""
TOO_LARGE = 128 + signal.SIGXFSZ
"""Code of a program that was killed for the size of its files."""
_PROGRAM = Path(__file__).with_name("sandboxed.py")


class SandboxError(RuntimeError):
    """The isolation of the sandbox could not be set up; nothing was run."""


@dataclass(frozen=True, kw_only=True)
class Limits:
    """Limits of one program."""

    cpu_s: float = 5.0
    """Processor time of each of its processes, in whole seconds, rounded up."""
    wall_s: float = 20.0
    """Wall-clock seconds, from when the isolation is set up."""
    memory_mib: int = 512
    """Address space of each process."""
    processes: int = 8
    """Threads included."""
    file_mib: int = 16
    """Largest file, and all files together (under `isolation: rlimits` with Landlock alone, as
    checked CHECKS_PER_S times a second); standard output has the same limit of its own."""
    isolation: Isolation = "namespaces"


@dataclass(frozen=True, kw_only=True)
class Usage:
    """Time that a sandbox took until now, its start included. `cpu_s`: processor time of all its
    processes. `computing`: one of them runs, or would if the machine had a processor for it."""

    cpu_s: float
    elapsed_s: float
    computing: bool


@dataclass(frozen=True, kw_only=True)
class ProgramEnd:
    """How a program ended. `code`: 128 + number of the signal where one ended it; None where its
    time was up, and `timed_out` where that is time by the clock. `output`: what it printed, cut at
    the limit."""

    code: int | None
    output: str
    timed_out: bool = field(default=False, compare=False)
    usage: Usage = field(compare=False, default=Usage(cpu_s=0.0, elapsed_s=0.0, computing=False))


def run(source: str, *, stdin: str = "", limits: Limits | None = None) -> ProgramEnd:
    """Runs `source` as a program. Raises SandboxError."""
    with Sandbox(source, stdin=stdin, limits=limits or Limits()) as sandbox:
        return sandbox.wait()


class Sandbox:
    """One program that runs until `wait` returns or the block ends. `passed`: descriptors it
    inherits, under their numbers."""

    def __init__(
        self, source: str, *, stdin: str = "", limits: Limits, passed: Sequence[int] = ()
    ) -> None:
        self._limits = limits
        self._started = time.monotonic()
        self._folder = (
            tempfile.mkdtemp(prefix="mar-sandbox-", dir=_parent())
            if limits.isolation == "rlimits"
            else None
        )
        self._too_large = False
        temporary = {} if self._folder is None else dict.fromkeys(("HOME", "TMPDIR"), self._folder)
        self._init: int | None = None
        """Pidfd of process 1 of the namespaces, with which all others end."""
        self._output = os.memfd_create("output")
        errors, given = os.memfd_create("errors"), os.memfd_create("input")
        local, remote = socket.socketpair()
        try:
            os.write(given, stdin.encode(errors="surrogatepass"))
            os.lseek(given, 0, os.SEEK_SET)
            command, user = self._command(remote)
            self._process = subprocess.Popen(
                command,
                stdin=given,
                stdout=self._output,
                stderr=errors,
                pass_fds=[remote.fileno(), *passed],
                env={"PATH": "/usr/bin:/bin", "HOME": "/tmp", "LANG": "C.UTF-8"} | temporary,
                cwd="/",
                start_new_session=True,
                user=user,
                group=user,
                extra_groups=None if user is None else (),
            )
        except BaseException:
            local.close()
            os.close(errors)
            self._clean()
            raise
        finally:
            os.close(given)
            remote.close()
        try:
            self._open(local, errors, source)
        except BaseException:
            self.close()
            raise
        finally:
            local.close()
            os.close(errors)
        self._deadline = time.monotonic() + limits.wall_s

    def __enter__(self) -> Sandbox:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def wait(self, *requested: Sandbox) -> ProgramEnd:
        """`requested`: those whose programs it waits for; where time is up their usage counts with
        its own."""
        timed_out = not self._ends_before(self._deadline, requested)
        every = [one._usage() for one in (self, *(requested if timed_out else ()))]
        usage = Usage(
            cpu_s=sum(one.cpu_s for one in every),
            elapsed_s=max(one.elapsed_s for one in every),
            computing=any(one.computing for one in every),
        )
        self._end()
        code: int | None = self._process.wait()
        if code is not None and code < 0:  # the launcher, which reports all other signals
            code = 128 - code
        if self._too_large:
            code, timed_out = TOO_LARGE, False
        elif timed_out or code in TIME_UP:
            code = None
        maximum = self._limits.file_mib * 2**20
        output = os.pread(self._output, maximum, 0).decode(errors="replace")
        return ProgramEnd(code=code, output=output, timed_out=timed_out, usage=usage)

    def close(self) -> None:
        self._end()
        self._clean()

    def _command(self, control: socket.socket) -> tuple[list[str], int | None]:
        """Return the command, and the user that starts it where that is not this one. Raises
        SandboxError."""
        limits, isolated = self._limits, self._folder is None
        user = own_user()
        settings = {
            "control": control.fileno(),
            "isolated": isolated,
            "user": user,
            "folder": self._folder or "/tmp",
            "cpu_s": max(1, round(limits.cpu_s + 0.499)),
            "memory_mib": limits.memory_mib,
            "processes": limits.processes,
            "file_mib": limits.file_mib,
        }
        python = os.path.realpath(sys.executable)
        options = ["-I", "-S", "-X", "utf8"]
        if not isolated:
            return [python, *options, str(_PROGRAM), json.dumps(settings)], None
        bubblewrap = shutil.which("bwrap")
        if bubblewrap is None:
            raise SandboxError("bubblewrap (the program bwrap) is not installed")
        command = [bubblewrap, *NAMESPACES]
        if user is None or not _has_capability(CAP_SYS_ADMIN):
            # In a user namespace there is one user, so root leaves itself before: the kernel limits
            # the number of its processes in no namespace.
            settings["user"] = None
            command += IN_USER_NAMESPACE
        else:
            user = None
        devices = [f"/dev/{name}" for name in DEVICES]
        # Only root could pass the folders above that bubblewrap makes by itself.
        files = (*_readable(), python, LINKER_CACHE, *devices)
        above = {parent for path in files for parent in Path(path).parents[:-1]}
        for folder in sorted(map(str, above)):
            command += ["--perms", "755", "--dir", folder]
        for path in _readable():
            link = os.path.islink(path)
            command += ["--symlink", os.readlink(path), path] if link else _read_only(path)
        for path in devices:
            command += ["--dev-bind", path, path]
        # Locks of `multiprocessing` are in /dev/shm: the bounds of /tmp hold for both together.
        command += ["--tmpfs", "/tmp", "--symlink", "../tmp", "/dev/shm"]
        # A new Python starts inside; musl has no such cache.
        command += ["--ro-bind-try", LINKER_CACHE, LINKER_CACHE]
        command += [*_read_only(python), "--ro-bind", str(_PROGRAM), _INSIDE]
        command += ["--remount-ro", "/", "--chdir", "/tmp", "--"]
        return [*command, python, *options, _INSIDE, json.dumps(settings)], user

    def _open(self, control: socket.socket, errors: int, source: str) -> None:
        """Wait until the isolation is complete, then send the source. Raises SandboxError."""
        control.settimeout(START_S)
        try:
            with control.makefile("rb") as file:
                printed = file.readline()
            if printed != b"ready\n":
                self._process.wait(END_S)
                reported = printed.removeprefix(b"failed ") or os.pread(errors, 1000, 0)
                reason = reported.decode(errors="replace").strip() or "its process ended"
                raise SandboxError(f"the sandbox did not start: {reason}")
            launcher = self._process.pid
            if self._folder is None:
                # Its init waits for the program, which waits for the source: the number is its own.
                self._init = os.pidfd_open(*_children(launcher))
            for process in _descendants(launcher):
                # The kernel ends the program, not the run, where memory is short.
                Path(f"/proc/{process}/oom_score_adj").write_text("1000", encoding="utf-8")
            content = source.encode(errors="surrogatepass")
            control.sendall(struct.pack("!I", len(content)) + content)
        except (OSError, subprocess.TimeoutExpired) as error:
            raise SandboxError(f"the sandbox did not start: {error}") from error

    def _usage(self) -> Usage:
        cpu_s, states = 0.0, []
        with contextlib.suppress(psutil.Error):
            launcher = psutil.Process(self._process.pid)
            ended = launcher.status() == psutil.STATUS_ZOMBIE
            for one in (launcher, *(() if ended else launcher.children(recursive=True))):
                with contextlib.suppress(psutil.Error):
                    cpu_s += sum(one.cpu_times()[:4])  # own and of children that were waited for
                    states.append(one.status())
        return Usage(
            cpu_s=cpu_s,
            elapsed_s=time.monotonic() - self._started,
            computing=psutil.STATUS_RUNNING in states[1:],
        )

    def _ends_before(self, deadline: float, watched: Sequence[Sandbox] = ()) -> bool:
        """Leaves the launcher to `wait`: until then its processor time can be read. Meanwhile the
        files of this program and of `watched` are kept within their limit."""
        pause_s, next_check = 0.001, time.monotonic()
        while True:
            if time.monotonic() >= next_check:
                for one in (self, *watched):
                    one._keep_small()
                next_check = time.monotonic() + 1 / CHECKS_PER_S
            options = os.WEXITED | os.WNOHANG | os.WNOWAIT
            if os.waitid(os.P_PID, self._process.pid, options) is not None:
                return True
            left_s = deadline - time.monotonic()
            if left_s <= 0:
                return False
            time.sleep(min(pause_s, left_s))
            pause_s = min(2 * pause_s, 0.05)

    def _keep_small(self) -> None:
        """Kill the program if its files exceed their limit together."""
        if self._folder is None or self._too_large:
            return
        maximum = self._limits.file_mib * 2**20
        if _exceeds(self._folder, maximum, _unlinked(self._folder, self._process.pid)):
            self._too_large = True
            self._terminate()

    def _terminate(self) -> None:
        """End the launcher if it has not ended. Popen.send_signal would wait for it first, and then
        `_ends_before` could not."""
        os.kill(self._process.pid, signal.SIGTERM)

    def _end(self) -> None:
        if self._init is not None:
            with contextlib.suppress(ProcessLookupError):
                signal.pidfd_send_signal(self._init, signal.SIGKILL)
            # Process 1 has ended once every process of its namespace has.
            ends_within(self._init, END_S)
            os.close(self._init)
            self._init = None
        if self._process.poll() is not None:
            return
        # The subreaper ends once all that the program started has.
        self._terminate()
        self._ends_before(time.monotonic() + END_S)
        with contextlib.suppress(ProcessLookupError):
            os.killpg(self._process.pid, signal.SIGKILL)
        self._process.wait()

    def _clean(self) -> None:
        if self._output >= 0:
            os.close(self._output)
            self._output = -1
        if self._folder is not None:
            remove_tree(Path(self._folder))


def _parent() -> Path:
    """Return the folder of the programs' own folders, which a later start removes if this process
    is killed."""
    temporary = Path(tempfile.gettempdir()).resolve()
    private = any(not one.stat().st_mode & stat.S_IXOTH for one in (temporary, *temporary.parents))
    # Root's programs are another user, and name their files by whole paths.
    if private and os.getuid() == 0:
        return public_folder(SHORT)
    return temporary if VARIABLE in os.environ else public_folder(temporary)


def _exceeds(folder: str, maximum: int, unlinked: Sequence[int]) -> bool:
    """True if the files below `folder` and `unlinked` ones of these sizes occupy more than
    `maximum` bytes, or are more than MAX_FILES."""
    size, files = sum(unlinked), len(unlinked)
    if size > maximum or files > MAX_FILES:
        return True
    folders = [folder]
    while folders:
        try:
            with os.scandir(folders.pop()) as entries:
                for entry in entries:
                    files += 1
                    with contextlib.suppress(FileNotFoundError):
                        size += entry.stat(follow_symlinks=False).st_blocks * 512
                        if entry.is_dir(follow_symlinks=False):
                            folders.append(entry.path)
                    if size > maximum or files > MAX_FILES:
                        return True
        except OSError as error:
            # Too deep for a path, or without rights: its content is unknown. Others were removed or
            # replaced meanwhile.
            if error.errno in (errno.ENAMETOOLONG, errno.EACCES):
                return True
    return False


def _unlinked(folder: str, launcher: int) -> list[int]:
    """Sizes of the files that processes below `launcher` removed from the file system of `folder`
    and still hold, open or in memory."""
    sizes: dict[int, int] = {}
    try:
        device = os.stat(folder).st_dev
    except FileNotFoundError:  # without Landlock, a program may rename its folder
        return []
    for number in _descendants(launcher):
        process = Path(f"/proc/{number}")
        with contextlib.suppress(OSError):  # it has ended
            for name in os.listdir(process / "fd"):
                _add_unlinked(sizes, process / "fd" / name, device)
            maps = (process / "maps").read_text(encoding="utf-8", errors="replace")
            for line in maps.splitlines():
                if line.endswith(" (deleted)"):
                    _add_unlinked(sizes, process / "map_files" / line.split(" ", 1)[0], device)
    return list(sizes.values())


def _add_unlinked(sizes: dict[int, int], held: Path, device: int) -> None:
    with contextlib.suppress(OSError):  # closed meanwhile; of `map_files`, only root may read it
        about = os.stat(held)
        if about.st_nlink == 0 and about.st_dev == device and stat.S_ISREG(about.st_mode):
            sizes[about.st_ino] = about.st_blocks * 512


def _children(process: int) -> list[int]:
    found: list[int] = []
    with contextlib.suppress(OSError):
        for thread in os.listdir(f"/proc/{process}/task"):
            listed = Path(f"/proc/{process}/task/{thread}/children")
            found += map(int, listed.read_text(encoding="utf-8").split())
    return found


def _descendants(process: int) -> Iterator[int]:
    for child in _children(process):
        yield child
        yield from _descendants(child)


def own_user() -> int | None:
    """Return a user that no other process is; None where this process is not root's, or its
    namespace has no other user."""
    if os.getuid() != 0:
        return None
    lines = Path("/proc/self/uid_map").read_text(encoding="utf-8").splitlines()
    first, _, count = max((list(map(int, one.split())) for one in lines), key=lambda row: row[2])
    # The users of a machine are in the lower half.
    return first + count // 2 + secrets.randbelow(count // 2) if count > 1 else None


def _has_capability(number: int) -> bool:
    status = Path("/proc/self/status").read_text(encoding="utf-8")
    held = next(one.split()[1] for one in status.splitlines() if one.startswith("CapEff:"))
    return bool(int(held, 16) >> number & 1)


def _read_only(path: str) -> list[str]:
    return ["--ro-bind", path, path]


@functools.cache
def _readable() -> list[str]:
    """Folders that a Python program needs: the standard library, and the system's libraries."""
    bases = {"base": sys.base_prefix, "platbase": sys.base_exec_prefix}
    library = [sysconfig.get_path(name, vars=bases) for name in ("stdlib", "platstdlib")]
    config = sysconfig.get_config_var("LIBDIR") or ""
    system = ["/lib", "/lib64", "/usr/lib", "/usr/lib64"]
    links = [path for path in system if os.path.islink(path)]
    folders = sorted({os.path.realpath(p) for p in (*library, config, *system) if os.path.isdir(p)})
    inside = [
        path
        for path in folders
        if not any(path != other and path.startswith(f"{other}/") for other in folders)
    ]
    return [*inside, *links]

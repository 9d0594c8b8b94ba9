"""Sandbox for unreviewed Python programs, such as a model's code or the tests of a data set.

    run("print(input())", stdin="4\\n")  ->  ProgramEnd(code=0, output="4\\n")

With `isolation: namespaces` (bubblewrap, `bwrap`, completed by sandboxed.py) a program
- has no network, and sees only its own processes;
- sees only Python's interpreter and standard library and the linker's cache, read-only, and an
  empty /tmp of its own. It does not see the run, the home directory, the rest of /etc, or /proc;
- inherits only the open files and environment variables that `Sandbox` passes on;
- has limits on CPU time, memory, processes, and the size of files and output; the kernel refuses
  memory that these limits would not count;
- ends with all its descendants, in any session or process group, when it ends or its time is up.
The kernel enforces this; the program shares the kernel with the run.

`isolation: rlimits` is for machines without namespaces. It has
- the limits, the environment and the end of all descendants, as above;
- no sockets, so the program reaches no network and no port of this machine;
- a user of its own if root starts the program: it reads only files that every user can read, and
  cannot end processes of other users. If another user starts it, the program reads everything that
  this user can read, and only Landlock (Linux 6.12 or newer) prevents it from ending the processes
  of this user, including the run and its own launcher;
- a folder of its own, which is removed afterwards. The program can write only there: Landlock
  (Linux 5.13 or newer) refuses other places. The size of the folder, including removed files that
  are still open, is checked CHECKS_PER_S times a second, and a program that exceeds the limit is
  killed;
- no locks and pools of `multiprocessing`, which need /dev/shm.
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

from megatron_async_rl.rollout.isolation.sandboxed import MAX_FILES, ends_within
from megatron_async_rl.watchdog.run_folder import SHORT, VARIABLE, public_folder, remove_tree

Isolation = Literal["namespaces", "rlimits"]
START_S = 30.0
"""Time limit for setting up the isolation. It is long, for busy machines."""
CPU_LIMIT_CODES = (128 + signal.SIGXCPU, 128 + signal.SIGKILL)
"""Exit codes of a program that reached its limit on CPU time: the kernel then sends SIGXCPU or
SIGKILL. A program that ends itself with one of these signals has used less CPU time."""
CPU_ROUNDING_S = 0.1
"""Maximum error of a measured CPU time, which is a sum of values that are rounded down to ticks."""
END_S = 5.0
"""Time limit for the processes of a program to end."""
CAP_SYS_ADMIN = 21
LINKER_CACHE = "/etc/ld.so.cache"
"""File with the paths of shared libraries outside the standard folders, such as libpython in
/usr/local/lib."""
DEVICES = ("null", "zero", "random", "urandom")
NAMESPACES = (
    *("--unshare-ipc", "--unshare-pid", "--unshare-net", "--unshare-uts", "--unshare-cgroup-try"),
    *("--die-with-parent", "--as-pid-1"),
)
IN_USER_NAMESPACE = ("--unshare-user", "--cap-add", "CAP_SYS_ADMIN", "--cap-add", "CAP_SETPCAP")
"""Options for a process that may create no namespaces except a user namespace. It has these
capabilities only inside the user namespace, and sandboxed.py drops them."""
_INSIDE = "/sandboxed.py"
"""Path of sandboxed.py in the sandbox."""
CHECKS_PER_S = 20
"""Checks of the size of a program's folder per second, with `isolation: rlimits`."""
TOO_LARGE = 128 + signal.SIGXFSZ
"""Exit code of a program that was killed because its files exceeded their limit."""
_PROGRAM = Path(__file__).with_name("sandboxed.py")


class SandboxError(RuntimeError):
    """The isolation could not be set up; no program ran."""


@dataclass(frozen=True, kw_only=True)
class Limits:
    """Limits of one program."""

    cpu_s: float = 5.0
    """CPU time of each process, rounded up to whole seconds."""
    wall_s: float = 20.0
    """Wall-clock time, in seconds, which begins when the isolation is complete."""
    memory_mib: int = 512
    """Maximum address space of each process."""
    processes: int = 8
    """Maximum number of processes and threads."""
    file_mib: int = 16
    """Maximum size of a file, and of all files together. With `isolation: rlimits`, the limit for
    all files is checked CHECKS_PER_S times a second and needs Landlock. Standard output has the
    same limit."""
    isolation: Isolation = "namespaces"


@dataclass(frozen=True, kw_only=True)
class Usage:
    """Time that a sandbox has used, including its start. `cpu_s`: CPU time of all its processes.
    `elapsed_s`: wall-clock time. `computing`: True if a process is running or ready to run."""

    cpu_s: float
    elapsed_s: float
    computing: bool


@dataclass(frozen=True, kw_only=True)
class ProgramEnd:
    """End of a program. `code`: exit code, or 128 + signal number; None if the program reached a
    time limit. `timed_out`: True if that was the wall-clock limit. `output`: standard output, cut
    at the limit."""

    code: int | None
    output: str
    timed_out: bool = field(default=False, compare=False)
    usage: Usage = field(compare=False, default=Usage(cpu_s=0.0, elapsed_s=0.0, computing=False))


def run(source: str, *, stdin: str = "", limits: Limits | None = None) -> ProgramEnd:
    """Run `source` as a program and return its end. Raises SandboxError if the isolation cannot be
    set up."""
    with Sandbox(source, stdin=stdin, limits=limits or Limits()) as sandbox:
        return sandbox.wait()


class Sandbox:
    """One program, which runs until `wait` returns or the `with` block ends. Raises SandboxError if
    the isolation cannot be set up. `passed`: descriptors that the program inherits under the same
    numbers."""

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
        folders = {} if self._folder is None else dict.fromkeys(("HOME", "TMPDIR"), self._folder)
        self._init: int | None = None
        """Pidfd of process 1 of the namespaces. All other processes end with it."""
        # Files in memory, not pipes: nothing has to read or write while the program runs.
        self._output = os.memfd_create("output")
        errors, stdin_file = os.memfd_create("errors"), os.memfd_create("input")
        local, remote = socket.socketpair()
        try:
            os.write(stdin_file, stdin.encode(errors="surrogatepass"))
            os.lseek(stdin_file, 0, os.SEEK_SET)
            command, user = self._command(remote)
            self._process = subprocess.Popen(
                command,
                stdin=stdin_file,
                stdout=self._output,
                stderr=errors,
                pass_fds=[remote.fileno(), *passed],
                env={"PATH": "/usr/bin:/bin", "HOME": "/tmp", "LANG": "C.UTF-8"} | folders,
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
            os.close(stdin_file)
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
        """Wait for the end of the program, and return it. `requested`: sandboxes for which this
        program waits; their files are checked meanwhile, and their usage counts if this program
        times out."""
        timed_out = not self._ends_before(self._deadline, requested)
        usages = [one._usage() for one in (self, *(requested if timed_out else ()))]
        usage = Usage(
            cpu_s=sum(one.cpu_s for one in usages),
            elapsed_s=max(one.elapsed_s for one in usages),
            computing=any(one.computing for one in usages),
        )
        self._end()
        code: int | None = self._process.wait()
        # A signal ended the launcher itself, which reports a signal of the program as 128 + number.
        if code is not None and code < 0:
            code = 128 - code
        if self._too_large:
            code, timed_out = TOO_LARGE, False
        elif timed_out or (
            code in CPU_LIMIT_CODES and usage.cpu_s >= self._limits.cpu_s - CPU_ROUNDING_S
        ):
            code = None
        maximum = self._limits.file_mib * 2**20
        output = os.pread(self._output, maximum, 0).decode(errors="replace")
        return ProgramEnd(code=code, output=output, timed_out=timed_out, usage=usage)

    def close(self) -> None:
        self._end()
        self._clean()

    def _command(self, control: socket.socket) -> tuple[list[str], int | None]:
        """Return the command, and the id of the user that runs it (None: the current user). Raises
        SandboxError if bubblewrap is needed and not installed."""
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
            # A user namespace has a single user, so the command switches from root to `user` before
            # it enters one: the kernel does not limit the number of root's processes.
            settings["user"] = None
            command += IN_USER_NAMESPACE
        else:
            user = None
        devices = [f"/dev/{name}" for name in DEVICES]
        # Created explicitly, because only root can access folders that bubblewrap creates itself.
        files = (*_readable(), python, LINKER_CACHE, *devices)
        above = {parent for path in files for parent in Path(path).parents[:-1]}
        for folder in sorted(map(str, above)):
            command += ["--perms", "755", "--dir", folder]
        for path in _readable():
            link = os.path.islink(path)
            command += ["--symlink", os.readlink(path), path] if link else _read_only(path)
        for path in devices:
            command += ["--dev-bind", path, path]
        # Locks of `multiprocessing` need /dev/shm. As a link to /tmp, it shares the limits of /tmp.
        command += ["--tmpfs", "/tmp", "--symlink", "../tmp", "/dev/shm"]
        # The program may start Python again. `try`, because musl has no such cache.
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
                # Init waits for the program, which waits for the source, so the pid is still valid.
                self._init = os.pidfd_open(*_children(launcher))
            for process in _descendants(launcher):
                # If memory is short, the kernel must kill the program, not the run.
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
                    # User and system time of the process and of its reaped children.
                    cpu_s += sum(one.cpu_times()[:4])
                    states.append(one.status())
        return Usage(
            cpu_s=cpu_s,
            elapsed_s=time.monotonic() - self._started,
            computing=psutil.STATUS_RUNNING in states[1:],
        )

    def _ends_before(self, deadline: float, watched: Sequence[Sandbox] = ()) -> bool:
        """Wait for the end of the program. Return False if it has not ended at `deadline`. The
        launcher stays a zombie, so that its CPU time can still be read. Meanwhile, check the files
        of this sandbox and of `watched`."""
        pause_s, next_check = 0.001, time.monotonic()
        while True:
            if time.monotonic() >= next_check:
                for one in (self, *watched):
                    one._check_files()
                next_check = time.monotonic() + 1 / CHECKS_PER_S
            # WNOWAIT: do not reap the launcher.
            options = os.WEXITED | os.WNOHANG | os.WNOWAIT
            if os.waitid(os.P_PID, self._process.pid, options) is not None:
                return True
            remaining_s = deadline - time.monotonic()
            if remaining_s <= 0:
                return False
            time.sleep(min(pause_s, remaining_s))
            pause_s = min(2 * pause_s, 0.05)

    def _check_files(self) -> None:
        """Kill the program if all its files together exceed their limit."""
        if self._folder is None or self._too_large:
            return
        maximum = self._limits.file_mib * 2**20
        if _exceeds(self._folder, maximum, _unlinked(self._folder, self._process.pid)):
            self._too_large = True
            self._terminate()

    def _terminate(self) -> None:
        """Send SIGTERM to the launcher, which may be a zombie. Popen.send_signal would reap a
        zombie, and `_ends_before` could then not wait for it."""
        os.kill(self._process.pid, signal.SIGTERM)

    def _end(self) -> None:
        """Kill the program and all its descendants. Without effect if they have ended."""
        if self._init is not None:
            with contextlib.suppress(ProcessLookupError):
                signal.pidfd_send_signal(self._init, signal.SIGKILL)
            # The kernel ends process 1 only after every other process of its namespace.
            ends_within(self._init, END_S)
            os.close(self._init)
            self._init = None
        if self._process.poll() is not None:
            return
        # The subreaper ends only after all descendants of the program.
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
    """Return the folder in which programs get their own folders. A later run removes the folder of
    a program if this process is killed."""
    temporary = Path(tempfile.gettempdir()).resolve()
    private = any(not one.stat().st_mode & stat.S_IXOTH for one in (temporary, *temporary.parents))
    # If root starts a program, it runs as another user, who must be able to reach its folder.
    if private and os.getuid() == 0:
        return public_folder(SHORT)
    return temporary if VARIABLE in os.environ else public_folder(temporary)


def _exceeds(folder: str, maximum: int, unlinked: Sequence[int]) -> bool:
    """Return True if the files below `folder` together with removed files occupy more than
    `maximum` bytes or are more than MAX_FILES. `unlinked`: sizes of the removed files."""
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
            # The path is too long or the program removed its permissions: the content is unknown.
            # With other errors, the program has removed or replaced the folder meanwhile.
            if error.errno in (errno.ENAMETOOLONG, errno.EACCES):
                return True
    return False


def _unlinked(folder: str, launcher: int) -> list[int]:
    """Return the sizes of the removed files that descendants of `launcher` hold open or mapped, on
    the file system of `folder`."""
    sizes: dict[int, int] = {}
    try:
        device = os.stat(folder).st_dev
    except FileNotFoundError:  # without Landlock, a program can rename its folder
        return []
    for number in _descendants(launcher):
        process = Path(f"/proc/{number}")
        with contextlib.suppress(OSError):  # the process has ended
            for name in os.listdir(process / "fd"):
                _add_unlinked(sizes, process / "fd" / name, device)
            maps = (process / "maps").read_text(encoding="utf-8", errors="replace")
            for line in maps.splitlines():
                if line.endswith(" (deleted)"):
                    _add_unlinked(sizes, process / "map_files" / line.split(" ", 1)[0], device)
    return list(sizes.values())


def _add_unlinked(sizes: dict[int, int], held: Path, device: int) -> None:
    # The file was closed meanwhile, or is in `map_files`, which only root can read.
    with contextlib.suppress(OSError):
        about = os.stat(held)
        if about.st_nlink == 0 and about.st_dev == device and stat.S_ISREG(about.st_mode):
            sizes[about.st_ino] = about.st_blocks * 512


def _children(process: int) -> list[int]:
    children: list[int] = []
    with contextlib.suppress(OSError):
        for thread in os.listdir(f"/proc/{process}/task"):
            file = Path(f"/proc/{process}/task/{thread}/children")
            children += map(int, file.read_text(encoding="utf-8").split())
    return children


def _descendants(process: int) -> Iterator[int]:
    for child in _children(process):
        yield child
        yield from _descendants(child)


def own_user() -> int | None:
    """Return the id of an unused user. None if this process does not run as root, or if its
    namespace has no other user."""
    if os.getuid() != 0:
        return None
    lines = Path("/proc/self/uid_map").read_text(encoding="utf-8").splitlines()
    first, _, count = max((list(map(int, one.split())) for one in lines), key=lambda row: row[2])
    # Accounts of the machine are in the lower half of the ids, so choose one of the upper half.
    return first + count // 2 + secrets.randbelow(count // 2) if count > 1 else None


def _has_capability(number: int) -> bool:
    status = Path("/proc/self/status").read_text(encoding="utf-8")
    held = next(one.split()[1] for one in status.splitlines() if one.startswith("CapEff:"))
    return bool(int(held, 16) >> number & 1)


def _read_only(path: str) -> list[str]:
    return ["--ro-bind", path, path]


@functools.cache
def _readable() -> list[str]:
    """Return the folders that a Python program needs: the standard library and the system's
    libraries, and links to them."""
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

"""A sandbox for Python programs that nobody has read: what a model wrote, or the tests of a data
set.

    run("print(input())", stdin="4\\n")  ->  Ended(code=0, output="4\\n")

With `isolation: namespaces` (Linux; sandbox_program.py builds the walls) a program
- has no network, and sees no process but its own;
- sees of the file system Python's standard library, read-only, and an empty /tmp of its own: not
  the run, not the home directory, not /etc, not /proc;
- inherits no environment variable and no open file;
- has limits on processor time, memory, processes, and the size of files and output;
- ends with all it started, whatever that did to hide, when it ends or its time is up.
It is a wall of the kernel's, not a machine of its own.

With `isolation: limits`, for machines that do not allow namespaces, only the limits, the empty
environment and the end of all its processes are left: it can read what this user can read, and has
the network.
"""

from __future__ import annotations

import contextlib
import functools
import json
import os
import shutil
import signal
import socket
import struct
import subprocess
import sys
import sysconfig
import tempfile
import time
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

import psutil

Isolation = Literal["namespaces", "limits"]
START_S = 30.0
"""Longest time for the walls to stand, on the busiest machine."""
TIME_UP = (128 + signal.SIGXCPU, 128 + signal.SIGKILL)
NOBODY = 65534
_PROGRAM = Path(__file__).with_name("sandbox_program.py")


class SandboxError(RuntimeError):
    """The walls of the sandbox could not be built; nothing was run."""


class Starved(RuntimeError):
    """The clock ran out on a program that was computing and had processor time left: the machine
    was too busy, which says nothing of the program."""


@dataclass(frozen=True, kw_only=True)
class Limits:
    """Of one program."""

    cpu_s: float = 5.0
    """Processor time of each of its processes, in whole seconds, rounded up."""
    wall_s: float = 20.0
    """By the clock."""
    memory_mib: int = 512
    """Address space of each process."""
    processes: int = 8
    """Threads included."""
    file_mib: int = 16
    """Largest file, and all files together; standard output is one."""
    isolation: Isolation = "namespaces"


@dataclass(frozen=True, kw_only=True)
class Ended:
    """How a program ended. `code`: 128 + number of the signal where one ended it; None where its
    time was up. `output`: what it printed, cut at the limit."""

    code: int | None
    output: str


def run(source: str, *, stdin: str = "", limits: Limits | None = None) -> Ended:
    """Runs `source` as a program. Raises SandboxError, and Starved."""
    with Sandbox(source, stdin=stdin, limits=limits or Limits()) as sandbox:
        return sandbox.wait()


class Sandbox:
    """One program that runs until `wait` returns or the block ends. `passed`: descriptors it
    inherits, under their numbers."""

    def __init__(
        self, source: str, *, stdin: str = "", limits: Limits, passed: Sequence[int] = ()
    ) -> None:
        self._limits = limits
        self._deadline = time.monotonic() + limits.wall_s
        self._folder = tempfile.mkdtemp() if limits.isolation == "limits" else None
        self._output = os.memfd_create("output")
        given = os.memfd_create("input")
        ours, theirs = socket.socketpair()
        try:
            os.write(given, stdin.encode(errors="surrogatepass"))
            os.lseek(given, 0, os.SEEK_SET)
            self._process = subprocess.Popen(
                [sys.executable, "-I", "-S", "-X", "utf8", str(_PROGRAM), self._settings(theirs)],
                stdin=given,
                stdout=self._output,
                stderr=subprocess.DEVNULL,
                pass_fds=[theirs.fileno(), *passed],
                env={"PATH": "/usr/bin:/bin", "HOME": "/tmp", "LANG": "C.UTF-8"},
                cwd="/",
                start_new_session=True,
            )
        except BaseException:
            ours.close()
            self._clean()
            raise
        finally:
            os.close(given)
            theirs.close()
        try:
            self._open(ours, source)
        except BaseException:
            self.close()
            raise
        finally:
            ours.close()

    def __enter__(self) -> Sandbox:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def wait(self) -> Ended:
        """Raises Starved."""
        try:
            code: int | None = self._process.wait(max(0.0, self._deadline - time.monotonic()))
        except subprocess.TimeoutExpired:
            starved = self._computes()
            self._end()
            if starved:
                used = f"{self._limits.cpu_s:g} s of processor time in {self._limits.wall_s:g} s"
                raise Starved(f"a program did not get its {used}: the machine is busy") from None
            code = None
        if code in TIME_UP:
            code = None
        most = self._limits.file_mib * 2**20
        return Ended(code=code, output=os.pread(self._output, most, 0).decode(errors="replace"))

    def close(self) -> None:
        self._end()
        self._clean()

    def _settings(self, control: socket.socket) -> str:
        limits = self._limits
        return json.dumps(
            {
                "control": control.fileno(),
                "isolated": limits.isolation == "namespaces",
                "change_user": os.getuid() == 0,
                "readable": _readable(),
                "folder": self._folder,
                "cpu_s": max(1, round(limits.cpu_s + 0.499)),
                "memory_mib": limits.memory_mib,
                "processes": limits.processes,
                "file_mib": limits.file_mib,
            }
        )

    def _open(self, control: socket.socket, source: str) -> None:
        """Maps the users of the new namespace, hands over the source and waits until the walls
        stand."""
        control.settimeout(START_S)
        with control.makefile("rb") as said:
            try:
                self._require(said.readline(), b"unshared\n")
                if self._limits.isolation == "namespaces":
                    self._map_users()
                content = source.encode(errors="surrogatepass")
                control.sendall(b"." + struct.pack("!I", len(content)) + content)
                self._require(said.readline(), b"ready\n")
            except OSError as error:
                raise SandboxError(f"the sandbox did not start: {error}") from error

    def _require(self, said: bytes, expected: bytes) -> None:
        if said == expected:
            return
        why = said.decode(errors="replace").removeprefix("failed ").strip() or "its process ended"
        raise SandboxError(f"the sandbox did not start: {why}")

    def _map_users(self) -> None:
        """Root stays root for launcher and init, and the program becomes nobody; another user stays
        itself."""
        folder = Path(f"/proc/{self._process.pid}")
        if os.getuid() == 0:
            for name in ("uid_map", "gid_map"):
                (folder / name).write_text(f"0 0 1\n{NOBODY} {NOBODY} 1\n")
        else:
            (folder / "uid_map").write_text(f"0 {os.getuid()} 1\n")
            (folder / "setgroups").write_text("deny")
            (folder / "gid_map").write_text(f"0 {os.getgid()} 1\n")

    def _computes(self) -> bool:
        try:
            launcher = psutil.Process(self._process.pid)
            states = [one.status() for one in launcher.children(recursive=True)]
        except psutil.Error:
            return False
        return psutil.STATUS_RUNNING in states

    def _end(self) -> None:
        if self._process.poll() is not None:
            return
        if self._limits.isolation == "limits":
            # The launcher adopted them all and ends them.
            self._process.send_signal(signal.SIGTERM)
            with contextlib.suppress(subprocess.TimeoutExpired):
                self._process.wait(5.0)
        with contextlib.suppress(ProcessLookupError):
            os.killpg(self._process.pid, signal.SIGKILL)
        self._process.wait()

    def _clean(self) -> None:
        if self._output >= 0:
            os.close(self._output)
            self._output = -1
        if self._folder is not None:
            shutil.rmtree(self._folder, ignore_errors=True)


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

"""The program of a sandbox (sandbox.py starts it): closes itself in, then runs what it is given.

    launcher: new namespaces, limits -> init, process 1 of the sandbox -> the program

Runs without this package and without site-packages. Invariants:
- nothing of the source is run before every wall stands; a wall that cannot be built is reported,
  and then nothing is run;
- the program has no capability, can gain none, and is not the user of launcher and init where root
  started it;
- when the program ends, every process it started ends with it.
"""

import ctypes
import json
import os
import resource
import signal
import socket
import struct
import sys
import types
from typing import Any

PR_SET_PDEATHSIG, PR_CAPBSET_DROP, PR_SET_CHILD_SUBREAPER, PR_SET_NO_NEW_PRIVS = 1, 24, 36, 38
MS_REMOUNT_FREE = 0x2 | 0x4  # nosuid, nodev
MS_BIND, MS_REC, MS_PRIVATE, MNT_DETACH = 4096, 16384, 1 << 18, 2
SYS_MOUNT_SETATTR, AT_FDCWD, AT_RECURSIVE = 442, -100, 0x8000
MOUNT_ATTR_RDONLY, MOUNT_ATTR_NOSUID = 0x1, 0x2
SYS_CAPSET = {"x86_64": 126, "aarch64": 91}
SYS_PIVOT_ROOT = {"x86_64": 155, "aarch64": 41}
CAPABILITY_VERSION_3 = 0x20080522
NOBODY = 65534
DEVICES = ("null", "zero", "random", "urandom")

libc = ctypes.CDLL(None, use_errno=True)


def called(result: int, what: str) -> None:
    if result != 0:
        number = ctypes.get_errno()
        raise OSError(number, f"{what}: {os.strerror(number)}")


def mount(source: str, target: str, kind: str | None, flags: int, options: str | None) -> None:
    values = [None if one is None else one.encode() for one in (source, target, kind, options)]
    source_, target_, kind_, options_ = values
    result = libc.mount(source_, target_, kind_, ctypes.c_ulong(flags), options_)
    called(result, f"mounting {target}")


def make_read_only(target: str, recursive: bool) -> None:
    attributes = struct.pack("QQQQ", MOUNT_ATTR_RDONLY | MOUNT_ATTR_NOSUID, 0, 0, 0)
    flags = AT_RECURSIVE if recursive else 0
    result = libc.syscall(
        SYS_MOUNT_SETATTR, AT_FDCWD, target.encode(), flags, attributes, len(attributes)
    )
    called(result, f"making {target} read-only")


def bind(source: str, target: str) -> None:
    mount(source, target, None, MS_BIND | MS_REC, None)


def pivot_root() -> None:
    """To the working directory."""
    called(libc.syscall(SYS_PIVOT_ROOT[os.uname().machine], b".", b"."), "changing the root")
    called(libc.umount2(b".", MNT_DETACH), "leaving the old root")
    os.chdir("/")


def close_in(readable: list[str], folder_mib: int) -> None:
    """A root of its own: Python's library read-only, /dev/null and its like, and an empty /tmp."""
    mount("none", "/", None, MS_REC | MS_PRIVATE, None)
    # The new root is put together under /tmp, seen by this mount namespace alone.
    mount("sandbox", "/tmp", "tmpfs", MS_REMOUNT_FREE, "size=1m,mode=755")
    os.mkdir("/tmp/new")
    os.mkdir("/tmp/old")
    os.chdir("/tmp")
    called(libc.syscall(SYS_PIVOT_ROOT[os.uname().machine], b".", b"old"), "changing the root")
    os.chdir("/")
    bind("/new", "/new")
    for path in readable:
        old, new = f"/old{path}", f"/new{path}"
        if os.path.islink(old):
            os.makedirs(os.path.dirname(new), exist_ok=True)
            os.symlink(os.readlink(old), new)
        elif os.path.isdir(old) and not os.path.exists(new):
            os.makedirs(new)
            bind(old, new)
            make_read_only(new, recursive=True)
    os.mkdir("/new/dev")
    for name in DEVICES:
        with open(f"/new/dev/{name}", "w"):
            bind(f"/old/dev/{name}", f"/new/dev/{name}")
    os.mkdir("/new/tmp")
    mount("sandbox", "/new/tmp", "tmpfs", MS_REMOUNT_FREE, f"size={folder_mib}m,mode=1777")
    make_read_only("/new", recursive=False)
    os.chdir("/new")
    pivot_root()
    os.chdir("/tmp")


def limit(settings: dict[str, Any]) -> None:
    limits = {
        resource.RLIMIT_CPU: settings["cpu_s"],
        resource.RLIMIT_AS: settings["memory_mib"] * 2**20,
        resource.RLIMIT_FSIZE: settings["file_mib"] * 2**20,
        # Launcher and init are the same user where root is not.
        resource.RLIMIT_NPROC: settings["processes"] + 2,
        resource.RLIMIT_NOFILE: 64,
        resource.RLIMIT_CORE: 0,
    }
    for which, most in limits.items():
        _, hard = resource.getrlimit(which)
        most = most if hard == resource.RLIM_INFINITY else min(most, hard)
        resource.setrlimit(which, (most, most))


def drop_capabilities() -> None:
    for capability in range(64):
        libc.prctl(PR_CAPBSET_DROP, capability, 0, 0, 0)
    header = struct.pack("Ii", CAPABILITY_VERSION_3, 0)
    called(libc.syscall(SYS_CAPSET[os.uname().machine], header, bytes(24)), "dropping capabilities")


def run(source: str) -> None:
    main = types.ModuleType("__main__")
    sys.modules["__main__"] = main
    sys.argv[:] = ["program.py"]
    exec(compile(source, "program.py", "exec"), main.__dict__)


def adopt_orphans() -> None:
    """What descends from this process is its child once the parent between them has ended."""
    libc.prctl(PR_SET_CHILD_SUBREAPER, 1, 0, 0, 0)


def end_descendants() -> None:
    """All that the program left behind: this process adopts them, as their parents end."""
    while True:
        try:
            with open(f"/proc/self/task/{os.getpid()}/children") as file:
                children = [int(pid) for pid in file.read().split()]
        except OSError:
            children = []
        for pid in children:
            os.kill(pid, signal.SIGKILL)
        try:
            os.waitpid(-1, 0)
        except ChildProcessError:
            return


def give_up(*_: object) -> None:
    end_descendants()
    os._exit(1)


def wait_for(pid: int) -> int:
    """Exit code of the program; adopted processes that end before it are passed over."""
    while True:
        ended, status = os.waitpid(-1, 0)
        if ended == pid:
            code = os.waitstatus_to_exitcode(status)
            return code if code >= 0 else 128 - code


def main() -> None:
    settings = json.loads(sys.argv[1])
    control = socket.socket(fileno=settings["control"])
    isolated, parent = settings["isolated"], os.getppid()
    try:
        libc.prctl(PR_SET_PDEATHSIG, signal.SIGKILL, 0, 0, 0)
        with open("/proc/self/oom_score_adj", "w") as file:
            file.write("1000")
        if isolated:
            spaces = os.CLONE_NEWUSER | os.CLONE_NEWNS | os.CLONE_NEWPID | os.CLONE_NEWNET
            os.unshare(spaces | os.CLONE_NEWIPC | os.CLONE_NEWUTS)
            control.sendall(b"unshared\n")
            control.recv(1)  # the starter has mapped the users
            libc.prctl(PR_SET_PDEATHSIG, signal.SIGKILL, 0, 0, 0)
        else:
            adopt_orphans()
            control.sendall(b"unshared\n")
            control.recv(1)
            os.chdir(settings["folder"])
        if os.getppid() != parent:
            os._exit(1)
        with control.makefile("rb") as file:
            source = file.read(*struct.unpack("!I", file.read(4))).decode()
    except BaseException as error:  # noqa: BLE001 - the starter raises it
        control.sendall(f"failed {error}\n".encode())
        os._exit(1)

    if isolated:
        init = os.fork()
        if init:
            control.close()
            os._exit(wait_for(init))

    try:
        if isolated:
            libc.prctl(PR_SET_PDEATHSIG, signal.SIGKILL, 0, 0, 0)
            close_in(settings["readable"], settings["file_mib"])
        else:
            signal.signal(signal.SIGTERM, give_up)
        program = os.fork()
        if not program:
            signal.signal(signal.SIGTERM, signal.SIG_DFL)
            limit(settings)
            if isolated:
                if settings["change_user"]:
                    os.setgroups([])
                    os.setresgid(NOBODY, NOBODY, NOBODY)
                    os.setresuid(NOBODY, NOBODY, NOBODY)
                drop_capabilities()
            called(libc.prctl(PR_SET_NO_NEW_PRIVS, 1, 0, 0, 0), "giving up privileges")
            control.sendall(b"ready\n")
    except BaseException as error:  # noqa: BLE001 - the starter raises it
        control.sendall(f"failed {error}\n".encode())
        os._exit(1)

    control.close()
    if not program:
        run(source)
        return  # as every program ends: threads are waited for, output is written out
    code = wait_for(program)
    if not isolated:
        end_descendants()
    os._exit(code)


if __name__ == "__main__":
    main()

"""Attempts of a program to leave the sandbox of the `code` reward, with the whole isolation and
with bubblewrap alone.

`bubblewrap alone` runs a copy of rollout/isolation/sandboxed.py without the steps of PARTS: without
the seccomp filter, the limits and the bounded /tmp. Prints one line per attempt, and the number of
attempts that each side stops. Needs bubblewrap, and x86_64 because of the numbers of system calls.
"""

from __future__ import annotations

import platform
import socket
import tempfile
import uuid
from pathlib import Path

from megatron_async_rl.rollout.isolation import sandbox

ROOT = Path(__file__).resolve().parents[1]
PARTS = (
    '            bound_files(settings["file_mib"])\n',
    "        limit(settings)\n",
    "        drop_capabilities()\n",
    '        called(libc.prctl(PR_SET_NO_NEW_PRIVS, 1, 0, 0, 0), "giving up privileges")\n',
    "        refuse_calls(FAMILIES if isolated else ())\n",
)
FILES = 20_000

PROGRAM = """
import ctypes, os, socket
libc = ctypes.CDLL(None, use_errno=True)
libc.syscall.restype = ctypes.c_long

def attempt(name, do):
    # Each in a process of its own, because a new namespace would change later attempts.
    child = os.fork()
    if child:
        print(name, os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 0, sep="|", flush=True)
        return
    try:
        result = do()
    except OSError:
        os._exit(1)
    os._exit(isinstance(result, int) and result < 0)

def cloned():
    child = libc.syscall(56, 0x10000011, 0, 0, 0, 0)
    if child == 0:
        os._exit(0)
    return child

def requested():
    libc.syscall(248, b"user", b"k", b"v", 1, -3)
    return libc.syscall(249, b"user", b"k", 0, -3)

def mounted():
    if libc.unshare(0x10020000) < 0:
        return -1
    return libc.mount(b"x", b"/tmp", b"tmpfs", 0, None)

def made():
    for number in range(FILES):
        open(f"f{number}", "w").close()

for path in ("/etc/passwd", SECRET, ROOT + "/setup.py", "/proc/self/environ"):
    attempt(f"files: read {path}", lambda: os.open(path, os.O_RDONLY))
for folder in ("", "/dev", os.path.dirname(os.__file__)):
    attempt(f"files: write to {folder or '/'}", lambda: open(folder + "/x", "w"))
attempt("files: mkdir in a folder of the machine", lambda: os.mkdir(SECRET + "-folder"))
attempt("files: open the library to write", lambda: os.open(os.__file__, os.O_RDWR))
attempt("network: TCP port of the machine", lambda: socket.socket().connect(("127.0.0.1", PORT)))
attempt("network: TCP to 192.0.2.1", lambda: socket.socket().connect(("192.0.2.1", 80)))
attempt("network: abstract Unix socket", lambda: socket.socket(1).connect(chr(0) + NAME))
attempt("network: AF_VSOCK", lambda: socket.socket(40, 1))
attempt("network: AF_NETLINK", lambda: socket.socket(16, 3))
attempt("network: AF_ALG", lambda: socket.socket(38, 5))
attempt("privileges: setuid", lambda: os.setuid(0))
attempt("privileges: setresuid", lambda: os.setresuid(0, 0, 0))
attempt("privileges: mount", lambda: libc.mount(b"x", b"/tmp", b"tmpfs", 0, None))
attempt("privileges: umount", lambda: libc.umount2(b"/tmp", 2))
attempt("privileges: sethostname", lambda: libc.sethostname(b"x", 1))
attempt("privileges: ptrace of process 1", lambda: libc.ptrace(16, 1, 0, 0))
attempt("keys: keyctl", lambda: libc.syscall(250, 0, -3, 0))
attempt("keys: add_key", lambda: libc.syscall(248, b"user", b"k", b"v", 1, -3))
attempt("keys: request_key", requested)
attempt("namespaces: clone with a user namespace", cloned)
attempt("namespaces: unshare of the user", lambda: libc.unshare(0x10000000))
attempt("namespaces: unshare of mounts", lambda: libc.unshare(0x00020000))
attempt("namespaces: unshare of both, and a mount", mounted)
attempt("namespaces: setns", lambda: libc.setns(0, 0))
attempt("memory: shmget", lambda: libc.shmget(0, 4096, 0o1600))
attempt("memory: semget", lambda: libc.semget(0, 1, 0o1600))
attempt("memory: msgget", lambda: libc.msgget(0, 0o1600))
attempt("memory: memfd_create", lambda: libc.memfd_create(b"x", 0))
attempt("memory: memfd_secret", lambda: libc.syscall(447, 0))
attempt("memory: mq_open", lambda: libc.syscall(240, b"q", 0o102, 0o600, 0))
attempt("memory: io_uring_setup", lambda: libc.syscall(425, 4, ctypes.create_string_buffer(120)))
attempt(f"memory: {FILES} empty files", made)
attempt("priority: ioprio_set", lambda: libc.syscall(251, 1, 0, (2 << 13) | 7))
"""


def attempted(source: str) -> dict[str, bool]:
    """Return name of an attempt -> True if it succeeded."""
    ended = sandbox.run(source, limits=sandbox.Limits(wall_s=60))
    if ended.code != 0:
        raise RuntimeError(f"the program ended with {ended.code}: {ended.output}")
    rows = (line.split("|") for line in ended.output.splitlines())
    return {name: succeeded == "True" for name, succeeded in rows}


def main() -> None:
    if platform.machine() != "x86_64":
        raise SystemExit("the numbers of the system calls are those of x86_64")
    name = uuid.uuid4().hex
    with (
        tempfile.TemporaryDirectory() as folder,
        socket.create_server(("127.0.0.1", 0)) as server,
        socket.socket(socket.AF_UNIX) as abstract,
    ):
        abstract.bind(f"\0{name}")
        abstract.listen()
        secret = Path(folder) / "secret"
        secret.write_text("s")
        values = {
            "FILES": FILES,
            "SECRET": str(secret),
            "ROOT": str(ROOT),
            "PORT": server.getsockname()[1],
            "NAME": name,
        }
        source = "".join(f"{key} = {value!r}\n" for key, value in values.items()) + PROGRAM
        whole = attempted(source)

        bare = Path(folder) / "sandboxed.py"
        text = sandbox._PROGRAM.read_text()
        for part in PARTS:
            if text.count(part) != 1:
                raise RuntimeError(f"sandboxed.py does not have {part.strip()} exactly once")
            text = text.replace(part, "")
        bare.write_text(text)
        sandbox._PROGRAM = bare
        alone = attempted(source)

    shown = {False: "stopped", True: "succeeded"}
    for attempt, succeeded in whole.items():
        print(f"{attempt}: {shown[succeeded]}; bubblewrap alone: {shown[alone[attempt]]}")
    print(
        f"{len(whole)} attempts; stopped: {[*whole.values()].count(False)},"
        f" by bubblewrap alone: {[*alone.values()].count(False)}"
    )


if __name__ == "__main__":
    main()

"""Program inside a sandbox, started by sandbox.py. It completes the isolation and runs source code.

    bubblewrap -> init, process 1 of the sandbox -> the program        isolation: namespaces
    subreaper -> the program                                           isolation: rlimits

`fork_under_subreaper` is also for other processes whose descendants must end with them.

This file runs without this package and without site-packages. Invariants:
- no part of the source runs before the isolation is complete; if a part of the isolation fails, the
  failure is reported and no source runs;
- the program has no capability, cannot gain one, and runs as a user of its own if root started it;
- the memory of the program is in its address space or in its /tmp, which both have limits. The
  kernel refuses all other memory (`refuse_calls`), because bubblewrap has no option for that;
- the program opens no socket to the host of a virtual machine or to the kernel, reads no keys,
  creates no namespace, and does not change its I/O priority. The filter refuses these calls, too:
  of the 38 attempts of benchmarks/escape_attempts.py, bubblewrap alone stops 21, the filter 16 more
  and the limit on the number of files the last one;
- the program reaches no port of this machine: it has its own network namespace, or no sockets
  except connected pairs from `socketpair`;
- when the program ends, every process that it started ends with it.
"""

import contextlib
import ctypes
import errno
import json
import os
import resource
import select
import signal
import socket
import struct
import sys
import types
from typing import Any

PR_SET_PDEATHSIG, PR_CAPBSET_DROP, PR_SET_CHILD_SUBREAPER, PR_SET_NO_NEW_PRIVS = 1, 24, 36, 38
MOUNT_FLAGS = 0x20 | 0x2 | 0x4  # remount, nosuid, nodev
SYS_CAPSET = {"x86_64": 126, "aarch64": 91}
CAPABILITY_VERSION_3 = 0x20080522
PR_SET_SECCOMP, SECCOMP_MODE_FILTER = 22, 2
CLONE_NEWUSER = 0x10000000
AUDIT_ARCH = {"x86_64": 0xC000003E, "aarch64": 0xC00000B7}
REFUSED = {
    # shmget, semget, msgget, memfd_create, memfd_secret, unshare, setns, mq_open, io_uring_setup,
    # add_key, request_key, keyctl, ioprio_set
    "x86_64": (29, 64, 68, 319, 447, 272, 308, 240, 425, 248, 249, 250, 251),
    "aarch64": (194, 190, 186, 279, 447, 97, 268, 180, 425, 217, 218, 219, 30),
}
"""System calls that allocate memory outside of address spaces, create a namespace (in which a
program could mount more memory), read the keys of the user who started it, or change the priority
of that user's I/O."""
FAMILIES = (socket.AF_UNIX, socket.AF_INET, socket.AF_INET6)
"""Socket families that a network namespace confines. It does not confine others: AF_VSOCK reaches
the host of a virtual machine."""
SYS_SOCKET = {"x86_64": 41, "aarch64": 198}
SYS_SOCKETPAIR = {"x86_64": 53, "aarch64": 199}
CONNECTED = (socket.SOCK_STREAM, socket.SOCK_SEQPACKET)
"""Types of socket pairs whose sockets can send only to each other. A datagram socket could send to
any Unix socket."""
ONLY_ON_SELF = {
    # setpriority; prlimit64, sched_setparam, sched_setscheduler, sched_setaffinity, sched_setattr
    "x86_64": {141: (16, 24), 302: (16,), 142: (16,), 144: (16,), 203: (16,), 314: (16,)},
    "aarch64": {140: (16, 24), 261: (16,), 118: (16,), 119: (16,), 122: (16,), 274: (16,)},
}
"""System call that limits or slows down a process -> offsets of its arguments that must be 0, which
selects the caller itself."""
MAX_FILES = 4096
"""Maximum number of files of a program. The size limit does not count the memory of an empty
file."""
SYS_CLONE = {"x86_64": 56, "aarch64": 220}
SYS_CLONE3 = 435
SYS_LANDLOCK_CREATE, SYS_LANDLOCK_ADD, SYS_LANDLOCK_RESTRICT = 444, 445, 446
LANDLOCK_VERSION, LANDLOCK_PATH_BENEATH = 1, 1
WRITE_FILE = 1 << 1
WRITES = WRITE_FILE | sum(1 << right for right in range(4, 13))
"""Landlock's rights to write, remove and create files of any kind."""
REFER, TRUNCATE = 1 << 13, 1 << 14
"""Rights that Landlock has since version 2 and version 3."""
SCOPES = 0x1 | 0x2
"""Scopes of Landlock, since version 6: the process cannot connect to abstract Unix sockets of
processes outside, and cannot signal those processes."""

libc = ctypes.CDLL(None, use_errno=True)


def called(result: int, what: str) -> None:
    """Raise OSError if a C function returned an error. `what`: action, as a gerund."""
    if result != 0:
        number = ctypes.get_errno()
        raise OSError(number, f"{what}: {os.strerror(number)}")


def bound_files(folder_mib: int) -> None:
    """Limit the size and the number of the files in this sandbox's /tmp. bubblewrap has no option
    for the number, and even an empty file uses memory."""
    options = f"size={folder_mib}m,nr_inodes={MAX_FILES}".encode()
    flags = ctypes.c_ulong(MOUNT_FLAGS)
    called(libc.mount(b"tmpfs", b"/tmp", b"tmpfs", flags, options), "limiting /tmp")
    os.chmod("/tmp", 0o1777)


def limit(settings: dict[str, Any]) -> None:
    """Set the resource limits of this process and its descendants."""
    limits = {
        resource.RLIMIT_CPU: settings["cpu_s"],
        resource.RLIMIT_AS: settings["memory_mib"] * 2**20,
        resource.RLIMIT_FSIZE: settings["file_mib"] * 2**20,
        # Without a user of its own, the subreaper, bubblewrap and init count, too.
        resource.RLIMIT_NPROC: settings["processes"] + (2 if settings["user"] is None else 0),
        resource.RLIMIT_NOFILE: 64,
        resource.RLIMIT_CORE: 0,
    }
    for which, maximum in limits.items():
        _, hard = resource.getrlimit(which)
        maximum = maximum if hard == resource.RLIM_INFINITY else min(maximum, hard)
        resource.setrlimit(which, (maximum, maximum))


def drop_capabilities() -> None:
    for capability in range(64):
        libc.prctl(PR_CAPBSET_DROP, capability, 0, 0, 0)
    header = struct.pack("Ii", CAPABILITY_VERSION_3, 0)
    called(libc.syscall(SYS_CAPSET[os.uname().machine], header, bytes(24)), "dropping capabilities")


def refuse_calls(families: tuple[int, ...]) -> None:
    """Install a seccomp filter. These calls fail with EPERM: REFUSED, ONLY_ON_SELF for other
    processes, sockets except `families` and, without families, pairs of datagram sockets.

    A filter cannot read the flags of clone3, so clone3 fails with ENOSYS. The C library then calls
    clone, which fails with EPERM for a new user namespace."""
    machine = os.uname().machine
    # BPF instructions: (code, jump if true, jump if false, operand). Jumps count instructions.
    load, equal, at_least, any_of, both, answer = 0x20, 0x15, 0x35, 0x45, 0x54, 0x06
    allow, refuse, missing = 0x7FFF0000, 0x00050000 | errno.EPERM, 0x00050000 | errno.ENOSYS
    program = [
        (load, 0, 0, 4),  # the architecture
        (equal, 1, 0, AUDIT_ARCH[machine]),
        (answer, 0, 0, missing),
        (load, 0, 0, 0),  # the call
        (at_least, 0, 1, 0x40000000),  # numbers of the x32 interface of x86_64
        (answer, 0, 0, missing),
        (equal, 0, 1, SYS_CLONE3),
        (answer, 0, 0, missing),
    ]
    for call in REFUSED[machine]:
        program += [(equal, 0, 1, call), (answer, 0, 0, refuse)]
    if not families:
        program += [
            (equal, 0, len(CONNECTED) + 4, SYS_SOCKETPAIR[machine]),
            (load, 0, 0, 24),  # the type of the pair
            (both, 0, 0, 0xF),  # without the flags in it
            *((equal, len(CONNECTED) - place, 0, int(one)) for place, one in enumerate(CONNECTED)),
            (answer, 0, 0, refuse),
            (answer, 0, 0, allow),
        ]
    program += [
        (equal, 0, len(families) + 3, SYS_SOCKET[machine]),
        (load, 0, 0, 16),  # the family of the socket
        *((equal, len(families) - place, 0, int(one)) for place, one in enumerate(families)),
        (answer, 0, 0, refuse),
        (answer, 0, 0, allow),
        (equal, 0, 4, SYS_CLONE[machine]),
        (load, 0, 0, 16),  # the flags of clone
        (any_of, 0, 1, CLONE_NEWUSER),
        (answer, 0, 0, refuse),
        (answer, 0, 0, allow),
    ]
    for call, offsets in ONLY_ON_SELF[machine].items():
        program.append((equal, 0, 3 * len(offsets) + 1, call))
        for offset in offsets:
            program += [(load, 0, 0, offset), (equal, 1, 0, 0), (answer, 0, 0, refuse)]
        program.append((answer, 0, 0, allow))
    program.append((answer, 0, 0, allow))
    code = ctypes.create_string_buffer(b"".join(struct.pack("HBBI", *one) for one in program))
    head = struct.pack("HxxxxxxP", len(program), ctypes.addressof(code))
    called(libc.prctl(PR_SET_SECCOMP, SECCOMP_MODE_FILTER, head, 0, 0), "refusing system calls")


def restrict_with_landlock() -> bool:
    """Restrict this process and its descendants with Landlock: they can change only files below the
    working directory and, on Linux 6.12 or newer, signal only each other. Return False if the
    kernel lacks Landlock. Call this function after setting PR_SET_NO_NEW_PRIVS."""
    version = libc.syscall(SYS_LANDLOCK_CREATE, None, 0, LANDLOCK_VERSION)
    if version < 1:
        return False
    handled = WRITES | (REFER if version >= 2 else 0) | (TRUNCATE if version >= 3 else 0)
    # An older kernel accepts the longer structure if the fields that it does not support are 0.
    attributes = struct.pack("QQQ", handled, 0, SCOPES if version >= 6 else 0)
    rules = libc.syscall(SYS_LANDLOCK_CREATE, attributes, len(attributes), 0)
    called(min(rules, 0), "restricting writes")
    allowed = handled & (WRITE_FILE | TRUNCATE)
    for path, rights in ((".", handled), ("/dev/null", allowed)):
        beneath = os.open(path, os.O_PATH | os.O_CLOEXEC)
        rule = struct.pack("=Qi", rights, beneath)
        added = libc.syscall(SYS_LANDLOCK_ADD, rules, LANDLOCK_PATH_BENEATH, rule, 0)
        called(added, f"restricting writes to {path}")
        os.close(beneath)
    called(libc.syscall(SYS_LANDLOCK_RESTRICT, rules, 0), "restricting writes")
    os.close(rules)
    return True


def switch_user(user: int, folder: str) -> None:
    """Switch to `user`, which only this sandbox uses, so that the limit on processes applies and
    the program cannot end other processes. Keep the user in a user namespace without `user`.
    `folder` becomes the property of `user`."""
    # Opened by root, because `user` may not reach a library below a folder such as /root.
    library = {
        place: os.open(path, os.O_PATH)
        for place, path in enumerate(sys.path)
        if os.path.isdir(path)
    }
    try:
        os.chown(folder, user, user)
        os.setgroups([])
        os.setresgid(user, user, user)
        os.setresuid(user, user, user)
    except OSError as error:
        if error.errno != errno.EINVAL:  # EINVAL: this namespace has no such user
            raise
    for place, descriptor in library.items():
        if os.access(sys.path[place], os.R_OK | os.X_OK):
            os.close(descriptor)
        else:
            sys.path[place] = f"/proc/self/fd/{descriptor}"
            if not os.access(sys.path[place], os.R_OK | os.X_OK):
                raise OSError(errno.EACCES, "only root can read Python's library", sys.path[place])


def run(source: str) -> None:
    """Run `source` as the module `__main__`."""
    main = types.ModuleType("__main__")
    sys.modules["__main__"] = main
    sys.argv[:] = ["program.py"]
    exec(compile(source, "program.py", "exec"), main.__dict__)


def end_descendants() -> None:
    """Kill every descendant of this process. The process must be a subreaper or init: it adopts
    descendants whose parents end, so each of them is a child at some time."""
    while True:
        try:
            with open(f"/proc/self/task/{os.getpid()}/children", encoding="utf-8") as file:
                children = [int(pid) for pid in file.read().split()]
        except OSError:
            children = []
        for pid in children:
            with contextlib.suppress(OSError):
                os.kill(pid, signal.SIGKILL)
        try:
            os.waitpid(-1, 0)
        except ChildProcessError:
            return


def on_terminate(*_: object) -> None:
    end_descendants()
    os._exit(1)


def wait_for(pid: int) -> int:
    """Wait for the end of process `pid`. Return its exit code, or minus the number of the signal
    that ended it. Reap adopted processes that end earlier."""
    while True:
        ended, status = os.waitpid(-1, 0)
        if ended == pid:
            return os.waitstatus_to_exitcode(status)


def ends_within(process: int, seconds: float) -> bool:
    """Wait for the end of a process. Return False if it is still running after `seconds`.
    `process`: pidfd of the process."""
    poll = select.poll()  # `select` accepts no descriptor above 1023
    poll.register(process, select.POLLIN)
    return bool(poll.poll(1000 * seconds))


def exit_code(code: int) -> int:
    """Return the exit code that a shell would report for a result of `wait_for`."""
    return code if code >= 0 else 128 - code


def end_with(parent: int) -> None:
    """Make the kernel kill this process at the end of the process `parent`, its parent."""
    libc.prctl(PR_SET_PDEATHSIG, signal.SIGKILL, 0, 0, 0)
    # The parent may have ended before the line above.
    if os.getppid() != parent:
        os._exit(1)


def fork_under_subreaper(forwarded: tuple[int, ...] = ()) -> int:
    """Fork. This process becomes the subreaper of the child and does not return; the child returns
    the pid of the subreaper, its parent.

    The subreaper waits for the child, kills all remaining descendants in any session, and ends the
    way the child ended. On SIGTERM, or when the parent thread of the subreaper ends, it kills all
    descendants and exits with code 1. It passes the signals `forwarded` on to the child, and closes
    all its descriptors from 3 on."""
    parent = os.getppid()
    handled = (signal.SIGTERM, *forwarded)
    signal.pthread_sigmask(signal.SIG_BLOCK, handled)
    libc.prctl(PR_SET_CHILD_SUBREAPER, 1, 0, 0, 0)
    libc.prctl(PR_SET_PDEATHSIG, signal.SIGTERM, 0, 0, 0)
    # The parent may have ended before the line above.
    if os.getppid() != parent:
        os._exit(1)
    subreaper = os.getpid()
    child = os.fork()
    if not child:
        end_with(subreaper)
        signal.pthread_sigmask(signal.SIG_UNBLOCK, handled)
        return subreaper

    def forward(number: int, _: object) -> None:
        with contextlib.suppress(ProcessLookupError):
            os.kill(child, number)

    signal.signal(signal.SIGTERM, on_terminate)
    for number in forwarded:
        signal.signal(number, forward)
    # Only the child may hold its sockets, so that their peers notice its end.
    os.closerange(3, 1 << 16)
    signal.pthread_sigmask(signal.SIG_UNBLOCK, handled)
    code = wait_for(child)
    end_descendants()
    if code < 0:
        # End by the child's signal, without a core dump of the subreaper.
        resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
        with contextlib.suppress(OSError):  # the handler of SIGKILL cannot be set
            signal.signal(-code, signal.SIG_DFL)
        os.kill(os.getpid(), -code)
    os._exit(exit_code(code))


def main() -> None:
    settings = json.loads(sys.argv[1])
    control = socket.socket(fileno=settings["control"])
    isolated, folder = settings["isolated"], settings["folder"]
    try:
        if isolated:
            bound_files(settings["file_mib"])
            # This is process 1, with whose end the kernel ends all others. The program runs in a
            # child, because process 1 ignores signals without a handler.
            if program := os.fork():
                control.close()
                os._exit(exit_code(wait_for(program)))
        else:
            subreaper = fork_under_subreaper()
        os.environ.pop("PWD", None)  # set by bubblewrap
        os.chdir(folder)
        limit(settings)
        if settings["user"] is not None:
            switch_user(settings["user"], folder)
        if not isolated:
            # Again, because the kernel forgets the signal when a process switches its user.
            end_with(subreaper)
        drop_capabilities()
        # Before Landlock and the filter, which the kernel otherwise refuses without privileges.
        called(libc.prctl(PR_SET_NO_NEW_PRIVS, 1, 0, 0, 0), "giving up privileges")
        if not isolated:
            restrict_with_landlock()
        refuse_calls(FAMILIES if isolated else ())
        # Until here, standard error was for failures of the isolation; the program's is discarded.
        with open(os.devnull, "wb") as nothing:
            os.dup2(nothing.fileno(), 2)
        control.sendall(b"ready\n")
        with control.makefile("rb") as file:
            source = file.read(*struct.unpack("!I", file.read(4))).decode()
    except BaseException as error:  # noqa: BLE001 - sandbox.py raises it
        control.sendall(f"failed {error}\n".encode())
        os._exit(1)
    control.close()
    # Python then ends as usual: it waits for threads and flushes the output.
    run(source)


if __name__ == "__main__":
    main()

"""Program inside a sandbox (sandbox.py starts it): completes the isolation, then runs its source.

    bubblewrap -> init, process 1 of the sandbox -> the program        isolation: namespaces
    subreaper -> the program                                           isolation: rlimits

It also holds `keep`, for any process whose descendants are to end with it.

It runs without this package and without site-packages. Invariants:
- nothing of the source runs before the isolation is complete; a part that cannot be set up is
  reported, and then nothing is run;
- the program has no capability, can gain none, and is a user of its own where root started it;
- what it holds in memory is in its address space or in its /tmp, both bounded: the kernel refuses
  it memory that is neither (`refuse_calls`), which no option of bubblewrap does;
- it reaches no port of this machine: it is in a network namespace of its own, or it has no socket
  except those of `socketpair`, which stay with their peer;
- when the program ends, every process it started ends with it.
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
MS_REMOUNT_FREE = 0x20 | 0x2 | 0x4  # remount, nosuid, nodev
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
"""System calls that hold memory outside of any address space, begin a namespace, in which a program
could mount some more, read the keys of the user who started it, or hold up its input and output."""
FAMILIES = (socket.AF_UNIX, socket.AF_INET, socket.AF_INET6)
"""Kinds of sockets in a network namespace, which others leave (AF_VSOCK, to the host of a virtual
machine)."""
SYS_SOCKET = {"x86_64": 41, "aarch64": 198}
SYS_SOCKETPAIR = {"x86_64": 53, "aarch64": 199}
CONNECTED = (socket.SOCK_STREAM, socket.SOCK_SEQPACKET)
"""Types of sockets of a pair that stay with their peer. One of datagrams sends to any Unix
socket."""
OF_SELF = {
    # setpriority; prlimit64, sched_setparam, sched_setscheduler, sched_setaffinity, sched_setattr
    "x86_64": {141: (16, 24), 302: (16,), 142: (16,), 144: (16,), 203: (16,), 314: (16,)},
    "aarch64": {140: (16, 24), 261: (16,), 118: (16,), 119: (16,), 122: (16,), 274: (16,)},
}
"""System calls that limit or slow down a process, and the places of the arguments that are 0 where
that is the caller."""
MOST_FILES = 4096
"""Limit of the number of files in /tmp: even an empty file takes memory that the size limit does
not count."""
SYS_CLONE = {"x86_64": 56, "aarch64": 220}
SYS_CLONE3 = 435
SYS_LANDLOCK_CREATE, SYS_LANDLOCK_ADD, SYS_LANDLOCK_RESTRICT = 444, 445, 446
LANDLOCK_VERSION, LANDLOCK_PATH_BENEATH = 1, 1
WRITE_FILE = 1 << 1
WRITES = WRITE_FILE | sum(1 << right for right in range(4, 13))
"""Landlock's rights to write, remove and make files of any kind."""
REFER, TRUNCATE = 1 << 13, 1 << 14
"""Rights that Landlock has since its versions 2 and 3."""
SCOPES = 0x1 | 0x2
"""Landlock, version 6: no abstract Unix socket and no signal reaches a process outside."""

libc = ctypes.CDLL(None, use_errno=True)


def called(result: int, what: str) -> None:
    if result != 0:
        number = ctypes.get_errno()
        raise OSError(number, f"{what}: {os.strerror(number)}")


def bound_files(folder_mib: int) -> None:
    """Bound the size and number of files of this sandbox's /tmp: bubblewrap bounds no number, and
    even an empty file takes memory."""
    options = f"size={folder_mib}m,nr_inodes={MOST_FILES}".encode()
    flags = ctypes.c_ulong(MS_REMOUNT_FREE)
    called(libc.mount(b"tmpfs", b"/tmp", b"tmpfs", flags, options), "bounding /tmp")
    os.chmod("/tmp", 0o1777)


def limit(settings: dict[str, Any]) -> None:
    limits = {
        resource.RLIMIT_CPU: settings["cpu_s"],
        resource.RLIMIT_AS: settings["memory_mib"] * 2**20,
        resource.RLIMIT_FSIZE: settings["file_mib"] * 2**20,
        # Without a user of its own, subreaper, bubblewrap and init count as well.
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
    """Refuse the calls of REFUSED, limits and priorities of other processes, and sockets except for
    `families` (without any, also pairs that may leave each other), with EPERM.

    A filter cannot read the flags of clone3, so that call does not exist here: the C library then
    uses clone, which is refused for a new namespace of users."""
    machine = os.uname().machine
    load, equal, at_least, any_of, both, answer = 0x20, 0x15, 0x35, 0x45, 0x54, 0x06
    allow, refuse, missing = 0x7FFF0000, 0x00050000 | errno.EPERM, 0x00050000 | errno.ENOSYS
    program = [
        (load, 0, 0, 4),  # the architecture
        (equal, 1, 0, AUDIT_ARCH[machine]),
        (answer, 0, 0, missing),
        (load, 0, 0, 0),  # the call
        (at_least, 0, 1, 0x40000000),  # of another interface of x86_64
        (answer, 0, 0, missing),
        (equal, 0, 1, SYS_CLONE3),
        (answer, 0, 0, missing),
    ]
    for call in REFUSED[machine]:
        program += [(equal, 0, 1, call), (answer, 0, 0, refuse)]
    if not families:
        program += [
            (equal, 0, len(CONNECTED) + 4, SYS_SOCKETPAIR[machine]),
            (load, 0, 0, 24),  # its type
            (both, 0, 0, 0xF),  # without flags
            *((equal, len(CONNECTED) - place, 0, int(one)) for place, one in enumerate(CONNECTED)),
            (answer, 0, 0, refuse),
            (answer, 0, 0, allow),
        ]
    program += [
        (equal, 0, len(families) + 3, SYS_SOCKET[machine]),
        (load, 0, 0, 16),  # its family
        *((equal, len(families) - place, 0, int(one)) for place, one in enumerate(families)),
        (answer, 0, 0, refuse),
        (answer, 0, 0, allow),
        (equal, 0, 4, SYS_CLONE[machine]),
        (load, 0, 0, 16),  # its flags
        (any_of, 0, 1, CLONE_NEWUSER),
        (answer, 0, 0, refuse),
        (answer, 0, 0, allow),
    ]
    for call, places in OF_SELF[machine].items():
        program.append((equal, 0, 3 * len(places) + 1, call))
        for place in places:
            program += [(load, 0, 0, place), (equal, 1, 0, 0), (answer, 0, 0, refuse)]
        program.append((answer, 0, 0, allow))
    program.append((answer, 0, 0, allow))
    code = ctypes.create_string_buffer(b"".join(struct.pack("HBBI", *one) for one in program))
    head = struct.pack("HxxxxxxP", len(program), ctypes.addressof(code))
    called(libc.prctl(PR_SET_SECCOMP, SECCOMP_MODE_FILTER, head, 0, 0), "refusing system calls")


def stay_here() -> bool:
    """Let this process and its descendants change files below the working directory alone and, from
    Linux 6.12 on, send signals to each other alone, by Landlock. Call it after PR_SET_NO_NEW_PRIVS.
    Return False if the kernel does not have Landlock."""
    version = libc.syscall(SYS_LANDLOCK_CREATE, None, 0, LANDLOCK_VERSION)
    if version < 1:
        return False
    handled = WRITES | (REFER if version >= 2 else 0) | (TRUNCATE if version >= 3 else 0)
    # An older kernel takes the longer structure as long as what it does not know is zero.
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


def become(user: int, folder: str) -> None:
    """Become a user that only this sandbox has, so that limits bind the program and it cannot end
    other processes; stay where there is no such user, as inside of a namespace of one. `folder`
    becomes that user's."""
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
        if error.errno != errno.EINVAL:
            raise
    for place, descriptor in library.items():
        if os.access(sys.path[place], os.R_OK | os.X_OK):
            os.close(descriptor)
        else:  # below a folder such as /root
            sys.path[place] = f"/proc/self/fd/{descriptor}"
            if not os.access(sys.path[place], os.R_OK | os.X_OK):
                raise OSError(errno.EACCES, "only root can read Python's library", sys.path[place])


def run(source: str) -> None:
    main = types.ModuleType("__main__")
    sys.modules["__main__"] = main
    sys.argv[:] = ["program.py"]
    exec(compile(source, "program.py", "exec"), main.__dict__)


def end_descendants() -> None:
    """All that this process, or the program it waited for, left behind: it adopts them, as their
    parents end."""
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


def give_up(*_: object) -> None:
    end_descendants()
    os._exit(1)


def wait_for(pid: int) -> int:
    """How the program ended, as a code of `os.waitstatus_to_exitcode`; adopted processes that end
    before it are passed over."""
    while True:
        ended, status = os.waitpid(-1, 0)
        if ended == pid:
            return os.waitstatus_to_exitcode(status)


def ends_within(process: int, seconds: float) -> bool:
    """Wait for the end of a process, given by its pidfd. Return False if it has not ended."""
    poll = select.poll()  # `select` takes no descriptor above 1023
    poll.register(process, select.POLLIN)
    return bool(poll.poll(1000 * seconds))


def exit_code(code: int) -> int:
    return code if code >= 0 else 128 - code


def keep(forwarded: tuple[int, ...] = ()) -> int:
    """Continues in a child. This process waits for the child and then kills all that is left of
    what it started, in whatever session, and ends as it did; so it does on SIGTERM, and when the
    thread that started it ends. Signals of `forwarded` go to the child. Returns its own process id,
    which is the child's parent. Call it before anything that must stay out of this process."""
    parent = os.getppid()
    handled = (signal.SIGTERM, *forwarded)
    signal.pthread_sigmask(signal.SIG_BLOCK, handled)
    libc.prctl(PR_SET_CHILD_SUBREAPER, 1, 0, 0, 0)
    libc.prctl(PR_SET_PDEATHSIG, signal.SIGTERM, 0, 0, 0)
    if os.getppid() != parent:
        os._exit(1)
    subreaper = os.getpid()
    child = os.fork()
    if not child:
        libc.prctl(PR_SET_PDEATHSIG, signal.SIGKILL, 0, 0, 0)
        signal.pthread_sigmask(signal.SIG_UNBLOCK, handled)
        if os.getppid() != subreaper:
            os._exit(1)
        return subreaper

    def forward(number: int, _: object) -> None:
        with contextlib.suppress(ProcessLookupError):
            os.kill(child, number)

    signal.signal(signal.SIGTERM, give_up)
    for number in forwarded:
        signal.signal(number, forward)
    os.closerange(3, 1 << 16)  # the child's, whose end the other end must notice
    signal.pthread_sigmask(signal.SIG_UNBLOCK, handled)
    code = wait_for(child)
    end_descendants()
    if code < 0:
        resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
        with contextlib.suppress(OSError):  # SIGKILL has no handler to take away
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
            # This is process 1, whose end ends all others: a program as process 1 would ignore
            # signals.
            if program := os.fork():
                control.close()
                os._exit(exit_code(wait_for(program)))
        else:
            keep()
        os.environ.pop("PWD", None)  # bubblewrap sets it
        os.chdir(folder)
        limit(settings)
        if settings["user"] is not None:
            become(settings["user"], folder)
        drop_capabilities()
        called(libc.prctl(PR_SET_NO_NEW_PRIVS, 1, 0, 0, 0), "giving up privileges")
        if not isolated:
            stay_here()
        refuse_calls(FAMILIES if isolated else ())
        # Until here, standard error takes the reason for a failure.
        with open(os.devnull, "wb") as nothing:
            os.dup2(nothing.fileno(), 2)
        control.sendall(b"ready\n")
        with control.makefile("rb") as file:
            source = file.read(*struct.unpack("!I", file.read(4))).decode()
    except BaseException as error:  # noqa: BLE001 - the starter raises it
        control.sendall(f"failed {error}\n".encode())
        os._exit(1)
    control.close()
    run(source)  # ends as every program: threads are waited for, output is written out


if __name__ == "__main__":
    main()

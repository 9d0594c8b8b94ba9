"""Python processes that begin with their imports done: a server imports modules once, and forks.

    requester --- arguments, environment, descriptors ---> server (has imported; one thread)
              <-- process id, and the exit code at its end --- | fork
                                                               +--> process

Imports take most of the CPU time of a start on a CPU: those of Megatron in each rank, those of vLLM
in an engine's actor and again in its core. A request is an interpreter's command line, and what comes
of it is what the interpreter would have done.

Invariants:
- the server has one thread and no CUDA context, so a fork of it is as good as a new process;
- a process ends with its requester and with the server, whatever it is doing: both kill it;
- where no server answers, the requester starts the interpreter itself: only time is lost. A request
  that another PYTHONPATH would change is refused;
- variables that libraries read when they are loaded are the server's, which has to be started with
  them. All others are the requester's.

This file imports only the standard library: as a program it is what Ray starts in the place of Python.
"""

from __future__ import annotations

import contextlib
import ctypes
import fcntl
import json
import os
import selectors
import shlex
import signal
import socket
import struct
import subprocess
import sys
import traceback
from collections.abc import Collection, Iterator, Mapping, MutableMapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal, cast

if TYPE_CHECKING:
    from multiprocessing.process import BaseProcess

Kind = Literal["ranks", "engines"]
VARIABLE = "MEGATRON_ASYNC_RL_PRELOADED_"
"""Prefix of the environment variables that hold the servers' addresses, by kind in capitals."""
PARENT = "MAR_ENGINE_PARENT"
"""Environment variable: process id of the engine actor, or of the process of vLLM that descends from
it (watchdog/processes.py)."""
PACKAGE = __name__.rpartition(".")[0].rpartition(".")[0]

_MOST_DESCRIPTORS = 253  # the kernel's limit for one message
_REQUEST_TIMEOUT_S = 30.0
_SEARCHED = ("PYTHONPATH", "LD_LIBRARY_PATH")
"""Variables by which imports find their files."""
_PR_SET_PDEATHSIG = 1
_FORWARDED = (signal.SIGTERM, signal.SIGINT, signal.SIGHUP)


class Process:
    """A process that the server forked; as much of `subprocess.Popen` as torchrun uses. It is killed
    when this object is dropped."""

    def __init__(self, connection: socket.socket, pid: int) -> None:
        self.pid = pid
        self.returncode: int | None = None
        self._connection = connection

    def poll(self) -> int | None:
        """Exit code, negative for a signal; None while the process runs."""
        return self.wait(0.0)

    def wait(self, timeout: float | None = None) -> int | None:
        """As `poll`, after at most `timeout` seconds (None: as long as it takes)."""
        if self.returncode is None:
            self._connection.settimeout(timeout)
            try:
                answer = self._connection.recv(4, socket.MSG_WAITALL)
            except (BlockingIOError, TimeoutError):
                return None
            except OSError:
                answer = b""
            # A server that is gone has taken its processes along.
            self.returncode = struct.unpack("i", answer)[0] if answer else -signal.SIGKILL
            self._connection.close()
        return self.returncode

    def send_signal(self, number: int) -> None:
        if self.poll() is None:
            with contextlib.suppress(ProcessLookupError):
                os.kill(self.pid, number)

    def terminate(self) -> None:
        self.send_signal(signal.SIGTERM)

    def kill(self) -> None:
        self.send_signal(signal.SIGKILL)


def address_of(kind: Kind) -> str | None:
    """Address of this process's server of `kind`; None where there is none."""
    return os.environ.get(f"{VARIABLE}{kind.upper()}")


def start(
    address: str | None,
    arguments: Sequence[str],
    environment: Mapping[str, str],
    descriptors: Sequence[int],
    *,
    new_session: bool = False,
) -> Process | None:
    """Start `python ARGUMENTS` from the server at `address`; None where no server takes the request.

    descriptors: those of this process that the new one has under the same numbers.
    """
    if address is None or len(descriptors) > _MOST_DESCRIPTORS:
        return None
    request = {
        "arguments": list(arguments),
        "environment": dict(environment),
        "folder": os.getcwd(),
        "descriptors": list(descriptors),
        "new_session": new_session,
    }
    connection = socket.socket(socket.AF_UNIX)
    try:
        _send(connection, address, request, descriptors)
        answer = connection.recv(4, socket.MSG_WAITALL)
    except OSError:
        answer = b""
    if len(answer) < 4:
        connection.close()
        return None
    return Process(connection, struct.unpack("i", answer)[0])


def started_by(address: str | None, requesters: Collection[int]) -> set[int]:
    """Return the processes that the server at `address` has forked for these, and for what it forked
    for them: they are children of the server."""
    if address is None:
        return set()
    with contextlib.suppress(OSError, ValueError), socket.socket(socket.AF_UNIX) as connection:
        _send(connection, address, {"started_by": list(requesters)}, ())
        with connection.makefile("rb") as answer:
            return set(json.load(answer))
    return set()


def _send(
    connection: socket.socket,
    address: str,
    request: Mapping[str, Any],
    descriptors: Sequence[int],
) -> None:
    content = json.dumps(request).encode("utf-8", "surrogateescape")
    connection.connect(address)
    socket.send_fds(connection, [struct.pack("I", len(content))], list(descriptors))
    connection.sendall(content)


def spawn_by_fork(kind: Kind) -> None:
    """Have `multiprocessing` take the processes that it would spawn from the server of `kind`, where
    there is one."""
    import io
    from multiprocessing import context as contexts
    from multiprocessing import popen_spawn_posix, reduction, resource_tracker, spawn
    from multiprocessing import util as utilities

    context, util = cast("Any", contexts), cast("Any", utilities)

    class Popen(cast("Any", popen_spawn_posix).Popen):  # type: ignore[misc]
        """`spawn`, but for the program that is executed."""

        _process: Process | None
        _fds: list[int]

        def _launch(self, process_obj: BaseProcess) -> None:
            tracker, content = resource_tracker.getfd(), io.BytesIO()
            context.set_spawning_popen(self)
            try:  # which collects the descriptors that it needs
                reduction.dump(spawn.get_preparation_data(process_obj.name), content)
                reduction.dump(process_obj, content)
            finally:
                context.set_spawning_popen(None)
            child_r, parent_w = os.pipe()
            parent_r, child_w = os.pipe()
            command = spawn.get_command_line(tracker_fd=tracker, pipe_handle=child_r)[1:]
            kept = {0, 1, 2, tracker, child_r, child_w, *self._fds}
            self._process = start(
                address_of(kind), command, os.environ, sorted(cast("set[int]", kept))
            )
            os.close(child_r)
            os.close(child_w)
            if self._process is None:
                os.close(parent_r)
                os.close(parent_w)
                self._fds = []
                super()._launch(process_obj)
                return
            self.pid = self._process.pid
            self.sentinel = parent_r
            self.finalizer = util.Finalize(self, util.close_fds, (parent_r, parent_w))
            with open(parent_w, "wb", closefd=False) as file:
                file.write(content.getbuffer())

        def poll(self, flag: int = os.WNOHANG) -> int | None:
            if self._process is None:
                return super().poll(flag)
            self.returncode = self._process.wait(0.0 if flag == os.WNOHANG else None)
            return self.returncode

    if address_of(kind) is not None:
        context.SpawnProcess._Popen = staticmethod(Popen)


def executable(kind: Kind) -> str | None:
    """Command, for a shell, that takes the place of `python` for a process of the server of `kind`;
    None where there is no server."""
    address = address_of(kind)
    if address is None:
        return None
    # UTF-8 mode, in which the server is, too: so the variables stay the same bytes.
    return shlex.join([sys.executable, "-X", "utf8", "-I", "-S", __file__, address])


@contextlib.contextmanager
def serving(
    kind: Kind,
    module: str,
    environment: MutableMapping[str, str],
    own: Mapping[str, str],
    folder: Path,
    log: Path,
) -> Iterator[int]:
    """Run a server of `kind` that imports `module`, and name it in `environment`, with which, and
    with `own`, it starts. Yields a descriptor: the server ends once no process holds it.

    folder: where its socket is. log: file for what the imports write.
    """
    address = str(folder / f"preloaded-{kind}")
    alive_r, alive_w = os.pipe()
    with socket.socket(socket.AF_UNIX) as listener, open(log, "wb") as file:
        listener.bind(address)
        # From here on requests wait for the imports.
        listener.listen(64)
        environment[f"{VARIABLE}{kind.upper()}"] = address
        numbers = [str(listener.fileno()), str(alive_r)]
        process = subprocess.Popen(
            [sys.executable, "-m", f"{PACKAGE}.watchdog.preloaded", "--serve", *numbers, module],
            stdin=subprocess.DEVNULL,
            stdout=file,
            stderr=subprocess.STDOUT,
            env={**environment, **own},
            pass_fds=(listener.fileno(), alive_r),
            start_new_session=True,
        )
    os.close(alive_r)
    try:
        yield alive_w
    finally:
        os.close(alive_w)
        process.kill()
        process.wait()


class Server:
    """Forks a process for each request at `listener`, until no process holds the other end of
    `alive`. `environment`: this process's before the imports, which may have changed it."""

    def __init__(self, listener: socket.socket, alive: int, environment: Mapping[str, str]) -> None:
        self._listener = listener
        self._alive = alive
        self._environment = environment
        self._running: dict[int, socket.socket] = {}
        """Connection of the requester of each process."""
        self._requesters: dict[int, int] = {}
        self._selector = selectors.DefaultSelector()
        self._woken, self._wake = os.pipe2(os.O_NONBLOCK | os.O_CLOEXEC)
        for file in (listener, alive, self._woken):
            self._selector.register(file, selectors.EVENT_READ)

    def serve(self) -> list[str] | None:
        """Return twice: in every new process its arguments, and in the server, at its end, None."""
        signal.signal(signal.SIGCHLD, lambda *_: None)
        signal.set_wakeup_fd(self._wake)
        while True:
            for key, _ in self._selector.select():
                if key.fileobj == self._alive:
                    return None
                if key.fileobj == self._woken:
                    os.read(self._woken, 4096)
                    self._report_ends()
                elif key.fileobj is not self._listener:
                    self._end(key.data)
                elif (arguments := self._accept()) is not None:
                    return arguments

    def _end(self, pid: int) -> None:
        """Kill a process whose requester has closed the connection: it sends nothing after its
        request."""
        if pid in self._running:  # not reported since the selection
            self._selector.unregister(self._running[pid])
            os.kill(pid, signal.SIGKILL)

    def _report_ends(self) -> None:
        while self._running:
            pid, status = os.waitpid(-1, os.WNOHANG)
            if not pid:
                return
            connection = self._running.pop(pid, None)
            if connection is None:  # a process that an import started
                continue
            del self._requesters[pid]
            with contextlib.suppress(KeyError):  # its requester is gone
                self._selector.unregister(connection)
            with contextlib.suppress(OSError):
                connection.sendall(struct.pack("i", os.waitstatus_to_exitcode(status)))
            connection.close()

    def _accept(self) -> list[str] | None:
        """Take the next request; returns its arguments in the new process."""
        connection, _ = self._listener.accept()
        connection.settimeout(_REQUEST_TIMEOUT_S)
        received: list[int] = []
        try:
            head, received, _, _ = socket.recv_fds(connection, 4, _MOST_DESCRIPTORS)
            (size,) = struct.unpack("I", head)
            content = connection.recv(size, socket.MSG_WAITALL)
            request = json.loads(content.decode("utf-8", "surrogateescape"))
            if "started_by" in request:
                found = self._started_by(set(request["started_by"]))
                connection.sendall(json.dumps(sorted(found)).encode())
            elif self._searches_alike(request["environment"]):
                if (arguments := self._fork(connection, request, received)) is not None:
                    return arguments
                received = []
        except (OSError, ValueError, struct.error):
            pass  # a requester that is gone, or none of this package's
        if connection not in self._running.values():
            connection.close()
        for number in received:
            os.close(number)
        return None

    def _started_by(self, requesters: set[int]) -> set[int]:
        found = {pid for pid, requester in self._requesters.items() if requester in requesters}
        return found | self._started_by(found) if found else found

    def _searches_alike(self, environment: Mapping[str, str]) -> bool:
        # A requester that is a fork itself has what the imports set.
        return all(
            environment.get(name) in (self._environment.get(name), os.environ.get(name))
            for name in _SEARCHED
        )

    def _fork(
        self, connection: socket.socket, request: Mapping[str, Any], received: Sequence[int]
    ) -> list[str] | None:
        """In the new process, its arguments."""
        credentials = connection.getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, 12)
        requester, server = struct.unpack("3i", credentials)[0], os.getpid()
        pid = os.fork()
        if pid:
            self._running[pid], self._requesters[pid] = connection, requester
            self._selector.register(connection, selectors.EVENT_READ, pid)
            for number in received:
                os.close(number)
            with contextlib.suppress(OSError):  # gone already, which is the next event
                connection.sendall(struct.pack("i", pid))
            return None

        try:
            ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)
            if os.getppid() != server:
                os._exit(1)
            connection.close()
            self._close()
            # As an import in the new process would have done.
            made = {
                name: value
                for name, value in os.environ.items()
                if self._environment.get(name) != value
            }
            _take_over(request, received, made, requester)
        except BaseException:  # noqa: BLE001 - the new process must not go on as a server
            traceback.print_exc()
            os._exit(1)
        return list(request["arguments"])

    def _close(self) -> None:
        signal.set_wakeup_fd(-1)
        self._selector.close()
        self._listener.close()
        for connection in self._running.values():
            connection.close()
        for number in (self._alive, self._woken, self._wake):
            os.close(number)


def _take_over(
    request: Mapping[str, Any], received: Sequence[int], made: Mapping[str, str], requester: int
) -> None:
    """Make this new process what the requester would have started. `made`: variables that the
    imports set."""
    signal.signal(signal.SIGCHLD, signal.SIG_DFL)
    if request["new_session"]:
        os.setsid()
    else:  # a signal to its group must not reach the server
        os.setpgid(0, 0)
    # First out of the way of each other's numbers.
    free = 1 + max([*received, *request["descriptors"]], default=0)
    above = [fcntl.fcntl(number, fcntl.F_DUPFD_CLOEXEC, free) for number in received]
    for number in received:
        os.close(number)
    for source, number in zip(above, request["descriptors"], strict=True):
        os.dup2(source, number)
        os.close(source)
    os.chdir(request["folder"])
    os.environ.clear()
    os.environ.update({**made, **request["environment"]})
    if os.environ.get(PARENT) == str(requester):
        # The server ends this process with its requester; its children are its own.
        os.environ[PARENT] = str(os.getpid())
    if (numpy := sys.modules.get("numpy")) is not None:
        # Python reseeds its own generator.
        numpy.random.seed()


def run(arguments: Sequence[str]) -> None:
    """Do what `python ARGUMENTS` does."""
    import runpy
    import types

    left = list(arguments)
    while left and left[0].startswith("-") and left[0] not in ("-c", "-m"):
        option = left.pop(0)
        if option in ("-X", "-W"):
            left.pop(0)
        elif option == "-u":
            for stream in (sys.stdout, sys.stderr):
                stream.reconfigure(write_through=True)  # type: ignore[union-attr]
    kind = left.pop(0) if left[0] in ("-c", "-m") else ""
    what = left.pop(0)
    sys.argv = [kind or what, *left]
    sys.orig_argv = [sys.executable, *arguments]
    main = types.ModuleType("__main__")
    if kind == "-m":
        sys.path[0] = os.getcwd()
        sys.modules.pop(what, None)  # imported before, and to be run as a program
        runpy.run_module(what, run_name="__main__", alter_sys=True)
        return
    if kind == "-c":
        sys.path[0] = ""
        code = compile(what, "<string>", "exec")
    else:
        sys.path[0] = os.path.dirname(os.path.realpath(what))
        main.__file__ = what
        code = compile(Path(what).read_bytes(), what, "exec")
    sys.modules["__main__"] = main
    exec(code, main.__dict__)


def _serve(listener: int, alive: int, module: str) -> None:
    import gc
    import importlib
    import warnings

    environment = dict(os.environ)
    importlib.import_module(module)
    # Python warns of other threads, but pyarrow's one is its allocator's, which stops for a fork.
    warnings.filterwarnings("ignore", ".*multi-threaded, use of fork", DeprecationWarning)
    gc.collect()
    # Neither the server nor its forks look through what was imported, and they go on sharing it.
    gc.freeze()
    sys.stdout.flush()
    sys.stderr.flush()
    arguments = Server(socket.socket(fileno=listener), alive, environment).serve()
    if arguments is None:
        # What was imported may have exit handlers; processes of the server have run theirs.
        os._exit(0)
    run(arguments)


def _replace(address: str, arguments: Sequence[str]) -> None:
    """Stand in the place of `python ARGUMENTS`: start it from the server and end as it does."""
    mask = signal.pthread_sigmask(signal.SIG_BLOCK, _FORWARDED)
    descriptors = [int(name) for name in os.listdir("/proc/self/fd")]
    held = [number for number in descriptors if _is_open(number)]
    process = start(address, arguments, os.environ, held)
    if process is None:
        signal.pthread_sigmask(signal.SIG_SETMASK, mask)
        os.execv(sys.executable, [sys.executable, *arguments])

    def forward(number: int, _: object) -> None:
        # Not by `send_signal`, whose poll would change the wait that this interrupts.
        with contextlib.suppress(ProcessLookupError):
            os.kill(process.pid, number)

    for number in _FORWARDED:
        signal.signal(number, forward)
    signal.pthread_sigmask(signal.SIG_SETMASK, mask)
    code = process.wait()
    if code is not None and code < 0:
        if -code in _FORWARDED:
            signal.signal(-code, signal.SIG_DFL)
        os.kill(os.getpid(), -code)
    os._exit(code or 0)


def _is_open(number: int) -> bool:
    try:
        os.fstat(number)
    except OSError:  # it was the descriptor of the listing
        return False
    return True


if __name__ == "__main__":
    if sys.argv[1] == "--serve":
        _serve(int(sys.argv[2]), int(sys.argv[3]), sys.argv[4])
    else:
        _replace(sys.argv[1], sys.argv[2:])

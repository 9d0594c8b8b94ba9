"""Server that imports a module once, and forks a process for each request (watchdog/preloaded.py).

    python -m megatron_async_rl.watchdog.fork_server LISTENER ALIVE MODULE

LISTENER and ALIVE are descriptors: a socket for requests, and a pipe whose other end keeps the
server alive.

Invariant: the server has one thread and no CUDA context, so its forks are equivalent to new
processes.
"""

from __future__ import annotations

import contextlib
import ctypes
import fcntl
import gc
import importlib
import json
import os
import runpy
import selectors
import signal
import socket
import struct
import sys
import traceback
import types
import warnings
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from megatron_async_rl.watchdog.preloaded import MAX_DESCRIPTORS, PARENT

_REQUEST_TIMEOUT_S = 30.0
_SEARCHED = ("PYTHONPATH", "LD_LIBRARY_PATH")
"""Variables that contain search paths of imports."""
_PR_SET_PDEATHSIG = 1


class Server:
    """Fork server at `listener`, which serves until no process holds the other end of `alive`.
    `environment`: this process's environment before the imports, which may have changed it."""

    def __init__(self, listener: socket.socket, alive: int, environment: Mapping[str, str]) -> None:
        self._listener = listener
        self._alive = alive
        self._environment = environment
        self._running: dict[int, socket.socket] = {}
        """Connection to the requester of each process."""
        self._requesters: dict[int, int] = {}
        self._selector = selectors.DefaultSelector()
        self._woken, self._wake = os.pipe2(os.O_NONBLOCK | os.O_CLOEXEC)
        for file in (listener, alive, self._woken):
            self._selector.register(file, selectors.EVENT_READ)

    def serve(self) -> list[str] | None:
        """Return in every new process its arguments, and in the server, at its end, None."""
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
        """Kill a process whose requester has closed the connection; a requester sends nothing after
        its request."""
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
            with contextlib.suppress(KeyError):  # its requester has ended
                self._selector.unregister(connection)
            with contextlib.suppress(OSError):
                connection.sendall(struct.pack("i", os.waitstatus_to_exitcode(status)))
            connection.close()

    def _accept(self) -> list[str] | None:
        """Accept the next request; return its arguments in the new process."""
        connection, _ = self._listener.accept()
        connection.settimeout(_REQUEST_TIMEOUT_S)
        received: list[int] = []
        try:
            head, received, _, _ = socket.recv_fds(connection, 4, MAX_DESCRIPTORS)
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
            pass  # the requester has ended, or is not of this package
        if connection not in self._running.values():
            connection.close()
        for number in received:
            os.close(number)
        return None

    def _started_by(self, requesters: set[int]) -> set[int]:
        found = {pid for pid, requester in self._requesters.items() if requester in requesters}
        return found | self._started_by(found) if found else found

    def _searches_alike(self, environment: Mapping[str, str]) -> bool:
        # The environment of a requester that is itself a fork has the values set by the imports.
        return all(
            environment.get(name) in (self._environment.get(name), os.environ.get(name))
            for name in _SEARCHED
        )

    def _fork(
        self, connection: socket.socket, request: Mapping[str, Any], received: Sequence[int]
    ) -> list[str] | None:
        """Fork for `request`; return its arguments in the new process, and None in the server."""
        credentials = connection.getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, 12)
        requester, server = struct.unpack("3i", credentials)[0], os.getpid()
        pid = os.fork()
        if pid:
            self._running[pid], self._requesters[pid] = connection, requester
            self._selector.register(connection, selectors.EVENT_READ, pid)
            for number in received:
                os.close(number)
            with contextlib.suppress(OSError):  # the requester has ended: the next event
                connection.sendall(struct.pack("i", pid))
            return None

        try:
            ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)
            if os.getppid() != server:
                os._exit(1)
            connection.close()
            self._close()
            # Imports in the new process would have set these.
            made = {
                name: value
                for name, value in os.environ.items()
                if self._environment.get(name) != value
            }
            _take_over(request, received, made, requester)
        except BaseException:  # noqa: BLE001 - the new process must not continue as a server
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
    """Set up this new process with the requester's environment, folder and descriptors. `made`:
    variables that the imports set."""
    signal.signal(signal.SIGCHLD, signal.SIG_DFL)
    if request["new_session"]:
        os.setsid()
    else:  # a signal to the requester's group must not reach the server
        os.setpgid(0, 0)
    # Received numbers may equal requested ones, so duplicate all of them above the range first.
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
        # The server ends this process with its requester, and the children end with this process.
        os.environ[PARENT] = str(os.getpid())
    if (numpy := sys.modules.get("numpy")) is not None:
        # Python reseeds its own generator, but not NumPy's.
        numpy.random.seed()


def run(arguments: Sequence[str]) -> None:
    """Run the program that `python ARGUMENTS` would run."""
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
        sys.modules.pop(what, None)  # imported before, but must run as a program
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


def main(listener: int, alive: int, module: str) -> None:
    environment = dict(os.environ)
    importlib.import_module(module)
    # The warning does not apply: pyarrow's allocator has a thread, which it stops for a fork.
    warnings.filterwarnings("ignore", ".*multi-threaded, use of fork", DeprecationWarning)
    gc.collect()
    # The collector would write to, and so copy, memory that the server shares with its forks.
    gc.freeze()
    sys.stdout.flush()
    sys.stderr.flush()
    arguments = Server(socket.socket(fileno=listener), alive, environment).serve()
    if arguments is None:
        # Skip the exit handlers of the imports, which are meant for the forks.
        os._exit(0)
    run(arguments)


if __name__ == "__main__":
    main(int(sys.argv[1]), int(sys.argv[2]), sys.argv[3])

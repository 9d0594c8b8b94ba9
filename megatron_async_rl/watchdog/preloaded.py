"""Processes from a fork server that has done their imports (watchdog/fork_server.py).

    requester --- arguments, environment, descriptors ---> server (has imported; one thread)
              <-- process id, and the exit code at its end --- | fork
                                                               +--> process

On a CPU, imports take most of the CPU time of a start: Megatron's in each rank, vLLM's in an
engine's actor and again in its core. A request is the command line of an interpreter, and the
process does what the interpreter would do.

Invariants:
- a process ends with its requester, because the server kills it, and with the server, because the
  kernel does;
- if no server answers, or if PYTHONPATH differs, the requester starts the interpreter itself: only
  time is lost;
- a library that reads a variable when it is loaded reads the server's value; otherwise a process
  has the environment of its requester.

This file imports only the standard library, because Ray starts it as a program instead of Python.
"""

from __future__ import annotations

import contextlib
import json
import os
import select
import shlex
import signal
import socket
import struct
import subprocess
import sys
from collections.abc import Collection, Iterator, Mapping, MutableMapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal, cast

if TYPE_CHECKING:
    from multiprocessing.process import BaseProcess

ForkServerKind = Literal["ranks", "engines"]
VARIABLE = "MEGATRON_ASYNC_RL_PRELOADED_"
"""Prefix of the environment variables that contain the servers' addresses; the kind in capitals
follows."""
PARENT = "MAR_ENGINE_PARENT"
"""See `watchdog.processes.PARENT`."""
PACKAGE = __name__.rpartition(".")[0].rpartition(".")[0]

ANSWER_S = 5.0
"""Time limit for the answer of a server that may have ended."""
MAX_DESCRIPTORS = 253
"""Limit of the kernel for one message."""
_FORWARDED = (signal.SIGTERM, signal.SIGINT, signal.SIGHUP)


class Process:
    """Process that the server forked, with the methods of `subprocess.Popen` that torchrun uses.
    The server kills the process when this object is garbage collected."""

    def __init__(self, connection: socket.socket, pid: int) -> None:
        self.pid = pid
        self.returncode: int | None = None
        self._connection = connection

    def fileno(self) -> int:
        """Return the descriptor that becomes readable at the end of the process."""
        return self._connection.fileno()

    def poll(self) -> int | None:
        """Return the exit code, negative for a signal; None while the process runs."""
        return self.wait(0.0)

    def wait(self, timeout: float | None = None) -> int | None:
        """Wait for up to `timeout` seconds (None: no limit); return the result of `poll`."""
        if self.returncode is None:
            # 0.0 makes the socket non-blocking, which is `poll`.
            self._connection.settimeout(timeout)
            try:
                answer = self._connection.recv(4, socket.MSG_WAITALL)
            except (BlockingIOError, TimeoutError):
                return None
            except OSError:
                answer = b""
            # If the server has ended, its processes have, too.
            self.returncode = struct.unpack("i", answer)[0] if answer else -signal.SIGKILL
            self._connection.close()
        return self.returncode

    def send_signal(self, number: int) -> None:
        # The id of an ended process may already belong to another process.
        if self.poll() is None:
            with contextlib.suppress(ProcessLookupError):
                os.kill(self.pid, number)

    def terminate(self) -> None:
        self.send_signal(signal.SIGTERM)

    def kill(self) -> None:
        self.send_signal(signal.SIGKILL)


def address_of(kind: ForkServerKind) -> str | None:
    """Return the address of this process's server of `kind`; None if there is none."""
    return os.environ.get(f"{VARIABLE}{kind.upper()}")


def start(
    address: str | None,
    arguments: Sequence[str],
    environment: Mapping[str, str],
    descriptors: Sequence[int],
    *,
    new_session: bool = False,
) -> Process | None:
    """Fork a process that runs `python ARGUMENTS` from the server at `address`. Returns None if no
    server accepts the request.

    descriptors: descriptors of this process that the new one inherits, with the same numbers.
    """
    # The caller then starts an interpreter instead.
    if address is None or len(descriptors) > MAX_DESCRIPTORS:
        return None
    request = {
        "arguments": list(arguments),
        # The whole environment, because the server has the environment of its own start.
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
    # The server refused, or ended between accept and fork.
    if len(answer) < 4:
        connection.close()
        return None
    return Process(connection, struct.unpack("i", answer)[0])


def started_by(address: str | None, requesters: Collection[int]) -> set[int]:
    """Return the ids of the processes that the server at `address` has forked for `requesters`,
    directly or indirectly."""
    if address is None:
        return set()
    with contextlib.suppress(OSError, ValueError), socket.socket(socket.AF_UNIX) as connection:
        _send(connection, address, {"started_by": list(requesters)}, ())
        with connection.makefile("rb") as answer:
            return set(json.load(answer))
    return set()


def has_ended(kind: ForkServerKind) -> bool:
    """Return True if this process has the address of a server of `kind` that has ended."""
    address = address_of(kind)
    if address is None:
        return False
    with socket.socket(socket.AF_UNIX) as connection:
        connection.settimeout(ANSWER_S)
        try:
            # Wait for an answer: the kernel ends the forked processes with the server's main
            # thread, but the socket accepts connections until its other threads have ended.
            _send(connection, address, {"started_by": []}, ())
            return not connection.recv(1)
        # A server that is busy with its imports, or stopped, answers later.
        except TimeoutError:
            return False
        except OSError:
            return True


def _send(
    connection: socket.socket,
    address: str,
    request: Mapping[str, Any],
    descriptors: Sequence[int],
) -> None:
    content = json.dumps(request).encode("utf-8", "surrogateescape")
    connection.connect(address)
    # Descriptors are sent with the length, so the server owns them before it reads the rest.
    socket.send_fds(connection, [struct.pack("I", len(content))], list(descriptors))
    connection.sendall(content)


def spawn_by_fork(kind: ForkServerKind) -> None:
    """Make `multiprocessing` fork from the server of `kind`, if there is one, instead of
    spawning."""
    import io
    from multiprocessing import context as contexts
    from multiprocessing import popen_spawn_posix, reduction, resource_tracker, spawn
    from multiprocessing import util as utilities

    context, util = cast("Any", contexts), cast("Any", utilities)

    class Popen(cast("Any", popen_spawn_posix).Popen):  # type: ignore[misc]
        """Start method `spawn`, with a fork of the server instead of a new interpreter."""

        _process: Process | None
        _fds: list[int]

        def _launch(self, process_obj: BaseProcess) -> None:
            # The tracker must exist before the fork, which inherits its descriptor.
            tracker, content = resource_tracker.getfd(), io.BytesIO()
            context.set_spawning_popen(self)
            try:  # this dump collects the descriptors that the child needs
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
            # The child has a copy; while this one is open, the child never reads the end of input.
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


def executable(kind: ForkServerKind) -> str | None:
    """Return the shell command that replaces `python` for processes of the server of `kind`, or
    None if there is no server."""
    address = address_of(kind)
    if address is None:
        return None
    # In UTF-8 mode, like the server, so that the bytes of variables do not change.
    return shlex.join([sys.executable, "-X", "utf8", "-I", "-S", __file__, address])


@contextlib.contextmanager
def serving(
    kind: ForkServerKind,
    module: str,
    environment: MutableMapping[str, str],
    own: Mapping[str, str],
    folder: Path,
    log: Path,
) -> Iterator[int]:
    """Run a server of `kind` that imports `module`; `environment` has its address while it runs.
    Yields a descriptor: the server ends once no process holds it.

    own: variables of the server in addition to `environment`. folder: folder of its socket. log:
    file for the output of the imports.
    """
    address = str(folder / f"preloaded-{kind}")
    alive_r, alive_w = os.pipe()
    with socket.socket(socket.AF_UNIX) as listener, open(log, "wb") as file:
        # Bound before the server starts, so that every requester finds the address.
        listener.bind(address)
        # From here on requests wait until the imports are done.
        listener.listen(64)
        variable = f"{VARIABLE}{kind.upper()}"
        environment[variable] = address
        numbers = [str(listener.fileno()), str(alive_r)]
        process = subprocess.Popen(
            [sys.executable, "-m", f"{PACKAGE}.watchdog.fork_server", *numbers, module],
            stdin=subprocess.DEVNULL,
            stdout=file,
            stderr=subprocess.STDOUT,
            env={**environment, **own},
            pass_fds=(listener.fileno(), alive_r),
            start_new_session=True,
        )
    # The server must be the only reader, because closing the other end ends it.
    os.close(alive_r)
    try:
        yield alive_w
    finally:
        # A later process must not request forks of a server that has ended.
        environment.pop(variable, None)
        os.close(alive_w)
        # The kernel ends its forks with it.
        process.kill()
        process.wait()


def _replace(address: str, arguments: Sequence[str]) -> None:
    """Run `python ARGUMENTS` in a fork of the server, and end like that process."""
    # A signal before the handlers are set would end this process but not the fork.
    mask = signal.pthread_sigmask(signal.SIG_BLOCK, _FORWARDED)
    descriptors = [int(name) for name in os.listdir("/proc/self/fd")]
    held = [number for number in descriptors if _is_open(number)]
    process = start(address, arguments, os.environ, held)
    if process is None:
        signal.pthread_sigmask(signal.SIG_SETMASK, mask)
        os.execv(sys.executable, [sys.executable, *arguments])

    def forward(number: int, _: object) -> None:
        # Not `send_signal`, whose poll would change the wait that this handler interrupts.
        with contextlib.suppress(ProcessLookupError):
            os.kill(process.pid, number)

    for number in _FORWARDED:
        signal.signal(number, forward)
    # Python runs handlers between system calls: without the descriptor, a signal just before a
    # blocking call would wait for the call's end.
    woken, waker = os.pipe()
    for end in (woken, waker):
        os.set_blocking(end, False)
    signal.set_wakeup_fd(waker, warn_on_full_buffer=False)
    signal.pthread_sigmask(signal.SIG_SETMASK, mask)
    while (code := process.poll()) is None:
        select.select([process.fileno(), woken], [], [])
        with contextlib.suppress(BlockingIOError):
            os.read(woken, 1024)
    # End by the same signal, so that the parent sees the same end as of an interpreter.
    if code < 0:
        if -code in _FORWARDED:
            signal.signal(-code, signal.SIG_DFL)
        os.kill(os.getpid(), -code)
    os._exit(code)


def _is_open(number: int) -> bool:
    try:
        os.fstat(number)
    except OSError:  # the descriptor of the listing itself
        return False
    return True


if __name__ == "__main__":
    _replace(sys.argv[1], sys.argv[2:])

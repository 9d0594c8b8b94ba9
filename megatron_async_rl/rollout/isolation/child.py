"""Processes that run user code: the server that forks them, and the loop of calls in each process.

    supervisor --start, show, kill--> server --fork--> subreaper --fork--> process of user code
        ^  ^                            |                                     |
        |  +----------- ended ----------+                                     |
        +------------- calls and replies, a socket for each process ----------+

Invariants:
- a process loads the user's function before it reads the first call, so an import never counts
  against the time limit of a call. With `preload` the server imports the function once, and the
  start of a process takes milliseconds;
- after the import the server calls no user code, so it always responds. It holds the pidfd of every
  living subreaper, and reports how each subreaper ended;
- a subreaper adopts all descendants of its process, in any session or process group, and ends only
  after all of them;
- a plain function is called in the main thread while no event loop is running, so it may run its
  own loop and set signal handlers. It may return an awaitable, which the loop runs while the
  process waits for further calls;
- the memory limit applies from the first call on;
- replies are JSON: the supervisor unpickles no data from user code. Output of user code goes to the
  engine's output, and so does its stack on SIGUSR1, even while it holds the interpreter lock;
- all processes end with the engine; a process also ends when its socket closes.
"""

from __future__ import annotations

import asyncio
import faulthandler
import functools
import importlib
import inspect
import json
import os
import pickle
import resource
import select
import signal
import socket
import struct
import sys
import time
import traceback
from collections.abc import Awaitable, Callable, Mapping
from contextlib import suppress
from dataclasses import dataclass, field
from typing import Any, NoReturn

from megatron_async_rl.rollout.isolation.sandboxed import ends_within, fork_under_subreaper
from megatron_async_rl.watchdog.processes import PARENT, die_with_parent

LENGTH = struct.Struct("!I")
"""Format of the prefix of a call or reply, which is its length in bytes."""
MAX_MESSAGE_BYTES = 2**16
"""Maximum size of a command to the server or of a report from it; each is one datagram."""
MAX_ERROR_CHARACTERS = 4000
"""Maximum length of an exception's text."""
KILL_TIMEOUT_S = 5.0
"""Time limit for a subreaper to end its descendants; afterwards the server kills it."""

MAIN = (
    "import json, sys; settings = json.loads(sys.argv[1]); sys.path[:] = settings.pop('path');"
    f" from {__name__} import serve_commands; serve_commands(**settings)"
)
"""Program of the server. `path`: module path of the engine, so that server and engine import the
same modules."""


@dataclass(frozen=True)
class LoadedCode:
    """User code that is ready for calls. `function`: takes the payload of a call, and returns a
    JSON value or an awaitable of one. `facts`: properties for the owner of the supervisor."""

    function: Callable[[Any], Any]
    facts: Mapping[str, Any] = field(default_factory=dict)


def framed(payload: bytes) -> bytes:
    """Return a call or reply with its prefix."""
    return LENGTH.pack(len(payload)) + payload


def described(error: BaseException) -> str:
    """Return the type and text of an exception. A text of more than MAX_ERROR_CHARACTERS is cut,
    and characters that UTF-8 cannot encode are escaped."""
    text = str(error)
    if len(text) > MAX_ERROR_CHARACTERS:
        text = f"{text[:MAX_ERROR_CHARACTERS]}... ({len(text)} characters)"
    text = text.encode(errors="backslashreplace").decode()
    return type(error).__name__ + (f": {text}" if text else "")


def serve_commands(
    loader: str,
    arguments: Mapping[str, Any],
    preload: bool,
    memory_mib: int | None,
    descriptor: int,
) -> None:
    """Run the server. `loader`: `module:function` of this package that takes `arguments` and
    returns LoadedCode. `preload`: load it in the server instead of in each process. `memory_mib`:
    maximum address space of a process. `descriptor`: descriptor of a SOCK_SEQPACKET socket."""
    die_with_parent()
    # A process that user code starts must not hold the socket open.
    os.set_inheritable(descriptor, False)
    module, _, name = loader.partition(":")
    with socket.socket(fileno=descriptor) as control:
        try:
            load = functools.cache(
                functools.partial(getattr(importlib.import_module(module), name), **arguments)
            )
            if preload:
                load()
        except BaseException as error:
            _report(control, {"failed": described(error)})
            raise
        _report(control, {"imported": True})
        resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
        _ForkingServer(control, load, memory_mib).run()


def _report(control: socket.socket, message: Mapping[str, Any]) -> None:
    # The supervisor has closed its end of the socket; ConnectionResetError: with unread reports.
    with suppress(BrokenPipeError, ConnectionResetError):
        control.send(json.dumps(message).encode())


class _ForkingServer:
    """Server that forks processes of user code, and follows the commands of one supervisor."""

    def __init__(
        self, control: socket.socket, load: Callable[[], LoadedCode], memory_mib: int | None
    ) -> None:
        self._control, self._load, self._memory_mib = control, load, memory_mib
        self._subreapers: dict[int, int] = {}
        """Number of a process -> pidfd of its subreaper. Unlike a pid, a pidfd never refers to a
        later process."""
        self._deadlines: dict[int, float] = {}
        """Number of a process that must end -> monotonic time at which its subreaper is killed."""
        self._poll = select.poll()
        self._poll.register(control, select.POLLIN)

    def run(self) -> None:
        """Follow commands until the supervisor closes its socket, then kill every process."""
        try:
            while True:
                ready = {one for one, _ in self._poll.poll(500 if self._deadlines else None)}
                self._report_ended(ready)
                if self._control.fileno() in ready and not self._follow_command():
                    return
                self._kill_overdue()
        finally:
            # SIGTERM first, so that each subreaper can end its descendants.
            for number in self._subreapers:
                self._signal(number, signal.SIGTERM)
            for number, subreaper in self._subreapers.items():
                if not ends_within(subreaper, KILL_TIMEOUT_S):
                    self._signal(number, signal.SIGKILL)

    def _follow_command(self) -> bool:
        """Read and follow one command. Return False once the supervisor has closed its socket."""
        try:
            message, descriptors, _, _ = socket.recv_fds(self._control, MAX_MESSAGE_BYTES, 1)
        except ConnectionResetError:  # the supervisor closed its socket with unread reports
            return False
        if not message:
            return False
        command, number = json.loads(message)
        if command == "start" and not descriptors:
            # The kernel drops a descriptor that would exceed this process's limit of open files.
            _report(self._control, {"ended": number, "how": "could not be started: no socket"})
        elif command == "start":
            self._start(number, descriptors[0])
        # A process that has already ended has no entry.
        elif number in self._subreapers:
            self._signal(number, signal.SIGUSR1 if command == "show" else signal.SIGTERM)
            if command == "kill":
                self._deadlines.setdefault(number, time.monotonic() + KILL_TIMEOUT_S)
        return True

    def _start(self, number: int, descriptor: int) -> None:
        """Fork a process. `descriptor`: socket for its calls and replies."""
        # The fork copies the buffer; unflushed output would be written twice.
        sys.stdout.flush()
        pid = None
        try:
            pid = os.fork()
            if pid == 0:
                self._become_process(descriptor)
            subreaper = os.pidfd_open(pid)
        except OSError as error:
            # Without a pidfd, this server would not learn that the process ended.
            if pid is not None:
                os.kill(pid, signal.SIGKILL)
                os.waitpid(pid, 0)
            _report(self._control, {"ended": number, "how": f"could not be started: {error}"})
            return
        finally:
            # Only the process may hold the socket, so that the supervisor sees it close.
            os.close(descriptor)
        self._subreapers[number] = subreaper
        self._poll.register(subreaper, select.POLLIN)

    def _report_ended(self, ready: set[int]) -> None:
        for number in [one for one, subreaper in self._subreapers.items() if subreaper in ready]:
            subreaper = self._subreapers.pop(number)
            self._deadlines.pop(number, None)
            self._poll.unregister(subreaper)
            ended = os.waitid(os.P_PIDFD, subreaper, os.WEXITED)
            os.close(subreaper)
            assert ended is not None
            how = f"ended with code {ended.si_status}"
            if ended.si_code != os.CLD_EXITED:
                how = f"was ended by {signal.Signals(ended.si_status).name}"
            _report(self._control, {"ended": number, "how": how})

    def _kill_overdue(self) -> None:
        """Kill the subreapers whose deadline has passed."""
        for number, deadline in list(self._deadlines.items()):
            if time.monotonic() >= deadline:
                self._signal(number, signal.SIGKILL)
                del self._deadlines[number]

    def _signal(self, number: int, what: signal.Signals) -> None:
        with suppress(ProcessLookupError):
            signal.pidfd_send_signal(self._subreapers[number], what)

    def _become_process(self, descriptor: int) -> NoReturn:
        """Turn this fork of the server into a subreaper and its process of user code."""
        code = 1
        try:
            os.environ[PARENT] = str(fork_under_subreaper((signal.SIGUSR1,)))
            os.setsid()
            self._control.close()
            for subreaper in self._subreapers.values():
                os.close(subreaper)
            faulthandler.register(signal.SIGUSR1, all_threads=False)
            # A received descriptor is inheritable: a program that user code starts could write to
            # the socket, or hold it open.
            os.set_inheritable(descriptor, False)
            with socket.socket(fileno=descriptor) as connection:
                self._serve(connection)
            code = 0
        except BaseException:  # noqa: BLE001 - the process must not return into the server's loop
            traceback.print_exc()
        finally:
            with suppress(BaseException):
                sys.stdout.flush()
                sys.stderr.flush()
            # Skip exit handlers: the server's must not run here, and user code's may block.
            os._exit(code)

    def _serve(self, connection: socket.socket) -> None:
        """Load the user's function, limit the memory, report `ready`, and serve calls."""
        try:
            loaded = self._load()
        except BaseException as error:
            connection.sendall(_encoded({"failed": described(error)}))
            raise
        # After the load, so that an import does not count against the limit.
        if self._memory_mib is not None:
            _, hard = resource.getrlimit(resource.RLIMIT_AS)
            maximum = self._memory_mib * 2**20
            soft = maximum if hard == resource.RLIM_INFINITY else min(maximum, hard)
            resource.setrlimit(resource.RLIMIT_AS, (soft, hard))
        connection.sendall(_encoded({"ready": {**loaded.facts, "pid": os.getpid()}}))
        _CallLoop(connection, loaded.function).run()


class _CallLoop:
    """Loop that reads and runs the calls of one process. Several awaitables may be pending at a
    time."""

    def __init__(self, connection: socket.socket, function: Callable[[Any], Any]) -> None:
        self._connection, self._function = connection, function
        self._pid = os.getpid()
        self._tasks: dict[int, asyncio.Task[None]] = {}
        """Number of a call -> its pending awaitable. A cancelled call has no entry."""

    def run(self) -> None:
        """Serve calls until the supervisor closes the socket."""
        # Never closed: `close` would wait for a task that ignores its cancellation.
        runner = asyncio.Runner()
        self._reader, self._writer = runner.run(_streams(self._connection))
        while (received := runner.run(self._read())) is not None:
            number, *payload = pickle.loads(received)
            if not payload:
                self._cancel(number)
                continue
            try:
                # Outside of the event loop, because a plain function may run a loop of its own.
                result = self._function(*payload)
            except BaseException as error:  # noqa: BLE001 - user code, `sys.exit` included
                self._send({"call": number, "error": described(error)})
                continue
            if inspect.isawaitable(result):
                work = self._settle(number, result)
                self._tasks[number] = runner.get_loop().create_task(work)
            else:
                self._send_result(number, result)

    async def _read(self) -> bytes | None:
        try:
            (length,) = LENGTH.unpack(await self._reader.readexactly(LENGTH.size))
            return await self._reader.readexactly(length)
        except asyncio.IncompleteReadError:
            return None

    async def _settle(self, number: int, result: Awaitable[Any]) -> None:
        try:
            settled = await result
        except BaseException as error:  # noqa: BLE001 - user code, `sys.exit` included
            # A cancelled call has already had its reply.
            if number in self._tasks:
                self._send({"call": number, "error": described(error)})
        else:
            if number in self._tasks:
                self._send_result(number, settled)
        self._tasks.pop(number, None)

    def _cancel(self, number: int) -> None:
        # Reply at once: user code may delay or ignore the cancellation.
        if (task := self._tasks.pop(number, None)) is not None:
            task.cancel()
            self._send({"call": number, "cancelled": True})

    def _send_result(self, number: int, result: Any) -> None:
        try:
            reply = _encoded({"call": number, "result": result})
        except Exception as error:  # noqa: BLE001 - user code returned a value that is not JSON
            reply = _encoded({"call": number, "error": described(error)})
        self._write(reply)

    def _send(self, message: Mapping[str, Any]) -> None:
        self._write(_encoded(message))

    def _write(self, reply: bytes) -> None:
        # User code forked, and its child returned here, too. Only the parent replies.
        if os.getpid() != self._pid:
            os._exit(0)
        self._writer.write(reply)


def _encoded(message: Mapping[str, Any]) -> bytes:
    return framed(json.dumps(message).encode())


async def _streams(
    connection: socket.socket,
) -> tuple[asyncio.StreamReader, asyncio.StreamWriter]:
    return await asyncio.open_connection(sock=connection)

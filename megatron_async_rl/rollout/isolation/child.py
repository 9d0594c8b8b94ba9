"""Processes that run user code: the server that forks them, and the loop of calls in each.

    supervisor --start, show, kill--> server --fork--> subreaper --fork--> process of user code
        ^  ^                            |                                     |
        |  +----------- ended ----------+                                     |
        +------------- calls and replies, a socket for each process ----------+

Invariants:
- a process loads the user's function before it reads the first call, so an import never counts
  against the time limit of a call. With `preload` the server imports it once, and starting a
  process takes milliseconds;
- the server calls no user code after the import, so it always answers; it alone knows which
  subreapers are alive, and reports how each ended;
- a subreaper adopts everything that its process started, in any session or group, and ends only
  after all of it;
- a plain function is called in the main thread while no event loop runs, so it may run its own loop
  and set signal handlers; what it returns may be awaitable, and the loop runs on between calls;
- limits on memory apply from the first call on;
- replies are JSON: the supervisor unpickles nothing that user code wrote. What user code prints
  goes where the engine's output goes, and so does its stack on SIGUSR1, even while it holds the
  interpreter lock;
- everything ends with the engine, and with the sockets.
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

from megatron_async_rl.rollout.isolation.sandboxed import ends_within, keep
from megatron_async_rl.watchdog.processes import PARENT, die_with_parent

LENGTH = struct.Struct("!I")
"""Prefix of a call or reply: its length in bytes."""
LONGEST_ORDER = 2**16
"""Maximum bytes of a message to or from the server, which one datagram holds."""
LONGEST_ERROR = 4000
"""Maximum characters of an exception's text."""
KILL_S = 5.0
"""Time limit for a subreaper to end its descendants, after which it is killed."""

MAIN = (
    "import json, sys; settings = json.loads(sys.argv[1]); sys.path[:] = settings.pop('path');"
    f" from {__name__} import serve_orders; serve_orders(**settings)"
)
"""Program of the server. `path`: the engine's module path, so that both find the same modules."""


@dataclass(frozen=True)
class LoadedCode:
    """User code that is ready to be called. `function` takes the payload of a call and returns
    what JSON can hold, or an awaitable of it. `facts`: properties for the supervisor's owner."""

    function: Callable[[Any], Any]
    facts: Mapping[str, Any] = field(default_factory=dict)


def framed(payload: bytes) -> bytes:
    return LENGTH.pack(len(payload)) + payload


def described(error: BaseException) -> str:
    """Return the type and text of an exception, shortened, and with what UTF-8 cannot encode
    escaped."""
    text = str(error)
    if len(text) > LONGEST_ERROR:
        text = f"{text[:LONGEST_ERROR]}... ({len(text)} characters)"
    text = text.encode(errors="backslashreplace").decode()
    return type(error).__name__ + (f": {text}" if text else "")


def serve_orders(
    loader: str,
    arguments: Mapping[str, Any],
    preload: bool,
    memory_mib: int | None,
    descriptor: int,
) -> None:
    """Run the server. `loader`: `module:function` of this package that takes `arguments` and
    returns LoadedCode. `descriptor`: descriptor of a SOCK_SEQPACKET socket."""
    die_with_parent()
    os.set_inheritable(descriptor, False)  # nothing that user code starts may hold it open
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
    # The supervisor has closed its side; reset: with reports that it had not read.
    with suppress(BrokenPipeError, ConnectionResetError):
        control.send(json.dumps(message).encode())


class _ForkingServer:
    def __init__(
        self, control: socket.socket, load: Callable[[], LoadedCode], memory_mib: int | None
    ) -> None:
        self._control, self._load, self._memory_mib = control, load, memory_mib
        self._subreapers: dict[int, int] = {}
        """Number of a process -> pidfd of its subreaper. Unlike a pid, a pidfd never refers to
        another process."""
        self._deadlines: dict[int, float] = {}
        """Number of a process -> time at which its subreaper is killed unless it has ended."""
        self._poll = select.poll()
        self._poll.register(control, select.POLLIN)

    def run(self) -> None:
        """Follow orders until the supervisor closes its socket, then kill every process."""
        try:
            while True:
                ready = {one for one, _ in self._poll.poll(500 if self._deadlines else None)}
                self._report_ended(ready)
                if self._control.fileno() in ready and not self._follow_order():
                    return
                self._kill_late()
        finally:
            for number in self._subreapers:
                self._signal(number, signal.SIGTERM)
            for number, subreaper in self._subreapers.items():
                if not ends_within(subreaper, KILL_S):
                    self._signal(number, signal.SIGKILL)

    def _follow_order(self) -> bool:
        try:
            message, descriptors, _, _ = socket.recv_fds(self._control, LONGEST_ORDER, 1)
        except ConnectionResetError:  # it closed its side with reports that it had not read
            return False
        if not message:
            return False
        order, number = json.loads(message)
        if order == "start" and not descriptors:
            # The kernel drops what it cannot pass where the limit of open files is reached.
            _report(self._control, {"ended": number, "how": "could not be started: no socket"})
        elif order == "start":
            self._start(number, descriptors[0])
        elif number in self._subreapers:  # otherwise it has ended meanwhile
            self._signal(number, signal.SIGUSR1 if order == "show" else signal.SIGTERM)
            if order == "kill":
                self._deadlines.setdefault(number, time.monotonic() + KILL_S)
        return True

    def _start(self, number: int, descriptor: int) -> None:
        sys.stdout.flush()  # a fork would write what is buffered a second time
        pid = None
        try:
            pid = os.fork()
            if pid == 0:
                self._become_process(descriptor)
            subreaper = os.pidfd_open(pid)
        except OSError as error:
            # Without a descriptor for it, the end of the process could not be seen.
            if pid is not None:
                os.kill(pid, signal.SIGKILL)
                os.waitpid(pid, 0)
            _report(self._control, {"ended": number, "how": f"could not be started: {error}"})
            return
        finally:
            # The process alone holds the socket, so its end is visible at the other side.
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

    def _kill_late(self) -> None:
        for number, deadline in list(self._deadlines.items()):
            if time.monotonic() >= deadline:
                self._signal(number, signal.SIGKILL)
                del self._deadlines[number]

    def _signal(self, number: int, what: signal.Signals) -> None:
        with suppress(ProcessLookupError):
            signal.pidfd_send_signal(self._subreapers[number], what)

    def _become_process(self, descriptor: int) -> NoReturn:
        code = 1
        try:
            os.environ[PARENT] = str(keep((signal.SIGUSR1,)))
            os.setsid()
            self._control.close()
            for subreaper in self._subreapers.values():
                os.close(subreaper)
            faulthandler.register(signal.SIGUSR1, all_threads=False)
            # A descriptor that was received is inheritable: a command of user code could write
            # into the socket, or hold it open.
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
            # No exit handlers: they belong to the server, and user code may block them.
            os._exit(code)

    def _serve(self, connection: socket.socket) -> None:
        try:
            loaded = self._load()
        except BaseException as error:
            connection.sendall(_encoded({"failed": described(error)}))
            raise
        if self._memory_mib is not None:
            _, hard = resource.getrlimit(resource.RLIMIT_AS)
            maximum = self._memory_mib * 2**20
            soft = maximum if hard == resource.RLIM_INFINITY else min(maximum, hard)
            resource.setrlimit(resource.RLIMIT_AS, (soft, hard))
        connection.sendall(_encoded({"ready": {**loaded.facts, "pid": os.getpid()}}))
        _CallLoop(connection, loaded.function).run()


class _CallLoop:
    """The calls of one process. Several awaitables may be pending at a time."""

    def __init__(self, connection: socket.socket, function: Callable[[Any], Any]) -> None:
        self._connection, self._function = connection, function
        self._own = os.getpid()
        self._tasks: dict[int, asyncio.Task[None]] = {}

    def run(self) -> None:
        """Return once the supervisor has closed the socket."""
        runner = asyncio.Runner()  # not closed: a task that ignores its end would hold it up
        self._reader, self._writer = runner.run(_opened(self._connection))
        while (received := runner.run(self._read())) is not None:
            number, *payload = pickle.loads(received)
            if not payload:
                self._cancel(number)
                continue
            try:
                # Outside of the loop: a plain function may run a loop of its own.
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
            if number in self._tasks:  # otherwise it was cancelled, and its reply was sent then
                self._send({"call": number, "error": described(error)})
        else:
            if number in self._tasks:
                self._send_result(number, settled)
        self._tasks.pop(number, None)

    def _cancel(self, number: int) -> None:
        # The call may take its time to end, or refuse to: nothing waits for it.
        if (task := self._tasks.pop(number, None)) is not None:
            task.cancel()
            self._send({"call": number, "cancelled": True})

    def _send_result(self, number: int, result: Any) -> None:
        try:
            reply = _encoded({"call": number, "result": result})
        except Exception as error:  # noqa: BLE001 - a value of user code
            reply = _encoded({"call": number, "error": described(error)})
        self._write(reply)

    def _send(self, message: Mapping[str, Any]) -> None:
        self._write(_encoded(message))

    def _write(self, reply: bytes) -> None:
        if os.getpid() != self._own:
            os._exit(0)  # user code forked and let the child return: the parent replies
        self._writer.write(reply)


def _encoded(message: Mapping[str, Any]) -> bytes:
    return framed(json.dumps(message).encode())


async def _opened(
    connection: socket.socket,
) -> tuple[asyncio.StreamReader, asyncio.StreamWriter]:
    return await asyncio.open_connection(sock=connection)

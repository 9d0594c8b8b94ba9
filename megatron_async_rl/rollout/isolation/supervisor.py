"""Supervisor of the processes that run one user function, for an event loop.

    owner -> Supervisor.process() -> UserProcess.call(payload) -> result, or UserCodeError

Owners are the pools of rewards and of environments, agents included; child.py runs in the
processes.

Invariants:
- the event loop never blocks until a process starts, replies or ends;
- every call ends at most a few seconds after its time limit, even if user code blocks. A process
  whose plain function exceeds the limit is killed, because code that holds the interpreter lock
  cannot be interrupted. A late awaitable is cancelled first, and its process is killed if it does
  not confirm;
- a CPU limit applies to CPU time, so a busy machine cannot turn a correct answer into a wrong one.
  A reply that arrived in time counts, even if the event loop reads it later;
- a process ends with all its descendants, and all processes end with the supervisor.
"""

from __future__ import annotations

import asyncio
import itertools
import json
import math
import os
import pickle
import socket
import subprocess
import sys
from collections import deque
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any, cast

import psutil

from megatron_async_rl.rollout.isolation.child import LENGTH, MAIN, MAX_MESSAGE_BYTES, framed
from megatron_async_rl.watchdog import watch
from megatron_async_rl.watchdog.processes import PARENT

START_S = 300.0
"""Time limit for the import of user code."""
CANCEL_S = 5.0
"""Time limit for a process to confirm the cancellation of a call; afterwards it is killed."""
READ_S = 0.1
"""Time for which the event loop may read replies that arrived while it was busy."""
SHOW_S = 0.2
"""Time for which a process may write its stack before it is killed."""
EXIT_S = 1.0
"""Time limit for the server to kill its processes, for a process to end after its socket closed,
and for the socket to close after its process ended."""


class UserCodeError(Exception):
    """A call has no result. The text is the reason, such as an exception of user code."""

    shared = False
    """True if other calls were pending in the process, so that one of them may be the cause."""


class OutOfTime(UserCodeError):
    """The time limit of the call has passed."""


class OutOfProcessorTime(UserCodeError):
    """The process reached the CPU time limit of the call."""


class UserProcessEnded(UserCodeError):
    """The process ended during the call."""


class UserCodeStartError(Exception):
    """User code could not be imported, or its process could not be started."""


@dataclass(frozen=True, kw_only=True)
class UserCode:
    """User code of a supervisor. `loader`: `module:function` of this package that takes `arguments`
    (JSON) and returns child.LoadedCode. `preload`: load the code once, in the server that forks the
    processes, instead of in each process. `memory_mib`: maximum address space of a process.
    `environment`: additional environment variables."""

    loader: str
    arguments: Mapping[str, Any]
    preload: bool = False
    memory_mib: int | None = None
    environment: Mapping[str, str] = field(default_factory=dict)


class _PendingCall:
    """A call without a reply yet. `activity`: reported to the watchdog until the call ends."""

    def __init__(self, activity: watch.doing) -> None:
        self.result: asyncio.Future[Any] = asyncio.get_running_loop().create_future()
        self.activity = activity
        self.timer: asyncio.TimerHandle | None = None
        self.deadline = 0.0
        """Time limit, on the clock of the event loop."""
        self.cpu_until_s: float | None = None
        """CPU time of the process at which the call exceeds its limit; None: no limit."""
        self.timer_fired = self.cancelled = False


class UserProcess(asyncio.Protocol):
    """One process and its calls.

    `on_ready`: called once the process accepts calls. `on_end`: called once the process and all its
    descendants have ended, with the reason.
    """

    def __init__(
        self,
        supervisor: Supervisor,
        number: int,
        on_ready: Callable[[UserProcess], None],
        on_end: Callable[[UserProcess, str], None],
    ) -> None:
        self.number = number
        self.calls: dict[int, _PendingCall] = {}
        self.facts: Mapping[str, Any] = {}
        """Properties that the process reported: LoadedCode.facts and its `pid`."""
        self.ready = self.killed = False
        self._supervisor, self._on_ready, self._on_end = supervisor, on_ready, on_end
        self._loop = asyncio.get_running_loop()
        self._received = bytearray()
        self._numbers = itertools.count(1)
        self._transport: asyncio.WriteTransport | None = None
        self._open = True
        """False once the socket was read to its end, or the process was killed."""
        self._timer: asyncio.TimerHandle | None = None
        self._failure: str | None = None
        self._how: str | None = None
        self._finished = False

    @property
    def pid(self) -> int:
        """Process id. Available once the process is ready."""
        return int(self.facts["pid"])

    def call(
        self,
        payload: Any,
        *,
        activity: watch.doing,
        timeout_s: float,
        cpu_limit_s: float | None = None,
    ) -> asyncio.Future[Any]:
        """Start a call and return the future of its result, which may raise UserCodeError.
        `activity`: reported to the watchdog until the call ends. `cpu_limit_s`: limit on the CPU
        time of the process during the call."""
        assert self._transport is not None
        number = next(self._numbers)
        content = framed(pickle.dumps((number, payload), pickle.HIGHEST_PROTOCOL))
        self.calls[number] = call = _PendingCall(activity)
        activity.__enter__()
        call.deadline = self._loop.time() + timeout_s
        if cpu_limit_s is not None:
            call.cpu_until_s = self._cpu_s() + cpu_limit_s
            # A single thread cannot reach the CPU limit earlier than this.
            timeout_s = min(timeout_s, cpu_limit_s)
        self._set_timer(number, timeout_s)
        self._transport.write(content)
        return call.result

    def kill(self, *, show: bool = False) -> None:
        """Kill the process. `show`: let it first write its stack into the engine's log."""
        if self.killed and show:
            return
        self.killed = True
        self._clear_timers()
        if show:
            self._supervisor.send_command("show", self.number)
            self._timer = self._loop.call_later(SHOW_S, self.kill)
            return
        self._supervisor.send_command("kill", self.number)
        self._close_socket()
        self._finish()

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        # A cast, not `isinstance`: Ray uses uvloop, whose transports are not asyncio's classes.
        self._transport = cast(asyncio.WriteTransport, transport)
        if not self._open:
            self._transport.abort()
            return
        # The limit counts from now: the loop may have been blocked for minutes by vLLM's start.
        self._timer = self._loop.call_later(START_S, self._did_not_start)

    def data_received(self, data: bytes) -> None:
        self._received += data
        while len(self._received) >= LENGTH.size:
            end = LENGTH.size + LENGTH.unpack_from(self._received)[0]
            if len(self._received) < end:
                return
            message = json.loads(self._received[LENGTH.size : end])
            del self._received[:end]
            # After a kill, the calls fail even if a reply arrives.
            if not self.killed:
                self._on_message(message)

    def connection_lost(self, error: Exception | None) -> None:
        self._open = False
        self._finish()
        if not self.killed:
            # The process receives no other call. Usually it is about to end, and how it ended is
            # the best reason to report; if it does not end in time, it is killed.
            self.killed = True
            self._clear_timers()
            self._timer = self._loop.call_later(EXIT_S, self.kill)

    def ended(self, how: str, failure: str | None = None) -> None:
        """Record that the process ended. `how`: the way it ended. `failure`: reason of a failed
        start. Replies before the end of its socket may still be unread."""
        self._how, self._failure = how, self._failure or failure
        self._finish()
        if not self._finished:
            # A descendant that the subreaper could not end may hold the socket open forever.
            self._loop.call_later(EXIT_S, self._abandon_soon, how)

    def _abandon_soon(self, how: str) -> None:
        # The loop may have been busy until now: let it read the last replies first.
        self._loop.call_later(READ_S, self.abandon, how)

    def _finish(self) -> None:
        """Fail pending calls and call `on_end`, once the process has ended and its socket is
        closed."""
        if self._how is None or self._open or self._finished:
            return
        self._finished = self.killed = True
        self._clear_timers()
        self._fail_all(UserProcessEnded(self._how))
        self._on_end(self, self._failure or f"it {self._how}")

    def abandon(self, how: str, failure: str | None = None) -> None:
        """Close the socket of a process that has ended, or whose server has ended."""
        self._close_socket()
        self.ended(how, failure)

    def _on_message(self, message: dict[str, Any]) -> None:
        if "failed" in message:
            self._failure = message["failed"]
        elif "ready" in message:
            if self._timer is not None:
                self._timer.cancel()
            self.facts, self.ready = message["ready"], True
            self._on_ready(self)
        elif message["call"] in self.calls:
            call = self._done(message["call"])
            if "error" in message:
                _fail(call.result, UserCodeError(message["error"]))
            elif "cancelled" in message:
                _fail(call.result, OutOfTime("no reply in time"))
            # The waiting task may have been cancelled, which resolves the future first.
            elif not call.result.done():
                call.result.set_result(message["result"])

    def _did_not_start(self) -> None:
        self._failure = f"it was not imported within {START_S:g} s"
        self.kill()

    def _out_of_time(self, number: int) -> None:
        """Handle the timer of a call: wait again, cancel the call, or kill the process."""
        call = self.calls[number]
        if not call.timer_fired:
            # If the loop was busy until now, the reply may be waiting: uvloop runs timers before it
            # reads. Read first, and decide at the next timer.
            call.timer_fired = True
            self._set_timer(number, READ_S)
            return

        remaining_s = call.deadline - self._loop.time()
        cpu_remaining_s = 0.0 if call.cpu_until_s is None else call.cpu_until_s - self._cpu_s()
        if remaining_s > 0 and cpu_remaining_s > 0:
            call.timer_fired = False
            self._set_timer(number, min(remaining_s, cpu_remaining_s))
        elif call.cpu_until_s is not None and cpu_remaining_s <= 0:
            # The CPU limit has priority: both may have passed while the loop was busy, and the
            # response is then a wrong answer, not an error.
            self._fail_all(OutOfProcessorTime("the limit on CPU time was reached"))
            self.kill()
        elif self.facts.get("concurrent") and not call.cancelled:
            assert self._transport is not None
            call.cancelled = True
            self._set_timer(number, CANCEL_S)
            self._transport.write(framed(pickle.dumps((number,))))
        else:
            self._fail_all(OutOfTime("no reply in time"))
            self.kill(show=True)

    def _cpu_s(self) -> float:
        """Return the CPU time of the process so far, in seconds; infinite if it has ended."""
        try:
            times = psutil.Process(self.pid).cpu_times()
        except psutil.Error:
            return math.inf
        return float(times.user + times.system)

    def _done(self, number: int) -> _PendingCall:
        """Remove a call and end its activity. The caller resolves its future."""
        call = self.calls.pop(number)
        if call.timer is not None:
            call.timer.cancel()
        call.activity.__exit__()
        return call

    def _fail_all(self, error: UserCodeError) -> None:
        error.shared = len(self.calls) > 1
        for number in list(self.calls):
            _fail(self._done(number).result, error)

    def _set_timer(self, number: int, seconds: float) -> None:
        call = self.calls[number]
        if call.timer is not None:
            call.timer.cancel()
        call.timer = self._loop.call_later(seconds, self._out_of_time, number)

    def _clear_timers(self) -> None:
        for timer in (self._timer, *(call.timer for call in self.calls.values())):
            if timer is not None:
                timer.cancel()

    def _close_socket(self) -> None:
        """Close this end of the socket: a daemon of user code may hold the other end open
        forever."""
        self._open = False
        if self._transport is not None:
            self._transport.abort()


class Supervisor:
    """Server of one user function and the processes that it forked, for one event loop."""

    def __init__(self, code: UserCode) -> None:
        self._code = code
        self._numbers = itertools.count()
        self._processes: dict[int, UserProcess] = {}
        self._server: subprocess.Popen[bytes] | None = None
        self._control: socket.socket | None = None
        self._imported: asyncio.Future[None] | None = None
        self._commands: deque[tuple[bytes, socket.socket | None]] = deque()
        """Commands that wait until the server's socket accepts them, each with the socket that it
        passes on."""
        self._connecting: set[asyncio.Task[Any]] = set()

    def start(self) -> None:
        """Start the server. Raises OSError."""
        self._loop = asyncio.get_running_loop()
        local, remote = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        settings = {
            "loader": self._code.loader,
            "arguments": dict(self._code.arguments),
            "preload": self._code.preload,
            "memory_mib": self._code.memory_mib,
            "descriptor": remote.fileno(),
            "path": sys.path,
        }
        try:
            self._server = subprocess.Popen(
                [sys.executable, "-c", MAIN, json.dumps(settings)],
                stdin=subprocess.DEVNULL,
                pass_fds=[remote.fileno()],
                env={**os.environ, **self._code.environment, PARENT: str(os.getpid())},
                start_new_session=True,  # the launcher alone handles Ctrl-C
            )
        except OSError:
            local.close()
            raise
        finally:
            remote.close()
        local.setblocking(False)
        self._control = local
        self._imported = self._loop.create_future()
        self._loop.add_reader(local, self._read_report)

    async def imported(self) -> None:
        """Return once the server has started and, with `preload`, imported the user's function.
        Raises UserCodeStartError."""
        assert self._imported is not None
        try:
            async with asyncio.timeout(START_S):
                await asyncio.shield(self._imported)
        except TimeoutError:
            raise UserCodeStartError(f"it was not imported within {START_S:g} s") from None

    def process(
        self,
        on_ready: Callable[[UserProcess], None],
        on_end: Callable[[UserProcess, str], None],
    ) -> UserProcess:
        """Start a process and return it before it is ready. Raises OSError."""
        if self._server is not None and self._server.poll() is not None:
            self._lose_server()
        if self._control is None:
            self.start()
        local, remote = socket.socketpair()
        process = UserProcess(self, next(self._numbers), on_ready, on_end)
        self._processes[process.number] = process
        self.send_command("start", process.number, remote)
        connecting = self._loop.create_connection(lambda: process, sock=local)
        task = self._loop.create_task(connecting)
        # The event loop holds tasks weakly: without this reference, it might be garbage-collected.
        self._connecting.add(task)
        task.add_done_callback(self._connecting.discard)
        return process

    def send_command(self, command: str, number: int, passed: socket.socket | None = None) -> None:
        """Send a command about process `number` to the server. `passed`: socket to pass on, which
        is then closed here."""
        self._commands.append((json.dumps([command, number]).encode(), passed))
        self._send_commands()

    def close(self) -> None:
        """End all processes and the server."""
        self._abandon("was ended with its supervisor")
        if self._server is not None:
            try:
                self._server.wait(EXIT_S)
            except subprocess.TimeoutExpired:  # the server is still importing
                self._server.kill()
                self._server.wait()

    def _send_commands(self) -> None:
        """Send the commands that the server's socket accepts now. The event loop sends the rest
        once the socket is writable."""
        while self._commands and self._control is not None:
            payload, passed = self._commands[0]
            descriptors = [] if passed is None else [passed.fileno()]
            try:
                socket.send_fds(self._control, [payload], descriptors)
            except BlockingIOError:
                self._loop.add_writer(self._control, self._send_commands)
                return
            except OSError:  # the server has ended, and its processes with it
                break
            self._commands.popleft()
            if passed is not None:
                passed.close()
        if self._control is not None:
            self._loop.remove_writer(self._control)
        self._drop_commands()

    def _drop_commands(self) -> None:
        """Drop commands that no server will read. A process that such a command would have started
        sees its socket close."""
        for _, passed in self._commands:
            if passed is not None:
                passed.close()
        self._commands.clear()

    def _read_report(self) -> None:
        assert self._control is not None
        assert self._imported is not None
        try:
            message = self._control.recv(MAX_MESSAGE_BYTES)
        except BlockingIOError:
            return
        except OSError:
            message = b""
        if not message:
            self._lose_server()
            return
        report = json.loads(message)
        if "failed" in report:
            _fail(self._imported, UserCodeStartError(report["failed"]))
        elif "imported" in report:
            self._imported.set_result(None)
        else:
            process = self._processes.pop(report["ended"], None)
            if process is not None:
                process.ended(report["how"])

    def _lose_server(self) -> None:
        """Abandon the processes of a server that has ended. The next process starts a new
        server."""
        self._abandon("was ended with its server")

    def _abandon(self, how: str) -> None:
        """Disconnect from the server, which then kills its processes. `how`: the way they ended."""
        self._drop_commands()
        if self._control is not None:
            self._loop.remove_reader(self._control)
            self._loop.remove_writer(self._control)
            self._control.close()
            self._control = None
        failure = None
        if self._imported is not None:
            _fail(self._imported, UserCodeStartError("its server ended; see the engine's log"))
            error = self._imported.exception()
            failure = None if error is None else str(error)
        processes, self._processes = self._processes, {}
        for process in processes.values():
            process.abandon(how, failure)


def _fail(future: asyncio.Future[Any], error: Exception) -> None:
    if not future.done():
        future.set_exception(error)
        # Mark the exception as retrieved: without a waiting task, asyncio would log it.
        future.exception()

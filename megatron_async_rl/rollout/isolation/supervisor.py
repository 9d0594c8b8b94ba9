"""Supervisor of the processes that run one user function, as an event loop sees them.

    owner -> Supervisor.process() -> UserProcess.call(payload) -> result, or UserCodeError

Rewards, environments and agents are its owners; child.py is the other side.

Invariants:
- the event loop never waits for a process: to start, to answer or to end;
- every call ends within its time limit and a few seconds, whatever user code does: a plain function
  that does not answer is killed, because code that holds the interpreter lock cannot be requested
  to stop; a call of a process with several is cancelled first, and the process is killed if it does
  not confirm;
- a limit on processor time is checked by processor time, so a loaded machine makes no right answer
  wrong; a reply that came in time counts, however late the event loop reads it;
- a process ends with everything that it started, and all of them end with the supervisor.
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

from megatron_async_rl.rollout.isolation.child import LENGTH, LONGEST_ORDER, MAIN, framed
from megatron_async_rl.watchdog import watch
from megatron_async_rl.watchdog.processes import PARENT

START_S = 300.0
"""Longest time to import user code."""
CANCEL_S = 5.0
"""Longest time for a process to confirm that it cancelled a call: after it, its loop is stuck."""
READ_S = 0.1
"""Time for the event loop to read what came while it was busy."""
SHOW_S = 0.2
"""Time for a process to write its stack before it is killed."""
EXIT_S = 1.0
"""Time for the server to kill its processes, and for a process to end after its socket did, or the
socket after its process."""


class UserCodeError(Exception):
    """A call without a result: user code raised, or one of the subclasses. The text is the
    reason."""

    shared = False
    """True if other calls were pending in the process, which may be at fault instead."""


class OutOfTime(UserCodeError):
    """The time limit of the call has passed."""


class OutOfProcessorTime(UserCodeError):
    """The process has used the call's limit on processor time."""


class UserProcessEnded(UserCodeError):
    """The process has ended in the call."""


class UserCodeStartError(Exception):
    """User code could not be imported, or the process for it not started."""


@dataclass(frozen=True, kw_only=True)
class UserCode:
    """The user code of a supervisor. `loader`: `module:function` of this package, called with
    `arguments` (JSON) in the process; it returns child.LoadedCode. `preload`: import it once, in
    the server that forks the processes. `environment`: more environment variables."""

    loader: str
    arguments: Mapping[str, Any]
    preload: bool = False
    memory_mib: int | None = None
    environment: Mapping[str, str] = field(default_factory=dict)


class _PendingCall:
    def __init__(self, activity: watch.doing) -> None:
        self.result: asyncio.Future[Any] = asyncio.get_running_loop().create_future()
        self.activity = activity
        self.timer: asyncio.TimerHandle | None = None
        self.deadline = 0.0
        self.cpu_until_s: float | None = None
        self.over = self.cancelled = False


class UserProcess(asyncio.Protocol):
    """One process and its calls.

    `on_ready` is called once it can take calls, and `on_end`, with the way it ended, once it and
    all that it started are gone.
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
        """Properties that the loader reported."""
        self.ready = self.killed = False
        self._supervisor, self._on_ready, self._on_end = supervisor, on_ready, on_end
        self._loop = asyncio.get_running_loop()
        self._received = bytearray()
        self._numbers = itertools.count(1)
        self._transport: asyncio.WriteTransport | None = None
        self._open = True
        """False once the process's end of its socket has been read, or the process was killed."""
        self._timer: asyncio.TimerHandle | None = None
        self._failure: str | None = None
        self._how: str | None = None
        self._finished = False

    @property
    def pid(self) -> int:
        """Process id, once the process is ready."""
        return int(self.facts["pid"])

    def call(
        self,
        payload: Any,
        *,
        activity: watch.doing,
        timeout_s: float,
        cpu_limit_s: float | None = None,
    ) -> asyncio.Future[Any]:
        """Return the future result of a call; it may raise UserCodeError. `activity`: shown until
        the call ends."""
        assert self._transport is not None
        number = next(self._numbers)
        content = framed(pickle.dumps((number, payload), pickle.HIGHEST_PROTOCOL))
        self.calls[number] = call = _PendingCall(activity)
        activity.__enter__()
        call.deadline = self._loop.time() + timeout_s
        if cpu_limit_s is not None:
            call.cpu_until_s = self._cpu_s() + cpu_limit_s
            timeout_s = min(timeout_s, cpu_limit_s)
        self._set_timer(number, timeout_s)
        self._transport.write(content)
        return call.result

    def kill(self, *, show: bool = False) -> None:
        """End the process. `show`: it first writes its stack into the engine's log."""
        if self.killed and show:
            return
        self.killed = True
        self._clear_timers()
        if show:
            self._supervisor.order("show", self.number)
            self._timer = self._loop.call_later(SHOW_S, self.kill)
            return
        self._supervisor.order("kill", self.number)
        self._close_socket()
        self._finish()

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        # No `isinstance`: the transports of uvloop, which Ray uses, are not asyncio's classes.
        self._transport = cast(asyncio.WriteTransport, transport)
        if not self._open:
            self._transport.abort()
            return
        # From now, not from the start: while vLLM starts the loop may not run for minutes.
        self._timer = self._loop.call_later(START_S, self._did_not_start)

    def data_received(self, data: bytes) -> None:
        self._received += data
        while len(self._received) >= LENGTH.size:
            end = LENGTH.size + LENGTH.unpack_from(self._received)[0]
            if len(self._received) < end:
                return
            message = json.loads(self._received[LENGTH.size : end])
            del self._received[:end]
            # A reply from before the process was killed comes too late.
            if not self.killed:
                self._on_message(message)

    def connection_lost(self, error: Exception | None) -> None:
        self._open = False
        self._finish()
        if not self.killed:
            # No other call goes to it. Usually it is about to end, which is the better reason; a
            # process with a closed socket that continues is killed.
            self.killed = True
            self._clear_timers()
            self._timer = self._loop.call_later(EXIT_S, self.kill)

    def ended(self, how: str, failure: str | None = None) -> None:
        """Take the report of the process's end. Replies that it sent before may still be unread,
        and the end of its socket is behind them."""
        self._how, self._failure = how, self._failure or failure
        self._finish()
        if not self._finished:
            # What it started, and nothing ended, may hold the other end of its socket forever.
            self._loop.call_later(EXIT_S, self._abandon_soon, how)

    def _abandon_soon(self, how: str) -> None:
        # A loop that was busy until now reads first what the process sent.
        self._loop.call_later(READ_S, self.abandon, how)

    def _finish(self) -> None:
        if self._how is None or self._open or self._finished:
            return
        self._finished = self.killed = True
        self._clear_timers()
        self._fail_all(UserProcessEnded(self._how))
        self._on_end(self, self._failure or f"it {self._how}")

    def abandon(self, how: str, failure: str | None = None) -> None:
        """Give up a process that no server reports about any more."""
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
            elif not call.result.done():  # otherwise the waiting task was cancelled
                call.result.set_result(message["result"])

    def _did_not_start(self) -> None:
        self._failure = f"it was not imported within {START_S:g} s"
        self.kill()

    def _out_of_time(self, number: int) -> None:
        call = self.calls[number]
        if not call.over:
            # The loop may have been busy until now, and the reply be there: uvloop runs timers
            # before it reads.
            call.over = True
            self._set_timer(number, READ_S)
            return

        left_s = call.deadline - self._loop.time()
        cpu_left_s = 0.0 if call.cpu_until_s is None else call.cpu_until_s - self._cpu_s()
        if left_s > 0 and cpu_left_s > 0:
            call.over = False
            self._set_timer(number, min(left_s, cpu_left_s))
        elif call.cpu_until_s is not None and cpu_left_s <= 0:
            # Also where both limits were reached while the loop was busy: it computed too long.
            self._fail_all(OutOfProcessorTime("the limit on processor time was reached"))
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
        """Return the processor time of the process so far; infinite once it is gone."""
        try:
            times = psutil.Process(self.pid).cpu_times()
        except psutil.Error:
            return math.inf
        return float(times.user + times.system)

    def _done(self, number: int) -> _PendingCall:
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
        """Close this side: a daemon of user code may hold the other one open forever."""
        self._open = False
        if self._transport is not None:
            self._transport.abort()


class Supervisor:
    """The server of one user function and the processes that it forked. Used by one event loop."""

    def __init__(self, code: UserCode) -> None:
        self._code = code
        self._numbers = itertools.count()
        self._processes: dict[int, UserProcess] = {}
        self._server: subprocess.Popen[bytes] | None = None
        self._control: socket.socket | None = None
        self._imported: asyncio.Future[None] | None = None
        self._orders: deque[tuple[bytes, socket.socket | None]] = deque()
        """Orders that the server has not read yet, each with the socket to pass on."""
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
                start_new_session=True,  # Ctrl-C is for the launcher to answer
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
        """Return a new process, which is about to start. Raises OSError."""
        if self._server is not None and self._server.poll() is not None:
            self._lose_server()
        if self._control is None:
            self.start()
        local, remote = socket.socketpair()
        process = UserProcess(self, next(self._numbers), on_ready, on_end)
        self._processes[process.number] = process
        self.order("start", process.number, remote)
        connecting = self._loop.create_connection(lambda: process, sock=local)
        task = self._loop.create_task(connecting)
        self._connecting.add(task)
        task.add_done_callback(self._connecting.discard)
        return process

    def order(self, order: str, number: int, sent: socket.socket | None = None) -> None:
        """Send an order to the server. `sent`: passed on to it, and closed here."""
        self._orders.append((json.dumps([order, number]).encode(), sent))
        self._send_orders()

    def close(self) -> None:
        """End all processes and the server."""
        self._abandon("was ended with its supervisor")
        if self._server is not None:
            try:
                self._server.wait(EXIT_S)
            except subprocess.TimeoutExpired:  # it is still importing
                self._server.kill()
                self._server.wait()

    def _send_orders(self) -> None:
        """Send as many orders as the server's socket accepts now, and the rest once it accepts
        more."""
        while self._orders and self._control is not None:
            payload, sent = self._orders[0]
            try:
                socket.send_fds(self._control, [payload], [] if sent is None else [sent.fileno()])
            except BlockingIOError:
                self._loop.add_writer(self._control, self._send_orders)
                return
            except OSError:  # the server is gone, and its processes with it
                break
            self._orders.popleft()
            if sent is not None:
                sent.close()
        if self._control is not None:
            self._loop.remove_writer(self._control)
        self._drop_orders()

    def _drop_orders(self) -> None:
        """Forget orders that no server will read. Their processes find their sockets closed."""
        for _, sent in self._orders:
            if sent is not None:
                sent.close()
        self._orders.clear()

    def _read_report(self) -> None:
        assert self._control is not None
        assert self._imported is not None
        try:
            message = self._control.recv(LONGEST_ORDER)
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
        """Give up the processes of a server that has ended; the next one starts a new server."""
        self._abandon("was ended with its server")

    def _abandon(self, how: str) -> None:
        self._drop_orders()
        if self._control is not None:
            self._loop.remove_reader(self._control)
            self._loop.remove_writer(self._control)
            self._control.close()  # the server then kills its processes
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
        future.exception()  # read: nothing may wait for it any more

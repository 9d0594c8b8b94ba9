"""The environments of an engine's samples, each in a process of its own for as long as it serves
one, and the deadlines they are held to.

Invariants:
- whatever an environment does costs the sample it serves and nothing else: what raises, does not
  answer in time or dies raises EnvironmentFailed there; its process is killed with all it started;
- the event loop never waits for a process: to start, to answer or to end; an answer that came in
  time counts, however late the loop reads it;
- at most `processes` samples are in an environment at a time; the others wait to begin, and their
  time does not run.
"""

from __future__ import annotations

import asyncio
import itertools
import json
import os
import pickle
import socket
import subprocess
import sys
from collections import deque
from collections.abc import Coroutine, Iterator, Sequence
from contextlib import contextmanager, nullcontext
from typing import Any

from megatron_async_rl.config.rollout import EnvironmentConfig
from megatron_async_rl.rollout.environments import Message, Step, TurnContent
from megatron_async_rl.rollout.environments.process import LENGTH, LONGEST, MAIN, framed
from megatron_async_rl.samples.types import Prompt
from megatron_async_rl.watchdog import watch
from megatron_async_rl.watchdog.processes import PARENT

START_S = 300.0
"""Longest time to import the environment."""
READ_S = 0.1
"""Time for the event loop to read what came while it was busy."""
SHOW_S = 0.2
"""Time for a process to write where it stands."""
NOTICED_S = 30.0
"""Time for the watchdog to hear of the end of an agent that took all of its time."""
EXIT_S = 1.0
"""Grace for the template to end its forks."""


class EnvironmentStartError(RuntimeError):
    """The environment could not be imported in a process of its own."""


class EnvironmentFailed(Exception):
    """The environment of one sample did not answer as it should; with the reason."""


class Environments:
    """Used by one event loop. Call `start` first."""

    def __init__(self, settings: EnvironmentConfig) -> None:
        self.settings = settings
        self._room = asyncio.Semaphore(settings.processes)
        self._numbers = itertools.count()
        self._idle: list[_EnvironmentProcess] = []
        self._template: subprocess.Popen[bytes] | None = None
        self._control: socket.socket | None = None
        self._imported: asyncio.Task[None] | None = None
        self._orders: deque[tuple[bytes, socket.socket | None]] = deque()
        """Orders that the template process has not read yet, each with the socket to pass on."""
        self._closing: set[asyncio.Task[None]] = set()
        self.at_work = 0
        """Agents that ask the model nothing now."""

    def start(self) -> None:
        """Starts the process that imports the environment, while the engine starts."""
        local, remote = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        local.setblocking(False)
        settings = {
            "environment": self.settings.model_dump(mode="json"),
            "descriptor": remote.fileno(),
            "path": sys.path,
        }
        try:
            self._template = subprocess.Popen(
                [sys.executable, "-c", MAIN, json.dumps(settings)],
                stdin=subprocess.DEVNULL,
                pass_fds=[remote.fileno()],
                env={**os.environ, **_without_proxy(), PARENT: str(os.getpid())},
                start_new_session=True,  # Ctrl-C is for the launcher to answer
            )
        finally:
            remote.close()
        self._control, self._loop = local, asyncio.get_running_loop()
        self._imported = asyncio.create_task(self._import(local))

    async def _import(self, control: socket.socket) -> None:
        loop = asyncio.get_running_loop()
        try:
            async with asyncio.timeout(START_S):
                message = await loop.sock_recv(control, LONGEST)
        except TimeoutError:
            raise EnvironmentStartError(f"it was not imported within {START_S:g} s") from None
        answer = (
            json.loads(message)
            if message
            else {"failed": "its process ended; see the engine's log"}
        )
        if "failed" in answer:
            raise EnvironmentStartError(answer["failed"])

    async def ready(self) -> None:
        """Returns once the environment is imported. Raises EnvironmentStartError."""
        assert self._imported is not None
        name = f"the environment {self.settings.name} to be imported"
        with watch.doing("wait", name, START_S):
            try:
                await asyncio.shield(self._imported)
            except asyncio.CancelledError:
                task = asyncio.current_task()
                if task is None or task.cancelling():
                    raise
                raise EnvironmentStartError("its process ended; see the engine's log") from None

    async def open(self) -> EnvironmentSession:
        """A process for one sample, once there is room. Raises EnvironmentFailed."""
        name = f"room in the environment {self.settings.name} (rollout.environment.processes)"
        with watch.doing("wait", name) if self._room.locked() else nullcontext():
            await self._room.acquire()
        try:
            process = self._idle.pop() if self._idle else await self._fork()
            return EnvironmentSession(self, process)
        except BaseException:
            self._room.release()
            raise

    @contextmanager
    def working_alone(self, left_s: float) -> Iterator[None]:
        """An agent that has `left_s` of its time left asks the model nothing meanwhile: it moves
        nothing, and is not stalled."""
        self.at_work += 1
        try:
            with watch.phase(f"at work in {self.settings.name}", max(0.0, left_s) + NOTICED_S):
                yield
        finally:
            self.at_work -= 1

    async def _fork(self) -> _EnvironmentProcess:
        if self._template is not None and self._template.poll() is not None:
            self.close()
            self.start()  # something killed it
        try:
            await self.ready()
            local, remote = socket.socketpair()
            number = next(self._numbers)
            self._order({"fork": number}, remote)
            reader, writer = await asyncio.open_connection(sock=local)
        except (EnvironmentStartError, OSError) as error:
            raise EnvironmentFailed(f"no process for the environment: {error}") from error
        return _EnvironmentProcess(number, reader, writer)

    def _order(self, order: dict[str, int], sent: socket.socket | None = None) -> None:
        """Close `sent`; the template gets a copy."""
        self._orders.append((json.dumps(order).encode(), sent))
        self._send_orders()

    def _send_orders(self) -> None:
        """Send as many orders as the template's socket accepts now, and the rest once it accepts
        more."""
        assert self._control is not None
        while self._orders:
            payload, sent = self._orders[0]
            try:
                descriptors = [] if sent is None else [sent.fileno()]
                socket.send_fds(self._control, [payload], descriptors)
            except BlockingIOError:
                self._loop.add_writer(self._control, self._send_orders)
                return
            except OSError:  # the template is gone, and its forks with it
                self._drop_orders()
                return
            self._orders.popleft()
            if sent is not None:
                sent.close()
        self._loop.remove_writer(self._control)

    def _drop_orders(self) -> None:
        """Tasks that wait for a process then find its socket closed."""
        if self._orders and self._control is not None:
            self._loop.remove_writer(self._control)
        for _, sent in self._orders:
            if sent is not None:
                sent.close()
        self._orders.clear()

    def kill(self, process: _EnvironmentProcess, *, show: bool) -> None:
        """`show`: it first writes into the engine's log where it stands."""
        process.writer.transport.abort()
        if self._control is None:
            return
        self._order({"show" if show else "kill": process.number})
        if show:
            asyncio.get_running_loop().call_later(SHOW_S, lambda: self.kill(process, show=False))

    def closing(self, close: Coroutine[Any, Any, None]) -> asyncio.Task[None]:
        """Continue even if a waiting task is cancelled, until the pool ends."""
        task = asyncio.create_task(close)
        self._closing.add(task)
        task.add_done_callback(self._closing.discard)
        return task

    def put_back(self, process: _EnvironmentProcess | None) -> None:
        """`process`: null where it was killed."""
        if process is not None:
            self._idle.append(process)
        self._room.release()

    def close(self) -> None:
        """Ends all processes."""
        if self._imported is not None:
            self._imported.cancel()
        for task in self._closing:
            task.cancel()
        self._drop_orders()
        for process in self._idle:
            process.writer.transport.abort()
        self._idle.clear()
        if self._control is not None:
            self._control.close()  # which has the template kill its forks, with all they started
            self._control = None
        if self._template is not None:
            try:
                self._template.wait(EXIT_S)
            except subprocess.TimeoutExpired:  # it is still importing
                self._template.kill()
                self._template.wait()


class _EnvironmentProcess:
    def __init__(
        self, number: int, reader: asyncio.StreamReader, writer: asyncio.StreamWriter
    ) -> None:
        self.number, self.reader, self.writer = number, reader, writer


class EnvironmentSession:
    """The environment of one sample: `reset` once, then `step`; `close` in every case."""

    def __init__(self, pool: Environments, process: _EnvironmentProcess) -> None:
        self._pool = pool
        self._process: _EnvironmentProcess | None = process
        self._busy = False

    async def reset(self, prompt: Prompt) -> TurnContent:
        content: str | Sequence[Message] = (await self._ask("reset", prompt, "reset"))["words"]
        return content

    async def step(self, response: str | Message) -> Step:
        return Step(**await self._ask("step", response, "step"))

    async def run(self, prompt: Prompt, base_url: str) -> float:
        """Reward of an agent's whole run, which replaces `reset` and `step`."""
        return float((await self._ask("run", (prompt, base_url), "run"))["reward"])

    async def close(self) -> None:
        """A process that is still busy is killed: the waiting task was cancelled. A cancelled task
        does not wait for the environment's own `close` either."""
        closing = self._pool.closing(self._close())
        task = asyncio.current_task()
        if task is None or not task.cancelling():
            await asyncio.shield(closing)

    async def _close(self) -> None:
        try:
            if not self._busy and self._process is not None:
                await self._ask("close", None, "close")
        except EnvironmentFailed:
            pass  # the sample has all it needs
        finally:
            if self._busy:
                self._end(show=False)
            process, self._process = self._process, None
            self._pool.put_back(process)

    async def _ask(self, method: str, argument: Any, what: str) -> dict[str, Any]:
        process, settings = self._process, self._pool.settings
        if process is None:
            raise EnvironmentFailed("its process is gone")
        payload = pickle.dumps((method, argument), pickle.HIGHEST_PROTOCOL)
        self._busy = True
        # An agent's run is work while it asks the model nothing, and `working_alone` shows that.
        kind: watch.ActivityKind = "wait" if method == "run" else "work"
        with watch.doing(kind, f"{what} of the environment {settings.name}", settings.timeout_s):
            process.writer.write(framed(payload))
            answer = asyncio.ensure_future(_read(process.reader))
            try:
                await asyncio.wait((answer,), timeout=settings.timeout_s)
                if not answer.done():
                    await asyncio.wait((answer,), timeout=READ_S)
            finally:
                if not answer.done():
                    answer.cancel()
        if answer.cancelled() or not answer.done():
            self._end(show=True)
            limit = f"rollout.environment.timeout_s: {settings.timeout_s:g}"
            raise EnvironmentFailed(f"no answer to {what} within {limit}")
        try:
            message: dict[str, Any] = answer.result()
        except (OSError, asyncio.IncompleteReadError):
            self._end(show=False)
            raise EnvironmentFailed(f"its process ended in {what}; see the engine's log") from None
        self._busy = False
        watch.progress("environments")
        if "error" in message:
            raise EnvironmentFailed(f"{what} raised {message['error']}")
        return message

    def _end(self, *, show: bool) -> None:
        if self._process is not None:
            self._pool.kill(self._process, show=show)
        self._process, self._busy = None, False


def _without_proxy() -> dict[str, str]:
    """Environment variables that keep an agent's calls to its endpoint, on this machine, from a
    proxy."""
    known = os.environ.get("no_proxy") or os.environ.get("NO_PROXY") or ""
    names = ",".join(one for one in (known, "127.0.0.1", "localhost") if one)
    return {"no_proxy": names, "NO_PROXY": names}


async def _read(reader: asyncio.StreamReader) -> dict[str, Any]:
    (length,) = LENGTH.unpack(await reader.readexactly(LENGTH.size))
    answer: dict[str, Any] = json.loads(await reader.readexactly(length))
    return answer

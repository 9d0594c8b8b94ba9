"""The processes that environments live in: a template that has imported the user's module, and
forks of it, each with one sample's environment at a time.

    engine --fork, kill, show--> template --fork--> reaper --fork--> process of one environment
       ^                                                                  |
       +------------- requests and answers, a socket of its own ----------+

Invariants:
- the import does not count as a sample's time, and a process costs milliseconds, not an import;
- the template calls nothing of the user's after the import, so it always answers; it alone ends
  subreapers, and knows which are alive;
- a subreaper adopts all that its environment started, in whatever session or group, and ends with
  none of it left;
- what a user's code prints goes where the engine's output goes, never into a socket; so does where
  it stands, on SIGUSR1, even while it holds the interpreter lock;
- all end with the engine, and with the sockets.
"""

from __future__ import annotations

import asyncio
import faulthandler
import json
import os
import pickle
import resource
import select
import signal
import socket
import struct
from collections.abc import Callable, Mapping
from contextlib import suppress
from typing import Any

from megatron_async_rl.config.rollout import EnvironmentConfig
from megatron_async_rl.rollout.environments import (
    Environment,
    checked_content,
    checked_step,
    load_factory,
    require_finite,
    settled,
)
from megatron_async_rl.rollout.isolation.sandboxed import keep
from megatron_async_rl.watchdog.processes import PARENT, die_with_parent

LENGTH = struct.Struct("!I")
"""Precedes every request and answer: its length in bytes."""
LONGEST = 4096
"""Bytes of a message to or from the template, which a datagram holds whole."""
REAP_S = 0.5
"""Longest time that a process which has ended keeps its number."""

MAIN = (
    "import json, sys; settings = json.loads(sys.argv[1]); sys.path[:] = settings.pop('path');"
    f" from {__name__} import serve; serve(**settings)"
)
"""Program of the template. `path`: Python's path in the engine, so that both find the same
module."""

Factory = Callable[[], Environment]


def framed(payload: bytes) -> bytes:
    return LENGTH.pack(len(payload)) + payload


def serve(environment: Mapping[str, Any], descriptor: int) -> None:
    """The template. `descriptor`: of a socket of datagrams (SOCK_SEQPACKET)."""
    die_with_parent()
    os.set_inheritable(descriptor, False)
    settings = EnvironmentConfig.model_validate(environment)
    with socket.socket(fileno=descriptor) as connection:
        try:
            factory = load_factory(settings)
        except BaseException as error:
            text = f"{type(error).__name__}: {error}"
            connection.send(json.dumps({"failed": text[: LONGEST // 8]}).encode())
            raise
        resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
        connection.send(json.dumps({"ready": True}).encode())
        _fork_when_requested(connection, factory, settings.memory_mib)


def _fork_when_requested(
    connection: socket.socket, factory: Factory, memory_mib: int | None
) -> None:
    """Until the engine closes the socket. Processes go by numbers that the engine gives."""
    processes: dict[int, int] = {}
    try:
        while True:
            requested, _, _ = select.select([connection], [], [], REAP_S)
            for number, pid in list(processes.items()):
                if os.waitid(os.P_PID, pid, os.WEXITED | os.WNOHANG | os.WNOWAIT) is not None:
                    _kill(processes.pop(number))
            if not requested:
                continue
            message, descriptors, _, _ = socket.recv_fds(connection, LONGEST, 1)
            if not message:
                return
            order = json.loads(message)
            if "fork" in order:
                pid = os.fork()
                if pid == 0:
                    connection.close()
                    _live(descriptors[0], factory, memory_mib)
                os.close(descriptors[0])
                processes[order["fork"]] = pid
            elif "kill" in order and order["kill"] in processes:
                _kill(processes.pop(order["kill"]))
            elif "show" in order and order["show"] in processes:
                os.kill(processes[order["show"]], signal.SIGUSR1)
    finally:
        for pid in processes.values():
            _kill(pid)


def _kill(pid: int) -> None:
    """The subreaper with all its descendants; it has not been waited for, so the number is its
    own."""
    with suppress(ProcessLookupError):
        os.kill(pid, signal.SIGTERM)
    os.waitpid(pid, 0)


def _live(descriptor: int, factory: Factory, memory_mib: int | None) -> None:
    """The subreaper, and the process of the environment; does not return."""
    code = 1
    try:
        os.environ[PARENT] = str(keep((signal.SIGUSR1,)))
        os.setsid()
        faulthandler.register(signal.SIGUSR1, all_threads=False)
        if memory_mib is not None:
            _, hard = resource.getrlimit(resource.RLIMIT_AS)
            maximum = memory_mib * 2**20
            soft = maximum if hard == resource.RLIM_INFINITY else min(maximum, hard)
            resource.setrlimit(resource.RLIMIT_AS, (soft, hard))
        with socket.socket(fileno=descriptor) as connection:
            _serve_samples(connection, factory)
        code = 0
    finally:
        os._exit(code)


def _serve_samples(connection: socket.socket, factory: Factory) -> None:
    """Until the engine closes the socket. An agent is called while no event loop runs, in the main
    thread, so that a plain function may run its own loop and set signals."""
    own = os.getpid()
    with asyncio.Runner() as runner:
        streams = runner.run(_opened(connection))
        while (requested := runner.run(_answer(*streams, factory))) is not None:
            try:
                agent: Any = factory()
                given = agent.run(*requested)
                reward = float(runner.run(settled(given)))
                require_finite(reward, "the reward")
                reply = json.dumps({"reward": reward})
            except BaseException as error:  # noqa: BLE001 - user code, `sys.exit` included
                reply = _message(error)
            if os.getpid() != own:
                os._exit(
                    0
                )  # a child that the user's code forked and let return: the parent answers
            runner.run(_send(streams[1], reply))


async def _opened(
    connection: socket.socket,
) -> tuple[asyncio.StreamReader, asyncio.StreamWriter]:
    return await asyncio.open_connection(sock=connection)


async def _send(writer: asyncio.StreamWriter, reply: str) -> None:
    writer.write(framed(reply.encode()))
    await writer.drain()


def _message(error: BaseException) -> str:
    text = str(error).encode(errors="backslashreplace").decode()
    return json.dumps({"error": type(error).__name__ + (f": {text}" if text else "")})


async def _answer(
    reader: asyncio.StreamReader, writer: asyncio.StreamWriter, factory: Factory
) -> Any:
    """One request after the other, up to one for the run of an agent, whose arguments are returned;
    null once the engine closes the socket. The event loop runs on between them, for an environment
    that holds a connection."""
    own = os.getpid()
    environment: Environment | None = None
    while True:
        try:
            (length,) = LENGTH.unpack(await reader.readexactly(LENGTH.size))
            method, argument = pickle.loads(await reader.readexactly(length))
        except asyncio.IncompleteReadError:
            return None
        if method == "run":
            return argument
        try:
            if method == "reset":
                environment = factory()
                opening = await settled(environment.reset(argument))
                answer: dict[str, Any] = {"words": checked_content(opening, "what reset returns")}
            elif method == "step":
                assert environment is not None
                answer = checked_step(await settled(environment.step(argument)))
            else:
                close = getattr(environment, "close", None)
                environment, answer = None, {}
                if close is not None:
                    await settled(close())
            reply = json.dumps(answer)
        except BaseException as error:  # noqa: BLE001 - user code, `sys.exit` included
            reply = _message(error)
        if os.getpid() != own:
            os._exit(0)  # a child that the user's code forked and let return: the parent answers
        await _send(writer, reply)

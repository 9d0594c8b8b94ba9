"""Calling a reward, and the process that does it: calls come over a socket, one reply each.

    engine --(call, items)--> serve -> call / call_async -> reward
                        <--{"call": ..., "scored": [...]}--

Invariants:
- the reward and what it needs are imported before the first call is read, so the time of an import
  does not count for a response;
- a plain reward has one call at a time, on the main thread; an `async` one as many as come;
- its limits on memory hold from the first call on;
- what a reward prints goes where the engine's output goes, never into the socket; so does where
  it stands, on SIGUSR1, even while it holds the interpreter lock;
- it ends with its engine: the kernel kills it when the thread that started it ends, and it ends by
  itself when the socket closes.
"""

from __future__ import annotations

import asyncio
import faulthandler
import importlib
import json
import os
import pickle
import resource
import signal
import socket
import struct
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from megatron_async_rl.rollout.rewards.registry import (
    LARGEST,
    BoundReward,
    RewardItem,
    built_in,
    load_reward,
)
from megatron_async_rl.watchdog.processes import die_with_parent

LENGTH = struct.Struct("!I")
"""Precedes every message: its length in bytes."""

LONGEST_ERROR = 4000
"""Characters of an exception that are kept."""

MAIN = (
    "import json, sys; settings = json.loads(sys.argv[1]); sys.path[:] = settings.pop('path');"
    f" from {__name__} import serve; serve(**settings)"
)
"""Program of the process. `path`: Python's path in the engine, so that both find the same
module."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Scored:
    """`error` is the reason for a missing reward; `reward` is 0.0 then. `parts`: the rewards it is
    made of, by their names; null: it has none."""

    reward: float
    error: str | None = None
    parts: Mapping[str, float] | None = None
    timed_out: bool = field(default=False, compare=False)


class CallFailed(Exception):
    """A call that has no result for any of its responses."""


def call(reward: BoundReward, items: list[RewardItem], timeout_s: float) -> list[Scored]:
    """Calls a plain reward. Raises CallFailed; a value that is not a finite number is an error of
    its response."""
    positional, keyword = reward.arguments(items, timeout_s)
    try:
        return _scored(reward, items, reward.function(*positional, **keyword))
    except BaseException as error:  # noqa: BLE001 - user code, `sys.exit` included
        raise CallFailed(_message(error)) from None


async def call_async(
    reward: BoundReward, items: list[RewardItem], timeout_s: float
) -> list[Scored]:
    """Call an `async` reward; see `call`."""
    positional, keyword = reward.arguments(items, timeout_s)
    try:
        return _scored(reward, items, await reward.function(*positional, **keyword))
    except asyncio.CancelledError:
        raise
    except BaseException as error:  # noqa: BLE001 - user code, `sys.exit` included
        raise CallFailed(_message(error)) from None


def _scored(reward: BoundReward, items: Sequence[RewardItem], returned: Any) -> list[Scored]:
    if not reward.of_several:
        return [_one(returned)]
    values = list(returned)
    if len(values) != len(items):
        raise ValueError(f"the reward returned {len(values)} values for {len(items)} responses")
    return [_one(value) for value in values]


def _one(returned: Any) -> Scored:
    if returned is None or isinstance(returned, str | bytes | Mapping | Sequence):
        what = "nothing" if returned is None else f"{type(returned).__name__} {repr(returned)[:80]}"
        return Scored(reward=0.0, error=f"the reward returned {what}, not a number")
    try:
        value = float(returned)
    except BaseException as error:  # noqa: BLE001 - an object of the user's
        return Scored(reward=0.0, error=_message(error))
    if not abs(value) <= LARGEST:
        what = f"the reward is {value}, not a finite number of at most {LARGEST:g}"
        return Scored(reward=0.0, error=what)
    return Scored(reward=value)


def _message(error: BaseException) -> str:
    text = str(error)
    if len(text) > LONGEST_ERROR:
        text = f"{text[:LONGEST_ERROR]}... ({len(text)} characters)"
    text = text.encode(errors="backslashreplace").decode()
    return type(error).__name__ + (f": {text}" if text else "")


def framed(payload: bytes) -> bytes:
    return LENGTH.pack(len(payload)) + payload


def encode_call(number: int, items: Sequence[RewardItem] | None) -> bytes:
    """`items`: None cancels the call `number`."""
    return framed(pickle.dumps((number, items), pickle.HIGHEST_PROTOCOL))


def serve(
    name: str,
    key: str,
    settings: Mapping[str, Any],
    descriptor: int,
    memory_mib: int | None,
    timeout_s: float,
) -> None:
    """`descriptor`: of the socket. `memory_mib`: most address space, null for no limit."""
    die_with_parent()
    os.set_inheritable(descriptor, False)  # nothing that the reward starts may hold it open
    with socket.socket(fileno=descriptor) as connection:
        try:
            reward = load_reward(name, settings, key)
            found = built_in(name)
            if found is not None and found.requires is not None:
                importlib.import_module(found.requires)
        except BaseException as error:
            connection.sendall(_reply({"failed": f"{type(error).__name__}: {error}"}))
            raise

        resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
        if memory_mib is not None:
            _, hard = resource.getrlimit(resource.RLIMIT_AS)
            maximum = memory_mib * 2**20
            soft = maximum if hard == resource.RLIM_INFINITY else min(maximum, hard)
            resource.setrlimit(resource.RLIMIT_AS, (soft, hard))

        faulthandler.register(signal.SIGUSR1, all_threads=False)
        kind = {"asynchronous": reward.asynchronous, "batched": reward.batched}
        connection.sendall(_reply({"ready": True, "pid": os.getpid(), **kind}))
        if reward.asynchronous:
            asyncio.run(_serve_async(reward, connection, timeout_s))
        else:
            _serve(reward, connection, timeout_s)


def _serve(reward: BoundReward, connection: socket.socket, timeout_s: float) -> None:
    own = os.getpid()
    with connection.makefile("rb") as calls:
        while header := calls.read(LENGTH.size):
            number, items = pickle.loads(calls.read(*LENGTH.unpack(header)))
            try:
                reply = _result(number, call(reward, items, timeout_s))
            except CallFailed as error:
                reply = _failure(number, error)
            if os.getpid() != own:
                os._exit(0)  # a child that the reward forked and let return: the parent answers
            connection.sendall(reply)


async def _serve_async(reward: BoundReward, connection: socket.socket, timeout_s: float) -> None:
    own = os.getpid()
    calls, replies = await asyncio.open_connection(sock=connection)
    tasks: dict[int, asyncio.Task[None]] = {}

    async def work(number: int, items: list[RewardItem]) -> None:
        try:
            reply = _result(number, await call_async(reward, items, timeout_s))
        except CallFailed as error:
            reply = _failure(number, error)
        if os.getpid() != own:
            os._exit(0)
        if tasks.pop(number, None) is not None:
            replies.write(reply)

    while True:
        try:
            header = await calls.readexactly(LENGTH.size)
        except asyncio.IncompleteReadError:
            return
        number, items = pickle.loads(await calls.readexactly(*LENGTH.unpack(header)))
        if items is not None:
            tasks[number] = asyncio.create_task(work(number, items))
        elif (task := tasks.pop(number, None)) is not None:
            # It may take its time to end, or refuse to: it is no longer waited for.
            task.cancel()
            replies.write(_reply({"call": number, "cancelled": True}))


def _result(number: int, scored: Sequence[Scored]) -> bytes:
    return _reply({"call": number, "scored": [[one.reward, one.error] for one in scored]})


def _failure(number: int, error: CallFailed) -> bytes:
    return _reply({"call": number, "error": str(error)})


def _reply(message: dict[str, object]) -> bytes:
    return framed(json.dumps(message).encode())

"""The process that calls a reward: one request at a time over a socket, one reply each.

Invariants:
- the reward and what it needs are imported before the first request is read, so the time of an
  import is no response's;
- its limits on memory hold from the first request on;
- what a reward prints goes where the engine's output goes, never into the socket; so does where
  it stands, on SIGUSR1, even while it holds the interpreter lock;
- it ends with its engine: the kernel kills it when the thread that started it ends, and it ends by
  itself when the socket closes.
"""

from __future__ import annotations

import faulthandler
import importlib
import json
import os
import pickle
import resource
import signal
import socket
import struct

from megatron_async_rl.rollout.rewards.registry import built_in, load_reward, score
from megatron_async_rl.samples.types import Prompt
from megatron_async_rl.watchdog.processes import die_with_parent

LENGTH = struct.Struct("!I")
"""Precedes every message: its length in bytes."""

MAIN = (
    "import json, sys; settings = json.loads(sys.argv[1]); sys.path[:] = settings.pop('path');"
    f" from {__name__} import serve; serve(**settings)"
)
"""Program of the process. `path`: Python's path in the engine, so that both find the same
module."""


def framed(payload: bytes) -> bytes:
    return LENGTH.pack(len(payload)) + payload


def encode_request(prompt: Prompt, response: str) -> bytes:
    return framed(pickle.dumps((prompt, response), pickle.HIGHEST_PROTOCOL))


def serve(name: str, descriptor: int, memory_mib: int | None) -> None:
    """`descriptor`: of the socket. `memory_mib`: most address space, null for no limit."""
    die_with_parent()
    own = os.getpid()
    os.set_inheritable(descriptor, False)  # nothing that the reward starts may hold it open
    with socket.socket(fileno=descriptor) as connection, connection.makefile("rb") as requests:
        try:
            reward = load_reward(name)
            found = built_in(name)
            if found is not None and found.requires is not None:
                importlib.import_module(found.requires)
        except BaseException as error:
            _reply(connection, {"failed": f"{type(error).__name__}: {error}"})
            raise

        resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
        if memory_mib is not None:
            _, hard = resource.getrlimit(resource.RLIMIT_AS)
            most = memory_mib * 2**20
            soft = most if hard == resource.RLIM_INFINITY else min(most, hard)
            resource.setrlimit(resource.RLIMIT_AS, (soft, hard))

        faulthandler.register(signal.SIGUSR1, all_threads=False)
        _reply(connection, {"ready": True})
        while header := requests.read(LENGTH.size):
            prompt, response = pickle.loads(requests.read(*LENGTH.unpack(header)))
            scored = score(reward, prompt, response)
            if os.getpid() != own:
                os._exit(0)  # a child that the reward forked and let return: the parent answers
            _reply(connection, {"reward": scored.reward, "error": scored.error})


def _reply(connection: socket.socket, message: dict[str, object]) -> None:
    connection.sendall(framed(json.dumps(message).encode()))

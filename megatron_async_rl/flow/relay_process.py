"""Agents in processes of their own (weights/relay.py): their calls, and their start on a machine.

Invariants:
- an exception that a call raised in the agent is raised here with its own type;
- an agent that did not start leaves nothing running; a new agent removes what a killed one left in
  its machine's memory.
"""

from __future__ import annotations

import asyncio
import logging
import socket
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Protocol

from megatron_async_rl.watchdog import watch
from megatron_async_rl.watchdog.deadline import answer_of, name_this_process
from megatron_async_rl.watchdog.logs import redirect_output
from megatron_async_rl.weights.manifest import Manifest, StagedCopy
from megatron_async_rl.weights.relay_server import Address, RelayFailed, RelayServer
from megatron_async_rl.weights.stale_files import SHARED_MEMORY, remove_stale


@dataclass(frozen=True, kw_only=True)
class RelaySpec:
    """One machine's agent. `machine`: the id of its Ray node, or an engine's own memory; `index` is
    unique in the run and names its log, `relay-<index>.log` in `log_dir`. `silence_s`: longest time
    without a byte."""

    index: int
    machine: str
    log_dir: Path
    silence_s: float = 60.0

    @property
    def name(self) -> str:
        return f"relay-{self.index}"


class Relay(Protocol):
    """A running agent. `where`: text that names its machine."""

    where: str

    async def fetch(self, version: int, manifest: Manifest) -> StagedCopy: ...
    async def alive(self) -> None:
        """Answers at once."""

    async def close(self) -> None: ...
    def kill(self) -> None: ...


class RelayActor:
    """An agent in a process of its own, a Ray actor on its machine."""

    def __init__(self, spec: RelaySpec, address: Address) -> None:
        redirect_output(spec.log_dir / f"{spec.name}.log")
        logging.basicConfig(level=logging.INFO, format="%(asctime)s %(levelname)s %(message)s")
        name_this_process(spec.name)
        watch.join(spec.name)
        # Copies of a killed agent: its locks went with it, its files did not.
        remove_stale(SHARED_MEMORY)
        from megatron_async_rl.weights.relay import WeightAgent

        self._agent = WeightAgent(address, silence_s=spec.silence_s)

    async def where(self) -> str:
        return socket.gethostname()

    async def fetch(self, version: int, manifest: Manifest) -> StagedCopy:
        with watch.doing("work", f"fetching version {version}"):
            return await asyncio.to_thread(self._agent.fetch, version, manifest)

    async def alive(self) -> None:
        """Answers at once."""

    async def close(self) -> None:
        self._agent.close()


@dataclass
class RemoteRelay:
    """A `Relay` in the Ray actor `actor`. Raises ProcessDied where that has ended."""

    actor: Any
    where: str = ""

    async def fetch(self, version: int, manifest: Manifest) -> StagedCopy:
        copy: StagedCopy = await self._call("fetch", version, manifest)
        return copy

    async def alive(self) -> None:
        await self._call("alive")

    async def close(self) -> None:
        await self._call("close")

    def kill(self) -> None:
        import ray

        ray.kill(self.actor)

    async def look(self) -> None:
        """Wait until it has started; `where` names its machine."""
        self.where = await self._call("where")

    async def _call(self, method: str, *arguments: object) -> Any:
        return await answer_of(getattr(self.actor, method).remote(*arguments))


async def start_relay(spec: RelaySpec, address: Address) -> Relay:
    """Start an agent on its machine, which fetches from `address`. Ray must be initialised. Raises
    the agent's error if it does not start; a cancelled call leaves nothing running."""
    import ray
    from ray.util.scheduling_strategies import NodeAffinitySchedulingStrategy

    there = NodeAffinitySchedulingStrategy(spec.machine, soft=False)
    remote_class = ray.remote(num_cpus=0, max_restarts=0)(RelayActor)
    relay = RemoteRelay(remote_class.options(scheduling_strategy=there).remote(spec, address))
    try:
        await relay.look()
    except BaseException:
        relay.kill()
        raise
    return relay


def serve_here(silence_s: float) -> RelayServer:
    """Start a server at this machine's address in the Ray cluster. Raises RelayFailed if it cannot
    listen there."""
    import ray

    host = ray.util.get_node_ip_address()
    try:
        return RelayServer(host, silence_s)
    except OSError as error:
        raise RelayFailed(
            f"the weights' server cannot listen at {host}, Ray's address of this machine:"
            f" {error}; start its Ray node with another --node-ip-address"
        ) from error

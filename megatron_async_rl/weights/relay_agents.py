"""Agents of machines: a server on rank 0's machine, and an actor on each other machine with
engines, which copies every version into that machine's memory (relay.py).

Invariant: a new agent removes the copies that a killed one left in its machine's memory.
"""

from __future__ import annotations

import asyncio
import logging
import socket
from dataclasses import dataclass
from typing import Any

from megatron_async_rl.watchdog import watch
from megatron_async_rl.watchdog.logs import redirect_output
from megatron_async_rl.watchdog.run_folder import SHARED_MEMORY, remove_stale
from megatron_async_rl.watchdog.watch import answer_of, name_this_process
from megatron_async_rl.weights.agents import Agent, AgentContext, AgentSource, AgentSpec
from megatron_async_rl.weights.manifest import Manifest, StagedCopy
from megatron_async_rl.weights.relay_server import Address, RelayFailed, RelayServer


class RelaySource(AgentSource):
    """The server from which agents fetch."""

    def __init__(self, server: RelayServer) -> None:
        self.server = server

    @classmethod
    def of(cls, context: AgentContext) -> RelaySource:
        """Raises RelayFailed if this machine cannot serve weights."""
        return cls(serve_here(context.limit_s))

    async def launch(self, spec: AgentSpec) -> Agent:
        return await start_agent(spec, self.server.address)

    def stage(self, version: int, manifest: Manifest) -> None:
        self.server.stage(version, manifest)

    def release(self, version: int) -> None:
        self.server.release(version)

    def close(self) -> None:
        self.server.close()


SOURCE = RelaySource


class RelayActor:
    """Agent in its own process, a Ray actor on its machine."""

    def __init__(self, spec: AgentSpec, address: Address) -> None:
        redirect_output(spec.log_dir / f"{spec.name}.log")
        logging.basicConfig(level=logging.INFO, format="%(asctime)s %(levelname)s %(message)s")
        name_this_process(spec.name)
        watch.join(spec.name)
        # Copies of a killed agent: its locks ended with it, but its files remain.
        remove_stale(SHARED_MEMORY)
        # Imported here: it loads torch, which the controller must not.
        from megatron_async_rl.weights.relay import WeightAgent
        from megatron_async_rl.weights.transport import carrier

        memory = carrier(spec.transport)
        self._agent = WeightAgent(address, memory, silence_s=spec.silence_s)

    async def where(self) -> str:
        return socket.gethostname()

    async def fetch(self, version: int, manifest: Manifest) -> StagedCopy:
        with watch.doing("work", f"fetching version {version}"):
            # In a thread: `alive` must be answered while gigabytes arrive.
            return await asyncio.to_thread(self._agent.fetch, version, manifest)

    async def alive(self) -> None:
        """Return at once: a call shows that the agent answers."""

    async def close(self) -> None:
        self._agent.close()


@dataclass
class RemoteAgent:
    """An `Agent` in the Ray actor `actor`. Its calls raise ProcessDied if the actor has ended."""

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
        """Wait until the actor has started. Then `where` names its machine."""
        self.where = await self._call("where")

    async def _call(self, method: str, *arguments: object) -> Any:
        return await answer_of(getattr(self.actor, method).remote(*arguments))


async def start_agent(spec: AgentSpec, address: Address) -> Agent:
    """Start an agent on its machine, which fetches from `address`. Ray must be initialised. Raises
    the agent's error if it does not start; a cancelled call leaves nothing running."""
    import ray
    from ray.util.scheduling_strategies import NodeAffinitySchedulingStrategy

    # Not soft: on another machine the agent would fill memory that no engine reads.
    there = NodeAffinitySchedulingStrategy(spec.machine, soft=False)
    remote_class = ray.remote(num_cpus=0, max_restarts=0)(RelayActor)
    agent = RemoteAgent(remote_class.options(scheduling_strategy=there).remote(spec, address))
    try:
        await agent.look()
    except BaseException:
        # Cancelled calls included, because only this function has the handle.
        agent.kill()
        raise
    return agent


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

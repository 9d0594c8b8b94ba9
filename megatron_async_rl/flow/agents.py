"""Agents that copy weights to memory other than rank 0's: their processes and calls.

    relay        server on rank 0's machine ==TCP==> RelayActor, one per machine (weights/relay.py)
    collective   controller --receive--> engine: its workers wait for the version
                            --send-----> SenderActor ==communicator==> workers

Invariants:
- an exception that a call raised in an agent is raised here with its own type;
- an agent that fails to start leaves nothing running; a new agent removes the copies that a killed
  one left in its machine's memory;
- the sender closes its end of a lost communicator, and that engine's workers then close theirs;
  other communicators are not affected;
- the sender has its own process, because it loads torch and, on a GPU, uses memory of rank 0's
  device. A sender that has died or does not answer is replaced when the next communicator starts.
"""

from __future__ import annotations

import asyncio
import functools
import logging
import os
import socket
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Protocol

from megatron_async_rl.flow.engine_task import EngineSlot
from megatron_async_rl.rollout.engine_process import Engine
from megatron_async_rl.watchdog import watch
from megatron_async_rl.watchdog.logs import redirect_output
from megatron_async_rl.watchdog.run_folder import SHARED_MEMORY, remove_stale
from megatron_async_rl.watchdog.watch import (
    ProcessDied,
    answer_of,
    await_named,
    name_this_process,
)
from megatron_async_rl.weights.manifest import Manifest, Meeting, StagedCopy, WeightUpdate
from megatron_async_rl.weights.relay_server import Address, RelayFailed, RelayServer


@dataclass(frozen=True, kw_only=True)
class RelaySpec:
    """Settings of one machine's agent. `machine`: id of its Ray node, or an engine's own memory.
    `index` is unique in the run and names its log, `relay-<index>.log` in `log_dir`. `silence_s`:
    longest time without a byte."""

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
        """Return at once: a call shows that the agent answers."""

    async def close(self) -> None: ...
    def kill(self) -> None: ...


class RelayActor:
    """Agent in its own process, a Ray actor on its machine."""

    def __init__(self, spec: RelaySpec, address: Address) -> None:
        redirect_output(spec.log_dir / f"{spec.name}.log")
        logging.basicConfig(level=logging.INFO, format="%(asctime)s %(levelname)s %(message)s")
        name_this_process(spec.name)
        watch.join(spec.name)
        # Copies of a killed agent: its locks ended with it, but its files remain.
        remove_stale(SHARED_MEMORY)
        # Imported here: it loads torch, which the controller must not.
        from megatron_async_rl.weights.relay import WeightAgent

        self._agent = WeightAgent(address, silence_s=spec.silence_s)

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
class RemoteRelay:
    """A `Relay` in the Ray actor `actor`. Its calls raise ProcessDied if the actor has ended."""

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


async def start_relay(spec: RelaySpec, address: Address) -> Relay:
    """Start an agent on its machine, which fetches from `address`. Ray must be initialised. Raises
    the agent's error if it does not start; a cancelled call leaves nothing running."""
    import ray
    from ray.util.scheduling_strategies import NodeAffinitySchedulingStrategy

    # Not soft: on another machine the agent would fill memory that no engine reads.
    there = NodeAffinitySchedulingStrategy(spec.machine, soft=False)
    remote_class = ray.remote(num_cpus=0, max_restarts=0)(RelayActor)
    relay = RemoteRelay(remote_class.options(scheduling_strategy=there).remote(spec, address))
    try:
        await relay.look()
    except BaseException:
        # Cancelled calls included, because only this function has the handle.
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


NAME = "sender"


class SenderActor:
    """The sender, a Ray actor on rank 0's machine. `gpu`: rank 0's GPU; None without one."""

    def __init__(self, host: str, log_dir: Path, limit_s: float, gpu: str | None) -> None:
        redirect_output(log_dir / f"{NAME}.log")
        logging.basicConfig(level=logging.INFO, format="%(asctime)s %(levelname)s %(message)s")
        name_this_process(NAME)
        watch.join(NAME)
        if gpu is not None:  # Ray has assigned it none
            os.environ["CUDA_VISIBLE_DEVICES"] = gpu
        # After the variable is set, which CUDA reads once.
        import torch

        from megatron_async_rl.weights.collective import Sender

        device = torch.device("cpu" if gpu is None else "cuda:0")
        self._sender = Sender(host, device, limit_s)

    async def open(self, workers: int) -> Meeting:
        return await asyncio.to_thread(self._sender.open, workers)

    async def send(self, meeting: Meeting, version: int, manifest: Manifest) -> StagedCopy:
        with watch.doing("work", f"sending version {version}"):
            # In a thread: `alive` must be answered meanwhile.
            return await asyncio.to_thread(self._sender.send, meeting, version, manifest)

    async def alive(self) -> None:
        """Return at once: a call shows that the sender answers."""

    async def close(self, meeting: Meeting) -> None:
        await asyncio.to_thread(self._sender.close, meeting)


@dataclass
class EngineCommunicator:
    """A `Relay` to an engine's own memory."""

    where: str
    sender: Any
    engine: Engine
    meeting: Meeting
    held: int | None = None
    """Version that arrived last."""

    async def fetch(self, version: int, manifest: Manifest) -> StagedCopy:
        # The engine only begins to receive: the call returns before any bytes arrive.
        await self.engine.receive(
            WeightUpdate(meeting=self.meeting, version=version, manifest=manifest, kept=self.held)
        )
        copy: StagedCopy = await answer_of(self.sender.send.remote(self.meeting, version, manifest))
        # Only once the version is whole: the next one is written to the other slot.
        self.held = version
        return copy

    async def alive(self) -> None:
        await answer_of(self.sender.alive.remote())

    async def close(self) -> None:
        await answer_of(self.sender.close.remote(self.meeting))

    def kill(self) -> None:
        # Close only this communicator: the sender serves other engines, too.
        self.sender.close.remote(self.meeting)


class Communicators:
    """Communicators of all engines, and their sender. `limit_s`: longest wait of a communicator for
    a member or a bucket. Ray must be initialised."""

    def __init__(
        self,
        engines: Callable[[], Iterable[EngineSlot]],
        log_dir: Path,
        limit_s: float,
        gpu: str | None,
    ) -> None:
        self._engines = engines
        self._log_dir = log_dir
        self._limit_s = limit_s
        self._gpu = gpu
        self._sender: Any = None
        self._starting = asyncio.Lock()

    async def launch(self, spec: RelaySpec) -> Relay:
        """Return a communicator to the engine of `spec`. Raises ProcessDied if the sender dies, and
        RuntimeError if this machine cannot be reached or the engine no longer exists. A cancelled
        call leaves no port open."""
        sender = await self._running_sender()
        slot = next((one for one in self._engines() if one.machine == spec.machine), None)
        if slot is None or slot.engine is None:
            raise RuntimeError("its engine no longer exists")
        opening = asyncio.ensure_future(answer_of(sender.open.remote(slot.spec.rollout.workers)))
        try:
            # Shielded: a cancelled call still has to learn which port to close.
            meeting: Meeting = await asyncio.shield(opening)
        except asyncio.CancelledError:
            opening.add_done_callback(functools.partial(_close, sender))
            raise
        return EngineCommunicator(slot.name, sender, slot.engine, meeting)

    def stage(self, version: int, manifest: Manifest) -> None:
        """Nothing to do: each call names the version to send."""

    def release(self, version: int) -> None:
        """Nothing to do: receivers wait only for announced versions."""

    def close(self) -> None:
        sender, self._sender = self._sender, None
        if sender is not None:
            _kill(sender)

    async def _running_sender(self) -> Any:
        async with self._starting:
            if self._sender is not None:
                try:
                    alive = answer_of(self._sender.alive.remote())
                    await await_named("the sender to answer", alive, self._limit_s)
                except (ProcessDied, TimeoutError):
                    self.close()
            if self._sender is None:
                sender = self._start()
                try:
                    # The sender loads torch first, which may take as long as a start and longer
                    # than an answer.
                    await answer_of(sender.alive.remote())
                except BaseException:
                    _kill(sender)
                    raise
                self._sender = sender
        return self._sender

    def _start(self) -> Any:
        import ray
        from ray.util.scheduling_strategies import NodeAffinitySchedulingStrategy

        here = NodeAffinitySchedulingStrategy(ray.get_runtime_context().get_node_id(), soft=False)
        # Ray must not restart it: a new sender has no communicators, so agents must notice.
        remote_class = ray.remote(num_cpus=0, max_restarts=0)(SenderActor)
        host = ray.util.get_node_ip_address()
        return remote_class.options(scheduling_strategy=here).remote(
            host, self._log_dir, self._limit_s, self._gpu
        )


def _kill(sender: Any) -> None:
    import ray

    ray.kill(sender)


def _close(sender: Any, opening: asyncio.Future[Meeting]) -> None:
    """Close the sender's end of a communicator that no engine will join."""
    if not opening.cancelled() and opening.exception() is None:
        sender.close.remote(opening.result())

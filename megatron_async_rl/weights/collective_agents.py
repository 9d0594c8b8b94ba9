"""Agents of engines: one sender on rank 0's machine, with a communicator to the workers of each
engine (collective.py).

Invariants:
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
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from megatron_async_rl.watchdog import watch
from megatron_async_rl.watchdog.logs import redirect_output
from megatron_async_rl.watchdog.watch import (
    ProcessDied,
    answer_of,
    await_named,
    name_this_process,
)
from megatron_async_rl.weights.agents import (
    Agent,
    AgentContext,
    AgentSource,
    AgentSpec,
    ReceivingEngine,
)
from megatron_async_rl.weights.manifest import Manifest, Meeting, StagedCopy, WeightUpdate

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
    """An `Agent` for an engine's own memory."""

    where: str
    sender: Any
    engine: ReceivingEngine
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


class Communicators(AgentSource):
    """Communicators of all engines, and their sender."""

    def __init__(self, context: AgentContext) -> None:
        self._context = context
        self._sender: Any = None
        self._starting = asyncio.Lock()

    @classmethod
    def of(cls, context: AgentContext) -> Communicators:
        return cls(context)

    async def launch(self, spec: AgentSpec) -> Agent:
        """Return a communicator to the engine of `spec`. Raises ProcessDied if the sender dies, and
        RuntimeError if this machine cannot be reached or the engine no longer exists. A cancelled
        call leaves no port open."""
        sender = await self._running_sender()
        engine = self._context.engine_at(spec.machine)
        if engine is None:
            raise RuntimeError("its engine no longer exists")
        opening = asyncio.ensure_future(answer_of(sender.open.remote(engine.workers)))
        try:
            # Shielded: a cancelled call still has to learn which port to close.
            meeting: Meeting = await asyncio.shield(opening)
        except asyncio.CancelledError:
            opening.add_done_callback(functools.partial(_close, sender))
            raise
        return EngineCommunicator(engine.name, sender, engine, meeting)

    def close(self) -> None:
        sender, self._sender = self._sender, None
        if sender is not None:
            _kill(sender)

    async def _running_sender(self) -> Any:
        async with self._starting:
            if self._sender is not None:
                try:
                    alive = answer_of(self._sender.alive.remote())
                    await await_named("the sender to answer", alive, self._context.limit_s)
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
            host, self._context.log_dir, self._context.limit_s, self._context.sender_gpu
        )


SOURCE = Communicators


def _kill(sender: Any) -> None:
    import ray

    ray.kill(sender)


def _close(sender: Any, opening: asyncio.Future[Meeting]) -> None:
    """Close the sender's end of a communicator that no engine will join."""
    if not opening.cancelled() and opening.exception() is None:
        sender.close.remote(opening.result())

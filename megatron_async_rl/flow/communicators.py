"""Agents of carriers that give each engine its own copy: one communicator per engine, from one
sender.

    controller --receive--> engine: its workers wait for the version
               --send-----> sender, a process on rank 0's machine ==communicator==> workers

Invariants:
- a lost communicator is closed at the sender, and its engine's workers then close their ends;
  other communicators are not affected;
- the sender has its own process: it loads torch, and on a GPU uses memory of rank 0's device. A
  sender that has died or does not answer is replaced when the next communicator starts.
"""

from __future__ import annotations

import asyncio
import functools
import logging
import os
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from megatron_async_rl.flow.engine_task import EngineSlot
from megatron_async_rl.flow.relay_process import Relay, RelaySpec
from megatron_async_rl.rollout.engine_process import Engine
from megatron_async_rl.watchdog import watch
from megatron_async_rl.watchdog.deadline import (
    ProcessDied,
    answer_of,
    await_named,
    name_this_process,
)
from megatron_async_rl.watchdog.logs import redirect_output
from megatron_async_rl.weights.manifest import Manifest, Meeting, StagedCopy, WeightUpdate

NAME = "sender"


class SenderActor:
    """The sender, a Ray actor on rank 0's machine. `gpu`: rank 0's; null: there is none."""

    def __init__(self, host: str, log_dir: Path, limit_s: float, gpu: str | None) -> None:
        redirect_output(log_dir / f"{NAME}.log")
        logging.basicConfig(level=logging.INFO, format="%(asctime)s %(levelname)s %(message)s")
        name_this_process(NAME)
        watch.join(NAME)
        if gpu is not None:  # Ray has given it none
            os.environ["CUDA_VISIBLE_DEVICES"] = gpu
        import torch

        from megatron_async_rl.weights.collective import Sender

        device = torch.device("cpu" if gpu is None else "cuda:0")
        self._sender = Sender(host, device, limit_s)

    async def open(self, workers: int) -> Meeting:
        return await asyncio.to_thread(self._sender.open, workers)

    async def send(self, meeting: Meeting, version: int, manifest: Manifest) -> StagedCopy:
        with watch.doing("work", f"sending version {version}"):
            return await asyncio.to_thread(self._sender.send, meeting, version, manifest)

    async def alive(self) -> None:
        """Answers at once."""

    async def close(self, meeting: Meeting) -> None:
        await asyncio.to_thread(self._sender.close, meeting)


@dataclass
class EngineCommunicator:
    """A `Relay` whose memory is the engine's own."""

    where: str
    sender: Any
    engine: Engine
    meeting: Meeting
    held: int | None = None
    """The version that came last."""

    async def fetch(self, version: int, manifest: Manifest) -> StagedCopy:
        # Only begins to receive: the call returns before any bytes arrive.
        await self.engine.receive(
            WeightUpdate(meeting=self.meeting, version=version, manifest=manifest, kept=self.held)
        )
        copy: StagedCopy = await answer_of(self.sender.send.remote(self.meeting, version, manifest))
        self.held = version
        return copy

    async def alive(self) -> None:
        await answer_of(self.sender.alive.remote())

    async def close(self) -> None:
        await answer_of(self.sender.close.remote(self.meeting))

    def kill(self) -> None:
        self.sender.close.remote(self.meeting)


class Communicators:
    """`engines`: all there are. `limit_s`: longest wait of a communicator for a member or a bucket.
    Ray must be initialised."""

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
        """Raises ProcessDied where the sender dies, and RuntimeError where this machine cannot be
        reached or the engine has gone. A cancelled one leaves no port open."""
        sender = await self._running_sender()
        slot = next((one for one in self._engines() if one.machine == spec.machine), None)
        if slot is None or slot.engine is None:
            raise RuntimeError("its engine has gone")
        opening = asyncio.ensure_future(answer_of(sender.open.remote(slot.spec.rollout.workers)))
        try:
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
                    # It loads torch first: that may take as long as a start, and longer than an
                    # answer.
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

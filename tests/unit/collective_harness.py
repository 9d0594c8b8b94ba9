"""A worker of an engine, as far as it receives weights: a process of its own."""

from __future__ import annotations

import multiprocessing
import os
from multiprocessing.connection import Connection
from pathlib import Path

import torch

from megatron_async_rl.weights import collective
from megatron_async_rl.weights.collective import Receiver
from megatron_async_rl.weights.manifest import WeightUpdate
from megatron_async_rl.weights.shared_memory import SharedMemory

CPU = torch.device("cpu")


class Worker:
    """`number`: its number in the engine."""

    def __init__(self, number: int, folder: Path) -> None:
        spawn = multiprocessing.get_context("spawn")
        self._pipe, other = spawn.Pipe()
        self.process = spawn.Process(target=_serve, args=(other, number, folder), daemon=True)
        self.process.start()
        other.close()

    def receive(self, update: WeightUpdate, *, dies: bool = False) -> None:
        """Begins to receive. `dies`: the process ends with the first bucket that arrived."""
        self._pipe.send((update, dies))
        assert self._pipe.recv() == "begun"

    def close(self) -> None:
        self._pipe.close()
        self.process.join(60)
        self.process.kill()


def _serve(pipe: Connection, number: int, folder: Path) -> None:
    torch.set_num_threads(1)
    receiver = Receiver(number, CPU, SharedMemory(folder))
    while True:
        try:
            update, dies = pipe.recv()
        except EOFError:
            receiver.close()
            return
        if dies:
            collective.damaged_tensor = lambda *_: os._exit(9)  # type: ignore[assignment]
        receiver.receive(update)
        pipe.send("begun")

"""A communicator of the sender and the workers of one engine: NCCL between GPUs, gloo between CPUs,
by the same calls.

Invariants:
- it is not the default process group and does not use it, so the trainer's and vLLM's are not
  disturbed;
- every wait has a limit. A failed one is closed and used no more: others are made in its place;
- a failed operation ends no process: torch's watchdog, which would, does not watch this group.
"""

from __future__ import annotations

import math
import os
import socket
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor
from torch.distributed import PrefixStore, TCPStore

from megatron_async_rl.weights.manifest import IN_FLIGHT, Meeting

BLOCKING_WAIT = "TORCH_NCCL_BLOCKING_WAIT"
"""Read by the constructor of `ProcessGroupNCCL`: with 1, `wait` enforces the limit itself, and the
group gets no watchdog thread."""
CREATION_LIMIT = "TORCH_NCCL_NONBLOCKING_TIMEOUT"
"""Seconds for which torch polls a non-blocking communicator. Read once per process, when it creates
the first one; 30 minutes by default."""


class Communicator:
    """A member's end. Made once all members come, used by one thread."""

    def __init__(self, meeting: Meeting, rank: int, device: torch.device, store: TCPStore) -> None:
        """Raises RuntimeError where a member does not come within the limit."""
        self._limit = meeting.limit
        self._device = device
        self._lanes: list[Tensor | None] = [None] * IN_FLIGHT
        self._lane = 0
        members = PrefixStore("members", store)
        members.set_timeout(self._limit)
        self._group = _group(members, meeting, rank, device)

    def send(self, memory: Tensor, to: int, number: int) -> Callable[[], None]:
        """Begins to send bytes; what it returns waits until they have left."""
        place = self._place(memory)
        if place is not memory:
            place.copy_(memory)
        work = self._group.send([place], to, number)

        def wait() -> None:
            work.wait(self._limit)

        return wait

    def receive(self, memory: Tensor, number: int) -> Callable[[], None]:
        """Begins to receive the sender's bytes; what it returns waits until they are there."""
        place = self._place(memory)
        work = self._group.recv([place], 0, number)

        def wait() -> None:
            work.wait(self._limit)  # with a limit NCCL's, too, waits for the device
            if place is not memory:
                memory.copy_(place)

        return wait

    def close(self) -> None:
        """Members that wait for this one fail. gloo closes its connections as soon as nothing holds
        the group."""
        group, self._group = self._group, None
        if group is not None:
            group.abort()

    def _place(self, memory: Tensor) -> Tensor:
        """Tensor that is sent or received: the host memory itself, or a device buffer for each
        bucket in flight."""
        if self._device.type == "cpu":
            return memory
        self._lane = (self._lane + 1) % IN_FLIGHT
        lane = self._lanes[self._lane]
        if lane is None or lane.numel() < memory.numel():
            lane = torch.empty(memory.numel(), dtype=torch.uint8, device=self._device)
            self._lanes[self._lane] = lane
        return lane[: memory.numel()]


def _group(members: PrefixStore, meeting: Meeting, rank: int, device: torch.device) -> Any:
    size = 1 + meeting.workers
    if device.type == "cuda":
        from torch.distributed import ProcessGroupNCCL

        nccl: Any = ProcessGroupNCCL.Options()
        nccl._timeout = meeting.limit
        # NCCL creates communicators at the first operation. A blocking creation waits for a missing
        # member without limit; a non-blocking one is polled until the limit.
        nccl.config.blocking = 0
        os.environ.setdefault(CREATION_LIMIT, str(math.ceil(meeting.limit_s)))
        # After a timeout the watchdog would end the whole process, the engine's or the sender's,
        # also where the group was aborted.
        with _blocking_wait():
            return ProcessGroupNCCL(members, rank, size, nccl)
    from torch.distributed import ProcessGroupGloo

    gloo: Any = ProcessGroupGloo._Options()
    gloo._timeout = meeting.limit
    # Else gloo listens at what the host's own name resolves to, which may be 127.0.1.1.
    gloo._devices = [ProcessGroupGloo.create_device(hostname=_address_towards(meeting.host))]
    gloo._threads = 2
    return ProcessGroupGloo(members, rank, size, gloo)


@contextmanager
def _blocking_wait() -> Iterator[None]:
    """Set BLOCKING_WAIT for groups that are constructed meanwhile; vLLM's and Megatron's keep their
    watchdog."""
    before = os.environ.get(BLOCKING_WAIT)
    os.environ[BLOCKING_WAIT] = "1"
    try:
        yield
    finally:
        if before is None:
            del os.environ[BLOCKING_WAIT]
        else:
            os.environ[BLOCKING_WAIT] = before


def _address_towards(host: str) -> str:
    """This machine's address, as `host` sees it."""
    family = socket.AF_INET6 if ":" in host else socket.AF_INET
    with socket.socket(family, socket.SOCK_DGRAM) as probe:
        probe.connect((host, 9))  # sends nothing
        address: str = probe.getsockname()[0]
    return address

"""The carrier `collective`: shared memory on every machine, filled over one communicator per
engine: NCCL between GPUs, gloo between CPUs.

    rank 0's machine                             the engine's machine
    ranks -> /dev/shm -> sender ==bucket 0, 2==> worker 0 -> /dev/shm -> all workers of the engine,
                         rank 0 ==bucket 1, 3==> worker 1 ->    "        at its turn to load
                                (ranks 1, 2)

Invariants:
- workers receive a version while the engine samples. Either the whole version arrives, with each
  tensor verified, or `Sender.send` raises. A bucket goes to one worker; the others read it in
  shared memory;
- two buckets are in flight: while one is verified the next ones arrive;
- a communicator that failed is closed on both sides, and a retry opens another;
- there are two slots: a version is received into the slot that does not hold the `kept` version,
  which engines may be reading;
- the communicator is not the default process group and does not use it, so it does not affect those
  of the trainer and of vLLM;
- every wait has a limit, and a failed operation ends no process: torch's watchdog, which would end
  it, does not watch this group.
"""

from __future__ import annotations

import json
import logging
import math
import os
import socket
import threading
import time
from collections import deque
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, replace
from datetime import timedelta
from typing import Any

import torch
from torch import Tensor
from torch.distributed import PrefixStore, TCPStore

from megatron_async_rl.watchdog import watch
from megatron_async_rl.weights.bound_store import listen, serve_store
from megatron_async_rl.weights.manifest import (
    IN_FLIGHT,
    BucketRef,
    Manifest,
    Meeting,
    StagedCopy,
    WeightUpdate,
)
from megatron_async_rl.weights.shared_memory import SharedMemory
from megatron_async_rl.weights.staging import StagingSlot
from megatron_async_rl.weights.transport import Carrier, damaged_tensor, whole_bucket

log = logging.getLogger(__name__)

CARRIER = SharedMemory
"""The memory that ranks write and engines read, each on its own machine."""


class CollectiveFailed(RuntimeError):
    """A version did not reach an engine; the message gives the reason. Its communicator is
    closed."""


@dataclass(eq=False)
class _SenderEnd:
    """Sender's end of an engine's communicator."""

    meeting: Meeting
    store: TCPStore
    local: Communicator | None = None


class Sender:
    """Sender's ends of all communicators, one per engine. `host`: address of this machine for the
    engines. Each communicator permits one call to `send` at a time."""

    def __init__(
        self, host: str, device: torch.device, limit_s: float, carrier: Carrier | None = None
    ) -> None:
        self._host = host
        self._device = device
        self._limit_s = limit_s
        self._reader = (carrier or CARRIER()).reader()
        self._sets: dict[int, _SenderEnd] = {}
        """Sender's ends of the communicators by port."""
        self._paths: dict[int, list[str]] = {}
        """Bucket paths of the two newest versions that were sent."""

    def open(self, workers: int) -> Meeting:
        """Return the rendezvous for an engine of this many workers. Raises OSError if the host is
        not an address of this machine."""
        limit = timedelta(seconds=self._limit_s)
        store = serve_store(listen(self._host), limit)
        meeting = Meeting(host=self._host, port=store.port, workers=workers, limit_s=self._limit_s)
        self._sets[meeting.port] = _SenderEnd(meeting, store)
        return meeting

    def send(self, meeting: Meeting, version: int, manifest: Manifest) -> StagedCopy:
        """Send `version`, staged as `manifest`, to the workers of an engine, which have begun to
        receive it. Raises CollectiveFailed after closing the communicator."""
        began = time.monotonic()
        one = self._sets.get(meeting.port)
        if one is None:
            raise CollectiveFailed("its communicator was closed")
        try:
            self._send_buckets(one, version, manifest)
            paths = _answers(one, version)
        except Exception as error:
            # After any error: a transfer that stopped halfway cannot be resumed.
            self.close(meeting)
            answers = "; ".join(_refusals(one, version)) or str(error)
            raise CollectiveFailed(
                f"version {version} did not reach its workers: {answers}"
            ) from error
        # Paths on the engine's machine, which only its workers can open.
        refs = tuple(replace(ref, path=paths[i]) for i, ref in enumerate(manifest.buckets))
        return StagedCopy(
            manifest=replace(manifest, buckets=refs),
            nbytes=sum(ref.size for ref in refs),
            seconds=time.monotonic() - began,
        )

    def close(self, meeting: Meeting) -> None:
        """Close the engine's communicator."""
        one = self._sets.pop(meeting.port, None)
        if one is not None and one.local is not None:
            one.local.close()

    def _send_buckets(self, one: _SenderEnd, version: int, manifest: Manifest) -> None:
        # Both slots stay mapped, since rank 0 writes them alternately.
        self._paths = dict(sorted({**self._paths, version: manifest.paths}.items())[-2:])
        self._reader.keep({path for paths in self._paths.values() for path in paths})
        if one.local is None:
            one.local = Communicator(one.meeting, 0, self._device, one.store)
        on_their_way: deque[tuple[BucketRef, Callable[[], None]]] = deque()

        def left() -> None:
            ref, wait = on_their_way.popleft()
            wait()
            watch.progress("bytes sent", ref.size)

        for number, ref in enumerate(manifest.buckets):
            # At most this many in flight, because device buffers are reused alternately.
            if len(on_their_way) == IN_FLIGHT:
                left()
            ((_, memory),) = self._reader.read(replace(ref, entries=(whole_bucket(ref),)))
            # Member 0 is the sender.
            to = 1 + number % one.meeting.workers
            on_their_way.append((ref, one.local.send(memory, to, number)))
        while on_their_way:
            left()


class Receiver:
    """One worker's end of the communicator. `worker`: its number in the engine, from 0."""

    def __init__(self, worker: int, device: torch.device, carrier: Carrier | None = None) -> None:
        carrier = carrier or CARRIER()
        self._worker = worker
        self._device = device
        self._slots = (StagingSlot(carrier), StagingSlot(carrier))
        self._versions: list[int | None] = [None, None]
        self._paths: list[list[str]] = [[], []]
        self._writer = carrier.writer()
        self._meeting: Meeting | None = None
        self._store: TCPStore | None = None
        self._local: Communicator | None = None
        self._thread: threading.Thread | None = None

    def receive(self, update: WeightUpdate) -> None:
        """Begin to receive, and return; the sender gets the outcome through the store."""
        # The thread waits for the previous one: one thread at a time uses a communicator.
        work = (update, self._thread)
        self._thread = threading.Thread(target=self._run, args=work, name="weights", daemon=True)
        self._thread.start()

    def close(self) -> None:
        """Free the memory."""
        self._leave()
        self._writer.keep(())
        for slot in self._slots:
            slot.discard_from(0)

    def _run(self, update: WeightUpdate, before: threading.Thread | None) -> None:
        version = update.version
        try:
            if before is not None:  # each of its waits has a limit
                before.join(update.meeting.limit_s)
                if before.is_alive():
                    raise TimeoutError("the delivery before it has not ended")
            local = self._joined(update.meeting)
            answer = {"paths": self._receive(local, update)}
        except Exception as error:
            log.exception("version %d was not received", version)
            # Answer before leaving, so that the sender does not wait for its limit.
            self._answer(version, {"error": f"{type(error).__name__}: {error}"})
            self._leave()
        else:
            self._answer(version, answer)

    def _joined(self, meeting: Meeting) -> Communicator:
        if self._local is None or self._meeting != meeting:
            self._leave()
            self._meeting = meeting
            self._store = TCPStore(
                meeting.host, meeting.port, is_master=False, timeout=meeting.limit
            )
            self._local = Communicator(meeting, 1 + self._worker, self._device, self._store)
        return self._local

    def _leave(self) -> None:
        local, self._local, self._store = self._local, None, None
        if local is not None:
            local.close()

    def _answer(self, version: int, answer: Mapping[str, Any]) -> None:
        try:
            if self._store is not None:
                self._store.set(_key(version, self._worker), json.dumps(answer))
        except RuntimeError as error:  # the sender has ended or closed the store
            log.warning("the outcome of version %d was not reported: %s", version, error)

    def _receive(self, local: Communicator, update: WeightUpdate) -> dict[int, str]:
        """Receive a version; return the paths of this worker's buckets by number."""
        manifest, workers = update.manifest, update.meeting.workers
        # The buckets that the sender assigns to this worker.
        numbers = range(self._worker, len(manifest.buckets), workers)
        slot = 0 if update.kept is None else 1 - self._versions.index(update.kept)
        paths = self._slots[slot].places([manifest.buckets[i].size for i in numbers])
        self._paths[slot] = paths
        self._writer.keep({path for both in self._paths for path in both})
        self._versions[slot] = update.version
        found = dict(zip(numbers, paths, strict=True))

        awaited = iter(numbers)
        on_their_way: deque[tuple[BucketRef, Callable[[], None]]] = deque()

        def await_next() -> None:
            number = next(awaited, None)
            if number is not None:
                ref = replace(manifest.buckets[number], path=found[number])
                memory = self._writer.view(ref, whole_bucket(ref))
                on_their_way.append((ref, local.receive(memory, number)))

        for _ in range(IN_FLIGHT):
            await_next()
        while on_their_way:
            ref, arrived = on_their_way.popleft()
            arrived()
            # The next bucket is in flight while this one is verified.
            await_next()
            wrong = damaged_tensor(self._writer, ref, manifest.digests)
            if wrong is not None:
                raise CollectiveFailed(f"it arrived damaged: tensor {wrong} is not what was staged")
        return found


def _key(version: int, worker: int) -> str:
    return f"{version}/{worker}"


def _answers(one: _SenderEnd, version: int) -> dict[int, str]:
    """Return the paths of a version's buckets on the workers, by number. Raises CollectiveFailed
    for a worker that refused, and RuntimeError for a worker without an answer."""
    paths: dict[int, str] = {}
    for worker in range(one.meeting.workers):
        key = _key(version, worker)
        one.store.wait([key], one.meeting.limit)
        answer = json.loads(one.store.get(key))
        if "error" in answer:
            raise CollectiveFailed(f"worker {worker}: {answer['error']}")
        paths |= {int(number): path for number, path in answer["paths"].items()}
    for worker in range(one.meeting.workers):
        # A second delivery of this version must not find this answer.
        one.store.delete_key(_key(version, worker))
    return paths


def _refusals(one: _SenderEnd, version: int) -> list[str]:
    """Return the reasons of the workers that did not receive a version."""
    keys = {worker: _key(version, worker) for worker in range(one.meeting.workers)}
    try:
        answers = {
            worker: json.loads(one.store.get(key))
            for worker, key in keys.items()
            if one.store.check([key])
        }
    except RuntimeError:
        return []
    return [f"worker {worker}: {a['error']}" for worker, a in answers.items() if "error" in a]


BLOCKING_WAIT = "TORCH_NCCL_BLOCKING_WAIT"
"""Read by the constructor of `ProcessGroupNCCL`: with 1, `wait` enforces the limit itself, and the
group gets no watchdog thread."""
CREATION_LIMIT = "TORCH_NCCL_NONBLOCKING_TIMEOUT"
"""Seconds for which torch polls a non-blocking communicator. Read once per process, when it creates
the first one; 30 minutes by default."""


class Communicator:
    """End of one member, created once all members have joined, and used by one thread."""

    def __init__(self, meeting: Meeting, rank: int, device: torch.device, store: TCPStore) -> None:
        """Raise RuntimeError if a member does not join within the limit."""
        self._limit = meeting.limit
        self._device = device
        self._lanes: list[Tensor | None] = [None] * IN_FLIGHT
        self._lane = 0
        members = PrefixStore("members", store)
        members.set_timeout(self._limit)
        self._group = _group(members, meeting, rank, device)

    def send(self, memory: Tensor, to: int, number: int) -> Callable[[], None]:
        """Begin to send bytes; return a function that waits until they are sent."""
        place = self._place(memory)
        if place is not memory:
            place.copy_(memory)
        work = self._group.send([place], to, number)

        def wait() -> None:
            work.wait(self._limit)

        return wait

    def receive(self, memory: Tensor, number: int) -> Callable[[], None]:
        """Begin to receive the sender's bytes; return a function that waits until they have
        arrived."""
        place = self._place(memory)
        work = self._group.recv([place], 0, number)

        def wait() -> None:
            work.wait(self._limit)  # with a limit, NCCL also waits for the device
            if place is not memory:
                memory.copy_(place)

        return wait

    def close(self) -> None:
        """Abort the group, so that waiting members fail. gloo closes its connections once no object
        refers to the group."""
        group, self._group = self._group, None
        if group is not None:
            group.abort()

    def _place(self, memory: Tensor) -> Tensor:
        """Return the tensor that is sent or received: the host memory itself, or a device buffer
        for each bucket in flight."""
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
        # NCCL creates communicators at the first operation. Blocking creation waits for a missing
        # member without limit; non-blocking creation is polled until the limit.
        nccl.config.blocking = 0
        os.environ.setdefault(CREATION_LIMIT, str(math.ceil(meeting.limit_s)))
        # After a timeout the watchdog would end the whole process, the engine's or the sender's,
        # even if the group was aborted.
        with _blocking_wait():
            return ProcessGroupNCCL(members, rank, size, nccl)
    from torch.distributed import ProcessGroupGloo

    gloo: Any = ProcessGroupGloo._Options()
    gloo._timeout = meeting.limit
    # By default gloo listens at the address of the host's own name, which may be 127.0.1.1.
    gloo._devices = [ProcessGroupGloo.create_device(hostname=_address_towards(meeting.host))]
    gloo._threads = 2
    return ProcessGroupGloo(members, rank, size, gloo)


@contextmanager
def _blocking_wait() -> Iterator[None]:
    """Set BLOCKING_WAIT for groups constructed in the body; the groups of vLLM and Megatron keep
    their watchdog."""
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
    """Return this machine's address as `host` sees it."""
    family = socket.AF_INET6 if ":" in host else socket.AF_INET
    with socket.socket(family, socket.SOCK_DGRAM) as probe:
        probe.connect((host, 9))  # sends nothing
        address: str = probe.getsockname()[0]
    return address

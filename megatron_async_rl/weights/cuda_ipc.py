"""The carrier `cuda_ipc`: buckets pass from the policy's devices to paused engines on the same
devices. Host memory holds nothing of a version, and a device holds two buckets of it.

    each rank:  its parts --> bucket on its device --summed over all ranks--> the whole bucket
                                                                               |  memory handle
    each worker of an engine, on one of these devices:  maps it, loads from it, answers
                                                        and then the ranks may write it again

The staged weights are the policy's own parameters. They do not change until the next step trains,
and no engine loads then (flow/updates.py). An engine that restarts or joins before that gets the
same buckets again. On a CPU the memory is a file in /dev/shm; everything else is the same.

Invariants:
- of the two places on a device one is read while the other is filled; the controller decides which
  (flow/ipc_buckets.py), and a place is filled only while no engine reads it;
- every device of the ranks has the whole bucket, so an engine needs no access to another device;
- digests are computed from the ranks' parameters, before a bucket is filled;
- places are released when no engine is loading. A worker unmaps them after its last bucket; a
  killed engine holds none of their memory;
- all ranks fill a bucket, or all raise.

The memory comes from CUDA's driver, not from torch's allocator, for two reasons. Torch's memory may
be in expandable segments, which other processes can map only if they may read each other's file
descriptors. And torch never frees memory that it has shared with a process that was killed. vLLM's
own backend (`ipc`) uses torch's memory.
"""

from __future__ import annotations

import ctypes
import functools
import json
from collections.abc import Callable, Collection, Iterable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor

from megatron_async_rl.watchdog import watch
from megatron_async_rl.weights.manifest import IN_FLIGHT, BucketRef, Manifest, TensorEntry
from megatron_async_rl.weights.shared_memory import SharedMemory
from megatron_async_rl.weights.staging import NotStaged, Staging, StagingRanks
from megatron_async_rl.weights.transport import (
    ALIGNMENT,
    BucketMemory,
    Carrier,
    ShardSlice,
    TensorSpec,
    TransportReader,
    TransportWriter,
    size_of,
    view_of,
    whole_bucket,
)

HANDLE_BYTES = 64
HOST = "cpu"
"""Name of the device of a process without CUDA."""
_LAZY_PEER_ACCESS = 1
_OUT_OF_MEMORY = 2


class CudaIpc(Carrier):
    """Carrier in memory of `device`; None: this process's device."""

    def __init__(self, device: torch.device | None = None) -> None:
        device = device or torch.device("cuda" if torch.cuda.is_available() else "cpu")
        if device.type == "cuda" and device.index is None:
            device = torch.device("cuda", torch.cuda.current_device())
        self._device = device
        self._host = SharedMemory() if self._device.type == "cpu" else None
        self._places: dict[str, DeviceBucketMemory] = {}

    @classmethod
    def on(cls, device: torch.device) -> CudaIpc:
        return cls(device)

    @property
    def device(self) -> str:
        """Name of the device, the same in every process that uses it."""
        if self._host is not None:
            return HOST
        return f"GPU-{torch.cuda.get_device_properties(self._device).uuid}"

    def place(self, size: int) -> BucketMemory:
        if self._host is not None:
            return self._host.place(size)
        place = DeviceBucketMemory(size, self._device)
        self._places[place.path] = place
        return place

    def writer(self) -> TransportWriter:
        return DeviceWriter(self._places) if self._host is None else self._host.writer()

    def reader(self) -> TransportReader:
        return DeviceReader(self.device, self._device)


CARRIER = CudaIpc


class IpcBuckets(Staging):
    """Staging whose buckets are filled on demand from the parameters of all `ranks`. One thread of
    each rank uses it."""

    on_demand = True

    def __init__(self, carrier: CudaIpc, ranks: StagingRanks | None = None) -> None:
        """Collective: every rank makes the object."""
        super().__init__(carrier, ranks)
        self._device = carrier.device
        self._buckets: Sequence[BucketRef] = ()
        self._memory: list[tuple[BucketMemory, Tensor, str] | None] = [None] * IN_FLIGHT
        """Each place: its memory, the same as a tensor, and its handles on every device as JSON."""

    def stage(
        self,
        version: int,
        buckets: Sequence[Sequence[TensorSpec]],
        parts: Iterable[ShardSlice],
        when_free: Callable[[], None] = lambda: None,
    ) -> Manifest:
        # The places contain buckets of the previous version.
        self.release()
        manifest = super().stage(version, buckets, parts, when_free)
        self._buckets = manifest.buckets
        return replace(manifest, on_demand=True)

    def fill(self, number: int, place: int, parts: Iterable[ShardSlice]) -> BucketRef:
        """Fill a place on every device with a bucket of the version; return its location.
        Collective. parts: this rank's parts of the bucket; each is copied before the next is
        requested.

        Raises this rank's own error, or NotStaged if only another rank failed.
        """
        own, memory, paths = self._memory[place] or self._make(place)
        ref = replace(self._buckets[number], path=own.path, size=own.size)
        entries = {entry.name: entry for entry in ref.entries}
        # Only this bucket's words, because a place has room for the largest bucket.
        memory = memory[: _whole_words(size_of(ref.entries))]

        def write() -> None:
            for part in parts:
                self._put(part, ref, entries[part.name])

        alone = len(self.reached) == 1
        if not alone:
            # The parts of other ranks are added to these zeros.
            memory.zero_()
        failure = _failure_of(write)
        # Each byte comes from one rank, and is zero on the others.
        self._ranks.summed(memory.view(torch.int64))
        if memory.is_cuda:
            # Engines read from other processes, which no stream of this one orders.
            torch.cuda.synchronize(memory.device)
        # After the collective, which every rank must reach, even after an error.
        self._agree(failure, f"fill bucket {number}")
        watch.progress("buckets shared")
        return replace(ref, path=paths)

    def release(self) -> None:
        """Free the memory of the places; engines must have stopped reading."""
        # Views first: they must not outlive their memory.
        self._writer.keep(())
        for index, made in enumerate(self._memory):
            self._memory[index] = None
            if made is not None:
                made[0].close()

    def close(self) -> None:
        self.release()
        super().close()

    def _reached(self) -> list[bool]:
        return self._ranks.gathered(True)

    def _open(
        self, entries: Sequence[Sequence[TensorEntry]], when_free: Callable[[], None]
    ) -> list[str]:
        when_free()
        # No memory yet: staging only computes the digests.
        return [""] * len(entries)

    def _put(self, part: ShardSlice, ref: BucketRef, entry: TensorEntry) -> None:
        if ref.path:  # while a version is staged, no bucket has memory
            super()._put(part, ref, entry)

    def _make(self, index: int) -> tuple[BucketMemory, Tensor, str]:
        """Allocate a place on every rank's device, large enough for any bucket. Collective."""
        made: list[BucketMemory] = []

        def make() -> None:
            size = max(_whole_words(ref.size) for ref in self._buckets)
            made.append(self._carrier.place(size))

        failure = _failure_of(make)
        # A rank that failed takes part, too, or the others would hang.
        where = self._ranks.gathered((self._device, made[0].path if made else ""))
        try:
            self._agree(failure, "take memory for a bucket")
        except Exception:
            for one in made:
                one.close()
            raise
        (place,) = made
        ref = BucketRef(path=place.path, size=place.size, nbytes=0, entries=())
        memory = self._writer.view(ref, whole_bucket(ref))
        # Ranks without CUDA share a device name; any rank's memory will do, so use the first.
        found = place, memory, json.dumps(dict(reversed(where)))
        self._memory[index] = found
        return found

    def _agree(self, failure: Exception | None, what: str) -> None:
        failed = sum(self._ranks.gathered(failure is not None))
        if failure is not None:
            raise failure
        if failed:
            raise NotStaged(f"{failed} other ranks could not {what} of the weights")


STAGING = IpcBuckets


def _failure_of(work: Callable[[], None]) -> Exception | None:
    try:
        work()
    except Exception as error:  # noqa: BLE001 - raised once the other ranks know
        return error
    return None


def _whole_words(size: int) -> int:
    return -(-size // ALIGNMENT) * ALIGNMENT


class DeviceWriter(TransportWriter):
    """A rank's end on CUDA. places: this rank's own places by path."""

    def __init__(self, places: dict[str, DeviceBucketMemory]) -> None:
        self._places = places

    def reaches(self, path: str) -> bool:
        return path in self._places

    def view(self, ref: BucketRef, entry: TensorEntry) -> Tensor:
        return view_of(self._places[ref.path].memory, entry)

    def keep(self, paths: Collection[str]) -> None:
        for path in self._places.keys() - set(paths):
            del self._places[path]


class DeviceReader(TransportReader):
    """A worker's end on its device."""

    # The place is filled again once the worker requests the next bucket.
    lasting = False

    def __init__(self, name: str, device: torch.device) -> None:
        self._name = name
        self._device = device
        self._host = SharedMemory().reader() if name == HOST else None
        self._mapped: dict[str, MappedBucketMemory] = {}

    def read(self, ref: BucketRef) -> Iterator[tuple[str, Tensor]]:
        """Yield the bucket's tensors. Raises ValueError if no rank has memory on this device, and
        RuntimeError for memory that cannot be mapped."""
        where: dict[str, str] = json.loads(ref.path)
        if self._name not in where:
            raise ValueError(
                f"weights.transport: cuda_ipc has no bucket on {self._name}, this engine's device:"
                f" ranks of the policy are on {', '.join(sorted(where))}. Give both the same"
                " devices (CUDA_VISIBLE_DEVICES, policy.parallel.ranks), or set weights.transport:"
                " shared_memory"
            )
        path = where[self._name]
        if self._host is not None:
            yield from self._host.read(replace(ref, path=path))
            return
        if path not in self._mapped:
            self._mapped[path] = MappedBucketMemory(path, ref.size, self._device)
        for entry in ref.entries:
            yield entry.name, view_of(self._mapped[path].memory, entry)

    def keep(self, paths: Collection[str]) -> None:
        kept = {own for path in paths for own in json.loads(path).values()}
        if self._host is not None:
            self._host.keep(kept)
        for path in self._mapped.keys() - kept:
            self._mapped.pop(path).close()


class DeviceBucketMemory(BucketMemory):
    """CUDA memory that other processes can map. `path`: its handle, in hexadecimal digits."""

    def __init__(self, size: int, device: torch.device) -> None:
        """Raise torch.OutOfMemoryError, or RuntimeError if the driver refuses for another
        reason."""
        self.size = size
        self._device = device
        self._pointer = ctypes.c_uint64()
        handle = _Handle()
        torch.cuda.empty_cache()  # torch keeps freed memory, which the driver then lacks
        with _context(device):
            _call("cuMemAlloc_v2", ctypes.byref(self._pointer), ctypes.c_size_t(size))
            try:
                _call("cuIpcGetMemHandle", ctypes.byref(handle), self._pointer)
            except BaseException:
                self.close()
                raise
        self.path = bytes(handle).hex()
        self.memory = _tensor(self._pointer, size, device)

    def close(self) -> None:
        with _context(self._device):
            _call("cuMemFree_v2", self._pointer)


class MappedBucketMemory:
    """Mapping of another process's memory at `path`."""

    def __init__(self, path: str, size: int, device: torch.device) -> None:
        self._device = device
        self._pointer = ctypes.c_uint64()
        opened, handle = ctypes.byref(self._pointer), _Handle.from_buffer_copy(bytes.fromhex(path))
        with _context(device):
            _call("cuIpcOpenMemHandle_v2", opened, handle, ctypes.c_uint(_LAZY_PEER_ACCESS))
        self.memory = _tensor(self._pointer, size, device)

    def close(self) -> None:
        with _context(self._device):
            _call("cuIpcCloseMemHandle", self._pointer)


class _Handle(ctypes.Structure):
    _fields_ = (("content", ctypes.c_ubyte * HANDLE_BYTES),)


class _Exposed:
    """CUDA memory with the interface that torch accepts."""

    def __init__(self, pointer: int, size: int) -> None:
        self.__cuda_array_interface__ = {
            "data": (pointer, False),
            "shape": (size,),
            "typestr": "|u1",
            "version": 2,
        }


def _tensor(pointer: ctypes.c_uint64, size: int, device: torch.device) -> Tensor:
    """Return the memory as a tensor, [size] uint8."""
    return torch.as_tensor(_Exposed(pointer.value, size), device=device)


@contextmanager
def _context(device: torch.device) -> Iterator[None]:
    """Make `device` current for the driver's calls, after all work on it has ended."""
    with torch.cuda.device(device):
        torch.cuda.synchronize()
        yield


@functools.cache
def _driver() -> Any:
    return ctypes.CDLL("libcuda.so.1")


def _call(function: str, *arguments: Any) -> None:
    """Call the driver. Raises RuntimeError with the driver's name of the error, or
    torch.OutOfMemoryError."""
    code = getattr(_driver(), function)(*arguments)
    if not code:
        return
    name = ctypes.c_char_p()
    _driver().cuGetErrorName(code, ctypes.byref(name))
    message = f"{function} failed: {name.value.decode() if name.value else f'error {code}'}"
    if code == _OUT_OF_MEMORY:
        raise torch.OutOfMemoryError(f"CUDA out of memory: {message}")
    raise RuntimeError(message)

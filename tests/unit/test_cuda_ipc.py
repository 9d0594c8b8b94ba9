"""Versions that are shared bucket by bucket out of two places on a device: what engines read there,
who may read it, and how all ranks end where one of them fails. Here the memory is a CPU's
(tests/gpu/test_cuda_ipc.py: CUDA's)."""

from __future__ import annotations

import ctypes
import json
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from megatron_async_rl.watchdog.events import out_of_memory
from megatron_async_rl.watchdog.run_folder import WEIGHTS_PREFIX
from megatron_async_rl.weights import cuda_ipc
from megatron_async_rl.weights.cuda_ipc import CudaIpc, DeviceReader, IpcBuckets
from megatron_async_rl.weights.digest import tensor_digest
from megatron_async_rl.weights.manifest import IN_FLIGHT, BucketRef, Manifest, TensorEntry
from megatron_async_rl.weights.shared_memory import SharedMemory
from megatron_async_rl.weights.staging import NotStaged
from megatron_async_rl.weights.transport import ShardSlice
from tests.staged import specs

CPU = torch.device("cpu")


@pytest.fixture(autouse=True)
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    """Folder that replaces /dev/shm; it must be empty at the end."""
    monkeypatch.setattr(cuda_ipc, "SharedMemory", lambda: SharedMemory(tmp_path))
    yield tmp_path
    assert not list(tmp_path.glob(f"{WEIGHTS_PREFIX}*"))


def weights(version: int) -> list[dict[str, torch.Tensor]]:
    """Five buckets of different sizes."""
    generator = torch.Generator().manual_seed(version)
    return [
        {
            f"odd{number}": torch.randn(3, 7, generator=generator).to(torch.bfloat16),
            f"large{number}": torch.randn(40 + number, 10, generator=generator),
            f"empty{number}": torch.empty(0, 4),
        }
        for number in range(5)
    ]


def parts_of(
    bucket: dict[str, torch.Tensor], rank: int = 0, ranks: int = 1
) -> Iterator[ShardSlice]:
    """A rank's rows."""
    for name, tensor in bucket.items():
        start, end = (len(tensor) * one // ranks for one in (rank, rank + 1))
        yield ShardSlice(name, start, 0, tensor[start:end])


def stage(staging: IpcBuckets, version: int, rank: int = 0, ranks: int = 1) -> Manifest:
    buckets = weights(version)
    parts = (part for bucket in buckets for part in parts_of(bucket, rank, ranks))
    return staging.stage(version, specs(buckets), parts)


def files(folder: Path) -> list[Path]:
    return list(folder.glob(f"{WEIGHTS_PREFIX}*"))


def test_every_bucket_comes_whole_out_of_two_places(folder: Path) -> None:
    staging, reader = IpcBuckets(CudaIpc(CPU)), CudaIpc(CPU).reader()
    for version in (1, 2):
        manifest = stage(staging, version)
        assert manifest.on_demand
        assert files(folder) == []
        for number, bucket in enumerate(weights(version)):
            ref = staging.fill(number, number % IN_FLIGHT, parts_of(bucket))
            found = dict(reader.read(ref))
            assert list(found) == list(bucket)
            for name, tensor in bucket.items():
                assert torch.equal(found[name], tensor), name
                assert manifest.digests[name] == tensor_digest(tensor), name
            assert len(files(folder)) == min(number + 1, IN_FLIGHT)
        reader.keep(())
        staging.release()
        assert files(folder) == []
    staging.close()


def test_a_version_staged_anew_takes_the_memory_of_the_one_before(folder: Path) -> None:
    staging = IpcBuckets(CudaIpc(CPU))
    stage(staging, 1)
    staging.fill(0, 0, parts_of(weights(1)[0]))
    stage(staging, 2)
    assert files(folder) == []
    staging.close()


def test_an_engine_on_another_device_than_any_rank_is_refused_by_name() -> None:
    there = BucketRef(path=json.dumps({"GPU-a": "00", "GPU-b": "11"}), size=8, nbytes=8, entries=())
    with pytest.raises(
        ValueError, match=r"no bucket on cpu.*ranks of the policy are on GPU-a, GPU-b"
    ):
        list(CudaIpc(CPU).reader().read(there))


class Gang:
    """Ranks as threads of this process."""

    def __init__(self, count: int) -> None:
        self.count = count
        self._barrier = threading.Barrier(count, timeout=60)
        self._given: list[Any] = [None] * count

    def run(self, body: Callable[[Member], Any]) -> list[Any]:
        """Run `body` on each rank; returns the results and exceptions."""
        found: list[Any] = [None] * self.count

        def work(rank: int) -> None:
            try:
                found[rank] = body(Member(self, rank))
            except Exception as error:  # noqa: BLE001 - the test looks at it
                found[rank] = error

        threads = [threading.Thread(target=work, args=(rank,)) for rank in range(self.count)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join(60)
        return found

    def exchange(self, rank: int, mine: Any) -> list[Any]:
        self._given[rank] = mine
        self._barrier.wait()
        found = list(self._given)
        self._barrier.wait()
        return found


class Member:
    def __init__(self, gang: Gang, rank: int) -> None:
        self.gang, self.rank = gang, rank

    def gathered(self, mine: Any) -> list[Any]:
        return self.gang.exchange(self.rank, mine)

    def from_rank_zero(self, make: Callable[[], Any]) -> Any:
        return self.gathered(make() if self.rank == 0 else None)[0]

    def summed(self, numbers: torch.Tensor) -> torch.Tensor:
        total = torch.stack(self.gathered(numbers.clone())).sum(0)
        numbers.copy_(total)
        self.gathered(None)
        return numbers


def test_each_rank_has_the_whole_bucket_of_which_it_gave_its_rows(folder: Path) -> None:
    """Each rank's own memory, also where it held another bucket before."""
    found: dict[tuple[int, int], dict[str, torch.Tensor]] = {}

    def body(rank: Member) -> tuple[dict[str, str], list[str]]:
        staging = IpcBuckets(CudaIpc(CPU), rank)
        manifest, paths = stage(staging, 1, rank.rank, 3), []
        for number, bucket in enumerate(weights(1)):
            ref = staging.fill(number, number % IN_FLIGHT, parts_of(bucket, rank.rank, 3))
            own = staging._memory[number % IN_FLIGHT]
            assert own is not None
            mine = BucketRef(
                path=json.dumps({"cpu": own[0].path}), size=ref.size, nbytes=0, entries=ref.entries
            )
            read = CudaIpc(CPU).reader().read(mine)
            found[number, rank.rank] = {name: tensor.clone() for name, tensor in read}
            paths.append(ref.path)
        rank.gathered(None)
        staging.close()
        return dict(manifest.digests), paths

    (digests, paths), *others = Gang(3).run(body)
    assert others == [(digests, paths)] * 2
    for number, bucket in enumerate(weights(1)):
        for rank in range(3):
            assert all(torch.equal(found[number, rank][name], t) for name, t in bucket.items())
    assert digests == {
        name: tensor_digest(t) for bucket in weights(1) for name, t in bucket.items()
    }


@pytest.mark.parametrize("when", ["it takes memory", "it cuts its parts"])
def test_where_one_rank_cannot_fill_all_raise_and_none_waits(
    when: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    def body(rank: Member) -> None:
        staging = IpcBuckets(CudaIpc(CPU), rank)
        stage(staging, 1, rank.rank, 2)

        def broken(*_: Any) -> Any:
            raise torch.OutOfMemoryError("CUDA out of memory")

        if rank.rank == 1 and when == "it takes memory":
            staging._carrier.place = broken  # type: ignore[method-assign]
        if rank.rank == 1 and when == "it cuts its parts":
            staging._put = broken  # type: ignore[method-assign]
        try:
            staging.fill(0, 0, parts_of(weights(1)[0], rank.rank, 2))
        finally:
            staging.close()

    one, other = Gang(2).run(body)
    assert isinstance(one, NotStaged)
    assert "1 other ranks could not" in str(one)
    assert isinstance(other, torch.OutOfMemoryError)


class FakeDriver:
    """CUDA driver whose functions fail. `refuses`: codes by function."""

    def __init__(self, **refuses: int) -> None:
        self.calls: list[str] = []
        self._refuses = refuses

    def __getattr__(self, function: str) -> Callable[..., int]:
        def call(*arguments: Any) -> int:
            self.calls.append(function)
            if function == "cuGetErrorName":
                arguments[1]._obj.value = b"CUDA_ERROR_OF_A_KIND"
            return self._refuses.get(function, 0)

        return call


def test_what_the_driver_refuses_is_named_and_memory_that_is_out_is_known_as_that(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    driver = FakeDriver(cuMemAlloc_v2=2, cuIpcOpenMemHandle_v2=201)
    monkeypatch.setattr(cuda_ipc, "_driver", lambda: driver)
    with pytest.raises(torch.OutOfMemoryError, match="cuMemAlloc_v2 failed: CUDA_ERROR") as out:
        cuda_ipc._call("cuMemAlloc_v2", ctypes.c_size_t(8))
    assert out_of_memory(out.value)
    with pytest.raises(RuntimeError, match="cuIpcOpenMemHandle_v2 failed: CUDA_ERROR_OF_A_KIND"):
        cuda_ipc._call("cuIpcOpenMemHandle_v2")
    cuda_ipc._call("cuMemFree_v2")


def test_a_worker_maps_each_place_once_and_lets_go_of_all_with_the_last_bucket(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    log: list[str] = []

    class Mapped:
        def __init__(self, path: str, size: int, device: torch.device) -> None:
            log.append(f"map {path}")
            self._path = path
            self.memory = torch.arange(size, dtype=torch.uint8)

        def close(self) -> None:
            log.append(f"unmap {self._path}")

    monkeypatch.setattr(cuda_ipc, "MappedBucketMemory", Mapped)
    reader = DeviceReader("GPU-a", CPU)
    for place in ("00", "11", "00"):
        path = json.dumps({"GPU-b": "33", "GPU-a": place})
        ref = BucketRef(path=path, size=64, nbytes=0, entries=())
        assert list(reader.read(ref)) == []
    assert log == ["map 00", "map 11"]
    reader.keep(())
    assert sorted(log[2:]) == ["unmap 00", "unmap 11"]


class MemoryDriver:
    """CUDA driver that records its calls, and torch's calls before them. `handle`: result of
    cuIpcGetMemHandle."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch, handle: int = 0) -> None:
        self.calls: list[Any] = []
        self._handle = handle
        monkeypatch.setattr(cuda_ipc, "_driver", lambda: self)
        monkeypatch.setattr(torch.cuda, "device", self.device)
        for name in ("synchronize", "empty_cache"):
            monkeypatch.setattr(torch.cuda, name, lambda *_, name=name: self.calls.append(name))
        monkeypatch.setattr(torch, "as_tensor", self.as_tensor)

    @contextmanager
    def device(self, device: torch.device) -> Iterator[None]:
        self.calls.append(str(device))
        yield
        self.calls.append("leave")

    def as_tensor(self, exposed: Any, device: torch.device) -> torch.Tensor:
        self.calls.append((exposed.__cuda_array_interface__, str(device)))
        return torch.arange(exposed.__cuda_array_interface__["shape"][0], dtype=torch.uint8)

    def cuMemAlloc_v2(self, pointer: Any, size: Any) -> int:
        pointer._obj.value = 4096
        self.calls.append(("alloc", size.value))
        return 0

    def cuIpcGetMemHandle(self, handle: Any, pointer: Any) -> int:
        handle._obj.content[:] = range(64)
        self.calls.append(("handle", pointer.value))
        return self._handle

    def cuMemFree_v2(self, pointer: Any) -> int:
        self.calls.append(("free", pointer.value))
        return 0

    def cuIpcOpenMemHandle_v2(self, pointer: Any, handle: Any, flags: Any) -> int:
        pointer._obj.value = 8192
        self.calls.append(("open", bytes(handle).hex(), flags.value))
        return 0

    def cuIpcCloseMemHandle(self, pointer: Any) -> int:
        self.calls.append(("close", pointer.value))
        return 0

    def cuGetErrorName(self, code: int, name: Any) -> int:
        return 1


def exposed(pointer: int, size: int) -> dict[str, Any]:
    """Return version 2 of the CUDA array interface of writable bytes."""
    return {"data": (pointer, False), "shape": (size,), "typestr": "|u1", "version": 2}


HANDLE = bytes(range(64)).hex()


def test_memory_of_a_device_is_allocated_shared_mapped_and_freed(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    driver = MemoryDriver(monkeypatch)
    device = torch.device("cuda", 1)
    monkeypatch.setattr(
        torch.cuda, "get_device_properties", lambda one: SimpleNamespace(uuid=f"u{one.index}")
    )
    carrier = CudaIpc(device)
    assert carrier.device == "GPU-u1"
    assert CudaIpc.on(device)._device == device
    place, writer = carrier.place(128), carrier.writer()
    assert driver.calls == [
        *("empty_cache", "cuda:1", "synchronize", ("alloc", 128), ("handle", 4096), "leave"),
        (exposed(4096, 128), "cuda:1"),
    ]
    assert (place.path, place.size) == (HANDLE, 128)
    entry = TensorEntry(name="w", dtype="uint8", shape=(2, 3), offset=64, nbytes=6)
    ref = BucketRef(path=HANDLE, size=128, nbytes=6, entries=(entry,))
    assert writer.reaches(HANDLE)
    assert not writer.reaches("")
    assert writer.view(ref, entry).tolist() == [[64, 65, 66], [67, 68, 69]]
    writer.keep([HANDLE])
    assert writer.reaches(HANDLE)
    writer.keep(())
    assert not writer.reaches(HANDLE)

    driver.calls.clear()
    reader = carrier.reader()
    assert not reader.lasting
    there = replace(ref, path=json.dumps({"GPU-u1": HANDLE}))
    assert {name: tensor.tolist() for name, tensor in reader.read(there)} == {
        "w": [[64, 65, 66], [67, 68, 69]]
    }
    reader.keep([there.path])
    assert driver.calls == [
        *("cuda:1", "synchronize", ("open", HANDLE, 1), "leave"),
        (exposed(8192, 128), "cuda:1"),
    ]
    driver.calls.clear()
    reader.keep(())
    place.close()
    assert driver.calls == [
        *("cuda:1", "synchronize", ("close", 8192), "leave"),
        *("cuda:1", "synchronize", ("free", 4096), "leave"),
    ]
    assert IpcBuckets.on_demand

    monkeypatch.setattr(torch.cuda, "current_device", lambda: 3)
    assert CudaIpc(torch.device("cuda"))._device == torch.device("cuda", 3)


def test_memory_that_cannot_be_shared_is_freed(monkeypatch: pytest.MonkeyPatch) -> None:
    driver = MemoryDriver(monkeypatch, handle=201)
    with pytest.raises(RuntimeError, match="cuIpcGetMemHandle failed: error 201"):
        CudaIpc(torch.device("cuda", 0)).place(64)
    assert driver.calls[3:] == [
        *(("alloc", 64), ("handle", 4096)),
        *("cuda:0", "synchronize", ("free", 4096), "leave"),
    ]

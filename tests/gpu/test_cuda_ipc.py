"""Buckets that another process maps on the same GPU: the bytes are the same, two buckets of memory
are used and none afterwards, even if that process is killed while it maps a bucket."""

from __future__ import annotations

import json
import multiprocessing
import time
from collections.abc import Callable, Iterator
from dataclasses import replace
from multiprocessing.connection import Connection
from typing import Any

import pytest
import torch

from megatron_async_rl.weights.cuda_ipc import CudaIpc, IpcBuckets
from megatron_async_rl.weights.digest import tensor_digest
from megatron_async_rl.weights.manifest import IN_FLIGHT, BucketRef
from tests.gpu.hardware import DEVICE, ON_CUDA, ON_DEVICE
from tests.staged import parts, specs

MIB = 2**20
BUCKETS, ROWS, COLUMNS = 6, (16384 if DEVICE == "cuda" else 64), 2048
NBYTES = ROWS * COLUMNS * 2
"""Size of each bucket: 64 MiB on a GPU."""
ANSWER_S = 120.0


def bucket_of(number: int) -> dict[str, torch.Tensor]:
    draw = torch.Generator(DEVICE).manual_seed(number)
    rows = [ROWS // 4, ROWS - ROWS // 4]
    return {
        f"{number}.{part}": torch.randn(count, COLUMNS, device=DEVICE, generator=draw).bfloat16()
        for part, count in enumerate(rows)
    }


class Worker:
    """The part of an engine's worker that receives buckets, with separate memory for all of
    them."""

    def __init__(self) -> None:
        spawn = multiprocessing.get_context("spawn")
        self._pipe, other = spawn.Pipe()
        self.process = spawn.Process(target=serve, args=(other, DEVICE), daemon=True)
        self.process.start()
        other.close()
        self.answer()

    def ask(self, what: str, *arguments: Any) -> Any:
        self._pipe.send((what, arguments))
        return self.answer()

    def answer(self) -> Any:
        assert self._pipe.poll(ANSWER_S), "the other process does not answer"
        answer = self._pipe.recv()
        if isinstance(answer, Exception):
            raise answer
        return answer

    def end(self) -> None:
        self.process.kill()
        self.process.join(ANSWER_S)


def serve(pipe: Connection, device: str) -> None:
    """Serve requests: take(ref) copies the bucket; map(ref) only maps it; digests() returns those
    of the copies."""
    own = [torch.empty(NBYTES // 2, dtype=torch.bfloat16, device=device) for _ in range(BUCKETS)]
    taken: dict[str, torch.Tensor] = {}
    reader = CudaIpc(torch.device(device)).reader()
    pipe.send("ready")
    while True:
        what, arguments = pipe.recv()
        answer: Any = None
        try:
            if what in ("take", "map"):
                start = 0
                for name, tensor in reader.read(arguments[0]):
                    if what == "take":
                        place = own[int(name.partition(".")[0])]
                        place = place[start : start + tensor.numel()].view(tensor.shape)
                        taken[name] = place.copy_(tensor)
                        start += tensor.numel()
                if device == "cuda":
                    torch.cuda.synchronize()
            elif what == "let go":
                reader.keep(())
            else:
                answer = {name: tensor_digest(tensor) for name, tensor in taken.items()}
        except Exception as error:  # noqa: BLE001 - the other end raises it
            answer = error
        pipe.send(answer)


@pytest.fixture
def worker() -> Iterator[Worker]:
    one = Worker()
    yield one
    one.end()


@pytest.fixture
def staging() -> Iterator[IpcBuckets]:
    one = IpcBuckets(CudaIpc(torch.device(DEVICE)))
    yield one
    one.close()


def publish(
    staging: IpcBuckets, worker: Worker, count: int, after: Callable[[], None] = lambda: None
) -> None:
    """Send a version of `count` buckets. `after`: called while two of them exist."""
    buckets = [bucket_of(number) for number in range(count)]
    manifest = staging.stage(1, specs(buckets), parts(buckets))
    ref = staging.fill(0, 0, parts(buckets[:1]))
    for number in range(count):
        ahead = number + 1
        following = ref
        if ahead < count:
            following = staging.fill(ahead, ahead % IN_FLIGHT, parts([buckets[ahead]]))
        after()
        worker.ask("take", ref)
        ref = following
    worker.ask("let go")
    staging.release()
    assert worker.ask("digests") == manifest.digests


@pytest.mark.parametrize("count", [pytest.param(BUCKETS, marks=ON_DEVICE)])
def test_another_process_takes_what_was_filled(
    staging: IpcBuckets, worker: Worker, count: int
) -> None:
    publish(staging, worker, count)
    publish(staging, worker, count)


@pytest.mark.parametrize("count", [pytest.param(BUCKETS, marks=ON_CUDA)])
def test_it_does_so_where_torch_allocates_in_expandable_segments(
    staging: IpcBuckets, worker: Worker, count: int
) -> None:
    """Another process could map these only if it may read this one's file descriptors."""
    torch.cuda.memory._set_allocator_settings("expandable_segments:True")
    try:
        publish(staging, worker, count)
    finally:
        torch.cuda.memory._set_allocator_settings("expandable_segments:False")


def used() -> int:
    """Return the bytes of the device's memory in use, by all processes."""
    torch.cuda.synchronize()
    torch.cuda.empty_cache()
    free, total = torch.cuda.mem_get_info()
    return total - free


def until_used(at_most: int) -> int:
    """Return the bytes in use, once they are at most `at_most`: the driver reclaims a killed
    process's memory after the process has ended."""
    until = time.monotonic() + 30.0
    while (found := used()) > at_most and time.monotonic() < until:
        time.sleep(0.1)
    return found


def settled() -> int:
    """Return the bytes in use, once they have not changed for five seconds."""
    found, since = used(), time.monotonic()
    until = since + 30.0
    while since + 5.0 > time.monotonic() < until:
        time.sleep(0.1)
        if (later := used()) != found:
            found, since = later, time.monotonic()
    return found


@pytest.mark.parametrize("count", [pytest.param(BUCKETS, marks=ON_CUDA)])
def test_two_buckets_are_all_the_memory_it_takes_and_none_is_left(
    staging: IpcBuckets, worker: Worker, count: int, figure: Callable[..., None]
) -> None:
    publish(staging, worker, count)  # CUDA's own, of both processes, is there now
    source = sum(sum(t.nbytes for t in bucket_of(number).values()) for number in range(count))
    before, peak = used(), [0]

    def look() -> None:
        free, total = torch.cuda.mem_get_info()
        peak[0] = max(peak[0], total - free)

    publish(staging, worker, count, look)
    # The buckets' contents are made here, in memory of this process that is separate from the
    # shared memory.
    figure(
        "memory of a version on its way, of two buckets",
        (peak[0] - before - source) / (2 * NBYTES),
        at_most=1.2,
        against="two buckets",
    )
    figure(
        "memory left after it, MiB",
        (used() - before) / MIB,
        at_most=4.0,
        against="what was in use before",
        unit="MiB",
    )


@pytest.mark.parametrize("count", [pytest.param(1, marks=ON_CUDA)])
def test_a_reader_that_is_killed_holds_none_of_it(staging: IpcBuckets, count: int) -> None:
    def killed_with_a_bucket() -> None:
        victim = Worker()
        buckets = [bucket_of(number) for number in range(count)]
        staging.stage(1, specs(buckets), parts(buckets))
        victim.ask("map", staging.fill(0, 0, parts(buckets)))
        victim.end()
        staging.release()

    killed_with_a_bucket()
    before = settled()
    killed_with_a_bucket()
    assert until_used(before + 4 * MIB) <= before + 4 * MIB


@pytest.mark.parametrize("count", [pytest.param(1, marks=ON_CUDA)])
def test_a_handle_that_cannot_be_opened_is_an_error_by_name(
    staging: IpcBuckets, worker: Worker, count: int
) -> None:
    buckets = [bucket_of(number) for number in range(count)]
    staging.stage(1, specs(buckets), parts(buckets))
    ref = staging.fill(0, 0, parts(buckets))
    ((device, handle),) = json.loads(ref.path).items()
    broken: BucketRef = replace(ref, path=json.dumps({device: "00" * (len(handle) // 2)}))
    with pytest.raises(RuntimeError, match=r"cuIpcOpenMemHandle_v2 failed: CUDA_ERROR"):
        worker.ask("map", broken)
    worker.ask("take", ref)
    worker.ask("let go")


@pytest.mark.parametrize("count", [pytest.param(BUCKETS, marks=ON_CUDA)])
def test_a_version_is_shared_at_the_speed_of_the_memory(
    staging: IpcBuckets, worker: Worker, count: int, figure: Callable[..., None]
) -> None:
    publish(staging, worker, count)
    buckets = [bucket_of(number) for number in range(count)]
    target = [{name: torch.empty_like(t) for name, t in bucket.items()} for bucket in buckets]
    staging.stage(1, specs(buckets), parts(buckets))
    started = time.perf_counter()
    for number in range(count):
        worker.ask("take", staging.fill(number, number % IN_FLIGHT, parts([buckets[number]])))
    torch.cuda.synchronize()
    published_s = time.perf_counter() - started
    worker.ask("let go")
    host = torch.empty(NBYTES, dtype=torch.uint8)
    started = time.perf_counter()
    for bucket, own in zip(buckets, target, strict=True):
        for name, tensor in bucket.items():
            host[: tensor.nbytes].copy_(tensor.view(torch.uint8).flatten())
            own[name].view(torch.uint8).flatten().copy_(host[: tensor.nbytes])
    torch.cuda.synchronize()
    figure(
        "a version shared and loaded, one bucket after the other",
        published_s / (time.perf_counter() - started),
        at_most=1.0,
        against="the same bytes through host memory and back",
    )

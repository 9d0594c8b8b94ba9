"""Weights over real communicators (gloo): whole, two buckets at a time, refused, given up."""

from __future__ import annotations

import json
import mmap
import os
import threading
from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from datetime import timedelta
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
import torch.distributed
from torch.distributed import TCPStore

from megatron_async_rl.watchdog.run_folder import WEIGHTS_PREFIX
from megatron_async_rl.weights import collective
from megatron_async_rl.weights.collective import (
    BLOCKING_WAIT,
    CREATION_LIMIT,
    CollectiveFailed,
    Communicator,
    Receiver,
    Sender,
)
from megatron_async_rl.weights.manifest import (
    IN_FLIGHT,
    Manifest,
    Meeting,
    StagedCopy,
    WeightUpdate,
)
from megatron_async_rl.weights.shared_memory import BucketFile, BucketReader, SharedMemory
from megatron_async_rl.weights.staging import Staging
from megatron_async_rl.weights.transport import whole_bucket
from tests.staged import stage
from tests.unit.collective_harness import CPU, Worker

PATIENT_S = 300.0
SIZE = 300_000
NCCL = getattr(torch.distributed, "ProcessGroupNCCL", None)


@pytest.fixture(scope="module")
def there(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The shared memory of the engine's machine."""
    return tmp_path_factory.mktemp("there")


@pytest.fixture(scope="module")
def engine(there: Path) -> Iterator[list[Receiver | Worker]]:
    """An engine's two workers; one is another process."""
    here, other = Receiver(0, CPU, SharedMemory(there)), Worker(1, there)
    yield [here, other]
    here.close()
    other.close()


@pytest.fixture
def staging(tmp_path: Path) -> Iterator[Staging]:
    staging = Staging(SharedMemory(tmp_path))
    yield staging
    staging.close()


@pytest.fixture(scope="module")
def sender(there: Path) -> Sender:
    return Sender("127.0.0.1", CPU, PATIENT_S, SharedMemory(there))


@pytest.fixture
def receiver(there: Path) -> Iterator[Receiver]:
    """An engine's only worker, in this process."""
    receiver = Receiver(0, CPU, SharedMemory(there))
    yield receiver
    receiver.close()


def weights(version: int, buckets: int) -> list[dict[str, torch.Tensor]]:
    generator = torch.Generator().manual_seed(version)
    return [
        {
            f"odd{number}": torch.randn(3, 7, generator=generator).to(torch.bfloat16),
            f"large{number}": torch.randn(SIZE, generator=generator),
            f"empty{number}": torch.empty(0, 4),
        }
        for number in range(buckets)
    ]


def require_version(copy: StagedCopy, version: int, buckets: int) -> None:
    sent = {name: tensor for bucket in weights(version, buckets) for name, tensor in bucket.items()}
    reader = BucketReader()
    found = {n: t.clone() for ref in copy.manifest.buckets for n, t in reader.read(ref)}
    assert list(found) == list(sent)
    for name, tensor in sent.items():
        assert torch.equal(found[name], tensor), name


def brought(
    sender: Sender,
    meeting: Meeting,
    engine: Sequence[Receiver | Worker],
    version: int,
    manifest: Manifest,
    kept: int | None = None,
) -> StagedCopy:
    update = WeightUpdate(meeting=meeting, version=version, manifest=manifest, kept=kept)
    for worker in engine:
        worker.receive(update)
    return sender.send(meeting, version, manifest)


def test_each_bucket_reaches_one_worker_and_all_of_them_are_the_version(
    engine: list[Receiver | Worker], staging: Staging, sender: Sender, there: Path
) -> None:
    meeting, kept = sender.open(2), None
    copies = []
    for version in (1, 2, 3):
        manifest = stage(staging, version, weights(version, 5))
        copies.append(brought(sender, meeting, engine, version, manifest, kept))
        kept = version
        require_version(copies[-1], version, 5)
        assert copies[-1].manifest.digests == manifest.digests
        assert copies[-1].nbytes == sum(ref.size for ref in manifest.buckets)
    require_version(copies[1], 2, 5)
    assert copies[2].manifest.paths == copies[0].manifest.paths, "the third takes the first's place"
    assert {*copies[1].manifest.paths, *copies[2].manifest.paths} <= files(there)
    assert not torch.distributed.is_initialized()
    sender.close(meeting)


def files(folder: Path) -> set[str]:
    return {str(path) for path in folder.glob(f"{WEIGHTS_PREFIX}*")}


def bucket_bytes(manifest: Manifest) -> list[torch.Tensor]:
    reader = BucketReader()
    return [
        tensor
        for ref in manifest.buckets
        for _, tensor in reader.read(replace(ref, entries=(whole_bucket(ref),)))
    ]


def test_a_worker_awaits_two_buckets_at_a_time(
    receiver: Receiver, staging: Staging, sender: Sender
) -> None:
    """Else the second, which comes first here, would wait for the first forever."""
    manifest, meeting = stage(staging, 1, weights(1, 3)), sender.open(1)
    store = sender._sets[meeting.port].store
    receiver.receive(WeightUpdate(meeting=meeting, version=1, manifest=manifest, kept=None))
    plays_sender = Communicator(meeting, 0, CPU, store)
    memory = bucket_bytes(manifest)
    for number in (1, 0, 2):
        plays_sender.send(memory[number], 1, number)()
    store.wait(["1/0"], meeting.limit)
    assert set(json.loads(store.get("1/0"))["paths"]) == {"0", "1", "2"}
    plays_sender.close()


def test_the_sender_has_two_buckets_on_their_way(staging: Staging, sender: Sender) -> None:
    manifest, meeting = stage(staging, 1, weights(1, 3)), sender.open(1)
    with ThreadPoolExecutor(1) as pool:
        sending = pool.submit(sender.send, meeting, 1, manifest)
        store = TCPStore(meeting.host, meeting.port, is_master=False, timeout=meeting.limit)
        plays_worker = Communicator(meeting, 1, CPU, store)
        memory = [torch.empty_like(sent) for sent in bucket_bytes(manifest)]
        for number in (1, 0, 2):
            plays_worker.receive(memory[number], number)()
        store.set("1/0", json.dumps({"paths": {"0": "a", "1": "b", "2": "c"}}))
        assert sending.result(PATIENT_S).manifest.paths == ["a", "b", "c"]
    assert all(map(torch.equal, memory, bucket_bytes(manifest)))
    plays_worker.close()
    sender.close(meeting)


def test_a_bucket_that_arrives_damaged_is_refused_and_costs_no_version_but_its_own(
    receiver: Receiver, staging: Staging, sender: Sender
) -> None:
    first = brought(sender, sender.open(1), [receiver], 1, stage(staging, 1, weights(1, 4)))
    second = stage(staging, 2, weights(2, 4))
    wrong = replace(second, digests={**second.digests, "odd1": "another"})
    refused = "version 2 did not reach its workers: worker 0: .*tensor odd1 is not what was staged"
    with pytest.raises(CollectiveFailed, match=refused):
        brought(sender, sender.open(1), [receiver], 2, wrong, kept=1)
    require_version(first, 1, 4)
    require_version(brought(sender, sender.open(1), [receiver], 2, second, kept=1), 2, 4)
    require_version(first, 1, 4)


def test_a_worker_without_room_reports_it(
    receiver: Receiver, staging: Staging, sender: Sender, monkeypatch: pytest.MonkeyPatch
) -> None:
    def full(*_: object) -> None:
        raise OSError("no space left")

    manifest = stage(staging, 1, weights(1, 2))
    monkeypatch.setattr(BucketFile, "__init__", full)
    with pytest.raises(CollectiveFailed, match="worker 0: OSError: no space left"):
        brought(sender, sender.open(1), [receiver], 1, manifest)


def test_a_worker_that_does_not_come_is_given_up(staging: Staging) -> None:
    impatient = Sender("127.0.0.1", CPU, 0.2)
    meeting = impatient.open(1)
    manifest = stage(staging, 1, weights(1, 1))
    with pytest.raises(CollectiveFailed, match="version 1 did not reach its workers"):
        impatient.send(meeting, 1, manifest)
    with pytest.raises(CollectiveFailed, match="its communicator was closed"):
        impatient.send(meeting, 1, manifest)


@pytest.mark.parametrize("buckets", [1, 6], ids=["with all it was sent", "with more to come"])
def test_a_worker_that_stands_still_is_given_up(
    buckets: int,
    receiver: Receiver,
    staging: Staging,
    sender: Sender,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    meeting, goes_on = sender.open(1), threading.Event()
    brought(sender, meeting, [receiver], 1, stage(staging, 1, weights(1, 1)))
    one = sender._sets[meeting.port]
    assert one.local is not None
    one.meeting, one.local._limit = replace(meeting, limit_s=0.2), timedelta(seconds=0.2)
    with monkeypatch.context() as patch:
        patch.setattr(collective, "damaged_tensor", lambda *_: goes_on.wait() and None)
        manifest = stage(staging, 2, weights(2, buckets))
        with pytest.raises(CollectiveFailed, match="version 2 did not reach its workers"):
            brought(sender, meeting, [receiver], 2, manifest, kept=1)
    goes_on.set()
    require_version(brought(sender, sender.open(1), [receiver], 2, manifest, 1), 2, buckets)


def test_an_engine_whose_worker_dies_costs_no_other_engine(
    engine: list[Receiver | Worker], staging: Staging, sender: Sender
) -> None:
    """The last test of that process."""
    manifest = stage(staging, 1, weights(1, 9))
    meeting = sender.open(2)
    update = WeightUpdate(meeting=meeting, version=1, manifest=manifest, kept=None)
    engine[0].receive(update)
    assert isinstance(engine[1], Worker)
    engine[1].receive(update, dies=True)
    with pytest.raises(CollectiveFailed, match="version 1 did not reach its workers"):
        sender.send(meeting, 1, manifest)
    require_version(brought(sender, sender.open(1), engine[:1], 1, manifest), 1, 9)


def nccl_options() -> Any:
    """torch's own, or their shape where torch is built for CPUs."""
    if NCCL is not None:
        return NCCL.Options()
    return SimpleNamespace(config=SimpleNamespace(blocking=None), _timeout=None)


@pytest.mark.parametrize("before", [None, "0"])
def test_nccl_waits_within_the_limit_and_has_no_watchdog(
    before: str | None, monkeypatch: pytest.MonkeyPatch
) -> None:
    """torch's watchdog would end the engine's process a minute after a timeout."""
    made: list[tuple[str | None, str | None, Any]] = []

    class Nccl:
        Options = staticmethod(nccl_options)

        def __init__(self, store: object, rank: int, size: int, options: Any) -> None:
            assert (rank, size) == (1, 3)
            made.append((os.environ.get(BLOCKING_WAIT), os.environ.get(CREATION_LIMIT), options))

    monkeypatch.setattr(torch.distributed, "ProcessGroupNCCL", Nccl, raising=False)
    monkeypatch.delenv(CREATION_LIMIT, raising=False)
    if before is None:
        monkeypatch.delenv(BLOCKING_WAIT, raising=False)
    else:
        monkeypatch.setenv(BLOCKING_WAIT, before)
    meeting = Meeting(host="127.0.0.1", port=1, workers=2, limit_s=7.5)
    store = TCPStore(meeting.host, 0, is_master=True, wait_for_workers=False)
    Communicator(meeting, 1, torch.device("cuda", 0), store)
    ((blocking_wait, creation_limit, options),) = made
    assert (blocking_wait, creation_limit) == ("1", "8")
    assert options.config.blocking == 0
    assert options._timeout == meeting.limit
    assert os.environ.get(BLOCKING_WAIT) == before, "of other groups in the process"


def test_torch_reads_the_variables_that_nccls_limits_depend_on() -> None:
    library = Path(torch.__file__).parent / "lib" / "libtorch_cuda.so"
    if not library.is_file():
        pytest.skip("torch is built for CPUs here")
    with open(library, "rb") as file, mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ) as text:
        for words in (BLOCKING_WAIT, CREATION_LIMIT, "NO watchdog thread is created"):
            assert text.find(words.encode()) >= 0, words


class Group:
    """Group of members that records operations; what is received is all 9."""

    def __init__(self) -> None:
        self.calls: list[Any] = []
        self.places: list[torch.Tensor] = []

    def send(self, tensors: list[torch.Tensor], to: int, number: int) -> Any:
        (place,) = tensors
        self.places.append(place)
        self.calls.append(("send", place.tolist(), to, number))
        return SimpleNamespace(wait=lambda limit: self.calls.append(("sent", limit)))

    def recv(self, tensors: list[torch.Tensor], source: int, number: int) -> Any:
        (place,) = tensors
        self.places.append(place)
        self.calls.append(("recv", len(place), source, number))

        def wait(limit: str) -> None:
            place.fill_(9)
            self.calls.append(("received", limit))

        return SimpleNamespace(wait=wait)

    def abort(self) -> None:
        self.calls.append("abort")


def communicator(device: str) -> tuple[Any, Group]:
    one: Any = Communicator.__new__(Communicator)
    one._limit, one._device, one._group = "limit", SimpleNamespace(type=device), Group()
    one._lanes, one._lane = [None] * IN_FLIGHT, 0
    return one, one._group


def test_on_a_device_bytes_pass_through_a_buffer_for_each_bucket_in_flight(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    one, group = communicator("cuda")
    empty, made = torch.empty, list[int]()

    def allocated(count: int, *, dtype: torch.dtype, device: Any) -> torch.Tensor:
        made.append(count)
        return empty(count, dtype=dtype)

    monkeypatch.setattr(torch, "empty", allocated)
    memory, counts = torch.arange(5, dtype=torch.uint8), (4, 3, 2, 3, 4, 5)
    waits = [one.send(memory[:count], 2, count) for count in counts]
    assert made == [4, 3, 5], "only if a buffer is too small"
    assert group.calls == [("send", list(range(count)), 2, count) for count in counts]
    places = [place.data_ptr() for place in group.places]
    assert places[0] == places[2] == places[4] != places[1] == places[3]
    assert memory.data_ptr() not in places
    group.calls.clear()
    waits[0]()
    into = torch.zeros(3, dtype=torch.uint8)
    wait = one.receive(into, 7)
    assert into.tolist() == [0, 0, 0]
    wait()
    assert into.tolist() == [9, 9, 9]
    assert group.calls == [("sent", "limit"), ("recv", 3, 0, 7), ("received", "limit")]
    one.close()
    one.close()
    assert group.calls[3:] == ["abort"]


def test_on_a_host_bytes_are_sent_from_their_memory() -> None:
    one, group = communicator("cpu")
    memory = torch.arange(4, dtype=torch.uint8)
    one.send(memory, 1, 0)()
    one.receive(memory, 1)()
    assert all(place is memory for place in group.places)
    assert memory.tolist() == [9] * 4


def test_refusals_name_their_workers_and_a_lost_store_has_none() -> None:
    keys = [collective._key(3, worker) for worker in range(3)]
    answers = {keys[0]: b'{"error": "no room"}', keys[2]: b'{"paths": []}'}
    checked: list[str] = []

    def check(keys: list[str]) -> bool:
        checked.extend(keys)
        return keys[0] in answers

    store: Any = SimpleNamespace(check=check, get=answers.get)
    end: Any = SimpleNamespace(meeting=SimpleNamespace(workers=3), store=store)
    assert collective._refusals(end, 3) == ["worker 0: no room"]
    assert checked == keys

    def lost(keys: list[str]) -> bool:
        raise RuntimeError("connection reset")

    store.check = lost
    assert collective._refusals(end, 3) == []

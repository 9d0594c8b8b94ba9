"""A publish reaches every engine, proves what they loaded, and lets nobody sample before that."""

import pickle
from collections.abc import Callable, Iterator
from concurrent.futures import Future
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
import torch

from megatron_async_rl.observe.deadline import DeadlineExceeded
from megatron_async_rl.weights.digest import tensor_digest
from megatron_async_rl.weights.publish import Publisher, PublishFailed, WeightMismatch
from megatron_async_rl.weights.shared_memory import PREFIX, BucketRef, read_bucket


@dataclass
class Bucket:
    names: tuple[str, ...]
    tensors: tuple[torch.Tensor | None, ...]


class LoopEngine:
    """Answers at once and keeps a diary. `hang` names a call that never answers, `spoil` changes the digests it reports."""

    def __init__(self, name: str, *, hang: str = "", spoil: Callable[[dict[str, str]], None] | None = None) -> None:
        self.name = name
        self.diary: list[str] = []
        self.loaded: dict[str, torch.Tensor] = {}
        self._hang = hang
        self._spoil = spoil

    def pause(self) -> Future[None]:
        return self._answer("pause", None)

    def load_bucket(self, bucket: BucketRef, version: int, first: bool, last: bool) -> Future[dict[str, str]]:
        for name, tensor in read_bucket(bucket):
            self.loaded[name] = tensor.clone()
        digests = {name: tensor_digest(tensor) for name, tensor in self.loaded.items()} if last else {}
        if last and self._spoil is not None:
            self._spoil(digests)
        return self._answer(f"load {version}{' first' if first else ''}{' last' if last else ''}", digests)

    def resume(self) -> Future[None]:
        return self._answer("resume", None)

    def _answer(self, call: str, value: Any) -> Future[Any]:
        self.diary.append(call)
        future: Future[Any] = Future()
        if call.split()[0] != self._hang:
            future.set_result(value)
        return future


def buckets(count: int) -> Iterator[Bucket]:
    for i in range(count):
        yield Bucket((f"w{i}", f"v{i}"), (torch.full((4,), float(i)), torch.arange(3 + i)))


def test_one_bucket_is_one_call_to_each_engine(tmp_path: Path) -> None:
    engines = [LoopEngine("engine-0"), LoopEngine("engine-1")]
    report = Publisher(engines, timeout_s=5, directory=tmp_path).publish(3, buckets(1))
    for engine in engines:
        assert engine.diary == ["pause", "load 3 first last", "resume"]
        assert torch.equal(engine.loaded["v0"], torch.arange(3))
    assert (report.version, report.tensors, report.bytes) == (3, 2, 4 * 4 + 3 * 8)
    assert 0 < report.paused_s <= report.seconds


def test_every_bucket_of_many_arrives_and_no_file_stays(tmp_path: Path) -> None:
    engine = LoopEngine("engine-0")
    Publisher([engine], timeout_s=5, directory=tmp_path).publish(1, buckets(3))
    assert engine.diary == ["pause", "load 1 first", "load 1", "load 1 last", "resume"]
    assert sorted(engine.loaded) == ["v0", "v1", "v2", "w0", "w1", "w2"]
    assert not list(tmp_path.glob(f"{PREFIX}*"))


def test_tensors_may_be_overwritten_once_the_next_bucket_is_asked_for(tmp_path: Path) -> None:
    buffer = torch.empty(4)

    def reused() -> Iterator[Bucket]:
        for i in range(3):
            yield Bucket((f"w{i}",), (buffer.fill_(i),))

    engine = LoopEngine("engine-0")
    Publisher([engine], timeout_s=5, directory=tmp_path).publish(1, reused())
    assert [float(engine.loaded[f"w{i}"][0]) for i in range(3)] == [0.0, 1.0, 2.0]


@pytest.mark.parametrize(
    ("spoil", "name"),
    [
        (lambda digests: digests.update(v0="0" * 32), "v0"),
        (lambda digests: digests.pop("w0"), "w0"),
        (lambda digests: digests.update(x="0" * 32), "x"),
    ],
    ids=["other bytes", "a tensor left out", "a tensor nobody sent"],
)
def test_a_digest_that_differs_stops_the_publish_with_engines_paused(tmp_path: Path, spoil: Callable, name: str) -> None:
    engines = [LoopEngine("engine-0"), LoopEngine("engine-1", spoil=spoil)]
    with pytest.raises(WeightMismatch, match=rf"engine-1.*tensor {name} ") as failure:
        Publisher(engines, timeout_s=5, directory=tmp_path).publish(1, buckets(1))
    assert (failure.value.name, failure.value.engine) == (name, "engine-1")
    assert failure.value.sent != failure.value.loaded
    assert all("resume" not in engine.diary for engine in engines)
    assert str(pickle.loads(pickle.dumps(failure.value))) == str(failure.value)


@pytest.mark.parametrize(("hang", "phase"), [("pause", "pause"), ("load", "load weights of version 7"), ("resume", "resume")])
def test_a_silent_engine_is_named_with_what_it_was_asked_for(tmp_path: Path, hang: str, phase: str) -> None:
    engines = [LoopEngine("engine-0"), LoopEngine("engine-1", hang=hang)]
    with pytest.raises(DeadlineExceeded, match=f"engine-1 to {phase}"):
        Publisher(engines, timeout_s=0.2, directory=tmp_path).publish(7, buckets(2))
    assert not list(tmp_path.glob(f"{PREFIX}*"))


def test_an_engine_that_fails_fails_the_publish(tmp_path: Path) -> None:
    class Failing(LoopEngine):
        def load_bucket(self, *args: object) -> Future[dict[str, str]]:
            future: Future[dict[str, str]] = Future()
            future.set_exception(RuntimeError("out of memory"))
            return future

    engine = Failing("engine-0")
    with pytest.raises(PublishFailed, match="engine-0 failed to load weights of version 1: out of memory"):
        Publisher([engine], timeout_s=5, directory=tmp_path).publish(1, buckets(1))
    assert engine.diary == ["pause"]


def test_an_update_of_nothing_is_refused_before_any_engine_pauses(tmp_path: Path) -> None:
    engine = LoopEngine("engine-0")
    with pytest.raises(ValueError, match="version 4 has no buckets"):
        Publisher([engine], timeout_s=5, directory=tmp_path).publish(4, iter(()))
    assert engine.diary == []

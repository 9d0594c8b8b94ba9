"""A publish reaches every engine, proves what they loaded, and lets nobody sample before that."""

import gc
import pickle
import re
import threading
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import Future
from pathlib import Path
from typing import Any

import pytest
import torch

from megatron_async_rl.weights.publish import Publisher, PublishFailed, WeightMismatch
from megatron_async_rl.weights.shared_memory import BucketRef
from megatron_async_rl.weights.stale_files import PREFIX
from tests.unit.stand_in_engines import Bucket, Diary, LoopEngine, buckets


def fleet(directory: Path, *engines: dict[str, Any], timeout_s: float = 5.0, **options: Any) -> tuple[Publisher, Diary, list]:
    diary = Diary()
    members = [LoopEngine(f"engine-{index}", diary, **settings) for index, settings in enumerate(engines)]
    return Publisher(members, timeout_s=timeout_s, directory=directory, **options), diary, members


def files(directory: Path) -> set[Path]:
    return set(directory.glob(f"{PREFIX}*"))


def test_rolling_engines_load_one_after_the_other(tmp_path: Path) -> None:
    publisher, diary, engines = fleet(tmp_path, {}, {}, {})
    report = publisher.publish(3, buckets(1))
    assert diary.lines == [f"engine-{i} {call}" for i in range(3) for call in ("pause", "load 3 first last", "resume")]
    for engine in engines:
        assert torch.equal(engine.loaded["v0"], torch.arange(3))
    assert (report.version, report.tensors, report.bytes) == (3, 2, 4 * 4 + 3 * 8)
    assert 0 < report.paused_s <= report.seconds
    assert report.pauses.keys() == {"engine-0", "engine-1", "engine-2"}
    assert publisher.versions == {"engine-0": 3, "engine-1": 3, "engine-2": 3}


def test_together_all_engines_load_before_any_resumes(tmp_path: Path) -> None:
    publisher, diary, _ = fleet(tmp_path, {}, {}, update="together")
    publisher.publish(1, buckets(2))
    phases = ("pause", "load 1 first", "load 1 last", "resume")
    assert diary.lines == [f"engine-{i} {call}" for call in phases for i in range(2)]


@pytest.mark.parametrize("update", ["rolling", "together"])
def test_an_engine_alone_is_asked_once_and_told_what_to_prove(
    tmp_path: Path, update: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    publisher, diary, (engine,) = fleet(tmp_path, {}, update=update)
    told = []

    def answer(buckets: Sequence[BucketRef], version: int, digests: Mapping[str, str]) -> Future[dict[str, str]]:
        told.append(([bucket.path for bucket in buckets], version))
        loaded: Future[dict[str, str]] = Future()
        loaded.set_result(dict(digests))
        return loaded

    monkeypatch.setattr(engine, "update", answer)
    assert not publisher.publish(3, buckets(2)).lost
    assert diary.lines == []
    ((paths, version),) = told
    assert version == 3
    assert {Path(path) for path in paths} == files(tmp_path)


@pytest.mark.parametrize("count", [1, 2])
def test_engines_that_sleep_are_not_paused_and_wake_with_the_new_weights(tmp_path: Path, count: int) -> None:
    publisher, diary, _ = fleet(tmp_path, *[{}] * count)
    publisher.stage(1, buckets(1))
    publisher.deliver(1, asleep=True).result(timeout=5)
    phases = ("wake weights", "load 1 first last", "wake all")
    assert diary.lines == [f"engine-{i} {call}" for call in phases for i in range(count)]


def test_every_bucket_of_many_arrives(tmp_path: Path) -> None:
    publisher, diary, (engine,) = fleet(tmp_path, {})
    publisher.publish(1, buckets(3))
    assert diary.of("engine-0") == ["pause", "load 1 first", "load 1", "load 1 last", "resume"]
    assert sorted(engine.loaded) == ["v0", "v1", "v2", "w0", "w1", "w2"]


def test_tensors_may_be_overwritten_once_the_next_bucket_is_asked_for(tmp_path: Path) -> None:
    buffer = torch.empty(4)

    def reused() -> Iterator[Bucket]:
        for i in range(3):
            yield Bucket((f"w{i}",), (buffer.fill_(i),))

    publisher, _, (engine,) = fleet(tmp_path, {})
    publisher.publish(1, reused())
    assert [float(engine.loaded[f"w{i}"][0]) for i in range(3)] == [0.0, 1.0, 2.0]


def test_the_next_version_takes_the_same_memory_and_another_shape_takes_none_beside_it(tmp_path: Path) -> None:
    publisher, _, (engine,) = fleet(tmp_path, {})
    publisher.publish(1, buckets(2))
    first = files(tmp_path)
    publisher.publish(2, buckets(2, value=7.0))
    assert files(tmp_path) == first
    assert float(engine.loaded["w0"][0]) == 7.0
    publisher.publish(3, buckets(1))
    assert len(files(tmp_path)) == 1
    publisher.close()
    assert not files(tmp_path)


def test_no_file_outlives_the_publisher(tmp_path: Path) -> None:
    publisher, _, _ = fleet(tmp_path, {})
    publisher.publish(1, buckets(2))
    assert len(files(tmp_path)) == 2
    del publisher
    gc.collect()
    assert not files(tmp_path)


def test_the_trainer_goes_on_while_weights_are_delivered_and_stages_again_only_after(tmp_path: Path) -> None:
    publisher, diary, (engine,) = fleet(tmp_path, {"hang": "load"})
    publisher.stage(1, buckets(1, value=1.0))
    delivered = publisher.deliver(1)
    diary.wait_for("engine-0 load 1 first last")
    staging = threading.Thread(target=lambda: publisher.stage(2, buckets(1, value=2.0)))
    staging.start()
    staging.join(timeout=0.2)
    assert staging.is_alive(), "the engine still reads version 1"
    assert publisher.versions == {"engine-0": -1}
    engine.answer()
    assert delivered.result(timeout=5).version == 1
    staging.join(timeout=5)
    assert publisher.deliver(2).result(timeout=5).version == 2
    assert float(engine.loaded["w0"][0]) == 2.0


def test_staging_waits_for_an_engine_that_reads_no_longer_than_the_deadline(tmp_path: Path) -> None:
    publisher, _diary, (engine,) = fleet(tmp_path, {"hang": "load"}, timeout_s=0.2)
    publisher.stage(1, buckets(1))
    delivered = publisher.deliver(1)
    publisher.stage(2, buckets(1))
    assert "engine-0 to take weights of version 1" in delivered.result(timeout=0).lost["engine-0"]
    engine.answer()
    assert publisher.deliver(2).result(timeout=5).version == 2


@pytest.mark.parametrize(
    ("spoil", "name"),
    [
        (lambda digests: digests.update(v0="0" * 32), "v0"),
        (lambda digests: digests.pop("w0"), "w0"),
        (lambda digests: digests.update(x="0" * 32), "x"),
    ],
    ids=["other bytes", "a tensor left out", "a tensor nobody sent"],
)
@pytest.mark.parametrize("update", ["rolling", "together"])
def test_a_digest_that_differs_stops_the_publish_with_the_engine_paused(
    tmp_path: Path, spoil: Callable[[dict[str, str]], Any], name: str, update: str
) -> None:
    publisher, diary, _ = fleet(tmp_path, {"spoil": spoil}, {}, update=update)
    with pytest.raises(WeightMismatch, match=rf"engine-0.*tensor {name} ") as failure:
        publisher.publish(1, buckets(1))
    assert (failure.value.name, failure.value.engine) == (name, "engine-0")
    assert failure.value.sent != failure.value.loaded
    assert "engine-0 resume" not in diary.lines
    assert "engine-1 resume" not in diary.lines
    assert publisher.versions == {"engine-0": -1, "engine-1": -1}
    assert str(pickle.loads(pickle.dumps(failure.value))) == str(failure.value)


def test_a_byte_that_flips_in_shared_memory_names_its_tensor(tmp_path: Path) -> None:
    def flip(bucket: BucketRef) -> None:
        (entry,) = (entry for entry in bucket.entries if entry.name == "v0")
        with open(bucket.path, "r+b") as file:
            file.seek(entry.offset + 5)
            file.write(b"\1")

    publisher, _, _ = fleet(tmp_path, {"meddle": flip})
    with pytest.raises(WeightMismatch, match="tensor v0 "):
        publisher.publish(1, buckets(1))


@pytest.mark.parametrize("update", ["rolling", "together"])
@pytest.mark.parametrize(("call", "phase"), [("pause", "pause"), ("load", "load weights of version 7"), ("resume", "resume")])
@pytest.mark.parametrize(
    ("how", "reason"), [("hang", "waited .* for engine-0 to {}"), ("fail", "engine-0 failed to {}: out of memory")]
)
def test_an_engine_that_is_lost_is_named_with_its_phase_and_the_others_go_on(
    tmp_path: Path, update: str, call: str, phase: str, how: str, reason: str
) -> None:
    publisher, diary, _ = fleet(tmp_path, {how: call}, {}, {}, timeout_s=0.2, update=update)
    report = publisher.publish(7, buckets(2))
    assert report.lost.keys() == {"engine-0"}
    named = phase if update == "together" else "take weights of version 7"
    assert re.search(reason.format(named), report.lost["engine-0"])
    assert report.pauses.keys() == {"engine-1", "engine-2"}
    assert publisher.versions == {"engine-0": -1, "engine-1": 7, "engine-2": 7}
    assert diary.of("engine-2")[-1] == "resume"


def test_a_publish_that_no_engine_takes_fails_with_every_reason(tmp_path: Path) -> None:
    publisher, _, _ = fleet(tmp_path, {"fail": "load"}, {"fail": "pause"})
    with pytest.raises(
        PublishFailed,
        match="engine-0 failed to take weights of version 1: out of memory; engine-1 failed to take weights of version 1: out",
    ):
        publisher.publish(1, buckets(1))


def test_an_engine_that_was_started_again_gets_the_staged_weights_and_then_every_next(tmp_path: Path) -> None:
    publisher, diary, _ = fleet(tmp_path, {"fail": "load"}, {})
    assert publisher.publish(4, buckets(1, value=4.0)).lost
    again = LoopEngine("engine-0", diary)
    diary.lines.clear()
    assert publisher.bring_up(again) == 4
    assert diary.lines == ["engine-0 pause", "engine-0 load 4 first last", "engine-0 resume"]
    assert float(again.loaded["w0"][0]) == 4.0
    assert publisher.versions == {"engine-0": 4, "engine-1": 4}
    assert not publisher.publish(5, buckets(1, value=5.0)).lost
    assert float(again.loaded["w0"][0]) == 5.0


def test_an_engine_brought_up_between_staging_and_delivery_is_not_fed_twice(tmp_path: Path) -> None:
    publisher, diary, _ = fleet(tmp_path, {}, {})
    publisher.stage(1, buckets(1))
    publisher.bring_up(LoopEngine("engine-0", diary))
    report = publisher.deliver(1).result(timeout=5)
    assert diary.of("engine-0").count("load 1 first last") == 1
    assert report.pauses.keys() == {"engine-1"}


def test_an_engine_is_brought_up_after_the_delivery_that_is_running(tmp_path: Path) -> None:
    publisher, diary, (slow,) = fleet(tmp_path, {"hang": "load"})
    publisher.stage(1, buckets(1))
    delivered = publisher.deliver(1)
    diary.wait_for("engine-0 load 1 first last")
    bringing = threading.Thread(target=lambda: publisher.bring_up(LoopEngine("engine-1", diary)))
    bringing.start()
    bringing.join(timeout=0.2)
    assert diary.of("engine-1") == []
    slow.answer()
    bringing.join(timeout=5)
    assert delivered.result(timeout=5).pauses.keys() == {"engine-0"}
    assert publisher.versions == {"engine-0": 1, "engine-1": 1}


@pytest.mark.parametrize(
    ("settings", "error"), [({"fail": "pause"}, PublishFailed), ({"spoil": lambda digests: digests.pop("w0")}, WeightMismatch)]
)
def test_an_engine_that_cannot_be_brought_up_stays_out(tmp_path: Path, settings: dict[str, Any], error: type[Exception]) -> None:
    publisher, diary, _ = fleet(tmp_path, {})
    publisher.publish(1, buckets(1))
    with pytest.raises(error, match="engine-1"):
        publisher.bring_up(LoopEngine("engine-1", diary, **settings))
    assert publisher.versions == {"engine-0": 1}


def test_an_engine_cannot_be_brought_up_before_anything_is_staged(tmp_path: Path) -> None:
    publisher, diary, _ = fleet(tmp_path, {})
    with pytest.raises(RuntimeError, match="engine-1 cannot be brought up: no weights are staged"):
        publisher.bring_up(LoopEngine("engine-1", diary))
    assert diary.lines == []


def test_a_removed_engine_gets_no_more_weights(tmp_path: Path) -> None:
    publisher, diary, _ = fleet(tmp_path, {}, {})
    publisher.remove("engine-0")
    assert publisher.publish(1, buckets(1)).pauses.keys() == {"engine-1"}
    assert diary.of("engine-0") == []
    publisher.remove("engine-1")
    with pytest.raises(PublishFailed, match="there is none left"):
        publisher.publish(2, buckets(1))


def test_only_the_staged_version_can_be_delivered(tmp_path: Path) -> None:
    publisher, _, _ = fleet(tmp_path, {})
    publisher.stage(1, buckets(1))
    with pytest.raises(ValueError, match="version 2 cannot be delivered: staged is 1"):
        publisher.deliver(2)


def twice() -> Iterator[Bucket]:
    yield from buckets(1)
    yield from buckets(1)


@pytest.mark.parametrize(
    ("given", "message"), [(iter(()), "version 4 has no buckets"), (twice(), "tensor w0 comes twice")], ids=["nothing", "twice"]
)
def test_an_update_in_fault_is_refused_before_any_engine_pauses(tmp_path: Path, given: Iterator[Bucket], message: str) -> None:
    publisher, diary, _ = fleet(tmp_path, {})
    with pytest.raises(ValueError, match=message):
        publisher.publish(4, given)
    assert diary.lines == []
    with pytest.raises(ValueError, match="staged is None"):
        publisher.deliver(4)


def test_a_version_whose_staging_failed_on_the_way_is_given_to_nobody_nor_is_the_one_before(tmp_path: Path) -> None:
    publisher, diary, _ = fleet(tmp_path, {})
    publisher.publish(1, buckets(2))

    def broken() -> Iterator[Bucket]:
        yield from buckets(1, value=2.0)
        raise KeyError("a rank is gone")

    with pytest.raises(KeyError):
        publisher.stage(2, broken())
    for version in (1, 2):
        with pytest.raises(ValueError, match="staged is None"):
            publisher.deliver(version)
    with pytest.raises(RuntimeError, match="no weights are staged"):
        publisher.bring_up(LoopEngine("engine-1", diary))

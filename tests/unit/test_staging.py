"""A staged version exists whole, together with the one before it, with digests of the sender's own
tensors."""

import gc
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from types import ModuleType

import pytest
import torch

from megatron_async_rl.config.load import load
from megatron_async_rl.config.weights import CARRIERS, CarrierCapabilities
from megatron_async_rl.flow.batches import controller_spec
from megatron_async_rl.plan.layout import engines_elsewhere
from megatron_async_rl.plan.machine import Machine
from megatron_async_rl.watchdog.run_folder import WEIGHTS_PREFIX
from megatron_async_rl.weights.digest import tensor_digest
from megatron_async_rl.weights.manifest import Manifest, WeightMismatch, require_equal
from megatron_async_rl.weights.shared_memory import BucketReader, SharedMemory
from megatron_async_rl.weights.staging import (
    NotStaged,
    SingleProcess,
    Staging,
    WeightDigests,
    staging_of,
)
from megatron_async_rl.weights.transport import Carrier, ShardSlice, TensorSpec, carrier
from tests.staged import parts, specs, stage
from tests.written_run import write_run


def buckets(count: int, value: float = 0.0) -> list[dict[str, torch.Tensor]]:
    return [
        {f"w{i}": torch.full((4,), i + value), f"v{i}": torch.arange(3 + i)} for i in range(count)
    ]


def files(directory: Path) -> set[Path]:
    return set(directory.glob(f"{WEIGHTS_PREFIX}*"))


def loaded(manifest: Manifest) -> dict[str, torch.Tensor]:
    reader = BucketReader()
    return {name: tensor for ref in manifest.buckets for name, tensor in reader.read(ref)}


@pytest.fixture
def staging(tmp_path: Path) -> Iterator[Staging]:
    made = Staging(SharedMemory(tmp_path))
    yield made
    made.close()
    assert files(tmp_path) == set()


def test_a_version_is_read_back_with_the_digests_of_what_was_sent(staging: Staging) -> None:
    manifest = stage(staging, 3, buckets(3))
    tensors = loaded(manifest)
    assert sorted(tensors) == ["v0", "v1", "v2", "w0", "w1", "w2"]
    assert {name: tensor_digest(tensor) for name, tensor in tensors.items()} == manifest.digests
    assert torch.equal(tensors["v0"], torch.arange(3))
    assert manifest.nbytes == 3 * 16 + (3 + 4 + 5) * 8


def test_what_an_engine_still_reads_is_not_touched_by_the_version_after_it(
    staging: Staging,
) -> None:
    first = stage(staging, 1, buckets(2))
    reading = loaded(first)
    second = stage(staging, 2, buckets(2, value=7.0))
    assert float(reading["w0"][0]) == float(loaded(first)["w0"][0]) == 0.0
    assert float(loaded(second)["w0"][0]) == 7.0


def test_the_version_after_the_next_takes_the_same_memory_and_another_shape_none_beside_it(
    staging: Staging, tmp_path: Path
) -> None:
    stage(staging, 1, buckets(2))
    stage(staging, 2, buckets(2))
    both = files(tmp_path)
    third = stage(staging, 3, buckets(2, value=5.0))
    assert files(tmp_path) == both
    assert float(loaded(third)["w1"][0]) == 6.0
    stage(staging, 4, buckets(1))
    assert len(files(tmp_path)) == 3


def test_a_parts_memory_may_be_overwritten_once_the_next_is_asked_for(staging: Staging) -> None:
    buffer = torch.empty(1, 4)
    specs = [[TensorSpec(f"w{i}", torch.float32, (4,)) for i in range(3)]]
    reused = (ShardSlice(f"w{i}", 0, 0, buffer.fill_(i)) for i in range(3))
    tensors = loaded(staging.stage(1, specs, reused))
    assert [float(tensors[f"w{i}"][0]) for i in range(3)] == [0.0, 1.0, 2.0]


def test_an_update_that_fails_on_the_way_leaves_the_version_before_it(staging: Staging) -> None:
    first = stage(staging, 1, buckets(2))

    def failing() -> Iterator[ShardSlice]:
        yield from parts(buckets(1, value=9.0))
        raise RuntimeError("rank 1 is gone")

    with pytest.raises(RuntimeError, match="rank 1 is gone"):
        staging.stage(2, specs(buckets(2)), failing())
    with pytest.raises(ValueError, match="the update to version 2 has no buckets"):
        stage(staging, 2, [])
    with pytest.raises(ValueError, match="tensor w0 comes twice in one update"):
        stage(staging, 2, [*buckets(1), *buckets(1)])
    assert float(loaded(first)["w1"][0]) == 1.0
    assert float(loaded(stage(staging, 2, buckets(1, value=4.0)))["w0"][0]) == 4.0
    assert float(loaded(first)["w1"][0]) == 1.0


@pytest.mark.parametrize(
    ("change", "said"),
    [
        (lambda all_parts: all_parts[:-1], "0 of the 4 elements of v1"),
        (lambda all_parts: [*all_parts, all_parts[0]], "8 of the 4 elements of w0"),
        (
            lambda all_parts: [*all_parts[1:], ShardSlice("w0", 0, 1, all_parts[0].tensor[:, 1:])],
            "3 of the 4 elements of w0",
        ),
    ],
)
def test_a_version_that_is_not_there_whole_is_none(
    staging: Staging, change: Callable[[list[ShardSlice]], list[ShardSlice]], said: str
) -> None:
    first = stage(staging, 1, buckets(2))
    with pytest.raises(ValueError, match=f"the ranks wrote {said} in the update to version 2"):
        staging.stage(2, specs(buckets(2)), change(list(parts(buckets(2, value=9.0)))))
    again = stage(staging, 2, buckets(2, value=5.0))
    assert {ref.path for ref in again.buckets}.isdisjoint(ref.path for ref in first.buckets)
    assert float(loaded(first)["w1"][0]) == 1.0


class WithAnother(SingleProcess):
    """Rank 0 next to a rank that adds `numbers`."""

    def __init__(self) -> None:
        self.numbers: torch.Tensor | int = 0

    def summed(self, numbers: torch.Tensor) -> torch.Tensor:
        return numbers + self.numbers


def test_a_version_that_another_rank_could_not_write_is_none(tmp_path: Path) -> None:
    ranks = WithAnother()
    staging = Staging(SharedMemory(tmp_path), ranks)
    stage(staging, 1, buckets(1))
    ranks.numbers = torch.tensor([[0, 0, 0], [0, 0, 0], [1, 1, 1]])
    with pytest.raises(NotStaged, match="1 other ranks could not write"):
        stage(staging, 2, buckets(1))
    staging.close()


def test_a_rank_that_fails_takes_its_further_parts_and_informs_the_others(tmp_path: Path) -> None:
    """The parts may be a walk that all ranks make together."""
    ranks, asked = WithAnother(), []
    told = ranks.summed
    ranks.summed = lambda numbers: asked.append(numbers.tolist()) or told(numbers)  # type: ignore[func-returns-value,method-assign]
    staging = Staging(SharedMemory(tmp_path), ranks)
    taken = []

    def wrong() -> Iterator[ShardSlice]:
        for part in parts(buckets(2)):
            taken.append(part.name)
            yield ShardSlice(part.name, 7, 0, part.tensor)

    with pytest.raises(ValueError, match=r"1 x 4 elements from \(7, 0\) on are not within w0"):
        staging.stage(1, specs(buckets(2)), wrong())
    assert taken == ["w0", "v0", "w1", "v1"]
    assert asked[0][-1] == [1, 1, 1]

    def fails_again() -> Iterator[ShardSlice]:
        yield ShardSlice("w0", 7, 0, next(parts(buckets(2))).tensor)
        raise MemoryError

    # The others wait in the reduction, whatever else fails here; the first error is raised.
    with pytest.raises(ValueError, match="are not within w0"):
        staging.stage(1, specs(buckets(2)), fails_again())
    assert len(asked) == 2
    assert asked[1][-1] == [1, 1, 1]
    staging.close()


def test_shared_memory_goes_with_its_staging(tmp_path: Path) -> None:
    staging = Staging(SharedMemory(tmp_path))
    stage(staging, 1, buckets(2))
    assert len(files(tmp_path)) == 2
    del staging
    gc.collect()
    assert files(tmp_path) == set()


@pytest.mark.parametrize(
    ("sent", "loaded", "named"),
    [
        ({"a": "1", "b": "2"}, {"a": "1", "b": "3"}, "tensor b was sent as 2 and loaded as 3"),
        ({"a": "1", "b": "2"}, {"a": "1"}, "tensor b was sent as 2 and loaded as None"),
        ({"a": "1"}, {"a": "1", "0": "2"}, "tensor 0 was sent as None and loaded as 2"),
    ],
)
def test_a_mismatch_names_the_engine_and_the_first_tensor(
    sent: dict[str, str], loaded: dict[str, str], named: str
) -> None:
    require_equal("engine-0", sent, dict(sent))
    with pytest.raises(WeightMismatch, match=f"weights of engine-0 are .* {named}"):
        require_equal("engine-0", sent, loaded)


@pytest.fixture
def second_carrier(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> str:
    """The name of a carrier that has one file and one line of the table."""
    module = ModuleType("megatron_async_rl.weights.second_carrier")

    class SecondCarrier(SharedMemory):
        def __init__(self) -> None:
            super().__init__(tmp_path)

    module.CARRIER = SecondCarrier  # type: ignore[attr-defined]
    monkeypatch.setitem(sys.modules, module.__name__, module)
    monkeypatch.setitem(CARRIERS, "second_carrier", CarrierCapabilities(agents="relay_agents"))
    return "second_carrier"


def test_a_carrier_is_added_by_one_file_and_one_line(tmp_path: Path, second_carrier: str) -> None:
    staging = staging_of(second_carrier, torch.device("cpu"), SingleProcess())
    reader = carrier(second_carrier).reader()
    (ref, *_) = stage(staging, 1, buckets(2)).buckets
    assert Path(ref.path).parent == tmp_path
    assert [name for name, _ in reader.read(ref)] == ["w0", "v0"]
    staging.close()


def test_the_carrier_of_the_configuration_is_the_one_that_engines_read_by(
    tmp_path: Path, second_carrier: str
) -> None:
    assert all(isinstance(carrier(name), Carrier) for name in CARRIERS)
    config = load(write_run(tmp_path))
    weights = config.weights.model_copy(update={"transport": second_carrier})
    config = config.model_copy(update={"weights": weights})
    spec = controller_spec(config, "cpu", {})
    assert {engine.transport for engine in spec.engines} == {second_carrier}
    assert all(engine.carrier.other_machines for engine in spec.engines)
    machine = Machine(cores=1, memory=0, shared_memory=0, gpus=(), engine_nodes=1)
    assert engines_elsewhere(config, machine)


def test_a_staging_of_whole_versions_fills_no_bucket_on_demand(tmp_path: Path) -> None:
    staging = Staging(SharedMemory(tmp_path))
    assert not staging.on_demand
    staging.release()
    with pytest.raises(TypeError, match="Staging fills no bucket on demand"):
        staging.fill(0, 0, ())
    staging.close()


def test_without_engines_a_version_has_the_same_digests_and_no_memory(staging: Staging) -> None:
    versions = [buckets(2), buckets(2, value=1.0), buckets(3)]
    alone = WeightDigests()
    assert alone.reached == [True]
    of_two = specs(versions[0])
    for version, given in enumerate(versions):
        cut = of_two if version < 2 else specs(given)
        found = alone.digests(version, cut, parts(given))
        assert found == stage(staging, version, given).digests
    with pytest.raises(ValueError, match="wrote 0 of the 3 elements of v0 in the update to"):
        alone.digests(7, of_two, (one for one in parts(versions[0]) if one.name != "v0"))
    with pytest.raises(ValueError, match="tensor w0 comes twice in one update"):
        alone.digests(8, specs([versions[0][0]] * 2), parts([]))
    with pytest.raises(ValueError, match="the update to version 9 has no buckets"):
        alone.digests(9, [], parts([]))
    empty = [TensorSpec.of(name, torch.empty(0, 2)) for name in "ab"]
    with pytest.raises(ValueError, match="a bucket of 2 tensors holds no bytes; there is nothing"):
        alone.digests(10, [empty], parts([]))


def test_a_bucket_has_plain_values_for_a_message_queue(staging: Staging) -> None:
    manifest = stage(staging, 1, [{"w": torch.zeros(2, 3)}])
    (ref,) = manifest.buckets
    entry = {"name": "w", "dtype": "float32", "shape": (2, 3), "offset": 0, "nbytes": 24}
    assert ref.as_plain() == {"path": ref.path, "size": 24, "nbytes": 24, "entries": [entry]}

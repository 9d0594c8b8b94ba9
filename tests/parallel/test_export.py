import pytest
import torch

from megatron_async_rl.weights.digest import tensor_digest
from tests.cases import looped
from tests.parallel.models import (
    ALL_LAYOUTS,
    CASES,
    FAULTY,
    LAYOUTS,
    MIXTURE_LAYOUTS,
    as_transformers_loads,
    directory_of,
    results,
    source_of,
    tensors_of,
)

pytestmark = pytest.mark.parallel


def assert_same(found, expected):
    assert found.keys() == expected.keys()
    for name, tensor in expected.items():
        assert found[name].dtype == tensor.dtype
        assert torch.equal(found[name], tensor), name


@looped(("layout", "model"), [*CASES, *((layout, "qwen3-bfloat16") for layout in LAYOUTS)])
def test_exported_tensors_are_the_checkpoints_bit_for_bit(layout, model):
    rank_zero, *others = results(layout)
    for kind in ("exported", "exported_in_small_buckets"):
        assert_same(rank_zero["models"][model][kind], tensors_of(source_of(model)))
        assert all(rank["models"][model][kind] is None for rank in others)


@looped("layout", LAYOUTS)
def test_a_bucket_costs_one_collective_per_dimension_however_many_tensors_it_has(layout):
    """One bucket per stage here: a gather over tensor ranks, and a message from every later
    stage."""
    stages, tensor = LAYOUTS[layout].get("pipeline", 1), LAYOUTS[layout].get("tensor", 1)
    ranks = [rank["models"]["qwen3-untied"]["collectives"] for rank in results(layout)]
    assert ranks[0] == (tensor > 1) + (stages - 1)
    assert max(ranks) <= max((tensor > 1) + 1, stages)


@looped("layout", MIXTURE_LAYOUTS)
def test_divided_experts_travel_in_buckets_of_their_own(layout):
    """Two buckets per stage: what every data-parallel rank holds, and the experts, gathered over
    their owners."""
    settings = MIXTURE_LAYOUTS[layout]
    stages, tensor, expert = (settings.get(name, 1) for name in ("pipeline", "tensor", "expert"))
    whole, divided = (tensor > 1) + (stages - 1), (expert > 1) * (1 + stages - 1)
    assert results(layout)[0]["models"]["mixture"]["collectives"] == whole + divided


@looped(
    ("layout", "model"),
    [("single", "qwen3-tied"), ("data", "qwen3-tied"), ("mixture_single", "mixture")],
)
def test_what_one_rank_holds_whole_is_exported_without_a_copy(layout, model):
    """Only queries, keys and values lie apart in Megatron's memory."""
    exported = tensors_of(source_of(model)).keys()
    parted = {name for name in exported if name.split(".")[-2] in ("q_proj", "k_proj", "v_proj")}
    assert results(layout)[0]["models"][model]["in_parameter_memory"] == exported - parted


STAGED = [*CASES, *((layout, "qwen3-bfloat16") for layout in LAYOUTS)]


@looped("way", ["by tensors", "by rows", "gathered", "on demand"])
@looped(("layout", "model"), STAGED)
def test_what_all_ranks_stage_is_the_checkpoint_and_so_are_its_digests(layout, model, way):
    """Digests of the checkpoint are of whole tensors; on every rank the same sums of parts."""
    expected = tensors_of(source_of(model))
    digests = {name: tensor_digest(tensor) for name, tensor in expected.items()}
    for rank in results(layout):
        staged = rank["models"][model]["staging"][way]
        assert_same(staged["tensors"], expected)
        assert staged["digests"] == digests


@looped(("layout", "model"), CASES)
def test_every_rank_writes_its_share_and_no_weights_go_through_another(layout, model):
    settings = ALL_LAYOUTS[layout]
    expected = tensors_of(source_of(model))
    total = sum(tensor.nbytes for tensor in expected.values())
    for rank in results(layout):
        staging = rank["models"][model]["staging"]
        assert sum(staging["bytes"]) == total
        if settings.get("pipeline", 1) == 1:
            assert max(staging["bytes"]) < 1.05 * total / settings["ranks"] + 1500
        assert staging["collectives"].keys() <= {"all_reduce"}
        assert staging["collectives"].get("all_reduce", 0) == (settings["ranks"] > 1)


@looped("layout", ALL_LAYOUTS)
def test_a_flipped_bit_swapped_rows_and_a_stale_shard_are_each_caught(layout):
    model = FAULTY[layout in MIXTURE_LAYOUTS]
    damaged = "model.layers.1.self_attn.q_proj.weight"
    for rank in results(layout):
        found = rank["models"][model]["faults"]
        stale = found.pop("stale shard")
        assert found == {"nothing": "", "flipped bit": damaged, "swapped rows": damaged}
        assert stale in tensors_of(source_of(model))


@looped("layout", ALL_LAYOUTS)
def test_a_trained_model_is_written_as_a_directory_that_transformers_loads(layout, tmp_path):
    expected = results(layout)[0]["checkpoint"]["after_export"]
    assert_same(as_transformers_loads(directory_of(layout) / "hf", tmp_path), expected)

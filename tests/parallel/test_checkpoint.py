import json

import pytest
import torch
import torch.distributed.checkpoint as dcp
from torch.distributed.checkpoint.metadata import TensorStorageMetadata

from tests.parallel.model_program import BLOCK
from tests.parallel.models import (
    ALL_LAYOUTS,
    LOADS_FROM,
    as_transformers_loads,
    directory_of,
    results,
)
from tests.parallel.ranks import run_alone

pytestmark = pytest.mark.parallel

FOREIGN = [layout for layout in ALL_LAYOUTS if LOADS_FROM[layout]]
CONVERTED = [
    name
    for name in ("tensor_pipeline", "virtual_pipeline", "data", "expert")
    if name in ALL_LAYOUTS
]


def saved(layout):
    return results(layout)[0]["checkpoint"]


def assert_same(found, expected):
    assert found.keys() == expected.keys()
    for name, tensor in expected.items():
        assert torch.equal(found[name], tensor), name


def assert_close(found, expected):
    assert found.keys() == expected.keys()
    for name, tensor in expected.items():
        torch.testing.assert_close(found[name], tensor, rtol=1e-5, atol=1e-6, msg=name)


@pytest.mark.parametrize("layout", ALL_LAYOUTS)
def test_a_resumed_model_has_the_saved_weights_and_takes_the_same_next_step(layout):
    result = saved(layout)
    assert_same(result["resumed"], result["at_save"])
    assert_same(result["resumed_after"], result["after"])
    assert any(
        not torch.equal(result["after"][name], tensor) for name, tensor in result["at_save"].items()
    )


@pytest.mark.parametrize("layout", ALL_LAYOUTS)
def test_state_and_random_numbers_continue(layout):
    for result in results(layout):
        result = result["checkpoint"]
        assert result["step"] == 2
        assert result["state"] == {"version": 2, "mark": "own", "nested": {"position": (3, 4)}}
        assert result["random_restored"]
        assert result["files"] == [b"own", None, None]


@pytest.mark.parametrize("layout", FOREIGN)
def test_a_checkpoint_of_another_layout_gives_the_same_weights_and_the_same_next_step(layout):
    result, origin = saved(layout), saved(LOADS_FROM[layout])
    assert_same(result["other"], origin["at_save"])
    assert_close(result["other_after"], origin["after"])


def test_a_save_killed_at_any_moment_leaves_the_old_checkpoint_or_the_new_one():
    found = results("single")[0]["interrupted"]
    assert len(found) > 10
    assert all(entry["whole"] and entry["file"] == entry["mark"] for entry in found)
    marks = [entry["mark"] for entry in found]
    turn = marks.index("second")
    assert marks == ["first"] * turn + ["second"] * (len(marks) - turn)
    assert turn > 5
    assert all(entry["step"] == {"first": 1, "second": 2}[entry["mark"]] for entry in found)


def test_a_save_after_a_killed_one_works_and_clears_what_it_left():
    tried = [entry for entry in results("single")[0]["interrupted"] if "left" in entry]
    assert len(tried) > 10
    for entry in tried:
        assert entry["saves_again"]
        assert entry["left"] == ["latest", "step_00000003"]


@pytest.mark.parametrize("layout", CONVERTED)
def test_convert_writes_a_checkpoint_of_any_layout_as_a_hugging_face_directory(layout, tmp_path):
    results(layout)
    checkpoint = directory_of(layout) / "checkpoint"
    run_alone("tests.parallel.convert_program", [checkpoint, tmp_path / "hf"])
    assert_same(
        as_transformers_loads(tmp_path / "hf", tmp_path / "again"), saved(layout)["at_save"]
    )
    assert json.loads((tmp_path / "hf" / "config.json").read_text())["dtype"] == "float32"


@pytest.mark.parametrize("layout", ["single", "mixture_single"])
def test_local_layers_save_tensors_alone_and_under_the_keys_of_transformer_engines(layout):
    results(layout)
    (step,) = (directory_of(layout) / "checkpoint").glob("step_*")
    found = dcp.FileSystemReader(step / "sharded").read_metadata().state_dict_metadata
    # Anything else is a pickled object.
    assert {type(each) for each in found.values()} == {TensorStorageMetadata}
    model = {key for key in found if not key.startswith("parameter_state.")}
    assert {
        "decoder.layers.self_attention.linear_qkv.layer_norm_weight",
        "decoder.layers.mlp.linear_fc1.layer_norm_weight",
    } <= model
    assert not [key for key in model if "input_layernorm" in key or "pre_mlp_layernorm" in key]


@pytest.mark.parametrize("layout", ALL_LAYOUTS)
def test_what_is_written_beside_a_step_is_the_state_before_it(layout):
    for rank, result in enumerate(results(layout)):
        found = result["checkpoint"]["beside"]
        assert found["busy"]
        assert not found["early"], "latest names what is being written"
        assert found["moments"]
        if rank == 0:
            assert_same(found["loaded"], found["at_save"])


@pytest.mark.parametrize("layout", ["single", "data"])
def test_a_write_that_failed_is_raised_once_by_the_next_wait_and_leaves_the_last_checkpoint(layout):
    for result in results(layout):
        found = result["checkpoint"]["beside"]
        assert found["raised"] == ["the disk is gone"] * 2
        assert found["left"] == ["latest", "step_00000002"]


@pytest.mark.parametrize("layout", ["data", "expert"])
def test_no_rank_puts_a_tensor_together_to_save_or_to_load(layout):
    for result in results(layout):
        found = result["checkpoint"]["memory"]
        assert found["largest"] > 2 * BLOCK
        assert max(found["saving"] + found["staging"] + found["loading"]) <= BLOCK
        assert ".distcp" not in found["read"], "a file of blocks may be larger than the memory"


def test_each_data_parallel_rank_handles_its_own_moments_and_no_more():
    found = [result["checkpoint"]["memory"] for result in results("data")]
    parameters = found[0]["parameters"]
    assert sum(rank["moments"] for rank in found) == 2 * parameters
    for rank in found:
        assert 0.3 * parameters < rank["moments"] < 1.7 * parameters
        # Each rank also writes half of the weights, in multiples of 64 elements, and reads all;
        # of a block that two of its own overlap it reads a part twice.
        written = 4 * (rank["moments"] + 0.6 * parameters)
        assert 0 < sum(rank["staging"]) <= written
        assert sum(rank["saving"]) <= written
        assert sum(rank["loading"]) <= 4.5 * (rank["moments"] + parameters)


@pytest.mark.parametrize("layout", ["data", "expert"])
def test_exporting_and_scoring_leave_the_moments_alone(layout):
    assert all(result["checkpoint"]["memory"]["touched"] == [] for result in results(layout))


@pytest.mark.parametrize("layout", ALL_LAYOUTS)
def test_copies_divided_over_replicas_hold_the_bits_of_whole_ones(layout):
    found = [result["checkpoint"]["copies"] for result in results(layout)]
    assert all(rank["same"] for rank in found)
    assert all(rank["gathered"] <= BLOCK for rank in found)
    if layout == "data":
        assert all(rank["gathered"] > BLOCK / 2 for rank in found)
        assert sum(rank["share"] for rank in found) == pytest.approx(1.0)
        assert all(0.4 < rank["share"] < 0.6 for rank in found)


@pytest.mark.parametrize("layout", ["single", "data"])
def test_a_checkpoint_that_one_rank_wrote_whole_loads_too(layout):
    for result in results(layout):
        found = result["earlier"]
        assert sorted(found["same"]) == found["held"]
        assert all(found["same"].values())
        assert found["steps"] == 2

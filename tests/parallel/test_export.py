import pytest
import torch
from safetensors.torch import load_file

from megatron_async_rl.weights.digest import tensor_digest
from tests.parallel.models import LAYOUTS, directory_of, material, results

pytestmark = pytest.mark.parallel

MODELS = (
    "llama-untied", "llama-tied", "qwen2-untied", "qwen2-tied", "qwen3-untied", "qwen3-tied",
    "qwen3-tied-odd", "qwen2-untied-odd", "qwen3-bfloat16",
)  # fmt: skip


def source(model):
    tensors = {}
    for file in (material() / model).glob("*.safetensors"):
        tensors |= load_file(file)
    return tensors


def assert_same(found, expected):
    assert found.keys() == expected.keys()
    for name, tensor in expected.items():
        assert found[name].dtype == tensor.dtype
        assert torch.equal(found[name], tensor), name


@pytest.mark.parametrize("model", MODELS)
@pytest.mark.parametrize("layout", LAYOUTS)
def test_exported_tensors_are_the_checkpoints_bit_for_bit(layout, model):
    rank_zero, *others = results(layout)
    for kind in ("exported", "exported_in_small_buckets"):
        assert_same(rank_zero["models"][model][kind], source(model))
        assert all(rank["models"][model][kind] is None for rank in others)


@pytest.mark.parametrize("layout", LAYOUTS)
def test_a_bucket_costs_one_collective_per_dimension_however_many_tensors_it_has(layout):
    """One bucket per stage here: a gather over tensor ranks, and a message from every later stage."""
    stages, tensor = LAYOUTS[layout].get("pipeline", 1), LAYOUTS[layout].get("tensor", 1)
    ranks = [rank["models"]["qwen3-untied"]["collectives"] for rank in results(layout)]
    assert ranks[0] == (tensor > 1) + (stages - 1)
    assert max(ranks) <= max((tensor > 1) + 1, stages)


@pytest.mark.parametrize("layout", LAYOUTS)
def test_digests_of_the_exported_tensors_are_those_of_the_checkpoint(layout):
    expected = {name: tensor_digest(tensor) for name, tensor in source("qwen3-bfloat16").items()}
    assert results(layout)[0]["models"]["qwen3-bfloat16"]["digests"] == expected


@pytest.mark.parametrize("layout", LAYOUTS)
def test_a_trained_model_is_written_as_a_directory_that_transformers_loads(layout):
    import transformers

    directory = directory_of(layout) / "hf"
    model, problems = transformers.AutoModelForCausalLM.from_pretrained(directory, dtype=torch.float32, output_loading_info=True)
    assert not any(problems[kind] for kind in ("missing_keys", "unexpected_keys", "mismatched_keys"))
    expected = results(layout)[0]["checkpoint"]["after_export"]
    weights = {name: parameter.detach() for name, parameter in model.named_parameters()}
    assert_same(weights, expected)

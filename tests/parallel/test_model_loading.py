import pytest

from tests.parallel.models import results

pytestmark = pytest.mark.parallel

TENSOR = "model.layers.1.mlp.down_proj.weight"


@pytest.mark.parametrize(
    ("breakage", "kind", "named"),
    [
        ("missing tensor", "WeightsDoNotFit", f"{TENSOR} is missing"),
        (
            "foreign tensor",
            "WeightsDoNotFit",
            "model.layers.1.mlp.extra.weight is in the files but not in the model",
        ),
        ("wrong shape", "WeightsDoNotFit", f"{TENSOR} has shape [3, 3], the model needs [32, 48]"),
        (
            "truncated file",
            "WeightsDoNotFit",
            "model.safetensors is not a complete safetensors file",
        ),
        ("no weights", "FileNotFoundError", "lacks safetensors files"),
        ("model type", "UnsupportedModel", "model_type is 'gpt2'; supported: gemma3_text, llama"),
        (
            "rope",
            "UnsupportedModel",
            "rope_parameters.rope_type is 'dynamic'; supported: default, linear, llama3, yarn",
        ),
        ("sliding window", "UnsupportedModel", "layer_types is ['full_attention']; "),
    ],
)
def test_a_model_directory_that_does_not_fit_is_refused_and_the_reason_named(breakage, kind, named):
    found = results("single")[0]["refusals"][breakage]
    assert found.startswith(kind)
    assert named in found


@pytest.mark.parametrize("harmless", ["derived tensor", "tied copy"])
def test_tensors_that_the_configuration_implies_are_allowed(harmless):
    assert results("single")[0]["refusals"][harmless] == "built"

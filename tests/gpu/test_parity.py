"""The same policy code on one CUDA device, compared with transformers on the CPU in float32."""

import pytest
import torch

from tests.gpu.hardware import DEVICE, ON_DEVICE, run_program
from tests.parallel import models, test_model_families
from tests.parallel.test_export import assert_same

pytestmark = ON_DEVICE


@pytest.fixture(scope="module")
def found(tmp_path_factory):
    output = tmp_path_factory.mktemp("gpu")
    run_program(
        "tests.gpu.parity_program",
        [DEVICE, models.material("dense"), test_model_families.material(), output],
    )
    return torch.load(output / "results.pt", weights_only=False, map_location="cpu")


def furthest(ours: list[torch.Tensor], theirs: list[torch.Tensor]) -> float:
    """Return the largest difference; nan if one is nan."""
    assert [one.shape for one in ours] == [other.shape for other in theirs]
    return float((torch.cat(ours).double() - torch.cat(theirs).double()).abs().max())


@pytest.mark.parametrize(
    ("model", "tolerance"),
    [
        ("llama-untied", 1e-5),
        ("qwen2-tied", 1e-5),
        ("qwen3-tied-odd", 1e-5),
        ("qwen3-bfloat16", 0.08),
    ],
)
def test_log_probs_agree_with_transformers(found, model, tolerance, figure):
    apart = furthest(found[model]["logprobs"], models.reference_logprobs(model))
    against = "transformers in float32 on the CPU"
    figure(f"log-probs of {model}, largest error", apart, at_most=tolerance, against=against)


@pytest.mark.parametrize("sequence", ["padded", "packed"])
@pytest.mark.parametrize("model", test_model_families.MODELS)
def test_log_probs_of_every_family_agree_with_transformers(found, model, sequence, figure):
    expected, _ = test_model_families.reference(model)
    figure(
        f"log-probs of {model}, {sequence}, largest error",
        furthest(found[model][sequence], expected),
        at_most=1e-5,
        against="transformers in float64 on the CPU",
    )


@pytest.mark.parametrize("model", ["llama-untied", "qwen3-tied-odd", "qwen3-bfloat16"])
def test_exported_tensors_are_the_checkpoints_bit_for_bit(found, model):
    assert_same(found[model]["exported"], models.tensors_of(models.source_of(model)))


def test_a_resumed_model_has_the_saved_weights_and_takes_the_same_next_step(found):
    result = found["checkpoint"]
    assert_same(result["resumed"], result["at_save"])
    assert_same(result["resumed_after"], result["after"])

import pytest
import torch

from tests.parallel.models import LAYOUTS, VOCABULARY, reference_logprobs, results

pytestmark = pytest.mark.parallel

FLOAT32 = (
    "llama-untied", "llama-tied", "qwen2-untied", "qwen2-tied", "qwen3-untied", "qwen3-tied",
    "qwen3-tied-odd", "qwen2-untied-odd", "llama-llama3-rope", "llama-linear-rope",
)  # fmt: skip


def last_stage(layout, model):
    found = [rank["models"][model]["logprobs"] for rank in results(layout) if rank["models"][model]["logprobs"] is not None]
    parallel = LAYOUTS[layout]
    assert len(found) == parallel["ranks"] // parallel.get("pipeline", 1)
    return found


@pytest.mark.parametrize("model", FLOAT32)
@pytest.mark.parametrize("layout", LAYOUTS)
def test_log_probs_agree_with_transformers(layout, model):
    for rank in last_stage(layout, model):
        for ours, reference in zip(rank, reference_logprobs(model), strict=True):
            torch.testing.assert_close(ours, reference, rtol=0, atol=1e-5)


@pytest.mark.parametrize("layout", LAYOUTS)
def test_bfloat16_log_probs_are_near_the_float32_ones_and_themselves_float32(layout):
    for rank in last_stage(layout, "qwen3-bfloat16"):
        for ours, reference in zip(rank, reference_logprobs("qwen3-bfloat16"), strict=True):
            assert ours.dtype == torch.float32
            torch.testing.assert_close(ours, reference, rtol=0, atol=0.08)


def test_the_test_models_are_far_from_uniform():
    for model in FLOAT32:
        everything = torch.cat(reference_logprobs(model))
        assert (everything + torch.log(torch.tensor(float(VOCABULARY)))).abs().max() > 0.5

import pytest
import torch

from tests.parallel.models import (
    ALL_LAYOUTS,
    CASES,
    LAYOUTS,
    VOCABULARY,
    reference_logprobs,
    results,
)

pytestmark = pytest.mark.parallel


def last_stage(layout, model, what="logprobs"):
    found = [
        rank["models"][model][what]
        for rank in results(layout)
        if rank["models"][model][what] is not None
    ]
    parallel = ALL_LAYOUTS[layout]
    assert len(found) == parallel["ranks"] // parallel.get("pipeline", 1)
    return found


@pytest.mark.parametrize(("layout", "model"), CASES)
def test_log_probs_agree_with_transformers(layout, model):
    for rank in last_stage(layout, model):
        for ours, reference in zip(rank, reference_logprobs(model), strict=True):
            torch.testing.assert_close(ours, reference, rtol=0, atol=1e-5)


@pytest.mark.parametrize(("layout", "model"), CASES)
def test_log_probs_of_packed_samples_agree_with_transformers(layout, model):
    for rank in last_stage(layout, model, "logprobs_packed"):
        for ours, reference in zip(rank, reference_logprobs(model), strict=True):
            torch.testing.assert_close(ours, reference, rtol=0, atol=1e-5)


@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize("what", ["logprobs", "logprobs_packed"])
def test_bfloat16_log_probs_are_near_the_float32_ones_and_themselves_float32(layout, what):
    for rank in last_stage(layout, "qwen3-bfloat16", what):
        for ours, reference in zip(rank, reference_logprobs("qwen3-bfloat16"), strict=True):
            assert ours.dtype == torch.float32
            torch.testing.assert_close(ours, reference, rtol=0, atol=0.08)


def test_the_test_models_are_far_from_uniform():
    for model in {model for _, model in CASES}:
        everything = torch.cat(reference_logprobs(model))
        assert (everything + torch.log(torch.tensor(float(VOCABULARY)))).abs().max() > 0.5

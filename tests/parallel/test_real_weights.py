"""Log-probs of real pre-trained models on several layouts are those of transformers."""

from __future__ import annotations

import functools
import json
import shutil
from pathlib import Path
from typing import Any

import pytest
import torch

from megatron_async_rl.samples import Sample
from tests.parallel.models import TEMPERATURE
from tests.parallel.ranks import run_ranks
from tests.real_models import FOLDER, case_of, samples
from tests.thorough import thorough

pytestmark = [pytest.mark.parallel, thorough]

LAYOUTS = {
    "single": {"ranks": 1},
    # SmolLM2 has nine heads.
    "tensor": {"ranks": 3, "tensor": 3},
    "pipeline": {"ranks": 2, "pipeline": 2},
}
CASES = [
    ("smollm2", "single"),
    ("smollm2", "tensor"),
    ("smollm2", "pipeline"),
    # Tensor parallelism does not divide Gemma 3 270M, which has one key-value head.
    ("gemma3", "single"),
    ("gemma3", "pipeline"),
]
cases = pytest.mark.parametrize(("model", "layout"), [case_of(*case) for case in CASES])


@pytest.fixture(scope="module")
def measured(tmp_path_factory: pytest.TempPathFactory) -> Any:
    """Return the results of real_weights_program on a layout, and the directory of the model with
    merged adapters."""

    @functools.cache
    def of(model: str, layout: str) -> tuple[dict[str, list[torch.Tensor]], Path]:
        folder = tmp_path_factory.mktemp(f"{model}-{layout}")
        torch.save(samples(model), folder / "samples.pt")
        settings = LAYOUTS[layout]
        arguments = [FOLDER / model, folder / "samples.pt", json.dumps(settings), folder]
        run_ranks(settings["ranks"], "tests.parallel.real_weights_program", arguments)
        merged = folder / "merged"
        shutil.copytree(FOLDER / model, merged, ignore=shutil.ignore_patterns("*.safetensors*"))
        (folder / "merged.safetensors").rename(merged / "model.safetensors")
        return torch.load(folder / "logprobs.pt", weights_only=False), merged

    return of


@functools.cache
def transformers_logprobs(folder: Path, model: str) -> list[torch.Tensor]:
    import transformers

    reference = transformers.AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32)
    return [of_one(reference, one) for one in samples(model)]


def of_one(reference: Any, sample: Sample) -> torch.Tensor:
    start = len(sample.prompt.token_ids)
    ids = torch.tensor([[*sample.prompt.token_ids, *sample.response_ids.tolist()]])
    with torch.no_grad():
        logits = reference(ids).logits[0, start - 1 : -1] / TEMPERATURE
    return torch.log_softmax(logits, -1).gather(1, ids[0, start:, None])[:, 0]


def difference(one: list[torch.Tensor], other: list[torch.Tensor]) -> float:
    pairs = zip(one, other, strict=True)
    return max(float((a - b).abs().max()) for a, b in pairs)


@cases
def test_log_probs_agree_with_transformers(measured: Any, model: str, layout: str) -> None:
    found, _ = measured(model, layout)
    reference = transformers_logprobs(FOLDER / model, model)
    for sequence in ("padded", "packed"):
        assert difference(found[sequence], reference) < 2e-4, sequence
    # bfloat16 has 8 bits of precision.
    assert 1e-4 < difference(found["bfloat16"], reference) < 0.5


@cases
def test_merged_adapters_are_the_model_with_adapters(
    measured: Any, model: str, layout: str
) -> None:
    found, merged = measured(model, layout)
    assert difference(found["adapted"], transformers_logprobs(merged, model)) < 5e-4
    assert difference(found["adapted"], found["padded"]) > 0.01

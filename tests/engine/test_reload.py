"""vLLM's model after an update, compared bit by bit with the same model right after loading, for
the differences between model families and for quantization during the load; and compared with the
policy's log-probs."""

from __future__ import annotations

import json
import pickle
import subprocess
import sys
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from megatron_async_rl.samples import Prompt
from tests.engine.reference import PROMPT, VICTIM
from tests.parallel.ranks import run_ranks
from tests.thorough import chosen
from tests.tiny_models import save_tiny_model
from tests.train_batches import make_sample

pytestmark = pytest.mark.engine

SHAPE: dict[str, Any] = {"hidden_size": 64, "heads": 2, "kv_heads": 1}
"""Shape of all models. 32 is the smallest head of vLLM's attention on a CPU."""
MODELS: dict[str, dict[str, Any]] = chosen(
    {
        "tied-with-bias": {"family": "qwen2", "tied": True},
        "untied": {"family": "llama"},
        "experts": {"family": "qwen3_moe", "tied": True},
        "window": {"family": "mistral", "sliding_window": 7},
        "some-windows": {
            "family": "gemma3_text",
            "tied": True,
            "sliding_window": 7,
            "layer_types": ["sliding_attention", "full_attention"],
        },
        "output-bias": {"family": "llama", "attention_bias": True},
        "yarn-window": {
            "family": "qwen3",
            "use_sliding_window": True,
            "sliding_window": 7,
            "max_window_layers": 0,
            "rope_parameters": {
                "rope_type": "yarn",
                "rope_theta": 1e4,
                "factor": 4.0,
                "original_max_position_embeddings": 64,
                "attention_factor": 1.3,
            },
        },
    },
    "tied-with-bias",
    "untied",
    "experts",
    "some-windows",
)
"""The gate has one model for each way to load: fused projections with biases, an output layer of
its own, experts, and layers that differ."""
HALVES, QUANTISED = "halves", "fp8_per_channel"
"""QUANTISED is the only quantization that vLLM's CPU kernels support."""
HOW: dict[str, dict[str, Any]] = {
    HALVES: {"family": "qwen3_moe", "tied": True, "num_experts": 6},
    QUANTISED: {"family": "qwen3", "tied": True, "dtype": "bfloat16"},
}
"""Value of HOW in reload_program.py -> model. The last case also has the faults."""
LAYERWISE_TOO = ("tied-with-bias", "untied")
ROOT = Path(__file__).resolve().parents[2]

State = tuple[str, int, list[float]]


TOLERANCE = 1e-5


@pytest.fixture(scope="module")
def root(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("reload")


@pytest.fixture(scope="module")
def states(root: Path) -> dict[str, list[State]]:
    arguments = []
    for name, model in MODELS.items():
        first, second = (
            save_tiny_model(root / which / name, seed=seed, **model, **SHAPE)
            for which, seed in (("a", 1), ("b", 2))
        )
        arguments.append(f"{first}:{second}" + (":both" if name in LAYERWISE_TOO else ""))
    for how, model in HOW.items():
        pair = [
            str(save_tiny_model(root / which / how, seed=seed, **model, **SHAPE))
            for which, seed in (("a", 1), ("b", 2))
        ]
        arguments.append(":".join([*pair, how]))
    results = root / "results.json"
    program = [sys.executable, "-m", "tests.engine.reload_program", str(results), *arguments]
    run = subprocess.run(
        program, cwd=ROOT, capture_output=True, text=True, timeout=900, check=False
    )
    assert run.returncode == 0, run.stdout[-2000:] + run.stderr[-4000:]
    by_model: dict[str, list[State]] = json.loads(results.read_text())
    return by_model


@pytest.mark.parametrize("model", MODELS)
def test_a_model_after_an_update_computes_the_same_as_the_freshly_loaded_checkpoint(
    states: dict[str, list[State]], model: str
) -> None:
    (start, _, fresh), (way, _, first), (_, _, back), (_, _, again), *layerwise = states[model]
    assert (start, way) == ("none", "InPlaceReload")
    assert np.max(np.abs(np.subtract(first, fresh))) > 0.1, "the two checkpoints must differ"
    assert back == fresh
    assert again == first
    assert [way for way, _, _ in layerwise] == (
        ["LayerwiseReload"] * 2 if model in LAYERWISE_TOO else []
    )
    for _, which, logprobs in layerwise:
        assert logprobs == (first if which else fresh)


def test_each_of_two_workers_loads_its_half_of_the_experts(
    states: dict[str, list[State]],
) -> None:
    """The program has verified the digests of both halves together."""
    first, second = states[HALVES][:4], states[HALVES][4:]
    for (_, _, fresh), (way, _, new), (_, _, back), (_, _, again) in (first, second):
        assert way == "InPlaceReload"
        assert np.max(np.abs(np.subtract(new, fresh))) > 0.1
        assert (back, again) == (fresh, new)
    assert first[0][2] != second[0][2]


def test_a_quantized_model_after_an_update_computes_the_same_as_freshly_loaded(
    states: dict[str, list[State]],
) -> None:
    (_, _, fresh), (way, _, first), (_, _, back), (_, _, again) = states[QUANTISED]
    assert way == "LayerwiseReload"
    assert np.max(np.abs(np.subtract(first, fresh))) > 0.1
    assert back == fresh
    assert again == first


def test_a_flipped_bit_and_a_missing_weight_of_a_quantized_model_are_detected(
    states: dict[str, list[State]],
) -> None:
    flipped, left_out = states["faults"]
    assert flipped == [VICTIM]
    assert f"left out 1: {VICTIM}" in str(left_out)


@pytest.fixture(scope="module")
def trainers(root: Path, states: dict[str, list[State]]) -> dict[str, np.ndarray]:
    """Model -> log-probs of the policy for the prompt's tokens, without the first token."""
    sample = make_sample(Prompt(id="p", text="", token_ids=(PROMPT[0],)), "p-0", PROMPT[1:])
    (root / "samples").write_bytes(pickle.dumps([sample]))
    checkpoints = [root / "a" / name for name in MODELS]
    arguments = [root / "samples", "1.0", root / "logprobs", *checkpoints]
    run_ranks(1, "tests.engine.trainer_program", arguments)
    logprobs = pickle.loads((root / "logprobs").read_bytes())
    return {path.name: logprobs[str(path)][0] for path in checkpoints}


@pytest.mark.parametrize("model", MODELS)
def test_log_probs_equal_the_policys(
    states: dict[str, list[State]], trainers: dict[str, np.ndarray], model: str
) -> None:
    _, which, logprobs = states[model][0]
    assert which == 0
    np.testing.assert_allclose(
        logprobs[: len(PROMPT) - 1], trainers[model], atol=TOLERANCE, rtol=0.0
    )

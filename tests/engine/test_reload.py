"""vLLM's model after an update against the same model freshly read: bit for bit, for each way in
which families of models differ, and where vLLM quantises what is loaded; and against the policy,
whose log-probs are the same."""

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
from tests.tiny_models import save_tiny_model
from tests.train_batches import make_sample

pytestmark = pytest.mark.engine

SHAPE: dict[str, Any] = {"hidden_size": 64, "heads": 2, "kv_heads": 1}
"""32 is the smallest head of vLLM's attention on a CPU."""
MODELS: dict[str, dict[str, Any]] = {
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
}
HALVES, QUANTISED = "halves", "fp8_per_channel"
"""The second: the one quantisation that vLLM's CPU kernels know."""
HOW: dict[str, dict[str, Any]] = {
    HALVES: {"family": "qwen3_moe", "tied": True, "num_experts": 6},
    QUANTISED: {"family": "qwen3", "tied": True, "dtype": "bfloat16"},
}
"""Arguments of reload_program.py; the last case has the faults."""
LAYERWISE_TOO = ("tied-with-bias", "untied")
ROOT = Path(__file__).resolve().parents[2]

State = tuple[str, int, list[float]]


TOLERANCE = 1e-5


@pytest.fixture(scope="module")
def root(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("reload")


@pytest.fixture(scope="module")
def states(root: Path) -> dict[str, list[State]]:
    asked = []
    for name, model in MODELS.items():
        first, second = (
            save_tiny_model(root / which / name, seed=seed, **model, **SHAPE)
            for which, seed in (("a", 1), ("b", 2))
        )
        asked.append(f"{first}:{second}" + (":both" if name in LAYERWISE_TOO else ""))
    for how, model in HOW.items():
        pair = [
            str(save_tiny_model(root / which / how, seed=seed, **model, **SHAPE))
            for which, seed in (("a", 1), ("b", 2))
        ]
        asked.append(":".join([*pair, how]))
    answer = root / "answer.json"
    program = [sys.executable, "-m", "tests.engine.reload_program", str(answer), *asked]
    run = subprocess.run(
        program, cwd=ROOT, capture_output=True, text=True, timeout=900, check=False
    )
    assert run.returncode == 0, run.stdout[-2000:] + run.stderr[-4000:]
    found: dict[str, list[State]] = json.loads(answer.read_text())
    return found


@pytest.mark.parametrize("model", MODELS)
def test_after_an_update_it_computes_what_the_same_checkpoint_freshly_read_does(
    states: dict[str, list[State]], model: str
) -> None:
    (start, _, fresh), (way, _, first), (_, _, back), (_, _, again), *layerwise = states[model]
    assert (start, way) == ("none", "InPlaceReload")
    assert np.max(np.abs(np.subtract(first, fresh))) > 0.1, (
        "the two checkpoints agree: nothing is tested"
    )
    assert back == fresh
    assert again == first
    assert [way for way, _, _ in layerwise] == (
        ["LayerwiseReload"] * 2 if model in LAYERWISE_TOO else []
    )
    for _, which, logprobs in layerwise:
        assert logprobs == (first if which else fresh)


def test_the_experts_of_two_workers_are_all_of_them_and_each_takes_its_own(
    states: dict[str, list[State]],
) -> None:
    """The program has added their digests up."""
    first, second = states[HALVES][:4], states[HALVES][4:]
    for (_, _, fresh), (way, _, new), (_, _, back), (_, _, again) in (first, second):
        assert way == "InPlaceReload"
        assert np.max(np.abs(np.subtract(new, fresh))) > 0.1
        assert (back, again) == (fresh, new)
    assert first[0][2] != second[0][2]


def test_a_quantised_model_after_an_update_computes_what_it_does_freshly_read(
    states: dict[str, list[State]],
) -> None:
    (_, _, fresh), (way, _, first), (_, _, back), (_, _, again) = states[QUANTISED]
    assert way == "LayerwiseReload"
    assert np.max(np.abs(np.subtract(first, fresh))) > 0.1
    assert back == fresh
    assert again == first


def test_of_a_quantised_models_weights_each_bit_is_proved_and_each_must_come(
    states: dict[str, list[State]],
) -> None:
    flipped, left_out = states["faults"]
    assert flipped == [VICTIM]
    assert f"left out 1: {VICTIM}" in str(left_out)


@pytest.fixture(scope="module")
def trainers(root: Path, states: dict[str, list[State]]) -> dict[str, np.ndarray]:
    """The policy's log-probs of the prompt's tokens after its first, by model."""
    sample = make_sample(Prompt(id="p", text="", token_ids=(PROMPT[0],)), "p-0", PROMPT[1:])
    (root / "samples").write_bytes(pickle.dumps([sample]))
    checkpoints = [root / "a" / name for name in MODELS]
    arguments = [root / "samples", "1.0", root / "logprobs", *checkpoints]
    run_ranks(1, "tests.engine.trainer_program", arguments)
    found = pickle.loads((root / "logprobs").read_bytes())
    return {path.name: found[str(path)][0] for path in checkpoints}


@pytest.mark.parametrize("model", MODELS)
def test_its_log_probs_are_the_policys(
    states: dict[str, list[State]], trainers: dict[str, np.ndarray], model: str
) -> None:
    _, which, logprobs = states[model][0]
    assert which == 0
    np.testing.assert_allclose(
        logprobs[: len(PROMPT) - 1], trainers[model], atol=TOLERANCE, rtol=0.0
    )

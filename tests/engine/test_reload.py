"""vLLM's model after an update against the same model freshly read: bit for bit, for dense models
and a mixture of experts."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from tests.tiny_models import save_tiny_model

pytestmark = pytest.mark.engine

SHAPE: dict[str, Any] = {"hidden_size": 64, "heads": 2, "kv_heads": 1}
"""32 is the smallest head of vLLM's attention on a CPU."""
MODELS: dict[str, dict[str, Any]] = {
    "tied-with-bias": {"family": "qwen2", "tied": True},
    "untied": {"family": "llama"},
    "experts": {"family": "qwen3_moe", "tied": True},
}
LAYERWISE_TOO = ("tied-with-bias", "untied")
ROOT = Path(__file__).resolve().parents[2]

State = tuple[str, int, list[float]]


@pytest.fixture(scope="module")
def states(tmp_path_factory: pytest.TempPathFactory) -> dict[str, list[State]]:
    root = tmp_path_factory.mktemp("reload")
    asked = []
    for name, model in MODELS.items():
        first, second = (
            save_tiny_model(root / which / name, seed=seed, **model, **SHAPE)
            for which, seed in (("a", 1), ("b", 2))
        )
        asked.append(f"{first}:{second}" + (":both" if name in LAYERWISE_TOO else ""))
    answer = root / "answer.json"
    program = [sys.executable, "-m", "tests.engine.reload_program", str(answer), *asked]
    run = subprocess.run(
        program, cwd=ROOT, capture_output=True, text=True, timeout=400, check=False
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

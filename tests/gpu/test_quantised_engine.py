"""vLLM's FP8 on a GPU: after an update an engine computes the same, bit for bit, as if it had just
read the same weights, and each received bit is verified."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from megatron_async_rl.config.engine_options import QUANTISED_AS_LOADED
from tests.engine.reference import VICTIM
from tests.gpu.hardware import DEVICE, ON_DEVICE, run_program
from tests.tiny_models import save_tiny_model

pytestmark = ON_DEVICE

KNOWN = QUANTISED_AS_LOADED if DEVICE == "cuda" else QUANTISED_AS_LOADED[:1]
FAMILIES = ("qwen3", "qwen3_moe") if DEVICE == "cuda" else ("qwen3",)
SHAPE = {"hidden_size": 256, "heads": 4, "kv_heads": 2, "intermediate_size": 512}
"""Sizes that are whole blocks of 128."""


@pytest.mark.parametrize("quantization", KNOWN)
@pytest.mark.parametrize("family", FAMILIES)
def test_after_an_update_it_is_the_engine_that_has_just_read_the_weights(
    tmp_path: Path, family: str, quantization: str
) -> None:
    # vLLM quantises the router too, which needs 16 rows.
    more = {"moe_intermediate_size": 128, "num_experts": 16} if family == "qwen3_moe" else {}
    first, second = (
        save_tiny_model(
            tmp_path / which / family, family, seed=seed, dtype="bfloat16", **SHAPE, **more
        )
        for which, seed in (("a", 1), ("b", 2))
    )
    answer = tmp_path / "answer.json"
    run_program("tests.engine.reload_program", [answer, f"{first}:{second}:{quantization}"])
    found = json.loads(answer.read_text())
    (_, _, fresh), (way, _, new), (_, _, back), (_, _, again) = found[family]
    assert way == "LayerwiseReload"
    assert new != fresh
    assert (back, again) == (fresh, new)
    flipped, left_out = found["faults"]
    assert flipped == [VICTIM]
    assert f"left out 1: {VICTIM}" in str(left_out)

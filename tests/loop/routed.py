"""A tiny mixture of experts, and engines that record the experts of their tokens."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import numpy as np

from megatron_async_rl.samples.types import Sample
from tests.loop.one_process import VOCABULARY, LoopEngine, varied
from tests.tiny_models import save_tiny_model
from tests.written_run import write_model

LAYERS, EXPERTS, CHOSEN = 2, 4, 2


def write_mixture(folder: Path) -> Path:
    write_model(folder)
    return save_tiny_model(folder, "qwen3_moe", vocab_size=VOCABULARY, num_experts=EXPERTS)


def with_experts(engine: LoopEngine) -> None:
    engine.alter = routed


def routed(sample: Sample) -> Sample:
    """Return `sample` with tokens and experts that are drawn from its id."""
    sample = varied(sample)
    draw = np.random.default_rng([*sample.id.encode()])
    rows = len(sample.prompt.token_ids) + len(sample.response_ids) - 1
    first = draw.integers(EXPERTS, size=(rows, LAYERS, 1))
    # Distinct experts of a token.
    other = (first + draw.integers(1, EXPERTS, size=first.shape)) % EXPERTS
    chosen = np.concatenate([first, other], axis=2).astype(np.uint8)
    return replace(sample, routed_experts=chosen.tobytes())

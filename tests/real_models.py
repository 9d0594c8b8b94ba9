"""Real pre-trained models, where examples/smollm2/prepare.py has written them."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from megatron_async_rl.samples import Prompt, Sample

ROOT = Path(__file__).parents[1]
FOLDER = Path(os.environ.get("MAR_REAL_MODELS", ROOT / "examples" / "smollm2" / "generated"))
COMMANDS = {"smollm2": "", "gemma3": " --gemma"}
"""Options of prepare.py for each model."""
TEXTS = (
    ("State the final answer: 17 + 25 - 8 =", " 17 + 25 - 8 = 34."),
    ("The capital of France is", " Paris, a city on the river Seine with 2,100,000 inhabitants."),
    ("def add(a, b):\n", "    return a + b\n"),
)
"""(prompt, response)"""


def case_of(model: str, *more: str) -> Any:
    """Return a case of a parametrised test, which is skipped where the model is missing."""
    return pytest.param(
        model,
        *more,
        marks=pytest.mark.skipif(
            not (FOLDER / model / "config.json").exists(),
            reason=f"`python examples/smollm2/prepare.py{COMMANDS[model]}` has not written {model}",
        ),
    )


def prompts(model: str) -> list[Prompt]:
    """Return the prompts of TEXTS."""
    return [one.prompt for one in samples(model)]


def samples(model: str) -> list[Sample]:
    """Return TEXTS as samples."""
    import transformers

    tokenizer = transformers.AutoTokenizer.from_pretrained(FOLDER / model)
    found = []
    for number, (prompt, response) in enumerate(TEXTS):
        ids = np.array(tokenizer(response, add_special_tokens=False).input_ids, dtype=np.int32)
        first = tuple(tokenizer(prompt).input_ids)
        found.append(
            Sample(
                id=str(number),
                prompt=Prompt(id=str(number), text=prompt, token_ids=first),
                response_ids=ids,
                behavior_logprobs=np.zeros(len(ids), np.float32),
                versions=np.zeros(len(ids), np.int32),
                loss_mask=np.ones(len(ids), np.uint8),
                text=response,
                finish_reason="stop",
                reward=0.0,
            )
        )
    return found

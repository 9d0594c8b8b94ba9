"""Directories of published models that contain only their sizes."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from megatron_async_rl.plan import model_files

PUBLISHED: dict[str, dict[str, Any]] = {
    name.rpartition("/")[2]: dict(config) for name, config in model_files.PUBLISHED.items()
}
"""Name without its owner -> config.json, for the models in the recipes and the pages."""
COMMON: dict[str, Any] = {
    "max_position_embeddings": 40960,
    "rms_norm_eps": 1e-6,
    "rope_theta": 1e6,
    "hidden_act": "silu",
    "torch_dtype": "bfloat16",
    "tie_word_embeddings": False,
    "attention_bias": False,
}
QWEN2 = {
    "architectures": ["Qwen2ForCausalLM"],
    "model_type": "qwen2",
    "num_key_value_heads": 8,
    "vocab_size": 152064,
}


def write_config(folder: Path, name: str) -> None:
    """Write a model's directory that contains only its sizes."""
    folder.mkdir(parents=True)
    (folder / "config.json").write_text(json.dumps(COMMON | PUBLISHED[name]))

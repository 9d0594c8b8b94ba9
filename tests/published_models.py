"""Sizes of published models, as their config.json has them."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

COMMON: dict[str, Any] = {
    "max_position_embeddings": 40960,
    "rms_norm_eps": 1e-6,
    "rope_theta": 1e6,
    "hidden_act": "silu",
    "torch_dtype": "bfloat16",
    "tie_word_embeddings": False,
    "attention_bias": False,
}
QWEN3 = {
    "architectures": ["Qwen3ForCausalLM"],
    "model_type": "qwen3",
    "num_key_value_heads": 8,
    "head_dim": 128,
    "vocab_size": 151936,
}
QWEN2 = {
    "architectures": ["Qwen2ForCausalLM"],
    "model_type": "qwen2",
    "num_key_value_heads": 8,
    "vocab_size": 152064,
}
PUBLISHED: dict[str, dict[str, Any]] = {
    "Qwen3-0.6B": QWEN3
    | {
        "hidden_size": 1024,
        "num_hidden_layers": 28,
        "num_attention_heads": 16,
        "intermediate_size": 3072,
        "tie_word_embeddings": True,
    },
    "Qwen3-1.7B": QWEN3
    | {
        "hidden_size": 2048,
        "num_hidden_layers": 28,
        "num_attention_heads": 16,
        "intermediate_size": 6144,
        "tie_word_embeddings": True,
    },
    "Qwen3-8B": QWEN3
    | {
        "hidden_size": 4096,
        "num_hidden_layers": 36,
        "num_attention_heads": 32,
        "intermediate_size": 12288,
    },
    "Qwen3-32B": QWEN3
    | {
        "hidden_size": 5120,
        "num_hidden_layers": 64,
        "num_attention_heads": 64,
        "intermediate_size": 25600,
    },
    "Qwen2.5-32B": QWEN2
    | {
        "hidden_size": 5120,
        "num_hidden_layers": 64,
        "num_attention_heads": 40,
        "intermediate_size": 27648,
    },
    "Qwen3-30B-A3B": QWEN3
    | {
        "architectures": ["Qwen3MoeForCausalLM"],
        "model_type": "qwen3_moe",
        "hidden_size": 2048,
        "num_hidden_layers": 48,
        "num_attention_heads": 32,
        "num_key_value_heads": 4,
        "intermediate_size": 6144,
        "moe_intermediate_size": 768,
        "num_experts": 128,
        "num_experts_per_tok": 8,
        "norm_topk_prob": True,
    },
}


def write_config(folder: Path, name: str) -> None:
    """A model's directory that has nothing but its sizes."""
    folder.mkdir(parents=True)
    (folder / "config.json").write_text(json.dumps(COMMON | PUBLISHED[name]))

"""Sizes of models that the recipes and the pages name, so that `mar plan` needs no weights.

Each entry has the keys of the model's published config.json that a plan reads. A config.json in the
hub's cache is preferred to an entry here; one in model.path is preferred to both.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from megatron_async_rl.data.hub import cached_file, parse

CONFIG = "config.json"


def _qwen3(hidden: int, layers: int, heads: int, intermediate: int, **more: Any) -> dict[str, Any]:
    return {
        "architectures": ["Qwen3ForCausalLM"],
        "model_type": "qwen3",
        "hidden_size": hidden,
        "num_hidden_layers": layers,
        "num_attention_heads": heads,
        "num_key_value_heads": 8,
        "head_dim": 128,
        "intermediate_size": intermediate,
        "vocab_size": 151936,
        "max_position_embeddings": 40960,
        "tie_word_embeddings": False,
        "attention_bias": False,
        "hidden_act": "silu",
        "rms_norm_eps": 1e-6,
        "rope_theta": 1e6,
        "torch_dtype": "bfloat16",
        **more,
    }


def _qwen25(
    hidden: int, layers: int, heads: int, kv_heads: int, intermediate: int, **more: Any
) -> dict[str, Any]:
    return {
        "architectures": ["Qwen2ForCausalLM"],
        "model_type": "qwen2",
        "hidden_size": hidden,
        "num_hidden_layers": layers,
        "num_attention_heads": heads,
        "num_key_value_heads": kv_heads,
        "intermediate_size": intermediate,
        "vocab_size": 152064,
        "max_position_embeddings": 131072,
        "tie_word_embeddings": False,
        "hidden_act": "silu",
        "rms_norm_eps": 1e-5,
        "rope_theta": 1e6,
        "torch_dtype": "bfloat16",
        **more,
    }


TIED = {"tie_word_embeddings": True}
PUBLISHED: Mapping[str, Mapping[str, Any]] = {
    "Qwen/Qwen3-0.6B": _qwen3(1024, 28, 16, 3072, **TIED),
    "Qwen/Qwen3-1.7B": _qwen3(2048, 28, 16, 6144, **TIED),
    "Qwen/Qwen3-4B": _qwen3(2560, 36, 32, 9728, **TIED),
    "Qwen/Qwen3-8B": _qwen3(4096, 36, 32, 12288),
    "Qwen/Qwen3-14B": _qwen3(5120, 40, 40, 17408),
    "Qwen/Qwen3-32B": _qwen3(5120, 64, 64, 25600),
    "Qwen/Qwen3-30B-A3B": _qwen3(
        2048,
        48,
        32,
        6144,
        architectures=["Qwen3MoeForCausalLM"],
        model_type="qwen3_moe",
        num_key_value_heads=4,
        moe_intermediate_size=768,
        num_experts=128,
        num_experts_per_tok=8,
        norm_topk_prob=True,
    ),
    "Qwen/Qwen2.5-7B": _qwen25(3584, 28, 28, 4, 18944),
    "Qwen/Qwen2.5-32B": _qwen25(5120, 64, 40, 8, 27648),
}
"""Name on the Hugging Face hub -> keys of config.json."""


@dataclass(frozen=True)
class PublishedConfig:
    """The config.json of a model whose files are not here. `source`: where it comes from."""

    content: Mapping[str, Any]
    source: str


def published_config(path: Path) -> PublishedConfig | None:
    """The config.json of the model that `path` names: a name on a hub, or a folder that would hold
    a model of the table under its own name, such as models/Qwen3-8B. Null for any other."""
    name = parse(path)
    ids = [name.id] if name is not None else [one for one in PUBLISHED if _is_last(one, path)]
    for one in ids:
        cached = cached_file(one, CONFIG)
        if cached is not None:
            content = json.loads(cached.read_text(encoding="utf-8"))
            return PublishedConfig(content, f"the hub's cache ({cached})")
    for one in ids:
        if one in PUBLISHED:
            return PublishedConfig(PUBLISHED[one], f"the table of published models ({one})")
    return None


def _is_last(model: str, path: Path) -> bool:
    return model.rpartition("/")[2] == path.name

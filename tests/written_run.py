"""A config with the model directory and data that it names, written without torch: enough for all
that happens before a run starts."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import yaml
from safetensors.numpy import save_file
from tokenizers import Tokenizer, models, pre_tokenizers

CHARACTERS = "0123456789+="
QWEN3 = {
    "architectures": ["Qwen3ForCausalLM"],
    "model_type": "qwen3",
    "hidden_size": 16,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 32,
    "intermediate_size": 32,
    "vocab_size": 14,
    "max_position_embeddings": 64,
    "tie_word_embeddings": False,
    "eos_token_id": 0,
}


def write_model(folder: Path, **changes: Any) -> Path:
    """Write a Qwen3 directory: config.json with `changes`, a character tokenizer, and one weight
    file that no test opens."""
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "config.json").write_text(json.dumps(QWEN3 | changes))
    vocabulary = {"<eos>": 0, "<unk>": 1} | {
        character: index + 2 for index, character in enumerate(CHARACTERS)
    }
    tokenizer = Tokenizer(models.WordLevel(vocabulary, unk_token="<unk>"))
    tokenizer.pre_tokenizer = pre_tokenizers.Split("", "isolated")
    tokenizer.save(str(folder / "tokenizer.json"))
    # Without a class of its own transformers would rebuild it as a byte-level tokenizer of Qwen.
    (folder / "tokenizer_config.json").write_text('{"tokenizer_class": "PreTrainedTokenizerFast"}')
    save_file({"model.norm.weight": np.ones(16, dtype=np.float32)}, folder / "model.safetensors")
    return folder


def write_prompts(file: Path, prompts: int = 8) -> Path:
    rows = [
        {"prompt": f"{i}+{i}=", "answer": str(2 * i), "response": str(2 * i)}
        for i in range(prompts)
    ]
    file.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return file


def config_tree() -> dict[str, Any]:
    """Return the config of `write_run`, as a tree to change."""
    return {
        "run": {"dir": "out", "steps": 4},
        "model": {"path": "model", "dtype": "float32"},
        "data": {"train": "train.jsonl"},
        "flow": {"prompts_per_step": 4, "group_size": 2, "async_ratio": 1},
        "policy": {"parallel": {"ranks": 1}, "device": "cpu"},
        "rollout": {"sampling": {"max_tokens": 8}, "reward": {"name": "arithmetic"}},
    }


def write_run(folder: Path, **model_changes: Any) -> Path:
    """Write a run that `mar plan` accepts; return the config file."""
    write_model(folder / "model", **model_changes)
    write_prompts(folder / "train.jsonl")
    config = folder / "config.yaml"
    config.write_text(yaml.safe_dump(config_tree(), sort_keys=False))
    return config

"""Sizes of a model, from its config.json; no weights are opened.

The first of these that exists is used, so `mar plan` works without a model's files:
- the config.json in model.path;
- the config.json in the hub's cache;
- PUBLISHED, a table of the models that recipes and pages use.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from megatron_async_rl.config.problem import Problem
from megatron_async_rl.data.hub import cached_file, name_of, parse
from megatron_async_rl.policy.families import FAMILIES, Family, unsupported, used_window

KEY = "model.path"


@dataclass(frozen=True, kw_only=True)
class ModelShape:
    """Sizes of a decoder."""

    family: Family
    hidden: int
    layers: int
    heads: int
    kv_heads: int
    head_dim: int
    intermediate: int
    """Columns of the MLP, or of one expert."""
    vocabulary: int
    context: int
    """Length of the longest sequence, in tokens."""
    tied: bool
    """True if input and output embeddings are one matrix."""
    attention_bias: bool
    windowed: bool = False
    """True if a sliding window limits the attention of some layers."""
    experts: int = 0
    """Experts per layer; 0 in a dense model."""
    experts_per_token: int = 0

    @property
    def layer_sharded(self) -> int:
        """Parameters of one layer that tensor parallelism divides."""
        # Grouped-query attention: keys and values have fewer heads.
        qkv = (self.heads + 2 * self.kv_heads) * self.head_dim
        bias = qkv if self.attention_bias else 0
        # Gate, up and down projections. Tensor parallelism does not divide experts, which
        # `layer_experts` counts.
        mlp = 0 if self.experts else 3 * self.hidden * self.intermediate
        return self.hidden * qkv + bias + self.heads * self.head_dim * self.hidden + mlp

    @property
    def routed_bytes(self) -> int:
        """Bytes that a sample stores per token for the experts chosen in all layers."""
        # One byte can index 256 experts.
        return self.layers * self.experts_per_token * (1 if self.experts <= 256 else 2)

    @property
    def layer_experts(self) -> int:
        """Parameters of one layer's experts, which only expert parallelism divides."""
        return self.experts * 3 * self.hidden * self.intermediate

    @property
    def layer_replicated(self) -> int:
        """Parameters of one layer that every tensor-parallel rank holds."""
        output_bias = (
            self.hidden if self.attention_bias and self.family.model_type == "llama" else 0
        )
        norms = self.family.layer_norms * self.hidden + self.family.head_norms * self.head_dim
        router = self.experts * self.hidden
        return norms + output_bias + router

    @property
    def parameters(self) -> int:
        embeddings = (1 if self.tied else 2) * self.vocabulary * self.hidden
        return (
            embeddings
            + self.layers * (self.layer_sharded + self.layer_experts + self.layer_replicated)
            + self.hidden
        )

    @property
    def kv_values_per_token(self) -> int:
        """Number of key and value elements per token in an engine's cache."""
        return 2 * self.layers * self.kv_heads * self.head_dim


def read_model(
    path: Path, *, weights: bool = True, tokenizer: bool = True
) -> tuple[ModelShape | None, list[Problem]]:
    """Return the shape (None if config.json does not define one) and all problems of the directory.
    `weights`, `tokenizer`: these files must exist."""
    if not path.is_dir():
        return None, [_problem(f"{path} is not a directory", _where_to_look(path))]
    # All problems of a directory are reported together.
    checked = (_weights(path) if weights else None, _tokenizer(path) if tokenizer else None)
    problems = [problem for problem in checked if problem]
    shape, wrong = _shape(path / "config.json")
    return shape, wrong + problems


def published_shape(path: Path) -> tuple[ModelShape, str] | None:
    """Return the shape of a published model whose directory does not exist here, and the source of
    the shape; None if the model is unknown or cannot be trained."""
    # An existing directory takes precedence, even if it is damaged.
    found = None if path.is_dir() else published_config(path)
    if found is None:
        return None
    shape, _ = _shape_of(found.content, path)
    return None if shape is None else (shape, found.source)


def _problem(what: str, fix: str) -> Problem:
    return Problem(key=KEY, what=what, fix=fix)


def _where_to_look(path: Path) -> str:
    if path.exists():
        return "name the model's directory, not a file in it"
    # A folder of the hub's cache was removed; the hub still has the model.
    on_hub = name_of(path)
    if on_hub is not None:
        return (
            f"it was a folder of the hub's cache: set model.path to {on_hub} to download it again"
        )
    return (
        "set it to a Hugging Face model directory or to a model on a hub, hf://OWNER/NAME; the"
        " first lines of an example's config contain the commands that create its model"
    )


def _shape(path: Path) -> tuple[ModelShape | None, list[Problem]]:
    if not path.is_file():
        return None, [
            _problem(
                f"{path} does not exist",
                "set it to a Hugging Face model directory, which contains config.json",
            )
        ]
    try:
        content = json.loads(path.read_text(encoding="utf-8"))
    except (OSError, ValueError) as error:
        return None, [_no_config(path, error)]
    return _shape_of(content, path)


def _no_config(path: Path, error: Exception) -> Problem:
    what = f"{path} is not a model config: {error}"
    return _problem(what, "restore the file from the model's source")


def _shape_of(content: Mapping[str, Any], path: Path) -> tuple[ModelShape | None, list[Problem]]:
    """Return the shape that `content` of the config.json at `path` defines, or its problems."""
    try:
        # Before any size is read: in other families the same keys have other meanings.
        ruled_out = unsupported(content)
        if ruled_out is not None:
            return None, [
                _problem(
                    f"{path}: {ruled_out.key} is {ruled_out.value!r}, which this trainer does not"
                    " support",
                    f"use a model with {ruled_out.key}: {ruled_out.supported}",
                )
            ]
        family = FAMILIES[content["model_type"]]
        # int(): configs of converted models contain numbers as text.
        heads = int(content["num_attention_heads"])
        hidden = int(content["hidden_size"])
        mixture = family.mixture
        shape = ModelShape(
            family=family,
            hidden=hidden,
            layers=int(content["num_hidden_layers"]),
            heads=heads,
            # Older configs lack this key, and some have null.
            kv_heads=int(content.get("num_key_value_heads") or heads),
            head_dim=int(content.get("head_dim") or hidden // heads),
            intermediate=int(content["moe_intermediate_size" if mixture else "intermediate_size"]),
            vocabulary=int(content["vocab_size"]),
            context=int(content["max_position_embeddings"]),
            tied=bool(content.get("tie_word_embeddings", family.tied)),
            attention_bias=family.model_type == "qwen2"
            or bool(content.get("attention_bias", False)),
            windowed=used_window(content) is not None,
            # transformers 5 writes the second key.
            experts=(
                int(content.get("num_experts") or content["num_local_experts"]) if mixture else 0
            ),
            experts_per_token=int(content["num_experts_per_tok"]) if mixture else 0,
        )
    except KeyError as error:
        return None, [
            _problem(f"{path} has no {error.args[0]}", "restore the file from the model's source")
        ]
    except (ValueError, TypeError, AttributeError) as error:
        return None, [_no_config(path, error)]
    return shape, []


def _weights(path: Path) -> Problem | None:
    index = path / "model.safetensors.index.json"
    if index.is_file():
        try:
            files = sorted(
                set(json.loads(index.read_text(encoding="utf-8"))["weight_map"].values())
            )
        except (OSError, ValueError, KeyError, AttributeError, TypeError) as error:
            return _problem(
                f"{index} is not a weight index: {error!r}",
                "restore the file from the model's source",
            )
        missing = [name for name in files if not (path / name).is_file()]
        if missing:
            return _problem(
                f"{path} lacks {len(missing)} of {len(files)} weight files, {missing[0]} first",
                "download them again",
            )
        return None
    # A model with a single weight file has no index.
    if not any(path.glob("*.safetensors")):
        return _problem(
            f"{path} contains no *.safetensors weights",
            "save the model in safetensors format (save_pretrained does)",
        )
    return None


def _tokenizer(path: Path) -> Problem | None:
    if (path / "tokenizer.json").is_file() or (path / "tokenizer.model").is_file():
        return None
    return _problem(
        f"{path} contains neither tokenizer.json nor tokenizer.model",
        "copy the model's tokenizer files into it",
    )


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
"""Content of config.json by the model's name on the Hugging Face hub."""


@dataclass(frozen=True)
class PublishedConfig:
    """Content of the config.json of a model that is not here, and its source as text."""

    content: Mapping[str, Any]
    source: str


def published_config(path: Path) -> PublishedConfig | None:
    """Return the config.json for `path`: a name on a hub, or a folder whose last part is that of a
    name in PUBLISHED, such as models/Qwen3-8B. None for any other path."""
    name = parse(path)
    ids = [name.id] if name is not None else [one for one in PUBLISHED if _is_last(one, path)]
    # The cache first: it may be newer than the table.
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

"""A Hugging Face model directory as the plan needs it: its files and the sizes in config.json.
Opens no weights."""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from megatron_async_rl.config.problem import Problem
from megatron_async_rl.data.hub import name_of
from megatron_async_rl.plan.published_models import published_config
from megatron_async_rl.policy.families import FAMILIES, Family
from megatron_async_rl.policy.supported import unsupported

KEY = "model.path"


@dataclass(frozen=True, kw_only=True)
class ModelShape:
    """Sizes of a decoder. `context` is the longest sequence it takes, in tokens.

    experts: of each layer, 0 in a dense model; each token visits `experts_per_token`. intermediate:
    of one expert, or of the MLP.
    """

    family: Family
    hidden: int
    layers: int
    heads: int
    kv_heads: int
    head_dim: int
    intermediate: int
    vocabulary: int
    context: int
    tied: bool
    attention_bias: bool
    experts: int = 0
    experts_per_token: int = 0

    @property
    def layer_sharded(self) -> int:
        """Parameters of one layer that tensor parallelism divides."""
        qkv = (self.heads + 2 * self.kv_heads) * self.head_dim
        bias = qkv if self.attention_bias else 0
        mlp = 0 if self.experts else 3 * self.hidden * self.intermediate
        return self.hidden * qkv + bias + self.heads * self.head_dim * self.hidden + mlp

    @property
    def routed_bytes(self) -> int:
        """Bytes of the experts that a token goes to, in all layers, as samples have them."""
        return self.layers * self.experts_per_token * (1 if self.experts <= 256 else 2)

    @property
    def layer_experts(self) -> int:
        """Parameters of one layer's experts, which expert parallelism divides and nothing else
        does."""
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
        """Key and value entries one token leaves in an engine's cache."""
        return 2 * self.layers * self.kv_heads * self.head_dim


def read_model(path: Path, *, weights: bool = True) -> tuple[ModelShape | None, list[Problem]]:
    """The shape, where config.json gives one, and everything wrong with the directory. `weights`
    false: they need not be there."""
    if not path.is_dir():
        return None, [_problem(f"{path} is not a directory", _where_to_look(path))]
    looked = (_weights(path) if weights else None, _tokenizer(path))
    problems = [problem for problem in looked if problem]
    shape, wrong = _shape(path / "config.json")
    return shape, wrong + problems


def published_shape(path: Path) -> tuple[ModelShape, str] | None:
    """The shape of a published model whose folder is not here, and where it comes from; null where
    it is not known, or the model cannot be trained."""
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
    on_hub = name_of(path)
    if on_hub is not None:
        return f"it was a folder of the hub's cache: name {on_hub}, and it is fetched again"
    return (
        "point it at a Hugging Face model directory, or at a model on a hub, hf://OWNER/NAME; that"
        " of an example is written by the commands which the first lines of its config name"
    )


def _shape(path: Path) -> tuple[ModelShape | None, list[Problem]]:
    if not path.is_file():
        return None, [
            _problem(
                f"{path} does not exist",
                "point it at a Hugging Face model directory, which holds config.json",
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
    """`content`: of config.json. `path`: what a problem names."""
    try:
        ruled_out = unsupported(content)
        if ruled_out is not None:
            return None, [
                _problem(
                    f"{path}: {ruled_out.key} is {ruled_out.value!r}, which this trainer does not"
                    " compute exactly",
                    f"use a model with {ruled_out.key}: {ruled_out.supported}",
                )
            ]
        family = FAMILIES[content["model_type"]]
        heads = int(content["num_attention_heads"])
        hidden = int(content["hidden_size"])
        mixture = family.mixture
        shape = ModelShape(
            family=family,
            hidden=hidden,
            layers=int(content["num_hidden_layers"]),
            heads=heads,
            kv_heads=int(content.get("num_key_value_heads") or heads),
            head_dim=int(content.get("head_dim") or hidden // heads),
            intermediate=int(content["moe_intermediate_size" if mixture else "intermediate_size"]),
            vocabulary=int(content["vocab_size"]),
            context=int(content["max_position_embeddings"]),
            tied=bool(content.get("tie_word_embeddings", family.tied)),
            attention_bias=family.model_type == "qwen2"
            or bool(content.get("attention_bias", False)),
            # transformers 5 writes the second name.
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
    if not any(path.glob("*.safetensors")):
        return _problem(
            f"{path} holds no *.safetensors weights",
            "save the model in safetensors format (save_pretrained does)",
        )
    return None


def _tokenizer(path: Path) -> Problem | None:
    if (path / "tokenizer.json").is_file() or (path / "tokenizer.model").is_file():
        return None
    return _problem(
        f"{path} holds neither tokenizer.json nor tokenizer.model",
        "copy the model's tokenizer files into it",
    )

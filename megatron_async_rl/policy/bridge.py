"""Conversion of a Hugging Face directory to Megatron's configuration, layers and weight names:
mbridge with this package's overrides.

mbridge assumes Transformer Engine layers and transformers 4. The overrides here use the layers of
either family (layers.py) with this package's attention, use the rotary frequencies of transformers
5, and pad the vocabulary to the tensor-parallel size. Each file of families/ contains the
differences of one model family.

Invariants:
- padded vocabulary rows are zero, and their number is known (`padded_vocab_size` - `vocab_size`);
- no class attribute of mbridge is changed, so two models in one process do not affect each other.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

import torch
from mbridge.core.llm_bridge import LLMBridge
from megatron.core.transformer.spec_utils import ModuleSpec
from megatron.core.transformer.transformer_block import (
    TransformerBlockSubmodules,
    get_num_layers_to_build,
)
from megatron.core.transformer.transformer_layer import TransformerLayerSubmodules
from torch import Tensor

from megatron_async_rl.config.policy import LoraConfig
from megatron_async_rl.policy.attention import core_attention
from megatron_async_rl.policy.layers import CHECKPOINT_KEYS, Layers, RMSNorm, with_bias
from megatron_async_rl.policy.lora import adapt as add_adapters
from megatron_async_rl.policy.parallel import Layout
from megatron_async_rl.policy.parameters import ADAPTER

MBRIDGE_METHODS = {
    "mbridge.core.bridge.Bridge": (
        "_ATTENTION_MAPPING",
        "_DIRECT_MAPPING",
        "_OTHER_MAPPING",
        "_adjust_mapping_for_shared_weights",
        "_build_config",
        "_weight_merge_across_tp",
        "_weight_name_mapping_mcore_local_to_global",
        "_weight_name_mapping_mcore_to_hf",
        "_weight_name_mapping_mlp",
        "_weight_name_mapping_other",
        "_weight_to_hf_format",
    ),
    "mbridge.core.llm_bridge.LLMBridge": ("_build_base_config",),
}
"""Class -> names that this module overrides or calls and that mbridge does not promise to keep; no
other module uses one. A unit test checks that each exists."""


class PolicyBridge(LLMBridge):
    """mbridge's bridge for this package's layers. It uses the parameters' names in the local
    family. Mixed in before the bridge of one model type."""

    dtype: torch.dtype | None
    layout: Layout
    layers: Layers
    tied: bool
    packed: bool
    lora: LoraConfig | None = None
    norm: type[torch.nn.Module] = RMSNorm
    output_bias = False
    """True if the output projection of attention has a bias."""
    embedding_scale = 1.0
    """Factor on the embedding of a token."""
    _DIRECT_MAPPING: dict[str, str]
    _OTHER_MAPPING: dict[str, list[str]]
    _ATTENTION_MAPPING: dict[str, list[str]]

    def _adjust_mapping_for_shared_weights(self) -> None:
        # The parent class writes into dictionaries shared by all its instances.
        self._DIRECT_MAPPING = dict(self._DIRECT_MAPPING)
        self._ATTENTION_MAPPING = {
            **self._ATTENTION_MAPPING,
            "self_attention.linear_proj.bias": [
                "model.layers.{layer_number}.self_attn.o_proj.bias"
            ],
        }
        # A pipeline has a second copy of a tied embedding in the last stage.
        if self.hf_config.tie_word_embeddings:
            self._DIRECT_MAPPING["output_layer.weight"] = "model.embed_tokens.weight"
        self._OTHER_MAPPING = {
            "input_layernorm.weight": ["model.layers.{layer_number}.input_layernorm.weight"],
            "pre_mlp_layernorm.weight": [
                "model.layers.{layer_number}.post_attention_layernorm.weight"
            ],
        }

    def _weight_name_mapping_mcore_to_hf(self, mcore_weights_name: str) -> list[str]:
        # The parent class treats every name that contains "mlp" as a weight of the MLP.
        if any(f".{part}" in mcore_weights_name for part in self._OTHER_MAPPING):
            return self._weight_name_mapping_other(mcore_weights_name)
        return super()._weight_name_mapping_mcore_to_hf(mcore_weights_name)

    def _build_base_config(self, text_config_key: str | None = None, **kwargs: Any) -> Any:
        def untouched(tensor: Tensor) -> Tensor:
            return tensor

        return super()._build_base_config(
            text_config_key,
            **kwargs,
            hidden_dropout=0.0,
            attention_dropout=0.0,
            # Every parameter is loaded afterwards (the loader ensures it), so initial values would
            # be wasted time.
            init_method=untouched,
            output_layer_init_method=untouched,
            embedding_init_method=untouched,
            bias_activation_fusion=False,
            bias_dropout_fusion=False,
            masked_softmax_fusion=False,
            gradient_accumulation_fusion=False,
            apply_rope_fusion=False,
            persist_layer_norm=False,
            overlap_p2p_comm=False,
            attention_softmax_in_fp32=True,
            softmax_scale=self._softmax_scale(),
            window_size=self._window_size(),
        )

    def _window_size(self) -> tuple[int, int] | None:
        """Return the numbers of tokens before and behind a token to which it attends, in Megatron's
        form."""
        window = getattr(self.hf_config, "sliding_window", None)
        # Megatron counts the tokens before; transformers' window includes the token itself.
        return None if window is None else (window - 1, 0)

    def _softmax_scale(self) -> float | None:
        """Return the factor on the scores; null: 1 / sqrt(head). yarn scales queries and keys
        equally, unlike Megatron's rotation."""
        factor = self._rotation()[1]
        if factor == 1.0:
            return None
        hf = self.hf_config
        width = getattr(hf, "head_dim", None) or hf.hidden_size // hf.num_attention_heads
        return factor * factor / math.sqrt(width)

    def _rotation(self) -> tuple[Tensor | None, float]:
        """Return, as transformers computes them, the frequencies of a head's pairs of coordinates
        ([head / 2] float32, or null for Megatron's own) and the length of a rotated unit vector."""
        from transformers.modeling_rope_utils import ROPE_INIT_FUNCTIONS

        kind = self.hf_config.rope_parameters["rope_type"]
        if kind == "default":
            return None, 1.0
        return ROPE_INIT_FUNCTIONS[kind](self.hf_config, torch.device("cpu"))

    def set_rotation(self, rotary: torch.nn.Module) -> None:
        """Set the model's frequencies in Megatron's rotary embedding, which must not have been used
        yet."""
        frequencies, _ = self._rotation()
        if frequencies is not None:
            assert rotary.inv_freq.shape == frequencies.shape
            # With the device and dtype of Megatron's own.
            rotary.inv_freq = frequencies.to(rotary.inv_freq)

    def global_names(self, chunk: torch.nn.Module) -> dict[str, str]:
        """Return a parameter's name in the chunk -> its canonical name (layers.py), with layers
        numbered over the whole model."""
        names = self._weight_name_mapping_mcore_local_to_global(chunk, consider_ep=False)
        return {own: self.layers.canonical(name) for own, name in names.items()}

    def to_hugging_face(self, name: str, whole: Tensor) -> tuple[list[str], list[Tensor]]:
        """Return the names and tensors in Hugging Face's files (for adapters, in PEFT's) of one
        whole Megatron parameter, or of some of its columns."""
        if ADAPTER in name:
            layer, _, own = name.partition(ADAPTER)
            target, part = own.split(".")
            (matrix,) = (
                matrix
                for matrix in self._weight_name_mapping_mcore_to_hf(f"{layer}.weight")
                if f".{target}." in matrix
            )
            return [f"base_model.model.{matrix.removesuffix('weight')}{part}.weight"], [whole]
        if ".linear_qkv." in name:  # mbridge only supports all columns
            config = self.config
            head, groups = config.kv_channels, config.num_query_groups
            sizes = [config.num_attention_heads // groups * head, head, head]
            parts = whole.unflatten(0, (groups, -1)).split(sizes, dim=1)
            names = self._weight_name_mapping_mcore_to_hf(name)
            # Megatron groups rows by query group, and Hugging Face's files by matrix.
            return names, [part.flatten(0, 1) for part in parts]
        names, tensors = self._weight_to_hf_format(name, whole)
        return names, tensors

    def merge(self, name: str, shards: Sequence[Tensor], like: Any) -> Tensor:
        """Return the whole parameter from its tensor-parallel shards, in order."""
        if ADAPTER in name:
            return torch.cat(list(shards), dim=like.partition_dim)
        whole: Tensor = self._weight_merge_across_tp(name, list(shards), like)
        return whole

    def layer_spec(self, vp_stage: int | None) -> TransformerBlockSubmodules:
        """Return the layers of this pipeline stage (or of one of its virtual stages) and the final
        norm."""
        layer = self.layers.layer(self.config, self.norm)
        parts = layer.submodules
        parts.sharded_state_dict_keys_map = CHECKPOINT_KEYS
        attention = parts.self_attention.submodules
        attention.core_attention = ModuleSpec(
            module=core_attention(
                self.layout.device_type,
                self.dtype,
                packed=self.packed,
                context_parallel=self.layout.cp_size > 1,
                windowed=self.config.window_size is not None,
            )
        )
        if self.output_bias:
            attention.linear_proj = with_bias(attention.linear_proj)
        self.adapt(parts)
        if self.lora is not None:
            add_adapters(parts, self.config, self.lora, output_bias=self.output_bias)
        layers = get_num_layers_to_build(self.config, vp_stage)
        return TransformerBlockSubmodules(
            layer_specs=[layer] * layers, layer_norm=self.layers.norm(self.norm)
        )

    def adapt(self, layer: TransformerLayerSubmodules) -> None:
        """Replace parts of the layer by the family's own."""

    def gpt_arguments(self) -> dict[str, Any]:
        """Return arguments of Megatron's language model that are not in its configuration."""
        return {
            "vocab_size": self.padded_vocab_size,
            "max_sequence_length": self.hf_config.max_position_embeddings,
            "position_embedding_type": "rope",
            # Base of the frequencies, which `set_rotation` may replace.
            "rotary_base": self.hf_config.rope_parameters.get("rope_theta", 10_000.0),
            "share_embeddings_and_output_weights": self.tied,
        }

"""From a Hugging Face directory to Megatron's configuration, layers and weight names: mbridge with
our overrides.

mbridge assumes Transformer Engine layers and transformers 4. The overrides here use Megatron's
local layers with our attention and normalisation, take rotary frequencies from transformers (5),
pad the vocabulary to the tensor-parallel size, and refuse what this path cannot compute exactly.

Invariants:
- a model whose forward pass would differ from transformers' is refused by name, not approximated;
- padded vocabulary rows are zero and known (`vocab_size` against `padded_vocab_size`);
- no class attribute of mbridge is changed: two models in one process do not see each other.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import torch
from mbridge.core.llm_bridge import LLMBridge
from mbridge.models.llama import LLaMABridge
from mbridge.models.qwen2 import Qwen2Bridge
from mbridge.models.qwen3 import Qwen3Bridge
from mbridge.models.qwen3moe import Qwen3MoEBridge
from megatron.core.models.gpt.gpt_layer_specs import get_gpt_layer_local_spec
from megatron.core.tensor_parallel import RowParallelLinear
from megatron.core.transformer.spec_utils import ModuleSpec
from megatron.core.transformer.transformer_block import (
    TransformerBlockSubmodules,
    get_num_layers_to_build,
)
from torch import Tensor

from megatron_async_rl.policy.attention import RMSNorm, core_attention
from megatron_async_rl.policy.parallel import Layout
from megatron_async_rl.policy.supported import FAMILIES, unsupported

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
        "_weight_split_across_tp",
        "_weight_to_hf_format",
        "_weight_to_mcore_format",
    ),
    "mbridge.core.llm_bridge.LLMBridge": ("_build_base_config",),
}
"""Class -> names that this module overrides or calls and that mbridge does not promise to keep; no
other module uses one. A unit test looks that each exists."""


class UnsupportedModel(ValueError):
    """The model directory describes something this trainer would not compute exactly."""

    def __init__(self, path: Path, key: str, value: Any, supported: str) -> None:
        super().__init__(f"{path / 'config.json'}: {key} is {value!r}; supported: {supported}")


class BiasedRowParallelLinear(RowParallelLinear):
    """A row-parallel product with a bias, in a layer whose other products of this kind have none.
    Each tensor-parallel rank has the whole bias, and adds it once, after the sum over ranks."""

    def __init__(self, *args: Any, bias: bool, **kwargs: Any) -> None:
        super().__init__(*args, bias=True, **kwargs)


class LocalBridge(LLMBridge):
    """mbridge's bridge on Megatron's local layers. Mixed in before the bridge of one model type."""

    layout: Layout
    tied: bool
    packed: bool
    output_bias = False
    """The output projection of attention has a bias."""
    _DIRECT_MAPPING: dict[str, str]
    _ATTENTION_MAPPING: dict[str, list[str]]

    def _adjust_mapping_for_shared_weights(self) -> None:
        # The parent writes into dictionaries shared by all its instances.
        self._DIRECT_MAPPING = dict(self._DIRECT_MAPPING)
        self._ATTENTION_MAPPING = {
            **self._ATTENTION_MAPPING,
            "self_attention.linear_proj.bias": [
                "model.layers.{layer_number}.self_attn.o_proj.bias"
            ],
        }
        if self.hf_config.tie_word_embeddings:
            self._DIRECT_MAPPING["output_layer.weight"] = "model.embed_tokens.weight"
        self._OTHER_MAPPING = {
            "input_layernorm.weight": ["model.layers.{layer_number}.input_layernorm.weight"],
            "pre_mlp_layernorm.weight": [
                "model.layers.{layer_number}.post_attention_layernorm.weight"
            ],
        }

    def _weight_name_mapping_mcore_to_hf(self, mcore_weights_name: str) -> list[str]:
        # "pre_mlp_layernorm" contains "mlp", which the parent takes for a weight of the MLP.
        if ".pre_mlp_layernorm." in mcore_weights_name:
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
            # Every parameter is loaded afterwards (the loader insists), so drawing initial values
            # is wasted time.
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
        """Tokens before and behind a token that it sees beside itself, in Megatron's form."""
        window = getattr(self.hf_config, "sliding_window", None)
        return None if window is None else (window - 1, 0)

    def _softmax_scale(self) -> float | None:
        """Of the scores; null for 1 / sqrt(head). yarn lengthens queries and keys alike, which
        Megatron's rotation does not."""
        factor = self._rotation()[1]
        if factor == 1.0:
            return None
        hf = self.hf_config
        width = getattr(hf, "head_dim", None) or hf.hidden_size // hf.num_attention_heads
        return factor * factor / math.sqrt(width)

    def _rotation(self) -> tuple[Tensor | None, float]:
        """(frequencies of a head's pairs of coordinates, [head / 2] float32, or null for Megatron's
        own; length of a rotated vector for 1), as transformers has them."""
        from transformers.modeling_rope_utils import ROPE_INIT_FUNCTIONS

        kind = self.hf_config.rope_parameters["rope_type"]
        if kind == "default":
            return None, 1.0
        return ROPE_INIT_FUNCTIONS[kind](self.hf_config, torch.device("cpu"))

    def set_rotation(self, rotary: torch.nn.Module) -> None:
        """Gives Megatron's rotary embedding, which has not been used yet, the model's
        frequencies."""
        frequencies, _ = self._rotation()
        if frequencies is not None:
            assert rotary.inv_freq.shape == frequencies.shape
            rotary.inv_freq = frequencies.to(rotary.inv_freq)

    def global_names(self, chunk: torch.nn.Module) -> dict[str, str]:
        """A parameter's name in the chunk -> its name with layers numbered over the whole model."""
        names: dict[str, str] = self._weight_name_mapping_mcore_local_to_global(chunk)
        return names

    def to_hugging_face(self, name: str, whole: Tensor) -> tuple[list[str], list[Tensor]]:
        """Names and tensors in Hugging Face's files of one whole Megatron parameter."""
        names, tensors = self._weight_to_hf_format(name, whole)
        return names, tensors

    def to_megatron(self, name: str, hf_tensors: Sequence[Tensor]) -> Tensor:
        """The whole Megatron parameter that these Hugging Face tensors make up."""
        whole: Tensor = self._weight_to_mcore_format(name, list(hf_tensors))
        return whole

    def merge(self, name: str, shards: Sequence[Tensor], like: Any) -> Tensor:
        """The whole parameter from its tensor-parallel shards, in order."""
        whole: Tensor = self._weight_merge_across_tp(name, list(shards), like)
        return whole

    def split(self, name: str, whole: Tensor, like: Tensor) -> list[Tensor]:
        """The tensor-parallel shards of a whole parameter, in order; `like` has a shard's shape."""
        shards: list[Tensor] = self._weight_split_across_tp(name, whole, like, self.mpu.tp_size)
        return shards

    def layer_spec(self, vp_stage: int | None) -> TransformerBlockSubmodules:
        """The layers of this pipeline stage (of one virtual stage of it, where there are several)
        and the final norm."""
        layer = get_gpt_layer_local_spec(
            num_experts=self.config.num_moe_experts,
            moe_grouped_gemm=False,
            qk_layernorm=self.config.qk_layernorm,
            normalization="RMSNorm",
        )
        parts = layer.submodules
        parts.input_layernorm = RMSNorm
        parts.pre_mlp_layernorm = RMSNorm
        attention = parts.self_attention.submodules
        attention.core_attention = ModuleSpec(
            module=core_attention(self.layout.device_type, self.dtype, packed=self.packed)
        )
        if self.output_bias:
            attention.linear_proj = BiasedRowParallelLinear
        if self.config.qk_layernorm:
            attention.q_layernorm = RMSNorm
            attention.k_layernorm = RMSNorm
        layers = get_num_layers_to_build(self.config, vp_stage)
        return TransformerBlockSubmodules(layer_specs=[layer] * layers, layer_norm=RMSNorm)

    def gpt_arguments(self) -> dict[str, Any]:
        """Arguments of Megatron's language model that are not in its configuration."""
        return {
            "vocab_size": self.padded_vocab_size,
            "max_sequence_length": self.hf_config.max_position_embeddings,
            "position_embedding_type": "rope",
            "rotary_base": self.hf_config.rope_parameters["rope_theta"],
            "share_embeddings_and_output_weights": self.tied,
        }


class Llama(LocalBridge, LLaMABridge):
    """Llama 2 and 3. With `attention_bias` all four projections of attention have one."""

    @property
    def output_bias(self) -> bool:  # type: ignore[override]
        return bool(self.hf_config.attention_bias)


class Mistral(LocalBridge, LLaMABridge):
    """Mistral, with a sliding window in every layer or in none. Its files have Llama's names."""


class Qwen2(LocalBridge, Qwen2Bridge):
    """Qwen 2 and 2.5, dense."""


class Qwen3(LocalBridge, Qwen3Bridge):
    """Qwen 3, dense."""


class Qwen3Moe(LocalBridge, Qwen3MoEBridge):
    """Qwen 3 with a mixture of experts in every layer.

    Routing is the checkpoint's, in float32, and nothing else touches it: every token reaches its
    experts (no capacity), and the load-balancing loss is off whatever config.json says
    (`router_aux_loss_coef` belongs to pre-training: it would add a gradient that no objective asked
    for). Experts run one after the other: grouped products need Transformer Engine.
    """

    def _build_config(self) -> Any:
        hf = self.hf_config
        return self._build_base_config(
            qk_layernorm=True,
            num_moe_experts=hf.num_experts,
            moe_ffn_hidden_size=hf.moe_intermediate_size,
            moe_router_topk=hf.num_experts_per_tok,
            # Softmax before the choice leaves the chosen weights as they are, after it they add up
            # to one.
            moe_router_pre_softmax=not hf.norm_topk_prob,
            moe_router_dtype="fp32",
            moe_router_load_balancing_type="none",
            moe_aux_loss_coeff=0.0,
            moe_grouped_gemm=False,
            # Ranks have micro-batches of different sizes, which an all-gather of tokens would not
            # allow.
            moe_token_dispatcher_type="alltoall",
        )

    def _weight_name_mapping_mlp(self, name: str) -> list[str]:
        layer, part = name.removeprefix("decoder.layers.").split(".mlp.")
        prefix = f"model.layers.{layer}.mlp"
        if part == "router.weight":
            return [f"{prefix}.gate.weight"]
        expert, product, _ = part.removeprefix("experts.local_experts.").split(".")
        matrices = {"linear_fc1": ("gate_proj", "up_proj"), "linear_fc2": ("down_proj",)}[product]
        return [f"{prefix}.experts.{expert}.{matrix}.weight" for matrix in matrices]


BRIDGES: dict[str, type[LocalBridge]] = {
    "llama": Llama,
    "qwen2": Qwen2,
    "qwen3": Qwen3,
    "qwen3_moe": Qwen3Moe,
    "mistral": Mistral,
}
assert BRIDGES.keys() == FAMILIES.keys()

RECOMPUTE: Mapping[str, Mapping[str, Any]] = {
    "none": {},
    # Megatron's own choice of modules is the core attention.
    "selective": {"recompute_granularity": "selective"},
    "full": {
        "recompute_granularity": "full",
        "recompute_method": "uniform",
        "recompute_num_layers": 1,
    },
}
"""Megatron's settings for each value of policy.recompute."""


def build_bridge(
    model_path: Path,
    *,
    dtype: torch.dtype,
    layout: Layout,
    sequence_parallel: bool,
    packed: bool = False,
    recompute: str = "none",
) -> LocalBridge:
    """The bridge of the model in `model_path`. packed: for packed rows. Raises UnsupportedModel, or
    OSError/ValueError for an unreadable config."""
    from transformers import AutoConfig

    hf_config = AutoConfig.from_pretrained(str(model_path), local_files_only=True)
    refuse_unsupported(model_path, hf_config)
    bridge = BRIDGES[hf_config.model_type](
        hf_config, dtype=dtype, make_vocab_size_divisible_by=layout.tp_size
    )
    bridge.set_extra_args(
        sequence_parallel=sequence_parallel and layout.tp_size > 1, **RECOMPUTE[recompute]
    )
    bridge.layout = layout
    bridge.packed = packed
    bridge.tied = bool(hf_config.tie_word_embeddings)
    bridge.vocab_size = hf_config.vocab_size
    bridge.padded_vocab_size = math.ceil(hf_config.vocab_size / layout.tp_size) * layout.tp_size
    return bridge


def refuse_unsupported(path: Path, hf_config: Any) -> None:
    """Raises UnsupportedModel naming the key of config.json that rules the model out."""
    found = unsupported(hf_config.to_dict())
    if found is not None:
        raise UnsupportedModel(path, found.key, found.value, found.supported)

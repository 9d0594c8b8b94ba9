"""The bridge of each model family, and the choice of the bridge for a Hugging Face directory.

Invariants:
- a model whose forward pass would differ from transformers' is refused by name, not approximated;
- every family of the table in supported.py has a bridge, and there is no other.
"""

from __future__ import annotations

import functools
import logging
import math
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import torch
from mbridge.models.llama import LLaMABridge
from mbridge.models.qwen2 import Qwen2Bridge
from mbridge.models.qwen3 import Qwen3Bridge
from mbridge.models.qwen3moe import Qwen3MoEBridge
from megatron.core.extensions.transformer_engine import HAVE_TE
from megatron.core.transformer.attention import SelfAttention
from megatron.core.transformer.spec_utils import ModuleSpec
from megatron.core.transformer.transformer_layer import TransformerLayerSubmodules
from megatron.core.utils import get_te_version
from torch import Tensor
from torch.nn import functional as F

from megatron_async_rl.config.policy import Fp8Config, LoraConfig
from megatron_async_rl.config.problem import UserError
from megatron_async_rl.policy.attention import window_of
from megatron_async_rl.policy.bridge import PolicyBridge
from megatron_async_rl.policy.fp8 import megatron_settings, refuse_device
from megatron_async_rl.policy.layers import LAYERS, GemmaNorm, NormedAdd
from megatron_async_rl.policy.parallel import Layout
from megatron_async_rl.policy.supported import FAMILIES, RequestedLayers, choose_layers, unsupported

log = logging.getLogger(__name__)


class UnsupportedModel(ValueError):
    """The model directory describes something this trainer would not compute exactly."""

    def __init__(self, path: Path, key: str, value: Any, supported: str) -> None:
        super().__init__(f"{path / 'config.json'}: {key} is {value!r}; supported: {supported}")


class Llama(PolicyBridge, LLaMABridge):
    """Llama 2 and 3. With `attention_bias` all four projections of attention have one."""

    @property
    def output_bias(self) -> bool:  # type: ignore[override]
        return bool(self.hf_config.attention_bias)


class Mistral(PolicyBridge, LLaMABridge):
    """Mistral, with a sliding window in every layer or in none. Its files have Llama's names."""


class Qwen2(PolicyBridge, Qwen2Bridge):
    """Qwen 2 and 2.5, dense."""


class Qwen3(PolicyBridge, Qwen3Bridge):
    """Qwen 3, dense."""


class Qwen3Moe(PolicyBridge, Qwen3MoEBridge):
    """Qwen 3 with a mixture of experts in every layer.

    Routing is the checkpoint's, in float32, and nothing else touches it: every token reaches its
    experts (no capacity), and the load-balancing loss is off whatever config.json sets
    (`router_aux_loss_coef` belongs to pre-training: it would add a gradient that no objective asked
    for).
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


class LocalOrGlobalAttention(SelfAttention):
    """Attention that rotates queries and keys as its layer does: `rotary_pos_emb` has the angles of
    layers without a window and of those with one, [length, 1, 1, 2 * head], as
    `Gemma3.set_rotation` mixes them."""

    def forward(self, *args: Any, rotary_pos_emb: Tensor, **kwargs: Any) -> Any:
        parts = rotary_pos_emb.chunk(4, -1)
        own = parts[window_of(self.config, self.layer_number) is not None :: 2]
        return super().forward(*args, rotary_pos_emb=torch.cat(own, -1), **kwargs)


class Gemma3(PolicyBridge, Qwen3Bridge):
    """Gemma 3's text models: norms before and behind attention and MLP, layers with a window and
    layers without one, each kind with frequencies of its own."""

    norm = GemmaNorm

    def _build_config(self) -> Any:
        kinds = self.hf_config.layer_types
        return self._build_base_config(
            qk_layernorm=True,
            activation_func=functools.partial(F.gelu, approximate="tanh"),
            window_attn_skip_freq=[int(kind == "sliding_attention") for kind in kinds],
        )

    def _adjust_mapping_for_shared_weights(self) -> None:
        super()._adjust_mapping_for_shared_weights()
        layer = "model.layers.{layer_number}"
        self._OTHER_MAPPING = {
            "input_layernorm.weight": [f"{layer}.input_layernorm.weight"],
            "self_attn_bda.weight": [f"{layer}.post_attention_layernorm.weight"],
            "pre_mlp_layernorm.weight": [f"{layer}.pre_feedforward_layernorm.weight"],
            "mlp_bda.weight": [f"{layer}.post_feedforward_layernorm.weight"],
        }

    @property
    def embedding_scale(self) -> float:  # type: ignore[override]
        """Rounded to the model's dtype, as transformers and vLLM do."""
        return float(torch.tensor(self.hf_config.hidden_size**0.5, dtype=self.dtype))

    def _softmax_scale(self) -> float:
        return float(self.hf_config.query_pre_attn_scalar**-0.5)

    def set_rotation(self, rotary: torch.nn.Module) -> None:
        both = [self._frequencies(kind) for kind in ("full_attention", "sliding_attention")]
        rotary.inv_freq = torch.cat(both).to(rotary.inv_freq)

    def _frequencies(self, kind: str) -> Tensor:
        rope = self.hf_config.rope_parameters[kind]
        width = self.hf_config.head_dim
        pairs = torch.arange(0, width, 2, dtype=torch.float32)
        frequencies: Tensor = 1.0 / rope["rope_theta"] ** (pairs / width)
        return frequencies / rope["factor"] if rope["rope_type"] == "linear" else frequencies

    def adapt(self, layer: TransformerLayerSubmodules) -> None:
        layer.self_attention.module = LocalOrGlobalAttention
        config = self.config
        sizes = {"hidden_size": config.hidden_size, "eps": config.layernorm_epsilon}
        normed = ModuleSpec(NormedAdd, {"config": config, **sizes})
        layer.self_attn_bda = layer.mlp_bda = normed


BRIDGES: dict[str, type[PolicyBridge]] = {
    "llama": Llama,
    "qwen2": Qwen2,
    "qwen3": Qwen3,
    "qwen3_moe": Qwen3Moe,
    "mistral": Mistral,
    "gemma3_text": Gemma3,
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
    lora: LoraConfig | None = None,
    layers: RequestedLayers = "auto",
    fp8: Fp8Config | None = None,
) -> PolicyBridge:
    """The bridge of the model in `model_path`. packed: for packed rows. lora: layers get adapters.
    layers, fp8: `policy.layers`, `policy.fp8`. Raises UnsupportedModel, UserError for layers that
    cannot be had, or OSError/ValueError for an unreadable config."""
    from transformers import AutoConfig

    hf_config = AutoConfig.from_pretrained(str(model_path), local_files_only=True)
    refuse_unsupported(model_path, hf_config)
    bridge = BRIDGES[hf_config.model_type](
        hf_config, dtype=dtype, make_vocab_size_divisible_by=layout.tp_size
    )
    chosen = choose_layers(
        layers,
        model_type=hf_config.model_type,
        dtype=str(dtype).removeprefix("torch."),
        device=layout.device_type,
        lora=lora is not None,
        engine=str(get_te_version()) if HAVE_TE else None,
        fp8=fp8 is not None,
    )
    refuse_device(fp8, layout)
    if layout.device_type == "cuda":
        refuse_mixed(layout.gathered(chosen.family))
    if chosen.why and layout.device_type == "cuda" and layout.rank == 0:
        log.warning("policy.layers: %s takes %s (%s)", layers, chosen.family, chosen.why)
    bridge.layers = LAYERS[chosen.family]
    bridge.set_extra_args(
        sequence_parallel=sequence_parallel and layout.tp_size > 1,
        **RECOMPUTE[recompute],
        **bridge.layers.settings(dtype, layout.device_type, lora=lora is not None),
        **megatron_settings(fp8),
    )
    bridge.layout = layout
    bridge.packed = packed
    bridge.lora = lora
    bridge.tied = bool(hf_config.tie_word_embeddings)
    bridge.vocab_size = hf_config.vocab_size
    bridge.padded_vocab_size = math.ceil(hf_config.vocab_size / layout.tp_size) * layout.tp_size
    return bridge


def refuse_mixed(families: Sequence[str]) -> None:
    """Raises UserError where ranks have taken different layers: the order of their parameters would
    differ, and gradients be added up one to another. families: by rank."""
    if len(set(families)) > 1:
        without = [str(rank) for rank, family in enumerate(families) if family == "local"]
        what = (
            f"ranks {', '.join(without)} cannot take Transformer Engine's layers, and the others do"
        )
        fix = "install the same version on every machine, or set local"
        raise UserError.of("policy.layers", what, fix)


def refuse_unsupported(path: Path, hf_config: Any) -> None:
    """Raises UnsupportedModel naming the key of config.json that rules the model out."""
    found = unsupported(hf_config.to_dict())
    if found is not None:
        raise UnsupportedModel(path, found.key, found.value, found.supported)

"""Gemma 3's text models."""

from __future__ import annotations

from typing import Any

from megatron_async_rl.policy.families import NO_BIAS, Family

GEMMA = {
    "hidden_activation": ("gelu_pytorch_tanh", "gelu_pytorch_tanh"),
    "attn_logit_softcapping": (None, "null"),
    "final_logit_softcapping": (None, "null"),
    "use_bidirectional_attention": (False, "false"),
}


def bridge() -> Any:
    import functools

    import torch
    from mbridge.models.qwen3 import Qwen3Bridge
    from megatron.core.transformer.spec_utils import ModuleSpec
    from megatron.core.transformer.transformer_layer import TransformerLayerSubmodules
    from torch import Tensor
    from torch.nn import functional as F

    from megatron_async_rl.policy.attention import LocalOrGlobalAttention
    from megatron_async_rl.policy.bridge import PolicyBridge
    from megatron_async_rl.policy.layers import GemmaNorm, NormedAdd

    class Gemma3(PolicyBridge, Qwen3Bridge):
        """Gemma 3: norms before and after attention and MLP; layers with and without a window,
        each kind with its own rotary frequencies."""

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
            # Norms after attention and MLP sit in Megatron's bias-dropout-add modules (`adapt`).
            self._OTHER_MAPPING = {
                "input_layernorm.weight": [f"{layer}.input_layernorm.weight"],
                "self_attn_bda.weight": [f"{layer}.post_attention_layernorm.weight"],
                "pre_mlp_layernorm.weight": [f"{layer}.pre_feedforward_layernorm.weight"],
                "mlp_bda.weight": [f"{layer}.post_feedforward_layernorm.weight"],
            }

        @property
        def embedding_scale(self) -> float:  # type: ignore[override]
            """Scale of the embeddings, rounded to the model's dtype like in transformers and
            vLLM."""
            return float(torch.tensor(self.hf_config.hidden_size**0.5, dtype=self.dtype))

        def _softmax_scale(self) -> float:
            # Not 1 / sqrt(head_dim): Gemma configures the scale separately.
            return float(self.hf_config.query_pre_attn_scalar**-0.5)

        def set_rotation(self, rotary: torch.nn.Module) -> None:
            both = [self._frequencies(kind) for kind in ("full_attention", "sliding_attention")]
            # One buffer with both halves: a layer selects its half (LocalOrGlobalAttention).
            rotary.inv_freq = torch.cat(both).to(rotary.inv_freq)

        def _frequencies(self, kind: str) -> Tensor:
            rope = self.hf_config.rope_parameters[kind]
            width = self.hf_config.head_dim
            # float32, as in vLLM: rounding in bfloat16 would shift the angles of high positions.
            pairs = torch.arange(0, width, 2, dtype=torch.float32)
            frequencies: Tensor = 1.0 / rope["rope_theta"] ** (pairs / width)
            return frequencies / rope["factor"] if rope["rope_type"] == "linear" else frequencies

        def adapt(self, layer: TransformerLayerSubmodules) -> None:
            layer.self_attention.module = LocalOrGlobalAttention
            config = self.config
            sizes = {"hidden_size": config.hidden_size, "eps": config.layernorm_epsilon}
            normed = ModuleSpec(NormedAdd, {"config": config, **sizes})
            layer.self_attn_bda = layer.mlp_bda = normed

    return Gemma3


FAMILY = Family(
    "gemma3_text",
    "Gemma3ForCausalLM",
    "Gemma 3 (text: 270M, 1B)",
    bridge,
    window="chosen layers",
    tied=True,
    layer_norms=4,
    float32_norms=True,
    head_norms=2,
    ropes=("default", "linear"),
    only=NO_BIAS | GEMMA,
    local="norms after attention and MLP, and a rotation for each kind of layer",
)

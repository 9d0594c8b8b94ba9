"""Qwen 3 with a mixture of experts in every layer."""

from __future__ import annotations

from typing import Any

from megatron_async_rl.policy.families import QWEN3_BIAS, Family


def bridge() -> Any:
    from mbridge.models.qwen3moe import Qwen3MoEBridge

    from megatron_async_rl.policy.bridge import PolicyBridge

    class Qwen3Moe(PolicyBridge, Qwen3MoEBridge):
        """Qwen 3 MoE with the checkpoint's routing in float32: every token reaches its experts (no
        capacity limit), and the load-balancing loss is off."""

        def _build_config(self) -> Any:
            hf = self.hf_config
            return self._build_base_config(
                qk_layernorm=True,
                num_moe_experts=hf.num_experts,
                moe_ffn_hidden_size=hf.moe_intermediate_size,
                moe_router_topk=hf.num_experts_per_tok,
                # Softmax before the choice keeps the chosen weights; softmax after it makes them
                # sum to one.
                moe_router_pre_softmax=not hf.norm_topk_prob,
                # Rounded to bfloat16, close scores would be equal, and other experts could win.
                moe_router_dtype="fp32",
                # `router_aux_loss_coef` is for pre-training; it would add a gradient to every
                # objective.
                moe_router_load_balancing_type="none",
                moe_aux_loss_coeff=0.0,
                # An all-gather of tokens requires micro-batches of equal size on all ranks.
                moe_token_dispatcher_type="alltoall",
            )

        def _weight_name_mapping_mlp(self, name: str) -> list[str]:
            layer, part = name.removeprefix("decoder.layers.").split(".mlp.")
            prefix = f"model.layers.{layer}.mlp"
            if part == "router.weight":
                return [f"{prefix}.gate.weight"]
            expert, product, _ = part.removeprefix("experts.local_experts.").split(".")
            matrices = {"linear_fc1": ("gate_proj", "up_proj"), "linear_fc2": ("down_proj",)}[
                product
            ]
            return [f"{prefix}.experts.{expert}.{matrix}.weight" for matrix in matrices]

    return Qwen3Moe


FAMILY = Family(
    "qwen3_moe",
    "Qwen3MoeForCausalLM",
    "Qwen 3 MoE",
    bridge,
    window="every layer",
    mixture=True,
    head_norms=2,
    only=QWEN3_BIAS,
    window_switch=True,
)

"""Qwen 3 with a mixture of experts in every layer."""

from __future__ import annotations

from typing import Any

from megatron_async_rl.policy.families import QWEN3_BIAS, Family


def bridge() -> Any:
    from mbridge.models.qwen3moe import Qwen3MoEBridge

    from megatron_async_rl.policy.bridge import PolicyBridge

    class Qwen3Moe(PolicyBridge, Qwen3MoEBridge):
        """Routing is the checkpoint's, in float32, and nothing else touches it: every token reaches
        its experts (no capacity), and the load-balancing loss is off whatever config.json sets
        (`router_aux_loss_coef` is for pre-training: it would add a gradient to every objective)."""

        def _build_config(self) -> Any:
            hf = self.hf_config
            return self._build_base_config(
                qk_layernorm=True,
                num_moe_experts=hf.num_experts,
                moe_ffn_hidden_size=hf.moe_intermediate_size,
                moe_router_topk=hf.num_experts_per_tok,
                # With softmax before the choice the chosen weights stay as they are; after it they
                # add up to one.
                moe_router_pre_softmax=not hf.norm_topk_prob,
                moe_router_dtype="fp32",
                moe_router_load_balancing_type="none",
                moe_aux_loss_coeff=0.0,
                # Ranks have micro-batches of different sizes, which an all-gather of tokens does
                # not permit.
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

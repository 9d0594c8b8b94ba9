"""Llama 2 and 3."""

from __future__ import annotations

from typing import Any

from megatron_async_rl.policy.families import Family


def bridge() -> Any:
    from mbridge.models.llama import LLaMABridge

    from megatron_async_rl.policy.bridge import PolicyBridge

    class Llama(PolicyBridge, LLaMABridge):
        """Llama 2 and 3. With `attention_bias`, all four attention projections have a bias."""

        @property
        def output_bias(self) -> bool:  # type: ignore[override]
            # Megatron has one switch for query, key and value; the output projection has its own.
            return bool(self.hf_config.attention_bias)

    return Llama


FAMILY = Family(
    "llama",
    "LlamaForCausalLM",
    "Llama 2 and 3",
    bridge,
    biases="attention_bias: query, key, value, output",
    only={"sliding_window": (None, "null: the family has full attention")},
)

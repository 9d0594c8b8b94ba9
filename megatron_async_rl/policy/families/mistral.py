"""Mistral."""

from __future__ import annotations

from typing import Any

from megatron_async_rl.policy.families import NO_BIAS, Family


def bridge() -> Any:
    from mbridge.models.llama import LLaMABridge

    from megatron_async_rl.policy.bridge import PolicyBridge

    class Mistral(PolicyBridge, LLaMABridge):
        """Mistral, with a sliding window in every layer or in none. Weights have Llama's names."""

    return Mistral


FAMILY = Family(
    "mistral",
    "MistralForCausalLM",
    "Mistral 7B, Nemo, Small (text)",
    bridge,
    window="every layer",
    only=NO_BIAS,
)

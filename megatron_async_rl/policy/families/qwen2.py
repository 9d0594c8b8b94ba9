"""Qwen 2 and 2.5, dense."""

from __future__ import annotations

from typing import Any

from megatron_async_rl.policy.families import Family


def bridge() -> Any:
    from mbridge.models.qwen2 import Qwen2Bridge

    from megatron_async_rl.policy.bridge import PolicyBridge

    class Qwen2(PolicyBridge, Qwen2Bridge):
        """Qwen 2 and 2.5, dense; mbridge has all names and biases."""

    return Qwen2


FAMILY = Family(
    "qwen2",
    "Qwen2ForCausalLM",
    "Qwen 2 and 2.5",
    bridge,
    window="every layer",
    biases="query, key, value",
    only={"attention_bias": (False, "false: the family's biases need no key")},
    window_switch=True,
    first_layers_full=True,
)

"""Qwen 3, dense."""

from __future__ import annotations

from typing import Any

from megatron_async_rl.policy.families import QWEN3_BIAS, Family


def bridge() -> Any:
    from mbridge.models.qwen3 import Qwen3Bridge

    from megatron_async_rl.policy.bridge import PolicyBridge

    class Qwen3(PolicyBridge, Qwen3Bridge):
        """Qwen 3, dense."""

    return Qwen3


FAMILY = Family(
    "qwen3",
    "Qwen3ForCausalLM",
    "Qwen 3",
    bridge,
    window="every layer",
    head_norms=2,
    only=QWEN3_BIAS,
    window_switch=True,
    first_layers_full=True,
)

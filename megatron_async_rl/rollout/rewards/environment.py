"""No reward of its own: what rollout.environment gives each turn is all there is."""

from __future__ import annotations

from megatron_async_rl.rollout.rewards.registry import BuiltInReward
from megatron_async_rl.samples.types import Prompt


def environment(prompt: Prompt, response: str, /) -> float:
    return 0.0


REWARD = BuiltInReward(function=environment, inline=True)

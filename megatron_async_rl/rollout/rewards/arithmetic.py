"""Exact answers: 1 if the response is the prompt's `answer`, white space around it aside, else
0."""

from __future__ import annotations

from megatron_async_rl.rollout.rewards.registry import BuiltInReward, text_field
from megatron_async_rl.samples.types import Prompt


def arithmetic(prompt: Prompt, response: str, /) -> float:
    return 1.0 if response.strip() == text_field(prompt, "answer") else 0.0


REWARD = BuiltInReward(function=arithmetic, required_fields=("answer",), inline=True)

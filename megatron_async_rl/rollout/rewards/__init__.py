"""Rewards: a response goes in, a number comes out. `load_reward` finds one by its name in the configuration."""

from megatron_async_rl.rollout.rewards.registry import load_reward, required_fields
from megatron_async_rl.rollout.rewards.reward import Reward, RewardError

__all__ = ["Reward", "RewardError", "load_reward", "required_fields"]

"""What answers the model's turns, and the conversations that come of it."""

from megatron_async_rl.rollout.environments.protocol import Environment, Step

__all__ = ["Environment", "Step"]

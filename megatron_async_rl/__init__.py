"""Asynchronous RL post-training with Megatron-Core policies and vLLM rollouts, and with controls
that keep training on stale data stable.

Importing the package does not import torch, Megatron-Core, vLLM or Ray.
"""

__version__ = "0.1.0"

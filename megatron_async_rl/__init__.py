"""Asynchronous RL post-training: Megatron-Core policies, vLLM rollouts, and the controls that keep
stale data stable.

Importing the package imports neither torch, Megatron-Core, vLLM nor Ray.
"""

__version__ = "0.1.0"

"""From the environment's reward to the reward that is learned from: length shaping, and the KL penalty taken per token."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from megatron_async_rl.objectives.batch import LOG_RATIO_BOUND, TokenBatch
from megatron_async_rl.objectives.kl import kl_estimate
from megatron_async_rl.samples.types import Sample

if TYPE_CHECKING:
    from megatron_async_rl.config.objective import KlConfig, ObjectiveConfig


def shaped_rewards(batch: TokenBatch, samples: Sequence[Sample], config: ObjectiveConfig) -> Tensor:
    """[S]: R, minus DAPO's soft overlong punishment penalty * clip((length - (max_length - buffer)) / buffer, 0, 1)."""
    rewards = batch.require("rewards")
    if config.overlong is None:
        return rewards
    length = torch.tensor([sample.length for sample in samples], dtype=rewards.dtype)
    start = config.overlong.max_length - config.overlong.buffer
    return rewards - config.overlong.penalty * ((length - start) / config.overlong.buffer).clamp(0.0, 1.0)


def kl_penalty(batch: TokenBatch, kl: KlConfig | None) -> Tensor:
    """[N]: coef * KL estimate on each trained token where the penalty is taken from the reward, else 0."""
    if kl is None or kl.where != "reward":
        return torch.zeros_like(batch.mask)
    log_ratio = (batch.logp - batch.require("logp_ref")).clamp(-LOG_RATIO_BOUND, LOG_RATIO_BOUND)
    return kl.coef * kl_estimate(log_ratio, kl.estimator) * batch.mask


def token_rewards(batch: TokenBatch, penalty: Tensor) -> Tensor:
    """[N]: the sequence's reward on its last trained token, minus the penalty [N] of each token."""
    position = torch.arange(len(batch.sequence))
    last = torch.full((batch.sequences,), -1).scatter_reduce(0, batch.sequence, torch.where(batch.mask > 0, position, -1), "amax")
    rewards = -penalty
    has = last >= 0
    rewards[last[has]] += batch.require("rewards")[has]
    return rewards

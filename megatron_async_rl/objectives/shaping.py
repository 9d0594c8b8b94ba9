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
    """[N] of a whole batch, its sequences one after another: what each trained token is rewarded with, 0 where the mask is 0.
    Sums to `rewards` minus the penalty [N].

    A step reward on an environment token goes to the trained token before it, or to the first one where there is none. The
    rest of the sequence's reward (all of it without step rewards; what shaping has changed) goes to its last trained token. A
    sequence without trained tokens has no rewards.
    """
    rewards = -penalty
    position, trained = torch.arange(len(batch.sequence)), batch.mask > 0
    ends = torch.full((batch.sequences,), -1)
    last = ends.scatter_reduce(0, batch.sequence, torch.where(trained, position, -1), "amax")
    has = last >= 0
    rest = batch.require("rewards")
    if batch.step_rewards is not None:
        beyond = len(position)
        first = torch.full_like(ends, beyond).scatter_reduce(0, batch.sequence, torch.where(trained, position, beyond), "amin")
        before = torch.cummax(torch.where(trained, position, -1), 0).values if beyond else position
        owner = torch.maximum(before, first[batch.sequence])
        given = has[batch.sequence]
        rewards = rewards.index_add(0, owner[given], batch.step_rewards[given])
        rest = rest - torch.zeros_like(rest).index_add(0, batch.sequence, batch.step_rewards)
    rewards[last[has]] += rest[has]
    return rewards

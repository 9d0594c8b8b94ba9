"""GRPO's group-relative advantage (DeepSeekMath, arXiv 2402.03300); without the division, Dr.GRPO (arXiv 2503.20783)."""

from __future__ import annotations

from typing import TYPE_CHECKING

from megatron_async_rl.objectives.batch import Advantages, TokenBatch

if TYPE_CHECKING:
    from megatron_async_rl.config.advantages import GrpoAdvantage

EPSILON = 1e-6


def grpo(batch: TokenBatch, settings: GrpoAdvantage) -> Advantages:
    """A_i = (R_i - mean R) / (std R + 1e-6) over the group, std unbiased (n - 1); `normalize_std: false` does not divide.

    [S] rewards -> [N]. Exactly 0 for a group of one or of equal rewards, where rounding in the mean would otherwise leave a
    residue that the small denominator blows up.
    """
    rewards = batch.require("rewards")
    centred = batch.group_centred(rewards)
    if settings.normalize_std:
        count = batch.group_count().to(centred.dtype)
        variance = batch.group_mean(centred.square()) * count / (count - 1).clamp(min=1)
        centred = centred / (variance.sqrt() + EPSILON)
    return Advantages(batch.per_token(centred))

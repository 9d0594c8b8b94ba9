"""REINFORCE leave-one-out (arXiv 2402.14740)."""

from __future__ import annotations

from typing import TYPE_CHECKING

from megatron_async_rl.objectives.batch import Advantages, TokenBatch

if TYPE_CHECKING:
    from megatron_async_rl.config.advantages import RlooAdvantage


def rloo(batch: TokenBatch, settings: RlooAdvantage) -> Advantages:
    """A_i = R_i - mean of the other n - 1 rewards of the group = n / (n - 1) (R_i - mean R).

    [S] rewards -> [N]. Exactly 0 for a group of one or of equal rewards.
    """
    count = batch.group_count().to(batch.require("rewards").dtype)
    return Advantages(batch.per_token(batch.group_centred(batch.require("rewards")) * count / (count - 1).clamp(min=1)))

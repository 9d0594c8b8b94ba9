"""OPO (arXiv 2505.23585): the minimum-variance baseline where the squared gradient norm grows with the length."""

from __future__ import annotations

from typing import TYPE_CHECKING

from megatron_async_rl.objectives.advantages.baseline import weighted_means
from megatron_async_rl.objectives.batch import Advantages, TokenBatch

if TYPE_CHECKING:
    from megatron_async_rl.config.advantages import OpoAdvantage


def opo(batch: TokenBatch, settings: OpoAdvantage) -> Advantages:
    """A_i = R_i - sum_j L_j R_j / sum_j L_j over the group, L the trained tokens of a response.

    [S] rewards -> [N]. Exactly 0 for a group of one or of equal rewards.
    """
    rewards, group = batch.require("rewards"), batch.require("group")
    lowest, above = weighted_means(rewards, batch.lengths(), group)
    return Advantages(batch.per_token(rewards - lowest[group] - above[group]), baselines=(lowest + above)[group])

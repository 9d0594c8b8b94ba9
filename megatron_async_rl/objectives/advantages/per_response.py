"""Estimators with one advantage for a whole response, from the rewards of its group.

none    no baseline
grpo    GRPO's group-relative advantage (DeepSeekMath, arXiv 2402.03300); without the division,
        Dr.GRPO (arXiv 2503.20783)
rloo    REINFORCE leave-one-out (arXiv 2402.14740)
opo     OPO (arXiv 2505.23585): the minimum-variance baseline if the squared gradient norm grows
        with the length
"""

from __future__ import annotations

from megatron_async_rl.config.advantages import (
    GrpoAdvantage,
    NoAdvantage,
    OpoAdvantage,
    RlooAdvantage,
)
from megatron_async_rl.objectives.batch import Advantages, TokenBatch, weighted_means
from megatron_async_rl.objectives.method import AdvantageMethod

EPSILON = 1e-6


def no_baseline(batch: TokenBatch, settings: NoAdvantage) -> Advantages:
    """A_i = R_i on each of the sequence's tokens: [S] -> [N]."""
    return Advantages(batch.per_token(batch.require("rewards")))


def grpo(batch: TokenBatch, settings: GrpoAdvantage) -> Advantages:
    """A_i = (R_i - mean R) / (std R + 1e-6) over the group, std unbiased (n - 1); no division with
    `normalize_std: false`.

    [S] rewards -> [N]. Exactly 0 for a group of one or of equal rewards, for which the small
    denominator would otherwise amplify a rounding error of the mean.
    """
    rewards = batch.require("rewards")
    # Exactly 0 for equal rewards, unlike a plain difference of means.
    centred = batch.group_centred(rewards)
    if settings.normalize_std:
        count = batch.group_count().to(centred.dtype)
        variance = batch.group_mean(centred.square()) * count / (count - 1).clamp(min=1)
        centred = centred / (variance.sqrt() + EPSILON)
    return Advantages(batch.per_token(centred))


def rloo(batch: TokenBatch, settings: RlooAdvantage) -> Advantages:
    """A_i = R_i - mean of the other n - 1 rewards of the group = n / (n - 1) (R_i - mean R).

    [S] rewards -> [N]. Exactly 0 for a group of one or of equal rewards.
    """
    count = batch.group_count().to(batch.require("rewards").dtype)
    return Advantages(
        batch.per_token(
            # n / (n - 1) turns the mean of all into the mean of the others.
            batch.group_centred(batch.require("rewards")) * count / (count - 1).clamp(min=1)
        )
    )


def opo(batch: TokenBatch, settings: OpoAdvantage) -> Advantages:
    """A_i = R_i - sum_j L_j R_j / sum_j L_j over the group, L the trained tokens of a response.

    [S] rewards -> [N]. Exactly 0 for a group of one or of equal rewards.
    """
    rewards, group = batch.require("rewards"), batch.require("group")
    lowest, above = weighted_means(rewards, batch.lengths(), group)
    return Advantages(
        batch.per_token(rewards - lowest[group] - above[group]), baselines=(lowest + above)[group]
    )


NO_BASELINE = AdvantageMethod(no_baseline)
GRPO = AdvantageMethod(grpo)
RLOO = AdvantageMethod(rloo)
OPO = AdvantageMethod(opo)

"""BAPO (arXiv 2510.18927): PPO's clip with bounds searched for each batch, so that positive tokens
keep their share.

share(low, high) = sum_{A>0} min(w A, clip(w, 0, high) A) / sum |min(w A, clip(w, low, high) A)|, w
= pi / mu, over all trained tokens of the optimizer-step batch. The search starts at (low_start,
high_start). While share < target_share and low can still rise, high rises by its step as long as it
can, then low does.
"""

from __future__ import annotations

import math

from megatron_async_rl.config.losses import BapoLoss
from megatron_async_rl.objectives.batch import BatchDecision, TokenBatch, TokenLoss
from megatron_async_rl.objectives.losses.ppo_clip import clipped_surrogate
from megatron_async_rl.objectives.method import LossMethod, columns

SLACK = 1e-6
"""Tolerance as a share of a search step, so that 0.6 + 15 * 0.02 reaches 0.9 in floating point."""


def decide_bapo(whole: TokenBatch, settings: BapoLoss) -> BatchDecision:
    """Return the bounds on the ratio and the share that they give. Without any advantage there is
    nothing to balance, and the result is the first bounds."""
    # A rejected token does not train, so it has no influence on the bounds either.
    trained = whole.kept() > 0
    weight, advantages = whole.log_weight().exp(), whole.advantages
    up, down = trained & (advantages > 0), trained & (advantages < 0)
    gain, gain_weight = advantages[up], weight[up]
    loss, loss_weight = -advantages[down], weight[down]

    def share(low: float, high: float) -> float:
        # The smaller of the two terms is A min(w, high) where A > 0, and A max(w, low) where A < 0.
        positive = float((gain * gain_weight.clamp(max=high)).sum())
        total = positive + float((loss * loss_weight.clamp(min=low)).sum())
        return positive / total if total > 0 else math.nan

    low, high = settings.low[0], settings.high[0]
    found = share(low, high)
    # nan compares false, so a batch without advantages keeps the first bounds.
    while found < settings.target_share and _can_rise(low, settings.low):
        if _can_rise(high, settings.high):
            high += settings.high[2]
        else:
            low += settings.low[2]
        found = share(low, high)
    scalars = {"objective/clip_low": low, "objective/clip_high": high}
    return BatchDecision(
        scalars=scalars if math.isnan(found) else {**scalars, "objective/positive_share": found}
    )


def _can_rise(value: float, bounds: tuple[float, float, float]) -> bool:
    _, end, step = bounds
    return value + step <= end + SLACK * step


def bapo(batch: TokenBatch, settings: BapoLoss) -> TokenLoss:
    """l = max(-A w, -A clip(w, low, high)) with the bounds of the whole batch. [N] -> [N].

    Defaults: target_share 0.4; low 0.6 to 0.9 by 0.02, high 1.2 to 3.0 by 0.05.
    """
    scalars = batch.decided.scalars
    return clipped_surrogate(
        batch.advantages,
        batch.log_weight().exp(),
        scalars["objective/clip_low"],
        scalars["objective/clip_high"],
    )


BAPO = LossMethod(bapo, decide_bapo, columns("logp"))

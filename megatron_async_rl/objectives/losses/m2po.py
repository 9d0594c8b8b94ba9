"""M2PO (arXiv 2510.01161): the second moment of the log-ratios is bounded over the whole
optimizer-step batch.

d = (log w)^2, w = pi / mu, over the candidates C: `harmful` tokens (A > 0 and w > 1, or A < 0 and w
< 1), or `all` trained ones.
    mask  (the paper's Algorithm 1) the largest d are removed from C until the mean of the others is
          <= second_moment; l = -w A, 0 for the removed tokens
    cap   (the authors' code) the water level c with mean over C of min(d, c^2) = second_moment;
          PPO's clip of w to [e^-c, e^c]
The means of a sorted list's prefixes only grow, so one sort gives an exact decision, equal for
every micro-batch.
"""

from __future__ import annotations

import math

import torch
from torch import Tensor

from megatron_async_rl.config.losses import M2poLoss
from megatron_async_rl.objectives.batch import LOG_RATIO_BOUND, BatchDecision, TokenBatch, TokenLoss
from megatron_async_rl.objectives.losses.ppo_clip import clipped_surrogate
from megatron_async_rl.objectives.method import LossMethod, columns


def decide_m2po(whole: TokenBatch, settings: M2poLoss) -> BatchDecision:
    """Return `keep`, [N] bool, in mode mask, or `log_ratio_cap` in mode cap; the cap is the largest
    |log w| if nothing has to be capped.

    The logged `second_moment` is that of the candidates before any change. Without candidates there
    is no decision, and no number is logged.
    """
    log_weight = whole.logp - whole.logp_behavior
    # A rejected token does not train, so it has no influence on the threshold either.
    candidate = whole.kept() > 0
    if settings.candidates == "harmful":
        candidate &= log_weight * whole.advantages > 0
    index = torch.nonzero(candidate).flatten()
    if not len(index):
        return BatchDecision(tokens={"keep": torch.ones_like(candidate)})
    ordered, order = log_weight[index].square().sort()
    total = ordered.cumsum(0)
    moment = float(total[-1] / len(ordered))
    if settings.mode == "cap":
        cap = _water_level(ordered, total, settings.second_moment)
        return BatchDecision(
            scalars={"objective/second_moment": moment, "objective/log_ratio_cap": cap}
        )
    count = torch.arange(1, len(ordered) + 1, dtype=total.dtype)
    kept = int((total / count <= settings.second_moment).sum())
    keep = torch.ones_like(candidate)
    keep[index[order[kept:]]] = False
    return BatchDecision(tokens={"keep": keep}, scalars={"objective/second_moment": moment})


def _water_level(ordered: Tensor, total: Tensor, target: float) -> float:
    """Return c >= 0 with mean(min(d, c^2)) = target. ordered: [C] rising d. total: [C] their
    running sums."""
    count = len(ordered)
    if total[-1] <= count * target:
        return float(ordered[-1].sqrt())
    # With the level at the i-th smallest d: smaller d count in full, the others as the level.
    filled = total + (count - torch.arange(1, count + 1, dtype=total.dtype)) * ordered
    below = int((filled <= count * target).sum())
    spent = float(total[below - 1]) if below else 0.0
    return max((count * target - spent) / (count - below), 0.0) ** 0.5


def m2po(batch: TokenBatch, settings: M2poLoss) -> TokenLoss:
    """[N] -> [N], as above. Defaults: mode mask, candidates harmful, second_moment 0.04. `clipped`
    marks the tokens that were removed, or that the cap clipped."""
    weight = batch.log_weight().exp()
    scalars = batch.decided.scalars
    if settings.mode == "mask":
        keep = batch.decided.tokens["keep"]
        return TokenLoss(torch.where(keep, -weight * batch.advantages, 0.0), ~keep)
    # A batch below the bound is not changed at all: at its largest ratio, rounding would clip.
    if (
        scalars.get("objective/second_moment", 0.0) <= settings.second_moment
    ):  # absent: no candidate
        return clipped_surrogate(batch.advantages, weight, 0.0, math.inf)
    cap = min(scalars["objective/log_ratio_cap"], LOG_RATIO_BOUND)
    return clipped_surrogate(batch.advantages, weight, math.exp(-cap), math.exp(cap))


M2PO = LossMethod(m2po, decide_m2po, columns("logp"))

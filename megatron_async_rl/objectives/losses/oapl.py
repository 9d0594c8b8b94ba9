"""OAPL (arXiv 2602.19362): regression of the log-ratio to the lagged policy on the optimal
advantage, without an importance weight."""

from __future__ import annotations

import torch

from megatron_async_rl.config.losses import OaplLoss
from megatron_async_rl.objectives.batch import BatchDecision, SequenceLoss, TokenBatch
from megatron_async_rl.objectives.method import LossMethod


def decide_oapl(whole: TokenBatch, settings: OaplLoss) -> BatchDecision:
    """Return R - V of each sequence, [S], with V = beta_value log mean_k exp(R_k / beta_value) over
    the group: the KL-regularised optimal value under the policy that sampled it. Equal rewards give
    exactly 0.
    """
    rewards, group = whole.require("rewards"), whole.require("group")
    # `max` of no elements would raise.
    if not len(group):
        return BatchDecision(sequences={"advantage": rewards})
    # Relative to the group's best, so that no exponential overflows.
    best = rewards.new_zeros(int(group.max()) + 1).scatter_reduce(
        0, group, rewards, "amax", include_self=False
    )[group]
    above = (
        settings.beta_value * whole.group_mean(((rewards - best) / settings.beta_value).exp()).log()
    )
    value = best + above
    return BatchDecision(
        sequences={"advantage": rewards - value}, scalars={"objective/value": float(value.mean())}
    )


def oapl(batch: TokenBatch, settings: OaplLoss) -> SequenceLoss:
    """l = (beta_policy sum_t (log pi - log mu) - (R - V))^2, summed over the whole sequence before
    squaring. [N] -> [S].

    Defaults: beta_value 1.0, beta_policy 0.001.
    """
    log_ratio = batch.sequence_sum(batch.logp - batch.logp_behavior)
    residual = settings.beta_policy * log_ratio - batch.decided.sequences["advantage"]
    # Otherwise a sequence without trained tokens would regress its advantage on 0.
    residual = torch.where(batch.lengths() > 0, residual, 0.0)
    return SequenceLoss(residual.square(), torch.zeros_like(batch.mask, dtype=torch.bool))


OAPL = LossMethod(oapl, decide_oapl)

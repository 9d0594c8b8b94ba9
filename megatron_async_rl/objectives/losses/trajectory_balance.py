"""Trajectory balance with the partition function estimated from the group: VarGrad, as in TBA
(arXiv 2503.18929)."""

from __future__ import annotations

import torch

from megatron_async_rl.config.losses import TrajectoryBalanceLoss
from megatron_async_rl.objectives.batch import BatchDecision, SequenceLoss, TokenBatch
from megatron_async_rl.objectives.method import LossMethod, columns


def decide_trajectory_balance(whole: TokenBatch, settings: TrajectoryBalanceLoss) -> BatchDecision:
    """Return log Z of each sequence's prompt, [S]: the mean over the group's responses of sum_t
    (log pi_ref - log pi) + R / beta."""
    log_ratio = whole.sequence_sum(whole.logp - whole.require("logp_ref"))
    # Estimated once per batch, without gradient (VarGrad).
    log_z = whole.group_mean(whole.require("rewards") / settings.beta - log_ratio)
    scalars = {"objective/log_z": float(log_z.mean())} if len(log_z) else {}
    return BatchDecision(sequences={"log_z": log_z}, scalars=scalars)


def trajectory_balance(batch: TokenBatch, settings: TrajectoryBalanceLoss) -> SequenceLoss:
    """l = (log Z + sum_t (log pi - log pi_ref) - R / beta)^2, summed over the whole sequence before
    squaring. [N] -> [S].

    log Z comes from the whole batch and carries no gradient. The minimum is at pi proportional to
    pi_ref exp(R / beta). Default: beta 0.05, the reward that weighs as much as one nat.
    """
    log_ratio = batch.sequence_sum(batch.logp - batch.require("logp_ref"))
    residual = (
        batch.decided.sequences["log_z"] + log_ratio - batch.require("rewards") / settings.beta
    )
    residual = torch.where(batch.lengths() > 0, residual, 0.0)
    return SequenceLoss(residual.square(), torch.zeros_like(batch.mask, dtype=torch.bool))


TRAJECTORY_BALANCE = LossMethod(
    trajectory_balance, decide_trajectory_balance, columns("logp", "logp_ref")
)

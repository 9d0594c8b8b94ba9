"""TOPR (arXiv 2503.14286): REINFORCE on good responses, truncated importance sampling on bad
ones."""

from __future__ import annotations

import torch

from megatron_async_rl.config.losses import ToprLoss
from megatron_async_rl.objectives.batch import LOG_RATIO_BOUND, TokenBatch, TokenLoss
from megatron_async_rl.objectives.method import LossMethod


def topr(batch: TokenBatch, settings: ToprLoss) -> TokenLoss:
    """l_t = -c R log pi_t; c = 1 where R >= 0, sg(min(1, prod_t w_t)) where R < 0, w = pi / mu. [N]
    -> [N].

    Summed over each sequence and averaged over sequences (the default aggregation), this is the
    paper's -(1/B) sum_i c_i R_i log pi(y_i). The ratio is that of the whole sequence against the
    behaviour policy, as in the paper.
    """
    rewards = batch.require("rewards")
    log_weight = batch.sequence_sum(batch.logp.detach() - batch.logp_behavior)
    # Clamped at 0 in log space, which truncates the product at 1.
    truncated = log_weight.clamp(-LOG_RATIO_BOUND, 0.0).exp()
    factor = batch.per_token(torch.where(rewards >= 0, 1.0, truncated) * rewards)
    return TokenLoss(-factor * batch.logp, torch.zeros_like(batch.mask, dtype=torch.bool))


TOPR = LossMethod(topr)

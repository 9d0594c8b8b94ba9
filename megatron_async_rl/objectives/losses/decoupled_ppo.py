"""Decoupled PPO (arXiv 2110.00641; AReaL, arXiv 2505.24298): staleness is clipped, the rest is
importance weight."""

from __future__ import annotations

from typing import TYPE_CHECKING

from megatron_async_rl.objectives.batch import LOG_RATIO_BOUND, TokenBatch, TokenLoss
from megatron_async_rl.objectives.losses.ppo_clip import ppo_clip

if TYPE_CHECKING:
    from megatron_async_rl.config.losses import DecoupledPpoLoss


def decoupled_ppo(batch: TokenBatch, settings: DecoupledPpoLoss) -> TokenLoss:
    """l = sg(rho) ppo_clip(r), rho = pi_prox / mu, r = pi / pi_prox. [N] -> [N].

    Defaults as `ppo_clip`. rho's logarithm is clamped to +-20 and rho is not truncated: a cap is
    the correction `tis`, beside loss `ppo_clip`.
    """
    found = ppo_clip(batch, settings)
    weight = (
        (batch.logp_prox - batch.logp_behavior)
        .clamp(-LOG_RATIO_BOUND, LOG_RATIO_BOUND)
        .detach()
        .exp()
    )
    return TokenLoss(weight * found.loss, found.clipped)

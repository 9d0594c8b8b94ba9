"""SAPO (arXiv 2511.20347): a smooth gate on the ratio instead of a clip."""

from __future__ import annotations

import torch

from megatron_async_rl.config.losses import SapoLoss
from megatron_async_rl.objectives.batch import TokenBatch, TokenLoss
from megatron_async_rl.objectives.method import LossMethod


def sapo(batch: TokenBatch, settings: SapoLoss) -> TokenLoss:
    """l = -A (4 / tau) sigmoid(tau (r - 1)), r = pi / pi_prox, tau = tau_pos where A > 0, tau_neg
    otherwise. [N] -> [N].

    Defaults: tau_pos 1.0, tau_neg 1.05. At r = 1 the gradient is the policy gradient, -A. Away from
    1 it decreases smoothly and is never cut to 0, so nothing is `clipped`.
    """
    advantages, ratio = batch.advantages, batch.log_ratio().exp()
    gain, loss = (
        torch.sigmoid(tau * (ratio - 1.0)) * (4.0 / tau)
        for tau in (settings.tau_pos, settings.tau_neg)
    )
    # Both gates are finite everywhere, so `where` passes no nan gradient.
    gate = torch.where(advantages > 0, gain, loss)
    return TokenLoss(-advantages * gate, torch.zeros_like(batch.mask, dtype=torch.bool))


SAPO = LossMethod(sapo)

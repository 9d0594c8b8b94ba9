"""VESPO (arXiv 2602.10693): a smooth kernel on the whole sequence's weight instead of a clip."""

from __future__ import annotations

import torch
from torch import Tensor

from megatron_async_rl.config.losses import VespoLoss
from megatron_async_rl.objectives.batch import LOG_RATIO_BOUND, TokenBatch, TokenLoss
from megatron_async_rl.objectives.method import LossMethod


def vespo(batch: TokenBatch, settings: VespoLoss) -> TokenLoss:
    """l = -sg(phi) A log pi, phi = exp(lambda + k log W - lambda W), log W = clamp(sum_t log r_t,
    +-20). [N] -> [N].

    r = pi / pi_prox. (k, lambda) = (k_pos, lambda_pos) = (2, 3) where A > 0, else (k_neg,
    lambda_neg) = (3, 2). phi(1) = 1; phi is largest at W = k / lambda and falls towards 0 on both
    sides without a cut, so nothing is `clipped`.
    """
    # Detached: the kernel weights the gradient and has none itself.
    log_w = batch.sequence_sum(batch.logp.detach() - batch.logp_prox).clamp(
        -LOG_RATIO_BOUND, LOG_RATIO_BOUND
    )
    gain = _phi(log_w, settings.k_pos, settings.lambda_pos)
    loss = _phi(log_w, settings.k_neg, settings.lambda_neg)
    phi = torch.where(batch.advantages > 0, batch.per_token(gain), batch.per_token(loss))
    return TokenLoss(
        -phi * batch.advantages * batch.logp, torch.zeros_like(batch.mask, dtype=torch.bool)
    )


def _phi(log_w: Tensor, k: float, scale: float) -> Tensor:
    return (scale + k * log_w - scale * log_w.exp()).exp()


VESPO = LossMethod(vespo)

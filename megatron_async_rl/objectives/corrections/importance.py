"""rho = pi_prox / mu, the ratio that corrections weigh by or look at.

Invariant: sequence statistics run over the tokens that corrections before this one kept.
"""

from __future__ import annotations

from typing import Literal

import torch
from torch import Tensor

from megatron_async_rl.objectives.batch import LOG_RATIO_BOUND, TokenBatch

SMALLEST_MEAN = 1e-8
"""A mean weight below it is not divided by."""


def log_ratios(batch: TokenBatch) -> Tensor:
    """[N]: log rho, clamped to +-LOG_RATIO_BOUND."""
    return (batch.logp_prox - batch.logp_behavior).clamp(-LOG_RATIO_BOUND, LOG_RATIO_BOUND)


def importance_ratios(batch: TokenBatch, level: Literal["token", "sequence"]) -> Tensor:
    """[N]: each token's rho, or the product over its sequence; in log space clamped to +-LOG_RATIO_BOUND."""
    if level == "token":
        return log_ratios(batch).exp()
    product = seen(batch).sequence_sum(batch.logp_prox - batch.logp_behavior)
    return product.clamp(-LOG_RATIO_BOUND, LOG_RATIO_BOUND).exp()[batch.sequence]


def seen(batch: TokenBatch) -> TokenBatch:
    """The batch with the mask of what corrections so far have kept."""
    return batch.replace(mask=batch.kept())


def normalized(weights: Tensor, batch: TokenBatch, level: Literal["token", "sequence"]) -> Tensor:
    """[N] -> [N] with mean 1 over the kept tokens, or, level `sequence`, over the sequences that have any. Whole batches only."""
    kept = seen(batch)
    if level == "token":
        mean = kept.sequence_sum(weights).sum() / kept.mask.sum().clamp(min=1)
    else:
        mean = kept.sequence_mean(weights).sum() / (kept.lengths() > 0).sum().clamp(min=1)
    return weights / torch.where(mean > SMALLEST_MEAN, mean, 1.0)

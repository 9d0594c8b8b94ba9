"""DPPO (arXiv 2602.04879): the trust region bounds a divergence between two outcomes, the sampled
token and all others, instead of a ratio.

Both forms need only the policies' probabilities of the sampled token: the binary total variation or
KL.
"""

from __future__ import annotations

import torch
from torch import Tensor

from megatron_async_rl.config.losses import DppoKlLoss, DppoTvLoss
from megatron_async_rl.objectives.batch import LOG_RATIO_BOUND, TokenBatch, TokenLoss
from megatron_async_rl.objectives.method import LossMethod

SMALLEST_REST = 1e-8
"""Least probability of "any other token" in the KL divergence; keeps its logarithm finite."""


def dppo_tv(batch: TokenBatch, settings: DppoTvLoss) -> TokenLoss:
    """l = -A sg(min(w, cap)) log pi, w = pi / mu; 0 where A > 0 and pi - mu > threshold, or A < 0
    and mu - pi > threshold.

    [N] -> [N]. Defaults: threshold 0.15, cap 20. `clipped` marks the tokens set to 0.
    """
    policy, behavior = _probabilities(batch)
    return _masked(
        batch, (policy - behavior).abs() > settings.threshold, policy - behavior, settings.cap
    )


def dppo_kl(batch: TokenBatch, settings: DppoKlLoss) -> TokenLoss:
    """Variant of `dppo_tv` with the mask mu log(mu / pi) + (1 - mu) log((1 - mu) / (1 - pi)) >
    threshold on the same sides (pi above mu where A > 0, below it where A < 0). [N] -> [N].
    Defaults: threshold 0.05, cap 20."""
    policy, behavior = _probabilities(batch)
    rest, rest_behavior = (
        (1.0 - policy).clamp(min=SMALLEST_REST),
        (1.0 - behavior).clamp(min=SMALLEST_REST),
    )
    # In float32 the difference of the log-probs is more exact than the logarithm of a ratio.
    divergence = (
        behavior * (batch.logp_behavior - batch.logp.detach())
        + rest_behavior * (rest_behavior / rest).log()
    )
    return _masked(batch, divergence > settings.threshold, policy - behavior, settings.cap)


def _probabilities(batch: TokenBatch) -> tuple[Tensor, Tensor]:
    """Return the probabilities of the sampled tokens under pi and mu, [N] each, detached. Rounding
    may make them larger than 1."""
    policy, behavior = (
        logp.detach().clamp(max=LOG_RATIO_BOUND).exp() for logp in (batch.logp, batch.logp_behavior)
    )
    return policy, behavior


def _masked(batch: TokenBatch, far: Tensor, moved: Tensor, cap: float) -> TokenLoss:
    """Return the loss with far tokens masked. far: [N] bool. moved: [N]; its sign is the direction
    in which the policy has moved since the token was sampled."""
    # Only a step further away is masked, not one back towards mu.
    dropped = far & (moved * batch.advantages > 0)
    # Detached: the gradient flows through log pi alone.
    weight = batch.log_weight().detach().exp().clamp(max=cap)
    return TokenLoss(torch.where(dropped, 0.0, -batch.advantages * weight * batch.logp), dropped)


DPPO_TV = LossMethod(dppo_tv)
DPPO_KL = LossMethod(dppo_kl)

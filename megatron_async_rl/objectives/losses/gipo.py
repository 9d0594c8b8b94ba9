"""GIPO (arXiv 2603.03955): a Gaussian trust weight on the log-ratio. The formula was known to
us only from third-party copies, not from the paper."""

from __future__ import annotations

import torch

from megatron_async_rl.config.losses import GipoLoss
from megatron_async_rl.objectives.batch import TokenBatch, TokenLoss
from megatron_async_rl.objectives.method import LossMethod


def gipo(batch: TokenBatch, settings: GipoLoss) -> TokenLoss:
    """l = -sg(exp(-(log w / sigma)^2 / 2)) w A, w = pi / mu. [N] -> [N].

    Default: sigma 1.0. The weight of far tokens decreases smoothly on both sides and is never cut
    to 0, so nothing is `clipped`.
    """
    log_weight = batch.log_weight()
    # Detached: the trust weight is not optimised.
    trust = (-0.5 * (log_weight.detach() / settings.sigma).square()).exp()
    return TokenLoss(
        -trust * log_weight.exp() * batch.advantages, torch.zeros_like(batch.mask, dtype=torch.bool)
    )


GIPO = LossMethod(gipo)

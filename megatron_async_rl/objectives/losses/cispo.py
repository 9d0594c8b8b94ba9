"""CISPO (MiniMax-M1, arXiv 2506.13585): clips the importance weight and never the gradient."""

from __future__ import annotations

import torch

from megatron_async_rl.config.losses import CispoLoss
from megatron_async_rl.objectives.batch import TokenBatch, TokenLoss
from megatron_async_rl.objectives.method import LossMethod


def cispo(batch: TokenBatch, settings: CispoLoss) -> TokenLoss:
    """l = -sg(clip(r, 1 - clip_low, 1 + clip_high)) A log pi, r = pi / pi_prox. [N] -> [N].

    Defaults: clip_low 0.5, clip_high 0.2. Every token keeps a gradient, so nothing is `clipped`.
    """
    # Detached, so that clipping the weight never cuts a token's gradient.
    weight = (
        batch.log_ratio().detach().exp().clamp(1.0 - settings.clip_low, 1.0 + settings.clip_high)
    )
    return TokenLoss(
        -weight * batch.advantages * batch.logp, torch.zeros_like(batch.mask, dtype=torch.bool)
    )


CISPO = LossMethod(cispo)

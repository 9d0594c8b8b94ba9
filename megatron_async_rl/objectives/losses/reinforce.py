"""REINFORCE (Williams 1992)."""

from __future__ import annotations

import torch

from megatron_async_rl.config.losses import ReinforceLoss
from megatron_async_rl.objectives.batch import TokenBatch, TokenLoss
from megatron_async_rl.objectives.method import LossMethod


def reinforce(batch: TokenBatch, settings: ReinforceLoss) -> TokenLoss:
    """l = -A log pi. [N] -> [N]; without a ratio, so off-policy data is not corrected."""
    return TokenLoss(-batch.advantages * batch.logp, torch.zeros_like(batch.mask, dtype=torch.bool))


REINFORCE = LossMethod(reinforce)

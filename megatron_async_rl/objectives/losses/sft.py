"""Supervised fine-tuning on given responses: the warm start of a policy."""

from __future__ import annotations

import torch

from megatron_async_rl.config.losses import SftLoss
from megatron_async_rl.objectives.batch import TokenBatch, TokenLoss
from megatron_async_rl.objectives.method import LossMethod


def sft(batch: TokenBatch, settings: SftLoss) -> TokenLoss:
    """l = -log pi. [N] -> [N]; a sample's own weight is part of `batch.weights`, as for every
    loss."""
    return TokenLoss(-batch.logp, torch.zeros_like(batch.mask, dtype=torch.bool))


SFT = LossMethod(sft)

"""IcePop (Ling team, 2025: ringtech.notion.site/icepop): an importance ratio out of bounds takes no part."""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch
from torch import Tensor

from megatron_async_rl.objectives.batch import LOG_RATIO_BOUND, TokenBatch

if TYPE_CHECKING:
    from megatron_async_rl.config.corrections import IcepopCorrection


def icepop(batch: TokenBatch, settings: IcepopCorrection) -> Tensor:
    """rho_t where low <= rho_t <= high, else 0; rho = pi_prox / mu. [N]."""
    rho = (batch.logp_prox - batch.logp_behavior).clamp(-LOG_RATIO_BOUND, LOG_RATIO_BOUND).exp()
    return torch.where((rho >= settings.low) & (rho <= settings.high), rho, 0.0)

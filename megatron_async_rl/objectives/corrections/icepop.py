"""IcePop (arXiv 2510.18855, ringtech.notion.site/icepop): an importance ratio out of bounds takes no part."""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch
from torch import Tensor

from megatron_async_rl.objectives.batch import TokenBatch
from megatron_async_rl.objectives.corrections.importance import importance_ratios, normalized

if TYPE_CHECKING:
    from megatron_async_rl.config.corrections import IcepopCorrection


def icepop(batch: TokenBatch, settings: IcepopCorrection) -> Tensor:
    """rho_t where low <= rho_t <= high, else 0; rho = pi_prox / mu, or its product over the sequence. [N].

    `normalize` divides by the mean over the tokens that came in (`token`) or their sequences (`sequence`), zeros included.
    """
    rho = importance_ratios(batch, settings.level)
    weights = torch.where((rho >= settings.low) & (rho <= settings.high), rho, 0.0)
    return normalized(weights, batch, settings.level) if settings.normalize else weights

"""Token veto: one token that the proximal policy all but excludes condemns its sequence (Liu, Li et al. 2025,
richardli.xyz/rl-collapse)."""

from __future__ import annotations

import math
from typing import TYPE_CHECKING

from torch import Tensor

from megatron_async_rl.objectives.batch import TokenBatch
from megatron_async_rl.objectives.corrections.importance import log_ratios, seen

if TYPE_CHECKING:
    from megatron_async_rl.config.corrections import TokenVetoCorrection


def token_veto(batch: TokenBatch, settings: TokenVetoCorrection) -> Tensor:
    """0 on every token of a sequence in which any kept token has rho = pi_prox / mu < threshold, else 1. [N]."""
    vetoes = (log_ratios(batch) < math.log(settings.threshold)).to(batch.mask.dtype)
    return (seen(batch).sequence_sum(vetoes) == 0).to(batch.mask.dtype)[batch.sequence]

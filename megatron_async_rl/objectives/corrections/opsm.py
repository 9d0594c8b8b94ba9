"""Off-policy sequence masking (DeepSeek-V3.2, arXiv 2512.02556): bad responses that the policy has moved away from teach
nothing more."""

from __future__ import annotations

from typing import TYPE_CHECKING

from torch import Tensor

from megatron_async_rl.objectives.batch import TokenBatch
from megatron_async_rl.objectives.corrections.importance import seen

if TYPE_CHECKING:
    from megatron_async_rl.config.corrections import OpsmCorrection


def opsm(batch: TokenBatch, settings: OpsmCorrection) -> Tensor:
    """0 where A < 0 and the sequence's mean over kept tokens of log(pi_prox / pi) is above delta, else 1. [N].

    Where all tokens of a response share an advantage this drops the sequence; otherwise its tokens of negative advantage.
    """
    drift = seen(batch).sequence_mean(batch.logp_prox - batch.logp)[batch.sequence]
    return (~((batch.advantages < 0) & (drift > settings.delta))).to(batch.mask.dtype)

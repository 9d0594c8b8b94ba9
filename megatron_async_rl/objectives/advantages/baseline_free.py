"""The reward itself, without a baseline."""

from __future__ import annotations

from typing import TYPE_CHECKING

from megatron_async_rl.objectives.batch import Advantages, TokenBatch

if TYPE_CHECKING:
    from megatron_async_rl.config.advantages import NoAdvantage


def no_baseline(batch: TokenBatch, settings: NoAdvantage) -> Advantages:
    """A_i = R_i on each of the sequence's tokens: [S] -> [N]."""
    return Advantages(batch.per_token(batch.require("rewards")))

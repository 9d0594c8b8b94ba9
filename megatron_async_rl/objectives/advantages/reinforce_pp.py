"""REINFORCE++ (arXiv 2501.03262): advantages whitened over the whole batch instead of within each group."""

from __future__ import annotations

from typing import TYPE_CHECKING

from megatron_async_rl.objectives.advantages.timeline import Timeline, discounted_sums
from megatron_async_rl.objectives.advantages.whitening import whitened
from megatron_async_rl.objectives.batch import Advantages, TokenBatch

if TYPE_CHECKING:
    from megatron_async_rl.config.advantages import ReinforcePpAdvantage


def reinforce_pp(batch: TokenBatch, settings: ReinforcePpAdvantage) -> Advantages:
    """G_t = sum_{j >= t} gamma^(j - t) r_j over the response's trained tokens, then whitened. [N] token rewards -> [N]."""
    timeline = Timeline.of(batch)
    returns = discounted_sums(timeline.grid(batch.require("token_rewards")), settings.gamma)
    return Advantages(whitened(timeline.flat(returns), batch.mask))

"""Generalised advantage estimation (arXiv 1506.02438, eq. 16); with a value head: PPO and A2C."""

from __future__ import annotations

from typing import TYPE_CHECKING

from torch.nn.functional import pad

from megatron_async_rl.objectives.advantages.timeline import Timeline, discounted_sums
from megatron_async_rl.objectives.advantages.whitening import whitened
from megatron_async_rl.objectives.batch import Advantages, TokenBatch

if TYPE_CHECKING:
    from megatron_async_rl.config.advantages import GaeAdvantage


def gae(batch: TokenBatch, settings: GaeAdvantage) -> Advantages:
    """A_t = sum_{j >= t} (gamma lam)^(j - t) (r_j + gamma V_{j+1} - V_j), V = 0 beyond the last token; [N] -> [N].

    returns: A + V before `whiten`, which is over the whole batch. A truncated response ends like a finished one.
    """
    timeline = Timeline.of(batch)
    values = timeline.grid(batch.require("values"))
    following = pad(values[:, 1:], (0, 1))
    errors = timeline.grid(batch.require("token_rewards")) + settings.gamma * following - values
    advantages = discounted_sums(errors, settings.gamma * settings.lam)
    tokens = timeline.flat(advantages)
    returns = timeline.flat(advantages + values)
    return Advantages(whitened(tokens, batch.mask) if settings.whiten else tokens, returns=returns)

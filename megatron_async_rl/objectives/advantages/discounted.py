"""Estimators that discount along the response: `reinforce_pp`, `reinforce_pp_baseline` and `gae`.

REINFORCE++ (arXiv 2501.03262): advantages whitened over the whole batch; with a baseline, they are
first centred within each group. Generalised advantage estimation (arXiv 1506.02438, eq. 16); with a
value head: PPO and A2C.
"""

from __future__ import annotations

import torch
from torch import Tensor
from torch.nn.functional import pad

from megatron_async_rl.config.advantages import (
    GaeAdvantage,
    ReinforcePpAdvantage,
    ReinforcePpBaselineAdvantage,
)
from megatron_async_rl.objectives.advantages.token_grid import TokenGrid, discounted_sums
from megatron_async_rl.objectives.batch import Advantages, TokenBatch
from megatron_async_rl.objectives.method import AdvantageMethod, columns

EPSILON = 1e-8


def whitened(values: Tensor, mask: Tensor) -> Tensor:
    """[N] -> [N]: (x - mean) / sqrt(var + 1e-8) over tokens with mask > 0, var unbiased (n - 1); 0
    elsewhere.

    Exactly 0 if all trained tokens have the same value, or if there is only one.
    """
    trained = mask > 0
    kept = values[trained]
    # Otherwise the small deviation would amplify a rounding error of the mean.
    if not len(kept) or kept.min() == kept.max():
        return torch.zeros_like(values)
    return torch.where(trained, (values - kept.mean()) / (kept.var() + EPSILON).sqrt(), 0.0)


def reinforce_pp(batch: TokenBatch, settings: ReinforcePpAdvantage) -> Advantages:
    """G_t = sum_{j >= t} gamma^(j - t) r_j over the response's trained tokens, then whitened. [N]
    token rewards -> [N]."""
    grid = TokenGrid.of(batch)
    returns = discounted_sums(grid.by_sequence(batch.require("token_rewards")), settings.gamma)
    return Advantages(whitened(grid.flat(returns), batch.mask))


def reinforce_pp_baseline(batch: TokenBatch, settings: ReinforcePpBaselineAdvantage) -> Advantages:
    """R_i - mean R of the group on each of the sequence's tokens, then whitened. [S] rewards ->
    [N].

    Before whitening exactly 0 for a group of one or of equal rewards; afterwards only the batch's
    mean remains, which whitening subtracts from every token.
    """
    return Advantages(
        whitened(batch.per_token(batch.group_centred(batch.require("rewards"))), batch.mask)
    )


def gae(batch: TokenBatch, settings: GaeAdvantage) -> Advantages:
    """A_t = sum_{j >= t} (gamma lam)^(j - t) (r_j + gamma V_{j+1} - V_j), V = 0 beyond the last
    token; [N] -> [N].

    returns: A + V before `whiten`, which uses the whole batch. A truncated response ends like a
    finished one.
    """
    grid = TokenGrid.of(batch)
    values = grid.by_sequence(batch.require("values"))
    # V = 0 beyond the last token, also for a truncated response.
    following = pad(values[:, 1:], (0, 1))
    errors = grid.by_sequence(batch.require("token_rewards")) + settings.gamma * following - values
    advantages = discounted_sums(errors, settings.gamma * settings.lam)
    tokens = grid.flat(advantages)
    # Before whitening, because the value head learns returns in units of the reward.
    returns = grid.flat(advantages + values)
    return Advantages(whitened(tokens, batch.mask) if settings.whiten else tokens, returns=returns)


REINFORCE_PP = AdvantageMethod(reinforce_pp)
REINFORCE_PP_BASELINE = AdvantageMethod(reinforce_pp_baseline)
GAE = AdvantageMethod(gae, columns("values"))

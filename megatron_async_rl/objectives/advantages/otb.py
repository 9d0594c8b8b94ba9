"""Optimal token baseline (arXiv 2602.07078): for each token, the baseline of least variance among
the group's responses.

    e_j = 1 - 2 pi_j + sum_v pi_v^2      squared norm of the score with respect to the logits
    W_t = sum_{j <= t} e_j               of the path up to t, its cross terms being 0 on average
    B_t = sum_i W_it G_it / sum_i W_it   over the group's responses that have a t-th trained token;
                                         G the reward to go
    A_t = G_t - B_t

Under importance weights e_j is multiplied by the weight's square, inside the sum, as the released
implementation (verl) does.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch
from torch import Tensor

from megatron_async_rl.objectives.advantages.token_grid import TokenGrid, discounted_sums
from megatron_async_rl.objectives.batch import Advantages, TokenBatch, weighted_means
from megatron_async_rl.objectives.off_policy import importance_ratios

if TYPE_CHECKING:
    from megatron_async_rl.config.advantages import OtbAdvantage

ROUNDING = 1e-4
"""An energy below 0 by less than this is one of 0 after rounding in float32: left in, weights of
both signs could cancel."""


def otb(batch: TokenBatch, settings: OtbAdvantage) -> Advantages:
    """[N] token rewards, `logp_prox` and `sum_p_squared` of the same weights -> [N].

    `zero_tail`: where one response is longer than all others of its group its own return would be
    its baseline and the advantage 0; the baseline is 0 there instead, and A = G (what verl's option
    of that name does). Without it, exactly 0 for equal rewards; a group of one is 0 either way.
    """
    grid = TokenGrid.of(batch)
    weights = torch.cumsum(grid.by_sequence(_energy(batch, settings)), dim=-1)[
        grid.row, grid.column
    ]
    to_go = discounted_sums(grid.by_sequence(batch.require("token_rewards")), 1.0)[
        grid.row, grid.column
    ]
    group = batch.require("group")[grid.row]
    cell = group * grid.columns + grid.column
    lowest, above = weighted_means(to_go, weights, cell)
    advantages = to_go - lowest[cell] - above[cell]
    if settings.zero_tail:
        first = (grid.column == 0).long()
        alone = torch.bincount(cell)[cell] == 1
        compared = torch.bincount(group, weights=first)[group] > 1
        advantages = torch.where(alone & compared, to_go, advantages)
    return Advantages(grid.on_tokens(advantages))


def _energy(batch: TokenBatch, settings: OtbAdvantage) -> Tensor:
    """[N]: e_j, times the squared importance weight."""
    energy = 1.0 - 2.0 * batch.logp_prox.exp() + batch.require("sum_p_squared")
    energy = torch.where((energy < 0) & (energy > -ROUNDING), 0.0, energy)
    if settings.importance is not None:
        energy = (
            energy * importance_ratios(batch, settings.importance).clamp(max=settings.cap).square()
        )
    return energy

"""Partial policy gradients (arXiv 2603.06138): a token is credited only with the rewards of a
subset of later steps.

A step is a turn (a run of trained tokens between environment tokens) or a single trained token.
With R_s the rewards of step s, a token of step s is credited with the rewards of its own step that
come at or after it, plus sum over j in S_s of gamma^(j - s) R_j:

    full      S = all later steps
    greedy    S is empty
    k         the next k - 1 steps
    segment   the rest of its block of k steps (0..k-1, k..2k-1, ...)

Smaller subsets trade bias for variance. How the paper cuts segments was not available to us; blocks
of k steps are this project's choice.
"""

from __future__ import annotations

import torch
from torch import Tensor
from torch.nn.functional import pad

from megatron_async_rl.config.advantages import PartialReturnAdvantage
from megatron_async_rl.objectives.advantages.token_grid import (
    TokenGrid,
    discounted_sums,
    sums_to_end_of_run,
)
from megatron_async_rl.objectives.batch import Advantages, TokenBatch, weighted_means
from megatron_async_rl.objectives.method import AdvantageMethod


def partial_return(batch: TokenBatch, settings: PartialReturnAdvantage) -> Advantages:
    """[N] token rewards -> [N]. `baseline: group` subtracts the mean credit of the step's first
    token, over the group's responses that reached the step; a step that only one response reached
    then has advantage 0."""
    grid = TokenGrid.of(batch)
    rewards = batch.require("token_rewards")
    step = grid.column if settings.step == "token" else _turns(grid)
    steps = int(step.max()) + 1 if len(step) else 1
    totals = rewards.new_zeros(batch.sequences, steps).index_put(
        (grid.row, step), rewards[grid.token], accumulate=True
    )
    later = _later(totals, settings)
    own = sums_to_end_of_run(rewards[grid.token], grid.row * steps + step)
    # Within its own step a token is credited with the rewards at or after it.
    credited = own + later[grid.row, step]
    if settings.baseline == "group":
        reached = totals.new_zeros(totals.shape, dtype=torch.bool).index_put(
            (grid.row, step), torch.tensor(True)
        )
        row, column = reached.nonzero(as_tuple=True)
        group = batch.require("group")
        # Weights of 1, so that each response that reached the step counts once.
        lowest, above = weighted_means(
            (totals + later)[row, column], totals.new_ones(len(row)), group[row] * steps + column
        )
        cell = group[grid.row] * steps + step
        credited = credited - lowest[cell] - above[cell]
    return Advantages(grid.on_tokens(credited))


def _turns(grid: TokenGrid) -> Tensor:
    """[M]: number of environment interruptions before each trained token of its sequence."""
    interrupted = torch.zeros_like(grid.row)
    interrupted[1:] = (grid.row[1:] == grid.row[:-1]) & (
        grid.position[1:] != grid.position[:-1] + 1
    )
    so_far = torch.cumsum(interrupted, 0)
    # The first token of each sequence, from which turns are counted.
    first = torch.searchsorted(grid.row, grid.row)
    return so_far - so_far[first]


def _later(totals: Tensor, settings: PartialReturnAdvantage) -> Tensor:
    """[S, K] rewards of steps -> [S, K]: the discounted rewards of later steps with which a step is
    credited."""
    gamma, steps = settings.gamma, totals.shape[1]
    if settings.horizon == "greedy":
        return torch.zeros_like(totals)
    if settings.horizon == "full":
        return gamma * pad(discounted_sums(totals, gamma)[:, 1:], (0, 1))
    # The settings model requires k for the other two horizons.
    assert settings.k is not None
    if settings.horizon == "k":
        later = torch.zeros_like(totals)
        for ahead in range(1, min(settings.k, steps)):
            later = later + gamma**ahead * pad(totals[:, ahead:], (0, ahead))
        return later
    # Zeros do not change a sum; they complete the last block.
    blocks = pad(totals, (0, -steps % settings.k)).unflatten(1, (-1, settings.k))
    return (gamma * pad(discounted_sums(blocks, gamma)[:, :, 1:], (0, 1))).flatten(1)[:, :steps]


PARTIAL_RETURN = AdvantageMethod(partial_return)

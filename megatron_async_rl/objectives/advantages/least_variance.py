"""Baselines of minimum variance, computed from the squared norm of each response's score gradient.

`otb`, the optimal token baseline (arXiv 2602.07078): for each token, the minimum-variance baseline
over the group's responses.

    e_j = 1 - 2 pi_j + sum_v pi_v^2      squared norm of the score with respect to the logits
    W_t = sum_{j <= t} e_j               of the path up to t, its cross terms being 0 on average
    B_t = sum_i W_it G_it / sum_i W_it   over the group's responses that have a t-th trained token;
                                         G the reward to go
    A_t = G_t - B_t

Under importance weights e_j is multiplied by the square of the weight, inside the sum, as in the
released implementation (verl).

`opob`, VCPO's minimum-variance off-policy baseline (arXiv 2602.17616):

For the estimator (1/L) sum_t min(w, cap) (R - b) grad logp, per group:

    b = sum_i W_i R_i / sum_i W_i,   W_i = min(w_i, cap)^2 |s_i|^2,   w_i = prod_t pi / mu

s_i is the sequence's score gradient, with the loss's weights of its tokens. Two modes compute it:
- `exact`: the policy measures |s_i| with one backward pass per sequence (policy/opob.py) and sets
  the baseline afterwards;
- `cheap`: |s_i|^2 is approximated by (1/L^2) sum_t (1 - 2 p_t + sum_v p_v^2): the squared norms of
  the token scores with respect to the logits, as if all tokens had the same Jacobian below the
  logits and all scores were orthogonal.
"""

from __future__ import annotations

import math

import torch
from torch import Tensor

from megatron_async_rl.config.advantages import OpobAdvantage, OtbAdvantage
from megatron_async_rl.objectives.advantages.per_response import EPSILON
from megatron_async_rl.objectives.advantages.token_grid import TokenGrid, discounted_sums
from megatron_async_rl.objectives.batch import Advantages, TokenBatch, weighted_means
from megatron_async_rl.objectives.method import AdvantageMethod, TokenColumn, columns
from megatron_async_rl.objectives.off_policy import importance_ratios

ROUNDING = 1e-4
"""An energy slightly below 0, by less than this value, is 0 after rounding in float32. If it were
kept, weights of both signs could cancel."""


def otb(batch: TokenBatch, settings: OtbAdvantage) -> Advantages:
    """[N] token rewards, `logp_prox` and `sum_p_squared` of the same weights -> [N].

    `zero_tail`: if one response is longer than all others of its group, its own return would be its
    baseline, and its advantage 0. The baseline there is 0 instead, and A = G (like verl's option of
    that name). Without it, exactly 0 for equal rewards; a group of one is 0 either way.
    """
    grid = TokenGrid.of(batch)
    # W_t: cross terms of the path's score vanish in expectation.
    weights = torch.cumsum(grid.by_sequence(_energy(batch, settings)), dim=-1)[
        grid.row, grid.column
    ]
    to_go = discounted_sums(grid.by_sequence(batch.require("token_rewards")), 1.0)[
        grid.row, grid.column
    ]
    group = batch.require("group")[grid.row]
    # One cell per group and token number, so that responses are compared position by position.
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
    # Larger negative values remain: they show that the columns do not match.
    energy = torch.where((energy < 0) & (energy > -ROUNDING), 0.0, energy)
    if settings.importance is not None:
        energy = (
            energy * importance_ratios(batch, settings.importance).clamp(max=settings.cap).square()
        )
    return energy


def opob(batch: TokenBatch, settings: OpobAdvantage) -> Advantages:
    """A_i = R_i - b on each of the sequence's tokens: [S] -> [N]. Exactly 0 for a group of one or
    of equal rewards.

    Score norms are the batch's `score_norms` if it has them. In mode `exact` without them, the
    baseline is the plain mean, which gives 0 for equal rewards; after the backward passes the
    policy subtracts the difference to b.
    """
    rewards, group = batch.require("rewards"), batch.require("group")
    norms = batch.score_norms
    if norms is None and settings.mode == "exact":
        return Advantages(
            batch.per_token(batch.group_centred(rewards)), baselines=batch.group_mean(rewards)
        )
    log_weights = batch.sequence_sum(batch.logp - batch.logp_behavior)
    centred, baselines = minimum_variance(
        rewards,
        log_weights,
        norms if norms is not None else score_norm_proxy(batch),
        group,
        settings.cap,
    )
    if settings.normalize_std:
        count = batch.group_count().to(rewards.dtype)
        variance = (
            batch.group_mean(batch.group_centred(rewards).square())
            * count
            / (count - 1).clamp(min=1)
        )
        # Divided after the baseline, as in GRPO.
        centred = centred / (variance.sqrt() + EPSILON)
    return Advantages(batch.per_token(centred), baselines=baselines)


def minimum_variance(
    rewards: Tensor, log_weights: Tensor, score_norms: Tensor, group: Tensor, cap: float
) -> tuple[Tensor, Tensor]:
    """[S] each -> (R - b, b), [S] each. log_weights: log w_i, of any size; group: [S] int64.

    W is divided by its largest value in the group, in log space, so that neither underflow nor
    overflow changes b. A group in which every W is 0 has no gradient; its baseline is the plain
    mean.
    """
    log_w = 2.0 * (log_weights.clamp(max=math.log(cap)) + score_norms.log())
    groups = int(group.max()) + 1 if len(group) else 0
    largest = log_w.new_zeros(groups).scatter_reduce(0, group, log_w, "amax", include_self=False)[
        group
    ]
    scaled = torch.where(largest.isneginf(), 0.0, (log_w - largest).exp())
    lowest, above = weighted_means(rewards, scaled, group)
    return rewards - lowest[group] - above[group], (lowest + above)[group]


def score_norm_proxy(batch: TokenBatch) -> Tensor:
    """[S]: sqrt((1/L^2) sum_t (1 - 2 p_t + sum_v p_v^2)), 0 for a sequence without trained
    tokens."""
    energy = (1.0 - 2.0 * batch.logp.exp() + batch.require("sum_p_squared")).clamp(min=0.0)
    return (batch.sequence_sum(energy) / batch.lengths().clamp(min=1).square()).sqrt()


def opob_needs(settings: OpobAdvantage) -> frozenset[TokenColumn]:
    return frozenset({"logp", "sum_p_squared"}) if settings.mode == "cheap" else frozenset()


OTB = AdvantageMethod(otb, columns("logp_prox", "sum_p_squared"))
OPOB = AdvantageMethod(opob, opob_needs)

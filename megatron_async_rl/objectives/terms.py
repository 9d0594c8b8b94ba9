"""Terms besides the loss itself: they shape the reward (length, a KL penalty per token) or are
added to the loss (a KL penalty, the value head's own loss).

The value head learns the returns that the advantage estimator computed from the head's estimates:

    loss      0.5 (V - R)^2                                  (PPO, arXiv 1707.06347, eq. 9)
    clipped   0.5 max((V - R)^2, (V_old + clip(V - V_old, -c, c) - R)^2)

V_old comes from the weights at the start of the batch. With one optimizer step per batch V equals
V_old, so clipping has no effect, like PPO's clip of a ratio of the weights to themselves.
"""

from __future__ import annotations

from typing import Literal

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from megatron_async_rl.config.objective import KlConfig, ObjectiveConfig, ValueConfig
from megatron_async_rl.objectives.batch import LOG_RATIO_BOUND, TokenBatch


def shaped_rewards(
    batch: TokenBatch, lengths: NDArray[np.int64], config: ObjectiveConfig
) -> Tensor:
    """Return R minus DAPO's soft overlong punishment penalty * clip((length - (max_length -
    buffer)) / buffer, 0, 1): [S]. lengths: [S], tokens that the policy sampled, without an
    environment's."""
    rewards = batch.require("rewards")
    if config.overlong is None:
        return rewards
    length = torch.tensor(lengths, dtype=rewards.dtype)
    start = config.overlong.max_length - config.overlong.buffer
    return rewards - config.overlong.penalty * ((length - start) / config.overlong.buffer).clamp(
        0.0, 1.0
    )


def kl_penalty(batch: TokenBatch, kl: KlConfig | None) -> Tensor:
    """Return coef * KL estimate on each trained token if the penalty is subtracted from the reward,
    else 0: [N]."""
    if kl is None or kl.where != "reward":
        return torch.zeros_like(batch.mask)
    # The policy did not sample environment tokens, so they carry no penalty.
    return kl.coef * token_kl(batch, kl) * batch.mask


def token_kl(batch: TokenBatch, kl: KlConfig) -> Tensor:
    """Return the estimate of each token, with gradient if `logp` has one: [N].

    With `weight: truncated` it is multiplied by sg(min(w, cap)), w = pi / mu: an expectation under
    pi from tokens of mu. Log-ratios are clamped to +-LOG_RATIO_BOUND.
    """
    log_ratio = (batch.logp - batch.require("logp_ref")).clamp(-LOG_RATIO_BOUND, LOG_RATIO_BOUND)
    estimate = kl_estimate(log_ratio, kl.estimator)
    if kl.weight == "none":
        return estimate
    # Detached: the weight corrects the expectation and is not optimised.
    return estimate * batch.log_weight().detach().exp().clamp(max=kl.cap)


def token_rewards(batch: TokenBatch, penalty: Tensor) -> Tensor:
    """Return the reward of each trained token of a whole batch, [N], sequence after sequence; 0
    where the mask is 0. Sums to `rewards` minus the penalty [N].

    A step reward on an environment token is added to the trained token before it, or to the first
    one if there is none. The rest of the sequence's reward (all of it without step rewards; the
    change by shaping) is added to its last trained token. A sequence without trained tokens has no
    rewards.
    """
    rewards = -penalty
    position, trained = torch.arange(len(batch.sequence)), batch.mask > 0
    ends = torch.full((batch.sequences,), -1)
    last = ends.scatter_reduce(0, batch.sequence, torch.where(trained, position, -1), "amax")
    has = last >= 0
    rest = batch.require("rewards")
    if batch.step_rewards is not None:
        beyond = len(position)
        first = torch.full_like(ends, beyond).scatter_reduce(
            0, batch.sequence, torch.where(trained, position, beyond), "amin"
        )
        before = torch.cummax(torch.where(trained, position, -1), 0).values if beyond else position
        owner = torch.maximum(before, first[batch.sequence])
        given = has[batch.sequence]
        # index_add, because several environment tokens may add to one trained token.
        rewards = rewards.index_add(0, owner[given], batch.step_rewards[given])
        rest = rest - torch.zeros_like(rest).index_add(0, batch.sequence, batch.step_rewards)
    # The last trained token gets the part of the reward that no step reward contains.
    rewards[last[has]] += rest[has]
    return rewards


def kl_estimate(log_ratio: Tensor, estimator: Literal["k1", "k2", "k3"]) -> Tensor:
    """Estimators of KL(pi || pi_ref) from samples of pi (Schulman, joschu.net/blog/kl-approx.html).

    [N] from l = log(pi / pi_ref), [N]: k1 = l, k2 = l^2 / 2, k3 = exp(-l) - 1 + l.

    Under samples of pi, k1 and k3 are unbiased in value, and k2 and k3 are never negative. As a
    loss, the mean gradient of k1 is 0, that of k2 is the gradient of KL(pi || pi_ref), and that of
    k3 is the gradient of KL(pi_ref || pi).
    """
    if estimator == "k1":
        return log_ratio
    if estimator == "k2":
        return 0.5 * log_ratio.square()
    # expm1 keeps the digits if the policies nearly agree.
    return torch.expm1(-log_ratio) + log_ratio


def value_loss(batch: TokenBatch, settings: ValueConfig) -> Tensor:
    """Return the value loss, [N], with gradient in `values`; before mask and aggregation."""
    values, returns = batch.require("values"), batch.require("returns")
    error = (values - returns).square()
    if settings.clip is not None:
        old = batch.require("values_old")
        near = old + (values - old).clamp(-settings.clip, settings.clip)
        # The larger error: clipping only removes incentive to move away.
        error = torch.maximum(error, (near - returns).square())
    return 0.5 * error


def value_metrics(whole: TokenBatch) -> dict[str, float]:
    """Return the explained variance of a whole batch with `values` and `returns`: 1 - Var(R - V) /
    Var(R) over trained tokens; nothing if all returns are equal."""
    if whole.values is None or whole.returns is None:
        return {}
    trained = whole.mask > 0
    returns, values = whole.returns[trained], whole.values[trained]
    if len(returns) < 2 or not float(returns.var()):
        return {}
    return {"value/explained_variance": 1.0 - float((returns - values).var() / returns.var())}

"""Off-policy data: the proximal policy, corrections, and the effective sample size. All functions
are pure.

The proximal policy is the denominator of the ratio r = pi / pi_prox:

    behavior    logp_prox = logp_behavior
    recompute   the trainer's weights at the start of the batch; precomputed. If a batch is one
                optimizer step, `logp` is computed with these weights: its detached value is exact
                and needs no second pass
    loglinear   logp_behavior + a (sg(logp) - logp_behavior), a = 1 - 1/d, d the token's lag; a = 0
                at lag 0 (A-3PO, arXiv 2512.06547)
    ewma        log-probs under an exponential average of the trainer's weights; precomputed
    snapshot    log-probs under the trainer's copy of exactly the version that sampled the token
                (arXiv 2605.12070); precomputed

A correction is a factor on each token's loss; 0 rejects the token. Corrections use the ratio rho =
pi_prox / mu as a weight or compare it with bounds; `opsm` compares pi_prox / pi instead.

Invariant: sequence statistics use the tokens that earlier corrections kept.
"""

from __future__ import annotations

import math
from typing import Literal

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from megatron_async_rl.config.corrections import (
    IcepopCorrection,
    OpsmCorrection,
    RejectCorrection,
    TisCorrection,
    TokenVetoCorrection,
)
from megatron_async_rl.config.losses import Proximal
from megatron_async_rl.objectives.batch import LOG_RATIO_BOUND, TokenBatch
from megatron_async_rl.objectives.method import CorrectionMethod, TokenColumn, columns

SMALLEST_MEAN = 1e-8
"""Smallest mean weight that is used as a divisor."""


def columns_for_proximal(proximal: Proximal) -> set[TokenColumn]:
    """Return the columns that must be precomputed to know logp_prox over the whole batch."""
    if proximal == "behavior":
        return set()
    return {"logp"} if proximal in ("recompute", "loglinear") else {"logp_prox"}


def proximal_logp(batch: TokenBatch, proximal: Proximal, precomputed: Tensor | None) -> Tensor:
    """Return logp_prox, [N]. `batch.logp`: detached, under the weights at the start of the batch
    (nan gives nan).

    precomputed: [N], for ewma and snapshot.
    """
    if proximal == "behavior":
        return batch.logp_behavior
    if proximal == "recompute":
        return batch.logp
    if proximal == "loglinear":
        # a = 1 - 1/d is 0 for d = 1, and lag 0 must give the same result.
        lag = batch.require("lag").clamp(min=1)
        return batch.logp_behavior + (1.0 - 1.0 / lag) * (batch.logp - batch.logp_behavior)
    # In a micro-batch the column exists already.
    return precomputed.double() if precomputed is not None else batch.logp_prox


def proximal_metrics(batch: TokenBatch, precomputed: Tensor | None) -> dict[str, float]:
    """Return `ratio/prox_diff_max`: largest |logp_prox - logp_behavior| of a trained token, if
    logp_prox was precomputed.

    With `snapshot`, and responses whose cache is recomputed at every update, it is only rounding.
    If it is larger, trainer and engine disagree about a token, or about the version that sampled
    it.
    """
    if precomputed is None or not batch.mask.any():
        return {}
    difference = (precomputed.double() - batch.logp_behavior).abs()[batch.mask > 0]
    return {"ratio/prox_diff_max": float(difference.max())}


def log_ratios(batch: TokenBatch) -> Tensor:
    """Return log rho, clamped to +-LOG_RATIO_BOUND: [N]."""
    return (batch.logp_prox - batch.logp_behavior).clamp(-LOG_RATIO_BOUND, LOG_RATIO_BOUND)


def importance_ratios(batch: TokenBatch, level: Literal["token", "sequence"]) -> Tensor:
    """Return each token's rho, or the product over its sequence, in log space clamped to
    +-LOG_RATIO_BOUND: [N]."""
    if level == "token":
        return log_ratios(batch).exp()
    product = seen(batch).sequence_sum(batch.logp_prox - batch.logp_behavior)
    # Clamped after the sum, because a product of 1,000 ratios overflows float32.
    return product.clamp(-LOG_RATIO_BOUND, LOG_RATIO_BOUND).exp()[batch.sequence]


def seen(batch: TokenBatch) -> TokenBatch:
    """Return the batch with the mask of the tokens that corrections so far have kept."""
    return batch.replace(mask=batch.kept())


def normalized(weights: Tensor, batch: TokenBatch, level: Literal["token", "sequence"]) -> Tensor:
    """[N] -> [N] with mean 1 over the kept tokens, or, for level `sequence`, over the sequences
    that have any. Whole batches only."""
    kept = seen(batch)
    if level == "token":
        mean = kept.sequence_sum(weights).sum() / kept.mask.sum().clamp(min=1)
    else:
        mean = kept.sequence_mean(weights).sum() / (kept.lengths() > 0).sum().clamp(min=1)
    # If all weights vanish, none is normalised.
    return weights / torch.where(mean > SMALLEST_MEAN, mean, 1.0)


def effective_sample_size(log_weights: NDArray[np.float64]) -> float:
    """Return the effective sample size. log_weights: [B] float64, of any magnitude. The result is 0
    for an empty batch, and if a weight is not a number.

    A weight of +inf leaves only equal weights in the sum.
    """
    # 0 makes the step as small as the floor permits.
    if len(log_weights) == 0 or np.isnan(log_weights).any():
        return 0.0
    largest = log_weights.max()
    if np.isinf(largest):
        return float((log_weights == largest).sum())
    # The largest weight becomes 1, so that the sum neither overflows nor vanishes.
    weights = np.exp(log_weights - largest)
    return float(weights.sum() ** 2 / np.square(weights).sum())


def tis(batch: TokenBatch, settings: TisCorrection) -> Tensor:
    """Truncated importance sampling (Ionides 2008, doi 10.1198/106186008X320456), between rollout
    engine and trainer as in Yao et al. 2025, fengyao.notion.site/off-policy-rl; for distributed
    actors: V-trace, arXiv 1802.01561.

    min(rho_t, cap), or for `level: sequence` min(prod_t rho_t, cap) on each of its tokens; rho =
    pi_prox / mu. [N].

    `normalize` divides by the mean over the kept tokens of the whole batch (`token`), or over its
    sequences (`sequence`), after truncation.
    """
    weights = importance_ratios(batch, settings.level).clamp(max=settings.cap)
    return normalized(weights, batch, settings.level) if settings.normalize else weights


def icepop(batch: TokenBatch, settings: IcepopCorrection) -> Tensor:
    """IcePop (arXiv 2510.18855, ringtech.notion.site/icepop): rejects ratios out of bounds.

    rho_t where low <= rho_t <= high, else 0; rho = pi_prox / mu, or its product over the
    sequence. [N].

    `normalize` divides by the mean over the tokens that the corrections before this one kept
    (`token`) or their sequences (`sequence`), including zeros.
    """
    rho = importance_ratios(batch, settings.level)
    weights = torch.where((rho >= settings.low) & (rho <= settings.high), rho, 0.0)
    return normalized(weights, batch, settings.level) if settings.normalize else weights


def reject(batch: TokenBatch, settings: RejectCorrection) -> Tensor:
    """Rejection by a statistic of the mismatch between pi_prox and mu (Liu, Li et al. 2025, "When
    Speed Kills Stability", richardli.xyz/rl-collapse; estimators k1, k2, k3:
    joschu.net/blog/kl-approx.html).

    1 where low <= statistic <= high, else 0, of the token or of its whole sequence. [N].

    With l = log rho clamped to +-20, tokens of mu: ratio e^l; estimates of KL(mu || pi_prox) k1 =
    -l, k2 = l^2 / 2, k3 = e^l - 1 - l. sequence_sum and sequence_mean: of the estimates;
    sequence_product: e^(sum l); sequence_geometric: e^(mean l). Ratios are compared in log space,
    so a product cannot overflow.
    """
    log_rho = log_ratios(batch)
    low, high = settings.low, settings.high
    if settings.statistic == "ratio":
        values = log_rho
        low, high = (None if bound is None else math.log(bound) for bound in (low, high))
    elif settings.statistic == "k1":
        values = -log_rho
    elif settings.statistic == "k2":
        values = 0.5 * log_rho.square()
    else:
        # expm1 keeps the digits if the ratio is near 1.
        values = torch.expm1(log_rho) - log_rho
    if settings.level in ("sequence_sum", "sequence_product"):
        # Over the tokens that earlier corrections kept.
        values = seen(batch).sequence_sum(values)[batch.sequence]
    elif settings.level in ("sequence_mean", "sequence_geometric"):
        values = seen(batch).sequence_mean(values)[batch.sequence]
    keep = torch.ones_like(batch.mask, dtype=torch.bool)
    if low is not None:
        keep &= values >= low
    if high is not None:
        keep &= values <= high
    return keep.to(batch.mask.dtype)


def token_veto(batch: TokenBatch, settings: TokenVetoCorrection) -> Tensor:
    """Token veto: one token that is almost impossible under the proximal policy rejects its whole
    sequence (Liu, Li et al. 2025, richardli.xyz/rl-collapse).

    0 on every token of a sequence in which any kept token has rho = pi_prox / mu < threshold,
    else 1. [N]."""
    vetoes = (log_ratios(batch) < math.log(settings.threshold)).to(batch.mask.dtype)
    return (seen(batch).sequence_sum(vetoes) == 0).to(batch.mask.dtype)[batch.sequence]


def opsm(batch: TokenBatch, settings: OpsmCorrection) -> Tensor:
    """Off-policy sequence masking (DeepSeek-V3.2, arXiv 2512.02556): bad responses from which the
    policy has moved away do not train.

    0 where A < 0 and the sequence's mean over kept tokens of log(pi_prox / pi) is above delta,
    else 1. [N].

    If all tokens of a response share an advantage, this drops the sequence; otherwise it drops its
    tokens of negative advantage.
    """
    drift = seen(batch).sequence_mean(batch.logp_prox - batch.logp)[batch.sequence]
    return (~((batch.advantages < 0) & (drift > settings.delta))).to(batch.mask.dtype)


TIS = CorrectionMethod(tis, whole=lambda settings: settings.normalize)
ICEPOP = CorrectionMethod(icepop, whole=lambda settings: settings.normalize)
REJECT = CorrectionMethod(reject)
TOKEN_VETO = CorrectionMethod(token_veto)
OPSM = CorrectionMethod(opsm, needs=columns("logp"))

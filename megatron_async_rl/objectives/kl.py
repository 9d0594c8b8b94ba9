"""Estimators of KL(pi || pi_ref) from samples of pi (Schulman, joschu.net/blog/kl-approx.html)."""

from __future__ import annotations

from typing import Literal

import torch
from torch import Tensor


def kl_estimate(log_ratio: Tensor, estimator: Literal["k1", "k2", "k3"]) -> Tensor:
    """[N] from l = log(pi / pi_ref), [N]: k1 = l, k2 = l^2 / 2, k3 = exp(-l) - 1 + l.

    k1 and k3 are unbiased in value, k2 and k3 are never negative. As a loss, only k2's gradient is that of the KL divergence
    on average (k1's is 0 on average).
    """
    if estimator == "k1":
        return log_ratio
    if estimator == "k2":
        return 0.5 * log_ratio.square()
    return torch.expm1(-log_ratio) + log_ratio

"""GRPO's group-relative advantage (DeepSeekMath, arXiv 2402.03300); without the division, Dr.GRPO (arXiv 2503.20783)."""

from __future__ import annotations

from typing import TYPE_CHECKING

import numpy as np
from numpy.typing import NDArray

if TYPE_CHECKING:
    from megatron_async_rl.config.objective import GrpoAdvantage

EPSILON = 1e-6


def grpo(rewards: NDArray[np.float64], settings: GrpoAdvantage) -> NDArray[np.float64]:
    """A_i = (R_i - mean R) / (std R + 1e-6), std unbiased (n - 1); `normalize_std: false` leaves out the division.

    rewards: [n] float64, one group. Returns [n] float64: exactly 0 for a group of one or of equal rewards, where
    rounding in the mean would otherwise leave a residue that the small denominator blows up.
    """
    if len(rewards) < 2 or rewards.min() == rewards.max():
        return np.zeros_like(rewards)
    centred = rewards - rewards.mean()
    return centred / (rewards.std(ddof=1) + EPSILON) if settings.normalize_std else centred

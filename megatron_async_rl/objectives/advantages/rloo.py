"""REINFORCE leave-one-out (arXiv 2402.14740)."""

from __future__ import annotations

from typing import TYPE_CHECKING

import numpy as np
from numpy.typing import NDArray

if TYPE_CHECKING:
    from megatron_async_rl.config.objective import RlooAdvantage


def rloo(rewards: NDArray[np.float64], settings: RlooAdvantage) -> NDArray[np.float64]:
    """A_i = R_i - mean of the other n - 1 rewards of the group.

    rewards: [n] float64, one group. Returns [n] float64: exactly 0 for a group of one or of equal rewards.
    """
    if len(rewards) < 2 or rewards.min() == rewards.max():
        return np.zeros_like(rewards)
    return rewards - (rewards.sum() - rewards) / (len(rewards) - 1)

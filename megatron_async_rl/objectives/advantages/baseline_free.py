"""The reward itself, without a baseline."""

from __future__ import annotations

from typing import TYPE_CHECKING

import numpy as np
from numpy.typing import NDArray

if TYPE_CHECKING:
    from megatron_async_rl.config.objective import NoAdvantage


def no_baseline(rewards: NDArray[np.float64], settings: NoAdvantage) -> NDArray[np.float64]:
    """A_i = R_i. rewards: [n] float64; returns [n] float64."""
    return rewards.copy()

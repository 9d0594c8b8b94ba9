"""How many on-policy samples a weighted batch is worth, and the learning-rate factor that follows (VCPO, arXiv 2602.17616).

    log w_i = sum over the response's tokens of log(pi / mu)
    ESS     = (sum w)^2 / sum w^2                         between 1 and B
    scale   = rule(min(1, (ESS / B) / reference_ratio))   rule: square root, or linear

Everything is in log space with a max shift: weights that overflow, underflow or are all tiny change nothing.
"""

from __future__ import annotations

import math
from typing import Literal

import numpy as np
from numpy.typing import NDArray


def effective_sample_size(log_weights: NDArray[np.float64]) -> float:
    """log_weights: [B] float64, as large or small as they come. 0 for an empty batch, and where a weight is not a number.

    A weight of +inf leaves only its equals in the sum.
    """
    if len(log_weights) == 0 or np.isnan(log_weights).any():
        return 0.0
    largest = log_weights.max()
    if np.isinf(largest):
        return float((log_weights == largest).sum())
    weights = np.exp(log_weights - largest)
    return float(weights.sum() ** 2 / np.square(weights).sum())


def lr_scale(
    ess_ratio: float, *, rule: Literal["sqrt", "linear"] = "sqrt", reference_ratio: float = 1.0, floor: float = 0.0
) -> float:
    """ess_ratio: ESS / B. In [floor, 1]; the floor itself where ess_ratio is not a number."""
    if math.isnan(ess_ratio):
        return floor
    relative = min(1.0, ess_ratio / reference_ratio)
    return max(floor, math.sqrt(relative) if rule == "sqrt" else relative)

"""Mean 0 and variance 1 over the trained tokens of the whole optimizer-step batch."""

from __future__ import annotations

import torch
from torch import Tensor

EPSILON = 1e-8


def whitened(values: Tensor, mask: Tensor) -> Tensor:
    """[N] -> [N]: (x - mean) / sqrt(var + 1e-8) over tokens with mask > 0, var unbiased (n - 1); 0 elsewhere.

    Exactly 0 where all trained tokens have the same value, and for a single one.
    """
    trained = mask > 0
    kept = values[trained]
    if not len(kept) or kept.min() == kept.max():
        return torch.zeros_like(values)
    return torch.where(trained, (values - kept.mean()) / (kept.var() + EPSILON).sqrt(), 0.0)

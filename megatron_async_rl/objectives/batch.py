"""The response tokens of one micro-batch, flat, with the three policies' log-probs side by side.

Invariants:
- every tensor has one entry per response token (N of them, in any order), so padding does not exist here;
- sequence sums go through `sequence`, so any packing of the same tokens gives the same sums;
- a sequence is never split over two TokenBatches;
- only `logp` carries a gradient.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

LOG_RATIO_BOUND = 20.0
"""Log-ratios inside a loss are clamped to this magnitude: exp(20) is far outside every clip range and still finite."""


@dataclass(frozen=True, kw_only=True, eq=False)
class TokenBatch:
    """N response tokens of S sequences.

    logp: [N] float, with gradient: log-probs (nats) under the policy being trained, after temperature.
    logp_prox: [N] float, detached: under the proximal policy, which the loss's ratio is taken against.
    logp_behavior: [N] float, detached: as reported by the engine that sampled the token.
    advantages: [N] float: the sample's advantage on each of its tokens.
    mask: [N] float: 1 = trained on, 0 = takes no part (environment tokens).
    weights: [N] float: factor on the token's loss; 1 for sampled responses. It does not enter any denominator.
    sequence: [N] int64: the token's sequence, 0..S-1.
    """

    logp: Tensor
    logp_prox: Tensor
    logp_behavior: Tensor
    advantages: Tensor
    mask: Tensor
    weights: Tensor
    sequence: Tensor
    sequences: int

    def sequence_sum(self, values: Tensor) -> Tensor:
        """[N] -> [S]: sum of `values` over each sequence's trained tokens, differentiable."""
        return values.new_zeros(self.sequences).index_add(0, self.sequence, values * self.mask)

    def log_ratio(self) -> Tensor:
        """[N]: log(pi / pi_prox), clamped to +-LOG_RATIO_BOUND."""
        return torch.clamp(self.logp - self.logp_prox, -LOG_RATIO_BOUND, LOG_RATIO_BOUND)


@dataclass(frozen=True, eq=False)
class TokenLoss:
    """What a loss returns.

    loss: [N] float with gradient, before mask, weights and aggregation.
    clipped: [N] bool: tokens whose gradient the loss has cut to zero.
    """

    loss: Tensor
    clipped: Tensor

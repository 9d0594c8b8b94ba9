"""How token losses become the number that is minimised.

Denominators are those of the whole optimizer-step batch, over all data-parallel ranks and
micro-batches, so the sum of `aggregate` over any cut of the batch into micro-batches is the loss of
the batch, and its gradient does not depend on the cut. Nothing is ever divided by a padded width.

A rejected token counts as a zero. With `renormalize` it does not count: at each level at which the
aggregation divides, the kept terms are averaged over the kept terms.
"""

from __future__ import annotations

from dataclasses import dataclass, replace

import torch
from torch import Tensor

from megatron_async_rl.config.losses import Aggregation
from megatron_async_rl.objectives.batch import SequenceLoss, TokenBatch, TokenLoss


@dataclass(frozen=True)
class Denominators:
    """Counts over the optimizer-step batch: trained tokens, and sequences with at least one trained
    token. kept: with `renormalize`, the same counts of what no correction has rejected, which the
    loss then divides by."""

    tokens: int
    sequences: int
    kept: Denominators | None = None

    @classmethod
    def of(cls, batch: TokenBatch, *, renormalize: bool = False) -> Denominators:
        """The counts of a whole batch."""
        counted = batch.lengths()
        # Counted over the whole batch, before it is cut into micro-batches.
        kept = cls.of(batch.replace(mask=batch.kept())) if renormalize else None
        return cls(int(counted.sum()), int((counted > 0).sum()), kept)

    @property
    def of_all(self) -> Denominators:
        """Denominators of terms without corrections, such as penalties: all tokens and sequences
        count."""
        return replace(self, kept=None)


def aggregate(
    losses: TokenLoss | SequenceLoss,
    batch: TokenBatch,
    aggregation: Aggregation,
    denominators: Denominators,
    norm_length: int | None = None,
) -> Tensor:
    """This micro-batch's part of the batch loss, per sequence: -> [S], to be summed.

    With l the weighted token loss, m the mask, N the trained tokens and B the sequences of the
    optimizer-step batch: `token-mean` sum l m / N; `seq-mean-token-sum` sum_s (sum_t l m) / B;
    `seq-mean-token-mean` sum_s (mean_t l) / B (the original GRPO); `seq-mean-token-sum-norm` sum_s
    (sum_t l m / norm_length) / B (Dr.GRPO, arXiv 2503.20783); `seq-mean` sum_s l_s / B for the
    losses that are one number l_s per sequence, weighted by the mean of its tokens' weights. With
    `denominators.kept`, N, B and the means over t count only tokens that are not rejected.
    """
    if denominators.kept is not None:
        batch, denominators = batch.replace(mask=batch.kept()), denominators.kept
    if isinstance(losses, SequenceLoss):
        weighted = torch.where(
            # A sequence without trained tokens has no loss, also where its formula gives nan.
            batch.lengths() > 0,
            losses.loss * batch.sequence_mean(batch.weights),
            0.0,
        )
        return weighted / max(denominators.sequences, 1)
    sums = batch.sequence_sum(losses.loss * batch.weights)
    if aggregation == "token-mean":
        # An empty batch gives 0 and not nan.
        return sums / max(denominators.tokens, 1)
    per_sequence = sums / max(denominators.sequences, 1)
    if aggregation == "seq-mean-token-sum":
        return per_sequence
    if aggregation == "seq-mean-token-mean":
        return per_sequence / batch.lengths().clamp(min=1)
    if aggregation != "seq-mean-token-sum-norm":
        raise ValueError(
            f"aggregation {aggregation} is for losses per sequence; this one is per token"
        )
    if norm_length is None:
        raise ValueError(
            "aggregation seq-mean-token-sum-norm needs norm_length: the constant number of tokens"
            " to divide by"
        )
    return per_sequence / norm_length

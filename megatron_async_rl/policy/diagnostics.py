"""What a step measured: a table with one row per sample, one all-reduce, then the metrics on every rank alike.

Each sample's row is written by one rank (the last pipeline stage, tensor rank 0, of the data-parallel rank that owns the
sample) and is zero elsewhere, so a plain sum over all ranks completes the table, maxima included; the metrics are then
the same numbers, added in the same order, on every layout.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from megatron_async_rl.objectives.batch import LOG_RATIO_BOUND, TokenBatch, TokenLoss
from megatron_async_rl.policy.microbatch import MicroBatch

COLUMNS = (
    "loss",
    "entropy",
    "log_weight",
    "k3",
    "chi2",
    "difference",
    "difference_max",
    "difference_lag0_max",
    "clipped_positive",
    "clipped_negative",
    "positive",
    "negative",
)


class StepTable:
    """[S, len(COLUMNS)] float64: sums, or maxima, over each sample's trained tokens."""

    def __init__(self, samples: int, device: torch.device) -> None:
        self.values = torch.zeros((samples, len(COLUMNS)), dtype=torch.float64, device=device)

    @torch.no_grad()
    def record(
        self,
        micro_batch: MicroBatch,
        tokens: TokenBatch,
        entropy: Tensor,
        parts: Tensor,
        token_loss: TokenLoss,
        version: int,
    ) -> None:
        """parts: [B] the rows' contributions to the batch loss; entropy: [N]."""
        if not micro_batch.samples:
            return
        log_weight = (tokens.logp - tokens.logp_behavior).double()
        bounded = log_weight.clamp(-LOG_RATIO_BOUND, LOG_RATIO_BOUND)
        difference = log_weight.abs()
        # A token of this version in a response that an older one began was sampled over the older one's keys and values.
        current = torch.ones(tokens.sequences, dtype=torch.bool, device=entropy.device)
        current[tokens.sequence[micro_batch.versions != version]] = False
        lag0 = current[tokens.sequence].double()
        positive, negative = (tokens.advantages > 0).double(), (tokens.advantages < 0).double()

        def total(values: Tensor) -> Tensor:
            return tokens.sequence_sum(values)

        def largest(values: Tensor) -> Tensor:
            zeros = torch.zeros(tokens.sequences, dtype=torch.float64, device=values.device)
            return zeros.scatter_reduce(0, tokens.sequence, values * tokens.mask, "amax")

        columns = {
            "loss": parts.double(),
            "entropy": total(entropy.double()),
            "log_weight": total(log_weight),
            "k3": total(torch.expm1(bounded) - bounded),
            "chi2": total(torch.expm1(2 * bounded)),
            "difference": total(difference),
            "difference_max": largest(difference),
            "difference_lag0_max": largest(difference * lag0),
            "clipped_positive": total(token_loss.clipped * positive),
            "clipped_negative": total(token_loss.clipped * negative),
            "positive": total(positive),
            "negative": total(negative),
        }
        self.values[list(micro_batch.samples)] = torch.stack([columns[name] for name in COLUMNS], dim=1)


def effective_sample_size(log_weights: NDArray[np.float64]) -> float:
    """(sum w)^2 / sum w^2 from log w, with a max shift: no weight over- or underflows (VCPO, arXiv 2602.17616)."""
    if len(log_weights) == 0:
        return 0.0
    weights = np.exp(log_weights - log_weights.max())
    return float(weights.sum() ** 2 / np.square(weights).sum())


def step_metrics(table: NDArray[np.float64], trained_tokens: Sequence[int], *, sampled: bool) -> dict[str, float]:
    """Metrics of a completed table; `trained_tokens`: [S] tokens with mask 1 per sample.

    sampled: the responses came from an engine, so that ratios against it exist. Keys are those of observe/keys.py.
    """
    column = dict(zip(COLUMNS, table.T, strict=True))
    counts = np.asarray(trained_tokens)
    tokens = max(int(counts.sum()), 1)
    metrics = {
        "policy/loss": float(column["loss"].sum()),
        "policy/entropy": float(column["entropy"].sum()) / tokens,
    }
    if not sampled:
        return metrics
    log_weights = column["log_weight"][counts > 0]
    ess = effective_sample_size(log_weights)
    return metrics | {
        "ratio/ess": ess,
        "ratio/ess_ratio": ess / max(len(log_weights), 1),
        "ratio/kl_k1": float(-column["log_weight"].sum()) / tokens,
        "ratio/kl_k3": float(column["k3"].sum()) / tokens,
        "ratio/chi2": float(column["chi2"].sum()) / tokens,
        "ratio/logp_diff_mean": float(column["difference"].sum()) / tokens,
        "ratio/logp_diff_max": float(column["difference_max"].max(initial=0.0)),
        "ratio/logp_diff_lag0_max": float(column["difference_lag0_max"].max(initial=0.0)),
        "clip/positive": float(column["clipped_positive"].sum() / max(column["positive"].sum(), 1.0)),
        "clip/negative": float(column["clipped_negative"].sum() / max(column["negative"].sum(), 1.0)),
    }
